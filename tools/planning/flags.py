"""The flags of pretrain_gpt.py that the time of a step depends on."""

import argparse
import warnings
from collections.abc import Sequence
from typing import NoReturn

from tools.launching.configs import LaunchError
from tools.shared.layer import add_arguments

NOT_PLANNED = (
    *("--use-megatron-fsdp", "--use-torch-fsdp2", "--num-distributed-optimizer-instances", "--multi-latent-attention"),
    *("--grad-reduce-in-bf16", "--recompute-granularity", "--use-precision-aware-optimizer"),
    *("--pipeline-model-parallel-layout", "--mtp-num-layers", "--rampup-batch-size", "--step-batch-size-schedule"),
    *("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"),
    *("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"),
    *("--fp8-format", "--fp4-format", "--moe-layer-freq", "--moe-latent-size", "--expert-tensor-parallel-size"),
    *("--moe-shared-expert-intermediate-size", "--is-hybrid-model", "--hybrid-layer-pattern"),
    *("--hybrid-override-pattern", "--heterogeneous-layers-config-path"),
    "--heterogeneous-layers-config-encoded-json",
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LaunchError(message)


def _parser() -> _Parser:
    """Of the flags that a step's time depends on here."""
    parser = _Parser(allow_abbrev=False, add_help=False)
    add_arguments(parser)
    for flag in ("--num-layers", "--seq-length", "--micro-batch-size", "--global-batch-size"):
        parser.add_argument(flag, type=int, required=True)
    for flag in ("--tensor-model-parallel-size", "--pipeline-model-parallel-size"):
        parser.add_argument(flag, type=int, default=1)
    for flag in ("--num-layers-per-virtual-pipeline-stage", "--num-experts", "--moe-ffn-hidden-size"):
        parser.add_argument(flag, type=int)
    parser.add_argument("--expert-model-parallel-size", type=int, default=1)
    parser.add_argument("--context-parallel-size", type=int, default=1)
    parser.add_argument("--moe-router-topk", type=int, default=2)
    parser.add_argument("--optimizer", default="adam")
    switches = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--bf16", "--fp16", "--sequence-parallel")
    for flag in (*switches, "--accumulate-allreduce-grads-in-fp32", "--untie-embeddings-and-output-weights"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--num-virtual-stages-per-pipeline-rank", type=int)
    return parser


def read_flags(given: Sequence[str]) -> argparse.Namespace:
    """Raises ``LaunchError`` for what the planner cannot compute."""
    parser = _parser()
    flags, others = parser.parse_known_args(list(given))
    named = {flag.partition("=")[0] for flag in others}
    unknown = [flag for flag in NOT_PLANNED if flag in named]
    if flags.context_parallel_size > 1:
        unknown.append("--context-parallel-size")
    if flags.optimizer not in ("adam", "sgd"):
        unknown.append(f"--optimizer {flags.optimizer}")
    if unknown:
        raise LaunchError(f"{', '.join(unknown)}: the planner does not know what that costs")
    if not (flags.bf16 or flags.fp16):
        raise LaunchError("the planner knows training in 16 bits alone: give --bf16 or --fp16")
    if flags.fp16 and not flags.accumulate_allreduce_grads_in_fp32:
        raise LaunchError(
            "without --accumulate-allreduce-grads-in-fp32 Megatron sums gradients in fp16: the planner does not know "
            "what that costs with EDGC"
        )
    for action in parser._actions:
        value = getattr(flags, action.dest)
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise LaunchError(f"{action.option_strings[0]} {value}: must be at least 1")
    return flags


def check_names(flags: Sequence[str]) -> None:
    """Raises ``LaunchError`` for EDGC's flags, and for those that neither the planner nor an installed Megatron has."""
    named = [flag.partition("=")[0] for flag in flags if flag.startswith("--")]
    if of_edgc := sorted(flag for flag in set(named) if flag == "--edgc" or flag.startswith("--edgc-")):
        raise LaunchError(f"{', '.join(of_edgc)}: the planner compares the presets and engines as they are")
    others = set(named) - set(_parser()._option_string_actions) - set(NOT_PLANNED)
    if not others:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron.training.arguments import add_megatron_arguments  # which takes seconds
    except ImportError:
        return
    known = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))._option_string_actions
    if unknown := sorted(others - set(known)):
        raise LaunchError(f"{', '.join(unknown)}: pretrain_gpt.py has no such flag")


def chunks_of_stage(flags: argparse.Namespace) -> int:
    """Of a stage, in an interleaved schedule. Raises ``LaunchError`` for layers that do not divide."""
    if flags.num_virtual_stages_per_pipeline_rank:
        return int(flags.num_virtual_stages_per_pipeline_rank)
    if flags.num_layers_per_virtual_pipeline_stage is None:
        return 1
    here = flags.num_layers // flags.pipeline_model_parallel_size
    if here % flags.num_layers_per_virtual_pipeline_stage:
        raise LaunchError(
            f"--num-layers-per-virtual-pipeline-stage {flags.num_layers_per_virtual_pipeline_stage} does not divide "
            f"the {here} layers of a stage"
        )
    return int(here // flags.num_layers_per_virtual_pipeline_stage)
