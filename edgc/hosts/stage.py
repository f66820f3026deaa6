"""What one process reduces under one rank of the plan: its reducers, and what they send, take and see."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from edgc.comm.collectives import Traffic
from edgc.compress.reducer import GradientReducer
from edgc.hosts.units import Units
from edgc.observe.moments import mean_of_finite
from edgc.observe.timing import Spans
from edgc.observe.window import StageWindow, by_layer_kind, median_or_nan
from edgc.plan.rank_plan import RankPlan
from edgc.plan.stages import StageKey


class ByteCounts(NamedTuple):
    """Bytes so far: of gradients, in the host's own way, and in an all-reduce in fp32; of updated weights, and in the
    host's way.
    """

    sent: float
    dense: float
    fp32: float
    weights: float
    weights_dense: float


class Stage:
    """The reducers of one process that share a rank plan.

    Args:
        key: its place in the plan.
        device: of its gradients.
        dense_bytes_per_step: what the host's own way sends.
        fp32_bytes_per_step: what an all-reduce in fp32 in its place would send.
    """

    def __init__(self, key: StageKey, device: torch.device, dense_bytes_per_step: float, fp32_bytes_per_step: float):
        self.key = key
        self.device = device
        self.traffic = Traffic()  # of gradients
        self.weights, self.weights_dense = Traffic(), Traffic()  # of updated weights, and the host's own way
        self.spans = Spans(device)
        self.dense_bytes_per_step, self.fp32_bytes_per_step = dense_bytes_per_step, fp32_bytes_per_step
        self.dense_bytes = self.fp32_bytes = 0.0
        self._window_start = (0.0, 0.0)
        self.units = Units([])  # those of its parameters, once they are known

    @property
    def reducers(self) -> list[GradientReducer]:
        """In the order in which gradients come, the same on every process of the group."""
        return [unit.reducer for unit in self.units]

    def set_rank(self, active: Sequence[int | None], place: int, plan: RankPlan, by_host: bool = False) -> None:
        """Take the rank at this place among those that are in use, and what the plan says there of parameters.

        ``by_host``: where that is None, gradients are not even rounded.
        """
        matrix_ranks = plan.matrix_ranks[place] if plan.matrix_ranks else None
        formats = plan.formats[place] if plan.formats else None
        for reducer in self.reducers:
            reducer.set_rank(active[place], matrix_ranks, formats, by_host)

    def end_step(self) -> None:
        """Once a step, when all its reductions have ended."""
        self.dense_bytes += self.dense_bytes_per_step
        self.fp32_bytes += self.fp32_bytes_per_step
        self.spans.close()

    def take_window(self, micro_backward_seconds: float) -> StageWindow:
        """What was seen since the last call."""
        measurements = [reducer.observer.take() for reducer in self.reducers]
        sent, dense = self.traffic.bytes, self.dense_bytes
        window = StageWindow(
            stage=self.key,
            entropy=mean_of_finite([value for m in measurements for value in m.entropy]),
            residual=mean_of_finite([value for m in measurements for value in m.residual]),
            reduce_seconds=median_or_nan(self.spans.take_seconds()),
            micro_backward_seconds=micro_backward_seconds,
            dp_bytes=sent - self._window_start[0],
            dp_bytes_dense=dense - self._window_start[1],
            state_bytes=sum(reducer.state.bytes() for reducer in self.reducers),
            spikes=sum(float(m.spikes) for m in measurements),
            largest_spike=max((float(m.largest_spike) for m in measurements), default=0.0),
            energies={name: values for m in measurements for name, values in m.mean_energies().items()},
            statistics=by_layer_kind([step for m in measurements for step in m.statistics]),
            fidelity={name: seen for m in measurements for name, seen in m.total_fidelity().items()},
            row_shares={name: shares for m in measurements for name, shares in m.mean_row_shares().items()},
        )
        self._window_start = (sent, dense)
        return window

    def byte_counts(self) -> ByteCounts:
        weights = self.weights.bytes, self.weights_dense.bytes
        return ByteCounts(self.traffic.bytes, self.dense_bytes, self.fp32_bytes, *weights)

    def restore_bytes(self, counts: ByteCounts) -> None:
        """Go on counting from ``byte_counts`` in a checkpoint, the mean over the stage's processes."""
        self.traffic.resume(counts.sent)
        self.weights.resume(counts.weights)
        self.weights_dense.resume(counts.weights_dense)
        self.dense_bytes, self.fp32_bytes = counts.dense, counts.fp32
        self._window_start = (counts.sent, counts.dense)
