"""The canary for Megatron's private names, and what is refused."""

import importlib.metadata
import sys
from argparse import Namespace
from typing import Any

import pytest
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from edgc.config import ConfigError, EDGCConfig
from megatron.edgc import compatibility


def test_the_installed_megatron_has_the_seam_that_edgc_relies_on() -> None:
    compatibility.check_version()
    compatibility.check_seam()


def test_a_changed_signature_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ParamAndGradBucketGroup, "start_grad_sync", lambda self: None)
    with pytest.raises(ConfigError, match="start_grad_sync has changed its parameters"):
        compatibility.check_seam()


def test_a_vanished_attribute_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_group(self: Any) -> None:
        self.buckets = self.grad_reduce_handle = None

    monkeypatch.setattr(_ParamAndGradBucketGroup, "__init__", without_group)
    with pytest.raises(ConfigError, match="no longer sets data_parallel_group"):
        compatibility.check_seam()


@pytest.mark.parametrize("version", ["0.18.3", "0.20.0", "1.19.0"])
def test_another_minor_version_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(compatibility, "version", lambda package: version)
    with pytest.raises(ConfigError, match=f"megatron-core {version} is installed.*megatron-core>=0.19,<0.20"):
        compatibility.check_version()


@pytest.fixture(scope="module")
def arguments() -> Namespace:
    """Megatron's own defaults, with what its validation derives for two data-parallel ranks."""
    from megatron.training.arguments import parse_args

    argv, sys.argv = sys.argv, ["pretrain_gpt.py"]
    try:
        derived = {"data_parallel_size": 2, "virtual_pipeline_model_parallel_size": None}
        return Namespace(**{**vars(parse_args()), **derived})
    finally:
        sys.argv = argv


UNSUPPORTED = {
    "--use-megatron-fsdp": {"use_megatron_fsdp": True},
    "--use-torch-fsdp2": {"use_torch_fsdp2": True},
    "--num-distributed-optimizer-instances > 1": {"num_distributed_optimizer_instances": 2},
    "--cuda-graph-impl": {"cuda_graph_impl": "local"},
    "--ddp-param-name-patterns-for-fp32-local-accumulation": {
        "ddp_param_name_patterns_for_fp32_local_accumulation": ["router"]
    },
    "--optimizer dist_muon": {"use_layer_wise_distributed_optimizer": True},
    "--save-wgrads-interval": {"save_wgrads_interval": 10},
}


def test_megatrons_defaults_are_supported(arguments: Namespace) -> None:
    compatibility.check_options(EDGCConfig(), arguments)


@pytest.mark.parametrize("flag", UNSUPPORTED)
def test_an_unsupported_option_is_named(arguments: Namespace, flag: str) -> None:
    changed = Namespace(**{**vars(arguments), **UNSUPPORTED[flag]})
    with pytest.raises(ConfigError, match=f"--edgc does not support yet: {flag}"):
        compatibility.check_options(EDGCConfig(), changed)


def test_all_refused_options_are_tested() -> None:
    assert len(UNSUPPORTED) == len(compatibility.UNSUPPORTED)


def test_one_data_parallel_rank_is_refused_without_messages_to_compress(arguments: Namespace) -> None:
    alone = Namespace(**{**vars(arguments), "data_parallel_size": 1})
    with pytest.raises(ConfigError, match="at least 2 data-parallel ranks"):
        compatibility.check_options(EDGCConfig(), alone)
    # gradients are summed over context-parallel ranks, too
    compatibility.check_options(EDGCConfig(), Namespace(**{**vars(alone), "context_parallel_size": 2}))
    pipeline = Namespace(**{**vars(alone), "pipeline_model_parallel_size": 2})
    for pp in ("backward", "auto"):
        compatibility.check_options(EDGCConfig(pp=pp), pipeline)
    with pytest.raises(ConfigError, match="at least 2 data-parallel ranks"):
        compatibility.check_options(EDGCConfig(pp="auto"), alone)


def test_weights_in_few_bits_need_unrounded_ones_beside_them(arguments: Namespace) -> None:
    config = EDGCConfig(param_wire="int8")
    fitting = {"use_distributed_optimizer": True, "bf16": True, "fp16": False}
    compatibility.check_param_wire(config, Namespace(**{**vars(arguments), **fitting}))
    for change, said in (
        ({"use_distributed_optimizer": False}, "--use-distributed-optimizer"),
        ({"bf16": False}, "--bf16 or --fp16"),
        ({"fp8_param_gather": True}, "not in fp8"),
        ({"use_precision_aware_optimizer": True}, "not --use-precision-aware-optimizer"),
    ):
        unfit = Namespace(**{**vars(arguments), **fitting, **change})
        with pytest.raises(ConfigError, match=f"--edgc-param-wire = int8: needs .*{said}"):
            compatibility.check_param_wire(config, unfit)
        compatibility.check_param_wire(EDGCConfig(), unfit)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pipeline_model_parallel_size": 1}, "--pipeline-model-parallel-size 1"),
        ({"variable_seq_lengths": True}, "variable sequence lengths"),
        ({"mtp_standalone": True}, "--mtp-standalone"),
        ({"use_ring_exchange_p2p": True}, "--use-ring-exchange-p2p"),
    ],
)
def test_messages_whose_shape_a_receiver_cannot_know_are_refused(
    arguments: Namespace, change: dict[str, object], said: str
) -> None:
    # Megatron sets the latter when it validates
    fitting = {**vars(arguments), "pipeline_model_parallel_size": 2, "variable_seq_lengths": False}
    config = EDGCConfig(pp="backward")
    assert compatibility.compresses_messages(config, Namespace(**fitting))
    unfit = Namespace(**{**fitting, **change})
    with pytest.raises(ConfigError, match=f"--edgc-pp = backward does not work with {said}"):
        compatibility.compresses_messages(config, unfit)
    assert not compatibility.compresses_messages(EDGCConfig(), unfit)
    assert not compatibility.compresses_messages(EDGCConfig(pp="auto"), unfit)


def test_a_virtual_pipeline_has_no_epilogue(arguments: Namespace) -> None:
    virtual = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    virtual["variable_seq_lengths"] = False
    config = EDGCConfig(pp="backward", pp_epilogue_only=True)
    with pytest.raises(ConfigError, match="--edgc-pp-epilogue-only with a virtual pipeline"):
        compatibility.compresses_messages(config, Namespace(**{**vars(arguments), **virtual}))


def test_a_tied_embedding_is_summed_at_once_only_where_it_has_two_copies(arguments: Namespace) -> None:
    config = EDGCConfig(fuse_embedding_sync=True)
    tied = {**vars(arguments), "pipeline_model_parallel_size": 2, "untie_embeddings_and_output_weights": False}
    compatibility.check_embedding(config, Namespace(**tied))
    for change, said in (
        ({"pipeline_model_parallel_size": 1}, "needs a pipeline"),
        ({"untie_embeddings_and_output_weights": True}, "--untie-embeddings-and-output-weights"),
    ):
        with pytest.raises(ConfigError, match=f"--edgc-fuse-embedding-sync .*{said}"):
            compatibility.check_embedding(config, Namespace(**{**tied, **change}))


def test_the_requirement_of_the_package_is_the_checked_version() -> None:
    requires = importlib.metadata.requires("edgc")
    assert requires is not None and any("megatron-core" in r and "0.19" in r and "0.20" in r for r in requires)
