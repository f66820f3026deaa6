"""What a window makes of all processes: one record of each stage and boundary, and what the controller is told."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from edgc.byte_counts import ByteCount, RunBytes
from edgc.hosts.exchange import ProcessWindow, WindowExchange
from edgc.hosts.stage import Stage
from edgc.hosts.steps import Step
from edgc.observe.fidelity import Agreement, Fidelity, Products
from edgc.observe.moments import GradientStatistics
from edgc.observe.window import Boundary, MessageWindow, StageWindow
from edgc.plan.stages import StageKey, StageKind

STAGE = StageWindow(StageKey(StageKind.LAYERS, 0), *[0.0] * 4, ByteCount(), 0.0)
MESSAGE = MessageWindow(Boundary("backward", 1, 0), 0.0, ByteCount(), 0.0)
NAN, INF = math.nan, math.inf
NOT_MEASURED = pytest.approx(NAN, nan_ok=True)


@pytest.mark.parametrize(
    ("window", "field", "seen", "merged"),
    [
        # the mean of what was measured
        (STAGE, "entropy", [-5.0, NAN, -4.0, -INF], -4.5),
        (STAGE, "entropy", [NAN, NAN], NOT_MEASURED),
        (STAGE, "residual", [0.25, 0.75, NAN], 0.5),
        (STAGE, "micro_backward_seconds", [NAN, 1.0, 4.0], 2.5),
        (MESSAGE, "entropy", [-5.0, NAN, -4.0, -INF], -4.5),
        (MESSAGE, "entropy", [NAN, NAN], NOT_MEASURED),
        # the shortest: the others also waited
        (STAGE, "reduce_seconds", [NAN, 3.0, 2.0, 7.0], 2.0),
        (STAGE, "reduce_seconds", [NAN, NAN], NOT_MEASURED),
        # the mean over all
        (STAGE, "bytes", [ByteCount(1, 2, 3), ByteCount(3, 2, 4), ByteCount(8, 2, 8)], ByteCount(4, 2, 5)),
        (MESSAGE, "bytes", [ByteCount(1, 2, 3), ByteCount(3, 2, 4), ByteCount(8, 2, 8)], ByteCount(4, 2, 5)),
        # the largest
        (STAGE, "state_bytes", [1.0, 8.0, 3.0], 8.0),
        (STAGE, "largest_spike", [6.0, 9.0, 0.0], 9.0),
        (MESSAGE, "state_bytes", [1.0, 8.0, 3.0], 8.0),
        # the sum
        (STAGE, "spikes", [1.0, 2.0, 0.0], 3.0),
        (MESSAGE, "spikes", [1.0, 2.0, 0.0], 3.0),
        # by name: over the processes that have measured the same
        (STAGE, "energies", [{"w": [4.0, 2.0]}, {"w": [2.0, 0.0]}, {"w": [9.0]}, {}], {"w": [3.0, 1.0]}),
        (STAGE, "row_shares", [{"w": [0.5, 1.0]}, {"w": [0.25, 0.5]}], {"w": [0.375, 0.75]}),
        (
            STAGE,
            "statistics",
            [{"a": GradientStatistics(1, 2, 3, 4, 5)}, {"a": GradientStatistics(3, 4, 5, 6, 7)}, {}],
            {"a": GradientStatistics(2, 3, 4, 5, 6)},
        ),
        (
            STAGE,
            "fidelity",
            [{"a": Fidelity(adam=Agreement(1, 2, 3))}, {"b": Fidelity()}, {"a": Fidelity(adam=Agreement(4, 4, 4))}],
            {"a": Fidelity(adam=Agreement(5, 6, 7)), "b": Fidelity()},
        ),
    ],
)
def test_the_windows_of_several_processes_become_one(
    window: StageWindow | MessageWindow, field: str, seen: list[Any], merged: Any
) -> None:
    several = [replace(window, **{field: value}) for value in seen]
    assert getattr(type(window).merge(several), field) == merged


def test_the_cosine_of_a_stage_is_a_mean_over_the_entries_of_which_it_is_known() -> None:
    half, whole, unknown = (Products(4.0, got, both) for got, both in ((4.0, 2.0), (4.0, 4.0), (0.0, 0.0)))
    seen = {"a": Fidelity(half, entries=3.0), "b": Fidelity(whole, entries=1.0), "c": Fidelity(unknown, entries=8.0)}
    assert replace(STAGE, fidelity=seen).cosine == pytest.approx((3 * 0.5 + 1) / 4)
    assert math.isnan(STAGE.cosine)


def test_alignment_is_told_the_ranks_at_which_stages_send_gradients_and_not_activations() -> None:
    boundaries = [
        Boundary("backward", 1, 0),
        Boundary("backward", 2, 1),
        Boundary("forward", 0, 1),
        Boundary("forward", 1, 2),
    ]
    driver = SimpleNamespace(current=Step(0, None, message_ranks=(16, None, 4, 8)))
    under_test: Any = SimpleNamespace(driver=driver, messages=SimpleNamespace(boundaries=boundaries))
    ranks = WindowExchange._gradient_message_ranks(under_test)
    assert ranks == {StageKey(StageKind.LAYERS, 1): 16, StageKey(StageKind.LAYERS, 2): None}


def test_bytes_in_fp32_are_those_of_the_steps_that_were_made() -> None:
    """A resumed run may have gradients of another type: what an all-reduce in fp32 took before stays."""
    cpu = torch.device("cpu")
    before, after = (Stage(STAGE.stage, cpu, ByteCount(host=host, fp32=100.0)) for host in (50.0, 100.0))
    before.end_step()
    before.end_step()
    after.restore_bytes(before.byte_counts())
    after.end_step()
    assert after.byte_counts().gradients == ByteCount(0.0, 200.0, 300.0)


def test_all_bytes_go_on_where_they_were_saved() -> None:
    cpu = torch.device("cpu")
    before, after = (Stage(STAGE.stage, cpu, ByteCount(host=50.0, fp32=100.0)) for _ in range(2))
    for traffic, elements in ((before.traffic, 10), (before.weights, 20), (before.weights_by_host, 30)):
        traffic.count_all_gather(torch.zeros(elements), 2)
    before.count_unplanned(ByteCount(host=8.0, fp32=16.0))
    before.end_step()
    expected = RunBytes(
        gradients=ByteCount(40.0, 50.0, 100.0),
        weights=ByteCount(80.0, 120.0, 120.0),
        unplanned=ByteCount(8.0, 8.0, 16.0),
    )
    assert before.byte_counts() == expected
    after.restore_bytes(expected)
    assert after.byte_counts() == expected


def test_the_controller_is_told_of_the_descent_the_usual_ranks_and_all_bytes() -> None:
    told: list[Any] = []
    controller: Any = SimpleNamespace(observe=told.append, decide=lambda iteration: None)
    step = Step(0, None, ranks=(None,), usual_ranks=(8,))
    driver = SimpleNamespace(current=step, seconds_by={False: [1.0], True: [2.0]})
    told_of_messages: list[Any] = []
    of_messages: Any = SimpleNamespace(observe=told_of_messages.append, decide=lambda iteration: None)
    under_test: Any = SimpleNamespace(driver=driver, message_controller=of_messages, _gradient_message_ranks=dict)
    units = (Products(4.0, 4.0, both) for both in (1.0, 2.0, 3.0))
    window = replace(
        STAGE,
        fidelity={"w": Fidelity(*units, Agreement(4.0, 4.0, 3.5), entries=2.0)},
        energies={"w": [4.0, 1.0]},
        row_shares={"w": [0.5, 0.25]},
    )
    count = ByteCount(1.0, 2.0, 3.0)
    seen = ProcessWindow([window], [], RunBytes(count), sent_by_host=0.5, loss=3.5)
    WindowExchange._decide(under_test, controller, 100, seen, host_step_share=0.25)
    (seen,) = told
    assert seen.stages[0].noise == {"w": (pytest.approx((4 / 3) ** 2 - 1), 2.0)}, "of the descent"
    assert (seen.stages[0].energies, seen.stages[0].row_shares) == ({"w": [4.0, 1.0]}, {"w": [0.5, 0.25]})
    assert (seen.ranks, seen.bytes, seen.host_step_share, seen.sent_by_host) == ((8,), count, 0.25, 0.5)
    assert seen.step_seconds is driver.seconds_by
    assert seen.loss == told_of_messages[0].loss == 3.5


def test_the_loss_of_all_processes_is_the_mean_of_those_that_know_a_finite_one() -> None:
    def merged(*losses: float) -> float:
        processes = [ProcessWindow([STAGE], [], RunBytes(), 0.0, loss) for loss in losses]
        return ProcessWindow.merge(processes).loss

    assert merged(math.nan, 2.0, 4.0, math.inf) == 3.0
    assert merged(math.inf, math.nan) == math.inf and math.isnan(merged(math.nan, math.nan))
