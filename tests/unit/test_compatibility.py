"""Which versions of Megatron-core are accepted, and which of its options are refused."""

import shutil
import sys
import tomllib
from argparse import Namespace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig

from edgc.config import ConfigError, EDGCConfig
from megatron.edgc import compatibility, seam

REPOSITORY = Path(__file__).parents[2]
BUCKETS = "core/distributed/param_and_grad_buffer.py"


@pytest.fixture(autouse=True)
def unchecked() -> None:
    compatibility.check_megatron.cache_clear()


def test_the_installed_megatron_fits_and_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    compatibility.check_megatron()
    assert capsys.readouterr().err == ""


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that EDGC relies on, to be changed."""
    for file in {row.file for row in seam.RELIED_ON}:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(seam.megatron_folder() / file, tmp_path / file)
    monkeypatch.setattr(compatibility, "megatron_folder", lambda: tmp_path)
    monkeypatch.setattr(compatibility, "installed_in", lambda: tmp_path)
    return tmp_path


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


WAIT = "                    current_stream.wait_event(event)\n"


@pytest.mark.parametrize("version", ["0.19.2", "0.19.9", "0.20.0"])
def test_a_changed_body_under_the_same_signature_is_refused(
    monkeypatch: pytest.MonkeyPatch, copied: Path, version: str
) -> None:
    monkeypatch.setattr(compatibility, "version", lambda package: version)
    change(copied / BUCKETS, WAIT, "                    current_stream.synchronize()\n")
    with pytest.raises(ConfigError) as refused:
        compatibility.check_megatron()
    said = str(refused.value)
    assert said.startswith(f"megatron-core {version} is installed")
    assert f"_ParamAndGradBucketGroup.start_grad_sync in {BUCKETS} has another body (overridden" in said
    assert said.count("has another body") == 1
    assert "pip install 'megatron-core>=0.19,<0.20'" in said


def test_a_checkout_that_comes_before_the_installed_package_is_named(
    monkeypatch: pytest.MonkeyPatch, copied: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(compatibility, "installed_in", lambda: tmp_path / "site-packages")
    compatibility.check_megatron()
    compatibility.check_megatron.cache_clear()
    change(copied / BUCKETS, WAIT, "")
    with pytest.raises(ConfigError, match=f"{copied} is imported, and not megatron-core .* off PYTHONPATH"):
        compatibility.check_megatron()


def test_comments_docstrings_and_layout_do_not_matter(copied: Path) -> None:
    change(copied / BUCKETS, WAIT, f"                    # a comment\n{WAIT}".replace("(event)", "( event )"))
    change(copied / BUCKETS, "Initiates grad sync (all-reduce", "Starts to sync (all-reduce")
    compatibility.check_megatron()


def test_a_name_that_is_gone_is_refused(copied: Path) -> None:
    change(copied / BUCKETS, "self.data_parallel_group", "self.ranks")
    change(copied / BUCKETS, "def shard_buffer", "def cut_buffer")
    with pytest.raises(ConfigError, match="shard_buffer in .* is gone.*__init__ in .* has no data_parallel_group"):
        compatibility.check_megatron()


def test_the_command_prints_what_agrees_and_todays_hashes(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert seam.main([str(copied)]) == 0
    known = capsys.readouterr().out.splitlines()
    assert len(known) == len(seam.RELIED_ON) and all(line.startswith("agrees") for line in known)
    change(copied / BUCKETS, WAIT, "")
    assert seam.main([str(copied)]) == 1
    lines = zip(known, capsys.readouterr().out.splitlines(), strict=True)
    ((before, after),) = (pair for pair in lines if pair[0] != pair[1])
    assert after.startswith("CHANGED") and "_ParamAndGradBucketGroup.start_grad_sync" in after
    assert before.split()[1] != after.split()[1]  # the hashes


@pytest.mark.parametrize("version", ["0.20.0", "0.21.1rc0", "1.0.0"])
def test_of_a_newer_minor_version_whose_sources_agree_rank_0_warns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], version: str
) -> None:
    monkeypatch.setattr(compatibility, "version", lambda package: version)
    compatibility.check_megatron()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"edgc: warning: megatron-core {version} is installed") and "tested with 0.19.x" in line
    monkeypatch.setenv("RANK", "1")
    compatibility.check_megatron()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("version", ["0.18.3", "0.9.0"])
def test_an_older_version_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(compatibility, "version", lambda package: version)
    with pytest.raises(ConfigError, match=f"megatron-core {version} is installed.*megatron-core>=0.19,<0.20"):
        compatibility.check_megatron()


def test_a_megatron_that_is_on_the_path_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(compatibility, "version", unknown)
    with pytest.raises(ConfigError, match="is not an installed package, so its version is not known"):
        compatibility.check_megatron()


@pytest.fixture(scope="module")
def arguments() -> Namespace:
    """Megatron's own defaults, with what its validation derives for two data-parallel ranks."""
    from megatron.training.arguments import parse_args

    argv, sys.argv = sys.argv, ["pretrain_gpt.py"]
    try:
        derived = {"data_parallel_size": 2, "virtual_pipeline_model_parallel_size": None}
        derived |= {"params_dtype": torch.float32, "accumulate_allreduce_grads_in_fp32": False}
        derived |= {"gtp_weight_remat_size": 1, "expert_gtp_weight_remat_size": 1}
        return Namespace(**{**vars(parse_args()), **derived})
    finally:
        sys.argv = argv


UNSUPPORTED = {
    "--use-megatron-fsdp": {"use_megatron_fsdp": True},
    "--use-torch-fsdp2": {"use_torch_fsdp2": True},
    "--num-distributed-optimizer-instances > 1": {"num_distributed_optimizer_instances": 2},
    "--override-ckpt-iteration": {"override_ckpt_iteration": 100},
    "--cuda-graph-impl, --enable-cuda-graph, --external-cuda-graph": {"cuda_graph_impl": "local"},
    "--ddp-param-name-patterns-for-fp32-local-accumulation": {
        "ddp_param_name_patterns_for_fp32_local_accumulation": ["router"]
    },
    "--ddp-reduce-scatter-with-fp32-accumulation": {"ddp_reduce_scatter_with_fp32_accumulation": True},
    "--optimizer dist_muon": {"use_layer_wise_distributed_optimizer": True},
    "--save-wgrads-interval": {"save_wgrads_interval": 10},
    "--tensor-parallel-num-weight-shards": {"gtp_weight_remat_size": 2},
    "--moe-expert-rank-capacity-factor": {"moe_expert_rank_capacity_factor": 1.0},
    "--optimizer-cuda-graph": {"optimizer_cuda_graph": True},
    "--moe-use-upcycling": {"moe_use_upcycling": True},
    "--inprocess-restart": {"inprocess_restart": True},
    "--adlr-autoresume": {"adlr_autoresume": True},
    "--ckpt-assume-constant-structure": {"ckpt_assume_constant_structure": True},
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


def test_ddp_with_other_settings_than_the_arguments_is_refused(arguments: Namespace) -> None:
    compatibility.check_ddp(DistributedDataParallelConfig(), arguments)
    built = DistributedDataParallelConfig(num_distributed_optimizer_instances=2)
    with pytest.raises(ConfigError, match="built with num_distributed_optimizer_instances = 2"):
        compatibility.check_ddp(built, arguments)
    built = DistributedDataParallelConfig(param_name_patterns_for_fp32_local_accumulation=("router",))
    with pytest.raises(ConfigError, match="param_name_patterns_for_fp32_local_accumulation"):
        compatibility.check_ddp(built, arguments)


def test_ddp_that_sums_in_another_type_is_refused(arguments: Namespace) -> None:
    in_16_bits = Namespace(**{**vars(arguments), "params_dtype": torch.bfloat16})
    compatibility.check_ddp(DistributedDataParallelConfig(), in_16_bits)
    built = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    compatibility.check_ddp(built, arguments)  # gradients of weights in fp32 are in fp32 in any case
    with pytest.raises(ConfigError, match="built with grad_reduce_in_fp32 = True"):
        compatibility.check_ddp(built, in_16_bits)


def test_one_data_parallel_rank_is_refused_without_messages_to_compress(arguments: Namespace) -> None:
    alone = Namespace(**{**vars(arguments), "data_parallel_size": 1})
    with pytest.raises(ConfigError, match="at least 2 data-parallel ranks"):
        compatibility.check_options(EDGCConfig(), alone)
    # gradients are summed over context-parallel ranks, too
    compatibility.check_options(EDGCConfig(), Namespace(**{**vars(alone), "context_parallel_size": 2}))
    # and so are those of experts that several ranks hold
    shared = {"num_experts": 4, "world_size": 2, "expert_tensor_parallel_size": 1, "expert_model_parallel_size": 1}
    experts = Namespace(**{**vars(alone), **shared})
    compatibility.check_options(EDGCConfig(), experts)
    with pytest.raises(ConfigError, match="at least 2 data-parallel ranks"):
        compatibility.check_options(EDGCConfig(), Namespace(**{**vars(experts), "expert_model_parallel_size": 2}))
    pipeline = Namespace(**{**vars(alone), "pipeline_model_parallel_size": 2})
    for pp in ("backward", "auto"):
        compatibility.check_options(EDGCConfig.of(pp=pp), pipeline)
    with pytest.raises(ConfigError, match="at least 2 data-parallel ranks"):
        compatibility.check_options(EDGCConfig.of(pp="auto"), alone)


def test_messages_that_cannot_be_compressed_are_no_reason_to_take_one_data_parallel_rank(arguments: Namespace) -> None:
    from megatron.edgc.session import Session

    sizes = {"data_parallel_size": 1, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    sizes |= {"variable_seq_lengths": False}
    alone = Namespace(**{**vars(arguments), **sizes, "train_iters": 2000, "rank": 0})
    with pytest.raises(ConfigError, match="at least 2 data-parallel ranks"):
        Session(EDGCConfig.from_preset("paper"), alone)


def test_weights_in_few_bits_need_unrounded_ones_beside_them(arguments: Namespace) -> None:
    config = EDGCConfig.of(param_wire="int8")
    fitting = {"use_distributed_optimizer": True, "bf16": True, "fp16": False}
    optional = EDGCConfig.of(param_wire="auto:int8")
    for one in (config, optional):
        assert compatibility.rounds_weights(one, Namespace(**{**vars(arguments), **fitting}))
    for change, said in (
        ({"use_distributed_optimizer": False}, "--use-distributed-optimizer"),
        ({"bf16": False}, "--bf16 or --fp16"),
        ({"fp8_param_gather": True}, "not in fp8"),
        ({"data_parallel_size": 1}, "layers of which there are copies"),
        ({"use_precision_aware_optimizer": True}, "not --use-precision-aware-optimizer"),
    ):
        unfit = Namespace(**{**vars(arguments), **fitting, **change})
        with pytest.raises(ConfigError, match=f"--edgc-param-wire = int8: needs .*{said}"):
            compatibility.rounds_weights(config, unfit)
        assert not any(compatibility.rounds_weights(one, unfit) for one in (optional, EDGCConfig()))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pipeline_model_parallel_size": 1}, "--pipeline-model-parallel-size 1"),
        ({"variable_seq_lengths": True}, "variable sequence lengths"),
        ({"mtp_num_layers": 1, "pipeline_model_parallel_layout": "Et|mL"}, "--mtp-num-layers with --pipeline"),
        ({"use_ring_exchange_p2p": True}, "--use-ring-exchange-p2p"),
    ],
)
def test_messages_whose_shape_a_receiver_cannot_know_are_refused(
    arguments: Namespace, change: dict[str, object], said: str
) -> None:
    # Megatron sets the latter when it validates
    fitting = {**vars(arguments), "pipeline_model_parallel_size": 2, "variable_seq_lengths": False}
    config = EDGCConfig.of(pp="backward")
    assert compatibility.compresses_messages(config, Namespace(**fitting))
    unfit = Namespace(**{**fitting, **change})
    with pytest.raises(ConfigError, match=f"--edgc-pp = backward does not work with {said}"):
        compatibility.compresses_messages(config, unfit)
    assert not compatibility.compresses_messages(EDGCConfig(), unfit)
    assert not compatibility.compresses_messages(EDGCConfig.of(pp="auto"), unfit)


@pytest.mark.parametrize("name", ["variable_seq_lengths", "mtp_standalone"])
def test_messages_whose_shapes_a_script_makes_unknown_stay_as_they_are(arguments: Namespace, name: str) -> None:
    """Megatron's arguments have no flag for it: a script sets it in the model's config."""
    args = Namespace(**{**vars(arguments), "pipeline_model_parallel_size": 2, "variable_seq_lengths": False})
    usual, unknown = SimpleNamespace(**{name: False}), SimpleNamespace(**{name: True})
    assert compatibility.compresses_messages(EDGCConfig.of(pp="auto"), args, usual)
    assert not compatibility.compresses_messages(EDGCConfig.of(pp="auto"), args, unknown)
    with pytest.raises(ConfigError, match="negotiated at run time"):
        compatibility.compresses_messages(EDGCConfig.of(pp="backward"), args, unknown)


def test_a_virtual_pipeline_has_no_epilogue(arguments: Namespace, capsys: pytest.CaptureFixture[str]) -> None:
    virtual = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    virtual["variable_seq_lengths"] = False
    config = EDGCConfig.of(pp="epilogue")
    with pytest.raises(ConfigError, match="--edgc-pp = epilogue does not work with a virtual pipeline"):
        compatibility.compresses_messages(config, Namespace(**{**vars(arguments), **virtual}))
    optional = EDGCConfig.of(pp="auto-epilogue")
    first = {**vars(arguments), **virtual, "rank": 0}
    assert not compatibility.compresses_messages(optional, Namespace(**first))
    assert "warning: messages between stages stay uncompressed with a virtual pipeline" in capsys.readouterr().err
    plain = {**virtual, "virtual_pipeline_model_parallel_size": None}
    assert compatibility.compresses_messages(optional, Namespace(**{**vars(arguments), **plain}))


def test_the_copies_of_a_tied_embedding_are_summed_in_one_sum_where_that_can_be(arguments: Namespace) -> None:
    tied = {**vars(arguments), "pipeline_model_parallel_size": 2, "untie_embeddings_and_output_weights": False}
    asked, default = EDGCConfig.of(fuse_embedding_sync=True), EDGCConfig()
    assert compatibility.fuses_embedding(asked, Namespace(**tied))
    assert compatibility.fuses_embedding(default, Namespace(**tied))
    for change, said in (
        ({"pipeline_model_parallel_size": 1}, "needs a pipeline"),
        ({"untie_embeddings_and_output_weights": True}, "--untie-embeddings-and-output-weights"),
        ({"mtp_num_layers": 1}, "--mtp-num-layers"),
    ):
        unfit = Namespace(**{**tied, **change})
        with pytest.raises(ConfigError, match=f"--edgc-fuse-embedding-sync: .*{said}"):
            compatibility.fuses_embedding(asked, unfit)
        assert not compatibility.fuses_embedding(default, unfit)
    off: tuple[dict[str, Any], ...] = ({"engine": "dense"}, {"preset": "paper"}, {"fuse_embedding_sync": False})
    for settings in off:
        assert not compatibility.fuses_embedding(EDGCConfig.from_preset(**settings), Namespace(**tied))
        given = EDGCConfig.from_preset(**{**settings, "fuse_embedding_sync": True})
        assert compatibility.fuses_embedding(given, Namespace(**tied))
    assert compatibility.fuses_embedding(EDGCConfig.from_preset(engine="int4"), Namespace(**tied))


def test_the_package_requires_the_tested_version_or_a_newer_one() -> None:
    tested = ".".join(map(str, compatibility.TESTED))
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert f"megatron-core>={tested}" in project["optional-dependencies"]["megatron"]
    assert f"megatron-core=={tested}." in (REPOSITORY / "constraints.txt").read_text()
