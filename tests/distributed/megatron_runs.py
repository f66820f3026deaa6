"""Launch real multi-process Megatron runs from tests."""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PRETRAIN = REPOSITORY / "pretrain_gpt.py"
FORKED = REPOSITORY / "tests" / "distributed" / "forked.py"

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
    launcher = [sys.executable]
    if processes > 1 and not torchrun:
        launcher += [str(FORKED), str(processes)]
    elif processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return _run([*launcher, str(script), *arguments], timeout)


def launch_each(script: Path, several: list[list[str]], timeout: float = 600) -> list[tuple[int, str]]:
    """Run ``script`` on one process with each of these arguments, one after another: exit statuses and outputs. All
    share one import of torch and Megatron.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "arguments.json").write_text(json.dumps(several))
        finished = _run([sys.executable, str(FORKED), "each", str(script), name], timeout)
        assert finished.returncode == 0, finished.stdout
        statuses = json.loads((folder / "statuses.json").read_text())
        return [(status, (folder / f"{place}.txt").read_text()) for place, status in enumerate(statuses)]


def _run(command: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONWARNINGS": "ignore",
        "TRITON_INTERPRET": "1",  # for the modes that ask for its kernels
    }
    return subprocess.run(
        command,
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
