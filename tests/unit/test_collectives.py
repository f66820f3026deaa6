"""Taking several sequences of collectives at once, with works that only note when they are waited for."""

from edgc.comm.collectives import Steps, interleave, run


class Note:
    """A collective that writes down when it is started and waited for."""

    def __init__(self, log: list[str], name: str):
        self.log, self.name = log, name
        log.append(f"start {name}")

    def wait(self) -> None:
        self.log.append(f"wait {self.name}")


def steps(log: list[str], name: str, count: int) -> Steps[str]:
    for number in range(count):
        yield Note(log, f"{name}{number}")
    return name.upper()


def test_messages_of_others_travel_while_one_waits() -> None:
    log: list[str] = []
    results: list[list[str]] = []

    def whole() -> Steps[None]:
        results.append((yield from interleave([steps(log, "a", 2), steps(log, "b", 1), steps(log, "c", 0)])))

    run(whole())
    assert results == [["A", "B", "C"]]
    assert log == ["start a0", "start b0", "wait a0", "start a1", "wait b0", "wait a1"]
