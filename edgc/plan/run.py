"""A training run as its host describes it, and what is decided for all of it before its first step."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edgc.config import EDGCConfig, RankPolicy
from edgc.plan.by_volume.budget import BudgetPlanner
from edgc.plan.by_volume.noise import ENERGY_OF_VECTORS, STEEPNESS_OF_DIRECTIONS, STEEPNESS_OF_ROWS, EnergySpectrum
from edgc.plan.by_volume.parameters import PartialSend, PlannedParameter
from edgc.plan.controller import ControlledStage, Controller
from edgc.plan.stages import StageKey, StageKind, StagePlan
from edgc.plan.times.comm_cost import StageCost
from edgc.plan.times.link_times import LinkTimes
from edgc.plan.times.trials import Trials
from edgc.specs import MatrixSpec


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
    def host_share(self) -> float:
        """The share of an all-reduce's bytes that the host's own sum sends."""
        return 0.5 if self.scatters else 1.0

    @property
    def host_bytes(self) -> float:
        """The bytes of one value in the host's own sum."""
        return self.gradient_bytes * self.host_share

    @property
    def rounded_share(self) -> float:
        """The share of an all-reduce's bytes that a sum of rounded values sends: a reduce-scatter also sums these.

        Sums in 16 bits are known to all processes, so that what they cut off can be fed back.
        """
        return self.host_share if self.gradient_bytes == 4 else 1.0

    @property
    def alone(self) -> bool:
        """Whether no two processes hold the same layers, so that only messages between stages can be compressed."""
        return self.replicas == 1


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

    def parameters(self, stage: StagePlan) -> list[PlannedParameter]:
        """The parameters of a stage that sends any."""
        if self.run.alone and stage.key.kind is StageKind.LAYERS:
            return []
        price, found = self.price(stage.key.kind), []
        for one in stage.selection.matrices:
            spectrum = EnergySpectrum(min(one.rows, one.cols), STEEPNESS_OF_DIRECTIONS)
            directions = PartialSend(spectrum, self.factors(one))
            rows: PartialSend | None = None
            # The rows of a layer are no choice: of queries, keys and values in one matrix the values have the largest,
            # and what queries and keys need would wait.
            if one.embedding:
                rows = PartialSend(EnergySpectrum(one.rows, STEEPNESS_OF_ROWS), *self.rows(one), self.row_format)
            found.append(PlannedParameter(one, directions, rows, price))
        others = [parameter for parameter, _ in stage.selection.others if parameter.elements]
        return found + [PlannedParameter(one.spec, price=price, energy=ENERGY_OF_VECTORS) for one in others]

    def price(self, kind: StageKind) -> float:
        """The price of a stage's bytes; that of layers is 1. The processes of two stages send a tied embedding."""
        if kind is not StageKind.EMBEDDING or self.run.alone:
            return 1.0
        own, both = self.run.replicas, 2 * self.run.replicas
        return 2 * ((both - 1) / both) / ((own - 1) / own)


@dataclass(frozen=True)
class RunPlan:
    """What holds for the whole run; the same on every process.

    ``config`` has its ranks resolved. ``compresses``: false where on this link neither low rank nor rounding is worth
    its time. ``tries``: whether steps of the run decide if compression is worth its time (``edgc.plan.times.trials``).
    Where neither holds, ``config`` asks for the engine ``dense``. ``rounds``: with a volume, every gradient is rounded,
    because on this link that takes less time than low rank. ``link_times``: by which that was decided; None where
    nothing was timed. ``warnings``: for the user, one line each.
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
            volume_steps = math.inf if volume is None else iterations / volume * 4 / sizes.run.host_bytes
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
        return Controller(self.config, iterations, stages, budget, trials, self.link_times)
