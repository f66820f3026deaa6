"""How much noise a way to send a parameter makes, predicted from few measurements.

The *noise* of a parameter is 1/c^2 - 1. Here c is the cosine between what the optimizer got and the sum of the
gradients, in the unit of the descent (``edgc.observe.fidelity``). So the noise is the energy across that sum over the
energy along it. A planner weights it by the energy of the sum: over all parameters, that adds up to how much a step of
Adam lowers the loss.

*Sending parts*. A part is a direction of a low rank, or a row.

- In every step, a gradient brings new energy G_j into part j. The G_j fall as a power law, j^-a.
- A step sends the r parts that hold most. What a part holds includes its error.
- So there is a level t. A part with G_j above t is sent in every step. Any other part is sent once it has filled up to
  t, which takes t / G_j steps. The condition r = sum_j min(1, G_j / t) gives t. That is reverse water-filling (Cover
  and Thomas, section 10.3.3), over time.
- Of this step's gradient in part j, the share min(1, G_j / t) is sent at once. The rest is sent later. In the mean a
  step sends as much energy as a gradient brings. So c(r) = sum_j G_j min(1, G_j / t) / sum_j G_j.
- One measured noise gives a. Then a gives the noise at all other r. If the noise is larger than that of equal G_j, a
  factor multiplies the law.
- Of rows the law is known before anything is compressed: the warm-up measures how much energy the largest rows of a
  step's gradient hold. That is c. Rows differ from step to step, as tokens do, so nothing fills up.

*Rounding*. Of normal values b bits lose a share d(b) of the energy. With error feedback the noise is d / (1 - d). A
measured factor multiplies it, for outliers and for sums that are rounded twice.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

# Share of the energy of normal values that a format loses. 1 to 3 bits: Max 1960, table II. More bits: step^2 / 12,
# with the largest of 128 values, about 2.6 root mean squares, at the last code. Numbers with an exponent lose too
# little to count.
LOST: Mapping[str, float] = {
    **dict.fromkeys(("fp32", "bf16", "fp16", "fp8"), 0.0),
    "int1": 0.3634,
    "int2": 0.1188,
    "int3": 0.03454,
    **{f"int{bits}": (2.6 / (2 ** (bits - 1) - 1)) ** 2 / 12 for bits in (4, 5, 6, 8)},
}
# Exponents by which the energy of a gradient falls from direction to direction, and from row to row: guesses until they
# are measured. They are on the high side where a way may be good: what looks good is tried, and so it is measured. Few
# rows of an embedding may have a token that occurs in a step.
STEEPNESS_OF_DIRECTIONS, STEEPNESS_OF_ROWS = 1.7, 1.3
ENERGY_OF_VECTORS = 10.0  # of an entry of a one-dimensional parameter, over that of a mean entry: a guess as well
STEEPEST = 4.0  # exponent of a power law
LARGEST_FACTOR = 100.0  # of noise over that of a law: few samples can say anything
LEAST_NOISE = 1e-3  # of parts that hold all energy of the gradients seen: later ones may have others
LARGEST_NOISE = 1000.0  # where next to nothing of a gradient arrives
NEWEST = 0.25  # least weight of a new measurement: a window has few samples of a small parameter


@dataclass(frozen=True)
class EnergySpectrum:
    """How the energy of a gradient is spread over its parts.

    ``parts``: the number of its directions, or rows. ``steepness``: exponent of the power law. ``factor``: how many
    times the noise is that of the law. Both are guesses until there are ``measurements``. ``measured_shares``: pairs
    (parts, share) with both growing: the share of a gradient's energy that so many of its largest parts hold. Where
    they are known, they take the place of the power law.
    """

    parts: int
    steepness: float
    factor: float = 1.0
    measurements: int = 0
    measured_shares: tuple[tuple[int, float], ...] = ()

    def noise(self, sent: int) -> float:
        """The noise where each step sends so many parts."""
        return min(self.factor, LARGEST_FACTOR) * self._law(sent)

    def _law(self, sent: int) -> float:
        if not self.measured_shares:
            return noise_of_parts(sent, self.parts, self.steepness)
        parts, shares = zip((0, 0.0), *self.measured_shares, (self.parts, 1.0), strict=True)
        share = max(float(np.interp(sent, parts, shares)), 1e-2)
        return max(1 / share**2 - 1, LEAST_NOISE)

    def fitted(self, sent: int, noise: float) -> "EnergySpectrum":
        """The same as measured now and before."""
        noise = _averaged(noise, self.noise(sent), self.measurements)
        if self.measured_shares:
            factor = min(max(noise / self._law(sent), 1 / LARGEST_FACTOR), LARGEST_FACTOR)
            return replace(self, factor=factor, measurements=self.measurements + 1)
        flat = noise_of_parts(sent, self.parts, 0.0)
        if flat == 0:  # all parts
            return self
        exponent, factor = steepness(noise, sent, self.parts), min(max(noise / flat, 1.0), LARGEST_FACTOR)
        return replace(self, steepness=exponent, factor=factor, measurements=self.measurements + 1)

    def with_noise_scaled(self, ratio: float) -> "EnergySpectrum":
        """The same with every noise times ``ratio``. The factor itself has no bound, so that the inverse ratio takes
        this back.
        """
        return replace(self, factor=self.factor * ratio)


@dataclass(frozen=True)
class RoundingNoise:
    """What rounding makes of a parameter. ``factor``: how many times the noise is that of normal values; a guess until
    there are ``measurements``.
    """

    factor: float = 4.0
    measurements: int = 0

    def noise(self, format_name: str) -> float:
        """The noise where every value travels in this format."""
        return self.factor * noise_of_format(format_name)

    def fitted(self, format_name: str, noise: float) -> "RoundingNoise":
        """The same as measured now and before."""
        noise = _averaged(noise, self.noise(format_name), self.measurements)
        return RoundingNoise(min(max(noise / noise_of_format(format_name), 0.5), LARGEST_FACTOR), self.measurements + 1)


def _averaged(noise: float, before: float, measurements: int) -> float:
    """The geometric mean of a measured noise and of what this many measurements before it had given."""
    weight = max(1 / (measurements + 1), NEWEST)  # 1 for the first
    return float(noise**weight * before ** (1 - weight))


def noise_of_format(name: str) -> float:
    """Noise of normal values in this format under error feedback. Raises KeyError for a format without an entry in
    ``LOST``.
    """
    return LOST[name] / (1 - LOST[name])


@lru_cache(maxsize=4096)
def noise_of_parts(sent: int, parts: int, steepness: float) -> float:
    """The noise of parts whose energies are j^-steepness: see the top of this module."""
    if sent >= parts:
        return 0.0
    energies = np.arange(1.0, parts + 1) ** -steepness
    whole = energies.sum()
    head = energies[:sent]
    # With the k largest above the level: k + sum of the others / level = sent.
    levels = (whole - np.cumsum(head) + head) / (sent - np.arange(sent))
    # the largest k for which the k-th part still reaches the level
    reached = np.flatnonzero(head[:-1] >= levels[1:])
    count = int(reached[-1]) + 1 if len(reached) else 0
    cosine = np.sum(energies * np.minimum(1.0, energies / levels[count])) / whole
    return float(1 / cosine**2 - 1)


def steepness(noise: float, sent: int, parts: int) -> float:
    """The exponent at which the noise is this much if so many parts are sent, between 0 and ``STEEPEST``."""
    low, high = 0.0, STEEPEST
    if noise >= noise_of_parts(sent, parts, low):
        return low
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if noise_of_parts(sent, parts, middle) > noise else (low, middle)
    return round((low + high) / 2, 2)  # two digits are enough, and the laws of many parameters are then the same
