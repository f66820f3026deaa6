"""A training script that is not this project's own, on another model: ``examples/pretrain_bert.py``."""

import json
import shlex
from pathlib import Path

import pytest
import torch

from edgc.observe.events import read_events
from tests.distributed.megatron_runs import REPOSITORY, failure, launch
from tests.distributed.test_megatron_run import losses

SCRIPT = REPOSITORY / "examples" / "pretrain_bert.py"
BERT = shlex.split(
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 8 --global-batch-size 32 --lr 5e-3 --lr-decay-style constant --tokenizer-type NullTokenizer "
    "--vocab-size 127 --mock-data --split 90,5,5 --eval-iters 1 --eval-interval 1000 --log-interval 1 "
    "--attention-dropout 0 --hidden-dropout 0 --distributed-timeout-minutes 2"
)
PAPER = shlex.split(
    "--edgc --edgc-preset paper --edgc-window 6 --edgc-rmin 4 --edgc-rmax 12 --edgc-no-align "
    "--edgc-study entropy_stability=10 --edgc-iteration-sampling-rate 0.5"
)


def train(*arguments: str, processes: int = 2) -> list[float]:
    finished = launch(SCRIPT, [*BERT, *arguments], processes)
    assert finished.returncode == 0, failure(finished.stdout)
    return losses(finished.stdout)


def test_a_model_provider_of_another_model_trains_compressed_and_resumes(tmp_path: Path) -> None:
    dense = train("--train-iters", "60")
    saving = ["--save", str(tmp_path), "--ckpt-format", "torch", "--save-interval", "30"]
    events = ["--edgc-log-dir", str(tmp_path)]
    whole = train("--train-iters", "60", *PAPER, *saving, *events)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("30")
    resumed = train("--train-iters", "60", *PAPER, "--load", str(tmp_path), "--ckpt-format", "torch")
    # the second one that a resumed run logs is, without EDGC as well, the mean of the first two
    assert len(resumed) == 30 and resumed[2:] == whole[32:] and resumed[0] == whole[30]
    fall = dense[0] - sum(dense[-5:]) / 5
    assert fall > 1.5 and whole[:6] == dense[:6]  # the warm-up is Megatron's own reduction
    assert sum(whole[-5:]) / 5 - sum(dense[-5:]) / 5 < 0.2 * fall
    start, *windows = read_events(tmp_path)
    ranks = [window["ranks"][0] for window in windows]
    assert ranks[0] is None and len(set(ranks)) > 2, "ranks follow entropy"
    assert [name for name, *_ in start["stages"][0]["matrices"] if "encoder.layers.0" in name]
    assert windows[-1]["dp_bytes"] < windows[-1]["dp_bytes_dense"]
    saved = torch.load(next(tmp_path.glob("iter_0000030/mp_rank_00/*.pt")), weights_only=False)
    assert any("lm_head" in name for name in saved["edgc"]["index"]["saved"]["stage0-tp0"]["layout"])


def test_its_pipeline_sends_gradients_between_stages_compressed(tmp_path: Path) -> None:
    pipeline = ["--pipeline-model-parallel-size", "2", "--train-iters", "12", "--edgc-log-dir", str(tmp_path)]
    found = train(*pipeline, *PAPER, "--edgc-pp", "backward:powersgd:8", processes=4)
    assert len(found) == 12 and found[-1] < found[0]
    *_, last = read_events(tmp_path)
    assert [stage["stage"] for stage in last["stages"]] == ["stage 1", "stage 2"]
    assert last["pp_bytes"] < last["pp_bytes_dense"]


def test_a_loop_that_calls_megatrons_parts_itself(tmp_path: Path) -> None:
    loop, found = REPOSITORY / "tests" / "distributed" / "own_loop_run.py", {}
    low_rank = shlex.split("--edgc --edgc-preset paper --edgc-static-rank 8 --edgc-warmup-fraction 0 --edgc-window 6")
    for name, flags in {"plain": [], "dense": ["--edgc", "--edgc-engine", "dense"], "low rank": low_rank}.items():
        # the checks are a part of Megatron's own loop
        unchecked = ["--train-iters", "24", "--no-check-for-nan-in-loss-and-grad"]
        unchecked += ["--save", str(tmp_path / name), "--save-interval", "24", "--ckpt-format", "torch"]
        finished = launch(loop, [*BERT, *unchecked, *flags], 2)
        assert finished.returncode == 0, failure(finished.stdout)
        (line,) = (line for line in finished.stdout.splitlines() if line.startswith("RESULT"))
        found[name] = json.loads(line.removeprefix("RESULT"))
        assert found[name]["replaced"] == [] and found[name]["finalize"]
        assert "this checkpoint is without step" not in finished.stdout, "Megatron doubts nothing"
    assert found["dense"]["losses"] == found["plain"]["losses"]
    plain, low = found["plain"]["losses"], found["low rank"]["losses"]
    assert plain[-1] < plain[0] - 1 and low[0] == plain[0] and low[1] != plain[1]
    assert sum(low[-4:]) / 4 < sum(plain[-4:]) / 4 + 0.2 * (plain[0] - plain[-1])
    sent, dense = found["low rank"]["sent"]
    assert 0 < sent < dense / 2
    assert found["low rank"]["noted"] == pytest.approx(sum(low[17:23]) / 6), "of the last window, without its last step"
    saved = torch.load(next((tmp_path / "low rank").glob("iter_0000024/mp_rank_00/*.pt")), weights_only=False)
    assert saved["edgc"]["index"]["iteration"] == 24, "its checkpoints have EDGC's state"


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        ("LATE", "set config.finalize_model_grads_func before EDGC is attached"),
        ("TWICE", "iteration 1: gradients are reduced a second time"),
    ],
)
def test_a_loop_that_finalizes_in_its_own_way_is_told(mistake: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(mistake, "1")
    loop = REPOSITORY / "tests" / "distributed" / "own_loop_run.py"
    unchecked = ["--train-iters", "4", "--no-check-for-nan-in-loss-and-grad"]
    finished = launch(loop, [*BERT, *unchecked, "--edgc", "--edgc-engine", "int4", "--edgc-window", "2"], 2)
    assert finished.returncode != 0
    assert told in finished.stdout
