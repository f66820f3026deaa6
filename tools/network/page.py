"""The page of points: tables by mode, and step time against the rate of the links."""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median

from edgc.plan.rank_plan import rank_in_words
from tools.network.runs import (
    CHANGING,
    CONTENDERS,
    EVEN,
    FALLING,
    LINKS,
    MODES,
    SEQUENCES,
    WINDOW,
    Curve,
    Point,
    changes_after,
    has_volume,
)
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

KEPT = (0.5, 0.8, 0.9, 0.95)  # shares of the speed without reductions
SMOOTH = 4  # windows, of whose losses the mean is drawn

GLOO = (
    "Over gloo a reduce-scatter sends as many bytes as an all-reduce, so the interface of the dense run counts more",
    "than EDGC does. With NCCL dense gradients would take about half as long here, and the gain would be smaller.",
)


def table(points: Sequence[Point]) -> list[str]:
    """A row for each rate, repetition and contender of one mode, compared with the dense run of that repetition.

    Runs of one rate are in the order in which they began, a repetition of one code together.
    """
    lines = header(
        ["link", "commit", "contender", "s a step", "against dense", "mean", "communication, s", "against dense"]
        + ["MB a step, counted", "by the interface", "ranks"]
    )
    for own in _runs(points):
        dense = _of(own, "dense")
        for contender in CONTENDERS:
            for point in _of(own, contender):
                cells = [
                    rate_name(point.mbit),
                    _dated(point),
                    contender,
                    f"{point.step_seconds:.2f}",
                    _change(point, dense, "step_seconds"),
                    f"{point.mean_seconds:.2f}" if point.mean_seconds else "",
                    f"{point.communication_seconds:.2f} ({point.communication_seconds / point.step_seconds:.0%})",
                    _change(point, dense, "communication_seconds"),
                    f"{point.counted_bytes / 1e6:.2f}",
                    f"{point.interface_bytes / 1e6:.2f}",
                    _ranks(point) if contender not in ("dense", "bf16", "int8", "int4") else "",
                ]
                lines.append(row(cells))
    return lines


def changing_table(points: Sequence[Point]) -> list[str]:
    """A row for each run whose links change: a step before it and after it, each the median over windows."""
    lines = header(
        ["link", "commit", "contender", "s a step before", "after", "MB a step, counted", "ranks at the end"]
    )
    for point in sorted(points, key=lambda one: (_order(one.mbit), one.started)):
        place = changes_after(len(point.window_seconds))
        before, after = point.window_seconds[:place], point.window_seconds[place:]
        cells = [
            " then ".join(_two_rates(point)),
            _dated(point),
            point.contender,
            *(f"{median(own):.2f}" for own in (before, after)),
        ]
        lines.append(row([*cells, f"{point.counted_bytes / 1e6:.2f}", _ranks(point)]))
    return lines


def _two_rates(point: Point) -> list[str]:
    """Before and after the links change."""
    rates = [rate_name(point.mbit), rate_name(point.mbit and point.mbit / 3)]
    return rates if point.links == FALLING else rates[::-1]


def _dated(run: Point | Curve) -> str:
    return run.commit + (", old" if run.old else "")


def _ranks(point: Point) -> str:
    return ", ".join(map(rank_in_words, point.ranks))


def repeated(points: Sequence[Point]) -> list[str]:
    """A row for each contender with three repetitions or more of one code, the newest such: medians of the changes
    against dense. Of what compresses, that code is today's, but for what presets stand for.
    """
    lines = header(
        ["mode", "link", "commit", "contender", "repetitions", "step", "communication", "share of a dense step"]
    )
    for mode in MODES:
        pairs: dict[tuple[float, str, str], list[tuple[Point, Point]]] = {}
        for run in _runs([point for point in points if (point.mode, point.links) == (mode, EVEN)]):
            dense = _of(run, "dense")
            for point in run if dense else ():
                if point.contender != "dense" and not point.old:
                    pairs.setdefault((_order(point.mbit), point.contender, point.commit), []).append((point, dense[0]))
        # runs are in the order of time, so that newer code takes the place of older
        newest = {(rate, contender): (code, own) for (rate, contender, code), own in pairs.items() if len(own) >= 3}
        for (rate, contender), (code, own) in newest.items():
            steps = [p.step_seconds / d.step_seconds - 1 for p, d in own]
            sums = [p.communication_seconds / d.communication_seconds - 1 for p, d in own]
            shares = [d.communication_seconds / d.step_seconds for _, d in own]
            cells = [mode, rate_name(rate), code, contender, len(own), *map(_spread, (steps, sums))]
            lines.append(row([*cells, f"{min(shares):.0%} to {max(shares):.0%}"]))
    return lines if len(lines) > 2 else []


def _spread(values: Sequence[float]) -> str:
    return f"**{median(values):+.0%}** ({min(values):+.0%} to {max(values):+.0%})"


def keeps_speed(points: Sequence[Point]) -> dict[str, list[tuple[float, bool]]]:
    """By contender, for each of ``KEPT``: the lowest rate at which a step's reductions leave that share of it to the
    rest, and whether no lower rate was timed. An infinite rate: at none that was timed.

    Of the plain runs of one sweep. A share is of one run, so that the speed of the machine in that hour matters little.
    Between two rates it is taken to be linear in 1 / rate.
    """
    own = [point for point in sweep(points, "plain") if not point.old]
    found: dict[str, list[tuple[float, bool]]] = {}
    for contender in CONTENDERS:
        kept = sorted(
            (1 / _order(point.mbit), 1 - point.communication_seconds / point.step_seconds)
            for point in _of(own, contender)
        )
        if len(kept) > 1:
            found[contender] = [_crossing(kept, share) for share in KEPT]
    return found


def _crossing(kept: Sequence[tuple[float, float]], share: float) -> tuple[float, bool]:
    """``kept``: (1 / rate, share of the speed), the highest rate first."""
    for (near, fast), (far, slow) in reversed(list(pairwise(kept))):
        if fast >= share > slow:
            inverse = near + (far - near) * (fast - share) / (fast - slow)
            return (1 / inverse if inverse else math.inf), False
    least, last = kept[-1]
    return (1 / least, True) if last >= share and least else (math.inf, False)


def speed_table(points: Sequence[Point]) -> list[str]:
    """The rates of ``keeps_speed``."""
    found = keeps_speed(points)
    if len(found) < 2:
        return []
    lines = header(["contender", *(f"{share:.0%} of the speed" for share in KEPT)])
    for contender, rates in found.items():
        lines.append(row([contender, *(_least_rate(rate, below) for rate, below in rates)]))
    return lines


def _least_rate(rate: float, below: bool) -> str:
    if math.isinf(rate):
        return "at no rate timed"
    return f"{'at most ' if below else 'from '}{rate:.0f} Mbit/s"


def curve_table(curves: Sequence[Curve]) -> list[str]:
    """A row for each whole run, compared with the dense one."""
    lines = header(
        ["mode", "link", "contender", "commit", "s of training", "against dense", "validation loss", "gap", "GB sent"]
    )
    for curve in sorted(curves, key=_place):
        run = curve.mode, curve.mbit, curve.commit
        dense = next((c for c in curves if (c.mode, c.mbit, c.commit) == run and c.contender == "dense"), None)
        compared = dense is not None and curve is not dense
        cells = [
            curve.mode,
            rate_name(curve.mbit),
            curve.contender,
            _dated(curve),
            f"{curve.seconds[-1]:.0f}{'' if curve.by_clock else '*'}",
            f"{curve.seconds[-1] / dense.seconds[-1] - 1:+.0%}" if dense and compared else "",
            f"{curve.val_loss:.4f}",
            f"{curve.val_loss / dense.val_loss - 1:+.2%}" if dense and compared else "",
            f"{curve.counted_bytes / 1e9:.2f}",
        ]
        lines.append(row(cells))
    return lines


def of_older_presets(runs: Sequence[Point | Curve]) -> list[str]:
    """What a reader must know of presets that stood for something else; nothing where none did."""
    own = [run for run in runs if has_volume(run.mode, run.contender)]
    if not any(run.older_preset for run in own):
        return []
    names = ", ".join(f"`{name}`" for name in ("safe", "balanced", "fast"))
    today = sorted({run.commit for run in own if not run.older_preset})
    which = f"Rows of presets with a volume ({names}) are of older presets"
    which = f"{which}, except those of {', '.join(today)}" if today else f"All {which[0].lower()}{which[1:]}"
    return [
        f"**{which}.**",
        f"What differs there: {'; '.join(sorted({run.older_preset for run in own if run.older_preset}))}.",
        *([] if today else ["Whether a step of today's presets takes as long was not timed."]),
        "",
    ]


def markdown(points: Sequence[Point], machine: str, curves: Sequence[Curve] = ()) -> str:
    """The whole page."""
    start = [point.start_bytes for point in points]
    lines = [
        "# Time on limited links",
        "",
        "Made by `bash scripts/bench_network.sh`; every run is in [points.json](points.json). These are real Megatron",
        "runs over gloo. Each process has its own network namespace, and `tc tbf` limits the namespace's link in both",
        f"directions. The model is a GPT of 4 layers, width 256, {128 * SEQUENCES:,} tokens a process and step, on a",
        f"CPU ({machine}). [Targets, and what was reached](targets.md).",
        "",
        *of_older_presets([*points, *curves]),
        f"- A run has a window of warm-up, and then two windows or more of {WINDOW} steps. A step's time is the",
        "  median over these windows of the median step, with the steps of trials.",
        "- *Mean* is the time of all these steps, with the exchanges at the ends of windows, over their number. Older",
        "  runs did not keep it.",
        "- *Communication* is the time of the reductions. The brackets give its share of the step.",
        "- *MB a step* are those of a process. The first column is what EDGC counts, with gathered weights. The",
        "  second is what the interface sent, with headers and with EDGC's exchange at the end of a window. Where",
        "  processes share a link, it is their mean.",
        "- Before its first measured step a process sent "
        f"{min(start) / 1e6:.0f} to {max(start) / 1e6:.0f} MB: start-up, probing, and the window of warm-up",
        "  (`start_bytes` of each run).",
        "- `powersgd` is low rank in fp32 (`--edgc-preset paper --edgc-static-rank 32 --edgc-warmup-fraction 0.025`).",
        "- `paper` is dense until entropy is stable. In rows without its ranks that warm-up had not ended.",
        "  `paper-begun` begins after two windows, and its ranks may move by 128 a window. `paper-not-aligned` is the",
        "  same without alignment of the stages. [When each stage ends](stage_ends.md) was measured apart.",
        "- EDGC's probe, and later its trials in training, decide whether to compress, and whether to round all",
        "  gradients instead of low rank. *Ranks* are those of the last window.",
        "- `balanced-low-rank` is `balanced` with `--edgc-rmax 1024`. It has neither that choice nor trials, and the",
        "  link does not bound its ranks.",
        "- *Width 2048* is another model: one layer, sequences of 16 tokens, 512 tokens a process and step.",
        "- Repetitions may be hours apart. This machine is shared, and its speed changes between them. So *against",
        "  dense* compares with the dense run of the same repetition, the nearest one above.",
        "- The picture shows the repetition whose step is the median. Each mode shows the commit that was timed at the",
        "  largest number of rates.",
        "- Rows are *old* where today's code",
        "  [compresses otherwise](../frontier/README.md#old-rows) with the same preset, or where runs had other flags.",
        "",
        "![Step time against the rate of the links](step.png)",
        "",
    ]
    if summary := repeated(points):
        lines += ["## Repeated", ""]
        lines += ["Medians over the repetitions of the newest code that has three, with the least and the most.", ""]
        lines += [*summary, ""]
    if speeds := speed_table(points):
        lines += [
            "## Which link keeps the speed",
            "",
            "The reference is a step of the same run without its reductions. Reductions include the time to compress.",
            "The table shows the slowest link on which a contender still reaches a share of that speed. All runs are",
            "plain ones of one sweep. Between two rates that were timed, the share is taken to be linear in 1/rate.",
            *("", *speeds, ""),
        ]
    if curves:
        lines += [
            "## Loss over time",
            "",
            "These are whole runs of 280 iterations with seed 1, one of each contender. The learning rate falls to 0.",
            "Seconds are those from the first step on, without evaluation. A point of a line is the mean training loss",
            f"of {SMOOTH} windows. A star marks older runs, whose seconds are the median step of each window times its",
            "steps: what happens once in a window, such as EDGC's exchange, is not in them.",
            *("", *curve_table(curves), "", "![Training loss over time](loss.png)", ""),
        ]
    for kind in LINKS:
        for mode in MODES:
            own = [point for point in points if (point.mode, point.links) == (mode, kind)]
            if own:
                title = mode.capitalize() if kind == EVEN else f"{mode.capitalize()}, {kind}"
                lines += [f"## {title}", "", *(changing_table(own) if kind in CHANGING else table(own)), ""]
                lines += [*GLOO, ""] if "distributed" in mode else []
    if any(point.links in CHANGING for point in points):
        lines += ["![Step time over the windows of a run whose links change](changing.png)", ""]
    return "\n".join(lines)


def over_time(points: Sequence[Point]) -> bytes:
    """Step time in each measured window, a panel for each change of links, a line for each run of the newest code."""
    newest = max(points, key=lambda point: point.started).commit
    points = [point for point in points if point.commit == newest]
    changes = sorted({(point.links, _order(point.mbit)) for point in points})
    figure, several = panels(-(-len(changes) // 2), min(len(changes), 2), width=4.8, height=3.0)
    for change, axes in zip(changes, several, strict=False):
        own = [point for point in points if (point.links, _order(point.mbit)) == change]
        for contender in CONTENDERS:
            for point in _of(own, contender):
                windows = range(1, 1 + len(point.window_seconds))
                color, label = COLORS.get(contender, "black"), f"{contender}, {_dated(point)}"
                axes.plot(windows, point.window_seconds, marker="o", color=color, label=label)
        for count in {len(point.window_seconds) for point in own}:
            axes.axvline(changes_after(count) + 0.5, color=GREY, linestyle=":")
        axes.set_ylim(bottom=0)
        axes.set_xlabel(f"window of {WINDOW} steps; dotted: the links change")
        axes.set_ylabel("s a step")
        axes.set_title(f"{' then '.join(_two_rates(own[0]))}, {own[0].mode}", fontsize=9)
        tidy(axes)
        axes.legend(fontsize=8)
    return to_png(figure, dpi=90)


def loss_over_time(curves: Sequence[Curve]) -> bytes:
    """Training loss against seconds of training, a panel for each mode and rate, a line for each contender."""
    places = sorted({_place(curve)[:2] for curve in curves})
    figure, several = panels(1, len(places), width=4.8, height=3.4)
    for place, axes in zip(places, several, strict=True):
        own = sorted((curve for curve in curves if _place(curve)[:2] == place), key=_place)
        for curve in own:
            ends = range(SMOOTH, 1 + len(curve.losses))
            seconds, losses = (
                [curve.seconds[end - 1] for end in ends],
                [fmean(curve.losses[e - SMOOTH : e]) for e in ends],
            )
            axes.plot(
                seconds, losses, color=COLORS.get(curve.contender, "black"), label=f"{curve.contender}, {_dated(curve)}"
            )
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
        axes.set_title(f"{mode}, code of {own[0].commit}" if own else mode)
        tidy(axes)
        if own:
            axes.legend(fontsize=8)
    return to_png(figure, dpi=90)


def sweep(points: Sequence[Point], mode: str) -> list[Point]:
    """On even links, with the code that was timed at most rates, the newest one of several: of each rate and contender
    the repetition whose step is the median.

    A line through points of several days would show how fast the machine was.
    """
    by_code: dict[str, dict[tuple[float | None, str], list[Point]]] = {}
    for point in sorted(points, key=lambda one: one.started):
        if (point.mode, point.links) == (mode, EVEN):
            by_code.setdefault(point.commit, {}).setdefault((point.mbit, point.contender), []).append(point)
    places = max(reversed(by_code.values()), key=lambda own: len({mbit for mbit, _ in own}), default={})
    return [sorted(same, key=lambda point: point.step_seconds)[(len(same) - 1) // 2] for same in places.values()]


def _runs(points: Sequence[Point]) -> list[list[Point]]:
    """Those of one rate, code and repetition, by rate and then by time."""
    runs: dict[tuple[float, str, int], list[Point]] = {}
    for point in sorted(points, key=lambda one: (_order(one.mbit), one.started)):
        runs.setdefault((_order(point.mbit), point.commit, point.repetition), []).append(point)
    return list(runs.values())


def _of(points: Sequence[Point], contender: str) -> list[Point]:
    return [point for point in points if point.contender == contender]


def _change(point: Point, dense: Sequence[Point], field: str) -> str:
    """Against the dense run of the same repetition."""
    reference = next((getattr(one, field) for one in dense), 0)
    return f"{getattr(point, field) / reference - 1:+.0%}" if reference and point.contender != "dense" else ""


def rate_name(rate: float | None) -> str:
    return "no limit" if rate in (None, math.inf) else f"{rate:.4g} Mbit/s"


def _order(rate: float | None) -> float:
    return math.inf if rate is None else rate


def _place(curve: Curve) -> tuple[int, float, int]:
    """Among others: by mode, rate and contender."""
    return list(MODES).index(curve.mode), _order(curve.mbit), list(CONTENDERS).index(curve.contender)
