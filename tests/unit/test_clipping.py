import math

import pytest
import torch
from torch import Tensor

from edgc.compress.clipping import DECAY, LIMIT, SpikeClipping

YES, NO = torch.tensor(True), torch.tensor(False)
SCALE = torch.tensor(1024.0)


def gradient(norm: float, seed: int = 0) -> Tensor:
    values = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))
    return values * (norm / values.norm())


def step(clipping: SpikeClipping, norm: float, finite: Tensor = YES) -> float:
    """What the gradient is divided by."""
    spikes = clipping.spikes({"w": gradient(norm)})
    clipping.update(spikes, finite)
    return float(spikes.divisors(None)["w"])


def running(clipping: SpikeClipping) -> float:
    return float(clipping.state_dict()["w:norm"].values())


def test_a_gradient_within_the_limit_is_divided_by_exactly_1() -> None:
    clipping = SpikeClipping()
    for norm in (2.0, 2.0, 0.01, 1.9, 3.9, 0.5 * LIMIT):
        assert step(clipping, norm) == 1.0


def test_a_spike_gets_the_running_norm_and_counts_as_the_limit() -> None:
    clipping = SpikeClipping()
    for _ in range(3):
        step(clipping, 2.0)
    assert step(clipping, 200.0) == pytest.approx(100.0)
    assert running(clipping) == pytest.approx(2.0 * (DECAY + (1 - DECAY) * LIMIT))


def test_a_gradient_that_stays_large_is_let_through() -> None:
    clipping = SpikeClipping()
    step(clipping, 1.0)
    divisors = [step(clipping, 100.0) for _ in range(60)]
    assert divisors[0] == pytest.approx(100.0) and divisors[-1] == 1.0
    assert sum(divisor > 1 for divisor in divisors) < 30


def test_loss_scale_and_spike_divide_together() -> None:
    clipping = SpikeClipping()
    gradients = {"a": gradient(1.0, 1), "b": gradient(3.0, 2)}
    scaled = {name: one * SCALE for name, one in gradients.items()}
    clipping.update(clipping.spikes(scaled, SCALE), YES)
    scaled["b"] *= 50
    spikes = clipping.spikes(scaled, SCALE)
    found = spikes.divisors(SCALE)
    assert (spikes.factors > 1).tolist() == [False, True]
    assert float(found["a"]) == 1024.0 and float(found["b"]) == pytest.approx(50 * 1024, rel=1e-5)


def test_zeros_say_nothing_of_the_size() -> None:
    clipping = SpikeClipping()
    assert step(clipping, 0.0) == 1.0
    assert step(clipping, 5.0) == 1.0  # nothing was known
    for _ in range(50):
        step(clipping, 0.0)
    assert step(clipping, 5.0) == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_leaves_the_state_and_is_not_hidden(bad: float) -> None:
    for first in (True, False):
        clipping = SpikeClipping()
        if not first:
            step(clipping, 2.0)
        broken = gradient(2.0)
        broken[1, 2] = bad
        spikes = clipping.spikes({"w": broken})
        clipping.update(spikes, NO)
        assert not torch.isfinite(broken / spikes.divisors(None)["w"]).all()
        assert running(clipping) == (0.0 if first else pytest.approx(2.0))


def test_of_a_finite_gradient_whose_norm_overflows_nothing_is_left() -> None:
    clipping = SpikeClipping()
    large = torch.full((256, 1024), 6e17)
    spikes = clipping.spikes({"w": large})
    clipping.update(spikes, YES)
    assert running(clipping) == 0.0  # an infinite one would let everything through
    clipping.update(clipping.spikes({"w": gradient(2.0)}), YES)
    divisor = clipping.spikes({"w": large}).divisors(None)["w"]
    assert torch.equal(large / divisor, torch.zeros_like(large))


def test_a_norm_that_grew_old_is_forgotten() -> None:
    clipping = SpikeClipping()
    step(clipping, 2.0)
    clipping.keep({"w"})
    assert step(clipping, 30.0) == pytest.approx(15.0)
    clipping.keep(())
    assert step(clipping, 30.0) == 1.0


def test_a_copy_goes_on_as_the_original() -> None:
    clipping, copy = SpikeClipping(), SpikeClipping()
    step(clipping, 2.0)
    copy.load_state_dict(clipping.state_dict())
    assert step(copy, 30.0) == step(clipping, 30.0) == pytest.approx(15.0)
    norms = clipping.norms()
    assert norms is not None
    clipping.set_norms(norms / 2)
    assert running(clipping) == running(copy) / 2
    assert SpikeClipping().norms() is None
