"""What the driver of a step times of it, and which ranks it says were in use."""

import math
import time
from types import SimpleNamespace

import pytest
import torch

from edgc.config import EDGCConfig
from edgc.hosts.steps import RECENT_STEPS, StepDriver
from edgc.observe.observer import GradientObserver
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
    assert (window.seconds, window.count, window.host_steps) == (list(range(11)), 12, 3)


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


def test_the_end_of_a_warm_up_ends_a_window_where_a_budget_plans() -> None:
    driver = StepDriver([StageKey(StageKind.LAYERS, 0)], [], 10, lambda: 0, lambda: None)
    for plan, ends in (
        (RankPlan(0, 13, (4,), formats=({},)), [9, 12, 19, 29]),
        (RankPlan(0, 13, (4,)), [9, 19, 29]),
        (RankPlan(1, 13, (4,), formats=({},)), [9, 19, 29]),
    ):
        driver.adopt(plan, None)
        assert [iteration for iteration in range(30) if driver.closes_window(iteration)] == ends


def test_replicas_are_compared_at_a_windows_end_and_where_a_rank_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, seen = Steps(monkeypatch), []
    steps.driver.window = 10
    for iteration in range(12):
        steps.make(iteration)
        seen.append(steps.driver.current.compares_replicas)
    # compression begins in the first step, and again after the trial
    assert [iteration for iteration, compares in enumerate(seen) if compares] == [0, 8, 9]


def test_losses_are_noted_as_they_are_when_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, observer = Steps(monkeypatch).driver, GradientObserver([], EDGCConfig())
    driver.stages = [SimpleNamespace(reducers=[SimpleNamespace(observer=observer)])]  # type: ignore[list-item]
    assert math.isnan(driver.window_loss())
    told = torch.zeros(1, requires_grad=True)
    for loss in (2.0, 4.0, math.inf):
        told.data.fill_(loss)
        driver.note_loss(told)  # whose memory the caller uses again
    driver.note_loss(6.0)
    assert driver.window_loss() == 4.0
    assert observer.measurements.state_dict()["losses"] == [2.0, 4.0, math.inf, 6.0], "a checkpoint has them"
    with pytest.raises(ValueError, match="a loss of shape .2,.: must be one number"):
        driver.note_loss(torch.ones(2))
