"""Launch real multi-process Megatron runs from tests."""

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

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
    ``stdout``. Several processes, without ``torchrun``, are forks of one that has imported torch and Megatron.
    """
    if processes > 1 and not torchrun:
        return _forked(script, arguments, processes, timeout)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if torchrun else []
    command = [sys.executable, *launcher, str(script), *arguments]
    # not a pipe: a process left behind by a failed run would hold it open
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command,
            env=_environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise subprocess.TimeoutExpired(command, timeout, _text(output)) from None
        finally:
            _end(process)
        return subprocess.CompletedProcess(command, process.returncode, _text(output))


def _end(process: subprocess.Popen[Any]) -> None:
    """Also of what it has started: torchrun gives each worker a session of its own, and ends them when asked to."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _text(output: IO[str]) -> str:
    output.seek(0)
    return output.read()


def launch_each(script: Path, several: list[list[str]]) -> list[tuple[int, str]]:
    """Run ``script`` on one process, a fork, with each of these arguments in turn: exit statuses and outputs."""
    finished = [_forked(script, arguments, 1, 60) for arguments in several]
    return [(one.returncode, one.stdout) for one in finished]


def _forked(script: Path, arguments: list[str], processes: int, timeout: float) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run``, by ``forked.py``."""
    server = _server()
    assert server.stdin is not None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        request = {"script": str(script), "arguments": arguments, "processes": processes, "folder": name}
        server.stdin.write(json.dumps({**request, "environment": _environment()}) + "\n")
        server.stdin.flush()
        status, group, deadline, late = folder / "status", folder / "group", math.inf, False
        while not status.is_file():
            assert server.poll() is None, "the process that starts others has ended"
            if deadline == math.inf and group.is_file():  # before that it imports
                deadline = time.monotonic() + timeout
            if time.monotonic() > deadline and not late:
                late = True
                os.killpg(int(group.read_text()), signal.SIGKILL)
            time.sleep(0.05)
        output = (folder / "output").read_text(errors="replace")
        if late:
            raise subprocess.TimeoutExpired([str(script), *arguments], timeout, output)
        return subprocess.CompletedProcess([str(script), *arguments], int(status.read_text()), output)


@cache
def _server() -> subprocess.Popen[str]:
    """It ends with this process, whose end closes its input."""
    return subprocess.Popen([sys.executable, str(FORKED)], env=_environment(), stdin=subprocess.PIPE, text=True)


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",  # a crash of native code says where
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONWARNINGS": "ignore",
        "TRITON_INTERPRET": "1",  # for the modes that ask for its kernels
    }


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
