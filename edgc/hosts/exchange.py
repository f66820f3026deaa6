"""The exchange at the end of a window: what all processes have seen in, the next plan of process 0 out."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

from edgc.byte_counts import ByteCount, RunBytes
from edgc.comm.objects import ProcessGroup, broadcast_object, gather_objects
from edgc.hosts.stage import Stage
from edgc.hosts.steps import StepDriver
from edgc.observe.averages import median_or_nan
from edgc.observe.window import Boundary, MessageWindow, StageWindow, WindowReport
from edgc.plan.controller import Controller
from edgc.plan.loss_watch import mean_loss
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


@dataclass(frozen=True)
class ProcessWindow:
    """What one process has seen in a window, or all together. ``bytes``: so far; ``sent_by_host``: of the gradients
    that the host has summed in the window. ``loss``: the mean training loss; NaN on processes that do not know it.
    """

    stages: Sequence[StageWindow]
    messages: Sequence[MessageWindow]
    bytes: RunBytes
    sent_by_host: float
    loss: float = math.nan

    @classmethod
    def merge(cls, processes: "Sequence[ProcessWindow]") -> "ProcessWindow":
        """Stages and boundaries in order, each once; means of the bytes over the processes."""
        stages, boundaries = defaultdict(list), defaultdict(list)
        for process in processes:
            for stage in process.stages:
                stages[stage.stage].append(stage)
            for message in process.messages:
                boundaries[message.boundary].append(message)
        return cls(
            stages=[StageWindow.merge(stages[key]) for key in sorted(stages)],
            messages=[MessageWindow.merge(boundaries[key]) for key in sorted(boundaries)],
            bytes=RunBytes.mean([process.bytes for process in processes]),
            sent_by_host=fmean(process.sent_by_host for process in processes),
            loss=mean_loss([process.loss for process in processes]),
        )


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
        sent = gather_objects(self._bytes_of_stages().planned, self.group)
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
        steps, loss = driver.take_window(), driver.window_loss()
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
        own = ProcessWindow(windows, sent, counts, by_host, loss)
        everywhere = gather_objects(own, self.group)
        report = None
        if self.controller is not None:
            window = ProcessWindow.merge(everywhere)
            if decide:
                before_decision()
                self._decide(self.controller, completed, window, steps.host_step_share)
            report = WindowReport(
                iteration=completed,
                ranks=driver.current.usual_ranks,
                plan=self.controller.plan,
                stages=tuple(window.stages),
                step_seconds=median_or_nan(steps.seconds),
                loss=window.loss,
                bytes=window.bytes,
                message_ranks=driver.current.message_ranks,
                message_plan=None if self.message_controller is None else self.message_controller.plan,
                messages=tuple(window.messages),
                costs=tuple(self.controller.times.costs),
            )
        shared: WindowReport = broadcast_object(report, self.group)
        driver.adopt(shared.plan, shared.message_plan)
        return shared

    def _decide(self, controller: Controller, completed: int, window: ProcessWindow, host_step_share: float) -> None:
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
            for s in window.stages
        ]
        usual_ranks, seconds_by = self.driver.current.usual_ranks, self.driver.seconds_by
        gradients, by_host = window.bytes.planned, window.sent_by_host
        controller.observe(
            WindowObservation(observations, usual_ranks, gradients, host_step_share, by_host, seconds_by, window.loss)
        )
        controller.decide(completed)
        if self.message_controller is not None:
            of_messages = [StageObservation(message.entropy) for message in window.messages]
            self.message_controller.observe(WindowObservation(of_messages, loss=window.loss))
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
