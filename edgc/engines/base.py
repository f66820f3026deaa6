"""The interface between a gradient reducer and an engine."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edgc.collectives import Communicator, Work
from edgc.config import EDGCConfig


@dataclass(frozen=True)
class MatrixSpec:
    """A gradient matrix: the parameter's name and its shape seen as rows x cols."""

    name: str
    rows: int
    cols: int


class Engine(ABC):
    """Sums a set of gradient matrices over a process group with fewer bytes than an all-reduce takes.

    What an engine could not send stays in its own state (error feedback) and is added to the next gradient.
    """

    def __init__(self, matrices: Sequence[MatrixSpec], config: EDGCConfig, device: torch.device):
        self.matrices = {matrix.name: matrix for matrix in matrices}
        self.config = config
        self.device = device

    @abstractmethod
    def reduce(
        self, gradients: Mapping[str, Tensor], ranks: Mapping[str, int], communicator: Communicator
    ) -> Iterator[Work]:
        """Replace each local gradient (rows x cols, fp32, scaled) by the group's sum, in place.

        A generator that yields every collective it has started; the caller waits on it, at once or after doing
        something else, and resumes. When it is exhausted the gradients hold the result. So one code serves the
        synchronous, the overlapped and the side-stream use. ``ranks`` gives each matrix's rank. A gradient that is
        not finite on any rank comes out as NaN on every rank and leaves the engine's state as it was.
        """

    @abstractmethod
    def owing(self) -> tuple[str, ...]:
        """Names of the matrices with error feedback that has not been sent."""

    @abstractmethod
    def flush(self, name: str, gradient: Tensor) -> None:
        """Add what is owed to ``gradient``, which will travel exactly, and forget it."""

    @abstractmethod
    def residual_ratio(self) -> float:
        """Norm of what the last reduction left unsent over the norm of what it was to send, on this rank."""
