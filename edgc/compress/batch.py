"""The matrices of one low-rank exchange as an engine sees them, and their products with factors."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

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
        for indices in by_shape(divided, matrices):
            indices.sort(key=lambda index: matrices[index].storage_offset())  # a view cannot run backwards
            view = stacked_view([matrices[index] for index in indices])
            if view is None:  # not worth a copy of whole matrices
                parts = [divided[index] @ matrices[index] for index in indices]
            else:
                parts = list(torch.bmm(stacked([divided[index] for index in indices]), view).unbind(0))
            for index, part in zip(indices, parts, strict=True):
                products[index] = part
        return _where_known(torch.div, products, [operand.scales and operand.scales[1] for operand in self.values()])

    def restored(self, left: Sequence[Tensor], *rights: Sequence[Tensor]) -> list[dict[str, Product]]:
        """Approximations of the gradients, by name, for each list of right factors (r x n) with the left ones (m x r).

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
    known = [index for index, scale in enumerate(scales) if scale is not None]
    results = list(tensors)
    changed = map_stacked(function, [tensors[index] for index in known], [s for s in scales if s is not None])
    for index, result in zip(known, changed, strict=True):
        results[index] = result
    return results
