"""Processes that share a GPU, with a script of a few lines in the place of a training run."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools import one_gpu

SCRIPT = """
import os, pathlib, signal, sys, time
ready = lambda rank: pathlib.Path(__file__).with_name(f"ready-{rank}")
rank = int(os.environ["RANK"])
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # at once, as other processes write to the same file
say("rank", rank, "of", os.environ["WORLD_SIZE"], os.environ["NCCL_HOSTID"], *sys.argv[1:])
if "fail" in sys.argv and rank == 1:
    while not (ready(0).exists() and ready(2).exists()):
        time.sleep(0.01)
    print("what went wrong", file=sys.stderr)
    sys.exit(3)
if "fail" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: (say("asked to end", rank), sys.exit(0)))
    ready(rank).touch()
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pretrain_gpt.py").write_text(SCRIPT)
    monkeypatch.setattr(one_gpu, "REPOSITORY", tmp_path)
    monkeypatch.setattr(one_gpu, "end_on_signals", lambda: None)  # of pytest's process


def test_the_first_and_the_last_process_are_shown(capfd: pytest.CaptureFixture[str]) -> None:
    assert one_gpu.main(["3", "--some", "flag"]) == 0
    shown = sorted(capfd.readouterr().out.splitlines())
    assert shown == ["rank 0 of 3 host0 --some flag", "rank 2 of 3 host2 --some flag"]


def test_a_process_that_fails_is_named_and_the_others_are_asked_to_end(capfd: pytest.CaptureFixture[str]) -> None:
    assert one_gpu.main(["3", "fail"]) == 3
    found = capfd.readouterr()
    assert "what went wrong" in found.err and "one_gpu: error: process 1 ended with status 3" in found.err
    assert "process 0" not in found.err
    assert {"asked to end 0", "asked to end 2"} <= set(found.out.splitlines())


@pytest.mark.parametrize("arguments", [["0"], ["many"], []])
def test_the_number_of_processes_is_checked(arguments: list[str]) -> None:
    command = [sys.executable, one_gpu.__file__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "one_gpu" in done.stderr
