"""No step makes the CPU wait for the device: on the device ``meta``, which has no values, reading one is an error."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from edgc.comm import wire
from edgc.comm.collectives import Communicator, Traffic, run_to_end
from edgc.compress.reducer import GradientReducer
from edgc.config import EDGCConfig
from edgc.config.presets import PRESETS
from edgc.engines import ENGINES
from edgc.observe.measurements import Measurements
from edgc.plan.selection import select
from edgc.specs import Parameter

META = torch.device("meta")
SHAPES = {"wide": (64, 128), "tall": (96, 64), "bias": (64,)}
RANKS = 4


@pytest.fixture(autouse=True)
def without_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device "meta" has no generator of random numbers."""
    monkeypatch.setattr(wire, "_drawn", lambda draw, like, generator: draw(like.shape, device=like.device))


@pytest.fixture
def communicator() -> Iterator[Communicator]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=RANKS)
    yield Communicator(dist.group.WORLD, Traffic())
    dist.destroy_process_group()


def reducer(communicator: Communicator, **settings: object) -> GradientReducer:
    config = EDGCConfig.from_preset(**{"iteration_sampling_rate": 0.5, **settings})
    selection = select([Parameter(name, torch.Size(shape)) for name, shape in SHAPES.items()], config, 4)
    under_test = GradientReducer(selection, config, communicator, torch.device("cpu"))
    under_test.router.device = META
    if under_test.router.engine is not None:
        under_test.router.engine.device = META
    return under_test


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        *({"preset": preset} for preset in PRESETS),
        *({"engine": engine} for engine in ENGINES),
        *({"error_dtype": dtype} for dtype in ("bf16", "fp8", "int8")),
        {"fidelity_share": 1e-3},
        {"kernels": "fused"},  # but for Triton's, which do not run on it; they have a test of their own
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_no_value_is_read(
    settings: dict[str, object], sharded: bool, dtype: torch.dtype, communicator: Communicator
) -> None:
    under_test = reducer(communicator, **settings)
    sizes = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}
    shards = {name: tuple(size * part // RANKS for part in range(RANKS + 1)) for name, size in sizes.items()}
    for iteration in range(6):
        under_test.set_rank(None if iteration < 2 else 8)
        gradients = {name: torch.empty(shape, dtype=dtype, device=META) for name, shape in SHAPES.items()}
        under_test.observer.measure(gradients, iteration)
        run_to_end(under_test.reduce(gradients, iteration, torch.empty((), device=META), shards if sharded else None))
        if iteration == 3:  # the next spikes are counted from a number, not from a tensor
            measured = under_test.observer.take()
            under_test.observer.measurements.entropy = measured.entropy
    assert len(under_test.observer.measurements.entropy) == 3


def test_a_process_that_needs_nothing_of_a_sum_copies_nothing_to_its_device(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy would make the CPU wait on CUDA. The device without values takes one without a word."""
    under_test = reducer(communicator, engine="int8", warmup_fraction=0.0)
    under_test.set_rank(8)
    sizes = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}
    # nothing for this process, the second
    shards = {name: (0, size // 3, size // 3, 2 * size // 3, size) for name, size in sizes.items()}
    copy = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        copied = copy(tensor, *args, **kwargs)
        assert tensor.device == copied.device, "copied to the device"
        return copied

    for iteration in range(2):
        gradients = {name: torch.empty(shape, device=META) for name, shape in SHAPES.items()}
        run_to_end(under_test.reduce(gradients, iteration, torch.empty((), device=META), shards))
        monkeypatch.setattr(torch.Tensor, "to", to)  # but for what is made once


def test_replicas_are_compared_on_the_device_of_the_gradients(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing was reduced: NCCL takes no tensors of the CPU."""
    under_test = reducer(communicator, preset="paper")
    under_test.router.device = META
    handed: list[torch.device] = []

    def all_gather(self: Communicator, tensor: torch.Tensor) -> None:
        handed.append(tensor.device)
        raise InterruptedError

    monkeypatch.setattr(Communicator, "all_gather", all_gather)
    with pytest.raises(InterruptedError):
        under_test.compare_replicas(0)
    assert handed == [META]


def test_measurements_of_before_a_resume_join_those_of_the_device() -> None:
    measured = Measurements(energies=[{"w": torch.ones(2)}, {"w": torch.ones(2, device=META)}])
    with pytest.raises(NotImplementedError, match="meta"):  # only because that device has no values
        measured.mean_energies()
    measured = Measurements(energies=[{"w": torch.ones(2)}, {"w": 3 * torch.ones(2)}])
    assert measured.mean_energies() == {"w": [2.0, 2.0]}


def test_an_iteration_that_was_not_finite_says_nothing_and_takes_nothing_from_the_others() -> None:
    bad = torch.tensor([math.inf, math.nan])
    measured = Measurements(row_shares=[{"w": bad, "v": bad}, {"w": torch.ones(2), "v": bad}])
    assert measured.mean_row_shares() == {"w": [1.0, 1.0]}


def test_a_value_that_is_read_is_noticed(communicator: Communicator) -> None:
    under_test = reducer(communicator, entropy_estimator="histogram")
    with pytest.raises(RuntimeError):
        under_test.observer.measure({name: torch.empty(shape, device=META) for name, shape in SHAPES.items()}, 0)
