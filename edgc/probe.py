"""What a reduction costs on this link: timed on scratch buffers before training, or computed from a bandwidth."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from edgc.alignment import RANK_MULTIPLE, CommCost, break_even_rank
from edgc.allocation import Allocation, pays
from edgc.collectives import Communicator, all_reduce_bytes
from edgc.config import EDGCConfig
from edgc.controller import StageCost
from edgc.engines import MatrixSpec
from edgc.engines.base import cuts
from edgc.engines.powersgd import STRONG_SHARE
from edgc.reducer import GradientReducer, run
from edgc.wire import wire

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


def cost_of_link(
    allocation: Allocation, config: EDGCConfig, ranks: int, gbps: float, scatters: bool = False, half: bool = False
) -> StageCost:
    """Cost of a stage whose data-parallel group has so many ranks on links of ``gbps`` Gbit/s, without latency."""
    return cost_in_bytes(allocation, config, ranks, scatters, half).scaled(8 / (gbps * 1e9))


def cost_in_bytes(
    allocation: Allocation, config: EDGCConfig, ranks: int, scatters: bool = False, half: bool = False
) -> StageCost:
    """The same with the bytes that each rank sends in a step in the place of seconds.

    ``scatters``: the host's own reduction is a reduce-scatter, which sends half of what an all-reduce does. ``half``:
    it sums gradients of 16 bits.
    """

    def sent(elements: float, name: str) -> float:
        return all_reduce_bytes(elements * wire(name).bytes_per_value(), ranks)

    # A rounded sum of which each rank needs its shard ends halfway, unless one rank needs most of what there is: so it
    # is with what low rank does not take.
    rest = sent(allocation.rest_elements, config.rest_wire)
    if config.engine == "alternating":
        per_rank = sent(sum(rows + cols for rows, cols in allocation.shapes) / 2, config.wire)
    else:
        longer = sum(max(shape) for shape in allocation.shapes)
        per_rank = sent(STRONG_SHARE * longer, config.basis_wire)
        per_rank += sent((1 - STRONG_SHARE) * longer, config.weak_basis_wire or config.basis_wire)
        per_rank += sent(sum(min(shape) for shape in allocation.shapes), config.wire)
    dense = allocation.rest_elements + sum(rows * cols for rows, cols in allocation.shapes)
    per_rank *= config.power_iterations
    if config.residual_wire is not None:
        rest += sent(sum(rows * cols for rows, cols in allocation.shapes), config.residual_wire) * _host_share(scatters)
    host = sent(dense, "bf16" if half else "fp32") * _host_share(scatters)
    uncompressed = host if wire(config.dense_wire).exact else sent(dense, config.dense_wire) * _host_share(scatters)
    return StageCost(CommCost(rest, per_rank), uncompressed, host)


def probe(
    allocation: Allocation,
    config: EDGCConfig,
    communicator: Communicator,
    device: torch.device,
    scatters: bool = False,
    half: bool = False,
) -> StageCost:
    """Time dense and compressed reductions of scratch copies of a stage's gradients.

    Every rank of the group must call this at the same time. Takes memory for two more fp32 gradients and the error
    while it runs. The smallest of a few repetitions counts: anything above it is noise. ``scatters``: the host's own
    reduction is a reduce-scatter; it counts as half an all-reduce. ``half``: it sums gradients of 16 bits.
    """
    matrices = allocation.matrices
    # iteration 1 is then no measured one: what measuring costs comes on top, and not at every step
    reducer = GradientReducer(allocation, replace(config, iteration_sampling_rate=1e-6), communicator, device)
    sizes = {name: spec.rows * spec.cols for name, spec in reducer.specs.items()}
    generator = torch.Generator().manual_seed(config.seed)
    flat = torch.randn(sum(sizes.values()), generator=generator).to(device)
    gradients = dict(zip(sizes, torch.split(flat, list(sizes.values())), strict=True))
    shard = -(-len(flat) // communicator.ranks)
    ends = zip(sizes, accumulate(sizes.values()), strict=True)
    shards = {name: cuts(end - sizes[name], end, shard, communicator.ranks) for name, end in ends} if scatters else None
    top = largest_rank(matrices, config.min_saving)
    ranks = sorted({max(RANK_MULTIPLE, top // 4), max(2 * RANK_MULTIPLE, top // 2), max(3 * RANK_MULTIPLE, top)})

    def reduction(rank: int | None) -> Callable[[], None]:
        def reduce() -> None:
            reducer.set_rank(rank)
            run(reducer.reduce(gradients, iteration=1, shards=shards))

        return reduce

    own = flat.bfloat16() if half else flat
    all_reduce = _fastest(lambda: communicator.all_reduce(own).wait(), own, communicator)
    host = all_reduce * _host_share(scatters)
    dense = host if reducer.plain else _fastest(reduction(None), flat, communicator)
    compressed = [_fastest(reduction(rank), flat, communicator) for rank in ranks]
    return StageCost(CommCost.fit(ranks, compressed), dense, host)


def _host_share(scatters: bool) -> float:
    return 0.5 if scatters else 1.0


def break_even(cost: StageCost, matrices: Sequence[MatrixSpec], min_saving: float) -> int:
    """The largest rank at which a stage is not slower than the host's sum and still saves enough; 0 if none is."""
    rank = break_even_rank(cost.compressed, cost.host_seconds)
    return min(RANK_MULTIPLE * (rank // RANK_MULTIPLE), largest_rank(matrices, min_saving))


def _fastest(work: Callable[[], object], scratch: Tensor, communicator: Communicator) -> float:
    device = scratch.device
    fastest = float("inf")
    for _ in range(1 + REPETITIONS):
        scratch.clamp_(-1, 1)  # sums of sums of sums would overflow
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
