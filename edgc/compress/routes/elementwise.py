"""Gradients that are rounded or thinned out, value by value."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, zip_longest

import torch
from torch import Tensor

from edgc.comm.collectives import Exchange
from edgc.comm.wire import GROUP
from edgc.compress.engines.base import Elementwise
from edgc.compress.engines.rounding import Rounding
from edgc.compress.equaliser import squared_norms
from edgc.compress.routes.base import ReductionContext, Route
from edgc.specs import MatrixSpec
from edgc.stacking import all_finite, batches

# Values that are rounded and sent at once: that takes several times their memory. Of very many, a twelfth: fewer
# messages.
PORTION, MOST_PORTIONS = 2**22, 12


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
        equalised = context.equaliser is not None and self.fed_back and self.engine.equalised
        scales = context.equaliser.scales(matrices) if context.equaliser is not None and equalised else {}
        for name, (rows, cols) in scales.items():
            matrices[name].div_(rows).div_(cols)
        if self.fed_back:
            self.errors = {name: torch.empty_like(matrix) for name, matrix in matrices.items()}
        self.engine.begin(list(matrices), context.iteration, context.communicator.process)
        yield from self._sum_in_place()
        for name, (rows, cols) in scales.items():
            for restored in (matrices[name], self.errors[name]):
                restored.mul_(rows).mul_(cols)
        if context.equaliser is not None:
            self.squared_norms = {
                name: squared_norms(matrix, context.own_part(name) if self.sharded else None)
                for name, matrix in matrices.items()
                if matrix.shape[0] > 1
            }
        self._round_narrow()

    def _sum_in_place(self) -> Exchange[None]:
        """Sums take the place of the matrices, and errors that of ``errors``."""
        communicator, engine = self.context.communicator, self.engine
        if not isinstance(engine, Rounding):
            result = yield from engine.sum(list(self.matrices.values()), communicator)
            listed = list(self.matrices.values())
            _subtract(listed, result.shares, list(self.errors.values()))
            torch._foreach_copy_(listed, list(result.sums))
            assert result.finite is not None  # sums of rounded values alone tell by themselves
            self.finite = result.finite
            return
        by_process = self._pieces_of_processes()
        sizes = [_size(pieces) for pieces in by_process]
        self.sharded = bool(sizes) and engine.shards_pay(sizes)
        whole = [[(name, 0, matrix.numel()) for name, matrix in self.matrices.items()]]
        summed: list[Tensor] = []
        for portion in _portions(by_process if self.sharded else whole, portion_of(_size(whole[0]))):
            values = [[self.matrices[name].view(-1)[start:stop] for name, start, stop in part] for part in portion]
            own = values[communicator.process if self.sharded else 0]
            if self.sharded:
                result = yield from engine.sum_shards(values, communicator)
            else:
                result = yield from engine.sum(own, communicator)
            if self.fed_back:
                pieces = [piece for part in portion for piece in part]
                errors = [self.errors[name].view(-1)[start:stop] for name, start, stop in pieces]
                _subtract([one for part in values for one in part], result.shares, errors)
            if own and own[0] is not result.sums[0]:  # else it was summed in place
                torch._foreach_copy_(own, list(result.sums))
            summed += own
            del result  # memory for the next portion
        self.finite = all_finite(summed) if summed else self.finite.to(self.engine.device)

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


def _subtract(values: Sequence[Tensor], shares: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """values - shares, into ``out``."""
    for indices in batches(values):
        if len(indices) == 1:  # in one pass over what may be large
            torch.sub(values[indices[0]], shares[indices[0]], out=out[indices[0]])
        else:
            torch._foreach_copy_([out[index] for index in indices], [values[index] for index in indices])
            torch._foreach_sub_([out[index] for index in indices], [shares[index] for index in indices])


Piece = tuple[str, int, int]  # of a flattened gradient: name, start, end


def _size(pieces: Sequence[Piece]) -> int:
    return sum(stop - start for _, start, stop in pieces)


def portion_of(elements: int) -> int:
    """How many of so many values are rounded and sent at once, at most."""
    return max(-(-elements // (MOST_PORTIONS * PORTION)), 1) * PORTION


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
