"""Rounding: every value travels, in few bits.

Seide et al. 2014 (1 bit); ZeRO++ (arXiv 2306.10209), SDP4Bit (arXiv 2410.15526) for groups of 8 and 4 bits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from edgc.comm.collectives import Communicator, Exchange
from edgc.comm.wire import wire
from edgc.compress.engines.base import Elementwise
from edgc.config import EDGCConfig
from edgc.seeding import stable_seed
from edgc.specs import MatrixSpec


class Rounding(Elementwise):
    """Sums in a wire format. In fp32 that is the dense all-reduce, which leaves no error.

    To this engine it is all the same whether gradients come whole or in pieces of whole groups of values.
    """

    def __init__(
        self,
        matrices: Sequence[MatrixSpec],
        config: EDGCConfig,
        device: torch.device,
        format_name: str,
        variant: str = "",
    ):
        super().__init__(matrices, config, device)
        self.wire = wire(format_name, stochastic=variant == "stochastic", hadamard=variant == "rotated")
        self.exact = self.wire.exact
        self._generator = torch.Generator(device) if self.wire.stochastic else None

    def begin(self, names: Sequence[str], iteration: int, process: int) -> None:
        if self._generator is not None:
            # Each process draws its own noise, and other noise for other gradients: buckets of one shape must not
            # round in step.
            self._generator.manual_seed(stable_seed(self.config.seed, iteration, process, *names))

    def sum_in_place(
        self, tensors: Sequence[Tensor], errors: Sequence[Tensor], communicator: Communicator
    ) -> Exchange[None]:
        """The sums of fp32 tensors of any shape take their place; ``errors`` get what the sums do not hold of them.

        An ``exact`` engine leaves no errors.
        """
        if not self.exact:
            yield from communicator.sum_in_place(tensors, errors, self.wire, self._generator)
            return
        sums = yield from communicator.sum_alone(tensors, self.wire)
        if sums[0] is not tensors[0]:  # else it was summed in place
            torch._foreach_copy_(list(tensors), sums)

    def sum_shards_in_place(
        self, shards: Sequence[Sequence[Tensor]], errors: Sequence[Sequence[Tensor]], communicator: Communicator
    ) -> Exchange[None]:
        """``sum_in_place``, of which process i gets only the sums of ``shards[i]``; the errors are those of all."""
        yield from communicator.sum_shards_in_place(shards, errors, self.wire, self._generator)

    def shards_pay(self, sizes: Sequence[int]) -> bool:
        """Whether ``sum_shards_in_place`` of shards of so many values sends less than ``sum_in_place``."""
        return not self.exact and max(sizes) * len(sizes) < 2 * sum(sizes)
