"""Which of Megatron's options the recipe of GPT pretraining takes, and what they mean for it."""

from argparse import Namespace

import pytest

from edgc.config import ConfigError
from megatron.edgc.recipes import gpt
from megatron.edgc.run import scales_loss

PLAIN = Namespace(
    mtp_num_layers=None,
    pipeline_model_parallel_layout=None,
    pipeline_model_parallel_size=4,
    tensor_model_parallel_size=2,
    micro_batch_size=4,
    eval_micro_batch_size=4,
)


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({}, ""),
        ({"logits_load_dir": "teacher"}, "--logits-load-dir"),
        ({"mtp_num_layers": 1}, ""),
        ({"mtp_num_layers": 1, "pipeline_model_parallel_layout": "Ett|tt|tt|tmL"}, ""),
        ({"mtp_num_layers": 1, "pipeline_model_parallel_layout": "Ett|tt|m|L"}, "--mtp-num-layers on another stage"),
        ({"pipeline_model_parallel_layout": "Ett|tt|tt|tL"}, ""),
        ({"eval_micro_batch_size": 2}, "--eval-micro-batch-size with --tensor-model-parallel-size"),
        ({"eval_micro_batch_size": 2, "tensor_model_parallel_size": 1}, ""),
    ],
)
def test_what_would_train_another_model_or_hang_is_refused(given: dict[str, object], refused: str) -> None:
    args = Namespace(**{**vars(PLAIN), **given})
    if not refused:
        gpt.check_script_options(args)
        return
    with pytest.raises(ConfigError, match=f"pretrain_gpt.py does not implement {refused}"):
        gpt.check_script_options(args)


@pytest.mark.parametrize(
    ("given", "scaled"),
    [
        ({"fp16": True}, True),
        ({"loss_scale": 8.0, "bf16": True}, True),
        ({"loss_scale": 8.0, "use_distributed_optimizer": True}, True),
        ({"loss_scale": 8.0}, False),
        ({"bf16": True}, False),
    ],
)
def test_megatron_scales_a_loss_where_its_optimizer_can_skip_a_step(given: dict[str, object], scaled: bool) -> None:
    plain = {"fp16": False, "bf16": False, "use_distributed_optimizer": False, "loss_scale": None}
    assert scales_loss(Namespace(**{**plain, **given})) == scaled
