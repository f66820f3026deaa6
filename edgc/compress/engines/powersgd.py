"""Low rank with error feedback: PowerSGD (Vogels et al. 2019, arXiv 1905.13727)."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.profiler import record_function

from edgc.comm.collectives import Communicator, Steps, together
from edgc.comm.wire import FP32, Packed, choose_all, pack_all, unpack_all, wire
from edgc.compress import lowrank
from edgc.compress.engines.base import LowRank, Reduced, all_finite, or_zeros
from edgc.compress.lowrank import Product
from edgc.compress.matrices import Matrices
from edgc.config import EDGCConfig
from edgc.specs import MatrixSpec

# V is only where a step starts, so a few bits of it are enough: 8 of them in turn take less than one in fp32.
STORED = wire("int4", hadamard=True)
STRONG_SHARE = 1 / 4  # of the first factor's columns; the others may travel in fewer bits


class PowerSGD(LowRank):
    """Per matrix and step, over the ranks i of the data-parallel group, with V from the step before:

    1. M_i = gradient_i + error_i transposed if it has more columns than rows
    2. P   = sum_i M_i V          first message (longer side x rank)
    3. P   = orthonormal(P)
    4. Q_i = M_i^T P
    5. Q   = sum_i Q_i            second message (shorter side x rank)
    6. error_i = M_i - P Q_i^T    with Q_i as the sum holds it, so that rounding on the wire is fed back; with
                                  ``local_error`` off, the workers' mean in the place of their own Q_i
    7. gradient = P Q^T
    8. V   = orthonormal(Q), its columns sorted by norm, the strongest first

    With ``power_iterations`` above 1, steps 2 to 5 are repeated from V = Q.

    V and Q are on the shorter side, where the directions that are in use cover more of the space. ``transpose`` off
    leaves every matrix as it is.

    Step 8 spans what Q spans, as in the paper, but makes the columns of the next P nearly orthogonal. Rounding P then
    costs each direction a little instead of drowning the weak ones in the error of the strongest. An inexact P is
    still the same orthonormal basis on all ranks. The last columns of P are the weakest, and ``weak_basis_wire`` may
    give them fewer bits: an error as large against the strongest ones leaves more behind than a weak column holds.

    Error feedback empties the directions that have just been sent. With ``basis_cycle`` = k each matrix keeps k factors
    V and uses them in turn, so that each comes back when its directions have filled again.
    """

    def __init__(self, matrices: Sequence[MatrixSpec], config: EDGCConfig, device: torch.device):
        super().__init__(matrices, config, device)
        self.q_wire = wire(config.wire, hadamard=True)
        self.p_wires = [wire(config.basis_wire, hadamard=True)]
        if config.weak_basis_wire not in (None, config.basis_wire):
            self.p_wires.append(wire(config.weak_basis_wire, hadamard=True))
        # V by name and place in the cycle: (shorter side x rank), nearly orthonormal, identical on every rank
        self.bases: dict[tuple[str, int], Packed] = {}

    def state_dict(self) -> dict[str, Packed]:
        return {f"{name}:{turn}": basis for (name, turn), basis in self.bases.items()}

    def load_state_dict(self, state: Mapping[str, Packed]) -> None:
        self.bases = {}
        for key, basis in state.items():
            name, _, turn = key.rpartition(":")
            self.bases[name, int(turn)] = basis

    def turned(self, matrix: MatrixSpec, iteration: int) -> bool:
        return self.config.transpose and matrix.cols > matrix.rows

    def basis(self, matrix: MatrixSpec, rank: int, iteration: int) -> Packed:
        """V at this rank, clamped to the matrix's own limit. Where that is a change, learned columns stay."""
        rank = lowrank.limited(rank, matrix.rows, matrix.cols)
        side = matrix.rows if self.turned(matrix, iteration) else matrix.cols
        if not self.config.warm_start:
            fresh = lowrank.resize(None, side, rank, self.device, self.config.seed, matrix.name, iteration)
            return Packed(fresh, FP32)
        turn = iteration % self.config.basis_cycle
        kept = self.bases.get((matrix.name, turn))
        if kept is None or kept.shape[1] != rank:
            learned = None if kept is None else kept.values()
            start = lowrank.resize(learned, side, rank, self.device, self.config.seed, matrix.name, turn)
            kept = self.bases[matrix.name, turn] = Packed(start, STORED)
        return kept

    def reduce(
        self, matrices: Matrices, ranks: Mapping[str, int], iteration: int, communicator: Communicator
    ) -> Steps[Reduced]:
        kept = [self.basis(self.matrices[name], ranks[name], iteration) for name in matrices]
        starts = unpack_all(kept)
        finite = torch.ones((), dtype=torch.bool, device=self.device)
        for _ in range(self.config.power_iterations):
            with record_function("edgc/project"):
                local = matrices.T.times([start.T for start in starts])
            sums = yield from self._sum_first_factors(local, communicator)
            finite = finite & all_finite(sums)
            with record_function("edgc/orthonormalise"):
                bases = self.orthonormal([factor.T for factor in or_zeros(finite, sums)])
            with record_function("edgc/project"):
                local = matrices.times([basis.T for basis in bases])
            sums, shares = yield from communicator.sum(local, self.q_wire)
            finite = finite & all_finite(sums)
            with record_function("edgc/next basis"):
                principal = self.principal([q.T for q in or_zeros(finite, sums)])
            starts = [vectors for vectors, _ in principal]
        if not self.config.local_error:
            shares = [q / communicator.ranks for q in sums]

        def advance(finite: Tensor) -> None:
            self.strengths.update(zip(matrices, (strengths for _, strengths in principal), strict=True))
            if self.config.warm_start:
                # A factor of zeros, as of a step without gradient, would teach unit vectors.
                usable = finite & (torch.stack([strengths[0] for _, strengths in principal]) > 0)
                learned = choose_all(usable.unbind(), pack_all(starts, STORED), kept)
                turn = iteration % self.config.basis_cycle
                self.bases.update(zip(((name, turn) for name in matrices), learned, strict=True))

        def products(factors: Sequence[Tensor]) -> dict[str, Product]:
            return {name: Product(basis, q) for name, basis, q in zip(matrices, bases, factors, strict=True)}

        return Reduced(finite, {}, advance, products=products(sums), shares=products(shares))

    def _sum_first_factors(self, factors: Sequence[Tensor], communicator: Communicator) -> Steps[list[Tensor]]:
        """The sums of (rank x longer side) factors, whose rows are sorted by strength."""
        strong = [math.ceil(len(factor) * STRONG_SHARE) for factor in factors]
        if len(self.p_wires) == 1 or strong == [len(factor) for factor in factors]:
            sums, _ = yield from communicator.sum(factors, self.p_wires[0])
            return sums
        parts = (
            [factor[:count] for factor, count in zip(factors, strong, strict=True)],
            [factor[count:] for factor, count in zip(factors, strong, strict=True)],
        )
        (heads, _), (tails, _) = yield from together(
            [communicator.sum(part, p_wire) for part, p_wire in zip(parts, self.p_wires, strict=True)]
        )
        return [torch.cat(pair) for pair in zip(heads, tails, strict=True)]
