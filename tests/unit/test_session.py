"""What EDGC settles when it is given Megatron's model."""

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from edgc.config import EDGCConfig
from edgc.plan.run import Run
from edgc.plan.stages import StageKey, StageKind
from edgc.plan.times.comm_cost import LinearCost, StageCost
from edgc.specs import Parameter
from megatron.edgc import session
from megatron.edgc.run import described_run

# neither a rank nor rounding is worth its time: the host's sum takes 20 ms, rounding 16 ms
DEAR = StageCost(LinearCost(0.1, 0.001), 0.02, 0.02, rounded_seconds=0.016, volume_rank=40)


@pytest.mark.parametrize(
    ("requested", "kept"),
    [
        pytest.param(EDGCConfig.from_preset(volume=20.0), True, id="steps try compression"),
        pytest.param(EDGCConfig.of(window=10), False, id="dense to the end"),
    ],
)
def test_a_run_gives_the_tied_embedding_back_if_it_never_compresses(
    requested: EDGCConfig, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that tries compression keeps it, whatever its probe says: a resumed one has the same stages."""

    def stages(chunks: Any, stage: int, device: torch.device, tied: Any = None) -> list[Any]:
        layers = Parameter("fc1.weight", (256, 64)), Parameter("fc1.bias", (256,))
        one: Any = SimpleNamespace(key=StageKey(StageKind.LAYERS, 0), parameters=layers, process_group=None)
        one.units_of_parameters = [layers]
        embedding = SimpleNamespace(
            key=StageKey(StageKind.EMBEDDING, 0), parameters=(Parameter("word", (512, 64), embedding=True),)
        )
        return [one] if tied is None else [one, embedding]

    monkeypatch.setattr(session, "stages_of", stages)
    monkeypatch.setattr(session, "TiedEmbedding", lambda chunks: SimpleNamespace(install=lambda seam: None))
    monkeypatch.setattr(session.Communicator, "uncounted", lambda group: None)
    monkeypatch.setattr(session, "reduction_cost", lambda *arguments: DEAR)
    monkeypatch.setattr(session, "all_gather_objects", lambda own: [own])
    monkeypatch.setattr(session.parallel_state, "get_pipeline_model_parallel_rank", lambda: 0)
    own = session.Session.__new__(session.Session)
    own.args, own.chunks, own.seam = Namespace(), [], None
    own.requested = requested
    own.config = own.requested.replace(fuse_embedding_sync=True)
    own.run = Run(iterations=1000, replicas=4, pipeline_stages=2)
    plan = own._plan(torch.device("cpu"))
    keys = [StageKey(StageKind.LAYERS, 0), StageKey(StageKind.EMBEDDING, 0)]
    assert (own.tied is not None) == kept == plan.config.pipeline.fuse_embedding_sync
    assert plan.keys == (keys if kept else keys[:1])
    assert not plan.compresses and plan.tries == kept
    assert (plan.link_times is not None) == kept, "compression that is tried may be rounding"


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_run_is_what_megatrons_arguments_say(overlapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.edgc.run.run_length", lambda args: 100)
    sizes = {"data_parallel_size": 2, "context_parallel_size": 3, "pipeline_model_parallel_size": 4, "world_size": 48}
    experts = {"num_experts": 8, "expert_tensor_parallel_size": 2, "expert_model_parallel_size": 3}
    sizes |= {**experts, "num_experts": None}
    gradients = {"accumulate_allreduce_grads_in_fp32": False, "params_dtype": torch.bfloat16, "bf16": True}
    sums = {"use_distributed_optimizer": not overlapped, "overlap_grad_reduce": overlapped}
    usual = {"fp16": False, "loss_scale": None, "check_for_spiky_loss": False, "check_for_large_grads": False}
    usual |= {"error_injection_rate": 0, "rerun_mode": "disabled"}
    monkeypatch.setattr("megatron.edgc.run.learning_rate", lambda args, iterations: None)
    run = described_run(Namespace(**sizes, **gradients, **sums, **usual))
    scaled = described_run(Namespace(**sizes, **gradients, **sums, **{**usual, "fp16": True}))
    doubting = described_run(Namespace(**sizes, **gradients, **sums, **{**usual, "check_for_spiky_loss": True}))
    assert [(one.repeatable, one.reruns) for one in (run, scaled, doubting)] == [
        (False, False),
        (True, False),  # a step whose gradients overflow is skipped, and not run again
        (True, True),
    ]
    assert (run.iterations, run.replicas, run.pipeline_stages, run.value_bytes) == (100, 6, 4, 2)
    with_experts = described_run(Namespace(**{**sizes, **experts}, **gradients, **sums, **usual))
    assert (run.expert_replicas, with_experts.expert_replicas) == (1, 2)
    assert (run.overlapped, run.scatters) == (overlapped, not overlapped)
