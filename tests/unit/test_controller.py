"""The window state machine, driven by recorded entropy histories."""

import json
import math
import random
from dataclasses import replace
from typing import Any

import pytest

from edgc.config import ConfigError, EDGCConfig
from edgc.plan.allocation import uniform_ranks
from edgc.plan.by_entropy.rank_model import StageRankModel
from edgc.plan.controller import ControlledStage, Controller
from edgc.plan.observation import StageObservation, WindowObservation
from edgc.plan.rank_plan import RankPlan, Summing
from edgc.plan.ranks import resolve_ranks, smallest_rank, static_ranks
from edgc.plan.times.comm_cost import LinearCost, StageCost
from edgc.plan.times.trials import Trials
from edgc.specs import MatrixSpec

MATRICES = (MatrixSpec("a", 1024, 1024), MatrixSpec("b", 4096, 1024))
MODEL = StageRankModel(((1024, 1024), (4096, 1024)))
COST = StageCost(LinearCost(0.0, 0.001), 1.0, 1.0)
STAGE = ControlledStage(MATRICES, COST)
WINDOW = 100
BASE = EDGCConfig.of(window=WINDOW, rmin=16, rmax=64, align=False, entropy_stability=0.25)


def controller(stages: int = 1, cost: StageCost = COST, iterations: int = 10_000, **settings: Any) -> Controller:
    return Controller(BASE.replace(**settings), iterations, [ControlledStage(MATRICES, cost)] * stages)


def play(c: Controller, history: list[float], backward: float = math.nan) -> list[tuple[int | None, ...]]:
    """Feed one entropy a window to every stage; the ranks decided after each window."""
    ranks = []
    for window, entropy in enumerate(history, start=len(c.entropy.history) + 1):
        seen = StageObservation(entropy=entropy, micro_backward_seconds=backward)
        c.observe(WindowObservation([seen] * len(c.matrices)))
        ranks.append(c.decide(window * WINDOW).ranks)
    return ranks


def first_stage(ranks: list[tuple[int | None, ...]]) -> list[int | None]:
    return [stage[0] for stage in ranks]


WARM = [-5.0] * 10  # ten flat windows of 100 in a run of 10,000: the warm-up's minimum


def test_warm_up_lasts_for_its_fraction_of_the_run() -> None:
    assert first_stage(play(controller(), WARM)) == [None] * 9 + [64]
    assert first_stage(play(controller(warmup_fraction=0.0), WARM[:3])) == [None, 64, 64]


def test_ranks_by_entropy_are_rmax_while_the_loss_rises_and_fall_again_by_steps() -> None:
    c = controller(stages=2, rank_step=16)
    play(c, [*WARM, -9.0, -9.0, -9.0])
    assert c.plan.ranks == (16, 16), "so low an entropy asks for less"
    decided = []
    for window, loss in enumerate([3.0, 4.0, 4.0, 3.1, 3.1], start=14):
        c.observe(WindowObservation([StageObservation(entropy=-9.0)] * 2, loss=loss))
        decided.append(c.decide(window * WINDOW))
    assert [plan.ranks for plan in decided] == [(16, 16), (64, 64), (64, 64), (48, 48), (32, 32)]
    assert decided[1].loss_rise == pytest.approx(1 / 3) and decided[3].loss_rise == 0
    assert decided[1].reasons == ("the training loss rose",) * 2 and decided[3].reasons == ("entropy",) * 2


def test_a_stage_in_its_warm_up_stays_dense_while_the_loss_rises() -> None:
    c = controller()
    for window, loss in enumerate([3.0, 4.0], start=1):
        c.observe(WindowObservation([StageObservation(entropy=-5.0)], loss=loss))
        assert c.decide(window * WINDOW).ranks == (None,)
    assert c.plan.loss_rise == pytest.approx(1 / 3) and c.plan.reasons == ("warm-up",)


def test_a_resumed_run_remembers_the_losses_before() -> None:
    c, decided = controller(), []
    for window, loss in enumerate([2.0, 3.0, math.inf, 2.0], start=1):
        state, c = json.loads(json.dumps(c.state_dict())), controller()
        c.load_state_dict(state)
        c.observe(WindowObservation([StageObservation()], loss=loss))
        decided.append(c.decide(window * WINDOW).loss_rise)
    assert decided == [0, 0.5, 0.5, 0]


def test_a_stage_that_begins_to_compress_while_the_loss_rises_says_so() -> None:
    c = controller()
    for window, loss in enumerate([3.0] * 9 + [4.0], start=1):
        c.observe(WindowObservation([StageObservation(entropy=-5.0)], loss=loss))
        plan = c.decide(window * WINDOW)
    assert plan.ranks == (64,) and plan.reasons == ("entropy is stable",)


def test_warm_up_goes_on_until_entropy_is_stable() -> None:
    falling = [-5.0 * 1.1**window for window in range(12)]
    assert first_stage(play(controller(), falling + [falling[-1]] * 2)) == [None] * 12 + [64, 64]


def windows(c: Controller, entropies: list[tuple[float, ...]], backward: float = math.nan) -> list[RankPlan]:
    """Feed each stage its own entropy, one entry a window; the plans decided after each window."""
    plans = []
    for entropy in entropies:
        c.observe(
            WindowObservation([StageObservation(entropy=one, micro_backward_seconds=backward) for one in entropy])
        )
        plans.append(c.decide(len(c.entropy.history) * WINDOW))
    return plans


def test_every_stage_ends_its_own_warm_up() -> None:
    c = controller(stages=2, warmup_fraction=0.0)
    plans = windows(c, [(-5.0, -5.0), (-5.0, -6.0), (-5.0, -6.1), (-5.0, -6.1)])
    assert [plan.ranks for plan in plans] == [(None, None), (64, None), (64, 64), (64, 64)]
    assert [plan.reasons for plan in plans] == [
        ("warm-up", "warm-up"),
        ("entropy is stable", "warm-up"),
        ("entropy", "entropy is stable"),
        ("entropy", "entropy"),
    ]
    assert c.entropy.anchor == [-5.0, -6.1]


@pytest.mark.parametrize("unit", [0.0, 8.3, -8.0, 5.0])
def test_the_unit_of_the_gradient_does_not_matter(unit: float) -> None:
    """Gradients e^8.3 times larger have an entropy that is larger by 8.3, and the same plan."""
    generator = random.Random(1)
    history = [-8.0 + 6 * 0.8**window + 0.1 * generator.random() for window in range(30)]
    c, shifted = (controller(stages=2, align=True, warmup_fraction=0.0) for _ in range(2))
    expected = play(c, history, backward=0.004)
    assert play(shifted, [entropy + unit for entropy in history], backward=0.004) == expected
    assert expected[7:10] == [(None, None), (None, None), (64, 64)] and min(first or 64 for first, _ in expected) == 16


@pytest.mark.parametrize("dead", [-math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("align", [True, False])
def test_a_dead_stage_stays_dense_until_it_lives_and_holds_no_other_back(dead: float, place: int, align: bool) -> None:
    c = controller(stages=2, warmup_fraction=0.0, align=align)
    entropies: list[tuple[float, ...]] = [(-5.0, dead)] * 3 + [(-5.0, -7.0)] * 2
    if place == 0:
        entropies = [(last, first) for first, last in entropies]
    plans = windows(c, entropies, backward=0.004)
    dead_ranks = [plan.ranks[place] for plan in plans]
    assert dead_ranks == [None, None, None, None, 64]
    assert [plan.ranks[1 - place] for plan in plans] == [None, 64, 64, 64, 64]
    assert plans[3].reasons[place] == "warm-up"


def test_alignment_leaves_a_later_stage_its_warm_up() -> None:
    c = controller(stages=3, align=True, rank_step=16, warmup_fraction=0.0)
    stable = [(-5.0, math.nan, -5.0)] * 2
    falling = [(-5.2, -6.0, -5.2), (-5.2, -7.0, -5.2), (-5.2, -7.1, -5.2), (-5.2, -7.1, -5.2)]
    plans = windows(c, stable + falling, backward=0.004)
    # 4 ms of backward at 1 ms a rank: the third stage has 8 ranks more than the first, the second begins at rmax
    assert [plan.ranks for plan in plans[1:]] == [
        (64, None, 64),
        (48, None, 56),
        (32, None, 40),
        (16, 64, 24),
        (16, 48, 24),
    ]
    assert plans[-2].reasons == ("entropy", "entropy is stable", "alignment")


def test_while_the_first_stage_is_in_its_warm_up_the_others_follow_their_own_entropy() -> None:
    c = controller(stages=2, align=True, rank_step=16, warmup_fraction=0.0)
    first = [math.nan] * 5 + [-5.0] * 3
    second = [-5.0, -5.0, -5.2, -5.2, -5.2, -5.2, -5.2, -5.2]
    plans = windows(c, list(zip(first, second, strict=True)), backward=0.004)
    assert [plan.ranks for plan in plans[1:6]] == [(None, 64), (None, 48), (None, 32), (None, 16), (None, 16)]
    # the first stage begins at rmax; the second, which ends 4 ms earlier, is aligned to it from then on, step by step
    assert [plan.ranks for plan in plans[6:]] == [(64, 32), (64, 48)]
    assert plans[5].reasons == ("warm-up", "entropy") and plans[6].reasons == ("entropy is stable", "alignment")


def test_flat_entropy_keeps_the_rank() -> None:
    assert first_stage(play(controller(), [*WARM, -5.0, -5.0, -5.0]))[9:] == [64] * 4


def test_falling_entropy_lowers_the_rank_step_by_step_down_to_rmin() -> None:
    ranks = first_stage(play(controller(), [*WARM, *[-5.2] * 8]))[9:]
    assert ranks == [64, 56, 48, 40, 32, 24, 16, 16, 16]


def test_the_plan_tells_what_entropy_proposed_what_bounds_left_of_it_and_what_the_step_limit_made_of_that() -> None:
    c = controller(stages=2, align=True)
    play(c, [*WARM, -5.2], backward=0.004)
    assert c.plan.ranks == (56, 60)
    assert c.plan.targets == (16, 60), "4 ms of backward at 1 ms a rank"
    assert c.plan.proposed == (0.0, 0.0)
    play(c, [-5.2], backward=0.004)
    assert (c.plan.ranks, c.plan.targets) == ((48, 52), (16, 52))
    c.times.costs[1] = StageCost(LinearCost(0.0, 0.001), 0.01, 0.01)  # the dense reduction has become cheap
    play(c, [-5.2], backward=0.004)
    assert (c.plan.ranks, c.plan.targets) == ((40, 60), (16, None))


def test_the_step_limit_does_the_work_as_the_docs_say() -> None:
    model = StageRankModel(((1024, 4096),))
    assert model.adjusted_rank(64, 0.0, -0.051) == pytest.approx(16, abs=0.5)
    assert model.adjusted_rank(64, 0.0, -0.068) == 0


def test_a_small_fall_lands_where_the_model_says() -> None:
    entropy = -5.013
    expected = MODEL.adjusted_rank(64, -5.0, entropy)
    assert 20 < expected < 60 and round(expected) % 4 != 0
    assert first_stage(play(controller(rank_step=64), [*WARM, entropy]))[-1] == 4 * round(expected / 4)


def test_rising_entropy_raises_the_rank_again_but_not_above_rmax() -> None:
    ranks = first_stage(play(controller(), [*WARM, -5.2, -5.2, -4.9, -4.9, -4.9]))[9:]
    assert ranks == [64, 56, 48, 56, 64, 64]


def test_noise_within_the_step_limit_moves_the_rank_no_further_than_the_limit() -> None:
    noisy = [*WARM, -5.1, -4.9, -5.1, -5.1, -4.9]
    ranks = [rank for rank in first_stage(play(controller(), noisy))[9:] if rank is not None]
    assert all(abs(after - before) <= 8 for before, after in zip(ranks, ranks[1:], strict=False))
    assert ranks == [64, 56, 64, 56, 48, 56]


def test_ranks_are_multiples_of_four_even_where_the_step_is_not() -> None:
    assert first_stage(play(controller(rank_step=7), [*WARM, -5.2, -5.2]))[9:] == [64, 60, 56]


def test_a_step_below_four_still_moves() -> None:
    assert first_stage(play(controller(rank_step=1), [*WARM, -5.2, -5.2]))[9:] == [64, 63, 62]


def test_a_window_without_a_finite_entropy_holds_the_rank() -> None:
    ranks = first_stage(play(controller(), [*WARM, -5.2, math.nan, math.inf, -5.2]))[9:]
    assert ranks == [64, 56, 56, 56, 48]


def test_a_window_without_a_finite_entropy_does_not_end_the_warm_up() -> None:
    assert first_stage(play(controller(warmup_fraction=0.0), [-5.0, math.nan, -5.0, -5.0])) == [None, None, None, 64]


def test_static_rank_starts_after_the_warm_up_and_never_changes() -> None:
    c = controller(static_rank=32, rmin=None, rmax=None, align=True)
    assert c.plan == RankPlan(0, 1000, (32,), reasons=("static",))
    assert first_stage(play(c, [-5.0, -9.0, -1.0])) == [32, 32, 32]


@pytest.mark.parametrize(("tilt", "ranks"), [(0.5, [44, 36, 28, 20]), (-0.5, [20, 28, 36, 44])])
def test_a_tilted_rank_moves_on_a_straight_line_around_its_mean(tilt: float, ranks: list[int]) -> None:
    c = controller(
        static_rank=32, rmin=None, rmax=None, align=True, rank_tilt=tilt, iterations=4 * WINDOW, warmup_fraction=0.0
    )
    assert c.plan.ranks == (ranks[0],)
    assert first_stage(play(c, [math.nan] * 3)) == ranks[1:]
    assert static_ranks(c.config) == (16, 48) and smallest_rank(c.config) == 16


def test_a_tilted_rank_stays_within_its_range_in_a_window_that_is_cut_short() -> None:
    tilted = {"static_rank": 64, "rmin": None, "rmax": None, "align": True, "rank_tilt": -0.5}
    c = controller(**tilted, iterations=110, warmup_fraction=0.0)
    assert first_stage(play(c, [math.nan])) == [92]  # in the middle of the last ten iterations


def test_a_tilted_rank_after_one_by_entropy_begins_with_a_warm_up_of_its_own() -> None:
    settings = {"static_rank": 32, "rmin": None, "rmax": None, "align": True, "rank_tilt": 0.5}
    by_entropy, tilted = controller(), controller(**settings)
    play(by_entropy, WARM[:1])
    tilted.load_state_dict(json.loads(json.dumps(by_entropy.state_dict())))
    assert tilted.plan.first_iteration == 1000 and tilted.plan.reasons == ("static",)
    assert tilted.plan.summing(200) is Summing.DENSE
    play(by_entropy, [*WARM[1:], -5.2])
    tilted.load_state_dict(json.loads(json.dumps(by_entropy.state_dict())))
    assert by_entropy.plan.reasons == ("entropy",) and tilted.plan.reasons == ("static",)
    moved, again = controller(**settings), controller(**settings)
    play(moved, [math.nan] * 60)
    assert moved.plan.ranks != again.plan.ranks
    again.load_state_dict(moved.state_dict())
    assert again.plan.ranks == moved.plan.ranks, "a plan of today goes on"


def test_dense_engine_stays_dense() -> None:
    assert first_stage(play(controller(engine="dense"), [*WARM, -5.2])) == [None] * 11


def test_without_alignment_every_stage_follows_its_own_entropy() -> None:
    c = controller(stages=2)
    for window in range(11):
        falling = -5.0 if window < 10 else -5.2
        c.observe(WindowObservation([StageObservation(entropy=-5.0), StageObservation(entropy=falling)]))
        plan = c.decide((window + 1) * WINDOW)
    assert plan.ranks == (64, 56)


def test_alignment_gives_later_stages_the_rank_that_ends_with_the_first() -> None:
    # 4 ms of backward at 1 ms a rank: 4 ranks more a stage, and 64 = rmax at most.
    c = controller(stages=4, align=True, rank_step=64)
    assert play(c, [*WARM, -5.2], backward=0.004)[-1] == (16, 20, 24, 28)


def test_alignment_counts_the_messages_that_carry_the_last_gradient_back() -> None:
    # 4 ms of backward at 1 ms a rank as above, and of messages 8 ms uncompressed or 1 ms a rank and 4 ms
    message = StageCost(LinearCost(0.004, 0.001), 0.008, 0.008)
    config = BASE.replace(align=True, rank_step=64)
    sends_back = ControlledStage(MATRICES, COST, message)
    c = Controller(config, 10_000, [STAGE, sends_back, sends_back])
    assert play(c, [*WARM, -5.2], backward=0.004)[-1] == (16, 28, 40)
    seen = StageObservation(entropy=-5.2, micro_backward_seconds=0.004)
    c.observe(WindowObservation([seen, seen, replace(seen, message_rank=1)]))
    assert c.decide(12 * WINDOW).ranks == (16, 28, 36)  # 5 ms instead of 8: 37, a multiple of four
    saved = json.loads(json.dumps(c.state_dict()))
    again = Controller(config, 10_000, [STAGE] * 3)
    again.load_state_dict(saved)
    assert again.times.message_costs == c.times.message_costs, "they were not timed today"
    faster = StageCost(LinearCost(0.0, 0.001), 0.002, 0.002)
    again = Controller(config, 10_000, [STAGE, *[ControlledStage(MATRICES, COST, faster)] * 2])
    again.load_state_dict(saved)
    assert again.times.message_costs == [None, faster, faster], "nothing in training would correct older ones"


def test_alignment_moves_within_the_step_limit_and_never_below_the_first_stage() -> None:
    c = controller(stages=3, align=True)
    history = play(c, [*WARM, *[-5.2] * 7], backward=0.004)[9:]
    assert history[:3] == [(64, 64, 64), (56, 60, 64), (48, 52, 56)]
    for before, after in zip(history, history[1:], strict=False):
        assert all(b is not None and a is not None and abs(a - b) <= 8 for a, b in zip(after, before, strict=True))
        assert after[0] is not None and all(rank is not None and rank >= after[0] for rank in after)


def test_the_slowest_stages_reductions_say_whether_a_trial_is_due() -> None:
    for slowest, due in ((0.3, False), (0.8, True)):
        c = Controller(BASE, 10_000, [STAGE] * 3, trials=Trials(10_000, 1.0, overlapped=False))
        seen = [StageObservation(reduce_seconds=seconds) for seconds in (0.1, slowest, math.nan)]
        c.observe(WindowObservation(seen, step_seconds={False: [2.0] * 9, True: []}))
        assert c.trials is not None and c.trials.due == due


def test_alignment_needs_a_measured_backward() -> None:
    c = controller(stages=2, align=True, rank_step=64)
    assert play(c, [*WARM, -5.2])[-1] == (16, 16)


def test_a_stage_whose_budget_exceeds_its_dense_time_goes_dense_from_rmax() -> None:
    fast = StageCost(LinearCost(0.0, 0.001), 0.05, 0.05)
    c = controller(stages=2, align=True, cost=fast)
    # budget of stage 2: 56 ms and 4 ms more, above 50 ms; stage 1 has no budget but its own.
    assert play(c, [*WARM, -5.2, -5.2], backward=0.004)[9:] == [(64, 64), (56, None), (48, None)]
    # once the first stage has come down far enough the budget is short again: compressed, from rmax, step by step
    assert play(c, [-5.2] * 3, backward=0.004) == [(40, 64), (32, 56), (24, 48)]


def test_a_stage_climbs_to_rmax_before_it_goes_dense() -> None:
    c = controller(stages=2, align=True)
    play(c, [*WARM, *[-5.2] * 3], backward=0.001)
    assert c.plan.ranks == (40, 40)
    c.times.costs[1] = StageCost(LinearCost(0.0, 0.001), 0.01, 0.01)  # the dense reduction has become cheap
    assert [ranks[1] for ranks in play(c, [-5.2] * 4, backward=0.001)] == [48, 56, 64, None]


def test_costs_follow_what_reductions_really_take() -> None:
    c = controller(stages=1, cost=StageCost(LinearCost(0.01, 0.001), 0.2, 0.3))
    c.observe(
        WindowObservation([StageObservation(entropy=-5.0, reduce_seconds=0.4)])
    )  # dense now: twice as slow as probed
    assert c.times.costs[0] == StageCost(LinearCost(0.02, 0.002), 0.4, 0.6)
    # compressed at rank 10, which no plan of this controller says
    c.observe(WindowObservation([StageObservation(entropy=-5.0, reduce_seconds=0.08)], ranks=[10]))
    assert c.times.costs[0].dense_seconds == pytest.approx(0.4 * 0.08 / (0.02 + 10 * 0.002))


def test_costs_of_a_given_link_stay() -> None:
    c = controller(link_gbps=1.0)
    c.observe(WindowObservation([StageObservation(entropy=-5.0, reduce_seconds=9.0)]))
    assert c.times.costs[0] == COST


def test_versions_grow_only_when_ranks_change() -> None:
    c = controller()
    play(c, WARM)
    assert (c.plan.version, c.plan.first_iteration) == (1, 1000)
    play(c, [-5.0])
    assert (c.plan.version, c.plan.first_iteration) == (1, 1000)
    play(c, [-5.2])
    assert (c.plan.version, c.plan.first_iteration) == (2, 1200)


def test_a_stage_without_matrices_stays_dense() -> None:
    c = Controller(BASE, 1000, [ControlledStage(()), STAGE])
    for window in range(3):
        c.observe(WindowObservation([StageObservation(), StageObservation(entropy=-5.0)]))
        plan = c.decide((window + 1) * WINDOW)
    assert plan.ranks == (None, 64)


def test_state_survives_json_and_goes_on_alike() -> None:
    history = [*WARM, -5.05, -5.1, -5.02]
    whole, first = controller(stages=2, align=True), controller(stages=2, align=True)
    expected = play(whole, history, backward=0.004)
    play(first, history[:11], backward=0.004)
    second = controller(stages=2, align=True)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert play(second, history[11:], backward=0.004) == expected[11:]
    assert second.plan == whole.plan


@pytest.mark.parametrize(
    ("replicas", "estimator", "ranks"),
    [(8, "gaussian", [56, 48, 40]), (4, "gaussian", [64, 64, 64]), (8, "histogram", [64, 64, 64])],
)
def test_entropy_of_other_shares_of_the_batch_or_another_estimator_is_not_compared(
    replicas: int, estimator: str, ranks: list[int]
) -> None:
    """At half the processes each averages over twice the samples: its entropy falls, the sum is as it was."""
    before = Controller(BASE, 10_000, [STAGE], replicas=8)
    assert first_stage(play(before, [*WARM, -5.0]))[-1] == 64
    after = Controller(BASE.replace(entropy_estimator=estimator), 10_000, [STAGE], replicas=replicas)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    decided = []
    for window, entropy in enumerate([-5.35, -5.35, -5.35], start=12):
        after.observe(WindowObservation([StageObservation(entropy=entropy)]))
        decided.append(after.decide(window * WINDOW).ranks[0])
    assert decided == ranks


def test_a_resumed_run_keeps_to_the_bounds_of_now_at_once() -> None:
    before = controller(stages=2, align=True)
    assert play(before, [*WARM, -5.0], backward=0.004)[-1] == (64, 64)
    after = controller(stages=2, align=True, rmin=8, rmax=32)
    after.load_state_dict(before.state_dict())
    assert after.plan.ranks == (32, 32) and after.plan.version > before.plan.version
    (ranks,) = play(after, [-5.0], backward=0.004)
    assert ranks == (32, 32)
    again = controller(stages=2, align=True, rmin=48, rmax=64)
    again.load_state_dict(after.state_dict())
    assert again.plan.ranks == (48, 48)
    same = controller(stages=2, align=True)
    same.load_state_dict(before.state_dict())
    assert same.plan == before.plan


@pytest.mark.parametrize("changed", [{}, {"rmax": 32}, {"allocation": "uniform"}])
def test_ranks_that_were_shared_out_end_with_the_bounds_that_they_kept_to(changed: dict[str, Any]) -> None:
    before = controller(allocation="waterfill")
    play(before, [*WARM, -5.0])
    before.plan = replace(before.plan, matrix_ranks=({"a": 96, "b": 32},))
    after = controller(**{"allocation": "waterfill", **changed})
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert any(after.plan.matrix_ranks) == (not changed)
    assert (after.plan.version > before.plan.version) == bool(changed)


def test_a_resumed_run_has_the_static_rank_and_the_warm_up_of_now() -> None:
    static = {"rmin": None, "rmax": None, "align": True}
    before = controller(static_rank=64, warmup_fraction=0.1, **static)
    play(before, [-5.0] * 12)
    for settings in ({"static_rank": 32, "warmup_fraction": 0.1}, {"static_rank": 64, "warmup_fraction": 0.5}):
        after, fresh = controller(**settings, **static), controller(**settings, **static)
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        assert (after.plan.ranks, after.plan.first_iteration) == (fresh.plan.ranks, fresh.plan.first_iteration)
        assert after.plan.version > before.plan.version
    same = controller(static_rank=64, warmup_fraction=0.1, **static)
    same.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert same.plan == before.plan


@pytest.mark.parametrize("allocation", ["waterfill", "lgreco"])
def test_a_resumed_run_keeps_how_a_static_rank_was_shared_out(allocation: str) -> None:
    settings = {"static_rank": 32, "warmup_fraction": 0.01, "rmin": None, "rmax": None, "align": True}
    before = controller(allocation=allocation, **settings)
    for window, energies in enumerate([{}, {}, {"a": [1.0] * 64, "b": [0.01] * 64}], start=1):
        before.observe(WindowObservation([StageObservation(entropy=-5.0, energies=energies)]))
        before.decide(window * WINDOW)
    (shared,) = before.plan.matrix_ranks
    assert shared is not None and shared["a"] > shared["b"] and before.plan.first_iteration == 3 * WINDOW
    state = json.loads(json.dumps(before.state_dict()))
    after = controller(allocation=allocation, **settings)
    after.load_state_dict(state)
    assert after.plan == before.plan
    # another allocation, or a warm-up that is not over, begins again
    for other in ({"allocation": "uniform"}, {"allocation": allocation, "warmup_fraction": 0.9}):
        anew = controller(**{**settings, **other})
        anew.load_state_dict(state)
        assert not any(anew.plan.matrix_ranks)


def test_after_a_static_rank_entropy_begins_with_a_warm_up() -> None:
    before = controller(static_rank=32, rmin=None, rmax=None, align=True)
    play(before, [-5.0] * 12)
    after = controller()
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert after.plan.ranks == (None,) and after.plan.reasons == ("warm-up",)


def test_a_tolerance_in_another_unit_and_costs_of_another_link_are_not_taken_over() -> None:
    before = controller(warmup_fraction=0.0, rank_model="measured", link_gbps=1.0)
    for window, energies in enumerate([{}, {}, spectra(1, 1), spectra(1, 1)], start=1):
        before.observe(WindowObservation([StageObservation(entropy=-5.0, energies=energies)]))
        before.decide(window * WINDOW)
    state = json.loads(json.dumps(before.state_dict()))
    assert state["tolerated"] != [None]
    after = controller(warmup_fraction=0.0, rank_model="residual", link_gbps=100.0)
    after.times.costs = [COST.scaled(0.01)]
    after.load_state_dict(state)
    assert after.entropy.tolerated == [None] and after.times.costs == [COST.scaled(0.01)]
    other = controller(warmup_fraction=0.0, rank_model="measured", entropy_estimator="histogram")
    other.load_state_dict(state)
    assert math.isnan(other.entropy.anchor[0]) and not other.entropy.history and other.times.costs == [COST]


def test_the_warm_up_of_entropy_is_no_compression() -> None:
    c = controller()
    play(c, WARM[:3])
    assert c.plan.summing(300) is Summing.DENSE
    play(c, [*WARM[3:], -5.0])
    assert c.plan.summing(1100) is Summing.COMPRESSED


def test_state_of_another_pipeline_is_refused() -> None:
    with pytest.raises(ValueError, match="controller state of 2 stages, this run has 3"):
        controller(stages=3).load_state_dict(controller(stages=2).state_dict())


def test_state_of_another_release_is_refused() -> None:
    old = controller().state_dict()
    old["plan"]["reason"] = "warm-up"
    del old["plan"]["reasons"]
    with pytest.raises(ValueError, match="controller state of another release of EDGC"):
        controller().load_state_dict(old)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="2 observations for 1 stages"):
        controller().observe(WindowObservation([StageObservation()] * 2))
    with pytest.raises(ValueError, match="rmin and rmax must be resolved"):
        Controller(EDGCConfig(), 10_000, [STAGE])


def test_ranks_are_resolved_from_the_break_even_rank_and_the_share_of_the_width() -> None:
    resolved = resolve_ranks(EDGCConfig(), 130, 1024)
    assert (resolved.ranks.rmin, resolved.ranks.rmax) == (32, 128)
    given = resolve_ranks(EDGCConfig.of(rmax=64, rmin=8), 1000, 1024)
    assert (given.ranks.rmin, given.ranks.rmax) == (8, 64)
    assert resolve_ranks(EDGCConfig.of(rmax=6), 0, 1024).ranks.rmin == 4
    share = EDGCConfig.of(rmax=1 / 16)
    assert resolve_ranks(share, 200, 1024).ranks.rmax == 64
    assert resolve_ranks(share, 40, 1024).ranks.rmax == 40, "never above break-even"
    assert resolve_ranks(share, 200, 32).ranks.rmax == 4
    with pytest.raises(ConfigError, match="--edgc-rmin = 80: must not exceed rmax = 64"):
        resolve_ranks(EDGCConfig.of(rmax=1 / 16, rmin=80), 200, 1024)
    static = EDGCConfig.of(static_rank=1 / 16)
    for break_even, rank in ((200, 64), (40, 40)):
        settled = resolve_ranks(static, break_even, 1024)
        assert (settled.ranks.resolved_static_rank, settled.rank_depends_on_link, static.rank_depends_on_link) == (
            rank,
            False,
            True,
        )


def falling(strength: float) -> list[float]:
    """64 squared singular values."""
    return [strength * 0.9**place for place in range(64)]


def test_water_filling_moves_rank_between_matrices_at_equal_bytes() -> None:
    c = controller(allocation="waterfill")
    play(c, WARM)
    assert c.plan.ranks == (64,) and c.plan.matrix_ranks == (None,), "nothing measured yet"
    flat_b = {"a": falling(1.0), "b": [1.0] * 64}
    c.observe(WindowObservation([StageObservation(entropy=-5.0, energies=flat_b)]))
    version = c.plan.version
    plan = c.decide(1100)
    (ranks,) = plan.matrix_ranks
    assert plan.ranks == (64,) and ranks is not None
    assert ranks["b"] > 64 > ranks["a"] >= 32
    assert (plan.version, plan.first_iteration) == (version + 1, 1100)
    assert sum(ranks[m.name] * (m.rows + m.cols) for m in MATRICES) <= 64 * (2048 + 5120)
    # a window in which nothing was measured changes nothing
    c.observe(WindowObservation([StageObservation(entropy=-5.0)]))
    assert c.decide(1200).matrix_ranks == (ranks,) and c.plan.version == version + 1
    restored = RankPlan.from_dict(json.loads(json.dumps(c.plan.to_dict())))
    assert restored == c.plan


def test_water_filling_also_shares_a_static_rank() -> None:
    c = controller(allocation="waterfill", rmin=None, rmax=None, static_rank=32, align=True)
    steep = [0.5**place for place in range(32)]
    c.observe(WindowObservation([StageObservation(energies={"a": falling(1.0)[:32], "b": steep})]))
    plan = c.decide(100)
    (ranks,) = plan.matrix_ranks
    assert plan.ranks == (32,) and plan.first_iteration == 1000, "the warm-up still holds"
    assert ranks is not None and ranks["a"] > 32 > ranks["b"]


@pytest.mark.parametrize("price", [1.0, 3.0])
def test_one_water_level_shares_a_static_rank_out_over_all_stages(price: float) -> None:
    """The tied embedding of a pipeline is a stage of one matrix. Its steps of rank cost ``price`` times the bytes."""
    config = BASE.replace(allocation="waterfill", rmin=None, rmax=None, static_rank=32, align=True, min_saving=1.0)
    layers, embedding = (MatrixSpec("a", 1024, 1024), MatrixSpec("b", 1024, 1024)), (MatrixSpec("a", 1024, 1024),)
    too_small = (MatrixSpec("c", 8, 8),)  # no rank pays there, so nothing is measured: the others do not wait for it
    stages = [ControlledStage(one, COST) for one in (layers, layers, embedding, too_small)]
    stages[2] = replace(stages[2], price=price)
    c = Controller(config, 10_000, stages)
    quiet, loud = {"a": falling(1.0), "b": falling(1.0)}, {"a": falling(1e4)}
    c.observe(WindowObservation([StageObservation(energies=own) for own in (quiet, quiet, loud, {})]))
    first, second, last, none = c.decide(100).matrix_ranks
    assert none == {}
    assert first is not None and second is not None and last is not None
    assert first.keys() == second.keys() == {"a", "b"} and last["a"] > 32 > min(second.values())
    sent = sum(first.values()) + sum(second.values()) + price * last["a"]
    assert 0.95 * (4 + price) * 32 < sent <= (4 + price) * 32
    if price == 3.0:
        assert last["a"] < 64, "dear bytes buy less"
    # a window in which a stage measured nothing changes nothing
    c.observe(WindowObservation([StageObservation(energies=own) for own in (quiet, {}, loud, {})]))
    assert c.decide(200).matrix_ranks == (first, second, last, none)


def test_the_fewest_bytes_for_the_energy_of_a_static_rank() -> None:
    c = controller(allocation="lgreco", rmin=None, rmax=None, static_rank=32, align=True)
    c.observe(WindowObservation([StageObservation(energies={"a": falling(1.0), "b": falling(1e-3)})]))
    (ranks,) = c.decide(100).matrix_ranks
    assert ranks is not None and ranks["a"] >= 32 > ranks["b"]


def spectra(first: float, slope: float) -> dict[str, list[float]]:
    """Measured energies of the 64 strongest directions of every matrix."""
    return {matrix.name: [first * (1 + place) ** -slope for place in range(64)] for matrix in MATRICES}


@pytest.mark.parametrize("model", ["measured", "residual"])
def test_by_measured_spectra_a_steeper_one_needs_a_lower_rank(model: str) -> None:
    c = controller(warmup_fraction=0.0, rank_model=model, rank_step=64)
    ranks = []
    for window, energies in enumerate([{}, {}, spectra(1, 1), spectra(1, 1), spectra(1, 1.2), spectra(1, 1)], start=1):
        c.observe(WindowObservation([StageObservation(entropy=-5.0, energies=energies)]))
        ranks.append(c.decide(window * WINDOW).ranks[0])
    assert ranks[:4] == [None, 64, 64, 64]
    assert 16 <= ranks[4] < 64 and ranks[5] == 64  # type: ignore[operator]


@pytest.mark.parametrize("model", ["measured", "residual"])
def test_matrices_that_join_low_rank_at_a_smaller_rank_do_not_move_it(model: str) -> None:
    """At rank 96 the square one does not pay. Its dropped norm is no part of what is tolerated."""
    both = [MatrixSpec("wide", 256, 1024), MatrixSpec("square", 256, 256)]
    settings = {"rmin": 24, "rmax": 96, "window": WINDOW, "warmup_fraction": 0.0, "rank_model": model}
    config, last = EDGCConfig.of(**settings), list[int | None]()  # type: ignore[arg-type]
    for matrices in (both, both[:1]):
        c = Controller(config, 100 * WINDOW, [ControlledStage(matrices)])
        for window in range(1, 30):
            (rank,) = c.plan.ranks
            first = 1.0 if window < 4 else 0.6  # both spectra fall once
            ranks = uniform_ranks(matrices, rank, 2.0) if rank else {}
            energies = {name: [first * (1 + j) ** -1.2 for j in range(own)] for name, own in ranks.items()}
            c.observe(WindowObservation([StageObservation(entropy=-5.0, energies=energies)]))
            c.decide(window * WINDOW)
        last += [*c.plan.ranks]
    assert last[0] == last[1] is not None


@pytest.mark.parametrize("model", ["gaussian", "measured"])
def test_a_stage_that_alignment_has_left_dense_compresses_after_a_resume_without(model: str) -> None:
    costs = [StageCost(LinearCost(1, 0.1), 5, 5), StageCost(LinearCost(0.1, 0.05), 1, 1)]
    stages = [ControlledStage([MatrixSpec(f"m{place}", 64, 128)], cost) for place, cost in enumerate(costs)]
    settings = {"rmin": 4, "rmax": 16, "window": WINDOW, "warmup_fraction": 0.0, "rank_model": model}

    def decided(c: Controller, window: int) -> tuple[int | None, ...]:
        seen = [
            StageObservation(-5.0, micro_backward_seconds=2.0, energies={f"m{place}": [1.0] * rank} if rank else {})
            for place, rank in enumerate(c.plan.ranks)
        ]
        c.observe(WindowObservation(seen))
        return c.decide(window * WINDOW).ranks

    aligned, alone = (
        Controller(EDGCConfig.of(**settings, align=align), 100 * WINDOW, stages)  # type: ignore[arg-type]
        for align in (True, False)
    )
    for window in range(1, 8):
        ranks = decided(aligned, window)
    assert ranks[0] is not None and ranks[1] is None
    alone.load_state_dict(json.loads(json.dumps(aligned.state_dict())))
    for window in range(8, 12):
        ranks = decided(alone, window)
    assert None not in ranks


def test_measured_holds_the_norm_and_residual_its_share() -> None:
    ranks = {}
    for model in ("measured", "residual"):
        c = controller(warmup_fraction=0.0, rank_model=model, rank_step=64)
        for window, energies in enumerate([{}, {}, spectra(1, 1), spectra(0.9, 1)], start=1):
            c.observe(WindowObservation([StageObservation(entropy=-5.0, energies=energies)]))
            ranks[model] = c.decide(window * WINDOW).ranks[0]
    assert ranks["measured"] < 64 and ranks["residual"] == 64  # type: ignore[operator]


def test_what_is_tolerated_is_part_of_the_state() -> None:
    c = controller(warmup_fraction=0.0, rank_model="residual", rank_step=64)
    for window, energies in enumerate([{}, {}, spectra(1, 1)], start=1):
        c.observe(WindowObservation([StageObservation(entropy=-5.0, energies=energies)]))
        c.decide(window * WINDOW)
    resumed = controller(warmup_fraction=0.0, rank_model="residual", rank_step=64)
    resumed.load_state_dict(json.loads(json.dumps(c.state_dict())))
    for one in (c, resumed):
        one.observe(WindowObservation([StageObservation(entropy=-5.0, energies=spectra(1, 1.2))]))
    assert resumed.decide(4 * WINDOW).ranks == c.decide(4 * WINDOW).ranks != (64,)


def test_without_a_spectrum_the_rank_stays() -> None:
    c = controller(warmup_fraction=0.0, rank_model="residual")
    assert first_stage(play(c, [-5.0, -5.0, -9.0])) == [None, 64, 64]


@pytest.mark.parametrize("settings", [{"static_rank": 8}, {"rmin": 4, "rmax": 8}])
def test_a_stage_that_is_to_stay_dense_does(settings: dict[str, int]) -> None:
    config = EDGCConfig.of(**settings, window=10, warmup_fraction=0, entropy_stability=1)  # type: ignore[arg-type]
    stage = ControlledStage([MatrixSpec("w", 64, 64)])
    both, first = (Controller(config, 100, [stage, replace(stage, excluded=excluded)]) for excluded in (False, True))
    for window in range(1, 4):
        for one in (both, first):
            one.observe(WindowObservation([StageObservation(-1.0), StageObservation(-1.0)]))
            one.decide(10 * window)
    assert (both.plan.ranks, first.plan.ranks) == ((8, 8), (8, None))
    first.load_state_dict(both.state_dict())
    assert first.plan.ranks == (8, None)
    first.observe(WindowObservation([StageObservation(-1.0), StageObservation(-1.0)]))
    assert first.decide(40).ranks == (8, None)
