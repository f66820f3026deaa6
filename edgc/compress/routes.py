"""The ways of gradients through a reduction. A route takes some gradients through three phases.

1. *prepare*: unscale each gradient and add its error, in place. What is to be sent is called M (rows x cols, fp32).
2. *exchange*: talk to the other processes. Sums take the place of M, as matrices or as products of two factors.
3. *commit*: once all routes of the step have told whether their sums are finite, write sums and errors, and let the
   engine take in what it has learned. If not all are finite, every gradient becomes NaN and no state changes.

An exchange changes no state but the size of a basis whose rank is new, so a step that fails loses nothing that was
learned at its rank.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

import torch
from torch import Tensor
from torch.profiler import record_function

from edgc.comm.collectives import Communicator, Exchange, interleave
from edgc.comm.replicas import digest
from edgc.comm.wire import GROUP
from edgc.compress.batch import Batch, Operand
from edgc.compress.engines.base import Elementwise, FactoredSums, LowRank, Piecewise
from edgc.compress.engines.rows import Rows
from edgc.compress.equaliser import Equaliser, squared_norms
from edgc.compress.error_feedback import ErrorFeedback, ErrorRule
from edgc.compress.lowrank import Product, squared_norms_of
from edgc.specs import MatrixSpec, ShardBounds
from edgc.stacking import all_finite, batches, map_stacked

# Values that are rounded and sent at once: that takes several times their memory. Of very many, a 24th: fewer messages.
PORTION, MOST_PORTIONS = 2**22, 24
SquaredNorms = dict[str, tuple[Tensor, Tensor]]  # of the rows and of the columns of sums, by name


@dataclass(frozen=True)
class ReductionContext:
    """What the routes of one reduction share.

    ``shards``: by name, where in a flattened gradient the part of each process begins and ends; a process needs no more
    of such a sum than its own part. ``equaliser``: None, and nothing is divided by scales. ``error_gain``: the share of
    an error that a gradient takes with it, where its sum may leave a new one; the rest waits.
    """

    iteration: int
    loss_scale: Tensor | None
    shards: Mapping[str, ShardBounds]
    communicator: Communicator
    feedback: ErrorFeedback
    equaliser: Equaliser | None
    error_gain: float

    def own_part(self, name: str) -> tuple[int, int]:
        """Where the part of a flattened sum that this process needs begins and ends."""
        process = self.communicator.process
        return self.shards[name][process], self.shards[name][process + 1]


class Route(ABC):
    """Some gradients of one reduction.

    Args:
        gradients: contiguous, by name.
        specs: their shapes as matrices, also of others.
        context: what all routes share.
    """

    fed_back = True  # whether sums may leave errors
    error_rule: ErrorRule | None = None  # by which an engine keeps them; None: by that of the run

    def __init__(self, gradients: Mapping[str, Tensor], specs: Mapping[str, MatrixSpec], context: ReductionContext):
        self.gradients = gradients
        # view, not reshape: the sums have to reach the gradients; those in 16 bits are copied
        self.matrices = {name: gradient.view(specs[name].rows, -1).float() for name, gradient in gradients.items()}
        self.context = context
        self.error_gain = context.error_gain if self.fed_back else 1.0  # the share of an error that ``prepare`` adds
        self.sharded = False  # whether each process gets its own parts of the sums alone, and ``finite`` is of those
        self.finite = torch.ones((), dtype=torch.bool)  # after the exchange
        self.squared_norms: SquaredNorms = {}  # after the exchange; of sharded sums those of own parts
        self.excess: Mapping[str, Tensor] = {}
        self.errors: dict[str, Tensor] = {}  # what the sums do not hold of this process
        self.narrow: dict[str, Tensor] = {}  # sums as gradients of 16 bits hold them

    def prepare(self, excess: Mapping[str, Tensor]) -> None:
        """Unscale and add errors.

        ``excess``: what to divide each new error by, by name: 0-dimensional, 1 unless the gradient is a spike.
        """
        self.excess = excess
        self.context.feedback.add_to(self.matrices, self.context.loss_scale, self.error_gain)

    def owed(self, name: str) -> Tensor:
        """After ``prepare``: the gradient with the whole of its error, (rows x cols); perhaps M itself."""
        matrix, older = self.matrices[name], self._waiting(name)
        return matrix if older is None else torch.add(matrix, older, alpha=1 - self.error_gain)

    def _waiting(self, name: str) -> Tensor | None:
        """The error of which ``prepare`` has added a part alone, (rows x cols); None: nothing waits."""
        packed = self.context.feedback.packed
        if self.error_gain == 1 or name not in packed:
            return None
        return packed[name].values().view_as(self.matrices[name])

    @abstractmethod
    def exchange(self) -> Exchange[None]:
        """Sum over the processes."""

    def commit(self, finite: Tensor) -> None:
        """Write the sums, in the loss scale, and keep the errors, if all sums of the step are ``finite``."""
        feedback = self.context.feedback
        if self.errors:
            iteration, waiting = self.context.iteration, 1 - self.error_gain
            feedback.store(self.errors, finite, iteration, self.error_rule, self.excess, waiting)
            self.errors = {}
        else:
            owing = [name for name in self.matrices if name in feedback.packed]
            if owing and bool(finite):  # the CPU waits once, when compression ends
                for name in owing:
                    feedback.clear(name)
        if self.narrow:
            sums = [self.gradients[name].view_as(total) for name, total in self.narrow.items()]
            gain = torch.where(finite, 1.0, math.nan)  # the loss scale is in them
            torch._foreach_copy_(sums, torch._foreach_mul(list(self.narrow.values()), gain))
        wide = [matrix for name, matrix in self.matrices.items() if name not in self.narrow]
        if wide:
            torch._foreach_mul_(wide, self._gain(finite))

    def digests(self) -> dict[str, Tensor]:
        """After ``commit``: hashes of what must be the same on all processes, by name."""
        return {} if self.sharded else {name: digest(gradient) for name, gradient in self.gradients.items()}

    def _scale(self) -> Tensor | float:
        return 1.0 if self.context.loss_scale is None else self.context.loss_scale

    def _gain(self, finite: Tensor) -> Tensor:
        """What sums are multiplied with, 0-dimensional: the loss scale, or NaN."""
        return torch.where(finite, self._scale(), math.nan)

    def _round_narrow(self) -> None:
        """Sums of gradients in 16 bits as their buffers will hold them; what that cuts off goes into the errors."""
        scale = self._scale()
        for name, gradient in self.gradients.items():
            if gradient.dtype == torch.float32:
                continue
            matrix = self.matrices[name]
            total = self.narrow[name] = (matrix * scale).to(gradient.dtype)
            if name in self.errors:  # all processes know what is cut off: each keeps an equal part
                self.errors[name] += (matrix - total.float() / scale) / self.context.communicator.world_size
        if self.narrow:
            self.finite = self.finite & all_finite(list(self.narrow.values()))


def agree(routes: Sequence[Route], communicator: Communicator) -> Exchange[tuple[Tensor, SquaredNorms]]:
    """After the exchanges: whether all sums are finite on all processes, and the squared norms of whole sums.

    Only of sums in parts does a process not know this by itself.
    """
    finite = torch.stack([route.finite for route in routes]).all()
    known = {name: pair for route in routes if not route.sharded for name, pair in route.squared_norms.items()}
    parts = {name: pair for route in routes if route.sharded for name, pair in route.squared_norms.items()}
    if not any(route.sharded for route in routes):
        return finite, known
    sides = [side for pair in parts.values() for side in pair]
    message = torch.cat([(~finite).float().view(1), *sides])
    total = yield from communicator.all_reduce(message)
    totals = iter(torch.split(total[1:], [len(side) for side in sides]))
    return total[0] == 0, {**known, **{name: (next(totals), next(totals)) for name in parts}}


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
        if not isinstance(engine, Piecewise):
            result = yield from engine.sum(list(self.matrices.values()), communicator)
            listed = list(self.matrices.values())
            _subtract(listed, result.shares, list(self.errors.values()))
            torch._foreach_copy_(listed, list(result.sums))
            self.finite = result.finite
            return
        by_process = self._pieces_of_processes()
        sizes = [_size(pieces) for pieces in by_process]
        self.sharded = bool(sizes) and engine.shards_pay(sizes)
        whole = [[(name, 0, matrix.numel()) for name, matrix in self.matrices.items()]]
        finite = []
        for portion in _portions(by_process if self.sharded else whole, portion_of(_size(whole[0]))):
            values = [[self.matrices[name].view(-1)[start:stop] for name, start, stop in part] for part in portion]
            own = values[communicator.process if self.sharded else 0]
            if self.sharded:
                result = yield from engine.sum_shards(values, communicator)
            else:
                result = yield from engine.sum(own, communicator)
            if self.fed_back:
                places = [piece for part in portion for piece in part]
                errors = [self.errors[name].view(-1)[start:stop] for name, start, stop in places]
                _subtract([one for part in values for one in part], result.shares, errors)
            if own and own[0] is not result.sums[0]:  # else it was summed in place
                torch._foreach_copy_(own, list(result.sums))
            finite.append(result.finite)
        self.finite = torch.stack(finite).all()

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


class FactorRoute(Route):
    """Matrices that an engine sums as products of two factors.

    ``first``: by name, of a matrix, what takes rows of it before; the factors are of what that leaves.
    """

    def __init__(
        self,
        gradients: Mapping[str, Tensor],
        specs: Mapping[str, MatrixSpec],
        context: ReductionContext,
        engine: LowRank,
        ranks: Mapping[str, int],
        first: Mapping[str, Rows] | None = None,
    ):
        super().__init__(gradients, specs, context)
        self.specs = specs
        self.engine = engine
        self.ranks = ranks
        self.first = first or {}
        self.first_sums: dict[str, tuple[Tensor, Tensor]] = {}  # indices of rows and their sums
        self.factored: FactoredSums | None = None

    def exchange(self) -> Exchange[None]:
        context = self.context
        for name, engine in self.first.items():
            engine.begin([name], context.iteration, context.communicator.process)
        taken = yield from interleave(
            [engine.sum_rows([self.matrices[name]], context.communicator) for name, engine in self.first.items()]
        )
        for name, parts in zip(self.first, taken, strict=True):
            self.matrices[name].index_add_(0, parts.rows[0], parts.shares[0], alpha=-1)
            self.first_sums[name] = parts.rows[0], parts.sums[0]
        finite_rows = [parts.finite for parts in taken]
        del taken  # the shares' memory
        scales = {} if context.equaliser is None else context.equaliser.scales(self.matrices)
        operands = {name: Operand(matrix, scales.get(name)) for name, matrix in self.matrices.items()}
        for name in operands:
            if self.engine.transposes(self.specs[name], context.iteration):
                operands[name] = operands[name].T
        factored = yield from self.engine.sum(
            self._batch(operands), self.ranks, context.iteration, context.communicator
        )
        self.factored, self.finite = factored, torch.stack([factored.finite, *finite_rows]).all()
        if context.equaliser is not None:
            self.squared_norms = squared_norms_of(factored.sums)
        if any(gradient.dtype != torch.float32 for gradient in self.gradients.values()):
            for name, matrix in self.matrices.items():
                self.errors[name] = factored.shares[name].residual_of(matrix)
                factored.sums[name].write(matrix, slice(None))
                if name in self.first_sums:
                    rows, total = self.first_sums[name]
                    matrix.index_add_(0, rows, total)
            self._round_narrow()

    def commit(self, finite: Tensor) -> None:
        assert self.factored is not None
        self.engine.commit(self.factored, self.context.iteration, finite)
        if self.narrow:
            super().commit(finite)
            return
        self._write(self.factored, finite, self._gain(finite))

    def digests(self) -> dict[str, Tensor]:
        sums = {} if self.factored is None else self.factored.sums
        found = {name: digest(product.left) + 3 * digest(product.right) for name, product in sums.items()}
        of_rows = {name: 5 * digest(total) + 7 * digest(rows) for name, (rows, total) in self.first_sums.items()}
        return {**found, **{name: found[name] + own for name, own in of_rows.items()}}

    def _batch(self, operands: Mapping[str, Operand]) -> Batch:
        return Batch(operands)

    def _write(self, factored: FactoredSums, finite: Tensor, gain: Tensor) -> None:
        """The errors, and times ``gain`` the rows of the sums that this process needs."""
        names = list(self.matrices)
        shares, sums = ([products[name] for name in names] for products in (factored.shares, factored.sums))
        excess = [self.excess[name].view(1, 1) for name in names]
        divided = map_stacked(torch.div, [share.left for share in shares], excess)
        gained = torch._foreach_mul([total.left for total in sums], gain)
        for place, (name, matrix) in enumerate(self.matrices.items()):
            with record_function("edgc/residual"):
                # The division takes the place of the copy with which ``addmm`` begins: no further pass over the matrix.
                older, waiting = self._waiting(name), 1 - self.error_gain
                if older is None:
                    error, waiting = torch.div(matrix, self.excess[name]), 1.0
                else:  # error = waiting * older + M / excess - share / excess
                    error = torch.addcdiv(older, matrix, self.excess[name], value=1 / waiting)
                error.addmm_(divided[place], shares[place].right, beta=waiting, alpha=-1)
            self.context.feedback.store({name: error}, finite, self.context.iteration)
            with record_function("edgc/reconstruct"):
                Product(gained[place], sums[place].right).write(matrix, self._own_rows(name))
                if name in self.first_sums:
                    rows, total = self.first_sums[name]
                    matrix.index_add_(0, rows, total * gain)

    def _own_rows(self, name: str) -> slice:
        if name not in self.context.shards:
            return slice(None)
        (start, stop), cols = self.context.own_part(name), self.specs[name].cols
        return slice(start // cols, -(-stop // cols))


def _subtract(values: Sequence[Tensor], shares: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """values - shares, into ``out``."""
    for places in batches(values):
        if len(places) == 1:  # in one pass over what may be large
            torch.sub(values[places[0]], shares[places[0]], out=out[places[0]])
        else:
            torch._foreach_copy_([out[place] for place in places], [values[place] for place in places])
            torch._foreach_sub_([out[place] for place in places], [shares[place] for place in places])


Piece = tuple[str, int, int]  # of a flattened gradient: name, start, end


def _size(pieces: Sequence[Piece]) -> int:
    return sum(stop - start for _, start, stop in pieces)


def portion_of(elements: int) -> int:
    """How many of so many values are rounded and sent at once, at most."""
    return max(PORTION, -(-elements // MOST_PORTIONS))


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
