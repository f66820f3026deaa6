"""The whole command of a run."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.launching.checks import check
from tools.launching.configs import CLUSTERS, MODELS, Cluster, LaunchError, Model, method_flags, read, split_flags
from tools.launching.data_flags import DataError, data_flags, placeholder_flags
from tools.shared.megatron import data_path

STORED_BYTES = 14  # a parameter in a checkpoint: weight, fp32 copy and Adam's two moments
ERROR_BYTES = 4  # and the sum of EDGC's errors
PLACEHOLDER = "/path/to/data"


@dataclass(frozen=True)
class Launch:
    """A run that has passed the checks. ``arguments`` follow ``pretrain_gpt.py``; ``notes`` are lines for people."""

    folder: Path
    arguments: tuple[str, ...]
    nodes: int
    processes_per_node: int
    iterations: int
    notes: tuple[str, ...]


def plan(options: Namespace, extra: Sequence[str]) -> Launch:
    """The whole command of a run. Raises ``LaunchError``."""
    model = read(Model, MODELS, options.model)
    cluster = read(Cluster, CLUSTERS, options.cluster or model.cluster)
    nodes = options.nodes or cluster.nodes
    processes = options.processes_per_node or cluster.gpus_per_node
    if nodes < 1 or processes < 1:
        raise LaunchError(f"{nodes} x {processes} processes: there must be at least one of each")
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
        notes.append(f"{error}; {data_path(prefix, 'all')} and GPT-2's tokenizer stand in its place")
    arguments = [
        *split_flags(cluster.flags, cluster.name),
        *split_flags(model.flags, model.name),
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
    if options.method != "dense":
        notes += replicas_within_nodes(shape, nodes, processes)
    return Launch(folder, tuple(arguments), nodes, processes, shape.train_iters, tuple(notes))


def replicas_within_nodes(shape: Namespace, nodes: int, processes: int) -> list[str]:
    """A line where all replicas of a stage share a node, so that their reductions use no network."""
    pipeline = shape.pipeline_model_parallel_size
    stage = nodes * processes // pipeline
    alone = shape.tensor_model_parallel_size * shape.context_parallel_size == stage
    if nodes == 1 or pipeline == 1 or alone or shape.use_tp_pp_dp_mapping or processes % stage:
        return []
    return [
        f"all {stage} GPUs of a stage share a node, so its gradients use no network and there is little to gain from "
        "EDGC: --use-tp-pp-dp-mapping puts the replicas of a stage on different nodes (docs/paper-runs.md)"
    ]


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
