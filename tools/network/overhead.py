"""What EDGC costs where it can save nothing: steps of Megatron alone beside those of runs with EDGC, without a limit.

Step times are those that Megatron prints, so that they mean the same with EDGC and without it.
"""

import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from tools.network.links import Links
from tools.network.runs import failed, training
from tools.network.setups import CONTENDERS, MEGATRON, MODES, SEQUENCES, WINDOW, arguments, meaning, older_preset
from tools.shared.markdown import header, row
from tools.shared.processes import under_way

MODE = "plain"
ALONE = "Megatron alone"
COMPARED = (ALONE, "dense", "balanced")
WINDOWS = 6  # the first one is not measured: it holds the probe and the warm-up
_KINDS: Mapping[str, Callable[[Sequence[float]], float]] = {"median": median, "mean": fmean}
_STEP = re.compile(r"elapsed time per iteration \(ms\): ([0-9.]+)")


@dataclass(frozen=True)
class Run:
    """``steps``: seconds of each measured step, with what EDGC does at the ends of windows. ``preset_settings``: as of
    a ``Point``.
    """

    contender: str
    repetition: int
    steps: tuple[float, ...]
    preset_settings: Mapping[str, Any] | None = None


def measure(contender: str, repetition: int, data: Sequence[str]) -> Run:
    """Train between two namespaces whose links have no limit. ``contender``: of ``COMPARED``. Raises ``RunFailed``."""
    mode = MODES[MODE]
    with tempfile.TemporaryDirectory() as name, Links([None] * mode.links) as links:
        folder = Path(name)
        more = ["--log-interval", "1", "--exit-interval", str(WINDOWS * WINDOW)]
        if contender == ALONE:
            batch = ["--global-batch-size", str(SEQUENCES * mode.replicas)]
            given = [*MEGATRON, "--edgc-cpu", *data, *batch, *more]
        else:
            given = arguments(mode, contender, folder, data, more)
        with training(links, mode, given, folder) as processes:
            while under_way(processes):
                time.sleep(0.2)
        steps = step_seconds("".join(log.read_text() for log in folder.glob("*.log")))
        if any(process.poll() for process in processes) or len(steps) != WINDOWS * WINDOW:
            raise failed(contender, folder)
    return Run(contender, repetition, steps[WINDOW:], None if contender == ALONE else meaning(MODE, contender))


def step_seconds(log: str) -> tuple[float, ...]:
    """Of each step that Megatron has printed, one process alone prints."""
    return tuple(float(found) / 1e3 for found in _STEP.findall(log))


def page(runs: Sequence[Run], machine: str, commit: str) -> str:
    """A row for each repetition and one for all."""
    repetitions = sorted({run.repetition for run in runs})
    with_edgc = [run for run in runs if run.contender != ALONE]
    older = {run.contender: older_preset(MODE, run.contender, run.preset_settings) for run in with_edgc}
    lines = [
        "# What EDGC costs where it can save nothing",
        "",
        f"Made by `bash scripts/bench_network.sh --overhead --repetitions {len(repetitions)}`",
        f"(commit {commit}; {machine}). The time of every step is in [overhead.json](overhead.json).",
        "",
        "The model and the processes are those of [time on limited links](README.md), plain, without a limit. There a",
        "dense reduction is so short that no compression pays. A step's time is what Megatron prints after each one.",
        f"It holds all that EDGC does in the step and after it. {WINDOWS - 1} windows of {WINDOW} steps are measured,",
        "after a first one that is not. Runs of a repetition follow each other, every second time in reverse.",
        "",
        *(f"- `{name}`: `{CONTENDERS[name]}`" for name in COMPARED[1:]),
        *(f"- `{name}` is an older preset here. What differs: {what}." for name, what in older.items() if what),
        "- *Median*, *mean*: the median step and the mean step, against Megatron alone in the same repetition.",
        "",
        *header(["repetition", f"{ALONE}, s", *(f"{name}, {kind}" for name in COMPARED[1:] for kind in _KINDS)]),
    ]
    table = []
    for repetition in repetitions:
        steps = {run.contender: run.steps for run in runs if run.repetition == repetition}
        if set(steps) == set(COMPARED):
            alone = steps[ALONE]
            changes = [of(steps[name]) / of(alone) - 1 for name in COMPARED[1:] for of in _KINDS.values()]
            table.append([median(alone), *changes])
            lines.append(row([repetition + 1, *_cells(table[-1], "")]))
    lines.append(row(["median", *_cells([median(column) for column in zip(*table, strict=True)], "**")]))
    return "\n".join([*lines, ""])


def _cells(figures: Sequence[float], mark: str) -> list[str]:
    seconds, *changes = figures
    return [f"{seconds:.2f}", *(f"{mark}{change:+.1%}{mark}" for change in changes)]
