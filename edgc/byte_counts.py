"""Bytes that a process sends, beside what the same would take in other ways."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class ByteCount:
    """Bytes of one process. ``sent``: by this run. ``host``: by the host without EDGC. ``fp32``: by all-reduces in fp32
    in the place of the host's sums.

    What the host does not sum takes in ``fp32`` what it takes in the host's own way.
    """

    sent: float = 0.0
    host: float = 0.0
    fp32: float = 0.0

    def __add__(self, other: "ByteCount") -> "ByteCount":
        return ByteCount(self.sent + other.sent, self.host + other.host, self.fp32 + other.fp32)

    def __sub__(self, other: "ByteCount") -> "ByteCount":
        return ByteCount(self.sent - other.sent, self.host - other.host, self.fp32 - other.fp32)

    @classmethod
    def mean(cls, several: Sequence["ByteCount"]) -> "ByteCount":
        return cls(
            fmean(one.sent for one in several), fmean(one.host for one in several), fmean(one.fp32 for one in several)
        )

    def to_event(self, name: str) -> dict[str, float]:
        """Fields of the event log under this name."""
        return {name: self.sent, f"{name}_dense": self.host}


@dataclass(frozen=True)
class RunBytes:
    """The byte counts of gradients, of updated weights, and of messages between pipeline stages.

    ``unplanned``: of the gradients, what no plan can change.
    """

    gradients: ByteCount = ByteCount()
    weights: ByteCount = ByteCount()
    messages: ByteCount = ByteCount()
    unplanned: ByteCount = ByteCount()

    @property
    def planned(self) -> ByteCount:
        """Of gradients whose bytes follow the plan, and count against a volume."""
        return self.gradients - self.unplanned

    @property
    def total(self) -> ByteCount:
        return self.gradients + self.weights + self.messages

    def __add__(self, other: "RunBytes") -> "RunBytes":
        return RunBytes(
            self.gradients + other.gradients,
            self.weights + other.weights,
            self.messages + other.messages,
            self.unplanned + other.unplanned,
        )

    @classmethod
    def mean(cls, several: Sequence["RunBytes"]) -> "RunBytes":
        return cls(
            ByteCount.mean([one.gradients for one in several]),
            ByteCount.mean([one.weights for one in several]),
            ByteCount.mean([one.messages for one in several]),
            ByteCount.mean([one.unplanned for one in several]),
        )

    def to_event(self) -> dict[str, float]:
        """Fields of the event log."""
        return {
            **self.gradients.to_event("dp_bytes"),
            **self.weights.to_event("param_bytes"),
            **self.messages.to_event("pp_bytes"),
            **self.total.to_event("total_bytes"),
            "dp_bytes_fp32": self.gradients.fp32,
        }

    @classmethod
    def of(cls, kept: Mapping[str, Mapping[str, float]]) -> "RunBytes":
        """What ``dataclasses.asdict`` has made plain."""
        return cls(**{what: ByteCount(**count) for what, count in kept.items()})
