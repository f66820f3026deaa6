"""Whether the training loss rises: the sign of a run that diverges, for whatever reason."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

LOSS_RISES = "the training loss rose"  # the reason of a plan
RECENT_WINDOWS = 10  # after so many a loss that stays high, because the data has changed, is the usual one; not tuned
LEAST_LOSSES = 4  # of a window: in healthy runs of small models means of fewer vary by more than a tenth


def mean_loss(losses: Sequence[float]) -> float:
    """The mean of those that are finite. NaN is a loss that is not known. Infinite if none of the known ones is finite,
    NaN if none is known.
    """
    known = [loss for loss in losses if not math.isnan(loss)]
    finite = [loss for loss in known if math.isfinite(loss)]
    return math.fsum(finite) / len(finite) if finite else math.inf if known else math.nan


def window_loss(losses: Sequence[float]) -> float:
    """``mean_loss`` of the steps of a window, all of which are known; NaN of too few."""
    if len(losses) < LEAST_LOSSES:
        return math.nan
    return mean_loss([loss if math.isfinite(loss) else math.inf for loss in losses])


class LossWatch:
    """Compares the mean training loss of each window with the lowest of the ``RECENT_WINDOWS`` before it.

    ``greatest_rise``: the share above that one at which the loss counts as risen. A loss below zero never does.
    """

    def __init__(self, greatest_rise: float):
        self.greatest_rise = greatest_rise
        self.recent: list[float] = []
        self.rise = 0.0  # of the last window, as a share, if that is too much; else 0

    def observe(self, loss: float) -> None:
        """Take in a window. NaN: EDGC was not told. A window without any finite loss changes nothing."""
        if math.isinf(loss):
            return
        self.rise = 0.0
        if math.isnan(loss):
            return
        lowest = min(self.recent, default=math.inf)
        if 0 < lowest < math.inf and loss > (1 + self.greatest_rise) * lowest:
            self.rise = loss / lowest - 1
        self.recent = [*self.recent, loss][-RECENT_WINDOWS:]

    def state_dict(self) -> dict[str, Any]:
        return {"recent": list(self.recent), "rise": self.rise}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.recent, self.rise = list(state["recent"]), state["rise"]
