"""The benchmark on a CPU: its figures are no GPU's, but what it counts and compares is the same."""

import json
from pathlib import Path

import pytest

from edgc.config import EDGCConfig
from tools import bench_gpu
from tools.benchmarks.contenders import CONTENDERS
from tools.benchmarks.reduction import KINDS
from tools.benchmarks.stage import Stage


def test_a_stage_has_the_matrices_of_its_layers() -> None:
    stage = Stage.of("gpt2_12.1b", None)
    assert len(stage.matrices) == 4 * 48 // 4
    assert {(m.rows, m.cols) for m in stage.matrices} == {(6720, 4480), (4480, 2240), (8960, 4480), (4480, 8960)}
    assert stage.elements == pytest.approx(12 * 48 * 4480**2 / 8)  # 12 width^2 a layer, 2 x 4 GPUs a replica
    assert stage.data_parallel == 8


@pytest.mark.parametrize("given", [["--models", "nosuch"], ["--models", "tiny", "--write", "README.md"]])
def test_what_cannot_be_measured_or_written_is_said_before(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_gpu.main(given) == 2
    error = capsys.readouterr().err
    assert error.startswith("bench_gpu: error: ") and error.count("\n") == 1


def test_a_run_writes_what_it_has_measured(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{bench_gpu.START}\nold\n<!-- end -->\nafter\n")
    bench_gpu.main(["--models", "tiny", "--ranks", "4", "--repetitions", "1", "--write", str(page)])
    result = json.loads(page.with_suffix(".json").read_text())
    (stage,) = result["stages"]
    by_name = {row["contender"]: row for row in stage["rows"]}
    assert set(by_name) == {"hook", *CONTENDERS}
    assert (by_name["plain"]["reads"], by_name["plain"]["writes"]) == (pytest.approx(7, abs=0.5), 4)
    assert all(row["seconds"] > 0 and row["break_even_gbps"] > 0 for row in by_name.values())
    for name, row in by_name.items():
        if name != "hook":
            kept = row["kept_bytes_per_parameter"]
            assert 4 <= kept < 5 and row["peak_bytes_per_parameter"] > kept, name
        if name in ("fused", "plain"):
            exact = stage["exactness"]["4"][name]
            assert exact["result"] < 1e-5 and exact["result_and_error"] < 1e-6
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("<!-- end -->\nafter\n") and "old" not in text
    assert "say nothing of a GPU" in text and f"| {4} | hook |" in text


def test_what_the_benchmark_of_a_reduction_compares_are_settings_of_today() -> None:
    for settings in KINDS.values():
        assert EDGCConfig.of(**settings, static_rank=8, min_saving=1.0).ranks.resolved_static_rank == 8
