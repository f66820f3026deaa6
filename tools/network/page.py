"""The page of points: tables by mode, and step time against the rate of the links."""

from collections.abc import Sequence
from statistics import median

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
    """A row for each rate and contender of one mode; medians over repetitions. What is compared is of the same one."""
    lines = header(
        ["link", "contender", "s a step", "against dense", "communication, s", "against dense"]
        + ["MB a step, counted", "by the interface", "ranks"]
    )
    for rate in sorted({point.mbit for point in points}, key=_order):
        own = [point for point in points if point.mbit == rate]
        dense = _of(own, "dense")
        for contender in CONTENDERS:
            found = _of(own, contender)
            if not found:
                continue
            step, talk = (_median(found, field) for field in ("step_seconds", "communication_seconds"))
            counted, interface = (_median(found, field) / 1e6 for field in ("counted_bytes", "interface_bytes"))
            spread = [point.step_seconds for point in found]
            within = f" ({min(spread):.2f} to {max(spread):.2f})" if len(spread) > 1 else ""
            ranks = "; ".join(dict.fromkeys(map(_ranks, found)))
            cells = [
                "no limit" if rate is None else f"{rate:g} Mbit/s",
                contender,
                f"{step:.2f}{within}",
                _changes(found, dense, "step_seconds") if contender != "dense" else "",
                f"{talk:.2f} ({talk / step:.0%})",
                _changes(found, dense, "communication_seconds") if contender != "dense" else "",
                f"{counted:.2f}",
                f"{interface:.2f}",
                ranks if contender not in ("dense", "bf16", "int8", "int4") else "",
            ]
            lines.append(row(cells))
    return lines


def _ranks(point: Point) -> str:
    return ", ".join("dense" if rank is None else str(rank) for rank in point.ranks)


def markdown(points: Sequence[Point], machine: str) -> str:
    """The whole page."""
    commits = ", ".join(dict.fromkeys(point.commit for point in points))
    lines = [
        "# Time on limited links",
        "",
        "Made by `bash scripts/bench_network.sh`; every run is in [points.json](points.json). These are real Megatron",
        "runs over gloo. Each process has its own network namespace, and `tc tbf` limits the namespace's link in both",
        "directions. The model is a GPT",
        f"of 4 layers, width 256, {128 * SEQUENCES:,} tokens a process and step, on a CPU ({machine};",
        f"commit {commits}). A step's time is the median over windows of {WINDOW} steps, after a first window of",
        "warm-up. Communication is the time of the reductions alone, its share of the step in brackets. Bytes are",
        "those of a process and step: what EDGC counts, and what the interface sent with headers and exchanges",
        "at the ends of windows. EDGC's probe, and later its trials in training, decide whether to compress. *Ranks*",
        "are those of the last window, of each repetition. A range is that of repetitions, beside their median.",
        "Repetitions may be hours apart and of other commits (points.json). This machine is shared, and its speed",
        "changes between them. So what is compared is always of one repetition. The picture has the first one.",
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
            rates = sorted({point.mbit for point in found if point.mbit is not None})
            steps = [_median([point for point in found if point.mbit == rate], "step_seconds") for rate in rates]
            free = [point for point in found if point.mbit is None]
            if free and limited:
                rates.append(3 * max(limited))
                steps.append(_median(free, "step_seconds"))
            if rates:
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


def _median(points: Sequence[Point], field: str) -> float:
    return float(median(getattr(point, field) for point in points))


def _changes(points: Sequence[Point], dense: Sequence[Point], field: str) -> str:
    """Against dense of the same repetition: the median, and the range where there are several."""
    references = {point.repetition: getattr(point, field) for point in dense}
    found = [
        getattr(point, field) / references[point.repetition] - 1 for point in points if references.get(point.repetition)
    ]
    if not found:
        return ""
    within = f" ({min(found):+.0%} to {max(found):+.0%})" if len(found) > 1 else ""
    return f"{median(found):+.0%}{within}"


def _order(rate: float | None) -> float:
    return float("inf") if rate is None else rate
