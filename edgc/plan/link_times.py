"""What reductions take on this link in the three ways that a run with a volume has, and which way that speaks for."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

# With a volume a reduction takes at most this share of the time of the host's own: timings vary, and computing takes
# longer amid training than it did before.
WORTH_IT = 0.75
CLEARLY_FASTER = 0.9  # of the time of low rank, which rounding may take to be used instead: it sends more bytes


def worth_rounding(rounded: float, low_rank: float, host: float) -> bool:
    """Whether rounding all gradients takes clearly less time than low rank and than the host's own sum.

    All in seconds; ``low_rank`` is infinite where no rank is worth its time.
    """
    return rounded <= WORTH_IT * host and rounded <= CLEARLY_FASTER * low_rank


@dataclass(frozen=True)
class Timing:
    """``seconds`` that the reductions of a step take; their ``bytes_sent``, over those of an all-reduce in fp32."""

    seconds: float
    bytes_sent: float


@dataclass(frozen=True)
class LinkTimes:
    """Of the slowest stage's reductions: by the host, with every gradient rounded, and in low rank at a volume."""

    host: Timing
    rounded: Timing
    low_rank: Timing

    @property
    def low_rank_pays(self) -> bool:
        """Whether low rank takes clearly less time than the host's own sum."""
        return self.low_rank.seconds <= WORTH_IT * self.host.seconds

    @property
    def rounding_pays(self) -> bool:
        """Whether rounding does, and also clearly less than low rank where that pays."""
        low_rank = self.low_rank.seconds if self.low_rank_pays else math.inf
        return worth_rounding(self.rounded.seconds, low_rank, self.host.seconds)

    @property
    def low_rank_is_faster(self) -> bool:
        """Whether low rank takes clearly less time than rounding."""
        return self.low_rank.seconds <= CLEARLY_FASTER * self.rounded.seconds

    def slower(self, used: Timing, seconds: float) -> "LinkTimes":
        """The same on a link on which the way in use takes so many seconds more: each byte takes longer."""
        each = seconds / used.bytes_sent
        ways = self.host, self.rounded, self.low_rank
        return LinkTimes(*(replace(one, seconds=one.seconds + each * one.bytes_sent) for one in ways))

    def to_list(self) -> list[list[float]]:
        """Plain numbers."""
        return [[one.seconds, one.bytes_sent] for one in (self.host, self.rounded, self.low_rank)]

    @classmethod
    def from_list(cls, saved: Sequence[Sequence[float]]) -> "LinkTimes":
        """What ``to_list`` was made from."""
        return cls(*(Timing(*one) for one in saved))
