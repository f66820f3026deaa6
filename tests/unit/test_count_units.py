"""How a step's time depends on the number of units: what the command computes from counts, and what it refuses."""

from dataclasses import replace
from pathlib import Path

import pytest

from edgc.plan.rank_plan import NO_RANK
from edgc.specs import MatrixSpec
from tools import count_units
from tools.benchmarks.stage import Stage
from tools.benchmarks.step_costs import PAPER_AT_RANK, ROUNDED, Count
from tools.benchmarks.step_counts import count_step, transient_bytes

ONE = Count(
    model="a model",
    gpu="a GPU",
    link_gbps=8.0,
    method="paper",
    ranks=(64,),
    units=1,
    launches=1000,
    collectives=1,
    gradient_bytes=2**30,
    moved_bytes=0,
    flops=0,
    sent_bytes=1e9,
    transient_bytes=2**29,
    host_seconds=1.0,
    device_seconds=0.5,
    latency_seconds=0.25,
    wire_seconds=1.0,
    dense_seconds=2.0,
    warm_up_transient_bytes=None,
)


def test_more_units_take_more_launches_and_messages_and_less_memory() -> None:
    # units of 64 MiB and more wait for one another, so that they need less memory together
    stage = Stage("large", tuple(MatrixSpec(f"{layer}.fc1", 4096, 8192) for layer in range(4)), 2)
    one, four = (count_step(stage, PAPER_AT_RANK, (64,), units) for units in (1, 4))
    assert 2 * one.launches < four.launches and one.collectives < four.collectives == 8
    assert four.sent == pytest.approx(one.sent, rel=0.01)
    memory = [transient_bytes(stage, ROUNDED["int4"], (NO_RANK,), units) for units in (1, 4)]
    assert memory[1] < 0.5 * memory[0]


def test_units_take_turns_and_start_within_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    class Passes:
        def forward_seconds(self) -> float:
            return 1.0

    monkeypatch.setattr(count_units.Training, "of", lambda *_: Passes())
    one = count_units.timed(ONE, "any")
    assert one.backward_seconds == 2.0
    # a second of computing, and a message of a second and its latency
    assert one.alone == pytest.approx(2.25) and one.overlapped == pytest.approx(2.25)
    # Half a second of computing each, in two parts, and messages of 0.75 s. The second computes 0.25 to 0.5 s and sends
    # 1.0 to 1.75 s; then its last 0.25 s follow.
    two = count_units.timed(replace(ONE, units=2, collectives=2, latency_seconds=0.5), "any")
    assert two.alone == pytest.approx(2.0)
    # The first starts after 1 s, and sends until the backward pass ends. Its last part and the second unit follow.
    assert two.overlapped == pytest.approx(1.5)


def test_the_page_has_a_row_for_each_number_of_units() -> None:
    text = count_units.page([count_units.Timed(ONE, 0.002, 2.25, 1.5)], "raw")
    assert "| `paper` | 64 | 1 | 1,000 | 1 | 0.50 | 1000 | 1250 | 2250 | 1500 |" in text
    assert "8 Gbit/s a process, a backward pass of 2 ms" in text


def test_what_cannot_be_counted_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert count_units.main(["--models", "no_such", "--output", str(tmp_path / "units")]) == 2
    assert "there is no such file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        count_units.main(["--units", "0"])
    assert "--units: must be at least 1" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
