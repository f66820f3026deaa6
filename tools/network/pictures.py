"""Pictures of points: step time against the rate of the links, over time where it changes, and loss over time."""

import math
from collections.abc import Sequence
from statistics import fmean

from tools.network.points import Curve, Point, changes_after
from tools.network.setups import CONTENDERS, MODES, WINDOW
from tools.network.tables import by_rate, dated, of_contender, place_of, rate_name, sweep, two_rates
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
# the contender in whose colour one is drawn, and the style of its line
VARIANTS = {
    "bf16": ("bf16", "--"),
    "powersgd-int8": ("powersgd-int8", "--"),
    "dense-bf16-sums": ("dense", "--"),
    "balanced-whole-weights": ("balanced", "--"),
    "balanced-int4-weights": ("balanced", ":"),
    "balanced-low-rank": ("balanced", "-."),
    "safe": ("balanced", ":"),
    "fast": ("balanced", "--"),
    "paper-begun": ("paper", "--"),
    "paper-not-aligned": ("paper", ":"),
}

SMOOTH = 4  # windows, of whose losses the mean is drawn


def over_time(points: Sequence[Point]) -> bytes:
    """Step time in each measured window, a panel for each change of links, a line for each run of the newest code that
    was timed there.
    """
    changes = sorted({(point.links, by_rate(point.mbit)) for point in points})
    figure, several = panels(-(-len(changes) // 2), min(len(changes), 2), width=4.8, height=3.0)
    for change, axes in zip(changes, several, strict=False):
        own = [point for point in points if (point.links, by_rate(point.mbit)) == change]
        newest = max(own, key=lambda point: point.started).commit
        own = [point for point in own if point.commit == newest]
        for contender in CONTENDERS:
            like, style = VARIANTS.get(contender, (contender, "-"))
            for point in of_contender(own, contender):
                windows, label = range(1, 1 + len(point.window_seconds)), f"{contender}, {dated(point)}"
                axes.plot(windows, point.window_seconds, style, marker="o", color=COLORS[like], label=label)
        for count in {len(point.window_seconds) for point in own}:
            axes.axvline(changes_after(count) + 0.5, color=GREY, linestyle=":")
        axes.set_ylim(bottom=0)
        axes.set_xlabel(f"window of {WINDOW} steps; dotted: the links change")
        axes.set_ylabel("s a step")
        axes.set_title(f"{' then '.join(two_rates(own[0]))}, {own[0].mode}", fontsize=9)
        tidy(axes)
        axes.legend(fontsize=8)
    return to_png(figure, dpi=90)


def loss_over_time(curves: Sequence[Curve]) -> bytes:
    """Training loss against seconds of training, a panel for each mode and rate, a line for each contender."""
    places = sorted({place_of(curve)[:2] for curve in curves})
    figure, several = panels(1, len(places), width=4.8, height=3.4)
    for place, axes in zip(places, several, strict=True):
        own = sorted((curve for curve in curves if place_of(curve)[:2] == place), key=place_of)
        for curve in own:
            ends = range(SMOOTH, 1 + len(curve.losses))
            seconds, losses = (
                [curve.seconds[end - 1] for end in ends],
                [fmean(curve.losses[e - SMOOTH : e]) for e in ends],
            )
            like, style = VARIANTS.get(curve.contender, (curve.contender, "-"))
            axes.plot(seconds, losses, style, color=COLORS[like], label=f"{curve.contender}, {dated(curve)}")
        axes.set_xlabel("seconds of training")
        axes.set_ylabel("training loss")
        axes.set_title(f"{own[0].mode}, {rate_name(own[0].mbit)}")
        tidy(axes)
        axes.legend(fontsize=8)
    return to_png(figure, dpi=90)


def picture(points: Sequence[Point]) -> bytes:
    """Step time against rate, a panel for each mode that was timed at three or more, a line for each contender;
    unlimited links at the right edge.
    """
    modes = [mode for mode in MODES if len({point.mbit for point in sweep(points, mode)}) > 2] or ["plain"]
    figure, places = panels(1, len(modes), width=4.8, height=3.4)
    for mode, axes in zip(modes, places, strict=True):
        own = sweep(points, mode)
        limited = [point.mbit for point in own if point.mbit is not None]
        for contender in CONTENDERS:
            found = of_contender(own, contender)
            # at most one point for each rate
            steps_at = {by_rate(point.mbit): point.step_seconds for point in found}
            if limited and math.inf in steps_at:
                steps_at[3 * max(limited)] = steps_at.pop(math.inf)
            if rates := sorted(steps_at):
                steps = [steps_at[rate] for rate in rates]
                like, style = VARIANTS.get(contender, (contender, "-"))
                axes.plot(rates, steps, style, marker="o", color=COLORS[like], label=contender)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("Mbit/s of each link (right: no limit)")
        axes.set_ylabel("s a step")
        axes.set_title(f"{mode},\ncode of {own[0].commit}" if own else mode)
        tidy(axes)
        if own:
            axes.legend(fontsize=8)
    return to_png(figure, dpi=90)
