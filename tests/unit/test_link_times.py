"""Which way of reducing takes least time on a link, and what that becomes on a slower one."""

import math
from dataclasses import replace

import pytest

from edgc.plan.link_times import LinkTimes, Timing, worth_rounding

# of a link on which an all-reduce in fp32 takes 0.8 s, and computing low rank 0.2 s
TIMES = LinkTimes(Timing(0.8, 1.0), Timing(0.12, 1 / 8), Timing(0.24, 1 / 20))


@pytest.mark.parametrize(
    ("rounded", "low_rank", "host", "pays"),
    [
        (0.89, 1.0, 2.0, True),
        (0.91, 1.0, 2.0, False),
        (0.89, 1.0, 1.1, False),
        (0.89, math.inf, 1.3, True),
        (math.inf, 1.0, 2.0, False),
    ],
)
def test_rounding_has_to_be_clearly_faster_than_both(rounded: float, low_rank: float, host: float, pays: bool) -> None:
    assert worth_rounding(rounded, low_rank, host) == pays
    times = LinkTimes(Timing(host, 1.0), Timing(rounded, 1 / 8), Timing(min(low_rank, 100.0), 1 / 20))
    assert times.rounding_pays == pays, "low rank that takes 100 s is not worth its time"


def test_on_a_slower_link_each_way_takes_longer_by_its_bytes() -> None:
    slower = TIMES.slower(TIMES.rounded, 0.2)
    assert [way.seconds for way in (slower.host, slower.rounded, slower.low_rank)] == pytest.approx([2.4, 0.32, 0.32])
    assert slower.slower(slower.low_rank, 0.08).host.seconds == pytest.approx(4.0)
    assert TIMES.slower(TIMES.host, 1.6).rounded.seconds == pytest.approx(slower.rounded.seconds)


def test_a_slow_link_speaks_for_low_rank() -> None:
    assert TIMES.rounding_pays and not TIMES.low_rank_is_faster
    slower = TIMES.slower(TIMES.host, 2.4)
    assert not slower.rounding_pays and slower.low_rank_is_faster
    assert not replace(slower, low_rank=Timing(1.0, 1 / 20)).low_rank_is_faster


def test_times_come_back_from_a_checkpoint() -> None:
    assert LinkTimes.from_list(TIMES.to_list()) == TIMES
