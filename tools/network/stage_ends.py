"""When the stages of a pipeline have their gradients, with their ranks aligned and without."""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from edgc.observe.events import read_events
from tools.network.links import Links
from tools.network.runs import failed, started
from tools.network.setups import CONTENDERS, MODES, WINDOW, arguments
from tools.shared.intervals import Interval
from tools.shared.markdown import header, row
from tools.shared.processes import under_way

COMPARED = ("dense", "paper-not-aligned", "paper-begun")
RATE = 20.0  # Mbit/s
WINDOWS, MEASURED = 5, 2  # the last ones are measured: there ranks have come to rest
MODE = MODES["pipeline"]


@dataclass(frozen=True)
class Run:
    """``times``: of each process, for each measured step: seconds at which its backward pass ended, and at which its
    gradients were summed. The first stage's processes come first.
    """

    contender: str
    repetition: int
    ranks: tuple[int | None, ...]
    times: tuple[tuple[tuple[float, float], ...], ...]

    def begins(self, stage: int) -> list[float]:
        """Of each step: the mean over the stage's processes."""
        return [fmean(begin for begin, _ in step) for step in self._steps(stage)]

    def ends(self, stage: int) -> list[float]:
        """Of each step: the last of the stage's processes."""
        return [max(end for _, end in step) for step in self._steps(stage)]

    def step_seconds(self) -> list[float]:
        """From the sums of each step, of all stages, to those of the next."""
        ends = [max(own) for own in zip(*(self.ends(stage) for stage in range(MODE.pipeline)), strict=True)]
        return [after - before for before, after in pairwise(ends)]

    def later(self) -> list[float]:
        """Of each step: by how much the last stage's sums come after those of the first."""
        return [last - first for first, last in zip(self.ends(0), self.ends(MODE.pipeline - 1), strict=True)]

    def _steps(self, stage: int) -> list[tuple[tuple[float, float], ...]]:
        own = self.times[stage * MODE.replicas : (stage + 1) * MODE.replicas]
        return list(zip(*own, strict=True))


def measure(contender: str, repetition: int, data: Sequence[str]) -> Run:
    """Train a pipeline whose processes have links of ``RATE``. Raises ``RunFailed``."""
    with tempfile.TemporaryDirectory() as name, Links([RATE] * MODE.links) as links:
        folder = Path(name)
        files = [folder / f"times.{process}" for process in range(MODE.processes)]
        given = arguments(MODE, contender, folder, data, ["--exit-interval", str(WINDOWS * WINDOW)])
        commands = [
            (place, ["-m", "tools.network.recorded_run", str(file), *given]) for place, file in enumerate(files)
        ]
        with started(links, commands, folder) as processes:
            while under_way(processes):
                time.sleep(0.2)
        times = [_read(file) for file in files]
        if any(process.poll() for process in processes) or {len(one) for one in times} != {WINDOWS * WINDOW}:
            raise failed(contender, folder)
        last = [event for event in read_events(folder) if event["event"] == "window"][-1]
    first = min(begin for own in times for begin, _ in own)
    measured = [
        tuple((round(begin - first, 4), round(end - first, 4)) for begin, end in own[-MEASURED * WINDOW :])
        for own in times
    ]
    return Run(contender, repetition, tuple(last["ranks"]), tuple(measured))


def _read(file: Path) -> list[tuple[float, float]]:
    lines = file.read_text().splitlines() if file.is_file() else []
    return [(float(begin), float(end)) for begin, end in map(str.split, lines)]


def page(runs: Sequence[Run], machine: str, commit: str) -> str:
    """A row for each run."""
    repetitions = len({run.repetition for run in runs})
    lines = [
        "# When the stages of a pipeline end",
        "",
        f"Made by `bash scripts/bench_network.sh --stage-ends --repetitions {repetitions}`",
        f"(commit {commit}; {machine}). The times of every step are in [stage_ends.json](stage_ends.json).",
        "",
        "The model is that of [time on limited links](README.md), in two stages of two processes each. Each process",
        f"has a link of {RATE:g} Mbit/s. All processes are on one machine and read the same clock: where the backward",
        "pass of a step has ended, and where its gradients are summed. Of",
        f"{WINDOWS} windows of {WINDOW} steps the last {MEASURED} are measured.",
        "",
        *(f"- `{name}`: `{CONTENDERS[name]}`" for name in COMPARED),
        "- *Stage 2 begins earlier by*: its backward pass ends so long before that of stage 1.",
        "- *Reductions*: from there until the slowest process of the stage has its sums.",
        "- *Stage 2 ends later by*: negative where it waits for stage 1.",
        "- *A step*: from the last sum of a step to that of the next.",
        "- All times are medians of steps. In brackets are the least and the most of all steps.",
        "",
        *header(
            ["repetition", "contender", "ranks of the last window", "stage 2 begins earlier by, s"]
            + ["reductions of stage 1, s", "of stage 2, s", "stage 2 ends later by, s", "a step, s"]
        ),
    ]
    for run in sorted(runs, key=lambda one: (one.repetition, COMPARED.index(one.contender))):
        lead = [first - second for first, second in zip(run.begins(0), run.begins(1), strict=True)]
        later = run.later()
        reductions = [
            median(end - begin for begin, end in zip(run.begins(stage), run.ends(stage), strict=True))
            for stage in range(MODE.pipeline)
        ]
        lines.append(
            row(
                [
                    run.repetition + 1,
                    run.contender,
                    ", ".join("dense" if rank is None else str(rank) for rank in run.ranks),
                    f"{median(lead):.2f}",
                    *(f"{seconds:.2f}" for seconds in reductions),
                    f"**{median(later):+.2f}** ({min(later):+.2f} to {max(later):+.2f})",
                    f"{median(run.step_seconds()):.2f}",
                ]
            )
        )
    if repetitions > 1:
        lines += [
            "",
            "Over the repetitions: means of these medians ± half their 95 % confidence interval.",
            "",
            *header(["contender", "stage 2 ends later by, s", "a step, s", "a step, against the contender above"]),
            *_means(runs),
        ]
    return "\n".join([*lines, ""])


def _means(runs: Sequence[Run]) -> list[str]:
    """A row for each contender."""
    rows: list[str] = []
    before: dict[int, float] = {}
    for contender in COMPARED:
        own = [run for run in runs if run.contender == contender]
        later = Interval.of([median(run.later()) for run in own])
        steps = {run.repetition: median(run.step_seconds()) for run in own}
        changes = [steps[one] / before[one] - 1 for one in steps if one in before]
        cells = [later.number(2, "+"), Interval.of(list(steps.values())).number(2)]
        rows.append(row([contender, *cells, Interval.of(changes).percent(1) if changes else ""]))
        before = steps
    return rows
