"""Collectives over one process group, counted. The only user of ``torch.distributed`` in ``edgc``."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Block until the result may be used (on CUDA: until later kernels may use it)."""


class Traffic:
    """Bytes that this rank has sent, counted from the tensors handed to the collectives.

    They are the bytes one rank sends under the bandwidth-optimal algorithm among W ranks, so that different
    collectives compare fairly: an all-reduce of X bytes sends 2 X (W-1) / W.
    """

    def __init__(self) -> None:
        self.bytes = 0.0
        self.collectives = 0

    def count_all_reduce(self, tensor: Tensor, ranks: int) -> None:
        """Count an all-reduce of ``tensor`` among so many ranks."""
        self.bytes += all_reduce_bytes(tensor.numel() * tensor.element_size(), ranks)
        self.collectives += 1


def all_reduce_bytes(size: int, ranks: int) -> float:
    """Bytes one rank sends in an all-reduce of ``size`` bytes."""
    return 2 * size * (ranks - 1) / ranks


class Communicator:
    """A process group whose traffic is counted."""

    def __init__(self, group: dist.ProcessGroup, traffic: Traffic):
        self.group = group
        self.traffic = traffic
        self.ranks: int = dist.get_world_size(group)

    def all_reduce(self, tensor: Tensor) -> Work:
        """Start the in-place sum of ``tensor`` over the group."""
        self.traffic.count_all_reduce(tensor, self.ranks)
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        if work is None:
            raise RuntimeError("this rank is not a member of the process group it was given")
        return work

    def all_reduce_packed(self, tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> "PackedAllReduce":
        """Start the in-place sum of many tensors in one message, which travels in ``dtype`` if given."""
        return PackedAllReduce(self, tensors, dtype)


class PackedAllReduce:
    """Many tensors summed in one message; ``wait`` writes the sums back into them."""

    def __init__(self, communicator: Communicator, tensors: Sequence[Tensor], dtype: torch.dtype | None):
        self._tensors = tensors
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._message = flat if dtype is None else flat.to(dtype)
        self._work = communicator.all_reduce(self._message)

    def wait(self) -> None:
        self._work.wait()
        parts = torch.split(self._message, [tensor.numel() for tensor in self._tensors])
        for tensor, part in zip(self._tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))
