"""The interface between a gradient reducer and an engine."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from edgc.comm.collectives import Communicator, Steps
from edgc.comm.wire import Packed
from edgc.compress import lowrank
from edgc.compress.lowrank import Product
from edgc.compress.matrices import Matrices
from edgc.config import EDGCConfig
from edgc.specs import MatrixSpec
from edgc.stacking import alike, at_once, stacked_view

# Places in a flattened gradient, one more than there are ranks: rank i needs what lies between the i-th and the next.
type Cuts = Sequence[int]


def cuts(start: int, end: int, shard: int, ranks: int) -> Cuts:
    """Of a gradient that lies between ``start`` and ``end`` of a buffer, of which each rank has a shard so long."""
    return [min(max(rank * shard, start), end) - start for rank in range(ranks + 1)]


@dataclass(frozen=True)
class Reduced:
    """What a reduction has left. It takes effect only where all reductions of the step have turned out finite.

    ``finite``: whether this one has, a boolean on the device; if not, the rest means nothing. ``errors``: by name,
    what the sum does not hold of a gradient; a name that is missing was sent whole. ``advance`` brings the engine's
    own state to that of the next step, given whether all were finite. ``sharded``: names whose sums each rank got its
    own part of only; ``finite`` then tells of that, and otherwise is the same on every rank.

    A low-rank engine changes no gradient. ``products``: its sums by name; ``shares``: what each holds of this rank, and
    what a share does not hold of the own matrix is its error.
    """

    finite: Tensor
    errors: dict[str, Tensor]
    advance: Callable[[Tensor], None]
    sharded: Collection[str] = ()
    products: dict[str, Product] = field(default_factory=dict)
    shares: dict[str, Product] = field(default_factory=dict)

    @classmethod
    def of_all(cls, several: Sequence["Reduced"]) -> "Reduced":
        """Reductions of different gradients as one. It does not keep them, so that an error goes when it is taken."""
        advances = [one.advance for one in several]

        def advance(finite: Tensor) -> None:
            for each in advances:
                each(finite)

        return cls(
            torch.stack([one.finite for one in several]).all(),
            {name: error for one in several for name, error in one.errors.items()},
            advance,
            {name for one in several for name in one.sharded},
            {name: product for one in several for name, product in one.products.items()},
            {name: share for one in several for name, share in one.shares.items()},
        )


class Engine:
    """Sums a set of gradients over a process group with fewer bytes than an all-reduce takes.

    What changes from step to step by plan follows the iteration, so that a step can be repeated. The host does not wait
    for results: a gradient that is not finite on any rank is told in ``Reduced.finite``, and then its sum may be
    anything.
    """

    def __init__(self, matrices: Sequence[MatrixSpec], config: EDGCConfig, device: torch.device):
        self.matrices = {matrix.name: matrix for matrix in matrices}
        self.config = config
        self.device = device

    def state_dict(self) -> dict[str, Packed]:
        """What the next step depends on beside the errors. Its tensors are replaced, never changed: no copies."""
        return {}

    def load_state_dict(self, state: Mapping[str, Packed]) -> None:
        """Go on where ``state_dict`` was taken."""


class Elementwise(Engine, ABC):
    """An engine that rounds or leaves out single values, of any gradient."""

    @abstractmethod
    def reduce(
        self,
        gradients: Mapping[str, Tensor],
        older: Mapping[str, Packed],
        iteration: int,
        communicator: Communicator,
        shards: Mapping[str, Cuts],
    ) -> Steps[Reduced]:
        """Replace each local gradient (rows x cols, fp32, scaled, older error added) by the group's sum, in place.

        Over the group, sums and the errors that are returned are together exactly what was put in. ``older`` holds the
        errors that were added. Of a gradient with cuts in ``shards`` each rank needs only its own part; the others may
        be left as anything.
        """


class LowRank(Engine, ABC):
    """An engine that sums matrices as products of two factors, at ranks that the controller sets."""

    def __init__(self, matrices: Sequence[MatrixSpec], config: EDGCConfig, device: torch.device):
        super().__init__(matrices, config, device)
        # (rank,) norms of the columns of each last Q, sorted: about its singular values
        self.strengths: dict[str, Tensor] = {}
        self._orthonormalise = lowrank.cholesky_basis if config.kernels == "fused" else lowrank.orthonormalise

    def orthonormal(self, factors: Sequence[Tensor]) -> list[Tensor]:
        """Orthonormal bases of the columns of (n x rank) factors, all at once."""
        return at_once(self._orthonormalise, factors)

    def principal(self, factors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """``lowrank.sorted_basis`` of (n x rank) factors, all at once."""
        return at_once(partial(lowrank.sorted_basis, orthonormalise=self._orthonormalise), factors)

    @abstractmethod
    def turned(self, matrix: MatrixSpec, iteration: int) -> bool:
        """Whether the transposed matrix is what ``reduce`` works on."""

    @abstractmethod
    def reduce(
        self, matrices: Matrices, ranks: Mapping[str, int], iteration: int, communicator: Communicator
    ) -> Steps[Reduced]:
        """The sums of the matrices over the group as ``Reduced.products``; those of all ranks' shares are the same."""


def all_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Whether every entry is finite. Of sums that are the same on every rank the answer is, too."""
    seen = []
    for places in alike(tensors):
        view = stacked_view([tensors[place] for place in places])
        whole = [tensors[place] for place in places] if view is None else [view]  # not worth a copy
        seen += [torch.isfinite(tensor).all() for tensor in whole]
    return torch.stack(seen).all()


def or_zeros(finite: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, or zeros in their place if they are not finite: factorisations refuse what is not."""
    return at_once(lambda tensor: torch.where(finite, tensor, 0.0), tensors)
