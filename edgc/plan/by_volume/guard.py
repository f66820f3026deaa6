"""More bytes than the budget of a step has, where too little of the gradient arrives."""

from collections.abc import Sequence

# Times the least fidelity: then steps get fewer bytes again. Fewer bytes lower the fidelity, so if this were about 1,
# bytes would go up and down in turn. Not tuned.
ENOUGH_FIDELITY = 3.0


class FidelityGuard:
    """Says how many times the bytes of its budget a step gets, which is its ``relief``.

    Args:
        least: the fidelity below which relief doubles. It halves above ``ENOUGH_FIDELITY`` times this, down to 1.
        watched: by iteration, whether steps may have relief at all.
    """

    def __init__(self, least: float, watched: Sequence[bool]):
        self.least, self.watched = least, watched
        self.relief = 1.0

    def update(self, fidelity: float, iteration: int, most: bool = False, exhausted: bool = False) -> float:
        """The relief of steps from ``iteration`` on, after a window of this fidelity; NaN changes nothing.

        ``most``: steps have as many bytes as they can take already. ``exhausted``: without relief they would have next
        to none, so that relief does not end.
        """
        if not self.watched[iteration]:
            self.relief = 1.0
        elif fidelity < self.least and not most:
            self.relief *= 2
        elif fidelity > ENOUGH_FIDELITY * self.least:
            self.relief = max(self.relief / 2, min(self.relief, 2.0) if exhausted else 1.0)
        return self.relief
