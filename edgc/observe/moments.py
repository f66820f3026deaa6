"""The distribution of a gradient: is it normal, as the Gaussian entropy assumes? Off the training path."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from torch import Tensor

from edgc.observe.averages import mean_of_finite
from edgc.observe.entropy import gaussian_entropy, histogram_entropy


@dataclass(frozen=True)
class GradientStatistics:
    """Moments and entropies (nats) of a sample of gradient entries."""

    standard_deviation: float
    skewness: float
    excess_kurtosis: float
    gaussian_entropy: float
    histogram_entropy: float

    @classmethod
    def of(cls, sample: Tensor) -> "GradientStatistics":
        """The statistics of a tensor of any shape with at least two elements. Where these do not vary, skewness and
        kurtosis are NaN, and entropies minus infinity.
        """
        values = sample.detach().double()
        centred = values - values.mean()
        variance = float(centred.square().mean())
        deviation = variance**0.5
        # of the standardised values, so that tiny gradients do not underflow
        standard = centred / deviation
        return cls(
            deviation,
            float(standard.pow(3).mean()),
            float(standard.pow(4).mean()) - 3,
            float(gaussian_entropy(sample)),
            histogram_entropy(sample),
        )

    @classmethod
    def mean(cls, several: Sequence["GradientStatistics"]) -> "GradientStatistics":
        """Field by field, of what is finite."""
        return cls(*(mean_of_finite([getattr(one, field.name) for one in several]) for field in fields(cls)))
