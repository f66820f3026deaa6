"""Runs that have a budget of bytes: what they send, what they plan, and how they go on."""

import shlex
from pathlib import Path

import pytest

from edgc.observe.events import read_events
from tests.distributed.megatron_runs import train
from tests.distributed.test_megatron_run import losses

VOLUME = shlex.split(
    "--edgc --edgc-preset balanced --edgc-volume 12 --edgc-window 10 --edgc-iteration-sampling-rate 0.5 "
    "--edgc-link-gbps 0.01 --edgc-warmup-fraction 0.1 --edgc-study fidelity_share=0.002"
)


def test_a_run_sends_its_budget_and_resumes_with_the_same_plans(tmp_path: Path) -> None:
    # dropout: not even plain Megatron finds its random numbers again on a CPU
    base = ["--attention-dropout", "0", "--hidden-dropout", "0", "--train-iters", "60", *VOLUME]
    saving = ["--save", str(tmp_path / "saved"), "--ckpt-format", "torch", "--save-interval", "35"]
    whole = losses(train([*base, *saving, "--edgc-log-dir", str(tmp_path / "whole")], processes=2))
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("35")
    loading = ["--load", str(tmp_path / "saved"), "--ckpt-format", "torch"]
    resumed = losses(train([*base, *loading, "--edgc-log-dir", str(tmp_path / "resumed")], processes=2))
    assert resumed[2:] == whole[37:] and len(resumed) == 25

    _, *windows = read_events(tmp_path / "whole")
    _, *later = read_events(tmp_path / "resumed")
    plans = [(window["plan"]["matrix_ranks"], window["plan"]["formats"]) for window in windows]
    assert len(plans) == 20, "a window is a twentieth of the run"
    assert plans[11:] == [(window["plan"]["matrix_ranks"], window["plan"]["formats"]) for window in later]
    assert windows[-1]["dp_bytes_dense"] / windows[-1]["dp_bytes"] == pytest.approx(12, rel=0.03)
    assert windows[-1]["dp_bytes"] == later[-1]["dp_bytes"]
    # not in the last plan alone: of two matrices left in low rank both may have the same one, by the last bits of a CPU
    differ = [len(set(ranks.values())) > 1 and len(set(formats.values())) > 1 for (ranks,), (formats,) in plans]
    assert sum(differ) > len(plans) / 2, "matrices have ranks and formats of their own"
    for (ranks,), (formats,) in plans:
        assert all(formats[name].startswith("rows:") for name in ranks.keys() & formats.keys())
    assert len({str(plan) for plan in plans}) > 2, "plans follow what is measured"


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        "--bf16 --use-distributed-optimizer --overlap-grad-reduce",
        "--pipeline-model-parallel-size 2 --num-layers 4",
    ],
)
def test_a_budget_is_kept_in_other_modes(mode: str, tmp_path: Path) -> None:
    train(["--train-iters", "60", *VOLUME, *shlex.split(mode), "--edgc-log-dir", str(tmp_path)], processes=4)
    start, *windows = read_events(tmp_path)
    last = windows[-1]
    # Megatron's own reduce-scatter sends half of what an all-reduce does
    host_bytes = start["gradient_bytes"] / (2 if "distributed" in mode else 1)
    assert 4 / host_bytes * last["dp_bytes_dense"] / last["dp_bytes"] == pytest.approx(12, rel=0.05)
    assert all(ranks is not None for ranks in last["plan"]["matrix_ranks"])
