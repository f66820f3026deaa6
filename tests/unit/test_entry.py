"""EDGC in a training script: what is noticed where the script gives it too little."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.training import training as megatron_training

from edgc.config import ConfigError
from edgc.errors import StepError
from edgc.hosts import steps
from edgc.hosts.steps import StepDriver
from edgc.plan.rank_plan import RankPlan
from megatron.edgc import entry
from megatron.edgc.seam import Seam
from megatron.edgc.session import Session


def test_a_model_that_edgc_never_sees_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_training, "setup_model_and_optimizer", lambda: "the model")
    session = SimpleNamespace(installed=False, seam=Seam())
    with session.seam:
        entry._check_installed(session)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="EDGC was given no model: call compressing"):
            megatron_training.setup_model_and_optimizer()
        session.installed = True
        assert megatron_training.setup_model_and_optimizer() == "the model"


def test_a_model_that_is_not_trained_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script for reinforcement learning builds one for inference as well, without a wrapper."""
    monkeypatch.setattr(megatron_training, "get_model", lambda provider, kind=None, wrap_with_ddp=True: [provider])
    with Seam() as own_seam:
        session = SimpleNamespace(seam=own_seam, install=lambda chunks: [*chunks, "installed"])
        entry._install_on_built_models(session)  # type: ignore[arg-type]
        assert megatron_training.get_model("model") == ["model", "installed"]
        assert megatron_training.get_model("model", wrap_with_ddp=False) == ["model"]
        assert megatron_training.get_model("model", None, False) == ["model"]


def session(**parts: Any) -> Any:
    """Of a run, with nothing but these parts."""
    one = object.__new__(Session)
    vars(one).update({"seam": Seam(), "chunks": [], **parts})
    return one


def test_a_second_model_is_refused_before_anything_of_it_is_changed() -> None:
    own = session(chunks=["a model"])
    with own.seam, pytest.raises(ConfigError, match="EDGC was given a second model"):
        own.install(["another model"])
    with Seam() as first, (own := session()).seam:
        first.hold()
        with pytest.raises(ConfigError, match="EDGC is attached to another model of this process"):
            own.install(["another model"])
        assert own.chunks == []


def test_a_loss_scale_that_edgc_cannot_know_is_an_error() -> None:
    config = SimpleNamespace(grad_scale_func=None)
    own = session(scaled=True, model_config=config, stages=[SimpleNamespace(device=torch.device("cpu"))])
    with pytest.raises(StepError, match="set config.grad_scale_func"):
        own._loss_scale()
    for scale in (lambda loss: 8 * loss, lambda loss: 8 * loss.reshape(1), lambda loss: 8.0):
        config.grad_scale_func = scale
        assert own._loss_scale().shape == () and own._loss_scale() == 8


def test_a_step_that_was_never_ended_is_noticed_when_the_next_one_begins() -> None:
    now = [0]
    driver = StepDriver([], [], 10, lambda: now[0], lambda: None)
    driver.adopt(RankPlan(0, 0, ()), None)
    assert driver.step().iteration == driver.step().iteration == 0
    driver.end(0)
    driver.step()  # the host runs the step again
    now[0] = 1
    assert driver.step().iteration == 1
    now[0] = 3  # another one was skipped
    with pytest.raises(RuntimeError, match="step 4 began, but EDGC was not told that step 2 had ended"):
        driver.step()


def test_a_trial_is_compared_with_the_steps_next_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with the last ones of a long window, in which batch or link may have become others."""
    clock, now = [0.0], [0]
    monkeypatch.setattr(steps, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    driver = StepDriver([], [], 1000, lambda: now[0], lambda: None)
    driver.adopt(RankPlan(0, 0, (8,), trial=(101, 104)), None)
    for iteration in range(100, 400):
        now[0] = iteration
        driver.step()
        driver.end(iteration)
        clock[0] += 1.0 if iteration < 200 else 3.0
    assert list(driver.seconds_by[False]) == [1.0] * steps.RECENT_STEPS
    driver.adopt(RankPlan(0, 0, (8,)), None)
    for iteration in range(400, 440):
        now[0] = iteration
        driver.step()
        driver.end(iteration)
        clock[0] += 2.0
    assert list(driver.seconds_by[False]) == [2.0] * steps.RECENT_STEPS, "elsewhere the newest count"
