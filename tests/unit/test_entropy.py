"""Entropy estimators against known differential entropies, and the sampler that feeds them."""

import math

import pytest
import torch

from edgc.config import EDGCConfig
from edgc.observe import entropy
from edgc.observe.entropy import histogram_entropy, spacing_entropy
from edgc.observe.observer import GradientObserver
from edgc.observe.sampler import GradientSampler
from edgc.specs import MatrixSpec

ESTIMATORS = {name: lambda x, estimate=estimate: float(estimate(x)) for name, estimate in entropy.ESTIMATORS.items()}
gaussian_entropy = ESTIMATORS["gaussian"]
DRAWS = 200_000
NORMAL = 0.5 * math.log(2 * math.pi * math.e)


def mixture_entropy() -> float:
    """Entropy of 0.3 N(2, 3^2) + 0.7 N(-1, 0.5^2), integrated numerically."""
    x = torch.linspace(-30, 30, 600_001, dtype=torch.float64)
    density = sum(
        weight * torch.exp(-0.5 * ((x - mean) / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))
        for weight, mean, sigma in ((0.3, 2, 3), (0.7, -1, 0.5))
    )
    return float(torch.special.entr(density).sum() * (x[1] - x[0]))


def draw(shape: str, count: int = DRAWS, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(count, generator=generator)
    uniform = torch.rand(count, generator=generator)
    match shape:
        case "normal":
            return 0.02 * normal + 1
        case "uniform":
            return 3 * uniform - 7
        case "laplace":
            return (0.5 - uniform).sign() * torch.log1p(-2 * (uniform - 0.5).abs().clamp(max=0.4999999))
        case "mixture":
            return torch.where(uniform < 0.3, 2 + 3 * normal, -1 + 0.5 * normal)
        case "cauchy":
            return torch.tan(math.pi * (uniform.double() - 0.5)).float()
    raise ValueError(shape)


# Known differential entropy and standard deviation.
KNOWN = {
    "normal": (NORMAL + math.log(0.02), 0.02),
    "uniform": (math.log(3), math.sqrt(3) / 2),
    "laplace": (1 + math.log(2), math.sqrt(2)),
    "mixture": (mixture_entropy(), math.sqrt(0.3 * 9 + 0.7 * 0.25 + 0.3 * 0.7 * 9)),
    "cauchy": (math.log(4 * math.pi), math.inf),
}


@pytest.mark.parametrize("estimator, tolerance", [(histogram_entropy, 0.015), (spacing_entropy, 0.015)])
@pytest.mark.parametrize("shape", ["normal", "uniform", "laplace", "mixture"])
def test_shape_free_estimators_find_the_known_entropy(estimator, tolerance: float, shape: str) -> None:
    assert estimator(draw(shape)) == pytest.approx(KNOWN[shape][0], abs=tolerance)


@pytest.mark.parametrize("shape", ["normal", "uniform", "laplace", "mixture"])
def test_gaussian_is_the_formula_at_the_known_sigma_and_an_upper_bound(shape: str) -> None:
    entropy, sigma = KNOWN[shape]
    estimate = gaussian_entropy(draw(shape))
    assert estimate == pytest.approx(NORMAL + math.log(sigma), abs=0.01)
    assert estimate > entropy - 0.01
    if shape != "normal":
        assert estimate > entropy + 0.05


def test_gaussian_stays_on_the_device_until_somebody_asks() -> None:
    """A tensor of the device ``meta`` has no values: reading one, as ``float`` does, is an error there."""
    assert entropy.gaussian_entropy(torch.empty(100, device="meta")).shape == ()
    with pytest.raises(RuntimeError):
        histogram_entropy(torch.empty(100, device="meta"))


def test_gaussian_takes_values_of_any_size() -> None:
    for size in (1e-300, 1e300):
        assert gaussian_entropy(size * torch.tensor([-1.0, 1.0], dtype=torch.float64)) == pytest.approx(
            NORMAL + 0.5 * math.log(2) + math.log(size)
        )


def test_gaussian_uses_the_unbiased_variance() -> None:
    assert gaussian_entropy(torch.tensor([3.0, 5.0])) == pytest.approx(NORMAL + 0.5 * math.log(2))


@pytest.mark.parametrize("count", [2, 7, 1001])
def test_gaussian_resolves_differences_in_the_last_bits(count: int) -> None:
    ticks = (torch.arange(count) % 3 == 0).double()
    expected = NORMAL + 0.5 * math.log(float(ticks.var())) + math.log(2**-52)
    assert gaussian_entropy(1 + ticks * 2**-52) == pytest.approx(expected, rel=1e-6)


def test_spacing_bias_correction_is_exact_for_uniform_data() -> None:
    estimates = [spacing_entropy(torch.rand(30, generator=torch.Generator().manual_seed(s))) for s in range(2000)]
    # Standard error 0.0013; uncorrected, the mean is -0.20.
    assert sum(estimates) / len(estimates) == pytest.approx(0, abs=0.006)


def test_heavy_tails_do_not_widen_the_bins() -> None:
    values = draw("cauchy")
    assert values.abs().max() > 1e4
    assert histogram_entropy(values) == pytest.approx(KNOWN["cauchy"][0], abs=0.03)
    normal = draw("normal")
    clean = histogram_entropy(normal)
    normal[::50_000] = 1e6
    assert histogram_entropy(normal) == pytest.approx(clean, abs=0.005)


def test_histogram_tails_are_exact_for_exponential_ones() -> None:
    # Standard error 0.001; a tail model that is off by one nat would shift this by 0.01.
    assert histogram_entropy(draw("laplace", 1_000_000)) == pytest.approx(KNOWN["laplace"][0], abs=0.003)


def test_histogram_range_does_not_hang_on_single_columns() -> None:
    # Columns whose stride divides the width, as in a matrix of attention heads, hold nothing.
    grad = torch.randn(1024, 512, generator=torch.Generator().manual_seed(6))
    grad[:, ::8] = 0
    grad[5, 5] = 1e6
    order = torch.randperm(grad.numel(), generator=torch.Generator().manual_seed(7))
    shuffled = histogram_entropy(grad.flatten()[order])
    assert histogram_entropy(grad) == pytest.approx(shuffled, abs=0.01)


def test_histogram_tails_count() -> None:
    # 0.7 % of the mass, spread over a hundred times its width: at least 0.0067 * log(100) = 0.031 nats more.
    values = draw("laplace")
    wide = torch.where(values.abs() > 5, values * 100, values)
    assert histogram_entropy(wide) - histogram_entropy(values) == pytest.approx(0.036, abs=0.01)


def test_histogram_counting_bias_is_corrected() -> None:
    estimates = [histogram_entropy(torch.rand(3000, generator=torch.Generator().manual_seed(s))) for s in range(50)]
    # Uncorrected, 256 bins read 255 / 6000 = 0.042 nats low.
    assert sum(estimates) / len(estimates) == pytest.approx(0, abs=0.01)


def test_histogram_bins_are_a_parameter() -> None:
    values = draw("normal")
    assert histogram_entropy(values, bins=2) > histogram_entropy(values, bins=64) + 0.1
    assert histogram_entropy(values, bins=64) == pytest.approx(KNOWN["normal"][0], abs=0.01)
    with pytest.raises(ValueError, match="bins = 0"):
        histogram_entropy(values, bins=0)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("factor", [3.7, -4.0, 1e-30, 1e-300, 1e300])
def test_scaling_adds_the_log_of_the_factor(name: str, factor: float) -> None:
    values = draw("laplace", 20_000).double()  # in float32 the product itself would be rounded
    expected = ESTIMATORS[name](values) + math.log(abs(factor))
    assert ESTIMATORS[name](values * factor) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_scaling_by_a_power_of_two_is_exact_in_float32(name: str) -> None:
    values = draw("cauchy", 20_000)
    for exponent in (-80, 3, 60):
        expected = ESTIMATORS[name](values) + exponent * math.log(2)
        assert ESTIMATORS[name](values * 2.0**exponent) == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_shift_permutation_and_shape_do_not_matter(name: str) -> None:
    values = draw("normal", 20_000).double()
    entropy = ESTIMATORS[name](values)
    # The histogram's range comes from a subset only beyond 2^17 entries.
    order = torch.randperm(values.numel(), generator=torch.Generator().manual_seed(2))
    assert ESTIMATORS[name](values[order].reshape(100, 200).t()) == pytest.approx(entropy, abs=1e-9)
    assert ESTIMATORS[name](values + 1000) == pytest.approx(entropy, abs=1e-4)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_entropy_of_pieces_is_that_of_the_whole_however_unlike_they_are(name: str) -> None:
    whole = torch.cat([draw("normal", 300), 2 + draw("laplace", 5000), draw("uniform", 1), draw("uniform", 700)])
    under_test = entropy.entropy_accumulator(name)
    for piece in torch.split(whole, [300, 5000, 0, 1, 700]):
        under_test.add(piece)
    assert under_test.entries == len(whole)
    assert float(under_test.entropy()) == pytest.approx(ESTIMATORS[name](whole), abs=1e-9)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    values = draw("mixture")
    assert ESTIMATORS[name](values.to(dtype)) == pytest.approx(ESTIMATORS[name](values), abs=0.01)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_input_is_left_alone(name: str) -> None:
    values = draw("laplace", 1000).double().requires_grad_()
    before = values.detach().clone()
    ESTIMATORS[name](values)
    assert torch.equal(values, before)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("size", [0, 1])
def test_too_few_elements(name: str, size: int) -> None:
    with pytest.raises(ValueError, match=f"{size} elements"):
        ESTIMATORS[name](torch.zeros(size))


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("value", [0.0, -3.3e-20, 7e37])
def test_constant_input_is_minus_infinity(name: str, value: float) -> None:
    assert ESTIMATORS[name](torch.full((1001,), value)) == -math.inf


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_entries_give_nan(name: str, bad: float) -> None:
    values = draw("normal", 1000)
    values[517] = bad
    assert math.isnan(ESTIMATORS[name](values))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_awkward_but_valid_inputs_give_finite_numbers(name: str) -> None:
    sparse = torch.zeros(10_000)  # such as the gradient of an embedding
    sparse[:5] = torch.tensor([1.0, -1.0, 2.0, 0.5, 3.0])
    clipped = draw("laplace", 10_000).clamp(min=0)
    last_bit = torch.tensor([1.0, 1.0 + 2**-52], dtype=torch.float64)
    for values in (sparse, clipped, last_bit, torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0, 2.0])):
        assert math.isfinite(ESTIMATORS[name](values))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_sign_does_not_matter_even_with_ties_at_one_end(name: str) -> None:
    clipped = draw("laplace", 10_000).clamp(min=-0.3)
    assert ESTIMATORS[name](-clipped) == pytest.approx(ESTIMATORS[name](clipped), abs=1e-9)


def test_spacing_is_not_misled_by_rounding() -> None:
    # Coarse enough for ties that hold the whole window of 2 sqrt(n) = 2000 neighbours.
    values = draw("normal", 1_000_000)
    rounded = (values * 6_000).round() / 6_000
    assert rounded.unique(return_counts=True)[1].max() > 3000
    assert spacing_entropy(rounded) == pytest.approx(KNOWN["normal"][0], abs=0.01)


# The sampler.


@pytest.mark.parametrize("rate", [0.1, 0.25, 1.0, 0.3, 1 / 3, 0.7])
def test_iterations_measured_have_the_exact_fraction_and_are_spread_evenly(rate: float) -> None:
    sampler = GradientSampler(iteration_rate=rate)
    measured = [iteration for iteration in range(21_000) if sampler.measures(iteration)]
    assert measured[0] == 0
    assert len(measured) == round(21_000 * rate)
    gaps = {later - earlier for earlier, later in zip(measured, measured[1:], strict=False)}
    assert gaps <= {math.floor(1 / rate + 1e-9), math.ceil(1 / rate - 1e-9)}


def test_every_tenth_iteration_by_default() -> None:
    assert [i for i in range(45) if GradientSampler().measures(i)] == [0, 10, 20, 30, 40]


@pytest.mark.parametrize("rate", [0.25, 0.1, 1.0, 0.3, 0.7, 0.2537])
@pytest.mark.parametrize("size", [10_000, 10_007])
def test_sample_fraction(rate: float, size: int) -> None:
    sampler = GradientSampler(gradient_rate=rate)
    sizes = [sampler.sample("w", torch.zeros(size), 10 * k).numel() for k in range(20)]
    assert all(abs(length - rate * size) < 1 for length in sizes)


@pytest.mark.parametrize("rate", [0.25, 0.1, 1.0, 0.3, 0.7, 0.2537])
@pytest.mark.parametrize("iteration_rate", [0.1, 0.3, 1.0])
def test_consecutive_measurements_cover_every_entry_alike(rate: float, iteration_rate: float) -> None:
    sampler = GradientSampler(iteration_rate=iteration_rate, gradient_rate=rate, seed=5)
    grad = torch.arange(24 * 64).reshape(24, 64)  # 1/4 of it: the same 16 columns in each row
    measured = [iteration for iteration in range(3000) if sampler.measures(iteration)]
    for start in (0, 7):
        seen = torch.zeros(grad.numel(), dtype=torch.long)
        for iteration in measured[start : start + math.ceil(1 / rate - 1e-9)]:
            seen[sampler.sample("layer.weight", grad, iteration)] += 1
        assert seen.min() >= 1
        assert seen.max() <= seen.min() + 2


@pytest.mark.parametrize("rate", [0.25, 0.3, 0.05])
def test_a_sample_spans_the_whole_buffer(rate: float) -> None:
    sampler = GradientSampler(gradient_rate=rate)
    positions = sampler.sample("w", torch.arange(100_000), 0)
    assert positions.unique().numel() == positions.numel()
    assert positions[0] < 1 / rate
    assert positions[-1] >= 100_000 - 1 / rate - 1
    gaps = positions.diff()
    assert gaps.min() >= math.floor(1 / rate)
    assert gaps.max() <= math.ceil(1 / rate)


def test_sample_is_a_view_for_an_integer_stride() -> None:
    grad = torch.randn(64, 64)
    sample = GradientSampler(gradient_rate=0.25).sample("w", grad, 0)
    assert sample.dim() == 1
    assert sample.stride() == (4,)
    assert sample.untyped_storage().data_ptr() == grad.untyped_storage().data_ptr()


def test_rate_one_takes_everything_in_order() -> None:
    grad = torch.randn(13, 7, requires_grad=True)
    sample = GradientSampler(gradient_rate=1.0).sample("w", grad, 30)
    assert torch.equal(sample, grad.detach().reshape(-1))
    assert not sample.requires_grad


def test_tiny_gradients_can_give_an_empty_sample() -> None:
    sampler = GradientSampler(gradient_rate=0.25)
    sizes = [sampler.sample("b", torch.zeros(1), 10 * k).numel() for k in range(8)]
    assert sorted(sizes) == [0] * 6 + [1] * 2
    assert GradientSampler(gradient_rate=0.3).sample("b", torch.zeros(0), 0).numel() == 0


def first_positions(seed: int, rate: float, count: int) -> list[int]:
    sampler = GradientSampler(gradient_rate=rate, seed=seed)
    return [int(sampler.sample(f"layers.{k}.weight", torch.arange(1000), 0)[0]) for k in range(count)]


def test_names_and_seeds_start_at_different_entries() -> None:
    assert set(first_positions(0, 0.25, 40)) == {0, 1, 2, 3}
    assert first_positions(0, 0.25, 40) != first_positions(1, 0.25, 40)
    assert len(set(first_positions(0, 0.01, 200))) > 60


def test_starts_are_the_same_in_every_process_and_version() -> None:
    # A rank or a resumed run that started elsewhere would compare entropies of other entries.
    assert first_positions(3, 0.01, 8) == [52, 82, 77, 88, 89, 59, 32, 20]


@pytest.mark.parametrize("field", ["iteration_rate", "gradient_rate"])
@pytest.mark.parametrize("rate", [0.0, -0.1, 1.5, math.nan, 1e-9])
def test_sampler_rejects_rates_outside_its_interval(field: str, rate: float) -> None:
    with pytest.raises(ValueError, match=f"{field} = {rate}"):
        GradientSampler(**{field: rate})


def test_a_strided_sample_follows_the_entropy_of_the_whole() -> None:
    sampler = GradientSampler(gradient_rate=0.25)
    scales = torch.linspace(0, 3, 12).exp().repeat_interleave(25)  # columns of very different scale
    grad = torch.randn(400, 300, generator=torch.Generator().manual_seed(4)) * scales
    sampled = [gaussian_entropy(sampler.sample("w", grad, 10 * k)) for k in range(4)]
    assert sum(sampled) / 4 == pytest.approx(gaussian_entropy(grad), abs=0.02)


def test_an_observer_unscales_in_fp32_and_records_no_entropy_of_a_single_entry() -> None:
    config = EDGCConfig.of(iteration_sampling_rate=1.0, gradient_sampling_rate=1.0)
    torch.manual_seed(1)
    gradient, scale = 1e-8 * torch.randn(64, 64), torch.tensor(65536.0)
    seen = []
    for dtype in (torch.float32, torch.float16):
        observer = GradientObserver([MatrixSpec("w", 64, 64)], config)
        observer.begin(0)
        observer.measure({"w": (scale * gradient).to(dtype)}, 0, scale)
        seen.append(float(observer.measurements.entropy[0]))
    assert seen[1] == pytest.approx(seen[0], abs=0.01), "1e-8 is less than fp16's smallest number"

    alone = GradientObserver([MatrixSpec("scale", 1, 1)], config)
    alone.begin(0)
    alone.measure({"scale": torch.ones(1, 1)}, 0)
    assert math.isnan(alone.measurements.entropy[0])


def test_of_a_step_that_ended_before_all_gradients_came_the_next_one_has_nothing() -> None:
    config = EDGCConfig.of(iteration_sampling_rate=1.0, gradient_sampling_rate=1.0)
    observer, fresh = (GradientObserver([MatrixSpec(name, 8, 8) for name in "ab"], config) for _ in range(2))
    gradients = {name: torch.randn(8, 8) for name in "ab"}
    observer.begin(0)
    observer.measure({"a": 100 * torch.randn(8, 8)}, 0)
    for one in (observer, fresh):
        one.begin(0)
        one.measure(gradients, 0)
    assert observer.measurements.entropy == fresh.measurements.entropy


def test_the_histogram_does_not_depend_on_the_order_of_the_entries() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1024, 512, generator=generator) * torch.logspace(-2, 2, 1024)[:, None]
    shuffled = rows.flatten()[torch.randperm(rows.numel(), generator=generator)]
    assert histogram_entropy(rows) == pytest.approx(histogram_entropy(shuffled), abs=0.05)
