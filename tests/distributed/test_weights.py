"""The all-gather of updated weights as rounded differences, over three gloo ranks."""

import torch
import torch.distributed as dist
from torch import Tensor

from edgc.comm.collectives import Communicator, Traffic, run_to_end
from edgc.comm.weight_gather import gather_differences
from edgc.comm.wire import GROUP, wire
from tests.distributed.gloo import run_on_ranks

RANKS, SHARD, STEPS = 3, 300, 40
PARTS = [[300], [5, 290, 5], [150, 150]]


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
        run_to_end(gather_differences(shards, PARTS, before, wire("int4"), communicator))
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
    groups = 1 + 3 + 1  # of the rank whose shard has most; the others' messages are as long
    assert results[0][2] == STEPS * (RANKS - 1) * wire("int4").message_bytes(groups * GROUP)


def beside(rank: int) -> Tensor:
    """What a parameter becomes beside another neighbour on every rank of a *different* pair, seen by this pair."""
    assert dist.group.WORLD is not None
    communicator = Communicator(dist.group.WORLD, Traffic())
    outcomes = []
    for neighbour in (1.0, 100.0):
        weights = torch.zeros(2 * 128)
        shards = list(torch.split(weights, 128))
        before = shards[rank].clone()
        shards[rank][:64] = torch.linspace(-1, 1, 64)
        shards[rank][64:] = neighbour
        run_to_end(gather_differences(shards, [[64, 64], [64, 64]], before, wire("int4"), communicator))
        outcomes.append(shards[0][:64].clone())
    return torch.stack(outcomes)


def test_what_a_parameter_becomes_does_not_depend_on_its_neighbours() -> None:
    for small, large in run_on_ranks(beside, 2):
        assert torch.equal(small, large)
        assert float((small - torch.linspace(-1, 1, 64)).abs().max()) < 0.1
