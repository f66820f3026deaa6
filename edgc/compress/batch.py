"""The matrices of one low-rank exchange as an engine sees them, and their products with factors."""

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from edgc.compress.lowrank import Product
from edgc.stacking import by_shape, map_stacked, stacked, stacked_view


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

    def multiplied_by(self, factors: Sequence[Tensor]) -> list[Tensor]:
        """factor (r x m) @ M of each pair: (r x n). Pairs of equal shapes are one operation."""
        matrices = [operand.matrix for operand in self.values()]
        divided = _where_known(
            torch.div, factors, [operand.scales and operand.scales[0].T for operand in self.values()]
        )
        products = list(divided)
        for places in by_shape(divided, matrices):
            places.sort(key=lambda place: matrices[place].storage_offset())  # a view cannot run backwards
            view = stacked_view([matrices[place] for place in places])
            if view is None:  # not worth a copy of whole matrices
                parts = [divided[place] @ matrices[place] for place in places]
            else:
                parts = list(torch.bmm(stacked([divided[place] for place in places]), view).unbind(0))
            for place, part in zip(places, parts, strict=True):
                products[place] = part
        return _where_known(torch.div, products, [operand.scales and operand.scales[1] for operand in self.values()])

    def restored(self, left: Sequence[Tensor], *rights: Sequence[Tensor]) -> list[dict[str, Product]]:
        """Of each list of right factors (r x n), with the left ones (m x r): what approximates the gradients, by name.

        The factors' products approximate M.
        """
        rows, cols = ([operand.scales and operand.scales[side] for operand in self.values()] for side in (0, 1))
        scaled_left = _where_known(torch.mul, left, rows)
        found = []
        for right in rights:
            scaled_right = _where_known(torch.mul, right, cols)
            products = map(Product, scaled_left, scaled_right)
            found.append(
                {
                    name: product.T if operand.transposed else product
                    for (name, operand), product in zip(self.items(), products, strict=True)
                }
            )
        return found


def _where_known(
    function: Callable[[Tensor, Tensor], Tensor], tensors: Sequence[Tensor], scales: Sequence[Tensor | None]
) -> list[Tensor]:
    """The function of each tensor and its scales, those of equal shapes at once; without scales the tensor itself."""
    known = [place for place, scale in enumerate(scales) if scale is not None]
    results = list(tensors)
    changed = map_stacked(function, [tensors[place] for place in known], [s for s in scales if s is not None])
    for place, result in zip(known, changed, strict=True):
        results[place] = result
    return results


class FusedBatch(Batch):
    """A batch whose first product also unscales each gradient and adds its error, in one pass of a Triton kernel.

    ``errors``: fp32 or bf16, of the operands' shapes; a name may be missing. ``loss_scale``: 0-dimensional. ``gain``:
    the share of an error that is added.
    """

    def __init__(
        self,
        kernels: ModuleType,
        operands: Mapping[str, Operand],
        errors: Mapping[str, Tensor],
        loss_scale: Tensor | None,
        gain: float,
    ):
        super().__init__(operands)
        self._kernels = kernels
        self._errors = errors
        self._loss_scale = loss_scale
        self._gain = gain
        self._unprepared = set(operands)  # shared with the transposed batch

    @property
    def T(self) -> "FusedBatch":  # noqa: N802 - as of a tensor
        errors = {name: error.T for name, error in self._errors.items()}
        operands = {name: one.T for name, one in self.items()}
        batch = FusedBatch(self._kernels, operands, errors, self._loss_scale, self._gain)
        batch._unprepared = self._unprepared
        return batch

    def multiplied_by(self, factors: Sequence[Tensor]) -> list[Tensor]:
        products = []
        for (name, operand), factor in zip(self.items(), factors, strict=True):
            divided = factor if operand.scales is None else factor / operand.scales[0].T
            if name in self._unprepared:
                error = self._errors.get(name)
                product = self._kernels.project(operand.matrix, divided, error, self._loss_scale, self._gain)
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
