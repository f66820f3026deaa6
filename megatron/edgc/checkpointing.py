"""EDGC's state in Megatron's checkpoints: a folder ``edgc`` beside Megatron's own files, the same for every format.

Of each stage of the plan, for each tensor- and expert-parallel rank, the data-parallel ranks write one file each: the
error feedback as its *sum* over them, shared out by parameter, the state of engine and equaliser likewise, and what
each of them has measured since the last window. Where messages between stages are compressed, each rank writes a file
with what it has left unsent of its own. ``index.json`` comes last and names every file with its size, so that a
folder without it is an incomplete one. Megatron neither reads nor minds the folder.
"""

import json
import shutil
import signal
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies.filesystem_async import get_write_results_queue
from megatron.training import training as megatron_training
from megatron.training.checkpointing import get_checkpoint_name

from edgc.config import ConfigError, EDGCConfig, flag
from edgc.controller import Controller
from edgc.reducer import Measurements
from edgc.statistics import GradientStatistics
from edgc.wire import Packed, Wire
from megatron.edgc.messages import PipelineMessages
from megatron.edgc.reporting import Reporter
from megatron.edgc.seam import Seam
from megatron.edgc.stages import Stage
from megatron.edgc.windows import Part, StageKey

FOLDER = "edgc"
VERSION = 2
RANKS = "rmin", "rmax", "static_rank"
MESSAGES = "pp", "pp_engine", "pp_rank"
RESOLVED = "engine", *RANKS  # settings that a probe of the link may have decided
TIED_STAGE = StageKey(Part.EMBEDDING, 0)
TIED_NAMES = ("word_embeddings.weight", "output_layer.weight")  # of its copies, where they are not summed at once
GO_ON = "give --edgc-reset-state to go on without it"


def shield_writer(args: Namespace) -> None:
    """Start the helper of Megatron's ``torch_dist`` writer so that it outlives the signal of ``--exit-signal-handler``.

    Slurm and torchrun send the signal to all processes. The helper would end by it, and with it the save that the
    signal asks for; started while the signal is ignored, it goes on ignoring it.
    """
    if args.exit_signal_handler and args.save is not None and args.ckpt_format == "torch_dist":
        before = signal.signal(args.exit_signal, signal.SIG_IGN)
        get_write_results_queue()
        signal.signal(args.exit_signal, before)


@dataclass
class Checkpoints:
    """Saves and loads with Megatron's own checkpoints once ``install`` has been called.

    ``requested`` are the settings as given, ``config`` as resolved; ``keys`` the stages of the plan.
    """

    args: Namespace
    requested: EDGCConfig
    config: EDGCConfig
    keys: list[StageKey]
    stages: list[Stage]
    controller: Controller | None  # on global rank 0 alone
    messages: PipelineMessages | None = None
    message_controller: Controller | None = None  # on global rank 0 alone
    messages_dropped: bool = False  # of what a load found on this rank

    def install(self, seam: Seam, on_loaded: Callable[[], None]) -> None:
        """Stand around the two functions of Megatron's training loop; ``on_loaded`` is called after a load."""

        def save_with_edgc(iteration: int, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("non_persistent_ckpt"):
                Reporter.warn("non-persistent checkpoints hold no EDGC state")
                return save(iteration, *args, **kwargs)
            checkpoint = Path(get_checkpoint_name(self.args.save, iteration, return_base_dir=True))
            # Before Megatron declares the checkpoint complete, but not yet in its folder, which it wants empty.
            self.save(_beside(checkpoint), iteration)
            result = save(iteration, *args, **kwargs)
            if dist.get_rank() == 0:
                shutil.rmtree(checkpoint / FOLDER, ignore_errors=True)
                _beside(checkpoint).rename(checkpoint / FOLDER)
            return result

        def load_with_edgc(*args: Any, **kwargs: Any) -> Any:
            result = load(*args, **kwargs)
            iteration = result[0]
            if iteration and not self.args.finetune:
                checkpoint = Path(get_checkpoint_name(self.args.load, iteration, return_base_dir=True))
                self.messages_dropped = False
                _on_all_ranks(lambda: self.load(checkpoint, iteration))
                everywhere: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(everywhere, self.messages_dropped)
                if any(everywhere):
                    Reporter.warn(
                        f"{checkpoint.name} has other messages between stages, or of other replicas: what was left "
                        "unsent of them starts anew"
                    )
                on_loaded()
            return result

        save = seam.replace(megatron_training, "save_checkpoint", save_with_edgc)
        load = seam.replace(megatron_training, "load_checkpoint", load_with_edgc)

    def save(self, folder: Path, iteration: int) -> None:
        """Write all state. From here on the live run has its errors divided evenly, as a resumed one will."""
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)  # what an earlier attempt has left
        dist.barrier()
        folder.mkdir(parents=True, exist_ok=True)
        files = {}
        for stage in self.stages:
            name = f"{_place(stage)}-{dist.get_rank(stage.process_group)}.pt"
            torch.save(_stage_state(stage, iteration), folder / name)
            files[name] = (folder / name).stat().st_size
        if self.messages is not None:
            name = f"{_message_place()}-{_replica()}.pt"
            torch.save(self.messages.state_dict(), folder / name)
            files[name] = (folder / name).stat().st_size
        everywhere: list[Any] = [None] * dist.get_world_size()
        counts = [(str(stage.key), *stage.byte_counts()) for stage in self.stages]
        if self.messages is not None:
            counts.append(("messages", *self.messages.byte_counts()))
        dist.all_gather_object(everywhere, (files, counts))
        if self.controller is not None:
            index = {
                "version": VERSION,
                "iteration": iteration,
                "parallel": _parallel(self.args),
                "engine": self.requested.engine,
                "resolved": {name: getattr(self.config, name) for name in RESOLVED},
                "stages": [str(key) for key in self.keys],
                "controller": self.controller.state_dict(),
                "messages": self._message_plan(),
                "bytes": _mean_bytes([count for _, counts in everywhere for count in counts]),
                "files": {name: size for one, _ in everywhere for name, size in one.items()},
            }
            partial = folder / "index.json.partial"
            partial.write_text(json.dumps(index, indent=1))
            partial.replace(folder / "index.json")
        dist.barrier()

    def _message_plan(self) -> dict[str, Any] | None:
        if self.messages is None or self.message_controller is None:
            return None
        return {
            "boundaries": [str(boundary) for boundary in self.messages.boundaries],
            "requested": {name: getattr(self.requested, name) for name in (*MESSAGES, *RANKS)},
            "resolved": {name: getattr(self.message_controller.config, name) for name in RESOLVED},
            "controller": self.message_controller.state_dict(),
        }

    def load(self, checkpoint: Path, iteration: int) -> None:
        """Go on where the checkpoint was written. Raises ``ConfigError`` for state that is there but cannot be used."""
        folder = checkpoint / FOLDER
        if not folder.is_dir():
            folder = _beside(checkpoint)  # the run ended before it was moved
        if self.config.reset_state:
            Reporter.warn(f"starting without the EDGC state of {checkpoint.name}, as asked for")
            return
        if not folder.is_dir():
            Reporter.warn(f"{checkpoint.name} was written without EDGC: its state starts anew")
            return
        index = self._index(folder)
        if index["parallel"] != _parallel(self.args):
            Reporter.warn(
                f"the EDGC state of {checkpoint.name} is for {_words(index['parallel'])}, this run has "
                f"{_words(_parallel(self.args))}: its state starts anew"
            )
            return
        # What a probe of the link decided then and now may differ; errors are good for any engine.
        alike = index["resolved"]["engine"] == self.config.engine
        if not alike:
            Reporter.warn(
                f"{checkpoint.name} used the engine {index['resolved']['engine']}, here it is {self.config.engine}: of "
                "its EDGC state only the error feedback is used"
            )
        if (str(TIED_STAGE) in index["stages"]) != (TIED_STAGE in self.keys):
            Reporter.warn(
                f"{checkpoint.name} and this run differ in --edgc-fuse-embedding-sync: the error of the tied embedding "
                "starts anew"
            )
        for stage in self.stages:
            self._load_stage(stage, folder, index, iteration, alike)
        self._load_messages(folder, index)
        if self.controller is None or not alike:
            return
        if index["stages"] != [str(key) for key in self.keys]:
            Reporter.warn(f"{checkpoint.name} has other stages than this run: the controller starts anew")
            return
        resolved = {name: value for name, value in index["resolved"].items() if getattr(self.requested, name) is None}
        self._load_controller(self.controller, index["controller"], resolved, folder)

    def _load_controller(
        self,
        controller: Controller,
        state: dict[str, Any],
        settings: dict[str, Any],
        folder: Path,
    ) -> None:
        """With it go the ``settings`` that a probe of the link had decided then."""
        try:
            controller.load_state_dict(state)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{folder}: the controller's state does not fit ({error}); {GO_ON}") from error
        controller.config = replace(controller.config, **settings)

    def _load_messages(self, folder: Path, index: dict[str, Any]) -> None:
        """What was left unsent of messages is of one micro-batch's size and of one replica of the model alone."""
        if self.messages is None:
            return
        name = f"{_message_place()}-{_replica()}.pt"
        if sum(known.rpartition("-")[0] == _message_place() for known in index["files"]) == _replicas():
            state = torch.load(folder / name, weights_only=True)
        else:
            state = None
        if state is not None and self.messages.fits(state):
            self.messages.load_state_dict(state)
        else:
            self.messages_dropped = bool(self.messages.directions or (state is not None and state["senders"]))
            self.messages.restore_bytes(*index["bytes"].get("messages", (0.0, 0.0)))
        controller, kept = self.message_controller, index.get("messages")
        if controller is None or kept is None:
            return
        if kept["boundaries"] != [str(boundary) for boundary in self.messages.boundaries]:
            Reporter.warn(f"{folder} has other messages in low rank than this run: their controller starts anew")
            return
        then, now = kept["requested"], {name: getattr(self.requested, name) for name in (*MESSAGES, *RANKS)}
        if any(then.get(name) != now[name] for name in MESSAGES):
            flags = ", ".join(map(flag, MESSAGES))
            Reporter.warn(f"{folder} was written with other {flags}: the controller of messages starts anew")
            return
        # also of a rank that was given: how much of it messages get has been timed
        timed = self.requested.pp_follows or self.requested.pp == "auto"
        resolved = kept["resolved"] if timed and then == now else {}
        self._load_controller(controller, kept["controller"], resolved, folder)

    def _index(self, folder: Path) -> dict[str, Any]:
        """The index, once all that it names is known to be there and whole."""
        try:
            index: dict[str, Any] = json.loads((folder / "index.json").read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder} was not written to its end ({error}); {GO_ON}") from error
        if index["version"] != VERSION:
            raise ConfigError(f"{folder} is of version {index['version']}, this release reads {VERSION}; {GO_ON}")
        for name, size in index["files"].items():
            found = (folder / name).stat().st_size if (folder / name).is_file() else None
            if found is None:
                raise ConfigError(f"{folder}: {name} is missing; {GO_ON}")
            if found != size:
                raise ConfigError(f"{folder}: {name} is cut short: {found} of {size} bytes; {GO_ON}")
        if index["engine"] != self.requested.engine:
            raise ConfigError(
                f"{folder} is of the engine {index['engine']}, this run has {self.requested.engine}; {GO_ON}"
            )
        return index

    def _load_stage(self, stage: Stage, folder: Path, index: dict[str, Any], iteration: int, alike: bool) -> None:
        place = _place(stage)
        names = sorted(name for name in index["files"] if name.rpartition("-")[0] == place)
        if not names:  # experts that had no copies to reduce over
            Reporter.warn(f"{folder} has nothing of {stage.key}: its state starts anew")
            return
        states = [torch.load(folder / name, map_location=stage.device, weights_only=True) for name in names]
        errors = {name: total for state in states for name, total in state["error"].items()}
        if (str(TIED_STAGE) in index["stages"]) != (TIED_STAGE in self.keys):
            errors = {name: total for name, total in errors.items() if not name.endswith(TIED_NAMES)}
        shapes = {name: (spec.rows, spec.cols) for reducer in stage.reducers for name, spec in reducer.specs.items()}
        for name, total in errors.items():
            if name not in shapes:
                raise ConfigError(f"{folder}: {stage.key} has an error of {name}, which this model lacks; {GO_ON}")
            rows, cols = shapes[name]
            if total.numel() != rows * cols:
                raise ConfigError(
                    f"{folder}: the error of {name} has {total.numel()} values, this model's {rows * cols}; {GO_ON}"
                )
        for reducer in stage.reducers:
            if alike:
                kept = {
                    part: {
                        key: _unpacked(packed)
                        for state in states
                        for key, packed in state[part].items()
                        if key.rpartition(":")[0] in reducer.specs
                    }
                    for part in ("engine", "equaliser")
                }
                reducer.load_state_dict({"error": {}, **kept})
            reducer.share_errors({name: total for name, total in errors.items() if name in reducer.specs}, iteration)
        measured = states[dist.get_rank(stage.process_group) % len(states)]["measurements"]
        # Other ranks or buckets have measured other things: the window then starts anew.
        if alike and len(states) == dist.get_world_size(stage.process_group) and len(measured) == len(stage.reducers):
            for reducer, measurements in zip(stage.reducers, measured, strict=True):
                reducer.measurements = _measurements(measurements)
        stage.restore_bytes(*index["bytes"][str(stage.key)])


def _beside(checkpoint: Path) -> Path:
    """Where EDGC's state is until Megatron has written the checkpoint."""
    return checkpoint.with_name(f"{checkpoint.name}.{FOLDER}")


def _on_all_ranks(work: Callable[[], None]) -> None:
    """Raise on every rank what one of them raises: the others would wait for it."""
    message = None
    try:
        work()
    except ConfigError as error:
        message = str(error)
    except Exception as error:  # whatever a file that is not what it should be makes of torch.load
        message = f"the EDGC state cannot be read ({type(error).__name__}: {error}); {GO_ON}"
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    for found in messages:
        if found is not None:
            raise ConfigError(found)


def _stage_state(stage: Stage, iteration: int) -> dict[str, Any]:
    """What this data-parallel rank writes of a stage; its errors are divided anew on the way."""
    own, ranks = dist.get_rank(stage.process_group), dist.get_world_size(stage.process_group)
    state: dict[str, Any] = {"error": {}, "engine": {}, "equaliser": {}, "measurements": []}
    place = 0
    for reducer in stage.reducers:
        for name, total in reducer.settle_errors(iteration):
            if place % ranks == own:
                state["error"][name] = total.cpu()
            place += 1
        kept = reducer.state_dict()
        for part in ("engine", "equaliser"):
            for key, packed in kept[part].items():
                if place % ranks == own:
                    state[part][key] = _packed(packed)
                place += 1
        state["measurements"].append(_plain(reducer.measurements))
    return state


def _packed(packed: Packed) -> dict[str, Any]:
    wire = packed.wire
    return {
        "message": packed.message.cpu().clone(),  # not all that shares its memory
        "shape": list(packed.shape),
        "wire": [wire.bits, wire.stochastic, wire.hadamard, wire.floating],
    }


def _unpacked(state: dict[str, Any]) -> Packed:
    return Packed.restored(state["message"], torch.Size(state["shape"]), Wire(*state["wire"]))


def _plain(measurements: Measurements) -> dict[str, Any]:
    return {
        "entropy": [float(value) for value in measurements.entropy],
        "residual": [float(value) for value in measurements.residual],
        "energies": [{name: energy.cpu() for name, energy in one.items()} for one in measurements.energies],
        "statistics": [{name: vars(one) for name, one in step.items()} for step in measurements.statistics],
    }


def _measurements(state: dict[str, Any]) -> Measurements:
    statistics = [{name: GradientStatistics(**one) for name, one in step.items()} for step in state["statistics"]]
    return Measurements(state["entropy"], state["residual"], state["energies"], statistics)


def _place(stage: Stage) -> str:
    """Where a stage's state belongs, whatever the number of data-parallel ranks."""
    key = stage.key
    if key.part is Part.EMBEDDING:
        return f"embedding-tp{parallel_state.get_tensor_model_parallel_rank()}"
    if key.part is Part.EXPERTS:
        tensor = parallel_state.get_expert_tensor_parallel_rank()
        expert = parallel_state.get_expert_model_parallel_rank()
        return f"stage{key.pipeline_stage}-experts-tp{tensor}-ep{expert}"
    return f"stage{key.pipeline_stage}-tp{parallel_state.get_tensor_model_parallel_rank()}"


def _message_place() -> str:
    """The same for stages and tensor-parallel ranks as of ``_place``."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return f"messages{stage}-tp{parallel_state.get_tensor_model_parallel_rank()}"


def _replica() -> int:
    return int(parallel_state.get_data_parallel_rank(with_context_parallel=True))


def _replicas() -> int:
    return int(parallel_state.get_data_parallel_world_size(with_context_parallel=True))


def _parallel(args: Namespace) -> dict[str, int]:
    """The sizes that decide which parameters, and which parts of them, a rank holds."""
    return {
        "tensor": args.tensor_model_parallel_size,
        "pipeline": args.pipeline_model_parallel_size,
        "virtual pipeline": args.virtual_pipeline_model_parallel_size or 1,
        "expert": args.expert_model_parallel_size,
        "expert tensor": args.expert_tensor_parallel_size or args.tensor_model_parallel_size,
    }


def _words(parallel: dict[str, int]) -> str:
    return ", ".join(f"{name}-parallel size {size}" for name, size in parallel.items())


def _mean_bytes(counts: list[tuple[Any, ...]]) -> dict[str, list[float]]:
    by_stage: dict[str, list[tuple[float, ...]]] = {}
    for stage, *values in counts:
        by_stage.setdefault(stage, []).append(tuple(values))
    return {stage: [sum(column) / len(rows) for column in zip(*rows, strict=True)] for stage, rows in by_stage.items()}
