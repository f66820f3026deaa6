"""The reduction of one group of gradients: sample, compress what the plan says, send the rest dense."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from edgc.allocation import Allocation, uniform_ranks
from edgc.collectives import Communicator, Work
from edgc.config import EDGCConfig
from edgc.engines import ENGINES
from edgc.entropy import ESTIMATORS, GradientSampler


@dataclass
class Measurements:
    """What a reducer saw since the last ``take``: one entry a measured iteration."""

    entropy: list[float] = field(default_factory=list)
    residual: list[float] = field(default_factory=list)

    def take(self) -> "Measurements":
        """The entries so far; start anew."""
        taken = Measurements(self.entropy, self.residual)
        self.entropy, self.residual = [], []
        return taken


class GradientReducer:
    """Sums named gradients over a process group under a stage rank that a controller sets.

    Args:
        allocation: which parameters may be compressed, and which travel dense.
        config: the run's settings.
        communicator: the data-parallel process group.
        device: where the gradients live.
    """

    def __init__(self, allocation: Allocation, config: EDGCConfig, communicator: Communicator, device: torch.device):
        self.allocation = allocation
        self.config = config
        self.communicator = communicator
        self.sampler = GradientSampler(
            iteration_rate=config.iteration_sampling_rate,
            gradient_rate=config.gradient_sampling_rate,
            seed=config.seed,
        )
        self.estimate = ESTIMATORS[config.entropy_estimator]
        # The dense engine has nothing to compress, but its entropy is still wanted.
        self.engine = ENGINES[config.engine](allocation.matrices, config, device) if config.engine in ENGINES else None
        self.measurements = Measurements()
        self.ranks: dict[str, int] = {}

    def set_rank(self, rank: int | None) -> None:
        """Use this rank from the next reduction on; None: dense."""
        self.ranks = (
            {}
            if rank is None or self.engine is None
            else uniform_ranks(self.allocation.matrices, rank, self.config.min_saving)
        )

    @property
    def compressing(self) -> bool:
        """Whether the next reduction compresses anything."""
        return bool(self.ranks)

    def measure(self, gradients: Mapping[str, Tensor], iteration: int) -> None:
        """On a measured iteration, estimate the entropy of the local, accumulated, uncompressed gradient (GDS)."""
        if not self.allocation.matrices or not self.sampler.measures(iteration):
            return
        sample = [
            self.sampler.sample(matrix.name, gradients[matrix.name], iteration) for matrix in self.allocation.matrices
        ]
        self.measurements.entropy.append(self.estimate(torch.cat(sample)))

    @property
    def owes(self) -> bool:
        """Whether a matrix that will travel dense has error feedback left: the next reduction must run here."""
        return self.engine is not None and any(name not in self.ranks for name in self.engine.owing())

    def _flush(self, gradients: Mapping[str, Tensor]) -> None:
        """Add what is owed to every matrix that is about to travel dense."""
        if self.engine is not None:
            for name in self.engine.owing():
                if name not in self.ranks:
                    self.engine.flush(name, _matrix(gradients[name], self.engine.matrices[name].rows))

    def reduce(self, gradients: Mapping[str, Tensor], iteration: int) -> Iterator[Work]:
        """Replace every local gradient by the sum over the group, in place; a generator as in ``Engine.reduce``.

        ``gradients``: contiguous views, one for each parameter of the allocation, already scaled.
        """
        self._flush(gradients)
        dense = [gradient for name, gradient in gradients.items() if name not in self.ranks]
        dense_work = self.communicator.all_reduce_packed(dense) if dense else None
        if self.engine is not None and self.ranks:
            compressed = {name: _matrix(gradients[name], self.engine.matrices[name].rows) for name in self.ranks}
            yield from self.engine.reduce(compressed, self.ranks, self.communicator)
            if self.sampler.measures(iteration):
                ratio = self.engine.residual_ratio()
                if math.isfinite(ratio):
                    self.measurements.residual.append(ratio)
        if dense_work is not None:
            yield dense_work


def _matrix(gradient: Tensor, rows: int) -> Tensor:
    # view, not reshape: the result has to be written back into the bucket
    return gradient.view(rows, -1)


def run(reduction: Iterator[Work]) -> None:
    """Run a reduction to its end, waiting on each collective in turn."""
    for work in reduction:
        work.wait()
