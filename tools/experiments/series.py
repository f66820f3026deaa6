"""What the windows of one line of results hold: series over the iterations, and figures of the whole run."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import numpy as np

from tools.experiments.entries import Line

Series = tuple[np.ndarray, np.ndarray]  # iterations, values


def stage_name(line: Line, stage: int) -> str:
    """``stage 1``; older results do not hold the names."""
    name: str = line["windows"][0].get("stages", {stage: f"stage {stage + 1}"})[stage]
    return name


def trajectory(line: Line, stage: int) -> Series:
    """(iterations, entropies) at the ends of the windows in which the stage's entropy was measured."""
    return _series((window["iteration"], window["entropy"][stage]) for window in line["windows"])


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


def training_gap(line: Line, dense: Line) -> Series:
    """(iterations, gaps): the training loss over that of the dense run, as a share, at the ends of windows of both.
    The end of a warm-up may have cut a window of one run alone.
    """
    reference, own = _by_window(dense["losses"]), _by_window(line["losses"])
    return _series((window[1], loss / reference[window] - 1) for window, loss in own.items() if window in reference)


def _by_window(losses: Sequence[tuple[int, float]]) -> dict[tuple[int, int], float]:
    """By the iterations (before its first, its last) of each window."""
    starts = [0, *(end for end, _ in losses)]
    return {(start, end): loss for start, (end, loss) in zip(starts, losses, strict=False)}


def stages(line: Line) -> range:
    return range(len(line["windows"][0]["entropy"]))


def kinds(line: Line, stage: int) -> list[str]:
    """Linear layers and embeddings: the other parameters have too few entries for a histogram."""
    measured: Mapping[str, Any] = line["windows"][-1]["statistics"][stage]
    return sorted(kind for kind in measured if kind.endswith(".weight") and "norm" not in kind)


def statistic(line: Line, stage: int, kind: str, field: str) -> Series:
    """A statistic of one kind of layer at the ends of the windows in which it was measured."""
    return _series(
        (window["iteration"], window["statistics"][stage].get(kind, {}).get(field)) for window in line["windows"]
    )


def _series(pairs: Iterable[tuple[int, float | None]]) -> Series:
    """The pairs that have a value."""
    iterations, values = np.array([pair for pair in pairs if pair[1] is not None], dtype=float).reshape(-1, 2).T
    return iterations, values


def fixed_rank(line: Line) -> int:
    """The rank of a run with one fixed rank; 0 of others."""
    used = {rank for window in line["windows"] for rank in window["ranks"] if rank}
    return used.pop() if len(used) == 1 else 0


def mean_rank(line: Line, stage: int) -> float:
    """The mean over the windows in which the stage had a rank; not a number if there are none."""
    used = [window["ranks"][stage] for window in line["windows"] if window["ranks"][stage]]
    return fmean(used) if used else math.nan


def step_bytes(line: Line) -> float:
    """Data-parallel bytes a step in the last window."""
    windows: list[Mapping[str, float]] = [{"iteration": 0, "dp_bytes": 0.0}, *line["windows"]]
    before, last = windows[-2:]
    return (last["dp_bytes"] - before["dp_bytes"]) / (last["iteration"] - before["iteration"])


def reduce_seconds(line: Line) -> float:
    """Median over the windows of the second half, of the slowest stage."""
    later: list[Mapping[str, list[float | None]]] = line["windows"][len(line["windows"]) // 2 :]
    return median(max(value for value in window["reduce_seconds"] if value is not None) for window in later)


def weighted(pairs: Sequence[tuple[float, float]]) -> float:
    """The mean of (weight, value) pairs; not a number of none."""
    return sum(size * value for size, value in pairs) / sum(size for size, _ in pairs) if pairs else math.nan
