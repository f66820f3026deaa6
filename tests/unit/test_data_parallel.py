"""A data-parallel module in one process: what needs no second one."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import edgc
from edgc.comm.collectives import Communicator, Traffic, run_to_end
from edgc.comm.overlap import Overlap
from edgc.compress.reducer import GradientReducer
from edgc.compress.router import Router
from edgc.compress.state import CompressionState
from edgc.config import EDGCConfig
from edgc.hosts import module
from edgc.observe.fidelity import FidelitySampler
from edgc.specs import Parameter

CONFIG = edgc.EDGCConfig.of(static_rank=4, window=4)


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train(net: torch.nn.Module, state: edgc.EDGCState, steps: int) -> None:
    for _ in range(steps):
        net.zero_grad()
        net(torch.randn(3, 32)).sum().backward()
        state.step()


@pytest.mark.parametrize("resumed", [False, True])
def test_a_run_that_ends_before_its_first_step_closes_without_an_error(resumed: bool) -> None:
    def attached() -> tuple[torch.nn.Module, edgc.EDGCState]:
        net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
        return net, edgc.attach(net, CONFIG, iterations=20)

    net, state = attached()
    if resumed:
        train(net, state, 5)
        kept = state.state_dict()
        state.close()
        net, state = attached()
        state.load_state_dict(kept)
    state.close()


def test_an_earlier_state_that_a_live_run_loads_is_reported_anew() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
    state = edgc.attach(net, CONFIG, iterations=20)
    train(net, state, 5)
    kept = state.state_dict()
    train(net, state, 12)
    state.load_state_dict(kept)
    train(net, state, 2)
    state.close()
    assert state.report is not None and state.report.iteration == 7


def test_a_module_that_is_wrapped_after_it_was_attached_does_not_train_without_a_word(
    capsys: pytest.CaptureFixture[str],
) -> None:
    net = torch.nn.Linear(32, 32)
    state = edgc.attach(net, CONFIG, iterations=20)
    assert "edgc | Linear is not wrapped in DistributedDataParallel: state.step()" in capsys.readouterr().out
    torch.nn.parallel.DistributedDataParallel(net)(torch.randn(3, 32)).sum().backward()
    state.close()
    assert "warning: EDGC has seen no step" in capsys.readouterr().err


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
    train(net, state, 8)
    state.close()
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning: step" in line]
    assert warnings == [
        "edgc: warning: step 6 of a run of 5 iterations, as EDGC was told: it goes on, but a volume holds for those "
        "iterations alone. Each average is a step: accumulate micro-batches in no_sync"
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
    with pytest.raises(RuntimeError, match=r"parameters without a gradient in this step: 3, the first 0\.bias"):
        state.end()
    with pytest.raises(RuntimeError, match="a step of it has failed"):
        state.begin()


def test_steps_that_are_compared_are_timed_to_the_end_of_their_work(monkeypatch: pytest.MonkeyPatch) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
    state = edgc.attach(net, CONFIG, iterations=20)
    waits: list[int] = []
    monkeypatch.setattr(Overlap, "synchronize", lambda self: waits.append(state.steps))
    for step in range(5):
        net.zero_grad()
        net(torch.randn(3, 32)).sum().backward()
        if step == 2:
            state.driver.adopt(replace(state.driver.plan, trial=(4, 7)), None)
        state.step()
    assert waits == [2, 3], "the CPU waits while a trial is set; a window has ended it here"
    state.close()


def test_whatever_sends_objects_does_so_from_the_device_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL sends them from the current device, and another process may have the first one."""
    entered: list[str] = []

    @contextmanager
    def device(own: torch.device) -> Iterator[None]:
        entered.append(str(own))
        yield
        entered.pop()

    for name in ("all_gather_object", "gather_object", "broadcast_object_list"):
        own = getattr(dist, name)

        def noted(*args: Any, own: Any = own, **kwargs: Any) -> Any:
            assert entered, "the current device may be another one"
            sent.append(own.__name__)
            return own(*args, **kwargs)

        monkeypatch.setattr(dist, name, noted)
    sent: list[str] = []
    monkeypatch.setattr(module, "device_of", device)
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
    state = edgc.attach(net, CONFIG, iterations=20)
    train(net, state, 5)
    state.load_state_dict(state.state_dict())
    state.close()
    assert set(sent) == {"all_gather_object", "gather_object", "broadcast_object_list"} and not entered


def test_a_run_that_ignores_a_state_goes_on_at_its_step() -> None:
    def attached(**settings: Any) -> tuple[torch.nn.Module, edgc.EDGCState]:
        net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
        return net, edgc.attach(net, edgc.EDGCConfig.from_preset(window=4, **settings), iterations=20)

    net, state = attached()
    train(net, state, 8)
    kept = state.state_dict()
    net, state = attached(reset_state=True)
    state.load_state_dict(kept)
    assert state.steps == 8
    train(net, state, 12)
    assert state.report is not None and state.report.iteration == 20
    controller = state.windows.controller
    assert controller is not None and controller.plan.first_iteration >= 8


def test_a_parameter_that_came_after_edgc_is_not_left_out_in_silence() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
    state = edgc.attach(net, CONFIG, iterations=20)
    net.append(torch.nn.Linear(32, 8))
    net(torch.randn(3, 32)).sum().backward()
    with pytest.raises(RuntimeError, match=r"2\.weight has a gradient, and was not there when EDGC was given"):
        state.step()


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


def test_a_loss_is_one_number_of_whatever_type_and_is_saved_as_a_plain_one(tmp_path: Path) -> None:
    net = torch.nn.Linear(32, 64)
    state = edgc.attach(net, CONFIG, iterations=20)
    with pytest.raises(RuntimeError, match="note_loss before the first step"):
        state.note_loss(1.0)
    train(net, state, 1)
    for wrong in ([1.0], np.ones(2), torch.ones(2), None):
        with pytest.raises(ValueError, match="must be one number"):
            state.note_loss(wrong)  # type: ignore[arg-type]
    state.note_loss(np.mean([1.0, 2.0], dtype=np.float32))  # type: ignore[arg-type]
    assert state.driver._losses == [1.5]
    torch.save(state.state_dict(), tmp_path / "state.pt")
    torch.load(tmp_path / "state.pt", weights_only=True)


def test_a_ddp_model_is_copied_and_saved_as_without_edgc(tmp_path: Path) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(32, 64))
    state = edgc.attach(model, CONFIG, iterations=20)
    average = torch.optim.swa_utils.AveragedModel(model)
    torch.save(model, tmp_path / "model.pt")
    for copied in (average.module, copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert torch.equal(copied.module.weight, model.module.weight)
        copied(torch.randn(3, 32)).sum().backward()  # without a hook, as DDP itself
    assert state.steps == 0
    model(torch.randn(3, 32)).sum().backward()
    assert state.steps == 1


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda state: {**state, "layout": {"engine": {}}, "tensors": {}}, "cannot be read: it lacks engine"),
        (lambda state: {}, "is no EDGC state"),
        (
            lambda state: {name: part for name, part in state.items() if name != "tensors"},
            "cannot be read: it lacks tensors",
        ),
        (
            lambda state: {**state, "shapes": {"weight": [32, 64]}},
            r"has weight of shape \(32, 64\), where this model's",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused_before_anything_of_it_is_taken(
    damage: Callable[[dict[str, Any]], dict[str, Any]], reason: str
) -> None:
    net = torch.nn.Linear(32, 64)
    state = edgc.attach(net, CONFIG, iterations=20)
    train(net, state, 3)
    kept = state.state_dict()
    again = edgc.attach(net, CONFIG, iterations=20)
    with pytest.raises(edgc.ConfigError, match=reason):
        again.load_state_dict(damage(kept))
    assert again.steps == 0
    train(net, again, 1)


def test_settings_of_the_run_that_cannot_work_are_refused() -> None:
    net = torch.nn.Linear(32, 64)
    scheduler = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(net.parameters(), 0.1))
    with pytest.raises(edgc.ConfigError, match="learning_rate is of type ConstantLR: must be a function of the step"):
        edgc.attach(net, iterations=20, learning_rate=scheduler)  # type: ignore[arg-type]
    with pytest.raises(edgc.ConfigError, match="a volume is planned for at most 10000000"):
        edgc.attach(net, iterations=10**8)


def test_a_sparse_gradient_is_refused_by_name() -> None:
    net = torch.nn.Linear(32, 64, bias=False)
    state = edgc.attach(net, CONFIG, iterations=20)
    torch.nn.functional.embedding(torch.tensor([3, 5]), net.weight, sparse=True).sum().backward()
    with pytest.raises(RuntimeError, match="weight has a sparse gradient, which EDGC does not average"):
        state.step()
