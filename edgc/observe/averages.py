"""Averages of values of which some may be missing or not finite."""

import math
from collections.abc import Sequence
from statistics import fmean, median

from torch import Tensor


def mean_of_finite(values: Sequence[float | Tensor]) -> float:
    """Mean of those that are finite; NaN of none."""
    finite = [value for value in map(float, values) if math.isfinite(value)]
    return fmean(finite) if finite else math.nan


def median_or_nan(values: Sequence[float]) -> float:
    """Median; NaN of nothing."""
    return median(values) if values else math.nan
