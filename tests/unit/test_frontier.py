"""Lists of runs, their results and their report, on made-up lines whose figures are known."""

import json
import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import stdev
from typing import Any

import numpy as np
import pytest

from edgc.config.presets import PRESETS
from edgc.plan.by_volume.noise import noise_of_format
from tools import frontier
from tools._root import REPOSITORY
from tools.experiments import lists, results, series, studies, study_page, training
from tools.experiments.entries import difference, entries, old, trend
from tools.experiments.lists import ListError, Trial, load_list
from tools.experiments.page import markdown
from tools.experiments.plot import FAMILIES, draw, draw_trends
from tools.experiments.replay import Replay, cases, compare, replays
from tools.experiments.results import page_lines
from tools.experiments.signals import rank_correlation
from tools.experiments.store import IDENTITY, RESULTS, identity, read_results, record_result
from tools.shared import changes
from tools.shared.intervals import Interval
from tools.shared.runs import Run, RunError

LIST = """
title: A list
flags: --lr 1e-3
models: {small: --num-layers 2, large: --num-layers 4}
defaults: {model: small, data_parallel: 2, pipeline_parallel: 1, iterations: 10, seeds: [1, 2], flags: ""}
entries:
  - {name: dense, flags: --edgc-engine dense}
  - {name: ours, flags: "--edgc-static-rank 8", model: large, pipeline_parallel: 2, seeds: [3]}
comparisons: [[ours, dense]]
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text)
    return path


def test_a_list_becomes_one_trial_for_each_entry_and_seed(tmp_path: Path) -> None:
    runs = load_list(written(tmp_path, LIST))
    assert (runs.name, runs.title, runs.comparisons) == ("mine", "A list", (("ours", "dense"),))
    assert [(trial.name, trial.model, trial.seed) for trial in runs.trials] == [
        ("dense", "small", 1),
        ("dense", "small", 2),
        ("ours", "large", 3),
    ]
    text = " ".join(runs.trials[2].arguments())
    for part in (
        "--lr 1e-3 --num-layers 4",
        "--train-data-path runs/data/stdlib_train_text_document",
        "--train-iters 10 --seed 3 --pipeline-model-parallel-size 2",
        "--edgc-log-dir runs/frontier/large-dp2-pp2-10/ours-seed3 --edgc-seed 3 --edgc-static-rank 8",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("model: large", "model: huge", "entry ours: there is no model huge"),
        ("seeds: [3]", "seed: 3", "entry ours: missing or unknown: seed"),
        ("title:", "titel:", "needs models and entries"),
        ("name: ours", "name: our own", "name = 'our own': only letters"),
        ("[[ours, dense]]", "[[ours, theirs]]", "compared but not listed: theirs"),
        ("seeds: [1, 2]", "seeds: [1, 1]", "listed twice: dense-seed1"),
        ("models: {", "models: [", "mine.yaml"),
        ("title:", "trends: {width: {tiny: 64}}\ntitle:", "trends name what is not listed: tiny"),
        (
            "iterations: 10",
            "iterations: ten",
            "iterations = 'ten': must be an integer",
        ),
        ("flags: --edgc-engine dense", "flags: ", "does not have the format"),
        ("seeds: [3]", "seeds: 3", "does not have the format"),
        ("[[ours, dense]]", "[[ours, dense, ours]]", "does not have the format"),
        ("  - {name: dense", "  - text\n  - {name: dense", "does not have the format"),
        ("--lr 1e-3", "--lr '1e-3", "No closing quotation"),
        ("title:", "trends: {width: 3}\ntitle:", "does not have the format"),
        ("title:", "studies: [[x]]\ntitle:", "does not have the format"),
        ("title:", "study: tea-leaves\ntitle:", "study = tea-leaves: must be one of fidelity"),
        ("title:", "studies: [entropy, tea-leaves]\ntitle:", "study = tea-leaves: must be one of fidelity"),
    ],
)
def test_a_list_that_breaks_a_rule_is_refused_in_one_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in LIST
    with pytest.raises(ListError, match="mine.yaml") as error:
        load_list(written(tmp_path, LIST.replace(old, new)))
    assert message in str(error.value)


def test_a_missing_corpus_is_named_once_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lists, "REPOSITORY", tmp_path)
    monkeypatch.setattr(lists, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(frontier, "DOCS", tmp_path)
    monkeypatch.setattr(frontier, "run", lambda trial: pytest.fail("something is trained"))
    path = written(
        tmp_path,
        LIST.replace("large: --num", "large: {corpus: runs/data/go512, flags: --num").replace(
            "layers 4}", "layers 4}}"
        ),
    )
    assert frontier.main(["--config", str(path)]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(
        "frontier: error: there is no corpus runs/data/stdlib: python tools/preprocess_data.py --py"
    )
    assert second.endswith("no corpus runs/data/go512: bash scripts/prepare_corpora.sh")
    assert frontier.main(["--config", str(path), "--report"]) == 0, "a page needs none"


def test_the_command_reports_a_bad_list_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert frontier.main(["--config", str(tmp_path / "none.yaml")]) == 2
    assert "frontier: error: " in capsys.readouterr().err


def test_the_lists_in_the_repository_are_sound() -> None:
    lists = sorted((REPOSITORY / "configs" / "frontier").glob("*.yaml"))
    assert lists
    for path in lists:
        names = {(trial.setting, trial.seed) for trial in load_list(path).trials}
        dense = {(trial.setting, trial.seed) for trial in load_list(path).trials if trial.name == "dense"}
        assert names == dense, f"{path}: every run needs a dense run of its setting and seed"


def line(name: str, seed: int, val_loss: float, megabytes: float, **other: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "name": name,
        "engine": "dense" if name == "dense" else "powersgd",
        "flags": f"--flag-of {name}",
        "settings": "--shared",
        "commit": "0123456789+",
        "seed": seed,
        "iterations": 10,
        "data_parallel": 2,
        "pipeline_parallel": 1,
        "val_loss": val_loss,
        "dp_bytes": megabytes * 1e6,
        "dp_bytes_dense": 120e6,  # the dense run's own bytes count, not what another run takes them for
        "step_seconds": 0.5,
        "machine": "box",
        "versions": {"torch": "1"},
        **other,
    }


LINES = [
    line("dense", 1, 2.0, 100),
    line("dense", 2, 4.0, 100),
    line("good", 1, 2.02, 10),
    line("good", 2, 4.0, 10),
    line("worse", 1, 2.04, 20),
    line("small", 1, 2.2, 5),
    line("orphan", 1, 2.0, 1, model="other"),
]


def test_gaps_are_paired_by_seed_and_the_front_is_marked() -> None:
    found = {entry.name: entry for entry in entries(LINES)}
    assert set(found) == {"dense", "good", "worse", "small"}
    assert found["good"].gap.mean == pytest.approx(0.005)
    # two gaps of 1 % and 0 %: standard error 0.5 %, t(1 degree of freedom) = 12.706
    assert found["good"].gap.half_width == pytest.approx(12.706 * 0.005, rel=1e-3)
    assert found["good"].reduction == pytest.approx(10)
    assert math.isinf(found["worse"].gap.half_width)
    assert {name for name, entry in found.items() if entry.on_front} == {"dense", "good", "small"}


def test_the_front_is_one_of_todays_rows() -> None:
    older = line("older", 1, 1.9, 1, other="--rank 3")
    on_front = {entry.name: entry.on_front for entry in entries([*LINES, older])}
    assert on_front["good"] and not on_front["older"], "a row that would not be the same today beats none"


def test_runs_on_other_data_devices_or_settings_are_not_set_against_each_other() -> None:
    dense, good = line("dense", 1, 2.0, 100, corpus="a-b"), line("good", 1, 2.02, 10)
    assert {entry.name for entry in entries([dense, good])} == {"dense", "good"}, "older lines do not name their data"
    for other, why in (
        ({"corpus": "c-d"}, "not trained on the same data"),
        ({"settings": "--shared --lr 9"}, "not trained with the same settings"),
        ({"gpu": True}, "no dense run"),
    ):
        moved = {**good, **other}
        assert {entry.name for entry in entries([dense, moved])} == {"dense"}
        assert why in markdown("a", "b", [dense, moved], []), "and the page says why"
    of_edgc = {**good, "settings": "--shared --edgc-window 9"}
    assert "good" in {entry.name for entry in entries([dense, of_edgc])}, "dense does not use those"
    twice = [{**one, "settings": f"--lr {lr} --shared --lr 9"} for one, lr in ((dense, 1), (good, 2))]
    assert "good" in {entry.name for entry in entries(twice)}, "the last one holds"


def test_confidence_intervals_cover_what_they_say() -> None:
    import random

    random.seed(0)
    covered = sum(
        abs(interval.mean) <= interval.half_width
        for interval in (Interval.of([random.gauss(0, 1) for _ in range(3)]) for _ in range(4000))
    )
    assert 0.94 < covered / 4000 < 0.96


@pytest.mark.parametrize(("seeds", "quantile"), [(2, 12.706), (11, 2.228), (12, 2.201), (40, 2.086)])
def test_quantiles_are_students(seeds: int, quantile: float) -> None:
    interval = Interval.of([float(number % 2) for number in range(seeds)])
    assert interval.half_width == pytest.approx(quantile * stdev([n % 2 for n in range(seeds)]) / math.sqrt(seeds))


def test_a_difference_is_that_of_common_seeds() -> None:
    ((key, (gain, size)),) = difference(LINES, "good", "worse").items()
    assert key == ("m, DP 2, 10 iterations", False, False)
    assert gain.mean == pytest.approx(1 - 2.02 / 2.04) and size == pytest.approx(0.5)


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs/frontier").glob("*.yaml")), ids=lambda path: path.stem)
def test_pages_are_those_of_the_lines_that_are_kept(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = frontier.DOCS
    (tmp_path / RESULTS).symlink_to(kept / RESULTS)
    monkeypatch.setattr(frontier, "DOCS", tmp_path)
    assert frontier.main(["--config", str(path), "--report"]) == 0
    for page in tmp_path.glob("*.md"):
        again = f"python tools/frontier.py --report --config configs/frontier/{path.name}"
        assert (kept / page.name).read_text() == page.read_text(), f"write it again with {again}"


def test_the_page_and_the_plot() -> None:
    page = markdown("mine", "A title", LINES, [("good", "worse")])
    assert "| ● | good | 10.0x | 5.0x | +0.50 % ± 6.35 | 1: +1.00, 2: +0.00 | 0.50 | 0123456+ |" in page
    assert "|  | worse | 5.0x | 2.5x | +2.00 % | 1: +2.00 | 0.50 | 0123456+ |" in page
    assert "| gap to dense in fp32 | by seed (%) |" in page and "Flags of all runs: `--shared`" in page
    assert "| orphan | other, DP 2, 10 iterations | 1 | 2.0000 | 0123456+ | there is no dense run of its seed |" in page
    assert "| good | worse | m, DP 2, 10 iterations | +0.98 % | 0.50x |" in page
    assert "mine.png" in page and "| small | `--flag-of small` |" in page
    assert "Commits: 0123456+." in page
    other = markdown("mine", "A title", [*LINES, line("small", 1, 2.2, 5, model="other", flags="--other")], [])
    assert "| small | `--flag-of small` |" in other and "| small | `--other` |" in other
    changed = [{**one, "settings": "--changed"} if one["name"] == "worse" else one for one in LINES]
    of_changed = markdown("mine", "A title", changed, [])
    assert "Flags of worse: `--changed`" in of_changed and "Flags of all runs" not in of_changed
    assert draw(LINES).startswith(b"\x89PNG")


def test_a_trend_is_the_gap_by_what_settings_differ_in() -> None:
    large = [line("dense", 1, 3.0, 100, model="large"), line("good", 1, 3.003, 10, model="large")]
    lines = [*LINES, *large, line("small", 1, 9.0, 5, model="large", other="another volume")]
    values = {"large, DP 2, 10 iterations": 256, "m, DP 2, 10 iterations": 128}
    found = trend(lines, values)
    assert [(value, point.gap.mean) for value, point in found["good"].items()] == [
        (128, pytest.approx(0.01)),
        (256, pytest.approx(0.001)),
    ], "of the first seed, which both have"
    assert found["good"][128].change is None
    assert found["good"][256].change == Interval(pytest.approx(-0.009), math.inf)
    alone = trend(LINES, {"m, DP 2, 10 iterations": 128})
    assert alone["good"][128].gap.mean == pytest.approx(0.005), "all seeds of a single point"
    others = [{**one, "seed": one["seed"] + 7} for one in large]
    apart = trend([*LINES, *others], values)["good"]
    assert apart[128].gap.mean == pytest.approx(0.005), "all, without a common one"
    assert apart[256].change is None
    assert list(found["small"]) == [128], "a run of older code is no point of a trend"
    lines.append(line("small", 1, 8.0, 5, model="large", other="yet another"))
    two = trend(lines, values)
    assert sorted(points[256].gap.mean for name, points in two.items() if name.startswith("small, old")) == [
        pytest.approx(8 / 3 - 1),
        pytest.approx(2),
    ]
    page = markdown("mine", "A title", lines, [], trends={"width": values})
    assert "| width | worse | good | small |" in page
    assert "+0.10 %; -0.90 %" in page and "not run" in page and "![Loss gap against width](mine.png)" in page
    assert draw_trends(lines, {"width": values}).startswith(b"\x89PNG")


def test_all_bytes_stand_beside_those_of_gradients() -> None:
    mixed = {"param_bytes": 60e6, "pp_bytes": 40e6, "pp_bytes_dense": 40e6, "settings": "--bf16 --shared"}
    lines = [line("dense", 1, 2.0, 100, **mixed), line("good", 1, 2.0, 10, **{**mixed, "param_bytes": 30e6})]
    page = markdown("mine", "A title", lines, [])
    assert "| than bf16 | in all | gap to dense in bf16 |" in page
    assert "| good | 10.0x, weights 2.0x, messages 1.0x | 5.0x | 2.5x | +0.00 % |" in page
    half = [{**one, "settings": "--bf16 --grad-reduce-in-bf16"} for one in lines]  # what dense sends is in bf16 then
    assert "| good | 10.0x, weights 2.0x, messages 1.0x | 10.0x | 2.5x |" in markdown("mine", "A title", half, [])


def test_runs_of_an_older_meaning_are_rows_apart_and_defects_are_left_out_with_their_reason() -> None:
    lines = [
        *LINES,
        line("good", 2, 4.4, 10, other="basis_cycle 4", before="basis by QR"),
        line("worse", 2, 4.08, 20, before="basis by QR", defect="the machine ran out of memory"),
        line("small", 2, 4.4, 5, before="embedding sum counted"),
    ]
    del lines[3]  # seed 2 of good as it is today
    page = markdown("mine", "A title", lines, [("good", "dense")], ["good of m, seed 3"])
    assert "| good | 10.0x | 5.0x | +1.00 % | 1: +1.00 | 0.50 | 0123456+ |  |" in page
    assert "| +10.00 % | 2: +10.00 | 0.50 | 0123456+ | with: basis_cycle 4; before: basis by QR |" in page
    assert "| good, old | dense | m, DP 2, 10 iterations | -10.00 % |" in page
    turned = markdown("mine", "A title", lines, [("dense", "good")])
    assert "| dense | good, old | m, DP 2, 10 iterations | +9.09 % |" in turned
    assert "| worse | m, DP 2, 10 iterations | 2 | 4.0800 | 0123456+ | the machine ran out of memory |" in page
    assert "| small | m, DP 2, 10 iterations | 2 | 4.4000 | 0123456+ | it and the dense run of its seed do not" in page
    assert "Not run yet: good of m, seed 3." in page
    assert {entry.name: entry.by_seed for entry in entries(lines)}["worse"] == ((1, pytest.approx(0.02)),)
    assert draw(lines).startswith(b"\x89PNG")


def test_a_later_run_of_a_trial_takes_its_lines_place(tmp_path: Path) -> None:
    folder = tmp_path / "deep"
    for known in LINES[:3]:
        record_result(folder, known)
    record_result(folder, {**LINES[0], "model": "other"})
    record_result(folder, {**LINES[0], "val_loss": 1.5})
    kept = read_results(folder, ["m", "m", "no such model"])
    assert len(kept) == 3 and {identity(known) for known in kept} == {identity(known) for known in LINES[:3]}
    assert [known["val_loss"] for known in kept if known["name"] == "dense"] == [1.5, 4.0]
    assert all(json.loads(text) for text in (folder / "m.jsonl").read_text().splitlines())
    assert [known["model"] for known in read_results(folder, ["other"])] == ["other"]


def test_windows_lie_in_columns_and_come_back_as_they_were(tmp_path: Path) -> None:
    def window(iteration: int, **more: Any) -> dict[str, Any]:
        by_stage = [{"fc1": {"skewness": 0.1 * iteration}}, {"norm": {"skewness": 0.2}}]
        return {"iteration": iteration, "ranks": [None, iteration], "statistics": by_stage, **more}

    line = {**dict.fromkeys(IDENTITY, 1), "model": "m", "val_loss": 1.0, "commit": "c"}
    alike = {**line, "name": "alike", "windows": [window(number) for number in range(20)]}
    other = {**line, "name": "other", "windows": [window(1), window(2, fidelity=[{}])]}
    third = {**line, "name": "third", "windows": [{"entropy": {}}, {"entropy": {"fc1": 0.5}}]}
    without = {**line, "name": "without"}
    for one in (alike, other, third, without):
        record_result(tmp_path, one)
    assert read_results(tmp_path, ["m"]) == [alike, other, third, without]
    first, second, *_ = map(json.loads, (tmp_path / "m.jsonl").read_text().splitlines())
    assert first["windows"]["columns"]["statistics"][1]["norm"]["skewness"] == [0.2] * 20
    assert second["windows"] == other["windows"], "keys differ, so they stay as they are"
    older = json.dumps(alike)
    (tmp_path / "m.jsonl").write_text(f"{older}\n")
    record_result(tmp_path, without)
    assert (tmp_path / "m.jsonl").read_text().splitlines()[0] == older, "lines of other runs are not touched"


def test_no_line_is_lost_where_two_lists_record_at_once(tmp_path: Path) -> None:
    script = (
        "import json, sys; from pathlib import Path; from tools.experiments.store import record_result\n"
        "line = json.loads(sys.argv[2])\n"
        "for seed in range(40): record_result(Path(sys.argv[1]), {**line, 'seed': seed})"
    )
    lists = [
        subprocess.Popen([sys.executable, "-c", script, tmp_path, json.dumps(line(name, 0, 2.0, 10))], cwd=REPOSITORY)
        for name in ("good", "worse")
    ]
    assert [one.wait() for one in lists] == [0, 0]
    assert len(read_results(tmp_path, ["m"])) == 80


def test_a_defect_stays_in_the_line_of_the_run_that_has_it(tmp_path: Path) -> None:
    broken = line("good", 1, 2.02, 10)
    record_result(tmp_path, {**broken, "defect": "the disk was full"})
    record_result(tmp_path, broken)  # a list that goes on records what has finished again
    assert read_results(tmp_path, ["m"])[0]["defect"] == "the disk was full"
    record_result(tmp_path, {**broken, "commit": "mended"})
    assert "defect" not in read_results(tmp_path, ["m"])[0]


def test_gpus_that_are_not_there_cost_no_finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "RUNS", REPOSITORY / "runs" / tmp_path.name)
    monkeypatch.setenv("PATH", str(tmp_path))
    trial = load_list(written(tmp_path, LIST), gpu=True).trials[0]
    assert "--edgc-cpu" not in trial.arguments() and trial.folder.parent.name == "small-dp2-pp1-10-gpu"
    trial.folder.mkdir(parents=True)
    try:
        with pytest.raises(RunError, match="--gpu: nvidia-smi lists no GPU"):
            training.run(trial)
        assert trial.folder.is_dir()
    finally:
        shutil.rmtree(lists.RUNS)


def test_every_engine_has_a_place_in_the_plot() -> None:
    from edgc.engines import ENGINES

    assert {engine for _, _, engines in FAMILIES.values() for engine in engines} == {*ENGINES, "dense"}


SIGNALS = (
    "cosine_of_adam",
    *(f"{one}{unit}" for one in ("cosine", "delay", "late") for unit in ("", "_of_update", "_of_descent")),
)


def seen(name: str, period: int, ranks: list[int | None], **other: Any) -> dict[str, Any]:
    """A run of 40 iterations whose entropy falls by 0.1 nats an iteration in stage 0 and rises in stage 1."""
    ends = range(period, 41, period)
    kinds = {"skewness": 0.1, "excess_kurtosis": 3.0, "gaussian_entropy": -4.0, "histogram_entropy": -4.5}
    loss = other.pop("val_loss", 2.0 if name == "dense" else 2.01)
    signals = {"elements": 8, **dict.fromkeys(SIGNALS, 0.5)}
    return line(
        name,
        1,
        loss,
        100,
        windows=[
            {
                "iteration": end,
                "ranks": ranks,
                "dp_bytes": 1000.0 * end * (ranks[0] or 64),
                # the mean over the window that ends here
                "entropy": [-(end - period / 2) / 10, (end - period / 2) / 10],
                "residual": [0.5, None],
                "reduce_seconds": [0.1, None],
                "statistics": [{"fc1.weight": kinds}, {}],
            }
            for end in ends
        ],
        losses=[[10, 4.0], [20, 3.0 if name == "dense" else 3.3], [30, 2.0], [40, 2.0]],
        **{"fidelity": {} if name == "dense" else {"fc1.weight": signals, "fc1.bias": {"elements": 0}}, **other},
    )


def test_trajectories_of_different_windows_agree() -> None:
    alike, apart = series.correlation(seen("a", 5, [8, 8]), seen("b", 20, [8, 8]), 0)
    assert alike == pytest.approx(1) and apart == pytest.approx(0, abs=1e-9)
    opposite = seen("c", 10, [8, 8])
    for window in opposite["windows"]:
        window["entropy"].reverse()
    alike, apart = series.correlation(seen("a", 5, [8, 8]), opposite, 0)
    assert alike == pytest.approx(-1) and apart == pytest.approx(2 * 3.5)


def test_a_model_may_have_a_corpus_of_its_own(tmp_path: Path) -> None:
    text = LIST.replace("large: --num-layers 4", "large: {corpus: runs/data/go, flags: --num-layers 4}")
    found = {trial.model: " ".join(trial.settings) for trial in load_list(written(tmp_path, text)).trials}
    assert "runs/data/go.model" in found["large"] and "--num-layers 4" in found["large"]
    assert "runs/data/stdlib.model" in found["small"] and "--num-layers 2" in found["small"]
    wrong = LIST.replace("large: --num-layers 4", "large: {corpse: runs/data/go, flags: --num-layers 4}")
    with pytest.raises(ListError, match="model large: needs flags"):
        load_list(written(tmp_path, wrong))


@pytest.mark.parametrize("study", sorted(studies.STUDIES))
def test_every_study_has_a_page_and_a_plot(study: str) -> None:
    lines = [seen("dense", 10, [None, None]), seen("r4", 10, [4, 4]), seen("r16", 5, [16, 16])]
    if study == "replay":
        compressed = {**replayed("paper", 0.1), "engine": "powersgd"}
        longer = {**replayed("dense", 0.1), "seed": 2}
        longer["windows"] = longer["windows"][9::10]
        lines = [replayed("dense", 1.0), replayed("sampled", 0.1), compressed, longer]
    page, picture = study_page.page(
        "mine", "A title", study, [*lines, {**lines[0], "seed": 9, "defect": "it slept"}], ["r9"]
    )
    assert "it slept" in page and "Not run yet: r9." in page
    assert picture.startswith(b"\x89PNG") and page.startswith("# A title") and "configs/frontier/mine.yaml" in page
    blocks = page.partition("## Left out")[0].split("\n\n")
    tables = [block.splitlines() for block in blocks if block.startswith("|")]
    if study == "replay":
        assert "| sampled |" in page
        assert "| paper |" not in page, "entropies are those of dense runs"
    assert tables and all(len(rows) > 2 and len({row.count("|") for row in rows}) == 1 for rows in tables)
    assert "nan" not in page


def test_a_run_that_says_nothing_costs_no_page() -> None:
    """No window of it ends where one of the dense run does, or none was measured in a stage."""
    dense, other = seen("dense", 10, [None, None]), seen("other", 10, [8, 8])
    page, _ = study_page.page("mine", "A title", "losses", [dense, {**other, "losses": [[15, 3.0]]}])
    assert "| other |" not in page
    for window in other["windows"]:
        window["entropy"][1] = None
    page, _ = study_page.page("mine", "A title", "entropy", [dense, other])
    assert "not measured" in page


def test_training_losses_are_compared_over_the_same_iterations() -> None:
    """A warm-up that ends amid the first window leaves a mean of its own; the next one is of fewer iterations."""
    dense, other = ({"losses": losses} for losses in ([[20, 4.0], [40, 2.0]], [[5, 6.0], [20, 3.0], [40, 2.2]]))
    iterations, gaps = series.training_gap(other, dense)
    assert list(iterations) == [40] and gaps == pytest.approx([0.1])


def test_the_study_of_fidelity_asks_each_kind_of_parameter() -> None:
    """The cosine at fc1 has the order of the gaps, that at qkv the opposite one."""
    lines = [seen("dense", 10, [None])]
    for place in range(3):
        kinds_seen = {"fc1.weight": 0.9 - 0.1 * place, "qkv.weight": 0.5 + 0.1 * place}
        signals = {kind: {"elements": 8, **dict.fromkeys(SIGNALS, value)} for kind, value in kinds_seen.items()}
        lines.append(seen(f"r{place}", 10, [4], fidelity=signals, val_loss=2.001 + 0.001 * place))
    page, _ = study_page.page("mine", "A title", "fidelity", lines)
    rows = {row.split("|")[1].strip(): row for row in page.splitlines() if row.startswith("|")}
    assert rows["fc1.weight"].startswith("| fc1.weight | 3 | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 | -1.00 |")
    assert rows["qkv.weight"].startswith("| qkv.weight | 3 | -1.00 | -1.00 | -1.00 | -1.00 | -1.00 | 1.00 |")


def test_parameters_that_travel_exactly_count_and_energy_weighs_the_others() -> None:
    """Eight entries at a cosine of 0.5, so a noise of 3, of 32; their gradients have six tenths of the energy."""
    energies = {"fc1.weight": 3.0, "word.weight": 2.0 / 3.0}
    both = {
        name: {
            "elements": 8 if name == "fc1.weight" else 24,
            **dict.fromkeys(SIGNALS, 0.5),
            "energy_of_descent": energy,
        }
        for name, energy in energies.items()
    }
    lines = [
        seen("dense", 10, [None]),
        seen("all", 10, [4], fidelity=both, val_loss=2.2),
        seen("one", 10, [4], fidelity={"fc1.weight": both["fc1.weight"]}, val_loss=2.1),
    ]
    page, _ = study_page.page("mine", "A title", "fidelity", lines)
    rows = {row.split("|")[1].strip(): row.split("|")[3:] for row in page.splitlines() if row.startswith("|")}
    # the noise by energy, by elements, and the distance from a cosine of 1
    assert [float(rows["all"][place]) for place in range(3)] == [3, 3, 0.5]
    assert [float(rows["one"][place]) for place in range(3)] == [1.8, 0.75, 0.125]


def test_the_study_of_fidelity_compares_rounding_with_what_entropy_would_give() -> None:
    """Entropy half a nat below that of normal values; a cosine at which the noise is three times that of these."""
    cosine = (1 + 3 * noise_of_format("int2")) ** -0.5
    rounded = {"fc1.weight": {"elements": 8, **dict.fromkeys(SIGNALS, cosine)}}
    lines = [seen("dense", 10, [None]), seen("i2", 10, [0], fidelity=rounded, engine="int2")]
    lines[0]["engine"] = "dense"
    page, _ = study_page.page("mine", "A title", "fidelity", lines)
    assert f"| fc1.weight | 0.50 | {math.exp(-1):.3f} | 3.00 |" in page


def replayed(name: str, rate: float, noise: float = 0.0) -> dict[str, Any]:
    """A dense run of 2,000 iterations whose entropy falls by 1 nat after iteration 600."""
    ends = range(10, 2001, 10)
    fall = [-5.0 - min(max((end - 600) / 400, 0.0), 1.0) + noise * (-1) ** (end // 10) for end in ends]
    windows = [
        {"iteration": end, "ranks": [None], "dp_bytes": 1.0, "entropy": [value], "residual": [None]}
        for end, value in zip(ends, fall, strict=True)
    ]
    shapes = {"matrices": [[[512, 128], [128, 512]]], "iteration_sampling_rate": rate, "iterations": 2000}
    return {**line(name, 1, 2.0, 100, windows=windows), **shapes, "engine": "dense"}


def test_a_replay_decides_as_the_controller_does_by_what_a_window_has_shown() -> None:
    whole = replayed("dense", 1.0)
    short, long = replays(whole, 0, 50, 1.0), replays(whole, 0, 500, 1.0)
    assert short.measured == 50 and long.measured == 500 and len(short.ends) == 196 and long.ends[0] == 500
    # the warm-up lasts for a tenth, and ends at rmax; then ranks fall with entropy, by at most 8 a window
    held = dict(zip(short.ends, short.ranks, strict=True))
    assert math.isnan(held[190]) and held[200] == 32 and held[2000] == 8 and len(set(short.ranks[16:])) > 2
    assert set(long.ranks[~np.isnan(long.ranks)]) == {32}, "two windows in a row are alike at the end alone"
    same = compare(short, short)
    assert (same.correlation, same.difference, same.equal) == (pytest.approx(1), 0, 1)
    apart = compare(long, short)
    assert 0.5 < apart.correlation < 0.95 and apart.difference > 0.5
    assert apart.mean_ranks[0] == 32 and 8 < apart.mean_ranks[1] < 20 and apart.equal == 0
    assert apart.of_changes == pytest.approx(1), "the mean of ten short windows is that of a long one"


def test_a_trend_hides_that_changes_are_wrong() -> None:
    ends = np.arange(10, 410, 10)
    fine = Replay(10, 1, ends, ends / 100 + 0.1 * (-1.0) ** (ends // 20), ends)
    held = ends[1:] // 20 * 20  # windows of 20, whose entropy holds until the next one ends
    own = Replay(20, 2, ends[1:], held / 100 - 0.005 + 0.1 * (-1.0) ** (held // 40), ends[1:])
    found = compare(own, fine)
    assert found.correlation > 0.98 and abs(found.of_changes) < 0.3
    means = np.array([fine.entropy[end // 10 - 2 : end // 10].mean() for end in held])
    assert compare(Replay(20, 2, ends[1:], means, ends[1:]), fine).of_changes == pytest.approx(1)


def test_fewer_measurements_are_noisier() -> None:
    """Of two that differ, one in two is kept."""
    noisy = replayed("sampled", 0.1, noise=0.5)
    whole, half = (replays(noisy, 0, 100, kept) for kept in (1.0, 0.5))
    assert (whole.measured, half.measured) == (10, 5)
    assert whole.entropy[0] == pytest.approx(-5) and abs(half.entropy[0] + 5) == pytest.approx(0.5)
    found = list(cases(noisy))
    assert found[0] == (0.1, 50, 1.0) and (0.1, 50, 0.2) in found and (0.1, 1000, 1.0) not in found
    assert (0.0125, 500, 1.0) in found and (0.0125, 50, 0.2) not in found
    with pytest.raises(ValueError, match="windows of 10 iterations do not make 0.05 of one of 100"):
        replays(noisy, 0, 100, 0.05)


def test_the_study_of_replays_has_a_row_for_each_window_and_share() -> None:
    page, _ = study_page.page("mine", "A title", "replay", [replayed("dense", 1.0), replayed("sampled", 0.1)])
    rows = [row for row in page.splitlines() if row.startswith("| sampled")]
    assert len(rows) == len(list(cases(replayed("sampled", 0.1))))
    assert "| sampled | stage 1 | 1 | 10 % | 50 | 5 | 1.000 |" in page


def test_a_replay_is_compared_with_the_whole_run_of_its_own_seed() -> None:
    lines = []
    for seed, noise in ((1, 0.01), (2, 0.3)):
        lines += [{**replayed("dense", 1.0, noise), "seed": seed}, {**replayed("sampled", 0.1, noise), "seed": seed}]
    lines.append({**replayed("sampled", 0.1, 9.0), "seed": 3})  # without a whole run to compare with
    page, _ = study_page.page("mine", "A title", "replay", lines)
    rows = [line for line in page.splitlines() if line.startswith("| sampled | stage 1 | 2 | 10 % | 100 |")]
    assert len(rows) == 3
    assert "| sampled | stage 1 | 2 | 10 % | 50 | 5 | 1.000 ± 0.000 | 1.00 ± 0.00 | 0.000 ± 0.000 |" in page
    quiet, loud = (
        compare(replays(lines[2 * seed + 1], 0, 100, 0.5), replays(lines[2 * seed], 0, 50, 1.0)) for seed in (0, 1)
    )
    mean = (quiet.difference + loud.difference) / 2
    assert f"| {mean:.3f} ± {12.706 * abs(quiet.difference - loud.difference) / 2:.3f} |" in rows[1]
    assert "The picture shows seed 1." in page


def test_a_replay_may_begin_before_entropy_has_fallen() -> None:
    """After a long warm-up the fall is over, so that every rank is rmax; after a short one ranks follow it."""
    early_fall = replayed("dense", 1.0)
    for place, window in enumerate(early_fall["windows"]):
        window["entropy"] = [-5.0 - 0.6 * min(place / 15, 1.0)]  # over by iteration 150
    late, early = replays(early_fall, 0, 50, 1.0), replays(early_fall, 0, 50, 1.0, warmup=0.0125)
    assert set(late.ranks[~np.isnan(late.ranks)]) == {32}
    assert np.nanmin(early.ranks) < 32 and early.ends[~np.isnan(early.ranks)][0] < 200


def test_what_low_rank_leaves_out_stands_beside_that_of_normal_matrices() -> None:
    lines = []
    for seed, residual in ((1, 0.2), (2, 0.4)):
        one = {**seen("r64", 10, [64, None]), "seed": seed, "matrices": [[[128, 128]], []]}
        for window in one["windows"]:
            window["residual"] = [residual, None]
        lines.append(one)
    page, _ = study_page.page("mine", "A title", "statistics", lines)
    last = lines[0]["windows"][-1]["iteration"]
    normal = np.linalg.svd(np.random.default_rng(0).standard_normal((128, 128)), compute_uv=False)
    share = np.linalg.norm(normal[64:]) / np.linalg.norm(normal)
    (cells,) = ([cell.strip() for cell in row.split("|")] for row in page.splitlines() if f"| {last} |" in row)
    assert cells[1:5] == ["r64", "stage 1", "2", str(last)] and cells[5].startswith("0.30 ±")
    assert float(cells[6]) == pytest.approx(share, abs=0.01)
    by_volume = [{**one, "preset_settings": {"volume": 24.0}} for one in lines]
    assert "normal matrices" not in study_page.page("mine", "A title", "statistics", by_volume)[0]


def test_the_study_of_losses_says_when_the_loss_departs() -> None:
    page, _ = study_page.page("mine", "A title", "losses", [seen("dense", 10, [None]), seen("r4", 10, [4])])
    assert "| r4 | 1 | +0.00 % | +10.00 % | +0.00 % | +0.00 % | +0.50 % |" in page and "osine" not in page
    measured = seen("r4", 10, [4], cosines=[None, 0.9, 0.8, 0.7])
    page, _ = study_page.page("mine", "A title", "losses", [seen("dense", 10, [None]), measured])
    assert "| r4 | 1 | not measured | 0.90 | 0.80 | 0.70 | 0.80 |" in page


def test_rank_correlation_sees_the_order_alone() -> None:
    assert rank_correlation([1, 10, 1000], [0.1, 0.2, 0.21]) == pytest.approx(1)
    assert rank_correlation([3, 2, 1, 0], [1, 2, 3, 4]) == pytest.approx(-1)
    assert math.isnan(rank_correlation([1, 2], [1, 2]))


def test_signals_are_means_by_kind_of_parameter() -> None:
    run = Run(
        "mine",
        {"stages": [{"matrices": [["a.0.w", 2, 3], ["a.1.w", 1, 2]], "rest": [["b.bias", 4, "one-dimensional"]]}]},
        [
            {
                "iteration": 10,
                "stages": [{"fidelity": {"a.0.w": {"late": 1.0}, "a.1.w": {"late": 5.0}, "b.bias": {"late": None}}}],
            },
            {"iteration": 20, "stages": [{"fidelity": {"a.0.w": {"late": 1.0}, "a.1.w": {"late": math.inf}}}]},
            {"iteration": 30, "stages": [{}]},
        ],
        [],
        2.0,
    )
    found = results.fidelity(run)
    assert results.mean_cosines(run) == [None, None, None]
    run.windows[1]["stages"][0]["fidelity"] = {
        "a.0.w": {"cosine": 0.5},
        "a.1.w": {"cosine": 0.9},
        "b.bias": {"cosine": None},
    }
    assert results.mean_cosines(run) == [None, 0.6, None]
    kinds = {"0.w": {"elements": 6, "late": 1.0}, "1.w": {"elements": 2, "late": 5.0}, "b.bias": {"elements": 4}}
    assert found == kinds


def test_noise_counts_by_the_energy_of_a_gradient_and_the_learning_rate_of_a_window() -> None:
    """A noise of 3 and of 1, the latter where the gradient has twice the energy and the rate is a third."""
    windows = [
        {"iteration": end, "stages": [{"fidelity": {"a.0.w": {"cosine_of_descent": c, "energy_of_descent": energy}}}]}
        for end, c, energy in ((10, 0.5, 1.0), (20, 0.5**0.5, 2.0))
    ]
    start = {"stages": [{"matrices": [["a.0.w", 2, 3]], "rest": []}]}
    run = Run("mine", start, windows, [], 2.0, [(5, 2e-3), (10, 4e-3), (15, 1e-3), (30, 7.0)])
    assert results.fidelity(run)["0.w"]["noise_by_rate"] == pytest.approx((3 * 3 + 2 * 1) / 5)


def test_the_study_of_ranks_does_without_a_dense_run_that_failed() -> None:
    page, _ = study_page.page("mine", "A title", "ranks", [seen("r4", 10, [4, 4])])
    assert "| r4 | 4 | 1 | 4 kB | 0.1000 | 7.46 | – |" in page


def test_a_finished_run_is_kept_wherever_the_command_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (lists, training):
        monkeypatch.setattr(module, "REPOSITORY", tmp_path)
    monkeypatch.setattr(lists, "RUNS", tmp_path / "runs")
    trial = replace(load_list(written(tmp_path, LIST)).trials[-1], corpus="data/own")
    notes = tmp_path / "data" / "own_meta.json"
    notes.parent.mkdir()
    notes.write_text(json.dumps({"recipe": {"source": "s" * 64}, "tokenizer_hash": "t" * 64}))
    trial.folder.mkdir(parents=True)
    record = {
        "arguments": trial.arguments(),
        "preset": changes.preset(trial.arguments()),
        "changes": len(changes.CHANGES),
    }
    for corpus, kept in ((f"{'s' * 12}-{'t' * 12}", True), ("another", False)):
        (trial.folder / training.COMMAND).write_text(json.dumps({**record, "corpus": corpus}))
        for begun in (tmp_path, tmp_path / "data"):
            monkeypatch.chdir(begun)
            assert training.finished(trial) == kept


@pytest.mark.parametrize(
    ("warm_up", "rises"),
    [
        (["--lr-warmup-iters", "20"], True),
        (["--lr-warmup-iters", "20", "--lr-warmup-iters", "0"], False),
        (["--lr-warmup-fraction", "0.1"], True),
        (["--lr-warmup-init", "1e-5"], False),
        ([], False),
    ],
)
def test_a_run_without_a_warm_up_of_its_learning_rate_is_as_it_was(warm_up: list[str], rises: bool) -> None:
    text = "few bytes while the learning rate rises"
    assert (text in changes.changed("powersgd", 1, ["--edgc-preset", "fast", *warm_up], 0)) == rises


@pytest.mark.parametrize(
    ("flags", "concerned"),
    [
        ("--expert-model-parallel-size 2 --edgc-preset balanced", True),
        ("--expert-model-parallel-size 2 --edgc-preset balanced --edgc-static-rank 0.1", True),
        ("--expert-model-parallel-size 2 --edgc-preset paper --edgc-static-rank 8", False),
        ("--expert-model-parallel-size 1 --edgc-preset balanced", False),
        ("--edgc-preset balanced", False),
    ],
)
def test_runs_whose_experts_lie_apart_are_marked_where_bytes_are_shared_out(flags: str, concerned: bool) -> None:
    assert ("experts priced as layers" in changes.changed("powersgd", 1, flags.split(), 14)) == concerned


def test_a_run_whose_preset_has_changed_since_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "RUNS", REPOSITORY / "runs" / tmp_path.name)
    changed = LIST.replace("--edgc-static-rank 8", "--edgc-preset fast")
    trial = load_list(written(tmp_path, changed)).trials[-1]
    arguments = trial.arguments()
    whole = {name: value for name, value in PRESETS["fast"].items() if name != "param_wire"}
    assert changes.preset(arguments) == whole and changes.preset(arguments[:-2]) == {}
    # what it says of gathered weights matters where weights in 16 bits are gathered, and no flag says it
    gathers = [*arguments, "--bf16", "--use-distributed-optimizer"]
    assert changes.preset(gathers) == PRESETS["fast"]
    assert changes.preset([*gathers, "--edgc-param-wire", "off"]) == changes.preset(gathers[:-1]) == whole
    # what a preset says of messages between stages does not matter where a flag says it, nor without a pipeline
    assert changes.preset(["--pipeline-model-parallel-size", "2", "--edgc-preset", "paper"])
    assert changes.preset(["--edgc-preset", "paper"]) == {}
    pipeline = ["--pipeline-model-parallel-size", "2", "--edgc-preset", "paper"]
    assert changes.preset(pipeline)["pp"] == PRESETS["paper"]["pp"]
    for void in (["--edgc-engine", "dense"], ["--edgc-static-rank", "8"], ["--edgc-volume", "8"]):
        assert "pp" not in changes.preset([*pipeline, *void])
    # what only a volume uses does not matter where there is none
    assert changes.preset([*arguments, "--edgc-volume", "12"]) == whole
    for void in (["--edgc-static-rank", "8"], ["--edgc-engine", "int4"], ["--edgc-rmin", "4"]):
        assert set(whole) - set(changes.preset([*arguments, *void])) == {"learning_rate_power"}
    gradients = {name: value for name, value in whole.items() if not name.startswith("pp")}
    assert changes.preset([*arguments, "--edgc-pp", "off"]) == gradients
    assert changes.preset(["--edgc-preset", "fast"]) == gradients
    assert not training.finished(trial)
    trial.folder.mkdir(parents=True)
    try:
        today = {"preset": whole}
        others = {"preset": PRESETS["safe"]}, {"arguments": ["--other"]}, {"changes": 0}, {"commit": "abc1234+"}
        for kept in (today, *others):
            record = {"arguments": arguments, "preset": whole, "changes": len(changes.CHANGES), **kept}
            (trial.folder / training.COMMAND).write_text(json.dumps(record))
            assert training.finished(trial) == (kept is today)
    finally:
        shutil.rmtree(lists.RUNS)


def test_ranks_suggests_bounds() -> None:
    lines = [
        seen("dense", 10, [None, None]),
        seen("r4", 10, [4, 4]),
        seen("r16", 10, [16, 16]),
        seen("r99", 10, [99, 99]),
    ]
    lines[1]["val_loss"] = 3.0
    page, _ = study_page.page("mine", "A title", "ranks", lines)
    assert "| r4 | 4 | 1 | 4 kB | 0.1000 | 20.09 | +50.00 % |" in page
    assert "r_max = 16 " in page and "r_min = 16 " in page


def test_a_rank_has_its_mean_over_seeds() -> None:
    lines = [
        {**seen(name, 10, [rank, rank]), "seed": seed} for name, rank in (("dense", None), ("r4", 4)) for seed in (1, 2)
    ]
    lines[2]["val_loss"], lines[3]["val_loss"] = 1.02 * lines[0]["val_loss"], 0.99 * lines[1]["val_loss"]
    page, _ = study_page.page("mine", "A title", "ranks", lines)
    perplexity = (math.exp(lines[2]["val_loss"]) + math.exp(lines[3]["val_loss"])) / 2
    assert f"| r4 | 4 | 2 | 4 kB | 0.1000 | {perplexity:.2f} | +0.50 % ± {12.706 * 1.5:.2f} |" in page
    assert "r_min = 4 " in page, "the mean counts"


def test_windows_of_a_run_enter_its_line_without_the_plan() -> None:
    stage = {"entropy": -1.23456789, "residual": None, "reduce_seconds": 0.1, "statistics": {"k": {"skewness": 1 / 3}}}
    event = {"iteration": 5, "ranks": [4], "dp_bytes": 1.0, "plan": {"version": 1}, "stages": [{**stage, "stage": 0}]}
    assert results._window(event) == {
        "iteration": 5,
        "ranks": [4],
        "dp_bytes": 1.0,
        "stages": ["stage 1"],
        "entropy": [-1.23457],
        "residual": [None],
        "reduce_seconds": [0.1],
        "statistics": [{"k": {"skewness": 0.333333}}],
    }


def test_training_losses_enter_a_line_as_means_of_windows() -> None:
    windows = [{"iteration": 2}, {"iteration": 4}, {"iteration": 6}]
    loss = [(1, 3.0), (2, 2.0), (3, 1.0), (7, 9.0)]  # nothing logged from 4 to 6; 7 is of no window
    assert results.mean_losses(Run("", {}, windows, loss, 1.0)) == [[2, 2.5], [4, 1.0]]


def test_a_report_is_made_of_the_results_kept_and_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lists, "RUNS", REPOSITORY / "runs" / "no-such-folder")
    monkeypatch.setattr(frontier, "DOCS", tmp_path)
    path = written(tmp_path, LIST.replace("--edgc-static-rank 8", "--edgc-preset fast"))
    first, second, third = load_list(path).trials

    def kept(trial: Trial, **other: Any) -> dict[str, Any]:
        same = {key: getattr(trial, key) for key in IDENTITY}
        fields = {"settings": " ".join(trial.settings), "flags": " ".join(trial.flags), "preset_settings": {}}
        return {**line("dense", 1, 3.0, 100.0), **same, **fields, **other}

    lines = [
        kept(first),
        kept(second, flags="--edgc-engine int4"),
        kept(first, seed=7),  # of no seed in the list
        kept(third, preset_settings=PRESETS["safe"], engine="powersgd", changes=1),  # what the preset meant then
        kept(first, name="of another list"),
    ]
    kept_in = tmp_path / RESULTS
    for one in lines:
        record_result(kept_in, one)
    assert frontier.main(["--config", str(path), "--report"]) == 0
    assert "not run yet" not in capsys.readouterr().out
    page = (tmp_path / "mine.md").read_text()
    assert "| ● | dense | 1.0x | 0.5x | +0.00 % ± 0.00 | 1: +0.00, 7: +0.00 |" in page
    assert "| 2: +0.00 | 0.50 | 0123456+ | with: --edgc-engine int4 |" in page
    assert "| ours | large, DP 2, PP 2, 10 iterations | 3 |" in page and "of another list" not in page
    (outdated,) = (one for one in page_lines([third], lines) if one["name"] == "ours")
    assert "warmup_fraction 0.025" in outdated["other"] and "volume 8.0" in outdated["other"]
    changes_since = "embedding sum counted, spikes scaled down, spike limit 10, errors of spikes limited"
    of_volumes = "rank by descent, rows measured first, last steps within the budget"
    of_volumes += ", rows of embeddings alone, bytes kept for later"
    assert outdated["before"] == f"only factors scaled, {changes_since}, {of_volumes}"
    uniform = kept(third, flags="--edgc-allocation uniform", engine="powersgd", changes=len(changes.CHANGES) - 1)
    assert page_lines([third], [uniform])[0]["before"] == "", "its ranks are not shared out"
    meaning = changes.preset(third.arguments())
    today = kept(third, preset_settings=meaning, engine="powersgd", changes=len(changes.CHANGES))
    assert old(page_lines([third], [today])[0]) == ""
    shutil.rmtree(kept_in)
    record_result(kept_in, lines[0])
    assert frontier.main(["--config", str(path), "--report"]) == 0
    missing = (
        "not run yet: dense of small-dp2-pp1-10, seed 2\nfrontier: not run yet: ours of large-dp2-pp2-10, seed 3\n"
    )
    assert missing in capsys.readouterr().out
    assert not (REPOSITORY / "runs" / "no-such-folder").exists()


def test_flags_of_older_lines_mean_what_todays_say() -> None:
    shared = "--lr 1e-3 --edgc-preset paper"
    for then, now in (
        (
            "--edgc-engine topk --edgc-density 0.01 --edgc-dense-wire int8",
            "--edgc-engine topk:0.01 --edgc-dense-wire int8",
        ),
        (
            "--edgc-engine int4 --edgc-dense-wire int8 --edgc-hadamard",
            "--edgc-engine int4:rotated --edgc-dense-wire int8",
        ),
        ("--edgc-engine int4 --edgc-stochastic", "--edgc-engine int4:stochastic"),
        ("--edgc-pp backward --edgc-pp-rank 16", "--edgc-pp backward:powersgd:16"),
        ("--edgc-pp both --edgc-pp-rank 16 --edgc-pp-wire int8", "--edgc-pp both:powersgd:16:int8"),
        ("--edgc-pp both --edgc-pp-engine int8", "--edgc-pp both:int8"),
        (
            "--edgc-basis-wire bf16 --edgc-weak-basis-wire bf16 --edgc-wire bf16",
            "--edgc-basis-wire bf16 --edgc-wire bf16",
        ),
    ):
        assert changes.respelled(f"{shared} {then}") == f"{shared} {now}"
        assert changes.respelled(f"{shared} {now}") == f"{shared} {now}"


def test_presets_of_older_lines_mean_what_todays_say() -> None:
    rank = {
        "rank_model": "constant",
        "rank_share": 0.25,
        "basis_wire": "int6",
        "weak_basis_wire": "int4",
        "wire": "int4",
    }
    now = {"static_rank": 0.25, "basis_wire": "int6+int4", "wire": "int4"}
    assert changes.respelled_settings(rank) == now
    assert changes.respelled_settings({**rank, "pp": "auto", "pp_engine": "int4"}) == {**now, "pp": "auto:int4"}
    optimus = {"pp": "backward", "pp_rank": 16, "pp_epilogue_only": True, "static_rank": 128}
    assert changes.respelled_settings(optimus) == {"pp": "epilogue:powersgd:16", "static_rank": 128}
    assert changes.respelled_settings(PRESETS["fast"]) == PRESETS["fast"]


def test_a_row_of_a_study_has_the_mean_of_its_seeds_and_the_interval() -> None:
    iterations = np.array([10.0, 20.0, 30.0])
    seeds = [(iterations, np.array(values)) for values in ([1.0, 0.0, 2.0], [3.0, 1.0, 2.0])]
    both, first = (studies._trend("run", "stage 1", own) for own in (seeds, seeds[:1]))
    assert both.startswith(
        "| run | stage 1 | 2 | 2.000 ± 12.706 | 0.500 ± 6.353 (20, 20) | 2.000 ± 0.000 | +1.50 ± 6.35 |"
    )
    assert first.startswith("| run | stage 1 | 1 | 1.000 | 0.000 (20) | 2.000 | +2.00 |")
