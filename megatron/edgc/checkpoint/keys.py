"""Under which keys a checkpoint holds EDGC's state, and as what Megatron writes and reads it."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from edgc.plan.stages import StageKind
from megatron.edgc.stages import MegatronStage

ENTRY = "edgc"  # of the state dict that Megatron saves


def stage_key(stage: MegatronStage) -> str:
    """The key of a stage's state: where in the model it belongs, whatever the number of data-parallel processes."""
    key = stage.key
    if key.kind is StageKind.EXPERTS:
        tensor = parallel_state.get_expert_tensor_parallel_rank()
        expert = parallel_state.get_expert_model_parallel_rank()
        return f"{key.id}-tp{tensor}-ep{expert}"
    return f"{key.id}-tp{parallel_state.get_tensor_model_parallel_rank()}"


def tensor_key(stage: MegatronStage, name: str) -> str:
    """The key of one tensor of a stage's state, as ``edgc.hosts.checkpoint.stage_state`` names it."""
    return f"{stage_key(stage)}.{name}"


def measurements_key(stage: MegatronStage) -> str:
    """The key of what a stage's processes have measured; ``of_process`` makes that of each."""
    return f"{stage_key(stage)}.measurements"


def message_key() -> str:
    """The key of what ``replica_group`` has left unsent of messages; ``of_process`` makes that of each process."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return f"messages{stage}-tp{parallel_state.get_tensor_model_parallel_rank()}"


def of_process(key: str, process: int) -> str:
    """The key of what one process of a group has for itself."""
    return f"{key}.{process}"


def replica_group() -> dist.ProcessGroup:
    """The processes that hold the same part of the model."""
    group: dist.ProcessGroup = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return group


def sharded_tensor(key: str, data: torch.Tensor, replica: int) -> ShardedTensor:
    """A tensor that Megatron writes for replica 0 alone, and reads for all."""
    return ShardedTensor.from_rank_offsets(f"{ENTRY}.{key}", data, replica_id=replica)


def sharded_object(key: str, data: Any) -> ShardedObject:
    """What is no tensor, of one process. ``data``: None in a request."""
    return ShardedObject(f"{ENTRY}.{key}", data, (1,), (0,))
