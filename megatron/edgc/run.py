"""The training run that Megatron's validated arguments describe."""

from argparse import Namespace
from collections.abc import Callable
from copy import copy

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.training import training

from edgc.plan.run import Run
from megatron.edgc.compatibility import expert_replicas, replicas


def described_run(args: Namespace) -> Run:
    """The run of Megatron's validated arguments."""
    iterations = run_length(args)
    return Run(
        iterations=iterations,
        replicas=replicas(args),
        expert_replicas=expert_replicas(args),
        pipeline_stages=args.pipeline_model_parallel_size,
        value_bytes=value_bytes(args),
        scatters=args.use_distributed_optimizer,
        overlapped=args.overlap_grad_reduce,
        repeatable=repeatable(args),
        reruns=reruns(args),
        learning_rate=learning_rate(args, iterations),
    )


def value_bytes(args: Namespace) -> int:
    """The bytes of one value in Megatron's gradient buffers, by its validated arguments: 4 or 2."""
    return 4 if args.accumulate_allreduce_grads_in_fp32 or args.params_dtype == torch.float32 else 2


def learning_rate(args: Namespace, iterations: int) -> Callable[[int], float] | None:
    """The rate by iteration, as Megatron's scheduler will set it. Batches that grow count as if of one size.

    None where the arguments make no schedule, as those of a script with an optimizer of its own may.
    """
    by_samples = args.train_samples is not None
    unit, whole = ("samples", args.train_samples) if by_samples else ("iters", iterations)

    def steps(name: str) -> float | None:
        given: float | None = getattr(args, f"lr_{name}_{unit}")
        return given

    decay, fraction = steps("decay") or whole, args.lr_warmup_fraction
    try:
        scheduler = OptimizerParamScheduler(
            torch.optim.SGD([torch.zeros(1)]),
            init_lr=args.lr_warmup_init,
            max_lr=args.lr,
            min_lr=args.min_lr,
            lr_warmup_steps=steps("warmup") if fraction is None else fraction * decay,
            lr_decay_steps=decay,
            lr_decay_style=args.lr_decay_style,
            start_wd=0.0,
            end_wd=0.0,
            wd_incr_steps=0,
            wd_incr_style="constant",
            wsd_decay_steps=steps("wsd_decay"),
            lr_wsd_decay_style=args.lr_wsd_decay_style,
        )
    except (AssertionError, TypeError):
        return None

    def at(iteration: int) -> float:
        scheduler.num_steps = iteration * whole / iterations
        rate: float = scheduler.get_lr({})
        return rate

    return at


def scales_loss(args: Namespace) -> bool:
    """Whether Megatron's optimizer scales the loss: in fp16, or where that is asked for. It then skips a step whose
    gradients overflow. The optimizer in fp32 without shards takes no scale.
    """
    return bool(args.fp16 or (args.loss_scale and (args.bf16 or args.use_distributed_optimizer)))


def repeatable(args: Namespace) -> bool:
    """Whether Megatron may skip a step, because a gradient overflows, or run it again."""
    return scales_loss(args) or reruns(args)


def reruns(args: Namespace) -> bool:
    """Whether Megatron may run a step again, because it doubts a result."""
    doubts = args.check_for_spiky_loss or args.check_for_large_grads or args.error_injection_rate > 0
    return bool(doubts or args.rerun_mode not in ("disabled", "validate_results"))


def run_length(args: Namespace) -> int:
    """Iterations of the run as Megatron counts them, by samples perhaps and with batches that grow on the way."""
    counted = copy(args)  # Megatron itself fills in the count later, and takes a run that has one for another kind
    training.update_train_iters(counted)
    return int(counted.train_iters)
