"""What the controller decides: the ranks and formats of all stages, frozen until the next window ends."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, NamedTuple

NO_RANK = 0  # compressed by an engine that has no rank
NEVER_COMPRESSED = "never compressed"  # the reason of a stage that has nothing to compress


class Summing(Enum):
    """Who sums the gradients of a step."""

    DENSE = "dense"  # EDGC, and compresses none: in its warm-up, or under a plan without ranks
    COMPRESSED = "compressed"  # EDGC, at the ranks of the plan
    HOST = "host"


class StageRanks(NamedTuple):
    """What a plan says of one stage: see ``RankPlan``."""

    rank: int | None
    matrix_ranks: Mapping[str, int] | None
    formats: Mapping[str, str] | None


@dataclass(frozen=True)
class RankPlan:
    """The ranks of all stages from an iteration on; None is dense. Immutable, and the same on every process.

    ``matrix_ranks`` holds for each stage the rank of every matrix by name, where they differ; None: all have the
    stage's rank. ``formats`` holds for each stage the wire format, or engine, of parameters without a rank; None, or a
    parameter that is not in it: ``rest_wire``. Of a parameter in both, rows travel first (``rows:SHARE``), then what
    they leave, at its rank. ``proposed`` is what entropy alone asks for, ``targets`` what is left of it after bounds,
    rounding and alignment, and ``ranks`` after the step limit.

    ``relief``: with a volume, times its budget that a step gets because too little of the gradient has arrived, or the
    training loss has risen. ``loss_rise``: of the last window, as a share, if that is too much (``LossWatch``); else 0.

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
    relief: float = 1.0
    loss_rise: float = 0.0
    by_host: bool = False
    trial: tuple[int, int] | None = None
    tried: tuple[float, ...] = ()

    def summing(self, iteration: int) -> Summing:
        """Who sums in this iteration."""
        if iteration < self.first_iteration or all(rank is None for rank in self.ranks):
            return Summing.HOST if self.by_host else Summing.DENSE
        tried = self.trial is not None and self.trial[0] <= iteration < self.trial[1]
        return Summing.HOST if self.by_host != tried else Summing.COMPRESSED

    def of_stage(self, index: int) -> StageRanks:
        """The rank of one stage, and what its parameters have in the place of it."""
        matrix_ranks = self.matrix_ranks[index] if self.matrix_ranks else None
        return StageRanks(self.ranks[index], matrix_ranks, self.formats[index] if self.formats else None)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "RankPlan":
        own: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
        return cls(**own)
