"""Table and plot of a list of runs: loss gap against volume reduction. Used by ``tools/frontier.py``."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import LogLocator, NullFormatter  # noqa: E402

# Two-sided 95 % quantiles of Student's t distribution, by degrees of freedom.
T_95 = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
# Okabe and Ito's colours, which colour-blind readers can tell apart; markers say the same.
FAMILIES = {
    "low rank": ("#D55E00", "o", ("powersgd", "alternating")),
    "rounding": ("#0072B2", "s", ("bf16", "int8", "int4", "int3", "int2", "onebit", "loco")),
    "sparse": ("#009E73", "^", ("topk", "randomk")),
    "dense": ("#555555", "D", ("dense",)),
}

EMBEDDING_SUM = "embedding sum counted"  # the change before which bytes lack what Megatron sums between stages

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and the half width of its 95 % confidence interval: infinite for one seed."""

    mean: float
    half_width: float
    seeds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        count = len(values)
        if count < 2:
            return cls(values[0], math.inf, count)
        quantile = T_95[count - 1] if count <= len(T_95) else 1.96
        return cls(fmean(values), quantile * stdev(values) / math.sqrt(count), count)

    def percent(self) -> str:
        """``+0.25 % ± 0.10``."""
        width = f" ± {100 * self.half_width:.2f}" if math.isfinite(self.half_width) else ""
        return f"{100 * self.mean:+.2f} %{width}"


@dataclass(frozen=True)
class Entry:
    """One entry of a list in one setting, over its seeds. ``gap`` is relative to the dense run of the same seed.

    Runs that today's code would not give again are an entry apart, by what their flags and preset said: ``old`` is why.
    """

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
    return f"{line['model']}, DP {line['data_parallel']}{pipeline}, {line['iterations']} iterations"


def entries(lines: Sequence[Line]) -> list[Entry]:
    """The entries of all settings, most bytes first. Runs that are ``left_out`` are not in them."""
    references = _references(lines)
    groups: dict[tuple[str, str, str, bool], list[Line]] = {}
    for line in lines:
        if not left_out(line, lines):
            groups.setdefault((setting(line), line["name"], line.get("other", ""), bool(old(line))), []).append(line)
    found = []
    for (where, name, _, _), group in groups.items():
        pairs = [(line, references[where, line["seed"]]) for line in sorted(group, key=lambda line: int(line["seed"]))]
        gaps = [line["val_loss"] / dense["val_loss"] - 1 for line, dense in pairs]
        found.append(
            Entry(
                where,
                name,
                group[0]["engine"],
                max(map(old, group), key=len),  # changes come one after another
                Interval.of(gaps),
                tuple((line["seed"], gap) for (line, _), gap in zip(pairs, gaps, strict=True)),
                fmean(_fewer(dense["dp_bytes"], line["dp_bytes"]) for line, dense in pairs),
                fmean(_fewer(total_bytes(dense), total_bytes(line)) for line, dense in pairs),
                fmean(line["step_seconds"] for line in group),
                tuple(sorted({_commit(line) for line in group})),
                *(
                    _mean([dense[key] / line[key] for line, dense in pairs if key in line and key in dense])
                    for key in ("param_bytes", "pp_bytes")
                ),
                state=max(
                    (line["state_per_parameter"] for line in group if "state_per_parameter" in line), default=None
                ),
            )
        )
    marked = [replace(entry, on_front=not any(_beats(other, entry) for other in found)) for entry in found]
    return sorted(marked, key=lambda entry: (entry.setting, entry.reduction, entry.gap.mean))


def _references(lines: Sequence[Line]) -> dict[tuple[str, int], Line]:
    """The dense runs by setting and seed."""
    return {(setting(line), line["seed"]): line for line in lines if line["name"] == "dense" and "defect" not in line}


def old(line: Line) -> str:
    """Why today's code would not give this line again; empty if it would."""
    return "; ".join(f"{what}: {line[key]}" for key, what in (("other", "with"), ("before", "before")) if line.get(key))


def left_out(line: Line, lines: Sequence[Line]) -> str:
    """Why a run is in no entry: a defect that is written in its line, or no dense run to set it against; else empty."""
    if "defect" in line:
        return str(line["defect"])
    dense = _references(lines).get((setting(line), line["seed"]))
    if dense is None:
        return "there is no dense run of its seed"
    counted = {EMBEDDING_SUM in one.get("before", "") for one in (line, dense)}
    return "" if len(counted) == 1 else "it and the dense run of its seed do not count the same bytes"


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _beats(other: Entry, entry: Entry) -> bool:
    """Whether ``other`` has no more bytes, to within 1 %, and no more loss, and is better in one."""
    if other.setting != entry.setting:
        return False
    no_worse = other.reduction >= 0.99 * entry.reduction and other.gap.mean <= entry.gap.mean
    return no_worse and (other.reduction > 1.01 * entry.reduction or other.gap.mean < entry.gap.mean)


def total_bytes(line: Line) -> float:
    """Of gradients, gathered weights and messages between stages."""
    return float(line["dp_bytes"] + line.get("param_bytes", 0) + line.get("pp_bytes", 0))


def _fewer(dense: float, sent: float) -> float:
    """How many times fewer; 1 where one process has none to send."""
    return dense / sent if sent else 1.0


def _commit(line: Line) -> str:
    """Its first seven digits; a + where the checkout had local changes."""
    return str(line["commit"])[:7] + "+" * str(line["commit"]).endswith("+")


def difference(lines: Sequence[Line], first: str, second: str) -> dict[tuple[str, bool], tuple[Interval, float]]:
    """How much lower the loss of ``first`` is than that of ``second``, relative, and its gradient bytes over its.

    By setting, pairs of which one run is old apart from the others.
    """
    runs = {(setting(line), line["name"], line["seed"]): line for line in lines if not left_out(line, lines)}
    pairs: dict[tuple[str, bool], list[tuple[Line, Line]]] = {}
    for (where, name, seed), line in runs.items():
        if name == first and (where, second, seed) in runs:
            other = runs[where, second, seed]
            pairs.setdefault((where, bool(old(line) or old(other))), []).append((line, other))
    return {
        key: (
            Interval.of([1 - a["val_loss"] / b["val_loss"] for a, b in both]),
            fmean(a["dp_bytes"] / b["dp_bytes"] for a, b in both),
        )
        for key, both in pairs.items()
    }


def markdown(
    name: str, title: str, lines: Sequence[Line], comparisons: Sequence[tuple[str, str]], missing: Sequence[str] = ()
) -> str:
    """The list's page: a table for each setting, the comparisons, and what the runs ran on."""
    page = [f"# {title}", ""]
    page += [
        "Made by `tools/frontier.py` of all runs of these entries in [results.jsonl](results.jsonl), every seed.",
        "Gap: validation loss against the dense run of the same seed, mean over seeds ± half the 95 % confidence",
        "interval (Student's t, paired by seed; none for one seed), and by seed. Fewer bytes: those that the dense run",
        "sent for gradients over those sent, the whole run with its warm-up; than bf16: if the dense run had sent its",
        "gradients in bf16; in all: gradients, gathered weights and messages between stages. ● marks the Pareto front.",
        "State, where it was logged: bytes a parameter that EDGC keeps on a GPU. Step times are medians on shared CPU",
        "cores over loopback: they say nothing about a cluster. An old row is of runs that would not be the same",
        "today: its last column says why.",
        "",
        f"![Loss gap against volume reduction]({name}.png)",
        "",
    ]
    found = entries(lines)
    for where in dict.fromkeys(entry.setting for entry in found):
        here = [line for line in lines if setting(line) == where]
        page += [f"## {where}", "", *_table([entry for entry in found if entry.setting == where], here), ""]
        page += [f"Flags of all{_whose(text, here)} runs: `{text}`" for text in _shared(here)]
        page.append("")
    if comparisons:
        page += ["## Side by side", "", "| | against | setting | loss lower by | bytes |", "|---|---|---|---|---|"]
        for first, second in comparisons:
            page += [
                f"| {first}{', old' * is_old} | {second} | {where} | {gain.percent()} | {size:.2f}x |"
                for (where, is_old), (gain, size) in difference(lines, first, second).items()
            ]
        page.append("")
    flags = {(line["name"], line["flags"]) for line in lines}
    page += ["## Flags", "", "| entry | flags |", "|---|---|"]
    page += [f"| {entry} | `{text}` |" for entry, text in sorted(flags)]
    page.append("")
    if dropped := [(line, why) for line in lines if (why := left_out(line, lines))]:
        page += ["## Left out", "", "| entry | setting | seed | loss | commit | why |", "|---|---|---|---|---|---|"]
        page += [
            f"| {line['name']} | {setting(line)} | {line['seed']} | {line['val_loss']:.4f} | {_commit(line)} | {why} |"
            for line, why in dropped
        ]
        page.append("")
    if missing:
        page += [f"Not run yet: {'; '.join(missing)}.", ""]
    return "\n".join([*page, *provenance(lines), ""])


def _table(listed: Sequence[Entry], lines: Sequence[Line]) -> list[str]:
    """The table of one setting; columns that say nothing there are left out."""
    half = 1.0 if any("--grad-reduce-in-bf16" in text for text in _shared(lines)) else 0.5
    cells = [
        {
            "": "●" if entry.on_front else "",
            "entry": entry.name,
            "fewer bytes": entry.fewer(),
            "than bf16": f"{half * entry.reduction:.1f}x",
            "in all": f"{entry.total:.1f}x",
            f"gap to dense in {precision(lines)}": entry.gap.percent(),
            "by seed (%)": ", ".join(f"{seed}: {100 * gap:+.2f}" for seed, gap in entry.by_seed),
            "state": "-" if entry.state is None else f"{entry.state:.2f}",
            "s/step": f"{entry.step_seconds:.2f}",
            "commit": ", ".join(entry.commits),
            "old": entry.old,
        }
        for entry in listed
    ]
    if all(entry.weights is None and entry.messages is None for entry in listed):
        cells = [{key: cell for key, cell in row.items() if key != "in all"} for row in cells]
    if all(entry.state is None for entry in listed):
        cells = [{key: cell for key, cell in row.items() if key != "state"} for row in cells]
    if not any(entry.old for entry in listed):
        cells = [{key: cell for key, cell in row.items() if key != "old"} for row in cells]
    rows = [list(cells[0]), ["---"] * len(cells[0]), *(list(row.values()) for row in cells)]
    return [f"| {' | '.join(row)} |" for row in rows]


def _shared(lines: Sequence[Line]) -> list[str]:
    """The flags that all runs of a setting had, those of today first."""
    return list(dict.fromkeys(line["settings"] for line in sorted(lines, key=lambda line: bool(old(line)))))


def _whose(text: str, lines: Sequence[Line]) -> str:
    """`` old`` for flags that no other runs have."""
    return "" if any(line["settings"] == text and not old(line) for line in lines) else " old"


def precision(lines: Sequence[Line]) -> str:
    """What the dense runs of a setting compute in."""
    kinds = {kind for text in _shared(lines) for kind in ("bf16", "fp16") if f"--{kind}" in text.split()}
    return " and ".join(sorted(kinds)) or "fp32"


def provenance(lines: Sequence[Line]) -> list[str]:
    """What the runs ran on."""
    machines = sorted({line["machine"] for line in lines})
    versions = sorted({", ".join(f"{key} {value}" for key, value in line["versions"].items()) for line in lines})
    commits = sorted({_commit(line) for line in lines})
    return [f"Machine: {'; '.join(machines)}. Versions: {'; '.join(versions)}. Commits: {', '.join(commits)}."]


def draw(lines: Sequence[Line]) -> bytes:
    """The plot as PNG: one panel a setting."""
    found = [entry for entry in entries(lines) if entry.engine != "dense"]
    settings = list(dict.fromkeys(entry.setting for entry in found)) or [""]
    figure, panels = plt.subplots(
        1, len(settings), figsize=(6.5 * len(settings), 5.5), layout="constrained", squeeze=False
    )
    for where, axes in zip(settings, panels[0], strict=True):
        _panel(axes, where, [entry for entry in found if entry.setting == where])
    return to_png(figure)


def to_png(figure: Figure) -> bytes:
    """The figure as PNG, without the version of what drew it; closes it."""
    picture = io.BytesIO()
    figure.savefig(picture, dpi=90, metadata={"Software": None})
    plt.close(figure)
    return picture.getvalue()


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
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(alpha=0.3, which="both")
    axes.axhline(0, color="#555555", linewidth=1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
