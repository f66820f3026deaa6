"""The all-gather of updated weights as rounded differences, over three gloo ranks."""

import torch
import torch.distributed as dist
from torch import Tensor

from edgc.collectives import Communicator, Traffic
from edgc.reducer import run
from edgc.weights import gather_differences
from edgc.wire import GROUP, wire
from tests.distributed.gloo import run_on_ranks

RANKS, SHARD, STEPS = 3, 300, 40


def trained(rank: int) -> tuple[Tensor, Tensor, float]:
    """The gathered weights, the unrounded ones of this rank's shard, and the bytes sent, after some updates."""
    assert dist.group.WORLD is not None
    traffic = Traffic()
    communicator = Communicator(dist.group.WORLD, traffic)
    weights = torch.randn(RANKS * SHARD, generator=torch.Generator().manual_seed(0)).bfloat16()
    shards = list(torch.split(weights, SHARD))
    unrounded = shards[rank].float()
    generator = torch.Generator().manual_seed(rank + 1)
    for _ in range(STEPS):
        before = shards[rank].clone()
        unrounded += 0.01 * torch.randn(SHARD, generator=generator)
        shards[rank].copy_(unrounded)  # as the optimizer does
        run(gather_differences(shards, before, wire("int4"), communicator))
    return weights, unrounded, traffic.bytes


def test_all_ranks_get_the_same_weights_and_rounding_does_not_add_up() -> None:
    results = run_on_ranks(trained, RANKS)
    weights = results[0][0]
    assert all(torch.equal(weights, other) for other, _, _ in results)
    for rank, (_, unrounded, _) in enumerate(results):
        away = (weights[rank * SHARD : (rank + 1) * SHARD].float() - unrounded).abs()
        # one step of 4 bits of the last difference, and bf16; forty of them would be 0.06 on average
        assert float(away.mean()) < 0.006
        assert float(unrounded.abs().mean()) > 0.5
    groups = -(-SHARD // GROUP)
    assert results[0][2] == STEPS * (RANKS - 1) * wire("int4").message_bytes(groups * GROUP)
