"""Processes that would share a GPU, here on the CPU."""

import shlex
import subprocess
import sys

from tests.distributed.megatron_runs import REPOSITORY
from tests.distributed.test_megatron_run import losses

FLAGS = shlex.split(
    "--edgc-cpu --edgc --edgc-window 2 --edgc-link-gbps 0.05 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 128 --num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 6 --train-iters 4 --lr 1e-3 "
    "--eval-iters 1 --eval-interval 100 --log-interval 1"
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "tools/one_gpu.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_three_processes_train_and_two_are_shown() -> None:
    done = run("3", *FLAGS)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(losses(done.stdout)) == 4, "of the last process"
    assert "edgc | gradients: sent " in done.stdout, "of the first one"


def test_processes_that_fail_are_named() -> None:
    done = run("3", *FLAGS, "--no-such-flag")
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("one_gpu: error: process ")]
    assert errors and all(line.endswith("ended with status 2") for line in errors)
    assert run("0").returncode == 2
