"""Small Python objects between processes: what is told once a run or once a window, never in a step.

``group`` is a process group; None is all processes. Every process of the group must call these together. Hosts find
here the types of ``torch.distributed`` that they name.
"""

import pickle
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket as GradBucket

ProcessGroup = dist.ProcessGroup


def all_processes() -> ProcessGroup:
    """The group of all processes. Raises ValueError before ``init_process_group``."""
    group = dist.group.WORLD
    if group is None:
        raise ValueError("torch.distributed has no process group yet: call init_process_group first")
    return group


def process(group: ProcessGroup | None = None) -> int:
    """The number of this process in the group."""
    return dist.get_rank(group)


def processes(group: ProcessGroup | None = None) -> int:
    """How many processes the group has."""
    return dist.get_world_size(group)


def all_gather_objects(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """The values of all processes, in their order, on every process."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def gather_objects(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """The same on process 0 of the group alone; an empty list on the others."""
    everyone: list[Any] = [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else []
    dist.gather_object(value, everyone or None, group=group, group_dst=0)
    return everyone


def broadcast_object(value: Any, group: ProcessGroup | None = None, source: int = 0) -> Any:
    """The value of process ``source`` of the group. It gets a copy, too: all processes serialise the result alike.

    Megatron has every context-parallel process write the same file of a checkpoint in the format ``torch``, at the same
    time; another length of the same content would break the file.
    """
    if process(group) == source:
        value = pickle.loads(pickle.dumps(value))
    box = [value]
    dist.broadcast_object_list(box, group=group, group_src=source)
    return box[0]
