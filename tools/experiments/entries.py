"""Entries: the runs of a list over their seeds, against the dense runs and against each other."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

from tools.shared.changes import EMBEDDING_SUM
from tools.shared.intervals import Interval
from tools.shared.runs import times_fewer

Line = Mapping[str, Any]  # of the results
Key = tuple[str, str, str, bool]


@dataclass(frozen=True)
class Entry:
    """One entry of a list in one setting, over its seeds. ``gap`` is relative to the dense run of the same seed.

    Runs that today's code would not give again are an entry apart, by what their flags and preset said: ``old`` is why.
    """

    key: Key
    setting: str
    name: str
    engine: str
    old: str
    gap: Interval
    by_seed: tuple[tuple[int, float], ...]  # (seed, gap)
    reduction: float  # gradient bytes of the dense run over those of this one, whole run
    total: float  # the same of gradients, gathered weights and messages together
    step_seconds: float
    commits: tuple[str, ...]
    weights: float | None = None  # bytes of the dense run's gathered weights over those of this one, if there are any
    messages: float | None = None  # the same of messages between pipeline stages
    state: float | None = None  # bytes a parameter that is kept from step to step
    on_front: bool = False

    def fewer(self) -> str:
        """``27.8x``, with the distributed optimizer ``27.8x, weights 1.0x``, with a pipeline ``, messages 1.9x``."""
        others = (("weights", self.weights), ("messages", self.messages))
        return f"{self.reduction:.1f}x" + "".join(f", {what} {x:.1f}x" for what, x in others if x is not None)


def setting(line: Line) -> str:
    """What runs must have in common to be compared."""
    pipeline = f", PP {line['pipeline_parallel']}" if line["pipeline_parallel"] > 1 else ""
    gpu = ", GPU" if line.get("gpu") else ""
    return f"{line['model']}, DP {line['data_parallel']}{pipeline}, {line['iterations']} iterations{gpu}"


def key(line: Line) -> Key:
    """What the runs of one entry have in common."""
    return setting(line), line["name"], line.get("other", ""), bool(old(line))


def entries(lines: Sequence[Line]) -> list[Entry]:
    """The entries of all settings, most bytes first. Runs that are ``left_out`` are not in them."""
    references = _references(lines)
    groups: dict[Key, list[Line]] = {}
    for line in lines:
        if not left_out(line, lines):
            groups.setdefault(key(line), []).append(line)
    found = []
    for of_all, group in groups.items():
        where, name = of_all[:2]
        pairs = [(line, references[where, line["seed"]]) for line in sorted(group, key=lambda line: int(line["seed"]))]
        gaps = [line["val_loss"] / dense["val_loss"] - 1 for line, dense in pairs]
        found.append(
            Entry(
                key=of_all,
                setting=where,
                name=name,
                engine=group[0]["engine"],
                old=max(map(old, group), key=len),  # changes come one after another
                gap=Interval.of(gaps),
                by_seed=tuple((line["seed"], gap) for (line, _), gap in zip(pairs, gaps, strict=True)),
                reduction=fmean(times_fewer(dense["dp_bytes"], line["dp_bytes"]) for line, dense in pairs),
                total=fmean(times_fewer(total_bytes(dense), total_bytes(line)) for line, dense in pairs),
                step_seconds=fmean(line["step_seconds"] for line in group),
                commits=tuple(sorted({commit(line) for line in group})),
                weights=_reduction(pairs, "param_bytes"),
                messages=_reduction(pairs, "pp_bytes"),
                state=max(
                    (line["state_per_parameter"] for line in group if "state_per_parameter" in line), default=None
                ),
            )
        )
    today = [entry for entry in found if not entry.old]
    marked = [
        replace(entry, on_front=not entry.old and not any(_beats(other, entry) for other in today)) for entry in found
    ]
    return sorted(marked, key=lambda entry: (entry.setting, entry.reduction, entry.gap.mean))


@dataclass(frozen=True)
class TrendPoint:
    """The gap at one value of a trend. ``change``: by seed, from the gap at the smallest value; None there, and where
    the values have no seed in common.
    """

    gap: Interval
    change: Interval | None = None


def trend(lines: Sequence[Line], values: Mapping[str, float]) -> dict[str, dict[float, TrendPoint]]:
    """Of each compressed entry its gap by the value of the setting, smallest first; of older code as an entry apart.

    Only seeds that an entry has at all its values count, so that no two points differ by their seeds; all of them if
    it has none in common. ``values``: by setting.
    """
    found: dict[str, dict[float, Entry]] = {}
    here = [entry for entry in entries(lines) if entry.setting in values]
    for entry in sorted(here, key=lambda entry: values[entry.setting]):
        if entry.engine != "dense":
            value, name = values[entry.setting], f"{entry.name}, old" if entry.old else entry.name
            older = sum(own.startswith(name) and value in gaps for own, gaps in found.items()) if entry.old else 0
            found.setdefault(f"{name} ({1 + older})" if older else name, {})[value] = entry
    return {name: _of_common_seeds(own) for name, own in found.items()}


def _of_common_seeds(found: Mapping[float, Entry]) -> dict[float, TrendPoint]:
    common = set.intersection(*(set(dict(entry.by_seed)) for entry in found.values()))
    if not common:
        return {value: TrendPoint(entry.gap) for value, entry in found.items()}
    gaps = {value: [gap for seed, gap in entry.by_seed if seed in common] for value, entry in found.items()}
    first, *others = gaps
    points = {first: TrendPoint(Interval.of(gaps[first]))}
    for value in others:
        changes = [now - before for now, before in zip(gaps[value], gaps[first], strict=True)]
        points[value] = TrendPoint(Interval.of(gaps[value]), Interval.of(changes))
    return points


def _references(lines: Sequence[Line]) -> dict[tuple[str, int], Line]:
    """The dense runs by setting and seed."""
    return {(setting(line), line["seed"]): line for line in lines if line["name"] == "dense" and "defect" not in line}


def old(line: Line) -> str:
    """Why today's code would not give this line again; empty if it would."""
    return "; ".join(f"{what}: {line[key]}" for key, what in (("other", "with"), ("before", "before")) if line.get(key))


def left_out(line: Line, lines: Sequence[Line]) -> str:
    """Why a run is in no entry: a defect that is written in its line, or no dense run that it can be set against; else
    empty.
    """
    if "defect" in line:
        return str(line["defect"])
    dense = _references(lines).get((setting(line), line["seed"]))
    if dense is None:
        return "there is no dense run of its seed"
    if (EMBEDDING_SUM in line.get("before", "")) != (EMBEDDING_SUM in dense.get("before", "")):
        return "it and the dense run of its seed do not count the same bytes"
    if len({one["corpus"] for one in (line, dense) if "corpus" in one}) > 1:  # older lines do not say
        return "it and the dense run of its seed were not trained on the same data"
    if _of_host(line["settings"]) != _of_host(dense["settings"]):
        return "it and the dense run of its seed were not trained with the same settings"
    return ""


def _of_host(settings: str) -> set[tuple[str, ...]]:
    """Flags with their values, without EDGC's; of a flag that is given twice the last, which holds."""
    words = shlex.split(settings)
    starts = [place for place, word in enumerate(words) if word.startswith("--")]
    flags = {words[begin]: tuple(words[begin:end]) for begin, end in pairwise([*starts, len(words)])}
    return {flag for name, flag in flags.items() if not name.startswith("--edgc-")}


def _reduction(pairs: Sequence[tuple[Line, Line]], key: str) -> float | None:
    """Bytes of the dense runs over those of the others, mean over pairs; None where no pair counts such bytes."""
    ratios = [dense[key] / line[key] for line, dense in pairs if key in line and key in dense]
    return fmean(ratios) if ratios else None


def _beats(other: Entry, entry: Entry) -> bool:
    """Whether ``other`` has no more bytes, to within 1 %, and no more loss, and is better in one."""
    if other.setting != entry.setting:
        return False
    no_worse = other.reduction >= 0.99 * entry.reduction and other.gap.mean <= entry.gap.mean
    return no_worse and (other.reduction > 1.01 * entry.reduction or other.gap.mean < entry.gap.mean)


def total_bytes(line: Line) -> float:
    """Of gradients, gathered weights and messages between stages."""
    return float(line["dp_bytes"] + line.get("param_bytes", 0) + line.get("pp_bytes", 0))


def commit(line: Line) -> str:
    """Its first seven digits; a + where the checkout had local changes."""
    return str(line["commit"])[:7] + "+" * str(line["commit"]).endswith("+")


def difference(lines: Sequence[Line], first: str, second: str) -> dict[tuple[str, bool, bool], tuple[Interval, float]]:
    """How much lower the loss of ``first`` is than that of ``second``, relative, and its gradient bytes over its.

    By setting, and by whether the first and the second run is old.
    """
    runs = {(setting(line), line["name"], line["seed"]): line for line in lines if not left_out(line, lines)}
    pairs: dict[tuple[str, bool, bool], list[tuple[Line, Line]]] = {}
    for (where, name, seed), line in runs.items():
        if name == first and (where, second, seed) in runs:
            other = runs[where, second, seed]
            pairs.setdefault((where, bool(old(line)), bool(old(other))), []).append((line, other))
    return {
        key: (
            Interval.of([1 - a["val_loss"] / b["val_loss"] for a, b in both]),
            fmean(a["dp_bytes"] / b["dp_bytes"] for a, b in both),
        )
        for key, both in pairs.items()
    }


def line_label(line: Line, lines: Sequence[Line]) -> str:
    """The run's name, with its setting where the list has several."""
    name: str = line["name"]
    return name if len({setting(other) for other in lines}) == 1 else f"{name}, {setting(line)}"
