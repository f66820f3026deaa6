"""What a low-rank reduction does with whole gradients: as few passes over them as the factors allow."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from edgc.lowrank import Product


@dataclass(frozen=True)
class Scaled:
    """A matrix (rows x cols, fp32) as divided by scales (rows x 1) and (1 x cols). Only factors are ever divided."""

    matrix: Tensor
    rows: Tensor | None = None
    cols: Tensor | None = None

    @property
    def T(self) -> "Scaled":  # noqa: N802 - as of a tensor
        return Scaled(
            self.matrix.T, None if self.cols is None else self.cols.T, None if self.rows is None else self.rows.T
        )

    def restored(self, product: Product) -> Product:
        """A product that approximates the divided matrix as one that approximates the matrix."""
        return product if self.rows is None or self.cols is None else product.scaled(self.rows, self.cols)


class Matrices(Mapping[str, Scaled]):
    """The matrices of one reduction, by name."""

    def __init__(self, matrices: Mapping[str, Scaled]):
        self._matrices = dict(matrices)

    def __getitem__(self, name: str) -> Scaled:
        return self._matrices[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._matrices)

    def __len__(self) -> int:
        return len(self._matrices)

    @property
    def T(self) -> "Matrices":  # noqa: N802 - as of a tensor
        return Matrices({name: scaled.T for name, scaled in self.items()})

    def times(self, factors: Sequence[Tensor]) -> list[Tensor]:
        """(rank x cols) products of each (rank x rows) factor with its matrix."""
        return [_times(factor, scaled) for factor, scaled in zip(factors, self.values(), strict=True)]


def _times(factor: Tensor, scaled: Scaled) -> Tensor:
    if scaled.rows is None or scaled.cols is None:
        return factor @ scaled.matrix
    return (factor / scaled.rows.T) @ scaled.matrix / scaled.cols
