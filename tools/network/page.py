"""The page of points: tables by mode, and step time against the rate of the links."""

import math
from collections.abc import Sequence

from tools.network.runs import CHANGING, CONTENDERS, EVEN, LINKS, MODES, SEQUENCES, WINDOW, Point
from tools.shared.markdown import header, row
from tools.shared.pictures import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY_BLUE, VERMILION, panels, tidy, to_png

COLORS = {
    "dense": GREY,
    "bf16": GREY,
    "int8": BLUE,
    "int4": SKY_BLUE,
    "powersgd": GREEN,
    "powersgd-int8": GREEN,
    "optimus": PURPLE,
    "paper": ORANGE,
    "balanced": VERMILION,
}

GLOO = (
    "Over gloo a reduce-scatter sends as many bytes as an all-reduce, so the interface of the dense run counts more",
    "than EDGC does. With NCCL dense gradients would take about half as long here, and the gain would be smaller.",
)


def table(points: Sequence[Point]) -> list[str]:
    """A row for each rate, repetition and contender of one mode, compared with the dense run of that repetition."""
    lines = header(
        ["link", "commit", "contender", "s a step", "against dense", "communication, s", "against dense"]
        + ["MB a step, counted", "by the interface", "ranks"]
    )
    runs = sorted({(_order(point.mbit), point.repetition) for point in points})
    for rate, repetition in runs:
        own = [point for point in points if (_order(point.mbit), point.repetition) == (rate, repetition)]
        dense = _of(own, "dense")
        for contender in CONTENDERS:
            for point in _of(own, contender):
                cells = [
                    "no limit" if point.mbit is None else f"{point.mbit:g} Mbit/s",
                    point.commit + (", old" if point.old else ""),
                    contender,
                    f"{point.step_seconds:.2f}",
                    _change(point, dense, "step_seconds"),
                    f"{point.communication_seconds:.2f} ({point.communication_seconds / point.step_seconds:.0%})",
                    _change(point, dense, "communication_seconds"),
                    f"{point.counted_bytes / 1e6:.2f}",
                    f"{point.interface_bytes / 1e6:.2f}",
                    _ranks(point) if contender not in ("dense", "bf16", "int8", "int4") else "",
                ]
                lines.append(row(cells))
    return lines


def _ranks(point: Point) -> str:
    return ", ".join("dense" if rank is None else str(rank) for rank in point.ranks)


def markdown(points: Sequence[Point], machine: str) -> str:
    """The whole page."""
    lines = [
        "# Time on limited links",
        "",
        "Made by `bash scripts/bench_network.sh`; every run is in [points.json](points.json). These are real Megatron",
        "runs over gloo. Each process has its own network namespace, and `tc tbf` limits the namespace's link in both",
        f"directions. The model is a GPT of 4 layers, width 256, {128 * SEQUENCES:,} tokens a process and step, on a",
        f"CPU ({machine}).",
        "",
        f"- A step's time is the median over windows of {WINDOW} steps, after a first window of warm-up.",
        "- *Communication* is the time of the reductions alone, its share of the step in brackets.",
        "- *MB a step* are those of a process: what EDGC counts, gathered weights of the distributed optimizer",
        "  included, and what the interface sent with headers and exchanges at the ends of windows.",
        "- `powersgd` is low rank in fp32 (`--edgc-preset paper --edgc-static-rank 32 --edgc-warmup-fraction 0.025`).",
        "- EDGC's probe, and later its trials in training, decide whether to compress. *Ranks* are those of the last",
        "  window.",
        "- Repetitions may be hours apart. This machine is shared, and its speed changes between them. So *against",
        "  dense* compares with the dense run of the same repetition, the nearest one above.",
        "- The picture has the first repetition of each link.",
        "- Rows are *old* where today's code",
        "  [compresses otherwise](../frontier/README.md#old-rows).",
        "",
        "![Step time against the rate of the links](step.png)",
        "",
    ]
    for kind in LINKS:
        for mode in MODES:
            own = [point for point in points if (point.mode, point.links) == (mode, kind)]
            if own:
                title = mode.capitalize() if kind == EVEN else f"{mode.capitalize()}, {kind}"
                lines += [f"## {title}", "", *table(own), ""]
                lines += [*GLOO, ""] if "distributed" in mode else []
    if any(point.links == CHANGING for point in points):
        lines += ["![Step time over the windows of a run whose links change](changing.png)", ""]
    return "\n".join(lines)


def over_time(points: Sequence[Point]) -> bytes:
    """Step time in each measured window, a line for each run."""
    figure, (axes,) = panels(1, 1, width=4.8, height=3.2)
    for contender in CONTENDERS:
        for point in _of(points, contender):
            windows = range(1, 1 + len(point.window_seconds))
            axes.plot(windows, point.window_seconds, marker="o", color=COLORS.get(contender, "black"), label=contender)
    axes.axvline(len(points[0].window_seconds) // 2 + 0.5, color=GREY, linestyle=":")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"window of {WINDOW} steps; dotted: links fall to a third")
    axes.set_ylabel("s a step")
    tidy(axes)
    axes.legend(fontsize=8)
    return to_png(figure, dpi=90)


def picture(points: Sequence[Point]) -> bytes:
    """Step time against rate, a panel for each mode, a line for each contender; unlimited links at the right edge.

    Of first repetitions: a line of points of several days would show how fast the machine was.
    """
    points = [point for point in points if point.links == EVEN and point.repetition == 0]
    modes = [mode for mode in MODES if any(point.mode == mode for point in points)] or ["plain"]
    figure, places = panels(1, len(modes), width=4.8, height=3.4)
    for mode, axes in zip(modes, places, strict=True):
        own = [point for point in points if point.mode == mode]
        limited = [point.mbit for point in own if point.mbit is not None]
        for contender in CONTENDERS:
            found = _of(own, contender)
            # at most one point for each rate
            steps_at = {_order(point.mbit): point.step_seconds for point in found}
            if limited and math.inf in steps_at:
                steps_at[3 * max(limited)] = steps_at.pop(math.inf)
            if rates := sorted(steps_at):
                steps = [steps_at[rate] for rate in rates]
                style = "--" if contender in ("bf16", "powersgd-int8") else "-"
                axes.plot(rates, steps, style, marker="o", color=COLORS.get(contender, "black"), label=contender)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("Mbit/s of each link (right: no limit)")
        axes.set_ylabel("s a step")
        axes.set_title(mode)
        tidy(axes)
        if own:
            axes.legend(fontsize=8)
    return to_png(figure, dpi=90)


def _of(points: Sequence[Point], contender: str) -> list[Point]:
    return [point for point in points if point.contender == contender]


def _change(point: Point, dense: Sequence[Point], field: str) -> str:
    """Against the dense run of the same repetition."""
    reference = next((getattr(one, field) for one in dense), 0)
    return f"{getattr(point, field) / reference - 1:+.0%}" if reference and point.contender != "dense" else ""


def _order(rate: float | None) -> float:
    return math.inf if rate is None else rate
