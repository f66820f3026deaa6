"""The reduction of one group of gradients: sample, hand each to the engine that the plan says, feed errors back."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from edgc.allocation import Allocation, uniform_ranks
from edgc.collectives import Communicator, Steps, together
from edgc.config import DTYPES, EDGCConfig
from edgc.engines import ENGINES, Engine, Reduced, Rounding
from edgc.entropy import ESTIMATORS, GradientSampler
from edgc.equaliser import Equaliser
from edgc.error_feedback import ErrorFeedback
from edgc.statistics import GradientStatistics
from edgc.wire import wire


@dataclass
class Measurements:
    """What a reducer saw since the last ``take``: one entry a measured iteration."""

    entropy: list[float] = field(default_factory=list)
    residual: list[float] = field(default_factory=list)
    energies: list[dict[str, Tensor]] = field(default_factory=list)  # squared singular values by matrix
    statistics: list[dict[str, GradientStatistics]] = field(default_factory=list)  # by parameter, if asked for

    def take(self) -> "Measurements":
        """The entries so far; start anew."""
        taken = replace(self)
        self.entropy, self.residual, self.energies, self.statistics = [], [], [], []
        return taken

    def mean_energies(self) -> dict[str, list[float]]:
        """Mean over the measured iterations; of a matrix whose rank changed in between, over the last rank."""
        if not self.energies:
            return {}
        means = {}
        for name, last in self.energies[-1].items():
            alike = [seen[name] for seen in self.energies if name in seen and len(seen[name]) == len(last)]
            means[name] = torch.stack(alike).mean(dim=0).tolist()
        return means


class GradientReducer:
    """Sums named gradients over a process group under a stage rank that a controller sets.

    Args:
        allocation: which parameters the engine takes.
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
        self.feedback = ErrorFeedback(DTYPES[config.error_dtype], config.error_decay, config.error_average)
        self.equaliser = Equaliser()
        self.measurements = Measurements()
        self.ranks: dict[str, int] = {}
        self.specs = {matrix.name: matrix for matrix in allocation.matrices}
        self.specs.update((parameter.name, parameter.spec) for parameter, _ in allocation.rest)
        everything = list(self.specs.values())
        # The dense engine has nothing to compress, but its entropy is still wanted.
        self.engine = ENGINES[config.engine](allocation.matrices, config, device) if config.engine in ENGINES else None
        self.rest = Rounding(everything, config, device, wire(config.rest_wire))
        self.dense = Rounding(everything, config, device, wire(config.dense_wire))

    def set_rank(self, rank: int | None, matrix_ranks: Mapping[str, int] | None = None) -> None:
        """Use this rank from the next reduction on, any for an engine that has none; None: do not compress.

        ``matrix_ranks`` may hold the rank of each matrix of the stage.
        """
        if rank is None or self.engine is None:
            self.ranks = {}
        elif matrix_ranks is not None:
            self.ranks = {name: matrix_ranks[name] for name in self.engine.matrices if name in matrix_ranks}
        elif self.config.low_rank:
            self.ranks = uniform_ranks(self.allocation.matrices, rank, self.config.min_saving)
        else:
            self.ranks = dict.fromkeys(self.engine.matrices, rank)

    def measure(self, gradients: Mapping[str, Tensor], iteration: int) -> None:
        """On a measured iteration, estimate the entropy of the local, accumulated, uncompressed gradient (GDS)."""
        if not self.sampler.measures(iteration):
            return
        if self.config.statistics:
            samples = {name: self.sampler.sample(name, gradient, iteration) for name, gradient in gradients.items()}
            self.measurements.statistics.append(
                {name: GradientStatistics.of(part) for name, part in samples.items() if len(part) > 1}
            )
        if not self.allocation.matrices:
            return
        sample = [
            self.sampler.sample(matrix.name, gradients[matrix.name], iteration) for matrix in self.allocation.matrices
        ]
        self.measurements.entropy.append(self.estimate(torch.cat(sample)))

    @property
    def plain(self) -> bool:
        """Whether the next reduction is a plain sum in fp32 with no error to feed back: the host's own will do."""
        return not self.ranks and self.dense.wire.exact and not self.feedback.errors

    def reduce(self, gradients: Mapping[str, Tensor], iteration: int | None = None) -> Steps[None]:
        """Replace every local gradient by the sum over the group, in place.

        ``gradients``: contiguous views, one for each parameter of the allocation, already scaled. Where this
        ``iteration`` is a measured one, what was left unsent is recorded. If any gradient is not finite on any rank,
        all become NaN on all ranks, and no state changes: the host can skip the step, and nothing is lost.
        """
        # view, not reshape: the result has to be written back into the bucket
        matrices = {name: gradient.view(self.specs[name].rows, -1) for name, gradient in gradients.items()}
        for name, matrix in matrices.items():
            self.feedback.add_to(name, matrix)
        measured = iteration is not None and self.sampler.measures(iteration) and bool(self.ranks)
        to_send = sum(float(matrix.square().sum()) for matrix in matrices.values()) if measured else math.nan

        taken = {name: matrix for name, matrix in matrices.items() if name in self.ranks}
        left = {name: matrix for name, matrix in matrices.items() if name not in self.ranks}
        reductions = []
        if left:
            rounding = self.rest if self.ranks else self.dense
            reductions.append(self._reduce(rounding, left, equalise=self.config.equalise and not rounding.wire.exact))
        if self.engine is not None and taken:
            reductions.append(self._reduce(self.engine, taken, equalise=self.config.equalise))
        outcomes = yield from together(reductions)
        finite = [outcome for outcome in outcomes if outcome is not None]
        if len(finite) < len(outcomes):
            for matrix in matrices.values():
                matrix.fill_(math.nan)
            return
        errors: dict[str, Tensor] = {}
        for outcome in finite:
            outcome.advance()
            errors.update(outcome.errors)
        for name in matrices:
            if name in errors:
                self.feedback.store(name, errors[name])
            else:
                self.feedback.clear(name)
        if self.config.equalise:
            for name, matrix in matrices.items():
                if matrix.shape[0] > 1:
                    self.equaliser.update(name, matrix)
        if measured and 0 < to_send < math.inf:
            self.measurements.residual.append(math.sqrt(self.feedback.squared_norm() / to_send))
            if self.engine is not None and self.engine.low_rank:
                self.measurements.energies.append(
                    {name: self.engine.strengths[name].square() for name in self.ranks if name in self.engine.strengths}
                )

    def _reduce(self, engine: Engine, matrices: Mapping[str, Tensor], equalise: bool) -> Steps[Reduced | None]:
        """The engine's reduction, of matrices divided by their scales if asked for."""
        if not equalise:
            return (yield from engine.reduce(matrices, self.ranks, self.feedback.errors, self.communicator))
        scales = {name: self.equaliser.scale(name, matrix) for name, matrix in matrices.items()}
        for name, matrix in matrices.items():
            matrix.div_(scales[name])
        reduced = yield from engine.reduce(matrices, self.ranks, {}, self.communicator)
        if reduced is None:
            return None
        for name, matrix in matrices.items():
            matrix.mul_(scales[name])
        return replace(reduced, errors={name: error.mul_(scales[name]) for name, error in reduced.errors.items()})


def run[T](reduction: Steps[T]) -> T:
    """Run a reduction to its end, waiting on each collective in turn; its result."""
    while True:
        try:
            next(reduction).wait()
        except StopIteration as end:
            result: T = end.value
            return result
