"""The stages of a plan: what each is called, what a process knows of it, and what is decided for it before training."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

from edgc.config import EDGCConfig, flag
from edgc.plan.run import Run
from edgc.plan.selection import Selection
from edgc.plan.times.comm_cost import StageCost
from edgc.specs import Parameter


class StageKind(IntEnum):
    """Which gradients of the pipeline stages a stage of the plan holds."""

    LAYERS = 0
    EXPERTS = 1
    EMBEDDING = 2  # the tied one of the first and the last stage, where they sum it together


@dataclass(frozen=True, order=True)
class StageKey:
    """A stage of the plan. In order: all pipeline stages, the experts of each that has some, the tied embedding."""

    kind: StageKind
    pipeline_stage: int  # counted from 0

    @property
    def id(self) -> str:
        """Its name in checkpoints, which stays as it is whatever ``str`` says to the user."""
        if self.kind is StageKind.EMBEDDING:
            return "embedding"
        return f"stage{self.pipeline_stage}{'-experts' if self.kind is StageKind.EXPERTS else ''}"

    def __str__(self) -> str:
        if self.kind is StageKind.EMBEDDING:
            return "tied embedding"
        return f"stage {self.pipeline_stage + 1}{' experts' if self.kind is StageKind.EXPERTS else ''}"


@dataclass(frozen=True)
class ProcessStage:
    """What one process knows of one of its stages. ``cost``: of its reductions; None where nobody asked for it."""

    key: StageKey
    parameters: tuple[Parameter, ...]
    cost: StageCost | None = None


@dataclass(frozen=True)
class StagePlan:
    """A stage of the plan. ``dense_because``: why it is never compressed; empty if it may be.

    ``selection`` is that of its first process, ``cost`` that of its slowest one.
    """

    key: StageKey
    selection: Selection
    cost: StageCost | None
    dense_because: str

    @property
    def elements(self) -> int:
        """The elements of all its parameters."""
        return self.selection.other_elements + self.selection.matrix_elements

    def to_event(self) -> dict[str, Any]:
        """Fields of the event log."""
        return {
            "name": str(self.key),
            "matrices": [[matrix.name, matrix.rows, matrix.cols] for matrix in self.selection.matrices],
            "rest": [[parameter.name, parameter.elements, why] for parameter, why in self.selection.others],
            "cost": None if self.cost is None else asdict(self.cost),
        }


def dense_because(key: StageKey, config: EDGCConfig, run: Run) -> str:
    """Why a stage's gradients are never compressed; empty if they are."""
    if key.kind is StageKind.LAYERS and run.alone:
        return "no other process has these parameters"
    share = config.study.stage_share
    if key.kind is not StageKind.EMBEDDING and key.pipeline_stage >= math.ceil(share * run.pipeline_stages - 1e-9):
        return f"beyond {flag('stage_share')} {share:g}"
    return ""


def slowest(costs: Sequence[StageCost | None]) -> StageCost | None:
    """The cost of a stage whose processes measured it separately; None if they did not."""
    return max((cost for cost in costs if cost is not None), key=lambda cost: cost.dense_seconds, default=None)
