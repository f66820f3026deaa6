"""What a window leaves on the screen and in TensorBoard, and what is said once."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from edgc.byte_counts import ByteCount, RunBytes
from edgc.config import EDGCConfig
from edgc.hosts import reporting, tensorboard, user_warnings, wording
from edgc.hosts.reporting import Reporter
from edgc.hosts.user_warnings import warn_of_budget, warn_of_spent_budget
from edgc.observe.events import EventLog, read_events
from edgc.observe.fidelity import Agreement, Earlier, Fidelity, Products
from edgc.observe.window import Boundary, MessageWindow, StageWindow, WindowReport
from edgc.plan.by_entropy.entropy_ranks import STABLE, WARM_UP
from edgc.plan.rank_plan import NEVER_COMPRESSED, NO_RANK, RankPlan
from edgc.plan.run import Run
from edgc.plan.run_plan import RunPlan
from edgc.plan.stages import StageKey, StageKind
from tools._root import REPOSITORY

ITERATIONS, VOLUME = 1000, 24
PLAN = RankPlan(1, 100, ranks=(56,), reasons=("entropy",))
STAGE = StageWindow(
    StageKey(StageKind.LAYERS, 0),
    entropy=-5.25,
    residual=math.nan,
    reduce_seconds=0.125,
    micro_backward_seconds=0.01,
    bytes=ByteCount(1e6, 2e6),
    state_bytes=3000.0,
)
MESSAGE = MessageWindow(Boundary("backward", 1, 0), entropy=-3.5, bytes=ByteCount(1e3, 2e3), state_bytes=700.0)
REPORT = WindowReport(
    iteration=200,
    ranks=(64,),
    plan=PLAN,
    stages=(STAGE,),
    step_seconds=0.5,
    bytes=RunBytes(ByteCount(1e6, 2e6, VOLUME * 1e6)),
)
WITH_MESSAGES = replace(
    REPORT, messages=(MESSAGE,), message_ranks=(16,), message_plan=RankPlan(1, 100, (12,), reasons=("entropy",))
)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of no processes."""
    for module in (reporting, user_warnings):
        monkeypatch.setattr(module, "process", lambda group: 0)


def reporter(**settings: Any) -> Reporter:
    under_test = Reporter(EDGCConfig.from_preset(volume=VOLUME), Run(iterations=ITERATIONS, replicas=2), **settings)
    under_test.parameters = [1500]
    return under_test


def test_the_document_names_every_field_of_a_windows_event(tmp_path: Path) -> None:
    under_test = reporter()
    under_test.events = EventLog(str(tmp_path))
    under_test.window(WITH_MESSAGES, last=False)
    (event,) = read_events(tmp_path)
    assert (event["dp_bytes"], event["dp_bytes_dense"], event["dp_bytes_fp32"]) == (1e6, 2e6, VOLUME * 1e6)
    assert event["stages"][0]["dp_bytes_dense"] == 2e6 and event["messages"][0]["bytes"] == 1e3
    named = {name for part in (event, event["plan"], *event["stages"], *event["messages"]) for name in part}
    document = (REPOSITORY / "docs" / "events.md").read_text()
    assert [name for name in named if f"`{name}`" not in document] == []


@pytest.mark.parametrize(("reached", "warned"), [(23.5, False), (23.0, True), (13.0, True)])
def test_a_volume_may_be_missed_by_three_percent_without_a_word(
    reached: float, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    reporter().window(
        replace(REPORT, iteration=ITERATIONS, bytes=RunBytes(ByteCount(1e6, 2e6, reached * 1e6))), last=True
    )
    assert ("--edgc-volume 24 was asked for, and the run sent" in capsys.readouterr().err) == warned


def test_a_volume_that_begins_amid_a_run_is_of_the_steps_from_there_on(capsys: pytest.CaptureFixture[str]) -> None:
    under_test = reporter()
    ledger = SimpleNamespace(before=ByteCount(5e6, 2e6, 12e6), counts=SimpleNamespace(outside_budget=ByteCount()))
    budget = SimpleNamespace(rounds=False, ledger=ledger)
    under_test.resume(REPORT.plan, SimpleNamespace(budget=budget))  # type: ignore[arg-type]
    whole = RunBytes(ByteCount(6e6, 4e6, 36e6))
    under_test.window(replace(REPORT, iteration=ITERATIONS, bytes=whole), last=True)
    assert "was asked for" not in capsys.readouterr().err


def test_a_run_that_rounds_has_missed_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reporting, "processes", lambda group: 2)
    config = EDGCConfig.from_preset(volume=VOLUME)
    for resumed in (False, True):
        under_test = Reporter(config, Run(iterations=ITERATIONS, replicas=2))
        under_test.start(RunPlan(config, rounds=not resumed))
        assert ("all gradients rounded" in capsys.readouterr().out) != resumed
        under_test.parameters = [1500]
        if resumed:
            budget = SimpleNamespace(
                rounds=True,
                ledger=SimpleNamespace(before=ByteCount(), counts=SimpleNamespace(outside_budget=ByteCount())),
            )
            under_test.resume(PLAN, SimpleNamespace(budget=budget))  # type: ignore[arg-type]
        plan = replace(PLAN, ranks=(NO_RANK,), reasons=("rounding is faster",), formats=({"w": "int4"},))
        report = replace(
            REPORT, iteration=ITERATIONS, bytes=RunBytes(ByteCount(1e6, 2e6, 8e6)), ranks=(NO_RANK,), plan=plan
        )
        under_test.window(report, last=True)
        said = capsys.readouterr()
        assert "was asked for" not in said.err
        assert "rounded -> rounded (rounding is faster; 1 in int4)" in said.out


def test_a_run_that_ends_early_has_missed_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    reporter().window(replace(REPORT, bytes=RunBytes(ByteCount(1e6, 2e6, 2e6))), last=True)
    assert "was asked for" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("preset", "rank", "reason", "iteration", "by_host", "warned"),
    [
        ("paper", None, WARM_UP, ITERATIONS, False, True),
        ("paper", None, STABLE, ITERATIONS, False, True),  # stable in the last window, so too late
        ("paper", None, WARM_UP, ITERATIONS - 1, False, False),
        ("paper", None, NEVER_COMPRESSED, ITERATIONS, False, False),
        ("paper", None, "alignment", ITERATIONS, False, False),  # it was compressed before
        ("paper", None, STABLE, ITERATIONS, True, False),  # the host sums because that is faster
        ("paper", 64, "entropy", ITERATIONS, False, False),
        ("balanced", None, WARM_UP, ITERATIONS, False, False),
    ],
)
def test_a_run_whose_entropy_was_never_stable_says_so_at_its_end(
    preset: str,
    rank: int | None,
    reason: str,
    iteration: int,
    by_host: bool,
    warned: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    under_test = Reporter(EDGCConfig.from_preset(preset), Run(iterations=ITERATIONS, replicas=2))
    under_test.parameters = [1500]
    plan = replace(PLAN, ranks=(rank,), reasons=(reason,), by_host=by_host)
    under_test.window(replace(REPORT, iteration=iteration, ranks=(rank,), plan=plan), last=True)
    said = capsys.readouterr().err
    assert ("stage 1 stayed dense to the end" in said) == warned


@pytest.mark.parametrize(
    "by_host", [(False, False, False), (False, False, True), (False, True, False), (True, False, False)]
)
def test_a_missed_volume_is_no_fault_of_a_run_in_which_the_host_has_summed(
    by_host: Sequence[bool], capsys: pytest.CaptureFixture[str]
) -> None:
    under_test = reporter()
    under_test.resume(replace(PLAN, by_host=by_host[0]), None)
    for iteration, summed in zip((900, ITERATIONS), by_host[1:], strict=True):
        plan = replace(PLAN, by_host=summed)
        report = replace(REPORT, iteration=iteration, plan=plan, bytes=RunBytes(ByteCount(1e6, 2e6, 2e6)))
        under_test.window(report, last=iteration == ITERATIONS)
    assert ("was asked for" in capsys.readouterr().err) == (not any(by_host))


@pytest.mark.parametrize(("idle", "warned"), [(0.0, True), (1e6, False)])
def test_a_resumed_run_knows_whether_the_host_has_summed_before(
    idle: float, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = SimpleNamespace(before=ByteCount(), counts=SimpleNamespace(outside_budget=ByteCount(fp32=idle)))
    under_test, controller = reporter(), SimpleNamespace(budget=SimpleNamespace(rounds=False, ledger=ledger))
    under_test.resume(PLAN, controller)  # type: ignore[arg-type]
    under_test.window(
        replace(REPORT, iteration=ITERATIONS, plan=PLAN, bytes=RunBytes(ByteCount(1e6, 2e6, 2e6))), last=True
    )
    assert ("was asked for" in capsys.readouterr().err) == warned


@pytest.mark.parametrize(("reachable", "warned"), [(20.0, True), (24.0, False), (30.0, False)])
def test_a_volume_that_cannot_be_reached_is_named_before_training(
    reachable: float, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    controller: Any = SimpleNamespace(budget=SimpleNamespace(volume=VOLUME, reachable=reachable))
    warn_of_budget(controller)
    line = f"edgc: warning: --edgc-volume 24: this run can send about {reachable:g}x fewer bytes at most"
    assert capsys.readouterr().err.startswith(line) == warned


@pytest.mark.parametrize("exhausted", [False, True])
def test_a_resumed_run_says_that_too_little_of_its_volume_is_left(
    exhausted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = SimpleNamespace(exhausted=lambda: exhausted)
    controller: Any = SimpleNamespace(budget=SimpleNamespace(volume=VOLUME, rounds=False, ledger=ledger))
    warn_of_spent_budget(controller)
    said = capsys.readouterr().err
    assert said.startswith("edgc: warning: --edgc-volume 24: the steps before this resume have sent so") == exhausted


@pytest.mark.parametrize(
    ("before", "after", "next_trial", "decided"),
    [
        (False, False, None, "EDGC compresses as before"),
        (False, True, None, "the host sums from now on"),
        (True, False, None, "EDGC compresses from now on"),
        (True, True, None, "the host sums as before"),
        (True, True, (201, 204), "the host sums as before. Steps vary by more than that: another trial follows"),
    ],
)
def test_a_trial_leaves_one_line_that_tells_what_is_new(
    before: bool, after: bool, next_trial: tuple[int, int] | None, decided: str, capsys: pytest.CaptureFixture[str]
) -> None:
    under_test = reporter()
    under_test.resume(replace(PLAN, by_host=before), None)
    report = replace(REPORT, plan=replace(PLAN, by_host=after, tried=(0.75, 0.5), trial=next_trial))
    under_test.window(report, last=False)
    under_test.window(report, last=False)  # nothing was tried in this one
    steps = "a step takes 0.750 s compressed, 0.500 s with the host's own sum"
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "a step takes" in line] == [f"edgc | 200/1000 | {steps}: {decided}"]


def test_what_the_optimizer_got_stands_in_the_line_of_its_stage(capsys: pytest.CaptureFixture[str]) -> None:
    """The mean over entries: three at 0.9 and one at 0.5; of the last nothing was sampled."""
    large = Fidelity(Products(true=1.0, got=1.0, both=0.9), entries=3.0)
    small = Fidelity(Products(true=4.0, got=100.0, both=10.0), entries=1.0)
    stage = replace(STAGE, residual=0.75, fidelity={"a": large, "b": small, "c": Fidelity()})
    report = replace(REPORT, stages=(stage,))
    reporter().window(report, last=False)
    assert capsys.readouterr().out.splitlines()[0].endswith("| residual 0.750 | cosine 0.800")
    assert dict(tensorboard.scalars(report))["edgc/cosine/stage-1"] == pytest.approx(0.8)
    reporter().window(REPORT, last=False)
    assert "cosine" not in capsys.readouterr().out


def test_too_little_of_the_gradient_warns_once_for_each_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = EDGCConfig.from_preset(volume=VOLUME, log_dir=str(tmp_path))
    under_test = Reporter(config, Run(iterations=ITERATIONS, replicas=2))
    under_test.parameters = [1500]
    for iteration, relief in ((100, 1.0), (200, 2.0), (300, 2.0), (400, 4.0), (500, 2.0), (600, 1.0)):
        report = replace(REPORT, iteration=iteration, plan=replace(PLAN, relief=relief))
        under_test.window(report, last=False)
    seen = capsys.readouterr()
    what = "less than 10 % of the energy that the optimizer got lay along the true gradient"
    assert seen.err.splitlines() == [
        f"edgc: warning: iteration 200/1000: {what}: steps may now send 2 times their budget",
        f"edgc: warning: iteration 400/1000: {what}: steps may now send 4 times their budget",
    ]
    why = (
        "enough of the gradient arrives and the loss does not rise, the learning rate is small, or all gradients are "
        "rounded"
    )
    assert [line for line in seen.out.splitlines() if "enough" in line] == [
        f"edgc | iteration 500/1000: steps may send 2 times their budget: {why}",
        f"edgc | iteration 600/1000: steps may send their budget again: {why}",
    ]
    guards = [event for event in read_events(tmp_path) if event["event"] == "guard"]
    assert [(event["iteration"], event["relief"]) for event in guards] == [(200, 2), (400, 4), (500, 2), (600, 1)]


@pytest.mark.parametrize(
    ("settings", "answer", "relief"),
    [
        ({"volume": VOLUME}, "steps may now send 2 times their budget", 2.0),
        ({"volume": VOLUME}, "steps send what they have sent before", 1.0),
        ({"preset": "paper", "rmin": 4, "rmax": 16}, "stages that are compressed have rank 16 until it falls", 1.0),
        ({"static_rank": 8}, "steps send what they have sent before", 1.0),
    ],
)
def test_a_loss_that_rises_warns_once_with_what_edgc_does_about_it(
    settings: dict[str, Any], answer: str, relief: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = EDGCConfig.from_preset(**settings, log_dir=str(tmp_path))
    under_test = Reporter(config, Run(iterations=ITERATIONS, replicas=2))
    under_test.parameters = [1500]
    for iteration, rise, given in ((100, 0.0, 1.0), (200, 0.25, relief), (300, 0.3, relief), (400, 0.0, relief)):
        plan = replace(PLAN, loss_rise=rise, relief=given)
        under_test.window(replace(REPORT, iteration=iteration, plan=plan), last=False)
    seen = capsys.readouterr()
    what = "the training loss of the last window is 25 % above the lowest of the 10 windows before"
    assert seen.err.splitlines() == [f"edgc: warning: iteration 200/1000: {what}: {answer}"]
    assert "edgc | iteration 400/1000: the training loss no longer rises" in seen.out.splitlines()
    guards = [event for event in read_events(tmp_path) if event["event"] == "guard"]
    assert [(event["iteration"], event["loss_rise"]) for event in guards] == [(200, 0.25), (400, 0.0)]


@pytest.mark.parametrize(
    ("preset", "before", "after", "said"),
    [
        # the learning rate has become small while the loss is still high
        ({"volume": VOLUME}, {"relief": 4.0, "loss_rise": 0.3}, {"loss_rise": 0.3}, "their budget again"),
        ({"volume": VOLUME}, {"relief": 4.0}, {"loss_rise": 0.3}, "30 % above"),
        # no stage is compressed yet
        ({"preset": "paper", "rmin": 4, "rmax": 16}, {}, {"loss_rise": 0.3, "ranks": (None,)}, "what they have sent"),
    ],
)
def test_what_is_said_of_a_loss_that_rises_is_what_steps_do(
    preset: dict[str, Any], before: dict[str, Any], after: dict[str, Any], said: str
) -> None:
    plans = [replace(PLAN, **one) for one in (before, after)]
    assert said in wording.guard_text(*plans, EDGCConfig.from_preset(**preset))


def test_a_resumed_run_does_not_warn_again(capsys: pytest.CaptureFixture[str]) -> None:
    under_test, plan = reporter(), replace(PLAN, relief=2.0)
    under_test.resume(plan, None)
    under_test.window(replace(REPORT, plan=plan), last=False)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("spikes", "line"),
    [
        (
            replace(REPORT, stages=(replace(STAGE, spikes=3.0, largest_spike=12.34),)),
            "stage 1 | 3 gradients above 5 times their running norm (the largest 12.3 times)",
        ),
        (
            replace(WITH_MESSAGES, messages=(replace(MESSAGE, spikes=2.0),)),
            "gradients from stage 2 to 1 | 2 messages above 5 times their running norm",
        ),
    ],
)
def test_spikes_are_told_where_there_were_some(
    spikes: WindowReport, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    under_test = reporter()
    under_test.window(WITH_MESSAGES, last=False)
    assert "running norm" not in capsys.readouterr().out
    under_test.window(spikes, last=False)
    assert f"edgc | 200/1000 | {line}: their errors were scaled down" in capsys.readouterr().out.splitlines()


def test_what_was_not_measured_is_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    message = replace(MESSAGE, entropy=math.nan)
    unseen = replace(WITH_MESSAGES, stages=(replace(STAGE, entropy=math.nan),), messages=(message,))
    reporter().window(unseen, last=False)
    out = capsys.readouterr().out
    assert out.count("entropy - nats") == 2 and "residual -" in out and "nan" not in out


def test_at_the_end_stands_what_memory_a_process_has_kept(capsys: pytest.CaptureFixture[str]) -> None:
    under_test = reporter()
    lines = [
        "edgc | stage 1 kept 3 kB of state a process: 2.00 bytes a parameter",
        "edgc | gradients from stage 2 to 1: 700 B of state a process",
    ]
    for last in (False, True):
        under_test.window(WITH_MESSAGES, last=last)
        shown = capsys.readouterr().out.splitlines()
        assert [line for line in shown if "of state" in line] == (lines if last else [])


def test_tensorboard_gets_what_was_measured_of_stages_and_messages() -> None:
    scalars: dict[str, float] = {}

    def add_scalar(name: str, value: float, iteration: int) -> None:
        assert iteration == 200
        scalars[name] = value

    reporter(scalars=lambda: SimpleNamespace(add_scalar=add_scalar)).window(WITH_MESSAGES, last=False)
    stage = {"entropy": -5.25, "rank": 64.0, "dp-bytes": 1e6, "reduce-seconds": 0.125}
    messages = {"pp-bytes": 1e3, "pp-rank": 16.0, "pp-entropy": -3.5}
    expected = {f"edgc/{name}/stage-1": value for name, value in stage.items()}
    expected |= {f"edgc/{name}/gradients-from-stage-2-to-1": value for name, value in messages.items()}
    assert scalars == expected, "and no residual: it is NaN"
    unmeasured = dict(tensorboard.scalars(replace(WITH_MESSAGES, messages=(replace(MESSAGE, entropy=math.nan),))))
    assert expected.keys() - unmeasured.keys() == {"edgc/pp-entropy/gradients-from-stage-2-to-1"}


def test_the_rank_that_entropy_proposed_stands_beside_the_one_that_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    plan = RankPlan(
        version=2,
        first_iteration=200,
        ranks=(56, 60, None),
        entropy=(-5.2, -5.2, math.nan),
        proposed=(0.0, 0.0, None),
        targets=(16, 60, None),
        reasons=("entropy", "alignment", "warm-up"),
    )
    report = replace(
        WITH_MESSAGES,
        ranks=(64, 64, None),
        plan=plan,
        stages=tuple(replace(STAGE, stage=StageKey(StageKind.LAYERS, place)) for place in range(3)),
        message_plan=RankPlan(1, 200, (12,), proposed=(3.25,), targets=(4,), reasons=("entropy",)),
    )
    reporter().window(report, last=False)
    lines = capsys.readouterr().out.splitlines()
    assert "| rank 64 -> rank 56 (entropy; proposed 0.0; target rank 16) |" in lines[0]
    assert "| rank 64 -> rank 60 (alignment; proposed 0.0) |" in lines[1]
    assert "| int4 -> int4 (warm-up) |" in lines[2], "in the format of the warm-up"
    assert "| rank 16 -> rank 12 (entropy; proposed 3.2; target rank 4) |" in lines[3]
    ranks = {name: value for name, value in tensorboard.scalars(report) if name.startswith("edgc/rank")}
    assert ranks == {
        **{"edgc/rank/stage-1": 64, "edgc/rank-proposed/stage-1": 0, "edgc/rank-target/stage-1": 16},
        **{"edgc/rank/stage-2": 64, "edgc/rank-proposed/stage-2": 0, "edgc/rank-target/stage-2": 60},
        **{"edgc/rank/stage-3": 0, "edgc/rank-target/stage-3": 0},
    }


def test_each_unit_of_fidelity_has_its_own_numbers_in_the_event_log() -> None:
    units = [Products(4.0, 4.0, both, 4.0, unsent) for both, unsent in ((1.0, 1.0), (2.0, 2.0), (3.0, 3.0))]
    event = Fidelity(*units, Agreement(4.0, 4.0, 3.5), Earlier(1.0, 0.0, 0.25), 4.0).to_event()
    for name, values in (("cosine", (0.25, 0.5, 0.75)), ("late", (0.25, 0.5, 0.75)), ("delay", (0.3333, 1.0, 3.0))):
        assert [event[name + unit] for unit in ("", "_of_update", "_of_descent")] == list(values)
    assert event["cosine_of_adam"] == 0.875 and event["energy_of_descent"] == 1.0 and event["lag"] == 0.25


@pytest.mark.parametrize(
    ("given", "host", "ratios"),
    [
        ({}, 24e6, "24.0x fewer than in fp32, 12.0x fewer than in bf16"),
        ({"value_bytes": 2}, 12e6, "24.0x fewer than in fp32, 12.0x fewer than in bf16"),
        (
            {"value_bytes": 2, "scatters": True},
            6e6,
            "12.0x fewer than in fp32, 6.0x fewer than in bf16; 24.0x fewer than an all-reduce in fp32",
        ),
    ],
)
def test_a_run_ends_with_its_ratios(given: dict[str, Any], host: float, ratios: str) -> None:
    report = replace(REPORT, bytes=RunBytes(ByteCount(1e6, host, 24e6)))
    lines = wording.end_lines(report, Run(iterations=9, replicas=2, **given), [1500], {})
    (line,) = (line for line in lines if line.startswith("gradients: "))
    assert line.partition(", ")[2] == ratios


def test_a_run_ends_with_what_the_optimizer_got(capsys: pytest.CaptureFixture[str]) -> None:
    def seen(cosine: float) -> StageWindow:
        return replace(STAGE, fidelity={"w": Fidelity(Products(1.0, 1.0, cosine), entries=10)})

    under_test = reporter()
    for stage in (STAGE, seen(0.5), seen(0.75)):
        under_test.window(replace(REPORT, stages=(stage,)), last=False)
    under_test.end(REPORT)
    assert "stage 1: what the optimizer got has a mean cosine of 0.625 to the true gradient, in the worst of 2" in (
        said := capsys.readouterr().out
    )
    assert "measured windows 0.500" in said
    reporter().end(REPORT)
    assert "the optimizer got" not in capsys.readouterr().out, "nothing was measured"


def test_a_stage_says_how_many_times_fewer_bytes_and_progress_how_long_still() -> None:
    report = replace(REPORT, stages=(replace(STAGE, bytes=ByteCount(1e6, 25e6)),))
    line, *_ = wording.window_lines(report, PLAN, EDGCConfig())
    assert "| sent 1 MB of 25 MB (25.0x fewer) |" in line
    for host, what in ((25e6, "int8"), (0.0, "dense")):  # nothing is summed, and rounded, where the host sums nothing
        report = replace(REPORT, stages=(replace(STAGE, bytes=ByteCount(host, host)),), ranks=(None,))
        line, *_ = wording.window_lines(report, PLAN, EDGCConfig.of(dense_wire="int8"))
        assert f" | {what} -> " in line
    assert wording.progress_line(100, 400, [0.5, 9.0, 0.5]) == "100/400 iterations | 0.500 s/step | 2 m 30 s left"


@pytest.mark.parametrize(("kernels", "warned"), [("fused", True), ("plain", False)])
def test_kernels_that_do_not_run_here_are_told(
    kernels: str, warned: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(user_warnings, "triton_kernels", lambda device: None)
    user_warnings.warn_of_kernels(EDGCConfig.of(kernels=kernels), torch.device("cpu"))
    assert ("kernels = fused: Triton's kernels need Triton" in capsys.readouterr().err) == warned
