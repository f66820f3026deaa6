"""Real Megatron runs of several processes that share one GPU through NCCL. Skipped, with the reason, without a GPU."""

import importlib
import os
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from edgc.compress.fused import triton_kernels
from edgc.observe.events import read_events
from tests.distributed.megatron_runs import REPOSITORY
from tests.distributed.test_megatron_run import losses

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

TIMEOUT = 180  # seconds
LAST_LINES = 40  # of what a run that failed has printed
SMALL = shlex.split(
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 8 --global-batch-size 16 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 4 "
    "--weight-decay 0.01 --adam-beta2 0.95 --clip-grad 1.0 --attention-dropout 0 --hidden-dropout 0 --seed 1234 "
    "--mock-data --split 90,5,5 --tokenizer-type NullTokenizer --vocab-size 512 --num-workers 0 "
    "--eval-iters 2 --eval-interval 100000 --log-interval 5 "
    "--transformer-impl local --no-masked-softmax-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm "
    "--edgc --edgc-window 5 --edgc-iteration-sampling-rate 0.5 --edgc-link-gbps 0.05"
)
PIPELINE = shlex.split("--pipeline-model-parallel-size 2 --global-batch-size 32 --train-iters 12")


def train(processes: int, *arguments: str) -> str:
    """A run that must succeed; returns what its first and its last process have printed."""
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.Popen(
        [sys.executable, str(REPOSITORY / "tools/one_gpu.py"), str(processes), *SMALL, *arguments],
        env={**own, "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = run.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        run.terminate()  # then it ends its processes
        output, _ = run.communicate()
    assert run.returncode == 0, "\n".join(output.splitlines()[-LAST_LINES:])
    return output


def validation_loss(output: str) -> float:
    found = re.findall(r"validation loss at iteration \d+ on validation set \| lm loss value: (\S+)", output)
    assert len(found) == 1, f"{len(found)} validation losses"
    return float(found[0])


def assert_learns(output: str) -> None:
    """NaN is not below anything."""
    assert validation_loss(output) < losses(output)[0]


@pytest.fixture(scope="module")
def by_kernels() -> dict[str, str]:
    """Output of runs that differ only in what low rank computes with."""
    return {
        kernels: train(2, "--train-iters", "20", "--edgc-study", f"kernels={kernels}") for kernels in ("plain", "fused")
    }


@pytest.mark.parametrize("kernels", ["plain", "fused"])
def test_a_run_learns_within_its_bytes(kernels: str, by_kernels: dict[str, str]) -> None:
    output = by_kernels[kernels]
    assert_learns(output)
    (fewer,) = re.findall(r"edgc \| gradients: sent .*?, ([\d.]+)x fewer than in fp32", output)
    assert float(fewer) == pytest.approx(24, rel=0.05)


@pytest.mark.skipif(
    torch.cuda.is_available() and triton_kernels(torch.device("cuda")) is None,
    reason="Triton's kernels need compute capability 8.0",
)
def test_plain_and_fused_kernels_end_at_one_loss(by_kernels: dict[str, str]) -> None:
    assert "EDGC uses plain torch instead" not in by_kernels["fused"]
    plain, fused = (validation_loss(by_kernels[kernels]) for kernels in ("plain", "fused"))
    assert fused == pytest.approx(plain, rel=0.01)


def adam_for_gpus() -> bool:
    """Whether Megatron finds an Adam whose state it can load in a distributed optimizer."""
    for name in ("transformer_engine.pytorch.optimizers", "apex.optimizers"):
        with suppress(ImportError):
            importlib.import_module(name)
            return True
    return False


def test_a_distributed_optimizer_in_bf16_resumes(tmp_path: Path) -> None:
    if not adam_for_gpus():
        pytest.skip(
            "neither apex nor Transformer Engine: Megatron cannot load a distributed optimizer with torch's Adam"
        )
    checkpoints = str(tmp_path / "checkpoints")
    arguments = shlex.split(
        "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ckpt-format torch_dist "
        f"--train-iters 20 --save-interval 10 --save {shlex.quote(checkpoints)}"
    )
    first = train(2, *arguments, "--exit-interval", "10")
    resumed = train(2, *arguments, "--load", checkpoints)
    iterations = [re.findall(r"iteration +(\d+)/ +20 ", output) for output in (first, resumed)]
    assert iterations == [["1", "5", "10"], ["11", "15", "20"]]
    assert validation_loss(resumed) < losses(first)[0]


def test_a_pipeline_with_the_papers_preset_learns() -> None:
    output = train(4, *PIPELINE, "--edgc-preset", "paper", "--edgc-warmup-fraction", "0.1")
    assert_learns(output)


def test_a_pipeline_compresses_messages_between_its_stages(tmp_path: Path) -> None:
    output = train(4, *PIPELINE, "--edgc-log-dir", str(tmp_path / "events"))
    assert_learns(output)
    start, first, *_, last = read_events(tmp_path / "events")
    assert start["messages"]["engine"] == "int4"
    # The first window is a dense step. Activations, half of the messages, stay in fp32, which takes 8 times int4.
    sent, dense = (last[name] - first[name] for name in ("pp_bytes", "pp_bytes_dense"))
    assert dense / sent == pytest.approx(2 / (1 + 1 / 8), rel=0.02)
