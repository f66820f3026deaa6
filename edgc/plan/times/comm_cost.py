"""What communication takes, as a function of the rank."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from edgc.plan.ranks import RANK_MULTIPLE

RANK_SLACK = 1e-9  # relative; a quotient that should be a whole rank may come out an ulp below it
# in time, of compressing a message between stages, or gathered weights, so that noise of the timing does not decide
LEAST_GAIN = 1.1
_MIN_SLOPE = 1e-12  # seconds per rank: "free", yet T / eta stays finite


@dataclass(frozen=True)
class LinearCost:
    """T(r) = intercept + slope * r: what compressed communication takes at rank r, in seconds or in bytes.

    ``intercept`` (c) is what it takes whatever the rank; ``slope`` (eta) is what each rank adds. ``fit`` gives c >= 0
    and eta > 0; the constructor takes any numbers, nan included.
    """

    intercept: float
    slope: float

    @classmethod
    def fit(cls, ranks: Sequence[float], seconds: Sequence[float]) -> "LinearCost":
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

    def at(self, rank: float) -> float:
        """What communication at this rank takes."""
        return self.intercept + self.slope * rank

    def rank(self, seconds: float) -> float:
        """The fractional rank whose communication takes ``seconds``; 0 where even rank 0 takes longer."""
        return max((seconds - self.intercept) / self.slope, 0.0)

    def scaled(self, factor: float) -> "LinearCost":
        """The cost on a link ``factor`` times as slow; ValueError unless factor is finite and positive."""
        if not 0 < factor < math.inf:
            raise ValueError(f"factor = {factor}: must be finite and above 0")
        return LinearCost(self.intercept * factor, self.slope * factor)


@dataclass(frozen=True)
class StageCost:
    """Seconds that a stage's whole data-parallel reduction takes: compressed as a function of rank, and dense.

    Both include the parameters that low rank leaves, as the reductions timed in training do. ``dense_seconds`` is for
    what EDGC does while a stage is not compressed, in ``dense_wire``; ``host_seconds`` for the host's own sum, which
    compression has to beat: an all-reduce in the gradients' type, or half of one where the host scatters. Of a message
    between stages both are of its values.

    ``rounded_seconds``: of the same with every value rounded to few bits, None where that was not timed;
    ``volume_rank``: the mean rank that the volume pays for, where low rank has to be compared with it.
    """

    compressed: LinearCost
    dense_seconds: float
    host_seconds: float
    rounded_seconds: float | None = None
    volume_rank: int | None = None

    def scaled(self, factor: float) -> "StageCost":
        """The same link under other traffic."""
        return replace(
            self,
            compressed=self.compressed.scaled(factor),
            dense_seconds=self.dense_seconds * factor,
            host_seconds=self.host_seconds * factor,
            rounded_seconds=None if self.rounded_seconds is None else self.rounded_seconds * factor,
        )

    def seconds(self, rank: int | None) -> float:
        """Of the reductions of a step at this rank; None: uncompressed."""
        return self.dense_seconds if rank is None else self.compressed.at(rank)

    def largest_rank(self, seconds: float) -> int:
        """The largest rank, a multiple of 4, at which the stage takes at most so long, whatever it saves; 0 if none."""
        most = self.compressed.rank(seconds) * (1 + RANK_SLACK)
        return RANK_MULTIPLE * int(most // RANK_MULTIPLE)
