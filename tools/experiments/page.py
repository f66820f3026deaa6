"""The page of a list of runs: tables of loss gaps and volume reductions."""

from collections.abc import Mapping, Sequence

from tools.experiments.entries import (
    Entry,
    Line,
    TrendPoint,
    commit,
    difference,
    entries,
    left_out,
    old,
    setting,
    trend,
)
from tools.experiments.store import links
from tools.shared.changes import respelled
from tools.shared.markdown import header, row


def markdown(
    name: str,
    title: str,
    lines: Sequence[Line],
    comparisons: Sequence[tuple[str, str]],
    missing: Sequence[str] = (),
    trends: Mapping[str, Mapping[str, float]] | None = None,
) -> str:
    """The list's page: a table for each setting, the comparisons, and what the runs ran on.

    ``trends``: what to set the gap against, in tables and the picture; of each the values, by setting.
    """
    page = [f"# {title}", ""]
    page += [
        "With this page you can compare methods by loss and by bytes sent, and look up the flags of each run. [The",
        "frontier](README.md) says what these rows show.",
        "",
        f"Made by `tools/frontier.py` of all runs of these entries, every seed. Raw lines: {links(lines)}.",
        "",
        "- ● marks the Pareto front: no row that is not old has both a smaller gap and fewer bytes.",
        "- *Fewer bytes*: how many times fewer bytes of gradients than the dense run sent, over the whole run with its",
        "  warm-up. *Than bf16*: the same if the dense run had sent its gradients in bf16. *In all*: of gradients,",
        "  gathered weights and messages between stages together.",
        "- *Gap*: validation loss against the dense run of the same seed, mean over seeds ± half the 95 % confidence",
        "  interval (Student's t, paired by seed; none for one seed). *By seed*: the gap of each seed.",
        "- *State*, where it was logged: bytes a parameter that EDGC keeps on a process.",
        "- *s/step*: the median step time on shared CPU cores over loopback. It says nothing about a cluster.",
        "- *Old*: why today's code would not give the row again ([labels](lists.md#old-rows)).",
        "",
        f"![Loss gap against {', '.join(trends or ['volume reduction'])}]({name}.png)",
        "",
    ]
    if trends:
        page += [
            "These tables and the picture have the seeds that an entry has in all rows of a table. The second number "
            "of a cell is the change of the gap from the first row with a value, by seed.",
            "",
        ]
    for what, values in (trends or {}).items():
        page += [*_trend_table(what, trend(lines, values)), ""]
    found = entries(lines)
    for where in dict.fromkeys(entry.setting for entry in found):
        here = [line for line in lines if setting(line) == where]
        page += [f"## {where}", "", *_table([entry for entry in found if entry.setting == where], here), ""]
        page += [f"Flags of {_whose(text, here)}: `{text}`" for text in _shared(here)]
        page.append("")
    if comparisons:
        page += ["## Side by side", "", "| | against | setting | loss lower by | bytes |", "|---|---|---|---|---|"]
        for first, second in comparisons:
            page += [
                row(
                    (
                        f"{first}{', old' * first_old}",
                        f"{second}{', old' * second_old}",
                        where,
                        gain.percent(),
                        f"{size:.2f}x",
                    )
                )
                for (where, first_old, second_old), (gain, size) in difference(lines, first, second).items()
            ]
        page.append("")
    # as today's code takes them; those of an old row may mean something else today
    flags = {(line["name"] + ", old" * bool(old(line)), respelled(line["flags"])) for line in lines}
    page += ["## Flags", "", *header(["entry", "flags"])]
    page += [row((entry, f"`{text}`")) for entry, text in sorted(flags)]
    page.append("")
    return "\n".join([*page, *not_shown(lines, missing), *provenance(lines), ""])


def not_shown(lines: Sequence[Line], missing: Sequence[str]) -> list[str]:
    """The runs that a page leaves out, with the reason, and those that were not made."""
    page = []
    if dropped := [(line, why) for line in lines if (why := left_out(line, lines))]:
        page += ["## Left out", "", *header(["entry", "setting", "seed", "loss", "commit", "why"])]
        page += [
            row((line["name"], setting(line), line["seed"], f"{line['val_loss']:.4f}", commit(line), why))
            for line, why in dropped
        ]
        page.append("")
    return page + ([f"Not run yet: {'; '.join(missing)}.", ""] if missing else [])


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
    empty = {
        "in all": all(entry.weights is None and entry.messages is None for entry in listed),
        "state": all(entry.state is None for entry in listed),
        "old": not any(entry.old for entry in listed),
    }
    columns = [column for column in cells[0] if not empty.get(column)]
    return [row(columns), row("---" for _ in columns), *(row(one[column] for column in columns) for one in cells)]


def _trend_table(what: str, points: Mapping[str, Mapping[float, TrendPoint]]) -> list[str]:
    """A row for each value, a column for each entry."""
    values = sorted({value for own in points.values() for value in own})
    cells = [[_trend_cell(own.get(value)) for own in points.values()] for value in values]
    return [*header([what, *points]), *(row([f"{value:g}", *one]) for value, one in zip(values, cells, strict=True))]


def _trend_cell(point: TrendPoint | None) -> str:
    if point is None:
        return "not run"
    return point.gap.percent() + (f"; {point.change.percent()}" if point.change else "")


def _shared(lines: Sequence[Line]) -> list[str]:
    """The flags that all runs of a setting had, those of today first."""
    return list(dict.fromkeys(line["settings"] for line in sorted(lines, key=lambda line: bool(old(line)))))


def _whose(text: str, lines: Sequence[Line]) -> str:
    """Whose flags these are: of all runs, or of these entries, where runs of today had others as well."""
    today = [line for line in lines if not old(line)]
    own = [line for line in today if line["settings"] == text]
    if not own:
        return "all old runs"
    if len(own) == len(today):
        return "all runs"
    return ", ".join(dict.fromkeys(line["name"] for line in own))


def precision(lines: Sequence[Line]) -> str:
    """What the dense runs of a setting compute in."""
    kinds = {kind for text in _shared(lines) for kind in ("bf16", "fp16") if f"--{kind}" in text.split()}
    return " and ".join(sorted(kinds)) or "fp32"


def provenance(lines: Sequence[Line]) -> list[str]:
    """What the runs ran on."""
    machines = sorted({line["machine"] for line in lines})
    versions = sorted({", ".join(f"{key} {value}" for key, value in line["versions"].items()) for line in lines})
    commits = sorted({commit(line) for line in lines})
    return [f"Machine: {'; '.join(machines)}. Versions: {'; '.join(versions)}. Commits: {', '.join(commits)}."]
