"""The plan of a whole run, from what is known before its first step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from edgc.config import ConfigError, EDGCConfig, RankPolicy, flag
from edgc.plan.by_volume.budget import BudgetPlanner
from edgc.plan.by_volume.choices import bits_of
from edgc.plan.by_volume.ledger import MIN_WINDOWS
from edgc.plan.by_volume.reduction_sizes import ReductionSizes
from edgc.plan.controller import ControlledStage, Controller
from edgc.plan.ranks import RANK_MULTIPLE, static_ranks
from edgc.plan.run import Run
from edgc.plan.selection import largest_rank, pays, select
from edgc.plan.stages import ProcessStage, StageKey, StageKind, StagePlan, dense_because, slowest
from edgc.plan.times.comm_cost import StageCost
from edgc.plan.times.link_choice import LinkChoice, choose_by_link
from edgc.plan.times.trials import Trials
from edgc.specs import MatrixSpec


@dataclass(frozen=True)
class RunPlan(LinkChoice):
    """What holds for the whole run: what the link has decided, and the stages; the same on every process."""

    stages: tuple[StagePlan, ...] = ()

    @property
    def keys(self) -> list[StageKey]:
        return [stage.key for stage in self.stages]

    @property
    def starts_by_host(self) -> bool:
        """Whether the host sums until a trial shows that compressed steps are shorter."""
        return self.tries and not self.compresses

    def controller(self, sizes: ReductionSizes, message_costs: Sequence[StageCost | None] = ()) -> Controller:
        """The controller of these stages. ``message_costs``: of each stage, see ``ControlledStage``; default: none."""
        iterations = sizes.run.iterations
        budget = trials = None
        if self.config.rank_policy is RankPolicy.VOLUME:
            budget = BudgetPlanner(
                self.config,
                iterations,
                [sizes.parameters(stage) for stage in self.stages],
                [index for index, stage in enumerate(self.stages) if stage.dense_because],
                sizes.bytes_per_value,
                sizes.uncompressed,
                sizes.run.learning_rate,
                self.rounds,
            )
        if self.tries:  # a resumed run may not have timed the link again: the state has what the first one found
            timed = [stage.cost.host_seconds for stage in self.stages if stage.cost is not None]
            host_seconds = max(timed, default=math.nan)
            volume = self.config.ranks.volume
            volume_steps = math.inf if volume is None else iterations / volume * 4 / sizes.run.host_value_bytes
            trials = Trials(iterations, host_seconds, sizes.run.overlapped, self.starts_by_host, volume_steps)
        stages = [
            ControlledStage(
                stage.selection.matrices,
                None if stage.dense_because else stage.cost,
                message_cost,
                sizes.price(stage.key.kind),
                excluded=bool(stage.dense_because),
            )
            for stage, message_cost in zip(self.stages, message_costs or [None] * len(self.stages), strict=True)
        ]
        return Controller(self.config, iterations, stages, budget, trials, self.link_times, sizes.run.replicas)


def plan_run(config: EDGCConfig, run: Run, processes: Sequence[Sequence[ProcessStage]]) -> RunPlan:
    """Resolve rmin and rmax, and sort the parameters of every stage.

    ``processes``: the stages of each process, the first of each its layers. Raises ``ConfigError`` for ranks at which
    no matrix of the model saves anything, and for settings that cannot work in a run of this length.
    """
    config.check_run(run.iterations)
    by_volume = config.rank_policy is RankPolicy.VOLUME
    if by_volume:
        config = config.replace(window=_window(config, run.iterations))
        _check_learning_rate(run)
    known = [stage for own in processes for stage in own]
    if run.alone and all(stage.key.kind is StageKind.LAYERS for stage in known):
        config = config.replace(dense_wire="fp32")  # nothing is summed
    elif by_volume:
        _check_warmup(config, run)
    # by shape: a large run has thousands of processes with hundreds of parameters each
    named = [one for stage in known for one in stage.parameters]
    distinct = {(one.shape, one.embedding, config.study.takes(one.name)): one for one in named}.values()
    usable = largest_rank(select(distinct, config, RANK_MULTIPLE).matrices, config.study.min_saving)
    _check_ranks(config, select(distinct, config, 1).matrices, usable)
    # with a volume and no replicas the sums left, of experts or of a tied embedding, were not timed
    if config.rank_depends_on_link and not (by_volume and run.alone):
        choice = choose_by_link(config, run, known, usable)
    else:
        choice = LinkChoice(config)
    config, warnings = choice.config, choice.warnings
    if choice.compresses or choice.tries:
        warnings += _too_short(config, run, choice.compresses)
    stages = tuple(_planned(key, config, run, known) for key in sorted({stage.key for stage in known}))
    return RunPlan(**{**vars(choice), "config": config, "warnings": warnings}, stages=stages)


def _check_learning_rate(run: Run) -> None:
    """Raises ``ConfigError`` for rates that give no step a budget. On every process: one alone plans."""
    if run.learning_rate is None:
        return
    for iteration in range(run.iterations):
        rate = run.learning_rate(iteration)
        if not 0 <= rate < math.inf:
            raise ConfigError(f"the learning rate of iteration {iteration} is {rate}: it must be finite and at least 0")


def _check_warmup(config: EDGCConfig, run: Run) -> None:
    """Raises ``ConfigError`` where the share of the run that the warm-up was given alone sends more than the volume."""
    volume, fraction, form = config.ranks.volume, config.ranks.warmup_fraction, config.formats.dense_wire
    assert volume is not None
    # in fp32 the host sums, or what sends as much; scales of rounded values are left out
    value_bytes = run.uncompressed_value_bytes(None if form == "fp32" else bits_of(form) / 8)
    if fraction * value_bytes / 4 >= 1 / volume:
        fewer = "" if bits_of(form) <= 4 else f", or {flag('dense_wire')} int4"
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
            largest_usable = f"the largest rank that does is {usable}" if usable else "no rank does"
            raise ConfigError(
                f"{flag(name)} = {getattr(config.ranks, name)}: no matrix of this model saves "
                f"{config.study.min_saving:g}x at rank {rank}; {largest_usable}"
            )


def _too_short(config: EDGCConfig, run: Run, compresses: bool) -> tuple[str, ...]:
    """Warnings of a run in which what is measured cannot set a plan."""
    window, warmup, policy = config.ranks.window, config.warmup(run.iterations), config.rank_policy
    begins = window * max(2, math.ceil(warmup / window))
    if policy is RankPolicy.ENTROPY and compresses and begins >= run.iterations:
        what = "window" if 2 * window >= warmup else "warmup_fraction"
        return (
            f"the run of {run.iterations} iterations ends before compression can begin, at iteration {begins}: after "
            f"two windows of {window} and the warm-up, at the end of a window; give a smaller {flag(what)}",
        )
    if policy is RankPolicy.VOLUME and window > run.iterations - warmup:
        return (
            f"the run of {run.iterations} iterations has no window of {window} after its warm-up, so its plan never "
            f"changes; give more to {flag('iteration_sampling_rate')}",
        )
    return ()


def _window(config: EDGCConfig, iterations: int) -> int:
    """A window of at most a twentieth of the run, so that measurements can set plans, and of at least one of them."""
    measured = math.ceil(1 / config.ranks.iteration_sampling_rate)
    return max(min(config.ranks.window, max(iterations // MIN_WINDOWS, 2)), measured)


def _planned(key: StageKey, config: EDGCConfig, run: Run, known: Sequence[ProcessStage]) -> StagePlan:
    members = [stage for stage in known if stage.key == key]
    selection = select(members[0].parameters, config)
    return StagePlan(key, selection, slowest([stage.cost for stage in members]), dense_because(key, config, run))
