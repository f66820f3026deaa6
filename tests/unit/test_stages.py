"""What one rank reduces by stage of the plan, without Megatron's process groups."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from edgc.allocation import Parameter, allocate
from edgc.config import EDGCConfig
from edgc.controller import RankPlan
from megatron.edgc.stages import EmbeddingStage, Stage
from megatron.edgc.training import Session
from megatron.edgc.windows import Part, StageKey

CPU = torch.device("cpu")


class Reducer:
    """Notes the rank that it is given."""

    def __init__(self, config: EDGCConfig):
        self.allocation = allocate([Parameter("word", (1000, 64), embedding=True)], config, 4)
        self.rank: int | None = -1

    def set_rank(self, rank: int | None, matrix_ranks: Any) -> None:
        self.rank = rank


@pytest.mark.parametrize(("compressed", "expected"), [(True, None), (False, 64)])
def test_an_embedding_in_low_rank_has_its_own_warm_up_and_another_follows_the_first_stage(
    compressed: bool, expected: int | None
) -> None:
    reducer = Reducer(EDGCConfig(compress_embeddings=compressed))
    tied = SimpleNamespace(dense_bytes=lambda: 0.0, reducer=reducer)
    session = SimpleNamespace(
        args=SimpleNamespace(curr_iteration=7),
        _step=None,
        _last_step=math.nan,
        plan=RankPlan(1, 0, (64, None)),
        message_plan=RankPlan(0, 0, ()),
        keys=[StageKey(Part.LAYERS, 0), StageKey(Part.EMBEDDING, 0)],
        stages=[EmbeddingStage(tied, CPU)],  # type: ignore[arg-type]
        _loss_scale=lambda: None,
    )
    Session.begin_step(session)  # type: ignore[arg-type]
    assert reducer.rank == expected
    assert not Stage(StageKey(Part.LAYERS, 0), [], CPU).follows
