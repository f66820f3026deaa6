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
from edgc.wire import GROUP, Packed, Wire

# Values that travel in one message: rounding and summing takes several times their memory, whatever the bucket's size.
PORTION = 2**24


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
        errors = {} if self.wire.exact else {name: torch.empty_like(gradient) for name, gradient in gradients.items()}
        finite = []
        for portion in _portions(gradients):
            pieces = [gradients[name].view(-1)[part] for name, part in portion]
            sums, shares = yield from communicator.sum(pieces, self.wire, self._generator)
            finite.append(all_finite(sums))
            for (name, part), piece, total, share in zip(portion, pieces, sums, shares, strict=True):
                if not self.wire.exact:
                    torch.sub(piece, share, out=errors[name].view(-1)[part])
                piece.copy_(total)
        return Reduced(torch.stack(finite).all(), errors, lambda finite: None)


def _portions(gradients: Mapping[str, Tensor]) -> list[list[tuple[str, slice]]]:
    """Pieces of gradients, of all of them in turn, in portions of at most ``PORTION`` values."""
    portions: list[list[tuple[str, slice]]] = []
    room = 0
    for name, gradient in gradients.items():
        start = 0
        while start < gradient.numel():
            if room < GROUP:
                portions.append([])
                room = PORTION
            stop = min(start + room // GROUP * GROUP, gradient.numel())
            portions[-1].append((name, slice(start, stop)))
            room -= stop - start
            start = stop
    return portions
