"""The table of scores as Markdown."""

from collections.abc import Mapping
from typing import Any

from tools.shared.markdown import header, row


def markdown(summary: Mapping[str, Any]) -> str:
    """The table, with what a reader has to know about it."""
    names = list(summary["models"])
    paired = len(names) == 2
    columns = ["task", "metric", "documents", *names, *([f"{names[1]} − {names[0]}"] if paired else [])]
    lines = [
        "# Zero-shot tasks",
        "",
        f"By `tools/evaluate.py` with lm_eval {summary['versions']['lm_eval']}, value ± standard error; ↑ more is "
        "better, ↓ less."
        + (" The error of a difference is that of the differences document by document." if paired else ""),
    ]
    if summary["limit"]:
        lines += ["", f"Only the first {summary['limit']} documents of each task: a check, no result."]
    lines += ["", *header(columns)]
    for score in summary["results"]:
        better = {True: " ↑", False: " ↓"}.get(score["higher_is_better"], "")
        cells = [score["task"], score["metric"] + better, "" if score["documents"] is None else str(score["documents"])]
        cells += [measured(score["models"][name]) for name in names]
        if paired:
            cells.append(measured(score["difference"], signed=True))
        lines.append(row(cells))
    lines += [""] + [f"- {name}: `{model['folder']}`{origin(model)}" for name, model in summary["models"].items()]
    lines += [f"- Missing: {task}, its data could not be loaded: {why}" for task, why in summary["missing"].items()]
    lines += [f"- Machine: {summary['machine']}", ""]
    return "\n".join(lines)


def measured(result: Mapping[str, Any], signed: bool = False) -> str:
    """``0.4200 ± 0.0110``; perplexities can be long numbers."""
    sign = "+" if signed else ""
    value, error = (
        None if number is None else f"{number:{sign}.4f}" if abs(number) < 1000 else f"{number:{sign}.4g}"
        for number, sign in ((result["value"], sign), (result["stderr"], ""))
    )
    return f"{value}" if error is None else f"{value} ± {error}"


def origin(model: Mapping[str, Any]) -> str:
    """Which checkpoint an export is of, where the folder says so."""
    export = model["export"]
    return f", checkpoint {export['checkpoint']}, {export['parameters']:,} parameters" if export else ""
