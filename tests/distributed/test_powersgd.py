"""PowerSGD with error feedback over real gloo groups: its invariants (docs/algorithm.md, 5)."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from edgc.collectives import Communicator, Traffic
from edgc.config import EDGCConfig
from edgc.engines import MatrixSpec, PowerSGD
from edgc.reducer import run
from tests.distributed.gloo import run_on_ranks

MATRICES = (MatrixSpec("tall", 48, 20), MatrixSpec("wide", 12, 40), MatrixSpec("square", 24, 24))
CPU = torch.device("cpu")


def gradients(rank: int, step: int) -> dict[str, Tensor]:
    """Different on every rank and step, with a common part of low rank so that there is something to learn."""
    own = torch.Generator().manual_seed(1000 * step + rank)
    common = torch.Generator().manual_seed(7)
    result = {}
    for matrix in MATRICES:
        signal = torch.randn(matrix.rows, 3, generator=common) @ torch.randn(3, matrix.cols, generator=common)
        result[matrix.name] = signal + torch.randn(matrix.rows, matrix.cols, generator=own)
    return result


def summed(local: dict[str, Tensor]) -> dict[str, Tensor]:
    """The exact sum over the group in float64."""
    total = {name: tensor.double() for name, tensor in local.items()}
    for tensor in total.values():
        dist.all_reduce(tensor)
    return total


def errors(engine: PowerSGD) -> dict[str, Tensor]:
    return {
        name: torch.zeros(c.rows, c.cols) if c.error is None else c.error.float().clone()
        for name, c in engine.compressors.items()
    }


def engine_and_communicator(**settings: Any) -> tuple[PowerSGD, Communicator]:
    assert dist.group.WORLD is not None
    return PowerSGD(MATRICES, EDGCConfig(**settings), CPU), Communicator(dist.group.WORLD, Traffic())


def invariant_gap(rank: int, ranks_per_step: list[int], settings: dict[str, Any]) -> float:
    """Largest |sum of (gradient + old error) - result - sum of new errors| over steps, relative to the gradient."""
    engine, communicator = engine_and_communicator(**settings)
    worst = 0.0
    for step, r in enumerate(ranks_per_step):
        local = gradients(rank, step)
        owed = summed({name: local[name] + error for name, error in errors(engine).items()})
        run(engine.reduce(local, {m.name: r for m in MATRICES}, communicator))
        left = summed(errors(engine))
        for name, result in local.items():
            gap = (owed[name] - result - left[name]).abs().max() / owed[name].abs().max()
            worst = max(worst, float(gap))
    return worst


@pytest.mark.parametrize("ranks", [2, 4])
def test_error_feedback_invariant_holds_at_every_step_and_rank_change(ranks: int) -> None:
    schedule = [4, 4, 8, 8, 4, 12, 12, 4]
    assert max(run_on_ranks(invariant_gap, ranks, schedule, {})) < 5e-6


def test_error_feedback_sees_the_factor_as_it_travelled() -> None:
    # In bf16 only the rounding of the sums themselves (2^-8 of Q) may escape the error feedback.
    assert max(run_on_ranks(invariant_gap, 2, [4] * 6, {"wire_dtype": "bf16"})) < 2**-8


def full_rank_gap(rank: int) -> float:
    engine, communicator = engine_and_communicator()
    worst = 0.0
    for step in range(3):
        local = gradients(rank, step)
        exact = summed(local)
        run(engine.reduce(local, {m.name: 1000 for m in MATRICES}, communicator))
        worst = max(worst, *(float((exact[n] - g).abs().max() / exact[n].abs().max()) for n, g in local.items()))
    return worst


def test_full_rank_is_the_dense_all_reduce() -> None:
    assert max(run_on_ranks(full_rank_gap, 2)) < 5e-6


def fifty_steps(rank: int) -> tuple[list[Tensor], list[Tensor]]:
    engine, communicator = engine_and_communicator()
    for step in range(50):
        local = gradients(rank, step)
        run(engine.reduce(local, {m.name: 4 + 4 * (step // 20) for m in MATRICES}, communicator))
    return [c.q for c in engine.compressors.values() if c.q is not None], list(local.values())


def test_factors_and_results_are_bit_identical_on_all_ranks_after_50_steps() -> None:
    (first_q, first_result), *others = run_on_ranks(fifty_steps, 4)
    for q, result in others:
        assert all(torch.equal(a, b) for a, b in zip(first_q, q, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(first_result, result, strict=True))


def not_finite(rank: int) -> None:
    engine, communicator = engine_and_communicator()
    ranks = {m.name: 4 for m in MATRICES}
    run(engine.reduce(gradients(rank, 0), ranks, communicator))
    before = errors(engine), {name: c.q.clone() for name, c in engine.compressors.items() if c.q is not None}
    local = gradients(rank, 1)
    if rank == 1:
        local["wide"][3, 5] = torch.inf
    run(engine.reduce(local, ranks, communicator))
    assert all(torch.isnan(gradient).all() for gradient in local.values())
    for name, error in errors(engine).items():
        assert torch.equal(error, before[0][name])
        assert torch.equal(engine.compressors[name].q, before[1][name])


def test_a_gradient_that_is_not_finite_on_one_rank_is_seen_on_all_and_changes_no_state() -> None:
    run_on_ranks(not_finite, 2)


def bytes_sent(rank: int) -> float:
    engine, communicator = engine_and_communicator(wire_dtype="bf16")
    run(engine.reduce(gradients(rank, 0), {m.name: 4 for m in MATRICES}, communicator))
    return communicator.traffic.bytes


def test_bytes_are_those_of_the_messages() -> None:
    elements = sum(4 * (m.rows + m.cols) for m in MATRICES)
    assert run_on_ranks(bytes_sent, 4) == [2 * 3 / 4 * elements * 2] * 4


def tracking(rank: int) -> float:
    """Relative distance between the sum of 30 results and the sum of 30 true gradients."""
    engine, communicator = engine_and_communicator()
    exact, result = 0.0, 0.0
    for step in range(30):
        local = gradients(rank, step)
        exact = exact + summed(local)["tall"]
        run(engine.reduce(local, {m.name: 4 for m in MATRICES}, communicator))
        result = result + local["tall"]
    return float((exact - result).norm() / exact.norm())


def test_error_feedback_catches_up_over_steps() -> None:
    # Without feedback rank 4 of 20 would lose most of the noise for good, about 0.15 here.
    assert max(run_on_ranks(tracking, 2)) < 0.08
