"""What gathering updated weights takes, in the two ways that the distributed optimizer has."""

from collections.abc import Iterable
from dataclasses import dataclass

from edgc.plan.times.comm_cost import LEAST_GAIN


@dataclass(frozen=True)
class GatherTimes:
    """Seconds that the weights of one bucket take: ``whole`` in the host's all-gather, ``rounded`` as differences."""

    whole: float
    rounded: float

    @classmethod
    def slowest(cls, found: Iterable["GatherTimes | None"]) -> "GatherTimes | None":
        """The longest times of all processes, each way by itself; None where no process has any."""
        known = [one for one in found if one is not None]
        return cls(max(one.whole for one in known), max(one.rounded for one in known)) if known else None

    @property
    def rounding_pays(self) -> bool:
        """Whether rounding takes clearly less time. Between steps it has the processor to itself, as it was timed."""
        return LEAST_GAIN * self.rounded <= self.whole
