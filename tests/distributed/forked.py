"""Starts a script on several processes that share one import of torch and Megatron.

    python tests/distributed/forked.py PROCESSES SCRIPT ARGUMENTS...

torchrun starts an interpreter for each process, and their imports take most of the time of a short training. Here one
process imports and forks. As under torchrun, the script finds its place in the environment, and when one process fails
the others are killed. The exit status is that of torchrun: 0, or 1 if any failed.
"""

import ctypes
import math
import os
import runpy
import signal
import socket
import sys
import time


def main() -> int:
    processes, script, *arguments = int(sys.argv[1]), *sys.argv[2:]
    from megatron.edgc.recipes import cpu

    cpu.redirect()  # before Megatron is imported; when the script calls it again, nothing happens
    import megatron.edgc.recipes.pretrain
    import megatron.edgc.training  # noqa: F401

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(script)
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
