"""The interface between a gradient reducer and an engine."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from edgc.collectives import Communicator, Steps
from edgc.config import EDGCConfig
from edgc.lowrank import Product
from edgc.wire import Packed

# Places in a flattened gradient, one more than there are ranks: rank i needs what lies between the i-th and the next.
type Cuts = Sequence[int]


def cuts(start: int, end: int, shard: int, ranks: int) -> Cuts:
    """Of a gradient that lies between ``start`` and ``end`` of a buffer, of which each rank has a shard so long."""
    return [min(max(rank * shard, start), end) - start for rank in range(ranks + 1)]


@dataclass(frozen=True)
class MatrixSpec:
    """A gradient seen as a matrix: the parameter's name and rows x cols (1 x elements for a vector)."""

    name: str
    rows: int
    cols: int


@dataclass(frozen=True)
class Reduced:
    """What a reduction has left. It takes effect only where all reductions of the step have turned out finite.

    ``finite``: whether this one has, a boolean on the device; if not, the rest means nothing. ``errors``: by name,
    what the sum does not hold of a gradient; a name that is missing was sent whole. ``advance`` brings the engine's
    own state to that of the next step, given whether all were finite. ``products``: by name, sums that the engine knows
    as products; it has not written them. ``sharded``: names whose sums each rank got its own part of only; ``finite``
    then tells of that, and otherwise is the same on every rank.
    """

    finite: Tensor
    errors: Mapping[str, Tensor]
    advance: Callable[[Tensor], None]
    products: Mapping[str, Product] = field(default_factory=dict)
    sharded: Collection[str] = ()


class Engine(ABC):
    """Sums a set of gradients over a process group with fewer bytes than an all-reduce takes.

    ``low_rank`` tells what it works on: matrices at a rank that the controller sets, or any parameter.
    """

    low_rank: bool

    def __init__(self, matrices: Sequence[MatrixSpec], config: EDGCConfig, device: torch.device):
        self.matrices = {matrix.name: matrix for matrix in matrices}
        self.config = config
        self.device = device
        # of a low-rank engine: (rank,) norms of the columns of each last Q, sorted: about its singular values
        self.strengths: dict[str, Tensor] = {}

    @abstractmethod
    def reduce(
        self,
        gradients: Mapping[str, Tensor],
        ranks: Mapping[str, int],
        older: Mapping[str, Packed],
        iteration: int,
        communicator: Communicator,
        shards: Mapping[str, Cuts],
    ) -> Steps[Reduced]:
        """Replace each local gradient (rows x cols, fp32, scaled, older error added) by the group's sum, in place.

        Or return the sum as one of ``Reduced.products``. Over the group, sums and the errors that are returned are
        together exactly what was put in. ``ranks`` gives each matrix's rank and means nothing to other engines;
        ``older`` holds the errors that were added. Of a gradient with cuts in ``shards`` each rank needs only its own
        part; the others may be left as anything. What changes from step to step by plan follows ``iteration``, so that
        a step can be repeated. The host does not wait for results here: a gradient that is not finite on any rank is
        told in ``Reduced.finite``, and then its sum may be anything.
        """

    def state_dict(self) -> dict[str, Packed]:
        """What the next step depends on beside the errors. Its tensors are replaced, never changed: no copies."""
        return {}

    def load_state_dict(self, state: Mapping[str, Packed]) -> None:  # noqa: B027 - most engines keep nothing
        """Go on where ``state_dict`` was taken."""


def all_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Whether every entry is finite. Of sums that are the same on every rank the answer is, too."""
    return torch.stack([torch.isfinite(tensor).all() for tensor in tensors]).all()


def or_zeros(finite: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, or zeros in their place if they are not finite: factorisations refuse what is not."""
    return [torch.where(finite, tensor, 0.0) for tensor in tensors]
