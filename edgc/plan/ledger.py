"""What a run has sent of its volume, and what each step may send of the rest."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

WINDOWS = 20  # of a run, at least


@dataclass
class Counts:
    """Bytes as counted so far: of the run, of the host's own way, and of an all-reduce in fp32.

    ``idle``: of steps in which nothing was to be compressed, bytes of an all-reduce in fp32; ``sent_idle``: those that
    were sent. ``sent_beyond``: what relief has taken beyond the budget.
    """

    sent: float = 0.0
    by_host: float = 0.0
    in_fp32: float = 0.0
    idle: float = 0.0
    sent_idle: float = 0.0
    sent_beyond: float = 0.0


class Ledger:
    """Counts a run's bytes against its volume, and gives each step its part.

    Args:
        volume: bytes of an all-reduce of all gradients in fp32 over those of the run.
        iterations: of the run.
        dense_bytes: of a step's messages in fp32; ``uncompressed``: of those of a step in which nothing is compressed;
            ``least``: of those of a step in which every parameter has its smallest choice.
        worth: what a byte is worth in each iteration (None: always the same).
        window: iterations between two decisions.
    """

    def __init__(
        self,
        volume: float,
        iterations: int,
        dense_bytes: float,
        uncompressed: float,
        least: float,
        worth: Sequence[float] | None = None,
        window: int = 1,
    ):
        self.volume, self.iterations = volume, iterations
        self.dense_bytes, self.uncompressed, self.least = dense_bytes, uncompressed, least
        each = np.ones(iterations) if worth is None else np.asarray(worth)
        # of a step in the window from an iteration on, its share of what it and all later ones are worth
        before = np.concatenate([[0.0], np.cumsum(each)])
        ends = np.minimum(np.arange(iterations) + window, iterations)
        self.share = (before[ends] - before[:-1]) / (ends - np.arange(iterations)) / (before[-1] - before[:-1])
        self.worth = each / each.mean()
        self.counts = Counts()
        self.beyond = 0.0  # the share that relief has of the bytes of this window's steps
        # whether a resume in this window has hidden which of its steps the host has summed; whether it has changed who
        # sums, or how: then the window is no part of the budget
        self.mixed = self.apart = False
        self.per_step: float | None = None  # bytes that the last window took, in the unit of ``dense_bytes``
        # how many times more than predicted a step takes: padding, samples, the host's reduce-scatter; None: not known
        self.overhead: float | None = None

    def observe(self, sent: float, by_host: float, in_fp32: float, host_share: float, idle: bool) -> None:
        """Take in a window: bytes of the run so far, of the host's own way, and of an all-reduce in fp32.

        ``host_share``: of the steps of this window, those that the host has summed; ``idle``: because nothing was to be
        compressed.
        """
        if self.apart:
            host_share, idle = 1.0, True
        counts = self.counts
        taken, of_host, fp32 = sent - counts.sent, by_host - counts.by_host, in_fp32 - counts.in_fp32
        counts.sent, counts.by_host, counts.in_fp32 = sent, by_host, in_fp32
        # the host may send more than its own way does, as for a tied embedding that EDGC sums apart
        taken_by_host = taken if host_share == 1 else host_share * of_host
        if idle:
            counts.idle += host_share * fp32
            counts.sent_idle += taken_by_host
        counts.sent_beyond += self.beyond * (taken - taken_by_host)
        # of a window with both it is not known: the first of the host's steps also sends errors
        unknown = host_share or self.mixed or not fp32 > 0 or not self.dense_bytes  # without messages nothing is learnt
        self.mixed = self.apart = False
        self.per_step = None if unknown else taken / fp32 * self.dense_bytes

    def learn(self, predicted: float) -> None:
        """Compare the bytes of the last window's steps with those that were ``predicted`` of them."""
        if self.per_step is not None:
            # a part of the first window may have been warm-up
            self.overhead = 1.0 if self.overhead is None else self.per_step / predicted

    def step(self, iteration: int, relief: float) -> tuple[float, float]:
        """Bytes of each step from ``iteration`` on, as counted: by the budget, and what relief adds to them.

        ``relief``: how many times its budget a step gets.
        """
        counts = self.counts
        sent, dense = counts.sent, counts.in_fp32
        if not dense:  # nothing is counted yet: what the warm-up takes
            sent, dense = iteration * self.uncompressed, iteration * self.dense_bytes
        done = iteration * self.dense_bytes
        # the host's own steps are no part of the budget, nor of the steps that it is for
        idle = counts.idle / dense * done if dense else 0.0
        spent = (sent - counts.sent_idle - counts.sent_beyond) / dense * done if dense else 0.0
        unspent = (self.dense_bytes * self.iterations - idle) / self.volume - spent
        share = float(self.share[min(iteration, self.iterations - 1)])
        remaining = max(self.iterations - iteration, 1)
        # what later steps need at least is not for the steps of this window
        least = (self.overhead or 1.0) * self.least
        beyond = (unspent - least * remaining) / min(remaining, self.iterations / WINDOWS)
        each = min(unspent * share, least + beyond) if beyond > 0 else unspent * share
        if relief == 1:
            return each, 0.0
        plain = self.dense_bytes / self.volume * float(self.worth[min(iteration, self.iterations - 1)])
        return each, max(plain - each, 0.0) + (relief - 1) * plain

    def grant(self, iteration: int, relief: float) -> None:
        """Steps from ``iteration`` on get what ``step`` says."""
        by_budget, more = self.step(iteration, relief)
        self.beyond = more / (max(by_budget, 0.0) + more) if more else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            "counts": vars(self.counts).copy(),
            "beyond": self.beyond,
            "overhead": self.overhead,
            "mixed": self.mixed,
            "apart": self.apart,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken. Raises ValueError if it is of another release."""
        if state.keys() != self.state_dict().keys() or state["counts"].keys() != {one.name for one in fields(Counts)}:
            raise ValueError("the budget's counts are of another release of EDGC")
        self.counts = Counts(**state["counts"])
        self.beyond, self.overhead = state["beyond"], state["overhead"]
        self.mixed, self.apart = state["mixed"], state["apart"]
