"""Small objects between processes (edgc/comm/objects.py)."""

import pickle

from edgc.comm.objects import broadcast_object, gather_objects
from tests.distributed.gloo import run_on_ranks


def _serialised(rank: int) -> bytes:
    value = {"version": 1} if rank == 0 else None
    return pickle.dumps({"version": 4, "entry": broadcast_object(value)})


def test_what_was_broadcast_is_serialised_alike_by_all_processes() -> None:
    """Context-parallel processes write one file at the same time: pickles of different lengths would break it."""
    source, other = run_on_ranks(_serialised, 2)
    assert source == other


def test_what_is_gathered_is_on_process_0_alone() -> None:
    """What a window has shown of each parameter grows with the run: only process 0 decides by it."""
    assert run_on_ranks(gather_objects, 2) == [[0, 1], []]
