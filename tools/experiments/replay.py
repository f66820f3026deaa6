"""What the paper's algorithm would have done with the entropies of a run in which nothing was compressed: with other
windows, and with fewer of the measurements. Such entropies are those of training without compression.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from edgc.config import EDGCConfig
from edgc.plan.controller import ControlledStage, Controller
from edgc.plan.observation import StageObservation, WindowObservation
from edgc.specs import MatrixSpec
from tools.experiments.entries import Line

WINDOWS = (50, 100, 250, 500)  # the paper's 500, 1000 and 2500 in a run a tenth as long, and one twice as long
KEPT = (1.0, 0.5, 0.2)  # shares of the run's own measurements
WARMUPS = (0.1, 0.0125)  # shares of the run: the paper's, and one that ends while entropy still falls
RMAX = 32


@dataclass(frozen=True)
class Replay:
    """One stage under one window: at the end of each of the run's own windows, from the first whole window on, the
    entropy and the rank that hold then. ``measured``: iterations in a window that were measured.
    """

    window: int
    measured: float
    ends: np.ndarray
    entropy: np.ndarray
    ranks: np.ndarray  # NaN: not compressed


def replays(line: Line, stage: int, window: int, kept: float, warmup: float = WARMUPS[0]) -> Replay:
    """Decide at the end of every ``window`` iterations, by this share of the measurements in them, after a warm-up of
    this share of the run.

    The stage is not aligned with others. Raises ValueError where the run's own windows do not divide the window.
    """
    own = line["windows"][0]["iteration"]
    if window % own or kept * window < own:
        raise ValueError(f"windows of {own} iterations do not make {kept:g} of one of {window}")
    config = EDGCConfig.from_preset("paper", rmax=RMAX, rmin=RMAX // 4, align=False)
    config = config.replace(window=window, warmup_fraction=warmup)
    matrices = [MatrixSpec(f"{place}", *shape) for place, shape in enumerate(line["matrices"][stage])]
    controller = Controller(config, line["iterations"], [ControlledStage(matrices)])
    every = round(1 / kept)
    held = (math.nan, math.nan)
    seen: list[float] = []
    rows: list[tuple[float, float, float]] = []
    for place, one in enumerate(line["windows"]):
        if place % every == 0 and one["entropy"][stage] is not None:
            seen.append(one["entropy"][stage])
        if one["iteration"] % window == 0:
            controller.observe(WindowObservation([StageObservation(fmean(seen) if seen else math.nan)]))
            (rank,) = controller.decide(one["iteration"]).ranks
            held = (fmean(seen) if seen else math.nan, rank or math.nan)
            seen = []
        if one["iteration"] >= window:
            rows.append((one["iteration"], *held))
    ends, entropy, ranks = np.array(rows).T
    measured = kept * window * line["iteration_sampling_rate"]
    return Replay(window, measured, ends, entropy, ranks)


@dataclass(frozen=True)
class Agreement:
    """Of two replays where both hold something: Pearson's correlation of entropies, that of their changes from one
    window to the next, and their largest difference in nats; the mean ranks, and the share of the time for which the
    ranks are equal.
    """

    correlation: float
    of_changes: float
    difference: float
    mean_ranks: tuple[float, float]
    equal: float


def compare(one: Replay, other: Replay) -> Agreement:
    """Compare what two replays of runs with the same windows hold at the same time."""
    first = max(one.ends[0], other.ends[0])
    pairs = [
        (replay.entropy[replay.ends >= first], np.nan_to_num(replay.ranks[replay.ends >= first]))
        for replay in (one, other)
    ]
    (left, ranks), (right, other_ranks) = pairs
    both = np.isfinite(left) & np.isfinite(right)
    compressed = (ranks > 0) | (other_ranks > 0)
    return Agreement(
        float(np.corrcoef(left[both], right[both])[0, 1]),
        _correlation_of_changes(one, other),
        float(np.abs(left - right)[both].max()),
        (_mean_rank(ranks), _mean_rank(other_ranks)),
        float((ranks == other_ranks)[compressed].mean()) if compressed.any() else math.nan,
    )


def _correlation_of_changes(one: Replay, other: Replay) -> float:
    """Over the windows of the longer kind, of whose iterations the other's windows are averaged."""
    length = max(one.window, other.window)
    (ends, left), (other_ends, right) = (_by_window(replay, length) for replay in (one, other))
    _, places, other_places = np.intersect1d(ends, other_ends, return_indices=True)
    changes, other_changes = np.diff(left[places]), np.diff(right[other_places])
    both = np.isfinite(changes) & np.isfinite(other_changes)
    return float(np.corrcoef(changes[both], other_changes[both])[0, 1])


def _by_window(replay: Replay, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The ends of windows of ``length``, a multiple of the replay's own, and the mean entropy in each."""
    own = replay.ends % replay.window == 0
    ends = np.unique(replay.ends[own & (replay.ends % length == 0)])
    means = [replay.entropy[own & (replay.ends > end - length) & (replay.ends <= end)].mean() for end in ends]
    return ends, np.array(means)


def _mean_rank(ranks: np.ndarray) -> float:
    return float(ranks[ranks > 0].mean()) if (ranks > 0).any() else math.nan


def cases(line: Line) -> Iterator[tuple[float, int, float]]:
    """Warm-ups, windows, and shares of measurements, as far as a run's own windows allow them. The paper's warm-up
    comes first, and it alone has fewer measurements; of windows the shortest comes first.
    """
    own = line["windows"][0]["iteration"]
    for warmup in WARMUPS:
        for window in WINDOWS:
            for kept in KEPT if warmup == WARMUPS[0] else KEPT[:1]:
                if window % own == 0 and kept * window >= own and line["iterations"] >= 4 * window:
                    yield warmup, window, kept
