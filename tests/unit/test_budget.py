"""The planner of a budget: its two laws, its optimum, and what it sends over a run."""

import itertools
import json
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import edgc.plan.by_volume.budget as budget_module
from edgc.byte_counts import ByteCount
from edgc.config import FORMATS, EDGCConfig
from edgc.plan.by_volume.budget import BudgetPlanner, fidelity
from edgc.plan.by_volume.choices import (
    PLANNED_FORMATS,
    ROW_SHARES,
    Choice,
    SendLowRank,
    SendRounded,
    SendRows,
    ranks_to_try,
)
from edgc.plan.by_volume.hull import options, spend
from edgc.plan.by_volume.ledger import Ledger, StepBytes, byte_weights
from edgc.plan.by_volume.noise import (
    LARGEST_NOISE,
    LEAST_NOISE,
    EnergySpectrum,
    RoundingNoise,
    noise_of_format,
    noise_of_parts,
    steepness,
)
from edgc.plan.by_volume.parameters import PartialSend, PlannedParameter
from edgc.plan.controller import ControlledStage, Controller
from edgc.plan.observation import StageObservation, WindowObservation
from edgc.plan.rank_plan import NO_RANK, Summing
from edgc.plan.times.comm_cost import LinearCost, StageCost
from edgc.plan.times.link_times import LinkTimes, ReductionTime
from edgc.plan.times.trials import Trials
from edgc.specs import MatrixSpec

BYTES = {"int8": 1 + 1 / 64, "int4": 0.5 + 1 / 64, "int2": 0.25 + 1 / 64}


def parameter(
    name: str,
    rows: int = 64,
    cols: int = 128,
    low_rank: bool = True,
    steepness: float = 1.5,
    rounding: float = 4.0,
    by_rows: float | None = None,
) -> PlannedParameter:
    """``by_rows``: exponent of the energies of rows; None: rows are no choice."""
    directions = PartialSend(EnergySpectrum(min(rows, cols), steepness), 0.6 * (rows + cols)) if low_rank else None
    parts = None if by_rows is None else PartialSend(EnergySpectrum(rows, by_rows), 0.52 * cols, 1.02 * rows, "int4")
    return PlannedParameter(MatrixSpec(name, rows, cols), directions, parts, rounding=RoundingNoise(rounding))


NOTHING = ByteCount()
IN_4_BITS, AT_8, AT_16 = SendRounded("int4"), SendLowRank(8), SendLowRank(16)


def by_share(share: float, rank: int = 4) -> SendRows:
    """``rank``: of what these rows leave, which does not count for their noise."""
    return SendRows(share, rank)


def seen(noise: dict[str, float]) -> dict[str, tuple[float, float]]:
    """With entries of the same energy everywhere."""
    return {name: (one, 1.0) for name, one in noise.items()}


def planned(
    volume: float,
    iterations: int,
    first: int,
    stages: Sequence[Sequence[PlannedParameter]],
    uncompressed: float,
    excluded: Collection[int] = (),
    learning_rate: Callable[[int], float] | None = None,
    rounds: bool = False,
    **settings: Any,
) -> BudgetPlanner:
    """``first``: the iteration at which compression begins."""
    settings = {"window": 2, "least_fidelity": 0.0, "warmup_fraction": first / iterations, **settings}
    config = EDGCConfig.of(volume=volume, **settings)
    return BudgetPlanner(config, iterations, stages, excluded, BYTES, uncompressed, learning_rate, rounds)


def shown(
    noise: Sequence[dict[str, tuple[float, float]]],
    sent: float = 0.0,
    host: float = 0.0,
    fp32: float = 0.0,
    **rest: Any,
) -> WindowObservation:
    """A window that shows each stage's noise. ``sent``, ``host``, ``fp32``: bytes so far."""
    return WindowObservation([StageObservation(noise=one) for one in noise], bytes=ByteCount(sent, host, fp32), **rest)


def simulated(rank: int, exponent: float, directions: int = 64, steps: int = 2000) -> float:
    """Directions that fill up, of which the fullest are sent in every step: the noise of what is sent."""
    energies = np.arange(1.0, directions + 1) ** -exponent
    waiting, sent, fresh = np.zeros(directions), 0.0, 0.0
    for step in range(steps):
        waiting += energies
        fullest = np.argsort(-waiting)[:rank]
        if step >= steps // 2:
            sent += waiting[fullest].sum()
            fresh += energies[fullest].sum()
        waiting[fullest] = 0
    true = energies.sum() * (steps - steps // 2)
    return float(sent * true / fresh**2 - 1)


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.5, 2.5])
@pytest.mark.parametrize("rank", [4, 8, 16, 32])
def test_the_law_of_low_rank_is_that_of_directions_that_fill_up(rank: int, exponent: float) -> None:
    # intervals are whole numbers of steps in the simulation, and not in the law
    assert noise_of_parts(rank, 64, exponent) == pytest.approx(simulated(rank, exponent), rel=0.25)


def test_the_law_has_its_limits() -> None:
    assert noise_of_parts(8, 64, 0.0) == pytest.approx((64 / 8) ** 2 - 1)
    assert noise_of_parts(64, 64, 1.0) == noise_of_parts(70, 64, 1.0) == 0
    for exponent in (0.0, 1.0, 3.0):
        noises = [noise_of_parts(rank, 64, exponent) for rank in range(1, 65)]
        assert all(a > b for a, b in itertools.pairwise(noises)) and min(noises) >= 0


def test_one_measurement_gives_the_exponent() -> None:
    for exponent in (0.8, 1.5, 2.5):
        assert steepness(noise_of_parts(16, 128, exponent), 16, 128) == pytest.approx(exponent, abs=0.01)
    assert steepness(100.0, 16, 128) == 0 and steepness(1e-9, 16, 128) == 4


def test_a_fit_meets_what_was_measured_and_then_half_of_it() -> None:
    one = parameter("w").fitted(AT_8, 0.5)
    assert one.noise(AT_8) == pytest.approx(0.5, rel=0.02) and one.rounding == parameter("w").rounding
    other = one.fitted(IN_4_BITS, 0.2)
    assert other.noise(IN_4_BITS) == pytest.approx(0.2) and other.directions == one.directions
    assert other.fitted(IN_4_BITS, 0.8).noise(IN_4_BITS) == pytest.approx(0.4)
    assert parameter("w").fitted(AT_8, 1.0).fitted(AT_8, 4.0).fitted(AT_8, 2.0).noise(AT_8) == pytest.approx(
        2.0, rel=0.02
    )
    often = parameter("w")
    for _ in range(20):
        often = often.fitted(IN_4_BITS, 0.2)
    assert often.fitted(IN_4_BITS, 3.2).noise(IN_4_BITS) == pytest.approx(0.4), "a quarter of the way, in logarithms"
    whole = parameter("w").fitted(SendLowRank(64), 0.1).fitted(SendLowRank(64), 0.1)  # all directions: nothing to learn
    assert whole.noise(SendLowRank(64)) == 0
    flat = parameter("w").fitted(AT_8, 126.0)  # twice that of a flat spectrum
    assert flat.noise(AT_8) == pytest.approx(2 * 63) and flat.noise(AT_16) == pytest.approx(2 * 15)
    for nothing in (math.nan, 0.0):
        assert other.fitted(AT_8, nothing) == other
    assert parameter("w").fitted(AT_8, math.inf).noise(AT_8) == pytest.approx(LARGEST_NOISE)
    by_rows = parameter("words", 1000, 64, by_rows=1.0).fitted(by_share(0.1), 0.6)
    assert by_rows.noise(by_share(0.1)) == pytest.approx(0.6, rel=0.02), "with the noise of their format"
    assert by_rows.noise(by_share(0.4)) > by_rows.rounding.noise("int4")
    of_rest = by_rows.size(SendLowRank(by_rows.rank_beside_rows), BYTES)  # what rows leave travels in low rank
    assert by_rows.rank_beside_rows == 4
    assert by_rows.size(by_share(0.1), BYTES) == pytest.approx(100 * 0.52 * 64 + 1.02 * 1000 + of_rest)


def test_options_lie_on_a_convex_hull() -> None:
    for steep in (0.3, 1.0, 2.5):
        found = options(parameter("w", steepness=steep), BYTES)
        slopes = [(b.noise - a.noise) / (b.size - a.size) for a, b in itertools.pairwise(found)]
        assert len(found) > 2 and max(slopes) < 0 and slopes == sorted(slopes)
        assert [option.size for option in found] == sorted(option.size for option in found)


def test_a_steep_spectrum_gets_a_rank_and_a_flat_one_bits() -> None:
    steep, flat = parameter("steep", steepness=3.0), parameter("flat", steepness=0.2, rounding=1.0)
    chosen = spend([steep, flat], BYTES, 0.2 * (steep.elements + flat.elements))
    assert isinstance(chosen[0], SendLowRank) and isinstance(chosen[1], SendRounded)


def test_what_low_rank_cannot_hold_is_rounded_once_that_is_seen() -> None:
    """An embedding whose rare words no direction is made of, beside layers that low rank suits."""
    layers = [parameter(str(place), 128, 512, steepness=1.5) for place in range(4)]
    stages = [[*layers, parameter("words", 2048, 128)]]
    planner = planned(20.0, 1000, 0, stages, 4.0)
    assert isinstance(planner.choices[-1], SendLowRank)
    noise = {c.matrix.name: c.noise(one) for c, one in zip(planner.parameters, planner.choices, strict=True)}
    planner.observe(shown([seen({**noise, "words": 25.0})]))
    planner.decide(10)
    assert planner.choices[-1] == SendRounded("int2")
    assert all(isinstance(one, SendLowRank) for one in planner.choices[:-1])


@pytest.mark.parametrize(("share", "rows", "travel"), [(0.07, 100, 7), (0.14, 50, 7), (0.07, 101, 8), (0.01, 3, 1)])
def test_a_share_of_the_rows_is_rounded_up_but_not_for_what_binary_fractions_lack(
    share: float, rows: int, travel: int
) -> None:
    assert SendRows(share, 4).parts(MatrixSpec("w", rows, 8)) == travel


def test_rows_are_chosen_where_few_hold_most_and_given_up_where_they_do_not() -> None:
    layers = [parameter(str(place), 128, 512, steepness=1.7, by_rows=0.3) for place in range(4)]
    words = parameter("words", 2048, 128, steepness=1.2, by_rows=1.3)
    planner = planned(28.0, 1000, 0, [[*layers, words]], 4.0)
    assert isinstance(planner.choices[-1], SendRows)
    assert planner.ranks(0)["words"] == words.rank_beside_rows == 8 and planner.formats(0)["words"].startswith("rows:")
    assert all(isinstance(one, SendLowRank) for one in planner.choices[:-1])
    noise = {c.matrix.name: c.noise(one) for c, one in zip(planner.parameters, planner.choices, strict=True)}
    planner.observe(shown([seen({**noise, "words": 8.0})]))  # as of many tokens, each of them about as often
    planner.decide(10)
    assert isinstance(planner.choices[-1], SendLowRank)


def test_a_parameter_with_more_energy_gets_more_bytes() -> None:
    twins = [parameter("loud", steepness=1.0), parameter("quiet", steepness=1.0)]
    planner = planned(16.0, 1000, 0, [twins], 4.0)
    loud, quiet = (c.noise(one) for c, one in zip(planner.parameters, planner.choices, strict=True))
    planner.observe(shown([{"loud": (loud, 30.0), "quiet": (quiet, 0.3)}]))
    planner.decide(10)
    loud, quiet = (c.size(one, BYTES) for c, one in zip(planner.parameters, planner.choices, strict=True))
    assert loud > 2 * quiet


def test_a_parameter_that_was_not_measured_weighs_as_before_whatever_the_unit_of_gradients() -> None:
    planner = planned(16.0, 1000, 0, [[parameter(name) for name in ("loud", "quiet", "unknown")]], 4.0)
    planner.observe(shown([{"loud": (0.5, 3e-12), "quiet": (0.5, 1e-12)}]))
    assert [one.energy for one in planner.parameters] == pytest.approx([1.5, 0.5, 1.0])


def test_a_vector_has_no_rank_and_travels_in_eight_bits_whatever_the_budget() -> None:
    for share in (0.1, 0.6, 1.1):
        assert spend([parameter("bias", 1, 512, low_rank=False)], BYTES, 512 * share) == [SendRounded("int8")]


def test_no_other_choices_in_the_budget_are_much_better() -> None:
    three = [parameter("a", steepness=0.5), parameter("b", 32, 256, steepness=2.0), parameter("c", 1, 2000, False)]
    sizes = {c.matrix.name: options(c, BYTES) for c in three}
    for share in (0.2, 0.3, 0.6):
        budget = share * sum(c.elements for c in three)
        chosen = spend(three, BYTES, budget)
        used = sum(c.size(one, BYTES) for c, one in zip(three, chosen, strict=True))
        noise = sum(c.weight * c.noise(one) for c, one in zip(three, chosen, strict=True))
        best = min(
            sum(c.weight * o.noise for c, o in zip(three, pick, strict=True))
            for pick in itertools.product(*sizes.values())
            if sum(o.size for o in pick) <= budget
        )
        assert used <= budget and noise <= 1.15 * best


def test_a_budget_below_the_smallest_options_gets_these() -> None:
    (chosen,) = spend([parameter("w")], BYTES, 1.0)
    assert chosen == SendLowRank(4)
    planner = planned(1000.0, 100, 10, [[parameter("w")]], 4.0)
    assert planner.reason == "the budget is too small"


def run_of(
    planner: BudgetPlanner,
    iterations: int,
    window: int,
    overhead: float,
    noise: float,
    begins: int = 0,
    before: ByteCount = NOTHING,
) -> float:
    """The volume of the steps from ``begins`` on. ``overhead``: messages take more. ``before``: bytes so far."""
    sent = 0.0
    for iteration in range(begins, iterations):
        size = planner._size(planner.choices) * overhead if iteration >= planner.first else planner.ledger.uncompressed
        sent += size
        if (iteration + 1) % window == 0:
            measured = (
                [seen({c.matrix.name: noise for c in planner.parameters})] if iteration >= planner.first else [{}]
            )
            dense = (iteration + 1 - begins) * planner.ledger.fp32_bytes
            planner.observe(shown(measured, sent + before.sent, dense + before.host, dense + before.fp32))
            planner.decide(iteration + 1)
    return (iterations - begins) * planner.ledger.fp32_bytes / sent


@pytest.mark.parametrize("overhead", [1.0, 1.1, 2.0])
@pytest.mark.parametrize("volume", [8.0, 24.0])
def test_a_run_sends_its_budget(volume: float, overhead: float) -> None:
    stages = [[parameter(str(place), 128, 256) for place in range(6)] + [parameter("bias", 1, 128, low_rank=False)]]
    planner = planned(volume, 1000, 25, stages, 1 + 1 / 64)
    assert run_of(planner, 1000, 20, overhead, noise=0.5) == pytest.approx(volume, rel=0.02)


@pytest.mark.parametrize("sent", [0.0, 1.0, 100.0])  # of steps in fp32; without EDGC none are counted
def test_a_volume_that_begins_amid_a_run_is_that_of_the_rest(sent: float) -> None:
    stages = [[parameter(str(place), 128, 256) for place in range(6)] + [parameter("bias", 1, 128, low_rank=False)]]
    planner = planned(24.0, 1000, 25, stages, 1 + 1 / 64, window=20)
    before = ByteCount(*[sent * planner.ledger.fp32_bytes] * 3)
    planner.begin(500, before)
    assert planner.first == 520, "a warm-up of a window"
    assert run_of(planner, 1000, 20, 1.1, 0.5, 500, before) == pytest.approx(24, rel=0.02)
    resumed = planned(24.0, 1000, 25, stages, 1 + 1 / 64, window=20)
    resumed.load_state_dict(json.loads(json.dumps(planner.state_dict())))
    assert resumed.ledger.state_dict() == planner.ledger.state_dict()


def test_a_run_that_keeps_to_its_budget_is_not_told_at_a_resume_that_it_has_spent_it() -> None:
    """The learning rate falls, so late steps get less than the mean of those before."""
    stages = [[parameter(str(place), 128, 256) for place in range(6)]]
    planner = planned(24.0, 1000, 25, stages, 0.5 + 1 / 64, learning_rate=lambda step: 1000.0 - step, window=20)
    sent = 0.0
    for iteration in range(1000):
        sent += planner._size(planner.choices) if iteration >= planner.first else planner.ledger.uncompressed
        if (iteration + 1) % 20 == 0:
            dense = (iteration + 1) * planner.ledger.fp32_bytes
            planner.observe(shown([seen({str(place): 0.5 for place in range(6)})], sent, dense, dense))
            planner.decide(iteration + 1)
        assert not planner.ledger.exhausted()


@pytest.mark.parametrize("host_bytes", [4.0, 2.0, 1.0])
def test_steps_that_the_host_sums_are_paid_for_in_a_trial_and_no_part_of_the_budget_where_they_are_usual(
    host_bytes: float,
) -> None:
    stages = [[parameter(str(place), 128, 256) for place in range(6)]]
    planner = planned(12.0, 1000, 0, stages, host_bytes)
    whole = planner.ledger.fp32_bytes * host_bytes / 4  # bytes of a step by the host
    sent, compressed, tried = 0.0, 0.0, 0
    for window in range(50):
        idle, tries = 10 <= window < 30, window in (3, 15)
        own = 3 if idle and tries else 17 if tries else 0 if idle else 20  # compressed steps of this window
        tried += 0 if idle else 20 - own
        compressed += own * planner._size(planner.choices)
        sent += own * planner._size(planner.choices) + (20 - own) * whole
        noise = {str(place): 0.5 for place in range(6)}
        steps = 20 * (window + 1)
        counted = sent, steps * whole, steps * planner.ledger.fp32_bytes
        by_host = {"host_step_share": 1 - own / 20, "sent_by_host": (20 - own) * whole}
        planner.observe(shown([seen(noise)], *counted, **by_host), outside_budget=idle)
        planner.decide(20 * (window + 1))
        assert planner.ledger.overhead == pytest.approx(1.0, rel=1e-6), "the host's bytes are not those of the plan"
    budgeted = 1000 - (20 * 20 - 3)  # steps
    assert (compressed + tried * whole) / planner.ledger.fp32_bytes == pytest.approx(budgeted / 12, rel=0.02)


def test_a_trial_whose_first_step_sends_more_leaves_the_plan_as_it_is() -> None:
    stages = [[parameter(str(place), 128, 256) for place in range(6)]]
    planner = planned(12.0, 1000, 0, stages, 2.0)
    whole = (
        planner.ledger.fp32_bytes / 2
    )  # bytes of a step by the host, whose first one sends errors as well, in an all-reduce
    sent, sizes = 0.0, []
    for window in range(50):
        sizes.append(planner._size(planner.choices))
        tries = window == 10
        sent += (17 * sizes[-1] + 3 * whole + whole) if tries else 20 * sizes[-1]
        noise, steps = {str(place): 0.5 for place in range(6)}, 20 * (window + 1)
        host_step_share = 3 / 20 if tries else 0.0
        planner.observe(
            shown(
                [seen(noise)], sent, steps * whole, steps * planner.ledger.fp32_bytes, host_step_share=host_step_share
            )
        )
        planner.decide(20 * (window + 1))
    assert sizes[11] == pytest.approx(sizes[9], rel=0.1), "but for what the trial has cost"
    assert sent / planner.ledger.fp32_bytes == pytest.approx(1000 / 12, rel=0.02)


def test_a_stage_that_had_nothing_to_compress_starts_anew_after_a_resume() -> None:
    def planner(excluded: tuple[int, ...]) -> BudgetPlanner:
        stages = [[parameter("a", 128, 256)], [parameter("b", 128, 256)]]
        return planned(12.0, 1000, 0, stages, 4.0, excluded)

    before, after, fresh = planner((0,)), planner(()), planner(())
    before.observe(shown([{}, seen({"b": 0.3})], 1.0, 2.0, 2.0))
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert after.parameters[0] == fresh.parameters[0] and after.choices[0] == fresh.choices[0]
    assert after.parameters[1:] == before.parameters and after.choices[1:] == before.choices


def test_where_too_little_of_the_gradient_arrives_steps_get_more_until_it_does() -> None:
    stages = [[parameter(str(place), 128, 256) for place in range(6)]]
    planner = planned(24.0, 1000, 0, stages, 4.0, least_fidelity=0.1)
    sent, sizes = 0.0, []
    for window, noise in enumerate([0.5, 12.0, 12.0, 4.0, 0.5, 0.5, 0.5]):
        sizes.append(planner._size(planner.choices))
        sent += 20 * sizes[-1]
        dense = 20 * (window + 1) * planner.ledger.fp32_bytes
        planner.observe(shown([seen({str(place): noise for place in range(6)})], sent, dense, dense))
        assert planner.fidelity == pytest.approx(1 / (1 + noise))
        planner.decide(20 * (window + 1))
        if window == 2:
            assert planner.reason == "too little of the gradient arrived: 4 times the budget"
            again = planned(24.0, 1000, 0, stages, 4.0, least_fidelity=0.1)
            again.load_state_dict(json.loads(json.dumps(planner.state_dict())))
            assert again.relief == 4
    usual, _, twice, four, still, less, after = sizes
    assert 1.8 * usual < twice < 2.2 * usual and 3.3 * usual < four < 4.2 * usual
    assert still > 3 * usual, "a fidelity between the two limits changes nothing"
    assert 1.5 * usual < less < 2.2 * usual and after <= usual and planner.reason == "budget"


def test_steps_after_relief_have_their_budget_as_if_there_had_been_none() -> None:
    """The windows between iterations 100 and 250 bring noise; relief ends after them, and the run goes on at rank."""
    stages = [[parameter(str(place), 128, 256) for place in range(6)]]
    budgets: dict[bool, list[float]] = {}
    for troubled in (False, True):
        planner = planned(24.0, 1000, 0, stages, 4.0, least_fidelity=0.1)
        sent, reliefs = 0.0, []
        for window in range(20):
            noise = 50.0 if troubled and 2 <= window < 5 else 0.5
            sent += 50 * planner._size(planner.choices)
            dense = 50 * (window + 1) * planner.ledger.fp32_bytes
            planner.observe(shown([seen({str(place): noise for place in range(6)})], sent, dense, dense))
            planner.decide(50 * (window + 1))
            reliefs.append(planner.relief)
            budgets.setdefault(troubled, []).append(planner.budget(50 * (window + 1)))
            if window == 5:
                planner.load_state_dict(json.loads(json.dumps(planner.state_dict())))
        assert max(reliefs) == (8 if troubled else 1) and reliefs[9:] == [1] * 11
    assert budgets[True][9:-1] == pytest.approx(budgets[False][9:-1], rel=0.05)


def test_relief_goes_on_when_it_has_taken_the_whole_budget() -> None:
    stages = [[parameter(str(place), 128, 256) for place in range(6)]]
    planner = planned(24.0, 400, 0, stages, 4.0, least_fidelity=0.1)
    sent, sizes = 0.0, []
    for window in range(12):
        sizes.append(planner._size(planner.choices))
        sent += 20 * sizes[-1]
        dense = 20 * (window + 1) * planner.ledger.fp32_bytes
        planner.observe(shown([seen({str(place): 20.0 for place in range(6)})], sent, dense, dense))
        planner.decide(20 * (window + 1))
    assert sent > 400 * planner.ledger.fp32_bytes / 24, "more than the whole run was to take"
    assert planner.relief == 8 and sizes[-1] > 4 * sizes[0], "with eight times the budget all parameters have int8"


@pytest.mark.parametrize("rmax", [24, 72, 100, None])
def test_relief_that_steps_cannot_take_is_not_charged_to_it(rmax: int | None) -> None:
    """The link, or the finest format, bounds what relieved steps take; later ones have their budget all the same."""
    stages = [[parameter(str(place), 128, 256) for place in range(6)]]
    planner = planned(24.0, 1000, 0, stages, 4.0, least_fidelity=0.1, rmax=rmax)
    sent, sizes, reliefs = 0.0, [], []
    for window in range(20):
        noise = 50.0 if window < 6 else 0.5
        sizes.append(planner._size(planner.choices))
        sent += 50 * sizes[-1]
        dense = 50 * (window + 1) * planner.ledger.fp32_bytes
        planner.observe(shown([seen({str(place): noise for place in range(6)})], sent, dense, dense))
        planner.decide(50 * (window + 1))
        reliefs.append(planner.relief)
    usual = planner.ledger.fp32_bytes / 24
    after = reliefs.index(1.0, 6) + 1
    assert after < 12 and max(sizes[after:]) < 1.1 * usual
    assert max(reliefs) * usual < 2 * max(*sizes, usual), "no doubling without bytes"


def test_a_bound_on_the_rank_may_change() -> None:
    stages = [[parameter(str(place), 128, 256) for place in range(6)]]
    planner = planned(8.0, 1000, 0, stages, 4.0)
    free = planner.budget(0)
    planner.bound(8)
    assert planner.budget(0) == planner.most < free
    planner.bound(None)
    assert planner.budget(0) == free


def test_a_bound_on_the_rank_leaves_what_has_none_its_eight_bits() -> None:
    stages = [[parameter("w"), parameter("bias", 1, 512, low_rank=False)]]
    planner = planned(8.0, 1000, 0, stages, 4.0, rmax=8)
    assert planner.most == pytest.approx(stages[0][0].size(AT_8, BYTES) + 512 * BYTES["int8"])


def test_a_step_with_relief_keeps_no_bytes_for_later_ones() -> None:
    planner = planned(24.0, 1000, 0, [[parameter("w")]], 4.0, least_fidelity=0.1)
    assert planner.enough_noise(0) > 0
    planner.observe(shown([seen({"w": 50.0})]))
    planner.decide(20)
    assert planner.relief == 2 and planner.enough_noise(20) == 0


def test_rounding_because_that_is_faster_ends_relief() -> None:
    planner = planned(24.0, 1000, 0, [[parameter("w")]], 4.0, least_fidelity=0.1)
    for iteration, rounds, relief in ((20, False, 2), (40, True, 1)):
        planner.rounds = rounds
        planner.observe(shown([seen({"w": 50.0})]))
        planner.decide(iteration)
        assert planner.relief == relief


def test_relief_is_charged_with_compressed_steps_alone_and_with_all_of_them_once_the_budget_is_spent() -> None:
    ledger = Ledger(10.0, 20, fp32_bytes=100.0, uncompressed=100.0, least=0.0)
    ledger.grant(0, 2.0)
    assert ledger.granted == StepBytes(10, 10)
    halves = shown([], 60.0, 100.0, 100.0, host_step_share=0.5, sent_by_host=50.0)
    ledger.observe(halves, outside_budget=False)
    assert ledger.counts.sent_by_relief == 5.0
    ledger.observe(shown([], 1060.0, 1100.0, 1100.0), outside_budget=False)
    ledger.grant(11, 2.0)
    assert ledger.step(11, 2.0).by_budget < 0, "steps took more than they were granted, at the cost of the budget"


def test_what_later_steps_take_at_least_is_kept_for_them_with_their_overhead() -> None:
    ledger = Ledger(10.0, 20, fp32_bytes=100.0, uncompressed=100.0, least=2.0, weights=[100.0] + [1.0] * 19)
    assert ledger.step(0, 1.0).by_budget == pytest.approx(20 * 10 - 19 * 2)
    ledger.overhead = 2.0
    assert ledger.step(0, 1.0).by_budget == pytest.approx(20 * 10 - 19 * 4)


def test_what_is_spare_is_spread_over_a_window_that_is_longer_than_a_twentieth_of_the_run() -> None:
    """A window has a measured step, so that in a short run it may be a quarter of it."""
    weights = [100.0] + [1.0] * 39
    short, long = (Ledger(10.0, 40, 100.0, 100.0, least=8.0, weights=weights, window=window) for window in (2, 10))
    spare = 40 * (10 - 8)
    assert short.step(0, 1.0).by_budget == 8 + spare / 2
    assert long.step(0, 1.0).by_budget == 8 + spare / 10


def test_steps_of_a_tiny_learning_rate_get_no_more_than_their_budget() -> None:
    stages = [[parameter(str(place), 128, 256) for place in range(6)]]
    settings = {"learning_rate_power": 0.7, "least_fidelity": 0.1}
    planner = planned(24.0, 1000, 0, stages, 4.0, learning_rate=lambda iteration: 1 - iteration / 1000, **settings)
    for iteration, relief in ((700, 2.0), (780, 4.0), (820, 1.0), (900, 1.0)):
        sent, dense = iteration * planner._size(planner.choices), iteration * planner.ledger.fp32_bytes
        planner.observe(shown([seen({str(place): 12.0 for place in range(6)})], sent, dense, dense))
        planner.decide(iteration)
        assert planner.relief == relief, iteration


def test_steps_of_a_larger_learning_rate_get_more_and_the_run_sends_its_budget() -> None:
    stages = [[parameter(str(place), 128, 256) for place in range(6)]]

    def rate(iteration: int) -> float:
        return 3e-4 * (1 - iteration / 1000)

    weights = byte_weights(rate, 1000, 0.5)
    assert [weights[iteration] for iteration in (0, 750, 999)] == pytest.approx([1, 0.5, 0.2**0.5])
    planner = planned(12.0, 1000, 25, stages, 1 + 1 / 64, learning_rate=rate, learning_rate_power=0.5)
    even = planned(12.0, 1000, 25, stages, 1 + 1 / 64)
    assert planner._size(planner.choices) > 1.3 * even._size(even.choices)
    assert run_of(planner, 1000, 20, 1.1, noise=0.5) == pytest.approx(12, rel=0.02)
    assert planner._size(planner.choices) < 0.75 * even._size(even.choices)


def test_steps_in_which_the_learning_rate_still_rises_get_as_much_as_those_of_its_peak() -> None:
    def rate(iteration: int) -> float:
        return min(iteration / 100, 1 - (iteration - 100) / 900)

    weights = byte_weights(rate, 1000, 0.5)
    assert weights[:101] == [1.0] * 101
    assert [weights[iteration] for iteration in (550, 999)] == pytest.approx([0.5**0.5, 0.2**0.5])


@pytest.mark.parametrize("volume", [24.0, 48.0, 100.0])
def test_a_run_whose_learning_rate_falls_to_zero_sends_no_more_than_its_budget(
    volume: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 100x the last steps would have less than the smallest choices take."""
    monkeypatch.setattr(budget_module, "LITTLE_NOISE", 0.0)  # nothing is kept for them
    stages = [[parameter(str(place), 128, 256) for place in range(6)]]
    rate = {"learning_rate": lambda iteration: 1 - iteration / 1000, "learning_rate_power": 0.7}
    planner = planned(volume, 1000, 10, stages, 0.5, **rate)
    assert run_of(planner, 1000, 20, 1.0, noise=0.5) == pytest.approx(volume, rel=0.005)
    assert volume < 100 or planner._size(planner.choices) < 1.25 * planner.ledger.least


def test_a_known_way_that_is_not_in_use_must_be_better_by_a_quarter() -> None:
    word = parameter("word", 4096, 128, by_rows=1.3)
    in_bits = replace(word, current=SendRounded("int8"))
    assert in_bits.noise(AT_16) == word.noise(AT_16), "what was never tried is"
    for choice in (AT_16, by_share(0.1), IN_4_BITS):
        tried = word.fitted(choice, 1.0)
        assert replace(tried, current=choice).noise(choice) == pytest.approx(1.0, rel=0.02)
        assert replace(tried, current=SendRounded("int8")).noise(choice) == pytest.approx(1.25, rel=0.02)


def test_another_number_of_bits_is_another_encoding_of_the_same_method() -> None:
    rounded = replace(parameter("word", 4096, 128, by_rows=1.3).fitted(IN_4_BITS, 1.0), current=IN_4_BITS)
    assert rounded.choices(BYTES, same_method=True) == [SendRounded(name) for name in BYTES]
    fewer_bits = SendRounded("int2")
    assert rounded.noise(fewer_bits) == pytest.approx(1.25 * rounded.rounding.noise("int2"))
    at_rank = replace(parameter("word", 4096, 128, by_rows=1.3).fitted(AT_8, 1.0), current=AT_8)
    assert {type(choice) for choice in at_rank.choices(BYTES, same_method=True)} == {SendLowRank}
    assert at_rank.noise(AT_16) == replace(at_rank, current=None).noise(AT_16), "another rank is no other encoding"


def test_rows_that_the_warm_up_has_seen_take_the_place_of_a_guess() -> None:
    """An embedding of which a tenth of the rows hold nearly all energy, and one whose rows are alike."""
    layers = [parameter(str(place), 128, 512, steepness=1.7, by_rows=0.3) for place in range(4)]

    def after_warmup(shares: list[float], even: float = 1.0) -> BudgetPlanner:
        words = parameter("words", 8192, 128, steepness=1.2, by_rows=0.3)
        planner = planned(24.0, 1000, 10, [[*layers, words]], 1 + 1 / 64)
        dense = 10 * planner.ledger.fp32_bytes
        rows = StageObservation(row_shares={"words": [*shares, even]})
        planner.observe(WindowObservation([rows], bytes=ByteCount(10 * planner.ledger.uncompressed, dense, dense)))
        planner.decide(10)
        return planner

    held = [min(1.0, 10 * share) ** 0.5 for share in ROW_SHARES]
    sparse = after_warmup(held, 0.1)
    low_rank = parameter("words", 8192, 128, steepness=1.2, by_rows=0.3)
    assert sparse.parameters[-1].noise(AT_16) == pytest.approx(10 * low_rank.noise(AT_16)), "what few rows have"
    assert sparse.choices[-1] in (by_share(0.07, rank=8), by_share(0.1, rank=8)) and not any(sparse.changed)
    assert sparse.parameters[-1].rows.spectrum.noise(410) == pytest.approx(1 / held[3] ** 2 - 1, rel=0.01)
    even = after_warmup(list(ROW_SHARES))
    assert not isinstance(even.choices[-1], SendRows)
    state = json.loads(json.dumps(sparse.state_dict()))
    again = after_warmup(list(ROW_SHARES))
    again.load_state_dict(state)
    assert again.parameters == sparse.parameters and again.choices == sparse.choices
    fitted = sparse.parameters[-1].fitted(by_share(0.05), 2.0)
    assert fitted.noise(by_share(0.05)) == pytest.approx(2.0, rel=0.02) and fitted.noise(by_share(0.02)) > 4
    for nothing in ([], [math.nan] * 10, [0.0] * 10, held[:9]):
        assert after_warmup(nothing).parameters[-1].rows.spectrum.measured_shares == ()


def test_noise_that_grows_makes_the_other_way_no_better() -> None:
    word = parameter("word", 4096, 128, by_rows=1.3).fitted(by_share(0.1), 0.2)
    first = word.noise(AT_16) / word.noise(by_share(0.1))
    for noise in (0.4, 0.8, 1.6, 3.2):
        word = word.fitted(by_share(0.1), noise)
    assert word.noise(by_share(0.1)) > 4 * 0.2
    assert first <= word.noise(AT_16) / word.noise(by_share(0.1)) < 1.3 * first  # rows are rounded as well
    assert word.noise(IN_4_BITS) == parameter("word", 4096, 128).noise(IN_4_BITS), (
        "rounding is the same for all gradients"
    )


def test_noise_of_low_rank_that_grows_makes_rows_no_better() -> None:
    word = first = parameter("word", 4096, 128, by_rows=1.3).fitted(AT_16, 0.2)
    for noise in (0.4, 0.8, 1.6, 3.2):
        word = word.fitted(AT_16, noise)
    assert word.noise(AT_16) > 4 * first.noise(AT_16)
    rows, before = (one.noise(by_share(0.1)) - one.rounding.noise("int4") for one in (word, first))
    assert rows / before == pytest.approx(word.noise(AT_16) / first.noise(AT_16))


@pytest.mark.parametrize("bad", [1, 3, 5])
def test_windows_in_which_nothing_arrived_make_the_other_way_no_better_afterwards(bad: int) -> None:
    word = parameter("word", 4096, 128, by_rows=1.3)
    for _ in range(6):
        word = word.fitted(by_share(0.1), 0.2)
    before = word.noise(AT_16)
    for _ in range(bad):
        word = word.fitted(by_share(0.1), math.inf)
    assert word.noise(AT_16) > before
    for _ in range(40):
        word = word.fitted(by_share(0.1), 0.2)
    assert word.noise(AT_16) == pytest.approx(before, rel=0.2)  # laws have two digits


def test_stages_that_are_never_compressed_take_their_part_of_the_budget() -> None:
    stage = [parameter(str(place), 128, 256) for place in range(4)]
    alone = planned(6.0, 100, 0, [stage], 4.0)
    beside = planned(6.0, 100, 0, [stage, [parameter("other", 96, 96)]], 4.0, excluded=(1,))
    assert beside._size(beside.choices) < 0.8 * alone._size(alone.choices)
    assert beside.stage_of == [0] * 4


def test_what_stages_that_are_never_compressed_send_is_no_overhead() -> None:
    stages = [[parameter("w", 128, 256)], [parameter("other", 96, 96)]]
    planner = planned(6.0, 100, 0, stages, 4.0, (1,))
    sent = 0.0
    for end in (10, 20):
        sent += 10 * (planner._size(planner.choices) + 4 * 96 * 96)
        dense = end * planner.ledger.fp32_bytes
        planner.observe(shown([{}, {}], sent, dense, dense))
        planner.decide(end)
    assert planner.ledger.overhead == pytest.approx(1.0)


def test_parameters_keep_their_method_only_where_it_fits_the_budget() -> None:
    stages = [[parameter(str(place), 128, 256, steepness=0.5, rounding=1.0) for place in range(4)]]
    planner = planned(20.0, 1000, 0, stages, 4.0)
    planner.choices = [SendRounded("int2")] * 4  # as of an earlier window, when steps had more bytes
    planner.decide(10)
    assert planner._size(planner.choices) <= planner.budget(10)


def test_a_plan_changes_for_a_gain_alone() -> None:
    stages = [[parameter(str(place), 128, 256, steepness=1.5, rounding=4.0) for place in range(4)]]
    planner = planned(20.0, 1000, 0, stages, 4.0)
    before = list(planner.choices)
    predicted = {c.matrix.name: c.noise(one) for c, one in zip(planner.parameters, before, strict=True)}
    size = planner._size(planner.choices)
    dense = planner.ledger.fp32_bytes
    noise = seen({name: 1.03 * noise for name, noise in predicted.items()})
    planner.observe(shown([noise], 10 * size, 10 * dense, 10 * dense))
    planner.decide(10)
    assert planner.choices == before
    predicted["0"] *= 10
    for end in (20, 30, 40, 50):
        planner.observe(shown([seen(predicted)], end * size, end * dense, end * dense))
    planner.decide(50)
    assert planner.choices != before and planner.choices[0] != before[0]
    planner.decide(1000)  # after the last step there is nothing to plan


def test_the_first_window_of_a_new_way_says_nothing_of_it() -> None:
    """What low rank has left is sent with the first rows: that is no noise of rows."""
    layers = [parameter(str(place), 128, 512, steepness=1.7, by_rows=0.3) for place in range(4)]
    words = parameter("words", 4096, 128, steepness=1.7, by_rows=1.3)
    planner = planned(24.0, 1000, 0, [[*layers, words]], 4.0)
    assert isinstance(planner.choices[-1], SendLowRank), "low rank is tried first"

    def window(end: int, of_words: float) -> None:
        noise = {c.matrix.name: c.noise(one) for c, one in zip(planner.parameters, planner.choices, strict=True)}
        planner.observe(shown([seen({**noise, "words": of_words})]))
        planner.decide(end)

    window(10, 8.0)
    assert isinstance(planner.choices[-1], SendRows) and planner.changed == [False] * 4 + [True]
    window(20, 30.0)
    assert isinstance(planner.choices[-1], SendRows) and not any(planner.changed)
    window(30, 30.0)
    assert isinstance(planner.choices[-1], SendLowRank)


@pytest.mark.parametrize(("energy", "moves"), [(0.04, False), (20.0, True)])
def test_ways_change_only_where_the_whole_plan_gains_a_tenth(energy: float, moves: bool) -> None:
    """What an embedding gains by another way may be little beside the noise of the layers."""
    layers = [parameter(str(place), 128, 512).fitted(SendLowRank(28), 1.0) for place in range(6)]
    words = parameter("words", 1024, 128, by_rows=1.3)
    planner = planned(24.0, 1000, 0, [[*layers, words]], 4.0)
    assert isinstance(planner.choices[-1], SendLowRank)
    few = parameter("words", 1024, 128, by_rows=2.5).rows
    planner.parameters[-1] = replace(words.fitted(AT_16, 4.0), rows=few).with_energy(energy)
    usual, best = (planner._best(10, planner.choices, same_methods=same).choices for same in (True, False))
    assert isinstance(best[-1], SendRows) and planner._noise(best) < 0.99 * planner._noise(usual)
    planner.decide(10)
    assert planner.choices == (best if moves else usual)


def controller(
    volume: float = 20.0,
    excluded: tuple[int, ...] = (),
    rounds: bool = False,
    trials: Trials | None = None,
    link_times: LinkTimes | None = None,
) -> Controller:
    config = EDGCConfig.of(volume=volume, window=10, allocation="uniform")
    stages = [[parameter(f"{stage}", 128, 256), parameter("bias", 1, 128, low_rank=False)] for stage in range(2)]
    planner = planned(volume, 200, 10, stages, 1.0, excluded, rounds=rounds)
    controlled = [ControlledStage([stage[0].matrix], excluded=index in excluded) for index, stage in enumerate(stages)]
    return Controller(config, 200, controlled, planner, trials, link_times)


def observed(noise: float, *counted: float, reduce_seconds: float = math.nan, **rest: Any) -> WindowObservation:
    """``counted``: bytes so far, by the host, and in fp32."""
    stages = [StageObservation(-5.0, reduce_seconds, noise=seen({str(stage): noise})) for stage in range(2)]
    return WindowObservation(stages, bytes=ByteCount(*counted), **rest)


@pytest.mark.parametrize(("noise", "relief"), [(0.5, 1.0), (12.0, 2.0)])
def test_a_plan_says_how_many_times_its_budget_a_step_gets(noise: float, relief: float) -> None:
    under_test = controller()
    assert under_test.budget is not None
    under_test.budget.guard.least = 0.1
    under_test.decide(10)
    under_test.observe(observed(noise))
    assert under_test.decide(20).relief == relief


def test_a_stage_that_is_never_compressed_says_so_after_a_resume() -> None:
    before = controller()
    before.decide(10)
    after = controller(excluded=(1,))
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert after.plan.reasons == ("budget", "never compressed") and after.plan.ranks[1] is None


def test_a_loss_that_rises_while_the_host_sums_takes_no_bytes() -> None:
    under_test = controller(trials=Trials(200, 1.0, False, by_host=True))
    reliefs = []
    for window, loss in enumerate([3.0, 4.0, 4.0], start=2):
        under_test.observe(observed(0.5, loss=loss))
        plan = under_test.decide(10 * window)
        reliefs.append((plan.by_host, plan.relief, plan.loss_rise > 0))
    assert reliefs == [(True, 1, False), (True, 1, True), (True, 1, True)]


def test_steps_get_twice_the_bytes_while_the_loss_rises() -> None:
    under_test = controller()
    under_test.decide(10)
    plans = []
    for window, loss in enumerate([3.0, 4.0, 4.0, 3.0, 3.0], start=2):
        assert under_test.budget is not None
        dense = 10 * window * under_test.budget.ledger.fp32_bytes
        under_test.observe(observed(0.5, dense / 20, dense, dense, loss=loss))
        plans.append(under_test.decide(10 * window))
        if loss == 4.0:  # what a resumed run goes on with
            state, under_test = json.loads(json.dumps(under_test.state_dict())), controller()
            under_test.load_state_dict(state)
    assert [plan.relief for plan in plans] == [1, 2, 4, 2, 1]
    assert plans[2].reasons == ("the training loss rose: 4 times the budget",) * 2


@pytest.mark.parametrize("mixed", [False, True])
def test_a_window_of_which_a_resume_has_hidden_a_trial_teaches_nothing(mixed: bool) -> None:
    """Steps of the host's own sum would look as if compressed ones took more than predicted."""
    before = controller()
    before.decide(10)
    before.observe(observed(0.5, 1e5, 1e6, 1e6))
    before.decide(20)
    state = json.loads(json.dumps(before.state_dict()))
    state["plan"]["trial"] = [21, 24] if mixed else None
    for _ in range(2):  # also of a second resume in the same window
        after = controller()
        after.load_state_dict(state)
        state = json.loads(json.dumps(after.state_dict()))
    assert after.budget is not None
    for sent, known in ((3e5, not mixed), (4e5, True)):
        after.observe(observed(0.5, sent, 10 * sent, 10 * sent))
        assert (after.budget.ledger.per_step is not None) == known


def test_early_steps_with_little_noise_leave_bytes_for_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = [[parameter(str(place), 128, 256) for place in range(6)]]
    sizes: dict[float, list[float]] = {}
    for little in (0.0, 0.1):
        monkeypatch.setattr(budget_module, "LITTLE_NOISE", little)
        planner, sent = planned(24.0, 1000, 20, stages, 0.5, window=20), 0.0
        for window in range(50):
            sent += 20 * (planner._size(planner.choices) if window else planner.ledger.uncompressed)
            dense = 20 * (window + 1) * planner.ledger.fp32_bytes
            # the same choices make thirty times the noise in the second half of the run
            growth = 1 if window < 25 else 30
            noise = {one.matrix.name: 0.02 * growth for one in planner.parameters}
            planner.observe(shown([seen(noise) if window else {}], sent, dense, dense))
            planner.decide(20 * (window + 1))
            sizes.setdefault(little, []).append(planner._size(planner.choices))
        assert 1000 * planner.ledger.fp32_bytes / sent == pytest.approx(24.0, rel=0.05), (
            "all of the budget is spent in the end"
        )
    assert sizes[0.1][10] < 0.7 * sizes[0.0][10] and sizes[0.1][30] > 1.2 * sizes[0.0][30]


def test_a_step_gets_what_its_window_is_worth() -> None:
    stages = [[parameter(str(place), 128, 256) for place in range(6)]]
    rate = {"learning_rate": lambda iteration: 1.0 if iteration < 50 else 0.5, "learning_rate_power": 1.0}
    by_two, by_window = (planned(8.0, 100, 0, stages, 0.5, **rate, window=window) for window in (2, 20))
    assert by_two.ledger.share[40] == by_window.ledger.share[0] * 75 / 35 == pytest.approx(1 / 35)
    assert by_window.ledger.share[40] == pytest.approx(0.75 / 35), "half of the window is worth half"
    assert by_window.ledger.share[90] == pytest.approx(1 / 10)


def test_what_a_run_can_send_at_least_bounds_its_volume() -> None:
    stages = [[parameter(str(place), 128, 256) for place in range(6)]]
    usual, small = (planned(volume, 100, 5, stages, 0.5) for volume in (24.0, 5000.0))
    assert 24.0 < usual.reachable == small.reachable < 5000.0
    sent = 5 * usual.ledger.uncompressed + 95 * sum(options(one, BYTES)[0].size for one in stages[0])
    assert usual.reachable == pytest.approx(100 * usual.ledger.fp32_bytes / sent)


def test_a_budget_leaves_the_probes_costs_as_they_are() -> None:
    # parameters in few bits alone have rank 0, and a cost fitted to larger ranks may be 0 there
    config = EDGCConfig.of(volume=4.0, window=10, allocation="uniform")
    stages = [[parameter("bias", 1, 128, low_rank=False)]]
    planner = planned(4.0, 200, 10, stages, 1.0)
    cost = StageCost(LinearCost(0.0, 0.001), 1.0, 1.0)
    under_test = Controller(config, 200, [ControlledStage([], cost)], planner)
    under_test.observe(WindowObservation([StageObservation(-5.0, reduce_seconds=0.1)]))
    assert under_test.times.costs == [cost]


def test_windows_that_the_host_sums_leave_the_plan_as_it_is_whatever_they_send() -> None:
    stages = [[parameter(str(place), 128, 256) for place in range(6)]]
    usual, extra = (
        planned(12.0, 1000, 0, stages, 4.0, learning_rate=lambda i: 1 - i / 1000, learning_rate_power=1.0)
        for _ in range(2)
    )
    sizes = []
    for planner, of_its_way in ((usual, 1.0), (extra, 1.5)):
        sent = 0.0
        for window in range(30):
            idle = 10 <= window < 20
            host_steps = (17 if window == 15 else 20) if idle else 0  # in one window compression is tried
            by_host = host_steps * of_its_way * planner.ledger.fp32_bytes
            sent += by_host + (20 - host_steps) * planner._size(planner.choices)
            dense = 20 * (window + 1) * planner.ledger.fp32_bytes
            noise = seen({str(place): 0.5 for place in range(6)})
            summed = {"host_step_share": host_steps / 20, "sent_by_host": by_host}
            planner.observe(shown([noise], sent, dense, dense, **summed), outside_budget=idle)
            planner.decide(20 * (window + 1))
            assert planner.ledger.overhead == pytest.approx(1.0, rel=1e-6)
        sizes.append(planner._size(planner.choices))
    assert sizes[0] == sizes[1]


def test_the_link_bounds_each_stage_and_not_only_their_sum() -> None:
    stages = [[parameter(f"{stage}", 128, 256, steepness=1.0)] for stage in range(2)]
    planner = planned(4.0, 1000, 0, stages, 4.0, rmax=16)
    assert planner.limit == "link"
    noise = [{"0": (0.5, 10.0)}, {"1": (0.5, 0.1)}]  # the energy of the first one counts a hundred times as much
    planner.observe(shown(noise))
    planner.decide(20)
    own = [one.size(choice, BYTES) for one, choice in zip(planner.parameters, planner.choices, strict=True)]
    assert max(own) <= planner.most / 2 * (1 + 1e-9) and planner.limit == "link"


def test_relief_stays_where_a_resume_with_another_volume_has_left_next_to_nothing() -> None:
    """Else every second window would send as little as it can."""
    stages = [[parameter(str(place), 128, 256) for place in range(6)]]
    planner = planned(24.0, 1000, 0, stages, 4.0, least_fidelity=0.1)
    whole, sent = planner.ledger.fp32_bytes, 500 / 8 * planner.ledger.fp32_bytes  # the first half at a volume of 8
    planner.observe(shown([seen({str(place): 0.5 for place in range(6)})], sent, 500 * whole, 500 * whole))
    planner.decide(500)
    assert planner.ledger.exhausted()
    reliefs = []
    for window in range(8):
        size = planner._size(planner.choices)
        sent += 50 * size
        dense = (550 + 50 * window) * whole
        noise = 0.5 if size > whole / 30 else 50.0
        planner.observe(shown([seen({str(place): noise for place in range(6)})], sent, dense, dense))
        planner.decide(550 + 50 * window)
        reliefs.append(planner.relief)
    assert reliefs[1:] == [2.0] * 7


def test_the_evenness_of_rows_is_counted_once() -> None:
    shares = [min(1.0, 0.3 + share) for share in ROW_SHARES]
    before = parameter("words", 8192, 128, steepness=1.2, by_rows=0.3)
    once = before.with_rows([*shares, 0.25])
    often = once
    for _ in range(3):
        often = often.with_rows([*shares, 0.25])
    assert often == once and once.noise(AT_16) == pytest.approx(4 * before.noise(AT_16))
    assert once.with_rows([*shares, 0.5]).noise(AT_16) == pytest.approx(2 * before.noise(AT_16)), (
        "the newest window holds"
    )


def test_the_controller_takes_ranks_and_formats_from_the_budget() -> None:
    under_test = controller()
    plan = under_test.plan
    assert (plan.version, plan.first_iteration, plan.reasons) == (0, 10, ("budget", "budget"))
    for ranks, formats in zip(plan.matrix_ranks, plan.formats, strict=True):
        assert ranks is not None and formats is not None and ranks.keys() | formats.keys() == {*ranks, "bias"}
    dense = 10 * 4.0 * 2 * (128 * 256 + 128)
    under_test.observe(WindowObservation([StageObservation(-5.0)] * 2, bytes=ByteCount(dense / 4, dense, dense)))
    assert under_test.decide(10) == plan, "in the warm-up no noise is measured"
    under_test.observe(observed(5.0, 0.26 * dense, 2 * dense, 2 * dense))
    after = under_test.decide(20)
    assert (after.version, after.first_iteration) == (1, 20)
    again = controller()
    assert again.load_state_dict(json.loads(json.dumps(under_test.state_dict())))
    for one in (under_test, again):
        one.observe(observed(0.5, 3e5, 6e6, 6e6))
    assert again.decide(30).to_dict() == under_test.decide(30).to_dict()


def test_trials_take_their_share_of_what_a_volume_has_left() -> None:
    trials = Trials(200, 1.0, overlapped=False, volume_steps=100.0)
    under_test = controller(trials=trials)
    before = trials.largest_host_steps
    under_test.begin(150, ByteCount())
    assert trials.largest_host_steps == pytest.approx(before / 4)
    again = Trials(200, 1.0, overlapped=False, volume_steps=100.0)
    resumed = controller(trials=again)
    for _ in range(2):  # one session may load more than one checkpoint
        assert resumed.load_state_dict(json.loads(json.dumps(under_test.state_dict())))
        assert again.largest_host_steps == pytest.approx(before / 4), "a second resume is within the same rest"


def test_a_volume_that_had_nothing_to_compress_begins_where_there_is_something() -> None:
    """A run of one process goes on at several: a warm-up comes first, and nothing is said of bytes that nobody sent."""
    alone = controller(excluded=(0, 1))
    alone.observe(WindowObservation([StageObservation(-5.0)] * 2, bytes=ByteCount()))
    alone.decide(100)
    several = controller()
    assert several.load_state_dict(json.loads(json.dumps(alone.state_dict()))) and not several.resumed
    several.begin(100, ByteCount())
    assert several.plan.summing(100) == Summing.DENSE and several.plan.summing(110) == Summing.COMPRESSED
    assert several.budget is not None and not several.budget.ledger.exhausted()


def test_a_resumed_run_goes_on_with_the_bound_on_the_rank_that_it_had() -> None:
    under_test = controller()
    assert under_test.budget is not None
    under_test.adopt_ranks(under_test.state_dict(), rmax=8)
    assert under_test.budget.most == sum(under_test.budget._at_rank(8).values()) < math.inf
    assert under_test.config.ranks.rmax == under_test.entropy.config.ranks.rmax == 8


def test_what_is_rounded_because_that_is_faster_is_no_part_of_the_budget() -> None:
    under_test, step = controller(volume=20.0), 4.0 * 2 * (128 * 256 + 128)
    budget = under_test.budget
    assert budget is not None
    under_test.decide(10)
    budget.rounds, budget.guard.least = True, 0.1  # no bytes are added to those of rounding
    for end in range(20, 110, 10):
        dense = end * step
        under_test.observe(observed(12.0, dense / 7, dense, dense))
        plan = under_test.decide(end)
        assert plan.formats == ({"0": "int4", "bias": "int8"}, {"1": "int4", "bias": "int8"}) and not any(plan.ranks)
        assert plan.reasons == ("rounding is faster",) * 2 and plan.relief == 1
    budget.rounds = False
    assert budget.budget(100) == pytest.approx(step / 20)
    assert all(under_test.decide(100).ranks)


@pytest.mark.parametrize("resumes", [1, 2])
@pytest.mark.parametrize("before", ["the host", "rounding", "low rank"])
def test_a_window_in_which_a_resume_changes_who_sums_is_no_part_of_the_budget(before: str, resumes: int) -> None:
    """A resumed run that is asked for a rank compresses, whatever the run before has found of its link."""
    step = 4.0 * 2 * (128 * 256 + 128)
    first = controller(volume=20.0, rounds=before == "rounding")
    first.plan = replace(first.plan, by_host=before == "the host")
    each = {"the host": step, "rounding": step / 7, "low rank": step / 20}[before]
    first.decide(10)
    if before == "the host":
        first.observe(observed(0.5, 20 * step, 20 * step, 20 * step, host_step_share=1.0, sent_by_host=20 * step))
    else:
        first.observe(observed(0.5, 10 * step + 10 * each, 20 * step, 20 * step))
    first.decide(20)
    assert first.budget is not None
    expected, state = first.budget.budget(20), json.loads(json.dumps(first.state_dict()))
    for _ in range(resumes):
        under_test = controller(volume=20.0)
        assert under_test.load_state_dict(state)
        state = json.loads(json.dumps(under_test.state_dict()))
    budget = under_test.budget
    assert budget is not None
    sent = budget.ledger.counts.run.sent + 8 * each + 2 * step / 20
    under_test.observe(observed(0.5, sent, 30 * step, 30 * step))
    if before == "low rank":
        assert budget.ledger.counts.outside_budget.fp32 == 0
    else:
        assert budget.ledger.counts.outside_budget.fp32 == 30 * step
        assert budget.budget(30) == pytest.approx(step / 20) == pytest.approx(expected)


def test_a_resume_within_a_window_of_the_hosts_sums_charges_none_of_them_to_the_budget() -> None:
    step = 4.0 * 2 * (128 * 256 + 128)
    first, resumed = (controller(trials=Trials(200, 1.0, False, by_host=True)) for _ in range(2))
    first.decide(10)
    first.observe(observed(0.5, 20 * step, 20 * step, 20 * step, host_step_share=1.0, sent_by_host=20 * step))
    first.decide(20)
    assert resumed.load_state_dict(json.loads(json.dumps(first.state_dict()))) and resumed.budget is not None
    # of the ten steps of this window seven were before the resume
    resumed.observe(observed(0.5, 30 * step, 30 * step, 30 * step, host_step_share=1.0, sent_by_host=3 * step))
    assert resumed.budget.ledger.counts.outside_budget.sent == 30 * step
    assert resumed.budget.budget(30) == pytest.approx(step / 20)


def test_a_plan_names_the_trial_of_its_own_run_alone() -> None:
    """A run that was resumed with a rank has made none: its plan must not say so when trials begin anew."""
    first = controller()
    first.plan = replace(first.plan, tried=(1.0, 2.0))
    second = controller()
    assert second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.trials is None and second.plan.tried == ()


def test_a_resumed_run_rounds_if_the_run_before_had_to() -> None:
    rounding, own = controller(rounds=True), controller()
    state = json.loads(json.dumps(rounding.state_dict()))
    assert own.load_state_dict(state) and not own.rounds, "other ranks were asked for: its own link decides"
    own.adopt_ranks(state)
    assert own.rounds
    own.adopt_ranks(controller().state_dict())
    assert not own.rounds
    own.adopt_ranks({**state, "budget": None})
    assert not own.rounds


# on the link of before training: an all-reduce in fp32, rounding, low rank at a volume of 20
TIMES = LinkTimes(ReductionTime(0.8, 1.0), ReductionTime(0.12, 1 / 8), ReductionTime(0.24, 1 / 20))


@pytest.mark.parametrize(
    ("used", "reduction", "rounds"),
    [
        ("rounding", 0.32, True),  # low rank would take as long
        ("rounding", 0.60, False),
        ("rounding", 0.05, True),
        ("the host", 0.90, False),  # about the same link
        ("the host", 1.60, True),
        ("the host", 9.00, False),
        ("low rank", 0.60, False),
    ],
)
def test_a_run_that_rounds_goes_over_to_low_rank_where_its_link_becomes_slow(
    used: str, reduction: float, rounds: bool
) -> None:
    before = {"rounding": 0.12, "the host": 0.8, "low rank": 0.24}[used]
    trials = Trials(200, 0.8, overlapped=False, by_host=used == "the host")
    under_test = controller(rounds=used == "rounding", trials=trials, link_times=TIMES)
    if used == "the host":  # before this, neither low rank nor rounding was worth its time
        under_test.link_times = LinkTimes(
            ReductionTime(0.8, 1.0), ReductionTime(0.70, 1 / 8), ReductionTime(0.9, 1 / 20)
        )
    assert under_test.budget is not None
    steps = {trials.by_host: [1.0] * 10, not trials.by_host: []}
    plan = under_test.decide(10)
    for end in (20, 30):
        under_test.observe(observed(0.5, reduce_seconds=before, step_seconds=steps))
        plan = under_test.decide(end)
        assert under_test.rounds == (used == "rounding")
    under_test.observe(observed(0.5, reduce_seconds=reduction, step_seconds=steps))
    after = under_test.decide(40)
    if used == "rounding":
        assert plan.ranks == (NO_RANK, NO_RANK)
    assert under_test.rounds == rounds
    assert any(ranks for ranks in after.matrix_ranks) != rounds
    state = json.loads(json.dumps(under_test.state_dict()))
    if used == "rounding" and not rounds:  # and when the link is again what it was, it rounds again
        low_rank = 0.24 + (reduction - before) * 8 / 20
        for seconds in (low_rank, low_rank, 0.24):
            trials.trial = None
            under_test.observe(observed(0.5, reduce_seconds=seconds, step_seconds=steps))
            under_test.decide(50)
            assert under_test.rounds == (seconds == 0.24)
    resumed = controller(rounds=rounds)
    saved = LinkTimes.from_list(state["link_times"])
    assert resumed.load_state_dict(state) and resumed.link_times == saved
    own = controller(rounds=rounds, link_times=TIMES)
    assert own.load_state_dict(state) and own.link_times == TIMES, "its own link was timed"
    own.adopt_ranks(state)
    assert own.load_state_dict(state) and own.link_times == saved


def test_a_stage_that_is_never_compressed_has_no_choices() -> None:
    plan = controller(excluded=(1,)).plan
    assert plan.ranks[1] is None and plan.matrix_ranks[1] is None and plan.formats[1] is None
    assert plan.ranks[0] is not None


def test_a_budget_does_not_go_on_from_a_state_without_one() -> None:
    fresh = controller()
    plan = fresh.plan
    assert not fresh.load_state_dict({**controller().state_dict(), "budget": None})
    assert fresh.plan == plan


def test_a_state_of_other_parameters_is_refused() -> None:
    state = controller().state_dict()
    with pytest.raises(ValueError, match="other parameters"):
        other = controller()
        assert other.budget is not None
        other.budget.parameters[2] = parameter("another", 128, 256)
        other.load_state_dict(state)
    older = {name: part for name, part in state["budget"].items() if name != "changed"}
    with pytest.raises(ValueError, match="another release"):
        controller().load_state_dict({**state, "budget": older})


def test_formats_that_lose_nothing_that_counts() -> None:
    assert noise_of_format("fp32") == noise_of_format("bf16") == 0
    assert noise_of_format("int2") > noise_of_format("int3") > noise_of_format("int4") > noise_of_format("int8") > 0


def test_large_ranks_to_try_are_few_so_that_matrices_share_them() -> None:
    assert ranks_to_try(64) == list(range(4, 33, 4))
    large = [rank for rank in ranks_to_try(4480) if rank >= 96]
    assert len(large) < 25 and all(rank % 16 == 0 for rank in large)
    assert all(1.08 < after / before <= 7 / 6 for before, after in itertools.pairwise(large))


def test_a_volume_without_parameters_of_its_own_has_nothing_to_learn() -> None:
    """One process a stage, and Megatron's own sum of a tied embedding: all that is counted is Megatron's."""
    planner = planned(24.0, 1000, 10, [[]], 4.0)
    for window in range(1, 4):
        planner.observe(shown([{}], 8e6 * window, 8e6 * window, 8e6 * window))
        planner.decide(50 * window)
    assert planner.choices == []


def test_a_resumed_run_of_another_length_has_the_volume_as_a_whole() -> None:
    def planner(iterations: int) -> BudgetPlanner:
        return planned(24.0, iterations, 10, [[parameter("w")]], 4.0)

    before, longer = planner(1000), planner(2000)
    spent, dense = before.ledger.fp32_bytes * 500 / 16, before.ledger.fp32_bytes * 500  # more than its share
    before.observe(shown([{}], spent, dense, dense))
    longer.load_state_dict(before.state_dict())
    assert longer.budget(500) * 1500 + spent == pytest.approx(longer.ledger.fp32_bytes * 2000 / 24)
    assert before.budget(500) * 500 + spent == pytest.approx(before.ledger.fp32_bytes * 1000 / 24)


def test_a_resume_in_the_warm_up_with_another_link_is_no_new_plan() -> None:
    settings = EDGCConfig.from_preset(volume=24, window=10, rmax=64)
    planner = BudgetPlanner(settings, 1000, [[parameter("w")]], (), BYTES, 4.0)
    c = Controller(settings, 1000, [ControlledStage([MatrixSpec("w", 64, 128)])], planner)
    before = c.plan
    c.plan = replace(before, reasons=("of another link",))
    c.observe(WindowObservation([StageObservation()]))
    assert c.decide(10).version == 0, "so that the end of the warm-up closes a window"


def test_a_parameter_counts_by_its_size_and_energy_in_the_mean_energy_and_in_the_fidelity() -> None:
    planner = planned(16.0, 1000, 0, [[parameter("large", 64, 192), parameter("small", 64, 64)]], 4.0)
    planner.observe(shown([{"large": (1.0, 2.0), "small": (3.0, 6.0)}]))
    assert [one.energy for one in planner.parameters] == pytest.approx([2 / 3, 2.0])  # over a mean of 3
    assert planner.fidelity == pytest.approx((3 * 2 / 2 + 1 * 6 / 4) / (3 * 2 + 1 * 6))


def test_a_resume_in_the_first_window_of_a_new_way_learns_nothing_of_it_either() -> None:
    planner, again = (planned(16.0, 1000, 0, [[parameter("w")]], 4.0) for _ in range(2))
    planner.changed = [True]
    again.load_state_dict(json.loads(json.dumps(planner.state_dict())))
    before = again.parameters[0].learned()
    again.observe(shown([seen({"w": 30.0})]))
    assert again.parameters[0].learned() == before


@pytest.mark.parametrize("choice", [SendRounded("int4"), SendLowRank(8), by_share(0.1)], ids=str)
def test_dear_bytes_are_dear_however_a_parameter_travels(choice: Choice) -> None:
    one = parameter("words", 512, 64, by_rows=1.3)
    assert replace(one, price=3.0).size(choice, BYTES) == pytest.approx(3 * one.size(choice, BYTES))


def test_relief_goes_on_after_a_resume_and_is_no_part_of_the_budget_there_either() -> None:
    planner, again = (planned(24.0, 1000, 0, [[parameter("w", 128, 256)]], 4.0, least_fidelity=0.1) for _ in range(2))
    dense = 20 * planner.ledger.fp32_bytes
    planner.observe(shown([seen({"w": 30.0})], dense / 24, dense, dense))
    planner.decide(20)
    assert planner.relief == 2
    again.load_state_dict(json.loads(json.dumps(planner.state_dict())))
    for one in (planner, again):
        one.observe(shown([seen({"w": 30.0})], 3 * dense / 24, 2 * dense, 2 * dense))
    assert again.ledger.counts.sent_by_relief == planner.ledger.counts.sent_by_relief > 0


def test_relief_is_so_many_times_what_a_step_of_this_learning_rate_gets() -> None:
    weights = [1.0] * 50 + [0.5] * 50
    ledger = Ledger(10.0, 100, 1000.0, 1000.0, 1.0, weights)
    for iteration in (0, 60):
        step = ledger.step(iteration, 3.0)
        usual = 100.0 * weights[iteration] / 0.75
        assert step.total == pytest.approx(max(step.by_budget, usual) + 2 * usual)


def test_noise_is_at_most_a_hundred_times_that_of_the_law_however_hard_a_spectrum_has_become() -> None:
    one = EnergySpectrum(64, 1.5)
    assert one.with_noise_scaled(1e4).noise(8) == pytest.approx(100 * one.noise(8))
    assert one.with_noise_scaled(1e4).with_noise_scaled(1e-4).noise(8) == pytest.approx(one.noise(8))
    law = noise_of_format("int4")
    assert RoundingNoise().fitted("int4", 0.6 * law).noise("int4") == pytest.approx(0.6 * law)


def test_of_rows_that_held_all_there_is_some_noise_and_no_window_makes_a_factor_of_more_than_a_hundred() -> None:
    all_in_ten = EnergySpectrum(100, 1.0, measured_shares=((5, 0.5), (10, 1.0)))
    assert all_in_ten.noise(20) == LEAST_NOISE
    law = all_in_ten.noise(5)
    for times, factor in ((1e-4, 0.01), (0.1, 0.1), (1e4, 100.0)):
        fitted = all_in_ten.fitted(5, times * law)
        assert fitted.factor == pytest.approx(factor) and fitted.noise(5) == pytest.approx(factor * law)


def test_no_budget_that_holds_the_smallest_option_is_exceeded() -> None:
    """From a rank to bits is a long step up the hull, and the next one, to more bits, a short one."""
    formats = {f"int{bits}": bits / 8 + 1 / 64 for bits in (2, 3, 4, 5, 6, 8)}
    one = parameter("w", 256, 256)
    hull = options(one, formats)
    assert any(b.size - a.size > c.size - b.size for a, b, c in zip(hull, hull[1:], hull[2:], strict=False))
    for budget in np.linspace(hull[0].size, hull[-1].size, 300):
        (choice,) = spend([one], formats, budget)
        assert one.size(choice, formats) <= budget


@pytest.mark.parametrize(("volume", "first"), [(24.0, 0.03), (48.0, 0.0975), (8.0, 0.00464)])
def test_how_much_noise_is_enough_goes_with_the_volume_and_to_zero_in_the_end(volume: float, first: float) -> None:
    planner = planned(volume, 1000, 0, [[parameter("w")]], 4.0)
    found = [planner.enough_noise(iteration) for iteration in (0, 500, 1000)]
    assert found == pytest.approx([first, first / 2, 0], rel=0.01)


def test_what_does_not_arrive_at_all_lowers_the_fidelity() -> None:
    assert fidelity([(1, math.inf, 1.0)]) == 0.0
    assert fidelity([(1, math.inf, 1.0), (1, 0.0, 1.0)]) == 0.5


def test_the_overhead_of_messages_is_not_that_of_stages_that_are_never_compressed() -> None:
    stages = [[parameter("w", 128, 256)], [parameter("other", 32, 32)]]
    planner = planned(6.0, 100, 0, stages, 4.0, excluded=(1,))
    sent = 0.0
    for end in (10, 20, 30):
        sent += 10 * 1.5 * (planner._size(planner.choices) + planner.excluded_bytes)
        dense = end * planner.ledger.fp32_bytes
        planner.observe(shown([{}, {}], sent, dense, dense))
        planner.decide(end)
    assert planner.ledger.overhead == pytest.approx(1.5)
    left = 100 * planner.ledger.fp32_bytes / 6 - sent
    assert 70 * 1.5 * (planner._size(planner.choices) + planner.excluded_bytes) <= 1.001 * left


def test_what_is_summed_over_more_processes_has_a_budget_of_its_price() -> None:
    word = parameter("word", 512, 64)
    usual, dear = (planned(20.0, 100, 0, [[replace(word, price=price)]], 4.0) for price in (1.0, 3.0))
    assert dear.budget(0) == pytest.approx(3 * usual.budget(0)) and dear.choices == usual.choices


def test_another_number_of_bits_is_learnt_from_its_second_window_on() -> None:
    planner = planned(12.0, 1000, 0, [[parameter("w", 128, 256, steepness=0.1, rounding=0.5)]], 4.0)
    assert planner.choices == [SendRounded("int2")]
    planner.choices = [SendRounded("int8")]
    planner.decide(10)
    assert planner.choices == [SendRounded("int2")] and planner.changed == [True]


def ledger(least: float = 0.0) -> Ledger:
    return Ledger(10.0, 20, fp32_bytes=100.0, uncompressed=100.0, least=least)


def test_a_first_window_that_is_warm_up_in_part_says_nothing_of_the_overhead() -> None:
    under_test = ledger()
    for sent, overhead in ((55.0, 1.0), (12.0, 1.2)):
        under_test.per_step = sent
        under_test.learn(10.0)
        assert under_test.overhead == pytest.approx(overhead)


@pytest.mark.parametrize(("by_budget", "sent", "charged"), [(-5.0, 12.0, 12.0), (10.0, 14.0, 4.0), (10.0, 8.0, 0.0)])
def test_relief_is_charged_with_what_was_sent_beyond_the_budget(by_budget: float, sent: float, charged: float) -> None:
    under_test = ledger()
    under_test.granted = StepBytes(by_budget, 25.0)
    under_test.observe(shown([], sent, 100.0, 100.0), outside_budget=False)
    assert under_test.counts.sent_by_relief == charged


def test_relief_goes_on_where_nothing_is_sent() -> None:
    """As in a run that was resumed by one process."""
    under_test = Ledger(10.0, 20, fp32_bytes=0.0, uncompressed=0.0, least=0.0)
    under_test.granted = StepBytes(0.0, 25.0)
    under_test.observe(shown([], 0.0, 0.0, 0.0), outside_budget=False)
    assert under_test.counts.sent_by_relief == 0 and under_test.per_step is None


def test_a_budget_is_exhausted_by_what_its_steps_take_with_their_overhead() -> None:
    under_test = ledger(least=8.0)
    assert not under_test.exhausted()
    under_test.overhead = 2.0
    assert under_test.exhausted()


def test_a_large_parameter_that_gets_no_more_bytes_leaves_them_to_small_ones() -> None:
    large, small = parameter("large", 1024, 1024, steepness=1.0), parameter("small", 64, 128, steepness=1.0)
    hulls = [options(one, BYTES) for one in (large, small)]
    step = hulls[0][1].size - hulls[0][0].size
    chosen = spend([large, small], BYTES, sum(hull[0].size for hull in hulls) + 0.9 * step)
    assert chosen[0] == hulls[0][0].choice and chosen[1] != hulls[1][0].choice


@pytest.mark.parametrize(("rank", "exponent"), [*itertools.product((4, 8, 16, 32), (0.5, 1.0, 1.7, 2.5))])
def test_the_law_of_low_rank_meets_its_equation(rank: int, exponent: float) -> None:
    """Of each direction a share min(1, energy / t) is sent, with t such that the shares add up to the rank."""
    energies = np.arange(1.0, 129) ** -exponent
    low, high = 1e-12, 1e3
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if np.minimum(1, energies / middle).sum() > rank else (low, middle)
    cosine = (energies * np.minimum(1, energies / low)).sum() / energies.sum()
    assert noise_of_parts(rank, 128, exponent) == pytest.approx(1 / cosine**2 - 1, rel=1e-6)


def test_a_run_that_rounded_does_so_after_the_host_only_where_the_link_still_speaks_for_it() -> None:
    trials = Trials(200, 0.8, overlapped=False, by_host=True)
    under_test = controller(rounds=True, trials=trials, link_times=TIMES)
    assert under_test._follow_link(True, 1.6) and not under_test.rounds


def test_a_link_that_becomes_slower_twice_while_the_host_sums_is_followed_twice() -> None:
    trials = Trials(200, 0.8, overlapped=False, by_host=True)
    trials.spent = math.inf  # no trial can be afforded
    times = LinkTimes(ReductionTime(0.8, 1.0), ReductionTime(0.70, 1 / 8), ReductionTime(0.9, 1 / 20))
    under_test = controller(trials=trials, link_times=times)
    rounds = []
    for end, reduction in ((20, 0.8), (30, 1.6), (40, 9.0)):
        under_test.observe(observed(0.5, reduce_seconds=reduction, step_seconds={True: [1.0] * 10, False: []}))
        under_test.decide(end)
        rounds.append(under_test.rounds)
    assert rounds == [False, True, False]


def test_a_resumed_run_compares_with_the_host_on_the_link_that_was_timed_last() -> None:
    other = LinkTimes(ReductionTime(0.4, 1.0), ReductionTime(0.12, 1 / 8), ReductionTime(0.24, 1 / 20))
    state = json.loads(json.dumps(controller(trials=Trials(200, 1.0, False), link_times=other).state_dict()))
    for times, seconds in ((TIMES, 5.0), (other, 1.0), (None, 1.0)):
        own = controller(trials=Trials(200, 5.0, False), link_times=times)
        assert own.load_state_dict(state) and own.trials is not None
        assert own.trials.host_seconds == seconds


def test_every_format_has_a_noise() -> None:
    assert all(0 < noise_of_format(name) < 1 for name in PLANNED_FORMATS)
    assert all(noise_of_format(name) >= 0 for name in FORMATS)
    with pytest.raises(KeyError):
        noise_of_format("int7")


def test_less_noise_than_that_of_the_format_of_rows_is_still_some_noise_of_rows() -> None:
    one = parameter("word", 4096, 128, by_rows=1.3)
    assert one.rounding.noise("int4") > 0.01
    for _ in range(2):
        one = one.fitted(by_share(0.4), 0.01)
    assert one.rows is not None and one.rows.spectrum.noise(1639) > 0
