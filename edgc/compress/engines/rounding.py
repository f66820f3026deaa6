"""Rounding with error feedback: every value travels, in few bits.

Seide et al. 2014 (1 bit); ZeRO++ (arXiv 2306.10209), SDP4Bit (arXiv 2410.15526) for groups of 8 and 4 bits.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, zip_longest

import torch
from torch import Tensor

from edgc.comm.collectives import Communicator, Steps
from edgc.comm.wire import GROUP, Packed, Wire
from edgc.compress.engines.base import Cuts, Elementwise, Reduced, all_finite
from edgc.config import EDGCConfig
from edgc.seeding import stable_seed
from edgc.specs import MatrixSpec

# Values that travel in one message: rounding and summing takes several times their memory, whatever the bucket's size.
PORTION = 2**24
type Piece = tuple[str, int, int]  # of a flattened gradient: name, start, end


class Rounding(Elementwise):
    """Sums gradients in a wire format. In fp32 that is the dense all-reduce, and leaves no error.

    Where each rank needs only a part of the sums and that takes fewer bytes, it gets only that part: not so where one
    rank needs most of what there is.
    """

    def __init__(self, matrices: Sequence[MatrixSpec], config: EDGCConfig, device: torch.device, wire: Wire):
        super().__init__(matrices, config, device)
        self.wire = wire
        self._generator = torch.Generator(device) if wire.stochastic else None

    def reduce(
        self,
        gradients: Mapping[str, Tensor],
        older: Mapping[str, Packed],
        iteration: int,
        communicator: Communicator,
        shards: Mapping[str, Cuts],
    ) -> Steps[Reduced]:
        if self._generator is not None:  # each rank draws its own
            # ... and other noise for other gradients, so that buckets of one shape do not round in step
            self._generator.manual_seed(stable_seed(self.config.seed, iteration, communicator.rank, *gradients))
        errors = {} if self.wire.exact else {name: torch.empty_like(gradient) for name, gradient in gradients.items()}
        whole = [[(name, 0, gradient.numel()) for name, gradient in gradients.items()]]
        parts = _by_rank(gradients, shards, communicator.ranks) if shards and not self.wire.exact else []
        sharded = parts != [] and _size(max(parts, key=_size)) * communicator.ranks < 2 * _size(whole[0])
        finite = [torch.ones((), dtype=torch.bool, device=self.device)]
        for portion in _portions(parts if sharded else whole):
            values = [[gradients[name].view(-1)[start:stop] for name, start, stop in pieces] for pieces in portion]
            if sharded:
                own = communicator.rank
                sums, shares = yield from communicator.sum_shards(values, self.wire, self._generator)
            else:
                own = 0
                sums, of_all = yield from communicator.sum(values[0], self.wire, self._generator)
                shares = [of_all]
            finite += [all_finite([total]) for total in sums]
            if not self.wire.exact:
                for pieces, local, sent in zip(portion, values, shares, strict=True):
                    for (name, start, stop), value, share in zip(pieces, local, sent, strict=True):
                        torch.sub(value, share, out=errors[name].view(-1)[start:stop])
            for value, total in zip(values[own], sums, strict=True):
                value.copy_(total)
        return Reduced(
            torch.stack(finite).all(), errors, lambda finite: None, sharded=gradients.keys() if sharded else ()
        )


def _by_rank(gradients: Mapping[str, Tensor], shards: Mapping[str, Cuts], ranks: int) -> list[list[Piece]]:
    """What each rank needs of the sums."""
    parts: list[list[Piece]] = [[] for _ in range(ranks)]
    for name in gradients:
        for part, (start, stop) in zip(parts, pairwise(shards[name]), strict=True):
            if start < stop:
                part.append((name, start, stop))
    return parts


def _size(pieces: Sequence[Piece]) -> int:
    return sum(stop - start for _, start, stop in pieces)


def _portions(parts: Sequence[Sequence[Piece]]) -> Iterator[list[list[Piece]]]:
    """Cut all parts alike into portions that hold at most ``PORTION`` values together."""
    return map(list, zip_longest(*(_cut(pieces, PORTION // len(parts)) for pieces in parts), fillvalue=[]))


def _cut(pieces: Sequence[Piece], size: int) -> Iterator[list[Piece]]:
    """The pieces in lists of at most about ``size`` values, cut at whole groups."""
    taken: list[Piece] = []
    room = size
    for name, start, end in pieces:
        while start < end:
            if room < GROUP and taken:
                yield taken
                taken, room = [], size
            stop = min(start + max(room // GROUP, 1) * GROUP, end)
            taken.append((name, start, stop))
            room -= stop - start
            start = stop
    yield taken
