"""A training run as its host describes it."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run as its host describes it; the same on every process.

    ``replicas``: how many processes hold the same layers, and sum their gradients; ``expert_replicas``: the same
    experts. ``value_bytes``: of one value in the host's gradient buffers. ``scatters``: the host's own sum is a
    reduce-scatter, and each process needs its shard alone. ``overlapped``: reductions run beside the backward pass.
    ``repeatable``: the host may skip a step, or run it again, after its reduction; reducers then keep their state of
    before the step. ``reruns``: it may run it again. ``learning_rate``: by iteration, in any unit, where the host
    knows it.
    """

    iterations: int
    replicas: int
    expert_replicas: int = 1
    pipeline_stages: int = 1
    value_bytes: int = 4
    scatters: bool = False
    overlapped: bool = False
    repeatable: bool = False
    reruns: bool = False
    learning_rate: Callable[[int], float] | None = None

    @property
    def host_bytes_ratio(self) -> float:
        """The share of an all-reduce's bytes that the host's own sum sends."""
        return 0.5 if self.scatters else 1.0

    @property
    def host_value_bytes(self) -> float:
        """The bytes of one value in the host's own sum."""
        return self.value_bytes * self.host_bytes_ratio

    @property
    def rounded_share(self) -> float:
        """The share of an all-reduce's bytes that a sum of rounded values sends: a reduce-scatter also sums these.

        Sums in 16 bits are known to all processes, so that what they cut off can be fed back.
        """
        return self.host_bytes_ratio if self.value_bytes == 4 else 1.0

    def uncompressed_value_bytes(self, rounded_bytes: float | None) -> float:
        """The bytes of one value in a sum without low rank. ``rounded_bytes``: of the value in the format in which it
        is rounded; None where it is not.
        """
        return self.host_value_bytes if rounded_bytes is None else self.rounded_share * rounded_bytes

    @property
    def alone(self) -> bool:
        """Whether no two processes hold the same layers, so that only messages between stages can be compressed."""
        return self.replicas == 1
