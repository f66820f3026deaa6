"""The interface of an engine: sums over a process group, in fewer bytes than an all-reduce takes.

An engine returns what the sum has become and what it holds of this process. It knows nothing of errors: what a share
does not hold of the matrix that was put in is the error, whatever the engine. What changes from step to step by plan
follows the iteration, so that a step can be repeated. The CPU never waits for a result: a matrix that is not finite
on any process makes ``finite`` false, a boolean on the device, and then the rest means nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from edgc.arithmetic import on_cpu
from edgc.comm.collectives import Communicator, Exchange
from edgc.comm.packed import Packed
from edgc.compress import lowrank
from edgc.compress.batch import Batch
from edgc.compress.error_feedback import ErrorRule
from edgc.compress.lowrank import Product
from edgc.config import EDGCConfig
from edgc.specs import MatrixSpec
from edgc.stacking import map_padded, map_stacked


class Engine:
    """What all engines have."""

    error_rule: ErrorRule | None = None  # where an engine keeps errors by a rule that no setting changes

    def __init__(self, matrices: Sequence[MatrixSpec], config: EDGCConfig, device: torch.device):
        self.matrices = {matrix.name: matrix for matrix in matrices}
        self.config = config
        self.device = device

    def state_dict(self) -> dict[str, Packed]:
        """What the next step depends on. Its tensors are replaced, never changed: no copies."""
        return {}

    def load_state_dict(self, state: Mapping[str, Packed]) -> None:
        """Continue from ``state_dict``."""


@dataclass(frozen=True)
class Sums:
    """Over the group, ``shares`` add up to ``sums``; both in the order and the shapes of what was put in."""

    sums: Sequence[Tensor]
    shares: Sequence[Tensor]
    finite: Tensor


class Elementwise(Engine, ABC):
    """An engine that rounds single values, or leaves out values or whole rows."""

    exact = False  # whether sums are those of fp32, so that no errors are left
    equalised = True  # whether the equaliser's scales divide what is put in

    def begin(self, names: Sequence[str], iteration: int, process: int) -> None:
        """Seed what is drawn at random for the sums of these gradients, on this process of the group."""


class Thinning(Elementwise):
    """An engine that leaves out values or whole rows."""

    @abstractmethod
    def sum(self, tensors: Sequence[Tensor], communicator: Communicator) -> Exchange[Sums]:
        """The sums of fp32 matrices."""


@dataclass(frozen=True)
class FactoredSums:
    """Sums as products of two factors, by name, the same on all processes, and what they hold of this process.

    ``learned`` (side x rank, the strongest column first) and ``strengths`` (rank,) are what the next step starts from.
    """

    sums: Mapping[str, Product]
    shares: Mapping[str, Product]
    finite: Tensor
    learned: Sequence[Tensor]
    strengths: Sequence[Tensor]


class LowRank(Engine, ABC):
    """An engine that sums matrices as products of two factors, at ranks that the controller sets."""

    def __init__(self, matrices: Sequence[MatrixSpec], config: EDGCConfig, device: torch.device):
        super().__init__(matrices, config, device)
        # (rank,) norms of the columns of each last Q, sorted: about its singular values
        self.strengths: dict[str, Tensor] = {}
        # A GPU does Cholesky factorisations of many matrices at once, and Householder's QR one after another.
        self._cholesky = device.type == "cuda" or config.study.kernels == "fused"

    def orthonormal(self, factors: Sequence[Tensor], finite: Tensor) -> list[Tensor]:
        """Orthonormal bases of the columns of (n x rank) factors, if all are ``finite``, else anything.

        Many are one operation: those of equal shapes, on a GPU also those of like ranks.
        """
        if self._cholesky:
            bases = map_padded(lowrank.cholesky_basis, factors)
            return [basis[:, : factor.shape[1]] for basis, factor in zip(bases, factors, strict=True)]
        return map_stacked(lowrank.orthonormalise, self._usable(factors, finite))

    def principal(self, factors: Sequence[Tensor], finite: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """``lowrank.sorted_basis`` of (n x rank) factors, if all are ``finite``: the bases and the norms."""
        if self._cholesky:
            pairs = map_padded(partial(lowrank.sorted_basis, orthonormalise=lowrank.cholesky_basis), factors)
        else:
            pairs = map_stacked(lowrank.sorted_basis, self._usable(factors, finite))
        ranks = [factor.shape[1] for factor in factors]  # zeros sort behind all others
        bases = [vectors[:, :rank] for (vectors, _), rank in zip(pairs, ranks, strict=True)]
        return bases, [norms[:rank] for (_, norms), rank in zip(pairs, ranks, strict=True)]

    @staticmethod
    def _usable(factors: Sequence[Tensor], finite: Tensor) -> Sequence[Tensor]:
        """Householder's QR refuses factors that are not finite: it gets zeros."""
        if on_cpu(finite) and finite:
            return factors
        return map_stacked(lambda factor: torch.where(finite, factor, 0.0), factors)

    @classmethod
    @abstractmethod
    def bytes_per_rank(cls, matrix: MatrixSpec, config: EDGCConfig) -> float:
        """Bytes of the messages that the factors of a matrix take, per unit of rank."""

    @abstractmethod
    def transposes(self, matrix: MatrixSpec, iteration: int) -> bool:
        """Whether ``sum`` is to get the transposed matrix."""

    @abstractmethod
    def sum(
        self, batch: Batch, ranks: Mapping[str, int], iteration: int, communicator: Communicator
    ) -> Exchange[FactoredSums]:
        """The sums of the matrices of a batch."""

    @abstractmethod
    def commit(self, sums: FactoredSums, iteration: int, finite: Tensor) -> None:
        """Take in what an exchange has taught, if all of the step's were ``finite``."""
