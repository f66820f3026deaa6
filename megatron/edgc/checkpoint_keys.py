"""The keys under which a checkpoint holds the state of a process: where in the model it belongs."""

from argparse import Namespace
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from edgc.plan.run import Part
from megatron.edgc.stages import MegatronStage


def stage_key(stage: MegatronStage) -> str:
    """Of a stage's state, whatever the number of data-parallel processes."""
    key = stage.key
    if key.part is Part.EXPERTS:
        tensor = parallel_state.get_expert_tensor_parallel_rank()
        expert = parallel_state.get_expert_model_parallel_rank()
        return f"{key.id}-tp{tensor}-ep{expert}"
    return f"{key.id}-tp{parallel_state.get_tensor_model_parallel_rank()}"


def message_key() -> str:
    """Of what was left unsent of messages to other stages: one for each part of the model, as of ``stage_key``."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return f"messages{stage}-tp{parallel_state.get_tensor_model_parallel_rank()}"


def replica_group() -> dist.ProcessGroup:
    """The processes that hold the same part of the model."""
    group: dist.ProcessGroup = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return group


def parallel_sizes(args: Namespace) -> dict[str, int]:
    """The sizes that decide which parameters, and which parts of them, a process holds."""
    return {
        "tensor": args.tensor_model_parallel_size,
        "pipeline": args.pipeline_model_parallel_size,
        "virtual pipeline": args.virtual_pipeline_model_parallel_size or 1,
        "expert": args.expert_model_parallel_size,
        "expert tensor": args.expert_tensor_parallel_size or args.tensor_model_parallel_size,
    }


def in_words(parallel: dict[str, int]) -> str:
    """The same, for the user."""
    return ", ".join(f"{name}-parallel size {size}" for name, size in parallel.items())


def mean_bytes(counts: list[tuple[Any, ...]]) -> dict[str, list[float]]:
    """Over the processes, by stage."""
    by_stage: dict[str, list[tuple[float, ...]]] = {}
    for stage, *values in counts:
        by_stage.setdefault(stage, []).append(tuple(values))
    return {stage: [sum(column) / len(rows) for column in zip(*rows, strict=True)] for stage, rows in by_stage.items()}
