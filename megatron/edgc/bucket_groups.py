"""The data-parallel seam: EDGC's reduction in place of the all-reduce of Megatron's bucket groups."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import batched
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import (
    _ParamAndGradBucket,
    _ParamAndGradBucketGroup,
    shard_buffer,
)
from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine
from torch import Tensor

from edgc.arithmetic import own_arithmetic
from edgc.byte_counts import ByteCount
from edgc.comm.collectives import (
    AllReduce,
    Coalesced,
    CombinedWork,
    Communicator,
    Exchange,
    ReduceScatter,
    Traffic,
    Work,
    all_reduce_bytes,
    run_to_end,
)
from edgc.comm.overlap import Handle, Overlap
from edgc.errors import NonFiniteSum, StepError
from edgc.hosts.steps import Step
from edgc.hosts.units import Unit, Units
from edgc.specs import ShardBounds, shard_bounds
from edgc.timing import Spans
from megatron.edgc.weights import WeightGather, parts_of, travel_rounded


class StageReductions:
    """The sums of a stage's gradients, which its bucket groups hand over once in each backward pass.

    Groups are Megatron's; what is reduced together is a unit, which may hold gradients of several groups, and a group
    those of several units. A unit's reduction starts when its last gradient has come.
    """

    def __init__(
        self,
        units: Units,
        communicator: Communicator,
        spans: Spans,
        overlap: Overlap,
        step: Callable[[], Step],
        reruns: bool,
    ):
        self.units, self.communicator, self.spans, self.overlap = units, communicator, spans, overlap
        self.groups: list[EDGCBucketGroup] = []
        self.shards: dict[str, ShardBounds] = {}  # with the distributed optimizer: bounds of each gradient
        self.plain = False  # whether Megatron's own sums will do in this pass
        self._step, self.reruns = step, reruns
        self._begun: int | None = None  # the iteration of the last pass
        self._come: set[EDGCBucketGroup] = set()  # in this pass
        self._handles: dict[Unit, Handle] = {}

    def begin(self, group: "EDGCBucketGroup", gradients: Mapping[str, Tensor]) -> None:
        """These gradients have come, not scaled yet; the first ones begin the pass.

        Raises ``StepError`` for a second pass of an iteration that the host does not run again: sums would be summed.
        """
        step = self._step()
        if not self._come:
            if step.iteration == self._begun and not self.reruns:
                self._check_second_pass(step.iteration)
            self._begun = step.iteration
            self.units.begin()
            self._handles = {}
            for unit in self.units:
                unit.reducer.begin(step.iteration)
            self.plain = all(unit.reducer.plain for unit in self.units)
        self._come.add(group)
        # Before scaling, whoever sums: the entropy must not jump when compression begins.
        for unit in self.units.of(gradients):
            own = {name: gradients[name] for name in unit.names if name in gradients}
            unit.reducer.observer.measure(own, step.iteration, step.loss_scale)

    def _check_second_pass(self, iteration: int) -> None:
        """Raises ``StepError`` unless Megatron runs the step again and nothing was compressed in it.

        Megatron does so with its default flags, too, where a loss is not finite.
        """
        if get_rerun_state_machine().state is not RerunState.RERUNNING_IN_PLACE:
            raise StepError(
                f"iteration {iteration + 1}: gradients are reduced a second time. In a loop of your own, set "
                "args.curr_iteration in each step, and do not call finalize_model_grads: the schedule calls "
                "config.finalize_model_grads_func, which EDGC has set"
            )
        if not self.plain:
            raise NonFiniteSum(
                f"iteration {iteration + 1}: Megatron has found a result that is not finite, and runs the step again. "
                "Its gradients are in EDGC's sums already. Resume from the last checkpoint"
            )

    def add(self, gradients: Mapping[str, Tensor], scatter: bool) -> None:
        """Take scaled gradients, and start the units that are complete."""
        step = self._step()
        for unit in self.units.add(gradients):
            reducer, shards = unit.reducer, self.shards if scatter else None
            reduction = reducer.reduce(unit.gradients, step.iteration, step.loss_scale, shards)
            self._handles[unit] = self.overlap.start(
                reduction, reducer.state.tensors, self.spans, reducer.router.memory(unit.gradients)
            )

    def end(self, overlapped: bool) -> None:
        """A group has handed over its gradients. If it was the last of the pass, and reductions are not to run beside
        anything, wait for all of them.
        """
        if len(self._come) == len(self.groups):
            self._come = set()
            if not overlapped:
                for handle in self._handles.values():
                    handle.wait()

    def wait(self, names: Iterable[str]) -> None:
        """Until these are summed. A unit that has not started yet is left to the group that completes it."""
        for unit in self.units.of(names):
            if unit in self._handles:
                self._handles[unit].wait()


@dataclass(frozen=True)
class GroupHandle:
    """What Megatron waits for before it reads a group's sums."""

    sums: StageReductions
    names: Collection[str]

    def wait(self) -> None:
        self.sums.wait(self.names)


class EDGCBucketGroup(_ParamAndGradBucketGroup):  # type: ignore[misc]  # Megatron is untyped
    """A bucket group whose gradients EDGC sums. Only what starts a collective differs from Megatron's.

    Megatron's own object changes its class (``attach``) instead of being replaced, so everything that refers to it
    goes on working. As long as nothing of the stage is compressed or owed, Megatron's own collective runs and is only
    counted, unless the group holds a tied embedding that EDGC sums.

    With the distributed optimizer a process computes and, where possible, gets only its own shard of the sums. The
    factors of a matrix reach all processes anyway, since the next step starts from them.
    """

    grad_reduce_handle: Any  # of either kind
    param_gather_handle: Any
    edgc_sums: StageReductions
    edgc_weights: WeightGather
    edgc_names: dict[torch.nn.Parameter, str]

    @classmethod
    def attach(
        cls,
        group: _ParamAndGradBucketGroup,
        sums: StageReductions,
        weights: WeightGather,
        names: dict[torch.nn.Parameter, str],
    ) -> "EDGCBucketGroup":
        """Turn one of Megatron's bucket groups into an EDGC one, in place."""
        if type(group) is not _ParamAndGradBucketGroup:
            raise TypeError(f"a bucket group of type {type(group).__name__} cannot be taken over")
        group.__class__ = cls
        assert isinstance(group, EDGCBucketGroup)
        group.edgc_sums, group.edgc_weights, group.edgc_names = sums, weights, names
        sums.groups.append(group)
        if group.ddp_config.use_distributed_optimizer:
            sums.shards.update(group._shard_bounds())
        return group

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Sum the gradients over the data-parallel group; with overlap, ``finish_grad_sync`` waits for it."""
        if self.is_first_batch and self.grad_reduce_handle is not None:
            return  # already under way: in the first step Megatron asks twice
        if self.grad_reduce_handle is not None:
            raise StepError("a backward pass was made while the sums of the one before were under way")
        sums, overlapped = self.edgc_sums, self.ddp_config.overlap_grad_reduce
        gradients = self._gradients()
        sums.begin(self, gradients)
        if sums.plain:
            handle = self._start_plain(force_all_reduce, whole=len(gradients) == len(self.params))
            if overlapped:
                self.grad_reduce_handle = handle
            else:
                handle.wait()
        else:
            self._check_and_scale()
            sums.add(gradients, scatter=self.ddp_config.use_distributed_optimizer and not force_all_reduce)
            if overlapped:
                self.grad_reduce_handle = GroupHandle(sums, gradients.keys())
        sums.end(overlapped)

    def _start_plain(self, force_all_reduce: bool | None, whole: bool) -> Handle:
        """Start Megatron's own reduction, or, where a bucket is not ``whole`` EDGC's, one of what is."""
        sums = self.edgc_sums
        if not whole:
            self._check_and_scale()
            scatter = self.ddp_config.use_distributed_optimizer and not force_all_reduce
            return sums.overlap.start(self._sum_pieces(scatter), spans=sums.spans)
        for bucket in self.buckets:
            count_host_sum(sums.communicator.traffic, self, bucket.grad_data)

        def own_collective() -> Work:
            super(EDGCBucketGroup, self).start_grad_sync(force_all_reduce=force_all_reduce)
            under_way: Work = self.grad_reduce_handle or CombinedWork([])  # None: it has already waited
            return under_way

        return sums.overlap.start_own(own_collective, sums.spans)

    def _sum_pieces(self, scatter: bool) -> Exchange[None]:
        """Sum the buckets without a tied embedding, which is summed with its other copies.

        ``scatter``: a process needs its own shard alone of a bucket; of one with an embedding it gets all.
        """
        pieces = []
        communicator, scatters = self.edgc_sums.communicator, []
        for bucket in self.buckets:
            apart = [bucket.param_to_index[p] for p in bucket.params_list if p not in self.edgc_names]
            if not apart and scatter:
                scatters.append(ReduceScatter(communicator, bucket.grad_data))
                continue
            edges = [0, *(edge for start_end in sorted(apart) for edge in start_end), bucket.grad_data.numel()]
            pieces += [bucket.grad_data[start:end] for start, end in batched(edges, 2) if start < end]
        messages = [AllReduce(communicator, piece) for piece in pieces]
        yield Coalesced([*messages, *scatters])
        for piece, message in zip(pieces, messages, strict=True):
            if message.result is not piece:
                piece.copy_(message.result)

    def start_param_sync(self, force_sync: bool = False) -> None:
        """Gather the weights that the distributed optimizer has updated: as Megatron does, or their differences."""
        if force_sync and self.param_gather_handle is not None:
            super().start_param_sync(force_sync=force_sync)  # waits for the one under way
            return
        weights = self.edgc_weights
        processes = weights.communicator.world_size
        counters = [weights.host, *([weights.communicator.traffic] if weights.before is None else [])]
        for bucket in self.buckets:
            shard = bucket.param_data[: bucket.param_data.numel() // processes]
            for traffic in counters:
                traffic.count_all_gather(shard, processes)
        if weights.before is None:
            super().start_param_sync(force_sync=force_sync)
            return
        all_shards = [shard_buffer(bucket.param_data, processes) for bucket in self.buckets]
        gather = weights.gather(all_shards, [parts_of(bucket, processes) for bucket in self.buckets])
        if self.ddp_config.overlap_param_gather and not force_sync:
            self.param_gather_handle = self.edgc_sums.overlap.start(gather, reads=lambda: weights.before or ())
        else:
            with own_arithmetic(self.buckets[0].param_data.device):
                run_to_end(gather)
            if self.ddp_config.overlap_param_gather:
                self._post_param_sync()
        self.param_gather_dispatched = True

    def keep_weights(self) -> None:
        """Remember, before the optimizer's step, the own shards as the other processes have them."""
        weights = self.edgc_weights
        if weights.wire is not None and travel_rounded(self):
            shards = [shard_buffer(bucket.param_data, weights.communicator.world_size) for bucket in self.buckets]
            weights.before = [each[weights.communicator.process].clone() for each in shards]

    def forget_weights(self) -> None:
        """Others were loaded: gather them whole until ``keep_weights`` knows what the other processes have."""
        self.edgc_weights.before = None

    def _check_and_scale(self) -> None:
        """Check and scale gradients as Megatron does before its own collective."""
        config = self.ddp_config
        if config.check_for_nan_in_grad or config.check_for_large_grads:
            self.check_grads(config.check_for_nan_in_grad, config.check_for_large_grads)
        for bucket in self.buckets:
            factor = scaling_factor(self, bucket)
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
        """The bounds of the processes' shards in each flattened gradient, by name."""
        processes = self.edgc_sums.communicator.world_size
        return {
            self.edgc_names[parameter]: shard_bounds(start, end, bucket.grad_data.numel() // processes, processes)
            for bucket in self.buckets
            for parameter, (start, end) in bucket.param_to_index.items()
            if parameter in self.edgc_names
        }


def process_group(group: _ParamAndGradBucketGroup) -> dist.ProcessGroup:
    """The processes among which a bucket group's gradients are summed."""
    if group.ddp_config.use_distributed_optimizer:
        shards: dist.ProcessGroup = group.intra_distributed_optimizer_instance_group
        return shards
    replicas: dist.ProcessGroup = group.data_parallel_group
    return replicas


def count_host_sum(traffic: Traffic, group: _ParamAndGradBucketGroup, buffer: Tensor) -> None:
    """Count what Megatron's own collective sends of a bucket, or of a gradient in it."""
    processes = dist.get_world_size(process_group(group))
    if group.ddp_config.use_distributed_optimizer:
        traffic.count_reduce_scatter(buffer, processes)
    else:
        traffic.count_all_reduce(buffer, processes)


def sum_bytes(group: _ParamAndGradBucketGroup, gradient: Tensor) -> ByteCount:
    """What Megatron's own sum of a gradient sends, and what an all-reduce of it in fp32 would."""
    host = Traffic()
    count_host_sum(host, group, gradient)
    return ByteCount(
        host=host.bytes, fp32=all_reduce_bytes(4.0 * gradient.numel(), dist.get_world_size(process_group(group)))
    )


def scaling_factor(group: _ParamAndGradBucketGroup, bucket: _ParamAndGradBucket) -> float:
    """The factor of a gradient before it is summed; an average in the collective becomes one before it."""
    factor = float(bucket.gradient_scaling_factor)
    return factor / dist.get_world_size(process_group(group)) if group.ddp_config.average_in_collective else factor
