"""The central controller: what a window has shown in, one frozen plan out. No tensors, no collectives."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgc.byte_counts import ByteCount
from edgc.config import EDGCConfig, RankPolicy
from edgc.plan.allocation import RankAllocation
from edgc.plan.by_entropy.alignment import StageTimes
from edgc.plan.by_entropy.entropy_ranks import EntropyRanks
from edgc.plan.by_volume.budget import BudgetPlanner
from edgc.plan.loss_watch import LossWatch
from edgc.plan.observation import WindowObservation
from edgc.plan.policies import ConstantRank, NoRanks, Policy, RanksByBudget, RanksByEntropy
from edgc.plan.rank_plan import NEVER_COMPRESSED, RankPlan
from edgc.plan.times.comm_cost import StageCost
from edgc.plan.times.link_times import LinkTimes
from edgc.plan.times.trials import Trials
from edgc.specs import MatrixSpec


@dataclass(frozen=True)
class ControlledStage:
    """A stage as the controller knows it.

    ``matrices``: those that one process compresses; where entropy sets ranks, a stage without any stays dense.
    ``cost``: of its reduction; None where it was not measured. ``message_cost``: of the message with a micro-batch's
    activation gradients to the stage before; None where there is none. ``price``: of its bytes, where one rank is
    shared out over all stages. ``excluded``: it is never compressed.
    """

    matrices: Sequence[MatrixSpec]
    cost: StageCost | None = None
    message_cost: StageCost | None = None
    price: float = 1.0
    excluded: bool = False


class Controller:
    """Takes in what each window has shown, and asks the policy of this run (``edgc.plan.policies``) for the next plan.

    Call ``observe`` once at the end of every window and then ``decide``.

    Args:
        config: settings with ``rmin`` and ``rmax`` resolved (see ``resolve_ranks``).
        iterations: length of the run.
        stages: at least one.
        budget: what sets ranks and formats where the run has a volume.
        trials: what compares compressed steps with the host's; None: compress without comparing.
        link_times: by which a run with a volume rounds all gradients, or does not; None: that never changes.
        replicas: how many processes sum the gradients of which entropy is measured.
    """

    def __init__(
        self,
        config: EDGCConfig,
        iterations: int,
        stages: Sequence[ControlledStage],
        budget: BudgetPlanner | None = None,
        trials: Trials | None = None,
        link_times: LinkTimes | None = None,
        replicas: int = 1,
    ):
        bounded = config.rank_depends_on_link and config.rank_policy is not RankPolicy.VOLUME
        if bounded and (config.ranks.rmin is None or config.ranks.resolved_rmax is None):
            raise ValueError("rmin and rmax must be resolved before the controller is built")
        self.config, self.iterations = config, iterations
        self.budget, self.trials, self.link_times = budget, trials, link_times
        self.prices = [stage.price for stage in stages]
        self.excluded = frozenset(index for index, stage in enumerate(stages) if stage.excluded)
        self.matrices = tuple(() if stage.excluded else tuple(stage.matrices) for stage in stages)
        self.times = StageTimes(
            [stage.cost for stage in stages],
            [stage.message_cost for stage in stages],
            computed=config.ranks.link_gbps is not None,
        )
        # also where it decides nothing: a resumed run may have it decide
        self.entropy = EntropyRanks(config, iterations, self.matrices, self.times, replicas)
        self.energies: list[Mapping[str, Sequence[float]]] = [{} for _ in stages]
        self.loss = LossWatch(config.study.greatest_loss_rise)
        self.resumed = False  # whether it goes on where another one had ended
        self.plan = self._first()

    def _first(self) -> RankPlan:
        return replace(self.policy.first(), by_host=self.trials is not None and self.trials.by_host)

    @property
    def policy(self) -> Policy:
        """What sets the ranks by today's settings."""
        stages, policy = len(self.matrices), self.config.rank_policy
        if policy is RankPolicy.NONE:
            return NoRanks(stages, self.excluded)
        if self.budget is not None:
            return RanksByBudget(self.budget, stages, self.excluded, self.loss.rise > 0)
        allocation = RankAllocation(self.config, self.matrices, self.energies, self.prices)
        if policy is RankPolicy.ENTROPY:
            return RanksByEntropy(self.config, self.entropy, allocation, self.excluded, self.loss.rise > 0)
        return ConstantRank(self.config, self.iterations, allocation, self.excluded)

    def begin(self, iteration: int, sent: ByteCount) -> None:
        """Begin amid a run, at ``iteration``. A volume is then that of the steps from there on.

        ``sent``: bytes of the run before.
        """
        if self.budget is not None:
            self.budget.begin(iteration, sent)
            self._bound_trials(self.budget)
            self.plan = self._first()

    def _bound_trials(self, budget: BudgetPlanner) -> None:
        """Trials may take a share of what a volume allows the steps that it is of."""
        if self.trials is not None:
            self.trials.share_of_run = 1 - budget.ledger.begins / self.iterations

    def observe(self, window: WindowObservation) -> None:
        """Take in one window: entropy of every stage, and its timings, by which the fitted costs are corrected."""
        observations, used = window.stages, self.plan.ranks if window.ranks is None else window.ranks
        if len(observations) != len(self.matrices):
            raise ValueError(f"{len(observations)} observations for {len(self.matrices)} stages")
        self.loss.observe(window.loss)
        self.entropy.observe(observations)
        self.energies = [observation.energies for observation in observations]
        self.times.observe(observations)
        if self.budget is not None:
            self.budget.observe(window, outside_budget=self.plan.by_host)
        if self.trials is not None:
            reductions = [o.reduce_seconds for o in observations if math.isfinite(o.reduce_seconds)]
            by_host = self.trials.by_host
            change = self.trials.observe(window.step_seconds, max(reductions, default=math.nan), window.bytes)
            if change and self._follow_link(by_host, change) and not by_host:
                self.trials.compress_anew()
        # with a budget parameters travel in several ways, so that one rank predicts nothing
        if self.budget is None:
            self.times.correct(observations, used, self.plan.by_host)

    def _follow_link(self, by_host: bool, change: float) -> bool:
        """Round, or stop rounding, where reductions that take so many seconds more, or fewer, speak for it.

        ``by_host``: they were the host's own sums. Returns whether gradients are compressed in another way from now on.
        """
        times, budget = self.link_times, self.budget
        if times is None or budget is None:
            return False
        before = budget.rounds
        compressed = times.rounded if budget.rounds else times.low_rank
        times = self.link_times = times.changed(times.host if by_host else compressed, change)
        # what is in use stays unless the other is clearly faster
        keeps_rounding = budget.rounds and not by_host and not times.low_rank_is_faster
        budget.rounds = keeps_rounding or times.rounding_pays
        return budget.rounds != before

    def decide(self, iteration: int) -> RankPlan:
        """The plan from ``iteration`` (the first after the observed window) on; its version grows when ranks change."""
        plan, trials = self.policy.decide(iteration, self.plan), self.trials
        plan = replace(plan, loss_rise=self.loss.rise)
        if trials is not None and iteration >= plan.first_iteration and any(rank is not None for rank in plan.ranks):
            trials.decide(iteration)
            plan = replace(plan, by_host=trials.by_host, trial=trials.trial, tried=trials.measured)
        self.plan = plan
        return plan

    @property
    def rounds(self) -> bool:
        """Whether all gradients are rounded, because that takes less time than low rank."""
        return self.budget is not None and self.budget.rounds

    def adopt_ranks(self, state: Mapping[str, Any], **ranks: Any) -> None:
        """Use these settings of ranks, to which the probe of an earlier run has led, and round if it did.

        ``state``: of that run's controller.
        """
        self.link_times = _link_times(state)
        self.config = self.entropy.config = self.config.replace(**ranks)
        if self.budget is not None:
            self.budget.bound(self.config.ranks.resolved_rmax)
            self.budget.rounds = rounded_all(state)

    def adopt_excluded(self, state: Mapping[str, Any]) -> bool:
        """Leave those stages out that an earlier run with a constant rank has left out, whatever was timed now.

        ``state``: of that run's controller. Returns whether they are others than this run's.
        """
        before = self.excluded
        self.excluded = frozenset(index for index, rank in enumerate(state["plan"]["ranks"]) if rank is None)
        return self.excluded != before

    def state_dict(self) -> dict[str, Any]:
        """Everything that later decisions depend on, as plain numbers and lists."""
        return {
            **self.entropy.state_dict(),
            **self.times.state_dict(),
            "loss": self.loss.state_dict(),
            "plan": self.plan.to_dict(),
            "budget": None if self.budget is None else self.budget.state_dict(),
            "trials": None if self.trials is None else self.trials.state_dict(),
            "link_times": None if self.link_times is None else self.link_times.to_list(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Go on where ``state_dict`` was taken. Raises ValueError if it is of other stages or another release.

        False, and nothing is taken, if a volume sets the ranks of only one of the two runs. Where a volume has had
        nothing to compress before, as on one process, it is left to ``begin``.
        """
        own = self.state_dict()
        if state.keys() != own.keys() or state["plan"].keys() != own["plan"].keys():
            raise ValueError("controller state of another release of EDGC")
        if len(state["costs"]) != len(self.matrices):
            raise ValueError(f"controller state of {len(state['costs'])} stages, this run has {len(self.matrices)}")
        if (state["budget"] is None) != (self.budget is None):
            return False
        before = RankPlan.from_dict(state["plan"])
        compressed = [any(reason != NEVER_COMPRESSED for reason in plan.reasons) for plan in (before, self.plan)]
        if self.budget is not None and compressed == [False, True]:
            self.loss.load_state_dict(state["loss"])
            return True
        if self.trials is not None and state["trials"] is not None:
            timed_anew = self.link_times not in (None, _link_times(state))
            self.trials.load_state_dict(state["trials"], timed_anew)
        self.link_times = self.link_times or _link_times(state)
        by_host = self.trials is not None and self.trials.by_host
        tried = () if self.trials is None else self.trials.measured
        if self.budget is not None:
            self.budget.load_state_dict(state["budget"])
            self._bound_trials(self.budget)
            ledger = self.budget.ledger
            ledger.host_steps_unknown |= before.trial is not None
            # of a window's steps before the resume it is not known how many the host has summed
            changed = (by_host, self.budget.rounds) != (before.by_host, rounded_all(state))
            ledger.window_outside_budget |= by_host or changed
        by_entropy = self.entropy.load_state_dict(state)
        self.times.load_state_dict(state)
        self.loss.load_state_dict(state["loss"])
        plan = replace(before, by_host=by_host, trial=None, tried=tried)
        self.plan = self.policy.resume(plan, by_entropy)
        self.resumed = True
        return True


def rounded_all(state: Mapping[str, Any]) -> bool:
    """Whether the controller of this state rounded all gradients."""
    return state["budget"] is not None and bool(state["budget"]["rounds"])


def _link_times(state: Mapping[str, Any]) -> LinkTimes | None:
    return None if state["link_times"] is None else LinkTimes.from_list(state["link_times"])
