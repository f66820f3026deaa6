"""From what is known before training to the plan of a run: which ranks its link allows, and why a stage stays dense."""

import math
from collections.abc import Sequence

from edgc.config import ConfigError, EDGCConfig, RankPolicy, flag
from edgc.plan.by_volume.choices import ROUNDED, bits_of
from edgc.plan.by_volume.ledger import WINDOWS
from edgc.plan.ranks import RANK_MULTIPLE, resolve_ranks, static_ranks
from edgc.plan.run import Run, RunPlan
from edgc.plan.selection import largest_rank, pays, select, width
from edgc.plan.stages import ProcessStage, StageKey, StageKind, StagePlan
from edgc.plan.times.comm_cost import StageCost
from edgc.plan.times.link_times import WORTH_IT, LinkTimes, Timing
from edgc.specs import MatrixSpec


def plan_run(config: EDGCConfig, run: Run, processes: Sequence[Sequence[ProcessStage]]) -> RunPlan:
    """Resolve rmin and rmax, and sort the parameters of every stage.

    ``processes``: the stages of each process, the first of each its layers. Raises ``ConfigError`` for ranks at which
    no matrix of the model saves anything, and for settings that cannot work in a run of this length.
    """
    config.check_run(run.iterations)
    by_volume = config.rank_policy is RankPolicy.VOLUME
    if by_volume:
        config = config.replace(window=_window(config, run.iterations))
    known = [stage for own in processes for stage in own]
    if by_volume and not (run.alone and all(stage.key.kind is not StageKind.EMBEDDING for stage in known)):
        _check_warmup(config, run)
    # by shape: a large run has thousands of processes with hundreds of parameters each
    distinct = {(one.shape, one.embedding): one for stage in known for one in stage.parameters}.values()
    usable = largest_rank(select(distinct, config, RANK_MULTIPLE).matrices, config.study.min_saving)
    _check_ranks(config, select(distinct, config, 1).matrices, usable)
    compresses, tries, rounds = True, False, False
    times: LinkTimes | None = None
    warnings: list[str] = []
    # with a volume and no replicas the one sum left, of a tied embedding, was not timed
    if config.rank_depends_on_link and not (by_volume and run.alone):
        lowest = usable if run.alone else _lowest_break_even(config, run, known)
        if by_volume and config.ranks.rmax is None:  # who gives a rank wants low rank
            times = _link_times(config, run, known, lowest)
        rounds = times is not None and times.rounding_pays
        # a volume that allows rounded values in all parameters has finer formats to choose from beside low rank
        if config.ranks.volume is not None and run.rounded_share * bits_of(ROUNDED) / 8 * config.ranks.volume < 4:
            rounds &= lowest < RANK_MULTIPLE
        why = [_why_rounded(config, times)] if times is not None and rounds else []
        config, compresses, tries, warnings = _by_link(config, run, known, usable, lowest, rounds)
        warnings = [*why, *warnings]
    if compresses or tries:
        warnings += _too_short(config, run, compresses)
    stages = tuple(_planned(key, config, run, known) for key in sorted({stage.key for stage in known}))
    if run.alone:  # the host's own sum and gather over one process change nothing; rounding would
        config = config.replace(dense_wire="fp32", param_wire=None)
    return RunPlan(config, stages, compresses, tuple(warnings), tries, rounds, times)


def _check_warmup(config: EDGCConfig, run: Run) -> None:
    """Raises ``ConfigError`` where the share of the run that the warm-up was given alone sends more than the volume."""
    volume, fraction = config.ranks.volume, config.ranks.warmup_fraction
    form = "fp32" if run.alone else config.formats.dense_wire  # as the run will have it
    assert volume is not None
    exact = form == "fp32"  # then the host sums, or what sends as much
    value_bytes = run.host_bytes if exact else run.rounded_share * bits_of(form) / 8
    if fraction * value_bytes / 4 >= 1 / volume:
        fewer = "" if run.alone or bits_of(form) <= 4 else f", or {flag('dense_wire')} int4"
        raise ConfigError(
            f"{flag('volume')} = {volume:g}: the warm-up of {100 * fraction:g} % of the run in {form} alone sends more "
            f"than that allows; give a smaller {flag('warmup_fraction')}{fewer}"
        )


def _check_ranks(config: EDGCConfig, matrices: Sequence[MatrixSpec], usable: int) -> None:
    """Raises ``ConfigError`` for a rank at which none of these matrices saves anything. ``usable``: the largest one."""
    _, largest = static_ranks(config) or (None, None)
    # with a volume rmax bounds a mean rank, and may lie beyond what pays
    rmax = None if config.rank_policy is RankPolicy.VOLUME else config.ranks.resolved_rmax
    for name, rank in (("rmin", config.ranks.rmin), ("rmax", rmax), ("static_rank", largest)):
        if rank is None or rank <= usable:
            continue
        if not any(pays(rank, one.rows, one.cols, config.study.min_saving) for one in matrices):
            raise ConfigError(
                f"{flag(name)} = {getattr(config.ranks, name)}: no matrix of this model saves "
                f"{config.study.min_saving:g}x at rank {rank}; the largest rank that does is {usable}"
            )


def _by_link(
    config: EDGCConfig, run: Run, known: Sequence[ProcessStage], usable: int, lowest: int, rounds: bool
) -> tuple[EDGCConfig, bool, bool, list[str]]:
    """The settings with the ranks that the link allows; whether to compress; whether steps of the run are to try it;
    and warnings. ``lowest``: the break-even rank; ``rounds``: all gradients are rounded.
    """
    by_volume = config.rank_policy is RankPolicy.VOLUME
    warnings: list[str] = []
    asked = config.ranks.resolved_rmax is not None
    # a budget rounds what has no matrix for low rank, and nothing was timed of it
    untimed = by_volume and all(stage.cost is None for stage in known)
    compresses = asked or rounds or untimed or lowest >= max(RANK_MULTIPLE, config.ranks.rmin or 0)
    # a link that is only computed is not there to be timed
    tries = not asked and not run.alone and config.ranks.link_gbps is None and (compresses or by_volume)
    if not compresses:
        warnings.append(_why_dense(config, lowest, usable, tries))
        if config.pipeline.messages.needs_rank:
            warnings.append(
                "messages between stages stay uncompressed, too; give them a rank to compress them, as in "
                f"--edgc-pp {config.pipeline.messages.which}:powersgd:16"
            )
            config = config.replace(pp="off")
    if compresses or tries:
        # where steps will try, the link of now is no bound for that of later
        bound = lowest if compresses and not rounds else usable
        matrices = [matrix for stage in known for matrix in select(stage.parameters, config).matrices]
        return resolve_ranks(config, bound, width(matrices)), compresses, tries, warnings
    formats = {"rest_wire": "fp32", "dense_wire": "fp32"}
    dense = config.replace(engine="dense", static_rank=None, volume=None, rank_tilt=0.0, kernels="plain", **formats)
    return dense, compresses, tries, warnings


def _link_times(config: EDGCConfig, run: Run, known: Sequence[ProcessStage], lowest: int) -> LinkTimes | None:
    """Times of the slowest stage that may be compressed; None where rounding was not timed.

    Low rank is at the mean rank that the volume pays for, or at ``lowest``, the break-even rank, if there is one and it
    is smaller.
    """
    volume = config.ranks.volume
    assert volume is not None
    costs = [stage.cost for stage in known if stage.cost is not None and not dense_because(stage.key, config, run)]
    most = lowest if lowest >= RANK_MULTIPLE else math.inf
    ways = [
        (cost.rounded_seconds, cost.compressed.seconds(min(cost.volume_rank, most)))
        for cost in costs
        if cost.rounded_seconds is not None and cost.volume_rank is not None
    ]
    if not ways:
        return None
    rounded, low_rank = (max(column) for column in zip(*ways, strict=True))
    return LinkTimes(
        Timing(max(cost.host_seconds for cost in costs), run.host_bytes / 4),
        Timing(rounded, run.rounded_share * bits_of(ROUNDED) / 32),
        Timing(low_rank, 1 / volume),
    )


def _why_rounded(config: EDGCConfig, times: LinkTimes) -> str:
    """Why all gradients are rounded, with the times."""
    instead = f"Low rank takes {times.low_rank.seconds:.2g} s" if times.low_rank_pays else "No rank is worth its time"
    return (
        f"on this link reductions take {times.rounded.seconds:.2g} s with every gradient rounded to 4 bits, "
        f"{times.host.seconds:.2g} s dense. {instead}. So gradients are rounded, although that sends more bytes than "
        f"{flag('volume')} {config.ranks.volume:g} allows. Give {flag('rmax')} a rank to keep low rank"
    )


def _why_dense(config: EDGCConfig, lowest: int, usable: int, tries: bool) -> str:
    """Why nothing is compressed. ``lowest``: the break-even rank; ``usable``: the largest that saves anything."""
    if usable < RANK_MULTIPLE and config.rank_policy is not RankPolicy.VOLUME:
        return f"no matrix of this model saves {config.study.min_saving:g}x in low rank: reducing dense"
    needed, where = flag("rmax" if config.ranks.static_rank is None else "static_rank"), "at every rank"
    if config.ranks.rmin is not None and lowest >= RANK_MULTIPLE:
        where = f"above rank {lowest}, and {flag('rmin')} is {config.ranks.rmin}"
    until = " until reductions take longer" if tries else ""
    longer = "longer than"
    if config.rank_policy is RankPolicy.VOLUME:
        longer = f"more than {100 * WORTH_IT:g} % of the time of"
    return (
        f"on this link compression takes {longer} the dense reduction {where}: reducing dense{until}. Give {needed} "
        "a rank to compress all the same"
    )


def _too_short(config: EDGCConfig, run: Run, compresses: bool) -> list[str]:
    """Warnings of a run in which what is measured cannot set a plan."""
    window, warmup, policy = config.ranks.window, config.warmup(run.iterations), config.rank_policy
    begins = window * max(2, math.ceil(warmup / window))
    if policy is RankPolicy.ENTROPY and compresses and begins >= run.iterations:
        what = "window" if 2 * window >= warmup else "warmup_fraction"
        return [
            f"the run of {run.iterations} iterations ends before compression can begin, at iteration {begins}: after "
            f"two windows of {window} and the warm-up, at the end of a window; give a smaller {flag(what)}"
        ]
    if policy is RankPolicy.VOLUME and window > run.iterations - warmup:
        return [
            f"the run of {run.iterations} iterations has no window of {window} after its warm-up, so its plan never "
            f"changes; give more to {flag('iteration_sampling_rate')}"
        ]
    return []


def _window(config: EDGCConfig, iterations: int) -> int:
    """A window of at most a twentieth of the run, so that measurements can set plans, and of at least one of them."""
    measured = math.ceil(1 / config.ranks.iteration_sampling_rate)
    return max(min(config.ranks.window, max(iterations // WINDOWS, 2)), measured)


def dense_because(key: StageKey, config: EDGCConfig, run: Run) -> str:
    """Why a stage's gradients are never compressed; empty if they are."""
    if key.kind is StageKind.LAYERS and run.alone:
        return "no other process has these parameters"
    share = config.study.stage_share
    if key.kind is not StageKind.EMBEDDING and key.pipeline_stage >= math.ceil(share * run.pipeline_stages - 1e-9):
        return f"beyond {flag('stage_share')} {share:g}"
    return ""


def slowest(costs: Sequence[StageCost | None]) -> StageCost | None:
    """The cost of a stage whose processes measured it separately; None if they did not."""
    return max((cost for cost in costs if cost is not None), key=lambda cost: cost.dense_seconds, default=None)


def _lowest_break_even(config: EDGCConfig, run: Run, known: Sequence[ProcessStage]) -> int:
    """Over the stages that may be compressed: the slowest link limits all."""
    lowest = []
    for stage in known:
        if stage.cost is None or dense_because(stage.key, config, run):
            continue
        if config.rank_policy is RankPolicy.VOLUME:  # which itself says how much must be saved
            lowest.append(stage.cost.break_even_rank(WORTH_IT))
        else:
            matrices = select(stage.parameters, config).matrices
            lowest.append(min(stage.cost.break_even_rank(), largest_rank(matrices, config.study.min_saving)))
    return min(lowest, default=0)


def _planned(key: StageKey, config: EDGCConfig, run: Run, known: Sequence[ProcessStage]) -> StagePlan:
    members = [stage for stage in known if stage.key == key]
    selection = select(members[0].parameters, config)
    return StagePlan(key, selection, slowest([stage.cost for stage in members]), dense_because(key, config, run))
