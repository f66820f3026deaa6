"""What this release works with: the Megatron-core version, the private names it relies on, the options it refuses."""

import inspect
from argparse import Namespace
from collections.abc import Callable
from importlib.metadata import version

from edgc.config import ConfigError

SUPPORTED = "0.19"

# (flag as typed, why it is refused, test on the parsed arguments)
_UNSUPPORTED: tuple[tuple[str, str, Callable[[Namespace], bool]], ...] = (
    ("--use-distributed-optimizer", "parameters straddle shards", lambda a: a.use_distributed_optimizer),
    ("--overlap-grad-reduce", "the reduction is not asynchronous yet", lambda a: a.overlap_grad_reduce),
    ("--overlap-param-gather", "it needs the distributed optimizer", lambda a: a.overlap_param_gather),
    ("--use-megatron-fsdp", "it has gradient buffers of its own", lambda a: a.use_megatron_fsdp),
    ("--use-torch-fsdp2", "it has gradient buffers of its own", lambda a: a.use_torch_fsdp2),
    ("--fp16", "the error feedback does not follow the loss scale yet", lambda a: a.fp16),
    ("--grad-reduce-in-bf16", "the error feedback needs fp32 gradients", lambda a: a.grad_reduce_in_bf16),
    ("--num-experts", "experts have process groups of their own", lambda a: a.num_experts is not None),
    ("--tensor-model-parallel-size > 1", "not tested yet", lambda a: a.tensor_model_parallel_size > 1),
    ("--context-parallel-size > 1", "not tested yet", lambda a: a.context_parallel_size > 1),
    (
        "--virtual-pipeline-model-parallel-size / --num-layers-per-virtual-pipeline-stage",
        "one stage would be several model chunks",
        lambda a: a.virtual_pipeline_model_parallel_size is not None,
    ),
    (
        "--num-distributed-optimizer-instances > 1",
        "gradients are reduced in two steps",
        lambda a: a.num_distributed_optimizer_instances > 1,
    ),
    (
        "--calculate-per-token-loss",
        "gradients change scale from step to step",
        lambda a: a.calculate_per_token_loss,
    ),
    (
        "--ddp-average-in-collective",
        "compressed sums are scaled beforehand",
        lambda a: a.ddp_average_in_collective,
    ),
    (
        "--check-for-spiky-loss",
        "a repeated step would advance the error feedback twice",
        lambda a: a.check_for_spiky_loss,
    ),
    (
        "--check-for-large-grads",
        "a repeated step would advance the error feedback twice",
        lambda a: a.check_for_large_grads,
    ),
    (
        "--rerun-mode report_stats",
        "a repeated step would advance the error feedback twice",
        lambda a: a.rerun_mode == "report_stats",
    ),
    ("--cuda-graph-impl", "a replay may still be writing the gradients", lambda a: a.cuda_graph_impl != "none"),
    (
        "--ddp-param-name-patterns-for-fp32-local-accumulation",
        "those gradients lie outside the bucket",
        lambda a: bool(a.ddp_param_name_patterns_for_fp32_local_accumulation),
    ),
    ("--optimizer dist_muon", "it shards parameters by layer", lambda a: a.optimizer == "dist_muon"),
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


def check_options(args: Namespace) -> None:
    """Raise ``ConfigError`` naming every Megatron option in use that EDGC does not support yet.

    ``args`` are Megatron's, validated: it has worked out the data-parallel size by then.
    """
    refused = [f"{flag} ({why})" for flag, why, in_use in _UNSUPPORTED if in_use(args)]
    if refused:
        raise ConfigError("--edgc does not support yet: " + "; ".join(refused))
    if args.data_parallel_size < 2:
        raise ConfigError("--edgc needs at least 2 data-parallel ranks: with one there is no reduction to compress")


def check_seam() -> None:
    """Raise ``ConfigError`` if a private name or signature of Megatron that EDGC relies on has changed."""
    from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucket, _ParamAndGradBucketGroup
    from megatron.training.models.base import ModelConfig

    expected: tuple[tuple[str, Callable[..., object], tuple[str, ...]], ...] = (
        ("start_grad_sync", _ParamAndGradBucketGroup.start_grad_sync, ("self", "force_all_reduce")),
        ("finish_grad_sync", _ParamAndGradBucketGroup.finish_grad_sync, ("self", "force_all_reduce")),
        (
            "check_grads",
            _ParamAndGradBucketGroup.check_grads,
            ("self", "check_for_nan_or_inf", "check_for_large"),
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
        (_ParamAndGradBucketGroup.__init__, ("data_parallel_group", "buckets", "grad_reduce_handle")),
        (DistributedDataParallel.__init__, ("bucket_groups", "expert_parallel_bucket_groups")),
    )
    for function, names in sources:
        source = inspect.getsource(function)
        for name in names:
            if f"self.{name}" not in source:
                raise ConfigError(f"Megatron's {function.__qualname__} no longer sets {name}: EDGC must follow")
    if "post_wrap_hooks" not in ModelConfig.__dataclass_fields__:
        raise ConfigError("Megatron's ModelConfig has no post_wrap_hooks any more: EDGC must follow")
