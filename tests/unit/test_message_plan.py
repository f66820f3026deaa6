"""Which messages between pipeline stages are compressed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from edgc.config import EDGCConfig
from edgc.plan.times.comm_cost import LinearCost, StageCost
from megatron.edgc.checkpoint.index import RESOLVED
from megatron.edgc.messages.costs import message_form, message_shape, message_wire
from megatron.edgc.messages.plan import MessageChoice, choose_messages, message_config, without_compression

# messages of 256 x 64 values
ARGS: Any = SimpleNamespace(
    seq_length=64,
    micro_batch_size=4,
    context_parallel_size=1,
    sequence_parallel=False,
    hidden_size=64,
    params_dtype=torch.float32,
    fp32_residual_connection=False,
)


def chosen(pp: str, *compressed: LinearCost) -> MessageChoice:
    """Where an uncompressed message from any stage takes 1 s. ``compressed``: from the second stage on."""
    costs = {sender: StageCost(cost, 1.0, 1.0) for sender, cost in enumerate(compressed, start=1)}
    return choose_messages(EDGCConfig.of(pp=pp), ARGS, costs)


@pytest.mark.parametrize(("residual_in_fp32", "value_bytes"), [(False, 2), (True, 4)])
def test_messages_have_the_type_that_megatron_sends_them_in(residual_in_fp32: bool, value_bytes: int) -> None:
    changed = {"params_dtype": torch.bfloat16, "fp32_residual_connection": residual_in_fp32}
    args: Any = SimpleNamespace(**{**vars(ARGS), **changed})
    form = message_form(EDGCConfig.of(pp="backward:int4"), args, None)
    assert form.dense_bytes == 256 * 64 * value_bytes


def test_a_message_has_the_tokens_of_its_own_process() -> None:
    for parallel, rows in (({}, 256), ({"context_parallel_size": 2}, 128), ({"sequence_parallel": True}, 64)):
        args: Any = SimpleNamespace(**{**vars(ARGS), "tensor_model_parallel_size": 4, **parallel})
        assert message_shape(args) == (rows, 64)


def rounded(*seconds: float) -> list[LinearCost]:
    return [LinearCost(one, 0.0) for one in seconds]


@pytest.mark.parametrize(
    ("seconds", "left_alone"),
    [
        ((0.5, 0.9), set()),
        ((0.5, 0.95), {2}),  # too little
        ((2.0, 0.5, 2.0), {1, 3}),
        ((2.0, 2.0), {0, 1, 2}),  # then that of a first stage, too
        ((), set()),  # nothing was timed
    ],
)
def test_a_preset_rounds_messages_where_that_makes_them_faster(
    seconds: tuple[float, ...], left_alone: set[int]
) -> None:
    choice = chosen("auto:int4", *rounded(*seconds))
    assert choice.settings is not None and choice.settings.engine == "int4"
    assert choice.left_alone == left_alone and bool(choice.warning) == bool(left_alone)


def test_the_warning_has_the_times_and_how_to_insist() -> None:
    assert chosen("auto:int4", *rounded(0.5, 2.0)).warning == (
        "messages between stages stay uncompressed where compressing them saves no time: 2000.00 ms against 1000.00 ms "
        "from stage 3. Give --edgc-pp backward:int4 to compress them all the same"
    )
    assert "--edgc-pp epilogue:int8 " in chosen("auto-epilogue:int8", *rounded(2.0)).warning


@pytest.mark.parametrize("pp", ["backward:int4", "both:int4", "epilogue:int4"])
def test_what_is_asked_for_is_compressed_however_long_it_takes(pp: str) -> None:
    assert chosen(pp, *rounded(2.0)).left_alone == set()


def test_a_given_rank_is_timed_at_that_rank() -> None:
    assert chosen("auto:powersgd:8", LinearCost(0.0, 0.2), LinearCost(0.0, 0.1)).left_alone == {1}


def test_a_resumed_run_takes_up_that_messages_stay_uncompressed() -> None:
    config = EDGCConfig.from_preset("paper", rest_wire="int8")
    kept = without_compression(config).subset(RESOLVED)
    assert message_config(config).replace(**kept) == without_compression(config)


@pytest.mark.parametrize(("pp", "rotated"), [("powersgd:8:int4", True), ("powersgd:8", False), ("int4", False)])
def test_factors_of_messages_are_rotated_in_few_bits(pp: str, rotated: bool) -> None:
    assert message_wire(EDGCConfig.of(pp=f"backward:{pp}"), torch.bfloat16).hadamard == rotated
