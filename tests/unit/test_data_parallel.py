"""A data-parallel module in one process: what needs no second one."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import edgc
from edgc.comm.collectives import Communicator, Traffic, run_to_end
from edgc.compress.reducer import GradientReducer
from edgc.compress.router import Router
from edgc.compress.state import CompressionState
from edgc.config import EDGCConfig
from edgc.observe.fidelity import FidelitySampler
from edgc.specs import Parameter

CONFIG = edgc.EDGCConfig.of(static_rank=4, window=4)


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("resumed", [False, True])
def test_a_run_that_ends_before_its_first_step_closes_without_an_error(resumed: bool) -> None:
    def attached() -> tuple[torch.nn.Module, edgc.EDGCState]:
        net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
        return net, edgc.attach(net, CONFIG, iterations=20)

    net, state = attached()
    if resumed:
        for _ in range(5):
            net.zero_grad()
            net(torch.randn(3, 32)).sum().backward()
            state.step()
        kept = state.state_dict()
        state.close()
        net, state = attached()
        state.load_state_dict(kept)
    state.close()


def test_a_hook_that_never_saw_a_gradient_closes_without_an_error() -> None:
    """Nobody has called ``start``."""
    edgc.EDGCState(torch.nn.Linear(8, 8), CONFIG, iterations=20).close()


def test_reducers_know_for_how_long_to_add_the_whole_error() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
    state = edgc.attach(net, edgc.EDGCConfig.from_preset(), iterations=20)
    net(torch.randn(3, 32)).sum().backward()
    state.step()
    assert [reducer.whole_error_iterations for reducer in state.stage.reducers] == [8]
    state.close()


def test_a_run_that_goes_on_after_its_last_iteration_warns_once(capsys: pytest.CaptureFixture[str]) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
    state = edgc.attach(net, CONFIG, iterations=5)
    for _ in range(8):
        net.zero_grad()
        net(torch.randn(3, 32)).sum().backward()
        state.step()
    state.close()
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning: step" in line]
    assert warnings == [
        "edgc: warning: step 6 of a run of 5 iterations, as EDGC was told: it goes on, but a volume holds for those "
        "iterations alone"
    ]


def test_reductions_overlap_and_say_what_they_hold_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, told = [torch.ones(3)], list[Any]()
    monkeypatch.setattr(Router, "memory", lambda self, gradients: 0.25 * len(gradients))
    monkeypatch.setattr(CompressionState, "tensors", lambda self: kept)
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
    state = edgc.attach(net, CONFIG, iterations=20)
    start = state.overlap.start
    monkeypatch.setattr(state.overlap, "start", lambda *given: told.append(given) or start(*given))
    net(torch.randn(3, 32)).sum().backward()
    state.step()
    ((_, reads, spans, memory),) = told
    assert (reads(), spans, memory) == (kept, state.stage.spans, 1.0) and state.run.overlapped
    state.close()


def test_a_volume_spends_more_where_the_given_learning_rate_is_higher() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
    weights = []
    for rate in (None, lambda step: 1.0 if step < 50 else 0.5):
        state = edgc.attach(net, "balanced", iterations=100, learning_rate=rate)
        state.begin()
        assert state.run.learning_rate is rate
        controller = state.plan.controller(state._sizes)
        assert controller.budget is not None
        weights.append(controller.budget.ledger.weights)
    assert set(weights[0]) == {1.0} and weights[1][10] / weights[1][90] == pytest.approx(2**0.7)


def test_rare_measurements_sample_a_bounded_share_of_the_entries() -> None:
    def share(rate: float, **study: float) -> float:
        config = edgc.EDGCConfig.from_preset(iteration_sampling_rate=rate, **study)
        sampler = CompressionState(config, None, torch.device("cpu"), 0).fidelity
        assert sampler is not None
        return sampler.share

    assert share(0.1) == pytest.approx(0.0005 / 3 / 0.1) and share(1e-4) == 0.01
    assert share(1e-3, fidelity_share=0.0005) == pytest.approx(0.0005 / 3 / 1e-3), "as it was asked for"


def test_what_is_sampled_of_a_large_parameter_takes_no_memory_of_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "arange", None)
    indices = FidelitySampler(1e-6, 0).indices("words", 10**9, torch.device("cpu"))
    assert len(indices) == 1000 and bool((indices.diff() >= 0).all())


def test_no_step_follows_one_that_has_ended_without_all_gradients() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
    state = edgc.attach(net, CONFIG, iterations=20)
    state.begin()
    state.add({net[0].weight: torch.ones(64, 32)})
    with pytest.raises(RuntimeError, match=r"3 parameters have no gradient in this step, the first 0\.bias"):
        state.end()
    with pytest.raises(RuntimeError, match="a step of it has failed"):
        state.begin()


def test_norms_of_before_a_stretch_of_the_hosts_sums_find_no_spikes_after_it() -> None:
    assert dist.group.WORLD is not None
    communicator = Communicator(dist.group.WORLD, Traffic())
    parameters = [Parameter("w", (64, 64))]
    reducer = GradientReducer.of(parameters, EDGCConfig.of(static_rank=4), communicator, torch.device("cpu"))
    for iteration, rank in enumerate((4, None)):
        reducer.set_rank(rank)
        reducer.begin(iteration)
        run_to_end(reducer.reduce({"w": torch.randn(64, 64)}, iteration))
    assert reducer.state.norms.values() is not None
    reducer.begin(2)
    assert reducer.plain and reducer.state.norms.values() is None
