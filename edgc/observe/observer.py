"""Measures the gradients of one reducer, each iteration once."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from edgc.config import EDGCConfig
from edgc.observe.entropy import BufferedEntropy, StreamingGaussianEntropy, entropy_accumulator
from edgc.observe.measurements import Measurements, row_shares
from edgc.observe.moments import GradientStatistics
from edgc.observe.sampler import GradientSampler
from edgc.plan.by_volume.choices import ROW_SHARES
from edgc.specs import MatrixSpec


class GradientObserver:
    """Measures gradients in some iterations, each iteration once.

    Args:
        matrices: whose entropy is wanted.
        config: the run's settings.
    """

    def __init__(self, matrices: Sequence[MatrixSpec], config: EDGCConfig):
        self.matrices = matrices
        self.study = config.study
        self.sampler = GradientSampler.of(config)
        self.measurements = Measurements()
        self._iteration: int | None = None
        self._before = self.measurements  # those before ``_iteration``
        self._skipped: int | None = None  # an iteration whose measurements a window has already taken
        # of the gradients that have come in this iteration
        self._entropy: StreamingGaussianEntropy | BufferedEntropy | None = None
        self._awaited: set[str] = set()  # the matrices whose gradients have not

    def begin(self, iteration: int) -> None:
        """Keep what ``roll_back`` needs, before the iteration is measured."""
        self._entropy = None
        if iteration != self._iteration:
            self._iteration, self._before = iteration, self.measurements.copy()

    def measures(self, iteration: int) -> bool:
        """Whether this iteration is a measured one."""
        return self.sampler.measures(iteration) and iteration != self._skipped

    def measure(self, gradients: Mapping[str, Tensor], iteration: int, loss_scale: Tensor | None = None) -> None:
        """Estimate, in a measured iteration, the entropy of the local, accumulated, uncompressed gradient (GDS).

        ``gradients`` hold ``loss_scale`` times the gradient. They may come in several calls: the entropy is that of all
        matrices, taken together.
        """
        if not self.measures(iteration):
            return

        def sample(name: str) -> Tensor:
            entries = self.sampler.sample(name, gradients[name], iteration)
            # in fp16 small entries would become 0
            return entries if loss_scale is None else entries.float() / loss_scale

        if self.study.statistics:
            samples = {name: sample(name) for name in gradients}
            self.measurements.statistics.append(
                {name: GradientStatistics.of(part) for name, part in samples.items() if len(part) > 1}
            )
        come = [matrix.name for matrix in self.matrices if matrix.name in gradients]
        if not come:
            return
        if self._entropy is None:
            self._entropy = entropy_accumulator(self.study.entropy_estimator)
            self._awaited = {one.name for one in self.matrices}
        for name in come:
            self._entropy.add(sample(name))
            self._awaited.remove(name)
        if not self._awaited:
            self.measurements.entropy.append(self._entropy.entropy() if self._entropy.entries > 1 else math.nan)
            self._entropy = None

    def add_spikes(self, iteration: int, excess: Tensor, limit: float, finite: Tensor) -> None:
        """Count the spikes of an iteration: see ``Measurements.add_spikes``."""
        if iteration != self._skipped:
            self.measurements.add_spikes(excess, limit, finite)

    def add_unsent(self, share: Tensor, energies: dict[str, Tensor] | None, finite: Tensor) -> None:
        """Note, after the reduction of a measured iteration, the norm of its errors over that of what was to be sent.

        ``energies``: squared column norms of Q by matrix, where the engine has a rank.
        """
        self.measurements.residual.append(torch.where(finite, share, torch.nan))
        if energies is not None:
            masked = {name: torch.where(finite, own, torch.nan) for name, own in energies.items()}
            self.measurements.energies.append(masked)

    def add_fidelity(self, values: dict[str, Tensor]) -> None:
        """Note, after the reduction of a measured iteration, what ``FidelitySampler.compare`` gives."""
        self.measurements.fidelity.append(values)

    def add_row_shares(self, squares: Mapping[str, Tensor]) -> None:
        """Note, in a measured iteration of a warm-up, squared norms of the rows of gradients, by name."""
        self.measurements.row_shares.append({name: row_shares(own, ROW_SHARES) for name, own in squares.items()})

    def take(self) -> Measurements:
        """The measurements so far; a window begins."""
        taken, self.measurements = self.measurements, Measurements(windows=self.measurements.windows + 1)
        return taken

    def roll_back(self, iteration: int) -> None:
        """Forget what this iteration has shown."""
        if iteration != self._iteration:
            return
        if self.measurements.windows == self._before.windows:
            self.measurements = self._before.copy()
        else:
            self._skipped = iteration

    def before(self, iteration: int) -> Measurements:
        """The measurements without those of this iteration, also where a window has taken them since."""
        return self._before if iteration == self._iteration else self.measurements
