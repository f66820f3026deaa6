"""Launch real multi-process Megatron runs from tests."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PRETRAIN = REPOSITORY / "pretrain_gpt.py"

TINY_GPT = shlex.split(
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --global-batch-size 8 --lr 2e-3 --lr-decay-style constant --tokenizer-type NullTokenizer "
    "--vocab-size 255 --mock-data --split 90,5,5 --eval-iters 1 --eval-interval 1000 --log-interval 1 "
    "--distributed-timeout-minutes 2"
)


def launch(
    script: Path, arguments: list[str], processes: int = 1, timeout: float = 240, torchrun: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run ``script`` on so many processes without a GPU; return its exit status and its output, both streams in
    ``stdout``. Without ``torchrun``, the processes share one import of torch and Megatron.
    """
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONWARNINGS": "ignore",
        "TRITON_INTERPRET": "1",  # for the modes that ask for its kernels
    }
    launcher = [sys.executable]
    if processes > 1 and not torchrun:
        launcher += [str(REPOSITORY / "tests" / "distributed" / "forked.py"), str(processes)]
    elif processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return subprocess.run(
        [*launcher, str(script), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )


def train(arguments: list[str], processes: int = 4, script: Path = PRETRAIN, torchrun: bool = False) -> str:
    """A run that must succeed; returns its output."""
    device = ["--edgc-cpu"] if script == PRETRAIN else []  # other scripts redirect without being asked
    finished = launch(script, [*device, *TINY_GPT, *arguments], processes, torchrun=torchrun)
    assert finished.returncode == 0, failure(finished.stdout)
    return finished.stdout


def failure(output: str) -> str:
    """The part of a failed run's output that tells why: from the first traceback or error line on."""
    for marker in ("Traceback", "edgc: error"):
        if marker in output:
            return output[output.index(marker) :][:5000]
    return output[-5000:]
