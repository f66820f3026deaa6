"""What the controller learns of a window."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StageObservation:
    """What one pipeline stage saw in one window, merged over its processes; NaN where nothing was measured.

    ``energies``: squared norms of the columns of Q, the largest first, of each matrix by name. ``message_rank``: of the
    activation gradients that the stage has sent to the one before; None: they were not compressed. ``noise``: in what
    the optimizer got, by parameter, and the energy of an entry of its gradient (``edgc.plan.noise``). ``row_shares``:
    what a warm-up has shown of the rows of a parameter's gradient (``edgc.plan.candidates.Candidate.with_rows``).
    """

    entropy: float = math.nan
    reduce_seconds: float = math.nan
    micro_backward_seconds: float = math.nan
    message_rank: int | None = None
    energies: Mapping[str, Sequence[float]] = field(default_factory=dict)
    noise: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    row_shares: Mapping[str, Sequence[float]] = field(default_factory=dict)
