"""Zero-shot tasks of EleutherAI's lm_eval on exported models, side by side in one table.

    python tools/evaluate.py dense=runs/dense/hf edgc=runs/edgc/hf --output runs/zero_shot

writes ``zero_shot.json`` (all metrics with standard errors, versions, machine) and ``zero_shot.md`` (the table; of two
models with their difference). Models are folders that tools/export_hf.py, or any other tool, has written for Hugging
Face's transformers.
"""

import argparse
import json
import math
import os
import platform
import sys
import warnings
from argparse import Namespace
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
# lm_eval imports a package that has the name of this file: this folder must not be where Python looks first.
sys.path[:] = [str(REPOSITORY), *(path for path in sys.path if Path(path).resolve() != REPOSITORY / "tools")]
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("LMEVAL_LOG_LEVEL", "ERROR")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from tools.report import processor, write  # noqa: E402

TASKS = ("lambada_openai", "piqa", "winogrande", "hellaswag", "arc_easy", "arc_challenge", "race")
PACKAGES = ("lm_eval", "transformers", "tokenizers", "datasets", "torch")


class EvaluationError(Exception):
    """A model or task that cannot be evaluated; the message is one line that says why."""


def parse_models(given: Sequence[str]) -> dict[str, Path]:
    """``NAME=FOLDER`` arguments. Raises ``EvaluationError`` for a folder that transformers could not read."""
    models: dict[str, Path] = {}
    for pair in given:
        name, equals, folder = pair.partition("=")
        if not (name and equals and folder):
            raise EvaluationError(f"{pair}: is not NAME=FOLDER")
        if name in models:
            raise EvaluationError(f"{name}: is the name of two models")
        models[name] = path = Path(folder)
        if not path.is_dir():
            raise EvaluationError(f"{folder}: no such folder")
        if (path / "config.json").is_file():
            continue
        if any(any(path.glob(mark)) for mark in ("latest_checkpointed_iteration.txt", "mp_rank_*", "*.distcp")):
            raise EvaluationError(f"{folder}: is a Megatron checkpoint: export it first, with tools/export_hf.py")
        raise EvaluationError(f"{folder}: no config.json in it: not a Hugging Face model")
    return models


def available(manager: Any, tasks: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The tasks whose data can be had, and for the others the reason. Raises ``EvaluationError`` for unknown names."""
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        raise EvaluationError(f"lm_eval knows no task {', '.join(unknown)}; see --include-path")
    missing = {}
    for task in tasks:
        try:
            manager.load([task])
        except Exception as error:  # data sets come through many layers, each with errors of its own
            missing[task] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            print(f"evaluate: warning: {task}: its data cannot be loaded: {missing[task]}", file=sys.stderr)
    return [task for task in tasks if task not in missing], missing


def run(folder: Path, tasks: Sequence[str], manager: Any, args: Namespace) -> dict[str, Any]:
    """lm_eval's results of one model, with those of each document."""
    import lm_eval

    return dict(
        lm_eval.simple_evaluate(
            model="hf",
            model_args={"pretrained": str(folder), "dtype": "float32"},
            tasks=list(tasks),
            num_fewshot=0,
            batch_size=args.batch_size,
            device=args.device,
            limit=args.limit,
            bootstrap_iters=1000,  # for perplexities: an error known to 2 % will do, 100 times sooner than by default
            task_manager=manager,
        )
    )


def metrics(result: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, float | None]]:
    """Value and standard error by task and metric; the metric's filter is named where it is not the plain one."""
    found: dict[tuple[str, str], dict[str, float | None]] = {}
    for task, entries in result["results"].items():
        for key, value in entries.items():
            metric, comma, chosen = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = entries.get(f"{metric}_stderr,{chosen}")
            name = metric if chosen == "none" else key
            found[task, name] = {"value": value, "stderr": error if isinstance(error, int | float) else None}
    return found


def difference(first: Mapping[str, Any], second: Mapping[str, Any], task: str, name: str) -> dict[str, float | None]:
    """Second minus first. Both answered the same documents, so the standard error is that of the differences document
    by document; None where the metric is no mean over documents."""
    metric, _, chosen = name.partition(",")
    gap = metrics(second)[task, name]["value"] - metrics(first)[task, name]["value"]  # type: ignore[operator]

    def answers(result: Mapping[str, Any]) -> dict[Any, Any]:
        samples = result.get("samples", {}).get(task, [])
        return {s["doc_id"]: s.get(metric) for s in samples if s.get("filter", "none") == (chosen or "none")}

    ours, theirs = answers(first), answers(second)
    numbers = all(isinstance(value, int | float) for value in [*ours.values(), *theirs.values()])
    if len(ours) < 2 or ours.keys() != theirs.keys() or not numbers:
        return {"value": gap, "stderr": None}
    gaps = [float(theirs[document]) - float(ours[document]) for document in ours]
    if not math.isclose(fmean(gaps), gap, abs_tol=1e-9):
        return {"value": gap, "stderr": None}
    return {"value": gap, "stderr": stdev(gaps) / math.sqrt(len(gaps))}


def summarise(results: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each task and metric, with every model's value and, of two models, the second's minus the first's."""
    by_model = {name: metrics(result) for name, result in results.items()}
    first, *others = results
    rows = []
    for task, metric in by_model[first]:
        counts = results[first].get("n-samples", {}).get(task, {})
        row: dict[str, Any] = {
            "task": task,
            "version": results[first].get("versions", {}).get(task),
            "documents": counts.get("effective"),
            "metric": metric,
            "higher_is_better": results[first].get("higher_is_better", {}).get(task, {}).get(metric.partition(",")[0]),
            "models": {name: found[task, metric] for name, found in by_model.items()},
        }
        if len(others) == 1:
            row["difference"] = difference(results[first], results[others[0]], task, metric)
        rows.append(row)
    return rows


def markdown(summary: Mapping[str, Any]) -> str:
    """The table, with what a reader has to know about it."""
    names = list(summary["models"])
    paired = len(names) == 2
    head = ["task", "metric", "documents", *names, *([f"{names[1]} − {names[0]}"] if paired else [])]
    lines = [
        "# Zero-shot tasks",
        "",
        f"By `tools/evaluate.py` with lm_eval {summary['versions']['lm_eval']}, value ± standard error; ↑ more is "
        "better, ↓ less."
        + (" The error of a difference is that of the differences document by document." if paired else ""),
    ]
    if summary["limit"]:
        lines += ["", f"Only the first {summary['limit']} documents of each task: a trial, no result."]
    lines += ["", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in summary["results"]:
        better = {True: " ↑", False: " ↓"}.get(row["higher_is_better"], "")
        cells = [row["task"], row["metric"] + better, "" if row["documents"] is None else str(row["documents"])]
        cells += [measured(row["models"][name]) for name in names]
        if paired:
            cells.append(measured(row["difference"], signed=True))
        lines.append(f"| {' | '.join(cells)} |")
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


def evaluate(args: Namespace) -> bool:
    """Do what the command line asks for; whether any task could be evaluated. Raises ``EvaluationError``."""
    models = parse_models(args.models)
    tasks = list(dict.fromkeys(task for task in args.tasks.split(",") if task))
    if not tasks:
        raise EvaluationError("--tasks: names no task")
    if args.include_path is not None and not args.include_path.is_dir():
        raise EvaluationError(f"--include-path {args.include_path}: no such folder")
    try:
        import torch
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise EvaluationError(f"{error}: install this repository's extra 'evaluate'") from None
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    # lm_eval's own index is of 14,000 files, which takes a while to read: not for tasks of --include-path alone
    path = args.include_path and str(args.include_path)
    manager = TaskManager(include_path=path, include_defaults=False)
    if not set(tasks) <= set(manager.all_tasks):
        manager = TaskManager(include_path=path)
    tasks, missing = available(manager, tasks)
    if not tasks:
        return False
    results = {name: run(folder, tasks, manager, args) for name, folder in models.items()}
    summary = {
        "models": {name: {"folder": str(folder), "export": read_export(folder)} for name, folder in models.items()},
        "tasks": tasks,
        "missing": missing,
        "limit": args.limit,
        "num_fewshot": 0,
        "batch_size": args.batch_size,
        "results": summarise(results),
        "lm_eval": {name: result["results"] for name, result in results.items()},
        "versions": {name: version(name) for name in PACKAGES} | {"python": platform.python_version()},
        "machine": machine(args.device),
    }
    page = markdown(summary)
    args.output.mkdir(parents=True, exist_ok=True)
    write(args.output / "zero_shot.json", (json.dumps(summary, indent=2, default=str) + "\n").encode())
    write(args.output / "zero_shot.md", page.encode())
    print(page)
    print(f"written: {args.output / 'zero_shot.md'}, {args.output / 'zero_shot.json'}")
    return True


def read_export(folder: Path) -> dict[str, Any] | None:
    """What tools/export_hf.py says of the folder, if it has written it."""
    path = folder / "export.json"
    return dict(json.loads(path.read_text())) if path.is_file() else None


def machine(device: str) -> str:
    """What the models run on."""
    if device == "cpu":
        return f"{processor()}, {os.cpu_count()} cores"
    import torch

    return torch.cuda.get_device_name(device)


def main(argv: list[str] | None = None) -> int:
    """Evaluate the models in ``argv``; returns the exit status: 1 where no task could be evaluated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("models", nargs="+", metavar="NAME=FOLDER", help="a model's name in the table and its Hugging Face folder")
    add("--tasks", default=",".join(TASKS), help=f"lm_eval's names, with commas (default: {','.join(TASKS)})")
    add("--include-path", type=Path, metavar="FOLDER", help="of further tasks, lm_eval's YAML files")
    add("--limit", type=int, metavar="N", help="only the first N documents of each task (default: all)")
    add("--batch-size", type=int, default=8, metavar="N", help="sequences at once (default: 8)")
    add("--device", choices=("cpu", "cuda"), help="what the models run on (default: cuda where there is one)")
    add("--output", type=Path, required=True, metavar="FOLDER", help="folder to write")
    warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        done = evaluate(parser.parse_args(argv))
    except EvaluationError as error:
        print(f"evaluate: error: {error}", file=sys.stderr)
        return 2
    if not done:
        print("evaluate: error: none of the tasks could be loaded", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
