"""Low rank with error feedback: PowerSGD (Vogels et al. 2019, arXiv 1905.13727)."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.profiler import record_function

from edgc.comm.collectives import Communicator, Exchange, interleave
from edgc.comm.packed import Packed, choose_all, pack_all, unpack_all
from edgc.comm.wire import FP32, wire
from edgc.compress import lowrank
from edgc.compress.batch import Batch
from edgc.compress.engines.base import FactoredSums, LowRank
from edgc.config import EDGCConfig
from edgc.specs import MatrixSpec
from edgc.stacking import all_finite

# V is only where a step starts, so a few bits of it are enough: 8 of them in turn take less than one in fp32.
STORED = wire("int4", hadamard=True)
STRONG_SHARE = 1 / 4  # of the first factor's columns; the others may travel in fewer bits


class PowerSGD(LowRank):
    """Per matrix M (m x n, n the shorter side) and step, over the processes i, with V (n x r) from an earlier step:

    1. P   = sum_i M_i V          first message (m x r)
    2. P   = orthonormal(P)
    3. Q_i = M_i^T P
    4. Q   = sum_i Q_i            second message (n x r)
    5. The sum is P Q^T, the share of process i is P Q_i^T with Q_i as the sum holds it, so that rounding on the wire is
       fed back.
    6. V   = orthonormal(Q), its columns sorted by norm, the strongest first

    V and Q are on the shorter side, where the directions that are in use cover more of the space. ``transpose`` off
    leaves every matrix as it is.

    Step 6 spans what Q spans, as in the paper, but makes the columns of the next P nearly orthogonal. Rounding P then
    costs each direction a little instead of drowning the weak ones in the error of the strongest. An inexact P is
    still the same orthonormal basis on all processes. The last columns of P are the weakest, and ``basis_wire``
    may give them fewer bits: an error as large against the strongest ones leaves more behind than a weak column holds.

    Error feedback empties the directions that have just been sent. With ``basis_cycle`` = k each matrix keeps k factors
    V and uses them in turn, so that each comes back when its directions have filled again.
    """

    def __init__(self, matrices: Sequence[MatrixSpec], config: EDGCConfig, device: torch.device):
        super().__init__(matrices, config, device)
        self.q_wire = wire(config.formats.wire, hadamard=True)
        self.p_wires = [wire(name, hadamard=True) for name in dict.fromkeys(config.formats.basis_wires)]
        # V by name and place in the cycle: (n x r), nearly orthonormal, the same bits on every process
        self.bases: dict[tuple[str, int], Packed] = {}

    @classmethod
    def bytes_per_rank(cls, matrix: MatrixSpec, config: EDGCConfig) -> float:
        strong, weak, q = (wire(name).bytes_per_value() for name in (*config.formats.basis_wires, config.formats.wire))
        longer, shorter = max(matrix.rows, matrix.cols), min(matrix.rows, matrix.cols)
        return longer * (STRONG_SHARE * strong + (1 - STRONG_SHARE) * weak) + shorter * q

    def state_dict(self) -> dict[str, Packed]:
        return {f"{name}:{turn}": basis for (name, turn), basis in self.bases.items()}

    def load_state_dict(self, state: Mapping[str, Packed]) -> None:
        self.bases = {}
        for key, basis in state.items():
            name, _, turn = key.rpartition(":")
            self.bases[name, int(turn)] = basis

    def transposes(self, matrix: MatrixSpec, iteration: int) -> bool:
        return self.config.study.transpose and matrix.cols > matrix.rows

    def basis(self, matrix: MatrixSpec, rank: int, iteration: int) -> Packed:
        """V at this rank, clamped to the matrix's own limit. Where that is a change, learned columns stay."""
        rank = lowrank.limited(rank, matrix.rows, matrix.cols)
        side = matrix.rows if self.transposes(matrix, iteration) else matrix.cols
        if not self.config.study.warm_start:
            fresh = lowrank.resize(None, side, rank, self.device, self.config.seed, matrix.name, iteration)
            return Packed(fresh, FP32)
        turn = iteration % self.config.basis_cycle
        kept = self.bases.get((matrix.name, turn))
        if kept is None or kept.shape != (side, rank):
            # a run that went on with another ``transpose`` has learned the other side
            learned = kept.values() if kept is not None and kept.shape[0] == side else None
            start = lowrank.resize(learned, side, rank, self.device, self.config.seed, matrix.name, turn)
            kept = self.bases[matrix.name, turn] = Packed(start, STORED)
        return kept

    def sum(
        self, batch: Batch, ranks: Mapping[str, int], iteration: int, communicator: Communicator
    ) -> Exchange[FactoredSums]:
        M = batch  # noqa: N806 - the letters of the paper; a factor travels as its transpose, (r x m) or (r x n)
        bases = [self.basis(self.matrices[name], ranks[name], iteration) for name in M]
        # What is only handed on has no name here: it would stay in memory while messages are under way.
        P_sum = yield from self._sum_first_factors(_projected(M.T, unpack_all(bases)), communicator)  # noqa: N806
        finite = all_finite(P_sum)
        with record_function("edgc/orthonormalise"):
            P = self.orthonormal([p.T for p in P_sum], finite)  # noqa: N806
        del P_sum
        Q, Q_own = yield from communicator.sum(_projected(M, P), self.q_wire)  # noqa: N806
        finite = finite & all_finite(Q)
        with record_function("edgc/next basis"):
            learned, strengths = self.principal([q.T for q in Q], finite)
        sums, shares = M.restored(P, Q, Q_own)
        return FactoredSums(sums, shares, finite, learned, strengths)

    def commit(self, sums: FactoredSums, iteration: int, finite: Tensor) -> None:
        self.strengths.update(zip(sums.sums, sums.strengths, strict=True))
        if not self.config.study.warm_start:
            return
        usable = finite & lowrank.teaches(torch.stack([strengths[:1] for strengths in sums.strengths]))
        keys = [(name, iteration % self.config.basis_cycle) for name in sums.sums]
        kept = [self.bases[key] for key in keys]
        self.bases.update(zip(keys, choose_all(usable.unbind(), pack_all(sums.learned, STORED), kept), strict=True))

    def _sum_first_factors(self, factors: Sequence[Tensor], communicator: Communicator) -> Exchange[list[Tensor]]:
        """The sums of (r x m) factors, whose rows are sorted by strength."""
        strong = [math.ceil(len(factor) * STRONG_SHARE) for factor in factors]
        if len(self.p_wires) == 1 or strong == [len(factor) for factor in factors]:
            exchange = communicator.sum_alone(factors, self.p_wires[0])
            del factors  # the exchange drops them as soon as it can
            return (yield from exchange)
        parts = (
            [factor[:count] for factor, count in zip(factors, strong, strict=True)],
            [factor[count:] for factor, count in zip(factors, strong, strict=True)],
        )
        exchanges = [communicator.sum_alone(part, p_wire) for part, p_wire in zip(parts, self.p_wires, strict=True)]
        del factors, parts
        heads, tails = yield from interleave(exchanges)
        return [torch.cat(pair) for pair in zip(heads, tails, strict=True)]


def _projected(batch: Batch, bases: Sequence[Tensor]) -> list[Tensor]:
    with record_function("edgc/project"):
        return batch.multiplied_by([basis.T for basis in bases])
