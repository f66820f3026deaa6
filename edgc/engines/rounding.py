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
from edgc.wire import Wire


class Rounding(Engine):
    """Sums gradients in a wire format. In fp32 that is the dense all-reduce, and leaves no error."""

    low_rank = False

    def __init__(self, matrices: Sequence[MatrixSpec], config: EDGCConfig, device: torch.device, wire: Wire):
        super().__init__(matrices, config, device)
        self.wire = wire
        self._generator = torch.Generator(device)  # of stochastic rounding: each rank draws its own
        self._seeded = False

    def reduce(
        self,
        gradients: Mapping[str, Tensor],
        ranks: Mapping[str, int],
        older: Mapping[str, Tensor],
        communicator: Communicator,
    ) -> Steps[Reduced | None]:
        if not self._seeded:
            self._generator.manual_seed(stable_seed(self.config.seed, communicator.rank))
            self._seeded = True
        sums, shares = yield from communicator.sum(list(gradients.values()), self.wire, self._generator)
        if not all_finite(sums):
            return None
        errors = {}
        for (name, gradient), total, share in zip(gradients.items(), sums, shares, strict=True):
            if not self.wire.exact:
                errors[name] = gradient - share
            gradient.copy_(total)
        return Reduced(errors, lambda: None)
