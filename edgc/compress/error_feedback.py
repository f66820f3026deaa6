"""Error feedback: what sums do not hold of this process's gradients, added to the next gradients. No collectives."""

from dataclasses import dataclass

import torch
from torch import Tensor

from edgc.comm.wire import Packed, Wire
from edgc.seeding import stable_seed


@dataclass(frozen=True)
class ErrorRule:
    """How errors are kept. Any other rule than the default one, in fp32, loses a part of gradients.

    ``wire``: format in memory. ``decay``: share of an error that is kept. ``average``: weight of older errors in a
    moving average. ``reset_every``: errors are dropped after so many iterations (0: never).
    """

    wire: Wire
    decay: float = 1.0
    average: float = 0.0
    reset_every: int = 0


class ErrorFeedback:
    """One error for each parameter, keyed by *name*, so that a rebuilt bucket or another process finds the same state.

    An error is this process's own; only the sum over the data-parallel group matters to training. Source: Seide et al.
    2014; Karimireddy et al. 2019 (arXiv 1901.09847).

    Args:
        rule: how errors are kept.
        device: where they are.
        seed: whatever tells this process's random draws from all others.
    """

    def __init__(self, rule: ErrorRule, device: torch.device, *seed: object):
        self.rule = rule
        self.packed: dict[str, Packed] = {}  # replaced, never changed
        self._seed = seed
        self._generator = torch.Generator(device)

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

    def store(self, name: str, error: Tensor, finite: Tensor, iteration: int, rule: ErrorRule | None = None) -> None:
        """Keep this error, if all of the step's sums were ``finite``; the tensor becomes the store's own.

        A format that rounds does so at random: to the nearest, an error that grows by less than half a step at a time
        would never grow.
        """
        rule = rule or self.rule
        older = self.packed.get(name) or Packed(torch.zeros_like(error), rule.wire)
        if older.wire != rule.wire:
            older = Packed(older.values(), rule.wire)
        if rule.decay != 1:
            error = error * rule.decay
        if rule.average:
            error = torch.lerp(error, older.values().view_as(error), rule.average)
        if rule.reset_every and (iteration + 1) % rule.reset_every == 0:
            error = torch.zeros_like(error)
        self.packed[name] = self._packed(name, error, rule.wire, "error", iteration).where(finite, older)

    def share(self, name: str, total: Tensor, processes: int, iteration: int) -> None:
        """Keep this process's equal part of a sum over the group."""
        part = total.to(self._generator.device) / processes
        self.packed[name] = self._packed(name, part, self.rule.wire, "share", iteration)

    def draw(self, name: str, *occasion: object) -> int:
        """A seed for the rounding of this error, 0 if nothing is drawn."""
        return stable_seed(*self._seed, *occasion, name) if self.rule.wire.stochastic else 0

    def _packed(self, name: str, error: Tensor, wire: Wire, *occasion: object) -> Packed:
        if wire.stochastic:
            self._generator.manual_seed(stable_seed(*self._seed, *occasion, name))
        return Packed(error, wire, self._generator)

    def clear(self, name: str) -> None:
        """The whole of it was sent."""
        self.packed.pop(name, None)

    def squared_norm(self) -> Tensor:
        """Sum of squares of all errors, 0-dimensional."""
        return sum((packed.values().square().sum() for packed in self.packed.values()), torch.zeros(()))
