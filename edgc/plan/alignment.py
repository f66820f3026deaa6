"""DAC, the dynamic alignment compressor: communication time against rank, and the ranks that align stages.

Communication time is linear in the rank, T_com(r) = c + eta r. In 1F1B stage 1 ends its backward pass last,
so stage i may spend i - 1 micro-batch backward times more, and the times of the messages that carry the last gradient
back to stage 1, and still finish together with it:

    T_com(r_i) = T_com(r_1) + S_i    =>    r_i = r_1 + S_i / eta
    S_i = (i - 1) T_back + sum over j = 2 .. i of T_msg,j

Source: arXiv 2511.10333 section IV-D (there with c = 0 and without messages).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RANK_MULTIPLE = 4  # tensor-core friendly ranks
_MIN_SLOPE = 1e-12  # seconds per rank: "free", yet T / eta stays finite
_RANK_SLACK = 1e-9  # relative; a quotient that should be a whole rank may come out an ulp below it


@dataclass(frozen=True)
class CommCost:
    """T_com(r) = intercept + slope * r: the seconds that compressed communication takes at rank r.

    ``intercept`` (c, seconds) is what a message costs whatever its rank; ``slope`` (eta) is in seconds per
    unit of rank. ``fit`` gives c >= 0 and eta > 0; the constructor takes any numbers, nan included.
    """

    intercept: float
    slope: float

    @classmethod
    def fit(cls, ranks: Sequence[float], seconds: Sequence[float]) -> "CommCost":
        """Least squares of T = c + eta r over pairs of rank and measured seconds, under c >= 0 and eta > 0.

        A negative c (noise around a small one) is refitted as a line through the origin. An eta that is not
        positive means that noise hides the cost of rank; it becomes 1e-12 s, and c the mean time.

        Raises ValueError for lengths that differ, values that are negative or not finite, and fewer than two
        distinct ranks.
        """
        r, t = np.asarray(ranks, dtype=float), np.asarray(seconds, dtype=float)
        if r.ndim != 1 or r.shape != t.shape:
            raise ValueError(f"ranks, seconds of shapes {r.shape}, {t.shape}: must be lists of one length")
        for name, values in (("ranks", r), ("seconds", t)):
            if not np.all(np.isfinite(values) & (values >= 0)):
                raise ValueError(f"{name} = {values.tolist()}: must be finite and at least 0")
        if np.unique(r).size < 2:
            raise ValueError(f"ranks = {r.tolist()}: a line needs at least 2 distinct ranks")

        centred = r - r.mean()
        slope = float(centred @ t / (centred @ centred))
        intercept = float(t.mean() - slope * r.mean())
        if slope < _MIN_SLOPE:
            return cls(float(t.mean()), _MIN_SLOPE)
        if intercept < 0:
            return cls(0.0, float(r @ t / (r @ r)))
        return cls(intercept, slope)

    def seconds(self, rank: float) -> float:
        """Seconds that communication at this rank takes."""
        return self.intercept + self.slope * rank

    def rank(self, seconds: float) -> float:
        """The fractional rank whose communication takes ``seconds``; 0 where even rank 0 takes longer."""
        return max((seconds - self.intercept) / self.slope, 0.0)

    def scaled(self, factor: float) -> "CommCost":
        """The cost on a link ``factor`` times as slow; ValueError unless factor is finite and positive."""
        if not 0 < factor < math.inf:
            raise ValueError(f"factor = {factor}: must be finite and above 0")
        return CommCost(self.intercept * factor, self.slope * factor)


def aligned_rank(first_rank: int, cost: CommCost, slack_seconds: float, r_max: int) -> int:
    """The rank of a stage that ends its communication together with stage 1, ``slack_seconds`` after it could begin.

    first_rank + slack_seconds / eta, at most ``r_max`` and below that rounded down to a multiple of 4, though never
    under first_rank, the rank of stage 1: so ranks do not fall with the slack.

    Raises ValueError unless 1 <= first_rank <= r_max, cost.slope > 0 and slack_seconds is finite and at least 0.
    """
    if not 1 <= first_rank <= r_max:
        raise ValueError(f"first_rank = {first_rank}, r_max = {r_max}: needs 1 <= first_rank <= r_max")
    if not 0 <= slack_seconds < math.inf:
        raise ValueError(f"slack_seconds = {slack_seconds}: must be finite and at least 0")
    if not cost.slope > 0:
        raise ValueError(f"cost.slope = {cost.slope}: must be above 0 seconds per rank")
    rank = first_rank + slack_seconds / cost.slope
    if rank >= r_max:
        return r_max
    return max(first_rank, math.floor(rank * (1 + _RANK_SLACK)) // RANK_MULTIPLE * RANK_MULTIPLE)


def break_even_rank(cost: CommCost, dense_seconds: float) -> int:
    """The largest rank whose compressed time does not exceed the dense time; 0 if there is none.

    Raises ValueError unless ``dense_seconds`` is finite and at least 0.
    """
    if not 0 <= dense_seconds < math.inf:
        raise ValueError(f"dense_seconds = {dense_seconds}: must be finite and at least 0")
    return math.floor(cost.rank(dense_seconds) * (1 + _RANK_SLACK))
