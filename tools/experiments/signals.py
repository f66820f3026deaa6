"""The study ``fidelity``: which signal of a reduction puts methods in the order of their losses."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import numpy as np
from matplotlib.figure import Figure

from edgc.observe.averages import mean_of_finite
from edgc.plan.by_volume.noise import LOST, noise_of_format
from tools.experiments.entries import Key, Line, entries, key, line_label
from tools.experiments.series import kinds, stages, statistic
from tools.shared.intervals import Interval
from tools.shared.markdown import header, row
from tools.shared.pictures import panels, tidy

SMALL_GAP = 0.03
POWERS = 0.0, 0.5, 1.0, 1.5


@dataclass(frozen=True)
class Model:
    """What a mean over parameters weighs them by: the ``elements`` of each kind, and the mean ``energy`` of an entry of
    its gradient in the unit of the descent, over all runs that have measured it; NaN if none has.
    """

    elements: Mapping[str, float]
    energy: Mapping[str, float]

    @classmethod
    def of(cls, lines: Sequence[Line]) -> "Model":
        elements: dict[str, float] = {}
        energies: dict[str, list[float]] = {}
        for line in lines:
            for kind, seen in line["fidelity"].items():
                elements[kind] = seen["elements"]
                energies.setdefault(kind, []).append(seen.get("energy_of_descent", math.nan))
        return cls(elements, {kind: mean_of_finite(seen) for kind, seen in energies.items()})

    def only(self, kind: str) -> "Model":
        """The same with this kind of parameter alone."""
        return Model({kind: self.elements[kind]}, {kind: self.energy[kind]})

    def mean(self, line: Line, of: "Kind", power: float = 0.0) -> float:
        """The mean over all parameters, by elements times this power of the energy. Those that a run sends exactly have
        0.
        """
        weights = {kind: size * (self.energy[kind] ** power if power else 1.0) for kind, size in self.elements.items()}
        seen = [(weights[kind], of(one)) for kind, one in line["fidelity"].items() if kind in weights and len(one) > 1]
        return sum(weight * value for weight, value in seen) / sum(weights.values())


Kind = Callable[[Mapping[str, float]], float]  # of what was measured of one kind of parameter; 0 of an exact sum
Signal = Callable[[Line, Model], float]


def fidelity(lines: Sequence[Line]) -> tuple[Figure, list[str]]:
    """Gap against what was measured of the reductions: which signal puts the entries in the order of their losses."""
    gaps = {entry.key: entry.gap for entry in entries(lines) if entry.name != "dense"}
    seen = {one: [line for line in lines if key(line) == one and line.get("fidelity")] for one in gaps}
    lines_seen = [line for own in seen.values() for line in own]
    model = Model.of(lines_seen)
    # older runs have not measured all of them
    signals = {name: of for name, of in SIGNALS.items() if any(math.isfinite(of(one, model)) for one in lines_seen)}
    figure, places = panels(2, max(math.ceil(len(signals) / 2), 1), width=4, height=3.5)
    table = header(["entry", "gap", *signals])
    columns: dict[str, list[float]] = {signal: [] for signal in signals}
    measured = [one for one in gaps if seen[one]]
    for one in sorted(measured, key=lambda one: gaps[one].mean):
        values = [fmean(signal(line, model) for line in seen[one]) for signal in signals.values()]
        for column, value in zip(columns.values(), values, strict=True):
            column.append(value)
        shown = ("–" if math.isnan(value) else f"{value:.3g}" for value in values)
        table.append(row([line_label(seen[one][0], lines), gaps[one].percent(), *shown]))
    ordered = sorted(gaps[one].mean for one in measured)
    for axes in places[len(columns) :]:
        axes.set_axis_off()
    for axes, (signal, values) in zip(places[: len(columns)], columns.items(), strict=True):
        tidy(axes)
        axes.plot(values, [100 * gap for gap in ordered], "o")
        axes.set(xlabel=signal, ylabel="gap (%)")
        axes.set_xscale("log" if all(value > 0 for value in values) else "linear")
        axes.set_yscale("symlog", linthresh=0.1)
        axes.set_ylim(100 * min(ordered, default=0.0) - 0.05, 200 * max(ordered, default=1.0))
    order = [rank_correlation(values, ordered) for values in columns.values()]
    small = [place for place, gap in enumerate(ordered) if gap < SMALL_GAP]
    order_of_small = [rank_correlation([v[i] for i in small], [ordered[i] for i in small]) for v in columns.values()]
    table.append(row(["**rank correlation with the gap**", "", *map(_two_digits, order)]))
    title = f"**the same of entries below {100 * SMALL_GAP:g} %**"
    table.append(row([title, "", *map(_two_digits, order_of_small)]))
    table += [
        "",
        "Gap: against the dense run of the same seed, mean over seeds ± half the 95 % confidence interval. The signals "
        "are means over seeds, windows and all parameters ([what they are](../algorithm.md#9-what-the-optimizer-got)). "
        "A parameter that travels exactly counts with a cosine of 1, and with 0 of all else. Parameters are weighted "
        "by their elements; *by energy*: by these times the energy of an entry of the gradient in the unit of the "
        "descent, as the planner weights them. *By rate*: the mean of the noises of windows and of the parameters of a "
        "kind, weighted by energy and by the mean learning rate of the window. All other signals are means first; "
        "*noise of descent* is that of the mean cosine of a kind.",
        "",
    ]
    small_ones = [one for one in measured if gaps[one].mean < SMALL_GAP]
    table += _by_weights(small_ones, gaps, seen, model)
    table += [
        "## By kind of parameter",
        "",
        f"The rank correlation with the gap of each signal at one kind of parameter alone, over the entries below "
        f"{100 * SMALL_GAP:g} % that measured it.",
        "",
    ]
    return figure, [*table, *_by_kind(small_ones, gaps, seen, model, signals), *_by_entropy(lines)]


def _by_weights(
    ones: Sequence[Key], gaps: Mapping[Key, Interval], seen: Mapping[Key, Sequence[Line]], model: Model
) -> list[str]:
    """How signals correlate with the gap if parameters are weighted by other powers of their energy."""
    if not ones or not all(map(math.isfinite, model.energy.values())):
        return []  # older runs have not measured it
    ordered = [gaps[one].mean for one in ones]
    table = [
        "## Weights of parameters",
        "",
        f"The correlation of each signal with the gap over the entries below {100 * SMALL_GAP:g} %, of the ranks and "
        "linear. Parameters are weighted by their elements times a power of the energy of an entry of the gradient.",
        "",
        *header(["signal", *(f"power {power:g}" for power in POWERS)]),
    ]
    for name, of in KINDS.items():
        cells = []
        for power in POWERS:
            values = [fmean(model.mean(line, of, power) for line in seen[one]) for one in ones]
            linear = float(np.corrcoef(values, ordered)[0, 1]) if np.std(values) else math.nan
            cells.append(f"{_two_digits(rank_correlation(values, ordered))}, {_two_digits(linear)}")
        table.append(row([name, *cells]))
    return [*table, ""]


def _by_kind(
    ones: Sequence[Key],
    gaps: Mapping[Key, Interval],
    seen: Mapping[Key, Sequence[Line]],
    model: Model,
    signals: Iterable[str],
) -> list[str]:
    """The rank correlation of signals at one kind of parameter with the gap, a row for each kind."""
    of_kind = {name: KINDS[name] for name in signals if name in KINDS}
    table = header(["kind", "entries", *of_kind])
    for kind in sorted(model.elements):
        # an engine may leave a kind as it is, and a gradient of zeros has no cosine
        own = [one for one in ones if seen[one] and all("cosine" in x["fidelity"].get(kind, {}) for x in seen[one])]
        ordered = [gaps[one].mean for one in own]
        alone = model.only(kind)
        values = [[fmean(alone.mean(line, of) for line in seen[one]) for one in own] for of in of_kind.values()]
        table.append(row([kind, f"{len(own)}", *(_two_digits(rank_correlation(one, ordered)) for one in values)]))
    return table


def _by_entropy(lines: Sequence[Line]) -> list[str]:
    """The noise of rounding that rate-distortion theory gives by the entropy, and what was measured, by kind."""
    deficits: dict[str, float] = {}  # how far the entropy of a kind lies below that of normal values, in nats
    for line in lines:
        for stage in stages(line) if line["engine"] == "dense" else ():
            for kind in kinds(line, stage):
                normal, own = (statistic(line, stage, kind, f"{one}_entropy")[1] for one in ("gaussian", "histogram"))
                deficits.setdefault(kind, float((normal - own).mean()))
    rounded: dict[str, Mapping[str, Mapping[str, float]]] = {}  # by format, of the run that rounds most kinds
    for line in lines:
        if line["engine"] in LOST and len(line.get("fidelity", ())) > len(rounded.get(line["engine"], ())):
            rounded[line["engine"]] = line["fidelity"]
    formats = [name for name in sorted(rounded) if LOST[name] > 0]
    known = sorted(kind for kind in deficits if any("cosine" in rounded[name].get(kind, {}) for name in formats))
    if not known:
        return []
    table = [
        "",
        "## Bits by entropy",
        "",
        "How many times the noise of normal values rounding makes of each kind. *By theory*: what rate-distortion "
        "theory gives at equal bits, from the entropy alone. R(D) = h - ½ log 2πeD, so it is e to minus twice the nats "
        "by which the entropy lies below that of normal values (a histogram of the local gradients of the dense run, "
        "mean over its windows). The other columns are measured.",
        "",
        *header(["kind", "entropy below normal (nats)", "by theory", *formats]),
    ]
    for kind in known:
        cells = [f"{deficits[kind]:.2f}", f"{math.exp(-2 * deficits[kind]):.3f}"]
        for name in formats:
            cosine = rounded[name].get(kind, {}).get("cosine")
            cells.append("–" if cosine is None else f"{(1 / cosine**2 - 1) / noise_of_format(name):.2f}")
        table.append(row([kind, *cells]))
    return table


def _two_digits(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"


def _value(name: str, seen: Mapping[str, float]) -> float:
    return seen.get(name, math.nan)


def _distance(name: str, seen: Mapping[str, float]) -> float:
    return 1 - seen.get(name, math.nan)


def _noise(seen: Mapping[str, float]) -> float:
    return 1 / seen.get("cosine_of_descent", math.nan) ** 2 - 1


# of one kind of parameter
KINDS: Mapping[str, Kind] = {
    "noise of descent": _noise,
    "noise of descent by rate": partial(_value, "noise_by_rate"),
    "1 - cosine": partial(_distance, "cosine"),
    "1 - cosine of update": partial(_distance, "cosine_of_update"),
    "1 - cosine of descent": partial(_distance, "cosine_of_descent"),
    "1 - cosine of Adam's update": partial(_distance, "cosine_of_adam"),
    "delay": partial(_value, "delay"),
    "late": partial(_value, "late"),
    "late of update": partial(_value, "late_of_update"),
    "lag": partial(_value, "lag"),
}


def _mean(of: Kind, power: float = 0.0) -> Signal:
    return lambda line, model: model.mean(line, of, power)


def _mean_residual(line: Line, model: Model) -> float:
    seen = [value for window in line["windows"] for value in window["residual"] if value is not None]
    return fmean(seen) if seen else math.nan


# of a run
SIGNALS: Mapping[str, Signal] = {
    "noise of descent by rate, by energy": _mean(KINDS["noise of descent by rate"], power=1.0),
    "noise of descent, by energy": _mean(_noise, power=1.0),
    **{name: _mean(of) for name, of in KINDS.items()},
    "residual": _mean_residual,
}


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's, of values without ties, of the pairs that have both; NaN of fewer than three."""
    pairs = [pair for pair in zip(first, second, strict=True) if all(map(math.isfinite, pair))]
    if len(pairs) < 3:
        return math.nan
    one, other = (np.argsort(np.argsort(values)).astype(float) for values in zip(*pairs, strict=True))
    return float(np.corrcoef(one, other)[0, 1])
