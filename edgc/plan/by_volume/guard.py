"""More bytes than the budget of a step has, where too little of the gradient arrives or the training loss rises."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from edgc.plan.loss_watch import LOSS_RISES

# Times the least fidelity: then steps get fewer bytes again. Fewer bytes lower the fidelity, so if this were about 1,
# bytes would go up and down in turn. Not tuned.
ENOUGH_FIDELITY = 3.0
# Relief for a loss that rises: it may stay high because the data has changed, and bytes then help nothing. Not tuned.
MOST_FOR_LOSS = 4.0
TOO_LITTLE = "too little of the gradient arrived"


class Guard:
    """Says how many times the bytes of its budget a step gets, which is its ``relief``.

    Args:
        least: the fidelity below which relief doubles. It halves above ``ENOUGH_FIDELITY`` times this, down to 1,
            unless the loss rises. While the loss alone asks for it, it doubles up to ``MOST_FOR_LOSS``.
        watched: by iteration, whether steps may have relief at all.
    """

    def __init__(self, least: float, watched: Sequence[bool]):
        self.least, self.watched = least, watched
        self.relief = 1.0
        self.cause = TOO_LITTLE  # why relief was doubled last

    def update(
        self,
        fidelity: float,
        iteration: int,
        most: bool = False,
        exhausted: bool = False,
        loss_rises: bool = False,
    ) -> float:
        """The relief of steps from ``iteration`` on, after a window of this fidelity; NaN where it was not measured.

        ``most``: steps have as many bytes as they can take already. ``exhausted``: without relief they would have next
        to none, so that relief does not end.
        """
        if not self.watched[iteration]:
            self.relief = 1.0
        elif fidelity < self.least or loss_rises:
            too_little = fidelity < self.least
            if not most and (too_little or self.relief < MOST_FOR_LOSS):
                self.relief *= 2
                self.cause = TOO_LITTLE if too_little else LOSS_RISES
        elif fidelity > ENOUGH_FIDELITY * self.least or (math.isnan(fidelity) and self.cause == LOSS_RISES):
            self.relief = max(self.relief / 2, min(self.relief, 2.0) if exhausted else 1.0)
        return self.relief

    def state_dict(self) -> dict[str, Any]:
        return {"relief": self.relief, "cause": self.cause}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.relief, self.cause = state["relief"], state["cause"]
