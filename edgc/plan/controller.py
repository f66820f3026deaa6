"""The central controller: what a window has shown in, one frozen plan out. No tensors, no collectives."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from edgc.config import EDGCConfig
from edgc.plan.alignment import StageTimes
from edgc.plan.allocation import fewest_bytes_ranks, water_filled_over_stages, water_filled_ranks
from edgc.plan.budget import BudgetPlanner
from edgc.plan.comm_cost import StageCost
from edgc.plan.entropy_ranks import EntropyRanks
from edgc.plan.link_times import LinkTimes
from edgc.plan.observation import StageObservation
from edgc.plan.rank_plan import NO_RANK, RankPlan
from edgc.plan.ranks import nearest_rank
from edgc.plan.trials import Trials
from edgc.specs import MatrixSpec


class Controller:
    """Asks at the end of every window the one that sets the ranks of this run, and makes a plan of the answer.

    By its settings that is a budget (``BudgetPlanner``), entropy (``EntropyRanks``), or a constant. What sets one rank
    a stage also has it shared out among the stage's matrices (``edgc.plan.allocation``). Call ``observe`` once at the
    end of every window and then ``decide``.

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
        link_times: by which a run with a volume rounds all gradients, or does not; None: that never changes.
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
        link_times: LinkTimes | None = None,
    ):
        if len(stages) != len(costs) or not stages:
            raise ValueError(f"{len(stages)} stages and {len(costs)} costs: one of each per stage is needed")
        if config.dynamic and (config.ranks.rmin is None or config.ranks.largest is None):
            raise ValueError("rmin and rmax must be resolved before the controller is built")
        self.config, self.iterations = config, iterations
        self.budget, self.trials, self.link_times = budget, trials, link_times
        self.prices = list(prices) or [1.0] * len(stages)
        self.dense = frozenset(dense)
        self.matrices = tuple(() if place in self.dense else tuple(stage) for place, stage in enumerate(stages))
        self.times = StageTimes(costs, message_costs, computed=config.ranks.link_gbps is not None)
        # also where it decides nothing: a resumed run may have it decide
        self.entropy = EntropyRanks(config, iterations, self.matrices, self.times)
        self.energies: list[Mapping[str, Sequence[float]]] = [{} for _ in stages]
        self.plan = replace(self._first_plan(), by_host=self.trials is not None and self.trials.by_host)

    def _first_plan(self) -> RankPlan:
        nothing, places = (None,) * len(self.matrices), range(len(self.matrices))
        if self.config.engine == "dense":
            return RankPlan(0, 0, nothing, reasons=tuple("dense engine" for _ in places))
        if self.budget is not None:
            plan = RankPlan(0, self.budget.first, nothing)
            return replace(plan, **self._budgeted(self.budget))
        if self.config.dynamic:
            return RankPlan(0, 0, nothing, reasons=self.entropy.first_reasons())
        first = self.config.ranks.warmup(self.iterations)
        return RankPlan(0, first, self._static_ranks(0), reasons=tuple("static" for _ in places))

    def _budgeted(self, budget: BudgetPlanner) -> dict[str, Any]:
        """What the budget sets of a plan. A stage's rank is the largest of its matrices."""
        places = [None if place in self.dense else place for place in range(len(self.matrices))]
        ranks = [None if place is None else budget.ranks(place) for place in places]
        return {
            "ranks": tuple(None if own is None else max(own.values(), default=NO_RANK) for own in ranks),
            "matrix_ranks": tuple(ranks),
            "formats": tuple(None if place is None else budget.formats(place) for place in places),
            "reasons": tuple("never compressed" if place is None else budget.reason for place in places),
            "relief": budget.relief,
        }

    def _static_ranks(self, iteration: int) -> tuple[int | None, ...]:
        rank = self._static_rank(iteration)
        return tuple(None if place in self.dense else rank for place in range(len(self.matrices)))

    def _static_rank(self, iteration: int) -> int:
        """The rank without entropy: always the same, or on a straight line around it, at the window's middle."""
        rank, tilt = self.config.ranks.fixed or NO_RANK, self.config.study.rank_tilt
        end = min(iteration + self.config.ranks.window, self.iterations)
        progress = (iteration + end) / 2 / self.iterations
        return nearest_rank(rank * (1 + tilt * (1 - 2 * progress))) if tilt else rank

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
        if len(observations) != len(self.matrices):
            raise ValueError(f"{len(observations)} observations for {len(self.matrices)} stages")
        self.entropy.observe(observations)
        self.energies = [observation.energies for observation in observations]
        self.times.observe(observations)
        if self.budget is not None:
            noise, rows = [o.noise for o in observations], [o.row_shares for o in observations]
            self.budget.observe(noise, *sent, rows, host_share, self.plan.by_host)
        if self.trials is not None and step_seconds is not None:
            reductions = [o.reduce_seconds for o in observations if math.isfinite(o.reduce_seconds)]
            slower_by = self.trials.observe(step_seconds, max(reductions, default=math.nan), *sent[:2])
            if slower_by:
                self._follow_link(self.trials.by_host, slower_by)
        # with a budget parameters travel in several ways, so that one rank predicts nothing
        if self.budget is None:
            self.times.correct(observations, used, self.plan.by_host)

    def _follow_link(self, by_host: bool, slower_by: float) -> None:
        """Round, or stop rounding, where a link that is slower by so many seconds speaks for it. On a faster one the
        host's own sum is tried.
        """
        times, budget = self.link_times, self.budget
        if times is None or budget is None:
            return
        compressed = times.rounded if budget.rounds else times.low_rank
        times = self.link_times = times.slower(times.host if by_host else compressed, slower_by)
        if by_host:
            budget.rounds = times.rounding_pays
        elif times.low_rank_is_faster:
            budget.rounds = False

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
            if iteration < self.plan.first_iteration:  # what a resumed run finds of its link is no other plan
                changed = {name: value for name, value in changed.items() if name != "reasons"}
            if any(getattr(self.plan, name) != value for name, value in changed.items()):
                version, at = self.plan.version + 1, max(iteration, self.plan.first_iteration)
                return replace(self.plan, version=version, first_iteration=at, **changed)
            return self.plan
        if self.config.engine == "dense":
            return self.plan
        if not self.config.dynamic:
            return self._adopt(iteration, self.plan, self._static_ranks(iteration))
        return self._adopt(iteration, *self.entropy.decide(iteration, self.plan, self.energies))

    def _adopt(self, iteration: int, plan: RankPlan, ranks: tuple[int | None, ...]) -> RankPlan:
        """Share the ranks out among matrices; the plan is a new one only if a rank changes."""
        if self.config.ranks.allocation == "waterfill" and self.config.ranks.fixed is not None:
            matrix_ranks = self._shared_by_all(ranks)
        else:
            matrix_ranks = tuple(self._shared(stage, rank) for stage, rank in enumerate(ranks))
        if (ranks, matrix_ranks) != (plan.ranks, plan.matrix_ranks or (None,) * len(ranks)):
            # a static plan's first iteration may lie ahead
            first = max(iteration, plan.first_iteration)
            return replace(
                plan, version=plan.version + 1, first_iteration=first, ranks=ranks, matrix_ranks=matrix_ranks
            )
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
        found = water_filled_over_stages(
            [self.matrices[place] for place in places],
            [self.energies[place] for place in places],
            max((ranks[place] or 0 for place in places), default=0),
            self.config.study.min_saving,
            [self.prices[place] for place in places],
        )
        if found is None:
            return tuple(self._shared_before(place, own) for place, own in enumerate(ranks))
        shared = dict(zip(places, found, strict=True))
        return tuple(shared.get(place) for place in range(len(ranks)))

    @property
    def rounds(self) -> bool:
        """Whether all gradients are rounded, because that takes less time than low rank."""
        return self.budget is not None and self.budget.rounds

    def settle(self, state: Mapping[str, Any], **ranks: Any) -> None:
        """Use these settings of ranks, as the probe of an earlier run has settled them, and round if it did.

        ``state``: of that run's controller.
        """
        self.link_times = _link_times(state)
        self.config = self.entropy.config = self.config.but(**ranks)
        if self.budget is not None:
            self.budget.bound(self.config.ranks.largest)
            self.budget.rounds = state["budget"] is not None and state["budget"]["rounds"]

    def settle_dense(self, state: Mapping[str, Any]) -> bool:
        """Leave those stages dense that an earlier run with a constant rank has left dense, whatever was timed now.

        ``state``: of that run's controller. Returns whether they are others than this run's.
        """
        before = self.dense
        self.dense = frozenset(place for place, rank in enumerate(state["plan"]["ranks"]) if rank is None)
        return self.dense != before

    def state_dict(self) -> dict[str, Any]:
        """Everything that later decisions depend on, as plain numbers and lists."""
        return {
            **self.entropy.state_dict(),
            **self.times.state_dict(),
            "plan": self.plan.to_dict(),
            "budget": None if self.budget is None else self.budget.state_dict(),
            "trials": None if self.trials is None else self.trials.state_dict(),
            "link_times": None if self.link_times is None else self.link_times.to_list(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Go on where ``state_dict`` was taken. Raises ValueError if it is of other stages or another release.

        False, and nothing is taken, if a volume sets the ranks of only one of the two runs.
        """
        own = self.state_dict()
        if state.keys() != own.keys() or state["plan"].keys() != own["plan"].keys():
            raise ValueError("controller state of another release of EDGC")
        if len(state["costs"]) != len(self.matrices):
            raise ValueError(f"controller state of {len(state['costs'])} stages, this run has {len(self.matrices)}")
        if (state["budget"] is None) != (self.budget is None):
            return False
        if self.trials is not None and state["trials"] is not None:
            self.trials.load_state_dict(state["trials"])
        self.link_times = self.link_times or _link_times(state)
        by_host = self.trials is not None and self.trials.by_host
        tried = () if self.trials is None else self.trials.measured
        before = RankPlan.from_dict(state["plan"])
        if self.budget is not None:
            self.budget.load_state_dict(state["budget"])
            ledger = self.budget.ledger
            ledger.mixed |= before.trial is not None
            ledger.apart |= (by_host, self.budget.rounds) != (before.by_host, state["budget"]["rounds"])
        by_entropy = self.entropy.load_state_dict(state)
        self.times.load_state_dict(state)
        self._go_on(replace(before, by_host=by_host, trial=None, tried=tried), by_entropy)
        return True

    def _go_on(self, plan: RankPlan, by_entropy: bool) -> None:
        """From a plan of the run before, as far as today's settings would have led there.

        ``by_entropy``: entropy has set its ranks, and still does.
        """
        ranks = tuple(None if place in self.dense else rank for place, rank in enumerate(plan.ranks))
        if by_entropy:
            least, most = self.config.ranks.rmin, self.config.ranks.largest
            assert least is not None and most is not None
            ranks = tuple(rank and min(max(rank, least), most) for rank in ranks)
        changed: dict[str, Any] = {"ranks": ranks}
        shared = any(plan.matrix_ranks)
        if by_entropy and shared and (ranks != plan.ranks or self.config.ranks.allocation == "uniform"):
            changed["matrix_ranks"] = ()
        if self.budget is not None:
            self.budget.first = plan.first_iteration  # compression has begun by then, whatever its warm-up is now
            changed = {name: value for name, value in self._budgeted(self.budget).items() if name != "reasons"}
        elif not by_entropy and self.config.engine != "dense" and not self.config.study.rank_tilt:
            first = self._first_plan()
            # of a plan with shared ranks it is the one at which they were shared
            begins = max(first.first_iteration, plan.first_iteration) if shared else first.first_iteration
            unwanted = shared and self.config.ranks.allocation == "uniform"
            if unwanted or (first.ranks, begins, first.reasons) != (ranks, plan.first_iteration, plan.reasons):
                changed = {"ranks": first.ranks, "first_iteration": first.first_iteration, "reasons": first.reasons}
                changed |= {"matrix_ranks": (), "proposed": (), "targets": ()}
        if all(getattr(plan, name) == value for name, value in changed.items()):
            self.plan = plan
        else:
            self.plan = replace(plan, version=plan.version + 1, **changed)


def _link_times(state: Mapping[str, Any]) -> LinkTimes | None:
    return None if state["link_times"] is None else LinkTimes.from_list(state["link_times"])
