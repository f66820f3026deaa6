"""When compressed steps are compared with the host's, and what follows."""

import json
import math
from typing import Any

import pytest

from edgc.byte_counts import ByteCount
from edgc.plan.times.trials import LEAST_USUAL_STEPS, TRIAL_STEPS, Trials

ITERATIONS, HOST = 10_000, 1.0  # seconds of the host's reduction


def trials(iterations: int = ITERATIONS, overlapped: bool = False) -> Trials:
    return Trials(iterations, HOST, overlapped)


def seconds(compressed: float | None = None, host: float | None = None) -> dict[bool, list[float]]:
    """Those of enough steps of each kind, of which one is very short and one very long; None: there were none of it."""
    return {
        by_host: [] if step is None else [step / 20, *[step] * 18, step * 20]
        for by_host, step in ((False, compressed), (True, host))
    }


def window(
    under_test: Trials,
    iteration: int,
    reduction: float,
    compressed: float,
    host: float,
    counted: tuple[float, float] = (0.0, 0.0),
) -> None:
    """A window in which a trial that was set has been made. ``counted``: bytes of the run, and of the host."""
    shown = seconds(**{"host" if under_test.by_host else "compressed": 1.0})
    if under_test.trial is not None:
        shown = seconds(compressed, host)
        step = compressed if under_test.by_host else host
        shown[not under_test.by_host] = [step, 20 * step]  # of its two steps one has waited for an evaluation
    under_test.observe(shown, reduction, ByteCount(*counted))
    under_test.decide(iteration)


@pytest.mark.parametrize(("reduction", "due"), [(0.2, False), (0.49, False), (0.6, True), (3.0, True)])
def test_there_is_a_trial_where_compression_takes_more_than_half_of_the_time_of_the_hosts_reduction(
    reduction: float, due: bool
) -> None:
    under_test = trials()
    window(under_test, 100, reduction, 1.0, 1.0)
    assert under_test.trial == ((101, 101 + TRIAL_STEPS) if due else None)


@pytest.mark.parametrize(("step", "due"), [(0.9, False), (1.1, True)])
def test_overlapped_there_is_one_where_a_step_could_hide_the_hosts_reduction(step: float, due: bool) -> None:
    under_test = trials(overlapped=True)
    under_test.observe(seconds(compressed=step), 0.1, ByteCount())
    assert under_test.due == due


@pytest.mark.parametrize(("compressed", "by_host"), [(0.90, False), (0.97, False), (0.99, True), (1.3, True)])
def test_compression_goes_on_only_where_its_steps_are_clearly_shorter(compressed: float, by_host: bool) -> None:
    under_test = trials()
    window(under_test, 100, 0.8, compressed, 1.0)
    window(under_test, 200, 0.8, compressed, 1.0)
    assert (under_test.by_host, under_test.measured, under_test.trial) == (by_host, (compressed, 1.0), None)


@pytest.mark.parametrize(("spread", "by_host"), [(0.01, True), (0.3, False)])
def test_compression_goes_on_where_steps_differ_by_more_than_a_trial_shows(spread: float, by_host: bool) -> None:
    under_test = trials()
    window(under_test, 100, 0.8, 1.0, 1.0)
    usual = [1.0 + spread * (-1) ** step for step in range(10)]
    under_test.observe({False: usual, True: [0.9, 0.9]}, 0.8, ByteCount())
    assert under_test.measured == pytest.approx((1.0, 0.9)) and under_test.by_host == by_host


@pytest.mark.parametrize(
    ("tried", "by_host"), [([0.7, 0.7, 0.7, 0.7], False), ([0.7, 1.3], True), ([0.99], True), ([0.4], False)]
)
def test_a_trial_is_repeated_while_steps_differ_by_more_than_it_shows(tried: list[float], by_host: bool) -> None:
    """The mean of the trials counts, and steps vary less in it. No trial follows once nothing speaks for a change."""
    under_test = Trials(ITERATIONS, HOST, False, by_host=True)
    under_test.observe(seconds(host=1.0), 0.9, ByteCount())
    under_test.due = True
    usual = [1.0 + 0.3 * (-1) ** step for step in range(10)]
    for count, step in enumerate(tried, 1):
        under_test.decide(100 * count)
        assert under_test.trial is not None
        under_test.observe({False: [step, step], True: usual}, 0.9, ByteCount())
        assert under_test.measured == pytest.approx((sum(tried[:count]) / count, 1.0))
    assert (under_test.due, under_test.by_host) == (False, by_host)


def test_trials_of_another_link_are_forgotten() -> None:
    under_test = Trials(ITERATIONS, HOST, False, by_host=True)
    under_test.due = True
    usual = [1.0 + 0.3 * (-1) ** step for step in range(10)]
    window(under_test, 100, 0.2, 1.0, 1.0)
    under_test.observe({False: [0.7, 0.7], True: usual}, 0.2, ByteCount())
    assert under_test.due and under_test.measured == (0.7, 1.0)
    under_test.observe(seconds(host=1.0), 0.2, ByteCount())  # no window has shown reductions before
    under_test.observe(seconds(host=1.0), 0.9, ByteCount())
    under_test.decide(400)
    under_test.observe({False: [0.5, 0.5], True: usual}, 0.9, ByteCount())
    assert under_test.measured == pytest.approx((0.5, 1.0)), "not the mean of both links"


@pytest.mark.parametrize("spread", [0.02, 0.2])
def test_steps_that_differ_anyway_are_no_changed_link(spread: float) -> None:
    """A step is a tenth longer than in the trial, and reductions are a small part of it."""
    under_test = trials()
    for iteration in (100, 200):
        window(under_test, iteration, 0.8, 1.3, 1.0)
    assert under_test.by_host
    usual = [1.1 + spread * (-1) ** step for step in range(10)]
    assert (under_test.observe({False: [], True: usual}, 0.15, ByteCount()) > 0) == (spread < 0.1)


@pytest.mark.parametrize(("volume_steps", "due"), [(9.0, False), (11.0, True), (math.inf, True)])
def test_steps_that_the_host_sums_in_a_trial_take_little_of_a_volume(volume_steps: float, due: bool) -> None:
    under_test = Trials(ITERATIONS, HOST, False, volume_steps=volume_steps)
    window(under_test, 100, 0.8, 1.0, 1.0)
    assert (under_test.trial is not None) == due
    by_host = Trials(ITERATIONS, HOST, False, by_host=True, volume_steps=volume_steps)
    by_host.due = True
    window(by_host, 100, 0.8, 1.0, 1.0)
    assert by_host.trial is not None, "compressed steps take next to nothing"


@pytest.mark.parametrize(("reduction", "compressed", "by_host"), [(2.0, 0.5, False), (2.0, 0.96, True)])
def test_a_link_that_becomes_slow_brings_compression_back_within_two_windows(
    reduction: float, compressed: float, by_host: bool
) -> None:
    under_test = trials()
    for iteration in (100, 200, 300, 400):
        window(under_test, iteration, 0.8, 1.1, 1.0)
    assert (under_test.by_host, under_test.trial) == (True, None)
    window(under_test, 500, reduction, compressed, 1.0)
    assert under_test.trial is not None, "the change was not seen"
    window(under_test, 600, reduction, compressed, 1.0)
    assert under_test.by_host == by_host


def test_a_link_that_changes_within_a_trial_is_seen_after_it() -> None:
    under_test = trials()
    for iteration, reduction in ((100, 0.8), (200, 0.8), (300, 0.2), (400, 0.26)):
        window(under_test, iteration, reduction, 1.1, 1.0)
    assert under_test.by_host and under_test.trial is not None
    window(under_test, 500, 9.0, 1.1, 1.0)  # the steps were those of the link before
    assert under_test.by_host and under_test.trial is None
    window(under_test, 600, 9.0, 1.1, 8.0)
    assert under_test.trial is not None


@pytest.mark.parametrize(("reduction", "step", "due"), [(0.3, 1.0, False), (0.3, 1.03, False), (0.9, 1.6, True)])
def test_a_link_that_becomes_slow_as_the_host_begins_to_sum_is_seen(reduction: float, step: float, due: bool) -> None:
    """No window shows the host's reduction on the link before: its steps in the trial do."""
    under_test = trials()
    for iteration in (100, 200):
        window(under_test, iteration, 0.8, 1.1, 1.0)
    assert under_test.by_host and under_test.trial is None
    under_test.observe(seconds(host=step), reduction, ByteCount())
    under_test.decide(300)
    assert (under_test.trial is not None) == due


def test_a_trial_of_which_steps_were_skipped_is_made_again() -> None:
    under_test = trials()
    window(under_test, 100, 0.8, 1.1, 1.0)
    assert under_test.trial == (101, 104)
    under_test.observe({False: [1.1] * 8, True: [1.0]}, 0.8, ByteCount())  # one of two timed steps was left out
    under_test.decide(103)
    assert under_test.trial == (101, 104), "it has not ended"
    under_test.decide(200)
    assert under_test.trial == (201, 204)
    window(under_test, 300, 0.8, 1.1, 1.0)
    assert under_test.by_host and under_test.trial is None


def test_a_trial_that_has_ended_waits_for_enough_steps_to_compare_it_with() -> None:
    under_test = trials()
    window(under_test, 100, 0.8, 1.1, 1.0)
    under_test.observe({False: [1.1] * (LEAST_USUAL_STEPS - 1), True: [1.0, 1.0]}, 0.8, ByteCount())
    under_test.decide(104)
    assert under_test.trial == (101, 104)
    under_test.observe({False: [1.1] * LEAST_USUAL_STEPS, True: [1.0, 1.0]}, 0.8, ByteCount())
    under_test.decide(105)
    assert under_test.by_host and under_test.trial is None and under_test.host_steps == TRIAL_STEPS


def test_the_bytes_of_a_window_with_too_few_steps_are_not_counted_in_the_next_one() -> None:
    under_test = trials()
    for iteration in (100, 200):
        window(under_test, iteration, 0.2, 0.8, 1.0, (0.02 * iteration, iteration))
    few = {False: [1.0] * (LEAST_USUAL_STEPS - 1), True: []}
    under_test.observe(few, 0.2, ByteCount(0.02 * 200, 300))  # it has sent nothing
    # a plan that sends twice as much, and takes twice as long
    window(under_test, 400, 0.4, 0.8, 1.0, (0.02 * 200 + 0.04 * 100, 400))
    assert under_test.trial is None


def test_the_steps_of_a_trial_count_as_their_mean_if_none_was_held_up() -> None:
    under_test = trials()
    window(under_test, 100, 0.8, 1.1, 1.0)
    under_test.observe({False: [1.05] * 8, True: [0.9, 1.2]}, 0.8, ByteCount())
    assert under_test.measured == pytest.approx((1.05, 1.05))


def test_a_window_says_how_much_longer_reductions_take_on_a_changed_link() -> None:
    under_test = trials()
    changes = [under_test.observe(seconds(compressed=1.0), one, ByteCount()) for one in (0.2, 0.22, 0.3, 0.3, 0.1, 0.3)]
    assert changes == pytest.approx([0.0, 0.0, 0.1, 0.0, -0.2, 0.2])
    by_host = Trials(ITERATIONS, HOST, overlapped=False, by_host=True)
    changes = [by_host.observe(seconds(host=1.0), one, ByteCount()) for one in (0.8, 0.2, 1.2)]
    assert changes == pytest.approx([0.0, 0.0, 0.4])


def test_a_change_that_comes_with_another_one_who_sums_has_its_seconds() -> None:
    under_test = trials()
    for iteration in (100, 200):
        window(under_test, iteration, 0.8, 1.1, 1.0)
    assert under_test.by_host
    # steps of the host took 1.0 s in the trial; now they take 0.6 s more, which its reduction of 0.9 s explains
    assert under_test.observe(seconds(host=1.6), 0.9, ByteCount()) == pytest.approx(0.6)


def test_another_way_of_compressing_is_no_change_of_the_link_until_a_trial_has_seen_it() -> None:
    under_test = trials()
    for iteration in (100, 200, 300):
        window(under_test, iteration, 0.4, 0.8, 1.0)
    under_test.compress_anew()
    assert under_test.observe(seconds(compressed=0.6), 0.2, ByteCount()) == 0.0
    under_test.compress_anew()
    under_test.trial = (400, 403)
    window(under_test, 500, 0.2, 1.1, 1.0)
    assert under_test.by_host
    assert under_test.observe(seconds(host=1.6), 0.9, ByteCount()) == pytest.approx(0.6)


def with_a_link_timed_anew() -> Trials:
    """Of a resumed run after a trial in which compressed steps took 0.8 s."""
    before = trials()
    for iteration in (100, 200):
        window(before, iteration, 0.2, 0.8, 1.0)
    again = Trials(ITERATIONS, 5.0, overlapped=False)
    again.load_state_dict(before.state_dict(), timed_anew=True)
    return again


def test_a_resumed_run_that_has_timed_its_link_waits_for_its_own_reductions() -> None:
    again = with_a_link_timed_anew()
    assert again.host_seconds == 5.0
    assert again.observe(seconds(compressed=1.0), 0.9, ByteCount()) == 0.0


def test_a_link_that_was_timed_anew_has_not_changed_since() -> None:
    """Steps of before the resume are of the old one: the times that were taken now know the difference."""
    again = with_a_link_timed_anew()
    assert again.observe(seconds(compressed=6.2), 6.0, ByteCount()) == 0.0
    assert again.due, "which of both is faster there is not known"


def test_a_link_that_becomes_fast_ends_compression_within_two_windows() -> None:
    under_test = trials()
    for iteration in (100, 200):
        window(under_test, iteration, 0.3, 0.8, 1.0)
    assert under_test.trial is None
    for iteration in (300, 400):
        window(under_test, iteration, 0.2, 0.8, 0.7)
    assert under_test.by_host


def test_a_faster_link_is_no_reason_to_compress_again() -> None:
    under_test = trials()
    for iteration, reduction in ((100, 0.8), (200, 0.8), (300, 0.8), (400, 0.2)):
        window(under_test, iteration, reduction, 1.1, 1.0)
    assert under_test.by_host and under_test.trial is None and not under_test.due
    window(under_test, 500, 2.0, 1.1, 1.0)
    assert under_test.trial is not None, "a slower one is"


def test_a_plan_that_sends_less_is_no_faster_link() -> None:
    under_test, sent, host = trials(), 0.0, 0.0
    for window_number, share in enumerate((0.08, 0.06, 0.04, 0.02, 0.01)):
        sent, host = sent + share * 100, host + 100
        window(under_test, 100 * window_number, 0.05 + share, 0.8, 1.0, (sent, host))
        assert under_test.trial is None
    # the next plan sends twice as much, and takes six times as long
    window(under_test, 600, 0.36, 0.8, 1.0, (sent + 2.0, host + 100))
    assert under_test.trial is not None


def test_trials_cost_half_a_percent_of_a_run() -> None:
    under_test = trials(iterations=2000)
    reduction = 0.6
    for iteration in range(100, 1900, 20):  # the link changes all the time, and compression always wins
        reduction = 1.4 - reduction
        window(under_test, iteration, reduction, 0.5, 1.0)
    assert 2 * TRIAL_STEPS <= under_test.host_steps <= 0.005 * 2000


def test_a_trial_that_took_less_time_pays_for_no_other() -> None:
    under_test = trials()
    for iteration in (100, 200):
        window(under_test, iteration, 0.8, 1.1, 1.0)
    assert under_test.by_host and under_test.spent == 0.0


def test_where_the_host_sums_trials_cost_time_alone() -> None:
    under_test = trials(iterations=2000)
    for iteration in (100, 200):
        window(under_test, iteration, 0.8, 1.1, 1.0)
    reduction, tried = 1.0, 0
    for iteration in range(300, 1900, 20):
        reduction *= 1.3
        window(under_test, iteration, reduction, 3.0, 1.0)
        tried += TRIAL_STEPS * (under_test.trial is not None)
    assert tried > TRIAL_STEPS
    assert tried * (3.0 - 1.0) <= 0.005 * 2000 * 1.0 + TRIAL_STEPS * 2.0, "at most one trial beyond the bound"


def test_where_the_host_sums_in_next_to_no_time_there_is_no_trial() -> None:
    under_test = Trials(ITERATIONS, HOST, overlapped=False, by_host=True)
    for reduction in (0.001, 0.002, 0.04, 0.06):  # of steps of one second
        window(under_test, 100, reduction, 1.1, 1.0)
        assert (under_test.trial is None) == (reduction < 0.05)


def test_a_run_that_begins_with_the_hosts_sums_tries_compression_only_on_a_slower_link() -> None:
    under_test = Trials(ITERATIONS, HOST, overlapped=False, by_host=True)
    for reduction in (3.0, 3.6, 3.8):  # the first is long enough to ask whether compression pays
        window(under_test, 100, reduction, 1.1, 1.0)
        assert (under_test.trial is None) == (reduction < 1.25 * 3.0)


def test_a_trial_waits_for_enough_steps_and_never_outlasts_the_run() -> None:
    under_test = trials()
    under_test.observe({False: [1.0] * (LEAST_USUAL_STEPS - 1), True: []}, 0.8, ByteCount())
    under_test.decide(100)
    assert under_test.trial is None
    window(under_test, 200, 0.8, 1.1, 1.0)
    under_test.observe({False: [1.1] * 20, True: [1.0] * (TRIAL_STEPS - 2)}, 0.8, ByteCount())
    assert not under_test.by_host
    for left in (TRIAL_STEPS, TRIAL_STEPS + LEAST_USUAL_STEPS, TRIAL_STEPS + LEAST_USUAL_STEPS + 1):
        late = trials()
        window(late, ITERATIONS - left, 0.8, 1.1, 1.0)
        assert (late.trial is not None) == (left > TRIAL_STEPS + LEAST_USUAL_STEPS), (
            "as many usual steps come after it as it is compared with"
        )


def test_where_reductions_were_not_measured_there_is_one_trial() -> None:
    under_test = trials()
    found = []
    for iteration in (100, 200, 300):
        window(under_test, iteration, math.nan, 1.1, 1.0)
        found.append(under_test.trial)
    assert found == [(101, 101 + TRIAL_STEPS), None, None]
    untimed = Trials(ITERATIONS, math.nan, overlapped=False)
    untimed.observe(seconds(compressed=1.0), 0.5, ByteCount())
    assert untimed.due


def test_a_resumed_run_goes_on_with_what_was_decided() -> None:
    before = trials()
    for iteration in (100, 200):
        window(before, iteration, 0.8, 1.1, 1.0)
    again = trials()
    again.load_state_dict(before.state_dict())
    assert again.state_dict() == before.state_dict()
    assert again.by_host
    window(before, 300, 0.8, 1.1, 1.0)
    elsewhere = trials()
    elsewhere.load_state_dict(before.state_dict())
    window(elsewhere, 400, 1.6, 1.1, 1.0)
    assert elsewhere.trial is not None, "a resumed run that has another link sees it"
    window(before, 400, 1.6, 1.1, 1.0)
    state: dict[str, Any] = before.state_dict()
    assert before.trial is not None
    assert state["due"], "a trial under way is due again"


def test_a_resumed_run_counts_the_trials_that_have_decided_nothing() -> None:
    usual = [1.0, 1.06, 0.94, 1.03, 0.97, 1.0]
    before = trials()
    before.trial = (101, 104)
    before.observe({False: usual, True: [0.985, 0.985]}, 0.3, ByteCount(100.0, 400.0, 400.0))
    again, elsewhere = trials(), trials()
    again.load_state_dict(json.loads(json.dumps(before.state_dict())))
    elsewhere.load_state_dict(before.state_dict(), timed_anew=True)
    for one in (before, again, elsewhere):
        one.trial = (201, 204)
        one.observe({False: usual, True: [0.98, 0.98]}, 0.3, ByteCount(200.0, 800.0, 800.0))
    assert (before.by_host, before.due) == (again.by_host, again.due) == (True, False)
    assert elsewhere.due and not elsewhere.by_host, "one trial on this link decides nothing"


def test_a_resumed_run_counts_the_bytes_of_its_first_window_alone() -> None:
    before, again = trials(), trials()
    for iteration in (100, 200):
        window(before, iteration, 0.2, 0.8, 1.0, (0.02 * iteration, iteration))
    again.load_state_dict(before.state_dict())
    # a plan that sends twice as much, and takes twice as long
    window(again, 300, 0.4, 0.8, 1.0, (0.02 * 200 + 0.04 * 100, 300))
    assert again.trial is None


def test_every_number_of_trials_comes_back() -> None:
    state = {
        "host_seconds": 0.2,
        "by_host": True,
        "due": True,
        "measured": [1.0, 0.9],
        "undecided": [[1.0, 0.9]],
        "host_steps": 6,
        "spent": 1.5,
        "counted": {"sent": 1.0, "host": 2.0, "fp32": 3.0},
        "reduction": 0.3,
        "share": 0.4,
        "compared": False,
    }
    trials = Trials(1000, 0.1, overlapped=True)
    assert trials.state_dict().keys() == state.keys()
    trials.load_state_dict(json.loads(json.dumps(state)))
    assert trials.state_dict() == state


def test_the_host_goes_on_where_steps_differ_by_more_than_a_trial_shows() -> None:
    under_test = Trials(ITERATIONS, HOST, overlapped=False, by_host=True)
    under_test.due = True
    under_test.observe(seconds(host=1.0), 0.8, ByteCount())
    under_test.decide(100)
    usual = [1.0 + 0.3 * (-1) ** step for step in range(10)]
    under_test.observe({True: usual, False: [0.9, 0.9]}, 0.8, ByteCount())
    assert under_test.measured == pytest.approx((0.9, 1.0)) and under_test.by_host


def test_a_longer_step_that_reductions_do_not_explain_is_no_slower_link() -> None:
    under_test = trials()
    for iteration in (100, 200):
        window(under_test, iteration, 0.8, 1.1, 1.0)
    assert under_test.observe(seconds(host=2.0), 0.5, ByteCount()) == pytest.approx(0.5)
