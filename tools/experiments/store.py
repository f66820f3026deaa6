"""The files of results beside the pages: one for each model, with a line for each trial.

A new line has its windows as columns: each key once, with its values in all windows. That is half of the bytes.
"""

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
    return [_read(text) for model in sorted(set(models)) for text in _texts(folder, model)]


def record_result(folder: Path, line: dict[str, Any]) -> None:
    """Add a line, or replace that of the same trial; the file of its model is written whole or not at all.

    A defect that was written into a line by hand stays in that of the same run. Of processes that record at the same
    time each waits for the one before.
    """
    with locked(folder / f".{results_file(line['model'])}.lock"):
        _record(folder, line)


def _record(folder: Path, line: dict[str, Any]) -> None:
    model = line["model"]
    texts = {identity(_read(text)): text for text in _texts(folder, model)}  # other lines stay as they are
    known = _read(texts[identity(line)]) if identity(line) in texts else {}
    if "defect" in known and all(known[key] == line[key] for key in ("commit", "val_loss")):
        line = {**line, "defect": known["defect"]}
    if known == line:
        return
    texts[identity(line)] = _written(line)
    write(folder / results_file(model), "".join(f"{texts[key]}\n" for key in sorted(texts)).encode())


def _texts(folder: Path, model: str) -> list[str]:
    path = folder / results_file(model)
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def _written(line: Mapping[str, Any]) -> str:
    rows = line.get("windows") or [None]
    columns = _columns(rows)
    try:
        same = isinstance(columns, dict) and _rows(columns, len(rows)) == rows
    except (TypeError, KeyError):
        same = False
    if not same:  # windows that differ in their keys
        return json.dumps(line)
    return json.dumps({**line, "windows": {"count": len(rows), "columns": columns}})


def _read(text: str) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(text)
    if isinstance(windows := line.get("windows"), dict):
        line["windows"] = _rows(windows["columns"], windows["count"])
    return line


def _columns(rows: list[Any]) -> Any:
    """Mappings with the same keys as one of columns, and so lists of such mappings; anything else as the list it is."""
    first = rows[0]
    if isinstance(first, dict) and all(isinstance(row, dict) and row.keys() == first.keys() for row in rows):
        return {key: _columns([row[key] for row in rows]) for key in first}
    if isinstance(first, list) and all(isinstance(row, list) and len(row) == len(first) for row in rows):
        places = [_columns([row[place] for row in rows]) for place in range(len(first))]
        if places and all(isinstance(place, dict) for place in places):
            return places
    return rows


def _rows(columns: Any, count: int) -> list[Any]:
    """The inverse of ``_columns``."""
    if isinstance(columns, dict):
        parts = {key: _rows(column, count) for key, column in columns.items()}
        return [{key: part[row] for key, part in parts.items()} for row in range(count)]
    if columns and all(isinstance(column, dict) for column in columns):
        places = [_rows(column, count) for column in columns]
        return [[place[row] for place in places] for row in range(count)]
    return list(columns)


def links(lines: Iterable[Mapping[str, Any]]) -> str:
    """Links from a page to the files that have these lines."""
    names = sorted({results_file(line["model"]) for line in lines})
    return ", ".join(f"[{name}]({RESULTS}/{name})" for name in names)
