"""What does not go together: model, cluster, number of processes and flags."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from tools.launching.configs import Cluster, LaunchError, Model

BF16_CAPABILITY = 8.0  # of bf16 and of Transformer Engine: Ampere and later


def shape_of(arguments: Sequence[str]) -> Namespace:
    """The flags that the checks below need; of one that is given twice the last counts, as for Megatron."""
    parser = ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    sizes = {"tensor-model-parallel-size": 1, "pipeline-model-parallel-size": 1, "context-parallel-size": 1}
    for name, default in {**sizes, "micro-batch-size": 1, "global-batch-size": None}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("train-iters", "train-samples", "save-interval", "save-retain-interval"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--step-batch-size-schedule", nargs="*")
    parser.add_argument("--transformer-impl", default="transformer_engine")
    parser.add_argument("--distributed-backend", default="nccl")
    parser.add_argument("--fp8-format")
    parser.add_argument("--tensorboard-dir")
    for name in ("bf16", "sequence-parallel", "use-tp-pp-dp-mapping", "edgc-cpu"):
        parser.add_argument(f"--{name}", action="store_true")
    try:
        return parser.parse_known_args(arguments)[0]
    except argparse.ArgumentError as error:
        raise LaunchError(str(error)) from None


def check(model: Model, cluster: Cluster, world_size: int, arguments: Sequence[str]) -> Namespace:
    """Raise ``LaunchError`` where model, cluster and number of processes do not go together; the flags looked at."""
    shape = shape_of(arguments)
    parts = {
        "tensor": shape.tensor_model_parallel_size,
        "pipeline": shape.pipeline_model_parallel_size,
        "context": shape.context_parallel_size,
    }
    replica = 1
    for size in parts.values():
        replica *= size
    if replica < 1 or world_size % replica:
        product = " x ".join(f"{name} {size}" for name, size in parts.items())
        raise LaunchError(f"{world_size} processes do not divide by {replica} ({product} of {model.name})")
    copies = world_size // replica
    for name in ("micro_batch_size", "global_batch_size", "save_interval", "save_retain_interval"):
        if (size := getattr(shape, name)) is not None and size < 1:
            raise LaunchError(f"--{name.replace('_', '-')} {size}: must be at least 1")
    batch = shape.global_batch_size or shape.micro_batch_size * copies
    if batch % (shape.micro_batch_size * copies):
        raise LaunchError(
            f"--global-batch-size {batch} does not divide by {shape.micro_batch_size * copies} "
            f"(--micro-batch-size {shape.micro_batch_size} x {copies} data-parallel ranks)"
        )
    if bool(shape.train_iters) == bool(shape.train_samples):
        raise LaunchError(f"{model.name}: exactly one of --train-iters and --train-samples must be given")
    if shape.save_interval and shape.save_retain_interval and shape.save_retain_interval % shape.save_interval:
        raise LaunchError(
            f"--save-retain-interval {shape.save_retain_interval} is no multiple of "
            f"--save-interval {shape.save_interval}"
        )
    if cluster.compute_capability is not None and (refused := too_new(shape, cluster.gpu, cluster.compute_capability)):
        raise LaunchError(refused)
    if shape.train_iters is None:
        if shape.step_batch_size_schedule:
            raise LaunchError(
                "--step-batch-size-schedule with --train-samples: only Megatron can count the iterations; give "
                "--train-iters"
            )
        shape.train_iters = shape.train_samples // batch
    return shape


def too_new(shape: Namespace, gpu: str, capability: float) -> str | None:
    """What among the flags a GPU of this compute capability cannot do; None if nothing."""
    if shape.edgc_cpu or capability >= BF16_CAPABILITY:
        return None
    given = {
        "--bf16": shape.bf16,
        "--transformer-impl transformer_engine": shape.transformer_impl == "transformer_engine",
        f"--fp8-format {shape.fp8_format}": shape.fp8_format is not None,
    }
    refused = [flag for flag, wanted in given.items() if wanted]
    return (
        f"{', '.join(refused)} on {gpu}: needs compute capability {BF16_CAPABILITY}, not {capability}"
        if refused
        else None
    )
