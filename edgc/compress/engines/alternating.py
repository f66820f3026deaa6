"""Low rank with one factor a step: alternate compressed PowerSGD (Zhang et al. 2023, ACP-SGD, ICDCS)."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from edgc.comm.collectives import Communicator, Exchange
from edgc.comm.packed import Packed
from edgc.comm.wire import FP32, wire
from edgc.compress import lowrank
from edgc.compress.batch import Batch
from edgc.compress.engines.base import FactoredSums, LowRank
from edgc.config import EDGCConfig
from edgc.specs import MatrixSpec
from edgc.stacking import all_finite


class Alternating(LowRank):
    """PowerSGD whose two factors are learned in turn. Per matrix and step, with a basis B from the step before:

    1. C_i = B^T M_i                    M transposed in every other step
    2. C   = sum_i C_i                  the only message (r x n)
    3. The sum is B C, the share of process i is B C_i with C_i as the sum holds it.
    4. B   = orthonormal rows of C, the strongest first: the basis of the next step, for M transposed

    Half the bytes of PowerSGD at the same rank, and no message is delicate: B never travels, C is exact up to what
    error feedback returns.
    """

    def __init__(self, matrices: Sequence[MatrixSpec], config: EDGCConfig, device: torch.device):
        super().__init__(matrices, config, device)
        self.wire = wire(config.formats.wire, hadamard=True)
        # By name and whether the matrix is transposed: (rows or cols x rank), orthonormal, fp32
        self.bases: dict[tuple[str, bool], Tensor] = {}

    @classmethod
    def bytes_per_rank(cls, matrix: MatrixSpec, config: EDGCConfig) -> float:
        return (matrix.rows + matrix.cols) / 2 * wire(config.formats.wire).bytes_per_value()

    def state_dict(self) -> dict[str, Packed]:
        return {
            f"{name}:{'transposed' if transposed else 'straight'}": Packed(basis, FP32)
            for (name, transposed), basis in self.bases.items()
        }

    def load_state_dict(self, state: Mapping[str, Packed]) -> None:
        self.bases = {}
        for key, basis in state.items():
            name, _, side = key.rpartition(":")
            self.bases[name, side == "transposed"] = basis.values()

    def basis(self, matrix: MatrixSpec, rank: int, transposed: bool) -> Tensor:
        """B at this rank, clamped to the matrix's own limit. Where that is a change, learned columns stay."""
        name, rank = matrix.name, lowrank.limited(rank, matrix.rows, matrix.cols)
        rows = matrix.cols if transposed else matrix.rows
        return lowrank.resize(self.bases.get((name, transposed)), rows, rank, self.device, self.config.seed, name)

    def transposes(self, matrix: MatrixSpec, iteration: int) -> bool:
        return iteration % 2 == 1

    def sum(
        self, batch: Batch, ranks: Mapping[str, int], iteration: int, communicator: Communicator
    ) -> Exchange[FactoredSums]:
        transposed = iteration % 2 == 1
        bases = [self.basis(self.matrices[name], ranks[name], transposed) for name in batch]
        C, C_own = yield from communicator.sum(batch.multiplied_by([basis.T for basis in bases]), self.wire)  # noqa: N806
        finite = all_finite(C)
        learned, strengths = self.principal([c.T for c in C], finite)
        sums, shares = batch.restored(bases, C, C_own)
        return FactoredSums(sums, shares, finite, learned, strengths)

    def commit(self, sums: FactoredSums, iteration: int, finite: Tensor) -> None:
        transposed = iteration % 2 == 1
        for name, vectors, strengths in zip(sums.sums, sums.learned, sums.strengths, strict=True):
            self.strengths[name] = strengths
            older = self.basis(self.matrices[name], len(strengths), not transposed)
            kept = torch.where(finite & lowrank.teaches(strengths), vectors, older)
            self.bases[name, not transposed] = kept.contiguous()  # as a resumed run has it: products round alike
