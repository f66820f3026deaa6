"""What a run tells the user: printed lines, TensorBoard, and the event log."""

import math
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from typing import Any

from edgc import __version__
from edgc.byte_counts import ByteCount
from edgc.comm.objects import ProcessGroup, process, processes
from edgc.config import EDGCConfig, RankPolicy
from edgc.hosts import tensorboard, wording
from edgc.hosts.user_warnings import warn, warn_of_missed_volume, warn_of_warmup
from edgc.observe.events import EventLog
from edgc.observe.window import WindowReport
from edgc.plan.controller import Controller
from edgc.plan.rank_plan import RankPlan
from edgc.plan.run import Run
from edgc.plan.run_plan import RunPlan
from edgc.plan.stages import StageKey
from edgc.plan.times.comm_cost import StageCost
from edgc.plan.times.gather_times import GatherTimes
from edgc.printing import print_lines


class Reporter:
    """Prints and logs on process 0 of a group. Remembers what the next window is compared with.

    Args:
        run: what is trained; its ``value_bytes`` are those of plain training.
        log_interval: iterations between two lines of progress; 0: none.
        scalars: gives a writer with TensorBoard's ``add_scalar``, or None where this process has none.
        packages: whose versions the log names, beside Python's and torch's.
        group: the processes of the run; None: all.
    """

    def __init__(
        self,
        config: EDGCConfig,
        run: Run,
        log_interval: int = 0,
        scalars: Callable[[], Any] = lambda: None,
        packages: Sequence[str] = (),
        group: ProcessGroup | None = None,
    ):
        self.config, self.run = config, run
        self.log_interval, self.scalars, self.packages = log_interval, scalars, packages
        self.group, self.prints = group, process(group) == 0
        self.parameters: list[int] = []  # of each stage
        self._before = RankPlan(version=0, first_iteration=0, ranks=())  # the plan of the window before
        self._before_volume = ByteCount()  # of the run before the steps that its volume is of
        self._cosines: dict[StageKey, list[float]] = {}  # of each stage those of its windows since the start
        self._unbudgeted = False  # whether the link has made some steps send more than the volume, trials aside
        self.events = EventLog(config.job.log_dir if self.prints else None)

    def start(
        self,
        plan: RunPlan,
        messages: EDGCConfig | None = None,
        message_costs: Mapping[int, StageCost] | None = None,
        embedding_bytes: int | None = None,
        embedding_apart: str = "",
        weight_times: GatherTimes | None = None,
    ) -> None:
        """What is compressed, what stays dense and why.

        ``messages``: how those between stages are, if any; ``message_costs``: by the stage that sends them;
        ``embedding_bytes``: of the gradient of a tied embedding whose copies the host itself sums, if there is one;
        ``embedding_apart``: why EDGC cannot sum them; ``weight_times``: by which it was decided whether updated weights
        are rounded, None where nothing was.
        """
        pipeline = self.config.pipeline
        self._before, self._unbudgeted = replace(self._before, by_host=plan.starts_by_host), plan.rounds
        self.parameters = [stage.elements for stage in plan.stages]
        lines = wording.start_lines(plan, self.run.value_bytes)
        if embedding_bytes is not None:
            lines.append(wording.embedding_line(embedding_bytes, embedding_apart, plan.config))
        if messages is not None:
            lines.append(wording.messages_line(pipeline.messages.which, messages))
        if weight_times is not None or self.config.formats.weights.format is not None:
            lines.append(wording.weights_line(self.config.formats.weights.format, weight_times))
        self._print(lines)
        apart = None if embedding_bytes is None else "apart"
        self.events.write(
            "start",
            config=self.config.flat(),
            iterations=self.run.iterations,
            world_size=processes(self.group),
            gradient_bytes=self.run.value_bytes,
            embedding_sum="fused" if pipeline.fuse_embedding_sync else apart,
            stages=[stage.to_event() for stage in plan.stages],
            messages=None if messages is None else {"engine": messages.engine, **messages.ranks.resolved},
            message_costs={str(sender): asdict(cost) for sender, cost in (message_costs or {}).items()},
            weight_times=None if weight_times is None else asdict(weight_times),
            versions={
                "edgc": __version__,
                "python": platform.python_version(),
                **{package: version(package) for package in ("torch", *self.packages, "numpy")},
            },
        )

    def resume(self, plan: RankPlan, controller: Controller | None) -> None:
        """A run goes on with this plan, whose trial was reported before. ``controller``: on process 0."""
        self._before = plan
        budget = None if controller is None else controller.budget
        if budget is not None:
            self._unbudgeted = budget.rounds or budget.ledger.counts.outside_budget.fp32 > 0
            self._before_volume = budget.ledger.before

    def progress(self, completed: int, step_seconds: Sequence[float]) -> None:
        """Say at the log interval how far the run is, how fast, and how long it still takes."""
        if self.log_interval and completed % self.log_interval == 0 and step_seconds:
            self._print([wording.progress_line(completed, self.run.iterations, step_seconds)])

    def window(self, report: WindowReport, last: bool) -> None:
        """The lines of each stage and of what is new, the scalars, and the events."""
        plan, before = report.plan, self._before
        done = f"{report.iteration}/{self.run.iterations}"
        self._print(f"{done} | {line}" for line in wording.window_lines(report, before, self.config))
        self._unbudgeted |= before.by_host or plan.by_host
        for seen in report.stages:
            if math.isfinite(seen.cosine):
                self._cosines.setdefault(seen.stage, []).append(seen.cosine)
        if last:
            self.end(report)
            if report.iteration >= self.run.iterations:
                self._warn_at_end(report, by_host=before.by_host or plan.by_host)
        if writer := self.scalars():
            for tag, value in tensorboard.scalars(report):
                writer.add_scalar(tag, value, report.iteration)
        self.events.write("window", last=last, **report.to_event())
        rises, rose = plan.loss_rise > 0, before.loss_rise > 0
        begins = plan.relief > before.relief or rises > rose
        if (plan.relief, rises) != (before.relief, rose):
            self.events.write("guard", iteration=report.iteration, relief=plan.relief, loss_rise=plan.loss_rise)
            text = wording.guard_text(before, plan, self.config)
            if begins:
                warn(f"iteration {done}: {text}", self.group)
            else:
                self._print([f"iteration {done}: {text}"])
        self._before = plan

    def end(self, report: WindowReport) -> None:
        """The sums of a run that ends with this window."""
        self._print(wording.end_lines(report, self.run, self.parameters, self._cosines))

    def _warn_at_end(self, report: WindowReport, by_host: bool) -> None:
        """Warn of what a whole run has not done. ``by_host``: in its last window the host has summed."""
        volume = self.config.ranks.volume
        if volume is not None and not self._unbudgeted:
            warn_of_missed_volume(volume, report.bytes.planned - self._before_volume, self.group)
        if self.config.rank_policy is RankPolicy.ENTROPY and not by_host:
            warn_of_warmup(report, self.config, self.group)

    def _print(self, lines: Iterable[str]) -> None:
        if self.prints:
            print_lines(lines)
