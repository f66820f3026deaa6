"""Error feedback: what reductions have left unsent on this rank, added to the next gradient. No collectives."""

import torch
from torch import Tensor


class ErrorFeedback:
    """One error for each parameter, keyed by *name*, so that a rebuilt bucket or another process finds the same state.

    An error is this rank's own; only the sum over the data-parallel group matters to training. Source: Seide et al.
    2014; Karimireddy et al. 2019 (arXiv 1901.09847).
    """

    def __init__(self, dtype: torch.dtype, decay: float = 1.0, average: float = 0.0):
        self.dtype = dtype
        # Other values than these, and another type than fp32, lose a part of gradients.
        self.decay = decay  # what is kept of an error from step to step
        self.average = average  # weight of older errors in their moving average
        self.errors: dict[str, Tensor] = {}

    def add_to(self, name: str, gradient: Tensor) -> None:
        """gradient += error, in place. The error stays until ``store`` or ``clear``: a failed step loses nothing."""
        if name in self.errors:
            gradient.add_(self.errors[name].view_as(gradient))

    def store(self, name: str, error: Tensor) -> None:
        """This is what the reduction has left; the tensor becomes the store's own."""
        if self.decay != 1:
            error = error * self.decay
        if self.average:
            before = self.errors[name].float() if name in self.errors else torch.zeros_like(error)
            error = torch.lerp(error, before.view_as(error), self.average)
        self.errors[name] = error.to(self.dtype)

    def clear(self, name: str) -> None:
        """The whole of it was sent."""
        self.errors.pop(name, None)

    def squared_norm(self) -> float:
        """Sum of squares of all errors."""
        return sum(float(error.float().square().sum()) for error in self.errors.values())
