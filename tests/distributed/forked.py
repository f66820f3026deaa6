"""Starts a script on several processes that share one import of torch and Megatron.

    python tests/distributed/forked.py PROCESSES SCRIPT ARGUMENTS...
    python tests/distributed/forked.py each SCRIPT FOLDER

The second starts the script on one process for each list of arguments in FOLDER/arguments.json, one after another, and
leaves FOLDER/I.txt with the output of the I-th and FOLDER/statuses.json.

torchrun starts an interpreter for each process, and their imports take most of the time of a short training. Here one
process imports and forks. As under torchrun, the script finds its place in the environment, and when one process fails
the others are killed. The exit status is that of torchrun: 0, or 1 if any failed.
"""

import ctypes
import json
import math
import os
import runpy
import signal
import socket
import sys
import time
from pathlib import Path


def main() -> int:
    processes, script, *arguments = sys.argv[1:]
    from megatron.edgc.recipes import cpu

    cpu.redirect()  # before Megatron is imported; when the script calls it again, nothing happens
    import megatron.edgc.recipes.pretrain
    import megatron.edgc.training  # noqa: F401

    sys.path[0] = os.path.dirname(script)
    if processes == "each":
        return one_after_another(script, Path(*arguments))
    return together(int(processes), script, arguments)


def one_after_another(script: str, folder: Path) -> int:
    statuses = []
    for place, arguments in enumerate(json.loads((folder / "arguments.json").read_text())):
        child = os.fork()
        if child == 0:
            output = os.open(folder / f"{place}.txt", os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.argv = [script, *arguments]
            runpy.run_path(script, run_name="__main__")
            return 0
        _, status = os.waitpid(child, 0)
        statuses.append(os.waitstatus_to_exitcode(status))
    (folder / "statuses.json").write_text(json.dumps(statuses))
    return 0


def together(processes: int, script: str, arguments: list[str]) -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    sys.argv = [script, *arguments]
    running = set()
    for process in range(processes):
        child = os.fork()
        if child == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its parent
            place = {"RANK": process, "LOCAL_RANK": process, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
            os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)})
            os.environ.update({name: str(value) for name, value in place.items()})
            runpy.run_path(script, run_name="__main__")
            return 0
        running.add(child)
    deadline = math.inf
    while running:
        child, status = os.waitpid(-1, os.WNOHANG)
        running.discard(child)
        if child == 0:
            time.sleep(0.05)
        elif status != 0:
            deadline = min(deadline, time.monotonic() + 2)  # until then another may say why
        if time.monotonic() > deadline:
            for other in running:
                os.kill(other, signal.SIGKILL)
    return int(deadline < math.inf)


if __name__ == "__main__":
    sys.exit(main())
