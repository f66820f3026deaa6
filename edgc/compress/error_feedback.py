"""Error feedback: what reductions have left unsent on this rank, added to the next gradient. No collectives."""

from types import ModuleType

import torch
from torch import Tensor

from edgc.comm.wire import Packed, Wire
from edgc.compress.lowrank import Product
from edgc.seeding import stable_seed


class ErrorFeedback:
    """One error for each parameter, keyed by *name*, so that a rebuilt bucket or another process finds the same state.

    An error is this rank's own; only the sum over the data-parallel group matters to training. Source: Seide et al.
    2014; Karimireddy et al. 2019 (arXiv 1901.09847).
    """

    def __init__(self, wire: Wire, decay: float = 1.0, average: float = 0.0):
        self.wire = wire
        # Other values than these, and another wire than fp32, lose a part of gradients.
        self.decay = decay  # what is kept of an error from step to step
        self.average = average  # weight of older errors in their moving average
        self.packed: dict[str, Packed] = {}  # replaced, never changed

    def add_to(self, name: str, gradient: Tensor, divisor: Tensor | None = None) -> None:
        """gradient / divisor + error, in place and in one pass; the default divisor, 0-dimensional, is 1.

        The error stays until ``store`` or ``clear``: a failed step loses nothing.
        """
        if name not in self.packed:
            if divisor is not None:
                gradient.div_(divisor)
            return
        error = self.packed[name].values().view_as(gradient)
        if divisor is None:
            gradient.add_(error)
        else:
            torch.addcdiv(error, gradient, divisor, out=gradient)

    def store(self, name: str, error: Tensor, finite: Tensor, generator: torch.Generator | None = None) -> None:
        """This is what the reduction has left, if it was ``finite``; the tensor becomes the store's own.

        ``generator`` draws the rounding of a wire that rounds at random: to the nearest, an error that grows by less
        than half a step at a time would never grow.
        """
        older = self.packed.get(name) or Packed(torch.zeros_like(error), self.wire)
        if self.decay != 1:
            error = error * self.decay
        if self.average:
            error = torch.lerp(error, older.values().view_as(error), self.average)
        self.packed[name] = Packed(error, self.wire, generator).where(finite, older)

    @property
    def kernels_take(self) -> bool:
        """Whether ``write_back`` can store errors as they are kept here."""
        return self.wire.bits >= 16 and not self.wire.floating and self.decay == 1 and self.average == 0

    def write_back(
        self,
        kernels: ModuleType,
        name: str,
        matrix: Tensor,
        share: Product,
        product: Product,
        finite: Tensor,
        rows: slice,
        loss_scale: Tensor | None,
        seed: int,
    ) -> None:
        """``store`` what ``share`` leaves of the matrix, and write these rows of ``product`` into it, in one pass."""
        older = self.packed[name].stored().view_as(matrix) if name in self.packed else None
        error = torch.empty_like(matrix, dtype=torch.float32 if self.wire.exact else torch.bfloat16)
        kernels.write_back(
            matrix,
            share,
            product,
            finite,
            older,
            error,
            rows,
            loss_scale,
            stable_seed(seed, name) >> 32,
        )
        self.packed[name] = Packed.restored(error.view(1, -1).view(torch.uint8), matrix.shape, self.wire)

    def clear(self, name: str) -> None:
        """The whole of it was sent."""
        self.packed.pop(name, None)

    def squared_norm(self) -> Tensor:
        """Sum of squares of all errors, 0-dimensional."""
        return sum((packed.values().square().sum() for packed in self.packed.values()), torch.zeros(()))
