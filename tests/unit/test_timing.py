import time

import pytest
import torch
from torch import nn

from edgc.observe.backward_timer import BackwardTimer
from edgc.timing import MOST_KEPT, Spans

CPU = torch.device("cpu")


class Recorded(torch.autograd.Function):
    """A layer that notes when its backward pass runs."""

    @staticmethod
    def forward(ctx, x, events, name):
        ctx.events, ctx.name = events, name
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.events.append(ctx.name)
        return gradient, None, None


class Stage(nn.Module):
    def __init__(self, events):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.events = events

    def forward(self, x):
        return Recorded.apply(x * self.weight, self.events, "stage")


class EventSpans(Spans):
    """A clock that counts events, so that no test depends on how fast the machine is."""

    def __init__(self, events):
        super().__init__(CPU)
        self.events = events

    def mark(self):
        return len(self.events)


def test_the_newest_durations_are_kept_alone() -> None:
    events: list[str] = []
    spans = EventSpans(events)
    for number in range(MOST_KEPT + 10):
        start = spans.mark()
        events += ["event"] * number
        spans.add(start)
        spans.close()
    assert spans.take_seconds() == list(range(10, MOST_KEPT + 10)) and spans.take_seconds() == []


def test_the_backward_pass_of_the_module_is_timed_and_nothing_around_it() -> None:
    events: list[str] = []
    spans, active = EventSpans(events), [True]
    stage = Stage(events)
    BackwardTimer(stage, lambda: active[0], spans)
    Recorded.apply(stage(torch.ones(3)), events, "after").sum().backward()
    assert events == ["after", "stage"]
    assert spans.take_seconds() == [1], "one event, the stage's own, lies in the span"
    active[0] = False
    stage(torch.ones(3)).sum().backward()
    assert spans.take_seconds() == []


def test_nothing_is_timed_where_no_gradient_flows() -> None:
    spans = Spans(CPU)
    stage = Stage([])
    BackwardTimer(stage, lambda: True, spans)
    with torch.no_grad():
        stage(torch.ones(3))
    assert spans.take_seconds() == []


def test_spans_are_in_seconds_and_taken_once() -> None:
    spans = Spans(CPU)
    start = spans.mark()
    time.sleep(0.02)
    spans.add(start)
    assert spans.take_seconds() == [], "still open"
    spans.close()
    (seconds,) = spans.take_seconds()
    assert 0.02 <= seconds < 20
    assert spans.take_seconds() == []


def test_spans_that_are_closed_together_are_one_duration() -> None:
    events: list[str] = []
    spans = EventSpans(events)
    for pieces in ([2, 1], [4], []):
        for length in pieces:
            start = spans.mark()
            events.extend("piece" for _ in range(length))
            spans.add(start)
            events.append("between")
        spans.close()
    assert spans.take_seconds() == [3, 4], "a close without spans ends nothing"


class Clock:
    """Stands for ``torch.cuda.Event``: every event is recorded one second after the one before."""

    now = 0.0

    def __init__(self, enable_timing: bool):
        assert enable_timing
        self.waited = False

    def record(self) -> None:
        Clock.now += 1
        self.at = Clock.now

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, end: "Clock") -> float:
        assert end.waited, "the device may not be there yet"
        return 1000 * (end.at - self.at)


def test_on_cuda_events_are_waited_for_only_when_durations_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    spans = Spans(torch.device("cuda"))
    for _ in range(2):
        for _ in range(3):
            spans.add(spans.mark())
        spans.close()
    assert not any(end.waited for duration in spans._closed for _, end in duration)
    assert spans.take_seconds() == [3.0, 3.0]
