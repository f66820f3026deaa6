"""Spans timed on the CPU's clock or by CUDA events, without making the host wait inside a training step."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Spans:
    """Durations of repeated pieces of work on one device."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []

    def mark(self) -> Any:
        """A moment in the device's work."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def add(self, start: Any) -> None:
        """Close the span that began at ``start``."""
        self._spans.append((start, self.mark()))

    def take_seconds(self) -> list[float]:
        """All durations since the last call. The one place that waits for the device."""
        spans, self._spans = self._spans, []
        if not self._cuda:
            return [end - start for start, end in spans]
        if spans:
            spans[-1][1].synchronize()
        return [start.elapsed_time(end) / 1000 for start, end in spans]


class BackwardTimer:
    """Times the backward pass of every micro-batch through ``module`` while ``active()`` holds.

    The span begins when the gradient reaches the module's output and ends when autograd has finished the pass.
    """

    def __init__(self, module: nn.Module, active: Callable[[], bool], spans: Spans):
        self._active = active
        self._spans = spans
        module.register_forward_hook(self._after_forward)

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad and self._active():
            output.register_hook(self._begin)  # type: ignore[no-untyped-call]

    def _begin(self, gradient: Tensor) -> None:
        start = self._spans.mark()
        # The engine calls back when the whole pass is done; modules and tensors offer no such hook.
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: self._spans.add(start))
