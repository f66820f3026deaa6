"""DAC, the dynamic alignment compressor: the ranks with which all stages end their reductions together.

Communication time is linear in the rank, T_com(r) = c + eta r. In 1F1B stage 1 ends its backward pass last,
so stage i may spend i - 1 micro-batch backward times more, and the times of the messages that carry the last gradient
back to stage 1, and still finish together with it:

    T_com(r_i) = T_com(r_1) + S_i    =>    r_i = r_1 + S_i / eta
    S_i = (i - 1) T_back + sum over j = 2 .. i of T_msg,j

Source: arXiv 2511.10333 section IV-D (there with c = 0 and without messages).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from edgc.plan.observation import StageObservation
from edgc.plan.ranks import RANK_MULTIPLE
from edgc.plan.times.comm_cost import RANK_SLACK, LinearCost, StageCost


def aligned_rank(first_rank: int, cost: LinearCost, slack_seconds: float, r_max: int) -> int:
    """The rank of a stage that ends its communication together with stage 1, ``slack_seconds`` after it could begin.

    first_rank + slack_seconds / eta, at most ``r_max`` and below that rounded down to a multiple of 4, though never
    under first_rank, the rank of stage 1: so ranks do not fall with the slack.

    Raises ValueError unless 1 <= first_rank <= r_max, cost.slope > 0 and slack_seconds is finite and at least 0.
    """
    if not 1 <= first_rank <= r_max:
        raise ValueError(f"first_rank = {first_rank}, r_max = {r_max}: needs 1 <= first_rank <= r_max")
    if not 0 <= slack_seconds < math.inf:
        raise ValueError(f"slack_seconds = {slack_seconds}: must be finite and at least 0")
    if not cost.slope > 0:
        raise ValueError(f"cost.slope = {cost.slope}: must be above 0 seconds per rank")
    rank = first_rank + slack_seconds / cost.slope
    if rank >= r_max:
        return r_max
    return max(first_rank, math.floor(rank * (1 + RANK_SLACK)) // RANK_MULTIPLE * RANK_MULTIPLE)


class StageTimes:
    """What the stages' communication and backward passes take, as timed before training and corrected in it.

    Args:
        costs: of the reduction of each stage; None where it was not measured.
        message_costs: of the message with a micro-batch's activation gradients from each stage to the one before;
            None where there is none.
        computed: the costs are those of a link that the user has named, so that no measurement corrects them.
    """

    def __init__(
        self,
        costs: Sequence[StageCost | None],
        message_costs: Sequence[StageCost | None],
        computed: bool = False,
    ):
        self.costs, self.computed = list(costs), computed
        self.message_costs = list(message_costs)
        self.message_ranks: list[int | None] = [None] * len(costs)
        self.micro_backward_seconds = math.nan

    def observe(self, observations: Sequence[StageObservation]) -> None:
        """Take in a window's backward passes and messages."""
        self.message_ranks = [observation.message_rank for observation in observations]
        # The slowest stage sets the pace of the pipeline.
        backward = [o.micro_backward_seconds for o in observations if math.isfinite(o.micro_backward_seconds)]
        if backward:
            self.micro_backward_seconds = max(backward)

    def correct(self, observations: Sequence[StageObservation], ranks: Sequence[int | None], by_host: bool) -> None:
        """Scale the costs to what a window's reductions took, which were at these ranks or the host's."""
        if self.computed:
            return
        for stage, (cost, observation) in enumerate(zip(self.costs, observations, strict=True)):
            if cost is not None and observation.reduce_seconds > 0:
                predicted = cost.host_seconds if by_host else cost.seconds(ranks[stage])
                if predicted > 0:
                    self.costs[stage] = cost.scaled(observation.reduce_seconds / predicted)

    def can_align(self, stage: int) -> bool:
        """Whether all is known that alignment of a later stage to the first depends on."""
        return None not in (self.costs[0], self.costs[stage]) and not math.isnan(self.micro_backward_seconds)

    def aligned(self, stage: int, first_rank: int, r_max: int) -> int | None:
        """The rank at which a later stage ends together with the first one; None: it may as well be dense."""
        first_cost, cost = self.costs[0], self.costs[stage]
        assert first_cost is not None and cost is not None
        slack = self._slack(stage)
        if first_cost.seconds(first_rank) + slack >= cost.dense_seconds:
            return None
        # eta is the stage's own: links and stages differ
        return aligned_rank(first_rank, cost.compressed, slack, r_max)

    def _slack(self, stage: int) -> float:
        """Seconds from the stage's last backward pass to the first stage's: those between them, and the messages."""
        on_the_way = zip(self.message_costs[1 : stage + 1], self.message_ranks[1 : stage + 1], strict=True)
        messages = sum(cost.seconds(rank) for cost, rank in on_the_way if cost is not None)
        return stage * self.micro_backward_seconds + messages

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        return {
            "micro_backward_seconds": self.micro_backward_seconds,
            "costs": [None if cost is None else asdict(cost) for cost in self.costs],
            "message_costs": [None if cost is None else asdict(cost) for cost in self.message_costs],
            "computed": self.computed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken. Where costs are or were computed, today's stay: the link is another.

        Those of messages stay wherever there are some today. Nothing in training corrects them.
        """
        computed = self.computed or state["computed"]
        self.micro_backward_seconds = state["micro_backward_seconds"]
        self.costs, self.message_costs = (
            [
                cost if saved is None or (today and cost is not None) else _as_cost(saved)
                for cost, saved in zip(costs, state[name], strict=True)
            ]
            for name, costs, today in (
                ("costs", self.costs, computed),
                ("message_costs", self.message_costs, True),
            )
        )


def _as_cost(fields: Mapping[str, Any]) -> StageCost:
    return StageCost(**{**fields, "compressed": LinearCost(**fields["compressed"])})
