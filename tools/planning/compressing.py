"""What compressing costs a stage, by rank: counted steps of docs/bench/steps.json, or measured ones."""

import json
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgc.plan.rank_plan import NO_RANK
from tools.launching.configs import LaunchError
from tools.shared.gpus import GPU


@dataclass(frozen=True)
class Compressing:
    """Seconds that a stage of so many parameters computes at a rank, if the method has one, and the bytes of its
    messages, before they are sent round: lines of docs/bench/steps.json, or measured ones of the same fields.
    ``per_value``: those bytes of a parameter at the smallest rank.
    """

    elements: float
    ranks: tuple[float, ...]
    seconds: tuple[float, ...]
    sent: tuple[float, ...]
    messages: int
    per_value: float

    @classmethod
    def read(cls, path: Path, title: str, gradient_bytes: int, method: str, gpu: GPU) -> "Compressing | None":
        """Those of a stage with so many bytes of gradients, on such a GPU; None: the file has none.

        Raises ``LaunchError`` for a file that holds no counted steps.
        """
        try:
            rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
            wanted = (title, gradient_bytes, gpu.name)
            return cls.of([row for row in rows if (row["model"], row["gradient_bytes"], row["gpu"]) == wanted], method)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LaunchError(f"{path}: has no counted steps: {error}") from error

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], method: str) -> "Compressing | None":
        """From the lines of one stage; None: none has this method, in units and with one rank for all matrices."""
        own = [row for row in rows if row["method"] == method and row["units"] and len(row["ranks"]) == 1]
        if not own:
            return None
        own.sort(key=lambda row: float(row["ranks"][0]))
        elements = own[0]["gradient_bytes"] / 4
        sent = tuple(float(row["sent_bytes"]) / _ring(row) for row in own)
        return cls(
            elements,
            tuple(float(row["ranks"][0]) for row in own),
            tuple(max(row["host_seconds"], row["device_seconds"]) for row in own),
            sent,
            own[0]["collectives"],
            sent[0] / elements,
        )

    def with_experts(self, experts: "Compressing", ring: float) -> "Compressing":
        """Layers and experts together. ``ring``: bytes that a process sends for each byte of a message among those
        that hold its experts, over those that it sends among all replicas.
        """
        ranks = tuple(sorted({*self.ranks, *experts.ranks}))
        return Compressing(
            self.elements + experts.elements,
            ranks,
            tuple(self.at(rank) + experts.at(rank) for rank in ranks),
            tuple(self.bytes_at(rank) + ring * experts.bytes_at(rank) for rank in ranks),
            self.messages + experts.messages,
            self.per_value,
        )

    def at(self, rank: float) -> float:
        """Seconds: between counted ranks a straight line, which goes on beyond them; below the smallest its time."""
        return _on_line(max(rank, self.ranks[0]), self.ranks, self.seconds)

    def bytes_at(self, rank: float) -> float:
        """Of the messages at a rank. One counted rank says nothing of what has none: then all go with the rank."""
        if self.ranks == (NO_RANK,):
            return self.sent[0]
        if len(self.ranks) == 1:
            return rank * self.sent[0] / self.ranks[0]
        return _on_line(rank, self.ranks, self.sent)

    def rank_of(self, sent: float) -> int:
        """The largest rank whose messages have no more bytes."""
        if len(self.ranks) == 1:
            return int(sent * self.ranks[0] / self.sent[0])
        return int(_on_line(sent, self.sent, self.ranks))


def _ring(row: Mapping[str, Any]) -> float:
    """Bytes that a process sends for each byte of a message, among the processes that a line was counted for."""
    return float(row["dense_seconds"] * row["link_gbps"] * 1e9 / 8 / row["gradient_bytes"])


def _on_line(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Straight lines through points of rising x, of which the first and the last go on beyond them."""
    if len(xs) == 1:
        return ys[0]
    end = min(max(bisect(xs, x), 1), len(xs) - 1)
    slope = (ys[end] - ys[end - 1]) / (xs[end] - xs[end - 1])
    return ys[end] + (x - xs[end]) * slope
