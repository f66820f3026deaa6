"""What a resumed run takes up again of EDGC's state in a checkpoint, and what it says of the rest."""

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from edgc.byte_counts import RunBytes
from edgc.config import ConfigError, RankPolicy, flag
from edgc.hosts.checkpoint import STATE_VERSION, load_stage, misfit, restore_measurements, resume_controller
from edgc.hosts.user_warnings import warn
from edgc.hosts.wording import message_form
from edgc.plan.controller import Controller
from edgc.plan.stages import StageKey, StageKind
from megatron.edgc.checkpoint.index import (
    MESSAGES,
    RANK_SETTINGS,
    REQUESTED_SETTINGS,
    REQUESTED_SETTINGS_OF_MESSAGES,
    Index,
    RestorableState,
    RunState,
    in_words,
    parallel_sizes,
)
from megatron.edgc.checkpoint.keys import sharded_object, sharded_tensor, tensor_key
from megatron.edgc.stages import MegatronStage

GO_ON = "give --edgc-reset-state to go on without it"


def resumed(entry: Mapping[str, Any] | None, run: RunState, folder: str) -> "Resume | None":
    """How this run goes on with the entry of the checkpoint in this folder; None: without it, as a warning says.

    Raises ``ConfigError`` if it should go on with it, but cannot.
    """
    name = os.path.basename(folder)
    if run.config.job.reset_state:
        warn(f"starting without the EDGC state of {name}, as asked for")
        return None
    if entry is None:
        warn(f"{name} was written without EDGC: its state starts anew")
        return None
    version = entry["index"]["version"]
    if version != STATE_VERSION:
        raise ConfigError(
            f"{folder}: the EDGC state is of version {version}, this release reads {STATE_VERSION}; {GO_ON}"
        )
    index = Index.from_dict(entry["index"])
    if index.engine != run.requested.engine:
        raise ConfigError(f"{folder} is of the engine {index.engine}, this run has {run.requested.engine}; {GO_ON}")
    if index.parallel != parallel_sizes(run.args):
        warn(
            f"the EDGC state of {name} is for {in_words(index.parallel)}, this run has "
            f"{in_words(parallel_sizes(run.args))}: its state starts anew"
        )
        return None
    if index.layers != run.layers:
        warn(f"{name} has the layers split otherwise among the pipeline stages: the EDGC state starts anew")
        return None
    if index.per_token != bool(run.args.calculate_per_token_loss):
        warn(
            f"{name} and this run differ in --calculate-per-token-loss, and so in the unit of gradients: the EDGC "
            "state starts anew"
        )
        return None
    usable = RestorableState.of(index, run)
    # What a probe of the link decided then and now may differ; errors are good for any engine.
    if not usable.same_engine:
        warn(
            f"{name} used the engine {index.resolved['engine']}, here it is {run.config.engine}: of its EDGC state "
            "only the error feedback is used"
        )
    if usable.tied_apart:
        warn(f"{name} and this run differ in --edgc-fuse-embedding-sync: the error of the tied embedding starts anew")
    for stage in run.stages:
        sizes = {key: spec.elements for one in stage.reducers for key, spec in one.router.specs.items()}
        if stage.key in usable.stages and (why := misfit(usable.stages[stage.key].layout, sizes)):
            raise ConfigError(f"{folder}: {stage.key} has {why}; {GO_ON}")
    return Resume(run, usable, folder)


class Resume:
    """Loads what is ``usable`` of one checkpoint into the live objects of a run."""

    def __init__(self, run: RunState, usable: RestorableState, folder: str):
        self.run, self.usable, self.index = run, usable, usable.index
        self.folder, self.name = folder, os.path.basename(folder)

    def requests(self) -> dict[str, Any]:
        """What this process needs of the state, in Megatron's terms."""
        requests: dict[str, Any] = {}
        for stage in self.run.stages:
            own = self.usable.stages.get(stage.key)
            if own is None:
                continue
            for name, contents in own.layout.items():
                size = sum(size for _, _, size in contents.values())
                key, empty = tensor_key(stage, name), torch.empty(size, dtype=torch.uint8, device="cpu")
                requests[key] = sharded_tensor(key, empty, dist.get_rank(stage.process_group))
            if own.measurements is not None:
                requests[own.measurements] = sharded_object(own.measurements, None)
        if self.usable.messages is not None:
            requests[self.usable.messages] = sharded_object(self.usable.messages, None)
        return requests

    def load(self, state: Mapping[str, Any]) -> bool:
        """Go on where the state was saved: errors and factors, measurements, byte counts, and the controllers.

        Returns whether what this process has left unsent of messages starts anew.
        """
        for stage in self.run.stages:
            self._load_stage(stage, state)
        layers = self.usable.stages.get(self.run.stages[0].key)
        if layers is not None and not layers.same_processes:
            warn(
                f"{self.name} was written by {layers.processes} data-parallel processes: the sums of their errors go "
                "on, what its last window had measured does not"
            )
        dropped = self._load_messages(state)
        self._resume_weights()
        self._resume_messages()
        self._resume_gradients()
        return dropped

    def _load_stage(self, stage: MegatronStage, state: Mapping[str, Any]) -> None:
        own = self.usable.stages.get(stage.key)
        if own is None:
            return
        load_stage(
            stage,
            own.layout,
            lambda name: state[tensor_key(stage, name)],
            self.index.iteration,
            parts=self.usable.same_engine,
            # gradients are scaled by the number of processes, and so are their norms
            norms=own.same_processes,
        )
        if own.measurements is not None:
            restore_measurements(stage.reducers, state[own.measurements])
        stage.restore_bytes(self.index.bytes[stage.key.id])

    def _load_messages(self, state: Mapping[str, Any]) -> bool:
        """What was left unsent of messages is of one micro-batch's size and of one replica of the model alone.

        Returns whether it starts anew.
        """
        messages = self.run.messages
        if messages is None:
            return False
        own = None if self.usable.messages is None else state[self.usable.messages]
        if own is not None and messages.fits(own):
            messages.load_state_dict(own)
            return False
        messages.restore_bytes(self.index.bytes.get(MESSAGES, RunBytes()).messages)
        return self.index.messages is not None if own is None else bool(own["senders"])

    def _resume_weights(self) -> None:
        """How updated weights travel, where both runs left that to their links, or to the same given one."""
        run, kept = self.run, self.index.weights
        then, now = kept["requested"], run.requested.formats.param_wire
        if (then, self.index.requested["link_gbps"]) != (now, run.requested.ranks.link_gbps):
            return
        if kept["resolved"] == run.config.formats.param_wire:
            return
        warn(
            f"updated weights go on as in {self.name}, whatever was timed now: {flag('param_wire')} {kept['resolved']}"
        )
        for stage in run.stages:
            stage.gather_weights(kept["resolved"])

    def _resume_gradients(self) -> None:
        """The controller of gradients."""
        run, index = self.run, self.index
        if run.controller is None or not self.usable.same_engine:
            return
        if index.stages != [key.id for key in run.keys]:
            warn(f"{self.name} has other stages than this run: the controller starts anew")
            return
        others = index.requested != run.requested.subset(REQUESTED_SETTINGS)
        layers = self.usable.stages.get(run.stages[0].key)
        processes = dist.get_world_size(run.stages[0].process_group)
        # one process has no link that could bound ranks
        alike = layers is not None and (layers.processes == 1) == (processes == 1)
        # Else parameters were selected by the ranks of now.
        alike &= self.run.requested.rank_policy is RankPolicy.VOLUME
        settings = {name: index.resolved[name] for name in RANK_SETTINGS} if alike and not others else {}
        timed = run.controller.config
        if self._resume(run.controller, index.controller, settings) and others:
            warn(f"{self.name} was written with other ranks or another link given: this run's settings hold")
        if (kept := run.controller.config) != timed:
            warn(f"{flag('rmax')} stays {kept.ranks.resolved_rmax} as in {self.name}, whatever was timed now")

    def _resume_messages(self) -> None:
        """The controller of messages."""
        messages, controller, kept = self.run.messages, self.run.message_controller, self.index.messages
        if messages is None or controller is None or kept is None:
            return
        if kept.boundaries != [boundary.id for boundary in messages.boundaries]:
            warn(f"{self.folder} has other messages in low rank than this run: their controller starts anew")
            return
        then, now = kept.requested, self.run.requested.subset(REQUESTED_SETTINGS_OF_MESSAGES)
        if then["pp"] != now["pp"]:
            warn(f"{self.folder} was written with another {flag('pp')}: the controller of messages starts anew")
            return
        follows = self.run.requested.pipeline.messages.needs_rank
        # also of a rank that was given: how much of it messages get has been timed
        settings = kept.resolved if follows and then == now else {}
        # and so has what stays uncompressed
        if not follows and controller.adopt_excluded(kept.controller):
            stay = ", ".join(str(messages.boundaries[index]) for index in sorted(controller.excluded)) or "none"
            warn(f"messages between stages go on as in {self.name}, whatever was timed now: uncompressed stay {stay}")
        timed = controller.config
        self._resume(controller, kept.controller, settings)
        if controller.config != timed:
            how = message_form(controller.config)
            warn(f"messages between stages go on as in {self.name}, whatever was timed now: {how}")

    def _resume(self, controller: Controller, state: dict[str, Any], settings: Mapping[str, Any]) -> bool:
        """Whether it goes on. With it go the ``settings`` that a probe of the link had decided then."""
        rounded, by_host = controller.rounds, controller.plan.by_host
        if settings:
            controller.adopt_ranks(state, **settings)
        if controller.rounds != rounded:
            how = "rounded" if controller.rounds else "in low rank"
            warn(f"compressed gradients go on {how} as in {self.name}, whatever was timed now")
        goes_on = resume_controller(controller, state, self.name, GO_ON)
        if controller.plan.by_host != by_host:
            who = "Megatron sums gradients" if controller.plan.by_host else "EDGC compresses gradients"
            warn(f"{who} as in {self.name}, whatever was timed now")
        return goes_on

    def warn_of_losses(self, messages: bool) -> None:
        """What was left unsent and goes no further. ``messages``: whether on any process it starts anew."""
        if messages:
            warn(
                f"{self.name} has other messages between stages, or of other replicas: what was left unsent of them "
                "starts anew"
            )
        keys = self.run.keys
        anew = [str(key) for key in keys if key.kind is StageKind.EXPERTS and key.id not in self.index.stages]
        if anew:  # they had no copies to reduce over
            warn(f"{self.name} has nothing of {', '.join(anew)}: their state starts anew")
        # Experts of which no copies are left are not summed, so that nothing can send what is owed to them.
        experts = [StageKey(StageKind.EXPERTS, key.pipeline_stage) for key in keys if key.kind is StageKind.LAYERS]
        if lost := [str(key) for key in experts if key.id in self.index.stages and key not in keys]:
            warn(
                f"{self.name} has errors of {', '.join(lost)}, which this run does not sum: what was left unsent of "
                "them is lost"
            )
