"""Run a test function on several gloo ranks of this machine."""

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# The processes of all tests are forked from one that has imported torch, which takes longer than most of the tests.
START_METHOD = "forkserver"
get_context(START_METHOD).set_forkserver_preload(["torch", "edgc.hosts.module"])


def run_on_ranks(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """Call ``function(rank, *args)`` on each of ``ranks`` processes in one gloo group; return all results.

    An exception on any rank fails the caller. ``function`` must live at the top level of its module. The processes have
    the environment of the first call.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_worker, (ranks, folder, function, args), nprocs=ranks, start_method=START_METHOD)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def _worker(rank: int, ranks: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    try:
        torch.save(function(rank, *args), Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()
