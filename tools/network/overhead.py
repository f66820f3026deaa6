"""What EDGC costs where it can save nothing: steps of Megatron alone beside those of runs with EDGC, without a limit.

Step times are those that Megatron prints, so that they mean the same with EDGC and without it. One more run of Megatron
alone shows what it costs if tensors do not stay in the heap (``tools.shared.processes``).
"""

import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from tools.network.links import Links
from tools.network.runs import failed, training
from tools.network.setups import CONTENDERS, MEGATRON, MODES, SEQUENCES, WINDOW, arguments, meaning, older_preset
from tools.shared.markdown import header, row
from tools.shared.processes import IN_HEAP, under_way

MODE = "plain"
ALONE = "Megatron alone"
MAPPED = "Megatron alone, tensors mapped"
COMPARED = (ALONE, MAPPED, "dense", "balanced")
WINDOWS = 6  # the first one is not measured: it holds the probe and the warm-up
_STEP = re.compile(r"elapsed time per iteration \(ms\): ([0-9.]+)")


@dataclass(frozen=True)
class Run:
    """``steps``: seconds of each measured step, with what EDGC does at the ends of windows. ``page_faults``: of one
    process in the mean step, those that read no file. ``preset_settings``: as of a ``Point``.
    """

    contender: str
    repetition: int
    steps: tuple[float, ...]
    page_faults: float
    preset_settings: Mapping[str, Any] | None = None


def measure(contender: str, repetition: int, data: Sequence[str]) -> Run:
    """Train between two namespaces whose links have no limit. ``contender``: of ``COMPARED``. Raises ``RunFailed``."""
    mode = MODES[MODE]
    with tempfile.TemporaryDirectory() as name, Links([None] * mode.links) as links:
        folder = Path(name)
        more = ["--log-interval", "1", "--exit-interval", str(WINDOWS * WINDOW)]
        if contender in (ALONE, MAPPED):
            batch = ["--global-batch-size", str(SEQUENCES * mode.replicas)]
            given = [*MEGATRON, "--edgc-cpu", *data, *batch, *more]
        else:
            given = arguments(mode, contender, folder, data, more)
        seen: dict[int, int] = {}  # page faults after so many steps
        with training(links, mode, given, folder, IN_HEAP if contender == MAPPED else ()) as processes:
            while under_way(processes):
                done = len(step_seconds(_printed(folder)))
                if done >= WINDOW and processes[0].poll() is None:
                    seen.setdefault(done, _page_faults(processes[0].pid))
                time.sleep(0.2)
        steps = step_seconds(_printed(folder))
        if any(process.poll() for process in processes) or len(steps) != WINDOWS * WINDOW:
            raise failed(contender, folder)
    (first, before), *_, (last, after) = seen.items()
    settings = meaning(MODE, contender) if contender in CONTENDERS else None
    return Run(contender, repetition, steps[WINDOW:], (after - before) / (last - first), settings)


def _printed(folder: Path) -> str:
    return "".join(log.read_text() for log in folder.glob("*.log"))


def _page_faults(process: int) -> int:
    """So far, without those that read a file: field 10 of /proc/PID/stat."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[7])


def step_seconds(log: str) -> tuple[float, ...]:
    """Of each step that Megatron has printed, one process alone prints."""
    return tuple(float(found) / 1e3 for found in _STEP.findall(log))


def page(runs: Sequence[Run], machine: str, commit: str) -> str:
    """A row for each repetition and one for all."""
    repetitions = sorted({run.repetition for run in runs})
    with_edgc = [run for run in runs if run.contender in CONTENDERS]
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
        *(f"- `{name}`: `{CONTENDERS[name]}`" for name in COMPARED if name in CONTENDERS),
        f"- *{MAPPED}*: glibc may map each large tensor anew and unmap it. In all other runs tensors stay in the heap",
        "  (`tools/shared/processes.py`).",
        *(f"- `{name}` is an older preset here. What differs: {what}." for name, what in older.items() if what),
        "- *Median*, *mean*: the median step and the mean step, against Megatron alone in the same repetition.",
        "- *Page faults*: of a process in the mean step.",
        "",
        *header(["", "repetition", "a step, s", "median", "mean", "page faults"]),
    ]
    for name in COMPARED:
        table = []
        for repetition in repetitions:
            own = {run.contender: run for run in runs if run.repetition == repetition}
            if set(own) == set(COMPARED):
                changes = [of(own[name].steps) / of(own[ALONE].steps) - 1 for of in (median, fmean)]
                table.append([median(own[name].steps), *changes, own[name].page_faults])
                lines.append(row([name, repetition + 1, *_cells(table[-1], "")]))
        lines.append(row([name, "median", *_cells([median(column) for column in zip(*table, strict=True)], "**")]))
    return "\n".join([*lines, ""])


def _cells(figures: Sequence[float], mark: str) -> list[str]:
    seconds, of_median, of_mean, page_faults = figures
    return [
        f"{mark}{text}{mark}"
        for text in (f"{seconds:.2f}", f"{of_median:+.1%}", f"{of_mean:+.1%}", f"{page_faults:,.0f}")
    ]
