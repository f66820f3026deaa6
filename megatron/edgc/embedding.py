"""The tied word embedding of a pipeline: its two copies' gradients summed at once.

Megatron sums the gradient of each copy over its own data-parallel processes and then the two with each other.
Optimus-CC (Song et al., ASPLOS 2023) calls one sum over the processes of both fused embedding synchronisation. Here
that sum goes through a ``GradientReducer`` like any other, so it may be compressed.
"""

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.utils import unwrap_model
from megatron.training import get_args
from torch import Tensor

from edgc.arithmetic import own_arithmetic
from edgc.byte_counts import ByteCount
from edgc.comm.collectives import all_reduce_bytes, run_to_end
from edgc.comm.objects import all_gather_objects
from edgc.compress.reducer import GradientReducer
from edgc.hosts.steps import Step
from edgc.timing import Spans
from megatron.edgc.bucket_groups import scaling_factor, sum_bytes
from megatron.edgc.seam import Seam

TIED = "word_embeddings.weight"  # its name in both stages
COPIES = 2  # Megatron sums them over one process of the first and one of the last stage

# the package's attribute of that name is the function, not the module
_module: Any = sys.modules[finalize_model_grads.__module__]


class TiedEmbedding:
    """The copy that this process has, if any. Every process builds one, since building it makes process groups."""

    reducer: GradientReducer

    def __init__(self, chunks: Sequence[DistributedDataParallel]):
        self.weight: torch.nn.Parameter | None = None
        self.asked = False  # whether the sum was asked for in this step, on processes without a copy as well
        copy = tied_copy(chunks)
        if copy is not None:
            chunk, self.weight = copy
            self._group, self._bucket = _place(chunk, self.weight)
        self.process_group = self._new_group()

    def _new_group(self) -> dist.ProcessGroup:
        """The processes that hold the same part of a copy."""
        mine = (parallel_state.get_tensor_model_parallel_rank(), self.weight is not None)
        everyone = all_gather_objects(mine)
        own = None
        for tensor_rank in sorted({tensor_rank for tensor_rank, _ in everyone}):
            members = [process for process, one in enumerate(everyone) if one == (tensor_rank, True)]
            if not members:  # no copy is trained
                continue
            # Megatron's, so that --distributed-timeout-seconds-after-init reaches it
            group = parallel_state.create_group(
                members, timeout=timedelta(minutes=get_args().distributed_timeout_minutes), group_desc="EDGC_EMBEDDING"
            )
            if dist.get_rank() in members:
                own = group
        return own  # type: ignore[return-value]  # only asked for where there is a copy

    def gradient(self) -> Tensor:
        """A view into the bucket."""
        assert self.weight is not None
        start, end = self._bucket.param_to_index[self.weight]
        gradient: Tensor = self._bucket.grad_data[start:end].view(self.weight.shape)
        return gradient

    def step_bytes(self) -> ByteCount:
        """What Megatron's two sums send in a step."""
        return sum_bytes(self._group, self.gradient()) + copies_bytes(self.gradient())

    def attach(self, reducer: GradientReducer, spans: Spans, step: Callable[[], Step]) -> None:
        """``step`` tells of the step under way."""
        self.reducer, self._spans, self._step = reducer, spans, step

    def install(self, seam: Seam) -> None:
        """Take the place of Megatron's sum over the two copies."""

        def synchronise(*args: Any, **kwargs: Any) -> None:
            self.asked = True
            if self.weight is not None:
                self.synchronise()

        seam.replace(_module, "_allreduce_word_embedding_grads", synchronise)

    def synchronise(self) -> None:
        """Sum the gradient, which its bucket has scaled but not summed."""
        step, gradient = self._step(), {TIED: self.gradient()}
        self.reducer.begin(step.iteration)
        # as of all gradients, the entropy is that of what the bucket has not scaled yet
        # filled on the device: a copy to it would make the CPU wait
        factor = torch.full((), scaling_factor(self._group, self._bucket), device=self.gradient().device)
        self.reducer.observer.measure(
            gradient, step.iteration, factor if step.loss_scale is None else factor * step.loss_scale
        )
        start = self._spans.mark()
        with own_arithmetic(self.gradient().device):
            run_to_end(self.reducer.reduce(gradient, step.iteration, step.loss_scale))
        self._spans.add(start)


def copies_bytes(gradient: Tensor) -> ByteCount:
    """What Megatron's sum over the two copies of a tied embedding sends, and what it would in fp32."""
    host, fp32 = (all_reduce_bytes(size, COPIES) for size in (gradient.nbytes, 4.0 * gradient.numel()))
    return ByteCount(host=host, fp32=fp32)


def tied_copy(
    chunks: Sequence[DistributedDataParallel],
) -> tuple[DistributedDataParallel, torch.nn.Parameter] | None:
    """The word embedding whose gradient is summed with that of another stage, and its chunk, if this process has one.

    Position embeddings are on the first stage alone: Megatron's sum of them is over one process.
    """
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return None
    if parallel_state.is_pipeline_first_stage(ignore_virtual=True):
        chunk = chunks[0]
    elif parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        chunk = chunks[-1]
    else:
        return None
    model = unwrap_model(chunk)
    if not (model.share_embeddings_and_output_weights or model.config.mtp_num_layers):
        return None
    weight = model.shared_embedding_or_output_weight()
    return (chunk, weight) if weight.requires_grad else None


def _place(chunk: DistributedDataParallel, weight: torch.nn.Parameter) -> tuple[_ParamAndGradBucketGroup, Any]:
    for group in chunk.bucket_groups:
        for bucket in group.buckets:
            if weight in bucket.param_to_index:
                return group, bucket
    raise RuntimeError("the tied embedding is in none of the buckets")
