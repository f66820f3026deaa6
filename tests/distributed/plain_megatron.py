"""Megatron's own pretraining with nothing of EDGC but the CPU redirection: the reference for runs without --edgc."""

from megatron.edgc.recipes import cpu

cpu.redirect()

from megatron.core.enums import ModelType  # noqa: E402
from megatron.training import pretrain  # noqa: E402
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args  # noqa: E402
from megatron.training.arguments import parse_and_validate_args  # noqa: E402

from megatron.edgc.recipes import gpt  # noqa: E402


def cpu_defaults(parser):
    parser.set_defaults(**cpu.ARGUMENT_DEFAULTS)
    return parser


args = parse_and_validate_args(cpu_defaults)
pretrain(
    pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
    gpt.train_valid_test_datasets,
    ModelType.encoder_or_decoder,
    gpt.forward_step,
)
