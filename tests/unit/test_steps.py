"""What the driver of a step times of it, and which ranks it says were in use."""

import time

import pytest

from edgc.hosts.steps import RECENT_STEPS, StepDriver
from edgc.plan.rank_plan import RankPlan
from edgc.plan.stages import StageKey, StageKind

TRIAL = 5, 8  # the iterations in which the host sums


class Steps:
    """Steps of one stage, of which each takes as many seconds as its number, counted from 0."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.iteration, self.now = 0, 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        self.driver = StepDriver([StageKey(StageKind.LAYERS, 0)], [], 1000, lambda: self.iteration, lambda: None)
        self.driver.adopt(RankPlan(0, 0, (4,), trial=TRIAL), None)

    def make(self, last: int) -> None:
        """All up to this one, which has only begun."""
        while self.iteration < last:
            self.driver.step()
            self.driver.end(self.iteration)
            self.now += self.iteration
            self.iteration += 1
        self.driver.step()


def test_steps_are_timed_by_who_sums_but_not_the_first_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    steps.make(11)
    assert {by_host: list(seconds) for by_host, seconds in steps.driver.seconds_by.items()} == {
        False: [1, 2, 3, 4, 9, 10],
        True: [6, 7],
    }
    window = steps.driver.take_window()
    assert (window.seconds, window.count, window.by_host) == (list(range(11)), 12, 3)


def test_a_trial_is_compared_with_the_steps_next_to_it_and_without_one_the_newest_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = Steps(monkeypatch)
    steps.make(100)
    assert list(steps.driver.seconds_by[False])[-1] == 8 + RECENT_STEPS - 4
    steps.driver.adopt(RankPlan(1, 0, (4,)), None)
    assert not any(steps.driver.seconds_by.values()), "a trial has ended"
    steps.make(200)
    assert list(steps.driver.seconds_by[False]) == list(range(200 - RECENT_STEPS, 200))


def test_in_a_trial_the_usual_ranks_are_those_of_the_other_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    for iteration, active in ((4, (4,)), (6, (None,)), (8, (4,))):
        steps.make(iteration)
        assert (steps.driver.current.ranks, steps.driver.current.usual_ranks) == (active, (4,))
