"""The ranks that the preset `paper` can use for a model's matrices."""

from collections.abc import Sequence

from edgc.config import EDGCConfig
from edgc.plan.selection import largest_rank
from edgc.specs import MatrixSpec

LEAST_SAVING = EDGCConfig.from_preset("paper").study.min_saving  # of a matrix or a message: it is so many times smaller


def paper_ranks(matrices: Sequence[MatrixSpec]) -> list[int]:
    """The largest rank of each of these at which it sends at most what `paper` asks for, half of its bytes; in rising
    order, each once. Above its own a matrix travels whole. No stage has a rank above the last.
    """
    return sorted({largest_rank([matrix], LEAST_SAVING) for matrix in matrices})
