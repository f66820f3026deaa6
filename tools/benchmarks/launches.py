"""Launches and messages of one step of a pipeline stage, counted on a device without values: no GPU is needed."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from edgc.comm.collectives import Communicator, Traffic, run
from edgc.compress import lowrank
from edgc.compress.engines.base import LowRank
from edgc.compress.reducer import GradientReducer
from edgc.config import EDGCConfig
from edgc.hosts.units import cut
from edgc.plan.allocation import allocate
from edgc.specs import Parameter
from tools.benchmarks.operations import is_view
from tools.benchmarks.stage import Stage

META = torch.device("meta")
# Of torch's fused kernels for lists: tensors and values that one launch takes at the most.
_LIST_TENSORS, _LIST_VALUES = 48, 320 * 65536
_WITHOUT_LAUNCH = ("empty", "new_empty", "empty_like", "empty_strided")
WARM_STEPS = 2  # until errors, bases and scales are there


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the kernels that operators launch, at least one each, and the collectives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches = self.collectives = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d":
            self.collectives += 1
        elif func.namespace == "aten" and not is_view(func) and name not in _WITHOUT_LAUNCH:
            self.launches += _of_list(args[0]) if name.startswith("_foreach") else 1
        return result


def _of_list(tensors: Sequence[Tensor]) -> int:
    values = sum(tensor.numel() for tensor in tensors)
    return max(math.ceil(len(tensors) / _LIST_TENSORS), math.ceil(values / _LIST_VALUES))


def parameters(stage: Stage) -> list[Parameter]:
    """Of the stage's layers, in the order of a backward pass: matrices, their biases, and two norms a layer."""
    found: list[Parameter] = []
    for matrix in reversed(stage.matrices):
        layer, _, kind = matrix.name.partition(".")
        found += [Parameter(matrix.name, (matrix.rows, matrix.cols)), Parameter(f"{matrix.name}.bias", (matrix.rows,))]
        if kind in ("qkv", "fc1"):  # a norm comes before both
            width = (matrix.cols,)
            found += [Parameter(f"{layer}.{kind}.norm.{part}", width) for part in ("weight", "bias")]
    return found


def count_step(stage: Stage, config: EDGCConfig, ranks: Sequence[int], by_matrix: bool = False) -> Launches:
    """One step in which nothing is measured, with Cholesky factorisations as on CUDA.

    ``ranks``: of the matrices, in turn over the layers. ``by_matrix``: a reduction for each matrix and what follows it,
    as Megatron's buckets of a wide model are, in the place of units.
    """
    listed = parameters(stage)
    if by_matrix:
        units: list[list[Parameter]] = []
        for parameter in listed:
            if len(parameter.shape) > 1:
                units.append([])
            units[-1].append(parameter)
    else:
        units = cut((parameter, 4 * parameter.elements) for parameter in listed)
    order = {matrix.name: ranks[place // 4 % len(ranks)] for place, matrix in enumerate(stage.matrices)}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=stage.data_parallel)
    try:
        assert dist.group.WORLD is not None
        communicator = Communicator(dist.group.WORLD, Traffic())
        flat = torch.empty(sum(parameter.elements for parameter in listed), device=META)
        parts = torch.split(flat, [parameter.elements for parameter in listed])
        gradients = {one.name: part.view(one.shape) for one, part in zip(listed, parts, strict=True)}
        reducers = []
        for unit in units:
            # built on the CPU: a device without values has no random numbers
            reducer = GradientReducer(allocate(unit, config, min(ranks)), config, communicator, torch.device("cpu"))
            reducer.device = META
            if isinstance(reducer.engine, LowRank):
                reducer.engine.device, reducer.engine._orthonormalise = META, lowrank.cholesky_basis
            reducer.set_rank(max(ranks), order)
            reducers.append((reducer, {parameter.name: gradients[parameter.name] for parameter in unit}))
        counted = Launches()
        for iteration in range(1, WARM_STEPS + 2):
            counted = Launches()
            with torch.no_grad(), counted:
                for reducer, own in reducers:
                    reducer.begin(iteration)
                    run(reducer.reduce(own, iteration))
        return counted
    finally:
        dist.destroy_process_group()
