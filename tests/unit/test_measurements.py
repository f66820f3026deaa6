"""What is made of measurements: fidelity, shares of rows, spikes, what was not sent."""

import math
from collections.abc import Callable

import pytest
import torch

from edgc.config import EDGCConfig
from edgc.observe.fidelity import Agreement, Fidelity, FidelitySampler
from edgc.observe.measurements import Measurements, row_shares
from edgc.observe.observer import GradientObserver

CPU, NOT_FINITE = torch.device("cpu"), torch.tensor(False)


def test_a_sum_against_the_gradient_is_nothing_but_noise() -> None:
    assert Agreement(4.0, 4.0, -3.0).noise == math.inf
    assert Agreement(4.0, 4.0, 2.0).noise == pytest.approx(3.0)


def compared(sampler: FidelitySampler, size: float) -> torch.Tensor:
    """What the sampler says of four entries of this size, all of which arrive."""
    sampler.indices("w", 4, CPU)
    entries = torch.full((4,), size)
    return sampler.compare(["w"], (entries, entries, entries), torch.tensor(True))["w"]


def test_a_gradient_whose_square_overflows_leaves_the_averages_as_they_are() -> None:
    enormous, usual = FidelitySampler(1.0, 0), FidelitySampler(1.0, 0)
    for sampler in (enormous, usual):
        compared(sampler, 1.0)
    assert compared(enormous, 1e20).isnan().all()
    assert torch.equal(compared(enormous, 1.0), compared(usual, 1.0))


def test_lag_is_how_much_of_the_gradient_before_arrives_beside_that_of_the_step() -> None:
    sampler, generator = FidelitySampler(1.0, 0), torch.Generator().manual_seed(0)
    sampler.indices("w", 1000, CPU)
    before, now = torch.randn(2, 1000, generator=generator)
    now += 0.5 * before  # gradients of consecutive steps are alike: their likeness is no lag
    lags = []
    for got in (now, 0.7 * now + 0.4 * before):
        sampler.averages = {}
        first = sampler.compare(["w"], (before, before, before), torch.tensor(True))["w"]
        assert math.isnan(Fidelity.of(first.tolist()).lag)
        lags.append(Fidelity.of(sampler.compare(["w"], (now, now, got), torch.tensor(True))["w"].tolist()).lag)
    assert lags == pytest.approx([0.0, 0.4], abs=1e-4)


def fidelities(size: Callable[[int], float], steps: int = 12) -> list[Fidelity]:
    """Of gradients of these sizes by step, of which 0.7 arrive, with 0.2 of an error that is always as large."""
    sampler, generator = FidelitySampler(1.0, 0), torch.Generator().manual_seed(0)
    sampler.indices("w", 2000, CPU)
    found = []
    for step in range(steps):
        noise, error = torch.randn(2, 2000, generator=generator)
        gradient = size(step) * noise
        values = sampler.compare(["w"], (gradient, gradient + error, 0.7 * gradient + 0.2 * error), torch.tensor(True))
        found.append(Fidelity.of(values["w"].tolist()))
    return found


def test_an_expert_that_is_idle_in_the_first_measured_step_counts_from_its_first_gradient_on() -> None:
    idle, active = fidelities(lambda step: float(step > 0)), fidelities(lambda step: 1.0)
    assert Fidelity.total(idle).descent.noise < 2 * Fidelity.total(active).descent.noise
    assert Fidelity.total(idle).energy == pytest.approx(Fidelity.total(active).energy, rel=0.3)


@pytest.mark.parametrize("spike", [30.0, 1000.0])
def test_a_spike_says_little_of_the_steps_around_it(spike: float) -> None:
    seen, usual = fidelities(lambda step: spike if step == 6 else 1.0, 30), fidelities(lambda step: 1.0, 30)
    for first in range(0, 30, 5):
        own, plain = (Fidelity.total(steps[first : first + 5]) for steps in (seen, usual))
        assert 0.6 < own.energy / plain.energy < 1.6
        assert 0.5 < own.descent.noise / plain.descent.noise < 2


def test_the_shares_of_rows_are_of_their_norms() -> None:
    *shares, evenness = row_shares(torch.tensor([1.0] * 9 + [81.0]), (0.1, 0.2)).tolist()
    assert shares == pytest.approx([9 / 18, 10 / 18]) and evenness == pytest.approx(18**2 / (10 * 90))


def test_the_spikes_of_a_step_that_is_run_again_are_those_of_the_window_that_had_it_first() -> None:
    observer, excess, finite = GradientObserver([], EDGCConfig()), torch.tensor([8.0]), torch.tensor(True)
    for seen in (1, 0):
        observer.begin(3)
        observer.add_spikes(3, excess, 5.0, finite)
        assert float(observer.take().spikes) == seen
        observer.roll_back(3)
    observer.begin(4)
    observer.add_spikes(4, excess, 5.0, finite)
    assert float(observer.take().spikes) == 1


def test_a_step_that_is_not_finite_is_no_spike_and_says_nothing_of_what_was_sent() -> None:
    seen = Measurements()
    seen.add_spikes(torch.tensor([math.inf, 8.0]), 5.0, NOT_FINITE)
    assert float(seen.spikes) == float(seen.largest_spike) == 0
    observer = GradientObserver([], EDGCConfig())
    observer.add_unsent(torch.tensor(0.5), None, NOT_FINITE)
    assert math.isnan(float(observer.measurements.residual[0]))
