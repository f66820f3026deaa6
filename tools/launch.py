"""Check the shapes of a training run and print its command for scripts/pretrain.sh.

    python tools/launch.py --model gpt2_12.1b --method edgc --data runs/data/openwebtext --run runs/gpt2_12.1b
        [--cluster h100_64] [--nodes N] [--processes-per-node N] [--seed N] [--record] [--data-placeholder]
        [flags of pretrain_gpt.py]

A model is a file of configs/models/, a cluster one of configs/clusters/, a method a line of configs/methods.yaml.
Prints assignments for the shell: ``arguments``, what follows ``pretrain_gpt.py``, an array; ``nodes`` and
``processes_per_node``; ``iterations`` of the whole run; its ``folder``; ``notes``, lines to show, an array. What cannot
work is refused with one line, before a GPU is touched. Python 3.9 is enough, with or without PyYAML.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from tools import flat_yaml  # noqa: E402

try:
    import yaml

    NOT_YAML: type[Exception] = yaml.YAMLError
except ImportError:
    yaml = None  # type: ignore[assignment]
    NOT_YAML = ValueError

MODELS = REPOSITORY / "configs" / "models"
CLUSTERS = REPOSITORY / "configs" / "clusters"
METHODS = REPOSITORY / "configs" / "methods.yaml"
ATTEMPTS = "attempts.jsonl"  # in a run's folder: a line for every time that it was started
BF16_CAPABILITY = 8.0  # of bf16 and of Transformer Engine: Ampere and later
PACKAGES = ("edgc", "torch", "megatron-core", "transformer-engine", "apex", "numpy")
TRACKER = "latest_checkpointed_iteration.txt"  # Megatron's, in a folder of checkpoints
SHAPE_FLAGS = (
    *("--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads"),
    *("--max-position-embeddings", "--tokenizer-type"),
)
STORED_BYTES = 14  # a parameter in a checkpoint: weight, fp32 copy and Adam's two moments
ERROR_BYTES = 4  # and the sum of EDGC's errors
PLACEHOLDER = "/path/to/data"
DATA_FLAGS = ("--data-path", "--train-data-path", "--data-args-path", "--per-split-data-args-path", "--mock-data")


class LaunchError(Exception):
    """A run that cannot work; the message is one line that names the value and the rule."""


class DataError(LaunchError):
    """A run whose data is not there."""


@dataclass(frozen=True)
class Model:
    """What is trained: shape, parallel sizes, optimizer. ``cluster``: the one it is meant for; ``billions``: of
    parameters, by its name; ``methods``: flags that a method has to have otherwise at this size.
    """

    name: str
    title: str
    cluster: str
    flags: str
    billions: float | None = None
    methods: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cluster:
    """What it is trained on. ``link_gbps``: Gbit/s of one process to other nodes; ``gpu``: none for CPUs."""

    name: str
    gpu: str
    nodes: int
    gpus_per_node: int
    flags: str
    compute_capability: float | None = None
    memory_gib: float | None = None
    link_gbps: float | None = None


T = TypeVar("T", Model, Cluster)


def read(kind: type[T], folder: Path, name: str) -> T:
    """The file ``name``.yaml of a folder, or any file by its path. Raises ``LaunchError``."""
    path = Path(name) if name.endswith(".yaml") else folder / f"{name}.yaml"
    content = _mapping(path)
    known = {key.name: key for key in fields(kind) if key.name != "name"}
    if unknown := sorted(content.keys() - known.keys()):
        raise LaunchError(f"{path}: unknown key {', '.join(unknown)}; keys are {', '.join(known)}")
    needed = {name for name, key in known.items() if key.default is MISSING and key.default_factory is MISSING}
    if missing := sorted(needed - content.keys()):
        raise LaunchError(f"{path}: lacks {', '.join(missing)}")
    for key, value in content.items():
        rule, holds = _RULES[str(known[key].type)]
        if not holds(value):
            raise LaunchError(f"{path}: {key} = {value!r}: must be {rule}")
    return kind(**content, name=path.stem)


def _positive(value: Any, kinds: Any) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool) and value > 0


def _texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for pair in value.items() for text in pair)


_RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("text", lambda value: isinstance(value, str)),
    "int": ("a positive whole number", lambda value: _positive(value, int)),
    "float | None": ("a positive number", lambda value: _positive(value, (int, float))),
    "dict[str, str]": ("names with text", _texts),
}


def _mapping(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        others = ", ".join(sorted(file.stem for file in path.parent.glob("*.yaml")))
        raise LaunchError(f"{path}: there is no such file; those that are there: {others}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"{path}: {error}") from error
    try:
        content = flat_yaml.mapping(text) if yaml is None else yaml.safe_load(text)
    except NOT_YAML as error:
        raise LaunchError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise LaunchError(f"{path}: must hold keys and values")
    return content


def method_flags(name: str, model: Model) -> list[str]:
    """The flags of a method, with what this model changes."""
    methods = _mapping(METHODS)
    if name not in methods:
        raise LaunchError(f"{METHODS}: there is no method {name}; methods are {', '.join(methods)}")
    return shlex.split(f"{methods[name]} {model.methods.get(name, '')}")


@dataclass(frozen=True)
class Launch:
    """A run that has passed the checks. ``arguments`` follow ``pretrain_gpt.py``; ``notes`` are lines for people."""

    folder: Path
    arguments: tuple[str, ...]
    nodes: int
    processes_per_node: int
    iterations: int
    notes: tuple[str, ...]


def shape_of(arguments: Sequence[str]) -> Namespace:
    """The flags that the checks below need; of one that is given twice the last counts, as for Megatron."""
    parser = ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    sizes = {"tensor-model-parallel-size": 1, "pipeline-model-parallel-size": 1, "context-parallel-size": 1}
    for name, default in {**sizes, "micro-batch-size": 1, "global-batch-size": None}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("train-iters", "train-samples", "save-interval", "save-retain-interval"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--step-batch-size-schedule", nargs="*")
    parser.add_argument("--transformer-impl", default="transformer_engine")
    parser.add_argument("--distributed-backend", default="nccl")
    parser.add_argument("--fp8-format")
    for name in ("bf16", "sequence-parallel", "edgc-cpu"):
        parser.add_argument(f"--{name}", action="store_true")
    try:
        return parser.parse_known_args(arguments)[0]
    except argparse.ArgumentError as error:
        raise LaunchError(str(error)) from None


def check(model: Model, cluster: Cluster, world_size: int, arguments: Sequence[str]) -> Namespace:
    """Raise ``LaunchError`` where model, cluster and number of processes do not go together; the flags looked at."""
    shape = shape_of(arguments)
    parts = {
        "tensor": shape.tensor_model_parallel_size,
        "pipeline": shape.pipeline_model_parallel_size,
        "context": shape.context_parallel_size,
    }
    replica = 1
    for size in parts.values():
        replica *= size
    if replica < 1 or world_size % replica:
        product = " x ".join(f"{name} {size}" for name, size in parts.items())
        raise LaunchError(f"{world_size} processes do not divide by {replica} ({product} of {model.name})")
    copies = world_size // replica
    for name in ("micro_batch_size", "global_batch_size", "save_interval", "save_retain_interval"):
        if (size := getattr(shape, name)) is not None and size < 1:
            raise LaunchError(f"--{name.replace('_', '-')} {size}: must be at least 1")
    batch = shape.global_batch_size or shape.micro_batch_size * copies
    if batch % (shape.micro_batch_size * copies):
        raise LaunchError(
            f"--global-batch-size {batch} does not divide by {shape.micro_batch_size * copies} "
            f"(--micro-batch-size {shape.micro_batch_size} x {copies} data-parallel ranks)"
        )
    if bool(shape.train_iters) == bool(shape.train_samples):
        raise LaunchError(f"{model.name}: exactly one of --train-iters and --train-samples must be given")
    if shape.save_interval and shape.save_retain_interval and shape.save_retain_interval % shape.save_interval:
        raise LaunchError(
            f"--save-retain-interval {shape.save_retain_interval} is no multiple of "
            f"--save-interval {shape.save_interval}"
        )
    if cluster.compute_capability is not None and (refused := too_new(shape, cluster.gpu, cluster.compute_capability)):
        raise LaunchError(refused)
    if shape.train_iters is None:
        if shape.step_batch_size_schedule:
            raise LaunchError(
                "--step-batch-size-schedule with --train-samples: only Megatron can count the iterations; give "
                "--train-iters"
            )
        shape.train_iters = shape.train_samples // batch
    return shape


def too_new(shape: Namespace, gpu: str, capability: float) -> str | None:
    """What among the flags a GPU of this compute capability cannot do; None if nothing."""
    if shape.edgc_cpu or capability >= BF16_CAPABILITY:
        return None
    given = {
        "--bf16": shape.bf16,
        "--transformer-impl transformer_engine": shape.transformer_impl == "transformer_engine",
        f"--fp8-format {shape.fp8_format}": shape.fp8_format is not None,
    }
    refused = [flag for flag, wanted in given.items() if wanted]
    return (
        f"{', '.join(refused)} on {gpu}: needs compute capability {BF16_CAPABILITY}, not {capability}"
        if refused
        else None
    )


def kept_checkpoints(model: Model, method: str, shape: Namespace) -> str:
    """How many checkpoints a run leaves, and how large they are where the model's size is known."""
    kept = shape.save_retain_interval or shape.save_interval
    number = -(-shape.train_iters // kept)
    which = f"every {kept}th iteration" + (" and the newest one" if kept > shape.save_interval else "")
    note = f"checkpoints: one every {shape.save_interval} iterations; those of {which} are kept, {number} at the end"
    if model.billions is not None:
        size = model.billions * (STORED_BYTES + (ERROR_BYTES if method != "dense" else 0))
        note += f", about {size:.0f} GB each, {number * size / 1000:.1f} TB in all"
    return note


def data_flags(prefix: str | None, given: Sequence[str]) -> list[str]:
    """Where data and tokenizer are, by tools/preprocess_data.py; nothing if ``given`` has flags that say so."""
    if any(flag in given for flag in DATA_FLAGS):
        return []
    if prefix is None:
        raise DataError(f"no data: set DATA to a data set's prefix, or give one of {', '.join(DATA_FLAGS)}")
    meta = Path(f"{prefix}_meta.json")
    try:
        known = json.loads(meta.read_text(encoding="utf-8"))
        kind, tokenizer = known["tokenizer_type"], meta.with_name(known["tokenizer_model"])
        splits = list(known["splits"])
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"data {prefix}: {meta} is missing or damaged ({type(error).__name__}): "
            "make the data with tools/preprocess_data.py, or name it by Megatron's own flags"
        ) from error
    if "--tokenizer-model" in given:
        flags = []
    elif tokenizer.exists():
        flags = ["--tokenizer-type", kind, "--tokenizer-model", str(tokenizer)]
    else:
        raise DataError(
            f"data {prefix}: its tokenizer {tokenizer} is not there: give --tokenizer-type {kind} --tokenizer-model"
        )
    for split in splits:
        infix, flag = ("", "--data-path") if split == "all" else (f"_{split}", f"--{split}-data-path")
        path = f"{prefix}{infix}_text_document"
        if absent := [path + ending for ending in (".idx", ".bin") if not Path(path + ending).is_file()]:
            raise DataError(f"data {prefix}: there is no {absent[0]}")
        flags += [flag, path]
    return [*flags, "--data-cache-path", str(meta.parent / "cache")]


def placeholder_flags(prefix: str, given: Sequence[str]) -> list[str]:
    """The flags as they may look once the data is there."""
    tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "gpt2"]
    return [*([] if "--tokenizer-model" in given else tokenizer), "--data-path", f"{prefix}_text_document"]


def plan(options: Namespace, extra: Sequence[str]) -> Launch:
    """The whole command of a run. Raises ``LaunchError``."""
    model = read(Model, MODELS, options.model)
    cluster = read(Cluster, CLUSTERS, options.cluster or model.cluster)
    nodes = options.nodes or cluster.nodes
    processes = options.processes_per_node or cluster.gpus_per_node
    folder = options.run / options.method
    seed = str(options.seed)
    extra = [part for flag in extra for part in (flag.split("=", 1) if flag.startswith("--") else [flag])]
    if own := [flag for flag in ("--save", "--load") if flag in extra]:
        raise LaunchError(f"{', '.join(own)}: checkpoints are in the run's folder; set RUN to another one")
    notes = [f"{model.title}, {options.method}: {nodes} x {processes} processes, {cluster.name} (GPU: {cluster.gpu})"]
    try:
        data = data_flags(options.data, extra)
    except DataError as error:
        if not options.data_placeholder:
            raise
        prefix = options.data or PLACEHOLDER
        data = placeholder_flags(prefix, extra)
        notes.append(f"{error}; {prefix}_text_document and GPT-2's tokenizer stand in its place")
    arguments = [
        *shlex.split(cluster.flags),
        *shlex.split(model.flags),
        *method_flags(options.method, model),
        *data,
        *("--save", str(folder / "checkpoints"), "--load", str(folder / "checkpoints")),
        *("--tensorboard-dir", str(folder / "tensorboard"), "--edgc", "--edgc-log-dir", str(folder)),
        *("--seed", seed, "--edgc-seed", seed, "--exit-signal-handler"),
        *extra,
    ]
    shape = check(model, cluster, nodes * processes, arguments)
    if shape.save_interval is None:
        raise LaunchError(f"{model.name}: --save-interval must be given")
    notes.append(kept_checkpoints(model, options.method, shape))
    return Launch(folder, tuple(arguments), nodes, processes, shape.train_iters, tuple(notes))


def check_checkpoint(launch: Launch) -> None:
    """Raise ``LaunchError`` if the run's folder holds checkpoints of a model of another shape."""
    attempts = launch.folder / ATTEMPTS
    if not (launch.folder / "checkpoints" / TRACKER).is_file() or not attempts.is_file():
        return
    try:
        before = json.loads(attempts.read_text(encoding="utf-8").splitlines()[-1])["arguments"]
    except (ValueError, IndexError, KeyError):
        return  # cut short by a full disk; Megatron also compares the shapes
    for flag in SHAPE_FLAGS:
        known, wanted = (_last(flag, arguments) for arguments in (before, launch.arguments))
        if known != wanted:
            raise LaunchError(
                f"{launch.folder} has checkpoints of {flag} {known}, this run has {flag} {wanted}: "
                "set RUN to another folder"
            )


def _last(flag: str, arguments: Sequence[str]) -> str | None:
    places = [place for place, name in enumerate(arguments[:-1]) if name == flag]
    return arguments[places[-1] + 1] if places else None


def installed(package: str) -> str | None:
    """Its version; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def record(launch: Launch) -> None:
    """Add a line with the exact arguments and the versions that a run starts under to its folder."""
    try:
        git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=REPOSITORY, capture_output=True, text=True)
        commit = git.stdout.strip()
    except FileNotFoundError:  # as in a container
        commit = ""
    line: Mapping[str, Any] = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "processes": launch.nodes * launch.processes_per_node,
        "arguments": launch.arguments,
        "commit": commit or None,
        "python": sys.version.split()[0],
        "versions": {package: installed(package) for package in PACKAGES},
    }
    launch.folder.mkdir(parents=True, exist_ok=True)
    with (launch.folder / ATTEMPTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def main(argv: list[str] | None = None) -> int:
    """Check and print; returns the exit status."""
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", required=True, help="name in configs/models/, or a file")
    parser.add_argument("--method", required=True, help="name in configs/methods.yaml")
    parser.add_argument("--cluster", help="name in configs/clusters/, or a file (default: that of the model)")
    parser.add_argument("--data", help="prefix that tools/preprocess_data.py was given")
    parser.add_argument("--run", required=True, type=Path, help="folder in which the run gets one of the method's name")
    parser.add_argument("--nodes", type=int, help="nodes at hand (default: those of the cluster)")
    parser.add_argument("--processes-per-node", type=int, help="processes on each (default: the cluster's GPUs)")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--record", action="store_true", help=f"add the command to {ATTEMPTS} in the run's folder")
    parser.add_argument("--data-placeholder", action="store_true", help="go on without data, to show the command")
    options, extra = parser.parse_known_args(argv)
    try:
        launch = plan(options, extra)
        check_checkpoint(launch)
        if options.record:
            record(launch)
    except (LaunchError, OSError) as error:
        print(f"launch: error: {error}", file=sys.stderr)
        return 2
    print(f"folder={shlex.quote(str(launch.folder))}")
    print(f"arguments=({shlex.join(launch.arguments)})")
    print(f"nodes={launch.nodes}")
    print(f"processes_per_node={launch.processes_per_node}")
    print(f"iterations={launch.iterations}")
    print(f"notes=({shlex.join(launch.notes)})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
