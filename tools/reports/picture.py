"""The report's picture."""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import takewhile
from statistics import median

from matplotlib.axes import Axes

from tools.shared.pictures import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY_BLUE, VERMILION, YELLOW, panels, tidy, to_png
from tools.shared.runs import Run

RUN_COLOURS = {"dense": GREY, "paper": BLUE, "edgc": VERMILION}
OTHER_COLOURS = (GREEN, ORANGE, PURPLE, SKY_BLUE, YELLOW)
STAGE_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY_BLUE, YELLOW)


def draw(runs: Mapping[str, Run]) -> bytes:
    """The report's picture as PNG, over iterations: entropy and ranks of ``paper``, without it of ``edgc``; ranks and
    delay of ``edgc``; loss and cumulative bytes of all runs.
    """
    edgc, paper = runs["edgc"], runs.get("paper")
    drawings: list[Callable[[Axes], None]] = [partial(draw_entropy, run=paper or edgc)]
    drawings += [partial(draw_ranks, run=run) for run in (paper, edgc) if run]
    if any(delays(edgc, stage) for stage in range(len(edgc.stages))):
        drawings.append(partial(draw_delay, run=edgc))
    drawings += [partial(draw_loss, runs=runs), partial(draw_bytes, runs=runs)]
    columns = math.ceil(len(drawings) / 2)
    figure, axes = panels(2, columns, width=5.5, height=3.5)
    for one, drawing in zip(axes, drawings, strict=False):
        drawing(one)
        one.set_xlabel("iteration")
        tidy(one)
        one.legend(frameon=False)
    for spare in axes[len(drawings) :]:
        spare.set_axis_off()
    return to_png(figure, dpi=100 if columns == 2 else 80)


def draw_loss(axes: Axes, runs: Mapping[str, Run]) -> None:
    """Training losses, and the validation losses at the end."""
    colours = _colours(runs)
    for name, run in runs.items():
        # the runs nearly coincide: the dense one is drawn wide and light so that all can be seen
        width, opacity = (4, 0.4) if name == "dense" else (1, 1)
        colour, label = colours[name], f"{name}, validation {run.val_loss:.4f}"
        axes.plot(*zip(*run.loss, strict=True), color=colour, linewidth=width, alpha=opacity)
        marker = "o" if name == "dense" else "D"
        end = run.start["iterations"]
        axes.plot(end, run.val_loss, marker, color=colour, markersize=7, label=label, markeredgecolor="white")
    axes.set(title="Training loss, and validation loss at the end", ylabel="cross-entropy (nats per token)")


def draw_bytes(axes: Axes, runs: Mapping[str, Run]) -> None:
    """Bytes of gradients since the start, on a logarithmic axis."""
    colours = _colours(runs)
    for name, run in runs.items():
        iterations = [window["iteration"] for window in run.windows]
        megabytes = [window["dp_bytes"] / 1e6 for window in run.windows]
        label = f"{name}, {megabytes[-1]:,.0f} MB"
        axes.plot(iterations, megabytes, color=colours[name], linewidth=2, label=label)
    axes.set(title="Gradient traffic", ylabel="MB sent by a process since the start", yscale="log")


def _colours(names: Iterable[str]) -> dict[str, str]:
    others = (name for name in names if name not in RUN_COLOURS)
    return {**RUN_COLOURS, **{name: OTHER_COLOURS[place % len(OTHER_COLOURS)] for place, name in enumerate(others)}}


def draw_entropy(axes: Axes, run: Run) -> None:
    """Entropy of every stage at the end of each window."""
    for stage, name in enumerate(run.stages):
        values = [(w["iteration"], w["stages"][stage]["entropy"]) for w in run.windows]
        measured = [pair for pair in values if pair[1] is not None]
        if measured:
            colour = STAGE_COLOURS[stage % len(STAGE_COLOURS)]
            axes.plot(*zip(*measured, strict=True), "o-", color=colour, markersize=4, label=name)
    axes.set(title=f"{run.name}: gradient entropy, mean of each window", ylabel="entropy (nats)")


def draw_ranks(axes: Axes, run: Run) -> None:
    """Ranks of every stage as steps: the mean of its matrices, and a band from the smallest to the largest.

    The first windows, in which no stage was compressed yet, are shaded.
    """
    edges = [0] + [window["iteration"] for window in run.windows]
    for stage, name in enumerate(run.stages):
        ranks = [used_ranks(run, window, stage) for window in range(len(run.windows))]
        low, mean, high = zip(*((min(own), sum(own) / len(own), max(own)) for own in ranks), strict=True)
        colour = STAGE_COLOURS[stage % len(STAGE_COLOURS)]
        axes.stairs(high, edges, baseline=low, fill=True, color=colour, alpha=0.15)
        axes.stairs(mean, edges, baseline=None, color=colour, linewidth=2, label=name)
    begun = takewhile(lambda pair: set(pair[1]["ranks"]) == {None}, zip(edges[1:], run.windows, strict=True))
    if dense := [end for end, _ in begun]:
        axes.axvspan(0, dense[-1], color="#999999", alpha=0.2, linewidth=0, label="warm-up")
    axes.set(title=f"{run.name}: ranks of matrices (mean, range)", ylabel="rank", xlim=(0, edges[-1]))
    axes.set_ylim(bottom=0)


def draw_delay(axes: Axes, run: Run) -> None:
    """Of every stage, the median delay of its matrices in each window."""
    for stage, name in enumerate(run.stages):
        if found := delays(run, stage):
            colour = STAGE_COLOURS[stage % len(STAGE_COLOURS)]
            axes.plot(*zip(*found, strict=True), "o-", color=colour, markersize=4, label=name)
    axes.set(title=f"{run.name}: delay, median of matrices", ylabel="steps by which gradient arrives late")
    axes.set_ylim(bottom=0)


def delays(run: Run, stage: int) -> list[tuple[int, float]]:
    """(iteration, median delay of the stage's matrices) of each window that measured one."""
    matrices = {name for name, *_ in run.start["stages"][stage]["matrices"]}
    found = []
    for window in run.windows:
        measured = window["stages"][stage].get("fidelity") or {}
        own = [signals["delay"] for name, signals in measured.items() if name in matrices]
        if own := [one for one in own if one is not None and math.isfinite(one)]:
            found.append((window["iteration"], median(own)))
    return found


def used_ranks(run: Run, window: int, stage: int) -> list[float]:
    """Of a stage's matrices in a window; NaN alone where it was not compressed."""
    rank = run.windows[window]["ranks"][stage]
    if rank is None:
        return [float("nan")]
    # a window's plan is for the windows after it
    plan = run.windows[window - 1].get("plan", {}) if window else {}
    own = (plan.get("matrix_ranks") or [None] * (stage + 1))[stage]
    return [float(one) for one in own.values()] if own else [float(rank)]
