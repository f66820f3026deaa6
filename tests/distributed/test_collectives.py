"""Collectives over real gloo groups."""

import pytest
import torch
import torch.distributed as dist

from edgc.comm import collectives
from edgc.comm.collectives import Communicator, Traffic, run_to_end
from tests.distributed.gloo import run_on_ranks

COLUMNS = 100


def in_pieces(rank: int) -> tuple[float, float]:
    """Check what large messages bring; bytes that were counted for them, and that a process sent another at most."""
    group = dist.group.WORLD
    assert group is not None
    communicator, ranks = Communicator(group, Traffic()), dist.get_world_size()
    own = torch.arange(COLUMNS) + 1000 * rank
    parts = torch.stack([own + 100_000 * place for place in range(ranks)], dim=1).T  # not contiguous
    most = 0

    def noted(result: torch.Tensor, tensor: torch.Tensor, **kwargs: object) -> object:
        nonlocal most
        most = max(most, result.nbytes // ranks)
        return send(result, tensor, **kwargs)

    for name in ("all_gather_into_tensor", "all_to_all_single"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collectives, "PIECE_BYTES", 24 * own.itemsize)
            send = getattr(dist, name)
            patch.setattr(dist, name, noted)
            gathers = name.startswith("all_gather")
            found = run_to_end(communicator.all_gather(own) if gathers else communicator.all_to_all(parts))
        sent = 0 if gathers else 100_000 * rank
        assert found.is_contiguous()
        assert torch.equal(found, torch.stack([torch.arange(COLUMNS) + 1000 * place + sent for place in range(ranks)]))
    return communicator.traffic.bytes, most


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_large_message_travels_in_pieces(ranks: int) -> None:
    """It brings what a whole one does, and is counted once."""
    itemsize = torch.int64.itemsize
    sent = 2 * (ranks - 1) * COLUMNS * itemsize
    assert run_on_ranks(in_pieces, ranks) == [(sent, 24 * itemsize)] * ranks
