"""Plots of a list of runs: loss gap against volume reduction, or against what its settings differ in."""

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter

from tools.experiments.entries import Entry, Line, entries, trend
from tools.shared.pictures import BLUE, GREEN, GREY, VERMILION, panels, tidy, to_png

# Of each family of engines: its colour, and a marker that says the same.
FAMILIES = {
    "low rank": (VERMILION, "o", ("powersgd", "alternating")),
    "rounding": (BLUE, "s", ("bf16", "int8", "int4", "int3", "int2", "onebit", "loco")),
    "sparse": (GREEN, "^", ("topk", "randomk", "rows")),
    "dense": (GREY, "D", ("dense",)),
}


COLUMNS = 4  # panels side by side, at most


def draw(lines: Sequence[Line]) -> bytes:
    """The plot as PNG: one panel a setting."""
    found = [entry for entry in entries(lines) if entry.engine != "dense"]
    settings = list(dict.fromkeys(entry.setting for entry in found)) or [""]
    columns = min(len(settings), COLUMNS)
    figure, places = panels(math.ceil(len(settings) / columns), columns, width=6.5, height=5.5)
    for where, axes in zip(settings, places, strict=False):
        _panel(axes, where, [entry for entry in found if entry.setting == where])
    for axes in places[len(settings) :]:
        axes.set_axis_off()
    return to_png(figure, dpi=90)


def draw_trends(lines: Sequence[Line], trends: Mapping[str, Mapping[str, float]]) -> bytes:
    """The plot as PNG: a panel for each trend, in it a line for each compressed entry with more than one point."""
    figure, places = panels(1, len(trends), width=3.6, height=3.6)
    for (what, values), axes in zip(trends.items(), places, strict=True):
        for name, points in trend(lines, values).items():
            if len(points) < 2:
                continue
            gaps = {value: point.gap for value, point in points.items()}
            axes.errorbar(
                list(gaps),
                [100 * gap.mean for gap in gaps.values()],
                yerr=[100 * gap.half_width if math.isfinite(gap.half_width) else 0 for gap in gaps.values()],
                marker="o",
                capsize=2,
                elinewidth=1,
                label=name,
            )
        axes.set(xlabel=what, ylabel="validation-loss gap (%)")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(sorted(values.values())))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.axhline(0, color=GREY, linewidth=1)
        tidy(axes)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=7)
    return to_png(figure, dpi=90)


def _panel(axes: Axes, where: str, found: Sequence[Entry]) -> None:
    for family, (colour, marker, engines) in FAMILIES.items():
        for is_old in (False, True):
            members = [entry for entry in found if entry.engine in engines and bool(entry.old) == is_old]
            if not members:
                continue
            axes.errorbar(
                [entry.reduction for entry in members],
                [100 * entry.gap.mean for entry in members],
                yerr=[100 * entry.gap.half_width if math.isfinite(entry.gap.half_width) else 0 for entry in members],
                fmt=marker,
                color=colour,
                alpha=0.5 if is_old else 1,
                elinewidth=1,
                capsize=2,
                label=f"{family}, old" if is_old else family,
            )
    front = [entry for entry in found if entry.on_front]
    axes.plot(
        [entry.reduction for entry in front],
        [100 * entry.gap.mean for entry in front],
        color="#999999",
        zorder=0,
        label="Pareto front",
    )
    for entry in found:
        axes.annotate(
            entry.name,
            (entry.reduction, 100 * entry.gap.mean),
            xytext=(4, 4),
            textcoords="offset points",
            fontsize=7,
        )
    axes.set(title=where, xlabel="gradient bytes, times fewer than dense", ylabel="validation-loss gap (%)")
    axes.set_xscale("log")
    reductions = [entry.reduction for entry in found] or [1.0]
    least, most = min(reductions), max(reductions)
    if most < 1.5 * least:  # else hairs of a percent would fill the picture
        axes.set_xlim(least / 1.5, most * 1.5)
    axes.set_yscale("symlog", linthresh=0.5)
    low, high = axes.get_ylim()
    axes.set_ylim(min(1.15 * low, -0.5), max(1.15 * high, 0.5))
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    tidy(axes, minor_grid=True)
    axes.axhline(0, color=GREY, linewidth=1)
    axes.legend(frameon=False, loc="upper left")
