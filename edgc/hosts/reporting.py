"""What the user sees: the start block, a line per stage and window, progress, TensorBoard, and the event log."""

import math
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from statistics import median
from typing import Any

import torch

from edgc import __version__
from edgc.comm.objects import ProcessGroup, process, processes
from edgc.compress.batch import triton_kernels
from edgc.config import EDGCConfig, flag
from edgc.observe.events import EventLog
from edgc.observe.fidelity import Fidelity
from edgc.observe.window import WindowReport
from edgc.plan.comm_cost import StageCost
from edgc.plan.controller import Controller
from edgc.plan.rank_plan import NO_RANK, RankPlan
from edgc.plan.run import Run, RunPlan
from edgc.plan.stages import StagePlan

MISSED = 0.97  # of its volume, which a run may miss without a word


class Reporter:
    """Prints and logs on process 0 of a group.

    Args:
        run: what is trained; its ``gradient_bytes`` are those of plain training.
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
        self.config, self.run, self.iterations = config, run, run.iterations
        self._spike = f"{config.study.spike_limit:g}"  # times the running norm
        self.log_interval, self.scalars, self.packages = log_interval, scalars, packages
        self.group, self.prints = group, process(group) == 0
        self._by_host = False  # in the plan of the window before
        self._unbudgeted = False  # whether the link has made some steps send more than the volume, trials aside
        self._tried: tuple[float, ...] = ()
        self._relief = 1.0
        self.events = EventLog(config.job.log_dir if self.prints else None)

    def start(
        self,
        plan: RunPlan,
        messages: EDGCConfig | None = None,
        message_costs: Mapping[int, StageCost] | None = None,
        embedding_bytes: int | None = None,
        embedding_apart: str = "",
    ) -> None:
        """What is compressed, what stays dense and why.

        ``messages``: how those between stages are, if any; ``message_costs``: by the stage that sends them;
        ``embedding_bytes``: of the gradient of a tied embedding whose copies the host itself sums, if there is one;
        ``embedding_apart``: why EDGC cannot sum them.
        """
        self._by_host, self._unbudgeted = plan.tries and not plan.compresses, plan.rounds
        self.parameters = [stage.selection.other_elements + stage.selection.matrix_elements for stage in plan.stages]
        lines = [f"engine {self.config.engine}: {self._policy(plan)}"]
        lines += [line for stage in plan.stages for line in self._described(stage)]
        if embedding_bytes is not None:
            what = f"by the host, counted, not compressed: {_bytes(embedding_bytes)} a step"
            why = f": {flag('fuse_embedding_sync')} {embedding_apart}" if embedding_apart else ""
            lines.append(f"tied embedding summed over first and last stage {what}{why}")
        if messages is not None:
            what = "gradients and activations" if self.config.pipeline.messages.which == "both" else "gradients"
            lines.append(f"{what} between stages: {_policy_of_messages(messages)}")
        self._print("\n".join(f"edgc | {line}" for line in lines))
        embedding_sum = None if embedding_bytes is None else "apart"
        if self.config.pipeline.fuse_embedding_sync:
            embedding_sum = "fused"
        self.events.write(
            "start",
            config=self.config.flat(),
            iterations=self.iterations,
            world_size=processes(self.group),
            gradient_bytes=self.run.gradient_bytes,
            embedding_sum=embedding_sum,
            stages=[
                {
                    "name": str(stage.key),
                    "matrices": [[matrix.name, matrix.rows, matrix.cols] for matrix in stage.selection.matrices],
                    "rest": [[parameter.name, parameter.elements, why] for parameter, why in stage.selection.others],
                    "cost": None if stage.cost is None else asdict(stage.cost),
                }
                for stage in plan.stages
            ],
            messages=None if messages is None else {"engine": messages.engine, **messages.ranks.settled},
            message_costs={str(sender): asdict(cost) for sender, cost in (message_costs or {}).items()},
            versions={
                "edgc": __version__,
                "python": platform.python_version(),
                **{package: version(package) for package in ("torch", *self.packages, "numpy")},
            },
        )

    def _policy(self, plan: RunPlan) -> str:
        """What sets the ranks, or how much is sent."""
        config, ranks = self.config, self.config.ranks
        if config.engine == "dense":
            return "dense all-reduce, counted"
        if ranks.volume is not None:
            if plan.rounds:
                return f"all gradients rounded, window {ranks.window}"
            how = f"{ranks.volume:g}x fewer bytes than an all-reduce in fp32, window {ranks.window}"
            return how + (", once compression is faster" if self._by_host else "")
        if not config.dynamic:
            what = "compressed" if ranks.fixed is None else f"rank {ranks.fixed}"
            return f"{what} after {100 * ranks.warmup_fraction:g}% of the run"
        aligned = "aligned" if ranks.align else "not aligned"
        return f"rank {ranks.rmin} to {ranks.largest}, window {ranks.window}, stages {aligned}"

    def _described(self, stage: StagePlan) -> Iterator[str]:
        """What of a stage is compressed, and in what the rest travels."""
        config, key, selection = self.config, stage.key, stage.selection
        value_bytes = self.run.gradient_bytes
        if stage.dense_because:
            yield f"{key} in {config.formats.dense_wire} throughout: {stage.dense_because}"
            return
        verb = "measured" if config.engine == "dense" else "compressed"
        noun = "matrices" if config.low_rank or config.engine == "dense" else "parameters"
        nbytes = _bytes(selection.matrix_elements * value_bytes)
        yield f"{key} {verb}: {len(selection.matrices)} {noun}, {nbytes} a step"
        count: Counter[str] = Counter()
        size: Counter[str] = Counter()
        for parameter, why in selection.others:
            count[why] += 1
            size[why] += parameter.elements * value_bytes
        how = config.formats.rest_wire if config.ranks.volume is None else "bits that the budget sets"
        for why, number in count.items():
            what = f"{number} parameter{'s' * (number > 1)}, {_bytes(size[why])} a step"
            yield f"{key} in {how}: {what}: {why}"

    def resume(self, plan: RankPlan, controller: Controller | None) -> None:
        """A run goes on with this plan, whose trial was reported before. ``controller``: on process 0."""
        self._by_host, self._tried, self._relief = plan.by_host, plan.tried, plan.relief
        budget = None if controller is None else controller.budget
        self._unbudgeted = budget is not None and (budget.rounds or budget.ledger.counts.idle > 0)

    def progress(self, completed: int, step_seconds: Sequence[float]) -> None:
        """At the log interval: how far, how fast, how long still."""
        if self.log_interval and completed % self.log_interval == 0 and step_seconds:
            pace = median(step_seconds)
            minutes, seconds = divmod(round((self.iterations - completed) * pace), 60)
            self._print(
                f"edgc | {completed}/{self.iterations} iterations | {pace:.3f} s/step | "
                f"{minutes} m {seconds:02d} s left"
            )

    def window(self, report: WindowReport, last: bool) -> None:
        """One line for each stage, the scalars, and the event."""
        lines = [*self._stage_lines(report), *self._trial_line(report.plan), *self._message_lines(report)]
        if report.pp_bytes_dense:
            sent, dense = _bytes(report.pp_bytes), _bytes(report.pp_bytes_dense)
            lines.append(f"messages between stages: sent {sent} of {dense} so far")
        if report.param_bytes_dense:
            sent, dense = _bytes(report.param_bytes), _bytes(report.param_bytes_dense)
            lines.append(f"updated weights: sent {sent} of {dense} so far")
        for line in lines:
            self._print(f"edgc | {report.iteration}/{self.iterations} | {line}")
        self._unbudgeted |= self._by_host or report.plan.by_host
        self._by_host, self._tried = report.plan.by_host, report.plan.tried
        if last:
            for line in (*self._memory(report), *_totals(report, self.run)):
                self._print(f"edgc | {line}")
            self._warn_of_volume(report)
        self._tensorboard(report)
        event = asdict(report)
        for message, boundary in zip(event["messages"], report.messages, strict=True):
            message["boundary"] = str(boundary.boundary)
        for stage, seen in zip(event["stages"], report.stages, strict=True):
            stage["stage"] = str(seen.stage)
            del stage["energies"]  # all spectra would swell the log
            stage["fidelity"] = {name: logged(one) for name, one in seen.fidelity.items()}
        totals = {"total_bytes": report.total_bytes, "total_bytes_dense": report.total_bytes_dense}
        self.events.write("window", last=last, **event, **totals)
        self._guard(report)

    def _stage_lines(self, report: WindowReport) -> Iterator[str]:
        for place, seen in enumerate(report.stages):
            fewer = f" ({seen.dp_bytes_dense / seen.dp_bytes:.1f}x fewer)" if seen.dp_bytes else ""
            got = f" | cosine {seen.cosine:.3f}" if math.isfinite(seen.cosine) else ""
            yield (
                f"{seen.stage} | entropy {_number(seen.entropy, 4)} nats | "
                f"{self._stage_move(report.ranks, report.plan, place)} | "
                f"sent {_bytes(seen.dp_bytes)} of {_bytes(seen.dp_bytes_dense)}{fewer} | "
                f"residual {_number(seen.residual, 3)}{got}"
            )
            if seen.spikes:
                yield (
                    f"{seen.stage} | {seen.spikes:.0f} gradients above {self._spike} times their running norm (the "
                    f"largest {seen.largest_spike:.3g} times): their errors were scaled down"
                )

    def _trial_line(self, plan: RankPlan) -> Iterator[str]:
        """What a trial of this window has measured, and who sums now."""
        if plan.tried != self._tried:
            compressed, host = plan.tried
            who = "the host sums" if plan.by_host else "EDGC compresses"
            since = "as before" if plan.by_host == self._by_host else "from now on"
            yield (f"a step takes {compressed:.3f} s compressed, {host:.3f} s with the host's own sum: {who} {since}")

    def _message_lines(self, report: WindowReport) -> Iterator[str]:
        if report.message_plan is None:
            return
        for place, message in enumerate(report.messages):
            was = self._message_rank(report.message_ranks[place])
            yield (
                f"{message.boundary} | entropy {_number(message.entropy, 4)} nats | "
                f"{_move(was, report.message_plan, place, self._message_rank)} | "
                f"sent {_bytes(message.bytes)} of {_bytes(message.bytes_dense)}"
            )
            if message.spikes:
                yield (
                    f"{message.boundary} | {message.spikes:.0f} messages above {self._spike} times their running norm: "
                    "their errors were scaled down"
                )

    def _memory(self, report: WindowReport) -> Iterator[str]:
        for seen, parameters in zip(report.stages, self.parameters, strict=True):
            each = seen.state_bytes / max(parameters, 1)
            yield f"{seen.stage} kept {_bytes(seen.state_bytes)} of state a process: {each:.2f} bytes a parameter"
        for message in report.messages:
            yield f"{message.boundary}: {_bytes(message.state_bytes)} of state a process"

    def _guard(self, report: WindowReport) -> None:
        """Where too little of the gradient has begun to arrive, and where enough does again."""
        before, self._relief = self._relief, report.plan.relief
        if self._relief == before:
            return
        self.events.write("guard", iteration=report.iteration, relief=self._relief)
        where = f"iteration {report.iteration}/{self.iterations}"
        if self._relief > before:
            least = 100 * self.config.study.least_fidelity
            message = f"less than {least:g} % of the energy that the optimizer got lay along the true gradient"
            warn(f"{where}: {message}: steps now get {self._relief:g} times their budget", self.group)
        else:
            message = f"enough of the gradient arrives: steps get {self._relief:g} times their budget"
            self._print(f"edgc | {where}: {message}")

    def _tensorboard(self, report: WindowReport) -> None:
        writer = self.scalars()
        if not writer:
            return
        for stage, seen in enumerate(report.stages):
            scalars = {
                "entropy": seen.entropy,
                "rank": float(report.ranks[stage] or 0),  # 0: dense
                "residual": seen.residual,
                "cosine": seen.cosine,
                "dp-bytes": seen.dp_bytes,
                "reduce-seconds": seen.reduce_seconds,
                **_wanted(report.plan, stage),
            }
            for name, value in scalars.items():
                if math.isfinite(value):
                    writer.add_scalar(f"edgc/{name}/{str(seen.stage).replace(' ', '-')}", value, report.iteration)

        for message, rank in zip(report.messages, report.message_ranks, strict=True):
            place = str(message.boundary).replace(" ", "-")
            writer.add_scalar(f"edgc/pp-bytes/{place}", message.bytes, report.iteration)
            writer.add_scalar(f"edgc/pp-rank/{place}", float(rank or 0), report.iteration)
            if math.isfinite(message.entropy):
                writer.add_scalar(f"edgc/pp-entropy/{place}", message.entropy, report.iteration)

    def _warn_of_volume(self, report: WindowReport) -> None:
        """A whole run that ends above its budget."""
        volume, sent = self.config.ranks.volume, report.dp_bytes
        if volume is None or not sent or self._unbudgeted or report.iteration < self.iterations:
            return
        if (reached := report.dp_bytes_fp32 / sent) < MISSED * volume:
            message = (
                f"{flag('volume')} {volume:g} was asked for, and the run sent {reached:.1f}x fewer bytes: it has few "
                "windows, few iterations were measured, or too little of the gradient arrived for a while"
            )
            warn(message, self.group)

    def _stage_move(self, used: Sequence[int | None], plan: RankPlan, place: int) -> str:
        was = "the host's sum" if self._by_host else self._rank(used[place])
        if plan.by_host:
            return was if self._by_host else f"{was} -> the host's sum (its steps are shorter)"
        return _move(was, plan, place, self._rank)

    def _rank(self, rank: int | None) -> str:
        if rank is None:
            return "dense" if self.config.formats.dense_wire == "fp32" else self.config.formats.dense_wire
        if rank == NO_RANK:
            return "rounded" if self.config.low_rank else self.config.engine
        return f"rank {rank}"

    def _message_rank(self, rank: int | None) -> str:
        if rank is None:
            return "dense"
        return self.config.pipeline.messages.engine if rank == NO_RANK else f"rank {rank}"

    def _print(self, text: str) -> None:
        if self.prints:
            print(text, flush=True)


def warn(message: str, group: ProcessGroup | None = None) -> None:
    """One warning line, once for all processes of the group."""
    if process(group) == 0:
        print(f"edgc: warning: {message}", file=sys.stderr, flush=True)


def warn_of_new_plans(what: str, config: EDGCConfig, group: ProcessGroup | None = None) -> None:
    """``what`` has saved a controller that cannot go on, because only one of both runs has a volume."""
    written = "without" if config.ranks.volume is not None else "with"
    warn(f"{what} was written {written} {flag('volume')}: error feedback goes on, plans start anew", group)


def warn_of_budget(controller: Controller, group: ProcessGroup | None = None) -> None:
    """Where a run cannot send as little as its volume."""
    budget = controller.budget
    if budget is not None and budget.reachable < budget.volume:
        message = (
            f"{flag('volume')} {budget.volume:g}: this run can send about {budget.reachable:.3g}x fewer bytes at most, "
            "with its warm-up and the smallest rank or format of each parameter"
        )
        warn(message, group)


def warn_of_kernels(config: EDGCConfig, device: torch.device, group: ProcessGroup | None = None) -> None:
    """Where fused kernels are asked for that do not run on this device."""
    if config.study.kernels == "fused" and triton_kernels(device) is None:
        message = "Triton's kernels need Triton and a GPU from Ampere on; plain torch goes on"
        warn(f"{flag('kernels')} = fused: {message}", group)


def _policy_of_messages(messages: EDGCConfig) -> str:
    if not messages.low_rank:
        return "uncompressed" if messages.engine == "dense" else messages.engine
    ranks = messages.ranks
    return f"rank {ranks.rmin} to {ranks.largest}" if messages.dynamic else f"rank {ranks.fixed}"


def _move(was: str, plan: RankPlan, place: int, name: Callable[[int | None], str]) -> str:
    """From the rank in use to the one ahead, why, and what entropy and bounds alone would have made of it."""
    notes = [plan.reasons[place]]
    if plan.formats and (formats := plan.formats[place]) is not None:
        ranks = sorted(((plan.matrix_ranks[place] or {}) if plan.matrix_ranks else {}).values())
        if ranks:
            notes.append(f"{len(ranks)} at rank {ranks[0]} to {ranks[-1]}")
        notes += [f"{count} in {form}" for form, count in sorted(Counter(formats.values()).items())]
    if plan.proposed and plan.proposed[place] is not None:
        notes.append(f"proposed {plan.proposed[place]:.1f}")
    if plan.targets and plan.targets[place] != plan.ranks[place]:
        notes.append(f"target {name(plan.targets[place])}")
    return f"{was} -> {name(plan.ranks[place])} ({'; '.join(notes)})"


def _wanted(plan: RankPlan, stage: int) -> dict[str, float]:
    """For TensorBoard: the ranks ahead as entropy alone proposes them, and before the step limit."""
    wanted = {}
    if plan.proposed and (proposed := plan.proposed[stage]) is not None:
        wanted["rank-proposed"] = proposed
    if plan.targets:
        wanted["rank-target"] = float(plan.targets[stage] or 0)  # 0: dense
    return wanted


def _totals(report: WindowReport, run: Run) -> list[str]:
    """The run's bytes a process, against those of the host's own way."""
    sent, dense = report.dp_bytes, report.dp_bytes_dense
    lines = [f"gradients: sent {_bytes(sent)} of {_bytes(dense)}"]
    if sent:
        # parameters of a plain module may be of several types
        in_fp32 = (4 / run.gradient_bytes * dense if run.scatters else report.dp_bytes_fp32) / sent
        lines[0] += f", {in_fp32:.1f}x fewer than in fp32, {in_fp32 / 2:.1f}x fewer than in bf16"
        if run.scatters:
            lines[0] += f"; {report.dp_bytes_fp32 / sent:.1f}x fewer than an all-reduce in fp32"
    sent, dense = report.total_bytes, report.total_bytes_dense
    fewer_in_all = f", {dense / sent:.1f}x fewer" if sent else ""
    what = "gradients, updated weights, messages between stages"
    return [*lines, f"total ({what}): sent {_bytes(sent)} of {_bytes(dense)}{fewer_in_all}"]


def logged(fidelity: Fidelity) -> dict[str, float]:
    """As the event log and studies have it, of four digits."""
    numbers = {
        f"{name}{suffix}": getattr(products, name)
        for products, suffix in (
            (fidelity.gradient, ""),
            (fidelity.update, "_of_update"),
            (fidelity.descent, "_of_descent"),
        )
        for name in ("cosine", "delay", "late")
    }
    numbers["cosine_of_adam"] = fidelity.adam.cosine
    return {name: float(f"{value:.4g}") for name, value in numbers.items()}


def _number(value: float, digits: int) -> str:
    """A dash where nothing was measured."""
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def _bytes(count: float) -> str:
    """1234567 -> '1.23 MB'."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:  # else it would be rounded to 1e+03
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
