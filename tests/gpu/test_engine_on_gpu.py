"""The engine on a CUDA device. Needs one GPU; skipped, with the reason, where there is none."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from edgc.comm.collectives import Communicator, Traffic, run_to_end
from edgc.comm.wire import WIRES, wire
from edgc.compress.batch import Batch, Operand
from edgc.compress.engines.powersgd import PowerSGD
from edgc.compress.probe import probe
from edgc.config import EDGCConfig
from edgc.plan.run import Run
from edgc.plan.selection import Selection
from edgc.specs import MatrixSpec
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
    engine, errors = PowerSGD(MATRICES, EDGCConfig(), device), {}
    for step in range(3):
        torch.manual_seed(step)
        local = {m.name: torch.randn(m.rows, m.cols, device=device) for m in MATRICES}
        expected = {}
        for matrix in MATRICES:
            gradient = local[matrix.name]
            gradient += errors.get(matrix.name, 0)
            owed = gradient.double()
            tall = owed if matrix.rows >= matrix.cols else owed.T
            basis = torch.linalg.qr(tall @ engine.basis(matrix, 8, step).values().double()).Q
            result = basis @ (basis.T @ tall)
            expected[matrix.name] = result if matrix.rows >= matrix.cols else result.T, owed
        operands = {m.name: Operand(local[m.name]) for m in MATRICES}
        batch = Batch(
            {m.name: operands[m.name].T if engine.transposes(m, step) else operands[m.name] for m in MATRICES}
        )
        factored = run_to_end(engine.sum(batch, {m.name: 8 for m in MATRICES}, step, communicator))
        assert factored.finite
        engine.commit(factored, step, factored.finite)
        for name, matrix in local.items():
            errors[name] = factored.shares[name].residual_of(matrix)
            factored.sums[name].write(matrix, slice(None))
        for name, (result, owed) in expected.items():
            assert torch.allclose(local[name].double(), result, atol=1e-4)
            assert torch.allclose(errors[name].double(), owed - result, atol=1e-4)


@pytest.mark.parametrize("name", WIRES)
def test_a_message_is_the_same_on_gpu_as_on_the_cpu(name: str) -> None:
    values = torch.randn(2, 1280, generator=torch.Generator().manual_seed(0))
    message = wire(name).encode(values)
    on_gpu = wire(name).encode(values.cuda())
    # a value halfway between two codes may go either way
    assert (on_gpu.cpu() != message).float().mean() < 0.01
    assert torch.allclose(wire(name).decode(message.cuda()).cpu(), wire(name).decode(message))


def test_probing_and_timing_use_the_devices_own_clock(communicator: Communicator) -> None:
    device = torch.device("cuda")
    for overlapped in (False, True):
        groups = [Selection((matrix,)) for matrix in MATRICES]
        run = Run(iterations=1000, replicas=communicator.world_size, overlapped=overlapped)
        cost = probe(groups, EDGCConfig(), communicator, device, run)
        assert cost.dense_seconds > 0 and cost.compressed.at(8) > 0
    spans = Spans(device)
    start = spans.mark()
    torch.cuda._sleep(1_000_000)
    spans.add(start)
    spans.close()
    (seconds,) = spans.take_seconds()
    assert seconds > 1e-5
