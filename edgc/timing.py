"""Spans timed on the CPU's clock or by CUDA events, without making the CPU wait inside a training step."""

import time
from collections import deque
from typing import Any

import torch

MOST_KEPT = 128  # of durations, of which a median is taken: each holds events of a GPU until then


class Spans:
    """Durations of repeated work on one device, each the sum of the spans that ``add`` and ``close`` put together."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._open: list[tuple[Any, Any]] = []
        self._closed: deque[list[tuple[Any, Any]]] = deque(maxlen=MOST_KEPT)

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
        """The newest durations that were closed since the last call. The one place that waits for the device."""
        durations, self._closed = self._closed, deque(maxlen=MOST_KEPT)
        return [sum(self._seconds(start, end) for start, end in spans) for spans in durations]

    def _seconds(self, start: Any, end: Any) -> float:
        if not self._cuda:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000
