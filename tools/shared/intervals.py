"""Means and their confidence intervals, as tables have them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

# Two-sided 95 % quantiles of Student's t distribution, by degrees of freedom.
T_95 = (
    *(math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262),
    *(2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),  # beyond, that is a little wide
)


@dataclass(frozen=True)
class Interval:
    """A mean and the half width of its 95 % confidence interval, by Student's t: infinite for one value."""

    mean: float
    half_width: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        count = len(values)
        if count < 2:
            return cls(values[0], math.inf)
        quantile = T_95[min(count, len(T_95)) - 1]
        return cls(fmean(values), quantile * stdev(values) / math.sqrt(count))

    def number(self, digits: int, sign: str = "") -> str:
        """``-4.36 ± 0.10``; ``sign`` as in a format."""
        width = f" ± {self.half_width:.{digits}f}" if math.isfinite(self.half_width) else ""
        return f"{self.mean:{sign}.{digits}f}{width}"

    def percent(self, digits: int = 2) -> str:
        """``+0.25 % ± 0.10``."""
        width = f" ± {100 * self.half_width:.{digits}f}" if math.isfinite(self.half_width) else ""
        return percent(self.mean, digits) + width


def percent(share: float, digits: int = 2) -> str:
    """``+0.25 %``."""
    return f"{100 * share:+.{digits}f} %"
