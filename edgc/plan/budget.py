"""How to send each parameter so that, under one budget of bytes, the optimizer gets the least noise.

The *noise* of a parameter is 1/c^2 - 1, where c is the cosine between what the optimizer got and the sum of the
gradients, in the unit of the update (``edgc.observe.fidelity``): the energy that does not lie along that sum, over the
energy that does. Of all that was measured of engines of every kind it foretells the loss best
(docs/frontier/fidelity.md). Two laws say how it grows as bytes shrink. Each is scaled by what was measured of the
parameter.

*Low rank.* Let a gradient bring the energy G_j into direction j in every step, anew, and let each step send the r
directions that hold most, errors included. A direction with G_j above a level t is then sent in every step, another one
whenever it has filled up to t, every t / G_j steps. So r = sum_j min(1, G_j / t) sets the level. That is reverse
water-filling (Cover and Thomas, section 10.3.3), over time. Of the gradient of a step the share min(1, G_j / t) of
direction j leaves at once; what a step sends has as much energy as a gradient, of which the rest is older:

    c(r) = sum_j G_j min(1, G_j / t) / sum_j G_j

Spectra are taken as power laws, G_j = j^-a: one measured value of the noise gives a, and a gives all others. Where the
noise is larger than of a flat spectrum, as of rare words in an embedding, a factor says by how much.

*Rounding.* Of normal values b bits lose a share d(b) of the energy, and with error feedback the noise is d / (1 - d).
What is measured beside it multiplies this: outliers, and sums that are rounded twice.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from edgc.plan.alignment import RANK_MULTIPLE
from edgc.specs import MatrixSpec

# Share of the energy of normal values that a format loses. 2 and 3 bits: Max 1960, table II. More bits: step^2 / 12,
# with the largest of 128 values, about 2.6 root mean squares, at the last code.
LOST: Mapping[str, float] = {
    "int2": 0.1188,
    "int3": 0.03454,
    **{f"int{bits}": (2.6 / (2 ** (bits - 1) - 1)) ** 2 / 12 for bits in (4, 5, 6, 8)},
}
STEEPEST = 4.0  # exponent of a spectrum
LARGEST_FACTOR = 100.0  # of noise over that of a law: few samples can say anything
LARGEST_NOISE = 1000.0  # where next to nothing of a gradient arrives
# A plan stays while it is within the budget, uses this much of it, and a new one would not have this much less noise.
LEAST_USED, LEAST_GAIN = 0.97, 0.05
Choice = int | str  # a rank, or the format in which every value travels


@dataclass(frozen=True)
class Candidate:
    """A parameter, and what it costs to send it.

    ``weight``: of its noise. ``bytes_per_rank``: None where low rank is no choice. ``price``: of its bytes.
    ``steepness``: the exponent of its spectrum. ``flatter``: how many times the noise is that of a flat spectrum, if it
    is larger: small entries that no direction is made of. ``rounding``: how many times the noise is that of normal
    values. The last three are guesses until ``fitted``.
    """

    matrix: MatrixSpec
    weight: float
    bytes_per_rank: float | None
    price: float = 1.0
    steepness: float = 1.5
    flatter: float = 1.0
    rounding: float = 4.0
    known: frozenset[str] = frozenset()  # of the two laws, those that are fitted

    @property
    def elements(self) -> int:
        return self.matrix.rows * self.matrix.cols

    @property
    def directions(self) -> int:
        return min(self.matrix.rows, self.matrix.cols)

    def size(self, choice: Choice, bytes_per_value: Mapping[str, float]) -> float:
        """Bytes of a message, times the price."""
        if isinstance(choice, str):
            return self.price * self.elements * bytes_per_value[choice]
        assert self.bytes_per_rank is not None
        return self.price * choice * self.bytes_per_rank

    def noise(self, choice: Choice) -> float:
        """The noise under this choice, predicted."""
        if isinstance(choice, str):
            return self.rounding * noise_of_format(choice)
        return self.flatter * noise_of_rank(choice, self.directions, self.steepness)

    def fitted(self, choice: Choice, noise: float) -> "Candidate":
        """The same as measured under ``choice``: the geometric mean of that and what was known before, if it was."""
        if not noise > 0:
            return self
        noise = min(noise, LARGEST_NOISE)
        law = "rounding" if isinstance(choice, str) else "rank"
        if law in self.known:
            noise = math.sqrt(noise * self.noise(choice))
        if isinstance(choice, str):
            factor = min(max(noise / noise_of_format(choice), 0.5), LARGEST_FACTOR)
            return replace(self, rounding=factor, known=self.known | {law})
        flat = noise_of_rank(choice, self.directions, 0.0)
        steep, flatter = steepness(noise, choice, self.directions), min(max(noise / flat, 1.0), LARGEST_FACTOR)
        return replace(self, steepness=steep, flatter=flatter, known=self.known | {law})


@dataclass(frozen=True)
class Option:
    """One way to send a parameter: bytes of a message, and the noise."""

    choice: Choice
    size: float
    noise: float


def options(candidate: Candidate, bytes_per_value: Mapping[str, float]) -> list[Option]:
    """The ways to send a parameter that lie on the lower convex hull of noise over bytes, fewest bytes first."""
    choices: list[Choice] = list(bytes_per_value)
    if candidate.bytes_per_rank is not None:
        choices += ranks_to_try(candidate.directions)
    found = [Option(choice, candidate.size(choice, bytes_per_value), candidate.noise(choice)) for choice in choices]
    hull: list[Option] = []
    for option in sorted(found, key=lambda option: (option.size, option.noise)):
        if hull and option.noise >= hull[-1].noise:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-2], option):
            hull.pop()
        hull.append(option)
    return hull


def _slope(first: Option, second: Option) -> float:
    return (second.noise - first.noise) / (second.size - first.size)


def spend(candidates: Sequence[Candidate], bytes_per_value: Mapping[str, float], budget: float) -> list[Choice]:
    """For each parameter the choice with which all together have the least weighted noise in ``budget`` bytes.

    All start at their smallest option. Steps up the hulls are taken in falling order of noise saved per byte, as long
    as they fit. If not even the smallest options fit, they are the choice.
    """
    ways = [options(candidate, bytes_per_value) for candidate in candidates]
    places = [0] * len(ways)
    left = budget - sum(way[0].size for way in ways)
    steps = sorted(
        (candidate.weight * _slope(lower, upper), index, place)
        for index, (candidate, way) in enumerate(zip(candidates, ways, strict=True))
        for place, (lower, upper) in enumerate(pairwise(way))
    )
    for _, index, place in steps:
        cost = ways[index][place + 1].size - ways[index][place].size
        # a step that does not fit ends a parameter's turn: it would have to skip one
        if cost <= left and places[index] == place:
            places[index] += 1
            left -= cost
    return [way[place].choice for way, place in zip(ways, places, strict=True)]


class BudgetPlanner:
    """Gives every parameter of all stages its choice, so that the whole run sends its budget.

    Args:
        volume: bytes of gradients in fp32 over those of the run.
        iterations: of the run; ``first``: the one at which compression begins.
        stages: the parameters of each stage.
        never: places of stages that are never compressed.
        bytes_per_value: of the formats to choose from; ``uncompressed``: of what is not compressed; ``gradient_bytes``:
            of the host's gradients.
    """

    def __init__(
        self,
        volume: float,
        iterations: int,
        first: int,
        stages: Sequence[Sequence[Candidate]],
        never: Collection[int],
        bytes_per_value: Mapping[str, float],
        uncompressed: float,
        gradient_bytes: int = 4,
    ):
        self.volume, self.iterations, self.first = volume, iterations, first
        self.places = [place for place in range(len(stages)) if place not in never]
        self.candidates = {place: list(stages[place]) for place in self.places}
        self.bytes_per_value = bytes_per_value
        self.gradient_bytes = gradient_bytes
        elements = [sum(candidate.price * candidate.elements for candidate in stage) for stage in stages]
        self.dense = 4.0 * sum(elements)  # bytes of a step's messages in fp32
        self.uncompressed = uncompressed * sum(elements)
        self.never = uncompressed * sum(elements[place] for place in never)
        self.sent, self.sent_dense = 0.0, 0.0  # as counted so far
        self.per_step: float | None = None  # bytes that the last window took, in the unit of ``dense``
        # how many times more than predicted a step takes: padding, samples, the host's reduce-scatter; None: not known
        self.overhead: float | None = None
        self.short = False  # whether not even the smallest options fit
        self.choices = self._best(self.budget(first))

    def budget(self, iteration: int) -> float:
        """Bytes of the messages of each step from ``iteration`` on."""
        sent, dense = self.sent, self.sent_dense
        if not dense:  # nothing is counted yet: what the warm-up takes
            sent, dense = iteration * self.uncompressed, iteration * self.dense
        done = iteration * self.dense
        spent = sent / dense * done if dense else 0.0
        unspent = self.dense * self.iterations / self.volume - spent
        return unspent / max(self.iterations - iteration, 1) / (self.overhead or 1.0) - self.never

    def observe(self, noise: Sequence[Mapping[str, float]], sent: float, dense: float) -> None:
        """Take in a window: the noise of each stage's parameters; the bytes of the run so far, and the host's."""
        dense *= 4 / self.gradient_bytes
        sent_before, dense_before, self.sent, self.sent_dense = self.sent, self.sent_dense, sent, dense
        if dense > dense_before:
            self.per_step = (sent - sent_before) / (dense - dense_before) * self.dense
        for place in self.places:
            self.candidates[place] = [
                candidate.fitted(choice, noise[place].get(candidate.matrix.name, math.nan))
                for candidate, choice in zip(self.candidates[place], self.choices[place], strict=True)
            ]

    def decide(self, iteration: int) -> None:
        """The choices from ``iteration`` on. They stay as they are unless others pay for the change."""
        if iteration >= self.iterations:
            return
        first_window = self.overhead is None  # a part of it may have been warm-up
        if self.per_step is not None:
            self.overhead = 1.0 if first_window else self.per_step / (self._size(self.choices) + self.never)
        budget = self.budget(iteration)
        best = self._best(budget)
        size, noise = self._size(self.choices), self._noise(self.choices)
        fits = LEAST_USED * budget <= size <= budget
        if not fits or self._noise(best) < (1 - LEAST_GAIN) * noise:
            self.choices = best

    def _best(self, budget: float) -> dict[int, list[Choice]]:
        every = [candidate for place in self.places for candidate in self.candidates[place]]
        found = iter(spend(every, self.bytes_per_value, budget))
        best = {place: [next(found) for _ in self.candidates[place]] for place in self.places}
        self.short = self._size(best) > budget
        return best

    def _size(self, choices: Mapping[int, Sequence[Choice]]) -> float:
        return sum(
            candidate.size(choice, self.bytes_per_value)
            for place in self.places
            for candidate, choice in zip(self.candidates[place], choices[place], strict=True)
        )

    def _noise(self, choices: Mapping[int, Sequence[Choice]]) -> float:
        return sum(
            candidate.weight * candidate.noise(choice)
            for place in self.places
            for candidate, choice in zip(self.candidates[place], choices[place], strict=True)
        )

    def ranks(self, place: int) -> dict[str, int]:
        """Of a stage's parameters that travel in low rank, by name."""
        return {name: choice for name, choice in self._named(place) if isinstance(choice, int)}

    def formats(self, place: int) -> dict[str, str]:
        """Of a stage's parameters that are rounded, by name."""
        return {name: choice for name, choice in self._named(place) if isinstance(choice, str)}

    def _named(self, place: int) -> Iterator[tuple[str, Choice]]:
        names = (candidate.matrix.name for candidate in self.candidates[place])
        return zip(names, self.choices[place], strict=True)

    @property
    def reason(self) -> str:
        """Why the choices are as they are."""
        return "the budget is too small" if self.short else "budget"

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        stages = {
            str(place): {
                one.matrix.name: [*_shape(one), choice, one.steepness, one.flatter, one.rounding, sorted(one.known)]
                for one, choice in zip(self.candidates[place], self.choices[place], strict=True)
            }
            for place in self.places
        }
        sent = [self.sent, self.sent_dense]
        return {"sent": sent, "overhead": self.overhead, "short": self.short, "stages": stages}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken. Raises ValueError if it is of other parameters."""
        for place in self.places:
            saved = state["stages"].get(str(place), {})
            own = {one.matrix.name: _shape(one) for one in self.candidates[place]}
            if {name: values[:3] for name, values in saved.items()} != own:
                raise ValueError("the budget's state is of other parameters")
        self.sent, self.sent_dense = state["sent"]
        self.overhead, self.short = state["overhead"], state["short"]
        for place in self.places:
            saved = [state["stages"][str(place)][one.matrix.name][3:] for one in self.candidates[place]]
            self.choices[place] = [choice for choice, *_ in saved]
            self.candidates[place] = [
                replace(one, steepness=steep, flatter=flatter, rounding=rounding, known=frozenset(known))
                for one, (_, steep, flatter, rounding, known) in zip(self.candidates[place], saved, strict=True)
            ]


def _shape(candidate: Candidate) -> list[Any]:
    """What must be as it was for a choice to make sense."""
    return [candidate.matrix.rows, candidate.matrix.cols, candidate.bytes_per_rank is not None]


def bits_of(name: str) -> int:
    """Of a value in a wire format, without its share of a scale: 4 of int4."""
    return int(name.lstrip("abcdefghijklmnopqrstuvwxyz"))


def noise_of_format(name: str) -> float:
    """Of normal values, with error feedback; 0 for formats whose rounding does not matter."""
    lost = LOST.get(name, 0.0)
    return lost / (1 - lost)


@lru_cache(maxsize=4096)
def noise_of_rank(rank: int, directions: int, steepness: float) -> float:
    """Of a spectrum j^-steepness: see the top of this module."""
    if rank >= directions:
        return 0.0
    energies = np.arange(1.0, directions + 1) ** -steepness
    whole = energies.sum()
    head = energies[:rank]
    # With the k largest above the level: k + sum of the others / level = rank.
    levels = (whole - np.cumsum(head) + head) / (rank - np.arange(rank))
    # the largest k for which the k-th direction still reaches the level
    reached = np.flatnonzero(head[:-1] >= levels[1:])
    count = int(reached[-1]) + 1 if len(reached) else 0
    cosine = np.sum(energies * np.minimum(1.0, energies / levels[count])) / whole
    return float(1 / cosine**2 - 1)


def ranks_to_try(directions: int) -> list[int]:
    """Multiples of 4 up to half of full rank, beyond 64 about a twelfth apart."""
    ranks, rank = [], RANK_MULTIPLE
    while rank <= directions // 2:
        ranks.append(rank)
        rank += RANK_MULTIPLE * max(1, rank // (12 * RANK_MULTIPLE))
    return ranks


def steepness(noise: float, rank: int, directions: int) -> float:
    """The exponent at which the noise is this much at this rank, between 0 and ``STEEPEST``."""
    low, high = 0.0, STEEPEST
    if noise >= noise_of_rank(rank, directions, low):
        return low
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if noise_of_rank(rank, directions, middle) > noise else (low, middle)
    return round((low + high) / 2, 2)  # two digits are enough, and the laws of many parameters are then the same
