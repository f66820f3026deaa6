"""Which way of reducing takes least time on a link, and what that becomes on a slower one."""

import math
from dataclasses import replace

import pytest

from edgc.plan.times.link_times import LinkTimes, ReductionTime, worth_rounding

# of a link on which an all-reduce in fp32 takes 0.8 s, and computing low rank 0.2 s
TIMES = LinkTimes(ReductionTime(0.8, 1.0), ReductionTime(0.12, 1 / 8), ReductionTime(0.24, 1 / 20))


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
    times = LinkTimes(
        ReductionTime(host, 1.0), ReductionTime(rounded, 1 / 8), ReductionTime(min(low_rank, 100.0), 1 / 20)
    )
    assert times.rounding_pays == pays, "low rank that takes 100 s is not worth its time"


def seconds(times: LinkTimes) -> list[float]:
    return [times.seconds(way) for way in (times.host, times.rounded, times.low_rank)]


def test_on_a_slower_link_each_way_takes_longer_by_its_bytes() -> None:
    slower = TIMES.changed(TIMES.rounded, 0.2)
    assert seconds(slower) == pytest.approx([2.4, 0.32, 0.32])
    assert seconds(slower.changed(slower.low_rank, 0.08)) == pytest.approx([4.0, 0.52, 0.40])
    assert seconds(TIMES.changed(TIMES.host, 1.6)) == pytest.approx(seconds(slower))


def test_a_link_that_becomes_slow_again_and_again_is_no_slower_each_time() -> None:
    times = TIMES
    for _ in range(5):
        times = times.changed(times.rounded, 0.2).changed(times.rounded, -0.2)
    assert seconds(times) == pytest.approx(seconds(TIMES))
    assert seconds(times.changed(times.low_rank, -1.0)) == pytest.approx(seconds(TIMES)), "nor faster than it was"


def test_a_slow_link_speaks_for_low_rank() -> None:
    assert TIMES.rounding_pays and not TIMES.low_rank_is_faster
    slower = TIMES.changed(TIMES.host, 2.4)
    assert not slower.rounding_pays and slower.low_rank_is_faster
    assert not replace(slower, low_rank=ReductionTime(1.0, 1 / 20)).low_rank_is_faster


def test_rounding_that_may_not_replace_low_rank_is_used_where_that_does_not_pay() -> None:
    finer = replace(TIMES, may_replace=False)
    assert finer.low_rank_pays and not finer.rounding_pays
    assert (
        not finer.changed(finer.low_rank, -0.01).rounding_pays and not finer.changed(finer.low_rank, 0.1).rounding_pays
    )
    assert replace(finer, low_rank=ReductionTime(0.7, 1 / 20)).rounding_pays


def test_times_come_back_from_a_checkpoint() -> None:
    times = replace(TIMES.changed(TIMES.host, 2.4), may_replace=False)
    assert LinkTimes.from_list(times.to_list()) == times
