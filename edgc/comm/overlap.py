"""Reductions that run beside the backward pass and beside each other, message by message."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from edgc.arithmetic import own_arithmetic
from edgc.comm.collectives import Exchange, Work
from edgc.timing import Spans

# Two at most: one computes while the message of the other is under way. Each holds its memory to its end.
REDUCTIONS_UNDER_WAY = 2


class Overlap:
    """Starts reductions without waiting for their results.

    A reduction's first message leaves when it starts. Each of the following ones leaves when a later reduction has
    started, and the rest when one is waited for, of all reductions in turn. So one computes while the message of
    another is under way, and messages leave in the order of the program, which is the same on every process of a group.

    On CUDA the CPU waits for no message: all kernels are queued on one side stream, which does. The memory of a
    reduction lasts to its end. So ``REDUCTIONS_UNDER_WAY`` at most are under way, or fewer where they hold much.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._under_way: list[Handle] = []

    def start(
        self,
        reduction: Exchange[None],
        reads: Callable[[], Iterable[Tensor]] = tuple,
        spans: Spans | None = None,
        memory: float = 0.0,
    ) -> "Handle":
        """Start a reduction; the gradients may be used after ``wait`` on what is returned.

        ``reads`` gives the tensors made on another stream that the reduction reads and may drop. It is asked on CUDA
        alone, where the CPU is done with them long before the side stream is: their memory must not be given away so
        early.

        ``spans`` gets the time of its own work and of its waits for messages; on CUDA as the side stream sees them.
        ``memory``: what it holds to its end, as a share of what all under way may hold together. Where they would hold
        more, those under way have to end before it starts. Every process must give the same.
        """
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            for tensor in reads():
                if tensor.is_cuda:
                    tensor.record_stream(self.stream)
        while self._under_way and sum(handle.memory for handle in self._under_way) + memory > 1:
            self.advance()
        handle = Handle(reduction, self, spans, memory=memory)
        handle.advance()  # before the others: it has no message to wait for
        self.advance()
        self._under_way.append(handle)
        while len(self._under_way) > REDUCTIONS_UNDER_WAY:
            self.advance()
        return handle

    def advance(self, but: "Handle | None" = None) -> None:
        """Take every reduction under way one message further."""
        for handle in self._under_way:
            if handle is not but:
                handle.advance()
        self._under_way = [handle for handle in self._under_way if not handle.done]

    def synchronize(self) -> None:
        """Make the CPU wait for what the host's stream has queued."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).synchronize()

    def queue(self) -> AbstractContextManager[object]:
        """The stream on which kernels of reductions are queued."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def start_own(self, collective: Callable[[], Work], spans: Spans) -> "Handle":
        """Start a collective of the host's, where the host would: nothing but its time is taken, as by ``start``."""
        if self.stream is None:
            handle = Handle(_one_message(collective), self, spans)
            handle.advance()
            return handle
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with self.queue():
            begin = spans.mark()
        work = collective()
        # the host's stream may already have waited for it, and then nothing is left to wait for
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        handle = Handle(None, self, None, work)
        with self.queue():
            work.wait()
            spans.add(begin)
            handle.mark_end()
        return handle


class _HostCollective:
    """A collective of the host's as a message."""

    def __init__(self, collective: Callable[[], Work]):
        self.start = collective


def _one_message(collective: Callable[[], Work]) -> Exchange[None]:
    yield _HostCollective(collective)


class Handle:
    """A reduction under way.

    ``kept``: what must not be dropped before it has ended, with the memory that it owns. ``memory``: as of
    ``Overlap.start``.
    """

    def __init__(
        self,
        reduction: Exchange[None] | None,
        overlap: Overlap,
        spans: Spans | None,
        kept: Work | None = None,
        memory: float = 0.0,
    ):
        self.memory = memory
        self._reduction = reduction
        self._overlap = overlap
        self._spans = spans
        self._work = kept  # or the message under way
        self._end: torch.cuda.Event | None = None

    @property
    def done(self) -> bool:
        """Whether nothing is left to be queued."""
        return self._reduction is None

    def advance(self) -> None:
        """Take in the message under way and send the next one."""
        if self._reduction is None:
            return
        with own_arithmetic(self._overlap.device), self._overlap.queue():
            begin = self._spans.mark() if self._spans is not None else None
            if self._work is not None:
                self._work.wait()
                self._work = None  # the memory of what was sent, if nobody else has it
            message = next(self._reduction, None)
            if message is None:
                self._reduction = None
            self._work = None if message is None else message.start()
            if self._spans is not None:
                self._spans.add(begin)
            if message is None:
                self.mark_end()

    def mark_end(self) -> None:
        """Note that all is queued, on the current stream: who waits does not wait for what others queue behind it."""
        if self._overlap.stream is not None:
            self._end = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._end.record()

    def wait(self) -> None:
        """Until the sums may be used; on CUDA: by the current stream."""
        while not self.done:
            self.advance()
            self._overlap.advance(but=self)
        if self._end is not None:
            torch.cuda.current_stream(self._overlap.device).wait_event(self._end)
        self._work = None
