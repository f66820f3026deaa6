"""What reductions take on this link in the three ways that a run with a volume has, and which way that speaks for."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgc.plan.by_volume.choices import ROUNDED, bits_of

# With a volume a reduction takes at most this share of the time of the host's own: timings vary, and computing takes
# longer amid training than it did before.
MAX_TIME_RATIO = 0.75
CLEARLY_FASTER = 0.9  # of the time of low rank, which rounding may take to be used instead: it sends more bytes


def worth_rounding(rounded: float, low_rank: float, host: float) -> bool:
    """Whether rounding all gradients takes clearly less time than low rank and than the host's own sum.

    All in seconds; ``low_rank`` is infinite where no rank is worth its time.
    """
    return rounded <= MAX_TIME_RATIO * host and rounded <= CLEARLY_FASTER * low_rank


def may_replace_low_rank(volume: float, rounded_share: float) -> bool:
    """Whether all gradients may be rounded although low rank pays. A volume that allows that anyway has finer formats
    to choose from beside low rank. ``rounded_share``: as of a ``Run``.
    """
    return rounded_share * bits_of(ROUNDED) / 8 * volume >= 4


@dataclass(frozen=True)
class ReductionTime:
    """``seconds`` that the reductions of a step take; their ``bytes_sent``, over those of an all-reduce in fp32."""

    seconds: float
    bytes_sent: float


@dataclass(frozen=True)
class LinkTimes:
    """Times of the slowest stage's reductions: by the host, with every gradient rounded, and in low rank at a volume.

    ``may_replace``: rounding may be used although low rank pays. ``slower``: seconds that an all-reduce in fp32 takes
    longer than when the three were timed. Each way takes longer by its share of the bytes.
    """

    host: ReductionTime
    rounded: ReductionTime
    low_rank: ReductionTime
    may_replace: bool = True
    slower: float = 0.0

    def seconds(self, way: ReductionTime) -> float:
        """The seconds that one of the three takes now."""
        return way.seconds + self.slower * way.bytes_sent

    @property
    def low_rank_pays(self) -> bool:
        """Whether low rank takes clearly less time than the host's own sum."""
        return self.seconds(self.low_rank) <= MAX_TIME_RATIO * self.seconds(self.host)

    @property
    def rounding_pays(self) -> bool:
        """Whether rounding does, and also clearly less than low rank where that pays."""
        if self.low_rank_pays and not self.may_replace:
            return False
        low_rank = self.seconds(self.low_rank) if self.low_rank_pays else math.inf
        return worth_rounding(self.seconds(self.rounded), low_rank, self.seconds(self.host))

    @property
    def low_rank_is_faster(self) -> bool:
        """Whether low rank takes clearly less time than rounding."""
        return self.seconds(self.low_rank) <= CLEARLY_FASTER * self.seconds(self.rounded)

    def changed(self, used: ReductionTime, seconds: float) -> "LinkTimes":
        """The same after the way in use has come to take so many seconds more, or fewer. The link is never taken for a
        faster one than it was when it was timed.
        """
        return replace(self, slower=max(self.slower + seconds / used.bytes_sent, 0.0))

    def to_list(self) -> list[Any]:
        """Plain numbers."""
        ways = (self.host, self.rounded, self.low_rank)
        return [*([one.seconds, one.bytes_sent] for one in ways), self.may_replace, self.slower]

    @classmethod
    def from_list(cls, saved: Sequence[Any]) -> "LinkTimes":
        """What ``to_list`` was made from."""
        host, rounded, low_rank, may_replace, slower = saved
        return cls(ReductionTime(*host), ReductionTime(*rounded), ReductionTime(*low_rank), may_replace, slower)
