"""What this release works with: the versions of Megatron-core, and the options of Megatron that it refuses."""

import os
from argparse import Namespace
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

import torch

from edgc.config import ConfigError, EDGCConfig
from edgc.printing import print_warning
from megatron.edgc.seam import changes, megatron_folder

TESTED = (0, 19)  # minor version of Megatron-core

# (flag as typed, why it is refused, test on the parsed arguments)
UNSUPPORTED: tuple[tuple[str, str, Callable[[Namespace], bool]], ...] = (
    ("--use-megatron-fsdp", "it has gradient buffers of its own", lambda a: a.use_megatron_fsdp),
    ("--use-torch-fsdp2", "it has gradient buffers of its own", lambda a: a.use_torch_fsdp2),
    (
        "--num-distributed-optimizer-instances > 1",
        "gradients are reduced in two steps",
        lambda a: a.num_distributed_optimizer_instances > 1,
    ),
    (
        "--override-ckpt-iteration",
        "the plans in the checkpoint are of the iterations that it has done",
        lambda a: a.override_ckpt_iteration is not None,
    ),
    (
        "--cuda-graph-impl, --enable-cuda-graph, --external-cuda-graph",
        "a replay may still be writing the gradients: leave it out",
        lambda a: a.cuda_graph_impl != "none",
    ),
    (
        "--ddp-param-name-patterns-for-fp32-local-accumulation",
        "those gradients lie outside the bucket",
        lambda a: bool(a.ddp_param_name_patterns_for_fp32_local_accumulation),
    ),
    (
        "--ddp-reduce-scatter-with-fp32-accumulation",
        "EDGC's uncompressed sums of 16-bit gradients accumulate in 16 bits",
        lambda a: getattr(a, "ddp_reduce_scatter_with_fp32_accumulation", False),
    ),
    (
        "--optimizer dist_muon / muon with the distributed optimizer",
        "it shards parameters by layer",
        lambda a: getattr(a, "use_layer_wise_distributed_optimizer", False),
    ),
    (
        "--save-wgrads-interval",
        "it forces Megatron's own all-reduce",
        lambda a: a.save_wgrads_interval is not None,
    ),
    (
        "--tensor-parallel-num-weight-shards, --expert-tensor-parallel-num-weight-shards",
        "EDGC's state in a checkpoint does not tell apart the processes that hold the shards of a weight",
        lambda a: a.gtp_weight_remat_size > 1 or a.expert_gtp_weight_remat_size > 1,
    ),
    (
        "--moe-expert-rank-capacity-factor",
        "where an expert gets too many tokens Megatron runs a step again whose gradients EDGC has summed",
        lambda a: getattr(a, "moe_expert_rank_capacity_factor", None) is not None,
    ),
    (
        "--optimizer-cuda-graph",
        "a replay would gather weights from memory that was given away",
        lambda a: getattr(a, "optimizer_cuda_graph", False),
    ),
    (
        "--moe-use-upcycling",
        "it builds and saves a second model",
        lambda a: getattr(a, "moe_use_upcycling", False),
    ),
    (
        "--inprocess-restart",
        "it builds a second model within the run",
        lambda a: getattr(a, "inprocess_restart", False),
    ),
    (
        "--adlr-autoresume",
        "its checkpoint would be without EDGC's state",
        lambda a: getattr(a, "adlr_autoresume", False),
    ),
    (
        "--ckpt-assume-constant-structure",
        "EDGC's state in a checkpoint changes with the ranks",
        lambda a: a.ckpt_assume_constant_structure,
    ),
)


@cache
def check_megatron() -> None:
    """Raise ``ConfigError`` unless there is a Megatron-core that EDGC fits. Imports nothing of it.

    Of a newer minor version than the tested one, whose sources agree in all that EDGC relies on, process 0 warns.
    """
    folder = megatron_folder()
    try:
        installed = version("megatron-core")
    except PackageNotFoundError:
        raise ConfigError(
            f"{folder} is not an installed package, so its version is not known: EDGC needs megatron-core as pip "
            "installs it (docs/install.md)"
        ) from None
    minor = tuple(int(part) for part in installed.split(".")[:2])
    tested = ".".join(map(str, TESTED))
    mend = f"pip install 'megatron-core>={tested},<{TESTED[0]}.{TESTED[1] + 1}'"
    if minor < TESTED:
        raise ConfigError(f"megatron-core {installed} is installed; this release of EDGC needs {tested}.x: {mend}")
    if changed := changes(folder):
        where = installed_in()
        if not folder.resolve().is_relative_to(where):
            raise ConfigError(
                f"{folder} is imported, and not megatron-core {installed}, which is installed in {where}. EDGC relies "
                f"on what differs in it: {'; '.join(changed)}. Take that folder off PYTHONPATH, or uninstall it, if "
                "pip install -e has put it there"
            )
        raise ConfigError(
            f"megatron-core {installed} is installed; EDGC relies on what has changed in it: {'; '.join(changed)}. "
            f"Either {mend}, or read the changes and see docs/install.md, A newer Megatron-core"
        )
    if minor > TESTED and int(os.environ.get("RANK", "0")) == 0:
        print_warning(
            f"megatron-core {installed} is installed; this release of EDGC was tested with {tested}.x. All functions "
            "that it relies on agree"
        )


def installed_in() -> Path:
    """The folder that has the installed Megatron-core; that of an editable one does not have its sources."""
    return Path(str(distribution("megatron-core").locate_file(""))).resolve()


def replicas(args: Namespace) -> int:
    """How many processes hold the same layers."""
    return int(args.data_parallel_size * args.context_parallel_size)


def expert_replicas(args: Namespace) -> int:
    """How many processes hold the same experts; 1 without experts."""
    if not args.num_experts:
        return 1
    parallel = args.expert_tensor_parallel_size * args.expert_model_parallel_size * args.pipeline_model_parallel_size
    return int(args.world_size // parallel)


def check_options(config: EDGCConfig, args: Namespace) -> None:
    """Raise ``ConfigError`` naming every Megatron option in use that EDGC does not support yet.

    ``args`` are Megatron's, validated: it has worked out the data-parallel size by then.
    """
    refused = [f"{flag} ({why})" for flag, why, in_use in UNSUPPORTED if in_use(args)]
    if refused:
        raise ConfigError("--edgc does not support yet: " + "; ".join(refused))
    alone = max(replicas(args), expert_replicas(args)) < 2
    if alone and (config.pipeline.messages.which == "off" or args.pipeline_model_parallel_size == 1):
        raise ConfigError(
            "--edgc needs at least 2 data-parallel ranks, or a pipeline and --edgc-pp: with one there is no reduction "
            "to compress"
        )


# fields of DDP's own settings, by the argument of which Megatron makes them
_OF_DDP = {
    "use_distributed_optimizer": "use_distributed_optimizer",
    "overlap_grad_reduce": "overlap_grad_reduce",
    "num_distributed_optimizer_instances": "num_distributed_optimizer_instances",
    "reduce_scatter_with_fp32_accumulation": "ddp_reduce_scatter_with_fp32_accumulation",
    "param_name_patterns_for_fp32_local_accumulation": "ddp_param_name_patterns_for_fp32_local_accumulation",
}


def check_ddp(ddp_config: Any, args: Namespace) -> None:
    """Raise ``ConfigError`` where a script has built DDP with other settings than Megatron's arguments, from which EDGC
    knows what the run does.
    """
    for field, argument in _OF_DDP.items():
        built, given = getattr(ddp_config, field, None), getattr(args, argument, None)
        if (built or None) != (given or None):
            raise ConfigError(
                f"DDP was built with {field} = {built}, and Megatron's arguments have {argument} = {given}: EDGC needs "
                "both alike"
            )
    in_16_bits = args.params_dtype != torch.float32  # else gradients are in fp32 in any case
    if in_16_bits and ddp_config.grad_reduce_in_fp32 != args.accumulate_allreduce_grads_in_fp32:
        raise ConfigError(
            f"DDP was built with grad_reduce_in_fp32 = {ddp_config.grad_reduce_in_fp32}, and Megatron's arguments have "
            f"accumulate_allreduce_grads_in_fp32 = {args.accumulate_allreduce_grads_in_fp32}: EDGC needs both alike"
        )


def rounds_weights(config: EDGCConfig, args: Namespace) -> bool:
    """Whether updated weights may travel as differences in few bits. Raises ``ConfigError`` where they cannot but are
    asked to.
    """
    weights = config.formats.weights
    if weights.format is None:
        return False
    needs = {
        "--use-distributed-optimizer, whose weights are gathered": args.use_distributed_optimizer,
        "--bf16 or --fp16, whose optimizer keeps unrounded weights": args.bf16 or args.fp16,
        "an optimizer that keeps them apart from the model's: not --use-precision-aware-optimizer": (
            not args.use_precision_aware_optimizer
        ),
        "layers of which there are copies": replicas(args) > 1,
        "weights that are not in fp8 or fp4": not (args.fp8_param_gather or args.fp4_param_gather),
    }
    missing = [need for need, met in needs.items() if not met]
    if missing and not weights.optional:
        raise ConfigError(f"--edgc-param-wire = {config.formats.param_wire}: needs {'; '.join(missing)}")
    return not missing


def compresses_messages(config: EDGCConfig, args: Namespace, model_config: Any = None) -> bool:
    """Whether messages between stages are to be compressed. Raises ``ConfigError`` where they are asked for but a
    receiver cannot know their shapes. ``model_config``: of the model, once it is there; a script may set in it what
    Megatron's arguments cannot say.
    """
    messages = config.pipeline.messages
    if messages.which == "off":
        return False
    refused = {
        "--pipeline-model-parallel-size 1: there are no stages": args.pipeline_model_parallel_size == 1,
        "variable sequence lengths: shapes are negotiated at run time": (
            args.variable_seq_lengths or getattr(model_config, "variable_seq_lengths", False)
        ),
        # Megatron negotiates shapes where such a layer has a stage of its own
        "--mtp-num-layers with --pipeline-model-parallel-layout: shapes may be negotiated at run time": (
            (args.mtp_num_layers and args.pipeline_model_parallel_layout)
            or getattr(model_config, "mtp_standalone", False)
        ),
        "--use-ring-exchange-p2p: it sends whole tensors": args.use_ring_exchange_p2p,
    }
    found = [flag for flag, in_use in refused.items() if in_use]
    if messages.epilogue and args.virtual_pipeline_model_parallel_size:
        found.append("a virtual pipeline: its stages wait at other times")
    if found and not messages.optional:
        raise ConfigError(f"--edgc-pp = {config.pipeline.pp} does not work with {'; '.join(found)}")
    if found and args.pipeline_model_parallel_size > 1 and args.rank == 0:
        print_warning(f"messages between stages stay uncompressed with {'; '.join(found)}")
    return not found


def fuses_embedding(config: EDGCConfig, args: Namespace) -> bool:
    """Whether the two copies of a tied embedding are summed in one sum. Raises ``ConfigError`` where that is asked for
    but cannot be.
    """
    obstacle = embedding_apart(args)
    if config.pipeline.fuse_embedding_sync and obstacle:
        raise ConfigError(f"--edgc-fuse-embedding-sync: {obstacle}")
    if config.pipeline.fuse_embedding_sync is None:
        return config.engine != "dense" and not obstacle
    return config.pipeline.fuse_embedding_sync


def embedding_apart(args: Namespace) -> str:
    """Why a run cannot have one sum for the two copies of a tied embedding; empty if it can."""
    if args.pipeline_model_parallel_size == 1:
        return "needs a pipeline: --pipeline-model-parallel-size is 1"
    if args.mtp_num_layers:
        return "is not supported with --mtp-num-layers"
    if args.untie_embeddings_and_output_weights:
        return "does nothing with --untie-embeddings-and-output-weights"
    return ""
