"""The report's picture."""

from matplotlib.axes import Axes

from tools.shared.pictures import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY_BLUE, VERMILION, YELLOW, panels, tidy, to_png
from tools.shared.runs import Run

RUN_COLOURS = {"dense": GREY, "edgc": VERMILION}
STAGE_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY_BLUE, YELLOW)


def draw(dense: Run, edgc: Run) -> bytes:
    """The report's picture as PNG: entropy, ranks, loss and cumulative bytes over iterations."""
    figure, (entropy, ranks, loss, sent) = panels(2, 2, width=5.5, height=3.5)
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
        tidy(axes)
        axes.legend(frameon=False)
    return to_png(figure, dpi=100)


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
    """Ranks of every stage as steps: the mean of its matrices, and a band from the smallest to the largest.

    Windows in which every stage was dense are shaded.
    """
    edges = [0] + [window["iteration"] for window in run.windows]
    for stage, name in enumerate(run.stages):
        ranks = [used_ranks(run, window, stage) for window in range(len(run.windows))]
        low, mean, high = zip(*((min(own), sum(own) / len(own), max(own)) for own in ranks), strict=True)
        colour = STAGE_COLOURS[stage % len(STAGE_COLOURS)]
        axes.stairs(high, edges, baseline=low, fill=True, color=colour, alpha=0.15)
        axes.stairs(mean, edges, baseline=None, color=colour, linewidth=2, label=name)
    dense = [end for end, window in zip(edges[1:], run.windows, strict=True) if set(window["ranks"]) == {None}]
    if dense:
        axes.axvspan(0, dense[-1], color="#999999", alpha=0.2, linewidth=0, label="dense warm-up")
    axes.set(title="Ranks of matrices: mean, smallest, largest", ylabel="rank", xlim=(0, edges[-1]))
    axes.set_ylim(bottom=0)


def used_ranks(run: Run, window: int, stage: int) -> list[float]:
    """Of a stage's matrices in a window; NaN alone where it was not compressed."""
    rank = run.windows[window]["ranks"][stage]
    if rank is None:
        return [float("nan")]
    # a window's plan is for the windows after it
    plan = run.windows[window - 1].get("plan", {}) if window else {}
    own = (plan.get("matrix_ranks") or [None] * (stage + 1))[stage]
    return [float(one) for one in own.values()] if own else [float(rank)]
