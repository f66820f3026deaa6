"""The files of results beside the pages: one for each model, with a line for each trial."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tools.shared.files import locked, write

RESULTS = "results"  # their folder
IDENTITY = ("model", "data_parallel", "pipeline_parallel", "iterations", "name", "seed")


def identity(line: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes a line of the results that of one trial: a later run of it takes its place."""
    return (*(line[key] for key in IDENTITY), bool(line.get("gpu")))


def results_file(model: str) -> str:
    """The name of the file that has the results of a model."""
    return f"{model}.jsonl"


def read_results(folder: Path, models: Iterable[str]) -> list[dict[str, Any]]:
    """The lines of these models."""
    paths = [path for model in sorted(set(models)) if (path := folder / results_file(model)).is_file()]
    return [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


def record_result(folder: Path, line: dict[str, Any]) -> None:
    """Add a line, or replace that of the same trial; the file of its model is written whole or not at all.

    A defect that was written into a line by hand stays in that of the same run. Of processes that record at the same
    time each waits for the one before.
    """
    with locked(folder / f".{results_file(line['model'])}.lock"):
        _record(folder, line)


def _record(folder: Path, line: dict[str, Any]) -> None:
    model = line["model"]
    lines = {identity(known): known for known in read_results(folder, [model])}
    known = lines.get(identity(line), {})
    if "defect" in known and all(known[key] == line[key] for key in ("commit", "val_loss")):
        line = {**line, "defect": known["defect"]}
    if known == line:
        return
    lines[identity(line)] = line
    write(folder / results_file(model), "".join(json.dumps(lines[key]) + "\n" for key in sorted(lines)).encode())


def links(lines: Iterable[Mapping[str, Any]]) -> str:
    """Links from a page to the files that have these lines."""
    names = sorted({results_file(line["model"]) for line in lines})
    return ", ".join(f"[{name}]({RESULTS}/{name})" for name in names)
