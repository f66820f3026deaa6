"""What gathering updated weights takes, in the two ways that the distributed optimizer has."""

from dataclasses import dataclass

from edgc.plan.times.link_times import MAX_TIME_RATIO


@dataclass(frozen=True)
class GatherTimes:
    """Seconds that the weights of one bucket take: ``whole`` in the host's all-gather, ``rounded`` as differences."""

    whole: float
    rounded: float

    @property
    def rounding_pays(self) -> bool:
        """Whether rounding takes clearly less time: in training it shares the processor and the link."""
        return self.rounded <= MAX_TIME_RATIO * self.whole
