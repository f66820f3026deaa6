"""What a reduction costs on this link: timed on scratch buffers before training, or computed from a bandwidth."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from edgc.alignment import RANK_MULTIPLE, CommCost, break_even_rank
from edgc.allocation import Allocation, pays
from edgc.collectives import Communicator, all_reduce_bytes
from edgc.config import DTYPES, EDGCConfig
from edgc.controller import StageCost
from edgc.engines import ENGINES, MatrixSpec
from edgc.reducer import run

REPETITIONS = 3


def largest_rank(matrices: Sequence[MatrixSpec], min_saving: float) -> int:
    """The largest rank, in multiples of 4, at which at least one matrix pays; 0 if none does at 4."""
    limit = max((min(matrix.rows, matrix.cols) for matrix in matrices), default=0)
    return max(
        (
            rank
            for rank in range(RANK_MULTIPLE, limit + 1, RANK_MULTIPLE)
            if any(pays(rank, matrix.rows, matrix.cols, min_saving) for matrix in matrices)
        ),
        default=0,
    )


def cost_of_link(allocation: Allocation, config: EDGCConfig, ranks: int, gbps: float) -> StageCost:
    """Cost of a stage whose data-parallel group has so many ranks on links of ``gbps`` Gbit/s, without latency."""

    def seconds(elements: int, dtype: torch.dtype) -> float:
        return all_reduce_bytes(elements * dtype.itemsize, ranks) / (gbps * 1e9 / 8)

    rest = seconds(allocation.dense_elements, torch.float32)
    per_rank = seconds(sum(rows + cols for rows, cols in allocation.shapes), DTYPES[config.wire_dtype])
    dense = seconds(sum(rows * cols for rows, cols in allocation.shapes), torch.float32)
    return StageCost(CommCost(rest, per_rank), rest + dense)


def probe(allocation: Allocation, config: EDGCConfig, communicator: Communicator, device: torch.device) -> StageCost:
    """Time dense and compressed reductions of scratch copies of a stage's gradients.

    Every rank of the group must call this at the same time. Takes memory for two more fp32 gradients and the error
    while it runs. The smallest of a few repetitions counts: anything above it is noise.
    """
    matrices = allocation.matrices
    generator = torch.Generator().manual_seed(config.seed)
    rest = torch.zeros(max(allocation.dense_elements, 1), device=device)
    scratch = {
        matrix.name: torch.randn(matrix.rows, matrix.cols, generator=generator).to(device) for matrix in matrices
    }
    flat = torch.cat([rest, *(gradient.reshape(-1) for gradient in scratch.values())])
    dense_seconds = _fastest(lambda: communicator.all_reduce(flat).wait(), [flat], communicator)
    top = largest_rank(matrices, config.min_saving)
    ranks = sorted({max(RANK_MULTIPLE, top // 4), max(2 * RANK_MULTIPLE, top // 2), max(3 * RANK_MULTIPLE, top)})
    engine = ENGINES[config.engine](matrices, config, device)

    def compressed(rank: int) -> Callable[[], None]:
        def reduce() -> None:
            work = communicator.all_reduce(rest)
            run(engine.reduce(scratch, {name: rank for name in scratch}, communicator))
            work.wait()

        return reduce

    seconds = [_fastest(compressed(rank), list(scratch.values()), communicator) for rank in ranks]
    return StageCost(CommCost.fit(ranks, seconds), dense_seconds)


def break_even(cost: StageCost, matrices: Sequence[MatrixSpec], min_saving: float) -> int:
    """The largest rank at which a stage is not slower than dense and still saves enough; 0 if there is none."""
    rank = break_even_rank(cost.compressed, cost.dense_seconds)
    return min(RANK_MULTIPLE * (rank // RANK_MULTIPLE), largest_rank(matrices, min_saving))


def _fastest(work: Callable[[], object], scratch: Sequence[Tensor], communicator: Communicator) -> float:
    device = scratch[0].device
    fastest = float("inf")
    for _ in range(1 + REPETITIONS):
        for tensor in scratch:
            tensor.clamp_(-1, 1)  # sums of sums of sums would overflow
        communicator.all_reduce(torch.zeros(1, device=device)).wait()  # start together
        _synchronise(device)
        start = time.perf_counter()
        work()
        _synchronise(device)
        fastest = min(fastest, time.perf_counter() - start)
    return fastest


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
