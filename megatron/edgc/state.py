"""What a process has to save, as plain values and tensors, and where in the model it belongs."""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from edgc.comm.wire import FP32, Packed, Wire
from edgc.compress.reducer import Measurements
from edgc.observe.moments import GradientStatistics
from edgc.plan.run import Part
from megatron.edgc.stages import MegatronStage

ERROR = "error."  # a parameter's name follows


def stage_state(stage: MegatronStage, iteration: int) -> Iterator[tuple[str, dict[str, Any], torch.Tensor]]:
    """All that a stage's reducers keep, the same on all data-parallel processes: name, contents, bytes on the device.

    The errors, one by one, are their sums, and are divided anew on the way; of the other parts each is one tensor.
    """
    parts: dict[str, dict[str, Packed]] = {}
    for reducer in stage.reducers:
        for name, total in reducer.settle_errors(iteration):
            yield f"{ERROR}{name}", {name: _described(Packed(total, FP32))}, total.view(torch.uint8).flatten()
        for part, kept in reducer.state_dict().items():
            if part != "error":
                parts.setdefault(part, {}).update(kept)
    for part, kept in parts.items():
        if kept:
            described = {name: _described(packed) for name, packed in kept.items()}
            yield part, described, torch.cat([packed.message.flatten() for packed in kept.values()])


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


def plain(measurements: Measurements) -> dict[str, Any]:
    """Without tensors on a device and without classes."""
    return {
        "entropy": [float(value) for value in measurements.entropy],
        "residual": [float(value) for value in measurements.residual],
        "energies": [{name: energy.cpu() for name, energy in one.items()} for one in measurements.energies],
        "statistics": [{name: vars(one) for name, one in step.items()} for step in measurements.statistics],
        "spikes": float(measurements.spikes),
        "largest_spike": float(measurements.largest_spike),
    }


def measurements_of(state: dict[str, Any]) -> Measurements:
    """What ``plain`` was made from."""
    statistics = [{name: GradientStatistics(**one) for name, one in step.items()} for step in state["statistics"]]
    return Measurements(**{**state, "statistics": statistics})


def place_of(stage: MegatronStage) -> str:
    """Where a stage's state belongs, whatever the number of data-parallel ranks."""
    key = stage.key
    if key.part is Part.EMBEDDING:
        return f"embedding-tp{parallel_state.get_tensor_model_parallel_rank()}"
    if key.part is Part.EXPERTS:
        tensor = parallel_state.get_expert_tensor_parallel_rank()
        expert = parallel_state.get_expert_model_parallel_rank()
        return f"stage{key.pipeline_stage}-experts-tp{tensor}-ep{expert}"
    return f"stage{key.pipeline_stage}-tp{parallel_state.get_tensor_model_parallel_rank()}"


def message_place() -> str:
    """The same for stages and tensor-parallel ranks as of ``place_of``."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return f"messages{stage}-tp{parallel_state.get_tensor_model_parallel_rank()}"


def replica_group() -> dist.ProcessGroup:
    """The processes that hold the same part of the model."""
    group: dist.ProcessGroup = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return group


def parallel_sizes(args: Namespace) -> dict[str, int]:
    """The sizes that decide which parameters, and which parts of them, a rank holds."""
    return {
        "tensor": args.tensor_model_parallel_size,
        "pipeline": args.pipeline_model_parallel_size,
        "virtual pipeline": args.virtual_pipeline_model_parallel_size or 1,
        "expert": args.expert_model_parallel_size,
        "expert tensor": args.expert_tensor_parallel_size or args.tensor_model_parallel_size,
    }


def in_words(parallel: dict[str, int]) -> str:
    """The same, for the user."""
    return ", ".join(f"{name}-parallel size {size}" for name, size in parallel.items())


def mean_bytes(counts: list[tuple[Any, ...]]) -> dict[str, list[float]]:
    """Over the processes, by stage."""
    by_stage: dict[str, list[tuple[float, ...]]] = {}
    for stage, *values in counts:
        by_stage.setdefault(stage, []).append(tuple(values))
    return {stage: [sum(column) / len(rows) for column in zip(*rows, strict=True)] for stage, rows in by_stage.items()}
