import torch

from edgc.collectives import Steps
from edgc.overlap import Overlap


class Message:
    def __init__(self, log: list[str], name: str):
        self.log, self.name = log, name
        log.append(f"{name} leaves")

    def wait(self) -> None:
        self.log.append(f"{self.name} is there")


def reduction(log: list[str], name: str, messages: int) -> Steps[None]:
    for place in range(messages):
        yield Message(log, f"{name}{place}")
    log.append(f"{name} ends")


def test_messages_leave_in_the_order_of_the_program_and_before_anyone_waits() -> None:
    log: list[str] = []
    overlap = Overlap(torch.device("cpu"))
    a = overlap.start(reduction(log, "a", 2))
    assert log == ["a0 leaves"] and not a.done
    b = overlap.start(reduction(log, "b", 3))
    assert log[1:] == ["a0 is there", "a1 leaves", "b0 leaves"]
    b.wait()  # finished in another order than started
    assert log[4:] == ["b0 is there", "b1 leaves", "b1 is there", "b2 leaves", "b2 is there", "b ends"] and b.done
    a.wait()
    assert log[10:] == ["a1 is there", "a ends"] and a.done
    a.wait()
    assert len(log) == 12, "waiting twice does nothing"


def test_a_reduction_that_has_ended_is_left_alone() -> None:
    log: list[str] = []
    overlap = Overlap(torch.device("cpu"))
    a = overlap.start(reduction(log, "a", 1))
    for name in "bcd":
        overlap.start(reduction(log, name, 1))
    assert a.done and log.count("a ends") == 1
    assert len(overlap._pending) == 1, "and forgotten"


def test_the_reduction_runs_without_autograd() -> None:
    weights = torch.ones(3, requires_grad=True)
    products = []

    def steps() -> Steps[None]:
        products.append(weights * 2)
        yield Message([], "m")
        products.append(weights * 3)

    Overlap(torch.device("cpu")).start(steps()).wait()
    assert not any(product.requires_grad for product in products)
