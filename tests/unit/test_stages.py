"""What one rank reduces by stage of the plan, without Megatron's process groups."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from edgc.config import EDGCConfig
from edgc.hosts.steps import compressed_anew
from edgc.observe.timing import Spans
from edgc.plan.allocation import allocate
from edgc.plan.comm_cost import CommCost, StageCost
from edgc.plan.controller import Controller
from edgc.plan.observation import StageObservation
from edgc.plan.rank_plan import RankPlan
from edgc.plan.run import Part, StageKey
from edgc.specs import MatrixSpec, Parameter
from megatron.edgc.stages import EmbeddingStage, MegatronStage

CPU = torch.device("cpu")


class Reducer:
    """Notes the rank that it is given."""

    def __init__(self, config: EDGCConfig):
        self.allocation = allocate([Parameter("word", (1000, 64), embedding=True)], config, 4)
        self.rank: int | None = -1

    def set_rank(self, rank: int | None, matrix_ranks: Any, formats: Any, by_host: bool) -> None:
        self.rank = rank


@pytest.mark.parametrize(
    ("compressed", "active", "expected"),
    [
        (True, (64, 32, None), None),
        (True, (64, 32, 16), 16),
        (False, (64, 32, None), 64),
        (False, (None, 32, None), None),
        (False, (None, 32, 16), 16),
    ],
)
def test_an_embedding_in_low_rank_has_its_own_warm_up_and_another_follows_the_first_stage(
    compressed: bool, active: tuple[int | None, ...], expected: int | None
) -> None:
    reducer = Reducer(EDGCConfig.of(compress_embeddings=compressed))
    tied = SimpleNamespace(dense_bytes=lambda: 0.0, fp32_bytes=lambda: 0.0, reducer=reducer)
    stage = EmbeddingStage(tied, CPU)  # type: ignore[arg-type]
    stage.set_rank(active, 2, RankPlan(0, 0, active))
    assert reducer.rank == expected


@pytest.mark.parametrize(
    ("active", "before", "anew"),
    [
        ((None, None), (), False),
        ((64, None), (), True),
        ((64, 64), (64, None), True),  # the second stage has ended its warm-up, at the first one's rank
        ((64, 64), (64, 64), False),
        ((None, 64), (64, 64), False),
        ((56, None), (64, None), True),
    ],
)
def test_replicas_are_compared_when_any_stage_has_a_new_rank(
    active: tuple[int | None, ...], before: tuple[int | None, ...], anew: bool
) -> None:
    assert compressed_anew(active, before) == anew


class EventSpans(Spans):
    """A clock that moves by what is asked for."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.now = 0.0

    def mark(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        start = self.mark()
        self.now += seconds
        self.add(start)


def test_a_step_takes_what_all_its_reductions_take_together() -> None:
    """Four chunks of a virtual pipeline, 1 s each: a stage takes 4 s, which is what the probe has found."""
    stage = MegatronStage(StageKey(Part.LAYERS, 0), [], CPU)
    stage.spans = clock = EventSpans()
    for step in range(5):
        for _ in range(4):
            clock.spend(1.0 if step else 30.0)  # the first step is slow
        stage.end_step()
    window = stage.take_window(math.nan)
    assert window.reduce_seconds == 4.0
    cost = StageCost(CommCost(0.0, 0.1), 4.0, 4.0)
    config = EDGCConfig.of(window=10, rmin=16, rmax=64)
    controller = Controller(config, 100, [[MatrixSpec("w", 256, 256)]], [cost])
    controller.observe([StageObservation(entropy=-5.0, reduce_seconds=window.reduce_seconds)])
    assert controller.times.costs[0] == cost
