"""The largest rank that the preset `paper` can use for a model's matrices."""

from collections.abc import Sequence

from edgc.config import EDGCConfig
from edgc.plan.selection import largest_rank
from edgc.specs import MatrixSpec

LEAST_SAVING = EDGCConfig.from_preset("paper").study.min_saving  # of a matrix or a message: it is so many times smaller


def paper_rank(matrices: Sequence[MatrixSpec]) -> int:
    """The largest rank at which each of these sends at most what `paper` asks for, half of its bytes."""
    return largest_rank(matrices, LEAST_SAVING, share=1.0)
