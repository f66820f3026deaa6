"""What a model of configs/models/ needs on its cluster: parameters, memory of a GPU, and bytes of a step.

    python tools/describe.py configs/models/gpt2_12.1b.yaml [MORE ...] [--cluster h100_64] [--ranks 32 128]
        [--write docs/paper-runs.md] [flags of pretrain_gpt.py]

No GPU is needed. Megatron checks the arguments as on that cluster; then each pipeline stage is built by Megatron on the
meta device, of which only shapes exist. With ``--write`` the tables take the place of those between two comments in
that file, and the figures go to a JSON file of its name.

- weights, gradients, optimizer: exact, by the types that the flags choose; Adam. Activations: Megatron's own estimate
  for the first stage, which has most. EDGC: errors and kept factors at the largest of the ranks, twice where Megatron
  may skip a step or run it again (a loss scale, checks of the loss): then EDGC keeps the state before the step. What
  NCCL, CUDA and the allocator take comes on top.
- bytes of a step: those that one process sends for its stage's gradients: Megatron's reduction, and low rank in the
  formats of the method at each rank, each with the sum of a tied embedding between the first and the last stage; and
  beside them the distributed optimizer's updated weights and the messages to other stages, as Megatron sends them.
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import shlex
import sys
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from tools.documents import replace_tables  # noqa: E402
from tools.launch import CLUSTERS, MODELS, Cluster, LaunchError, Model, check, method_flags, read  # noqa: E402

VOCABULARY = 50257  # GPT-2's byte-pair encoding
TOLERANCE = 0.01  # between a model's size and its name
GIB = 2**30
START = "<!-- tools/describe.py -->"


@dataclass(frozen=True)
class StageNeeds:
    """A GPU of one pipeline stage. Memory in bytes.

    Bytes of a step: ``sent`` for gradients by rank, ``dense`` for Megatron's own; ``gathered`` of updated weights and
    ``messages`` to other stages.
    """

    layers: int
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    edgc: int
    sent: dict[str, float]
    gathered: float
    messages: float

    @property
    def memory(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.edgc


@dataclass(frozen=True)
class Needs:
    """A model on a cluster. ``parameters`` as stored: a pipeline holds a tied embedding twice."""

    model: str
    title: str
    cluster: str
    gpu: str
    memory_gib: float | None
    billions: float | None
    parameters: int
    processes: int
    parallel: dict[str, int]
    micro_batches: int
    message_bytes: float
    gradient_bytes: int  # of a value
    link_gbps: float | None
    stages: tuple[StageNeeds, ...]


def needs(model: Model, cluster: Cluster, method: str, ranks: Sequence[int], extra: Sequence[str]) -> Needs:
    """Build a model's stages. Megatron keeps its arguments for the whole process: call this once in each."""
    flags = [*shlex.split(cluster.flags), *shlex.split(model.flags), *method_flags(method, model), *extra]
    processes = cluster.nodes * cluster.gpus_per_node
    check(model, cluster, processes, flags)
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            return _needs(model, cluster, flags, ranks)
    except SystemExit as error:  # the argument parser's way to say what is wrong
        raise LaunchError(f"{model.name} on {cluster.name}: {output.getvalue().strip().splitlines()[-1]}") from error
    except Exception as error:  # Megatron's validation raises whatever an assert gives
        frame = traceback.extract_tb(error.__traceback__)[-1]
        reason = " ".join(str(error).split()) or f"{type(error).__name__} at {frame.line}"
        raise LaunchError(f"{model.name} on {cluster.name}: {reason}") from error


def _needs(model: Model, cluster: Cluster, flags: Sequence[str], ranks: Sequence[int]) -> Needs:
    processes = cluster.nodes * cluster.gpus_per_node
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(processes), CUDA_DEVICE_MAX_CONNECTIONS="1")
    from megatron.edgc.compatibility import check_megatron
    from megatron.edgc.recipes import cpu

    check_megatron()
    cpu.redirect()
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.theoretical_memory_usage import (
        compute_activation_memory,
        compute_activation_memory_without_sp,
    )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron.edgc.arguments import config_from_args
    from megatron.edgc.message_costs import message_shape
    from megatron.edgc.recipes.pretrain import parse
    from megatron.edgc.stages import gradient_bytes
    from megatron.edgc.training import Session

    if cluster.compute_capability is not None:
        major, minor = divmod(round(cluster.compute_capability * 10), 10)
        torch.cuda.get_device_capability = lambda *args, **kwargs: (major, minor)
        torch.cuda.get_device_properties = lambda *args, **kwargs: SimpleNamespace(
            name=cluster.gpu, major=major, minor=minor
        )
    tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCABULARY), "--mock-data"]
    sys.argv = ["pretrain_gpt.py", *flags, *tokenizer, "--edgc"]
    args = parse(on_cpu=cluster.gpu == "none")
    requested = config_from_args(args)
    assert requested is not None  # --edgc is among the flags
    config = Session(requested, args).config
    description = gpt_config_from_args(args)
    # Only shapes are wanted: local layers have those of Transformer Engine's, and nothing is drawn at random.
    description.transformer_impl = "local"
    description.use_cpu_initialization = True
    description.perform_initialization = description.persist_layer_norm = False
    description.gradient_accumulation_fusion = False
    builder = description.get_builder_cls()(description)

    pipeline = args.pipeline_model_parallel_size
    estimate = compute_activation_memory if args.sequence_parallel else compute_activation_memory_without_sp
    activations = round(estimate(args, get_num_microbatches()))
    rows, cols = message_shape(args)
    bytes_per_value = 4 if args.params_dtype == torch.float32 else 2
    message_bytes = float(get_num_microbatches() * rows * cols * bytes_per_value)
    stages = []
    for stage in range(pipeline):
        dist.init_process_group("fake", rank=stage * processes // pipeline, world_size=processes, store=FakeStore())
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size,
            pipeline,
            context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            create_gloo_process_groups=False,
        )
        with torch.device("meta"):
            part = builder.build_model(
                ProcessGroupCollection.use_mpu_process_groups(),
                pre_process=stage == 0,
                post_process=stage == pipeline - 1,
            )
        messages = message_bytes * _messages(stage, pipeline, args.virtual_pipeline_model_parallel_size or 1)
        stages.append(_stage_needs(part, args, config, ranks, activations, messages))
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return Needs(
        model=model.name,
        title=model.title,
        cluster=cluster.name,
        gpu=cluster.gpu,
        memory_gib=cluster.memory_gib,
        billions=model.billions,
        parameters=args.tensor_model_parallel_size * sum(stage.parameters for stage in stages),
        processes=processes,
        parallel={
            "tensor": args.tensor_model_parallel_size,
            "pipeline": pipeline,
            "context": args.context_parallel_size,
            "data": args.data_parallel_size,
        },
        micro_batches=get_num_microbatches(),
        message_bytes=message_bytes,
        gradient_bytes=gradient_bytes(args),
        link_gbps=cluster.link_gbps,
        stages=tuple(stages),
    )


def _messages(stage: int, stages: int, chunks: int) -> int:
    """How many messages a stage, counted from 0, sends for each micro-batch: both ways, but at the pipeline's ends."""
    return 2 * chunks - (stage == 0) - (stage == stages - 1)


def _stage_needs(
    part: Any, args: Namespace, config: Any, ranks: Sequence[int], activations: int, messages: float
) -> StageNeeds:
    import torch

    from edgc.comm.collectives import all_reduce_bytes
    from edgc.compress.probe import cost_in_bytes
    from edgc.plan.allocation import allocate
    from edgc.plan.controller import StageCost
    from megatron.edgc.embedding import COPIES
    from megatron.edgc.stages import describe, gradient_bytes
    from megatron.edgc.training import repeatable

    parameters = {parameter: describe("", name, parameter) for name, parameter in part.named_parameters()}
    elements = sum(parameter.elements for parameter in parameters.values())
    half = args.params_dtype != torch.float32
    copies = args.data_parallel_size * args.context_parallel_size
    gradient = gradient_bytes(args)
    owners = copies if args.use_distributed_optimizer else 1

    tied = None  # the copy of an embedding that is summed with another stage's
    if args.pipeline_model_parallel_size > 1 and not args.untie_embeddings_and_output_weights:
        tied = parameters.get(part.shared_embedding_or_output_weight())
    again = 0.0 if tied is None else all_reduce_bytes(tied.elements * gradient, COPIES)
    fused = tied is not None and config.fuse_embedding_sync
    own = [parameter for parameter in parameters.values() if not (fused and parameter is tied)]

    def cost(those: Sequence[Any], processes: int, scatters: bool) -> StageCost:
        return cost_in_bytes(allocate(those, config, min(ranks)), config, processes, scatters, half=gradient == 2)

    compressed = [cost(own, copies, args.use_distributed_optimizer)]
    if fused:
        compressed.append(cost([tied], COPIES * copies, False))
    dense = cost(list(parameters.values()), copies, args.use_distributed_optimizer).host_seconds + again
    return StageNeeds(
        layers=len(part.decoder.layers),
        parameters=elements,
        weights=elements * (2 if half else 4),
        gradients=elements * gradient,
        optimizer=elements * (12 if half else 8) // owners,
        activations=activations,
        edgc=_state(list(parameters.values()), config, ranks, repeatable(args)),
        sent={
            "dense": dense,
            **{str(rank): sum(one.seconds(rank) for one in compressed) + (not fused) * again for rank in ranks},
        },
        gathered=elements * (2 if half else 4) * (copies - 1) / copies if args.use_distributed_optimizer else 0.0,
        messages=messages,
    )


def _state(parameters: Sequence[Any], config: Any, ranks: Sequence[int], twice: bool) -> int:
    """Memory of errors and factors; ``twice``: with the state before the step."""
    from edgc.comm.wire import wire
    from edgc.compress.engines.powersgd import STORED
    from edgc.plan.allocation import allocate

    allocation = allocate(parameters, config, min(ranks))
    fed_back = sum(matrix.rows * matrix.cols for matrix in allocation.matrices)
    if not wire(config.rest_wire).exact:
        fed_back += allocation.rest_elements
    factor = sum(STORED.tensor_bytes(max(ranks) * min(matrix.rows, matrix.cols)) for matrix in allocation.matrices)
    error: int = wire(config.error_dtype).tensor_bytes(fed_back)
    # a step replaces all errors and one factor of each matrix
    return error * (1 + twice) + factor * (config.basis_cycle + twice)


def table(found: Needs) -> str:
    """The needs of one model as Markdown."""
    ranks = [rank for rank in found.stages[0].sent if rank != "dense"]
    parallel = " x ".join(f"{name} {size}" for name, size in found.parallel.items())
    size = f"{found.parameters / 1e9:.3f} billion parameters as stored"
    if found.billions is not None:
        size += f" ({found.parameters / 1e9 / found.billions - 1:+.1%} of {found.billions:g})"
    lines = [
        f"### {found.title} on {found.processes} x {found.gpu}",
        "",
        f"{size}; {parallel}; {found.micro_batches} micro-batches a step. Memory of a GPU in GiB; MB that it sends in "
        "a step: for gradients (with a tied embedding's sum between stages; in brackets: how many times fewer than "
        "dense, and than all that a dense step sends) and for weights and messages.",
        "",
        "| stage | layers | parameters | weights | gradients | optimizer | activations | EDGC | sum | dense |"
        + "".join(f" rank {rank} |" for rank in ranks)
        + " weights, messages |",
        "|" + "---|" * (11 + len(ranks)),
    ]
    for number, stage in enumerate(found.stages, start=1):
        memory = (stage.weights, stage.gradients, stage.optimizer, stage.activations, stage.edgc, stage.memory)
        dense, others = stage.sent["dense"], stage.gathered + stage.messages
        sent = "".join(
            f" {stage.sent[rank] / 1e6:,.0f} ({dense / max(stage.sent[rank], 1):.1f}x, in all "
            f"{(dense + others) / max(stage.sent[rank] + others, 1):.1f}x) |"
            for rank in ranks
        )
        lines.append(
            f"| {number} | {stage.layers} | {stage.parameters / 1e6:,.0f} M | "
            + " | ".join(f"{part / GIB:.1f}" for part in memory)
            + f" | {dense / 1e6:,.0f} |{sent} {stage.gathered / 1e6:,.0f}, {stage.messages / 1e6:,.0f} |"
        )
    most = max(stage.memory for stage in found.stages) / GIB
    room = f" of {found.memory_gib:g} GiB ({most / found.memory_gib:.0%})" if found.memory_gib else ""
    lines += ["", f"Most of a GPU's memory: {most:.1f} GiB{room}."]
    if found.parallel["pipeline"] > 1:
        lines[-1] += f" Messages to each neighbouring stage: {found.message_bytes / 1e6:,.0f} MB a step and direction."
    mean = {key: sum(stage.sent[key] for stage in found.stages) / len(found.stages) for key in ("dense", ranks[0])}
    others = sum(stage.gathered + stage.messages for stage in found.stages) / len(found.stages)
    in_all = (mean["dense"] + others) / (mean[ranks[0]] + others)
    lines[-1] += (
        f" Mean of all GPUs at rank {ranks[0]}: {mean['dense'] / mean[ranks[0]]:.1f}x fewer bytes of gradients "
        f"({mean['dense'] / mean[ranks[0]] * 2 / found.gradient_bytes:.1f}x than bf16 ones), {in_all:.1f}x in all."
    )
    if found.link_gbps:
        dense, low = (max(stage.sent[key] for stage in found.stages) for key in ("dense", ranks[0]))
        seconds = [8 * sent / (found.link_gbps * 1e9) for sent in (dense, low)]
        lines[-1] += (
            f" At {found.link_gbps:g} Gbit/s, without latency and overlap, gradients take {seconds[0]:.3f} s dense and "
            f"{seconds[1]:.3f} s at rank {ranks[0]}."
        )
    return "\n".join(lines)


def misnamed(found: Needs) -> str | None:
    """What is wrong with a model's name, if it is further from its size than 1 %."""
    if found.billions is None or abs(found.parameters / 1e9 / found.billions - 1) <= TOLERANCE:
        return None
    return f"{found.model}: {found.parameters / 1e9:.3f} billion parameters are more than 1 % from {found.billions:g}"


def main(argv: list[str] | None = None) -> int:
    """Print the tables; returns the exit status."""
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help="file in configs/models/, or a name there")
    parser.add_argument("--cluster", help="name in configs/clusters/, or a file (default: that of the model)")
    parser.add_argument("--method", default="edgc", help="name in configs/methods.yaml (default: edgc)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[32, 128], help="ranks to show (default: 32 128)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the tables between this file's two comments")
    options, extra = parser.parse_known_args(argv)
    found = []
    try:
        with ProcessPoolExecutor(
            1, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1
        ) as processes:
            for name in options.models:
                model = read(Model, MODELS, name)
                cluster = read(Cluster, CLUSTERS, options.cluster or model.cluster)
                work = partial(needs, model, cluster, options.method, options.ranks, extra)
                found.append(processes.submit(work).result())
    except LaunchError as error:
        print(f"describe: error: {error}", file=sys.stderr)
        return 2
    tables = "\n\n".join(table(one) for one in found)
    print(tables)
    if options.write is not None:
        replace_tables(options.write, START, tables)
        raw = json.dumps([asdict(one) for one in found], indent=1)
        options.write.with_suffix(".json").write_text(raw + "\n", encoding="utf-8")
    wrong = [message for message in map(misnamed, found) if message]
    for message in wrong:
        print(f"describe: error: {message}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
