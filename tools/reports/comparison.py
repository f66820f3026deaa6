"""The figures of a dense run and of EDGC's runs side by side."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgc.observe.events import EventLog
from tools._root import REPOSITORY
from tools.shared.checkout import commit
from tools.shared.machine import processor
from tools.shared.markdown import rank_in_words
from tools.shared.runs import Run, RunError, load_run, times_fewer

NEEDED = ("dense", "edgc")  # runs without which there is no report
BYTES = (
    "Bytes are those that a process sends in the whole run, mean over all of them, and how many times fewer than the "
    "dense run's; of gradients, also than if the dense ones were in bf16. Gradients include a tied embedding's sum "
    "between pipeline stages."
)
CAVEAT = "Processes of one machine talk over loopback: then step times say nothing about a cluster."


def load_runs(folder: Path) -> tuple[dict[str, Run], list[str]]:
    """The runs of a folder in the order of the table: dense, paper, others, edgc; and why some are left out.

    Raises ``RunError`` where dense or edgc is not there or has not finished.
    """
    found = {log.parent.name for log in folder.glob(f"*/{EventLog.FILE}")} - {*NEEDED}
    runs, left_out = {"dense": load_run(folder / "dense")}, []
    for name in sorted(found, key=lambda name: (name != "paper", name)):
        try:
            runs[name] = load_run(folder / name)
        except RunError as error:
            left_out.append(str(error))
    return {**runs, "edgc": load_run(folder / "edgc")}, left_out


def summarise(runs: Mapping[str, Run]) -> dict[str, Any]:
    """The figures of all runs, with machine and versions; ratios and gap are those of ``edgc``.

    Raises ``RunError`` for runs that differ in length, processes, precision or seed.
    """
    dense, edgc = runs["dense"], runs["edgc"]
    for what in ("iterations", "world_size", "gradient_bytes", "seed"):
        found = {name: {**run.start["config"], **run.start}.get(what) for name, run in runs.items()}
        if len(set(found.values())) > 1:
            raise RunError(
                f"these runs cannot be compared: {what} = {', '.join(f'{v} ({n})' for n, v in found.items())}"
            )
    return {
        **{name: _figures(run) for name, run in runs.items()},
        "plans": {name: different_plans(run) for name, run in runs.items()},
        # one process alone sends nothing
        "dp_bytes_ratio": edgc.dp_bytes / dense.dp_bytes if dense.dp_bytes else 1.0,
        "total_bytes_ratio": edgc.total_bytes / dense.total_bytes if dense.total_bytes else 1.0,
        "gradient_bytes": dense.start.get("gradient_bytes", 4),  # of a value; older logs do not tell
        "val_loss_gap": edgc.val_loss / dense.val_loss - 1,
        "iterations": edgc.start["iterations"],
        "settings": edgc.start["config"],
        "versions": edgc.start["versions"],
        "commit": commit(REPOSITORY),  # of the code that makes the report
        "machine": {"processor": processor(), "cores": os.cpu_count(), "world_size": edgc.start["world_size"]},
    }


def _figures(run: Run) -> dict[str, Any]:
    others = {"param_bytes": run.param_bytes, "pp_bytes": run.pp_bytes[0]}
    return {
        "val_loss": run.val_loss,
        "dp_bytes": run.dp_bytes,
        **{name: count for name, count in others.items() if count},
        "total_bytes": run.total_bytes,
        "step_seconds": run.step_seconds,
        "ranks": [window["ranks"] for window in run.windows],
        "entropy": [[stage["entropy"] for stage in window["stages"]] for window in run.windows],
        "stages": run.stages,
    }


def different_plans(run: Run) -> int:
    """How many plans the run has used that differ in a rank or a format."""
    # a window's plan is for the windows after it
    plans: list[dict[str, Any]] = [{}, *(window.get("plan") or {} for window in run.windows)]
    used = set()
    for plan, window in zip(plans, run.windows, strict=False):
        ranks = window["ranks"]
        own, formats = (plan.get(part) or [None] * len(ranks) for part in ("matrix_ranks", "formats"))
        used.add(json.dumps([[own[stage] or None, formats[stage] or None, rank] for stage, rank in enumerate(ranks)]))
    return len(used)


def table(summary: dict[str, Any]) -> list[list[str]]:
    """The comparison as rows of text, a header first."""
    dense, bf16 = summary["dense"], 2 / summary["gradient_bytes"]
    runs = {name: summary[name] for name in summary["plans"]}

    def fewer(run: dict[str, Any], key: str, share: float = 1.0) -> str:
        return f"{share * times_fewer(dense[key], run[key]):.2f}x"

    names = {"param_bytes": "weights", "pp_bytes": "messages"}
    others = [key for key in names if any(key in run for run in runs.values())]
    header = ["", "validation loss", "gap", "gradients", "fewer", "than bf16", *(names[key] for key in others)]
    rows = [[*header, "total", "fewer", "s/step"]]
    for name, run in runs.items():
        rows.append(
            [
                name,
                f"{run['val_loss']:.4f}",
                "" if name == "dense" else f"{run['val_loss'] / dense['val_loss'] - 1:+.2%}",
                _megabytes(run["dp_bytes"]),
                fewer(run, "dp_bytes"),
                fewer(run, "dp_bytes", bf16),
                *(_megabytes(run.get(key, 0)) for key in others),
                _megabytes(run["total_bytes"]),
                fewer(run, "total_bytes"),
                f"{run['step_seconds']:.3f}",
            ]
        )
    return rows


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.1f} MB"


def as_text(rows: list[list[str]]) -> str:
    """Rows in aligned columns, the first to the left and the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) if not column else cell.rjust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
    )


def rank_paths(summary: dict[str, Any]) -> list[str]:
    """Of every stage of EDGC's runs, the largest rank over the run: ``paper, stage 1: rank 48 for 2 windows``."""
    return [
        f"{name}, {stage}: {rank_path(summary[name]['ranks'], place)}"
        for name in summary["plans"]
        if name != "dense"
        for place, stage in enumerate(summary[name]["stages"])
    ]


def rank_path(ranks: list[list[int | None]], stage: int) -> str:
    """One stage's ranks over the run: ``dense for 4 windows, rank 48 for 2 windows``."""
    steps: list[tuple[str, int]] = []
    for window in ranks:
        words = rank_in_words(window[stage])
        label = f"rank {words}" if words.isdecimal() else words
        steps = [*steps[:-1], (label, steps[-1][1] + 1)] if steps and steps[-1][0] == label else [*steps, (label, 1)]
    return ", ".join(f"{label} for {count} window{'s' * (count > 1)}" for label, count in steps)


def plans_line(summary: dict[str, Any]) -> str:
    """How many different plans each run had, as text."""
    counts = [f"{name} {count}" for name, count in summary["plans"].items() if name != "dense"]
    return f"different plans over the run: {', '.join(counts)}"
