"""The exchange at the end of a window: what all processes have seen in, the next plan of process 0 out."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, Protocol

from edgc.byte_counts import ByteCount, RunBytes
from edgc.comm.objects import ProcessGroup, broadcast_object, gather_objects
from edgc.hosts.stage import Stage
from edgc.hosts.steps import StepDriver
from edgc.observe.window import (
    Boundary,
    MessageWindow,
    StageWindow,
    WindowReport,
    median_or_nan,
)
from edgc.plan.controller import Controller
from edgc.plan.observation import StageObservation, WindowObservation
from edgc.plan.stages import StageKey, StageKind
from edgc.timing import Spans


class MessageTraffic(Protocol):
    """What is seen of messages between pipeline stages, where a host compresses them."""

    boundaries: list[Boundary]

    def take_window(self) -> list[MessageWindow]:
        """What this process has sent since the last call."""

    def byte_count(self) -> ByteCount:
        """Bytes so far."""


class WindowExchange:
    """One exchange a window among the processes of ``group`` (None: all).

    ``controller`` and ``message_controller`` are on process 0 of the group alone. ``backward``: the time that
    micro-batches take.
    """

    def __init__(
        self,
        driver: StepDriver,
        stages: Sequence[Stage],
        backward: Spans,
        controller: Controller | None,
        messages: MessageTraffic | None = None,
        message_controller: Controller | None = None,
        group: ProcessGroup | None = None,
    ):
        self.driver, self.stages, self.backward = driver, stages, backward
        self.controller, self.messages, self.message_controller = controller, messages, message_controller
        self.group = group

    def adopt_plans(self) -> None:
        """Take the plans of process 0's controllers."""
        controllers = self.controller, self.message_controller
        plans = [None if controller is None else controller.plan for controller in controllers]
        self.driver.adopt(*broadcast_object(plans, self.group))

    def resume(self, iteration: int) -> None:
        """Go on at ``iteration``, with what a checkpoint has given stages and controllers. A controller of gradients
        that does not go on where it had ended begins there.
        """
        sent = gather_objects(self._bytes_of_stages().gradients, self.group)
        if self.controller is not None and not self.controller.resumed:
            self.controller.begin(iteration, ByteCount.mean(sent))
        self.adopt_plans()

    def _bytes_of_stages(self) -> RunBytes:
        return sum((stage.byte_counts() for stage in self.stages), RunBytes())

    def exchange(self, completed: int, before_decision: Callable[[], None] = lambda: None) -> WindowReport:
        """Report what was seen since the last call; at the end of a window decide anew, and adopt what was decided.

        ``completed``: steps so far. ``before_decision`` is called on process 0 before its controllers take the window
        in.
        """
        driver = self.driver
        steps = driver.take_window()
        decide = driver.closes_window(completed - 1) and steps.count > 0  # after a window's end nothing is new
        seconds = median_or_nan(self.backward.take_seconds())
        windows = [
            stage.take_window(seconds if stage.key.kind is StageKind.LAYERS else math.nan) for stage in self.stages
        ]
        counts, sent = self._bytes_of_stages(), []
        if self.messages is not None:
            counts += RunBytes(messages=self.messages.byte_count())
            sent = self.messages.take_window()
        by_host = sum(stage.take_sent_by_host() for stage in self.stages)
        everywhere = gather_objects((windows, counts, sent, by_host), self.group)
        report = None
        if self.controller is not None:
            stages = _merged(windows for windows, *_ in everywhere)
            messages = _merged_messages(sent for _, _, sent, _ in everywhere)
            mean = RunBytes.mean([counts for _, counts, *_ in everywhere])
            if decide:
                before_decision()
                sent_by_host = fmean(one for *_, one in everywhere)
                self._decide(
                    self.controller, completed, stages, messages, mean.gradients, steps.host_step_share, sent_by_host
                )
            report = WindowReport(
                iteration=completed,
                ranks=driver.current.usual_ranks,
                plan=self.controller.plan,
                stages=stages,
                step_seconds=median_or_nan(steps.seconds),
                bytes=mean,
                message_ranks=driver.current.message_ranks,
                message_plan=None if self.message_controller is None else self.message_controller.plan,
                messages=messages,
                costs=tuple(self.controller.times.costs),
            )
        shared: WindowReport = broadcast_object(report, self.group)
        driver.adopt(shared.plan, shared.message_plan)
        return shared

    def _decide(
        self,
        controller: Controller,
        completed: int,
        stages: Sequence[StageWindow],
        messages: Sequence[MessageWindow],
        gradients: ByteCount,
        host_step_share: float,
        sent_by_host: float,
    ) -> None:
        ranks = self._gradient_message_ranks()
        observations = [
            StageObservation(
                entropy=s.entropy,
                reduce_seconds=s.reduce_seconds,
                micro_backward_seconds=s.micro_backward_seconds,
                message_rank=ranks.get(s.stage),
                energies=s.energies,
                noise={name: (seen.descent.noise, seen.energy) for name, seen in s.fidelity.items()},
                row_shares=s.row_shares,
            )
            for s in stages
        ]
        usual_ranks, seconds_by = self.driver.current.usual_ranks, self.driver.seconds_by
        controller.observe(
            WindowObservation(observations, usual_ranks, gradients, host_step_share, sent_by_host, seconds_by)
        )
        controller.decide(completed)
        if self.message_controller is not None:
            of_messages = [StageObservation(message.entropy) for message in messages]
            self.message_controller.observe(WindowObservation(of_messages))
            self.message_controller.decide(completed)

    def _gradient_message_ranks(self) -> dict[StageKey, int | None]:
        """The ranks at which stages have sent activation gradients to the one before, where low rank is asked for."""
        if self.messages is None:
            return {}
        return {
            StageKey(StageKind.LAYERS, boundary.sender): rank
            for boundary, rank in zip(self.messages.boundaries, self.driver.current.message_ranks, strict=True)
            if boundary.direction == "backward"
        }


def _merged(processes: Any) -> tuple[StageWindow, ...]:
    windows = [window for own in processes for window in own]
    keys = sorted({window.stage for window in windows})
    return tuple(StageWindow.merge([window for window in windows if window.stage == key]) for key in keys)


def _merged_messages(processes: Any) -> tuple[MessageWindow, ...]:
    windows = [window for own in processes for window in own]
    boundaries = sorted({window.boundary for window in windows})
    return tuple(MessageWindow.merge([window for window in windows if window.boundary == one]) for one in boundaries)
