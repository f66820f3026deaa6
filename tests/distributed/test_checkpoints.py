"""EDGC's state in checkpoints: across data-parallel sizes, to and from plain Megatron, and when it is damaged."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.megatron_runs import TINY_GPT
from tests.distributed.modes import COMPRESSED, LOW_RANK, results

# The length of the run is the scheduler's business, and differs here.
BASE = [*TINY_GPT, "--attention-dropout", "0", "--hidden-dropout", "0", "--override-opt-param-scheduler"]
Left = dict[str, list[dict[str, Any]]]


def case(name: str, until: int, *arguments: object, edgc: bool = True) -> dict[str, Any]:
    flags = [str(argument) for argument in arguments]
    return {
        "name": name,
        "arguments": [*BASE, "--train-iters", str(until), *([*COMPRESSED, *LOW_RANK] if edgc else []), *flags],
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def four(folder: Path) -> Left:
    """On four ranks: what is saved, and plain Megatron's exchange with it."""
    runs = [
        case("four", 3, "--save", folder / "four", "--save-interval", 3),
        case("asynchronous", 3, "--save", folder / "asynchronous", "--save-interval", 3, "--async-save"),
        case("plain", 3, "--save", folder / "plain", "--save-interval", 3, edgc=False),
        case("from plain", 4, "--load", folder / "plain"),
        case("to plain", 4, "--load", folder / "four", edgc=False),
        case("to a pipeline", 4, "--load", folder / "four", "--pipeline-model-parallel-size", 2),
    ]
    return results(runs, folder)


@pytest.fixture(scope="module")
def two(folder: Path, four: Left) -> Left:
    """On two ranks: four's state, and a state for four."""
    runs = [
        case("two of four", 3, "--load", folder / "four"),
        case("two", 3, "--save", folder / "two", "--save-interval", 3),
    ]
    return results(runs, folder, ranks=2)


DAMAGE = {
    "missing": "is missing",
    "cut short": "is cut short",
    "unfinished": "was not written to its end",
    "another engine": "is of the engine int4, this run has powersgd",
    "another model": "which this model lacks",
}


def damage(edgc: Path, how: str) -> None:
    index = json.loads((edgc / "index.json").read_text())
    file = edgc / "stage0-tp0-1.pt"
    if how == "missing":
        file.unlink()
    elif how == "cut short":
        file.write_bytes(file.read_bytes()[:1000])
    elif how == "unfinished":
        (edgc / "index.json").unlink()
    elif how == "another engine":
        (edgc / "index.json").write_text(json.dumps({**index, "engine": "int4"}))
    elif how == "another model":
        state = torch.load(file, weights_only=True)
        state["error"] = {f"other.{name}": total for name, total in state["error"].items()}
        torch.save(state, file)
        index["files"][file.name] = file.stat().st_size
        (edgc / "index.json").write_text(json.dumps(index))


@pytest.fixture(scope="module")
def later(folder: Path, two: Left) -> Left:
    """On four ranks again: two's state, and damaged copies of four's."""
    runs = [case("four of two", 3, "--load", folder / "two")]
    for how in DAMAGE:
        copy = folder / how
        shutil.copytree(folder / "four", copy)
        damage(copy / "iter_0000003" / "edgc", how)
        runs.append(case(how, 4, "--load", copy))
    runs.append(case("without", 4, "--load", folder / "missing", "--edgc-reset-state"))
    return results(runs, folder)


def whole(left: Left, name: str) -> list[dict[str, Any]]:
    for result in left[name]:
        assert "failed" not in result, result["failed"]
    return left[name]


def test_the_sum_of_errors_survives_another_data_parallel_size(four: Left, two: Left, later: Left) -> None:
    for saved, loaded in (
        (whole(four, "four"), whole(two, "two of four")),
        (whole(two, "two"), whole(later, "four of two")),
    ):
        owed = saved[0]["owed"]
        assert any(total.abs().max() > 0 for total in owed.values())
        for result in loaded:
            assert result["owed"].keys() == owed.keys()
            for name, total in owed.items():
                # halves and quarters are exact in fp32
                assert torch.equal(result["owed"][name], total), name


def test_plain_megatron_and_edgc_read_each_others_checkpoints(folder: Path, four: Left) -> None:
    for name in ("from plain", "to plain"):
        for result in whole(four, name):
            assert all(torch.isfinite(parameter).all() for parameter in result["parameters"].values())
    output = (folder / "output-4.txt").read_text()
    assert "iter_0000003 was written without EDGC: its state starts anew" in output


def test_another_pipeline_size_drops_the_state_with_one_line(folder: Path, four: Left) -> None:
    whole(four, "to a pipeline")
    assert (folder / "output-4.txt").read_text().count(
        "this run has tensor-parallel size 1, pipeline-parallel size 2"
    ) == 1


def test_an_asynchronous_save_holds_the_same_state(folder: Path, four: Left) -> None:
    whole(four, "asynchronous")
    index, expected = (
        json.loads((folder / name / "iter_0000003" / "edgc" / "index.json").read_text())
        for name in ("asynchronous", "four")
    )
    assert index["files"].keys() == expected["files"].keys()
    assert (folder / "asynchronous" / "latest_checkpointed_iteration.txt").read_text() == "3"


@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_state_is_refused_with_what_is_wrong(later: Left, how: str) -> None:
    for result in later[how]:
        assert "ConfigError" in result["failed"] and DAMAGE[how] in result["failed"]
        assert "give --edgc-reset-state to go on without it" in result["failed"]


def test_state_can_be_left_behind(later: Left) -> None:
    whole(later, "without")
