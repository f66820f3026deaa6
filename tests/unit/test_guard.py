"""When steps get more bytes than their budget. What that does to a plan: ``test_budget.py``."""

import math

from edgc.plan.by_volume.guard import FidelityGuard


def test_relief_doubles_while_too_little_arrives_and_halves_once_enough_does() -> None:
    guard = FidelityGuard(0.1, [True] * 10)
    fidelities = (0.5, 0.09, 0.05, math.nan, 0.1, 0.29, 0.31, 0.4, 0.5)
    assert [guard.update(one, 0) for one in fidelities] == [1, 2, 4, 4, 4, 4, 2, 1, 1]
    assert [guard.update(0.0, 0, most) for most in (False, False, True, True)] == [2, 4, 4, 4]
    assert guard.update(0.5, 0, most=True) == 2
    assert [guard.update(0.5, 0, exhausted=one) for one in (True, False, True)] == [2, 1, 1]


def test_iterations_that_are_not_watched_end_relief() -> None:
    guard = FidelityGuard(0.1, [True, False])
    assert [guard.update(0.0, iteration) for iteration in (0, 0, 1, 0)] == [2, 4, 1, 2]
