"""What a reduction takes on this link, timed on scratch buffers before training."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from edgc.comm.collectives import AllReduce, Communicator, run_to_end
from edgc.comm.overlap import Handle, Overlap
from edgc.compress import lowrank
from edgc.compress.reducer import GradientReducer
from edgc.compress.sent_bytes import rank_of_volume
from edgc.config import EDGCConfig
from edgc.plan.by_volume.choices import ROUNDED, rest_format, rounded_format
from edgc.plan.rank_plan import NO_RANK
from edgc.plan.ranks import RANK_MULTIPLE
from edgc.plan.run import Run
from edgc.plan.selection import Selection, largest_rank
from edgc.plan.times.comm_cost import LinearCost, StageCost
from edgc.specs import shard_bounds

REPETITIONS = 3
# Of the elements of a stage's matrices, the share that is in low rank at every rank that is timed. With fewer of them
# at some ranks the times would lie on no line. Not tuned.
SHARE_IN_LOW_RANK = 0.9
BLOCK = 1_000_003  # values; prime, so that the rows of no matrix repeat


def probe(
    selections: Sequence[Selection],
    config: EDGCConfig,
    communicator: Communicator,
    device: torch.device,
    run: Run,
) -> StageCost:
    """Time dense and compressed reductions of scratch copies of a stage's gradients, cut up as training reduces them.
    With a volume also of rounded ones.

    ``selections``: of each unit. Every process of the group must call this at the same time. Takes memory for one more
    gradient while it runs, beside the state that training will have. The smallest of a few repetitions counts: anything
    above it is noise.
    """
    whole = Selection(
        tuple(matrix for selection in selections for matrix in selection.matrices),
        tuple(other for selection in selections for other in selection.others),
    )
    scratch = _Scratch(selections, config, communicator, device, run)
    host = scratch.host_alone()
    dense = host if scratch.plain else scratch.at_rank(None)
    top = largest_rank(whole.matrices, config.study.min_saving, SHARE_IN_LOW_RANK)
    ranks = sorted({max(RANK_MULTIPLE, top // 4), max(2 * RANK_MULTIPLE, top // 2), max(3 * RANK_MULTIPLE, top)})
    cost = StageCost(LinearCost.fit(ranks, [scratch.at_rank(rank) for rank in ranks]), dense, host)
    volume = config.ranks.volume
    if volume is not None:
        # what is not compressed travels in the same way but for small parameters
        seconds = dense if config.formats.dense_wire == ROUNDED else scratch.rounded()
        cost = replace(cost, rounded_seconds=seconds, volume_rank=rank_of_volume(whole, config, volume))
    lowrank.forget_shapes()
    del scratch
    if device.type == "cuda":  # its stream's memory serves no other stream
        torch.cuda.empty_cache()
    return cost


class _Scratch:
    """Reducers of a stage with scratch gradients, whose reductions it times."""

    def __init__(
        self,
        selections: Sequence[Selection],
        config: EDGCConfig,
        communicator: Communicator,
        device: torch.device,
        run: Run,
    ):
        # iterations 1 and 2 are then no measured ones: what measuring costs comes on top, and not at every step
        unmeasured = config.replace(iteration_sampling_rate=1e-6, rest_wire=rest_format(config))
        self.iterations = (1, 2) if config.engine == "alternating" else (1,)  # it sends each factor in every other one
        self.communicator, self.device, self.run = communicator, device, run
        self.reducers = [GradientReducer(selection, unmeasured, communicator, device) for selection in selections]
        dtype = torch.bfloat16 if run.value_bytes == 2 else torch.float32
        self.groups = [_Group(reducer, device, dtype) for reducer in self.reducers]
        self.overlap = Overlap(device)

    @property
    def plain(self) -> bool:
        """Whether what is not compressed is summed as the host does."""
        return all(reducer.plain for reducer in self.reducers)

    def host_alone(self) -> float:
        """Seconds of the host's own sums, which start together where ``run`` overlaps them, else one after another. A
        reduce-scatter counts as half an all-reduce.
        """

        def reduce() -> None:
            sums = (AllReduce(self.communicator, group.flat).start() for group in self.groups)
            for work in list(sums) if self.run.overlapped else sums:
                work.wait()

        return self._fastest(reduce) * self.run.host_bytes_ratio

    def at_rank(self, rank: int | None) -> float:
        """Seconds of reductions at a rank; None: not compressed."""
        for reducer in self.reducers:
            ranks = None
            if rank is not None and reducer.router.config.ranks.volume is not None:
                # a budget gives a rank to each matrix, also to those that uniform ranks would leave out
                ranks = {matrix.name: rank for matrix in reducer.router.selection.matrices}
            reducer.set_rank(rank, ranks)
        return self._reduced()

    def rounded(self) -> float:
        """Seconds of reductions in which every gradient is rounded."""
        for reducer in self.reducers:
            router = reducer.router
            low_rank = {matrix.name for matrix in router.selection.matrices}
            reducer.set_rank(NO_RANK, {}, {name: rounded_format(name in low_rank) for name in router.specs})
        return self._reduced()

    def _reduced(self) -> float:
        def reduce() -> None:
            for iteration in self.iterations:
                for handle in [group.start(iteration, self.overlap, self.run.scatters) for group in self.groups]:
                    handle.wait()

        return self._fastest(reduce) / len(self.iterations)

    def _fastest(self, work: Callable[[], None]) -> float:
        def bound() -> None:
            for group in self.groups:
                group.flat.clamp_(-1, 1)  # sums of sums of sums would overflow

        return fastest(work, self.communicator, self.device, bound)


class _Group:
    """A reducer and scratch gradients for it."""

    def __init__(self, reducer: GradientReducer, device: torch.device, dtype: torch.dtype):
        self.reducer = reducer
        sizes = {name: spec.elements for name, spec in reducer.router.specs.items()}
        elements = sum(sizes.values())
        # a block again and again: a whole stage would take as much memory on the CPU, of every process of a node
        generator = torch.Generator().manual_seed(reducer.router.config.seed)
        block = torch.randn(min(elements, BLOCK), generator=generator, dtype=torch.float32, device="cpu")
        self.flat = block.to(device, dtype).repeat(-(-elements // max(len(block), 1)))[:elements]
        self.gradients = dict(zip(sizes, torch.split(self.flat, list(sizes.values())), strict=True))
        processes = reducer.communicator.world_size
        shard = -(-len(self.flat) // processes)
        ends = zip(sizes, accumulate(sizes.values()), strict=True)
        self.shards = {name: shard_bounds(end - sizes[name], end, shard, processes) for name, end in ends}

    def start(self, iteration: int, overlap: Overlap, scatters: bool) -> Handle:
        """Start a reduction as training does."""
        reduction = self.reducer.reduce(self.gradients, iteration, shards=self.shards if scatters else None)
        return overlap.start(reduction, memory=self.reducer.router.memory(self.gradients))


def fastest(
    work: Callable[[], object],
    communicator: Communicator,
    device: torch.device,
    before: Callable[[], object] = lambda: None,
) -> float:
    """Seconds of the fastest of a few repetitions of ``work``, which all processes of the group begin together.

    ``before``: what is done before each one, and not timed.
    """
    seconds = math.inf
    for _ in range(1 + REPETITIONS):
        before()
        run_to_end(communicator.all_reduce(torch.zeros(1, device=device)))
        synchronise(device)
        start = time.perf_counter()
        work()
        synchronise(device)
        seconds = min(seconds, time.perf_counter() - start)
    return seconds


def synchronise(device: torch.device) -> None:
    """Wait for a GPU; a CPU has nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
