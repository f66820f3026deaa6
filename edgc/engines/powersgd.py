"""Low rank with error feedback: PowerSGD (Vogels et al. 2019, arXiv 1905.13727)."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from edgc import lowrank
from edgc.collectives import Communicator, Steps
from edgc.config import EDGCConfig
from edgc.engines.base import Engine, MatrixSpec, all_finite, spoil
from edgc.error_feedback import ErrorFeedback
from edgc.wire import wire


class PowerSGD(Engine):
    """Per matrix and step, over the ranks i of the data-parallel group, with Q from the step before:

    1. M_i = gradient_i + error_i
    2. P   = sum_i M_i Q          first message (rows x rank)
    3. P   = orthonormal(P)
    4. Q_i = M_i^T P
    5. Q   = sum_i Q_i            second message (cols x rank)
    6. error_i = M_i - P Q_i^T    with Q_i as the sum holds it, so that rounding on the wire is fed back
    7. gradient = P Q^T

    P may be rounded at will: an inexact basis is still the same orthonormal one on all ranks.
    """

    low_rank = True

    def __init__(self, matrices: Sequence[MatrixSpec], config: EDGCConfig, device: torch.device):
        super().__init__(matrices, config, device)
        self.q_wire = wire(config.wire)
        self.p_wire = wire(config.basis_wire)
        self.q: dict[str, Tensor] = {}  # (cols x rank), fp32, identical on every rank

    def factor(self, matrix: MatrixSpec, rank: int) -> Tensor:
        """Q at this rank, clamped to the matrix's own limit. Where that is a change, learned columns stay."""
        name, rank = matrix.name, lowrank.limited(rank, matrix.rows, matrix.cols)
        q = self.q.get(name)
        if q is None:
            return lowrank.random_factor(matrix.cols, rank, self.device, self.config.seed, name)
        return q if q.shape[1] == rank else lowrank.resize(q, rank, self.config.seed, name, q.shape[1], rank)

    def reduce(
        self,
        gradients: Mapping[str, Tensor],
        ranks: Mapping[str, int],
        feedback: ErrorFeedback,
        communicator: Communicator,
    ) -> Steps[None]:
        factors = [matrix @ self.factor(self.matrices[name], ranks[name]) for name, matrix in gradients.items()]
        # columns in rows, so that a group of rounded values lies within one column
        sums, _ = yield from communicator.sum([factor.T for factor in factors], self.p_wire)
        if not all_finite(sums):
            spoil(gradients)
            return

        bases = [lowrank.orthonormalise(factor.T) for factor in sums]
        local = [basis.T @ matrix for matrix, basis in zip(gradients.values(), bases, strict=True)]
        sums, shares = yield from communicator.sum(local, self.q_wire)
        for (name, matrix), basis, q, share in zip(gradients.items(), bases, sums, shares, strict=True):
            feedback.store(name, torch.addmm(matrix, basis, share, alpha=-1))
            torch.mm(basis, q, out=matrix)
            self.q[name] = q.T.contiguous()
