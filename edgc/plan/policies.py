"""What sets the ranks and formats of a run, by its settings: nothing, a constant rank, entropy, or a budget of bytes.

A policy keeps no state: ``EntropyRanks`` and ``BudgetPlanner`` do.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from edgc.config import EDGCConfig
from edgc.plan.allocation import RankAllocation
from edgc.plan.by_entropy.entropy_ranks import STABLE, EntropyRanks
from edgc.plan.by_volume.budget import BudgetPlanner
from edgc.plan.loss_watch import LOSS_RISES
from edgc.plan.rank_plan import NEVER_COMPRESSED, NO_RANK, RankPlan
from edgc.plan.ranks import nearest_rank


class Policy(ABC):
    """Makes the plans of so many ``stages``, of which those at ``excluded`` are never compressed."""

    def __init__(self, stages: int, excluded: Collection[int]):
        self.stages, self.excluded = stages, excluded

    @abstractmethod
    def first(self) -> RankPlan:
        """The plan of the first window."""

    @abstractmethod
    def decide(self, iteration: int, plan: RankPlan) -> RankPlan:
        """The plan from ``iteration`` on, the first after a window; ``plan`` itself where nothing changes."""

    @abstractmethod
    def resume(self, plan: RankPlan, by_entropy: bool) -> RankPlan:
        """A plan of the run before, as far as today's settings would have led there.

        ``by_entropy``: entropy has set its ranks, and still does.
        """

    def _everywhere(self, rank: int | None) -> tuple[int | None, ...]:
        return tuple(None if index in self.excluded else rank for index in range(self.stages))

    def _kept(self, plan: RankPlan) -> tuple[int | None, ...]:
        """The plan's ranks, of stages that may be compressed."""
        return tuple(None if index in self.excluded else rank for index, rank in enumerate(plan.ranks))

    def _begun_anew(self, plan: RankPlan, uniform: bool) -> RankPlan:
        """A plan that goes on only where it is the first of today. ``uniform``: no rank is shared out."""
        first, shared = self.first(), any(plan.matrix_ranks)
        # a plan with shared ranks begins where they were shared
        begins = max(first.first_iteration, plan.first_iteration) if shared else first.first_iteration
        now = first.ranks, begins, first.reasons
        if now == (self._kept(plan), plan.first_iteration, plan.reasons) and not (shared and uniform):
            return _changed(plan, ranks=self._kept(plan))
        return _changed(
            plan,
            ranks=first.ranks,
            first_iteration=first.first_iteration,
            reasons=first.reasons,
            matrix_ranks=(),
            proposed=(),
            targets=(),
        )


class NoRanks(Policy):
    """The engine ``dense`` compresses nothing."""

    def first(self) -> RankPlan:
        reasons = tuple("dense engine" for _ in range(self.stages))
        return RankPlan(0, 0, self._everywhere(None), reasons=reasons)

    def decide(self, iteration: int, plan: RankPlan) -> RankPlan:
        return plan

    def resume(self, plan: RankPlan, by_entropy: bool) -> RankPlan:
        return _changed(plan, ranks=self._kept(plan))


class ConstantRank(Policy):
    """``--edgc-static-rank`` after a warm-up: always the same, or on a straight line around it."""

    def __init__(self, config: EDGCConfig, iterations: int, allocation: RankAllocation, excluded: Collection[int]):
        super().__init__(len(allocation.matrices), excluded)
        self.config, self.iterations, self.allocation = config, iterations, allocation

    def first(self) -> RankPlan:
        reasons = tuple("static" for _ in range(self.stages))
        return RankPlan(0, self.config.warmup(self.iterations), self._everywhere(self._rank(0)), reasons=reasons)

    def decide(self, iteration: int, plan: RankPlan) -> RankPlan:
        return self.allocation.with_ranks(iteration, plan, self._everywhere(self._rank(iteration)))

    def resume(self, plan: RankPlan, by_entropy: bool) -> RankPlan:
        first = self.first()
        # its first iteration moves on with its ranks
        goes_on = plan.reasons == first.reasons and plan.first_iteration >= first.first_iteration
        if self.config.study.rank_tilt and goes_on:
            return _changed(plan, ranks=self._kept(plan))
        return self._begun_anew(plan, self.allocation.uniform)

    def _rank(self, iteration: int) -> int:
        """The rank at the middle of the window that begins at ``iteration``."""
        rank, tilt = self.config.ranks.resolved_static_rank or NO_RANK, self.config.study.rank_tilt
        end = min(iteration + self.config.ranks.window, self.iterations)
        progress = (iteration + end) / 2 / self.iterations
        return nearest_rank(rank * (1 + tilt * (1 - 2 * progress))) if tilt else rank


class RanksByEntropy(Policy):
    """The paper's algorithm (docs/algorithm.md, 1 to 4). While the training loss rises, every rank is rmax."""

    def __init__(
        self,
        config: EDGCConfig,
        entropy: EntropyRanks,
        allocation: RankAllocation,
        excluded: Collection[int],
        loss_rises: bool,
    ):
        super().__init__(len(allocation.matrices), excluded)
        self.config, self.entropy, self.allocation, self.loss_rises = config, entropy, allocation, loss_rises

    def first(self) -> RankPlan:
        return RankPlan(0, 0, self._everywhere(None), reasons=self.entropy.first_reasons())

    def decide(self, iteration: int, plan: RankPlan) -> RankPlan:
        plan, ranks = self.entropy.decide(iteration, plan, self.allocation.energies)
        if self.loss_rises:
            ranks = tuple(rank and self.config.ranks.resolved_rmax for rank in ranks)
            reasons = [
                LOSS_RISES if rank and reason != STABLE else reason
                for rank, reason in zip(ranks, plan.reasons, strict=True)
            ]
            plan = replace(plan, targets=ranks, reasons=tuple(reasons))
        return self.allocation.with_ranks(iteration, plan, ranks)

    def resume(self, plan: RankPlan, by_entropy: bool) -> RankPlan:
        if not by_entropy:
            return self._begun_anew(plan, self.allocation.uniform)
        least, most = self.config.ranks.rmin, self.config.ranks.resolved_rmax
        assert least is not None and most is not None
        ranks = tuple(rank and min(max(rank, least), most) for rank in self._kept(plan))
        unshared = any(plan.matrix_ranks) and (ranks != plan.ranks or self.allocation.uniform)
        return _changed(plan, ranks=ranks, matrix_ranks=() if unshared else plan.matrix_ranks)


class RanksByBudget(Policy):
    """``--edgc-volume`` (docs/algorithm.md, 10). A stage's rank is the largest of its matrices."""

    def __init__(self, budget: BudgetPlanner, stages: int, excluded: Collection[int], loss_rises: bool):
        super().__init__(stages, excluded)
        self.budget, self.loss_rises = budget, loss_rises

    def first(self) -> RankPlan:
        return replace(RankPlan(0, self.budget.first, self._everywhere(None)), **self._choices())

    def decide(self, iteration: int, plan: RankPlan) -> RankPlan:
        in_warmup = iteration < plan.first_iteration
        if not in_warmup:
            self.budget.decide(iteration, self.loss_rises and not plan.by_host)  # whose sums are exact
        choices = self._choices()
        if in_warmup:  # what a resumed run finds of its link is no other plan
            del choices["reasons"]
        if all(getattr(plan, name) == value for name, value in choices.items()):
            return plan
        at = max(iteration, plan.first_iteration)
        return replace(plan, version=plan.version + 1, first_iteration=at, **choices)

    def resume(self, plan: RankPlan, by_entropy: bool) -> RankPlan:
        self.budget.first = plan.first_iteration  # compression has begun by then, whatever its warm-up is now
        choices = self._choices()
        # what a resumed run finds of its link is no other plan, but which stages are compressed may be
        both = zip(plan.reasons, choices["reasons"], strict=True)
        choices["reasons"] = tuple(now if NEVER_COMPRESSED in (then, now) else then for then, now in both)
        return _changed(plan, **choices)

    def _choices(self) -> dict[str, Any]:
        budget, indices = self.budget, [None if index in self.excluded else index for index in range(self.stages)]
        ranks = [None if index is None else budget.ranks(index) for index in indices]
        return {
            "ranks": tuple(None if own is None else max(own.values(), default=NO_RANK) for own in ranks),
            "matrix_ranks": tuple(ranks),
            "formats": tuple(None if index is None else budget.formats(index) for index in indices),
            "reasons": tuple(NEVER_COMPRESSED if index is None else budget.reason for index in indices),
            "relief": budget.relief,
        }


def _changed(plan: RankPlan, **fields: Any) -> RankPlan:
    """The plan with these fields; a new one if any differs."""
    if all(getattr(plan, name) == value for name, value in fields.items()):
        return plan
    return replace(plan, version=plan.version + 1, **fields)
