"""Names and shapes of parameters. No torch: what decides needs no tensors."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class MatrixSpec:
    """A gradient seen as a matrix: the parameter's name and rows x cols (1 x elements for a vector)."""

    name: str
    rows: int
    cols: int


@dataclass(frozen=True)
class Parameter:
    """A parameter as the allocation sees it. ``embedding``: a word or position embedding or the output layer."""

    name: str
    shape: tuple[int, ...]
    embedding: bool = False

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def spec(self) -> MatrixSpec:
        """As a matrix: the first dimension by all others; a vector is one row."""
        rows = self.shape[0] if len(self.shape) > 1 else 1
        return MatrixSpec(self.name, rows, self.elements // rows if rows else 0)
