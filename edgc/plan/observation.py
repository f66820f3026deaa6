"""What the controller learns of a window."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from edgc.byte_counts import ByteCount


@dataclass(frozen=True)
class StageObservation:
    """What one pipeline stage saw in one window, merged over its processes; NaN where nothing was measured.

    ``energies``: squared norms of the columns of Q, the largest first, of each matrix by name. ``message_rank``: of the
    activation gradients that the stage has sent to the one before; None: they were not compressed. ``noise``: in what
    the optimizer got, by parameter, and the energy of an entry of its gradient (``edgc.plan.by_volume.noise``).
    ``row_shares``: what a warm-up has shown of the rows of a parameter's gradient (``PlannedParameter.with_rows``).
    """

    entropy: float = math.nan
    reduce_seconds: float = math.nan
    micro_backward_seconds: float = math.nan
    message_rank: int | None = None
    energies: Mapping[str, Sequence[float]] = field(default_factory=dict)
    noise: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    row_shares: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class WindowObservation:
    """What all stages saw in one window.

    ``ranks``: those in use in the window; None: the plan's, of which a static one may not have begun. ``bytes``: of
    gradients, in the whole run so far. ``host_step_share``: of this window's steps, those that the host has summed.
    ``sent_by_host``: bytes of gradients that were sent in them. ``step_seconds``: see ``Trials.observe``. ``loss``: the
    mean training loss; NaN where EDGC was not told.
    """

    stages: Sequence[StageObservation]
    ranks: Sequence[int | None] | None = None
    bytes: ByteCount = ByteCount()
    host_step_share: float = 0.0
    sent_by_host: float = 0.0
    step_seconds: Mapping[bool, Sequence[float]] = field(default_factory=lambda: {False: (), True: ()})
    loss: float = math.nan
