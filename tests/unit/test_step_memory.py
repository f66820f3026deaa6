"""The most memory that a step takes beside gradients and state, for every kind of plan.

Of one process, whose group is a fake one: the threads of a real one hold a message a moment longer than anything needs
it, so that the peak would depend on the machine's load. The sizes are those of two gloo ranks.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from edgc import stacking
from edgc.comm.collectives import Communicator, Traffic
from edgc.comm.overlap import Overlap
from edgc.compress import router
from edgc.compress.reducer import GradientReducer
from edgc.compress.routes import elementwise
from edgc.config import EDGCConfig
from edgc.config.presets import PRESETS
from edgc.hosts.units import Unit, Units, cut
from edgc.specs import Parameter
from tools.benchmarks.operations import TensorMemory

CPU = torch.device("cpu")
SIDE = 128
MATRICES = [f"w{place}" for place in range(24)]
# the arguments of set_rank: without a plan, and as the plans of a budget are
PLANS: dict[str, tuple[Any, ...]] = {
    "warm-up": (None,),
    "low rank": (8,),
    "all in few bits": (8, {}, dict.fromkeys(MATRICES, "int3")),
    "all by rows": (8, dict.fromkeys(MATRICES, 8), dict.fromkeys(MATRICES, "rows:0.1")),
    "mixed": (
        8,
        {name: 4 if place % 3 == 0 else 12 for place, name in enumerate(MATRICES) if place % 3 < 2},
        {name: "int4" if place % 3 == 2 else "rows:0.1" for place, name in enumerate(MATRICES) if place % 3 > 0},
    ),
}


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.ProcessGroup]:
    # as small beside these matrices as they are beside those of large models
    monkeypatch.setattr(stacking, "SMALL_TENSOR", SIDE * SIDE // 2)
    monkeypatch.setattr(elementwise, "PORTION", SIDE * SIDE // 2)
    monkeypatch.setattr(router, "LITTLE_BYTES", 0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_unit_is_rounded_in_nine_portions_at_most_whatever_its_tensors_sizes() -> None:
    values = 9 * elementwise.PORTION * 8
    pieces = [("a", 0, 1), ("b", 0, values - 1)]
    portions = list(elementwise._portions([pieces], elementwise.portion_of(values)))
    assert len(portions) == elementwise.MOST_PORTIONS
    assert sum(end - start for (portion,) in portions for _, start, end in portion) == values


@pytest.mark.parametrize("preset", PRESETS)
def test_a_step_takes_at_most_half_of_the_gradients_in_memory_beside_them_and_the_state(
    preset: str, two_processes: dist.ProcessGroup
) -> None:
    parameters = [Parameter(name, (SIDE, SIDE)) for name in MATRICES]
    # volume and its learning_rate_power are the planner's, whose plans are given here
    settings = {"static_rank": 8, "volume": None, "learning_rate_power": 0.0, "basis_cycle": 1}
    config = EDGCConfig.of(**{**PRESETS[preset], **settings, "iteration_sampling_rate": 0.01})
    communicator = Communicator(two_processes, Traffic())
    cut_up = [
        (unit, GradientReducer.of(unit, config, communicator, CPU))
        for unit in cut([(parameter, 4 * parameter.elements) for parameter in parameters], 1)
    ]
    units = Units([Unit([parameter.name for parameter in unit], own) for unit, own in cut_up])
    gradients = {parameter.name: torch.empty(parameter.shape) for parameter in parameters}
    overlap = Overlap(CPU)
    peaks = {}
    with TensorMemory() as memory:
        for kind, plan in PLANS.items():
            for unit in units:
                unit.reducer.set_rank(*plan)
            most = 0
            for step in range(1, 4):  # until there are errors, scales and bases
                for gradient in gradients.values():
                    gradient.normal_()
                units.begin()
                memory.peak = memory.now
                handles = []
                for name, gradient in gradients.items():
                    for unit in units.add({name: gradient}):
                        held = unit.reducer.router.memory(unit.gradients)
                        handles.append(overlap.start(unit.reducer.reduce(unit.gradients, step), memory=held))
                for handle in handles:
                    handle.wait()
                most = max(most, memory.peak - memory.now)
            peaks[kind] = most / (4 * SIDE * SIDE * len(MATRICES))
    assert min(peaks[kind] for kind in PLANS if kind != "warm-up") > 0.2, "hardly anything was counted"
    assert max(peaks.values()) <= 0.5, peaks
