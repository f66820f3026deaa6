"""Collectives over one process group, counted. The only user of ``torch.distributed`` in ``edgc``."""

from collections import Counter, deque
from collections.abc import Generator, Sequence
from typing import Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from edgc.comm.wire import GROUP, Wire, in_groups

T = TypeVar("T")


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Block until the result may be used (on CUDA: until later kernels may use it)."""


# Code that yields every collective it has started: the caller waits on it, at once or after doing something else, and
# resumes. So one piece of code serves the synchronous, the overlapped and the side-stream use.
Steps: TypeAlias = Generator[Work, None, T]


def interleave(several: Sequence[Steps[T]]) -> Steps[list[T]]:
    """Take all these steps at once, so that while one waits for its message those of the others travel; their results.

    Every process must call this with the same steps in the same order, as for the collectives themselves.
    """
    results: dict[int, T] = {}
    under_way: deque[tuple[int, Work]] = deque()

    def advance(place: int) -> None:
        try:
            under_way.append((place, next(several[place])))
        except StopIteration as end:
            results[place] = end.value

    for place in range(len(several)):
        advance(place)
    while under_way:
        place, work = under_way.popleft()
        yield work
        advance(place)
    return [results[place] for place in range(len(several))]


def run(reduction: Steps[T]) -> T:
    """Run a reduction to its end, waiting on each collective in turn; its result."""
    while True:
        try:
            next(reduction).wait()
        except StopIteration as end:
            result: T = end.value
            return result


class Traffic:
    """Bytes that this process has sent, by collective, counted from the tensors handed over.

    They are the bytes one process sends under the bandwidth-optimal algorithm among W, so that different
    collectives compare fairly: an all-reduce of X bytes sends 2 X (W-1) / W, an all-to-all of X bytes X (W-1) / W, an
    all-gather of X bytes from each process X (W-1), a reduce-scatter of X bytes X (W-1) / W.
    """

    def __init__(self) -> None:
        self.by_collective: Counter[str] = Counter()

    @property
    def bytes(self) -> float:
        """All bytes so far."""
        return float(sum(self.by_collective.values()))

    def resume(self, sent: float) -> None:
        """Begin with what was sent before a checkpoint was loaded."""
        self.by_collective = Counter({"before the resume": sent})

    def count_all_reduce(self, tensor: Tensor, world_size: int) -> None:
        """Count an all-reduce of ``tensor`` among so many processes."""
        self._count("all-reduce", all_reduce_bytes(tensor.nbytes, world_size))

    def count_reduce_scatter(self, tensor: Tensor, world_size: int) -> None:
        """Count a reduce-scatter of ``tensor`` among so many processes."""
        self._count("reduce-scatter", tensor.nbytes * (world_size - 1) / world_size)

    def count_all_to_all(self, tensor: Tensor, world_size: int) -> None:
        """Count an all-to-all that splits ``tensor`` among so many processes."""
        self._count("all-to-all", tensor.nbytes * (world_size - 1) / world_size)

    def count_all_gather(self, tensor: Tensor, world_size: int) -> None:
        """Count an all-gather of one such ``tensor`` from each of so many processes."""
        self._count("all-gather", tensor.nbytes * (world_size - 1))

    def _count(self, collective: str, sent: float) -> None:
        self.by_collective[collective] += sent  # type: ignore[assignment]  # a Counter of floats


def all_reduce_bytes(size: float, world_size: int) -> float:
    """Bytes one process sends in an all-reduce of ``size`` bytes; the same for a sum of values in a wire format."""
    return 2 * size * (world_size - 1) / world_size


class Communicator:
    """A process group whose traffic is counted."""

    def __init__(self, group: dist.ProcessGroup, traffic: Traffic):
        self.group = group
        self.traffic = traffic
        self.world_size: int = dist.get_world_size(group)
        self.process: int = dist.get_rank(group)
        self.members: list[int] = dist.get_process_group_ranks(group)  # their numbers in the whole run

    def all_reduce(self, tensor: Tensor) -> Work:
        """Start the in-place sum of ``tensor`` over the group."""
        self.traffic.count_all_reduce(tensor, self.world_size)
        return _member(dist.all_reduce(tensor, group=self.group, async_op=True))

    def all_gather(self, tensor: Tensor) -> Steps[Tensor]:
        """Every rank's (n,) ``tensor`` as the rows of one (processes, n)."""
        self.traffic.count_all_gather(tensor, self.world_size)
        gathered = tensor.new_empty(self.world_size * len(tensor))
        yield _member(dist.all_gather_into_tensor(gathered, tensor.contiguous(), group=self.group, async_op=True))
        return gathered.view(self.world_size, -1)

    def all_to_all(self, tensor: Tensor) -> Steps[Tensor]:
        """Row i of the (processes, n) ``tensor`` goes to process i; row i of the result came from there."""
        self.traffic.count_all_to_all(tensor, self.world_size)
        received = torch.empty_like(tensor)
        yield _member(dist.all_to_all_single(received, tensor.contiguous(), group=self.group, async_op=True))
        return received

    def sum(
        self, tensors: Sequence[Tensor], wire: Wire, generator: torch.Generator | None = None
    ) -> Steps[tuple[list[Tensor], list[Tensor]]]:
        """The sums of fp32 tensors over the group, in one message in a wire format; the same bits on every process.

        Returns (sums, shares), shaped as ``tensors``. A share is what the sum holds of this process: over all, the
        shares add up to the sum, whatever rounding did. So ``tensor - share`` is exactly what is left to feed back.

        Formats other than fp32 cannot be added on the way. Each process sends each other one its shard (all-to-all),
        adds up what it got in fp32, and sends the rounded sum to all (all-gather); what this second rounding changed
        goes into the share of the process that did it. No group of values that share a scale spans two tensors, so
        what a tensor becomes does not depend on its neighbours: replicas in other groups stay the same.
        """
        if wire.exact:
            parts = [tensor.reshape(-1) for tensor in tensors]
            total = torch.cat(parts)  # a copy, also of a single tensor
            yield self.all_reduce(total)
            shares: Sequence[Tensor] = tensors
        else:
            parts = [in_groups(tensor.reshape(-1)) for tensor in tensors]
            flat = torch.cat(parts)
            unit = GROUP * self.world_size
            shards = torch.nn.functional.pad(flat, (0, -len(flat) % unit)).view(self.world_size, -1)
            with record_function("edgc/round"):
                message = wire.encode(shards, generator)
                share = wire.decode(message)
            received = yield from self.all_to_all(message)
            with record_function("edgc/round"):
                own_sum = wire.decode(received).sum(dim=0)
                rounded = wire.encode(own_sum.unsqueeze(0), generator)
                share[self.process] += wire.decode(rounded)[0] - own_sum
            gathered = yield from self.all_gather(rounded[0])
            with record_function("edgc/round"):
                total = wire.decode(gathered).view(-1)
            shares = _cut(share.view(-1), parts, tensors)
        return _cut(total, parts, tensors), list(shares)

    def sum_shards(
        self, shards: Sequence[Sequence[Tensor]], wire: Wire, generator: torch.Generator | None = None
    ) -> Steps[tuple[list[Tensor], list[list[Tensor]]]]:
        """As ``sum``, but process i gets only the sums of ``shards[i]``: the all-to-all alone, half the bytes.

        Returns (this process's sums, shares of all that was put in). Shards are padded to the size of the largest one.
        """
        none = next(tensor for shard in shards for tensor in shard).new_empty(0)  # a shard may hold nothing
        parts = [[in_groups(tensor.reshape(-1)) for tensor in shard] for shard in shards]
        flat = [torch.cat([none, *pieces]) for pieces in parts]
        length = max(map(len, flat))
        with record_function("edgc/round"):
            values = torch.stack([torch.nn.functional.pad(shard, (0, length - len(shard))) for shard in flat])
            message = wire.encode(values, generator)
            share = wire.decode(message)
        received = yield from self.all_to_all(message)
        with record_function("edgc/round"):
            total = wire.decode(received).sum(dim=0)
        shares = [_cut(row, *pieces) for row, *pieces in zip(share, parts, shards, strict=True)]
        return _cut(total, parts[self.process], shards[self.process]), shares


def _cut(flat: Tensor, parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """The flat tensor of all ``parts`` as tensors shaped as ``like``, without what was padded."""
    lengths = [len(part) for part in parts]
    pieces = torch.split(flat[: sum(lengths)], lengths)
    return [piece[: tensor.numel()].view_as(tensor) for piece, tensor in zip(pieces, like, strict=True)]


def _member(work: Work | None) -> Work:
    if work is None:
        raise RuntimeError("this process is not a member of the process group it was given")
    return work
