"""The all-gather of updated weights as rounded differences, over three gloo ranks; when Megatron runs send them."""

import shlex
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from edgc.comm import weight_gather
from edgc.comm.collectives import Communicator, Traffic, run_to_end
from edgc.comm.weight_gather import gather_differences
from edgc.comm.wire import GROUP, wire
from edgc.plan.times.gather_times import GatherTimes
from tests.distributed.gloo import run_on_ranks
from tests.distributed.megatron_runs import TINY_GPT
from tests.distributed.modes import results

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


def trained_twice(rank: int) -> list[tuple[Tensor, Tensor, float]]:
    """With the shards of all ranks decoded at once, and one after another, as large ones are."""
    at_once = trained(rank)
    weight_gather.TOGETHER = 1
    return [at_once, trained(rank)]


def test_all_ranks_get_the_same_weights_and_rounding_does_not_add_up() -> None:
    for seen in zip(*run_on_ranks(trained_twice, RANKS), strict=True):
        weights = seen[0][0]
        assert all(torch.equal(weights, other) for other, _, _ in seen)
        for rank, (_, unrounded, _) in enumerate(seen):
            away = (weights[rank * SHARD : (rank + 1) * SHARD].float() - unrounded).abs()
            # one step of 4 bits of the last difference, and bf16; forty of them would be 0.06 on average
            assert float(away.mean()) < 0.006
            assert float(unrounded.abs().mean()) > 0.5
        groups = 1 + 3 + 1  # of the rank whose shard has most; the others' messages are as long
        assert seen[0][2] == STEPS * (RANKS - 1) * wire("int4").message_bytes(groups * GROUP)


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


def times(rank: int) -> list[GatherTimes | None]:
    """Of the larger bucket in 16 bits: computed, timed; and of groups with a bucket in fp32, which is never rounded."""
    from megatron.edgc.weights import gather_times

    assert dist.group.WORLD is not None
    small, large, exact, joined = (
        Namespace(param_data=torch.zeros(size, dtype=dtype), param_to_index={"weight": (0, size - 4)})
        for size, dtype in (
            *((1024, torch.bfloat16), (4096, torch.bfloat16)),
            *((8192, torch.float32), (16384, torch.bfloat16)),
        )
    )
    mixed, rounded = Namespace(buckets=[exact, joined]), Namespace(buckets=[small, large])
    group = dist.group.WORLD
    return [
        gather_times([mixed, rounded], "int8", group, 0.008),
        gather_times([mixed, rounded], "int8", group, None),
        gather_times([mixed], "int8", group, 0.008),
    ]


def test_a_gather_is_computed_or_timed_for_the_largest_bucket_that_may_be_rounded() -> None:
    for computed, timed, nothing in run_on_ranks(times, 2):
        assert computed is not None and timed is not None and nothing is None
        # a half of 4096 values over a megabyte a second: 2 bytes each, or 1 and a scale in bf16 for each 128
        assert computed.whole == pytest.approx(2048 * 2e-6)
        assert computed.rounded == pytest.approx(2048 * (1 + 2 / 128) * 1e-6)
        assert timed.whole > 0 and timed.rounded > 0


def test_rounding_has_to_be_clearly_faster_in_the_longest_times_of_each_way() -> None:
    assert GatherTimes(1.0, 0.90).rounding_pays and not GatherTimes(1.0, 0.92).rounding_pays
    assert GatherTimes.slowest([GatherTimes(1.0, 0.1), None, GatherTimes(0.5, 0.8)]) == GatherTimes(1.0, 0.8)
    assert GatherTimes.slowest([None, None]) is None


@pytest.mark.slow
def test_presets_round_weights_where_that_saves_time_and_a_resumed_run_goes_on_so(tmp_path: Path) -> None:
    base = [*TINY_GPT, *shlex.split("--attention-dropout 0 --hidden-dropout 0 --bf16 --use-distributed-optimizer")]
    base += shlex.split("--train-iters 4 --ckpt-format torch --edgc --edgc-preset balanced --edgc-window 2")
    low_rank = ["--edgc-static-rank", "8"]
    folder = str(tmp_path / "checkpoint")

    def case(name: str, rounded: float | None, *more: str) -> dict[str, Any]:
        known = {} if rounded is None else {"gather_seconds": rounded}
        return {"name": name, "arguments": [*base, *more], **known}

    runs = [
        case("fast", 0.5, *low_rank, "--save", folder, "--save-interval", "2"),
        {**case("resumed", 2.0, *low_rank, "--load", folder), "latest": [folder, 2]},
        case("slow", 2.0, *low_rank),
        case("asked", 2.0, *low_rank, "--edgc-param-wire", "int8"),
        case("refused", 0.5, *low_rank, "--edgc-param-wire", "off"),
        case("dense", 0.5, "--edgc-engine", "dense"),
        case("timed", None, *low_rank),
    ]
    left = results(runs, tmp_path)
    for result in (one for run in left.values() for one in run):
        assert "failed" not in result, result["failed"]
    assert {one["param_wire"] for name in ("fast", "resumed", "asked") for one in left[name]} == {"int8"}
    assert {one["param_wire"] for name in ("slow", "refused", "dense") for one in left[name]} == {"off"}
    assert len({one["param_wire"] for one in left["timed"]}) == 1, "whatever it is, all agree"
    for name, run in left.items():
        for one in run:
            sent, host = one["bytes"][2:4]
            assert sent < 0.7 * host if name in ("fast", "asked") else name in ("resumed", "timed") or sent == host
    for saved, resumed in zip(left["fast"], left["resumed"], strict=True):
        assert all(torch.equal(saved["parameters"][name], resumed["parameters"][name]) for name in saved["parameters"])
