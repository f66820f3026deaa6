"""Tables and plots of the studies: what entropy does over a run, and what follows.

Each function in ``STUDIES`` takes the results of a list's runs and gives a figure and the lines of a Markdown table.
``study_page.py`` makes the page with them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from statistics import fmean
from typing import Any, TypeVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from edgc.plan.by_entropy.rank_model import StageRankModel
from tools.experiments.entries import Key, Line, entries, key, line_label, setting
from tools.experiments.replay import WARMUPS, WINDOWS, Replay, cases, compare, replays
from tools.experiments.series import (
    Series,
    correlation,
    fixed_rank,
    kinds,
    mean_rank,
    reduce_seconds,
    stage_name,
    stages,
    statistic,
    step_bytes,
    training_gap,
    trajectory,
)
from tools.experiments.signals import fidelity
from tools.shared.intervals import Interval, percent
from tools.shared.markdown import header, row
from tools.shared.pictures import GREY, panels, tidy

Study = Callable[[Sequence[Line]], tuple[Figure, list[str]]]
T = TypeVar("T")
BySeed = dict[tuple[str, str], list[T]]  # by run and what of it is shown
# a gap below this is what a user would accept: it decides the smallest rank that the study of ranks suggests
ACCEPTED_GAP = 0.01
QUARTERS = 4
STYLES = "-", "--", "-.", ":"


def entropy(lines: Sequence[Line]) -> tuple[Figure, list[str]]:
    """Entropy over the run, by stage and, where statistics were kept, by kind of layer."""
    by_layer = [(line, stage) for line in lines for stage in stages(line) if kinds(line, stage)]
    figure, places = _panels(2 if by_layer else 1)
    found: BySeed[Series] = {}
    of_run = _LikeLines()
    for line in lines:
        for stage in stages(line):
            entropies = trajectory(line, stage)
            places[0].plot(*entropies, **of_run.style(line, stage, line_label(line, lines)))
            found.setdefault((line_label(line, lines), stage_name(line, stage)), []).append(entropies)
    places[0].set(xlabel="iteration", ylabel="entropy (nats)", title="by stage")
    places[0].legend(fontsize=6, ncol=2, loc="lower right")
    of_kind = _LikeLines()
    for line, stage in by_layer:
        for kind in kinds(line, stage):
            entropies = statistic(line, stage, kind, "gaussian_entropy")
            places[1].plot(*entropies, **of_kind.style(line, stage, kind))
            found.setdefault((line_label(line, lines), f"{stage_name(line, stage)}, {kind}"), []).append(entropies)
    columns = ["run", "of", "seeds", "first window", "lowest (until)", "last window", "rise"]
    table = header([*columns, "correlation with the iteration"])
    table += [_trend(*what, several) for what, several in found.items()]
    if by_layer:
        places[1].set(xlabel="iteration", ylabel="entropy (nats)", title="by kind of layer")
        places[1].legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure, table


class _LikeLines:
    """How lines of runs or of kinds of layers look: a colour for each, dashes by stage, and one entry in the legend for
    all lines that look alike.
    """

    def __init__(self) -> None:
        self._colors: dict[str, str] = {}
        self._labels: set[str] = set()

    def style(self, line: Line, stage: int, what: str) -> dict[str, Any]:
        label = f"{stage_name(line, stage)}, {what}"
        shown = None if label in self._labels else label
        self._labels.add(label)
        color = self._colors.setdefault(what, f"C{len(self._colors)}")
        return {"color": color, "linestyle": STYLES[stage % len(STYLES)], "linewidth": 1, "label": shown}


def losses(lines: Sequence[Line]) -> tuple[Figure, list[str]]:
    """When in a run its training loss departs from that of the dense run of the same seed, and what was sent then."""
    figure, (gaps, largest_ranks, cosines) = _panels(3)
    lines = [line for line in lines if "losses" in line]  # older ones have none
    dense = {(setting(line), line["seed"]): line for line in lines if line["name"] == "dense"}
    quarters = [f"quarter {quarter + 1}" for quarter in range(QUARTERS)]
    table, got = header(["run", "seed", *quarters, "validation"]), header(["run", "seed", *quarters, "whole run"])
    for line in lines:
        reference = dense.get((setting(line), line["seed"]))
        if reference is None or line is reference:
            continue
        label = f"{line_label(line, lines)}, seed {line['seed']}"
        iterations, gap = training_gap(line, reference)
        if not len(iterations):
            continue  # its windows end where none of the dense run does
        gaps.plot(iterations, 100 * gap, linewidth=1, label=label)
        ends = [window["iteration"] for window in line["windows"]]
        used = [max((rank or 0 for rank in window["ranks"]), default=0) for window in line["windows"]]
        largest_ranks.step(ends, used, label=label)
        means = [percent(mean) for mean in _by_quarter(iterations, gap)]
        validation = percent(line["val_loss"] / reference["val_loss"] - 1)
        table.append(row([line_label(line, lines), line["seed"], *means, validation]))
        measured = np.array(line.get("cosines", []), dtype=float)
        if np.isfinite(measured).any():
            cosines.plot(ends, measured, linewidth=1, label=label)
            own = (*_by_quarter(np.array(ends), measured), float(np.nanmean(measured)))
            means = ["not measured" if math.isnan(mean) else f"{mean:.2f}" for mean in own]
            got.append(row([line_label(line, lines), line["seed"], *means]))
    gaps.axhline(0, color=GREY)
    gaps.set(xlabel="iteration", ylabel="training loss over dense (%)")
    largest_ranks.set(xlabel="iteration", ylabel="largest rank")
    cosines.set(xlabel="iteration", ylabel="mean cosine", ylim=(0, 1))
    gaps.legend(frameon=False, fontsize=7)
    table += ["", "Training loss over that of the dense run of the same seed, mean over a quarter of the run."]
    if len(got) > 2:
        table += ["", *got, "", "Cosine of what the optimizer got with the gradient, mean over parameters by elements."]
    return figure, table


def _by_quarter(iterations: np.ndarray, values: np.ndarray) -> list[float]:
    """The mean of the finite values in each quarter of the run; nan where there are none."""
    quarter = np.minimum(QUARTERS * (iterations - 1) // iterations[-1], QUARTERS - 1)
    of_each = [values[(quarter == place) & np.isfinite(values)] for place in range(QUARTERS)]
    return [float(own.mean()) if len(own) else math.nan for own in of_each]


def ranks(lines: Sequence[Line]) -> tuple[Figure, list[str]]:
    """Communication and perplexity against a fixed rank, and the bounds that they suggest."""
    figure, (time, perplexity) = _panels(2)
    fixed = sorted((line for line in lines if fixed_rank(line)), key=fixed_rank)
    dense = [line for line in lines if line["name"] == "dense"]
    gaps = {entry.key: entry.gap for entry in entries(lines)}  # none without a dense run
    table = header(["run", "rank", "seeds", "bytes a step", "reduction (s)", "perplexity", "gap"])
    runs: dict[Key, list[Line]] = {}
    for line in [*dense, *fixed]:
        runs.setdefault(key(line), []).append(line)
    for of, own in runs.items():
        cells = [own[0]["name"], fixed_rank(own[0]) or "–", len(own), f"{fmean(map(step_bytes, own)) / 1e3:.0f} kB"]
        cells += [f"{fmean(map(reduce_seconds, own)):.4f}", f"{fmean(map(_perplexity, own)):.2f}"]
        table.append(row([*cells, gaps[of].percent() if of in gaps else "–"]))
    several = [own for own in runs.values() if fixed_rank(own[0])]
    for axes, value, label in (
        (time, step_bytes, "bytes a step"),
        (perplexity, _perplexity, "validation perplexity"),
    ):
        points = [(fixed_rank(own[0]), fmean(map(value, own))) for own in several]
        axes.plot(*zip(*points, strict=True), marker="o", label="fixed rank")
        if dense:
            axes.axhline(fmean(map(value, dense)), color=GREY, label="dense")
        axes.set(xlabel="rank", ylabel=label)
        axes.set_xscale("log", base=2)
        axes.legend(frameon=False)
    fewer = [fixed_rank(line) for line in fixed if all(step_bytes(line) < step_bytes(other) for other in dense)]
    good = [fixed_rank(line) for line in fixed if key(line) in gaps and gaps[key(line)].mean <= ACCEPTED_GAP]
    table += [
        "",
        f"Suggested: r_max = {max(fewer, default='none')} (largest rank tried that sends fewer bytes than dense), "
        f"r_min = {min(good, default='none')} (smallest rank tried with a gap of at most {100 * ACCEPTED_GAP:g} %). "
        "Seconds are those of loopback on a shared CPU.",
    ]
    return figure, table


def _perplexity(line: Line) -> float:
    return math.exp(line["val_loss"])


def agreement(lines: Sequence[Line]) -> tuple[Figure, list[str]]:
    """Whether windows of different length, or samples, see the same entropy and lead to the same ranks."""
    measured = [line for line in lines if line["name"] != "dense"]
    figure, (paths, decisions) = _panels(2)
    table = header(["stage", "runs", "correlation", "largest difference (nats)", "ranks, mean"])
    for line in measured:
        for stage in range(len(line["windows"][0]["entropy"])):
            label = f"{line['name']}: {stage_name(line, stage)}"
            paths.plot(*trajectory(line, stage), label=label)
            decisions.step(
                [window["iteration"] for window in line["windows"]],
                [window["ranks"][stage] or math.nan for window in line["windows"]],
                label=label,
            )
    for first, second in combinations(measured, 2):
        for stage in range(len(first["windows"][0]["entropy"])):
            pearson, largest = correlation(first, second, stage)
            means = " / ".join(f"{mean_rank(line, stage):.1f}" for line in (first, second))
            pair = f"{first['name']}, {second['name']}"
            table.append(row([stage_name(first, stage), pair, f"{pearson:.3f}", f"{largest:.3f}", means]))
    paths.set(xlabel="iteration", ylabel="entropy (nats)")
    decisions.set(xlabel="iteration", ylabel="rank (none in the warm-up)")
    paths.legend(frameon=False, fontsize=7)
    return figure, table


def replay(lines: Sequence[Line]) -> tuple[Figure, list[str]]:
    """What windows and sampling make of the same run: the paper's algorithm fed with the entropies of dense runs."""
    lines = [line for line in lines if line["engine"] == "dense" and "matrices" in line and any(cases(line))]
    # the reference of a seed: all that the run with most measurements knows, under its shortest window
    most = max((line["iteration_sampling_rate"] for line in lines), default=0.0)
    references = {line["seed"]: line for line in lines if line["iteration_sampling_rate"] == most}
    lines = [line for line in lines if line["seed"] in references and _same_gradients(line, references[line["seed"]])]
    runs: dict[str, list[Line]] = {}
    for line in lines:
        runs.setdefault(line["name"], []).append(line)
    figure, (entropies, *of_warmups) = _panels(1 + len(WARMUPS))
    ranks = dict(zip(WARMUPS, of_warmups, strict=True))
    table = header(
        [
            "run",
            "of",
            "seeds",
            "warm-up",
            "window",
            "measured",
            "correlation",
            "of changes",
            "largest difference (nats)",
            "mean rank",
            "least",
            "reference",
            "equal",
        ]
    )
    first = next(iter(references.values()), None)
    for stage in range(len(first["windows"][0]["entropy"]) if first else 0):
        assert first is not None
        shortest = next(window for _, window, _ in cases(first))
        truths = {
            (seed, warmup): replays(line, stage, shortest, 1.0, warmup)
            for seed, line in references.items()
            for warmup in WARMUPS
        }
        for place, (name, own) in enumerate(runs.items()):
            for warmup, window, kept in cases(own[0]):
                several = [replays(line, stage, window, kept, warmup) for line in own]
                found = [compare(one, truths[line["seed"], warmup]) for one, line in zip(several, own, strict=True)]
                one = several[0]
                if kept == 1:
                    label = f"{stage_name(own[0], stage)}: {name}, windows of {one.window}"
                    color, style = f"C{len(runs) * stage + place}", STYLES[WINDOWS.index(window)]
                    ranks[warmup].step(one.ends, one.ranks, style, color=color, linewidth=1, label=label)
                    if warmup == WARMUPS[0]:
                        entropies.plot(one.ends, one.entropy, style, color=color, linewidth=1)
                cells = [len(own), f"{100 * warmup:g} %", one.window, f"{one.measured:g}"]
                cells += [
                    _over_seeds([other.correlation for other in found], 3),
                    _over_seeds([other.of_changes for other in found], 2),
                    _over_seeds([other.difference for other in found], 3),
                    _over_seeds([other.mean_ranks[0] for other in found], 1),
                    _least(several),
                    _over_seeds([other.mean_ranks[1] for other in found], 1),
                    _over_seeds([100 * other.equal for other in found], 0, " %"),
                ]
                table.append(row([name, stage_name(own[0], stage), *cells]))
    entropies.set(xlabel="iteration", ylabel="entropy that is known (nats)")
    for warmup, panel in ranks.items():
        panel.set(xlabel="iteration", ylabel=f"rank, after a warm-up of {100 * warmup:g} %")
    of_warmups[-1].legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    shown = f" The picture shows seed {first['seed']}." if first is not None and len(references) > 1 else ""
    table += [
        "",
        "Measured: iterations of a window. Least: the smallest rank of all seeds. Each row is compared, at all times, "
        "with the row of its seed, stage and warm-up that has the shortest window and all measurements of the run that "
        "measures most. Of changes: the correlation of the changes from one window of the row to the next, by which "
        "ranks change; the other row is averaged over the same iterations. Equal: for how much of the time in which "
        f"either compresses the ranks are the same. Stages are not aligned here.{shown}",
    ]
    return figure, table


def _over_seeds(values: Sequence[float], digits: int, unit: str = "") -> str:
    """The mean of those that are known, with its interval."""
    known = [value for value in values if not math.isnan(value)]
    return f"{Interval.of(known).number(digits)}{unit}" if known else "–"


def _least(several: Sequence[Replay]) -> str:
    """The smallest rank of all."""
    ranks = np.concatenate([one.ranks for one in several])
    return f"{np.nanmin(ranks):g}" if np.isfinite(ranks).any() else "–"


def _same_gradients(one: Line, other: Line) -> bool:
    """Whether two dense runs of a seed see the same gradients, in windows of the same iterations."""
    return setting(one) == setting(other) and [window["iteration"] for window in one["windows"]] == [
        window["iteration"] for window in other["windows"]
    ]


def normality(lines: Sequence[Line]) -> tuple[Figure, list[str]]:
    """Whether gradients are normal: moments, and the Gaussian formula against a histogram."""
    figure, places = _panels(3)
    table = header(["run", "kind", "seeds", "skewness", "excess kurtosis", "Gaussian minus histogram entropy (nats)"])
    of_kind = _LikeLines()
    found: BySeed[list[Series]] = {}
    for line in lines:
        for stage in range(len(line["windows"][-1]["statistics"])):
            for kind in kinds(line, stage):
                style = of_kind.style(line, stage, kind)
                gaussian = statistic(line, stage, kind, "gaussian_entropy")
                histogram = statistic(line, stage, kind, "histogram_entropy")
                excess = gaussian[0], gaussian[1] - histogram[1]
                moments = [statistic(line, stage, kind, name) for name in ("skewness", "excess_kurtosis")]
                for axes, series in zip(places, (*moments, excess), strict=True):
                    axes.plot(*series, **style)
                of = f"{stage_name(line, stage)}, {kind}"
                found.setdefault((line_label(line, lines), of), []).append([*moments, excess])
    for what, several in found.items():
        ends = [
            [Interval.of([float(values[end]) for _, values in one]).number(2, "+") for end in (0, -1)]
            for one in zip(*several, strict=True)
        ]
        table.append(row([*what, len(several), *(" → ".join(pair) for pair in ends)]))
    for axes, title in zip(places, ("skewness", "excess kurtosis", "Gaussian minus histogram entropy"), strict=True):
        axes.set(xlabel="iteration", title=title)
        axes.set_yscale("symlog", linthresh=1)
    places[-1].legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    table += ["", "First window → last window. A normal distribution has 0 in all three columns."]
    return figure, [*table, *_left_out(lines)]


def _left_out(lines: Sequence[Line]) -> list[str]:
    """What one rank for all matrices of a stage leaves out, beside what it leaves out of normal matrices."""
    shapes = {setting(line): line["matrices"] for line in lines if "matrices" in line}
    found: BySeed[dict[int, tuple[float, float]]] = {}
    for line in lines:
        if "volume" in line.get("preset_settings", {}) or setting(line) not in shapes:
            continue
        for stage, own in enumerate(shapes[setting(line)]):
            model = StageRankModel(tuple((rows, cols) for rows, cols in own))
            seen = {
                window["iteration"]: (
                    window["residual"][stage],
                    model.residual_norm(window["ranks"][stage]) / model.residual_norm(0),
                )
                for window in line["windows"]
                if window["residual"][stage] is not None and window["ranks"][stage]
            }
            if seen:
                found.setdefault((line_label(line, lines), stage_name(line, stage)), []).append(seen)
    if not found:
        return []
    table = header(["run", "of", "seeds", "iteration", "left out", "of normal matrices"])
    for what, several in found.items():
        both = sorted(set.intersection(*(set(one) for one in several)))
        for place in dict.fromkeys((0, len(both) // 8, len(both) // 4, len(both) // 2, len(both) - 1)):
            measured, normal = zip(*(one[both[place]] for one in several), strict=True)
            cells = [Interval.of(list(measured)).number(2), f"{fmean(normal):.2f}"]
            table.append(row([*what, len(several), both[place], *cells]))
    return [
        "",
        *table,
        "",
        "Left out: the norm of what compression leaves out of gradients with their errors, over the norm of these, in "
        "the window that ends there. Of normal matrices: what the same rank leaves out of matrices of the same shapes "
        "whose entries are normal, without errors.",
    ]


def topology(lines: Sequence[Line]) -> tuple[Figure, list[str]]:
    """Gap, bytes and ranks under pure data parallelism, and on a pipeline with and without alignment."""
    figure, (gaps, over_time) = _panels(2)
    table = header(["setting", "run", "fewer bytes", "gap", "ranks of the last window"])
    last = {(setting(line), line["name"]): line["windows"][-1]["ranks"] for line in lines}
    for entry in entries(lines):
        if entry.name != "dense":
            gaps.plot(entry.reduction, 100 * entry.gap.mean, "o", label=f"{entry.name}: {entry.setting}")
        used = ", ".join("dense" if rank is None else str(rank) for rank in last[entry.setting, entry.name])
        table.append(row([entry.setting, entry.name, f"{entry.reduction:.2f}x", entry.gap.percent(), used]))
    for line in lines:
        if line["name"] == "dense":
            continue
        for stage in range(len(line["windows"][0]["ranks"])):
            over_time.step(
                [window["iteration"] for window in line["windows"]],
                [window["ranks"][stage] or math.nan for window in line["windows"]],
                label=f"{line['name']} DP {line['data_parallel']} PP {line['pipeline_parallel']}: stage {stage + 1}",
            )
    gaps.set(xlabel="times fewer bytes", ylabel="validation-loss gap (%)")
    over_time.set(xlabel="iteration", ylabel="rank")
    gaps.legend(frameon=False, fontsize=7)
    over_time.legend(frameon=False, fontsize=7)
    return figure, table


STUDIES: Mapping[str, Study] = {
    "fidelity": fidelity,
    "replay": replay,
    "entropy": entropy,
    "losses": losses,
    "ranks": ranks,
    "windows": agreement,
    "statistics": normality,
    "sampling": agreement,
    "topology": topology,
}


def _trend(run: str, what: str, several: Sequence[Series]) -> str:
    """The row of one run's seeds."""
    measured = [(iterations, values) for iterations, values in several if len(values)]
    if not measured:
        return row([run, what, len(several), *["not measured"] * 5])
    least = [int(values.argmin()) for _, values in measured]
    first, lowest, last = (
        Interval.of([float(values[place]) for (_, values), place in zip(measured, places, strict=True)])
        for places in ([0] * len(measured), least, [-1] * len(measured))
    )
    until = ", ".join(f"{iterations[place]:.0f}" for (iterations, _), place in zip(measured, least, strict=True))
    rise = Interval.of([float(values[-1] - values.min()) for _, values in measured])
    pearson = [float(np.corrcoef(*series)[0, 1]) for series in measured if series[1].std() > 0]
    of_time = Interval.of(pearson).number(2, "+") if pearson else "none: constant"
    numbers = first.number(3), f"{lowest.number(3)} ({until})", last.number(3), rise.number(2, "+")
    return row([run, what, len(measured), *numbers, of_time])


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    figure, places = panels(1, count, width=5.5, height=4.5)
    for axes in places:
        tidy(axes)
    return figure, places
