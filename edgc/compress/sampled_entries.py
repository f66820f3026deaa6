"""The sampled entries of one reduction, summed in fp32 beside it (``edgc.observe.fidelity``)."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from edgc.comm.collectives import Communicator, Exchange
from edgc.comm.wire import FP32
from edgc.compress.routes.base import ReductionContext
from edgc.observe.fidelity import FidelitySampler


class SampledEntries:
    """Takes part in the phases of a reduction, as routes do.

    Args:
        sampler: where entries are, and what is known of them.
        matrices: those that leave errors, before any phase: gradients in the loss scale. They are changed in place.
        context: what all routes share.
    """

    def __init__(self, sampler: FidelitySampler, matrices: Mapping[str, Tensor], context: ReductionContext):
        self.sampler = sampler
        self.matrices = matrices
        self.context = context
        self.true = self._unscaled(sampler.take(matrices))
        self.owed = self.true

    def prepare(self, owed: Callable[[str], Tensor]) -> None:
        """Take samples once the routes have added errors. ``owed``: a gradient with the whole of its error, by name."""
        self.owed = torch.cat([self.sampler.take({name: owed(name)}) for name in self.matrices])

    def exchange(self) -> Exchange[None]:
        """Sum over the processes."""
        self.true, self.owed = yield from _sums([self.true, self.owed], self.context.communicator)

    def compare(self, gradients: Mapping[str, Tensor], finite: Tensor) -> Exchange[dict[str, Tensor]]:
        """What ``FidelitySampler.compare`` gives, once the routes have written the sums into ``gradients``."""
        context, sampler = self.context, self.sampler
        got = sampler.take({name: gradients[name] for name in self.matrices})
        if context.shards:  # a process knows only its own part of the sums
            inside = sampler.inside(self.matrices, {name: context.own_part(name) for name in self.matrices})
            (got,) = yield from _sums([torch.where(inside, got, 0.0)], context.communicator)
        return sampler.compare(list(self.matrices), (self.true, self.owed, self._unscaled(got)), finite)

    def _unscaled(self, values: Tensor) -> Tensor:
        return values if self.context.loss_scale is None else values / self.context.loss_scale


def _sums(tensors: Sequence[Tensor], communicator: Communicator) -> Exchange[list[Tensor]]:
    sums, _ = yield from communicator.sum(tensors, FP32)
    return sums
