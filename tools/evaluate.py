"""Zero-shot tasks of EleutherAI's lm_eval on exported models, side by side in one table.

    python tools/evaluate.py dense=runs/dense/hf edgc=runs/edgc/hf --output runs/zero_shot

writes ``zero_shot.json`` (all metrics with standard errors, versions, machine) and ``zero_shot.md`` (the table; of two
models with their difference). Models are folders that tools/export_hf.py, or any other tool, has written for Hugging
Face's transformers.
"""

import os
import platform
import sys
import warnings
from argparse import Namespace
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import _root  # noqa: F401

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("LMEVAL_LOG_LEVEL", "ERROR")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from tools.evaluation.page import markdown
from tools.evaluation.scores import summarise
from tools.export.record import read_record
from tools.shared.command import command_parser, reason, say_error
from tools.shared.files import write, write_json
from tools.shared.machine import device_name
from tools.shared.megatron import TRACKER

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
        if any(any(path.glob(mark)) for mark in (TRACKER, "mp_rank_*", "*.distcp")):
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
            missing[task] = reason(error)
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
    args.output.mkdir(parents=True, exist_ok=True)  # a folder that cannot be written ends the command here
    results: dict[str, Any] = {}
    for name, folder in models.items():
        results[name] = run(folder, tasks, manager, args)
        done = {known: models[known] for known in results}
        page = write_results(args, done, tasks, missing, results)  # after each: the next model may fail
    print(page)
    print(f"written: {args.output / 'zero_shot.md'}, {args.output / 'zero_shot.json'}")
    return True


def write_results(
    args: Namespace,
    models: Mapping[str, Path],
    tasks: Sequence[str],
    missing: Mapping[str, str],
    results: Mapping[str, Any],
) -> str:
    """Write both files of what lm_eval has given for these models; the page."""
    summary = {
        "models": {name: {"folder": str(folder), "export": read_record(folder)} for name, folder in models.items()},
        "tasks": tasks,
        "missing": missing,
        "limit": args.limit,
        "num_fewshot": 0,
        "batch_size": args.batch_size,
        "results": summarise(results),
        "lm_eval": {name: result["results"] for name, result in results.items()},
        "versions": {name: version(name) for name in PACKAGES} | {"python": platform.python_version()},
        "machine": device_name(args.device == "cuda"),
    }
    page = markdown(summary)
    write_json(args.output / "zero_shot.json", summary, default=str)
    write(args.output / "zero_shot.md", page.encode())
    return page


def main(argv: list[str] | None = None) -> int:
    """Evaluate the models in ``argv``; returns the exit status: 1 where no task could be evaluated."""
    parser = command_parser(__doc__)
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
    except (EvaluationError, OSError) as error:
        say_error("evaluate", error)
        return 2
    if not done:
        say_error("evaluate", "none of the tasks could be loaded")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
