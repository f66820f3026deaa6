"""Which parameters an engine takes, which it leaves and why."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from edgc.config import EDGCConfig, RankPolicy
from edgc.plan.ranks import RANK_MULTIPLE, smallest_rank
from edgc.specs import MatrixSpec, Parameter


class SkippedParameter(NamedTuple):
    """A parameter that the engine leaves."""

    parameter: Parameter
    why: str


@dataclass(frozen=True)
class Selection:
    """Which parameters of one reducer the engine takes, and which it leaves."""

    matrices: tuple[MatrixSpec, ...]
    others: tuple[SkippedParameter, ...] = ()

    @property
    def other_elements(self) -> int:
        """Elements that the engine leaves, whatever the rank."""
        return sum(parameter.elements for parameter, _ in self.others)

    @property
    def matrix_elements(self) -> int:
        """Elements that the engine takes at a rank at which every matrix pays."""
        return sum(matrix.elements for matrix in self.matrices)


def saving(rank: int, rows: int, cols: int) -> float:
    """Elements of a rows x cols matrix over those of its two factors. Raises ValueError for a rank below 1."""
    if rank < 1:
        raise ValueError(f"rank {rank}: the rank of a matrix must be at least 1")
    return rows * cols / (rank * (rows + cols))


def pays(rank: int, rows: int, cols: int, min_saving: float) -> bool:
    """Whether a matrix is worth compressing at ``rank``: saves enough, and stays below half of full rank."""
    return rank <= min(rows, cols) / 2 and saving(rank, rows, cols) >= min_saving


def largest_rank(matrices: Iterable[MatrixSpec], min_saving: float, share: float = 0.0) -> int:
    """The largest rank, in multiples of 4, at which those matrices that pay hold ``share`` of all elements, and at
    least one does; 0 if none does at 4.
    """

    def largest(rows: int, cols: int) -> int:
        ranks = range(RANK_MULTIPLE, min(rows, cols) + 1, RANK_MULTIPLE)
        # each rank below one that pays pays, too
        return RANK_MULTIPLE * bisect_left(ranks, True, key=lambda rank: not pays(rank, rows, cols, min_saving))

    elements: Counter[tuple[int, int]] = Counter()
    for matrix in matrices:
        elements[matrix.rows, matrix.cols] += matrix.elements
    needed = share * elements.total()
    for rank, own in sorted(((largest(*shape), own) for shape, own in elements.items()), reverse=True):
        needed -= own
        if needed <= 0:
            return rank
    return 0


def select(parameters: Iterable[Parameter], config: EDGCConfig, min_rank: int | None = None) -> Selection:
    """Sort parameters into those that the engine takes and the others.

    An engine without ranks takes everything, as it is. Low rank takes matrices; a parameter of more than two dimensions
    counts as a matrix (``Parameter.spec``). A matrix that does not pay at ``min_rank``, the smallest
    rank of the run (default: by ``config``), never will.
    """
    least = smallest_rank(config) if min_rank is None else min_rank
    # a budget has other ways to send them as well
    takes_embeddings = config.compress_embeddings or config.rank_policy is RankPolicy.VOLUME
    matrices: list[MatrixSpec] = []
    others: list[SkippedParameter] = []
    for parameter in parameters:
        spec = parameter.spec
        if not parameter.elements:
            others.append(SkippedParameter(parameter, "no elements"))
        elif not config.study.takes(parameter.name):
            others.append(SkippedParameter(parameter, f"not in {config.study.flag('only')}"))
        elif not config.low_rank and config.engine != "dense":
            matrices.append(spec)
        elif spec.rows == 1:
            others.append(SkippedParameter(parameter, "one-dimensional"))
        elif parameter.embedding and not takes_embeddings:
            others.append(SkippedParameter(parameter, "embedding or output layer"))
        elif pays(least, spec.rows, spec.cols, config.study.min_saving):
            matrices.append(spec)
        else:
            others.append(SkippedParameter(parameter, f"saves less than {config.study.min_saving:g}x at rank {least}"))
    return Selection(tuple(matrices), tuple(others))


def width(matrices: Iterable[MatrixSpec]) -> int:
    """The smaller side that most entries' matrices have: the hidden size of a transformer; 0 of nothing."""
    entries: Counter[int] = Counter()
    for matrix in matrices:
        entries[min(matrix.rows, matrix.cols)] += matrix.elements
    return max(entries, key=lambda side: (entries[side], side), default=0)
