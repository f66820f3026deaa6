"""Taking several sequences of messages at once, with messages that only note when they are sent and waited for."""

import torch
from torch import Tensor

from edgc.comm.collectives import (
    COALESCED_BYTES,
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    Communicator,
    Exchange,
    Work,
    interleave,
    run_to_end,
)


class Note:
    """A message that writes down when it is started and waited for."""

    def __init__(self, log: list[str], name: str):
        self.log, self.name = log, name

    def start(self) -> Work:
        self.log.append(f"start {self.name}")
        return self

    def wait(self) -> None:
        self.log.append(f"wait {self.name}")


class Doubled(Collective):
    """A collective whose result is twice the tensor; ``sent`` has what travelled."""

    sent: list[Tensor] = []  # noqa: RUF012 - cleared by the test

    def start(self) -> Work:
        self.sent.append(self.tensor)
        self.result = 2 * self.tensor
        return Note([], "doubled")


class DoubledAlone(Doubled):
    """One that is not joined with others."""

    joins = False


def exchange(log: list[str], name: str, count: int) -> Exchange[str]:
    for number in range(count):
        yield Note(log, f"{name}{number}")
    return name.upper()


def results(several: list[Exchange[str]]) -> list[str]:
    found: list[str] = []

    def whole() -> Exchange[None]:
        found.extend((yield from interleave(several)))

    run_to_end(whole())
    return found


def test_messages_of_a_round_are_under_way_at_the_same_time() -> None:
    log: list[str] = []
    assert results([exchange(log, "a", 2), exchange(log, "b", 1), exchange(log, "c", 0)]) == ["A", "B", "C"]
    assert log == ["start a0", "start b0", "wait a0", "wait b0", "start a1", "wait a1"]


def doubled(tensor: Tensor, communicator: object, kind: type[Doubled] = Doubled) -> Exchange[Tensor]:
    message = kind(communicator, tensor)  # type: ignore[arg-type]
    yield message
    return message.result


def test_messages_of_a_kind_travel_as_one() -> None:
    """Also those that an interleave within an interleave asks for; not of another group or type, nor large sums."""
    Doubled.sent.clear()
    one, other = object(), object()
    tensors = [torch.full((2, n), float(n)) for n in (3, 1, 5)]
    sums, integers = torch.ones(2, 7), torch.ones(2, 4, dtype=torch.int64)

    def within() -> Exchange[list[Tensor]]:
        return (yield from interleave([doubled(tensors[1], one), doubled(tensors[2], one)]))

    def flat() -> Exchange[list[Tensor]]:
        first, inner, *others = yield from interleave(
            [
                doubled(tensors[0], one),
                within(),
                doubled(sums, one, DoubledAlone),
                doubled(integers, one),
                doubled(tensors[0], other),
            ]  # type: ignore[list-item]
        )
        return [first, *inner, *others]

    found = run_to_end(flat())
    for own, result in zip([*tensors, sums, integers, tensors[0]], found, strict=True):
        torch.testing.assert_close(result, 2 * own)
        assert result.is_contiguous()
    assert sorted(tuple(tensor.shape) for tensor in Doubled.sent) == [(2, 3), (2, 4), (2, 7), (2, 9)]


def test_only_large_sums_in_fp32_are_not_joined() -> None:
    small, large = torch.empty(4, device="meta"), torch.empty(COALESCED_BYTES // 4 + 1, device="meta")
    communicator: Communicator = None  # type: ignore[assignment]  # nothing is sent
    for kind, joins in ((AllReduce, False), (AllGather, True), (AllToAll, True)):
        assert kind(communicator, small).joins and kind(communicator, large).joins == joins
