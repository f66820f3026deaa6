"""The interface between a gradient reducer and an engine."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edgc.collectives import Communicator, Steps
from edgc.config import EDGCConfig
from edgc.error_feedback import ErrorFeedback


@dataclass(frozen=True)
class MatrixSpec:
    """A gradient seen as a matrix: the parameter's name and rows x cols (1 x elements for a vector)."""

    name: str
    rows: int
    cols: int


class Engine(ABC):
    """Sums a set of gradients over a process group with fewer bytes than an all-reduce takes.

    ``low_rank`` tells what it works on: matrices at a rank that the controller sets, or any parameter.
    """

    low_rank: bool

    def __init__(self, matrices: Sequence[MatrixSpec], config: EDGCConfig, device: torch.device):
        self.matrices = {matrix.name: matrix for matrix in matrices}
        self.config = config
        self.device = device
        # of a low-rank engine: (rank,) singular values of each matrix's last sum, the largest first
        self.strengths: dict[str, Tensor] = {}

    @abstractmethod
    def reduce(
        self,
        gradients: Mapping[str, Tensor],
        ranks: Mapping[str, int],
        feedback: ErrorFeedback,
        communicator: Communicator,
    ) -> Steps[None]:
        """Replace each local gradient (rows x cols, fp32, scaled, older error added) by the group's sum, in place.

        What the sum does not hold of a gradient goes to ``feedback``: over the group, sums and errors together are
        exactly what was put in. ``ranks`` gives each matrix's rank and means nothing to other engines. A gradient that
        is not finite on any rank comes out as NaN on every rank, with ``feedback`` and the engine's state unchanged.
        """


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether every entry is finite. Called on sums, which are the same on every rank, so the answer is too."""
    return bool(torch.stack([torch.isfinite(tensor).all() for tensor in tensors]).all())


def spoil(gradients: Mapping[str, Tensor]) -> None:
    """Make a failed reduction visible."""
    for gradient in gradients.values():
        gradient.fill_(torch.nan)
