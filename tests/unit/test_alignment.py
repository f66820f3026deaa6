"""Communication cost fits and the ranks that align pipeline stages."""

import json
import math

import numpy as np
import pytest

from edgc.plan.by_entropy.alignment import StageTimes, aligned_rank
from edgc.plan.observation import StageObservation
from edgc.plan.times.comm_cost import LinearCost, StageCost


def test_fit_is_exact_on_a_line() -> None:
    cost = LinearCost.fit([8, 32, 64], [0.003 + 2e-4 * rank for rank in (8, 32, 64)])
    assert cost.intercept == pytest.approx(0.003)
    assert cost.slope == pytest.approx(2e-4)


def test_fit_recovers_a_noisy_line() -> None:
    generator = np.random.default_rng(0)
    ranks = np.tile([4, 8, 16, 32, 64, 128], 200)
    seconds = 0.01 + 3e-4 * ranks + 0.002 * generator.standard_normal(ranks.size)
    cost = LinearCost.fit(ranks, seconds)
    # Four to five standard errors, which are 8e-5 s and 1.3e-6 s per rank.
    assert cost.intercept == pytest.approx(0.01, abs=4e-4)
    assert cost.slope == pytest.approx(3e-4, abs=6e-6)


def test_fit_is_the_least_squares_solution() -> None:
    ranks, seconds = [4.0, 8.0, 8.0, 64.0], [0.2, 0.25, 0.35, 0.9]
    slope, intercept = np.polyfit(ranks, seconds, 1)
    cost = LinearCost.fit(ranks, seconds)
    assert (cost.intercept, cost.slope) == pytest.approx((intercept, slope))


def test_negative_intercept_is_refitted_through_the_origin() -> None:
    ranks, seconds = np.array([8.0, 16.0, 32.0]), np.array([0.05, 0.15, 0.42])
    assert np.polyfit(ranks, seconds, 1)[1] < 0
    cost = LinearCost.fit(ranks, seconds)
    assert cost.intercept == 0
    assert cost.slope == pytest.approx(np.sum(ranks * seconds) / np.sum(ranks**2))


@pytest.mark.parametrize("seconds", [[0.3, 0.2, 0.1], [0.2, 0.2, 0.2], [0.0, 0.0, 0.0]])
def test_slope_hidden_by_noise_becomes_a_tiny_positive_one(seconds: list[float]) -> None:
    cost = LinearCost.fit([8, 16, 32], seconds)
    assert 0 < cost.slope <= 1e-12
    assert cost.intercept == pytest.approx(np.mean(seconds))
    assert aligned_rank(8, cost, 0.0, 64) == 8
    assert aligned_rank(8, cost, 0.01, 64) == 64


@pytest.mark.parametrize(
    "ranks, seconds, message",
    [
        ([], [], "2 distinct ranks"),
        ([8], [0.1], "2 distinct ranks"),
        ([8, 8], [0.1, 0.2], "2 distinct ranks"),
        ([8, 16], [0.1], "one length"),
        ([[8, 16]], [[0.1, 0.2]], "one length"),
        ([8, 16], [0.1, math.nan], "seconds = "),
        ([8, 16], [0.1, -0.2], "seconds = "),
        ([8, math.inf], [0.1, 0.2], "ranks = "),
        ([-8, 8], [0.1, 0.2], "ranks = "),
    ],
)
def test_fit_rejects_bad_measurements(ranks, seconds, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LinearCost.fit(ranks, seconds)


def test_seconds_and_rank_are_inverse_and_rank_is_clamped() -> None:
    cost = LinearCost(0.02, 0.001)
    assert cost.at(30) == pytest.approx(0.05)
    assert cost.rank(0.05) == pytest.approx(30)
    assert cost.rank(0.0205) == pytest.approx(0.5)
    assert cost.rank(0.01) == 0
    assert math.isnan(cost.rank(math.nan))


def test_congestion_scales_both_parts() -> None:
    assert LinearCost(0.02, 0.001).scaled(3).at(7) == pytest.approx(3 * LinearCost(0.02, 0.001).at(7))
    for factor in (0, -1, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"factor = {factor}"):
            LinearCost(0.02, 0.001).scaled(factor)


def ranks_of_stages(first: int, cost: LinearCost, backward: float, stages: int, r_max: int) -> list[int]:
    return [aligned_rank(first, cost, earlier * backward, r_max) for earlier in range(stages)]


def test_aligned_rank_by_hand() -> None:
    # Ten more ranks per stage, rounded down to multiples of four, up to r_max = 50, which is none.
    assert ranks_of_stages(16, LinearCost(0.5, 0.01), 0.1, 6, 50) == [16, 24, 36, 44, 50, 50]


def test_aligned_rank_does_not_lose_a_multiple_to_rounding() -> None:
    assert 0.3 / 0.1 * 4 < 12
    assert aligned_rank(4, LinearCost(0.0, 0.1 / 4), 0.3, 64) == 16


def test_first_rank_is_kept_and_is_the_floor() -> None:
    cost = LinearCost(0.0, 1.0)
    assert ranks_of_stages(18, cost, 1.0, 4, 64) == [18, 18, 20, 20]
    assert ranks_of_stages(18, cost, 0.0, 3, 64) == [18, 18, 18]
    assert ranks_of_stages(18, cost, 100.0, 3, 18) == [18, 18, 18]


def test_stages_stay_within_the_time_of_the_first_and_rise_with_the_stage() -> None:
    generator = np.random.default_rng(3)
    clipped = 0
    for _ in range(300):
        first, r_max = int(generator.integers(1, 64)), int(generator.integers(64, 256))
        cost = LinearCost(generator.random(), 10 ** generator.uniform(-5, -2))
        backward, stages = 10 ** generator.uniform(-4, -1), int(generator.integers(1, 9))
        ranks = ranks_of_stages(first, cost, backward, stages, r_max)
        assert ranks[0] == first
        assert ranks == sorted(ranks)
        for earlier, rank in enumerate(ranks):
            budget = cost.at(first) + earlier * backward
            assert first <= rank <= r_max
            assert cost.at(rank) <= budget * (1 + 1e-8)
            assert rank in (first, r_max) or rank % 4 == 0
            if rank < r_max:
                # The next multiple of four would be too slow, or lies beyond r_max.
                assert cost.at(rank + 4 - rank % 4) > budget * (1 - 1e-8) or rank + 4 - rank % 4 > r_max
            clipped += rank == r_max
    assert clipped > 100


@pytest.mark.parametrize(
    "first, slope, slack, r_max, message",
    [
        (0, 1.0, 1.0, 64, "first_rank = 0"),
        (65, 1.0, 1.0, 64, "r_max = 64"),
        (8, 1.0, -1.0, 64, "slack_seconds = -1.0"),
        (8, 1.0, math.nan, 64, "slack_seconds = nan"),
        (8, math.nan, 1.0, 64, "cost.slope = nan"),
        (8, 0.0, 1.0, 64, "cost.slope = 0.0"),
    ],
)
def test_aligned_rank_names_bad_input(first, slope, slack, r_max, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        aligned_rank(first, LinearCost(0.0, slope), slack, r_max)


def test_the_largest_rank_takes_no_longer_than_it_may() -> None:
    cost = LinearCost(0.02, 0.003)
    for host in np.linspace(0.02, 1.0, 97):
        rank = StageCost(cost, dense_seconds=9.0, host_seconds=9.0).largest_rank(host)
        assert rank % 4 == 0 and cost.at(rank) <= host * (1 + 1e-8) < cost.at(rank + 4) * (1 + 1e-7)
    assert StageCost(LinearCost(0.0, 0.1), 9.0, 9.0).largest_rank(0.4) == 4
    assert StageCost(LinearCost(0.0, 0.1), 9.0, 9.0).largest_rank(0.75 * (1.2 / 0.75)) == 12  # comes out below 1.2
    assert StageCost(cost, 9.0, 9.0).largest_rank(0.01) == 0


@pytest.mark.parametrize(("by_host", "rank", "predicted"), [(False, 5, 5.0), (False, None, 10.0), (True, 5, 20.0)])
def test_costs_are_scaled_by_what_the_reductions_of_that_kind_took(
    by_host: bool, rank: int | None, predicted: float
) -> None:
    cost = StageCost(LinearCost(0.0, 1.0), dense_seconds=10.0, host_seconds=20.0)
    times = StageTimes([cost], [None])
    times.correct([StageObservation(reduce_seconds=3 * predicted)], [rank], by_host)
    assert times.costs == [cost.scaled(3.0)]


def test_the_slowest_stage_sets_the_time_of_a_backward_pass() -> None:
    times = StageTimes([None] * 3, [None] * 3)
    times.observe([StageObservation(micro_backward_seconds=seconds) for seconds in (0.1, 0.3, math.nan)])
    assert times.micro_backward_seconds == 0.3
    times.observe([StageObservation()] * 3)
    assert times.micro_backward_seconds == 0.3, "nothing was measured"


@pytest.mark.parametrize(("before", "now", "kept"), [(False, False, 2.0), (True, False, 1.0), (False, True, 1.0)])
def test_costs_of_a_checkpoint_are_for_a_link_that_was_timed_then_and_now(before: bool, now: bool, kept: float) -> None:
    def cost(seconds: float) -> StageCost:
        return StageCost(LinearCost(0.0, seconds), seconds, seconds)

    saved = StageTimes([cost(2.0)], [cost(2.0)], computed=before)
    times = StageTimes([cost(1.0)], [cost(1.0)], computed=now)
    times.load_state_dict(saved.state_dict())
    assert times.costs == [cost(kept)] and times.message_costs == [cost(1.0)]


def test_a_later_stage_climbs_by_what_a_rank_costs_on_its_own_link() -> None:
    first, later = StageCost(LinearCost(0.1, 0.010), 2.0, 2.0), StageCost(LinearCost(0.1, 0.005), 2.0, 2.0)
    times = StageTimes([first, later], [None, None])
    times.observe([StageObservation(micro_backward_seconds=0.2)] * 2)
    assert times.aligned(1, 16, 128) == 16 + 40  # 0.2 s at 0.005 s a rank
    again = StageTimes([first, later], [None, None])
    assert not again.can_align(1)
    again.load_state_dict(json.loads(json.dumps(times.state_dict())))
    assert again.can_align(1) and again.aligned(1, 16, 128) == 56
