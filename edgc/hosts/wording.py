"""A run in words: the lines of its start, its progress, its windows and its end. Pure functions."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean, median

from edgc.byte_counts import ByteCount
from edgc.config import EDGCConfig, RankPolicy, flag
from edgc.observe.window import WindowReport
from edgc.plan.by_volume.choices import rest_format
from edgc.plan.loss_watch import RECENT_WINDOWS
from edgc.plan.rank_plan import NO_RANK, RankPlan
from edgc.plan.run import Run
from edgc.plan.run_plan import RunPlan
from edgc.plan.stages import StageKey, StagePlan
from edgc.plan.times.gather_times import GatherTimes


def start_lines(plan: RunPlan, value_bytes: int) -> list[str]:
    """What is compressed, what stays dense and why. ``value_bytes``: of a value in plain training."""
    lines = [f"engine {plan.config.engine}: {_policy(plan)}"]
    return lines + [line for stage in plan.stages for line in _contents(stage, plan.config, value_bytes)]


def embedding_line(size: float, apart: str, config: EDGCConfig) -> str:
    """The line on a tied embedding whose copies, of ``size`` bytes, the host sums. ``apart``: why EDGC cannot."""
    what = f"by the host, counted, not compressed: {_bytes(size)} a step"
    if config.rank_policy is RankPolicy.VOLUME:
        what += f", which {flag('volume')} does not bound"
    why = f": {flag('fuse_embedding_sync')} {apart}" if apart else ""
    return f"tied embedding summed over first and last stage {what}{why}"


def messages_line(which: str, messages: EDGCConfig) -> str:
    """How those between stages travel. ``which``: of both directions."""
    what = "gradients and activations" if which == "both" else "gradients"
    return f"{what} between stages: {message_form(messages)}"


def message_form(messages: EDGCConfig) -> str:
    """The form of messages between stages, by the settings of their controller."""
    ranks = messages.ranks
    if not messages.low_rank:
        return "uncompressed" if messages.rank_policy is RankPolicy.NONE else messages.engine
    by_entropy = messages.rank_policy is RankPolicy.ENTROPY
    return f"rank {ranks.rmin} to {ranks.resolved_rmax}" if by_entropy else f"rank {ranks.resolved_static_rank}"


def weights_line(name: str | None, times: GatherTimes | None) -> str:
    """How updated weights travel. ``name``: the format of their differences; None: whole. ``times``: of both ways."""
    how = "whole, by Megatron" if name is None else f"differences in {name}"
    if times is None:
        return f"updated weights: {how}"
    return (
        f"updated weights: {how}; the largest bucket takes {1e3 * times.whole:.2f} ms whole, "
        f"{1e3 * times.rounded:.2f} ms rounded"
    )


def _policy(plan: RunPlan) -> str:
    """What sets the ranks, or how much is sent."""
    ranks, policy = plan.config.ranks, plan.config.rank_policy
    if policy is RankPolicy.NONE:
        return "dense all-reduce, counted"
    if policy is RankPolicy.VOLUME:
        if plan.rounds:
            return f"all gradients rounded, window {ranks.window}"
        how = f"{ranks.volume:g}x fewer bytes than an all-reduce in fp32, window {ranks.window}"
        return how + (", once compression is faster" if plan.starts_by_host else "")
    if policy is RankPolicy.CONSTANT:
        what = "compressed" if ranks.resolved_static_rank is None else f"rank {ranks.resolved_static_rank}"
        return f"{what} after {100 * ranks.warmup_fraction:g}% of the run"
    aligned = "aligned" if ranks.align else "not aligned"
    return f"rank {ranks.rmin} to {ranks.resolved_rmax}, window {ranks.window}, stages {aligned}"


def _contents(stage: StagePlan, config: EDGCConfig, value_bytes: int) -> Iterator[str]:
    """What of a stage is compressed, and in what the rest travels."""
    key, selection = stage.key, stage.selection
    if stage.dense_because:
        yield f"{key} not compressed: {stage.dense_because}"
        return
    policy = config.rank_policy
    verb = "measured" if policy is RankPolicy.NONE else "compressed"
    nouns = ("matrix", "matrices") if config.low_rank or policy is RankPolicy.NONE else ("parameter", "parameters")
    count = f"{len(selection.matrices)} {nouns[len(selection.matrices) != 1]}"
    yield f"{key} {verb}: {count}, {_bytes(selection.matrix_elements * value_bytes)} a step"
    rest: dict[str, list[int]] = {}  # sizes by reason
    for parameter, why in selection.others:
        rest.setdefault(why, []).append(parameter.elements * value_bytes)
    how = rest_format(config)
    for why, sizes in rest.items():
        what = f"{len(sizes)} parameter{'s' * (len(sizes) > 1)}, {_bytes(sum(sizes))} a step"
        yield f"{key} in {how}: {what}: {why}"


def progress_line(completed: int, iterations: int, step_seconds: Sequence[float]) -> str:
    """How far, how fast, how long still."""
    pace = median(step_seconds)
    minutes, seconds = divmod(round((iterations - completed) * pace), 60)
    return f"{completed}/{iterations} iterations | {pace:.3f} s/step | {minutes} m {seconds:02d} s left"


def window_lines(report: WindowReport, before: RankPlan, config: EDGCConfig) -> Iterator[str]:
    """A line for each stage and boundary, and what else is new. ``before``: the plan of the window before."""
    plan = report.plan
    yield from _stage_lines(report, before, config)
    if plan.tried != before.tried:
        compressed, host = plan.tried
        who = "the host sums" if plan.by_host else "EDGC compresses"
        since = "as before" if plan.by_host == before.by_host else "from now on"
        if plan.trial is not None:
            since += ". Steps vary by more than that: another trial follows"
        yield f"a step takes {compressed:.3f} s compressed, {host:.3f} s with the host's own sum: {who} {since}"
    yield from _message_lines(report, config)
    if report.bytes.messages.host:
        yield f"messages between stages: {_sent(report.bytes.messages)} so far"
    if report.bytes.weights.host:
        yield f"updated weights: {_sent(report.bytes.weights)} so far"


def _stage_lines(report: WindowReport, before: RankPlan, config: EDGCConfig) -> Iterator[str]:
    plan, dense_wire = report.plan, config.formats.dense_wire
    for index, seen in enumerate(report.stages):
        # a stage that no other process has is summed, and rounded, by none
        dense = "dense" if dense_wire == "fp32" or not seen.bytes.host else dense_wire
        name = partial(_rank_name, dense, "rounded" if config.low_rank else config.engine)
        was = "the host's sum" if before.by_host else name(report.ranks[index])
        if plan.by_host:
            move = was if before.by_host else f"{was} -> the host's sum (its steps are shorter)"
        else:
            move = _move(was, plan, index, name)
        fewer = f" ({seen.bytes.host / seen.bytes.sent:.1f}x fewer)" if seen.bytes.sent else ""
        got = f" | cosine {seen.cosine:.3f}" if math.isfinite(seen.cosine) else ""
        yield (
            f"{seen.stage} | entropy {_measured(seen.entropy, 4)} nats | {move} | "
            f"{_sent(seen.bytes)}{fewer} | residual {_measured(seen.residual, 3)}{got}"
        )
        if seen.spikes:
            yield (
                f"{seen.stage} | {seen.spikes:.0f} gradients above {config.study.spike_limit:g} times their running "
                f"norm (the largest {seen.largest_spike:.3g} times): their errors were scaled down"
            )


def _message_lines(report: WindowReport, config: EDGCConfig) -> Iterator[str]:
    if report.message_plan is None:
        return
    name = partial(_rank_name, "dense", config.pipeline.messages.engine)
    for index, message in enumerate(report.messages):
        move = _move(name(report.message_ranks[index]), report.message_plan, index, name)
        yield (f"{message.boundary} | entropy {_measured(message.entropy, 4)} nats | {move} | {_sent(message.bytes)}")
        if message.spikes:
            yield (
                f"{message.boundary} | {message.spikes:.0f} messages above {config.study.spike_limit:g} times their "
                "running norm: their errors were scaled down"
            )


def _rank_name(dense: str, rankless: str, rank: int | None) -> str:
    """``dense``: where nothing is compressed; ``rankless``: where the engine has no rank."""
    return dense if rank is None else rankless if rank == NO_RANK else f"rank {rank}"


def _move(was: str, plan: RankPlan, index: int, name: Callable[[int | None], str]) -> str:
    """The rank in use, the one ahead, why, and what entropy and bounds alone would have made of it."""
    notes = [plan.reasons[index]]
    _, matrix_ranks, formats = plan.of_stage(index)
    if formats is not None:
        if ranks := sorted((matrix_ranks or {}).values()):
            notes.append(f"{len(ranks)} at rank {ranks[0]} to {ranks[-1]}")
        notes += [f"{count} in {form}" for form, count in sorted(Counter(formats.values()).items())]
    if plan.proposed and plan.proposed[index] is not None:
        notes.append(f"proposed {plan.proposed[index]:.1f}")
    if plan.targets and plan.targets[index] != plan.ranks[index]:
        notes.append(f"target {name(plan.targets[index])}")
    return f"{was} -> {name(plan.ranks[index])} ({'; '.join(notes)})"


def guard_text(before: RankPlan, plan: RankPlan, config: EDGCConfig) -> str:
    """The line where the loss has begun to rise or too little of the gradient to arrive, or where that has ended."""
    risen = (
        f"the training loss of the last window is {100 * plan.loss_rise:.0f} % above the lowest of the "
        f"{RECENT_WINDOWS} windows before"
    )
    if plan.relief > before.relief:
        least = f"less than {100 * config.study.least_fidelity:g} % of the energy that the optimizer got"
        why = risen if plan.loss_rise > 0 else f"{least} lay along the true gradient"
        return f"{why}: steps may now send {plan.relief:g} times their budget"
    if plan.relief < before.relief:
        how = f"{plan.relief:g} times their budget" if plan.relief > 1 else "their budget again"
        if plan.loss_rise > 0 == before.loss_rise:
            return (
                f"{risen}. Steps may send {how} all the same: the learning rate is small, or all gradients are rounded"
            )
        why = "enough of the gradient arrives and the loss does not rise, the learning rate is small, or all gradients"
        return f"steps may send {how}: {why} are rounded"
    if plan.loss_rise == 0:
        return "the training loss no longer rises"
    if config.rank_policy is RankPolicy.ENTROPY and any(plan.ranks):
        return f"{risen}: stages that are compressed have rank {config.ranks.resolved_rmax} until it falls"
    return f"{risen}: steps send what they have sent before"


def end_lines(
    report: WindowReport, run: Run, parameters: Sequence[int], cosines: Mapping[StageKey, Sequence[float]]
) -> Iterator[str]:
    """The memory that was kept, what the optimizer got, and the run's bytes a process against those of the host's own
    way.

    ``parameters``: how many each stage has. ``cosines``: of each stage those of its windows, as far as they are known.
    """
    for seen, own in zip(report.stages, parameters, strict=True):
        each = seen.state_bytes / max(own, 1)
        yield f"{seen.stage} kept {_bytes(seen.state_bytes)} of state a process: {each:.2f} bytes a parameter"
        if known := cosines.get(seen.stage):
            yield (
                f"{seen.stage}: what the optimizer got has a mean cosine of {fmean(known):.3f} to the true gradient, "
                f"in the worst of {len(known)} measured windows {min(known):.3f}"
            )
    for message in report.messages:
        yield f"{message.boundary}: {_bytes(message.state_bytes)} of state a process"
    gradients, total = report.bytes.gradients, report.bytes.total
    fewer = ""
    if gradients.sent:
        # parameters of a plain module may be of several types
        in_fp32 = (4 / run.value_bytes * gradients.host if run.scatters else gradients.fp32) / gradients.sent
        fewer = f", {in_fp32:.1f}x fewer than in fp32, {in_fp32 / 2:.1f}x fewer than in bf16"
        if run.scatters:
            fewer += f"; {gradients.fp32 / gradients.sent:.1f}x fewer than an all-reduce in fp32"
    yield f"gradients: {_sent(gradients)}{fewer}"
    if total.host > gradients.host:
        fewer = f", {total.host / total.sent:.1f}x fewer" if total.sent else ""
        yield f"total (gradients, updated weights, messages between stages): {_sent(total)}{fewer}"


def _bytes(count: float) -> str:
    """1234567 -> '1.23 MB'."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:  # else it would be rounded to 1e+03
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _sent(count: ByteCount) -> str:
    return f"sent {_bytes(count.sent)} of {_bytes(count.host)}"


def _measured(value: float, digits: int) -> str:
    """A dash where nothing was measured."""
    return "-" if math.isnan(value) else f"{value:.{digits}f}"
