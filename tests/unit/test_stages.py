"""What one rank reduces by stage of the plan, without Megatron's process groups."""

import math
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from torch import nn

from edgc.byte_counts import ByteCount, RunBytes
from edgc.comm.overlap import Overlap
from edgc.compress.router import Router
from edgc.config import EDGCConfig
from edgc.errors import StepError
from edgc.hosts.module_parameters import ModuleParameters
from edgc.hosts.stage import Stage
from edgc.hosts.steps import Step, compressed_anew
from edgc.hosts.units import Unit, Units
from edgc.observe.measurements import Measurements
from edgc.plan.controller import ControlledStage, Controller
from edgc.plan.observation import StageObservation, WindowObservation
from edgc.plan.rank_plan import RankPlan
from edgc.plan.run import Run
from edgc.plan.selection import select
from edgc.plan.stages import StageKey, StageKind
from edgc.plan.times.comm_cost import LinearCost, StageCost
from edgc.specs import MatrixSpec, Parameter
from edgc.timing import Spans
from megatron.edgc.embedding import TIED, TiedEmbedding
from megatron.edgc.seam import Seam
from megatron.edgc.session import Session
from megatron.edgc.stages import EmbeddingStage, MegatronStage, describe, is_tied

CPU = torch.device("cpu")


class Reducer:
    """Notes the rank that it is given."""

    def __init__(self, config: EDGCConfig):
        self.router = Router(select([Parameter("word", (1000, 64), embedding=True)], config), config, CPU)
        self.rank: int | None = -1

    def set_rank(self, rank: int | None, matrix_ranks: Any, formats: Any, unrounded: bool) -> None:
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
    tied = SimpleNamespace(step_bytes=ByteCount, reducer=reducer)
    stage = EmbeddingStage(tied, CPU)  # type: ignore[arg-type]
    stage.units = Units([Unit([TIED], reducer)])  # type: ignore[arg-type]
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


def test_layers_that_no_other_process_has_are_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(MegatronStage, "process_group", dist.group.WORLD)
        monkeypatch.setattr(MegatronStage, "units_of_parameters", [[Parameter("word", (1000, 64), embedding=True)]])
        stage = MegatronStage(StageKey(StageKind.LAYERS, 0), [], CPU)
        stage.attach(EDGCConfig.of(dense_wire="int8"), Overlap(CPU), lambda: None, Run(iterations=9, replicas=1))  # type: ignore[arg-type, return-value]
        assert [reducer.plain for reducer in stage.reducers] == [True]
    finally:
        dist.destroy_process_group()


def test_a_step_takes_what_all_its_reductions_take_together() -> None:
    """Four chunks of a virtual pipeline, 1 s each: a stage takes 4 s, which is what the probe has found."""
    stage = MegatronStage(StageKey(StageKind.LAYERS, 0), [], CPU)
    stage.spans = clock = EventSpans()
    for step in range(5):
        for _ in range(4):
            clock.spend(1.0 if step else 30.0)  # the first step is slow
        stage.end_step()
    window = stage.take_window(math.nan)
    assert window.reduce_seconds == 4.0
    cost = StageCost(LinearCost(0.0, 0.1), 4.0, 4.0)
    config = EDGCConfig.of(window=10, rmin=16, rmax=64)
    controller = Controller(config, 100, [ControlledStage([MatrixSpec("w", 256, 256)], cost)])
    controller.observe(WindowObservation([StageObservation(entropy=-5.0, reduce_seconds=window.reduce_seconds)]))
    assert controller.times.costs[0] == cost


def test_the_entropy_of_a_stage_is_a_mean_over_entries_however_they_are_cut_into_units() -> None:
    stage = MegatronStage(StageKey(StageKind.LAYERS, 0), [], CPU)
    seen: list[Any] = []
    for count, entropy in ((10, -3.0), (10, -3.0), (1, -3.5)):
        observer: Any = SimpleNamespace(matrices=[MatrixSpec("w", 8, 8)] * count)
        observer.take = partial(Measurements, entropy=[entropy, math.nan])
        seen.append(SimpleNamespace(observer=observer, state=SimpleNamespace(bytes=lambda: 0)))
    stage.units = [SimpleNamespace(reducer=one) for one in seen]  # type: ignore[assignment]
    assert stage.take_window(math.nan).entropy == pytest.approx(-3 - 0.5 / 21)
    for reducer in stage.reducers:
        reducer.observer.matrices = []
    assert math.isnan(stage.take_window(math.nan).entropy), "entropies of a run before, and no matrix today"


def test_a_word_embedding_has_sparse_rows_unless_it_is_the_output_layer_as_well() -> None:
    def sparse(shared: bool, post_process: bool) -> list[str]:
        model = nn.Module()
        model.embedding = nn.Module()
        model.embedding.word_embeddings, model.embedding.position_embeddings = nn.Embedding(8, 4), nn.Embedding(8, 4)
        model.output_layer = nn.Linear(4, 8, bias=False)
        model.share_embeddings_and_output_weights, model.post_process = shared, post_process
        found = [describe("", name, parameter, is_tied(model)) for name, parameter in model.named_parameters()]
        return [one.name for one in found if one.sparse_rows]

    words = ["embedding.word_embeddings.weight"]
    assert sparse(shared=False, post_process=True) == words
    assert sparse(shared=True, post_process=False) == words, "on another stage than the output layer"
    assert sparse(shared=True, post_process=True) == [], "every row has a gradient from the output layer"
    assert is_tied(nn.Linear(4, 8)), "a model that does not say"


def test_torchs_embedding_has_sparse_rows_unless_another_module_has_its_weight() -> None:
    class Tied(nn.Module):
        def __init__(self, tied: bool) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
            self.weight = [1.0]  # what a module calls so need not be a parameter
            if tied:
                self.head.weight = self.words.weight

    for tied in (False, True):
        described = ModuleParameters(Tied(tied)).described
        assert described["words.weight"].sparse_rows is not tied and described["words.weight"].embedding
    assert not ModuleParameters(Tied(False)).described["head.weight"].sparse_rows


def test_a_sum_of_a_tied_embedding_that_nobody_asked_for_is_noticed_on_every_rank() -> None:
    """Also on one between the first and the last stage, which has no copy: it would wait for the others."""
    tied = TiedEmbedding.__new__(TiedEmbedding)
    tied.weight, tied.asked = None, False
    session: Any = SimpleNamespace(tied=tied)
    with Seam() as seam:
        tied.install(seam)
        finalize = sys.modules[finalize_model_grads.__module__]
        finalize._allreduce_word_embedding_grads(None, None, None, None)  # type: ignore[attr-defined]
    Session._check_tied(session, 3)
    with pytest.raises(StepError, match="iteration 5: the gradient of the tied embedding was not summed"):
        Session._check_tied(session, 4)
    session.tied = None
    Session._check_tied(session, 5)


def test_messages_that_do_not_pass_through_edgc_are_noticed() -> None:
    messages: Any = SimpleNamespace(directions=("backward",), began=lambda iteration: iteration == 3)
    session: Any = SimpleNamespace(messages=messages)
    Session._check_messages(session, 3)
    with pytest.raises(StepError, match="iteration 5: messages between stages did not pass through EDGC"):
        Session._check_messages(session, 4)
    messages.directions = ()
    Session._check_messages(session, 4)


def test_bytes_of_steps_that_the_host_sums_are_counted_apart() -> None:
    stage = Stage(StageKey(StageKind.LAYERS, 0), CPU, ByteCount())
    plan = RankPlan(0, 0, (8,))
    for by_host, elements in ((False, 10), (True, 100), (True, 1000), (False, 10_000)):
        stage.set_rank((None if by_host else 8,), 0, plan, by_host)
        stage.traffic.count_all_reduce(torch.zeros(elements), 2)
        stage.end_step()
    assert stage.take_sent_by_host() == 4 * 1100
    assert stage.take_sent_by_host() == 0
    stage.restore_bytes(RunBytes(ByteCount(sent=1e6)))
    stage.set_rank((None,), 0, plan, by_host=True)
    stage.traffic.count_all_reduce(torch.zeros(10), 2)
    stage.end_step()
    assert stage.take_sent_by_host() == 40, "what was sent before the resume is no part of the step"


@pytest.mark.parametrize("loss_scale", [None, 1024.0])
def test_the_entropy_of_a_tied_embedding_is_that_of_the_gradient_that_its_bucket_has_not_scaled(
    loss_scale: float | None,
) -> None:
    told: list[float] = []
    reducer: Any = SimpleNamespace(begin=lambda iteration: None, reduce=lambda *arguments: iter(()))
    reducer.observer = SimpleNamespace(measure=lambda gradients, iteration, scale: told.append(float(scale)))
    tied = TiedEmbedding.__new__(TiedEmbedding)
    tied.weight = torch.nn.Parameter(torch.empty(2, 4))
    tied._group = SimpleNamespace(ddp_config=SimpleNamespace(average_in_collective=False))
    tied._bucket = SimpleNamespace(
        gradient_scaling_factor=0.25, grad_data=torch.zeros(8), param_to_index={tied.weight: (0, 8)}
    )
    step = Step(3, None if loss_scale is None else torch.tensor(loss_scale))
    tied.attach(reducer, Spans(CPU), lambda: step)
    tied.synchronise()
    assert told == [0.25 * (loss_scale or 1.0)]


def test_megatron_gets_its_functions_back_also_where_the_last_report_fails() -> None:
    owner, session = SimpleNamespace(function=1), Session.__new__(Session)
    session.seam = Seam()
    session.seam.replace(owner, "function", 2)
    session.completed = 5  # no run, so to ask for its length fails
    with pytest.raises(AttributeError):
        session.close()
    assert owner.function == 1


def test_a_session_that_ends_after_megatron_has_ended_the_process_group_closes_without_a_report() -> None:
    """As after --exit-signal-handler-for-training."""
    session = Session.__new__(Session)
    session.seam, session.completed = Seam(), 5
    session.run, session.report = Run(iterations=9, replicas=2), None
    session.close()


def test_the_memory_of_a_stage_has_the_shards_of_weights_that_are_kept() -> None:
    stage = MegatronStage(StageKey(StageKind.LAYERS, 0), [], CPU)
    shards = torch.zeros(3), torch.zeros(5, dtype=torch.bfloat16)
    stage.groups = [cast(Any, SimpleNamespace(edgc_weights=SimpleNamespace(before=one))) for one in (shards, None)]
    assert stage.state_bytes() == sum(shard.nbytes for shard in shards)


def test_a_window_has_all_that_its_units_have_measured() -> None:
    stage, units = MegatronStage(StageKey(StageKind.LAYERS, 0), [], CPU), []
    for name, spikes, largest in (("a", 2.0, 7.0), ("b", 1.0, 9.0)):
        observer: Any = SimpleNamespace(matrices=[MatrixSpec(name, 8, 8)])
        values = {name: torch.tensor([0.5, 1.0])}
        measured = Measurements(energies=[values], row_shares=[values], spikes=spikes, largest_spike=largest)
        observer.take = partial(lambda one: one, measured)
        units.append(
            SimpleNamespace(reducer=SimpleNamespace(observer=observer, state=SimpleNamespace(bytes=lambda: 0)))
        )
    stage.units = units  # type: ignore[assignment]
    window = stage.take_window(math.nan)
    assert window.energies == window.row_shares == {"a": [0.5, 1.0], "b": [0.5, 1.0]}
    assert (window.spikes, window.largest_spike) == (3.0, 9.0)
