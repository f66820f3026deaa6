"""The all-gather of weights that the distributed optimizer has updated: what it sends, and what it takes."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import (
    _ParamAndGradBucket,
    _ParamAndGradBucketGroup,
    shard_buffer,
)
from torch import Tensor

from edgc.arithmetic import own_arithmetic
from edgc.comm.collectives import Communicator, Exchange, Traffic, interleave, run_to_end
from edgc.comm.weight_gather import gather_differences
from edgc.comm.wire import Wire, wire
from edgc.compress.probe import fastest
from edgc.plan.times.gather_times import GatherTimes


class WeightGather:
    """How the weights of one bucket group are gathered, and what that sends; ``host`` counts Megatron's own way.

    ``wire``: the format of differences; None: whole weights travel.
    """

    def __init__(self, communicator: Communicator, host: Traffic):
        self.communicator = communicator
        self.host = host
        self.wire: Wire | None = None
        self.before: list[Tensor] | None = None  # own shards of all buckets as the others have them; None: not known

    def gather(
        self, all_shards: Sequence[Sequence[Tensor]], all_parts: Sequence[Sequence[Sequence[int]]]
    ) -> Exchange[None]:
        """Gather the differences of all buckets at once."""
        assert self.before is not None and self.wire is not None
        yield from interleave(
            [
                gather_differences(shards, parts, old, self.wire, self.communicator)
                for shards, parts, old in zip(all_shards, all_parts, self.before, strict=True)
            ]
        )
        # With experts Megatron gathers everything once for each of two optimizers, the second time only their updates.
        self.before = [shards[self.communicator.process].clone() for shards in all_shards]


def parts_of(bucket: _ParamAndGradBucket, processes: int) -> list[list[int]]:
    """The lengths of the pieces of parameters, and of gaps, in each process's shard of a bucket."""
    size = bucket.param_data.numel() // processes
    ends = {end for ends in bucket.param_to_index.values() for end in ends}
    cuts = sorted(ends | {process * size for process in range(processes + 1)})
    parts: list[list[int]] = [[] for _ in range(processes)]
    for start, end in pairwise(cuts):
        parts[start // size].append(end - start)
    return parts


def travel_rounded(group: _ParamAndGradBucketGroup) -> bool:
    """Whether its weights may. Those in fp32 are the optimizer's own: they must not be rounded."""
    return all(bucket.param_data.dtype != torch.float32 for bucket in group.buckets)


def gather_times(
    groups: Sequence[_ParamAndGradBucketGroup], name: str, group: dist.ProcessGroup, gbps: float | None
) -> GatherTimes | None:
    """What gathering the largest bucket that may be rounded takes: timed on scratch copies, as large as that bucket and
    what it is gathered into, or computed of its bytes alone for links of ``gbps`` Gbit/s. None if there is none.

    ``name``: of the format of differences. Every process of the group must call this at the same time.
    """
    buckets = [bucket for one in groups if travel_rounded(one) for bucket in one.buckets]
    if not buckets:
        return None
    bucket = max(buckets, key=lambda one: one.param_data.numel())
    communicator, form = Communicator.uncounted(group), wire(name)
    if gbps is not None:
        seconds = bucket.param_data.numel() * (1 - 1 / communicator.world_size) * 8 / (gbps * 1e9)
        return GatherTimes(seconds * bucket.param_data.itemsize, seconds * form.bytes_per_value())
    weights = torch.zeros_like(bucket.param_data)
    shards, parts = shard_buffer(weights, communicator.world_size), parts_of(bucket, communicator.world_size)
    before = shards[communicator.process].clone()

    def timed(exchange: Callable[[], Exchange[object]]) -> float:
        return fastest(lambda: run_to_end(exchange()), communicator, weights.device)

    with own_arithmetic(weights.device):  # as in training
        return GatherTimes(
            timed(lambda: communicator.all_gather(before)),
            timed(lambda: gather_differences(shards, parts, before, form, communicator)),
        )
