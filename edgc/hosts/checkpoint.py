"""What a stage keeps over a checkpoint, as plain values and tensors, and how it is taken up again."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from edgc.comm.objects import ProcessGroup
from edgc.comm.packed import Packed
from edgc.comm.wire import FP32, Wire
from edgc.compress.reducer import GradientReducer
from edgc.config import ConfigError
from edgc.hosts.stage import Stage
from edgc.hosts.user_warnings import warn_of_new_plans, warn_of_spent_budget
from edgc.observe.measurements import Measurements
from edgc.plan.controller import Controller

STATE_VERSION = 26  # of what every host saves; goes up where an earlier state can no longer be read
ERROR = "error."  # a parameter's name follows
Layout = Mapping[str, Mapping[str, Any]]  # by name of a tensor, what it holds: by key shape, wire format and bytes


def stage_state(stage: Stage, iteration: int) -> Iterator[tuple[str, dict[str, Any], torch.Tensor]]:
    """All that a stage's reducers keep, the same on all data-parallel processes: name, contents, bytes on the device.

    The errors, one by one, are their sums, and are divided anew on the way; of the other parts each is one tensor.
    """
    parts: dict[str, dict[str, Packed]] = {}
    for reducer in stage.reducers:
        for name, total in reducer.state.summed_errors(reducer.communicator, iteration):
            yield f"{ERROR}{name}", {name: _described(Packed(total, FP32))}, total.view(torch.uint8).flatten()
        for part, kept in reducer.state.state_dict().items():
            if part != "error":
                parts.setdefault(part, {}).update(kept)
    for part, kept in parts.items():
        if kept:
            described = {name: _described(packed) for name, packed in kept.items()}
            yield part, described, torch.cat([packed.message.flatten() for packed in kept.values()])


def misfit(layout: Layout, elements: Mapping[str, int]) -> str:
    """What of a saved stage does not fit parameters of so many elements, by name; empty: its errors do."""
    for contents in (one for key, one in layout.items() if key.startswith(ERROR)):
        for name, (shape, _, _) in contents.items():
            if name not in elements:
                return f"error feedback of {name}, which this model lacks"
            if (found := math.prod(shape)) != elements[name]:
                return f"error feedback of {name} with {found} values, where this model's has {elements[name]}"
    return ""


def load_stage(
    stage: Stage, layout: Layout, tensor: Callable[[str], torch.Tensor], iteration: int, *, parts: bool, norms: bool
) -> None:
    """Go on where ``stage_state`` was taken.

    ``layout``: the contents of each of its tensors; ``tensor`` gives one by name, on any device. ``parts``: also what
    is not an error, which is good for any engine; ``norms``: also the running norms of gradients, which depend on the
    number of processes.
    """

    def restored(name: str, device: torch.device) -> dict[str, Packed]:
        return unpacked(tensor(name), layout[name], device) if name in layout else {}

    kept = {part: restored(part, stage.device) for part in stage.reducers[0].state.state_dict()}
    if not norms:
        kept["norms"] = {}
    for reducer in stage.reducers:
        if parts:
            reducer.state.load_state_dict(
                {
                    part: {key: one for key, one in packed.items() if key.rpartition(":")[0] in reducer.router.specs}
                    for part, packed in kept.items()
                }
            )
        names = [name for name in reducer.router.specs if f"{ERROR}{name}" in layout]
        # on the CPU: the reducer moves one after another
        totals = {name: restored(f"{ERROR}{name}", torch.device("cpu"))[name].values() for name in names}
        reducer.state.share_errors(totals, reducer.communicator, iteration)


def _described(packed: Packed) -> list[Any]:
    """Shape, wire format and bytes, as plain values."""
    wire = packed.wire
    return [
        list(packed.shape),
        [wire.bits, wire.stochastic, wire.hadamard, wire.floating],
        packed.message.nbytes,
    ]


def unpacked(message: torch.Tensor, contents: Mapping[str, Any], device: torch.device) -> dict[str, Packed]:
    """What ``stage_state`` has put into one tensor."""
    messages = torch.split(message, [size for _, _, size in contents.values()])
    return {  # a copy of a part of it is aligned
        name: Packed.restored(part.to(device, copy=len(contents) > 1).view(1, -1), torch.Size(shape), Wire(*wire))
        for part, (name, (shape, wire, _)) in zip(messages, contents.items(), strict=True)
    }


def restore_measurements(reducers: Sequence[GradientReducer], kept: Sequence[dict[str, Any]]) -> None:
    """Go on with what so many reducers had measured in the window; other units have measured other things."""
    if len(kept) == len(reducers):
        for reducer, measurements in zip(reducers, kept, strict=True):
            reducer.observer.measurements = Measurements.from_state_dict(measurements)


def resume_controller(
    controller: Controller,
    state: dict[str, Any],
    place: str,
    remedy: str,
    group: ProcessGroup | None = None,
) -> bool:
    """Load the state of a controller; whether it goes on. It does not if only one of both runs has a volume.

    A warning says so, and also if too little of a volume is left. ``place``: of the state. Raises ``ConfigError`` with
    the ``remedy`` for a state that does not fit.
    """
    try:
        goes_on = controller.load_state_dict(state)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{place}: the controller's state does not fit ({error}); {remedy}") from error
    if goes_on:
        warn_of_spent_budget(controller, group)
    else:
        warn_of_new_plans(place, controller.config, group)
    return goes_on
