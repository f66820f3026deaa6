"""Compare a dense and an EDGC run: a table, ``summary.json``, ``report.png`` and a self-contained ``report.html``.

    python tools/report.py runs/quickstart        reads runs/quickstart/{dense,edgc}/{events.jsonl,tensorboard/}

Bytes, ranks, entropies and step times come from the event log, losses from Megatron's own TensorBoard scalars.
"""

import argparse
import base64
import html
import io
import json
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

from edgc.observe.events import EventLog, read_events  # noqa: E402

# Okabe and Ito's colours, which colour-blind readers can tell apart
RUN_COLOURS = {"dense": "#555555", "edgc": "#D55E00"}
STAGE_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442")
BYTES = (
    "Bytes are those that a process sends in the whole run, mean over all of them, and how many times fewer than the "
    "dense run's; of gradients, also than if the dense ones were in bf16. Gradients include a tied embedding's sum "
    "between pipeline stages."
)
CAVEAT = "All ranks ran on one machine over loopback: the step times say nothing about a cluster."


class ReportError(Exception):
    """A run that cannot be reported; the message is one line."""


@dataclass(frozen=True)
class Run:
    """A finished run. ``loss`` holds (iteration, training loss) pairs; ``windows`` the window events in order."""

    name: str
    start: dict[str, Any]
    windows: list[dict[str, Any]]
    loss: list[tuple[int, float]]
    val_loss: float

    @property
    def dp_bytes(self) -> float:
        """Bytes sent for gradients in the whole run, the mean over all processes."""
        return float(self.windows[-1]["dp_bytes"])

    @property
    def param_bytes(self) -> float:
        """The same for the weights that the distributed optimizer gathers; 0 without it."""
        return float(self.windows[-1].get("param_bytes", 0))

    @property
    def pp_bytes(self) -> tuple[float, float]:
        """The same for messages between pipeline stages, and without compression; 0 without a pipeline."""
        last = self.windows[-1]
        return float(last.get("pp_bytes", 0)), float(last.get("pp_bytes_dense", 0))

    @property
    def total_bytes(self) -> float:
        """Gradients, gathered weights and messages together."""
        return self.dp_bytes + self.param_bytes + self.pp_bytes[0]

    @property
    def state_per_parameter(self) -> float | None:
        """Bytes a parameter that EDGC keeps from step to step, of the stage with most; None in older logs."""
        stages = self.windows[-1]["stages"]
        if any("state_bytes" not in stage for stage in stages):
            return None
        sizes = [
            sum(rows * cols for _, rows, cols in stage["matrices"]) + sum(elements for _, elements, _ in stage["rest"])
            for stage in self.start["stages"]
        ]
        return max(float(stage["state_bytes"]) / size for stage, size in zip(stages, sizes, strict=True))

    @property
    def step_seconds(self) -> float:
        """Median over windows of the median step time; the first window, which warms up, is left out."""
        return median(window["step_seconds"] for window in (self.windows[1:] or self.windows))

    @property
    def stages(self) -> list[str]:
        """The names of the stages of the plan."""
        return [stage["name"] for stage in self.start["stages"]]


def load_run(folder: Path) -> Run:
    """Read a finished run. Raises ``ReportError`` where the log is missing, unfinished or without validation loss."""
    if not (folder / EventLog.FILE).is_file():
        raise ReportError(f"{folder}: there is no {EventLog.FILE}: was the run started with --edgc-log-dir?")
    events = read_events(folder)
    start = next((event for event in events if event["event"] == "start"), None)
    windows = [event for event in events if event["event"] == "window"]
    if start is None or not windows or not windows[-1]["last"]:
        raise ReportError(f"{folder}: the run has not finished")
    loss, validation = read_losses(folder / "tensorboard")
    if not validation:
        raise ReportError(f"{folder}: no validation loss in its TensorBoard files")
    final = validation[-1][0]
    # After the last step Megatron writes the validation loss and then, under the same name, the test loss.
    return Run(folder.name, start, windows, loss, next(value for step, value in validation if step == final))


def read_losses(folder: Path) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """(iteration, loss) pairs of training and of validation; empty where there are none."""
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={SCALARS: 0})
    accumulator.Reload()

    def scalars(tag: str) -> list[tuple[int, float]]:
        known = tag in accumulator.Tags()[SCALARS]
        return [(event.step, event.value) for event in accumulator.Scalars(tag)] if known else []

    return scalars("lm loss"), scalars("lm loss validation")


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


def processor() -> str:
    """The processor's name where Linux tells it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def table(summary: dict[str, Any]) -> list[list[str]]:
    """The comparison as rows of text, a header first."""
    dense, bf16 = summary["dense"], 2 / summary["gradient_bytes"]

    def fewer(run: dict[str, Any], key: str, share: float = 1.0) -> str:
        # one process alone sends nothing
        return f"{share * dense[key] / run[key] if run[key] else share:.2f}x"

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


def draw(dense: Run, edgc: Run) -> bytes:
    """The report's picture as PNG: entropy, ranks, loss and cumulative bytes over iterations."""
    figure, ((entropy, ranks), (loss, sent)) = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    draw_entropy(entropy, edgc)
    draw_ranks(ranks, edgc)
    for run in (dense, edgc):
        colour = RUN_COLOURS[run.name]
        # the runs nearly coincide: the dense one is drawn wide and light so that both can be seen
        width, opacity = (4, 0.4) if run.name == "dense" else (1, 1)
        loss.plot(
            *zip(*run.loss, strict=True), color=colour, linewidth=width, alpha=opacity, label=f"{run.name}, training"
        )
        marker = "o" if run.name == "dense" else "D"
        end = edgc.start["iterations"]
        label = f"{run.name}, validation {run.val_loss:.4f}"
        loss.plot(end, run.val_loss, marker, color=colour, markersize=7, label=label, markeredgecolor="white")
        iterations = [0] + [window["iteration"] for window in run.windows]
        megabytes = [0.0] + [window["dp_bytes"] / 1e6 for window in run.windows]
        sent.plot(iterations, megabytes, color=colour, linewidth=2, label=f"{run.name}, {megabytes[-1]:,.0f} MB")
    loss.set(title="Loss", ylabel="cross-entropy (nats per token)")
    sent.set(title="Gradient traffic", ylabel="MB sent by a process since the start")
    for axes in (entropy, ranks, loss, sent):
        axes.set_xlabel("iteration")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=100, metadata={"Software": None})
    plt.close(figure)
    return picture.getvalue()


def draw_entropy(axes: Axes, run: Run) -> None:
    """Entropy of every stage at the end of each window."""
    for stage, name in enumerate(run.stages):
        values = [(w["iteration"], w["stages"][stage]["entropy"]) for w in run.windows]
        measured = [pair for pair in values if pair[1] is not None]
        if measured:
            colour = STAGE_COLOURS[stage % len(STAGE_COLOURS)]
            axes.plot(*zip(*measured, strict=True), "o-", color=colour, markersize=4, label=name)
    axes.set(title="Gradient entropy, mean of each window", ylabel="entropy (nats)")


def draw_ranks(axes: Axes, run: Run) -> None:
    """Rank of every stage as steps; windows in which every stage was dense are shaded."""
    edges = [0] + [window["iteration"] for window in run.windows]
    for stage, name in enumerate(run.stages):
        values = [float("nan") if w["ranks"][stage] is None else w["ranks"][stage] for w in run.windows]
        colour = STAGE_COLOURS[stage % len(STAGE_COLOURS)]
        axes.stairs(values, edges, baseline=None, color=colour, linewidth=2, label=name)
    dense = [end for end, window in zip(edges[1:], run.windows, strict=True) if set(window["ranks"]) == {None}]
    if dense:
        axes.axvspan(0, dense[-1], color="#999999", alpha=0.2, linewidth=0, label="dense warm-up")
    axes.set(title="Compression rank", ylabel="rank", xlim=(0, edges[-1]))
    axes.set_ylim(bottom=0)


def as_html(summary: dict[str, Any], picture: bytes) -> str:
    """The whole report in one file that loads nothing."""
    header, *rows = table(summary)

    def line(cells: list[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    paths = "".join(
        f"<li>{html.escape(name)}: {html.escape(rank_path(summary['edgc']['ranks'], stage))}</li>"
        for stage, name in enumerate(summary["edgc"]["stages"])
    )
    details = {key: summary[key] for key in ("iterations", "machine", "versions", "settings")}
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>EDGC report</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222 }}
table {{ border-collapse: collapse }} th, td {{ padding: .3em 1em; text-align: right; border-bottom: 1px solid #ddd }}
th:first-child, td:first-child {{ text-align: left; font-weight: 600 }} img {{ max-width: 100%; margin: 1em 0 }}
</style>
<h1>EDGC against dense, same tokens</h1>
<table>{line(header, "th")}{"".join(line(row, "td") for row in rows)}</table>
<p>{BYTES} {CAVEAT}</p>
<img alt="Entropy, ranks, loss and bytes over iterations"
 src="data:image/png;base64,{base64.b64encode(picture).decode()}">
<h2>Ranks</h2><ul>{paths}</ul>
<h2>Run</h2><pre>{html.escape(json.dumps(details, indent=2))}</pre>
</html>
"""


def write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_bytes(content)
    draft.replace(path)


def main(argv: list[str] | None = None) -> int:
    """Report on the folder in ``argv``; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder that holds the runs dense/ and edgc/")
    folder = parser.parse_args(argv).folder
    try:
        dense, edgc = load_run(folder / "dense"), load_run(folder / "edgc")
    except ReportError as error:
        print(f"report: error: {error}", file=sys.stderr)
        return 2
    summary = summarise(dense, edgc)
    picture = draw(dense, edgc)
    write(folder / "report.png", picture)
    write(folder / "report.html", as_html(summary, picture).encode())
    write(folder / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())
    print(as_text(table(summary)))
    for stage, name in enumerate(edgc.stages):
        print(f"{name}: {rank_path(summary['edgc']['ranks'], stage)}")
    print(BYTES)
    print(CAVEAT)
    print(f"written: {folder / 'report.html'}, {folder / 'report.png'}, {folder / 'summary.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
