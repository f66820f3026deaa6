"""The matrices of one low-rank exchange as an engine sees them, and their products with factors."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edgc.compress.lowrank import Product
from edgc.stacking import alike, map_columns, padded, stacked, stacked_view


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
        """factor (r x m) @ M of each pair: (r x n), several at once (``alike``)."""
        operands = list(self.values())
        matrices = [operand.matrix for operand in operands]
        products = list(factors)
        for scaled in (True, False):
            own = [index for index, operand in enumerate(operands) if (operand.scales is not None) == scaled]
            for places in alike([factors[index].T for index in own], [matrices[index].T for index in own]):
                indices = sorted((own[place] for place in places), key=lambda index: matrices[index].storage_offset())
                joined = padded([factors[index].T for index in indices], zeros=False).mT
                scales = [operands[index].scales for index in indices]
                if scaled:
                    joined = joined / stacked([rows.T for rows, _ in filter(None, scales)])
                product = _product(joined, [matrices[index] for index in indices])
                if scaled:
                    product = product / stacked([cols for _, cols in filter(None, scales)])
                for index, part in zip(indices, product.unbind(), strict=True):
                    products[index] = part[: len(factors[index])]
        return products

    def restored(self, left: Sequence[Tensor], *rights: Sequence[Tensor]) -> list[dict[str, Product]]:
        """Approximations of the gradients, by name, for each list of right factors (r x n) with the left ones (m x r).

        The factors' products approximate M.
        """
        rows, cols = ([operand.scales and operand.scales[side] for operand in self.values()] for side in (0, 1))
        scaled_left = _scaled(left, rows)
        scaled_rights = _scaled(
            [factor.T for right in rights for factor in right],
            [None if scale is None else scale.T for scale in cols] * len(rights),
        )
        found = []
        for start in range(0, len(scaled_rights), len(left)):
            products = (
                Product(one, other.T)
                for one, other in zip(scaled_left, scaled_rights[start : start + len(left)], strict=True)
            )
            found.append(
                {
                    name: product.T if operand.transposed else product
                    for (name, operand), product in zip(self.items(), products, strict=True)
                }
            )
        return found


def _product(factors: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """(count, r, m) times (m x n) each: (count, r, n)."""
    view = stacked_view(matrices)
    if view is not None:
        return torch.bmm(factors, view)
    product = factors.new_empty(*factors.shape[:2], matrices[0].shape[1])  # no copy of whole matrices
    for factor, matrix, place in zip(factors.unbind(), matrices, product.unbind(), strict=True):
        torch.mm(factor, matrix, out=place)
    return product


def _scaled(factors: Sequence[Tensor], scales: Sequence[Tensor | None]) -> list[Tensor]:
    """Factors (n x rank) times scales (n x 1), several at once; without scales the factor itself."""
    known = [index for index, scale in enumerate(scales) if scale is not None]
    results = list(factors)
    products = map_columns(torch.mul, [factors[index] for index in known], [one for one in scales if one is not None])
    for index, product in zip(known, products, strict=True):
        results[index] = product
    return results
