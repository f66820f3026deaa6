"""Tables and plots of the studies: what entropy does over a run, and what follows. Used by ``tools/frontier.py``.

A study is a list of runs with the key ``study``; docs/frontier/README.md says what each shows. Each function in
``STUDIES`` takes the results of the list's runs and gives a figure and the lines of a Markdown table.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from statistics import fmean, median
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from tools.frontier_report import Line, entries, old, provenance, setting, to_png  # noqa: E402

Study = Callable[[Sequence[Line]], tuple[Figure, list[str]]]
# a gap below this is what a user would accept: it decides the smallest rank that the study of ranks suggests
ACCEPTED_GAP = 0.01


def page(name: str, title: str, study: str, lines: Sequence[Line]) -> tuple[str, bytes]:
    """The study's page and its plot as PNG."""
    lines = [line for line in lines if "defect" not in line and "windows" in line]
    figure, table = STUDIES[study](lines)
    text = [f"# {title}", "", f"Made by `python tools/frontier.py --config configs/frontier/{name}.yaml`; raw lines in"]
    text += [
        "[results.jsonl](results.jsonl).",
        "",
        f"![{title}]({name}.png)",
        "",
        *table,
        "",
        *_old(lines),
        *provenance(lines),
        "",
    ]
    return "\n".join(text), to_png(figure)


def _old(lines: Sequence[Line]) -> list[str]:
    """Which runs would not be the same today, and why."""
    found = [f"- {line['name']}, {setting(line)}: {old(line)}" for line in lines if old(line)]
    return ["Old runs, which would not be the same today:", "", *found, ""] if found else []


def stage_name(line: Line, stage: int) -> str:
    """``stage 1``; older results do not hold the names."""
    name: str = line["windows"][0].get("stages", {stage: f"stage {stage + 1}"})[stage]
    return name


def entropy(lines: Sequence[Line]) -> tuple[Figure, list[str]]:
    """Entropy over the run, by stage and by kind of layer."""
    figure, (by_stage, by_kind) = _panels(2)
    table = ["| run | of | first window | last window | correlation with the iteration |", "|---|---|---|---|---|"]
    for line in lines:
        stages = range(len(line["windows"][0]["entropy"]))
        for stage in stages:
            iterations, values = trajectory(line, stage)
            by_stage.plot(iterations, values, label=f"{_label(line, lines)} {stage_name(line, stage)}")
            table.append(_trend(_label(line, lines), stage_name(line, stage), iterations, values))
        for stage in stages:
            for kind in _kinds(line, stage):
                iterations, values = _statistic(line, stage, kind, "gaussian_entropy")
                by_kind.plot(iterations, values, linewidth=1, label=f"{stage_name(line, stage)}: {kind}")
                table.append(_trend(_label(line, lines), f"{stage_name(line, stage)}, {kind}", iterations, values))
    by_stage.set(xlabel="iteration", ylabel="entropy (nats)", title="by stage")
    by_kind.set(xlabel="iteration", ylabel="entropy (nats)", title="by kind of layer")
    by_stage.legend(frameon=False)
    by_kind.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure, table


def ranks(lines: Sequence[Line]) -> tuple[Figure, list[str]]:
    """Communication and perplexity against a fixed rank, and the bounds that they suggest."""
    figure, (time, perplexity) = _panels(2)
    fixed = sorted((line for line in lines if _rank(line)), key=_rank)
    dense = [line for line in lines if line["name"] == "dense"]
    gaps = {entry.name: entry.gap.mean for entry in entries(lines)}  # none without a dense run
    table = ["| run | rank | bytes a step | reduction (s) | perplexity | gap |", "|---|---|---|---|---|---|"]
    for line in [*dense, *fixed]:
        gap = f"{100 * gaps[line['name']]:+.2f} %" if line["name"] in gaps else "–"
        table.append(
            f"| {line['name']} | {_rank(line) or '–'} | {_step_bytes(line) / 1e3:.0f} kB | "
            f"{_reduce_seconds(line):.4f} | {math.exp(line['val_loss']):.2f} | {gap} |"
        )
    for axes, value, label in (
        (time, _step_bytes, "bytes a step"),
        (perplexity, lambda line: math.exp(line["val_loss"]), "validation perplexity"),
    ):
        axes.plot([_rank(line) for line in fixed], [value(line) for line in fixed], marker="o", label="fixed rank")
        for line in dense:
            axes.axhline(value(line), color="#555555", label="dense")
        axes.set(xlabel="rank", ylabel=label)
        axes.set_xscale("log", base=2)
        axes.legend(frameon=False)
    fewer = [_rank(line) for line in fixed if all(_step_bytes(line) < _step_bytes(other) for other in dense)]
    good = [_rank(line) for line in fixed if gaps.get(line["name"], math.inf) <= ACCEPTED_GAP]
    table += [
        "",
        f"Suggested: r_max = {max(fewer, default='none')} (largest rank tried that sends fewer bytes than dense), "
        f"r_min = {min(good, default='none')} (smallest rank tried with a gap of at most {100 * ACCEPTED_GAP:g} %). "
        "Seconds are those of loopback on a shared CPU.",
    ]
    return figure, table


def agreement(lines: Sequence[Line]) -> tuple[Figure, list[str]]:
    """Whether windows of different length, or samples, see the same entropy and lead to the same ranks."""
    measured = [line for line in lines if line["name"] != "dense"]
    figure, (paths, decisions) = _panels(2)
    table = ["| stage | runs | correlation | largest difference (nats) | ranks, mean |", "|---|---|---|---|---|"]
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
            alike, apart = correlation(first, second, stage)
            means = " / ".join(f"{_mean_rank(line, stage):.1f}" for line in (first, second))
            pair = f"{first['name']}, {second['name']}"
            table.append(f"| {stage_name(first, stage)} | {pair} | {alike:.3f} | {apart:.3f} | {means} |")
    paths.set(xlabel="iteration", ylabel="entropy (nats)")
    decisions.set(xlabel="iteration", ylabel="rank (none in the warm-up)")
    paths.legend(frameon=False, fontsize=7)
    return figure, table


def statistics(lines: Sequence[Line]) -> tuple[Figure, list[str]]:
    """Whether gradients are normal: moments, and the Gaussian formula against a histogram."""
    figure, panels = _panels(3)
    table = [
        "| run | kind | skewness | excess kurtosis | Gaussian minus histogram entropy (nats) |",
        "|---|---|---|---|---|",
    ]
    for line in lines:
        for stage in range(len(line["windows"][-1]["statistics"])):
            for kind in _kinds(line, stage):
                label = f"{stage_name(line, stage)}, {kind}"
                cells = []
                gaussian = _statistic(line, stage, kind, "gaussian_entropy")
                histogram = _statistic(line, stage, kind, "histogram_entropy")
                excess = gaussian[0], gaussian[1] - histogram[1]
                for axes, (iterations, values) in zip(
                    panels,
                    (
                        _statistic(line, stage, kind, "skewness"),
                        _statistic(line, stage, kind, "excess_kurtosis"),
                        excess,
                    ),
                    strict=True,
                ):
                    axes.plot(iterations, values, linewidth=1, label=label)
                    cells.append(f"{values[0]:+.2f} → {values[-1]:+.2f}")
                table.append(f"| {_label(line, lines)} | {label} | {' | '.join(cells)} |")
    for axes, title in zip(panels, ("skewness", "excess kurtosis", "Gaussian minus histogram entropy"), strict=True):
        axes.set(xlabel="iteration", title=title)
        axes.set_yscale("symlog", linthresh=1)
    panels[-1].legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    table += ["", "First window → last window. A normal distribution has 0 in all three columns."]
    return figure, table


def topology(lines: Sequence[Line]) -> tuple[Figure, list[str]]:
    """Gap, bytes and ranks under pure data parallelism, and on a pipeline with and without alignment."""
    figure, (gaps, over_time) = _panels(2)
    table = ["| setting | run | fewer bytes | gap | ranks of the last window |", "|---|---|---|---|---|"]
    last = {(setting(line), line["name"]): line["windows"][-1]["ranks"] for line in lines}
    for entry in entries(lines):
        if entry.name != "dense":
            gaps.plot(entry.reduction, 100 * entry.gap.mean, "o", label=f"{entry.name}: {entry.setting}")
        table.append(
            f"| {entry.setting} | {entry.name} | {entry.reduction:.2f}x | {entry.gap.percent()} | "
            f"{', '.join('dense' if rank is None else str(rank) for rank in last[entry.setting, entry.name])} |"
        )
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
    "entropy": entropy,
    "ranks": ranks,
    "windows": agreement,
    "statistics": statistics,
    "sampling": agreement,
    "topology": topology,
}


def trajectory(line: Line, stage: int) -> tuple[np.ndarray, np.ndarray]:
    """(iterations, entropies) at the ends of the windows in which the stage's entropy was measured."""
    seen = [
        (window["iteration"], window["entropy"][stage])
        for window in line["windows"]
        if window["entropy"][stage] is not None
    ]
    iterations, values = np.array(seen, dtype=float).T
    return iterations, values


def correlation(first: Line, second: Line, stage: int) -> tuple[float, float]:
    """Pearson's, of two entropy trajectories where both have values, and the largest difference in nats.

    The one with more windows is averaged over the windows of the other.
    """
    coarse, fine = sorted((trajectory(first, stage), trajectory(second, stage)), key=lambda path: len(path[0]))
    pairs = []
    start = 0.0
    for end, value in zip(*coarse, strict=True):
        within = fine[1][(fine[0] > start) & (fine[0] <= end)]
        if len(within):
            pairs.append((value, within.mean()))
        start = end
    one, other = np.array(pairs).T
    return float(np.corrcoef(one, other)[0, 1]), float(np.abs(one - other).max())


def _panels(count: int) -> tuple[Figure, Sequence[Axes]]:
    figure, panels = plt.subplots(1, count, figsize=(5.5 * count, 4.5), layout="constrained", squeeze=False)
    for axes in panels[0]:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, list(panels[0])


def _kinds(line: Line, stage: int) -> list[str]:
    """Linear layers and embeddings: the other parameters have too few entries for a histogram."""
    kinds = line["windows"][-1]["statistics"][stage]
    return sorted(kind for kind in kinds if kind.endswith(".weight") and "norm" not in kind)


def _statistic(line: Line, stage: int, kind: str, field: str) -> tuple[np.ndarray, np.ndarray]:
    seen = [
        (window["iteration"], window["statistics"][stage][kind][field])
        for window in line["windows"]
        if window["statistics"][stage].get(kind, {}).get(field) is not None
    ]
    iterations, values = np.array(seen, dtype=float).T
    return iterations, values


def _trend(run: str, what: str, iterations: np.ndarray, values: np.ndarray) -> str:
    alike = f"{np.corrcoef(iterations, values)[0, 1]:+.2f}" if values.std() > 0 else "none: constant"
    return f"| {run} | {what} | {values[0]:.3f} | {values[-1]:.3f} | {alike} |"


def _label(line: Line, lines: Sequence[Line]) -> str:
    """The run's name, with its setting where the list has several."""
    return line["name"] if len({setting(other) for other in lines}) == 1 else f"{line['name']}, {setting(line)}"


def _rank(line: Line) -> int:
    """The rank of a run with one fixed rank; 0 of others."""
    used = {rank for window in line["windows"] for rank in window["ranks"] if rank}
    return used.pop() if len(used) == 1 else 0


def _mean_rank(line: Line, stage: int) -> float:
    used = [window["ranks"][stage] for window in line["windows"] if window["ranks"][stage]]
    return fmean(used) if used else math.nan


def _step_bytes(line: Line) -> float:
    """Data-parallel bytes a step in the last window."""
    *_, before, last = [{"iteration": 0, "dp_bytes": 0.0}, *line["windows"]]
    return float(last["dp_bytes"] - before["dp_bytes"]) / (last["iteration"] - before["iteration"])


def _reduce_seconds(line: Line) -> float:
    """Median over the windows of the second half, of the slowest stage."""
    later: list[Mapping[str, Any]] = line["windows"][len(line["windows"]) // 2 :]
    seconds = [max(value for value in window["reduce_seconds"] if value is not None) for window in later]
    return median(seconds)
