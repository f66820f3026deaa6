"""What a model needs on its cluster: Megatron builds each pipeline stage on the meta device."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tools.launching.checks import check
from tools.launching.configs import Cluster, LaunchError, Model, method_flags, split_flags

if TYPE_CHECKING:
    from edgc.compress.sent_bytes import SentBytes
    from edgc.config import EDGCConfig
    from edgc.specs import Parameter

VOCABULARY = 50257  # GPT-2's byte-pair encoding


@dataclass(frozen=True)
class StageNeeds:
    """A GPU of one pipeline stage. Memory in bytes.

    Bytes of a step: ``sent`` for gradients by rank, ``dense`` for Megatron's own; of updated weights ``gathered`` by
    Megatron and ``gathered_by_edgc``, in the format of its settings; ``messages`` to other stages.
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
    gathered_by_edgc: float
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
    given = [*split_flags(cluster.flags, cluster.name), *split_flags(model.flags, model.name)]
    flags = [*given, *method_flags(method, model), *extra]
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

    from edgc.config import RankPolicy
    from megatron.edgc.arguments import config_from_args
    from megatron.edgc.messages.costs import message_shape
    from megatron.edgc.recipes.pretrain import parse
    from megatron.edgc.run import value_bytes
    from megatron.edgc.session import Session

    if cluster.compute_capability is not None:
        major, minor = divmod(round(cluster.compute_capability * 10), 10)
        torch.cuda.get_device_capability = lambda *args, **kwargs: (major, minor)
        properties: Any = SimpleNamespace(name=cluster.gpu, major=major, minor=minor)
        torch.cuda.get_device_properties = lambda *args, **kwargs: properties
    tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCABULARY), "--mock-data"]
    sys.argv = ["pretrain_gpt.py", *flags, *tokenizer, "--edgc"]
    args = parse(on_cpu=cluster.gpu == "none")
    requested = config_from_args(args)
    assert requested is not None  # --edgc is among the flags
    config = Session(requested, args).config
    if args.num_experts:
        raise LaunchError("--num-experts: only tools/plan.py counts experts")
    if config.rank_policy is RankPolicy.NONE:
        raise LaunchError("the engine dense has no ranks to show; the table of every other method has its bytes")
    description = gpt_config_from_args(args)
    # Only shapes are wanted: local layers have those of Transformer Engine's, and nothing is drawn at random.
    description.transformer_impl = "local"
    description.use_cpu_initialization = True
    description.perform_initialization = description.persist_layer_norm = False
    description.gradient_accumulation_fusion = False
    description.virtual_pipeline_model_parallel_size = None  # a whole stage is built, with all of its chunks
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
        stages.append(_stage_needs(stage, part, args, config, ranks, activations, messages))
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
        gradient_bytes=value_bytes(args),
        link_gbps=cluster.link_gbps,
        stages=tuple(stages),
    )


def _messages(stage: int, stages: int, chunks: int) -> int:
    """How many messages a stage, counted from 0, sends for each micro-batch: both ways, but at the pipeline's ends."""
    return 2 * chunks - (stage == 0) - (stage == stages - 1)


def _stage_needs(
    stage: int, part: Any, args: Namespace, config: EDGCConfig, ranks: Sequence[int], activations: int, messages: float
) -> StageNeeds:
    import torch

    from edgc.comm.collectives import all_reduce_bytes
    from edgc.comm.wire import wire
    from edgc.compress.sent_bytes import sent_bytes
    from edgc.plan.run import Run
    from edgc.plan.selection import select
    from edgc.plan.stages import StageKey, StageKind, dense_because
    from megatron.edgc.compatibility import replicas
    from megatron.edgc.embedding import COPIES
    from megatron.edgc.run import repeatable, value_bytes
    from megatron.edgc.stages import describe, is_tied

    parameters = {
        parameter: describe("", name, parameter, is_tied(part)) for name, parameter in part.named_parameters()
    }
    elements = sum(parameter.elements for parameter in parameters.values())
    half = args.params_dtype != torch.float32
    copies = replicas(args)
    gradient = value_bytes(args)
    owners = copies if args.use_distributed_optimizer else 1

    tied = None  # the copy of an embedding that is summed with another stage's
    if args.pipeline_model_parallel_size > 1 and not args.untie_embeddings_and_output_weights:
        tied = parameters.get(part.shared_embedding_or_output_weight())
    tied_bytes = 0.0 if tied is None else all_reduce_bytes(tied.elements * gradient, COPIES)
    # summed over all its copies by one low-rank reduction
    fused = tied if config.pipeline.fuse_embedding_sync else None

    run = Run(
        iterations=1,
        replicas=copies,
        pipeline_stages=args.pipeline_model_parallel_size,
        value_bytes=gradient,
        scatters=args.use_distributed_optimizer,
    )
    never = dense_because(StageKey(StageKind.LAYERS, stage), config, run)

    def sent(reduced: Iterable[Parameter], rank: int, processes: int, run: Run) -> SentBytes:
        return sent_bytes(select(reduced, config, rank), config, processes, run)

    layers = [parameter for parameter in parameters.values() if parameter is not fused]

    def at(rank: int) -> float:
        own = sent(layers, rank, copies, run).at_rank(None if never else rank)
        if fused is None:
            return own + tied_bytes
        return own + sent([fused], rank, COPIES * copies, replace(run, scatters=False)).at_rank(rank)

    rounded = config.formats.weights.format
    per_weight = 2.0 if half else 4.0
    from_others = elements * (copies - 1) / copies if args.use_distributed_optimizer else 0.0  # of the weights
    dense = sent(parameters.values(), min(ranks), copies, run).host + tied_bytes
    return StageNeeds(
        layers=len(part.decoder.layers),
        parameters=elements,
        weights=elements * (2 if half else 4),
        gradients=elements * gradient,
        optimizer=elements * (12 if half else 8) // owners,
        activations=activations,
        edgc=_state(list(parameters.values()), config, ranks, repeatable(args))
        + (0 if rounded is None else 2 * elements // copies),  # the own shard as the others have it
        sent={
            "dense": dense,
            **{str(rank): at(rank) for rank in ranks},
        },
        gathered=from_others * per_weight,
        gathered_by_edgc=from_others * (per_weight if rounded is None else wire(rounded).bytes_per_value()),
        messages=messages,
    )


def _state(parameters: Sequence[Parameter], config: EDGCConfig, ranks: Sequence[int], twice: bool) -> int:
    """Memory of errors and factors; ``twice``: with the state before the step."""
    from edgc.comm.wire import wire
    from edgc.compress.engines.powersgd import STORED
    from edgc.plan.by_volume.choices import rest_format
    from edgc.plan.selection import select

    selection = select(parameters, config, min(ranks))
    fed_back = selection.matrix_elements
    if not wire(rest_format(config)).exact:
        fed_back += selection.other_elements
    factor = sum(STORED.tensor_bytes(max(ranks) * min(matrix.rows, matrix.cols)) for matrix in selection.matrices)
    error = wire(config.formats.error_dtype).tensor_bytes(fed_back)
    # a step replaces all errors and one factor of each matrix
    return error * (1 + twice) + factor * (config.basis_cycle + twice)
