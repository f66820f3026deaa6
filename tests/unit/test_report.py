"""The report from synthetic runs, whose figures are known."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from torch.utils.tensorboard import SummaryWriter

from edgc.observe.events import EventLog
from tools import report
from tools._root import REPOSITORY
from tools.reports.comparison import different_plans, rank_path
from tools.reports.picture import delays, used_ranks
from tools.shared.checkout import commit
from tools.shared.runs import Run, load_run

RANKS = [[None, None], [16, 16], [8, 12], [8, None]]


def write_run(
    folder: Path, val_loss: float, megabytes: float, seconds: float, finished: bool = True, **of_start: object
) -> None:
    log = EventLog(str(folder))
    kinds = [{"name": f"stage {n}", "matrices": [[f"w{n}", 8, 8]], "rest": [], "cost": None} for n in (1, 2)]
    start = {"iterations": 40, "stages": kinds, "world_size": 4, "versions": {}, "gradient_bytes": 4}
    log.write("start", **{"config": {"window": 10, "seed": 7}, **start, **of_start})
    for window, ranks in enumerate(RANKS, start=1):
        stages = [{"entropy": -float(window)}, {"entropy": None}]
        if window > 1 and folder.name == "edgc":
            others = {"b": {"delay": 99.0}, "w1": {"delay": 1.0 * window}}  # of a matrix, and of another parameter
            stages[0]["fidelity"] = others
        log.write(
            "window",
            iteration=10 * window,
            last=finished and window == 4,
            ranks=ranks,
            stages=stages,
            step_seconds=9.0 if window == 1 else seconds * window,
            dp_bytes=megabytes * 1e6 * window / 4,
            pp_bytes=3e5 * window,
            pp_bytes_dense=6e5 * window,
        )
    writer = SummaryWriter(str(folder / "tensorboard"))
    for step in range(1, 41):
        writer.add_scalar("lm loss", 5 - step / 20, step)
    writer.add_scalar("lm loss validation", 9.0, 20)
    writer.add_scalar("lm loss validation", val_loss, 40)
    writer.add_scalar("lm loss validation", 7.0, 40)  # Megatron's test loss, under the same name
    writer.close()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_run(tmp_path / "dense", val_loss=2.0, megabytes=100, seconds=1.0)
    write_run(tmp_path / "edgc", val_loss=2.01, megabytes=25, seconds=0.5)
    return tmp_path


def test_the_summary_holds_the_runs_figures(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(runs)]) == 0
    summary: dict[str, Any] = json.loads((runs / "summary.json").read_text())
    figures = {"val_loss": 2.0, "dp_bytes": 100e6, "pp_bytes": 1.2e6, "total_bytes": 101.2e6, "step_seconds": 3.0}
    assert figures.items() <= summary["dense"].items() and "paper" not in summary
    edgc = summary["edgc"]
    assert edgc["val_loss"] == pytest.approx(2.01) and (edgc["dp_bytes"], edgc["step_seconds"]) == (25e6, 1.5)
    assert edgc["ranks"] == RANKS and edgc["entropy"] == [[-1, None], [-2, None], [-3, None], [-4, None]]
    assert summary["dp_bytes_ratio"] == 0.25 and summary["total_bytes_ratio"] == pytest.approx(26.2 / 101.2)
    assert summary["val_loss_gap"] == pytest.approx(0.005)
    assert summary["commit"] == commit(REPOSITORY)
    out = capsys.readouterr().out
    assert re.search(r"gradients +fewer +than bf16 +messages +total +fewer +s/step", out)
    assert re.search(r"dense +2\.0000 +100\.0 MB +1\.00x +0\.50x +1\.2 MB +101\.2 MB +1\.00x +3\.000", out)
    assert re.search(r"edgc +2\.0100 +\+0\.50% +25\.0 MB +4\.00x +2\.00x +1\.2 MB +26\.2 MB +3\.86x +1\.500", out)
    assert summary["plans"] == {"dense": 4, "edgc": 4}
    assert "edgc, stage 1: dense for 1 window, rank 16 for 1 window, rank 8 for 2 windows" in out
    assert "edgc, stage 2: dense for 1 window, rank 16 for 1 window, rank 12 for 1 window, dense for 1 window" in out


def test_the_papers_run_stands_beside_the_other_two(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(runs / "paper", val_loss=2.0, megabytes=50, seconds=1.0)
    assert report.main([str(runs)]) == 0
    summary: dict[str, Any] = json.loads((runs / "summary.json").read_text())
    assert summary["paper"]["dp_bytes"] == 50e6 and summary["paper"]["ranks"] == RANKS
    assert summary["val_loss_gap"] == pytest.approx(0.005)  # of edgc
    assert list(summary["plans"]) == ["dense", "paper", "edgc"]
    out = capsys.readouterr().out
    assert re.search(r"paper +2\.0000 +\+0\.00% +50\.0 MB +2\.00x +1\.00x", out)
    assert "paper, stage 1: dense for 1 window" in out and "different plans over the run: paper 4, edgc 4" in out


def test_other_runs_of_the_folder_have_a_row_as_well(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("powersgd", "paper"):
        write_run(runs / name, val_loss=2.1, megabytes=20, seconds=1.0)
    (runs / "corpus").mkdir()
    write_run(runs / "optimus", val_loss=2.1, megabytes=20, seconds=1.0, finished=False)
    assert report.main([str(runs)]) == 0
    summary: dict[str, Any] = json.loads((runs / "summary.json").read_text())
    assert list(summary["plans"]) == ["dense", "paper", "powersgd", "edgc"]
    out, left_out = capsys.readouterr()
    assert "optimus: the run has not finished" in left_out
    assert re.search(r"powersgd +2\.1000 +\+5\.00% +20\.0 MB +5\.00x", out) and "powersgd, stage 1: dense" in out


def test_plans_are_different_that_differ_in_a_rank_or_a_format() -> None:
    def window(ranks: list[int | None], **plan: Any) -> dict[str, Any]:
        return {"ranks": ranks, "plan": {"ranks": ranks, "matrix_ranks": [None], "formats": [None], **plan}}

    same = [window([None]), window([None]), window([None], matrix_ranks=[{}])]
    assert different_plans(Run("edgc", {}, same, [], 1.0)) == 1
    ranked = window([8], matrix_ranks=[{"a": 8}])
    moved = window([8], matrix_ranks=[{"a": 4, "b": 8}])
    coded = window([8], matrix_ranks=[{"a": 8}], formats=[{"b": "int4"}])
    # a window's plan is for those after it: that of the last one is never used
    assert different_plans(Run("edgc", {}, [ranked, moved, ranked, ranked, coded], [], 1.0)) == 3
    assert different_plans(Run("edgc", {}, [ranked, coded, ranked, moved], [], 1.0)) == 3


def test_a_run_that_was_resumed_is_as_long_as_it_was_resumed_for(tmp_path: Path) -> None:
    log = EventLog(str(tmp_path / "edgc"))
    log.write("start", iterations=20, config={"volume": 24}, stages=[], world_size=2)
    write_run(tmp_path / "edgc", val_loss=2.0, megabytes=25, seconds=0.5, config={"window": 10, "volume": 12})
    start = load_run(tmp_path / "edgc").start
    assert (start["iterations"], start["world_size"], start["config"]["volume"]) == (40, 4, 12)


def test_delays_are_of_matrices_and_of_windows_that_measured_some(runs: Path) -> None:
    edgc = load_run(runs / "edgc")
    assert delays(edgc, 0) == [(20, 2.0), (30, 3.0), (40, 4.0)] and delays(edgc, 1) == []


def test_the_page_loads_nothing_and_the_picture_is_small(runs: Path) -> None:
    report.main([str(runs)])
    page = (runs / "report.html").read_text()
    assert "data:image/png;base64," in page and "+0.50%" in page
    assert re.findall(r"(?:src|href)=\"(?!data:)", page) == []
    picture = (runs / "report.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and 10_000 < len(picture) < 300_000
    assert sorted(path.name for path in runs.iterdir()) == [
        "dense",
        "edgc",
        "report.html",
        "report.png",
        "summary.json",
    ]


def test_a_window_used_the_ranks_that_the_window_before_planned() -> None:
    def window(end: int, ranks: list[int | None], planned: list[dict[str, int] | None]) -> dict[str, Any]:
        return {"iteration": end, "ranks": ranks, "plan": {"matrix_ranks": planned}}

    windows = [window(10, [None, 16], [{"a": 8, "b": 24}, None]), window(20, [16, 16], [None, {"c": 4}])]
    run = Run("edgc", {}, windows, [], 1.0)
    assert math.isnan(used_ranks(run, 0, 0)[0]) and used_ranks(run, 0, 1) == [16]
    assert used_ranks(run, 1, 0) == [8, 24] and used_ranks(run, 1, 1) == [16]


def test_what_a_resumed_run_has_done_twice_counts_once(runs: Path) -> None:
    folder = runs / "edgc"
    before = load_run(folder)
    whole = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    # stopped after the third window, and resumed from a checkpoint of the second
    lost = [line.replace('"last": true', '"last": false') for line in whole[:4]]
    (folder / "events.jsonl").write_text("".join([*lost, whole[0], *whole[3:]]))
    writer = SummaryWriter(str(folder / "tensorboard"))
    writer.add_scalar("lm loss", 3.5, 30)
    writer.close()
    after = load_run(folder)
    assert [window["iteration"] for window in after.windows] == [10, 20, 30, 40]
    assert after.windows == before.windows and len(after.loss) == len(before.loss)


def test_a_last_line_cut_short_is_no_finished_run(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = runs / "edgc" / "events.jsonl"
    log.write_text(log.read_text()[:-20])
    assert report.main([str(runs)]) == 2
    assert capsys.readouterr().err == f"report: error: {runs / 'edgc'}: the run has not finished\n"


def test_a_run_that_megatron_has_ended_early_is_not_compared(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = runs / "edgc" / EventLog.FILE
    start, first, second, *_ = log.read_text().splitlines()
    log.write_text("\n".join([start, first, second.replace('"last": false', '"last": true')]) + "\n")
    assert report.main([str(runs)]) == 2
    expected = f"report: error: {runs / 'edgc'}: the run has not finished: 20 of 40 iterations\n"
    assert capsys.readouterr().err == expected


def test_what_has_no_rank_is_rounded() -> None:
    assert rank_path([[None], [0], [0], [16]], 0) == "dense for 1 window, rounded for 2 windows, rank 16 for 1 window"


@pytest.mark.parametrize("case", ["missing", "unfinished", "no loss"])
def test_a_run_that_cannot_be_reported_gives_one_line_and_no_files(
    runs: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = runs / "edgc"
    if case == "missing":
        (broken / "events.jsonl").unlink()
        message = "there is no events.jsonl"
    elif case == "no loss":
        for file in (broken / "tensorboard").iterdir():
            file.unlink()
        message = "no validation loss"
    else:
        (broken / "events.jsonl").unlink()
        write_run(broken, 2.0, 1.0, 1.0, finished=False)
        message = "the run has not finished"
    assert report.main([str(runs)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error
    assert not (runs / "summary.json").exists() and not (runs / "report.png").exists()


@pytest.mark.parametrize(("what", "value"), [("iterations", 20), ("world_size", 8), ("gradient_bytes", 2), ("seed", 8)])
def test_runs_that_cannot_be_compared_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str, value: int
) -> None:
    write_run(tmp_path / "dense", val_loss=2.0, megabytes=100, seconds=1.0, **{what: value})
    write_run(tmp_path / "edgc", val_loss=2.01, megabytes=25, seconds=0.5)
    assert report.main([str(tmp_path)]) == 2
    assert f"cannot be compared: {what} = {value} (dense)" in capsys.readouterr().err
