"""A reduction with Triton's kernels against the plain one, and how often each goes over a gradient."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from edgc.comm import packed
from edgc.comm.collectives import Communicator, Traffic, run_to_end
from edgc.compress.engines import base
from edgc.compress.fused import FusedRoute
from edgc.compress.reducer import GradientReducer
from edgc.config import ConfigError, EDGCConfig
from edgc.engines import ENGINES
from edgc.plan.selection import Selection
from edgc.specs import MatrixSpec, ShardBounds
from tools.benchmarks.operations import counted

SIZES = {"tall": (96, 40), "wide": (24, 70), "next": (24, 70)}
MATRICES = tuple(MatrixSpec(name, *size) for name, size in SIZES.items())
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """Two ranks, of which the other one sends nothing: a sum is what this one has put in."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def reducer(matrices: tuple[MatrixSpec, ...] = MATRICES, rank: int = 4, **settings: Any) -> GradientReducer:
    assert dist.group.WORLD is not None
    config = EDGCConfig.of(**{**settings, "iteration_sampling_rate": 1e-6})
    made = GradientReducer(Selection(matrices), config, Communicator(dist.group.WORLD, Traffic()), CPU)
    made.set_rank(rank, {matrix.name: rank for matrix in matrices})
    return made


def fused(matrices: tuple[MatrixSpec, ...] = MATRICES, rank: int = 4, **settings: Any) -> GradientReducer:
    made = reducer(matrices, rank, kernels="fused", **settings)
    pytest.importorskip("triton")  # torch for CPUs only comes without
    from tests.interpreter import interpreted_kernels

    made.router._kernels = interpreted_kernels()
    return made


def gradients(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    signal = {
        name: torch.randn(rows, 3, generator=generator) @ torch.randn(3, cols, generator=generator)
        for name, (rows, cols) in SIZES.items()
    }
    return {name: both + torch.randn(both.shape, generator=generator) / 4 for name, both in signal.items()}


@pytest.mark.parametrize("scale", [None, 8.0])
@pytest.mark.parametrize("shards", [None, {"tall": [0, 999, 3840], "wide": [0, 33, 1680], "next": [0, 0, 1680]}])
@pytest.mark.parametrize(
    "settings",
    [
        # a basis that is kept is kept in 4 bits, and what those make of it depends on the signs of its columns
        {"warm_start": False},
        {"warm_start": False, "equalise": True},
        {"warm_start": False, "transpose": False},
        {"warm_start": False, "error_gain": 0.5},
        {"warm_start": False, "error_dtype": "bf16", "error_gain": 0.5},
        {"engine": "alternating", "equalise": True},
    ],
    ids=str,
)
def test_kernels_give_what_plain_torch_does(
    settings: dict[str, Any], shards: dict[str, ShardBounds] | None, scale: float | None
) -> None:
    plain, under_test = reducer(**settings), fused(**settings)
    loss_scale = None if scale is None else torch.tensor(scale)
    tolerance = 0.05 if settings.get("error_dtype") == "bf16" else 2e-4  # errors in bf16 are rounded at random
    for step in range(4):
        expected, found = gradients(step), gradients(step)
        if step == 2:
            for local in (expected, found):
                local["wide"][3, 5] = torch.inf
        for made, local in ((plain, expected), (under_test, found)):
            for matrix in local.values():
                matrix *= scale or 1
            run_to_end(made.reduce(local, step, loss_scale, shards))
        for name, matrix in expected.items():
            start, stop = (0, matrix.numel()) if shards is None else (shards[name][0], shards[name][1])
            parts = (local[name].view(-1)[start:stop] for local in (found, expected))
            torch.testing.assert_close(*parts, atol=tolerance * (scale or 1), rtol=tolerance, equal_nan=True)
            errors = (made.state.feedback.packed[name].values() for made in (under_test, plain))
            torch.testing.assert_close(*errors, atol=tolerance, rtol=tolerance)
    assert under_test.state.feedback.packed["tall"].message.nbytes == plain.state.feedback.packed["tall"].message.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_kernels_do_not_fit_plain_torch_takes_over(dtype: torch.dtype) -> None:
    settings = {"error_dtype": "int8"} if dtype == torch.float32 else {}
    plain, under_test = reducer(**settings), fused(**settings)
    for step in range(2):
        expected, found = ({n: g.to(dtype) for n, g in gradients(step).items()} for _ in range(2))
        run_to_end(plain.reduce(expected, step))
        run_to_end(under_test.reduce(found, step))
        for name in SIZES:
            torch.testing.assert_close(found[name], expected[name], atol=0.05, rtol=0.05)


EQUAL = tuple(MatrixSpec(f"layer {place}", 160, 256) for place in range(3))


def passes(made: GradientReducer) -> tuple[float, float]:
    """Reads and writes of all gradients in the third step, in which there is an error and a basis."""
    flat = torch.randn(len(EQUAL) * 160 * 256)
    local = {m.name: part.view(m.rows, m.cols) for m, part in zip(EQUAL, flat.split(160 * 256), strict=True)}
    for step in range(2):
        run_to_end(made.reduce(local, step))
    seen = counted(lambda: run_to_end(made.reduce(local, 2)), local["layer 0"].numel())
    return seen.read / flat.nbytes, seen.written / flat.nbytes


@pytest.mark.parametrize(
    ("settings", "expected", "on_a_device"),
    [
        ({}, (7, 4), (9, 5)),  # one of the reads measures norms, by which spikes are found
        ({"equalise": True}, (7, 4), (9, 5)),
        ({"engine": "alternating"}, (6, 4), (8, 5)),
        ({"error_gain": 0.5}, (8, 4), (10, 5)),  # what waits of the older error
        ({"error_dtype": "bf16"}, (16.25, 11.25), (16.25, 11.25)),  # with the random numbers that round it
    ],
    ids=str,
)
def test_plain_torch_goes_over_a_gradient_no_more_than_it_must(
    settings: dict[str, Any],
    expected: tuple[float, float],
    on_a_device: tuple[float, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert passes(reducer(EQUAL, **settings)) == expected
    # there the CPU must not wait to see whether sums are finite: old and new errors are read, and one is written
    for module in (packed, base):
        monkeypatch.setattr(module, "on_cpu", lambda condition: False)
    assert passes(reducer(EQUAL, **settings)) == on_a_device


@pytest.mark.parametrize(
    ("settings", "most"),
    [({}, 8), ({"wire": "int4", "basis_wire": "int6"}, 8), ({"equalise": True}, 16)],
    ids=str,
)
def test_equal_matrices_take_few_operations_each(settings: dict[str, Any], most: int) -> None:
    """Products, factorisations and roundings of equal matrices are one operation for all."""

    def operations(count: int) -> int:
        flat = torch.randn(count * 160 * 256)
        matrices = tuple(MatrixSpec(f"layer {place}", 160, 256) for place in range(count))
        local = {m.name: part.view(m.rows, m.cols) for m, part in zip(matrices, flat.split(160 * 256), strict=True)}
        made = reducer(matrices, **settings)
        for step in range(2):
            run_to_end(made.reduce(local, step))
        return counted(lambda: run_to_end(made.reduce(local, 2)), flat.numel()).operations

    assert (operations(8) - operations(2)) / 6 < most


def test_kernels_go_over_a_gradient_four_times() -> None:
    """Reads: gradient and error, then twice what the two make. Writes: that, the new error, the sum."""
    made = fused(EQUAL)
    from tests.interpreter import Accesses

    flat = torch.randn(len(EQUAL) * 160 * 256)
    local = {m.name: part.view(m.rows, m.cols) for m, part in zip(EQUAL, flat.split(160 * 256), strict=True)}
    for step in range(2):
        run_to_end(made.reduce(local, step))
    older = made.state.feedback.packed["layer 1"].stored()
    with Accesses(flat=flat, older=older) as accesses:
        run_to_end(made.reduce(local, 2))
    assert (accesses.loads["flat"] == 3).all() and (accesses.stores["flat"] == 2).all()
    assert (accesses.loads["older"] == 1).all() and not accesses.stores[
        "older"
    ].any()  # test_kernels.py: the new one is written once


@pytest.mark.parametrize("engine", sorted(set(ENGINES) - {"powersgd", "alternating", "dense"}))
def test_engines_without_a_rank_never_see_kernels(engine: str) -> None:
    with pytest.raises(ConfigError, match="no rank"):
        EDGCConfig.of(engine=engine, kernels="fused")


class NoKernels:
    """What takes kernels' calls and does nothing."""

    LARGEST_RANK = 256

    @staticmethod
    def project(matrix: Tensor, factor: Tensor, *_: object) -> Tensor:
        return torch.zeros(len(factor), matrix.shape[1])

    @staticmethod
    def write_back(*_: object) -> None:
        pass


@pytest.mark.parametrize("settings", [{}, {"equalise": True, "error_dtype": "bf16"}], ids=str)
def test_beside_the_kernels_only_the_norm_goes_over_a_gradient(settings: dict[str, Any]) -> None:
    made = reducer(EQUAL, **settings)
    made.router._kernels = NoKernels
    assert passes(made) == (1, 0)


def test_each_step_rounds_the_errors_of_kernels_with_random_numbers_of_its_own() -> None:
    made, seeds = reducer(error_dtype="bf16"), list[Any]()

    class Noting(NoKernels):
        @staticmethod
        def write_back(*given: object) -> None:
            seeds.append(given[8])

    made.router._kernels = Noting
    for step in range(1, 4):
        run_to_end(made.reduce(gradients(step), step))
    assert len(seeds) == len(set(seeds)) == 9


def test_a_step_that_is_measured_takes_no_kernels() -> None:
    made = reducer()
    made.router._kernels = NoKernels
    context: Any = SimpleNamespace(feedback=made.state.feedback, error_gain=1.0)
    for measured in (False, True):
        (route,) = made.router.route(gradients(0), context, measured)
        assert isinstance(route, FusedRoute) != measured


def test_ranks_that_kernels_do_not_take_are_left_to_plain_torch() -> None:
    context: Any = SimpleNamespace(feedback=reducer().state.feedback, error_gain=1.0)
    for rank, fits in ((NoKernels.LARGEST_RANK, True), (NoKernels.LARGEST_RANK + 1, False)):
        assert FusedRoute.fits(NoKernels, {"w": torch.zeros(2, 2)}, {"w": rank}, context) == fits
