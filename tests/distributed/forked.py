"""A process that imports torch and Megatron once, and starts scripts as forks of itself: see ``megatron_runs``.

Each line of its input is a request in JSON: ``folder``, ``processes``, ``script``, ``arguments``, ``environment``. The
processes find their places in the environment, as under torchrun. FOLDER/output gets what they print. FOLDER/group has
their process group while they run, and FOLDER/status, when all have ended, the exit status: that of the one process, or
as of torchrun 0, and 1 if any of several failed. When one fails the others are killed.

An interpreter for each process would spend most of the time of a short training on these imports.
"""

import ctypes
import gc
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
    from megatron.edgc.recipes import cpu

    cpu.redirect()  # before Megatron is imported; when a script calls it again, nothing happens
    import megatron.edgc.recipes.pretrain
    import megatron.edgc.session  # noqa: F401

    gc.freeze()  # else the first collection of each fork would copy all that was imported
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            return start(**request)
        _, status = os.waitpid(child, 0)
        tell(request["folder"], "status", os.waitstatus_to_exitcode(status))
    os._exit(0)  # an orderly end would list what libraries leak


def start(folder: str, processes: int, script: str, arguments: list[str], environment: dict[str, str]) -> int:
    os.setsid()
    die_with_parent()
    for target, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, f"{folder}/output", os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        os.dup2(os.open(path, flags), target)
    os.dup2(1, 2)
    tell(folder, "group", os.getpid())
    os.environ.clear()
    os.environ.update(environment)
    sys.path[0] = os.path.dirname(script)
    sys.argv = [script, *arguments]
    if processes > 1:
        return together(processes, script)
    return run(script)


def tell(folder: str, name: str, value: int) -> None:
    """A file that is there once it is whole."""
    unfinished = Path(folder, f"{name}.unfinished")
    unfinished.write_text(str(value))
    unfinished.rename(Path(folder, name))


def free_port() -> int:
    """None of those that the system gives out: until it is used one of them may become a connection of another test."""
    for number in range(10_000):
        port = 10_000 + (os.getpid() + number) % 20_000
        with socket.socket() as free:
            try:
                free.bind(("localhost", port))
            except OSError:
                continue
            return port
    raise OSError("no port is free")


def together(processes: int, script: str) -> int:
    port = free_port()
    running = set()
    for process in range(processes):
        child = os.fork()
        if child == 0:
            die_with_parent()
            place = {"RANK": process, "LOCAL_RANK": process, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
            os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)})
            os.environ.update({name: str(value) for name, value in place.items()})
            return run(script)
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


def run(script: str) -> int:
    runpy.run_path(script, run_name="__main__")
    return 0


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    sys.exit(main())
