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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edgc.comm.collectives import Communicator, Exchange
from edgc.comm.replicas import digest
from edgc.compress.equaliser import Scales
from edgc.compress.error_feedback import ErrorFeedback, ErrorRule
from edgc.specs import MatrixSpec, ShardBounds
from edgc.stacking import all_finite

SquaredNorms = dict[str, tuple[Tensor, Tensor]]  # of the rows and of the columns of sums, by name


@dataclass(frozen=True)
class ReductionContext:
    """What the routes of one reduction share.

    ``shards``: by name, where in a flattened gradient the part of each process begins and ends; a process needs no more
    of such a sum than its own part. ``scales``: what gradients that leave errors are divided by before their sum, where
    something is known; None: they are not, and no squared norms of sums are wanted. ``error_gain``: the share of
    an error that a gradient takes with it, where its sum may leave a new one; the rest waits.
    """

    iteration: int
    loss_scale: Tensor | None
    shards: Mapping[str, ShardBounds]
    communicator: Communicator
    feedback: ErrorFeedback
    scales: Scales | None
    error_gain: float

    def own_part(self, name: str) -> tuple[int, int]:
        """The begin and end of the part of a flattened sum that this process needs."""
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
        self.finite = torch.ones((), dtype=torch.bool, device="cpu")  # after the exchange
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
        """The gradient with the whole of its error, (rows x cols), after ``prepare``; perhaps M itself."""
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
        """Hashes, after ``commit``, of what must be the same on all processes, by name."""
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
    """Agree, after the exchanges, on whether all sums are finite, and on the squared norms of whole sums.

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
