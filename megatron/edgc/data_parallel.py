"""The data-parallel seam: EDGC's reduction in place of the all-reduce of Megatron's bucket groups."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import (
    _ParamAndGradBucket,
    _ParamAndGradBucketGroup,
    shard_buffer,
)
from torch import Tensor

from edgc.comm.collectives import Communicator, Steps, Traffic, Work, interleave, run
from edgc.comm.overlap import Overlap
from edgc.comm.weight_gather import gather_differences
from edgc.comm.wire import Wire
from edgc.compress.reducer import GradientReducer
from edgc.hosts.steps import Step
from edgc.observe.timing import Spans
from edgc.specs import ShardBounds, shard_bounds


class EDGCBucketGroup(_ParamAndGradBucketGroup):  # type: ignore[misc]  # Megatron is untyped
    """A bucket group whose gradients EDGC sums. Only what starts a collective differs from Megatron's.

    Megatron's own object changes its class (``attach``) instead of being replaced, so everything that refers to it
    goes on working. As long as nothing is compressed or owed, Megatron's own collective runs and is only counted.

    With the distributed optimizer a rank computes and, where possible, gets only its own shard of the sums. The factors
    of a matrix reach all ranks anyway, since the next step starts from them.
    """

    grad_reduce_handle: Any  # of either kind
    param_gather_handle: Any
    edgc_reducer: GradientReducer
    edgc_weights: "WeightGather"
    edgc_names: dict[torch.nn.Parameter, str]
    edgc_spans: Spans
    edgc_overlap: Overlap
    edgc_step: Callable[[], Step]
    edgc_shards: dict[str, ShardBounds] | None  # with the distributed optimizer: bounds of each gradient

    @classmethod
    def attach(
        cls,
        group: _ParamAndGradBucketGroup,
        reducer: GradientReducer,
        weights: "WeightGather",
        names: dict[torch.nn.Parameter, str],
        spans: Spans,
        overlap: Overlap,
        step: Callable[[], Step],
    ) -> "EDGCBucketGroup":
        """Turn one of Megatron's bucket groups into an EDGC one, in place. ``step`` tells of the step under way."""
        if type(group) is not _ParamAndGradBucketGroup:
            raise TypeError(f"a bucket group of type {type(group).__name__} cannot be taken over")
        group.__class__ = cls
        assert isinstance(group, EDGCBucketGroup)
        group.edgc_reducer, group.edgc_weights, group.edgc_names = reducer, weights, names
        group.edgc_spans, group.edgc_overlap, group.edgc_step = spans, overlap, step
        group.edgc_shards = group._shard_bounds() if group.ddp_config.use_distributed_optimizer else None
        return group

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Sum the gradients over the data-parallel group; with overlap, ``finish_grad_sync`` waits for it."""
        if self.is_first_batch and self.grad_reduce_handle is not None:
            return  # already under way: in the first step Megatron asks twice
        reducer, step = self.edgc_reducer, self.edgc_step()
        overlapped = self.ddp_config.overlap_grad_reduce
        gradients = self._gradients()
        reducer.begin(step.iteration)
        # Before scaling in both branches: the entropy must not jump when compression begins.
        reducer.observer.measure(gradients, step.iteration, step.loss_scale)
        start = self.edgc_spans.mark()
        # Megatron would sum a whole bucket, also what is summed elsewhere
        if reducer.plain and len(gradients) == sum(len(bucket.params_list) for bucket in self.buckets):
            for bucket in self.buckets:
                count_dense(reducer.communicator.traffic, self, bucket.grad_data)
            if overlapped:
                own = partial(self._own_collective, force_all_reduce)
                self.grad_reduce_handle = self.edgc_overlap.start_own(own, self.edgc_spans)
            else:
                self._own_collective(force_all_reduce)
        else:
            self._check_and_scale()
            shards = None if force_all_reduce else self.edgc_shards
            reduction = reducer.reduce(gradients, step.iteration, step.loss_scale, shards)
            if overlapped:
                keep = reducer.state.state_dict()
                self.grad_reduce_handle = self.edgc_overlap.start(reduction, keep, self.edgc_spans)
            else:
                with torch.no_grad():
                    run(reduction)
        if not overlapped:  # else the span would be that of starting it
            self.edgc_spans.add(start)

    def _own_collective(self, force_all_reduce: bool | None) -> Work:
        """Megatron's own reduction; with overlap, what to wait for."""
        super().start_grad_sync(force_all_reduce=force_all_reduce)
        under_way: Work = self.grad_reduce_handle
        return under_way

    def start_param_sync(self, force_sync: bool = False) -> None:
        """Gather the weights that the distributed optimizer has updated: as Megatron does, or their differences."""
        if force_sync and self.param_gather_handle is not None:
            super().start_param_sync(force_sync=force_sync)  # waits for the one under way
            return
        weights = self.edgc_weights
        all_shards = [shard_buffer(bucket.param_data, weights.communicator.world_size) for bucket in self.buckets]
        for shards in all_shards:
            weights.dense.count_all_gather(shards[0], weights.communicator.world_size)
        if weights.before is None:
            for shards in all_shards:
                weights.communicator.traffic.count_all_gather(shards[0], weights.communicator.world_size)
            super().start_param_sync(force_sync=force_sync)
            return
        gather = weights.gather(
            all_shards, [_parts(bucket, weights.communicator.world_size) for bucket in self.buckets]
        )
        if self.ddp_config.overlap_param_gather and not force_sync:
            self.param_gather_handle = self.edgc_overlap.start(gather, keep=weights.before)
        else:
            with torch.no_grad():
                run(gather)
            if self.ddp_config.overlap_param_gather:
                self._post_param_sync()
        self.param_gather_dispatched = True

    def keep_weights(self) -> None:
        """Before the optimizer's step: remember the own shards as the other ranks have them."""
        weights = self.edgc_weights
        # parameters in fp32 are the optimizer's own: they must not be rounded
        if weights.wire is not None and all(bucket.param_data.dtype != torch.float32 for bucket in self.buckets):
            shards = [shard_buffer(bucket.param_data, weights.communicator.world_size) for bucket in self.buckets]
            weights.before = [each[weights.communicator.process].clone() for each in shards]

    def _check_and_scale(self) -> None:
        """As Megatron does before its own collective; an average in the collective becomes one before it."""
        config = self.ddp_config
        if config.check_for_nan_in_grad or config.check_for_large_grads:
            self.check_grads(config.check_for_nan_in_grad, config.check_for_large_grads)
        for bucket in self.buckets:
            factor = bucket.gradient_scaling_factor
            if config.average_in_collective:
                factor /= self.edgc_reducer.communicator.world_size
            if factor != 1.0:
                with torch.no_grad():
                    bucket.grad_data *= factor

    def _gradients(self) -> dict[str, Tensor]:
        """Views into the buckets: a parameter's ``main_grad`` may be another tensor than the one that is reduced."""
        views: dict[str, Tensor] = {}
        for bucket in self.buckets:
            for parameter in bucket.params_list:
                if parameter not in self.edgc_names:
                    continue  # a tied embedding, summed with its other copies
                start, end = bucket.param_to_index[parameter]
                views[self.edgc_names[parameter]] = bucket.grad_data[start:end].view(parameter.shape)
        return views

    def _shard_bounds(self) -> dict[str, ShardBounds]:
        """Where in each flattened gradient the shards of the ranks begin and end."""
        ranks = self.edgc_reducer.communicator.world_size
        return {
            self.edgc_names[parameter]: shard_bounds(start, end, bucket.grad_data.numel() // ranks, ranks)
            for bucket in self.buckets
            for parameter, (start, end) in bucket.param_to_index.items()
            if parameter in self.edgc_names
        }


class WeightGather:
    """How the weights of one bucket group are gathered, and what that sends; ``dense`` counts Megatron's own way."""

    def __init__(self, communicator: Communicator, dense: Traffic, wire: Wire | None):
        self.communicator = communicator
        self.dense = dense
        self.wire = wire
        self.before: list[Tensor] | None = None  # own shards of all buckets as the others have them; None: not known

    def gather(
        self, all_shards: Sequence[Sequence[Tensor]], all_parts: Sequence[Sequence[Sequence[int]]]
    ) -> Steps[None]:
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


def _parts(bucket: _ParamAndGradBucket, ranks: int) -> list[list[int]]:
    """For each rank's shard of a bucket: the lengths of the pieces of parameters, and of gaps between them, in it."""
    size = bucket.param_data.numel() // ranks
    ends = {end for ends in bucket.param_to_index.values() for end in ends}
    cuts = sorted(ends | {rank * size for rank in range(ranks + 1)})
    parts: list[list[int]] = [[] for _ in range(ranks)]
    for start, end in pairwise(cuts):
        parts[start // size].append(end - start)
    return parts


def process_group(group: _ParamAndGradBucketGroup) -> dist.ProcessGroup:
    """The ranks among which a bucket group's gradients are summed."""
    if group.ddp_config.use_distributed_optimizer:
        shards: dist.ProcessGroup = group.intra_distributed_optimizer_instance_group
        return shards
    replicas: dist.ProcessGroup = group.data_parallel_group
    return replicas


def count_dense(traffic: Traffic, group: _ParamAndGradBucketGroup, buffer: Tensor) -> None:
    """Count what Megatron's own collective sends of a bucket."""
    ranks = dist.get_world_size(process_group(group))
    if group.ddp_config.use_distributed_optimizer:
        traffic.count_reduce_scatter(buffer, ranks)
    else:
        traffic.count_all_reduce(buffer, ranks)
