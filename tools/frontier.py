"""Measure engines against each other: loss and bytes of real multi-process runs on the same tokens.

    python tools/frontier.py --config configs/frontier/default.yaml

Every run has its own folder under ``runs/frontier/`` and is kept once it has finished with the same command, so an
interrupted list goes on where it stopped. Each finished run adds a line to ``docs/frontier/results.jsonl``; at the end
``docs/frontier/NAME.md`` and ``docs/frontier/NAME.png`` hold the list's table and plot, which ``--report`` makes of
these lines without training. The format of a list is described in docs/frontier/README.md.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from edgc.compress.engines import has_rank  # noqa: E402
from edgc.config import PRESETS, EDGCConfig  # noqa: E402
from tools import frontier_studies  # noqa: E402
from tools.frontier_report import EMBEDDING_SUM, draw, markdown  # noqa: E402
from tools.report import ReportError, Run, load_run, processor, write  # noqa: E402

RUNS = REPOSITORY / "runs" / "frontier"
DOCS = REPOSITORY / "docs" / "frontier"
COMMAND = "command.json"  # in a run's folder once it has finished
ENTRY_KEYS = {"name", "model", "data_parallel", "pipeline_parallel", "iterations", "seeds", "flags"}
IDENTITY = ("model", "data_parallel", "pipeline_parallel", "iterations", "name", "seed")
LIST_KEYS = {"title", "study", "corpus", "flags", "models", "defaults", "entries", "comparisons"}


# What has changed since the first lines in what a run of the same flags computes or counts, oldest first, and whether
# it concerns an engine on so many pipeline stages. docs/frontier/README.md says more of each. A line's ``changes`` is
# how many of them its code had.
CHANGES: tuple[tuple[str, Callable[[str, int], bool]], ...] = (
    ("basis by QR", lambda engine, _: has_rank(engine)),
    ("only factors scaled", lambda engine, _: has_rank(engine)),
    (EMBEDDING_SUM, lambda _, stages: stages > 1),
    ("spikes scaled down", lambda engine, _: engine != "dense"),
    ("spike limit 10", lambda engine, _: engine != "dense"),
)


class ListError(Exception):
    """A list of runs that breaks a rule; the message names the file, the entry and the rule."""


@dataclass(frozen=True)
class Trial:
    """One training run: an entry of a list under one seed."""

    name: str
    model: str
    data_parallel: int
    pipeline_parallel: int
    iterations: int
    seed: int
    flags: tuple[str, ...]
    settings: tuple[str, ...]  # what all entries share: model, corpus, optimiser

    @property
    def setting(self) -> str:
        """What runs must have in common to be compared."""
        return f"{self.model}-dp{self.data_parallel}-pp{self.pipeline_parallel}-{self.iterations}"

    @property
    def folder(self) -> Path:
        return RUNS / self.setting / f"{self.name}-seed{self.seed}"

    @property
    def engine(self) -> str:
        given = [value for flag, value in pairwise((*self.settings, *self.flags)) if flag == "--edgc-engine"]
        return given[-1] if given else EDGCConfig.engine

    def arguments(self) -> list[str]:
        """Everything after ``pretrain_gpt.py``, with paths relative to the repository."""
        folder = self.folder.relative_to(REPOSITORY)
        own = f"--train-iters {self.iterations} --seed {self.seed}"
        if self.pipeline_parallel > 1:
            own += f" --pipeline-model-parallel-size {self.pipeline_parallel}"
        logs = f"--tensorboard-dir {folder}/tensorboard --edgc --edgc-log-dir {folder} --edgc-seed {self.seed}"
        return [*self.settings, *own.split(), *logs.split(), *self.flags]


@dataclass(frozen=True)
class RunList:
    """A list of runs, the pairs of entries to set side by side, and the study that it is, if any."""

    name: str
    title: str
    trials: tuple[Trial, ...]
    comparisons: tuple[tuple[str, str], ...]
    study: str | None = None


def load_list(path: Path) -> RunList:
    """Read a list of runs. Raises ``ListError`` for one that is incomplete or misspelt."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ListError(f"{path}: {error}") from error
    if not isinstance(content, dict) or set(content) - LIST_KEYS or not {"models", "entries"} <= set(content):
        raise ListError(f"{path}: needs models and entries, may have {', '.join(sorted(LIST_KEYS))}, and nothing else")
    corpus = content.get("corpus", "runs/data/stdlib")
    data = (
        f"--tokenizer-type SentencePieceTokenizer --tokenizer-model {corpus}.model "
        f"--train-data-path {corpus}_train_text_document --valid-data-path {corpus}_valid_text_document "
        f"--data-cache-path {Path(corpus).parent}/cache"
    )
    trials = []
    for entry in content["entries"]:
        entry = {**content.get("defaults", {}), **entry}
        where = f"{path}, entry {entry.get('name', '?')}"
        if set(entry) != ENTRY_KEYS:
            wrong = sorted(set(entry) ^ ENTRY_KEYS)
            raise ListError(f"{where}: missing or unknown: {', '.join(wrong)}")
        for key in ("name", "model"):  # they name folders and stand in command lines
            if not re.fullmatch(r"[\w.%+-]+", str(entry[key])):
                raise ListError(f"{where}: {key} = {entry[key]!r}: only letters, digits and ._%+- are allowed")
        if entry["model"] not in content["models"]:
            raise ListError(f"{where}: there is no model {entry['model']}")
        shared = " ".join((content.get("flags", ""), content["models"][entry["model"]], data))
        for seed in entry["seeds"]:
            trials.append(
                Trial(
                    name=entry["name"],
                    model=entry["model"],
                    data_parallel=entry["data_parallel"],
                    pipeline_parallel=entry["pipeline_parallel"],
                    iterations=entry["iterations"],
                    seed=seed,
                    flags=tuple(shlex.split(entry["flags"])),
                    settings=tuple(shlex.split(shared, comments=True)),
                )
            )
    folders = [trial.folder for trial in trials]
    if twice := sorted({folder.name for folder in folders if folders.count(folder) > 1}):
        raise ListError(f"{path}: listed twice: {', '.join(twice)}")
    comparisons = tuple((first, second) for first, second in content.get("comparisons", []))
    names = {trial.name for trial in trials}
    if unknown := sorted({name for pair in comparisons for name in pair} - names):
        raise ListError(f"{path}: compared but not listed: {', '.join(unknown)}")
    study = content.get("study")
    if study is not None and study not in frontier_studies.STUDIES:
        raise ListError(f"{path}: study = {study}: must be one of {', '.join(frontier_studies.STUDIES)}")
    return RunList(path.stem, content.get("title", path.stem), tuple(trials), comparisons, study)


def run(trial: Trial, device: Sequence[str]) -> Path:
    """Train, unless this command has finished before; returns the folder. Raises ``ReportError`` if training fails."""
    folder, arguments = trial.folder, [*device, *trial.arguments()]
    if finished(trial, device):
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    record = {
        "arguments": arguments,
        "preset": preset(arguments),
        "changes": len(CHANGES),
        "machine": machine(bool(device)),
        **commit(),
        "started": round(time.time()),
    }
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    processes = trial.data_parallel * trial.pipeline_parallel
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with (folder / "log.txt").open("wb") as log:
        status = subprocess.run(
            [sys.executable, *launcher, str(processes), "pretrain_gpt.py", *arguments],
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        ).returncode
    if status != 0:
        raise ReportError(f"{folder}: training ended with status {status}, see log.txt there")
    load_run(folder)  # a run without results has not finished
    (folder / COMMAND).write_text(json.dumps(record) + "\n")
    return folder


def finished(trial: Trial, device: Sequence[str]) -> bool:
    """Whether this very command has run to its end before, its preset and the code meaning the same."""
    if not (trial.folder / COMMAND).is_file():
        return False
    record, arguments = json.loads((trial.folder / COMMAND).read_text()), [*device, *trial.arguments()]
    return bool(
        record["arguments"] == arguments
        and record["preset"] == preset(arguments)
        and not changed(trial.engine, trial.pipeline_parallel, record.get("changes", 0))
    )


def preset(arguments: Sequence[str]) -> dict[str, Any]:
    """What the preset in these arguments, the last one if there are several, stands for today.

    Without what it says of messages between stages, and of a tied embedding on two of them, if there are none or a flag
    says it.
    """
    names = [value for flag, value in pairwise(arguments) if flag == "--edgc-preset"]
    meaning = PRESETS[names[-1]] if names else {}
    pipeline = "--pipeline-model-parallel-size" in arguments
    embedding = {"--edgc-fuse-embedding-sync", "--edgc-no-fuse-embedding-sync"}
    void = {name for name in meaning if name.startswith("pp") and (not pipeline or "--edgc-pp" in arguments)}
    if not pipeline or embedding & set(arguments):
        void.add("fuse_embedding_sync")
    return {name: value for name, value in meaning.items() if name not in void}


def changed(engine: str, stages: int, known: int) -> str:
    """What has changed for such a run since code that had the first ``known`` of the ``CHANGES``; empty: nothing."""
    return ", ".join(text for text, applies in CHANGES[known:] if applies(engine, stages))


def machine(on_cpu: bool) -> str:
    """What a run started now runs on."""
    if on_cpu:
        return f"{processor()}, {os.cpu_count()} cores"
    listed = subprocess.run(
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=True
    ).stdout.split("\n")
    return f"{len([name for name in listed if name])} x {listed[0]}"


def commit() -> dict[str, Any]:
    """The checkout's commit, and whether it had other changes than those this tool makes."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True
        ).stdout.strip()

    changes = [line for line in git("status", "--porcelain").splitlines() if "docs/frontier/" not in line]
    return {"commit": git("rev-parse", "HEAD"), "modified": bool(changes)}


def result(trial: Trial, measured: Run, record: Mapping[str, Any], windows: bool) -> dict[str, Any]:
    """One line of ``results.jsonl``, with what each window saw if asked; docs/frontier/README.md has the fields."""
    config = measured.start["config"]
    line = {
        "model": trial.model,
        "name": trial.name,
        "engine": config["engine"],
        "preset": config.get("preset"),
        "preset_settings": record["preset"],
        "flags": shlex.join(trial.flags),
        "seed": trial.seed,
        "iterations": trial.iterations,
        "data_parallel": trial.data_parallel,
        "pipeline_parallel": trial.pipeline_parallel,
        "val_loss": measured.val_loss,
        "dp_bytes": measured.dp_bytes,
        "dp_bytes_dense": float(measured.windows[-1]["dp_bytes_dense"]),
        **({"param_bytes": measured.param_bytes} if measured.param_bytes else {}),
        **({"pp_bytes": measured.pp_bytes[0], "pp_bytes_dense": measured.pp_bytes[1]} if measured.pp_bytes[1] else {}),
        **({} if measured.state_per_parameter is None else {"state_per_parameter": measured.state_per_parameter}),
        "step_seconds": measured.step_seconds,
        "ranks": [window["ranks"] for window in measured.windows],
        "settings": shlex.join(trial.settings),
        "commit": record["commit"] + ("+" if record["modified"] else ""),
        "changes": record.get("changes", 0),
        "versions": measured.start["versions"],
        "machine": record["machine"],
    }
    if windows:
        line["windows"] = [_window(event) for event in measured.windows]
    return line


def _window(event: Mapping[str, Any]) -> dict[str, Any]:
    """A window of the event log without the plan; numbers to six digits, to keep the file small."""
    stages = [_rounded(stage) for stage in event["stages"]]
    return {
        "iteration": event["iteration"],
        "ranks": event["ranks"],
        "dp_bytes": event["dp_bytes"],
        "stages": [_name(stage["stage"]) for stage in stages],
        **{key: [stage[key] for stage in stages] for key in ("entropy", "residual", "reduce_seconds", "statistics")},
    }


def _name(stage: str | int) -> str:
    """A stage's name; older logs only have its number."""
    return stage if isinstance(stage, str) else f"stage {stage + 1}"


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(part) for key, part in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


def identity(line: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes a line of the results that of one trial: a later run of it takes its place."""
    return tuple(line[key] for key in IDENTITY)


def read_results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def record_result(path: Path, line: dict[str, Any]) -> None:
    """Add a line, or replace that of the same trial; the file is written whole or not at all."""
    lines = {identity(known): known for known in read_results(path)}
    if lines.get(identity(line)) == line:
        return
    lines[identity(line)] = line
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, "".join(json.dumps(lines[key]) + "\n" for key in sorted(lines)).encode())


def page_lines(trials: Sequence[Trial], kept: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of all runs of these trials' entries, also of other seeds.

    A line that today's code would not give again has ``other``, what its flags and preset said then, or ``before``,
    the changes that its code lacked.
    """
    entry = IDENTITY[:-1]
    known = {tuple(getattr(trial, key) for key in entry): trial for trial in trials}
    return [
        {
            **line,
            "other": other_settings(line, known[place]),
            "before": changed(line["engine"], line["pipeline_parallel"], line.get("changes", 0)),
        }
        for line in kept
        if (place := tuple(line[key] for key in entry)) in known
    ]


def other_settings(line: Mapping[str, Any], trial: Trial) -> str:
    """What the flags and the preset of a line said that this entry does not say today; empty if nothing."""
    then = _by_flag(shlex.split(f"{line['settings']} {line['flags']}"))
    now = _by_flag([*trial.settings, *trial.flags])
    found = [" ".join(then[flag]) for flag in then if then[flag] != now.get(flag)]
    found += [f"no {flag}" for flag in now if flag not in then]
    meaning, today = line["preset_settings"], preset(trial.arguments())
    for name in sorted(meaning.keys() | today.keys()):
        before, after = (one.get(name, getattr(EDGCConfig, name)) for one in (meaning, today))
        if before != after and name != "fuse_embedding_sync":  # that is one of the changes
            found.append(f"{name} {before}")
    return ", ".join(found)


def _by_flag(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Each flag with its values, the last one if it is given several times."""
    found: dict[str, list[str]] = {}
    for word in arguments:
        if word.startswith("--"):
            flag = word
            found[flag] = []
        found[flag].append(word)
    return found


def not_run(trials: Sequence[Trial], lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """The trials that have no line at all, by entry."""
    done = {identity(line) for line in lines}
    seeds: dict[str, list[str]] = {}
    for trial in trials:
        if tuple(getattr(trial, key) for key in IDENTITY) not in done:
            seeds.setdefault(f"{trial.name} of {trial.setting}", []).append(str(trial.seed))
    return [f"{entry}, seed {', '.join(missing)}" for entry, missing in seeds.items()]


def main(argv: list[str] | None = None) -> int:
    """Run the list in ``argv``; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="the list of runs, a YAML file")
    parser.add_argument("--gpu", action="store_true", help="train on GPUs (default: on the CPU)")
    parser.add_argument("--report", action="store_true", help="train nothing: make the page of the results kept")
    arguments = parser.parse_args(argv)
    try:
        runs = load_list(arguments.config)
    except ListError as error:
        print(f"frontier: error: {error}", file=sys.stderr)
        return 2
    device = [] if arguments.gpu else ["--edgc-cpu"]
    failed = False
    for number, trial in enumerate(runs.trials, start=1):
        if arguments.report:
            break
        start = time.perf_counter()
        label = f"frontier: {number}/{len(runs.trials)} {trial.setting} {trial.name} seed {trial.seed}"
        try:
            folder = run(trial, device)
            measured = load_run(folder)
        except ReportError as error:
            failed = True
            print(f"{label}: failed: {error}", file=sys.stderr, flush=True)
            continue
        line = result(trial, measured, json.loads((folder / COMMAND).read_text()), bool(runs.study))
        record_result(DOCS / "results.jsonl", line)
        fewer = line["dp_bytes_dense"] / line["dp_bytes"] if line["dp_bytes"] else 1
        print(
            f"{label}: loss {measured.val_loss:.4f}, {fewer:.2f}x fewer bytes, {time.perf_counter() - start:.0f} s",
            flush=True,
        )
    lines = page_lines(runs.trials, read_results(DOCS / "results.jsonl"))
    missing = not_run(runs.trials, lines)
    for text in missing:
        print(f"frontier: not run yet: {text}", flush=True)
    if lines:
        if runs.study:
            page, picture = frontier_studies.page(runs.name, runs.title, runs.study, lines)
        else:
            page, picture = markdown(runs.name, runs.title, lines, runs.comparisons, missing), draw(lines)
        write(DOCS / f"{runs.name}.md", page.encode())
        write(DOCS / f"{runs.name}.png", picture)
        print(f"written: {', '.join(str(DOCS / f'{runs.name}.{kind}') for kind in ('md', 'png'))}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
