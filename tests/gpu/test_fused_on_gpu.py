"""Triton's kernels on the device they are for, and steps that do not wait for it. Skipped without a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from edgc.comm.collectives import Communicator, Traffic, run_to_end
from edgc.compress.fused import triton_kernels
from edgc.compress.reducer import GradientReducer
from edgc.config import EDGCConfig
from edgc.plan.selection import Selection
from edgc.specs import MatrixSpec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

MATRICES = tuple(MatrixSpec(f"{layer}.{name}", *shape) for layer in range(2) for name, shape in (
    ("tall", (1000, 300)), ("wide", (256, 1024))
))  # fmt: skip
GPU = torch.device("cuda")


@pytest.fixture
def communicator(tmp_path: Path):
    dist.init_process_group("nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield Communicator(dist.group.WORLD, Traffic())
    dist.destroy_process_group()


def reducer(communicator: Communicator, rank: int, **settings: Any) -> GradientReducer:
    config = EDGCConfig.from_preset(**{"preset": "paper", "iteration_sampling_rate": 1e-6, **settings})
    made = GradientReducer(Selection(MATRICES), config, communicator, GPU)
    made.set_rank(rank, {matrix.name: rank for matrix in MATRICES})
    return made


def gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {m.name: torch.randn(m.rows, m.cols, generator=generator).to(GPU) for m in MATRICES}


@pytest.mark.skipif(
    torch.cuda.is_available() and triton_kernels(GPU) is None, reason="Triton's kernels need compute capability 8.0"
)
@pytest.mark.parametrize("rank", [5, 64, 200])
@pytest.mark.parametrize("equalise", [False, True])
def test_kernels_give_what_plain_torch_does(rank: int, equalise: bool, communicator: Communicator) -> None:
    settings = {"equalise": equalise, "warm_start": False}
    plain, fused = (reducer(communicator, rank, kernels=kernels, **settings) for kernels in ("plain", "fused"))
    for step in range(3):
        expected, found = gradients(step), gradients(step)
        run_to_end(plain.reduce(expected, step))
        run_to_end(fused.reduce(found, step))
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("preset", ["paper", "balanced"])
@pytest.mark.parametrize("kernels", ["plain", "fused"])
def test_no_step_waits_for_the_device(kernels: str, preset: str, communicator: Communicator) -> None:
    under_test = reducer(communicator, 16, kernels=kernels, preset=preset)
    inputs = [gradients(step) for step in range(20)]
    for step in range(16):  # every basis of the cycle exists, kernels are compiled
        run_to_end(under_test.reduce(inputs[step], step))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for step in range(16, 20):
                run_to_end(under_test.reduce(inputs[step], step))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    names = [event.key for event in profiler.key_averages()]
    assert not [name for name in names if name in ("aten::item", "aten::_local_scalar_dense")]
