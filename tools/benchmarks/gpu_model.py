"""A model of the time that counted operations take on a named GPU. It computes times; it measures none."""

from collections.abc import Iterable
from dataclasses import dataclass

from tools.benchmarks.step_counts import Operation, StepCounts
from tools.shared.gpus import GPU

# Of the CPU for each launch of EDGC: 33 to 48 µs on a virtual machine with an H100, in steps too short for the GPU to
# be busy (docs/gpu.md). Taken for other machines as well.
HOST_SECONDS = 40e-6
# Assumptions. Kernels reach these shares of the memory's speed and of the arithmetic's. With them the device's time of
# a stage of GPT2-12.1B comes close to what was measured on an H100 at ranks 64 and 128.
LEAST_SECONDS = 2.5e-6
MEMORY_SHARE, FLOPS_SHARE = 0.75, 0.6
COLUMN_SECONDS = 2e-6  # of a batched factorisation, each of whose columns needs the one before
MESSAGE_SECONDS = 40e-6  # latency of a collective among nodes


@dataclass(frozen=True)
class StepTime:
    """Of one step, alone: nothing of it is hidden behind the backward pass. ``host`` and ``device`` overlap."""

    host: float
    device: float
    latency: float
    wire: float

    @property
    def compute(self) -> float:
        """Compressing and decompressing."""
        return max(self.host, self.device)

    @property
    def seconds(self) -> float:
        return self.compute + self.latency + self.wire


def step_time(counts: StepCounts, gpu: GPU, link_gbps: float) -> StepTime:
    """``link_gbps``: Gbit/s of one process to the others."""
    return StepTime(
        host=counts.launches * HOST_SECONDS,
        device=device_seconds(counts.listed, gpu),
        latency=counts.collectives * MESSAGE_SECONDS,
        wire=counts.sent * 8 / (link_gbps * 1e9),
    )


def device_seconds(operations: Iterable[Operation], gpu: GPU) -> float:
    """Of these operations, one after another."""
    total = 0.0
    for one in operations:
        peak = gpu.fp64 if one.double else gpu.fp32
        work = max(one.nbytes / (MEMORY_SHARE * gpu.memory), one.flops / (FLOPS_SHARE * peak))
        total += max(work, one.launches * LEAST_SECONDS, one.columns * COLUMN_SECONDS)
    return total
