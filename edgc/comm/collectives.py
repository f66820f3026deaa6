"""Collectives over one process group, counted. With ``objects`` the only user of ``torch.distributed`` in ``edgc``."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from edgc.arithmetic import on_cpu
from edgc.comm.wire import GROUP, Wire, in_groups
from edgc.stacking import subtract_all

T = TypeVar("T")
# A larger sum in fp32 would gain nothing by company, and joining copies.
COALESCED_BYTES = 4 * 2**20
# Of what one process sends another at once on a CPU. Gloo seems to send and receive more than that one after the
# other: on a slow link a message then takes up to twice as long as its bytes need.
PIECE_BYTES = 2**19


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Block until the result may be used (on CUDA: until later kernels may use it)."""


class Message(Protocol):
    """One collective or several, not yet under way."""

    def start(self) -> Work:
        """Every process of the group must start the same messages in the same order."""


# Code that yields every message that it needs sent. The caller starts it and goes on with the code once the message is
# there, at once or after doing something else. So one piece of code serves the synchronous, the overlapped and the
# side-stream use.
Exchange: TypeAlias = Generator[Message, None, T]


def interleave(several: Sequence[Exchange[T]]) -> Exchange[list[T]]:
    """All these exchanges at once; their results. Messages of the same round travel together.

    Every process must call this with the same exchanges in the same order, as for the collectives themselves.
    """
    results: dict[int, T] = {}
    waiting: dict[int, Message] = {}

    def advance(index: int) -> None:
        waiting.pop(index, None)  # what it has brought belongs to the exchange alone, which may drop it
        try:
            waiting[index] = next(several[index])
        except StopIteration as end:
            results[index] = end.value

    for index in range(len(several)):
        advance(index)
    while waiting:
        yield Coalesced(list(waiting.values())) if len(waiting) > 1 else next(iter(waiting.values()))
        for index in list(waiting):
            advance(index)
    return [results[index] for index in range(len(several))]


def run_to_end(exchange: Exchange[T]) -> T:
    """Run an exchange to its end, waiting for each message in turn; its result."""
    while True:
        try:
            next(exchange).start().wait()
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


class Collective(ABC):
    """A collective of one tensor, counted when it starts. ``result`` is there once it has been waited for.

    A tensor's last dimension may be cut and joined: a part of the result then belongs to each part.
    """

    result: Tensor

    def __init__(self, communicator: "Communicator", tensor: Tensor):
        self.communicator, self.tensor = communicator, tensor

    @property
    def joins(self) -> bool:
        """Whether it may travel with others of its kind. What is in few bits is small beside what it stands for."""
        return True

    @abstractmethod
    def start(self) -> Work:
        """Send it."""


class AllReduce(Collective):
    """The sum of (n,) tensors, in place."""

    @property
    def joins(self) -> bool:
        return self.tensor.nbytes <= COALESCED_BYTES

    def start(self) -> Work:
        to = self.communicator
        to.traffic.count_all_reduce(self.tensor, to.world_size)
        self.result = self.tensor
        return _member(dist.all_reduce(self.tensor, group=to.group, async_op=True))


class RowOfEach(Collective):
    """A collective whose result, (processes, n), has a row from each process. On a CPU it travels in pieces."""

    def start(self) -> Work:
        self._count()
        rows, columns = self.communicator.world_size, self.tensor.shape[-1]
        self.result = self.tensor.new_empty(rows, columns)
        most = PIECE_BYTES // self.tensor.itemsize if on_cpu(self.tensor) else columns
        if columns <= most:
            return self._send(self.tensor.contiguous(), self.result)
        works: list[Work] = []
        for own, place in zip(*(torch.split(whole, most, dim=-1) for whole in (self.tensor, self.result)), strict=True):
            received = torch.empty_like(place, memory_format=torch.contiguous_format)
            works.append(_Piece(self._send(own.contiguous(), received), received, place))
        return CombinedWork(works)

    @abstractmethod
    def _count(self) -> None:
        """Count the whole of it."""

    @abstractmethod
    def _send(self, tensor: Tensor, result: Tensor) -> Work:
        """Start it, from a contiguous tensor into another."""


@dataclass(frozen=True)
class _Piece:
    """A piece of a collective under way. What has come goes to its ``place``."""

    work: Work
    received: Tensor
    place: Tensor

    def wait(self) -> None:
        self.work.wait()
        self.place.copy_(self.received)


class AllGather(RowOfEach):
    """Every process's (n,) tensor as the rows of one (processes, n)."""

    def _count(self) -> None:
        self.communicator.traffic.count_all_gather(self.tensor, self.communicator.world_size)

    def _send(self, tensor: Tensor, result: Tensor) -> Work:
        return _member(
            dist.all_gather_into_tensor(result.view(-1), tensor, group=self.communicator.group, async_op=True)
        )


class AllToAll(RowOfEach):
    """Row i of the (processes, n) tensor goes to process i; row i of the result came from there."""

    def _count(self) -> None:
        self.communicator.traffic.count_all_to_all(self.tensor, self.communicator.world_size)

    def _send(self, tensor: Tensor, result: Tensor) -> Work:
        return _member(dist.all_to_all_single(result, tensor, group=self.communicator.group, async_op=True))


class ReduceScatter:
    """The sum of (n,) tensors, of which each process gets its own of as many equal parts, in place."""

    def __init__(self, communicator: "Communicator", tensor: Tensor):
        self.communicator, self.tensor = communicator, tensor

    def start(self) -> Work:
        """Send it."""
        to = self.communicator
        to.traffic.count_reduce_scatter(self.tensor, to.world_size)
        own = self.tensor.view(to.world_size, -1)[to.process]
        return _member(dist.reduce_scatter_tensor(own, self.tensor, group=to.group, async_op=True))


class Coalesced:
    """Messages that are under way at the same time, those of a kind as one where they allow it."""

    def __init__(self, messages: Sequence[Message]):
        self.messages: list[Message] = []
        for message in messages:
            self.messages += message.messages if isinstance(message, Coalesced) else [message]

    def start(self) -> Work:
        kinds: dict[object, list[Collective]] = {}
        works: list[Work] = []
        for message in self.messages:
            if isinstance(message, Collective) and message.joins:
                kinds.setdefault((type(message), message.communicator, message.tensor.dtype), []).append(message)
            else:
                works.append(message.start())
        works += [CoalescedWork(alike) if len(alike) > 1 else alike[0].start() for alike in kinds.values()]
        return CombinedWork(works)


class CoalescedWork:
    """Collectives of a kind under way as one."""

    def __init__(self, several: Sequence[Collective]):
        self.several = several
        whole = torch.cat([one.tensor for one in several], dim=-1)
        self.whole = type(several[0])(several[0].communicator, whole)
        self.work = self.whole.start()

    def wait(self) -> None:
        self.work.wait()
        parts = torch.split(self.whole.result, [one.tensor.shape[-1] for one in self.several], dim=-1)
        for one, part in zip(self.several, parts, strict=True):
            one.result = part.contiguous()


class CombinedWork:
    """Several collectives under way."""

    def __init__(self, works: Sequence[Work]):
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class Communicator:
    """A process group whose traffic is counted."""

    def __init__(self, group: dist.ProcessGroup, traffic: Traffic):
        self.group = group
        self.traffic = traffic
        self.world_size: int = dist.get_world_size(group)
        self.process: int = dist.get_rank(group)
        self.members: list[int] = dist.get_process_group_ranks(group)  # their numbers in the whole run

    @classmethod
    def uncounted(cls, group: dist.ProcessGroup) -> "Communicator":
        """A communicator for what is no training traffic: probes, checks and checkpoints."""
        return cls(group, Traffic())

    def all_reduce(self, tensor: Tensor) -> Exchange[Tensor]:
        """The sum of (n,) tensors over the group; ``tensor`` may be overwritten."""
        message = AllReduce(self, tensor)
        yield message
        return message.result

    def all_gather(self, tensor: Tensor) -> Exchange[Tensor]:
        """Every process's (n,) ``tensor`` as the rows of one (processes, n)."""
        message = AllGather(self, tensor)
        yield message
        return message.result

    def all_to_all(self, tensor: Tensor) -> Exchange[Tensor]:
        """Row i of the (processes, n) ``tensor`` goes to process i; row i of the result came from there."""
        message = AllToAll(self, tensor)
        yield message
        return message.result

    def sum(
        self, tensors: Sequence[Tensor], wire: Wire, generator: torch.Generator | None = None
    ) -> Exchange[tuple[list[Tensor], list[Tensor]]]:
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
            total = yield from self.all_reduce(torch.cat(parts))  # a copy, also of a single tensor
            return cut_joined(total, [tensor.shape for tensor in tensors]), list(tensors)
        message = self._rounded(tensors, wire, generator)
        shapes = [tensor.shape for tensor in tensors]
        del tensors  # memory for others, while messages are under way
        received = yield from self.all_to_all(message)
        own_sum, rounded = self._added_up(received, wire, generator)
        del received
        gathered = yield from self.all_gather(rounded[0])
        with record_function("edgc/round"):
            total, share = wire.decode(gathered), self._share(message, own_sum, rounded, wire)
        return cut_joined(total, shapes, GROUP), cut_joined(share, shapes, GROUP)

    def sum_in_place(
        self,
        tensors: Sequence[Tensor],
        errors: Sequence[Tensor],
        wire: Wire,
        generator: torch.Generator | None = None,
    ) -> Exchange[None]:
        """``sum`` in the place of the tensors. What it does not hold of them goes into ``errors``, of their shapes.

        It takes less memory: the errors are there before the second message leaves. The format is not fp32.
        """
        message = self._rounded(tensors, wire, generator)
        shapes = [tensor.shape for tensor in tensors]
        received = yield from self.all_to_all(message)
        own_sum, rounded = self._added_up(received, wire, generator)
        del received
        subtract_all(tensors, cut_joined(self._share(message, own_sum, rounded, wire), shapes, GROUP), errors)
        del message, own_sum
        gathered = yield from self.all_gather(rounded[0])
        with record_function("edgc/round"):
            total = wire.decode(gathered)
        torch._foreach_copy_(list(tensors), cut_joined(total, shapes, GROUP))

    def sum_alone(self, tensors: Sequence[Tensor], wire: Wire) -> Exchange[list[Tensor]]:
        """``sum`` without the shares. ``tensors`` may be overwritten, and one may be its own sum."""
        if wire.exact:
            alone = len(tensors) == 1 and tensors[0].is_contiguous()
            joined = tensors[0].view(-1) if alone else torch.cat([one.reshape(-1) for one in tensors])
            total = yield from self.all_reduce(joined)
            if alone and total is joined:  # and was not joined with other messages
                return list(tensors)
            return cut_joined(total, [tensor.shape for tensor in tensors])
        message = self._rounded(tensors, wire)
        shapes = [tensor.shape for tensor in tensors]
        del tensors
        received = yield from self.all_to_all(message)
        del message
        _, rounded = self._added_up(received, wire)
        del received
        gathered = yield from self.all_gather(rounded[0])
        with record_function("edgc/round"):
            total = wire.decode(gathered)
        return cut_joined(total, shapes, GROUP)

    def _rounded(self, tensors: Sequence[Tensor], wire: Wire, generator: torch.Generator | None = None) -> Tensor:
        """This process's message: one row for each process."""
        parts = [in_groups(tensor.reshape(-1)) for tensor in tensors]
        padding = -sum(map(len, parts)) % (GROUP * self.world_size)
        if padding:
            parts.append(parts[0].new_zeros(padding))
        copied = len(parts) > 1
        joined = torch.cat(parts) if copied else parts[0]
        with record_function("edgc/round"):
            return wire.encode(joined.view(self.world_size, -1), generator, overwrite=copied, aligned=True)

    @staticmethod
    def _added_up(received: Tensor, wire: Wire, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """The sum of what all have sent of this process's shard, in rotated values, and the same as a message."""
        with record_function("edgc/round"):
            own_sum = wire.unrotated.decode(received).sum(dim=0)
            return own_sum, wire.unrotated.encode(own_sum.unsqueeze(0), generator, aligned=True)

    def _share(self, message: Tensor, own_sum: Tensor, rounded: Tensor, wire: Wire) -> Tensor:
        """What the sum holds of this process, with what the second rounding has changed of its own shard."""
        with record_function("edgc/round"):
            share = wire.unrotated.decode(message)
            share[self.process].add_(wire.unrotated.decode(rounded)[0].sub_(own_sum))
            return wire.restored(share)

    def sum_shards_in_place(
        self,
        shards: Sequence[Sequence[Tensor]],
        errors: Sequence[Sequence[Tensor]],
        wire: Wire,
        generator: torch.Generator | None = None,
    ) -> Exchange[None]:
        """``sum_in_place``, of which process i gets only the sums of ``shards[i]``.

        That takes the all-to-all alone: half the bytes. The errors are those of all shards. Shards are padded to the
        size of the largest one.
        """
        message = self._rounded_shards(shards, wire, generator)
        received = yield from self.all_to_all(message)
        with record_function("edgc/round"):
            share = wire.decode(message)
        for row, own, left in zip(share, shards, errors, strict=True):
            subtract_all(own, cut_joined(row, [tensor.shape for tensor in own], GROUP), left)
        del message, share
        with record_function("edgc/round"):
            total = wire.restored(wire.unrotated.decode(received).sum(dim=0))
        own = shards[self.process]
        if own:
            torch._foreach_copy_(list(own), cut_joined(total, [tensor.shape for tensor in own], GROUP))

    @staticmethod
    def _rounded_shards(
        shards: Sequence[Sequence[Tensor]], wire: Wire, generator: torch.Generator | None = None
    ) -> Tensor:
        """This process's message: one row for each shard."""
        none = next(tensor for shard in shards for tensor in shard).new_empty(0)  # a shard may hold nothing
        flat = [torch.cat([none, *(in_groups(tensor.reshape(-1)) for tensor in shard)]) for shard in shards]
        length = max(map(len, flat))
        with record_function("edgc/round"):
            values = torch.stack([torch.nn.functional.pad(shard, (0, length - len(shard))) for shard in flat])
            return wire.encode(values, generator, overwrite=True, aligned=True)


def cut_joined(joined: Tensor, shapes: Sequence[torch.Size], multiple: int = 1) -> list[Tensor]:
    """Tensors of these shapes that follow each other in a message, each padded to a ``multiple`` of values."""
    lengths = [shape.numel() + -shape.numel() % multiple for shape in shapes]
    pieces = torch.split(joined.view(-1)[: sum(lengths)], lengths)
    return [piece[: shape.numel()].view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _member(work: Work | None) -> Work:
    if work is None:
        raise RuntimeError("this process is not a member of the process group it was given")
    return work
