"""Reductions that run beside the backward pass: on a stream of their own, or message by message between its pieces."""

from collections import deque
from collections.abc import Callable

import torch

from edgc.comm.collectives import Steps, Work, run
from edgc.observe.timing import Spans


class Overlap:
    """Starts reductions without waiting for their results.

    On CUDA all their kernels and messages are queued on one side stream. On a CPU a reduction's first message leaves at
    once; each of the following ones leaves when the next reduction starts, and the rest when its own is waited for. So
    messages leave in the order of the program, which is the same on every rank of a group.
    """

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._pending: deque[Handle] = deque()

    def start(self, reduction: Steps[None], keep: object = None, spans: Spans | None = None) -> "Handle":
        """Start a reduction; the gradients may be used after ``wait`` on what is returned.

        ``keep``: tensors made on another stream that the reduction reads and may drop. On CUDA the host is done with
        them long before the side stream is, and their memory must not be given away so early.

        ``spans`` gets the time that the reduction takes: on CUDA from when the side stream begins with it to when its
        last message is there, on a CPU that of its own work and waits.
        """
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream), torch.no_grad():
                begin = spans.mark() if spans is not None else None
                run(reduction)
                if spans is not None:
                    spans.add(begin)
            return Handle(None, self.stream, keep, None)
        for earlier in self._pending:
            earlier.advance()
        handle = Handle(reduction, None, None, spans)
        handle.advance()
        self._pending.append(handle)
        while self._pending and self._pending[0].done:
            self._pending.popleft()
        return handle

    def start_own(self, collective: Callable[[], Work], spans: Spans) -> "Handle":
        """Start a collective of the host's, where the host would: nothing but its time is taken, as by ``start``."""
        if self.stream is None:
            handle = Handle(_one_message(collective), None, None, spans)
            handle.advance()
            return handle
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            begin = spans.mark()
        work = collective()
        with torch.cuda.stream(self.stream):
            work.wait()
            spans.add(begin)
        return Handle(None, self.stream, work, None)


def _one_message(collective: Callable[[], Work]) -> Steps[None]:
    yield collective()


class Handle:
    """A reduction under way."""

    def __init__(
        self, reduction: Steps[None] | None, stream: torch.cuda.Stream | None, keep: object, spans: Spans | None
    ):
        self._reduction = reduction
        self._stream = stream
        self._keep = keep
        self._spans = spans
        self._message: Work | None = None

    @property
    def done(self) -> bool:
        """Whether nothing is left to be queued."""
        return self._reduction is None

    def advance(self) -> None:
        """Take in the message under way and send the next one."""
        if self._reduction is None:
            return
        begin = self._spans.mark() if self._spans is not None else None
        if self._message is not None:
            self._message.wait()
        with torch.no_grad():
            self._message = next(self._reduction, None)
        if self._message is None:
            self._reduction = None
        if self._spans is not None:
            self._spans.add(begin)

    def wait(self) -> None:
        """Until the sums may be used; on CUDA: by the current stream."""
        while not self.done:
            self.advance()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._keep = None
