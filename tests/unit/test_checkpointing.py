"""What a checkpoint says of a run, without Megatron's part."""

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

from edgc.config import EDGCConfig


def test_a_checkpoint_of_a_resumed_run_holds_the_ranks_in_force_not_those_of_its_own_probe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.edgc import checkpointing

    in_force = SimpleNamespace(config=EDGCConfig.of(rmin=16, rmax=64), budget=None, state_dict=dict)
    own: Any = checkpointing.Checkpoints(Namespace(), EDGCConfig(), EDGCConfig.of(rmin=12, rmax=48), [], [], in_force)
    monkeypatch.setattr(checkpointing, "gather_objects", lambda value: [value])
    monkeypatch.setattr(checkpointing, "broadcast_object", lambda value: value)
    monkeypatch.setattr(checkpointing, "parallel_sizes", lambda args: {})
    monkeypatch.setattr(checkpointing, "mean_bytes", lambda counts: {})
    resolved = own._index(7, {})["resolved"]
    assert (resolved["rmin"], resolved["rmax"]) == (16, 64)
