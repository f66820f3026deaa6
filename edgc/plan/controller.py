"""The central controller: windows of entropy in, one frozen rank plan out. No tensors, no collectives."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from edgc.config import EDGCConfig, flag
from edgc.plan.alignment import RANK_MULTIPLE, CommCost, aligned_rank
from edgc.plan.allocation import fewest_bytes_ranks, uniform_ranks, water_filled_ranks
from edgc.plan.budget import BudgetPlanner
from edgc.plan.rank_model import StageRankModel
from edgc.plan.spectrum import dropped, extended, rank_for_dropped
from edgc.plan.trials import Trials
from edgc.specs import MatrixSpec

# Settings that what a controller remembers depends on.
REFERENCES = "static_rank", "rank_model", "entropy_estimator"
NO_RANK = 0  # in a plan: compressed by an engine that has no rank


@dataclass(frozen=True)
class StageCost:
    """Seconds that a stage's whole data-parallel reduction takes: compressed as a function of rank, and dense.

    Both include the parameters that low rank leaves, as the reductions timed in training do. ``dense_seconds`` is for
    what EDGC does while a stage is not compressed, in ``dense_wire``; ``host_seconds`` for the host's own sum in
    fp32, which compression has to beat. Of a message between stages both are of its values.
    """

    compressed: CommCost
    dense_seconds: float
    host_seconds: float

    def scaled(self, factor: float) -> "StageCost":
        """The same link under other traffic."""
        return StageCost(self.compressed.scaled(factor), self.dense_seconds * factor, self.host_seconds * factor)

    def seconds(self, rank: int | None) -> float:
        return self.dense_seconds if rank is None else self.compressed.seconds(rank)


@dataclass(frozen=True)
class StageObservation:
    """What one pipeline stage saw in one window, averaged over its ranks; NaN where nothing was measured.

    ``energies``: squared norms of the columns of Q, the largest first, of each matrix by name. ``message_rank``: of the
    activation gradients that the stage has sent to the one before; None: they were not compressed. ``noise``: in what
    the optimizer got, by parameter, and the energy of an entry of its gradient (``edgc.plan.noise``). ``row_shares``:
    what a warm-up has shown of the rows of a parameter's gradient (``edgc.plan.budget.Candidate.with_rows``).
    """

    entropy: float = math.nan
    reduce_seconds: float = math.nan
    micro_backward_seconds: float = math.nan
    message_rank: int | None = None
    energies: Mapping[str, Sequence[float]] = field(default_factory=dict)
    noise: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    row_shares: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class RankPlan:
    """The ranks of all stages from an iteration on; None is dense. Immutable, and the same on every rank.

    ``matrix_ranks`` holds for each stage the rank of every matrix by name, where they differ; None: all have the
    stage's rank. ``formats`` holds for each stage the wire format, or engine, of parameters without a rank; None, or a
    parameter that is not in it: ``rest_wire``. ``proposed`` is what entropy alone asks for, ``targets`` what is left of
    it after bounds, rounding and alignment, and ``ranks`` after the step limit.

    ``by_host``: the host sums after all, because that is faster. In the iterations of ``trial`` (first, first after)
    it is the other way round. ``tried``: seconds of a compressed step and of the host's in the last trial.
    """

    version: int
    first_iteration: int
    ranks: tuple[int | None, ...]
    matrix_ranks: tuple[Mapping[str, int] | None, ...] = ()
    formats: tuple[Mapping[str, str] | None, ...] = ()
    entropy: tuple[float, ...] = ()
    proposed: tuple[float | None, ...] = ()
    targets: tuple[int | None, ...] = ()
    reasons: tuple[str, ...] = ()
    by_host: bool = False
    trial: tuple[int, int] | None = None
    tried: tuple[float, ...] = ()

    def sums_by_host(self, iteration: int) -> bool | None:
        """Whether the host sums in this iteration; None in a warm-up of EDGC's."""
        if iteration < self.first_iteration or all(rank is None for rank in self.ranks):
            return self.by_host or None
        return self.by_host != (self.trial is not None and self.trial[0] <= iteration < self.trial[1])

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "RankPlan":
        own: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
        return cls(**own)


class Controller:
    """Sets a rank per pipeline stage from its entropy history (docs/algorithm.md, 2 to 4).

    Call ``observe`` once at the end of every window and then ``decide``. Stage 0 here is the paper's stage 1: it
    holds the embedding and finishes its backward pass last.

    Args:
        config: settings with ``rmin`` and ``rmax`` resolved (see ``resolve_ranks``).
        iterations: length of the run.
        stages: the matrices that one rank of each stage compresses; a stage that has none stays dense.
        costs: communication cost of each stage; None where it was not measured.
        dense: places of stages that are never compressed.
        message_costs: of the message with a micro-batch's activation gradients from each stage to the one before;
            None, or no list at all, where there is none.
        budget: what sets ranks and formats where the run has a volume.
        prices: of the bytes of each stage (default: 1), where one rank is shared out over all of them.
        trials: what compares compressed steps with the host's; None: compress without comparing.
    """

    def __init__(
        self,
        config: EDGCConfig,
        iterations: int,
        stages: Sequence[Sequence[MatrixSpec]],
        costs: Sequence[StageCost | None],
        dense: Collection[int] = (),
        message_costs: Sequence[StageCost | None] = (),
        budget: BudgetPlanner | None = None,
        prices: Sequence[float] = (),
        trials: Trials | None = None,
    ):
        if len(stages) != len(costs) or not stages:
            raise ValueError(f"{len(stages)} stages and {len(costs)} costs: one of each per stage is needed")
        if config.dynamic and (config.ranks.rmin is None or config.ranks.largest is None):
            raise ValueError("rmin and rmax must be resolved before the controller is built")
        self.config = config
        self.iterations = iterations
        self.budget, self.trials = budget, trials
        self.prices = list(prices) or [1.0] * len(stages)
        self.dense = frozenset(dense)
        self.matrices = tuple(() if place in self.dense else tuple(stage) for place, stage in enumerate(stages))
        self.stages = tuple(
            StageRankModel(tuple((m.rows, m.cols) for m in stage)) if stage else None for stage in self.matrices
        )
        self.energies: list[Mapping[str, Sequence[float]]] = [{} for _ in stages]
        self.costs = list(costs)
        self.message_costs = list(message_costs) or [None] * len(stages)
        self.message_ranks: list[int | None] = [None] * len(stages)
        self.history: list[tuple[float, ...]] = []  # entropy per stage, one entry a window
        self.micro_backward_seconds = math.nan
        # of each stage, the entropy at which its compression began, with rank rmax; None: still in its warm-up
        self.anchor: list[float | None] = [None] * len(stages)
        # what a rank leaves out at first, by measured spectra: an energy or a share; None until it is known
        self.tolerated: list[float | None] = [None] * len(stages)
        self.plan = replace(self._first_plan(), by_host=self.trials is not None and self.trials.by_host)

    def _first_plan(self) -> RankPlan:
        nothing, places = (None,) * len(self.stages), range(len(self.stages))
        if self.config.engine == "dense":
            return RankPlan(0, 0, nothing, reasons=tuple("dense engine" for _ in places))
        if self.budget is not None:
            plan = RankPlan(0, self.budget.first, nothing)
            return replace(plan, **self._budgeted(self.budget))
        if self.config.dynamic:
            return RankPlan(0, 0, nothing, reasons=tuple(self._own_target(place, None)[1] for place in places))
        first = math.ceil(self.config.ranks.warmup_fraction * self.iterations)
        return RankPlan(0, first, self._static_ranks(0), reasons=tuple("static" for _ in places))

    def _budgeted(self, budget: BudgetPlanner) -> dict[str, Any]:
        """What the budget sets of a plan. A stage's rank is the largest of its matrices."""
        places = [None if place in self.dense else place for place in range(len(self.stages))]
        ranks = [None if place is None else budget.ranks(place) for place in places]
        return {
            "ranks": tuple(None if own is None else max(own.values(), default=NO_RANK) for own in ranks),
            "matrix_ranks": tuple(ranks),
            "formats": tuple(None if place is None else budget.formats(place) for place in places),
            "reasons": tuple("never compressed" if place is None else budget.reason for place in places),
        }

    def _static_ranks(self, iteration: int) -> tuple[int | None, ...]:
        rank = self._static_rank(iteration)
        return tuple(None if place in self.dense else rank for place in range(len(self.stages)))

    def _static_rank(self, iteration: int) -> int:
        """The rank without entropy: always the same, or on a straight line around it, at the window's middle."""
        rank, tilt = self.config.ranks.fixed or NO_RANK, self.config.study.rank_tilt
        progress = (iteration + self.config.ranks.window / 2) / self.iterations
        return _nearest(rank * (1 + tilt * (1 - 2 * progress))) if tilt else rank

    def observe(
        self,
        observations: Sequence[StageObservation],
        ranks: Sequence[int | None] | None = None,
        sent: tuple[float, float, float] = (0.0, 0.0, 0.0),
        host_share: float = 0.0,
        step_seconds: Mapping[bool, Sequence[float]] | None = None,
    ) -> None:
        """Take in one window: entropy of every stage, and its timings, by which the fitted costs are corrected.

        ``ranks``: those in use in the window (default: the plan's, of which a static one may not have begun). ``sent``:
        bytes of gradients of the whole run so far, of the host's own way, and of an all-reduce in fp32. ``host_share``:
        the share of this window's steps that the host has summed. ``step_seconds``: see ``Trials.observe``.
        """
        used = self.plan.ranks if ranks is None else ranks
        if len(observations) != len(self.stages):
            raise ValueError(f"{len(observations)} observations for {len(self.stages)} stages")
        self.history.append(tuple(observation.entropy for observation in observations))
        self.energies = [observation.energies for observation in observations]
        self.message_ranks = [observation.message_rank for observation in observations]
        if self.budget is not None:
            noise, rows = [o.noise for o in observations], [o.row_shares for o in observations]
            self.budget.observe(noise, *sent, rows, host_share, self.plan.by_host)
        if self.trials is not None and step_seconds is not None:
            reductions = [o.reduce_seconds for o in observations if math.isfinite(o.reduce_seconds)]
            self.trials.observe(step_seconds, max(reductions, default=math.nan), *sent[:2])
        # The slowest stage sets the pace of the pipeline.
        backward = [o.micro_backward_seconds for o in observations if math.isfinite(o.micro_backward_seconds)]
        if backward:
            self.micro_backward_seconds = max(backward)
        # with a budget parameters travel in several ways, so that one rank predicts nothing
        if self.config.ranks.link_gbps is None and self.budget is None:
            for stage, (cost, observation) in enumerate(zip(self.costs, observations, strict=True)):
                if cost is not None and observation.reduce_seconds > 0:
                    predicted = cost.host_seconds if self.plan.by_host else cost.seconds(used[stage])
                    if predicted > 0:
                        self.costs[stage] = cost.scaled(observation.reduce_seconds / predicted)

    def decide(self, iteration: int) -> RankPlan:
        """The plan from ``iteration`` (the first after the observed window) on; its version grows when ranks change."""
        plan, trials = self._planned(iteration), self.trials
        if trials is not None and iteration >= plan.first_iteration and any(rank is not None for rank in plan.ranks):
            trials.decide(iteration)
            plan = replace(plan, by_host=trials.by_host, trial=trials.trial, tried=trials.measured)
        self.plan = plan
        return plan

    def _planned(self, iteration: int) -> RankPlan:
        """The ranks from ``iteration`` on, if they are used."""
        if self.budget is not None:
            if iteration >= self.plan.first_iteration:  # in the warm-up nothing is compressed
                self.budget.decide(iteration)
            changed = self._budgeted(self.budget)
            if any(getattr(self.plan, name) != value for name, value in changed.items()):
                version, at = self.plan.version + 1, max(iteration, self.plan.first_iteration)
                self.plan = replace(self.plan, version=version, first_iteration=at, **changed)
            return self.plan
        if not self.config.dynamic:
            if self.config.engine == "dense":
                return self.plan
            return self._adopt(iteration, self.plan, self._static_ranks(iteration))
        entropy, places = self.history[-1], range(len(self.stages))
        proposed = tuple(self._proposed(place, entropy[place]) for place in places)
        may_begin = iteration >= self.config.ranks.warmup_fraction * self.iterations
        begins = [may_begin and self.anchor[place] is None and self._stable(place) for place in places]
        for place in places:
            if begins[place]:
                self.anchor[place] = entropy[place]
        own = [self._own_target(place, proposed[place], begins[place]) for place in places]
        targets, reasons = [target for target, _ in own], [reason for _, reason in own]
        first = self._step(self.plan.ranks[0], targets[0])
        if self.config.ranks.align and first is not None:
            for place in places[1:]:
                if self.anchor[place] is not None and not begins[place] and self._can_align(place):
                    targets[place], reasons[place] = self._aligned(place, first), "alignment"
        ranks = tuple(self._step(before, target) for before, target in zip(self.plan.ranks, targets, strict=True))
        plan = replace(self.plan, entropy=entropy, proposed=proposed, targets=tuple(targets), reasons=tuple(reasons))
        return self._adopt(iteration, plan, ranks)

    def _adopt(self, iteration: int, plan: RankPlan, ranks: tuple[int | None, ...]) -> RankPlan:
        """Share the ranks out among matrices; the plan is a new one only if a rank changes."""
        if self.config.ranks.allocation == "waterfill" and self.config.ranks.fixed is not None:
            matrix_ranks = self._shared_by_all(ranks)
        else:
            matrix_ranks = tuple(self._shared(stage, rank) for stage, rank in enumerate(ranks))
        if (ranks, matrix_ranks) != (plan.ranks, plan.matrix_ranks or (None,) * len(ranks)):
            # a static plan's first iteration may lie ahead
            first = max(iteration, plan.first_iteration)
            plan = replace(
                plan, version=plan.version + 1, first_iteration=first, ranks=ranks, matrix_ranks=matrix_ranks
            )
        self.plan = plan
        return plan

    def _shared(self, stage: int, rank: int | None) -> Mapping[str, int] | None:
        if self.config.ranks.allocation == "uniform" or not rank:
            return None
        if not self.energies[stage]:
            return self._shared_before(stage, rank)
        share = water_filled_ranks if self.config.ranks.allocation == "waterfill" else fewest_bytes_ranks
        return share(self.matrices[stage], self.energies[stage], rank, self.config.study.min_saving)

    def _shared_before(self, stage: int, rank: int | None) -> Mapping[str, int] | None:
        """Where nothing has been measured since."""
        return self.plan.matrix_ranks[stage] if self.plan.ranks[stage] == rank and self.plan.matrix_ranks else None

    def _shared_by_all(self, ranks: tuple[int | None, ...]) -> tuple[Mapping[str, int] | None, ...]:
        """One rank, shared out among the matrices of all stages by one water level."""
        places = [place for place, rank in enumerate(ranks) if rank]
        rank, saving = max((ranks[place] or 0 for place in places), default=0), self.config.study.min_saving
        # a stage of which no matrix pays is never measured
        measurable = [place for place in places if uniform_ranks(self.matrices[place], rank, saving)]
        if not measurable or not all(self.energies[place] for place in measurable):
            return tuple(self._shared_before(place, own) for place, own in enumerate(ranks))
        # parameters of two stages may have the same name
        named = [
            (place, one, replace(one, name=f"{place} {one.name}")) for place in places for one in self.matrices[place]
        ]
        found = water_filled_ranks(
            [key for _, _, key in named],
            {key.name: self.energies[place].get(one.name, ()) for place, one, key in named},
            rank,
            saving,
            {key.name: self.prices[place] for place, _, key in named},
        )
        shared: list[dict[str, int]] = [{} for _ in ranks]
        for place, one, key in named:
            if key.name in found:
                shared[place][one.name] = found[key.name]
        return tuple(shared[place] if place in places else None for place in range(len(ranks)))

    def _stable(self, stage: int) -> bool:
        """Whether a stage's entropy changed by less than the threshold, in nats, between the last two windows.

        A difference of entropies is the same in every unit of the gradient; a ratio is not.
        """
        if len(self.history) < 2 or self.stages[stage] is None:
            return False
        before, now = (entropy[stage] for entropy in self.history[-2:])
        # false for a NaN, and for -inf, the entropy of gradients that are all zero
        return abs(now - before) < self.config.study.entropy_stability

    def _own_target(self, stage: int, proposed: float | None, begins: bool = False) -> tuple[int | None, str]:
        """The rank to which a stage's own entropy leads, within the bounds, and the reason."""
        if self.stages[stage] is None:
            return None, "never compressed"
        if self.anchor[stage] is None:
            return None, "warm-up"
        if begins:
            return self.config.ranks.largest, "entropy is stable"
        if proposed is None:
            return self.plan.ranks[stage], "nothing measured"
        return self._bounded(proposed), "entropy"

    def _proposed(self, stage: int, entropy: float) -> float | None:
        """CQM: the rank that drops the same norm as rmax did when compression began; None without an entropy."""
        anchor, model = self.anchor[stage], self.stages[stage]
        if anchor is None or model is None:
            return None
        assert self.config.ranks.largest is not None
        if self.config.ranks.rank_model != "gaussian":
            return self._proposed_by_spectrum(stage)
        if not math.isfinite(entropy):
            return None
        return model.adjusted_rank(self.config.ranks.largest, anchor, entropy)

    def _proposed_by_spectrum(self, stage: int) -> float | None:
        """CQM with measured spectra in place of normal entries; the first that are measured set what is tolerated."""
        rank, energies = self.plan.ranks[stage], self.energies[stage]
        spectra = [
            extended(energies[matrix.name], min(matrix.rows, matrix.cols))
            for matrix in self.matrices[stage]
            if energies.get(matrix.name)
        ]
        whole = dropped(spectra, 0)
        if not rank or not 0 < whole < math.inf:
            return None
        unit = whole if self.config.ranks.rank_model == "residual" else 1.0
        tolerated = self.tolerated[stage]
        if tolerated is None:
            self.tolerated[stage] = dropped(spectra, rank) / unit
            return rank
        return rank_for_dropped(spectra, tolerated * unit)

    def _can_align(self, stage: int) -> bool:
        """Whether all is known that alignment of a later stage to the first depends on."""
        return None not in (self.costs[0], self.costs[stage]) and not math.isnan(self.micro_backward_seconds)

    def _aligned(self, stage: int, first: int) -> int | None:
        """The rank at which a later stage ends together with the first one, which has rank ``first``; None: dense."""
        first_cost, cost = self.costs[0], self.costs[stage]
        assert first_cost is not None and cost is not None and self.config.ranks.largest is not None
        slack = self._slack(stage)
        if first_cost.seconds(first) + slack >= cost.dense_seconds:
            return None
        # eta is the stage's own: links and stages differ
        return aligned_rank(first, cost.compressed, slack, self.config.ranks.largest)

    def _slack(self, stage: int) -> float:
        """Seconds from the stage's last backward pass to the first stage's: those between them, and the messages."""
        on_the_way = zip(self.message_costs[1 : stage + 1], self.message_ranks[1 : stage + 1], strict=True)
        messages = sum(cost.seconds(rank) for cost, rank in on_the_way if cost is not None)
        return stage * self.micro_backward_seconds + messages

    def _bounded(self, rank: float) -> int:
        assert self.config.ranks.rmin is not None and self.config.ranks.largest is not None
        return min(max(_nearest(rank), self.config.ranks.rmin), self.config.ranks.largest)

    def _step(self, before: int | None, wanted: int | None) -> int | None:
        """Move from ``before`` towards ``wanted`` by at most the step limit. Dense lies one step beyond rmax."""
        rmax, limit = self.config.ranks.largest, self.config.ranks.rank_step
        assert rmax is not None
        if limit >= RANK_MULTIPLE:
            limit = RANK_MULTIPLE * (limit // RANK_MULTIPLE)
        if wanted is None and before is None:
            return None
        if before is None:
            return rmax
        before = min(before, rmax)  # a resumed run may have a smaller one
        if wanted is None:
            return None if before == rmax else min(before + limit, rmax)
        return min(max(wanted, before - limit), before + limit, rmax)

    def state_dict(self) -> dict[str, Any]:
        """Everything that later decisions depend on, as plain numbers and lists."""
        return {
            "settings": self.config.only(REFERENCES),
            "history": [list(entropy) for entropy in self.history],
            "anchor": list(self.anchor),
            "tolerated": list(self.tolerated),
            "micro_backward_seconds": self.micro_backward_seconds,
            "costs": [None if cost is None else asdict(cost) for cost in self.costs],
            "message_costs": [None if cost is None else asdict(cost) for cost in self.message_costs],
            "plan": self.plan.to_dict(),
            "budget": None if self.budget is None else self.budget.state_dict(),
            "trials": None if self.trials is None else self.trials.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken. Raises ValueError if it is of other stages or another release."""
        own = self.state_dict()
        if state.keys() != own.keys() or state["plan"].keys() != own["plan"].keys():
            raise ValueError("controller state of another release of EDGC")
        if len(state["costs"]) != len(self.stages):
            raise ValueError(f"controller state of {len(state['costs'])} stages, this run has {len(self.stages)}")
        if (state["budget"] is None) != (self.budget is None):
            raise ValueError(f"{flag('volume')} was {'not ' * (state['budget'] is None)}given before")
        if self.budget is not None:
            self.budget.load_state_dict(state["budget"])
        if self.trials is not None and state["trials"] is not None:
            self.trials.load_state_dict(state["trials"])
        then, now = state["settings"], self.config.only(REFERENCES)
        by_entropy = then["static_rank"] is None and self.config.dynamic
        # else they are in another unit
        if then["entropy_estimator"] == now["entropy_estimator"]:
            self.history = [tuple(entropy) for entropy in state["history"]]
            self.anchor = list(state["anchor"]) if by_entropy else self.anchor
            if then["rank_model"] == now["rank_model"]:
                self.tolerated = list(state["tolerated"])
        self.micro_backward_seconds = state["micro_backward_seconds"]
        given = self.config.ranks.link_gbps is not None  # then own costs are computed from it, perhaps another one
        self.costs, self.message_costs = (
            [
                cost if saved is None or (given and cost is not None) else _as_cost(saved)
                for cost, saved in zip(costs, state[name], strict=True)
            ]
            for name, costs in (("costs", self.costs), ("message_costs", self.message_costs))
        )
        by_host = self.trials is not None and self.trials.by_host
        self._go_on(replace(RankPlan.from_dict(state["plan"]), by_host=by_host, trial=None), by_entropy)

    def _go_on(self, plan: RankPlan, by_entropy: bool) -> None:
        """From a plan of the run before, as far as today's settings would have led there.

        ``by_entropy``: entropy has set its ranks, and still does.
        """
        ranks = tuple(None if place in self.dense else rank for place, rank in enumerate(plan.ranks))
        changed: dict[str, Any] = {"ranks": ranks}
        if self.budget is not None:
            self.budget.first = plan.first_iteration  # compression has begun by then, whatever its warm-up is now
            changed = {name: value for name, value in self._budgeted(self.budget).items() if name != "reasons"}
        elif not by_entropy and self.config.engine != "dense" and not self.config.study.rank_tilt:
            first = self._first_plan()
            if (first.ranks, first.first_iteration, first.reasons) != (ranks, plan.first_iteration, plan.reasons):
                changed = {"ranks": first.ranks, "first_iteration": first.first_iteration, "reasons": first.reasons}
                changed |= {"matrix_ranks": (), "proposed": (), "targets": ()}
        if all(getattr(plan, name) == value for name, value in changed.items()):
            self.plan = plan
        else:
            self.plan = replace(plan, version=plan.version + 1, **changed)


def _as_cost(fields: Mapping[str, Any]) -> StageCost:
    return StageCost(**{**fields, "compressed": CommCost(**fields["compressed"])})


def resolve_ranks(config: EDGCConfig, break_even: int, width: int) -> EDGCConfig:
    """Make ranks of shares of the width; ``rmax`` is the break-even rank by default, and ``rmin`` a quarter of rmax.

    ``break_even``: the smallest, over the stages, of the largest ranks that are not slower than dense; a share is at
    most that. ``width``: the smaller side of most matrices (``allocation.width``). Source of the quarter: the paper has
    r_max/4 to r_max/6. Raises ``ConfigError`` for an rmin above that rmax.
    """

    def known(rank: float | None) -> int:
        if rank is None:
            return _multiple(break_even)
        return int(rank) if rank >= 1 else _multiple(min(break_even, rank * width))

    if config.ranks.static_rank is not None:
        return config.but(static_rank=known(config.ranks.static_rank))
    rmax = known(config.ranks.rmax)
    if config.ranks.volume is not None:
        return config.but(rmax=rmax)
    rmin = min(rmax, _multiple(rmax / 4)) if config.ranks.rmin is None else config.ranks.rmin
    return config.but(rmin=rmin, rmax=rmax)


def static_ranks(config: EDGCConfig) -> tuple[int, int] | None:
    """The smallest and largest rank of a run whose ``static_rank`` is settled."""
    rank, tilt = config.ranks.fixed, abs(config.study.rank_tilt)
    if rank is None:
        return None
    return (_nearest(rank * (1 - tilt)), _nearest(rank * (1 + tilt))) if tilt else (rank, rank)


def smallest_rank(config: EDGCConfig) -> int:
    """The smallest rank that a run can have, as far as ``config`` settles it."""
    static = static_ranks(config)
    return static[0] if static else config.ranks.rmin or RANK_MULTIPLE


def _nearest(rank: float) -> int:
    """Rounded to a multiple of 4, at least 4."""
    return max(RANK_MULTIPLE, RANK_MULTIPLE * round(rank / RANK_MULTIPLE))


def _multiple(rank: float) -> int:
    """Rounded down to a multiple of 4, at least 4."""
    return max(RANK_MULTIPLE, RANK_MULTIPLE * int(rank // RANK_MULTIPLE))
