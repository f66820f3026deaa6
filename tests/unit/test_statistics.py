import math

import pytest
import torch

from edgc.observe.moments import GradientStatistics

NORMAL_ENTROPY = 0.5 * math.log(2 * math.pi * math.e)


def draw(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(200_000, generator=generator)
    if kind == "normal":
        return normal
    uniform = torch.rand(200_000, generator=generator)
    return -uniform.log() if kind == "exponential" else uniform


@pytest.mark.parametrize(
    ("kind", "deviation", "skewness", "kurtosis", "entropy"),
    [
        ("normal", 1, 0, 0, NORMAL_ENTROPY),
        ("exponential", 1, 2, 6, 1.0),
        ("uniform", 12**-0.5, 0, -1.2, 0.0),
    ],
)
def test_known_distributions(kind: str, deviation: float, skewness: float, kurtosis: float, entropy: float) -> None:
    found = GradientStatistics.of(draw(kind))
    assert found.standard_deviation == pytest.approx(deviation, rel=0.01)
    assert found.skewness == pytest.approx(skewness, abs=0.06)
    assert found.excess_kurtosis == pytest.approx(kurtosis, abs=0.4)
    assert found.histogram_entropy == pytest.approx(entropy, abs=0.03)
    assert found.gaussian_entropy == pytest.approx(NORMAL_ENTROPY + math.log(deviation), abs=0.01)


def test_a_gradient_of_zeros_does_not_hide_the_others() -> None:
    usual, none = GradientStatistics.of(draw("normal")), GradientStatistics.of(torch.zeros(100))
    mean = GradientStatistics.mean([usual, none])
    assert mean.skewness == usual.skewness and mean.gaussian_entropy == usual.gaussian_entropy
    assert mean.standard_deviation == usual.standard_deviation / 2, "that is known of both"


def test_shape_does_not_depend_on_scale() -> None:
    small, large = GradientStatistics.of(1e-12 * draw("exponential")), GradientStatistics.of(draw("exponential"))
    assert small.skewness == pytest.approx(large.skewness) and small.excess_kurtosis == pytest.approx(
        large.excess_kurtosis
    )


def test_a_constant_sample_has_no_shape() -> None:
    assert math.isnan(GradientStatistics.of(torch.ones(10)).skewness)


def test_the_mean_is_taken_field_by_field() -> None:
    a, b = GradientStatistics(1, 2, 3, 4, 5), GradientStatistics(3, 4, 5, 6, 7)
    assert GradientStatistics.mean([a, b]) == GradientStatistics(2, 3, 4, 5, 6)
