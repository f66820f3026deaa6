from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.overrides import TorchFunctionMode

from edgc.comm.collectives import CombinedWork, Exchange
from edgc.comm.overlap import Overlap
from edgc.timing import Spans


class Message:
    """A message, and what is waited for once it is under way."""

    def __init__(self, log: list[str], name: str):
        self.log, self.name = log, name

    def start(self) -> "Message":
        self.log.append(f"{self.name} leaves")
        return self

    def wait(self) -> None:
        self.log.append(f"{self.name} is there")


def reduction(log: list[str], name: str, messages: int) -> Exchange[None]:
    for place in range(messages):
        yield Message(log, f"{name}{place}")
    log.append(f"{name} ends")


def test_messages_leave_in_the_order_of_the_program_and_before_anyone_waits() -> None:
    log: list[str] = []
    overlap = Overlap(torch.device("cpu"))
    a = overlap.start(reduction(log, "a", 2))
    assert log == ["a0 leaves"] and not a.done
    b = overlap.start(reduction(log, "b", 3))
    assert log[1:] == ["b0 leaves", "a0 is there", "a1 leaves"], "the one that waits for nothing goes first"
    b.wait()  # finished in another order than started
    assert log[4:6] == ["b0 is there", "b1 leaves"]
    assert log[6:8] == ["a1 is there", "a ends"], "while a message of b is under way"
    assert log[8:] == ["b1 is there", "b2 leaves", "b2 is there", "b ends"] and b.done
    a.wait()
    b.wait()
    assert a.done and len(log) == 12, "waiting for what has ended does nothing"


def test_reductions_take_turns_and_two_at_most_are_under_way() -> None:
    log: list[str] = []
    overlap = Overlap(torch.device("cpu"))
    handles = [overlap.start(reduction(log, name, 4)) for name in "abc"]
    assert handles[0].done, "the third one needs its memory"
    handles[1].wait()
    leaving = [entry.split()[0] for entry in log if entry.endswith("leaves")]
    assert leaving == ["a0", "b0", "a1", "c0", "a2", "b1", "a3", "b2", "c1", "b3", "c2", "c3"]
    for handle in handles:
        handle.wait()
    assert log[-1] == "c ends" and len(log) == 3 * 9


def test_a_reduction_starts_when_those_under_way_leave_the_memory_that_it_holds() -> None:
    log: list[str] = []
    overlap = Overlap(torch.device("cpu"))
    a = overlap.start(reduction(log, "a", 2), memory=0.5)
    b = overlap.start(reduction(log, "b", 9), memory=0.4)
    assert not a.done, "both have room"
    overlap.start(reduction(log, "c", 9), memory=0.6)
    assert a.done and log.index("a ends") < log.index("c0 leaves") and not b.done
    overlap.start(reduction(log, "d", 2), memory=1.2).wait()
    assert b.done and log.index("c ends") < log.index("d0 leaves"), "more than there is: by itself"


def test_a_reduction_that_has_ended_is_left_alone() -> None:
    log: list[str] = []
    overlap = Overlap(torch.device("cpu"))
    a = overlap.start(reduction(log, "a", 1))
    for name in "bcd":
        overlap.start(reduction(log, name, 1))
    assert a.done and log.count("a ends") == 1
    assert len(overlap._under_way) == 1, "and forgotten"


def test_the_reduction_runs_without_autograd() -> None:
    weights = torch.ones(3, requires_grad=True)
    products = []

    def exchange() -> Exchange[None]:
        products.append(weights * 2)
        yield Message([], "m")
        products.append(weights * 3)

    Overlap(torch.device("cpu")).start(exchange()).wait()
    assert not any(product.requires_grad for product in products)


def test_a_torch_function_mode_of_the_host_sees_nothing_of_a_reduction() -> None:
    seen: list[object] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    def exchange() -> Exchange[None]:
        torch.ones(3) * 2
        yield Message([], "m")
        torch.ones(3) * 3

    with Mode():
        Overlap(torch.device("cpu")).start(exchange()).wait()
        assert torch.ones not in seen
        torch.ones(3)
    assert torch.ones in seen


class EventSpans(Spans):
    """A clock that counts what was logged."""

    def __init__(self, log: list[str], device: str = "cpu"):
        super().__init__(torch.device(device))
        self._cuda = False
        self.log = log

    def mark(self) -> int:
        return len(self.log)


def test_a_reduction_is_timed_by_its_own_work_and_waits_and_by_nothing_in_between() -> None:
    log: list[str] = []
    spans, others = EventSpans(log), EventSpans(log)
    overlap = Overlap(torch.device("cpu"))
    a = overlap.start(reduction(log, "a", 2), spans=spans)
    log += ["backward"] * 10
    b = overlap.start(reduction(log, "b", 1), spans=others)  # takes the first one message further
    log += ["backward"] * 10
    weights = overlap.start(reduction(log, "weights", 1))
    a.wait()
    b.wait()
    weights.wait()
    for one in (spans, others):
        one.close()
    own = sum(entry.startswith("a") for entry in log)
    assert own == 5 and spans.take_seconds() == [own]
    assert others.take_seconds() == [3], "leaves, is there, ends"


def test_a_collective_of_the_hosts_is_timed_and_left_alone_until_it_is_waited_for() -> None:
    log: list[str] = []
    spans = EventSpans(log)
    overlap = Overlap(torch.device("cpu"))
    own = overlap.start_own(Message(log, "own").start, spans)
    a = overlap.start(reduction(log, "a", 1))
    assert log == ["own leaves", "a0 leaves"]
    own.wait()
    spans.close()
    assert spans.take_seconds() == [2], "leaves, is there"
    a.wait()
    assert own.done and a.done


class Streams:
    """Stands for ``torch.cuda``: one line of work for each stream, and which one is current."""

    def __init__(self, log: list[str]):
        self.log, self.now = log, "backward's"

    def Stream(self, device: torch.device) -> Any:  # noqa: N802  # the name of torch.cuda's
        return SimpleNamespace(wait_stream=lambda other: self.log.append(f"side stream waits for {other.name}"))

    def current_stream(self, device: torch.device) -> Any:
        return SimpleNamespace(
            name=self.now,
            wait_event=lambda event: self.log.append(f"{self.now} stream waits for {event.name}"),
            synchronize=lambda: self.log.append(f"the CPU waits for {self.now} stream"),
        )

    def Event(self) -> Any:  # noqa: N802
        """Named by how many lines the log has when it is recorded."""
        event = SimpleNamespace(name="nothing")
        event.record = lambda: setattr(event, "name", f"line {len(self.log)} on the {self.now} stream")
        return event

    def stream(self, stream: Any) -> Any:
        streams = self

        class Current:
            def __enter__(self) -> None:
                streams.now = "side"

            def __exit__(self, *error: Any) -> None:
                streams.now = "backward's"

        return Current()


class Marks(EventSpans):
    """Logs its marks, and the stream that they are of."""

    def __init__(self, log: list[str], streams: Streams):
        super().__init__(log, "cuda")
        self.streams = streams

    def mark(self) -> int:
        self.log.append(f"event on the {self.streams.now} stream")
        return len(self.log)


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def marks(log: list[str], monkeypatch: pytest.MonkeyPatch) -> Marks:
    streams = Streams(log)
    for name in ("Stream", "Event", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(streams, name))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return Marks(log, streams)


def test_on_cuda_a_reduction_runs_and_is_timed_on_the_side_stream(log: list[str], marks: Marks) -> None:
    Overlap(torch.device("cuda")).start(reduction(log, "a", 1), spans=marks).wait()
    assert log == [
        "side stream waits for backward's",
        *("event on the side stream", "a0 leaves", "event on the side stream"),
        *("event on the side stream", "a0 is there", "a ends", "event on the side stream"),
        "backward's stream waits for line 8 on the side stream",
    ]
    marks.close()
    assert marks.take_seconds() == [2 + 3]


def test_on_cuda_who_waits_for_a_reduction_does_not_wait_for_what_is_queued_behind_it(
    log: list[str], marks: Marks
) -> None:
    """Gathers of weights are all started before the first layer waits for its own."""
    overlap = Overlap(torch.device("cuda"))
    handles = [overlap.start(reduction(log, name, 1)) for name in "abc"]
    handles[0].wait()
    queued = log.index("a ends") + 1
    assert log[-1] == f"backward's stream waits for line {queued} on the side stream" and queued < len(log) - 1


def test_on_cuda_memory_that_a_reduction_may_drop_waits_for_the_side_stream(log: list[str], marks: Marks) -> None:
    overlap = Overlap(torch.device("cuda"))
    read = SimpleNamespace(
        is_cuda=True, record_stream=lambda stream: log.append("recorded" if stream is overlap.stream else "other")
    )
    overlap.start(reduction(log, "a", 1), reads=lambda: [cast(torch.Tensor, read), torch.zeros(1)])
    assert log == ["side stream waits for backward's", "recorded", "a0 leaves"]


def test_on_cuda_a_collective_that_the_host_has_waited_for_is_timed_up_to_its_end(log: list[str], marks: Marks) -> None:
    """So Megatron does without ``--overlap-grad-reduce``: nothing is left under way."""

    def collective() -> CombinedWork:
        log.append("the backward's stream waits for own")
        return CombinedWork([])

    Overlap(torch.device("cuda")).start_own(collective, marks)
    begin, end = (place for place, entry in enumerate(log) if entry == "event on the side stream")
    assert log[begin:end] == [
        "event on the side stream",
        "the backward's stream waits for own",
        "side stream waits for backward's",
    ]


def test_the_cpu_waits_for_the_hosts_stream_where_it_is_asked_to(log: list[str], marks: Marks) -> None:
    Overlap(torch.device("cuda")).synchronize()
    assert log == ["the CPU waits for backward's stream"]
    Overlap(torch.device("cpu")).synchronize()


def test_on_cuda_a_collective_of_the_hosts_starts_on_its_own_stream_and_is_timed_on_the_side_stream(
    log: list[str], marks: Marks
) -> None:
    class Own(Message):
        def wait(self) -> None:
            log.append(f"{marks.streams.now} stream waits for own")

    Overlap(torch.device("cuda")).start_own(
        lambda: Own(log, f"own on the {marks.streams.now} stream").start(), marks
    ).wait()
    assert log == [
        "side stream waits for backward's",
        "event on the side stream",
        "own on the backward's stream leaves",
        "side stream waits for backward's",
        "side stream waits for own",
        "event on the side stream",
        "backward's stream waits for line 6 on the side stream",
    ]
