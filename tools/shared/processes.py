"""Processes that work together: whether they go on, and how they end."""

import subprocess
import time
from collections.abc import Sequence

GRACE_SECONDS = 10.0  # for processes to end when asked
# Environment of processes that train on the CPU. By default glibc maps each large tensor anew and unmaps it, until a
# larger one has been freed: tens of thousands of page faults in each step of a dense run, but hardly any in one whose
# link EDGC has probed, because the probe frees large buffers. Here tensors stay in the heap, whatever trains.
IN_HEAP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**34), "MALLOC_TOP_PAD_": str(2**28)}
CPU_TRAINING = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **IN_HEAP}


def under_way(processes: Sequence[subprocess.Popen[bytes]]) -> bool:
    """Whether any goes on, and none has failed: the others would wait for it."""
    return any(process.poll() is None for process in processes) and not any(process.poll() for process in processes)


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End those that still run: gently at first, so that they can say what they have to say."""
    for process in processes:
        process.terminate()  # does nothing to one that has ended
    deadline = time.monotonic() + GRACE_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
