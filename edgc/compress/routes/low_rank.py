"""Matrices that travel as two factors."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.profiler import record_function

from edgc.comm.collectives import Exchange, interleave
from edgc.comm.replicas import digest
from edgc.compress.batch import Batch, Operand
from edgc.compress.engines.base import FactoredSums, LowRank
from edgc.compress.engines.rows import Rows
from edgc.compress.lowrank import Product, squared_norms_of
from edgc.compress.routes.base import ReductionContext, Route
from edgc.specs import MatrixSpec
from edgc.stacking import map_columns


class FactorRoute(Route):
    """Matrices that an engine sums as products of two factors.

    ``first``: by name, of a matrix, what takes rows of it before; the factors are of what that leaves.
    """

    def __init__(
        self,
        gradients: Mapping[str, Tensor],
        specs: Mapping[str, MatrixSpec],
        context: ReductionContext,
        engine: LowRank,
        ranks: Mapping[str, int],
        first: Mapping[str, Rows] | None = None,
    ):
        super().__init__(gradients, specs, context)
        self.specs = specs
        self.engine = engine
        self.ranks = ranks
        self.first = first or {}
        self.first_sums: dict[str, tuple[Tensor, Tensor]] = {}  # indices of rows and their sums
        self.factored: FactoredSums | None = None

    def exchange(self) -> Exchange[None]:
        context = self.context
        taken = yield from interleave(
            [engine.sum_rows([self.matrices[name]], context.communicator) for name, engine in self.first.items()]
        )
        for name, parts in zip(self.first, taken, strict=True):
            self.matrices[name].index_add_(0, parts.rows[0], parts.shares[0], alpha=-1)
            self.first_sums[name] = parts.rows[0], parts.sums[0]
        finite_rows = [parts.finite for parts in taken]
        del taken  # the shares' memory
        scales = context.scales or {}
        operands = {name: Operand(matrix, scales.get(name)) for name, matrix in self.matrices.items()}
        for name in operands:
            if self.engine.transposes(self.specs[name], context.iteration):
                operands[name] = operands[name].T
        factored = yield from self.engine.sum(
            self._batch(operands), self.ranks, context.iteration, context.communicator
        )
        self.factored, self.finite = factored, torch.stack([factored.finite, *finite_rows]).all()
        if context.scales is not None:
            self.squared_norms = squared_norms_of(factored.sums)
        if any(gradient.dtype != torch.float32 for gradient in self.gradients.values()):
            for name, matrix in self.matrices.items():
                self.errors[name] = factored.shares[name].residual_of(matrix)
                factored.sums[name].write(matrix, slice(None))
                if name in self.first_sums:
                    rows, total = self.first_sums[name]
                    matrix.index_add_(0, rows, total)
            self._round_narrow()

    def commit(self, finite: Tensor) -> None:
        assert self.factored is not None
        self.engine.commit(self.factored, self.context.iteration, finite)
        if self.narrow:
            super().commit(finite)
            return
        self._write(self.factored, finite)

    def digests(self) -> dict[str, Tensor]:
        sums = {} if self.factored is None else self.factored.sums
        found = {name: digest(product.left) + 3 * digest(product.right) for name, product in sums.items()}
        of_rows = {name: 5 * digest(total) + 7 * digest(rows) for name, (rows, total) in self.first_sums.items()}
        return {**found, **{name: found[name] + own for name, own in of_rows.items()}}

    def _batch(self, operands: Mapping[str, Operand]) -> Batch:
        return Batch(operands)

    def _write(self, factored: FactoredSums, finite: Tensor) -> None:
        """The errors, and the rows of the sums that this process needs."""
        names, gain = list(self.matrices), self._gain(finite)
        shares, sums = ([products[name] for name in names] for products in (factored.shares, factored.sums))
        excess = [self.excess[name].view(1, 1) for name in names]
        divided = map_columns(torch.div, [share.left for share in shares], excess)
        gained = torch._foreach_mul([total.left for total in sums], gain)
        for index, (name, matrix) in enumerate(self.matrices.items()):
            with record_function("edgc/residual"):
                # The division takes the place of the copy with which ``addmm`` begins: no further pass over the matrix.
                older, waiting = self._waiting(name), 1 - self.error_gain
                if older is None:
                    error, waiting = torch.div(matrix, self.excess[name]), 1.0
                else:  # error = waiting * older + M / excess - share / excess
                    error = torch.addcdiv(older, matrix, self.excess[name], value=1 / waiting)
                error.addmm_(divided[index], shares[index].right, beta=waiting, alpha=-1)
            self.context.feedback.store({name: error}, finite, self.context.iteration)
            with record_function("edgc/reconstruct"):
                Product(gained[index], sums[index].right).write(matrix, self._own_rows(name))
                if name in self.first_sums:
                    rows, total = self.first_sums[name]
                    matrix.index_add_(0, rows, total * gain)

    def _own_rows(self, name: str) -> slice:
        if name not in self.context.shards:
            return slice(None)
        (start, stop), cols = self.context.own_part(name), self.specs[name].cols
        return slice(start // cols, -(-stop // cols))
