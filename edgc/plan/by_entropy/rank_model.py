"""CQM, the compression quantification model: the rank that keeps the truncation error as entropy moves.

For a matrix of i.i.d. entries with standard deviation sigma, the Frobenius norm of what its best rank-r
approximation drops is sigma * g(r). Entropy measures log sigma up to a constant, so holding the dropped
norm fixed while entropy moves from H0 to H1 gives (arXiv 2511.10333, CQM)

    r1 = g^-1( exp(H0 - H1) * g(r0) ).

g follows from the Marchenko-Pastur law (Marchenko & Pastur 1967), the limit distribution of the eigenvalues
of X X^T / n for an m x n matrix X of unit variance, with y = m / n <= 1. On its support write

    x(t) = 1 + y - 2 sqrt(y) cos t,    t in [0, pi].

In the angle t the square roots at the edges and the pole of the density at y = 1, x = 0 cancel, and the two
cumulative functions are elementary:

    energy(t) = (t - sin t cos t) / pi                            share of ||X||^2 in eigenvalues below x(t)
    count(t)  = (t + sin t / sqrt(y) - (1 - y) d(t) / y) / pi     share of the eigenvalues below x(t)
    d(t)      = atan2(sqrt(y) sin t, 1 - sqrt(y) cos t)

Rank-r truncation drops the smallest 1 - r/m of the eigenvalues: g(r)^2 = m n energy(t), count(t) = 1 - r/m.

This is a large-matrix limit, with an error of order 1 / min(m, n). Against SVDs of Gaussian matrices it is
within 0.5 % for min(m, n) >= 128 and r <= min(m, n) / 2, the ranks at which compression pays. About the last
few of min(m, n) directions a limit law says little: there it can be off by tens of percent of a small norm.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

_HALVINGS = 60  # bisection steps: past the resolution of a double


def residual_norm(rank: float, rows: int, cols: int) -> float:
    """g(rank): expected Frobenius norm of what rank-``rank`` truncation drops from an i.i.d. matrix.

    The matrix is ``rows`` x ``cols``, its entries of zero mean and unit variance; for standard deviation
    sigma multiply by sigma. ``rank`` may be fractional. g falls strictly from sqrt(rows * cols) at 0 to 0 at
    min(rows, cols), stays 0 beyond, and is symmetric in rows and cols. Source: module docstring.

    Raises ValueError for a rank that is negative or not finite and for a size below 1.
    """
    limit, aspect = _limit_and_aspect(rows, cols)
    _check_rank(rank)
    if rank >= limit:
        return 0.0
    angle = _solve(lambda t: _count(t, aspect), 1 - rank / limit, math.pi)
    return math.sqrt(rows * cols * _energy(angle))


@dataclass(frozen=True)
class StageRankModel:
    """g for all compressed matrices of a pipeline stage under one common rank: g(r)^2 = sum_k g_k(r)^2.

    ``shapes`` holds one (rows, cols) pair per matrix. Where the rank exceeds a matrix's min(rows, cols), that
    matrix drops nothing; a stage without matrices never drops anything. Raises ValueError for a size below 1.
    Source: docs/algorithm.md, 2.
    """

    shapes: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        for rows, cols in self.shapes:
            _limit_and_aspect(rows, cols)

    @functools.cached_property
    def _groups(self) -> tuple[tuple[int, int, int], ...]:
        """(rows, cols, how often): a stage repeats a few shapes once per layer."""
        counts = Counter((min(shape), max(shape)) for shape in self.shapes)
        return tuple((rows, cols, number) for (rows, cols), number in counts.items())

    @property
    def limit(self) -> int:
        """The smallest rank at which no matrix of the stage drops anything: the largest min(rows, cols)."""
        return max((rows for rows, _, _ in self._groups), default=0)

    def residual_norm(self, rank: float) -> float:
        """Expected Frobenius norm of what truncation drops from all matrices together, at unit variance.

        Raises ValueError for a rank that is negative or not finite.
        """
        return math.hypot(*(math.sqrt(k) * residual_norm(rank, rows, cols) for rows, cols, k in self._groups))

    def rank_for_residual(self, norm: float) -> float:
        """The fractional rank at which the stage drops ``norm``; ValueError for nan.

        A norm outside the range is clamped: at all of it or more the answer is 0, at 0 or less the limit.
        """
        _check_norm(norm)
        if norm >= self.residual_norm(0):
            return 0.0
        if norm <= 0:
            return float(self.limit)
        return _solve(lambda rank: -self.residual_norm(rank), -norm, self.limit)

    def adjusted_rank(self, rank: float, entropy_before: float, entropy_after: float) -> float:
        """The rank that drops the same norm at ``entropy_after`` as ``rank`` did at ``entropy_before`` (nats).

        g^-1(exp(entropy_before - entropy_after) * g(rank)), fractional, within [0, limit]: a lower entropy gives a
        lower rank. Solved to about 1e-12 relative, so that a whole rank may come back just below itself: round, don't
        floor.

        Raises ValueError for an entropy that is not finite and for a rank that is negative or not finite.
        """
        tolerated = _entropy_factor(entropy_before, entropy_after) * self.residual_norm(rank)
        return self.rank_for_residual(tolerated)


def _energy(angle: float) -> float:
    """Share of the squared Frobenius norm in eigenvalues below x(angle): the same for every aspect ratio."""
    return (angle - math.sin(angle) * math.cos(angle)) / math.pi


def _count(angle: float, aspect: float) -> float:
    """Share of the eigenvalues that lie below x(angle), for aspect = min(m, n) / max(m, n)."""
    root = math.sqrt(aspect)
    sine = math.sin(angle)
    phase = math.atan2(root * sine, 1 - root * math.cos(angle))
    return (angle + sine / root - (1 - aspect) * phase / aspect) / math.pi


def _solve(increasing: Callable[[float], float], target: float, upper: float) -> float:
    """The argument in [0, upper] at which an increasing function reaches target, by bisection."""
    lower = 0.0
    for _ in range(_HALVINGS):
        middle = (lower + upper) / 2
        if increasing(middle) < target:
            lower = middle
        else:
            upper = middle
    return upper


def _entropy_factor(before: float, after: float) -> float:
    """exp(before - after): how much the tolerated norm grows in units of sigma."""
    for value in (before, after):
        if not math.isfinite(value):
            raise ValueError(f"entropy = {value}: must be finite (nats)")
    return math.exp(min(before - after, 700.0))  # far beyond any matrix, but finite: 0 times it stays 0


def _limit_and_aspect(rows: int, cols: int) -> tuple[int, float]:
    if not (rows >= 1 and cols >= 1):
        raise ValueError(f"rows, cols = {rows}, {cols}: both must be at least 1")
    return min(rows, cols), min(rows, cols) / max(rows, cols)


def _check_rank(rank: float) -> None:
    if not 0 <= rank < math.inf:
        raise ValueError(f"rank = {rank}: must be finite and at least 0")


def _check_norm(norm: float) -> None:
    if math.isnan(norm):
        raise ValueError(f"norm = {norm}: must be a number")
