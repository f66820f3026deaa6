"""Pretraining with EDGC: parse, check, install, and hand over to Megatron's own ``pretrain``."""

from argparse import Action, ArgumentParser, HelpFormatter, Namespace
from collections.abc import Callable, Sequence
from functools import partial

import torch.distributed as dist
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.global_vars import get_tensorboard_writer
from torch.nn import Module

from megatron.edgc.arguments import add_arguments
from megatron.edgc.entry import compressing
from megatron.edgc.recipes import cpu, gpt
from megatron.edgc.recipes.datasets import check_datasets, use_built_helpers
from megatron.edgc.session import Session

Hook = Callable[[list[Module]], list[Module]]


def pretrain_gpt(on_cpu: bool) -> None:
    """Train a GPT from the command line's flags. Raises ``ConfigError`` on bad input before anything is built."""
    ended: SystemExit | None = None
    try:
        train(on_cpu)
    except SystemExit as early:  # after --exit-interval, a time limit, or a signal: all has been saved
        trained = dist.is_initialized() and hasattr(get_args(), "curr_iteration")
        if early.code or not trained:  # else it is an error, perhaps of this process alone
            raise
        ended = early
    # Megatron leaves both to the interpreter's exit, where the last scalars (the validation loss) can be lost and
    # gloo's threads sometimes abort the process.
    if writer := get_tensorboard_writer():
        writer.close()
    dist.barrier()
    dist.destroy_process_group()
    if ended is not None:
        raise ended


def train(on_cpu: bool, hooks: Sequence[Hook] = ()) -> Session | None:
    """``pretrain_gpt`` without the end of the process groups; the session with EDGC.

    ``hooks`` are called with the list of wrapped model chunks, after EDGC's own, and return it.
    """
    args = parse(on_cpu)
    check_datasets(args)
    use_built_helpers()
    model = gpt_config_from_args(args)
    with compressing(args, model) as session:
        model.post_wrap_hooks.extend(hooks)
        pretrain(
            pretrain_cfg_container_from_args(args, model),
            gpt.train_valid_test_datasets,
            ModelType.encoder_or_decoder,
            gpt.forward_step,
        )
    return session


def parse(on_cpu: bool) -> Namespace:
    """Megatron's arguments. Raises ``ConfigError`` for settings and options that EDGC does not accept."""
    args: Namespace = parse_and_validate_args(
        partial(_extra_arguments, on_cpu=on_cpu), args_defaults={"tokenizer_type": "GPT2BPETokenizer"}
    )
    gpt.check_script_options(args)
    return args


class _Help(HelpFormatter):
    """Prints a help text with a stray % as it is; Megatron 0.19.2 has one, on which ``--help`` would fail."""

    def _expand_help(self, action: Action) -> str:
        try:
            return super()._expand_help(action)
        except ValueError:
            return action.help or ""


def _extra_arguments(parser: ArgumentParser, on_cpu: bool) -> ArgumentParser:
    parser.formatter_class = _Help
    add_arguments(parser)
    parser.add_argument(
        cpu.FLAG,
        action="store_true",
        help="train on the CPU over gloo; without this flag every process needs a GPU",
    )
    if on_cpu:
        parser.set_defaults(**cpu.ARGUMENT_DEFAULTS)
    return parser
