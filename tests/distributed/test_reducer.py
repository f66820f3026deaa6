"""The reducer over two gloo ranks: what is compressed, what travels dense, and how the two change over."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from edgc.comm.collectives import Communicator, Traffic, all_reduce_bytes, run_to_end
from edgc.compress.reducer import GradientReducer
from edgc.compress.routes import elementwise
from edgc.compress.sent_bytes import sent_bytes
from edgc.config import EDGCConfig
from edgc.config.presets import PRESETS
from edgc.hosts.units import cut, cut_shards
from edgc.plan.run import Run
from edgc.specs import Parameter, shard_bounds
from tests.distributed.gloo import run_on_ranks

PARAMETERS = [
    Parameter("wide", (24, 96)),
    Parameter("conv", (32, 4, 8)),
    Parameter("bias", (24,)),
    Parameter("word", (50, 8), embedding=True),
]
CPU = torch.device("cpu")


def equal_shards() -> dict[str, list[int]]:
    """Of one bucket with all parameters, an equal part for each rank: some begin within a parameter."""
    ends = list(itertools.accumulate(math.prod(p.shape) for p in PARAMETERS))
    part = -(-ends[-1] // dist.get_world_size())
    starts = [0, *ends[:-1]]
    return {
        p.name: shard_bounds(start, end, part, dist.get_world_size())
        for p, start, end in zip(PARAMETERS, starts, ends, strict=True)
    }


def reducer(**settings: object) -> GradientReducer:
    config = EDGCConfig.of(iteration_sampling_rate=0.5, **settings)  # type: ignore[arg-type]
    assert dist.group.WORLD is not None
    return GradientReducer.of(PARAMETERS, config, Communicator(dist.group.WORLD, Traffic()), CPU)


def gradients(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {p.name: torch.randn(p.shape, generator=generator) for p in PARAMETERS}


def summed(tensor: Tensor) -> Tensor:
    total = tensor.double()
    dist.all_reduce(total)
    return total


def needed(local: dict[str, Tensor], rank: int, shards: dict[str, list[int]] | None) -> dict[str, Tensor]:
    """What this rank needs of the sums, the rest zero."""
    if shards is None:
        return local
    parts = {name: torch.zeros_like(tensor) for name, tensor in local.items()}
    for name, (*_, start, stop) in ((name, cuts[: rank + 2]) for name, cuts in shards.items()):
        parts[name].view(-1)[start:stop] = local[name].view(-1)[start:stop]
    return parts


SETTINGS: list[dict[str, object]] = [
    {},
    {"engine": "alternating", "wire": "int4", "rest_wire": "int4", "dense_wire": "int8"},
    {"engine": "powersgd", "wire": "int8", "basis_wire": "int8", "rest_wire": "int8", "equalise": True},
    {**PRESETS["fast"], "volume": None},
]


def across_plans(rank: int) -> None:
    """Whatever the plan does, all that was ever put in is either in a result or in an error."""
    for settings, shards in itertools.product(SETTINGS, (None, equal_shards())):
        under_test = reducer(**settings)
        put_in = {p.name: torch.zeros(p.shape, dtype=torch.float64) for p in PARAMETERS}
        came_out = {p.name: torch.zeros(p.shape, dtype=torch.float64) for p in PARAMETERS}
        # rank 9 does not pay for "conv" (32 x 32), rank 400 for nothing
        taken = {None: set(), 4: {"wide", "conv"}, 9: {"wide"}, 400: set()}
        for step, stage_rank in enumerate([None, 4, 4, 9, 9, None, 4, 400, 9, 4, None]):
            under_test.set_rank(stage_rank, {"wide": 8, "conv": 4} if stage_rank == 4 and step > 5 else None)
            assert set(under_test.router.ranks) == taken[stage_rank]
            local = gradients(rank, step)
            for name, gradient in local.items():
                put_in[name] += summed(gradient)
            run_to_end(under_test.reduce(local, step, shards=shards))
            for name, result in needed(local, rank, shards).items():
                came_out[name] += result if shards is None else summed(result)
                kept = under_test.state.feedback.packed.get(name)
                owed = torch.zeros(result.shape) if kept is None else kept.values().view_as(result).clone()
                torch.testing.assert_close(came_out[name] + summed(owed), put_in[name], atol=2e-4, rtol=0)
            # a sum in fp32 settles every debt, and then the host's own all-reduce will do
            exact = ("rest_wire" if stage_rank else "dense_wire") not in settings
            assert under_test.plain == (exact and stage_rank in (None, 400))


@pytest.mark.parametrize("ranks", [2, 3])
def test_nothing_is_lost_when_plans_change_between_dense_and_compressed(ranks: int) -> None:
    run_on_ranks(across_plans, ranks)


def one_bad_gradient(rank: int) -> list[str]:
    """Parameters whose infinity on one rank is not seen everywhere or leaves a trace."""
    wrong = []
    several: list[dict[str, object]] = [
        {},
        {**PRESETS["fast"], "volume": None, "static_rank": 4},
        {"engine": "int4", "dense_wire": "int8"},
        {"engine": "int4", "equalise": True},
        {"engine": "loco"},
    ]
    for settings, shards in itertools.product(several, (None, equal_shards())):
        for bad in ("bias", "wide"):  # what low rank leaves, and what it takes
            under_test, twin = reducer(**settings), reducer(**settings)
            for each in (under_test, twin):
                each.set_rank(4)
                run_to_end(each.reduce(gradients(rank, 0), 0, shards=shards))
            local = gradients(rank, 1)
            if rank == 1:
                local[bad].view(-1)[3] = math.inf
            run_to_end(under_test.reduce(local, 1, shards=shards))
            spoilt = {name: torch.full_like(gradient, torch.nan) for name, gradient in local.items()}
            seen, expected = (needed(sums, rank, shards) for sums in (local, spoilt))
            if not all(torch.equal(seen[name].isnan(), expected[name].isnan()) for name in seen):
                wrong.append(f"{settings}: {bad} not seen")
            after, expected = gradients(rank, 2), gradients(rank, 2)
            run_to_end(under_test.reduce(after, 2, shards=shards))
            run_to_end(twin.reduce(expected, 2, shards=shards))
            after, expected = (needed(sums, rank, shards) for sums in (after, expected))
            if any(not torch.equal(after[name], expected[name]) for name in after):
                wrong.append(f"{settings}: {bad} changed state")
    return wrong


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_gradient_that_is_not_finite_on_one_rank_spoils_all_and_changes_no_state(ranks: int) -> None:
    assert run_on_ranks(one_bad_gradient, ranks) == [[]] * ranks


def sums_of_shards(rank: int) -> tuple[float, float, float]:
    """Of a step in which each rank needs its shard: bytes, those of whole sums, and how far apart their scales are."""
    sent = []
    scales = []
    for shards in (equal_shards(), None):
        plain, equalised = reducer(engine="int4"), reducer(engine="int4", equalise=True)
        for under_test in (plain, equalised):
            under_test.set_rank(4)
            run_to_end(under_test.reduce(gradients(rank, 0), 0, shards=shards))
        sent.append(plain.communicator.traffic.bytes)
        scales.append(equalised.state.state_dict()["equaliser"]["wide:rows"].values())
    return *sent, float((scales[0] / scales[1] - 1).abs().max())


def test_a_rank_that_needs_a_shard_gets_no_more_and_the_scales_are_of_the_whole() -> None:
    groups = max(15, 4 + 8 + 1 + 4)  # of 128 values, in each half
    for shard, whole, apart in run_on_ranks(sums_of_shards, 2):
        assert shard == groups * (128 // 2 + 2) + all_reduce_bytes(4, 2)
        assert whole == 2 * (18 + 8 + 1 + 4 + 1) / 2 * (128 // 2 + 2)
        assert 0 < apart < 0.1  # whole sums are rounded once more


def shards_of_three(rank: int) -> list[float]:
    """What is lost where low rank takes all of rank 0's shard, and other shards are rounded in several portions."""
    elementwise.PORTION = 3 * 256
    parameters = [Parameter("m", (32, 32)), Parameter("a", (900,)), Parameter("b", (1148,))]
    shards = {"m": [0, 1024, 1024, 1024], "a": [0, 0, 900, 900], "b": [0, 0, 124, 1148]}
    config = EDGCConfig.of(static_rank=4, rest_wire="int4", dense_wire="int8", equalise=True)
    assert dist.group.WORLD is not None
    communicator = Communicator(dist.group.WORLD, Traffic())
    under_test = GradientReducer.of(parameters, config, communicator, CPU)
    lost = []
    for step, stage_rank in enumerate([None, 4, 4]):
        under_test.set_rank(stage_rank)
        generator = torch.Generator().manual_seed(10 * step + rank)
        local = {p.name: torch.randn(p.shape, generator=generator) for p in parameters}
        kept = {name: packed.values().view_as(local[name]) for name, packed in under_test.state.feedback.packed.items()}
        owed = {name: summed(local[name] + kept.get(name, 0)) for name in local}
        run_to_end(under_test.reduce(local, step, shards=shards))
        for name, result in needed(local, rank, shards).items():
            left = summed(under_test.state.feedback.packed[name].values().view_as(result))
            lost.append(float((owed[name] - summed(result) - left).abs().max()))
    return lost


def test_a_rank_may_need_nothing_of_what_is_rounded() -> None:
    for lost in run_on_ranks(shards_of_three, 3):
        assert len(lost) == 9 and max(lost) < 1e-4


def bytes_and_measurements(rank: int) -> tuple[float, list[float], list[float]]:
    under_test = reducer()
    under_test.set_rank(4)
    for step in range(4):
        local = gradients(rank, step)
        under_test.observer.measure(local, step)
        run_to_end(under_test.reduce(local, step))
    seen = under_test.observer.take()
    assert under_test.observer.measurements.entropy == [] and under_test.observer.measurements.residual == []
    return under_test.communicator.traffic.bytes, [float(e) for e in seen.entropy], [float(r) for r in seen.residual]


def test_bytes_are_counted_and_every_second_iteration_measured() -> None:
    elements = 4 * (24 + 96) + 4 * (32 + 32) + 24 + 400
    for sent, entropy, residual in run_on_ranks(bytes_and_measurements, 2):
        assert sent == 4 * all_reduce_bytes(4 * elements, 2)
        assert len(entropy) == len(residual) == 2
        normal = 0.5 * math.log(2 * math.pi * math.e)
        assert all(abs(value - normal) < 0.2 for value in entropy)
        assert all(0.5 < value < 1 for value in residual)


def residual_of_one_step(rank: int) -> tuple[float, float]:
    under_test = reducer()
    under_test.set_rank(4)
    local = gradients(rank, 0)
    whole = math.sqrt(sum(float(gradient.square().sum()) for gradient in local.values()))
    run_to_end(under_test.reduce(local, 0))
    left = math.sqrt(under_test.state.feedback.squared_norm())
    return float(under_test.observer.measurements.residual[0]), left / whole


def test_the_residual_is_that_of_what_was_to_be_sent() -> None:
    for reported, expected in run_on_ranks(residual_of_one_step, 2):
        assert abs(reported - expected) < 1e-5


def bytes_of_a_step(rank: int) -> list[tuple[float, float]]:
    """Counted and computed, compressed at rank 8 and not, for settings that differ in formats; and of a warm-up in few
    bits whose host scatters sums of gradients in 32 or 16 bits.
    """
    found, ranks = [], dist.get_world_size()
    large = [Parameter("a", (256, 1280)), Parameter("b", (1024, 256)), Parameter("bias", (1280,))]
    for settings in ({}, {"basis_wire": "int8+int4", "wire": "int4", "rest_wire": "int8"}):
        config = EDGCConfig.of(iteration_sampling_rate=1e-6, **settings)  # type: ignore[arg-type]
        traffic = Traffic()
        own = GradientReducer.of(large, config, Communicator(dist.group.WORLD, traffic), CPU)
        sent = sent_bytes(own.router.selection, config, ranks, Run(iterations=1, replicas=ranks))
        for place, level in enumerate((8, None)):
            own.set_rank(level)
            before = traffic.bytes
            run_to_end(own.reduce({p.name: torch.randn(p.shape) for p in large}, iteration=1 + place))
            found.append((traffic.bytes - before, sent.at_rank(level)))
    config = EDGCConfig.of(iteration_sampling_rate=1e-6, dense_wire="int4")
    for dtype in (torch.float32, torch.bfloat16):
        traffic = Traffic()
        own = GradientReducer.of(large, config, Communicator(dist.group.WORLD, traffic), CPU)
        own.set_rank(None)
        shards = {p.name: tuple(part * p.elements // ranks for part in range(ranks + 1)) for p in large}
        run_to_end(own.reduce({p.name: torch.randn(p.shape).to(dtype) for p in large}, 1, shards=shards))
        run = Run(iterations=1, replicas=ranks, value_bytes=dtype.itemsize, scatters=True)
        sent = sent_bytes(own.router.selection, config, ranks, run)
        found.append((traffic.bytes, sent.uncompressed))
    return found


def test_bytes_that_are_computed_are_those_that_are_counted() -> None:
    for counted, computed in run_on_ranks(bytes_of_a_step, 2)[0]:
        assert abs(counted / computed - 1) < 0.01


def formats_of_parameters(rank: int) -> tuple[float, float, dict[str, float]]:
    """Of parameters that travel each in its own way: what is lost, bytes, and the errors that are kept; relative."""
    under_test, lost, put_in, result = reducer(rest_wire="int8"), 0.0, {}, {}
    for step in range(4):
        ranks = {"wide": 4} if step % 2 else {"conv": 4}
        formats = {"bias": "int8", "word": "int2", **({"conv": "int4"} if step % 2 else {"wide": "int3"})}
        under_test.set_rank(4, ranks, formats)
        local = gradients(rank, step)
        for name, gradient in local.items():
            put_in[name] = put_in.get(name, 0) + summed(gradient)
        run_to_end(under_test.reduce(local, step))
        for name, gradient in local.items():
            result[name] = result.get(name, 0) + gradient.double()
    kept = {name: summed(one.values()) for name, one in under_test.state.feedback.packed.items()}
    for name, whole in put_in.items():
        missing = whole - result[name] - kept[name].view_as(whole)
        lost = max(lost, float(missing.abs().max() / whole.abs().max()))
    errors = {name: float(kept[name].norm() / whole.norm()) for name, whole in put_in.items()}
    return lost, under_test.communicator.traffic.bytes, errors


def collectives(rank: int) -> list[int]:
    """How many a step takes: with factors in fp32, in few bits, and in few bits where each process needs its part."""
    calls: list[str] = []
    ranks = dist.get_world_size()
    parts = {p.name: [math.prod(p.shape) * part // ranks for part in range(ranks + 1)] for p in PARAMETERS}

    def noted(name: str) -> Callable[..., Any]:
        own = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return own(*args, **kwargs)

        return call

    counts = []
    for settings, shards in ((SETTINGS[0], None), (SETTINGS[3], None), (SETTINGS[3], parts)):
        under_test = reducer(**settings)
        under_test.set_rank(4)
        run_to_end(under_test.reduce(gradients(rank, 1), 1, shards=shards))
        with pytest.MonkeyPatch.context() as patch:
            for name in ("all_reduce", "all_to_all_single", "all_gather_into_tensor"):
                patch.setattr(dist, name, noted(name))
            run_to_end(under_test.reduce(gradients(rank, 3), 3, shards=shards))  # not a measured iteration
        counts.append(len(calls))
        calls.clear()
    return counts


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_routes_of_a_step_share_their_messages(ranks: int) -> None:
    """Two factors take two sums in fp32 and four messages in few bits. With parts one more tells what they hold."""
    assert run_on_ranks(collectives, ranks) == [[2, 4, 5]] * ranks


def test_every_parameter_travels_in_its_own_format() -> None:
    for lost, sent, errors in run_on_ranks(formats_of_parameters, 2):
        assert lost < 1e-5
        # of rank 4 with factors in fp32, and values in groups of 128 for each of two processes
        words = [(24 + 96) * 4 * 4 + 256 * 8 * 4 / 8 + 8 * 2, (32 + 32) * 4 * 4 + 2304 * 3 / 8 + 18 * 2]
        others = 128 * 2 + 2 * 2 + 512 * 2 / 8 + 4 * 2
        assert 2 * sum(words) < sent < 2 * (sum(words) + 2 * others) * 1.15
        assert errors["bias"] < 0.02 < errors["word"]


def bytes_of_units_in_shards(rank: int) -> list[float]:
    """What a step sends whose sums only their owners need, for units in a row and for units that follow shards; over
    what it sends whose sums all need.
    """
    large = [Parameter(f"w{place}", (64, columns)) for place, columns in enumerate([96, 32, 128, 128] * 6)]
    processes, elements = dist.get_world_size(), sum(parameter.elements for parameter in large)
    ends = list(itertools.accumulate(parameter.elements for parameter in large))
    shards = {
        one.name: shard_bounds(end - one.elements, end, elements // processes, processes)
        for one, end in zip(large, ends, strict=True)
    }
    values = [(one, [b - a for a, b in itertools.pairwise(shards[one.name])]) for one in large]
    in_a_row = cut([(one, 4 * one.elements) for one in large], 1)
    sent = []
    for units, bounds in ((in_a_row, None), (in_a_row, shards), (cut_shards(values, 3), shards)):
        traffic = Traffic()
        assert dist.group.WORLD is not None
        communicator = Communicator(dist.group.WORLD, traffic)
        for unit in units:
            config = EDGCConfig.of(engine="int4", rest_wire="int4", dense_wire="int4", iteration_sampling_rate=1e-6)
            own = GradientReducer.of(unit, config, communicator, CPU)
            own.set_rank(1)
            gradients = {parameter.name: torch.randn(parameter.shape) for parameter in unit}
            part = None if bounds is None else {name: bounds[name] for name in gradients}
            run_to_end(own.reduce(gradients, 0, shards=part))
        sent.append(traffic.bytes)
    return [one / sent[0] for one in sent[1:]]


def test_units_that_follow_shards_send_about_half() -> None:
    for in_a_row, by_shards in run_on_ranks(bytes_of_units_in_shards, 4):
        assert in_a_row == pytest.approx(1, abs=0.01), "most of it is one process's: no worse than sums for everyone"
        assert by_shards < 0.6
