"""Train with several processes that share this machine's one GPU, as NCCL would on several machines.

    python tools/one_gpu.py PROCESSES [flags of pretrain_gpt.py]

For trying what a cluster runs: NCCL sends over the loopback interface. The processes take turns on the GPU, so times
are no cluster's. Shows what the first and the last process print. If one fails, the others are stopped.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    import _root  # noqa: F401

from tools._root import REPOSITORY
from tools.shared.command import command_parser, end_on_signals, say_error
from tools.shared.processes import end, under_way

LAST_LINES = 40  # of the output of a process that has failed and was not shown


def main(argv: list[str] | None = None) -> int:
    """Train; returns the exit status: 0 if all processes end well, else that of the first one that has not."""
    parser = command_parser(__doc__, passes_on=True)
    parser.add_argument("processes", type=int, metavar="PROCESSES")
    options, flags = parser.parse_known_args(argv)
    if (count := options.processes) < 1:
        say_error("one_gpu", f"{count}: must be a number of processes")
        return 2
    end_on_signals()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(REPOSITORY / "pretrain_gpt.py"), *flags]
    started: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, str(rank)) for rank in range(count)]
        try:
            for rank, log in enumerate(logs):
                with log.open("wb") as output:
                    shown = rank in (0, count - 1)
                    started.append(
                        subprocess.Popen(
                            command,
                            stdin=subprocess.DEVNULL,
                            env={**os.environ, **_environment(rank, count, port)},
                            stdout=None if shown else output,
                            stderr=None if shown else subprocess.STDOUT,
                        )
                    )
            while under_way(started):
                time.sleep(0.2)
            statuses = [process.poll() for process in started]
        finally:
            end(started)
        for rank, status in enumerate(statuses):
            if status:
                print(*logs[rank].read_text(errors="replace").splitlines()[-LAST_LINES:], sep="\n", file=sys.stderr)
                say_error("one_gpu", f"process {rank} ended with status {status}")
    return next((status if status > 0 else 1 for status in statuses if status), 0)


def _environment(rank: int, count: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NCCL_HOSTID": f"host{rank}",  # NCCL refuses two processes on one GPU, unless it takes them for two hosts
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


if __name__ == "__main__":
    sys.exit(main())
