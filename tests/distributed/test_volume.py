"""Runs that have a budget of bytes: what they send, what they plan, and how they go on."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from edgc.observe.events import read_events
from tests.distributed.megatron_runs import TINY_GPT, train
from tests.distributed.modes import MODES, WITH_VOLUME, different, results
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


def test_what_megatron_sums_beside_takes_nothing_of_the_volume(tmp_path: Path) -> None:
    """The second sum of a tied embedding, which is a fifth of the bytes in fp32: no volume can pay for it."""
    flags = ["--pipeline-model-parallel-size", "2", "--edgc-no-fuse-embedding-sync", "--train-iters", "60", *VOLUME]
    output = train([*flags, "--edgc-log-dir", str(tmp_path)])
    assert "65.5 kB a step, which --edgc-volume does not bound" in output and "--edgc-volume 12 was asked" not in output
    last = read_events(tmp_path)[-1]
    second_sums = 60 * 65_536.0
    sent, fp32 = (last[name] - second_sums for name in ("dp_bytes", "dp_bytes_fp32"))
    assert fp32 / sent == pytest.approx(12, rel=0.05)


def test_a_run_that_diverges_warns_and_sends_more(tmp_path: Path) -> None:
    """Its learning rate rises far beyond what the model bears."""
    rising = ["--train-iters", "80", "--lr", "0.3", "--lr-warmup-iters", "60"]
    output = train([*rising, *VOLUME, "--edgc-log-dir", str(tmp_path)], processes=2)
    assert "warning: iteration" in output and "% above the lowest of the 10 windows before: steps may now" in output
    events = read_events(tmp_path)
    windows = [event for event in events if event["event"] == "window"]
    risen = [place for place, window in enumerate(windows[:-1]) if window["plan"]["relief"] > 1]
    assert risen and any(event["event"] == "guard" and event["loss_rise"] > 0.1 for event in events)
    usual = windows[risen[0]]["stages"][0]["dp_bytes"]
    assert all(windows[place + 1]["stages"][0]["dp_bytes"] > 1.5 * usual for place in risen[-3:])
    assert windows[risen[0]]["plan"]["reasons"] == ["the training loss rose: 2 times the budget"]


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


# One of each way in which gradients come about, are cut up and travel. Not the steps that Megatron runs again: their
# bytes count, and a resumed run has others of them.


@pytest.fixture(scope="module")
def whole_and_resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By mode and run, what each rank of a run with a volume has left, and of its resume from a checkpoint midway."""
    folder = tmp_path_factory.mktemp("volume")
    volume = "--edgc-window 2 --edgc-iteration-sampling-rate 1 --edgc-study fidelity_share=0.01"
    runs = []
    for name in WITH_VOLUME:
        mode = MODES[name]
        steps = [
            "--attention-dropout",
            "0",
            "--hidden-dropout",
            "0",
            "--train-iters",
            "10",
            "--ckpt-format",
            mode.format,
        ]
        base = [*TINY_GPT, *steps, *shlex.split(mode.flags), *VOLUME, *shlex.split(volume), *shlex.split(mode.edgc)]
        base += ["--edgc-pp", mode.pp]
        saved = str(folder / name)
        runs.append({"name": f"{name}.whole", "arguments": [*base, "--save", saved, "--save-interval", "5"]})
        runs.append({"name": f"{name}.resumed", "arguments": [*base, "--load", saved], "latest": [saved, 5]})
    return results(runs, folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_VOLUME)
def test_a_budget_works_in_each_mode(whole_and_resumed: dict[str, list[dict[str, Any]]], name: str) -> None:
    whole, resumed = (whole_and_resumed[f"{name}.{run}"] for run in ("whole", "resumed"))
    for result in (*whole, *resumed):
        assert "failed" not in result, result["failed"]
        assert result["apart"] == [] and result["lost"] < MODES[name].lost
    assert different(whole) == different(resumed) == []
    for one, other in zip(whole, resumed, strict=True):
        assert one["parameters"].keys() == other["parameters"].keys()
        assert all(torch.equal(one["parameters"][key], other["parameters"][key]) for key in one["parameters"])
    sent, dense = (sum(counts) for counts in zip(*(result["bytes"][:2] for result in whole), strict=True))
    # Megatron's own bytes are half with the distributed optimizer, and half in 16 bits
    share = whole[0]["gradient_bytes"] / 4 / (2 if "--use-distributed-optimizer" in MODES[name].flags else 1)
    if name == "multi-token prediction, pipeline":  # Megatron sums its embedding a second time, beside the budget
        second_sums = len(whole) * 10 * 256 * 64 * 4
        sent, dense = sent - second_sums, dense - second_sums
    assert dense / sent == pytest.approx(12 * share, rel=0.15)
