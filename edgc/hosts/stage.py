"""What one process reduces under one rank of the plan: its reducers, and what they send, take and see."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from edgc.byte_counts import ByteCount, RunBytes
from edgc.comm.collectives import Traffic
from edgc.compress.reducer import GradientReducer
from edgc.hosts.units import Units
from edgc.observe.averages import mean_of_finite, median_or_nan
from edgc.observe.measurements import Measurements
from edgc.observe.window import StageWindow, by_layer_kind
from edgc.plan.rank_plan import RankPlan
from edgc.plan.stages import StageKey
from edgc.timing import Spans


class Stage:
    """The reducers of one process that share a rank plan.

    Args:
        key: its name in the plan.
        device: of its gradients.
        step_bytes: of the gradients of one step in the host's way and in fp32; ``sent`` is 0.
    """

    def __init__(self, key: StageKey, device: torch.device, step_bytes: ByteCount):
        self.key = key
        self.device = device
        self.traffic = Traffic()  # of gradients
        self.weights, self.weights_by_host = Traffic(), Traffic()  # of updated weights, and in the host's own way
        self.spans = Spans(device)
        self.step_bytes = step_bytes
        self._other_ways = self._window_start = self._unplanned = ByteCount()
        self._by_host = False  # whether the host sums in the step under way
        self._step_start = self._sent_by_host = 0.0  # bytes before this step, and in steps of the host's sums
        self.units = Units([])  # those of its parameters, once they are known

    @property
    def reducers(self) -> list[GradientReducer]:
        """The reducers in the order in which gradients come, the same on every process of the group."""
        return [unit.reducer for unit in self.units]

    def set_rank(self, active: Sequence[int | None], index: int, plan: RankPlan, by_host: bool = False) -> None:
        """Take the rank of this index among those that are in use, and what the plan says of the parameters.

        ``by_host``: where that rank is None, gradients are not even rounded.
        """
        self._by_host, planned = by_host, plan.of_stage(index)
        for reducer in self.reducers:
            reducer.set_rank(active[index], planned.matrix_ranks, planned.formats, by_host)

    def end_step(self) -> None:
        """End a step, when all its reductions have ended."""
        self._other_ways += self.step_bytes
        if self._by_host:
            self._sent_by_host += self.traffic.bytes - self._step_start
        self._step_start = self.traffic.bytes
        self.spans.close()

    def count_unplanned(self, own: ByteCount) -> None:
        """Count a sum that the host has sent in its own way beside the step's reductions: a part of ``step_bytes`` and
        of ``traffic`` that no plan changes.
        """
        self._unplanned += replace(own, sent=own.host)
        self._step_start += own.host

    def take_sent_by_host(self) -> float:
        """Bytes of gradients in steps of the host's sums since the last call."""
        taken, self._sent_by_host = self._sent_by_host, 0.0
        return taken

    def take_window(self, micro_backward_seconds: float) -> StageWindow:
        """What was seen since the last call."""
        measurements = [reducer.observer.take() for reducer in self.reducers]
        counted = self.gradient_bytes
        window = StageWindow(
            stage=self.key,
            entropy=self._entropy(measurements),
            residual=mean_of_finite([value for m in measurements for value in m.residual]),
            reduce_seconds=median_or_nan(self.spans.take_seconds()),
            micro_backward_seconds=micro_backward_seconds,
            bytes=counted - self._window_start,
            state_bytes=self.state_bytes(),
            spikes=sum(float(m.spikes) for m in measurements),
            largest_spike=max((float(m.largest_spike) for m in measurements), default=0.0),
            energies={name: values for m in measurements for name, values in m.mean_energies().items()},
            statistics=by_layer_kind([step for m in measurements for step in m.statistics]),
            fidelity={name: seen for m in measurements for name, seen in m.total_fidelity().items()},
            row_shares={name: shares for m in measurements for name, shares in m.mean_row_shares().items()},
        )
        self._window_start = counted
        return window

    def state_bytes(self) -> int:
        """Memory of what a process keeps from step to step."""
        return sum(reducer.state.bytes() for reducer in self.reducers)

    def _entropy(self, measurements: Sequence[Measurements]) -> float:
        """The mean over measured iterations, and over units by the number of their entries; NaN if there is none."""
        sizes = [sum(matrix.elements for matrix in reducer.observer.matrices) for reducer in self.reducers]
        means = [mean_of_finite(one.entropy) for one in measurements]
        known = [(mean, size) for mean, size in zip(means, sizes, strict=True) if math.isfinite(mean)]
        whole = sum(size for _, size in known)
        # a resumed run may have entropies of matrices that it no longer compresses
        return sum(mean * (size / whole) for mean, size in known) if whole else math.nan

    @property
    def gradient_bytes(self) -> ByteCount:
        """Bytes of gradients so far."""
        return replace(self._other_ways, sent=self.traffic.bytes)

    def byte_counts(self) -> RunBytes:
        """Bytes so far."""
        by_host = self.weights_by_host.bytes
        weights = ByteCount(self.weights.bytes, by_host, by_host)
        return RunBytes(self.gradient_bytes, weights, unplanned=self._unplanned)

    def restore_bytes(self, counts: RunBytes) -> None:
        """Go on counting from ``byte_counts`` in a checkpoint, the mean over the stage's processes."""
        self.traffic.resume(counts.gradients.sent)
        self._step_start = counts.gradients.sent
        self.weights.resume(counts.weights.sent)
        self.weights_by_host.resume(counts.weights.host)
        self._other_ways = self._window_start = counts.gradients
        self._unplanned = counts.unplanned
