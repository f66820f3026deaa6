"""When steps get more bytes than their budget, and when the loss has risen. What that does to a plan:
``test_budget.py`` and ``test_controller.py``.
"""

import math

from edgc.plan.by_volume.guard import MOST_FOR_LOSS, TOO_LITTLE, Guard
from edgc.plan.loss_watch import LOSS_RISES, RECENT_WINDOWS, LossWatch, window_loss


def test_relief_doubles_while_too_little_arrives_and_halves_once_enough_does() -> None:
    guard = Guard(0.1, [True] * 10)
    fidelities = (0.5, 0.09, 0.05, math.nan, 0.1, 0.29, 0.31, 0.4, 0.5)
    assert [guard.update(one, 0) for one in fidelities] == [1, 2, 4, 4, 4, 4, 2, 1, 1]
    assert [guard.update(0.0, 0, most) for most in (False, False, True, True)] == [2, 4, 4, 4]
    assert guard.update(0.5, 0, most=True) == 2
    assert [guard.update(0.5, 0, exhausted=one) for one in (True, False, True)] == [2, 1, 1]


def test_iterations_that_are_not_watched_end_relief() -> None:
    guard = Guard(0.1, [True, False])
    assert [guard.update(0.0, iteration) for iteration in (0, 0, 1, 0)] == [2, 4, 1, 2]


def test_relief_doubles_while_the_loss_rises_however_much_arrives() -> None:
    guard = Guard(0.1, [True] * 10)
    assert [guard.update(0.9, 0, loss_rises=rises) for rises in (False, True, True, False, False)] == [1, 2, 4, 2, 1]
    assert guard.cause == LOSS_RISES
    assert guard.update(0.9, 0, most=True, loss_rises=True) == 1
    for _ in range(5):  # the data may have changed for good
        guard.update(0.9, 0, loss_rises=True)
    assert guard.relief == MOST_FOR_LOSS == 4
    assert guard.update(0.05, 0, loss_rises=True) == 8 and guard.cause == TOO_LITTLE


def test_relief_for_the_loss_ends_also_where_fidelity_is_not_measured() -> None:
    guard = Guard(0.1, [True] * 10)
    assert [guard.update(math.nan, 0, loss_rises=rises) for rises in (True, False)] == [2, 1]
    assert guard.update(0.05, 0) == 2 and guard.cause == TOO_LITTLE
    assert guard.update(math.nan, 0) == 2


def test_a_resumed_run_knows_why_it_has_relief() -> None:
    before, again = Guard(0.1, [True] * 10), Guard(0.1, [True] * 10)
    before.update(0.9, 0, loss_rises=True)
    again.load_state_dict(before.state_dict())
    assert again.relief == 2 and again.cause == LOSS_RISES
    assert again.update(math.nan, 0) == 1, "relief for a loss that has ended"


def rises(losses: list[float], greatest: float = 0.1) -> list[float]:
    watch, found = LossWatch(greatest), []
    for loss in losses:
        watch.observe(loss)
        found.append(round(watch.rise, 6))
    return found


def test_a_loss_rises_where_it_is_well_above_the_lowest_of_the_windows_before() -> None:
    assert rises([4.0, 2.0, 2.2, 2.21, 2.5, 2.1]) == [0, 0, 0, 0.105, 0.25, 0]
    assert rises([2.0, 2.5, 4.0], greatest=math.inf) == [0, 0, 0]


def test_a_loss_that_stays_high_is_the_usual_one_after_some_windows() -> None:
    assert rises([2.0] + [3.0] * (RECENT_WINDOWS + 1)) == [0] + [0.5] * RECENT_WINDOWS + [0]


def test_a_loss_that_is_not_known_or_below_zero_has_not_risen() -> None:
    assert rises([2.0, math.nan, 3.0, math.nan]) == [0, 0, 0.5, 0]
    assert rises([-2.0, 5.0, 0.0, 7.0]) == [0, 0, 0, 0]


def test_a_window_without_any_finite_loss_is_no_end_of_a_rise() -> None:
    assert rises([2.0, math.inf, 3.0, math.inf, 2.0]) == [0, 0, 0.5, 0.5, 0]


def test_the_mean_loss_of_a_window_is_of_finite_ones_and_of_enough_of_them() -> None:
    assert window_loss([1.0, 3.0, math.nan, math.inf]) == 2.0
    assert window_loss([math.nan] * 4) == math.inf
    assert math.isnan(window_loss([1.0, 2.0, 3.0]))
