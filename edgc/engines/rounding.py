"""Rounding with error feedback: every value travels, in few bits.

Seide et al. 2014 (1 bit); ZeRO++ (arXiv 2306.10209), SDP4Bit (arXiv 2410.15526) for groups of 8 and 4 bits.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from edgc.collectives import Communicator, Steps
from edgc.config import EDGCConfig
from edgc.engines.base import Engine, MatrixSpec, Reduced, all_finite
from edgc.seeding import stable_seed
from edgc.wire import Packed, Wire


class Rounding(Engine):
    """Sums gradients in a wire format. In fp32 that is the dense all-reduce, and leaves no error."""

    low_rank = False

    def __init__(self, matrices: Sequence[MatrixSpec], config: EDGCConfig, device: torch.device, wire: Wire):
        super().__init__(matrices, config, device)
        self.wire = wire
        self._generator = torch.Generator(device) if wire.stochastic else None

    def reduce(
        self,
        gradients: Mapping[str, Tensor],
        ranks: Mapping[str, int],
        older: Mapping[str, Packed],
        iteration: int,
        communicator: Communicator,
    ) -> Steps[Reduced]:
        if self._generator is not None:  # each rank draws its own
            self._generator.manual_seed(stable_seed(self.config.seed, iteration, communicator.rank))
        sums, shares = yield from communicator.sum(list(gradients.values()), self.wire, self._generator)
        errors = {}
        for (name, gradient), total, share in zip(gradients.items(), sums, shares, strict=True):
            if not self.wire.exact:
                errors[name] = gradient - share
            gradient.copy_(total)
        return Reduced(all_finite(sums), errors, lambda finite: None)
