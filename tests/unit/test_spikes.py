import math

import pytest
import torch
from torch import Tensor

from edgc.compress.spikes import RUNNING_NORM_DECAY, RunningNorms

LIMIT = 5.0
YES, NO = torch.tensor(True), torch.tensor(False)
SCALE = torch.tensor(1024.0)


def gradient(norm: float, seed: int = 0) -> Tensor:
    values = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))
    return values * (norm / values.norm())


def step(norms: RunningNorms, norm: float, finite: Tensor = YES) -> float:
    """The excess of a gradient of this norm."""
    spikes = norms.spikes({"w": gradient(norm)})
    norms.update(spikes, finite)
    return float(spikes.by_name()["w"])


def running(norms: RunningNorms) -> float:
    return float(norms.state_dict()["w:norm"].values())


def test_the_excess_of_a_gradient_within_the_limit_is_exactly_1() -> None:
    norms = RunningNorms(LIMIT)
    for norm in (2.0, 2.0, 0.01, 1.9, 3.9, 0.5 * LIMIT):
        assert step(norms, norm) == 1.0


def test_a_spike_counts_as_the_limit() -> None:
    norms = RunningNorms(LIMIT)
    for _ in range(3):
        step(norms, 2.0)
    assert step(norms, 200.0) == pytest.approx(100.0 / LIMIT)
    assert running(norms) == pytest.approx(2.0 * (RUNNING_NORM_DECAY + (1 - RUNNING_NORM_DECAY) * LIMIT))


def test_a_gradient_that_stays_large_is_no_spike_for_long() -> None:
    norms = RunningNorms(LIMIT)
    step(norms, 1.0)
    found = [step(norms, 100.0) for _ in range(60)]
    assert found[0] == pytest.approx(100.0 / LIMIT) and found[-1] == 1.0
    assert sum(excess > 1 for excess in found) == 17, "as ``moved`` says"


def test_norms_are_of_gradients_without_their_loss_scale() -> None:
    norms = RunningNorms(LIMIT)
    gradients = {"a": gradient(1.0, 1), "b": gradient(3.0, 2)}
    norms.update(norms.spikes(gradients), YES)
    gradients["b"] *= 50
    found = norms.spikes({name: one * SCALE for name, one in gradients.items()}, SCALE).by_name()
    assert float(found["a"]) == 1.0 and float(found["b"]) == pytest.approx(50 / LIMIT, rel=1e-5)


def test_zeros_say_nothing_of_the_size() -> None:
    norms = RunningNorms(LIMIT)
    assert step(norms, 0.0) == 1.0
    assert step(norms, 5.0) == 1.0  # nothing was known
    for _ in range(50):
        step(norms, 0.0)
    assert step(norms, 5.0) == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_leaves_the_state(bad: float) -> None:
    for first in (True, False):
        norms = RunningNorms(LIMIT)
        if not first:
            step(norms, 2.0)
        broken = gradient(2.0)
        broken[1, 2] = bad
        norms.update(norms.spikes({"w": broken}), NO)
        assert running(norms) == (0.0 if first else pytest.approx(2.0))


def test_of_a_finite_gradient_whose_norm_overflows_no_error_is_kept() -> None:
    norms = RunningNorms(LIMIT)
    large = torch.full((256, 1024), 6e17)
    spikes = norms.spikes({"w": large})
    norms.update(spikes, YES)
    assert running(norms) == 0.0  # an infinite one would let everything through
    norms.update(norms.spikes({"w": gradient(2.0)}), YES)
    assert float(norms.spikes({"w": large}).by_name()["w"]) == math.inf
    norms.limit = math.inf  # then there are no spikes
    assert float(norms.spikes({"w": large}).by_name()["w"]) == 1.0


def test_a_norm_that_grew_old_is_forgotten() -> None:
    norms = RunningNorms(LIMIT)
    step(norms, 2.0)
    norms.keep({"w"})
    assert step(norms, 30.0) == pytest.approx(15.0 / LIMIT)
    norms.keep(())
    assert step(norms, 30.0) == 1.0


def test_a_copy_goes_on_as_the_original() -> None:
    norms, copy = RunningNorms(LIMIT), RunningNorms(LIMIT)
    step(norms, 2.0)
    copy.load_state_dict(norms.state_dict())
    assert step(copy, 30.0) == step(norms, 30.0) == pytest.approx(15.0 / LIMIT)
    values = norms.values()
    assert values is not None
    norms.set_values(values / 2)
    assert running(norms) == running(copy) / 2
    assert RunningNorms(LIMIT).values() is None


@pytest.mark.parametrize(("limit", "expected"), [(LIMIT, math.inf), (math.inf, 1.0)])
def test_a_norm_that_overflows_is_a_spike_also_in_the_first_step(limit: float, expected: float) -> None:
    """Else its whole error would be sent over the next steps, and hide their gradients."""
    norms = RunningNorms(limit)
    spikes = norms.spikes({"w": torch.full((6, 8), 1e20)})
    assert float(spikes.by_name()["w"]) == expected


def test_norms_that_are_set_keep_their_names() -> None:
    norms = RunningNorms(5.0)
    norms.update(norms.spikes({"layer 2": torch.tensor([2.0]), "layer 10": torch.tensor([10.0])}), torch.tensor(True))
    before = {name: float(one.values()) for name, one in norms.state_dict().items()}
    norms.set_values(norms.values())
    assert {name: float(one.values()) for name, one in norms.state_dict().items()} == before
