"""What one step of a pipeline stage asks of a GPU and a network, counted on a device without values.

No GPU is needed.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import flop_registry

from edgc.comm.collectives import Communicator, Traffic, run_to_end
from edgc.comm.overlap import Overlap
from edgc.compress.engines.base import LowRank
from edgc.compress.reducer import GradientReducer
from edgc.config import EDGCConfig
from edgc.hosts.units import MAX_UNITS, cut
from edgc.plan.selection import select
from edgc.specs import Parameter
from tools.benchmarks.operations import Passes, TensorMemory, is_view
from tools.benchmarks.stage import Stage

META = torch.device("meta")
BY_MATRIX = 0  # in the place of a number of units
# Of torch's fused kernels for lists: tensors and values that one launch takes at the most.
_LIST_TENSORS, _LIST_VALUES = 48, 320 * 65536
_WITHOUT_LAUNCH = ("empty", "new_empty", "empty_like", "empty_strided", "_unsafe_view")


class Operation(NamedTuple):
    """One operator: kernels, bytes that it reads and writes, floating-point operations.

    ``columns``: of a factorisation, each of which needs the one before. ``double``: whether it computes in float64.
    """

    name: str
    launches: int
    nbytes: int
    flops: int
    columns: int
    double: bool


class StepCounts(Passes):  # type: ignore[no-untyped-call]
    """Lists the operators that launch kernels, one each or more, and counts the collectives."""

    def __init__(self) -> None:
        super().__init__(least=0)
        self.listed: list[Operation] = []
        self.collectives = 0
        self.sent = 0.0  # bytes, by one process

    @property
    def launches(self) -> int:
        return sum(one.launches for one in self.listed)

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.listed)

    @property
    def flops(self) -> int:
        return sum(one.flops for one in self.listed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = self.read + self.written
        result = super().__torch_dispatch__(func, types, args, kwargs)
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d":
            self.collectives += 1
        elif func.namespace == "aten" and not is_view(func) and name not in _WITHOUT_LAUNCH:
            launches = _of_lists(*args) if name.startswith("_foreach") else 1
            flops, columns = _work(func, name, args, kwargs or {}, result)
            double = any(isinstance(one, Tensor) and one.dtype == torch.float64 for one in args)
            self.listed.append(Operation(name, launches, self.read + self.written - before, flops, columns, double))
        return result


def _of_lists(tensors: Sequence[Tensor], others: Any = (), *_: Any) -> int:
    """Lists of dense tensors, of which all pairs lie alike in memory, take few launches; others one for each pair."""
    second = others if isinstance(others, list) and isinstance(others[0], Tensor) else tensors
    alike = all(
        one.shape == other.shape and one.stride() == other.stride() for one, other in zip(tensors, second, strict=True)
    )
    if not alike or not all(is_non_overlapping_and_dense_or_false(one) for one in tensors):
        return len(tensors)
    values = sum(tensor.numel() for tensor in tensors)
    return max(math.ceil(len(tensors) / _LIST_TENSORS), math.ceil(values / _LIST_VALUES))


def _work(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> tuple[int, int]:
    """Floating-point operations of products and factorisations, and the columns of a factorisation."""
    if name == "linalg_cholesky_ex":
        columns = args[0].shape[-1]
        return args[0].numel() * columns // 3, columns
    if name == "linalg_solve_triangular":
        columns = args[0].shape[-1]
        return args[1].numel() * columns, columns
    if func._overloadpacket in flop_registry:
        kwargs = {key: value for key, value in kwargs.items() if key != "out"}
        return flop_registry[func._overloadpacket](*args, **kwargs, out_val=result), 0
    return 0, 0


def parameters(stage: Stage) -> list[Parameter]:
    """Of the stage's layers, in the order of a backward pass: matrices, their biases, and two norms a layer."""
    found: list[Parameter] = []
    for matrix in reversed(stage.matrices):
        layer, _, kind = matrix.name.partition(".")
        found.append(Parameter(matrix.name, (matrix.rows, matrix.cols)))
        if stage.linear_bias:
            found.append(Parameter(f"{matrix.name}.bias", (matrix.rows,)))
        if kind in ("qkv", "fc1"):  # a norm comes before both
            parts = ("weight", "bias") if stage.norm_bias else ("weight",)
            found += [Parameter(f"{layer}.{kind}.norm.{part}", (matrix.cols,)) for part in parts]
    return found


def count_step(stage: Stage, config: EDGCConfig, ranks: Sequence[int], most_units: int = MAX_UNITS) -> StepCounts:
    """One step in which nothing is measured, with Cholesky factorisations as on CUDA.

    Code that made the CPU wait for a value would fail here, where there are none.

    ``ranks``: of the matrices, in turn over the layers. ``most_units``: ``BY_MATRIX`` for a reduction for each matrix
    and what follows it, as Megatron's buckets of a wide model are, in the place of units.
    """
    config = replace(config, basis_cycle=1)  # a step of a longer cycle asks for the same
    with _reducers(stage, config, ranks, most_units) as (traffic, reducers):
        counted = StepCounts()
        for iteration in range(3):  # until there are errors, scales and bases
            counted = StepCounts()
            before = traffic.bytes
            with torch.no_grad(), counted:
                for reducer, own in reducers:
                    reducer.begin(iteration)
                    run_to_end(reducer.reduce(own, iteration))
            counted.sent = traffic.bytes - before
        return counted


def transient_bytes(
    stage: Stage, config: EDGCConfig, ranks: Sequence[int | str] | None, most_units: int = MAX_UNITS
) -> int:
    """The most that a step in units takes beside gradients and state, as the hosts overlap them.

    ``ranks``: as of ``count_step``, or formats in the place of some; None: not compressed yet.
    """
    with _reducers(stage, config, ranks, most_units) as (_, reducers), torch.no_grad(), TensorMemory() as memory:
        overlap = Overlap(META)
        most = 0
        for iteration in range(config.basis_cycle + 2):
            memory.peak = memory.now
            handles = []
            for reducer, own in reducers:
                reducer.begin(iteration)
                handles.append(overlap.start(reducer.reduce(own, iteration), memory=reducer.router.memory(own)))
            for handle in handles:
                handle.wait()
            most = memory.peak - memory.now
        return most


@contextmanager
def _reducers(
    stage: Stage, config: EDGCConfig, ranks: Sequence[int | str] | None, most_units: int
) -> Iterator[tuple[Traffic, list[tuple[GradientReducer, dict[str, Tensor]]]]]:
    """What counts the bytes, and reducers with their gradients."""
    listed = parameters(stage)
    if most_units == BY_MATRIX:
        units: list[list[Parameter]] = []
        for parameter in listed:
            if len(parameter.shape) > 1:
                units.append([])
            units[-1].append(parameter)
    else:
        units = cut(((parameter, 4 * parameter.elements) for parameter in listed), most=most_units)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=stage.data_parallel)
    try:
        assert dist.group.WORLD is not None
        traffic = Traffic()
        communicator = Communicator(dist.group.WORLD, traffic)
        flat = torch.empty(sum(parameter.elements for parameter in listed), device=META)
        parts = torch.split(flat, [parameter.elements for parameter in listed])
        gradients = {one.name: part.view(one.shape) for one, part in zip(listed, parts, strict=True)}
        reducers = []
        for unit in units:
            # built on the CPU: a device without values has no random numbers
            numbers = [one for one in ranks or () if isinstance(one, int)]
            selection = select(unit, config, min(numbers, default=1))
            reducer = GradientReducer(selection, config, communicator, torch.device("cpu"))
            reducer.router.device = META
            if isinstance(reducer.router.engine, LowRank):
                reducer.router.engine.device, reducer.router.engine._cholesky = META, True
            if ranks is not None:
                travel = _by_layer(stage, ranks)
                rounded = {name: one for name, one in travel.items() if isinstance(one, str)}
                reducer.set_rank(
                    max(numbers), {name: one for name, one in travel.items() if isinstance(one, int)}, rounded
                )
            reducers.append((reducer, {parameter.name: gradients[parameter.name] for parameter in unit}))
        yield traffic, reducers
    finally:
        dist.destroy_process_group()


def _by_layer(stage: Stage, ranks: Sequence[int | str]) -> dict[str, int | str]:
    layers = list(dict.fromkeys(matrix.name.partition(".")[0] for matrix in stage.matrices))
    turn = {layer: ranks[place % len(ranks)] for place, layer in enumerate(layers)}
    return {matrix.name: turn[matrix.name.partition(".")[0]] for matrix in stage.matrices}
