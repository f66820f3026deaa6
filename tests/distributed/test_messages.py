"""Messages between stages: what travels, and that no stage ever takes one for another."""

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from edgc.byte_counts import ByteCount
from edgc.compress.message_sender import HEADER_BYTES, UnexpectedMessage
from edgc.config import EDGCConfig
from edgc.plan.times.comm_cost import LinearCost, StageCost
from tests.distributed.gloo import run_on_ranks
from tests.distributed.megatron_runs import TINY_GPT
from tests.distributed.modes import results

SHAPE = 16, 3, 32  # tokens, micro-batch, width
Both = list[dict[str, Any]]


@pytest.fixture(scope="module")
def both() -> Both:
    """What the two processes of one start have seen: each imports Megatron, which takes longer than the tests."""
    return run_on_ranks(everything, 2)


def everything(rank: int) -> dict[str, Any]:
    return {
        "several": several_messages(rank),
        "batch": both_ways_in_a_batch(rank),
        "wrong": {pair: wrong_rank(rank, *pair) for pair in WRONG},
        "costs": costs(rank),
        "settings": settings(rank),
    }


def communicator(ranks: list[int | None], **settings: object) -> SimpleNamespace:
    """Of one of two stages whose plan has these ranks for stage 1 and stage 2 as senders."""
    from megatron.edgc.recipes import cpu

    cpu.redirect()
    from megatron.core import parallel_state

    from megatron.edgc.bucket_groups import Step
    from megatron.edgc.messages.p2p_communicator import EDGCP2PCommunicator
    from megatron.edgc.messages.pipeline_messages import PipelineMessages

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    config = EDGCConfig.of(**{"pp": "backward:powersgd:4", **settings})  # type: ignore[arg-type]
    chunk = SimpleNamespace(training=True)
    step = Step(5, None, message_ranks=tuple(ranks))
    messages = PipelineMessages(config, SimpleNamespace(), [chunk], lambda: step, repeatable=False)
    host = SimpleNamespace(
        virtual_pipeline_model_parallel_size=None,
        timers=None,
        variable_seq_lengths=False,
        mtp_standalone=False,
        use_ring_exchange_p2p=False,
        pipeline_dtype=torch.float32,
        batch_p2p_comm=True,
        batch_p2p_sync=False,
    )
    link = EDGCP2PCommunicator(parallel_state.get_pipeline_model_parallel_group(), host, messages)
    return SimpleNamespace(link=link, messages=messages, chunk=chunk, stage=dist.get_rank())


def gradient(step: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(step))


def several_messages(rank: int) -> dict[str, object]:
    ends = communicator([4])
    seen = []
    for step in range(6):
        if rank:
            ends.link.send_backward(gradient(step), False)
        else:
            seen.append(ends.link.recv_backward(SHAPE, False))
            assert seen[-1].requires_grad
    ends.chunk.training = False
    if rank:
        ends.link.send_backward(gradient(9), False)
        seen.append(ends.messages.senders["backward", 0].error.view(SHAPE))
    else:
        assert torch.equal(ends.link.recv_backward(SHAPE, False), gradient(9))  # evaluation is left alone
    return {"sum": torch.stack(seen).sum(dim=0).detach(), "bytes": ends.messages.byte_count()}


def test_what_arrives_and_what_is_left_is_what_was_sent(both: Both) -> None:
    first, second = (found["several"] for found in both)
    everything = torch.stack([gradient(step) for step in range(6)]).sum(dim=0)
    torch.testing.assert_close(first["sum"] + second["sum"], everything, atol=1e-4, rtol=0)
    tokens, width = SHAPE[0] * SHAPE[1], SHAPE[2]
    assert second["bytes"].sent == 6 * ((tokens + width) * 4 * 4 + HEADER_BYTES)
    assert second["bytes"].host == 6 * tokens * width * 4 and first["bytes"] == ByteCount()


class OneForAll:
    """NCCL gives one request for a whole batch."""

    def __init__(self, requests: list[dist.Work]):
        self.requests = requests

    def wait(self) -> None:
        for request in self.requests:
            request.wait()


def both_ways_in_a_batch(rank: int) -> torch.Tensor:
    ends = communicator([None])
    from megatron.edgc.messages import p2p_communicator

    exchange = p2p_communicator._batched_p2p_ops
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(p2p_communicator, "_batched_p2p_ops", lambda **kwargs: [OneForAll(exchange(**kwargs))])
        if rank:
            return ends.link.send_backward_recv_forward(gradient(0), SHAPE, False).detach()
        return ends.link.send_forward_recv_backward(gradient(1), SHAPE, False).detach()


def test_one_request_for_a_whole_batch_will_do(both: Both) -> None:
    first, second = (found["batch"] for found in both)
    assert torch.equal(first, gradient(0)) and torch.equal(second, gradient(1))


WRONG: list[tuple[int | None, int | None]] = [(8, 4), (4, 8), (None, 4), (4, None)]


def wrong_rank(rank: int, receivers: int | None, senders: int | None) -> str:
    ends = communicator([senders if rank else receivers])
    if rank:
        ends.link.send_backward(gradient(0), False)
        return ""
    try:
        ends.link.recv_backward(SHAPE, False)
    except UnexpectedMessage as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(("receivers", "senders"), WRONG)
def test_a_message_of_another_size_is_refused_with_both_sizes(
    receivers: int | None, senders: int | None, both: Both
) -> None:
    error = both[0]["wrong"][receivers, senders]
    expected, sent = (
        HEADER_BYTES + 4 * (SHAPE[0] * SHAPE[1] * SHAPE[2] if rank is None else (SHAPE[0] * SHAPE[1] + SHAPE[2]) * rank)
        for rank in (receivers, senders)
    )
    assert error.startswith(
        f"gradients from stage 2 to 1: expected {expected} bytes of rank {receivers or 0}, message 1 "
    )
    assert f"got {sent} bytes of rank {senders or 0}" in error and "in step 5" in error


def costs(rank: int) -> list[dict[int, StageCost]]:
    """Of a link that is timed and of one that is given."""
    communicator([])
    from megatron.edgc.messages.costs import message_costs

    return [message_costs(EDGCConfig.of(link_gbps=gbps), ARGS, torch.device("cpu")) for gbps in (None, 0.08)]


# messages of 128 x 64 values: at rank r (128 + 64) r values and a header
ARGS = SimpleNamespace(
    seq_length=64,
    micro_batch_size=4,
    context_parallel_size=1,
    sequence_parallel=True,
    tensor_model_parallel_size=2,
    hidden_size=64,
    params_dtype=torch.float32,
    fp32_residual_connection=False,
)


def test_a_message_is_timed_by_its_receiver_or_follows_from_the_link(both: Both) -> None:
    (timed, given), (none, same) = (found["costs"] for found in both)
    assert set(timed) == {1} and none == {} and given == same
    assert 0 < timed[1].dense_seconds < 5 and 0 < timed[1].compressed.at(8) < 5
    assert given[1].dense_seconds == pytest.approx((HEADER_BYTES + 4 * 128 * 64) / 1e7)
    assert given[1].seconds(8) == pytest.approx((HEADER_BYTES + 4 * 192 * 8) / 1e7)


def settings(rank: int) -> list[tuple[str, int | None]]:
    """The messages' engine, and their largest rank where gradients have 40: on links ever faster against the work, as
    given, and rounded, however long it takes.
    """
    communicator([])
    from megatron.edgc.messages.plan import choose_messages

    found = []
    for slope, pp in ((1e-3, "backward"), (8e-2, "backward"), (1.0, "backward"), (1.0, "backward:powersgd:8")):
        config = EDGCConfig.of(pp=pp, rmin=8, rmax=40, rest_wire="int6")
        cost = StageCost(LinearCost(0.0, slope), 1.0, 1.0)
        settled = choose_messages(config, ARGS, {1: cost}).settings
        found.append((settled.engine, settled.ranks.rmax or settled.ranks.static_rank))
    by_entropy = {"rank_model": "measured", "rank_step": 16}  # of gradients
    for settings in (
        {"pp": "backward:int4"},
        {"pp": "auto:int4", "kernels": "fused"},
        {"pp": "both:powersgd:8", **by_entropy},
    ):
        settled = choose_messages(
            EDGCConfig.of(**settings), ARGS, {1: StageCost(LinearCost(2.0, 0.0), 1.0, 1.0)}
        ).settings
        found.append((settled.engine, settled.ranks.static_rank))
    return found


SETTLED = [
    *[("powersgd", 20), ("powersgd", 12), ("dense", None), ("powersgd", 8)],
    *[("int4", None)] * 2,
    ("powersgd", 8),
]


def test_the_rank_of_messages_is_one_that_saves_and_takes_no_longer(both: Both) -> None:
    # 2x smaller up to rank 21; at 80 ms a rank 12 takes as long as the values; at 1 s none does, unless asked for
    assert [found["settings"] for found in both] == [SETTLED] * 2


DYNAMIC = shlex.split(
    "--edgc --edgc-preset paper --edgc-rmin 4 --edgc-rmax 20 --edgc-window 2 --edgc-warmup-fraction 0 "
    "--edgc-study entropy_stability=10 --edgc-iteration-sampling-rate 1 --edgc-gradient-sampling-rate 1 "
    "--edgc-no-align "
    "--edgc-pp both --edgc-link-gbps 1"
)
TIMED = shlex.split("--edgc --edgc-window 2 --edgc-static-rank 16 --edgc-pp backward:powersgd")
DEFAULTS = shlex.split("--edgc --edgc-window 2 --edgc-static-rank 16")
ASKED = [*DEFAULTS, "--edgc-pp", "backward:int4"]
PAPER = [flag for flag in DYNAMIC if flag not in ("--edgc-pp", "both")]
EPILOGUE = shlex.split("--edgc --edgc-window 2 --edgc-pp epilogue:powersgd:8")


@pytest.mark.slow
def test_ranks_change_for_sender_and_receiver_in_the_same_step_and_over_a_resume(tmp_path: Path) -> None:
    base = [*TINY_GPT, "--attention-dropout", "0", "--hidden-dropout", "0", "--pipeline-model-parallel-size", "2"]
    base += ["--global-batch-size", "16", "--lr", "1e-2"]  # so that entropy moves
    folder = str(tmp_path / "checkpoint")
    saving = ["--save", folder, "--save-interval", "8", "--ckpt-format", "torch_dist"]
    loading = ["--load", folder, "--ckpt-format", "torch_dist"]
    other = str(tmp_path / "other")
    other_save = ["--save", other, "--save-interval", "4", "--ckpt-format", "torch_dist"]
    other_load = ["--load", other, "--ckpt-format", "torch_dist"]
    third = str(tmp_path / "third")
    third_save = ["--save", third, "--save-interval", "2", "--ckpt-format", "torch_dist"]
    third_load = ["--load", third, "--ckpt-format", "torch_dist"]
    runs = [
        {"name": "even", "arguments": [*base, "--train-iters", "14", *DYNAMIC]},
        {"name": "skewed", "arguments": [*base, "--train-iters", "14", *DYNAMIC], "slow_stage": 1},
        {"name": "saved", "arguments": [*base, "--train-iters", "14", *DYNAMIC, *saving]},
        {"name": "resumed", "arguments": [*base, "--train-iters", "14", *DYNAMIC, *loading], "latest": [folder, 8]},
        {"name": "timed", "arguments": [*base, "--train-iters", "6", *TIMED, *other_save], "break_even": 8},
        {
            "name": "timed-resumed",
            "arguments": [*base, "--train-iters", "6", *TIMED, *other_load],
            "latest": [other, 4],
            "break_even": 0,
        },
        {"name": "slow", "arguments": [*base, "--train-iters", "4", *DEFAULTS, *third_save], "message_seconds": 2.0},
        {
            "name": "slow-resumed",
            "arguments": [*base, "--train-iters", "4", *DEFAULTS, *third_load],
            "latest": [third, 2],
            "message_seconds": 0.5,
        },
        {"name": "fast", "arguments": [*base, "--train-iters", "4", *DEFAULTS], "message_seconds": 0.5},
        {"name": "asked", "arguments": [*base, "--train-iters", "4", *ASKED], "message_seconds": 2.0},
        {"name": "epilogue", "arguments": [*base, "--train-iters", "4", *EPILOGUE]},
        {"name": "paper", "arguments": [*base, "--train-iters", "8", *PAPER]},
    ]
    left = results(runs, tmp_path)
    for result in (one for run in left.values() for one in run):
        assert "failed" not in result, result["failed"]
    for even, skewed in zip(left["even"], left["skewed"], strict=True):
        assert even["place"][0] == 0 or {None, 20, 12, 4} <= set(even["message_ranks"])
        assert even["message_ranks"] == skewed["message_ranks"]
        assert all(torch.equal(even["parameters"][name], skewed["parameters"][name]) for name in even["parameters"])
    # what a link was found to allow is not found anew by a run that goes on
    assert {rank for one in left["timed"] for rank in one["message_ranks"]} == {None, 8}
    # what a preset would round stays as it is where that is faster, and what is asked for is rounded
    assert {rank for one in left["slow"] for rank in one["message_ranks"]} == {None}
    assert all({0, None} == {rank for one in left[name] for rank in one["message_ranks"]} for name in ("fast", "asked"))
    pairs = [(left[name], left[f"{name}-resumed"]) for name in ("timed", "slow")] + [(left["saved"], left["resumed"])]
    for saved, resumed in (both for run, rest in pairs for both in zip(run, rest, strict=True)):
        assert saved["message_ranks"][-len(resumed["message_ranks"]) :] == resumed["message_ranks"]
        assert all(torch.equal(saved["parameters"][name], resumed["parameters"][name]) for name in saved["parameters"])
    # four micro-batches a step: nothing hides the last message of stage 2, which waits for no forward pass of stage 1
    ranks = [one["message_ranks"] for one in left["epilogue"] if one["place"][0] == 1]
    assert ranks == [[None] * 4 + [None, None, None, 8] * 3] * 2
    # so does the preset of the paper, at ranks that entropy moves
    for one in (one for one in left["paper"] if one["place"][0] == 1):
        last = one["message_ranks"][3::4]
        assert len(last) == 8 and None not in last[4:]
        assert {rank for place, rank in enumerate(one["message_ranks"]) if place % 4 < 3} == {None}
        assert len(set(last) - {None}) > 1
