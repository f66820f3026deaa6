"""Training runs: started, or kept where the same command has finished before."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tools._root import REPOSITORY
from tools.experiments.lists import Trial
from tools.shared.changes import CHANGES, changed, preset
from tools.shared.checkout import commit
from tools.shared.files import locked
from tools.shared.machine import device_name
from tools.shared.megatron import corpus_digest
from tools.shared.processes import CPU_TRAINING
from tools.shared.runs import RunError, load_run

COMMAND = "command.json"  # in a run's folder once it has finished


def run(trial: Trial) -> Path:
    """Train, unless this command has finished before; returns the folder. Raises ``RunError`` if training fails.

    Of two lists that share a trial the second waits for the first.
    """
    with locked(trial.folder.with_name(f".{trial.folder.name}.lock")):
        if not finished(trial):
            _train(trial)
    return trial.folder


def _train(trial: Trial) -> None:
    folder, arguments = trial.folder, trial.arguments()
    record = {
        "arguments": arguments,
        "preset": preset(arguments),
        "changes": len(CHANGES),
        "machine": machine(trial.gpu),
        "corpus": _digest(trial),
        "commit": commit(REPOSITORY),
        "started": round(time.time()),
    }
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    processes = trial.data_parallel * trial.pipeline_parallel
    environment = {**os.environ, **CPU_TRAINING}
    with (folder / "log.txt").open("wb") as log:
        training = subprocess.Popen(
            [sys.executable, *launcher, str(processes), "pretrain_gpt.py", *arguments],
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            status = training.wait()
        finally:
            training.terminate()  # does nothing to one that has ended
            training.wait()
    if status != 0:
        raise RunError(f"{folder}: training ended with status {status}, see log.txt there")
    load_run(folder)  # a run without results has not finished
    (folder / COMMAND).write_text(json.dumps(record) + "\n")


def finished(trial: Trial) -> bool:
    """Whether this very command has run to its end before on this corpus, its preset and the code meaning the same.

    What ran with local changes has to run again: they may be others by now.
    """
    if not (trial.folder / COMMAND).is_file():
        return False
    record, arguments = json.loads((trial.folder / COMMAND).read_text()), trial.arguments()
    if record.get("commit", "").endswith("+"):
        return False
    return bool(
        record["arguments"] == arguments
        and record.get("corpus", "") in ("", _digest(trial))
        and record["preset"] == preset(arguments)
        and not changed(trial.engine, trial.pipeline_parallel, arguments, record.get("changes", 0))
    )


def _digest(trial: Trial) -> str:
    """Of its corpus, whose folder is relative to the repository, not to where the command is started."""
    return corpus_digest(str(REPOSITORY / trial.corpus))


def machine(gpu: bool) -> str:
    """What a run started now runs on. Raises ``RunError`` where GPUs are asked for and cannot be listed."""
    if not gpu:
        return device_name(on_gpu=False)
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")
    except (OSError, subprocess.CalledProcessError) as error:
        raise RunError(f"--gpu: nvidia-smi lists no GPU: {error}") from error
    return f"{len([name for name in listed if name])} x {listed[0]}"
