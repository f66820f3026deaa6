"""From what is known before training to the plan of a run: its settings, its stages, and why a stage stays dense."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from edgc.config import ConfigError, EDGCConfig, flag
from edgc.plan.allocation import Allocation, allocate, largest_rank, width
from edgc.plan.budget import LEAST_RATE, BudgetPlanner, worth_of
from edgc.plan.candidates import ROUNDED, Candidate, PartialSend, bits_of
from edgc.plan.comm_cost import StageCost, break_even_rank
from edgc.plan.controller import Controller
from edgc.plan.ledger import WINDOWS
from edgc.plan.link_times import WORTH_IT, LinkTimes, Timing
from edgc.plan.noise import ENERGY_OF_VECTORS, STEEPNESS_OF_DIRECTIONS, STEEPNESS_OF_ROWS, EnergySpectrum
from edgc.plan.ranks import RANK_MULTIPLE, resolve_ranks, smallest_rank, static_ranks
from edgc.plan.trials import Trials
from edgc.specs import MatrixSpec, Parameter


class Part(IntEnum):
    """Which gradients of the pipeline stages a stage of the plan holds."""

    LAYERS = 0
    EXPERTS = 1
    EMBEDDING = 2  # the tied one of the first and the last stage, where they sum it together


@dataclass(frozen=True, order=True)
class StageKey:
    """A stage of the plan. In order: all pipeline stages, the experts of each that has some, the tied embedding."""

    part: Part
    pipeline_stage: int  # counted from 0

    def __str__(self) -> str:
        if self.part is Part.EMBEDDING:
            return "tied embedding"
        return f"stage {self.pipeline_stage + 1}{' experts' if self.part is Part.EXPERTS else ''}"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run as its host describes it; the same on every process.

    ``replicas``: how many processes hold the same layers, and sum their gradients. ``gradient_bytes``: of one value in
    the host's gradient buffers. ``scatters``: the host's own sum is a reduce-scatter, and each process needs its shard
    alone. ``overlapped``: reductions run beside the backward pass. ``repeatable``: the host may skip a step, or run it
    again, after its reduction; reducers then keep their state of before the step. ``learning_rate``: by iteration, in
    any unit, where the host knows it.
    """

    iterations: int
    replicas: int
    pipeline_stages: int = 1
    gradient_bytes: int = 4
    scatters: bool = False
    overlapped: bool = False
    repeatable: bool = False
    learning_rate: Callable[[int], float] | None = None

    @property
    def host_bytes(self) -> float:
        """Of one value in the host's own sum, whose reduce-scatter is half of an all-reduce."""
        return self.gradient_bytes / 2 if self.scatters else self.gradient_bytes

    @property
    def rounded_share(self) -> float:
        """Of an all-reduce's bytes, what a sum of rounded values sends: a reduce-scatter also sums these.

        Sums in 16 bits are known to all processes, so that what they cut off can be fed back.
        """
        return 0.5 if self.scatters and self.gradient_bytes == 4 else 1.0

    @property
    def alone(self) -> bool:
        """Whether no two processes hold the same layers, so that only messages between stages can be compressed."""
        return self.replicas == 1


@dataclass(frozen=True)
class ProcessStage:
    """What one process knows of one of its stages. ``cost``: of its reductions; None where nobody asked for it."""

    key: StageKey
    parameters: tuple[Parameter, ...]
    cost: StageCost | None = None


@dataclass(frozen=True)
class StagePlan:
    """A stage of the plan. ``dense_because``: why it is never compressed; empty if it may be.

    ``allocation`` is that of its first process, ``cost`` that of its slowest one.
    """

    key: StageKey
    allocation: Allocation
    cost: StageCost | None
    dense_because: str


@dataclass(frozen=True)
class ReductionSizes:
    """Bytes of messages, of which an all-reduce sends all and a reduce-scatter half: of a matrix's factors per rank; of
    one of its rows, and of choosing rows; of a value in each format to choose from, and of a value while nothing is
    compressed. ``row_format``: in which rows travel.
    """

    factors: Callable[[MatrixSpec], float]
    rows: Callable[[MatrixSpec], tuple[float, float]]
    row_format: str
    bytes_per_value: Mapping[str, float]
    uncompressed: float
    run: Run

    def candidates(self, stage: StagePlan) -> list[Candidate]:
        """The parameters of a stage that sends any."""
        if self.run.alone and stage.key.part is Part.LAYERS:
            return []
        price, found = self.price(stage.key.part), []
        for one in stage.allocation.matrices:
            spectrum = EnergySpectrum(min(one.rows, one.cols), STEEPNESS_OF_DIRECTIONS)
            directions = PartialSend(spectrum, self.factors(one))
            rows: PartialSend | None = None
            # The rows of a layer are no choice: of queries, keys and values in one matrix the values have the largest,
            # and what queries and keys need would wait.
            if one.embedding:
                rows = PartialSend(EnergySpectrum(one.rows, STEEPNESS_OF_ROWS), *self.rows(one), self.row_format)
            found.append(Candidate(one, directions, rows, price))
        others = [parameter for parameter, _ in stage.allocation.others if parameter.elements]
        return found + [Candidate(one.spec, price=price, energy=ENERGY_OF_VECTORS) for one in others]

    def price(self, part: Part) -> float:
        """Of bytes of a stage, in the unit of a stage of layers: a tied embedding is sent by the processes of two."""
        if part is not Part.EMBEDDING or self.run.alone:
            return 1.0
        own, both = self.run.replicas, 2 * self.run.replicas
        return 2 * ((both - 1) / both) / ((own - 1) / own)


@dataclass(frozen=True)
class RunPlan:
    """What holds for the whole run; the same on every process.

    ``config`` has its ranks settled. ``compresses``: false where on this link neither low rank nor rounding is worth
    its time. ``tries``: whether steps of the run decide if compression is worth its time
    (``edgc.plan.trials``). Where neither holds, ``config`` asks for the engine ``dense``. ``rounds``: with a volume,
    every gradient is rounded, because on this link that takes less time than low rank. ``link_times``: by which that
    was decided; None where nothing was timed. ``warnings``: for the user, one line each.
    """

    config: EDGCConfig
    stages: tuple[StagePlan, ...]
    compresses: bool = True
    warnings: tuple[str, ...] = ()
    tries: bool = False
    rounds: bool = False
    link_times: LinkTimes | None = None

    @property
    def keys(self) -> list[StageKey]:
        return [stage.key for stage in self.stages]

    def controller(
        self, iterations: int, sizes: ReductionSizes, message_costs: Sequence[StageCost | None] = ()
    ) -> Controller:
        """The controller of these stages. ``message_costs``: see there."""
        never = [place for place, stage in enumerate(self.stages) if stage.dense_because]
        budget, rate, power = None, sizes.run.learning_rate, self.config.study.learning_rate_power
        if self.config.ranks.volume is not None:
            budget = BudgetPlanner(
                self.config.ranks.volume,
                iterations,
                self.config.ranks.warmup(iterations),
                [sizes.candidates(stage) for stage in self.stages],
                never,
                sizes.bytes_per_value,
                sizes.uncompressed,
                most=self.config.ranks.largest,
                worth=worth_of(rate, iterations, power) if rate and power else None,
                least_fidelity=self.config.study.least_fidelity,
                least_worth=LEAST_RATE**power if rate and power else 0.0,
                window=self.config.ranks.window,
                rounds=self.rounds,
            )
        trials = None
        if self.tries:  # a resumed run may not have timed the link again: the state has what the first one found
            timed = [stage.cost.host_seconds for stage in self.stages if stage.cost is not None]
            host_seconds = max(timed, default=math.nan)
            trials = Trials(iterations, host_seconds, sizes.run.overlapped, by_host=not self.compresses)
        return Controller(
            self.config,
            iterations,
            [stage.allocation.matrices for stage in self.stages],
            [None if stage.dense_because else stage.cost for stage in self.stages],
            never,
            message_costs,
            budget=budget,
            prices=[sizes.price(stage.key.part) for stage in self.stages],
            trials=trials,
            link_times=self.link_times,
        )


def break_even(cost: StageCost, matrices: Sequence[MatrixSpec], min_saving: float) -> int:
    """The largest rank at which a stage is not slower than the host's sum and still saves enough; 0 if none is."""
    return min(link_rank(cost), largest_rank(matrices, min_saving))


def link_rank(cost: StageCost, share: float = 1.0) -> int:
    """The largest rank, whatever it saves, at which a stage takes no longer than this share of the time of the host's
    sum; 0 if none does.
    """
    return RANK_MULTIPLE * (break_even_rank(cost.compressed, share * cost.host_seconds) // RANK_MULTIPLE)


def plan_run(config: EDGCConfig, run: Run, processes: Sequence[Sequence[ProcessStage]]) -> RunPlan:
    """Settle rmin and rmax, and sort the parameters of every stage.

    ``processes``: the stages of each process, the first of each its layers. Raises ``ConfigError`` for ranks at which
    no matrix of the model saves anything, and for settings that cannot work in a run of this length.
    """
    config.check_run(run.iterations)
    if config.ranks.volume is not None:
        config = config.but(window=_window(config, run.iterations))
        _check_warmup(config, run)
    usable = max(
        largest_rank([m for stage in own for m in _allocated(stage, config, RANK_MULTIPLE)], config.study.min_saving)
        for own in processes
    )
    _check_ranks(config, usable)
    known = [stage for own in processes for stage in own]
    compresses, tries, rounds = True, False, False
    times: LinkTimes | None = None
    warnings: list[str] = []
    # with a volume and no replicas the one sum left, of a tied embedding, was not timed
    if config.asks_link and not (config.ranks.volume and run.alone):
        lowest = usable if run.alone else _lowest_break_even(config, run, known)
        if config.ranks.volume is not None and config.ranks.rmax is None:  # who gives a rank wants low rank
            times = _link_times(config, run, known, lowest)
        rounds = times is not None and times.rounding_pays
        why = [_why_rounded(config, times)] if times is not None and rounds else []
        config, compresses, tries, warnings = _settled(config, run, known, usable, lowest, rounds)
        warnings = [*why, *warnings]
    if compresses or tries:
        warnings += _too_short(config, run, compresses)
    stages = tuple(_planned(key, config, run, known) for key in sorted({stage.key for stage in known}))
    if run.alone:  # the host's own sum and gather over one process change nothing; rounding would
        config = config.but(dense_wire="fp32", param_wire=None)
    return RunPlan(config, stages, compresses, tuple(warnings), tries, rounds, times)


def _check_warmup(config: EDGCConfig, run: Run) -> None:
    """Raises ``ConfigError`` where the warm-up alone sends more than the volume."""
    volume, fraction, form = config.ranks.volume, config.ranks.warmup_fraction, config.formats.dense_wire
    assert volume is not None
    exact = form == "fp32"  # then the host sums, or what sends as much
    value_bytes = run.host_bytes if exact else run.rounded_share * bits_of(form) / 8
    if fraction * value_bytes / 4 >= 1 / volume:
        fewer = "" if bits_of(form) <= 4 else f", or {flag('dense_wire')} int4"
        raise ConfigError(
            f"{flag('volume')} = {volume:g}: the warm-up of {100 * fraction:g} % of the run in {form} alone sends more "
            f"than that allows; give a smaller {flag('warmup_fraction')}{fewer}"
        )


def _check_ranks(config: EDGCConfig, usable: int) -> None:
    """Raises ``ConfigError`` for a rank beyond the largest that saves anything in a matrix of the model."""
    _, largest = static_ranks(config) or (None, None)
    # with a volume rmax bounds a mean rank, and may lie beyond what pays
    rmax = config.ranks.largest if config.ranks.volume is None else None
    for name, rank in (("rmin", config.ranks.rmin), ("rmax", rmax), ("static_rank", largest)):
        if rank is not None and rank > usable:
            raise ConfigError(
                f"{flag(name)} = {getattr(config.ranks, name)}: no matrix of this model saves "
                f"{config.study.min_saving:g}x at rank {rank}; the largest rank that does is {usable}"
            )


def _settled(
    config: EDGCConfig, run: Run, known: Sequence[ProcessStage], usable: int, lowest: int, rounds: bool
) -> tuple[EDGCConfig, bool, bool, list[str]]:
    """The settings with the ranks that the link allows; whether to compress; whether steps of the run are to try it;
    and warnings. ``lowest``: the break-even rank; ``rounds``: all gradients are rounded.
    """
    volume = config.ranks.volume
    warnings: list[str] = []
    asked = config.ranks.largest is not None
    # a budget rounds what has no matrix for low rank, and nothing was timed of it
    untimed = volume is not None and all(stage.cost is None for stage in known)
    compresses = asked or rounds or untimed or lowest >= max(RANK_MULTIPLE, config.ranks.rmin or 0)
    # a link that is only computed is not there to be timed
    tries = not asked and not run.alone and config.ranks.link_gbps is None and (compresses or volume is not None)
    if not compresses:
        warnings.append(_why_dense(config, lowest, usable, tries))
        if config.pipeline.messages.follows:
            warnings.append(
                "messages between stages stay uncompressed, too; give them a rank to compress them, as in "
                f"--edgc-pp {config.pipeline.messages.which}:powersgd:16"
            )
            config = config.but(pp="off")
    if compresses or tries:
        # where steps will try, the link of now is no bound for that of later
        bound = lowest if compresses and not rounds else usable
        matrices = [matrix for stage in known for matrix in _allocated(stage, config, smallest_rank(config))]
        return resolve_ranks(config, bound, width(matrices)), compresses, tries, warnings
    formats = {"rest_wire": "fp32", "dense_wire": "fp32"}
    dense = config.but(engine="dense", static_rank=None, volume=None, rank_tilt=0.0, kernels="plain", **formats)
    return dense, compresses, tries, warnings


def _link_times(config: EDGCConfig, run: Run, known: Sequence[ProcessStage], lowest: int) -> LinkTimes | None:
    """Of the slowest stage that may be compressed; None where rounding was not timed.

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
    if usable < RANK_MULTIPLE and config.ranks.volume is None:
        return f"no matrix of this model saves {config.study.min_saving:g}x in low rank: reducing dense"
    needed, where = flag("rmax" if config.ranks.static_rank is None else "static_rank"), "at every rank"
    if config.ranks.rmin is not None and lowest >= RANK_MULTIPLE:
        where = f"above rank {lowest}, and {flag('rmin')} is {config.ranks.rmin}"
    until = " until reductions take longer" if tries else ""
    return (
        f"on this link compression takes longer than the dense reduction {where}: reducing dense{until}. Give {needed} "
        "a rank to compress all the same"
    )


def _too_short(config: EDGCConfig, run: Run, compresses: bool) -> list[str]:
    """Warnings of a run in which what is measured cannot set a plan."""
    window, warmup = config.ranks.window, config.ranks.warmup(run.iterations)
    if config.dynamic and compresses and max(2 * window, warmup) >= run.iterations:
        return [
            f"the run of {run.iterations} iterations ends before compression can begin: whether entropy is stable is "
            f"known after two windows of {window}; give a smaller {flag('window')}"
        ]
    if config.ranks.volume is not None and window > run.iterations - warmup:
        return [
            f"the run of {run.iterations} iterations has no window of {window} after its warm-up, so its plan never "
            f"changes; give more to {flag('iteration_sampling_rate')}"
        ]
    return []


def _window(config: EDGCConfig, iterations: int) -> int:
    """At most a twentieth of the run, so that what is measured can set a budget's plan; never without a measurement."""
    measured = math.ceil(1 / config.ranks.iteration_sampling_rate)
    return max(min(config.ranks.window, max(iterations // WINDOWS, 2)), measured)


def dense_because(key: StageKey, config: EDGCConfig, run: Run) -> str:
    """Why a stage's gradients are never compressed; empty if they are."""
    if key.part is Part.LAYERS and run.alone:
        return "no other process has these parameters"
    share = config.study.stage_share
    if key.part is not Part.EMBEDDING and key.pipeline_stage >= math.ceil(share * run.pipeline_stages - 1e-9):
        return f"beyond {flag('stage_share')} {share:g}"
    return ""


def slowest(costs: Sequence[StageCost | None]) -> StageCost | None:
    """The cost of a stage whose processes measured it separately; None if they did not."""
    return max((cost for cost in costs if cost is not None), key=lambda cost: cost.dense_seconds, default=None)


def _allocated(stage: ProcessStage, config: EDGCConfig, rank: int) -> tuple[MatrixSpec, ...]:
    return allocate(stage.parameters, config, rank).matrices


def _lowest_break_even(config: EDGCConfig, run: Run, known: Sequence[ProcessStage]) -> int:
    """Over the stages that may be compressed: the slowest link limits all."""
    lowest = []
    for stage in known:
        if stage.cost is None or dense_because(stage.key, config, run):
            continue
        if config.ranks.volume is not None:  # which itself says how much must be saved
            lowest.append(link_rank(stage.cost, WORTH_IT))
        else:
            matrices = _allocated(stage, config, smallest_rank(config))
            lowest.append(break_even(stage.cost, matrices, config.study.min_saving))
    return min(lowest, default=0)


def _planned(key: StageKey, config: EDGCConfig, run: Run, known: Sequence[ProcessStage]) -> StagePlan:
    members = [stage for stage in known if stage.key == key]
    allocation = allocate(members[0].parameters, config, smallest_rank(config))
    return StagePlan(key, allocation, slowest([stage.cost for stage in members]), dense_because(key, config, run))
