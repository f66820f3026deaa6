"""What a low-rank reduction does with whole gradients: as few passes over them as the factors allow."""

import importlib
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from edgc.compress.lowrank import Product
from edgc.stacking import alike, stacked, stacked_view


@dataclass(frozen=True)
class Scaled:
    """A matrix (rows x cols, fp32) as divided by scales (rows x 1) and (1 x cols). Only factors are ever divided."""

    matrix: Tensor
    scales: tuple[Tensor, Tensor] | None = None

    @property
    def T(self) -> "Scaled":  # noqa: N802 - as of a tensor
        return Scaled(self.matrix.T, self.scales and (self.scales[1].T, self.scales[0].T))

    def restored(self, product: Product) -> Product:
        """A product that approximates the divided matrix as one that approximates the matrix."""
        return product.scaled(*self.scales) if self.scales else product


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
        """(rank x cols) products of each (rank x rows) factor with its matrix, those of equal shapes at once."""
        matrices = [scaled.matrix for scaled in self.values()]
        scales = [scaled.scales for scaled in self.values()]
        divided = [factor if by is None else factor / by[0].T for factor, by in zip(factors, scales, strict=True)]
        products = list(divided)
        for places in alike(divided, matrices):
            view = stacked_view([matrices[place] for place in places])
            if view is None:  # not worth a copy of whole matrices
                parts = [divided[place] @ matrices[place] for place in places]
            else:
                parts = list(torch.bmm(stacked([divided[place] for place in places]), view).unbind(0))
            for place, part in zip(places, parts, strict=True):
                products[place] = part
        return [product if by is None else product / by[1] for product, by in zip(products, scales, strict=True)]


class Owed(Matrices):
    """Matrices to which divisor and error are still to be applied: Triton's kernels do so in the first product.

    ``errors``: fp32 or bf16, shaped as the matrices they belong to; a name may be missing. ``divisors``: 0-dimensional.
    """

    def __init__(
        self,
        kernels: ModuleType,
        matrices: Mapping[str, Scaled],
        errors: Mapping[str, Tensor],
        divisors: Mapping[str, Tensor],
    ):
        super().__init__(matrices)
        self._kernels = kernels
        self._errors = errors
        self._divisors = divisors
        self._owed = set(matrices)  # shared with the transposed ones

    @property
    def T(self) -> "Owed":  # noqa: N802 - as of a tensor
        errors = {name: error.T for name, error in self._errors.items()}
        turned = Owed(self._kernels, {name: scaled.T for name, scaled in self.items()}, errors, self._divisors)
        turned._owed = self._owed
        return turned

    def times(self, factors: Sequence[Tensor]) -> list[Tensor]:
        products = []
        for (name, scaled), factor in zip(self.items(), factors, strict=True):
            divided = factor if scaled.scales is None else factor / scaled.scales[0].T
            if name in self._owed:
                product = self._kernels.project(scaled.matrix, divided, self._errors.get(name), self._divisors[name])
                self._owed.remove(name)
            else:
                product = self._kernels.project(scaled.matrix, divided)
            products.append(product if scaled.scales is None else product / scaled.scales[1])
        return products


def triton_kernels(device: torch.device) -> ModuleType | None:
    """The fused kernels where they run: on NVIDIA's GPUs from Ampere on, and anywhere in Triton's interpreter."""
    able = (
        device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (8, 0)
    )
    if not (able or os.environ.get("TRITON_INTERPRET") == "1") or importlib.util.find_spec("triton") is None:
        return None
    major, minor, *_ = importlib.import_module("triton").__version__.split(".")
    return importlib.import_module("edgc.compress.kernels") if (int(major), int(minor)) >= (3, 3) else None
