"""The matrices of one low-rank exchange as an engine sees them, and their products with factors."""

import importlib
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from edgc.compress.lowrank import Product
from edgc.stacking import by_shape, stacked, stacked_view


@dataclass(frozen=True)
class Operand:
    """A matrix M (m x n) as an engine sees it: perhaps transposed, and divided by scales (m x 1) and (1 x n).

    ``matrix`` is a view of the gradient. Only factors are ever divided.
    """

    matrix: Tensor
    scales: tuple[Tensor, Tensor] | None = None
    transposed: bool = False

    @property
    def T(self) -> "Operand":  # noqa: N802 - as of a tensor
        return Operand(self.matrix.T, self.scales and (self.scales[1].T, self.scales[0].T), not self.transposed)

    def restored(self, left: Tensor, right: Tensor) -> Product:
        """left (m x r) @ right (r x n), which approximate M, as what approximates the gradient."""
        product = Product(left, right)
        if self.scales is not None:
            product = product.scaled(*self.scales)
        return product.T if self.transposed else product


class Batch(Mapping[str, Operand]):
    """The operands of one exchange, by name."""

    def __init__(self, operands: Mapping[str, Operand]):
        self._operands = dict(operands)

    def __getitem__(self, name: str) -> Operand:
        return self._operands[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._operands)

    def __len__(self) -> int:
        return len(self._operands)

    @property
    def T(self) -> "Batch":  # noqa: N802 - as of a tensor
        return Batch({name: operand.T for name, operand in self.items()})

    def times(self, factors: Sequence[Tensor]) -> list[Tensor]:
        """factor (r x m) @ M of each pair: (r x n). Pairs of equal shapes are one operation."""
        matrices = [operand.matrix for operand in self.values()]
        scales = [operand.scales for operand in self.values()]
        divided = [factor if by is None else factor / by[0].T for factor, by in zip(factors, scales, strict=True)]
        products = list(divided)
        for places in by_shape(divided, matrices):
            view = stacked_view([matrices[place] for place in places])
            if view is None:  # not worth a copy of whole matrices
                parts = [divided[place] @ matrices[place] for place in places]
            else:
                parts = list(torch.bmm(stacked([divided[place] for place in places]), view).unbind(0))
            for place, part in zip(places, parts, strict=True):
                products[place] = part
        return [product if by is None else product / by[1] for product, by in zip(products, scales, strict=True)]


class FusedBatch(Batch):
    """A batch whose first product also unscales each gradient and adds its error, in one pass of a Triton kernel.

    ``errors``: fp32 or bf16, of the operands' shapes; a name may be missing. ``loss_scale``: 0-dimensional.
    """

    def __init__(
        self,
        kernels: ModuleType,
        operands: Mapping[str, Operand],
        errors: Mapping[str, Tensor],
        loss_scale: Tensor | None,
    ):
        super().__init__(operands)
        self._kernels = kernels
        self._errors = errors
        self._loss_scale = loss_scale
        self._unprepared = set(operands)  # shared with the transposed batch

    @property
    def T(self) -> "FusedBatch":  # noqa: N802 - as of a tensor
        errors = {name: error.T for name, error in self._errors.items()}
        batch = FusedBatch(self._kernels, {name: one.T for name, one in self.items()}, errors, self._loss_scale)
        batch._unprepared = self._unprepared
        return batch

    def times(self, factors: Sequence[Tensor]) -> list[Tensor]:
        products = []
        for (name, operand), factor in zip(self.items(), factors, strict=True):
            divided = factor if operand.scales is None else factor / operand.scales[0].T
            if name in self._unprepared:
                product = self._kernels.project(operand.matrix, divided, self._errors.get(name), self._loss_scale)
                self._unprepared.remove(name)
            else:
                product = self._kernels.project(operand.matrix, divided)
            products.append(product if operand.scales is None else product / operand.scales[1])
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
