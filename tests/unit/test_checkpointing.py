"""What a checkpoint says of a run, without Megatron's part."""

import json
import math
import pickle
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from edgc.byte_counts import ByteCount, RunBytes
from edgc.config import ConfigError, EDGCConfig
from edgc.hosts.checkpoint import STATE_VERSION
from edgc.observe.window import Boundary
from edgc.plan.controller import ControlledStage, Controller
from edgc.plan.stages import StageKey, StageKind
from edgc.plan.times.trials import Trials
from edgc.specs import MatrixSpec
from tests.unit.test_budget import controller


def run_state(settings: EDGCConfig | None = None, **parts: Any) -> Any:
    """Of a run with these settings and without stages of its own."""
    from megatron.edgc.checkpoint.index import RunState

    settings = settings or EDGCConfig()
    usual = {
        "args": Namespace(calculate_per_token_loss=False),
        "requested": settings,
        "config": settings,
        "keys": [],
        "stages": [],
        "layers": [],
        "controller": None,
    }
    return RunState(**{**usual, **parts})


def index_of(config: EDGCConfig, **parts: Any) -> Any:
    """Of a checkpoint of a run with these settings."""
    from megatron.edgc.checkpoint.index import REQUESTED_SETTINGS, RESOLVED, Index

    usual = {
        "iteration": 7,
        "parallel": {},
        "per_token": False,
        "engine": config.engine,
        "requested": config.subset(REQUESTED_SETTINGS),
    }
    usual |= {"resolved": config.subset(RESOLVED), "stages": [], "controller": {}, "messages": None, "replicas": 0}
    usual["weights"] = dict.fromkeys(("requested", "resolved"), config.formats.param_wire)
    return Index(**{**usual, "bytes": {}, "saved": {}, "layers": [], **parts})


def resume(run: Any, index: Any) -> Any:
    from megatron.edgc.checkpoint.index import RestorableState
    from megatron.edgc.checkpoint.loading import Resume

    usable = RestorableState(index, same_engine=True, tied_apart=False, stages={}, messages=None)
    return Resume(run, usable, "/checkpoints/iter_0000007")


def test_a_checkpoint_of_a_resumed_run_holds_what_is_in_force_and_not_what_its_own_probe_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.edgc.checkpoint import index as checkpoint_index

    in_force = SimpleNamespace(config=EDGCConfig.of(rmin=16, rmax=64))
    layers = StageKey(StageKind.LAYERS, 0)
    stage = SimpleNamespace(key=layers, param_wire="int8", byte_counts=lambda: RunBytes())
    asked = EDGCConfig.of(param_wire="auto:int8")
    run = run_state(asked, config=EDGCConfig.of(rmin=12, rmax=48), controller=in_force, stages=[stage])
    monkeypatch.setattr(checkpoint_index, "gather_objects", lambda value: [value])
    monkeypatch.setattr(checkpoint_index, "broadcast_object", lambda value: value)
    monkeypatch.setattr(checkpoint_index, "parallel_sizes", lambda args: {})
    index = checkpoint_index.gathered_index(run, 7, [{}, None], {})
    assert (index["resolved"]["rmin"], index["resolved"]["rmax"]) == (16, 64)
    assert index["weights"] == {"requested": "auto:int8", "resolved": "int8"}
    # by which a run that is resumed with another link knows that these ranks are not for it
    assert index["requested"]["link_gbps"] is None


def test_an_index_is_saved_as_plain_values_and_comes_back() -> None:
    from megatron.edgc.checkpoint.index import Index, SavedMessages, SavedStage

    messages = SavedMessages(["backward-1-0"], {"pp": "auto"}, {"engine": "int4"}, {"plan": {}})
    saved = {"stage0-tp0": SavedStage(2, {"error.w": {"w": [[3, 5], [32, False, False, True], 60]}})}
    counts = {"stage0": RunBytes(ByteCount(1.0, 2.0, 3.0), ByteCount(4.0, 5.0, 5.0))}
    index = index_of(EDGCConfig(), stages=["stage0"], bytes=counts, messages=messages, saved=saved)
    found = json.loads(json.dumps(index.to_dict()))
    assert found["version"] == STATE_VERSION and Index.from_dict(found) == index


def test_processes_hold_equal_indexes() -> None:
    """Entropy is NaN where a window has measured nothing."""
    from megatron.edgc.checkpoint.index import SavedMessages

    messages = SavedMessages(["1-2"], {}, {}, {"history": [[math.nan]]})
    own = index_of(EDGCConfig(), controller={"history": [[math.nan, 1.5]]}, messages=messages).to_dict()
    assert pickle.loads(pickle.dumps(own)) == own


def test_of_another_engine_and_of_embeddings_that_are_summed_otherwise_only_the_errors_are_taken_that_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.edgc.checkpoint import index as checkpoint_index

    stage: Any = SimpleNamespace(key=StageKey(StageKind.LAYERS, 0), process_group=None)
    names = ["error.a.weight", "error.embedding.word_embeddings.weight", "engine", "norms"]
    saved = {"stage0-tp0": checkpoint_index.SavedStage(2, {name: {} for name in names})}
    monkeypatch.setattr(checkpoint_index, "stage_key", lambda stage: f"{stage.key.id}-tp0")
    monkeypatch.setattr(checkpoint_index, "measurements_key", lambda stage: "measurements")
    monkeypatch.setattr(checkpoint_index.dist, "get_rank", lambda group: 1)

    def usable(processes: int, **changed: Any) -> Any:
        monkeypatch.setattr(checkpoint_index.dist, "get_world_size", lambda group: processes)
        run = run_state(EDGCConfig(), keys=[stage.key], stages=[stage])
        index = index_of(EDGCConfig(), saved=saved, **{"stages": [stage.key.id], **changed})
        found = checkpoint_index.RestorableState.of(index, run)
        own = found.stages[stage.key]
        return list(own.layout), own.same_processes, own.measurements

    assert usable(2) == (names, True, "measurements.1")
    assert usable(4) == (names, False, None)
    assert usable(2, stages=["stage0", "embedding"]) == ([names[0], *names[2:]], True, "measurements.1")
    assert usable(2, resolved={"engine": "another"}) == (names[:2], True, None)


def test_stages_and_boundaries_have_names_in_checkpoints_that_no_wording_changes() -> None:
    keys = [StageKey(part, 1) for part in (StageKind.LAYERS, StageKind.EXPERTS)] + [StageKey(StageKind.EMBEDDING, 0)]
    assert [key.id for key in keys] == ["stage1", "stage1-experts", "embedding"]
    assert [str(key) for key in keys] == ["stage 2", "stage 2 experts", "tied embedding"]
    boundaries = [Boundary("backward", 1, 0), Boundary("forward", 3, 0)]
    assert [one.id for one in boundaries] == ["backward-1-0", "forward-3-0"]


@pytest.mark.parametrize("kept", [(None, 0), (None, None)])
def test_a_resumed_run_says_that_messages_go_on_as_they_were_and_not_as_they_are_timed(
    kept: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron.edgc.checkpoint import loading as checkpoint_loading
    from megatron.edgc.checkpoint.index import REQUESTED_SETTINGS_OF_MESSAGES, SavedMessages
    from megatron.edgc.messages.plan import message_config

    boundaries = [Boundary("backward", 1, 0), Boundary("backward", 2, 1)]
    messages = SimpleNamespace(boundaries=boundaries, directions={}, restore_bytes=lambda *counts: None)
    config = EDGCConfig.of(pp="auto:int4")
    stages = [ControlledStage([MatrixSpec(one.id, 8, 8)], excluded=True) for one in boundaries]
    controller = Controller(message_config(config), 100, stages)
    plan = {"plan": {"ranks": kept}}
    saved = SavedMessages([one.id for one in boundaries], config.subset(REQUESTED_SETTINGS_OF_MESSAGES), {}, plan)
    own = resume(run_state(config, messages=messages, message_controller=controller), index_of(config, messages=saved))
    loaded: list[Any] = []
    monkeypatch.setattr(checkpoint_loading, "resume_controller", lambda *arguments: loaded.append(arguments))
    monkeypatch.setattr(checkpoint_loading, "warn", lambda line: print(line))
    own._resume_messages()
    assert [arguments[:2] for arguments in loaded] == [(controller, plan)]
    assert controller.excluded == {place for place, rank in enumerate(kept) if rank is None}
    said = capsys.readouterr().out
    assert ("messages between stages go on as in iter_0000007" in said) == (kept == (None, 0))
    assert said.endswith("uncompressed stay gradients from stage 2 to 1\n") or not said


@pytest.mark.parametrize(
    ("before", "now", "how"),
    [
        ({"engine": "dense"}, {"rmin": 4, "rmax": 16}, "uncompressed"),
        ({"rmin": 4, "rmax": 16}, {"engine": "dense"}, "rank 4 to 16"),
        ({"rmin": 4, "rmax": 16}, {"rmin": 4, "rmax": 12}, "rank 4 to 16"),
        ({"rmin": 4, "rmax": 16}, {"rmin": 4, "rmax": 16}, ""),
    ],
)
def test_a_resumed_run_says_at_which_ranks_messages_go_on_where_the_probe_has_said_otherwise(
    before: dict[str, Any],
    now: dict[str, Any],
    how: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from megatron.edgc.checkpoint import loading as checkpoint_loading
    from megatron.edgc.checkpoint.index import REQUESTED_SETTINGS_OF_MESSAGES, RESOLVED, SavedMessages
    from megatron.edgc.messages.plan import message_config, without_compression

    asked, boundary = EDGCConfig.from_preset("paper", pp="backward:powersgd"), Boundary("backward", 1, 0)

    def timed(settings: dict[str, Any]) -> Controller:
        config = without_compression(asked) if "engine" in settings else message_config(asked).replace(**settings)
        return Controller(config, 100, [ControlledStage([MatrixSpec(boundary.id, 8, 8)])])

    requested, saved, controller = asked.subset(REQUESTED_SETTINGS_OF_MESSAGES), timed(before), timed(now)
    kept = SavedMessages([boundary.id], requested, saved.config.subset(RESOLVED), saved.state_dict())
    messages = SimpleNamespace(boundaries=[boundary])
    own = resume(run_state(asked, messages=messages, message_controller=controller), index_of(asked, messages=kept))
    monkeypatch.setattr(checkpoint_loading, "warn", lambda line: print(line))
    own._resume_messages()
    said = f"messages between stages go on as in iter_0000007, whatever was timed now: {how}\n"
    assert capsys.readouterr().out == (said if how else "")


@pytest.mark.parametrize(("before", "now"), [(64, 48), (64, 64)])
def test_a_resumed_run_says_which_largest_rank_stays(
    before: int, now: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron.edgc.checkpoint import loading as checkpoint_loading
    from megatron.edgc.checkpoint.index import RESOLVED

    key, saved, own_controller = StageKey(StageKind.LAYERS, 0), controller(), controller()
    saved.adopt_ranks(saved.state_dict(), rmax=before)
    own_controller.adopt_ranks(own_controller.state_dict(), rmax=now)
    stage = SimpleNamespace(key=key, process_group=None)
    asked = EDGCConfig.from_preset()
    index = index_of(
        asked,
        stages=[key.id],
        resolved=saved.config.subset(RESOLVED),
        controller=json.loads(json.dumps(saved.state_dict())),
    )
    own = resume(run_state(asked, keys=[key], stages=[stage], controller=own_controller), index)
    own.usable.stages[key] = SimpleNamespace(processes=2)
    monkeypatch.setattr(checkpoint_loading.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(checkpoint_loading, "warn", lambda line: print(line))
    own._resume_gradients()
    said = f"--edgc-rmax stays {before} as in iter_0000007, whatever was timed now\n"
    assert capsys.readouterr().out == (said if before != now else "")


def test_state_is_not_taken_for_layers_that_another_stage_had(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parameters have the names of their places in their stage, so those of other layers would fit."""
    from megatron.edgc.checkpoint import index as checkpoint_index
    from megatron.edgc.checkpoint import loading as checkpoint_loading

    def chunk(*numbers: int) -> torch.nn.Module:
        layers = [torch.nn.Sequential(torch.nn.Linear(1, 1)) for _ in numbers]
        for number, layer in zip(numbers, layers, strict=True):
            layer.layer_number = layer[0].layer_number = number  # type: ignore[assignment]
        return torch.nn.ModuleList(layers)

    monkeypatch.setattr(checkpoint_index, "all_gather_objects", lambda own: [(1, [[4, 5]]), own])
    monkeypatch.setattr(checkpoint_index.parallel_state, "get_pipeline_model_parallel_rank", lambda: 0)
    layers = checkpoint_index.layers_of_stages([chunk(1, 2), chunk(3)])
    assert layers == [[[1, 2], [3]], [[4, 5]]]
    monkeypatch.setattr(checkpoint_loading, "parallel_sizes", lambda args: {})
    monkeypatch.setattr(checkpoint_loading, "warn", lambda line: print(line))
    run = run_state(layers=layers)
    for then, taken in ((layers, True), ([[[1, 2], [3, 4]], [[5]]], False)):
        entry = {"index": index_of(EDGCConfig(), layers=then).to_dict()}
        assert (checkpoint_loading.resumed(entry, run, "/checkpoints/iter_0000007") is not None) == taken
        said = "iter_0000007 has the layers split otherwise among the pipeline stages: the EDGC state starts anew\n"
        assert capsys.readouterr().out == ("" if taken else said)


def test_experts_that_start_anew_are_named_whichever_stage_has_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron.edgc.checkpoint import loading as checkpoint_loading

    layers, experts = ([StageKey(kind, stage) for stage in (0, 1)] for kind in (StageKind.LAYERS, StageKind.EXPERTS))
    own = resume(run_state(keys=[*layers, *experts]), index_of(EDGCConfig(), stages=[key.id for key in layers]))
    monkeypatch.setattr(checkpoint_loading, "warn", lambda line: print(line))
    own.warn_of_losses(messages=False)
    said = "iter_0000007 has nothing of stage 1 experts, stage 2 experts: their state starts anew\n"
    assert capsys.readouterr().out == said


@pytest.mark.parametrize(
    ("asked_before", "asked_now", "before", "now", "link", "goes_on"),
    [
        ("auto:int8", "auto:int8", "int8", "off", None, True),
        ("auto:int8", "auto:int8", "off", "int8", None, True),
        ("auto:int8", "auto:int8", "off", "off", None, False),
        ("int8", "auto:int8", "int8", "off", None, False),  # what the link says was not asked then
        ("auto:int8", "off", "int8", "off", None, False),
        ("auto:int8", "auto:int8", "off", "int8", 1.0, False),  # this run's link is given
    ],
)
def test_a_resumed_run_gathers_weights_as_before_and_not_as_it_is_timed(
    asked_before: str,
    asked_now: str,
    before: str,
    now: str,
    link: float | None,
    goes_on: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.edgc.checkpoint import loading as checkpoint_loading

    said: list[str] = []
    gathered: list[str] = []
    stage = SimpleNamespace(gather_weights=gathered.append)
    config = EDGCConfig.of(param_wire=now)
    run = run_state(EDGCConfig.of(param_wire=asked_now, link_gbps=link), config=config, stages=[stage])
    own = resume(run, index_of(EDGCConfig(), weights={"requested": asked_before, "resolved": before}))
    monkeypatch.setattr(checkpoint_loading, "warn", said.append)
    own._resume_weights()
    assert gathered == ([before] if goes_on else [])
    line = f"updated weights go on as in iter_0000007, whatever was timed now: --edgc-param-wire {before}"
    assert said == ([line] if goes_on else [])


@pytest.mark.parametrize(("before", "now"), [(True, False), (False, True), (True, True)])
def test_a_resumed_run_rounds_as_the_run_before_and_not_as_it_is_timed(
    before: bool, now: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron.edgc.checkpoint import loading as checkpoint_loading

    own = resume(run_state(), index_of(EDGCConfig()))
    monkeypatch.setattr(checkpoint_loading, "warn", lambda line: print(line))
    state = controller(rounds=before).state_dict()
    for settings, rounds in (({"rmax": 64}, before), ({}, now)):  # nothing is settled where other ranks are asked for
        resumed = controller(rounds=now)
        assert own._resume(resumed, state, settings)
        assert resumed.rounds == rounds
        how = "rounded" if rounds else "in low rank"
        said = f"compressed gradients go on {how} as in iter_0000007, whatever was timed now\n"
        assert capsys.readouterr().out == (said if rounds != now else "")


@pytest.mark.parametrize(("before", "now"), [(True, False), (False, True), (True, True)])
def test_a_resumed_run_says_who_sums_where_the_probe_has_said_otherwise(
    before: bool, now: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron.edgc.checkpoint import loading as checkpoint_loading

    own = resume(run_state(), index_of(EDGCConfig()))
    monkeypatch.setattr(checkpoint_loading, "warn", lambda line: print(line))
    saved, resumed = (controller(trials=Trials(200, 1.0, False, by_host=by_host)) for by_host in (before, now))
    assert own._resume(resumed, saved.state_dict(), {})
    assert resumed.plan.by_host == before
    who = "Megatron sums gradients" if before else "EDGC compresses gradients"
    said = f"{who} as in iter_0000007, whatever was timed now\n"
    assert capsys.readouterr().out == (said if before != now else "")


@pytest.mark.parametrize(
    ("preset", "processes", "adopts"), [("balanced", 2, True), ("paper", 2, False), ("balanced", 1, False)]
)
def test_only_a_volume_keeps_the_ranks_of_the_probe_before(
    preset: str, processes: int, adopts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where entropy sets ranks, matrices were chosen by the smallest rank of now. A link of one process is none."""
    from megatron.edgc.checkpoint import loading

    settings = EDGCConfig.from_preset(preset)
    key, found = StageKey(StageKind.LAYERS, 0), []
    stage, controller = SimpleNamespace(key=key, process_group=None), SimpleNamespace(config=settings)
    run = run_state(settings, keys=[key], stages=[stage], controller=controller)
    own = resume(run, index_of(settings, stages=[key.id]))
    own.usable.stages[key] = SimpleNamespace(processes=processes)
    monkeypatch.setattr(loading.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(loading.Resume, "_resume", lambda self, controller, state, ranks: found.append(ranks))
    own._resume_gradients()
    assert [bool(ranks) for ranks in found] == [adopts]


@pytest.mark.parametrize("same", [True, False])
def test_norms_of_gradients_go_on_among_as_many_processes(same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.edgc.checkpoint import loading

    key, norms, counted = StageKey(StageKind.LAYERS, 0), list[bool](), list[RunBytes]()
    stage = SimpleNamespace(key=key, restore_bytes=counted.append)
    own = resume(run_state(stages=[stage]), index_of(EDGCConfig(), bytes={key.id: RunBytes(ByteCount(1.0, 2.0, 3.0))}))
    own.usable.stages[key] = SimpleNamespace(layout={}, same_processes=same, measurements=None)
    monkeypatch.setattr(loading, "load_stage", lambda *args, **parts: norms.append(parts["norms"]))
    own._load_stage(stage, {})
    assert norms == [same] and counted == [own.index.bytes[key.id]]


@pytest.mark.parametrize("compressed", [True, False])
def test_bytes_of_messages_go_on_where_what_was_left_unsent_of_them_does_not(compressed: bool) -> None:
    from megatron.edgc.checkpoint.index import SavedMessages

    counted: list[ByteCount] = []
    messages: Any = SimpleNamespace(directions=("backward",), restore_bytes=counted.append)
    kept = RunBytes(messages=ByteCount(1.0, 2.0, 3.0))
    controller = SavedMessages([], {}, {}, {}) if compressed else None
    saved = index_of(EDGCConfig(), bytes={"messages": kept}, messages=controller)
    starts_anew = resume(run_state(messages=messages), saved)._load_messages({})
    assert counted == [kept.messages]
    # of a run that compressed none, nothing was left
    assert starts_anew == compressed


def test_a_checkpoint_that_edgc_does_not_see_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that imported Megatron's save_checkpoint by itself, before EDGC was attached."""
    from megatron.training import checkpointing as megatron_checkpointing
    from megatron.training import training as megatron_training

    from megatron.edgc.checkpoint.hooks import CheckpointHooks
    from megatron.edgc.seam import Seam

    saver: Any = SimpleNamespace(entry=lambda iteration, local: {"state": iteration})
    model, teacher = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    own = CheckpointHooks(run_state(), [model], saver, lambda iteration: None)
    monkeypatch.setattr(megatron_checkpointing, "generate_state_dict", lambda *args, **kwargs: {"model": 1})

    def saved(iteration: int, *args: Any, **kwargs: Any) -> Any:
        return megatron_checkpointing.generate_state_dict(None, iteration=iteration)

    monkeypatch.setattr(megatron_checkpointing, "save_checkpoint", saved)
    monkeypatch.setattr(megatron_training, "save_checkpoint", saved)
    with Seam() as seam:
        own.install(seam)
        for module in (megatron_checkpointing, megatron_training):
            for own_model in ([model], model, [torch.compile(model)]):
                assert module.save_checkpoint(7, own_model) == {"model": 1, "edgc": {"state": 7}}
            assert module.save_checkpoint(7, [teacher]) == {"model": 1}, "of another model"
        with pytest.raises(ConfigError, match="this checkpoint would be without EDGC's state"):
            saved(7)
        assert megatron_checkpointing.generate_state_dict(None) == {"model": 1}, "as a load asks for it"
    assert megatron_checkpointing.save_checkpoint is saved


def test_a_teacher_is_loaded_without_edgcs_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of another model is read as it is, also where a run with EDGC has written it."""
    from megatron.training import checkpointing as megatron_checkpointing
    from megatron.training import training as megatron_training

    from megatron.edgc.checkpoint.hooks import CheckpointHooks
    from megatron.edgc.seam import Seam

    model, teacher, resumed_at = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1), list[int]()
    saver: Any = SimpleNamespace()

    def read(load_dir: Any, args: Namespace, rank0: bool = False, sharded_state_dict: Any = None) -> Any:
        return {"iteration": 7}, "name", False, None

    def load(ddp_model: Any, optimizer: Any, opt_param_scheduler: Any) -> Any:
        return megatron_checkpointing._load_base_checkpoint("folder", Namespace(finetune=False))

    monkeypatch.setattr(megatron_checkpointing, "_load_base_checkpoint", read)
    for module in (megatron_checkpointing, megatron_training):
        monkeypatch.setattr(module, "load_checkpoint", load)
    monkeypatch.setattr("megatron.edgc.checkpoint.hooks._on_all_processes", lambda work: None)  # EDGC's state
    with Seam() as seam:
        CheckpointHooks(run_state(), [model], saver, resumed_at.append).install(seam)
        for module in (megatron_checkpointing, megatron_training):
            assert module.load_checkpoint([teacher], None, None)[0] == {"iteration": 7}
            assert resumed_at == []
        megatron_training.load_checkpoint([model], None, None)
        assert resumed_at == [7]


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
    from megatron.edgc.run import repeatable

    usual = {"fp16": False, "loss_scale": None, "check_for_spiky_loss": False, "check_for_large_grads": False}
    usual |= {"bf16": False, "use_distributed_optimizer": False}
    args = {**usual, "error_injection_rate": 0, "rerun_mode": "disabled", **changed}
    assert repeatable(Namespace(**args)) is expected


@pytest.mark.parametrize("finetune", [False, True])
def test_fine_tuning_goes_on_with_nothing_of_the_run_before(finetune: bool) -> None:
    from megatron.edgc.checkpoint.hooks import _goes_on

    assert _goes_on(({}, "name", False, None), Namespace(finetune=finetune)) != finetune
