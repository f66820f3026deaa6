"""How faithful a sum is: what the optimizer got against what it should have got, at sampled entries.

In measured steps a few entries of each parameter are also summed in fp32, without compression: of the gradients, and of
gradients with their errors. So for every engine, without a model of gradients, one sees by parameter

- the *cosine* between the sum g of the gradients and the sum s that the optimizer got;
- the *delay* (1 - c) / c, where c is the share of the energy of the sum of gradients and errors, g + e, that leaves in
  a step: the mean number of steps by which gradient arrives late, if in each step the same share of what waits leaves;
- both in units of the *update* as well: Adam divides every entry by the root of its mean square, so there a small entry
  weighs as much as a large one. g and s are divided by root mean squares of their own, errors by that of g;
- both in units of the *descent* as well: Adam's step along s lowers the loss by about the sum of g s / r, where r is
  the root of the mean square of g. An energy g^2 / r is about the size of g: a small entry counts, but less;
- the cosine of *Adam's updates*: between the moving averages of g and of s, in units of the update. What arrives a few
  steps late is in both averages. It is exact if every iteration is measured; if not, averages are over measured steps;
- the *lag*: how much of g of the measured step before s has, beside its share of today's g. It is the coefficient of
  that gradient in a least-squares fit of s by both.

There are no collectives here.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from edgc.seeding import stable_seed

DECAY = 0.9  # of the moving averages, per measured step
# Added to each mean square, times the parameter's average: a mean of few measurements can be much too small.
FLOOR = 0.01
# The energy of one gradient of a parameter counts as at most so many times its average; not tuned.
LARGEST_GROWTH = 4.0
_TINY = torch.finfo(torch.float32).tiny
LARGEST_SAMPLE = 0.01  # share of the entries of a parameter that is sampled by default: each takes 28 bytes
SUMS_PER_ENTRY = 3  # that are sent for an entry: g, g + e, and s where a process knows but its own part of it


@dataclass(frozen=True)
class Agreement:
    """Sums over entries and steps, of squares and of one product; in any unit."""

    true: float = 0.0  # g^2
    got: float = 0.0  # s^2
    both: float = 0.0  # g s

    @property
    def cosine(self) -> float:
        """Between g and s; NaN if one of them is zero."""
        norms = math.sqrt(self.true) * math.sqrt(self.got)
        return self.both / norms if norms > 0 else math.nan

    @property
    def noise(self) -> float:
        """Energy of s that does not lie along g, over that which does; infinite if none does, NaN if g or s is zero."""
        cosine = self.cosine
        return math.inf if cosine <= 0 else 1 / cosine**2 - 1


@dataclass(frozen=True)
class Products(Agreement):
    """The same, and of the errors."""

    owed: float = 0.0  # (g + e)^2
    unsent: float = 0.0  # (g + e - s)^2

    @property
    def delay(self) -> float:
        """(1 - c) / c in steps; infinite if nothing leaves, NaN if nothing waits."""
        sent = self.owed - self.unsent
        if self.owed <= 0:
            return math.nan
        return self.unsent / sent if sent > 0 else math.inf

    @property
    def late(self) -> float:
        """Energy of the error that stays over that of g: the delay if gradients of different steps are independent."""
        return self.unsent / self.true if self.true > 0 else math.nan


@dataclass(frozen=True)
class Earlier:
    """Sums over entries and steps, of products with p, which is g of the measured step before."""

    energy: float = 0.0  # p^2
    true: float = 0.0  # g p
    got: float = 0.0  # s p


@dataclass(frozen=True)
class Fidelity:
    """Sums of one parameter, in the units of the gradient, of the update and of the descent, of Adam's updates, and of
    products with the gradient before.
    """

    gradient: Products = Products()
    update: Products = Products()
    descent: Products = Products()
    adam: Agreement = Agreement()
    earlier: Earlier = Earlier()
    entries: float = 0.0  # times steps and processes

    @property
    def energy(self) -> float:
        """The mean energy of an entry of g, in the unit of the descent."""
        return self.descent.true / self.entries if self.entries else math.nan

    @property
    def lag(self) -> float:
        """The coefficient of the gradient before in a least-squares fit of s by it and g; NaN where one of them is
        zero, or where they are parallel.
        """
        true, both, before = self.gradient.true, self.gradient.both, self.earlier
        determinant = true * before.energy - before.true**2
        if determinant <= 1e-6 * true * before.energy:
            return math.nan
        return (before.got * true - both * before.true) / determinant

    @classmethod
    def of(cls, values: Sequence[float]) -> "Fidelity":
        """What ``FidelitySampler.compare`` gives for one parameter."""
        count = len(fields(Products))
        gradient, update, descent = (Products(*values[unit * count : (unit + 1) * count]) for unit in range(3))
        adam, earlier = Agreement(*values[3 * count : -4]), Earlier(*values[-4:-1])
        return cls(gradient, update, descent, adam, earlier, values[-1])

    @classmethod
    def total(cls, several: Iterable["Fidelity"]) -> "Fidelity":
        """The fidelity of all entries of several, from other processes, steps or parameters."""
        columns = zip(*(one._values() for one in several), strict=True)
        return cls.of([math.fsum(column) for column in columns])

    def to_event(self) -> dict[str, float]:
        """Fields of the event log, of four digits."""
        units = {"": self.gradient, "_of_update": self.update, "_of_descent": self.descent}
        numbers = {
            f"{name}{suffix}": getattr(products, name)
            for suffix, products in units.items()
            for name in ("cosine", "delay", "late")
        }
        numbers |= {"cosine_of_adam": self.adam.cosine, "energy_of_descent": self.energy, "lag": self.lag}
        return {name: float(f"{value:.4g}") for name, value in numbers.items()}

    def _values(self) -> list[float]:
        parts = (self.gradient, self.update, self.descent, self.adam, self.earlier)
        return [value for part in parts for value in vars(part).values()] + [self.entries]


class FidelitySampler:
    """Samples the same entries of each parameter in every measured step.

    ``share``: of the entries of each parameter, at least one entry. ``seed``: of their places.
    """

    def __init__(self, share: float, seed: int):
        self.share, self.seed = share, seed
        # by name (entries, 5): moving averages of g^2, s^2, g and s, and g of the last step; replaced, never changed
        self.averages: dict[str, Tensor] = {}
        self._indices: dict[str, Tensor] = {}

    def indices(self, name: str, size: int, device: torch.device) -> Tensor:
        """The sampled entries (int64, ascending) of a flattened gradient of this size."""
        if name not in self._indices:
            count = size if self.share >= 1 else math.ceil(self.share * size)
            generator = torch.Generator().manual_seed(stable_seed(self.seed, "fidelity", name))
            # drawn with repetition: a permutation of billions of entries would take their memory
            if count < size:
                indices = torch.randint(size, (count,), generator=generator, device="cpu")
            else:
                indices = torch.arange(size, device="cpu")
            self._indices[name] = indices.sort().values.to(device)
        return self._indices[name]

    def take(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The entries of all tensors in a row, fp32."""
        flat = [(name, tensor.reshape(-1)) for name, tensor in tensors.items()]
        return torch.cat([values[self.indices(name, len(values), values.device)].float() for name, values in flat])

    def inside(self, tensors: Mapping[str, Tensor], parts: Mapping[str, tuple[int, int]]) -> Tensor:
        """Whether each entry of ``take`` lies in the part (start, stop) of its flattened tensor."""
        masks = []
        for name, tensor in tensors.items():
            indices, (start, stop) = self.indices(name, tensor.numel(), tensor.device), parts[name]
            masks.append((indices >= start) & (indices < stop))
        return torch.cat(masks)

    def _before(self, name: str, count: int, like: Tensor) -> Tensor:
        """The averages so far, zeros where they are unknown: also those of another sample, of before a resume."""
        known = self.averages.get(name)
        return like.new_zeros(count, 5) if known is None or len(known) != count else known

    def compare(
        self, names: Sequence[str], samples: tuple[Tensor, Tensor, Tensor], finite: Tensor
    ) -> dict[str, Tensor]:
        """The values of a ``Fidelity`` (22,), by name.

        ``samples``: g, g + e and s at the entries of ``take``, all of them sums over the processes. They say nothing if
        the step was not ``finite``, a boolean on the device: the values are then NaN, and the averages stay.
        """
        counts = [len(self._indices[name]) for name in names]
        before = torch.cat([self._before(name, count, samples[0]) for name, count in zip(names, counts, strict=True)])
        usual, new = (_by_parameter(values, counts) for values in (before[:, 0], samples[0].square()))
        # a spike says nothing of other steps, and averages would keep it for long
        damped = torch.where(new > LARGEST_GROWTH * usual, LARGEST_GROWTH * usual / new, 1.0).sqrt()
        damped = torch.where(usual > 0, damped, 1.0)
        true, owed, got = (values * damped for values in samples)
        now = torch.stack([true.square(), got.square(), true, got], dim=1)
        # A mean square begins with the mean over its parameter: one square of an entry can be far too small.
        start = torch.where(before[:, :2] > 0, before[:, :2], _by_parameter(now[:, :2], counts))
        after = torch.lerp(now, torch.cat([start, before[:, 2:4]], dim=1), DECAY)
        finite = finite & torch.isfinite(after).all() & torch.isfinite(new).all()  # squares may overflow
        kept = torch.where(finite, torch.cat([after, true.unsqueeze(1)], dim=1), before)
        self.averages.update(zip(names, torch.split(kept, counts), strict=True))
        squares, (mean_true, mean_got) = after[:, :2], after[:, 2:].unbind(dim=1)
        # where no gradient was seen yet, what errors bring has no unit, and counts for nothing
        typical = _by_parameter(squares, counts)
        roots = (squares + FLOOR * typical).clamp_min(_TINY).rsqrt()
        of_true, of_got = torch.where(typical[:, :1] > 0, roots, 0.0).unbind(dim=1)
        unsent = owed - got
        values = [true.square(), got.square(), true * got, owed.square(), unsent.square()]
        units = [of_true.square(), of_got.square(), of_true * of_got, of_true.square(), of_true.square()]
        terms = values + [value * unit for value, unit in zip(values, units, strict=True)]
        terms += [value * of_true for value in values]
        means = [mean_true.square(), mean_got.square(), mean_true * mean_got]
        terms += [value * unit for value, unit in zip(means, units[:3], strict=True)]
        earlier = before[:, 4]
        terms += [earlier.square(), true * earlier, got * earlier, torch.ones_like(true)]
        sums = torch.stack([part.sum(dim=1) for part in torch.split(torch.stack(terms), counts, dim=1)])
        return dict(zip(names, torch.where(finite, sums, math.nan).unbind(), strict=True))


def _by_parameter(values: Tensor, counts: Sequence[int]) -> Tensor:
    """(entries, ...) -> the same, each entry the mean over its parameter's."""
    return torch.cat([part.mean(dim=0, keepdim=True).expand_as(part) for part in torch.split(values, list(counts))])
