"""What a checkpoint holds of EDGC: an entry of the state dict that Megatron saves.

The entry has an ``index``, the same on all processes, and a ``state`` by key. Of each stage of the plan, for each part
that tensor and expert parallelism cut it into, the state holds the error feedback as its *sum* over the data-parallel
processes, the other parts of the reducers' state, and what each process has measured since the last window; where
messages between stages are compressed, what each process has left unsent. Controllers and byte counts are in the index.
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine

from edgc.comm.objects import broadcast_object
from edgc.hosts.checkpoint import stage_state
from edgc.hosts.steps import NO_STEP
from edgc.hosts.user_warnings import warn
from megatron.edgc.checkpoint.index import RunState, SavedStage, gathered_index
from megatron.edgc.checkpoint.keys import (
    measurements_key,
    message_key,
    of_process,
    replica_group,
    sharded_object,
    sharded_tensor,
    stage_key,
    tensor_key,
)
from megatron.edgc.stages import MegatronStage


class CheckpointSaver:
    """Makes the entry of each checkpoint of a run."""

    def __init__(self, run: RunState):
        self.run = run
        # the last step that closed a window, and the states of the controllers before it
        self._before: tuple[int | None, Sequence[Any]] = (None, ())

    def keep_controllers(self, iteration: int) -> None:
        """Keep their state before they decide at the end of this step's window: Megatron may save without the step."""
        self._before = iteration, self._controllers()

    def _controllers(self) -> list[Any]:
        both = self.run.controller, self.run.message_controller
        return [None if controller is None else controller.state_dict() for controller in both]

    def entry(self, iteration: int, local: bool = False) -> dict[str, Any]:
        """The entry. From here on the live run has its errors divided evenly, as a resumed one will.

        ``iteration`` steps are in the checkpoint. Where Megatron doubts a result, it saves after the reduction of the
        next step and before its optimizer step: what that reduction has done is undone here.

        A ``local`` checkpoint is read where it was written, by all data-parallel processes. In the format ``torch`` one
        process writes what all of them have. Every process calls this.
        """
        doubted = get_rerun_state_machine().state is RerunState.WILL_RERUN_FROM_CHECKPOINT
        undone = iteration if doubted else NO_STEP.iteration
        if doubted:
            self._roll_back(iteration)
        run, sharded = self.run, self.run.args.ckpt_format == "torch_dist"
        writes = sharded or _writes_torch()
        state: dict[str, Any] = {}
        saved: dict[str, SavedStage] = {}
        for stage in run.stages:
            group = stage.process_group
            layout, tensors = _shared_state(stage, iteration, keeps_all=writes and (local or not sharded))
            replica = dist.get_rank(group) if local else 0
            state |= {
                name: sharded_tensor(name, tensor, replica) if sharded else tensor for name, tensor in tensors.items()
            }
            if dist.get_rank(group) == 0:
                saved[stage_key(stage)] = SavedStage(dist.get_world_size(group), layout)
            measured = [reducer.observer.before(undone).state_dict() for reducer in stage.reducers]
            state |= _of_each(measurements_key(stage), measured, group, sharded)
        if run.messages is not None:
            state |= _of_each(message_key(), run.messages.state_dict(undone), replica_group(), sharded)
        controllers = self._before[1] if undone == self._before[0] else self._controllers()
        index = gathered_index(run, iteration, controllers, saved)
        return {"index": index, "state": state if writes else {}}

    def _roll_back(self, iteration: int) -> None:
        """Undo what the reduction of this step has done, if it has run; a warning where that cannot be undone."""
        run = self.run
        for stage in run.stages:
            for reducer in stage.reducers:
                reducer.roll_back(iteration)
        if run.messages is not None:
            run.messages.roll_back(iteration)
        if not run.stages[0].reducers[0].repeatable:
            warn(
                f"this checkpoint is without step {iteration + 1}, but EDGC's state in it already has the reduction of "
                "that step: the state before a step is kept only with a loss scale or where Megatron checks for spikes"
            )


def _shared_state(stage: MegatronStage, iteration: int, keeps_all: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """What all data-parallel processes of a stage have alike: what the tensors hold, by name, and those that this
    process keeps, by key, on the CPU: all of them, or about as many bytes as every other process.
    """
    group = stage.process_group
    kept = [0] * dist.get_world_size(group)  # bytes
    layout, tensors = {}, {}
    for name, contents, message in stage_state(stage, iteration):
        layout[name] = contents
        keeper = kept.index(min(kept))
        kept[keeper] += message.nbytes
        if keeper == dist.get_rank(group) or keeps_all:
            tensors[tensor_key(stage, name)] = message.to("cpu", copy=True)
    return layout, tensors


def _of_each(key: str, own: Any, group: dist.ProcessGroup, sharded: bool) -> dict[str, Any]:
    """State that each process of a group has for itself; of all of them where not each one writes."""
    process = dist.get_rank(group)
    if sharded:
        named = of_process(key, process)
        return {named: sharded_object(named, own)}
    state = {}
    for sender in range(dist.get_world_size(group)):  # one after another: a device need not hold all
        state[of_process(key, sender)] = broadcast_object(own if sender == process else None, group, sender)
    return state


def _writes_torch() -> bool:
    """Whether this process writes a file of a checkpoint in the format ``torch``: Megatron's own rule."""
    return 0 in (parallel_state.get_data_parallel_rank(), parallel_state.get_expert_data_parallel_rank())
