"""What this release works with: the Megatron-core version, the private names it relies on, the options it refuses."""

import inspect
import sys
from argparse import Namespace
from collections.abc import Callable
from importlib.metadata import version

from edgc.config import ConfigError, EDGCConfig

SUPPORTED = "0.19"

# (flag as typed, why it is refused, test on the parsed arguments)
UNSUPPORTED: tuple[tuple[str, str, Callable[[Namespace], bool]], ...] = (
    ("--use-megatron-fsdp", "it has gradient buffers of its own", lambda a: a.use_megatron_fsdp),
    ("--use-torch-fsdp2", "it has gradient buffers of its own", lambda a: a.use_torch_fsdp2),
    (
        "--num-distributed-optimizer-instances > 1",
        "gradients are reduced in two steps",
        lambda a: a.num_distributed_optimizer_instances > 1,
    ),
    ("--cuda-graph-impl", "a replay may still be writing the gradients", lambda a: a.cuda_graph_impl != "none"),
    (
        "--ddp-param-name-patterns-for-fp32-local-accumulation",
        "those gradients lie outside the bucket",
        lambda a: bool(a.ddp_param_name_patterns_for_fp32_local_accumulation),
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
)


def check_version() -> None:
    """Raise ``ConfigError`` unless the installed Megatron-core is of the supported minor version."""
    installed = version("megatron-core")
    if not installed.startswith(f"{SUPPORTED}."):
        raise ConfigError(
            f"megatron-core {installed} is installed; this release of EDGC works with {SUPPORTED}.x: "
            f"pip install 'megatron-core>={SUPPORTED},<0.20'"
        )


def check_options(config: EDGCConfig, args: Namespace) -> None:
    """Raise ``ConfigError`` naming every Megatron option in use that EDGC does not support yet.

    ``args`` are Megatron's, validated: it has worked out the data-parallel size by then.
    """
    refused = [f"{flag} ({why})" for flag, why, in_use in UNSUPPORTED if in_use(args)]
    if refused:
        raise ConfigError("--edgc does not support yet: " + "; ".join(refused))
    alone = args.data_parallel_size * args.context_parallel_size < 2
    if alone and (config.pp == "off" or args.pipeline_model_parallel_size == 1):
        raise ConfigError(
            "--edgc needs at least 2 data-parallel ranks, or a pipeline and --edgc-pp: with one there is no reduction "
            "to compress"
        )


def check_param_wire(config: EDGCConfig, args: Namespace) -> None:
    """Raise ``ConfigError`` if updated weights are to travel in a format that this run cannot use."""
    if config.param_wire is None:
        return
    needs = {
        "--use-distributed-optimizer, whose weights are gathered": args.use_distributed_optimizer,
        "--bf16 or --fp16, whose optimizer keeps unrounded weights": args.bf16 or args.fp16,
        "an optimizer that keeps them apart from the model's: not --use-precision-aware-optimizer": (
            not args.use_precision_aware_optimizer
        ),
        "weights that are not in fp8 or fp4": not (args.fp8_param_gather or args.fp4_param_gather),
    }
    missing = [need for need, met in needs.items() if not met]
    if missing:
        raise ConfigError(f"--edgc-param-wire = {config.param_wire}: needs {'; '.join(missing)}")


def compresses_messages(config: EDGCConfig, args: Namespace) -> bool:
    """Whether messages between stages are to be compressed. Raises ``ConfigError`` where they are asked for but a
    receiver cannot know their shapes.
    """
    if config.pp == "off":
        return False
    refused = {
        "--pipeline-model-parallel-size 1: there are no stages": args.pipeline_model_parallel_size == 1,
        "variable sequence lengths: shapes are negotiated at run time": args.variable_seq_lengths,
        "--mtp-standalone: shapes are negotiated at run time": args.mtp_standalone,
        "--use-ring-exchange-p2p: it sends whole tensors": args.use_ring_exchange_p2p,
    }
    found = [flag for flag, in_use in refused.items() if in_use]
    if config.pp_epilogue_only and args.virtual_pipeline_model_parallel_size:
        found.append("--edgc-pp-epilogue-only with a virtual pipeline: its stages wait at other times")
    if found and config.pp != "auto":
        raise ConfigError(f"--edgc-pp = {config.pp} does not work with {'; '.join(found)}")
    return not found


def check_embedding(config: EDGCConfig, args: Namespace) -> None:
    """Raise ``ConfigError`` if a tied embedding is to be summed at once where there are no two copies of it."""
    if config.fuse_embedding_sync and args.pipeline_model_parallel_size == 1:
        raise ConfigError("--edgc-fuse-embedding-sync needs a pipeline: --pipeline-model-parallel-size is 1")
    if config.fuse_embedding_sync and args.untie_embeddings_and_output_weights:
        raise ConfigError("--edgc-fuse-embedding-sync does nothing with --untie-embeddings-and-output-weights")


def check_seam() -> None:
    """Raise ``ConfigError`` if a private name or signature of Megatron that EDGC relies on has changed."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucket, _ParamAndGradBucketGroup
    from megatron.core.pipeline_parallel import p2p_communication, schedules
    from megatron.training import training
    from megatron.training.models.base import ModelConfig

    expected: tuple[tuple[str, Callable[..., object], tuple[str, ...]], ...] = (
        ("start_grad_sync", _ParamAndGradBucketGroup.start_grad_sync, ("self", "force_all_reduce")),
        ("start_param_sync", _ParamAndGradBucketGroup.start_param_sync, ("self", "force_sync")),
        ("_post_param_sync", _ParamAndGradBucketGroup._post_param_sync, ("self",)),
        ("finish_grad_sync", _ParamAndGradBucketGroup.finish_grad_sync, ("self", "force_all_reduce")),
        (
            "check_grads",
            _ParamAndGradBucketGroup.check_grads,
            ("self", "check_for_nan_or_inf", "check_for_large"),
        ),
    )
    exchange = (
        *("tensor_send_prev", "tensor_recv_prev", "tensor_send_next", "tensor_recv_next"),
        *("group", "prev_pipeline_rank", "next_pipeline_rank"),
    )
    expected += (
        ("_batched_p2p_ops", p2p_communication._batched_p2p_ops, exchange),
        ("_p2p_ops", p2p_communication._p2p_ops, exchange),
        (
            "_communicate",
            p2p_communication.P2PCommunicator._communicate,
            ("self", "tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next", "tensor_shape", "wait_on_reqs"),
        ),
        (
            "_allreduce_word_embedding_grads",
            sys.modules[finalize_model_grads.__module__]._allreduce_word_embedding_grads,
            ("model", "config", "embd_group", "pp_group"),
        ),
        (
            "get_schedule_table",
            schedules.get_schedule_table,
            ("num_microbatches", "num_model_chunks", "microbatch_group_size_per_vp_stage"),
        ),
    )
    for name, function, parameters in expected:
        if tuple(inspect.signature(function).parameters) != parameters:
            raise ConfigError(f"Megatron's {name} has changed its parameters from {parameters}: EDGC must follow")
    sources = (
        (
            _ParamAndGradBucket.__init__,
            ("grad_data", "param_to_index", "gradient_scaling_factor", "params_list"),
        ),
        (
            _ParamAndGradBucketGroup.__init__,
            (
                "data_parallel_group",
                "intra_distributed_optimizer_instance_group",
                "buckets",
                "grad_reduce_handle",
                "is_first_batch",
            ),
        ),
        (DistributedDataParallel.__init__, ("bucket_groups", "expert_parallel_bucket_groups")),
    )
    for function, names in sources:
        source = inspect.getsource(function)
        for name in names:
            if f"self.{name}" not in source:
                raise ConfigError(f"Megatron's {function.__qualname__} no longer sets {name}: EDGC must follow")
    for schedule in (
        schedules.forward_backward_pipelining_without_interleaving,
        schedules.forward_backward_pipelining_with_interleaving,
    ):
        if "P2PCommunicator(" not in inspect.getsource(schedule):
            raise ConfigError(f"Megatron's {schedule.__name__} no longer builds a P2PCommunicator: EDGC must follow")
    if next(iter(inspect.signature(training.save_checkpoint).parameters)) != "iteration":
        raise ConfigError("Megatron's save_checkpoint no longer begins with the iteration: EDGC must follow")
    if "post_wrap_hooks" not in ModelConfig.__dataclass_fields__:
        raise ConfigError("Megatron's ModelConfig has no post_wrap_hooks any more: EDGC must follow")
