"""Every mode of the table: full rank is dense, nothing is lost, ranks agree, and a resumed run is the same run."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.modes import MODES, Seen, distance, run_all

# The modes that run without --slow: at least one of each kind of parallelism and precision.
ALWAYS = {
    "plain DDP",
    "overlapped reduction",
    "distributed optimizer, all overlapped",
    "virtual pipeline",
    "virtual pipeline, messages both ways in low rank",
    "tensor and sequence parallel, distributed optimizer",
    "experts",
    "context parallel",
    "bf16, weights gathered in 8 bits",
    "fp16, loss scale that overflows at first",
    "steps that Megatron runs again",
}


def each(names: Iterable[str]) -> list[Any]:
    """The names as parameters of a test; most are slow."""
    return [pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.slow]) for name in names]


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    names = [name for name in MODES if name in ALWAYS or request.config.getoption("--slow")]
    return run_all(names, Path(tmp_path_factory.mktemp("modes")))


@pytest.mark.parametrize("name", each(MODES))
def test_a_mode(seen: dict[str, Seen], name: str) -> None:
    one = seen[name]
    assert not one.failed, one.failed
    assert one.distance < MODES[name].tolerance
    assert one.reductions >= MODES[name].ranks if MODES[name].reduces else one.reductions == 0
    assert one.lost < MODES[name].lost
    assert one.apart == ()
    assert one.resumed_same
    assert one.ratio > 2 if MODES[name].reduces else one.ratio == 0
    assert (MODES[name].pp != "off") == (one.message_ratio > 1.01)
    assert ("param-wire" in MODES[name].edgc) == (one.param_ratio > 1.5)  # those with a format; all others say off


def test_experts_are_a_stage_of_the_plan_and_model_chunks_are_not(seen: dict[str, Seen]) -> None:
    assert seen["experts"].stages == ("stage 1", "stage 1 experts")
    assert seen["virtual pipeline"].stages == ("stage 1", "stage 2", "tied embedding")


@pytest.mark.parametrize("name", each(name for name, mode in MODES.items() if mode.reduces))
def test_the_copies_of_a_tied_embedding_have_one_sum_unless_a_flag_says_no(seen: dict[str, Seen], name: str) -> None:
    assert ("tied embedding" in seen[name].stages) == MODES[name].fuses


def test_context_parallel_ranks_train_the_same_model(seen: dict[str, Seen]) -> None:
    plain, parallel = seen["plain DDP"].dense, seen["context parallel"].dense
    scale = torch.cat([parameter.flatten() for parameter in plain.values()]).double().norm()
    assert 0 < distance(plain, parallel) < 1e-4 * scale


@pytest.mark.parametrize(
    ("plain", "repeated"),
    [
        ("plain DDP", "steps that Megatron runs again"),
        pytest.param(
            "pipeline, messages both ways in low rank",
            "pipeline, steps that Megatron runs again, messages both ways in low rank",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_step_that_is_run_again_changes_nothing(seen: dict[str, Seen], plain: str, repeated: str) -> None:
    once, again = seen[plain].compressed, seen[repeated].compressed
    assert all(torch.equal(once[name], again[name]) for name in once)


@pytest.mark.parametrize("name", each(name for name, mode in MODES.items() if mode.pp != "off" and "virtual" in name))
def test_a_gradient_is_taken_for_that_of_the_chunk_that_made_it(seen: dict[str, Seen], name: str) -> None:
    assert seen[name].chunks
    for made, taken in seen[name].chunks:
        assert made == taken and set(made) in ({0, 1}, {1})
