"""The data-parallel seam: EDGC's reduction in place of the all-reduce of Megatron's bucket groups."""

from collections.abc import Callable

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.utils import unwrap_model
from torch import Tensor

from edgc.allocation import Parameter
from edgc.reducer import GradientReducer, run
from edgc.timing import Spans


class EDGCBucketGroup(_ParamAndGradBucketGroup):
    """A bucket group whose gradients EDGC sums. Only ``start_grad_sync`` differs from Megatron's.

    Megatron's own object changes its class (``attach``) instead of being replaced, so everything that refers to it
    goes on working. As long as nothing is compressed or owed, Megatron's own collective runs and is only counted.
    """

    edgc_reducer: GradientReducer
    edgc_names: dict[torch.nn.Parameter, str]
    edgc_spans: Spans
    edgc_iteration: Callable[[], int]

    @classmethod
    def attach(
        cls,
        group: _ParamAndGradBucketGroup,
        reducer: GradientReducer,
        names: dict[torch.nn.Parameter, str],
        spans: Spans,
        iteration: Callable[[], int],
    ) -> "EDGCBucketGroup":
        """Turn one of Megatron's bucket groups into an EDGC one, in place."""
        if type(group) is not _ParamAndGradBucketGroup:
            raise TypeError(f"a bucket group of type {type(group).__name__} cannot be taken over")
        group.__class__ = cls
        assert isinstance(group, EDGCBucketGroup)
        group.edgc_reducer, group.edgc_names = reducer, names
        group.edgc_spans, group.edgc_iteration = spans, iteration
        return group

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Sum the gradients over the data-parallel group; synchronous, as Megatron's is without overlap."""
        reducer, iteration = self.edgc_reducer, self.edgc_iteration()
        gradients = self._gradients()
        # Before scaling in both branches: the entropy must not jump when compression begins.
        reducer.measure(gradients, iteration)
        start = self.edgc_spans.mark()
        if reducer.plain:
            for bucket in self.buckets:
                reducer.communicator.traffic.count_all_reduce(bucket.grad_data, reducer.communicator.ranks)
            super().start_grad_sync(force_all_reduce=force_all_reduce)
        else:
            self._reduce(gradients, iteration)
        self.edgc_spans.add(start)

    def _reduce(self, gradients: dict[str, Tensor], iteration: int) -> None:
        if self.ddp_config.check_for_nan_in_grad:
            self.check_grads(check_for_nan_or_inf=True, check_for_large=False)
        with torch.no_grad():
            for bucket in self.buckets:
                if bucket.gradient_scaling_factor != 1.0:
                    bucket.grad_data *= bucket.gradient_scaling_factor
            run(self.edgc_reducer.reduce(gradients, iteration))

    def _gradients(self) -> dict[str, Tensor]:
        """Views into the buckets: a parameter's ``main_grad`` may be another tensor than the one that is reduced."""
        views: dict[str, Tensor] = {}
        for bucket in self.buckets:
            for parameter in bucket.params_list:
                start, end = bucket.param_to_index[parameter]
                views[self.edgc_names[parameter]] = bucket.grad_data[start:end].view(parameter.shape)
        return views


def named_bucket_groups(
    chunk: DistributedDataParallel,
) -> list[tuple[_ParamAndGradBucketGroup, dict[torch.nn.Parameter, str]]]:
    """The bucket groups of a model chunk, each with the names of its parameters."""
    # of the bare model, so that a precision wrapper does not change them
    names = {parameter: name for name, parameter in unwrap_model(chunk).named_parameters()}
    groups = chunk.bucket_groups + chunk.expert_parallel_bucket_groups
    return [
        (group, {parameter: names[parameter] for bucket in group.buckets for parameter in bucket.params_list})
        for group in groups
    ]


def describe(name: str, parameter: torch.nn.Parameter) -> Parameter:
    """What the allocation needs to know of a Megatron parameter."""
    return Parameter(
        name,
        tuple(parameter.shape),
        # Megatron marks word embeddings and output layers, but not position embeddings
        embedding=name.startswith("embedding.") or getattr(parameter, "is_embedding_or_output_parameter", False),
    )
