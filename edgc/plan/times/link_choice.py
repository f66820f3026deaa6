"""Which ranks the probed link allows, and whether gradients are compressed, rounded or left to the host."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from edgc.config import EDGCConfig, RankPolicy, flag
from edgc.plan.by_volume.choices import ROUNDED, bits_of
from edgc.plan.ranks import RANK_MULTIPLE, resolve_ranks
from edgc.plan.run import Run
from edgc.plan.selection import select, width
from edgc.plan.stages import ProcessStage, dense_because
from edgc.plan.times.comm_cost import StageCost
from edgc.plan.times.link_times import MAX_TIME_RATIO, LinkTimes, ReductionTime, may_replace_low_rank


@dataclass(frozen=True)
class LinkChoice:
    """What the link decides for a run; the same on every process. By default it decides nothing.

    ``config`` has its ranks resolved. ``compresses``: false where on this link neither low rank nor rounding is worth
    its time. ``tries``: whether steps of the run decide if compression is worth its time (``edgc.plan.times.trials``).
    Where neither holds, ``config`` asks for the engine ``dense``. ``rounds``: with a volume, every gradient is rounded,
    because on this link that takes less time than low rank. ``link_times``: by which that was decided; None where
    nothing was timed. ``warnings``: for the user, one line each.
    """

    config: EDGCConfig
    compresses: bool = True
    tries: bool = False
    rounds: bool = False
    link_times: LinkTimes | None = None
    warnings: tuple[str, ...] = ()


def choose_by_link(config: EDGCConfig, run: Run, known: Sequence[ProcessStage], usable: int) -> LinkChoice:
    """What the timed link allows. ``known``: the stages of all processes; ``usable``: the largest rank that saves."""
    by_volume = config.rank_policy is RankPolicy.VOLUME
    lowest = usable if run.alone else _lowest_break_even(config, run, known, usable)
    # who gives a rank wants low rank
    times = _link_times(config, run, known, lowest) if by_volume and config.ranks.rmax is None else None
    rounds = times is not None and times.rounding_pays
    warnings = [_why_rounded(config, times)] if times is not None and rounds else []
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
        bound = lowest if compresses and not rounds and not untimed else usable
        matrices = [matrix for stage in known for matrix in select(stage.parameters, config).matrices]
        config = resolve_ranks(config, bound, width(matrices))
    else:
        unused = {"static_rank": None, "volume": None, "rank_tilt": 0.0, "kernels": "plain"}
        config = config.replace(engine="dense", rest_wire="fp32", dense_wire="fp32", **unused)
    return LinkChoice(config, compresses, tries, rounds, times, tuple(warnings))


def _lowest_break_even(config: EDGCConfig, run: Run, known: Sequence[ProcessStage], usable: int) -> int:
    """Over the stages that may be compressed: the slowest link limits all.

    A step waits for the slowest stage, so no stage has to be faster than the host's own sum of that one.
    """
    costs = _costs(config, run, known)
    share = MAX_TIME_RATIO if config.rank_policy is RankPolicy.VOLUME else 1.0  # a volume says what must be saved
    slowest = max((cost.host_seconds for cost in costs), default=0.0)
    lowest = min((cost.largest_rank(share * slowest) for cost in costs), default=0)
    return lowest if config.rank_policy is RankPolicy.VOLUME else min(lowest, usable)


def _costs(config: EDGCConfig, run: Run, known: Sequence[ProcessStage]) -> list[StageCost]:
    """Of the stages that may be compressed."""
    return [stage.cost for stage in known if stage.cost is not None and not dense_because(stage.key, config, run)]


def _link_times(config: EDGCConfig, run: Run, known: Sequence[ProcessStage], lowest: int) -> LinkTimes | None:
    """Times of the slowest stage that may be compressed; None where rounding was not timed.

    Low rank is at the mean rank that the volume pays for, or at ``lowest``, the break-even rank, if there is one and it
    is smaller; at the smallest rank at least.
    """
    volume = config.ranks.volume
    assert volume is not None
    costs = _costs(config, run, known)
    most = lowest if lowest >= RANK_MULTIPLE else math.inf
    ways = [
        (cost.rounded_seconds, cost.compressed.at(max(min(cost.volume_rank, most), RANK_MULTIPLE)))
        for cost in costs
        if cost.rounded_seconds is not None and cost.volume_rank is not None
    ]
    if not ways:
        return None
    rounded, low_rank = (max(column) for column in zip(*ways, strict=True))
    return LinkTimes(
        ReductionTime(max(cost.host_seconds for cost in costs), run.host_value_bytes / 4),
        ReductionTime(rounded, run.rounded_share * bits_of(ROUNDED) / 32),
        ReductionTime(low_rank, 1 / volume),
        may_replace_low_rank(volume, run.rounded_share),
    )


def _why_rounded(config: EDGCConfig, times: LinkTimes) -> str:
    """Why all gradients are rounded, with the times."""
    instead = f"Low rank takes {times.low_rank.seconds:.2g} s" if times.low_rank_pays else "No rank is worth its time"
    more = f", although that sends more bytes than {flag('volume')} {config.ranks.volume:g} allows"
    return (
        f"on this link reductions take {times.rounded.seconds:.2g} s with every gradient rounded to 4 bits, "
        f"{times.host.seconds:.2g} s dense. {instead}. So gradients are rounded{more if times.may_replace else ''}. "
        f"Give {flag('rmax')} a rank to keep low rank"
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
        longer = f"more than {100 * MAX_TIME_RATIO:g} % of the time of"
    return (
        f"on this link compression takes {longer} the dense reduction {where}: reducing dense{until}. Give {needed} "
        "a rank to compress all the same"
    )
