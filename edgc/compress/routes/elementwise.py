"""Gradients that are rounded or thinned out, value by value."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, zip_longest

import torch
from torch import Tensor

from edgc.comm.collectives import Exchange, interleave
from edgc.comm.wire import GROUP
from edgc.compress.engines.base import Elementwise, Thinning
from edgc.compress.engines.rounding import Rounding
from edgc.compress.equaliser import squared_norms
from edgc.compress.routes.base import ReductionContext, Route
from edgc.specs import MatrixSpec
from edgc.stacking import all_finite, subtract_all

# Values that are rounded at once: that takes several times their memory. Of very many, a ninth: fewer launches. What
# they become is small, so that several portions travel as one message.
PORTION, MOST_PORTIONS, JOINED_PORTIONS = 2**22, 9, 3


class ElementwiseRoute(Route):
    """Gradients that an engine rounds or thins out. With an equaliser they are divided by its scales before."""

    def __init__(
        self,
        gradients: Mapping[str, Tensor],
        specs: Mapping[str, MatrixSpec],
        context: ReductionContext,
        engine: Elementwise,
    ):
        self.engine = engine
        self.fed_back, self.error_rule = not engine.exact, engine.error_rule
        super().__init__(gradients, specs, context)

    def exchange(self) -> Exchange[None]:
        matrices, context = self.matrices, self.context
        known = (context.scales or {}) if self.fed_back and self.engine.equalised else {}
        scales = {name: known[name] for name in matrices if name in known}
        for name, (rows, cols) in scales.items():
            matrices[name].div_(rows).div_(cols)
        if self.fed_back:
            self.errors = {name: torch.empty_like(matrix) for name, matrix in matrices.items()}
        self.engine.begin(list(matrices), context.iteration, context.communicator.process)
        yield from self._sum_in_place()
        for name, (rows, cols) in scales.items():
            for restored in (matrices[name], self.errors[name]):
                restored.mul_(rows).mul_(cols)
        if context.scales is not None:
            self.squared_norms = {
                name: squared_norms(matrix, context.own_part(name) if self.sharded else None)
                for name, matrix in matrices.items()
                if matrix.shape[0] > 1
            }
        self._round_narrow()

    def _sum_in_place(self) -> Exchange[None]:
        """Sums take the place of the matrices, and errors that of ``errors``."""
        communicator, engine = self.context.communicator, self.engine
        if isinstance(engine, Thinning):
            listed = list(self.matrices.values())
            result = yield from engine.sum(listed, communicator)
            subtract_all(listed, result.shares, list(self.errors.values()))
            torch._foreach_copy_(listed, list(result.sums))
            self.finite = result.finite
            return
        assert isinstance(engine, Rounding)
        by_process = self._pieces_of_processes()
        sizes = [_size(pieces) for pieces in by_process]
        self.sharded = bool(sizes) and engine.shards_pay(sizes)
        whole = [[(name, 0, matrix.numel()) for name, matrix in self.matrices.items()]]
        portions = list(_portions(by_process if self.sharded else whole, portion_of(_size(whole[0]))))
        summed: list[Tensor] = []
        count = 1 if engine.exact else JOINED_PORTIONS  # a sum in fp32 is not joined
        for start in range(0, len(portions), count):
            exchanges = [self._sum_portion(engine, portion) for portion in portions[start : start + count]]
            for own in (yield from interleave(exchanges)):
                summed += own
        if summed:
            self.finite = all_finite(summed)
        else:  # made on the device: a copy would make the CPU wait
            self.finite = torch.ones((), dtype=torch.bool, device=self.engine.device)

    def _sum_portion(self, engine: Rounding, portion: "Sequence[Sequence[Piece]]") -> Exchange[list[Tensor]]:
        """``_sum_in_place`` of pieces of matrices; where the sums are that this process needs."""
        process = self.context.communicator.process
        values, errors = ([self._views(tensors, part) for part in portion] for tensors in (self.matrices, self.errors))
        if self.sharded:
            yield from engine.sum_shards_in_place(values, errors, self.context.communicator)
            return values[process]
        yield from engine.sum_in_place(values[0], errors[0], self.context.communicator)
        return values[0]

    @staticmethod
    def _views(tensors: Mapping[str, Tensor], pieces: "Sequence[Piece]") -> list[Tensor]:
        """Nothing of tensors that are not there."""
        return [tensors[name].view(-1)[start:stop] for name, start, stop in pieces if name in tensors]

    def _pieces_of_processes(self) -> "list[list[Piece]]":
        """What each process needs of the sums; nothing if all need all."""
        if not self.context.shards:
            return []
        parts: list[list[Piece]] = [[] for _ in range(self.context.communicator.world_size)]
        for name in self.matrices:
            for part, (start, stop) in zip(parts, pairwise(self.context.shards[name]), strict=True):
                if start < stop:
                    part.append((name, start, stop))
        return parts


Piece = tuple[str, int, int]  # of a flattened gradient: name, start, end


def _size(pieces: Sequence[Piece]) -> int:
    return sum(stop - start for _, start, stop in pieces)


def portion_of(elements: int) -> int:
    """How many of so many values are rounded at once, at most."""
    # a portion may end up to a group early, where a tensor ends within one
    return max(PORTION, (-(-elements // (MOST_PORTIONS * GROUP)) + 1) * GROUP)


def _portions(parts: Sequence[Sequence[Piece]], size: int) -> Iterator[list[list[Piece]]]:
    """Cut every part into portions, the same number of each; one portion of all holds at most ``size`` values."""
    return map(list, zip_longest(*(_cut(pieces, size // len(parts)) for pieces in parts), fillvalue=[]))


def _cut(pieces: Sequence[Piece], size: int) -> Iterator[list[Piece]]:
    """The pieces in lists of at most about ``size`` values, cut at whole groups."""
    portion: list[Piece] = []
    room = size
    for name, start, end in pieces:
        while start < end:
            if room < GROUP and portion:
                yield portion
                portion, room = [], size
            stop = min(start + max(room // GROUP, 1) * GROUP, end)
            portion.append((name, start, stop))
            room -= stop - start
            start = stop
    yield portion
