"""The convex hull of options. How a budget is spent along hulls: ``test_budget.py``."""

import random
from itertools import pairwise

from edgc.plan.by_volume.choices import SendLowRank
from edgc.plan.by_volume.hull import Option, lower_hull


def test_no_option_lies_below_the_hull() -> None:
    draw = random.Random(1)
    for _ in range(20):
        every = [Option(SendLowRank(rank), draw.uniform(1, 9), draw.uniform(0, 1)) for rank in range(12)]
        hull = lower_hull(every)
        assert set(hull) <= set(every)
        assert hull[0].size == min(one.size for one in every) and hull[-1].noise == min(one.noise for one in every)
        for lower, upper in pairwise(hull):
            assert lower.size < upper.size and lower.noise > upper.noise
            for one in every:
                if lower.size <= one.size <= upper.size:
                    share = (one.size - lower.size) / (upper.size - lower.size)
                    assert one.noise >= lower.noise + share * (upper.noise - lower.noise) - 1e-12


def test_the_hull_has_no_option_between_two_on_a_line_nor_two_of_one_size_or_noise() -> None:
    on_a_line = [Option(SendLowRank(size), float(size), 3.0 - size) for size in (1, 2, 3)]
    assert lower_hull(reversed(on_a_line)) == [on_a_line[0], on_a_line[2]]
    for worse in (Option(SendLowRank(8), 1.0, 3.0), Option(SendLowRank(8), 2.0, 2.0)):
        assert lower_hull([worse, on_a_line[0]]) == [on_a_line[0]]
