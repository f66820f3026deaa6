"""Units of reduction: the gradients of a stage that are reduced together, whatever pieces they come in."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from torch import Tensor

from edgc.compress.reducer import GradientReducer

# Two units hold more than half of the gradients' memory where a step of the paper's models sends 24 times fewer bytes,
# and four take more than 2,000 launches: docs/bench/units.md.
MAX_UNITS = 3
MIN_UNIT_BYTES = 25 * 2**20  # DDP's own bucket size

T = TypeVar("T")


def cut(gradients: Iterable[tuple[T, int]], least: int = MIN_UNIT_BYTES, most: int = MAX_UNITS) -> list[list[T]]:
    """Cut what comes in this order, each with its bytes, into units: ``most`` at most, alike in bytes, or fewer of
    about ``least`` bytes.
    """
    listed = list(gradients)
    size = max(least, -(-sum(nbytes for _, nbytes in listed) // most))
    units: list[list[T]] = []
    before, last = 0, -1
    for one, nbytes in listed:
        if before // size > last:
            units.append([])
            last = before // size
        units[-1].append(one)
        before += nbytes
    return units


def cut_shards(gradients: Sequence[tuple[T, Sequence[int]]], units: int) -> list[list[T]]:
    """Share out what comes together, each with its values in the shard of every process, so that each of so many units
    has about as much of every shard.

    A sum of which each process gets its own shard alone takes as many bytes as if all shards were as large as the
    largest one. Of the first third of a buffer that would be more than sums for everyone take.
    """
    loads = [[0] * len(gradients[0][1]) for _ in range(units)]
    chosen = [0] * len(gradients)
    for place in sorted(range(len(gradients)), key=lambda place: -sum(gradients[place][1])):
        values = gradients[place][1]
        fullest = [
            max((have + own for have, own in zip(load, values, strict=True) if own), default=0) for load in loads
        ]
        chosen[place] = min(range(units), key=lambda unit: (fullest[unit], sum(loads[unit])))
        load = loads[chosen[place]]
        load[:] = [have + own for have, own in zip(load, values, strict=True)]
    return [[one for (one, _), own in zip(gradients, chosen, strict=True) if own == unit] for unit in range(units)]


class Unit:
    """Gradients that are reduced together, by name, in the order in which they come."""

    def __init__(self, names: Sequence[str], reducer: GradientReducer):
        self.names = names
        self.reducer = reducer
        self.gradients: dict[str, Tensor] = {}  # that have come in this step

    @property
    def complete(self) -> bool:
        """Whether all have come."""
        return len(self.gradients) == len(self.names)


class Units:
    """The units of one stage, and what has come of their gradients in the step under way."""

    def __init__(self, units: Sequence[Unit]):
        self._units = units
        self._of = {name: unit for unit in units for name in unit.names}

    def __iter__(self) -> Iterator[Unit]:
        return iter(self._units)

    def __len__(self) -> int:
        return len(self._units)

    def begin(self) -> None:
        """A step begins: no gradient has come."""
        for unit in self._units:
            unit.gradients = {}

    def add(self, gradients: Mapping[str, Tensor]) -> list[Unit]:
        """These have come; the units that they complete, in order.

        Every process must add them in the same order.
        """
        for name, gradient in gradients.items():
            self._of[name].gradients[name] = gradient
        complete = [unit for unit in self.of(gradients) if unit.complete]
        for unit in complete:
            unit.gradients = {name: unit.gradients[name] for name in unit.names}
        return complete

    def awaits(self, names: Iterable[str]) -> bool:
        """Whether a step is under way, and these have not come in it."""
        under_way = any(unit.gradients for unit in self._units)
        return under_way and not any(name in self._of[name].gradients for name in names)

    def of(self, names: Iterable[str]) -> list[Unit]:
        """The units in which these are."""
        return list(dict.fromkeys(self._of[name] for name in names))

    @property
    def complete(self) -> bool:
        """Whether all have come."""
        return all(unit.complete for unit in self._units)

    @property
    def missing(self) -> list[str]:
        """The names of those that have not come."""
        return sorted(name for unit in self._units for name in unit.names if name not in unit.gradients)
