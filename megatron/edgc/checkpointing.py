"""EDGC's state in Megatron's checkpoints: an entry ``edgc`` of the state dict that Megatron saves and loads itself.

So Megatron writes it with everything else, asynchronously if asked to, into every kind of checkpoint it knows, declares
a checkpoint complete only with it, and removes it with the rest. Plain Megatron does not ask for the entry.

The entry has an ``index``, the same on all processes, and a ``state`` by key. Of each stage of the plan, for each part
that tensor and expert parallelism cut it into, the state holds the error feedback as its *sum* over the data-parallel
processes, the other parts of the reducers' state, and what each process has measured since the last window; where
messages between stages are compressed, what each process has left unsent.
"""

import os
import signal
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.filesystem_async import get_write_results_queue
from megatron.core.msc_utils import maybe_msc
from megatron.training import checkpointing as megatron_checkpointing
from megatron.training import training as megatron_training
from megatron.training.checkpointing import CheckpointType

from edgc.comm.objects import all_gather_objects, broadcast_object, gather_objects
from edgc.config import ConfigError, EDGCConfig, flag
from edgc.hosts.checkpoint import (
    ERROR,
    STATE_VERSION,
    load_stage,
    misfit,
    restore_measurements,
    resume_controller,
    stage_state,
)
from edgc.hosts.reporting import warn
from edgc.hosts.stage import ByteCounts
from edgc.plan.controller import Controller
from edgc.plan.run import Part, StageKey
from megatron.edgc.checkpoint_keys import in_words, mean_bytes, message_key, parallel_sizes, replica_group, stage_key
from megatron.edgc.pipeline_messages import PipelineMessages
from megatron.edgc.seam import Seam
from megatron.edgc.stages import MegatronStage

ENTRY = "edgc"
RANK_SETTINGS = "rmin", "rmax", "static_rank", "volume"
RESOLVED = "engine", *RANK_SETTINGS  # settings that a probe of the link may have decided
ASKED = *RANK_SETTINGS, "link_gbps"  # those as given, by which it decides
TIED_STAGE = StageKey(Part.EMBEDDING, 0)
TIED_NAMES = ("word_embeddings.weight", "output_layer.weight")  # of its copies, where they are not summed at once
GO_ON = "give --edgc-reset-state to go on without it"


def shield_writer(args: Namespace) -> None:
    """Start the helpers of Megatron's ``torch_dist`` writer so that they outlive ``--exit-signal-handler``'s signal.

    Slurm and torchrun send the signal to all processes. The helpers would end by it, and with them the save that the
    signal asks for; started while the signal is ignored, they ignore it. With ``--async-save`` the writer itself is a
    helper: the server that forks it passes on what it ignores.
    """
    if args.exit_signal_handler and args.save is not None and args.ckpt_format == "torch_dist":
        before = signal.signal(args.exit_signal, signal.SIG_IGN)
        get_write_results_queue()
        if args.async_save:
            forkserver.ensure_running()
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
    stages: list[MegatronStage]
    controller: Controller | None  # on global process 0 alone
    messages: PipelineMessages | None = None
    message_controller: Controller | None = None  # on global process 0 alone
    messages_dropped: bool = False  # of what a load found on this process
    _entry: dict[str, Any] | None = None  # of the save under way
    _found: tuple[Any, ...] | None = None  # what Megatron has read first of the checkpoint to load
    _before: tuple[int, Sequence[Any]] = (-1, ())  # the last step that closed a window, and the controllers before it

    def install(self, seam: Seam, on_loaded: Callable[[], None]) -> None:
        """Add the entry to what Megatron saves and loads; ``on_loaded`` is called after a load."""

        def save_with_edgc(iteration: int, *args: Any, **kwargs: Any) -> Any:
            local = bool(kwargs.get("non_persistent_ckpt")) and self.args.non_persistent_ckpt_type == "local"
            # Collectives: with the format torch not every process generates a state dict.
            self._entry = self.state_dict(iteration, local)
            try:
                return save(iteration, *args, **kwargs)
            finally:
                self._entry = None

        def generate_with_edgc(*args: Any, **kwargs: Any) -> Any:
            state_dict = generate(*args, **kwargs)
            if self._entry is not None:
                state_dict[ENTRY] = self._entry
            elif kwargs.get("iteration") is not None:  # a load asks for none
                # With the format torch only some processes come here. The others wait until the launcher ends them.
                raise ConfigError(
                    "this checkpoint would be without EDGC's state: save_checkpoint was imported before EDGC was "
                    "attached. Call megatron.training.checkpointing.save_checkpoint by this name"
                )
            return state_dict

        def read_with_edgc(
            load_dir: Any, args: Namespace, rank0: bool = False, sharded_state_dict: Any = None, **kwargs: Any
        ) -> Any:
            if rank0:
                found = read(load_dir, args, rank0=True, sharded_state_dict=sharded_state_dict, **kwargs)
                self._found = found
                return found
            first, self._found, index = self._found, None, None
            if sharded_state_dict is not None and first is not None and _goes_on(first, args):
                index = _on_all_processes(lambda: self._usable(first[0].get(ENTRY), _folder(first)))
                if index is not None:
                    sharded_state_dict[ENTRY] = {"state": self._requests(index)}
            found = read(load_dir, args, rank0=False, sharded_state_dict=sharded_state_dict, **kwargs)
            if not _goes_on(found, args):
                return found
            entry, folder = found[0].pop(ENTRY, None), _folder(found)
            if sharded_state_dict is None:
                index = _on_all_processes(lambda: self._usable(entry, folder))
            if index is not None:
                self.messages_dropped = False
                _on_all_processes(lambda: self.load_state_dict(index, entry["state"], folder))
                if any(all_gather_objects(self.messages_dropped)):
                    warn(
                        f"{os.path.basename(folder)} has other messages between stages, or of other replicas: what was "
                        "left unsent of them starts anew"
                    )
                self._warn_of_dropped(index, folder)
            on_loaded()
            return found

        save = seam.replace(megatron_training, "save_checkpoint", save_with_edgc)
        seam.replace(megatron_checkpointing, "save_checkpoint", save_with_edgc)  # for loops that are not Megatron's
        generate = seam.replace(megatron_checkpointing, "generate_state_dict", generate_with_edgc)
        read = seam.replace(megatron_checkpointing, "_load_base_checkpoint", read_with_edgc)

    def _warn_of_dropped(self, index: Mapping[str, Any], folder: str) -> None:
        """Experts of which no copies are left are not summed, so that nothing can send what is owed to them."""
        experts = [StageKey(Part.EXPERTS, key.pipeline_stage) for key in self.keys if key.part is Part.LAYERS]
        if dropped := [str(key) for key in experts if key.id in index["stages"] and key not in self.keys]:
            warn(
                f"{os.path.basename(folder)} has errors of {', '.join(dropped)}, which this run does not sum: what was "
                "left unsent of them is lost"
            )

    def keep_controllers(self, iteration: int) -> None:
        """Before the controllers decide at the end of this step's window: Megatron may save without the step."""
        self._before = iteration, self._controllers()

    def _controllers(self) -> list[Any]:
        both = self.controller, self.message_controller
        return [None if controller is None else controller.state_dict() for controller in both]

    def state_dict(self, iteration: int, local: bool = False) -> dict[str, Any]:
        """The entry. From here on the live run has its errors divided evenly, as a resumed one will.

        ``iteration`` steps are in the checkpoint. Where Megatron doubts a result, it saves after the reduction of the
        next step and before its optimizer step: what that reduction has done is undone here.

        What all data-parallel processes have alike one of them keeps, on the CPU, each about as much as the others. A
        ``local`` checkpoint is read where it was written, by all of them; the format ``torch`` is written by one.
        """
        for stage in self.stages:
            for reducer in stage.reducers:
                reducer.roll_back(iteration)
        if self.messages is not None:
            self.messages.roll_back(iteration)
        under_way = getattr(self.args, "curr_iteration", None)  # Megatron may save before the first step
        if iteration == under_way and not self.stages[0].reducers[0].repeatable:
            warn(
                f"this checkpoint is without step {iteration + 1}, but EDGC's state in it is that of after its "
                "reduction: the state before a step is kept only with a loss scale or where Megatron checks for spikes"
            )
        sharded = self.args.ckpt_format == "torch_dist"
        every, writes = local or not sharded, sharded or _writes_torch()
        state: dict[str, Any] = {}
        layouts = {}
        for stage in self.stages:
            place, group = stage_key(stage), stage.process_group
            own, processes = dist.get_rank(group), dist.get_world_size(group)
            layout = {}
            kept = [0] * processes  # bytes
            for name, contents, message in stage_state(stage, iteration):
                layout[name] = contents
                keeper = kept.index(min(kept))
                kept[keeper] += message.nbytes
                if keeper == own or (every and writes):
                    key, message = f"{place}.{name}", message.to("cpu", copy=True)
                    state[key] = _tensor(key, message, own if local else 0) if sharded else message
            if own == 0:
                layouts[place] = [processes, layout]
            measured = [reducer.observer.before(iteration).state_dict() for reducer in stage.reducers]
            state |= _of_each(f"{place}.measurements", measured, group, sharded)
        if self.messages is not None:
            state |= _of_each(message_key(), self.messages.state_dict(iteration), replica_group(), sharded)
        return {"index": self._index(iteration, layouts), "state": state if writes else {}}

    def _index(self, iteration: int, layouts: Mapping[str, Any]) -> dict[str, Any]:
        """What a load has to know before it reads any state: plain values, the same on all processes."""
        counts: list[tuple[Any, ...]] = [(stage.key.id, *stage.byte_counts()) for stage in self.stages]
        if self.messages is not None:
            counts.append(("messages", *self.messages.byte_counts()))
        everywhere = gather_objects((layouts, counts))
        index: dict[str, Any] | None = None
        if self.controller is not None:
            kept, of_messages = self._before[1] if iteration == self._before[0] else self._controllers()
            index = {
                "version": STATE_VERSION,
                "iteration": iteration,
                "parallel": parallel_sizes(self.args),
                "engine": self.requested.engine,
                "requested": self.requested.only(ASKED),
                "resolved": self.controller.config.only(RESOLVED),
                "stages": [key.id for key in self.keys],
                "controller": kept,
                "messages": self._message_plan(of_messages),
                "replicas": 0 if self.messages is None else dist.get_world_size(replica_group()),
                "bytes": mean_bytes([count for _, counts in everywhere for count in counts]),
                "places": {place: layout for one, _ in everywhere for place, layout in one.items()},
            }
        shared: dict[str, Any] = broadcast_object(index)
        return shared

    def _message_plan(self, controller: dict[str, Any] | None) -> dict[str, Any] | None:
        if self.messages is None or self.message_controller is None:
            return None
        return {
            "boundaries": [boundary.id for boundary in self.messages.boundaries],
            "requested": self.requested.only(("pp", *ASKED)),
            "resolved": self.message_controller.config.only(RESOLVED),
            "controller": controller,
        }

    def _usable(self, entry: dict[str, Any] | None, folder: str) -> dict[str, Any] | None:
        """The index, if this run can go on with the entry. Raises ``ConfigError`` if it should, but cannot."""
        name = os.path.basename(folder)
        if self.config.job.reset_state:
            warn(f"starting without the EDGC state of {name}, as asked for")
            return None
        if entry is None:
            if maybe_msc.os.path.exists(os.path.join(folder, ENTRY, "index.json")):
                raise ConfigError(f"{folder}: the EDGC state is that of an earlier release; {GO_ON}")
            warn(f"{name} was written without EDGC: its state starts anew")
            return None
        index: dict[str, Any] = entry["index"]
        if index["version"] != STATE_VERSION:
            raise ConfigError(
                f"{folder}: the EDGC state is of version {index['version']}, this release reads {STATE_VERSION}; "
                f"{GO_ON}"
            )
        if index["engine"] != self.requested.engine:
            raise ConfigError(
                f"{folder} is of the engine {index['engine']}, this run has {self.requested.engine}; {GO_ON}"
            )
        if index["parallel"] != parallel_sizes(self.args):
            warn(
                f"the EDGC state of {name} is for {in_words(index['parallel'])}, this run has "
                f"{in_words(parallel_sizes(self.args))}: its state starts anew"
            )
            return None
        # What a probe of the link decided then and now may differ; errors are good for any engine.
        if not self._same_engine(index):
            warn(
                f"{name} used the engine {index['resolved']['engine']}, here it is {self.config.engine}: of its EDGC "
                "state only the error feedback is used"
            )
        if (TIED_STAGE.id in index["stages"]) != (TIED_STAGE in self.keys):
            warn(
                f"{name} and this run differ in --edgc-fuse-embedding-sync: the error of the tied embedding starts anew"
            )
        for stage in self.stages:
            sizes = {name: spec.rows * spec.cols for one in stage.reducers for name, spec in one.specs.items()}
            if why := misfit(self._layout(stage, index), sizes):
                raise ConfigError(f"{folder}: {stage.key} has {why}; {GO_ON}")
        return index

    def _same_engine(self, index: Mapping[str, Any]) -> bool:
        """Whether more than the errors is of use."""
        return bool(index["resolved"]["engine"] == self.config.engine)

    def _layout(self, stage: MegatronStage, index: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """What this run takes of a stage's state: by its key, what ``_described`` says of each tensor in it."""
        _, layout = index["places"].get(stage_key(stage), (0, {}))
        alike, moved = self._same_engine(index), (TIED_STAGE.id in index["stages"]) != (TIED_STAGE in self.keys)
        return {
            key: contents
            for key, contents in layout.items()
            if (not (moved and key.endswith(TIED_NAMES)) if key.startswith(ERROR) else alike)
        }

    def _same_processes(self, stage: MegatronStage, index: Mapping[str, Any]) -> bool:
        """Other processes have measured other things: then the window starts anew."""
        processes, _ = index["places"].get(stage_key(stage), (0, {}))
        return self._same_engine(index) and bool(processes == dist.get_world_size(stage.process_group))

    def _requests(self, index: Mapping[str, Any]) -> dict[str, Any]:
        """What this process needs of the state, in Megatron's terms."""
        requests: dict[str, Any] = {}
        for stage in self.stages:
            place, own = stage_key(stage), dist.get_rank(stage.process_group)
            for name, contents in self._layout(stage, index).items():
                size = sum(size for _, _, size in contents.values())
                key = f"{place}.{name}"
                requests[key] = _tensor(key, torch.empty(size, dtype=torch.uint8, device="cpu"), own)
            if self._same_processes(stage, index):
                key = f"{place}.measurements.{own}"
                requests[key] = _object(key, None)
        if self._same_replicas(index):
            key = f"{message_key()}.{dist.get_rank(replica_group())}"
            requests[key] = _object(key, None)
        return requests

    def _same_replicas(self, index: Mapping[str, Any]) -> bool:
        return self.messages is not None and bool(index["replicas"] == dist.get_world_size(replica_group()))

    def load_state_dict(self, index: Mapping[str, Any], state: Mapping[str, Any], folder: str) -> None:
        """Go on where ``state_dict`` was taken."""
        for stage in self.stages:
            self._load_stage(stage, index, state, folder)
        layers = self.stages[0]
        before = index["places"].get(stage_key(layers))
        if before is not None and before[0] != dist.get_world_size(layers.process_group):
            warn(
                f"{os.path.basename(folder)} was written by {before[0]} data-parallel processes: the sums of their "
                "errors go on, what its last window had measured does not"
            )
        self._load_messages(index, state, folder)
        if self.controller is None or not self._same_engine(index):
            return
        if index["stages"] != [key.id for key in self.keys]:
            warn(f"{os.path.basename(folder)} has other stages than this run: the controller starts anew")
            return
        resolved = {name: index["resolved"][name] for name in RANK_SETTINGS}
        others = index["requested"] != self.requested.only(ASKED)
        # one process has no link that could bound ranks
        alike = before is not None and (before[0] == 1) == (dist.get_world_size(layers.process_group) == 1)
        settings = resolved if alike and not others else {}
        if self._load_controller(self.controller, index["controller"], settings, folder) and others:
            warn(f"{os.path.basename(folder)} was written with other ranks or another link given: those of now hold")

    def _load_controller(
        self,
        controller: Controller,
        state: dict[str, Any],
        settings: dict[str, Any],
        folder: str,
    ) -> bool:
        """Whether it goes on. With it go the ``settings`` that a probe of the link had decided then."""
        name, rounded = os.path.basename(folder), controller.rounds
        if settings:
            controller.settle(state, **settings)
        if controller.rounds != rounded:
            how = "rounded" if controller.rounds else "in low rank"
            warn(f"compressed gradients go on {how} as in {name}, whatever was timed now")
        return resume_controller(controller, state, name, GO_ON)

    def _load_messages(self, index: Mapping[str, Any], state: Mapping[str, Any], folder: str) -> None:
        """What was left unsent of messages is of one micro-batch's size and of one replica of the model alone."""
        if self.messages is None:
            return
        own = None
        if self._same_replicas(index):
            own = state[f"{message_key()}.{dist.get_rank(replica_group())}"]
        if own is not None and self.messages.fits(own):
            self.messages.load_state_dict(own)
        else:
            self.messages_dropped = bool(self.messages.directions or (own is not None and own["senders"]))
            self.messages.restore_bytes(*index["bytes"].get("messages", (0.0, 0.0)))
        controller, kept = self.message_controller, index.get("messages")
        if controller is None or kept is None:
            return
        if kept["boundaries"] != [boundary.id for boundary in self.messages.boundaries]:
            warn(f"{folder} has other messages in low rank than this run: their controller starts anew")
            return
        then, now = kept["requested"], self.requested.only(("pp", *ASKED))
        if then["pp"] != now["pp"]:
            warn(f"{folder} was written with another {flag('pp')}: the controller of messages starts anew")
            return
        # also of a rank that was given: how much of it messages get has been timed
        resolved = kept["resolved"] if self.requested.pipeline.messages.follows and then == now else {}
        # and so has what stays uncompressed
        if not self.requested.pipeline.messages.follows and controller.settle_dense(kept["controller"]):
            stay = ", ".join(str(self.messages.boundaries[place]) for place in sorted(controller.dense)) or "none"
            warn(
                f"messages between stages go on as in {os.path.basename(folder)}, whatever was timed now: "
                f"uncompressed stay {stay}"
            )
        self._load_controller(controller, kept["controller"], resolved, folder)

    def _load_stage(
        self, stage: MegatronStage, index: Mapping[str, Any], state: Mapping[str, Any], folder: str
    ) -> None:
        place = stage_key(stage)
        if place not in index["places"]:  # experts that had no copies to reduce over
            warn(f"{folder} has nothing of {stage.key}: its state starts anew")
            return
        load_stage(
            stage,
            self._layout(stage, index),
            lambda name: state[f"{place}.{name}"],
            index["iteration"],
            parts=self._same_engine(index),
            # gradients are scaled by the number of processes, and so are their norms
            norms=index["places"][place][0] == dist.get_world_size(stage.process_group),
        )
        if self._same_processes(stage, index):
            measured = state[f"{place}.measurements.{dist.get_rank(stage.process_group)}"]
            restore_measurements(stage.reducers, measured)
        stage.restore_bytes(ByteCounts(*index["bytes"][stage.key.id]))


def _goes_on(found: tuple[Any, ...], args: Namespace) -> bool:
    """Whether a run is to go on from what Megatron's ``_load_base_checkpoint`` has returned."""
    state_dict, _, release, _ = found
    return not (state_dict is None or release or args.finetune)


def _folder(found: tuple[Any, ...]) -> str:
    """The checkpoint's, of the same."""
    _, name, _, kind = found
    return os.path.dirname(os.path.dirname(name)) if kind is CheckpointType.LEGACY else str(name)


def _on_all_processes[T](work: Callable[[], T]) -> T:
    """Raise on every process what one of them raises: the others would wait for it."""
    message, result = None, None
    try:
        result = work()
    except ConfigError as error:
        message = str(error)
    except Exception as error:  # whatever a state that is not what it should be leads to
        message = f"the EDGC state cannot be read ({type(error).__name__}: {error}); {GO_ON}"
    for found in all_gather_objects(message):
        if found is not None:
            raise ConfigError(found)
    return result  # type: ignore[return-value]  # there was no exception


def _tensor(key: str, data: torch.Tensor, replica: int) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(f"{ENTRY}.{key}", data, replica_id=replica)


def _object(key: str, data: Any) -> ShardedObject:
    return ShardedObject(f"{ENTRY}.{key}", data, (1,), (0,))


def _of_each(key: str, own: Any, group: dist.ProcessGroup, sharded: bool) -> dict[str, Any]:
    """State that each process of a group has for itself; of all of them where not each one writes."""
    process = dist.get_rank(group)
    if sharded:
        return {f"{key}.{process}": _object(f"{key}.{process}", own)}
    state = {}
    for sender in range(dist.get_world_size(group)):  # one after another: a device need not hold all
        state[f"{key}.{sender}"] = broadcast_object(own if sender == process else None, group, sender)
    return state


def _writes_torch() -> bool:
    """Whether this process writes a file of a checkpoint in the format ``torch``: Megatron's own rule."""
    return 0 in (parallel_state.get_data_parallel_rank(), parallel_state.get_expert_data_parallel_rank())
