"""Whether compressed steps are faster than those with the host's own sum: tried in training, by the time of steps.

A probe times reductions alone. In training they share cores, caches and the network with all else, and overlap hides a
part of them. So a few steps of the run go the other way, and whole steps are compared.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

from edgc.byte_counts import ByteCount

# Steps of a trial. The first one is not timed: it also sends errors, or begins to compress anew. They are few because
# each may cost time or bytes. Not tuned.
TRIAL_STEPS = 3
LEAST_USUAL_STEPS = 5  # that a trial is compared with, so that one slow step does not move their median; not tuned
COMPRESS_BELOW = 0.98  # of the time of the host's steps, which compressed ones may take
COMPRESS_AGAIN_BELOW = 0.95  # the same after they were too slow
OUTLIER = 1.5  # times the shortest step of a trial: one that takes longer has waited for something else
BEYOND_DOUBT = 0.5  # of the time of the host's reduction: compression that takes less needs no trial
# Times the seconds of a reduction after the last trial, and its seconds per byte as well: another link. A plan that
# sends less takes fewer seconds, but not fewer per byte.
LINK_CHANGE = 1.25
# Of a run, what trials may cost: of its time, and after the first trial of its steps. Trials that find nothing should
# not count beside what compression saves. Not tuned.
LARGEST_SHARE_OF_RUN = 0.005
# Of the bytes that a volume allows a run, what steps of trials may take in which the host sums. In a short run three of
# them would leave little for all others. Not tuned.
LARGEST_SHARE_OF_VOLUME = 0.3
SPREAD_OF_NORMAL = 1.48  # the standard deviation of normal values over the median of their distances from their median


def host_sums_next(compressed: float, host: float, spread: float, by_host: bool) -> bool:
    """Whether the host sums from now on.

    ``compressed`` and ``host``: seconds of a step in which EDGC compresses, and in which the host sums. ``spread``: the
    standard deviation of a step, in seconds. ``by_host``: who sums now stays, unless the other is faster by more than
    a margin and the spread.
    """
    if by_host:
        return compressed > COMPRESS_AGAIN_BELOW * host - spread
    return compressed > COMPRESS_BELOW * host + spread


class Trials:
    """Decides who sums the gradients: EDGC, or the host (``by_host``).

    Args:
        iterations: of the run.
        host_seconds: of the host's own reduction, as the probe has timed it.
        overlapped: reductions run beside the backward pass, which hides an unknown part of them.
        by_host: the run begins with the host's sums: by the probe no rank is faster.
        volume_steps: as many steps of the host's sums take all bytes that a volume allows the run; infinite without.

    A ``trial`` is the iterations (first, first after) in which the other one sums. ``due``: one is wanted.
    ``measured``: seconds of a compressed step and of the host's in the last trial; empty before. Where the other one
    was faster, but by less than steps vary, another trial is due, and the mean of them counts. ``share_of_run``: of the
    iterations, those whose bytes the volume bounds.
    """

    def __init__(
        self,
        iterations: int,
        host_seconds: float,
        overlapped: bool,
        by_host: bool = False,
        volume_steps: float = math.inf,
    ):
        self.iterations, self.host_seconds, self.overlapped = iterations, host_seconds, overlapped
        self.volume_steps, self.share_of_run = volume_steps, 1.0
        self.by_host, self.due = by_host, False
        self.trial: tuple[int, int] | None = None
        self.measured: tuple[float, ...] = ()
        self._undecided: list[tuple[float, float]] = []  # what the last trials have measured that decided nothing
        self.host_steps = 0  # of trials in which the host has summed what would have been compressed
        self.spent = 0.0  # seconds by which steps of trials were longer than usual ones
        self._reduction = self._share = math.nan  # seconds after the last trial, and bytes over those of the host
        self._compared = True  # whether what the next window shows is compared with the last trial, if there was one
        self._counted = ByteCount()  # of gradients of the run so far
        self._step = self._spread = math.nan  # seconds of a step, and the standard deviation of a step
        self._enough_steps = False  # whether enough steps have been timed since a trial was last begun or ended

    @property
    def largest_host_steps(self) -> float:
        """How many steps of the host's sum trials may take, so that a volume keeps enough bytes for all others."""
        return LARGEST_SHARE_OF_VOLUME * self.volume_steps * self.share_of_run

    def observe(self, steps: Mapping[bool, Sequence[float]], reduce_seconds: float, counted: ByteCount) -> float:
        """Take in a window. Returns how many seconds more, or fewer, reductions take if the link has changed; else 0.

        ``steps``: seconds of steps after the warm-up, by whether the host has summed, since a trial was last begun or
        ended. ``reduce_seconds``: of the reductions of a step, in this window. ``counted``: bytes of gradients of the
        run so far.
        """
        taken, self._counted = counted - self._counted, counted
        share = taken.sent / taken.host if taken.sent > 0 and taken.host > 0 else math.nan
        usual, tried = steps[self.by_host], steps[not self.by_host]
        self._enough_steps = len(usual) >= LEAST_USUAL_STEPS
        if not self._enough_steps:
            return 0.0
        self._step = median(usual)
        self._spread = SPREAD_OF_NORMAL * median(abs(step - self._step) for step in usual)
        if self.trial is not None:
            if len(tried) >= TRIAL_STEPS - 1:
                usually, once = median(usual), median(step for step in tried if step <= OUTLIER * min(tried))
                self._judge(*((once, usually) if self.by_host else (usually, once)))
        elif not math.isfinite(self._reduction):
            self._reduction, self._share = reduce_seconds, share
            hidden = self.overlapped and self.host_seconds < self._step  # it may be
            first = not self.measured and not self.by_host
            # also where neither was timed
            self.due |= first and (hidden or not reduce_seconds <= BEYOND_DOUBT * self.host_seconds)
            compared, self._compared = self._compared, True
            if self.measured and compared:  # the other one sums from the last trial on: has the link changed since?
                longer = self._step - self.measured[self.by_host]
                before = reduce_seconds - longer
                ratio = math.inf if before <= 0 else reduce_seconds / before
                if abs(longer) > self._spread and self._changed(reduce_seconds, ratio):
                    self._ask_anew()
                    return reduce_seconds - max(before, 0.0)
        elif self._changed(reduce_seconds, reduce_seconds / self._reduction, share / self._share):
            before = self._reduction
            self._ask_anew()
            self._reduction, self._share = reduce_seconds, share
            return reduce_seconds - before
        return 0.0

    def compress_anew(self) -> None:
        """Gradients are compressed in another way from now on: its time says nothing of the link."""
        self._reduction, self._compared = math.nan, False
        self._undecided = []

    def _ask_anew(self) -> None:
        """The link has changed: earlier trials say nothing of it."""
        self.due, self._undecided = True, []

    def _changed(self, reduce_seconds: float, seconds: float, bytes_sent: float = math.nan) -> bool:
        """Whether reductions say that the link is another one, on which the other may be faster. ``seconds`` and
        ``bytes_sent`` are over those after the last trial.
        """
        # the most that compression could save of a step is all of the host's reduction
        if self.by_host and reduce_seconds <= (1 - COMPRESS_AGAIN_BELOW) * self._step:
            return False
        ratios = (seconds, seconds / bytes_sent) if math.isfinite(bytes_sent) else (seconds,)
        slower, faster = min(ratios) >= LINK_CHANGE, max(ratios) <= 1 / LINK_CHANGE
        return slower or (faster and not self.by_host)

    def _judge(self, compressed: float, host: float) -> None:
        usual, tried = (host, compressed) if self.by_host else (compressed, host)
        self.spent += TRIAL_STEPS * max(tried - usual, 0.0)
        self.host_steps += 0 if self.by_host else TRIAL_STEPS
        self._undecided.append((compressed, host))
        compressed, host = (fmean(steps) for steps in zip(*self._undecided, strict=True))
        before, spread = self.by_host, self._spread / math.sqrt(len(self._undecided))
        self.by_host = host_sums_next(compressed, host, spread, before)
        undecided = self.by_host == before != host_sums_next(compressed, host, 0.0, before)
        self.measured, self.trial, self.due = (compressed, host), None, undecided
        if not undecided:
            self._undecided = []
        self._compared = True
        if self.by_host != before:
            self._reduction = math.nan

    def decide(self, iteration: int) -> None:
        """Set a trial that begins soon after ``iteration``, if one is due, affordable, and ends in time."""
        first, last = iteration + 1, iteration + 1 + TRIAL_STEPS
        if self.trial is not None and self.trial[1] <= iteration and self._enough_steps:
            self.trial, self.due = None, True  # the host has skipped steps of it
        if not self.due or self.trial is not None or last + LEAST_USUAL_STEPS > self.iterations:
            return
        affordable = self.spent < LARGEST_SHARE_OF_RUN * self.iterations * self._step
        if not self.by_host:  # each takes bytes as well
            most = LARGEST_SHARE_OF_RUN * self.iterations if self.measured else math.inf
            affordable &= self.host_steps + TRIAL_STEPS <= min(most, self.largest_host_steps)
        if affordable:
            self.trial = (first, last)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers. A trial that is under way is not kept: it will be due again."""
        return {
            "host_seconds": self.host_seconds,
            "by_host": self.by_host,
            "due": self.due or self.trial is not None,
            "measured": list(self.measured),
            "undecided": [list(steps) for steps in self._undecided],
            "host_steps": self.host_steps,
            "spent": self.spent,
            "counted": asdict(self._counted),
            "reduction": self._reduction,
            "share": self._share,
            "compared": self._compared,
        }

    def load_state_dict(self, state: Mapping[str, Any], timed_anew: bool = False) -> None:
        """Go on where ``state_dict`` was taken, perhaps on another link. ``timed_anew``: this run has timed its own."""
        self.by_host, self.due = state["by_host"], state["due"]
        self.measured, self.host_steps = tuple(state["measured"]), state["host_steps"]
        self.spent, self._compared = state["spent"], state["compared"]
        self.trial, self._counted = None, ByteCount(**state["counted"])
        if timed_anew:  # steps of before are of another link, of which the times that were taken now know
            self._compared, self.due, self._undecided = False, self.due or bool(self.measured), []
        else:  # another link is then seen by its reductions
            self._undecided = [tuple(steps) for steps in state["undecided"]]
            self.host_seconds = state["host_seconds"]
            self._reduction, self._share = state["reduction"], state["share"]
