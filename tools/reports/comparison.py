"""The figures of a dense and an EDGC run side by side."""

import os
from typing import Any

from tools.shared.machine import processor
from tools.shared.runs import Run, times_fewer

BYTES = (
    "Bytes are those that a process sends in the whole run, mean over all of them, and how many times fewer than the "
    "dense run's; of gradients, also than if the dense ones were in bf16. Gradients include a tied embedding's sum "
    "between pipeline stages."
)
CAVEAT = "All ranks ran on one machine over loopback: the step times say nothing about a cluster."


def summarise(dense: Run, edgc: Run) -> dict[str, Any]:
    """The figures of both runs, with machine and versions."""

    def figures(run: Run) -> dict[str, Any]:
        others = {"param_bytes": run.param_bytes, "pp_bytes": run.pp_bytes[0]}
        sent = {"dp_bytes": run.dp_bytes, **{name: count for name, count in others.items() if count}}
        return {"val_loss": run.val_loss, **sent, "total_bytes": run.total_bytes, "step_seconds": run.step_seconds}

    return {
        "dense": figures(dense),
        "edgc": {
            **figures(edgc),
            "ranks": [window["ranks"] for window in edgc.windows],
            "entropy": [[stage["entropy"] for stage in window["stages"]] for window in edgc.windows],
            "stages": edgc.stages,
        },
        # one process alone sends nothing
        "dp_bytes_ratio": edgc.dp_bytes / dense.dp_bytes if dense.dp_bytes else 1.0,
        "total_bytes_ratio": edgc.total_bytes / dense.total_bytes if dense.total_bytes else 1.0,
        "gradient_bytes": dense.start.get("gradient_bytes", 4),  # of a value; older logs do not tell
        "val_loss_gap": edgc.val_loss / dense.val_loss - 1,
        "iterations": edgc.start["iterations"],
        "settings": edgc.start["config"],
        "versions": edgc.start["versions"],
        "machine": {"processor": processor(), "cores": os.cpu_count(), "world_size": edgc.start["world_size"]},
    }


def table(summary: dict[str, Any]) -> list[list[str]]:
    """The comparison as rows of text, a header first."""
    dense, bf16 = summary["dense"], 2 / summary["gradient_bytes"]

    def fewer(run: dict[str, Any], key: str, share: float = 1.0) -> str:
        return f"{share * times_fewer(dense[key], run[key]):.2f}x"

    others = [key for key in ("param_bytes", "pp_bytes") if key in summary["edgc"]]
    names = {"param_bytes": "weights", "pp_bytes": "messages"}
    header = ["", "validation loss", "gap", "gradients", "fewer", "than bf16", *(names[key] for key in others)]
    rows = [[*header, "total", "fewer", "s/step"]]
    for name in ("dense", "edgc"):
        run = summary[name]
        rows.append(
            [
                name,
                f"{run['val_loss']:.4f}",
                "" if name == "dense" else f"{summary['val_loss_gap']:+.2%}",
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


def rank_path(ranks: list[list[int | None]], stage: int) -> str:
    """One stage's ranks over the run: ``dense 4 windows, 48 -> 40 2 windows``."""
    steps: list[tuple[str, int]] = []
    for window in ranks:
        label = "dense" if window[stage] is None else f"rank {window[stage]}"
        steps = [*steps[:-1], (label, steps[-1][1] + 1)] if steps and steps[-1][0] == label else [*steps, (label, 1)]
    return ", ".join(f"{label} for {count} window{'s' * (count > 1)}" for label, count in steps)
