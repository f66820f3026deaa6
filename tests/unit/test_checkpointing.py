"""What a checkpoint says of a run, without Megatron's part."""

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

from edgc.config import ConfigError, EDGCConfig
from edgc.observe.window import Boundary
from edgc.plan.controller import Controller
from edgc.plan.run import Part, StageKey
from edgc.specs import MatrixSpec
from tests.unit.test_budget import controller


def test_a_checkpoint_of_a_resumed_run_holds_the_ranks_in_force_not_those_of_its_own_probe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.edgc import checkpointing

    in_force = SimpleNamespace(config=EDGCConfig.of(rmin=16, rmax=64), budget=None, state_dict=dict)
    own: Any = checkpointing.Checkpoints(Namespace(), EDGCConfig(), EDGCConfig.of(rmin=12, rmax=48), [], [], in_force)
    monkeypatch.setattr(checkpointing, "gather_objects", lambda value: [value])
    monkeypatch.setattr(checkpointing, "broadcast_object", lambda value: value)
    monkeypatch.setattr(checkpointing, "parallel_sizes", lambda args: {})
    monkeypatch.setattr(checkpointing, "mean_bytes", lambda counts: {})
    index = own._index(7, {})
    assert (index["resolved"]["rmin"], index["resolved"]["rmax"]) == (16, 64)
    # by which a run that is resumed with another link knows that these ranks are not for it
    assert index["requested"]["link_gbps"] is None


def test_stages_and_boundaries_have_names_in_checkpoints_that_no_wording_changes() -> None:
    keys = [StageKey(part, 1) for part in (Part.LAYERS, Part.EXPERTS)] + [StageKey(Part.EMBEDDING, 0)]
    assert [key.id for key in keys] == ["stage1", "stage1-experts", "embedding"]
    assert [str(key) for key in keys] == ["stage 2", "stage 2 experts", "tied embedding"]
    boundaries = [Boundary("backward", 1, 0), Boundary("forward", 3, 0)]
    assert [one.id for one in boundaries] == ["backward-1-0", "forward-3-0"]


@pytest.mark.parametrize("kept", [(None, 0), (None, None)])
def test_a_resumed_run_says_that_messages_go_on_as_they_were_and_not_as_they_are_timed(
    kept: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron.edgc import checkpointing
    from megatron.edgc.message_plan import message_config

    boundaries = [Boundary("backward", 1, 0), Boundary("backward", 2, 1)]
    messages = SimpleNamespace(boundaries=boundaries, directions={}, restore_bytes=lambda *counts: None)
    config = EDGCConfig.of(pp="auto:int4")
    specs = [[MatrixSpec(one.id, 8, 8)] for one in boundaries]
    controller = Controller(message_config(config), 100, specs, [None, None], dense={0, 1})
    own: Any = checkpointing.Checkpoints(Namespace(), config, config, [], [], None, messages, controller)  # type: ignore[arg-type]
    monkeypatch.setattr(own, "_same_replicas", lambda index: False)
    loaded: list[Any] = []
    monkeypatch.setattr(own, "_load_controller", lambda *arguments: loaded.append(arguments))
    monkeypatch.setattr(checkpointing, "warn", lambda line: print(line))
    plan = {
        "boundaries": [one.id for one in boundaries],
        "requested": config.only(("pp", *checkpointing.ASKED)),
        "resolved": {},
    }
    index = {"bytes": {}, "messages": {**plan, "controller": {"plan": {"ranks": kept}}}}
    own._load_messages(index, {}, "/checkpoints/iter_0000007")
    assert loaded and controller.dense == {place for place, rank in enumerate(kept) if rank is None}
    said = capsys.readouterr().out
    assert ("messages between stages go on as in iter_0000007" in said) == (kept == (None, 0))
    assert said.endswith("uncompressed stay gradients from stage 2 to 1\n") or not said


@pytest.mark.parametrize(("before", "now"), [(True, False), (False, True), (True, True)])
def test_a_resumed_run_rounds_as_the_run_before_and_not_as_it_is_timed(
    before: bool, now: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron.edgc import checkpointing

    own: Any = checkpointing.Checkpoints(Namespace(), EDGCConfig(), EDGCConfig(), [], [], None)
    monkeypatch.setattr(checkpointing, "warn", lambda line: print(line))
    state = controller(rounds=before).state_dict()
    for settings, rounds in (({"rmax": 64}, before), ({}, now)):  # nothing is settled where other ranks are asked for
        resumed = controller(rounds=now)
        assert own._load_controller(resumed, state, settings, "/checkpoints/iter_0000007")
        assert resumed.rounds == rounds
        how = "rounded" if rounds else "in low rank"
        said = f"compressed gradients go on {how} as in iter_0000007, whatever was timed now\n"
        assert capsys.readouterr().out == (said if rounds != now else "")


def test_a_checkpoint_that_edgc_does_not_see_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that imported Megatron's save_checkpoint by itself, before EDGC was attached."""
    from megatron.training import checkpointing as megatron_checkpointing

    from megatron.edgc import checkpointing
    from megatron.edgc.seam import Seam

    own: Any = checkpointing.Checkpoints(Namespace(), EDGCConfig(), EDGCConfig(), [], [], None)
    monkeypatch.setattr(megatron_checkpointing, "generate_state_dict", lambda *args, **kwargs: {"model": 1})
    monkeypatch.setattr(own, "state_dict", lambda iteration, local: {"state": iteration})

    def saved(iteration: int, *args: Any, **kwargs: Any) -> Any:
        return megatron_checkpointing.generate_state_dict(None, iteration=iteration)

    monkeypatch.setattr(megatron_checkpointing, "save_checkpoint", saved)
    with Seam() as seam:
        own.install(seam, lambda: None)
        with pytest.raises(ConfigError, match="this checkpoint would be without EDGC's state"):
            saved(7)
        assert megatron_checkpointing.generate_state_dict(None) == {"model": 1}, "as a load asks for it"
    assert megatron_checkpointing.save_checkpoint is saved


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, False),
        ({"rerun_mode": "validate_results"}, False),
        ({"rerun_mode": "report_determinism_stats"}, True),
        ({"fp16": True}, True),
        ({"loss_scale": 128.0, "bf16": True}, True),
        ({"check_for_spiky_loss": True}, True),
        ({"error_injection_rate": 10}, True),
    ],
)
def test_state_of_before_a_step_is_kept_where_megatron_may_repeat_it(changed: dict[str, Any], expected: bool) -> None:
    from megatron.edgc.training import repeatable

    usual = {"fp16": False, "loss_scale": None, "check_for_spiky_loss": False, "check_for_large_grads": False}
    usual |= {"bf16": False, "use_distributed_optimizer": False}
    args = {**usual, "error_injection_rate": 0, "rerun_mode": "disabled", **changed}
    assert repeatable(Namespace(**args)) is expected
