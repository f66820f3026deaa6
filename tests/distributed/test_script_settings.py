"""What a training script sets in torch for its own arithmetic changes no bit of EDGC's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import edgc
from edgc.comm import wire
from edgc.config import EDGCConfig
from edgc.hosts.module import EDGCState
from tests.distributed.gloo import run_on_ranks

COMMON = {"link_gbps": 0.05, "iteration_sampling_rate": 0.5, "window": 2}
SETTINGS = {
    "safe": {"preset": "safe", **COMMON},
    "balanced": {"preset": "balanced", **COMMON},
    "paper": {"preset": "paper", "static_rank": 8, "warmup_fraction": 0.0, "pp": "off"},
    "rounded": {"engine": "int2:rotated"},
    "randomk": {"engine": "randomk:0.1"},
}


@contextmanager
def autocast() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16):
        yield


def set_and_reset(setter: Callable[[Any], None], value: Any, before: Any) -> Callable[[], Any]:
    @contextmanager
    def scope() -> Iterator[None]:
        setter(value)
        try:
            yield
        finally:
            setter(before)

    return scope


SCOPES: dict[str, Callable[[], Any]] = {
    "autocast": autocast,
    "default type bf16": set_and_reset(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "default type float64": set_and_reset(torch.set_default_dtype, torch.float64, torch.float32),
    # stands for a GPU: no random number can be drawn there with a generator of the CPU
    "default device": set_and_reset(torch.set_default_device, "meta", "cpu"),
    "products in bf16": set_and_reset(torch.set_float32_matmul_precision, "medium", "highest"),
}


def averages(settings: dict[str, Any], scope: Callable[[], Any], rank: int) -> list[torch.Tensor]:
    """Of five steps, on this process; ``attach`` and ``step`` are called in the scope."""
    for made_once in (wire._rotation, wire._small_rotation):
        made_once.cache_clear()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 128), nn.Linear(128, 64))
    generator = torch.Generator().manual_seed(rank)
    with scope():
        state = edgc.attach(module, EDGCConfig.from_preset(**settings), iterations=6)
    found = []
    for _ in range(5):
        for parameter in module.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        with scope():
            state.step()
        found += [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
    return found


def same_bits(rank: int, name: str) -> dict[str, bool]:
    @contextmanager
    def nothing() -> Iterator[None]:
        yield

    usual = averages(SETTINGS[name], nothing, rank)
    return {
        which: all(map(torch.equal, usual, averages(SETTINGS[name], scope, rank))) for which, scope in SCOPES.items()
    }


@pytest.mark.parametrize("name", SETTINGS)
def test_averages_have_the_same_bits_whatever_a_script_sets(name: str) -> None:
    for seen in run_on_ranks(same_bits, 2, name):
        assert seen == dict.fromkeys(SCOPES, True)


def precisions(rank: int) -> tuple[set[str], str]:
    """That of products within EDGC, and the script's after it."""
    seen = set()
    exact = EDGCState._reduce

    def reduce(self: EDGCState, unit: Any) -> None:
        before = unit.reducer.reduce

        def watched(*args: Any, **kwargs: Any) -> Any:
            inner = before(*args, **kwargs)
            while True:
                seen.add(torch.backends.mkldnn.matmul.fp32_precision)
                try:
                    yield next(inner)
                except StopIteration:
                    return

        unit.reducer.reduce = watched
        exact(self, unit)
        unit.reducer.reduce = before

    EDGCState._reduce = reduce  # type: ignore[method-assign]
    torch.set_float32_matmul_precision("medium")
    scripts = torch.backends.mkldnn.matmul.fp32_precision
    averages(SETTINGS["paper"], autocast, rank)
    assert torch.backends.mkldnn.matmul.fp32_precision == scripts != "ieee"
    return seen, scripts


def test_products_are_in_fp32_within_edgc_and_as_the_script_has_set_them_after_it() -> None:
    for within, scripts in run_on_ranks(precisions, 2):
        assert within == {"ieee"} and scripts == "bf16"


def compiled(rank: int) -> tuple[int, set[str]]:
    """Steps that EDGC averages of a compiled model, and the names of parameters of one that is compiled within DDP."""
    config = EDGCConfig.from_preset(**SETTINGS["balanced"])
    model = torch.compile(DistributedDataParallel(nn.Linear(8, 8)), backend="eager")
    state = edgc.attach(model, config, iterations=6)
    for _ in range(2):
        model(torch.randn(4, 8)).sum().backward()
    inner = DistributedDataParallel(torch.compile(nn.Linear(8, 8), backend="eager"))
    return state.steps, {*edgc.attach(inner, config, iterations=6).parameters.described}


def test_a_compiled_model_is_averaged_under_its_own_names() -> None:
    for steps, names in run_on_ranks(compiled, 2):
        assert steps == 2 and names == {"weight", "bias"}
