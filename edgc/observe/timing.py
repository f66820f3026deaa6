"""Spans timed on the CPU's clock or by CUDA events, without making the CPU wait inside a training step."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Spans:
    """Durations of repeated work on one device, each the sum of the spans that ``add`` and ``close`` put together."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._open: list[tuple[Any, Any]] = []
        self._closed: list[list[tuple[Any, Any]]] = []

    def mark(self) -> Any:
        """A moment in the device's work: on CUDA in that of the current stream."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def add(self, start: Any) -> None:
        """Add the span from ``start`` to now to the duration that is still open."""
        self._open.append((start, self.mark()))

    def close(self) -> None:
        """End the open duration, if any span was added to it; the next span opens another one."""
        if self._open:
            self._closed.append(self._open)
            self._open = []

    def take_seconds(self) -> list[float]:
        """All durations that were closed since the last call. The one place that waits for the device."""
        durations, self._closed = self._closed, []
        return [sum(self._seconds(start, end) for start, end in spans) for spans in durations]

    def _seconds(self, start: Any, end: Any) -> float:
        if not self._cuda:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000


class BackwardTimer:
    """Times the backward pass of every micro-batch through ``module`` while ``active()`` holds.

    The span begins when the gradient reaches the module's output and ends when autograd has finished the pass.
    """

    def __init__(self, module: nn.Module, active: Callable[[], bool], spans: Spans):
        self._active = active
        self._spans = spans
        module.register_forward_hook(self._after_forward)

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple | list) and output else output  # BERT returns two
        if isinstance(first, Tensor) and first.requires_grad and self._active():
            first.register_hook(self._begin)  # type: ignore[no-untyped-call]

    def _begin(self, gradient: Tensor) -> None:
        start = self._spans.mark()
        # The engine calls back when the whole pass is done; modules and tensors offer no such hook.
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: self._end(start))

    def _end(self, start: Any) -> None:
        self._spans.add(start)
        self._spans.close()
