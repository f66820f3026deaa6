"""Table and plot of a list of runs: loss gap against volume reduction. Used by ``tools/frontier.py``."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    """One entry of a list in one setting, over its seeds. ``gap`` is relative to the dense run of the same seed."""

    setting: str
    name: str
    engine: str
    gap: Interval
    reduction: float  # bytes of the dense fp32 run over those of this one, whole run
    step_seconds: float
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
    """The entries of all settings, most bytes first. Runs without a dense run of their seed are left out."""
    references = {(setting(line), line["seed"]): line for line in lines if line["name"] == "dense"}
    dense = {key: line["val_loss"] for key, line in references.items()}
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        if (setting(line), line["seed"]) in dense:
            groups.setdefault((setting(line), line["name"]), []).append(line)
    found = [
        Entry(
            where,
            name,
            group[0]["engine"],
            Interval.of([line["val_loss"] / dense[where, line["seed"]] - 1 for line in group]),
            fmean(fewer_bytes(line) for line in group),
            fmean(line["step_seconds"] for line in group),
            fmean(references[where, line["seed"]]["param_bytes"] / line["param_bytes"] for line in group)
            if "param_bytes" in group[0]
            else None,
            _mean([line["pp_bytes_dense"] / line["pp_bytes"] for line in group if "pp_bytes" in line]),
            max((line["state_per_parameter"] for line in group if "state_per_parameter" in line), default=None),
        )
        for (where, name), group in groups.items()
    ]
    marked = [Entry(**{**vars(entry), "on_front": not any(_beats(other, entry) for other in found)}) for entry in found]
    return sorted(marked, key=lambda entry: (entry.setting, entry.reduction, entry.gap.mean))


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _beats(other: Entry, entry: Entry) -> bool:
    """Whether ``other`` has no more bytes, to within 1 %, and no more loss, and is better in one."""
    if other.setting != entry.setting:
        return False
    no_worse = other.reduction >= 0.99 * entry.reduction and other.gap.mean <= entry.gap.mean
    return no_worse and (other.reduction > 1.01 * entry.reduction or other.gap.mean < entry.gap.mean)


def fewer_bytes(line: Line) -> float:
    """How many times fewer data-parallel bytes than Megatron's own way; 1 where one rank has none to send."""
    return line["dp_bytes_dense"] / line["dp_bytes"] if line["dp_bytes"] else 1.0


def difference(lines: Sequence[Line], first: str, second: str) -> dict[str, tuple[Interval, float]]:
    """By setting: how much lower the loss of ``first`` is than that of ``second``, relative, and its bytes over its."""
    runs = {(setting(line), line["name"], line["seed"]): line for line in lines}
    pairs: dict[str, list[tuple[Line, Line]]] = {}
    for (where, name, seed), line in runs.items():
        if name == first and (where, second, seed) in runs:
            pairs.setdefault(where, []).append((line, runs[where, second, seed]))
    return {
        where: (
            Interval.of([1 - a["val_loss"] / b["val_loss"] for a, b in both]),
            fmean(fewer_bytes(b) / fewer_bytes(a) for a, b in both),
        )
        for where, both in pairs.items()
    }


def markdown(name: str, title: str, lines: Sequence[Line], comparisons: Sequence[tuple[str, str]]) -> str:
    """The list's page: a table for each setting, the comparisons, and what the runs ran on."""
    page = [f"# {title}", ""]
    page += [
        "Made by `tools/frontier.py`; raw lines in [results.jsonl](results.jsonl). Gap: validation loss against the",
        "dense fp32 run of the same seed, mean over seeds ± half the 95 % confidence interval (Student's t, paired by",
        "seed; none for one seed). Fewer bytes: data-parallel bytes of the dense run over those sent, the whole run",
        "with its warm-up. ● marks the Pareto front. State, where it was logged: bytes a parameter that EDGC keeps on",
        "a rank. Step times are medians on shared CPU cores over loopback: they say nothing about a cluster.",
        "",
        f"![Loss gap against volume reduction]({name}.png)",
        "",
    ]
    found = entries(lines)
    for where in dict.fromkeys(entry.setting for entry in found):
        listed = [entry for entry in found if entry.setting == where]
        columns = ["", "entry", "fewer bytes", "gap", "seeds", "state", "s/step"]
        rows = [
            [
                "●" if entry.on_front else "",
                entry.name,
                entry.fewer(),
                entry.gap.percent(),
                str(entry.gap.seeds),
                "-" if entry.state is None else f"{entry.state:.2f}",
                f"{entry.step_seconds:.2f}",
            ]
            for entry in listed
        ]
        if all(entry.state is None for entry in listed):
            for row in (columns, *rows):
                del row[5]
        page += [f"## {where}", ""]
        page += [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows)]
        page.append("")
    if comparisons:
        page += ["## Side by side", "", "| | against | setting | loss lower by | bytes |", "|---|---|---|---|---|"]
        for first, second in comparisons:
            page += [
                f"| {first} | {second} | {where} | {gain.percent()} | {size:.2f}x |"
                for where, (gain, size) in difference(lines, first, second).items()
            ]
        page.append("")
    flags = {(line["name"], line["flags"]) for line in lines}
    page += ["## Flags", "", "| entry | flags |", "|---|---|"]
    page += [f"| {entry} | `{text}` |" for entry, text in sorted(flags)]
    return "\n".join([*page, "", *provenance(lines), ""])


def provenance(lines: Sequence[Line]) -> list[str]:
    """What the runs ran on."""
    machines = sorted({line["machine"] for line in lines})
    versions = sorted({", ".join(f"{key} {value}" for key, value in line["versions"].items()) for line in lines})
    commits = sorted({line["commit"][:7] + "+" * line["commit"].endswith("+") for line in lines})
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
        members = [entry for entry in found if entry.engine in engines]
        if not members:
            continue
        axes.errorbar(
            [entry.reduction for entry in members],
            [100 * entry.gap.mean for entry in members],
            yerr=[100 * entry.gap.half_width if math.isfinite(entry.gap.half_width) else 0 for entry in members],
            fmt=marker,
            color=colour,
            elinewidth=1,
            capsize=2,
            label=family,
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
    axes.set(title=where, xlabel="data-parallel bytes, times fewer than dense fp32", ylabel="validation-loss gap (%)")
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
