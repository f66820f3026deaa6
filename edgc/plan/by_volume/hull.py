"""Which ways to send parameters leave the least noise, all together, in so many bytes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from edgc.plan.by_volume.choices import Choice
from edgc.plan.by_volume.parameters import PlannedParameter


@dataclass(frozen=True)
class Option:
    """One way to send a parameter: its bytes, and its noise."""

    choice: Choice
    size: float
    noise: float


def options(
    parameter: PlannedParameter, bytes_per_value: Mapping[str, float], same_method: bool = False
) -> list[Option]:
    """The ways to send a parameter that lie on the lower convex hull of noise over bytes, fewest bytes first.

    ``bytes_per_value``: of the formats to choose from. ``same_method``: only those of its present method.
    """
    return lower_hull(
        Option(choice, parameter.size(choice, bytes_per_value), parameter.noise(choice))
        for choice in parameter.choices(bytes_per_value, same_method)
    )


def lower_hull(found: Iterable[Option]) -> list[Option]:
    """Those of these options on the lower convex hull of noise over bytes, fewest bytes first."""
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
    parameters: Sequence[PlannedParameter],
    bytes_per_value: Mapping[str, float],
    budget: float,
    same_methods: bool = False,
    enough_noise: float = 0.0,
) -> list[Choice]:
    """For each parameter the choice with which all together have the least weighted noise in ``budget`` bytes.

    ``same_methods``: each keeps the method by which it travels now. ``enough_noise``: no more bytes are spent once the
    mean noise is less than this.

    All start at their smallest option. Steps up the hulls are taken in falling order of noise saved per byte, as long
    as they fit. If not even the smallest options fit, they are the choice.
    """
    hulls = [options(one, bytes_per_value, same_methods) for one in parameters]
    steps = sorted(
        (one.weight * _slope(lower, upper), index, step)
        for index, (one, hull) in enumerate(zip(parameters, hulls, strict=True))
        for step, (lower, upper) in enumerate(pairwise(hull))
    )
    taken = [0] * len(hulls)  # steps up each hull
    left = budget - sum(hull[0].size for hull in hulls)
    noise = sum(one.weight * hull[0].noise for one, hull in zip(parameters, hulls, strict=True))
    enough = enough_noise * sum(one.weight for one in parameters)
    for _, index, step in steps:
        if noise < enough:
            break
        lower, upper = hulls[index][step : step + 2]
        cost = upper.size - lower.size
        # a step that does not fit ends a parameter's turn: it would have to skip one
        if cost <= left and taken[index] == step:
            noise += parameters[index].weight * (upper.noise - lower.noise)
            taken[index] += 1
            left -= cost
    return [hull[step].choice for hull, step in zip(hulls, taken, strict=True)]
