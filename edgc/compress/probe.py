"""What a reduction costs on this link: timed on scratch buffers before training, or computed from a bandwidth."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from edgc.comm.collectives import AllReduce, Communicator, all_reduce_bytes, run_to_end
from edgc.comm.overlap import Handle, Overlap
from edgc.comm.wire import wire
from edgc.compress.reducer import GradientReducer
from edgc.config import EDGCConfig
from edgc.engines import engine_class
from edgc.plan.candidates import ROUNDED, rounded_format
from edgc.plan.comm_cost import CommCost, StageCost
from edgc.plan.rank_plan import NO_RANK
from edgc.plan.ranks import RANK_MULTIPLE
from edgc.plan.selection import Selection, largest_rank
from edgc.specs import shard_bounds

REPETITIONS = 3
BLOCK = 1_000_003  # values; prime, so that the rows of no matrix repeat


def cost_of_link(
    selection: Selection, config: EDGCConfig, processes: int, gbps: float, scatters: bool = False, half: bool = False
) -> StageCost:
    """Cost of a stage whose data-parallel group has so many processes on links of ``gbps`` Gbit/s, without latency."""
    return cost_in_bytes(selection, config, processes, scatters, half).scaled(8 / (gbps * 1e9))


def cost_in_bytes(
    selection: Selection, config: EDGCConfig, processes: int, scatters: bool = False, half: bool = False
) -> StageCost:
    """The same with the bytes that each process sends in a step in the place of seconds.

    ``scatters``: the host's own reduction is a reduce-scatter, which sends half of what an all-reduce does. ``half``:
    it sums gradients of 16 bits.
    """

    def sent(elements: float, name: str) -> float:
        return all_reduce_bytes(elements * wire(name).bytes_per_value(), processes)

    # A rounded sum of which each process needs its shard ends halfway, unless one needs most of what there is: so it is
    # with what low rank does not take.
    rest = sent(selection.other_elements, config.formats.rest_wire)
    engine = engine_class(config.engine)
    factors = sum(engine.bytes_per_rank(matrix, config) for matrix in selection.matrices)
    dense = selection.other_elements + selection.matrix_elements
    host = sent(dense, "bf16" if half else "fp32") * _host_share(scatters)
    warmup = config.formats.dense_wire
    # of gradients in 16 bits every process needs whole sums: what they cut off is fed back
    uncompressed = host if wire(warmup).exact else sent(dense, warmup) * _host_share(scatters and not half)
    return StageCost(CommCost(rest, all_reduce_bytes(factors, processes)), uncompressed, host)


def rank_of_volume(selection: Selection, config: EDGCConfig, volume: float) -> int:
    """The mean rank at which a step sends ``volume`` times fewer bytes than an all-reduce in fp32."""
    cost = cost_in_bytes(selection, config, 2)  # of any number of processes: all messages are sent round alike
    return int(cost.compressed.rank(cost.host_seconds / volume))


def probe(
    selections: Sequence[Selection],
    config: EDGCConfig,
    communicator: Communicator,
    device: torch.device,
    scatters: bool = False,
    half: bool = False,
    overlapped: bool = False,
) -> StageCost:
    """Time dense and compressed reductions of scratch copies of a stage's gradients, cut up as training reduces them.
    With a volume also of rounded ones, if these send more than it allows: else its plans may round in finer formats.

    ``selections``: of each unit. Every process of the group must call this at the same time. Takes memory for one more
    gradient while it runs, beside the state that training will have. The smallest of a few repetitions
    counts: anything above it is noise. ``overlapped``: the host's own sums start together, else one after another.
    ``scatters``: each is a reduce-scatter, and counts as half an all-reduce. ``half``: it sums gradients of 16 bits.
    """
    # iteration 1 is then no measured one: what measuring costs comes on top, and not at every step
    unmeasured = config.but(iteration_sampling_rate=1e-6)
    reducers = [GradientReducer(selection, unmeasured, communicator, device) for selection in selections]
    groups = [_Group(reducer, device, torch.bfloat16 if half else torch.float32) for reducer in reducers]
    overlap = Overlap(device)

    def fastest(work: Callable[[], None]) -> float:
        return min(_seconds(work, groups, communicator, device) for _ in range(1 + REPETITIONS))

    def host_alone() -> float:
        def reduce() -> None:
            sums = (AllReduce(communicator, group.flat).start() for group in groups)
            for work in list(sums) if overlapped else sums:
                work.wait()

        return fastest(reduce) * _host_share(scatters)

    def reduced() -> float:
        def reduce() -> None:
            for handle in [group.start(overlap, scatters) for group in groups]:
                handle.wait()

        return fastest(reduce)

    def at_rank(rank: int | None) -> float:
        for reducer in reducers:
            reducer.set_rank(rank)
        return reduced()

    def rounded() -> float:
        for reducer in reducers:
            low_rank = {matrix.name for matrix in reducer.router.selection.matrices}
            formats = {name: rounded_format(name in low_rank) for name in reducer.router.specs}
            reducer.set_rank(NO_RANK, {}, formats)
        return reduced()

    host = host_alone()
    dense = host if all(reducer.plain for reducer in reducers) else at_rank(None)
    top = largest_rank([matrix for selection in selections for matrix in selection.matrices], config.study.min_saving)
    ranks = sorted({max(RANK_MULTIPLE, top // 4), max(2 * RANK_MULTIPLE, top // 2), max(3 * RANK_MULTIPLE, top)})
    cost = StageCost(CommCost.fit(ranks, [at_rank(rank) for rank in ranks]), dense, host)
    value_bytes = wire(ROUNDED).bytes_per_value() * _host_share(scatters and not half)
    if config.ranks.volume is None or value_bytes * config.ranks.volume <= 4:
        return cost
    matrices = tuple(matrix for selection in selections for matrix in selection.matrices)
    others = tuple(other for selection in selections for other in selection.others)
    rank = rank_of_volume(Selection(matrices, others), config, config.ranks.volume)
    # what is not compressed travels in the same way but for small parameters
    seconds = dense if config.formats.dense_wire == ROUNDED else rounded()
    return replace(cost, rounded_seconds=seconds, volume_rank=rank)


class _Group:
    """A reducer and scratch gradients for it."""

    def __init__(self, reducer: GradientReducer, device: torch.device, dtype: torch.dtype):
        self.reducer = reducer
        sizes = {name: spec.rows * spec.cols for name, spec in reducer.router.specs.items()}
        elements = sum(sizes.values())
        # a block again and again: a whole stage would take as much memory on the CPU, of every process of a node
        block = torch.randn(min(elements, BLOCK), generator=torch.Generator().manual_seed(reducer.router.config.seed))
        self.flat = block.to(device, dtype).repeat(-(-elements // max(len(block), 1)))[:elements]
        self.gradients = dict(zip(sizes, torch.split(self.flat, list(sizes.values())), strict=True))
        processes = reducer.communicator.world_size
        shard = -(-len(self.flat) // processes)
        ends = zip(sizes, accumulate(sizes.values()), strict=True)
        self.shards = {name: shard_bounds(end - sizes[name], end, shard, processes) for name, end in ends}

    def start(self, overlap: Overlap, scatters: bool) -> Handle:
        """Start a reduction as training does."""
        reduction = self.reducer.reduce(self.gradients, 1, shards=self.shards if scatters else None)
        return overlap.start(reduction, memory=self.reducer.router.memory(self.gradients))


def _host_share(scatters: bool) -> float:
    return 0.5 if scatters else 1.0


def _seconds(
    work: Callable[[], None], groups: Sequence[_Group], communicator: Communicator, device: torch.device
) -> float:
    for group in groups:
        group.flat.clamp_(-1, 1)  # sums of sums of sums would overflow
    run_to_end(communicator.all_reduce(torch.zeros(1, device=device)))  # start together
    synchronise(device)
    start = time.perf_counter()
    work()
    synchronise(device)
    return time.perf_counter() - start


def synchronise(device: torch.device) -> None:
    """Wait for a GPU; a CPU has nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
