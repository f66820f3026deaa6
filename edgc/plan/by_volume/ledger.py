"""What a run has sent of its volume, and what each step may send of the rest."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from edgc.byte_counts import ByteCount
from edgc.plan.observation import WindowObservation

MIN_WINDOWS = 20  # of a run, at least
LEAST_RATE = 0.2  # of the largest learning rate: below it the budget of a step does not fall further


@dataclass
class Counts:
    """Bytes as counted so far.

    ``outside_budget``: of steps in which nothing was to be compressed. ``sent_by_relief``: what relief has taken, which
    is no part of the budget either.
    """

    run: ByteCount = ByteCount()
    outside_budget: ByteCount = ByteCount()
    sent_by_relief: float = 0.0


@dataclass(frozen=True)
class StepBytes:
    """Bytes of a step, as counted: those of its budget, and those that relief adds to them."""

    by_budget: float
    by_relief: float

    @property
    def total(self) -> float:
        return self.by_budget + self.by_relief


class Ledger:
    """Counts a run's bytes against its volume, and gives each step its part.

    Args:
        volume: bytes of an all-reduce of all gradients in fp32 over those of the run.
        iterations: of the run.
        fp32_bytes: of a step's messages in fp32; ``uncompressed``: of those of a step in which nothing is compressed;
            ``least``: of those of a step in which every parameter has its smallest choice.
        weights: of a byte in each iteration (None: always the same).
        window: iterations between two decisions.
    """

    def __init__(
        self,
        volume: float,
        iterations: int,
        fp32_bytes: float,
        uncompressed: float,
        least: float,
        weights: Sequence[float] | None = None,
        window: int = 1,
    ):
        self.volume, self.iterations, self.window = volume, iterations, window
        self.fp32_bytes, self.uncompressed, self.least = fp32_bytes, uncompressed, least
        each = np.ones(iterations) if weights is None else np.asarray(weights)
        # of a step in the window from an iteration on, its share of the weight of itself and all later ones
        before = np.concatenate([[0.0], np.cumsum(each)])
        ends = np.minimum(np.arange(iterations) + window, iterations)
        self.share = (before[ends] - before[:-1]) / (ends - np.arange(iterations)) / (before[-1] - before[:-1])
        self.weights = each / each.mean()
        self.begins = self.counted_to = 0  # iterations: the first that the volume is of, and the first not counted yet
        self.before = ByteCount()  # what the run had sent when the volume began
        self.counts = Counts()  # since then
        self.granted: StepBytes | None = None  # to the steps of this window; None: no relief
        # whether a resume during a trial has made it unknown how many steps of this window the host summed
        self.host_steps_unknown = False
        # whether this window is no part of the budget, because a resume has changed who sums, or how, or because the
        # link asks for what it sends
        self.window_outside_budget = False
        self.per_step: float | None = None  # bytes that the last window took, in the unit of ``fp32_bytes``
        # how many times more than predicted a step takes: padding, samples, the host's reduce-scatter; None: not known
        self.overhead: float | None = None

    def begin(self, iteration: int, sent: ByteCount) -> None:
        """The volume is that of the steps from ``iteration`` on. ``sent``: bytes of the run before."""
        self.begins = self.counted_to = iteration
        self.before = sent

    def observe(self, window: WindowObservation, outside_budget: bool) -> None:
        """Take in a window. ``outside_budget``: the host has summed because nothing was to be compressed."""
        counts, run = self.counts, window.bytes - self.before
        taken, counts.run = run - counts.run, run
        host_step_share, sent_by_host, outside = window.host_step_share, window.sent_by_host, outside_budget
        if self.window_outside_budget:
            host_step_share, sent_by_host, outside = 1.0, taken.sent, True
        if outside:
            counts.outside_budget += ByteCount(sent_by_host, host_step_share * taken.host, host_step_share * taken.fp32)
        if self.granted is not None and self.fp32_bytes and not self.host_steps_unknown:
            # steps may have taken less than relief offers, at first from their budget
            steps = (1 - host_step_share) * taken.fp32 / self.fp32_bytes
            beyond = taken.sent - sent_by_host - max(self.granted.by_budget, 0.0) * steps
            counts.sent_by_relief += min(max(beyond, 0.0), self.granted.by_relief * steps)
        # of a window with both it is not known: the first of the host's steps also sends errors
        unknown = host_step_share or self.host_steps_unknown or not taken.fp32 > 0
        unknown = unknown or not self.fp32_bytes  # without messages nothing is learnt
        self.host_steps_unknown = self.window_outside_budget = False
        self.per_step = None if unknown else taken.sent / taken.fp32 * self.fp32_bytes

    def learn(self, predicted: float) -> None:
        """Compare the bytes of the last window's steps with those that were ``predicted`` of them."""
        if self.per_step is not None:
            # a part of the first window may have been warm-up
            self.overhead = 1.0 if self.overhead is None else self.per_step / predicted

    def step(self, iteration: int, relief: float) -> StepBytes:
        """Bytes of each step from ``iteration`` on. ``relief``: how many times its budget a step gets."""
        by_budget = self._by_budget(iteration)
        if relief == 1:
            return StepBytes(by_budget, 0.0)
        # what the budget lacks of a usual step, because earlier ones have taken more, is relief as well
        usual = self.fp32_bytes / self.volume * float(self.weights[min(iteration, self.iterations - 1)])
        return StepBytes(by_budget, max(usual - by_budget, 0.0) + (relief - 1) * usual)

    def _by_budget(self, iteration: int) -> float:
        """What the budget has for each step of the window from ``iteration`` on; below 0 if more is spent already."""
        unspent = self._unspent(iteration)
        by_weight = unspent * float(self.share[min(iteration, self.iterations - 1)])
        # what later steps need at least is not for the steps of this window
        remaining = max(self.iterations - iteration, 1)
        least = (self.overhead or 1.0) * self.least
        spare = (unspent - least * remaining) / min(remaining, max(self.iterations / MIN_WINDOWS, self.window))
        return min(by_weight, least + spare) if spare > 0 else by_weight

    def _unspent(self, iteration: int) -> float:
        """What is left of the run's budget at ``iteration``. The host's own steps, where nothing was to be compressed,
        are no part of it, nor of the steps that it is for.
        """
        counts, done = self.counts, (iteration - self.begins) * self.fp32_bytes
        sent, fp32 = counts.run.sent, counts.run.fp32
        if not fp32:  # nothing is counted yet: what the warm-up takes
            sent, fp32 = (iteration - self.begins) * self.uncompressed, done
        outside = counts.outside_budget.fp32 / fp32 * done if fp32 else 0.0
        spent = (sent - counts.outside_budget.sent - counts.sent_by_relief) / fp32 * done if fp32 else 0.0
        return (self.fp32_bytes * (self.iterations - self.begins) - outside) / self.volume - spent

    def exhausted(self) -> bool:
        """Whether the steps after the last window need more than the budget has left, whatever they choose."""
        iteration = self.counted_to
        return self._unspent(iteration) < (self.overhead or 1.0) * self.least * (self.iterations - iteration)

    def grant(self, iteration: int, relief: float) -> None:
        """Steps from ``iteration`` on get what ``step`` says."""
        step = self.step(iteration, relief)
        self.granted = step if step.by_relief else None

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            "begins": self.begins,
            "counted_to": self.counted_to,
            "before": asdict(self.before),
            "counts": asdict(self.counts),
            "granted": self.granted and asdict(self.granted),
            "overhead": self.overhead,
            "host_steps_unknown": self.host_steps_unknown,
            "window_outside_budget": self.window_outside_budget,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken. Raises ValueError if it is of another release."""
        own, counts = self.state_dict(), state["counts"]
        if state.keys() != own.keys() or counts.keys() != own["counts"].keys():
            raise ValueError("the budget's counts are of another release of EDGC")
        self.begins, self.counted_to, self.before = state["begins"], state["counted_to"], ByteCount(**state["before"])
        self.counts = Counts(
            ByteCount(**counts["run"]), ByteCount(**counts["outside_budget"]), counts["sent_by_relief"]
        )
        self.granted, self.overhead = state["granted"] and StepBytes(**state["granted"]), state["overhead"]
        self.host_steps_unknown, self.window_outside_budget = (
            state["host_steps_unknown"],
            state["window_outside_budget"],
        )


def byte_weights(learning_rate: Callable[[int], float], iterations: int, power: float) -> Sequence[float]:
    """The weight of a byte in each iteration: this power of the learning rate, of small ones that of ``LEAST_RATE``.

    What a step's noise costs goes with the learning rate L. A step at rank r costs about L r^-a, a the steepness of the
    spectrum; the sum over the run is least if r goes with L^(1 / (1 + a)). While the rate still rises, the largest of
    the rates ahead counts: that run lost less where this was tried (docs/frontier/tried.md, short runs).
    """
    rates = [learning_rate(iteration) for iteration in range(iterations)]
    ahead = list(accumulate(reversed(rates), max))[::-1]
    largest = max(rates, default=0.0) or 1.0
    return [max(rate / largest, LEAST_RATE) ** power for rate in ahead]
