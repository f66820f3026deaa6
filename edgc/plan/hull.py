"""Which ways to send parameters leave the least noise, all together, in so many bytes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from edgc.plan.candidates import Candidate
from edgc.plan.choices import Choice


@dataclass(frozen=True)
class Option:
    """One way to send a parameter: bytes of a message, and the noise."""

    choice: Choice
    size: float
    noise: float


def options(candidate: Candidate, bytes_per_value: Mapping[str, float], same_method: bool = False) -> list[Option]:
    """The ways to send a parameter that lie on the lower convex hull of noise over bytes, fewest bytes first.

    ``bytes_per_value``: of the formats to choose from. ``same_method``: only those of its present method.
    """
    return lower_hull(
        Option(choice, candidate.size(choice, bytes_per_value), candidate.noise(choice))
        for choice in candidate.choices(bytes_per_value, same_method)
    )


def lower_hull(found: Iterable[Option]) -> list[Option]:
    """Of these options those on the lower convex hull of noise over bytes, fewest bytes first."""
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


def spend(
    candidates: Sequence[Candidate],
    bytes_per_value: Mapping[str, float],
    budget: float,
    same_methods: bool = False,
    little: float = 0.0,
) -> list[Choice]:
    """For each parameter the choice with which all together have the least weighted noise in ``budget`` bytes.

    ``same_methods``: each keeps the method by which it travels now. ``little``: no more bytes are spent once the mean
    noise is less than this.

    All start at their smallest option. Steps up the hulls are taken in falling order of noise saved per byte, as long
    as they fit. If not even the smallest options fit, they are the choice.
    """
    hulls = [options(candidate, bytes_per_value, same_methods) for candidate in candidates]
    places = [0] * len(hulls)
    left = budget - sum(hull[0].size for hull in hulls)
    steps = sorted(
        (candidate.weight * _slope(lower, upper), index, place)
        for index, (candidate, hull) in enumerate(zip(candidates, hulls, strict=True))
        for place, (lower, upper) in enumerate(pairwise(hull))
    )
    noise = sum(one.weight * hull[0].noise for one, hull in zip(candidates, hulls, strict=True))
    enough = little * sum(one.weight for one in candidates)
    for _, index, place in steps:
        if noise < enough:
            break
        lower, upper = hulls[index][place : place + 2]
        cost = upper.size - lower.size
        # a step that does not fit ends a parameter's turn: it would have to skip one
        if cost <= left and places[index] == place:
            noise += candidates[index].weight * (upper.noise - lower.noise)
            places[index] += 1
            left -= cost
    return [hull[place].choice for hull, place in zip(hulls, places, strict=True)]
