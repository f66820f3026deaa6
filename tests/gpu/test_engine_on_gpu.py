"""The engine on a CUDA device. Needs one GPU; skipped, with the reason, where there is none."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from edgc.allocation import Allocation
from edgc.collectives import Communicator, Traffic
from edgc.config import EDGCConfig
from edgc.engines import MatrixSpec, PowerSGD
from edgc.probe import probe
from edgc.reducer import run
from edgc.timing import Spans

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

MATRICES = (MatrixSpec("a", 256, 96), MatrixSpec("b", 64, 320))


@pytest.fixture
def communicator(tmp_path: Path):
    dist.init_process_group("nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield Communicator(dist.group.WORLD, Traffic())
    dist.destroy_process_group()


def test_a_step_gives_the_same_on_gpu_as_in_float64(communicator: Communicator) -> None:
    device = torch.device("cuda")
    engine = PowerSGD(MATRICES, EDGCConfig(), device)
    for step in range(3):
        torch.manual_seed(step)
        local = {m.name: torch.randn(m.rows, m.cols, device=device) for m in MATRICES}
        expected = {}
        for name, gradient in local.items():
            compressor = engine.compressors[name]
            owed = gradient.double() + (0 if compressor.error is None else compressor.error.double())
            basis = torch.linalg.qr(owed @ compressor.factor(8).double()).Q
            expected[name] = basis @ (basis.T @ owed), owed
        run(engine.reduce(local, {m.name: 8 for m in MATRICES}, communicator))
        for name, (result, owed) in expected.items():
            assert torch.allclose(local[name].double(), result, atol=1e-4)
            assert torch.allclose(engine.compressors[name].error.double(), owed - result, atol=1e-4)


def test_probing_and_timing_use_the_devices_own_clock(communicator: Communicator) -> None:
    device = torch.device("cuda")
    cost = probe(Allocation(MATRICES, ()), EDGCConfig(), communicator, device)
    assert cost.dense_seconds > 0 and cost.compressed.seconds(8) > 0
    spans = Spans(device)
    start = spans.mark()
    torch.cuda._sleep(1_000_000)
    spans.add(start)
    (seconds,) = spans.take_seconds()
    assert seconds > 1e-5
