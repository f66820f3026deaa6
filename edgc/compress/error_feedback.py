"""Error feedback: what sums do not hold of this process's gradients, added to the next gradients. No collectives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edgc.comm.packed import Packed, choose_all, pack_all, unpack_all
from edgc.comm.wire import Wire
from edgc.seeding import stable_seed
from edgc.stacking import batches, map_stacked


@dataclass(frozen=True)
class ErrorRule:
    """How errors are kept. Any other rule than the default one, in fp32, loses a part of gradients.

    ``wire``: format in memory. ``average``: weight of older errors in a moving average. ``reset_every``: errors are
    dropped after so many iterations (0: never).
    """

    wire: Wire
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

    def add_to(self, gradients: Mapping[str, Tensor], divisor: Tensor | None = None, gain: float = 1.0) -> None:
        """gradient / divisor + gain * error of each, in place; the default divisor, 0-dimensional, is 1.

        The errors stay until ``store`` or ``clear``: a failed step loses nothing.
        """
        owing = [name for name in gradients if name in self.packed]
        if divisor is not None and (others := [gradient for name, gradient in gradients.items() if name not in owing]):
            torch._foreach_div_(others, divisor)
        for indices in batches([gradients[name] for name in owing]):
            names = [owing[index] for index in indices]
            own = [gradients[name] for name in names]
            errors = [
                error.view_as(one) for error, one in zip(unpack_all([self.packed[n] for n in names]), own, strict=True)
            ]
            if divisor is None:
                torch._foreach_add_(own, errors, alpha=gain)
            elif len(own) == 1 and gain == 1:  # in one pass over what may be large
                torch.addcdiv(errors[0], own[0], divisor, out=own[0])
            else:
                torch._foreach_div_(own, divisor)
                torch._foreach_add_(own, errors, alpha=gain)

    def store(
        self,
        errors: Mapping[str, Tensor],
        finite: Tensor,
        iteration: int,
        rule: ErrorRule | None = None,
        divisors: Mapping[str, Tensor] | None = None,
        waiting: float = 0.0,
    ) -> None:
        """Keep these errors, if all of the step's sums were ``finite``; the tensors become the store's own.

        ``divisors``: what to divide each by, 0-dimensional. ``waiting``: the share of each error of before that was not
        added to the gradient; it is added to the new one, undivided. A format that rounds does so at random: to the
        nearest, an error that grows by less than half a step at a time would never grow.
        """
        rule = rule or self.rule
        listed = list(errors)
        for indices in batches(list(errors.values())):
            names = [listed[index] for index in indices]
            new = [errors[name] for name in names]
            if divisors is not None:
                new = map_stacked(_divided, new, [divisors[name] for name in names])
            older = [self._older(name, error, rule.wire) for name, error in zip(names, new, strict=True)]
            values: list[Tensor] = []
            if waiting or rule.average:
                values = [was.view_as(error) for was, error in zip(unpack_all(older), new, strict=True)]
            if waiting:
                torch._foreach_add_(new, values, alpha=waiting)
            if rule.average:
                new = [torch.lerp(error, was, rule.average) for error, was in zip(new, values, strict=True)]
            if rule.reset_every and (iteration + 1) % rule.reset_every == 0:
                new = [torch.zeros_like(error) for error in new]
            packed = self._packed(names, new, rule.wire, "error", iteration)
            self.packed.update(zip(names, choose_all([finite] * len(names), packed, older), strict=True))

    def _older(self, name: str, error: Tensor, wire: Wire) -> Packed:
        """The error that is kept, or zeros, in this format."""
        older = self.packed.get(name)
        if older is not None and older.wire == wire:
            return older
        values = torch.zeros_like(error) if older is None else older.values()
        return self._packed([name], [values], wire, "older")[0]

    def share(self, name: str, total: Tensor, processes: int, iteration: int) -> None:
        """Keep this process's equal part of a sum over the group."""
        part = total.to(self._generator.device) / processes
        (self.packed[name],) = self._packed([name], [part], self.rule.wire, "share", iteration)

    def draw(self, name: str, *occasion: object) -> int:
        """A seed for the rounding of this error, 0 if nothing is drawn."""
        return self._seed_of(name, *occasion) if self.rule.wire.stochastic else 0

    def _seed_of(self, name: str, *occasion: object) -> int:
        return stable_seed(*self._seed, *occasion, name)

    def _packed(self, names: Sequence[str], errors: Sequence[Tensor], wire: Wire, *occasion: object) -> list[Packed]:
        if not wire.stochastic:
            return pack_all(errors, wire)
        seeds = [self._seed_of(name, *occasion) for name in names]
        return pack_all(errors, wire, self._generator, seeds)

    def clear(self, name: str) -> None:
        """Delete the error of this parameter: all of it was sent."""
        self.packed.pop(name, None)

    def squared_norm(self) -> Tensor:
        """Sum of squares of all errors, 0-dimensional."""
        return sum(
            (packed.values().square().sum() for packed in self.packed.values()),
            torch.zeros((), dtype=torch.float32, device="cpu"),
        )


def _divided(errors: Tensor, divisors: Tensor) -> Tensor:
    """(count, ...) by (count,), in place."""
    return errors.div_(divisors.view(-1, *[1] * (errors.dim() - 1)))
