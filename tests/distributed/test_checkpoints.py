"""EDGC's state in checkpoints: of every kind that Megatron writes, across data-parallel sizes, to and from plain
Megatron, at a step that Megatron doubts, and where the state is of another run."""

import shlex
import shutil
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from edgc.hosts.checkpoint import STATE_VERSION
from tests.distributed.megatron_runs import TINY_GPT
from tests.distributed.modes import COMPRESSED, LOW_RANK, results

# The length of the run is the scheduler's business, and differs here.
BASE = [*TINY_GPT, "--attention-dropout", "0", "--hidden-dropout", "0", "--override-opt-param-scheduler"]
# Ranks of gradients and messages that follow the measurements of each window of two steps.
DYNAMIC = shlex.split(
    "--edgc --edgc-preset paper --edgc-rmin 4 --edgc-rmax 20 --edgc-window 2 --edgc-warmup-fraction 0 "
    "--edgc-study entropy_stability=10 --edgc-iteration-sampling-rate 1 --edgc-gradient-sampling-rate 1 "
    "--edgc-no-align "
    "--edgc-pp both --edgc-link-gbps 1 --pipeline-model-parallel-size 2 --global-batch-size 16 --lr 1e-2"
)
DENSE = ["--edgc", "--edgc-engine", "dense", "--edgc-window", "2"]
TENSOR = ["--tensor-model-parallel-size", 2]
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
        case("legacy", 3, "--save", folder / "legacy", "--save-interval", 3, "--ckpt-format", "torch"),
        case("plain", 3, "--save", folder / "plain", "--save-interval", 3, edgc=False),
        case("plain legacy", 3, "--save", folder / "old", "--save-interval", 3, "--ckpt-format", "torch", edgc=False),
        case("from plain", 4, "--load", folder / "plain"),
        case("to plain", 4, "--load", folder / "four", edgc=False),
        case("from plain legacy", 4, "--load", folder / "old", "--ckpt-format", "torch"),
        case("to plain legacy", 4, "--load", folder / "legacy", "--ckpt-format", "torch", edgc=False),
        case("to a pipeline", 4, "--load", folder / "four", "--pipeline-model-parallel-size", 2),
        case("dense", 3, "--save", folder / "dense", "--save-interval", 3, *DENSE, edgc=False),
        case("sequence", 3, "--save", folder / "sequence", "--save-interval", 3, *TENSOR, "--sequence-parallel"),
        case("without sequence", 5, "--load", folder / "sequence", *TENSOR),
        case("to sums over tokens", 4, "--load", folder / "four", "--calculate-per-token-loss"),
    ]
    return results(runs, folder)


@pytest.fixture(scope="module")
def two(folder: Path, four: Left) -> Left:
    """On two ranks: four's state, and a state for four."""
    runs = [
        case("two of four", 3, "--load", folder / "four", "--ckpt-fully-parallel-load"),
        case("two of legacy", 3, "--load", folder / "legacy", "--ckpt-format", "torch"),
        case("two", 3, "--save", folder / "two", "--save-interval", 3, "--no-ckpt-fully-parallel-save"),
        case("two of dense", 5, "--load", folder / "dense", *DENSE, edgc=False),
    ]
    return results(runs, folder, ranks=2)


def whole(left: Left, name: str) -> list[dict[str, Any]]:
    for result in left[name]:
        assert "failed" not in result, result["failed"]
    return left[name]


def resumed_same(left: Left, one: str, other: str) -> None:
    """The second run went on somewhere in the first one, and ended with the same bits."""
    for a, b in zip(whole(left, one), whole(left, other), strict=True):
        assert 0 < b["reductions"] < a["reductions"]
        assert a["parameters"].keys() == b["parameters"].keys()
        assert [name for name in a["parameters"] if not torch.equal(a["parameters"][name], b["parameters"][name])] == []


REFUSED = {
    "another engine": "is of the engine powersgd, this run has int4",
    "another model": "has error feedback of output_layer.weight, which this model lacks",
    "another size": "feedback of embedding.position_embeddings.weight with 4096 values, where this model's has 8192",
    "another version": f"the EDGC state is of version 2, this release reads {STATE_VERSION}",
    "incomplete": "the EDGC state cannot be read (KeyError: 'stage0-tp0.engine')",
}


def change_legacy(file: Path, how: str) -> None:
    saved = torch.load(file, weights_only=False)  # it holds the run's arguments
    if how == "another version":
        saved["edgc"]["index"]["version"] = 2
    else:
        del saved["edgc"]["state"]["stage0-tp0.engine"]
    torch.save(saved, file)


@pytest.fixture(scope="module")
def later(folder: Path, two: Left) -> Left:
    """On four ranks again: two's state, and states that are not this run's."""
    int4 = ["--edgc-engine", "int4", "--edgc-preset", "paper"]
    untied = ["--untie-embeddings-and-output-weights"]
    for how in ("another version", "incomplete"):
        shutil.copytree(folder / "legacy", folder / how)
        change_legacy(folder / how / "iter_0000003" / "mp_rank_00" / "model_optim_rng.pt", how)
    legacy = ["--ckpt-format", "torch"]
    by_entropy = shlex.split(
        "--edgc --edgc-rmin 4 --edgc-rmax 12 --edgc-window 2 --edgc-link-gbps 0.05 --edgc-iteration-sampling-rate 1"
    )
    volume = shlex.split(
        "--edgc --edgc-volume 12 --edgc-window 2 --edgc-link-gbps 0.05 --edgc-iteration-sampling-rate 1"
    )
    runs = [
        case("four of two", 3, "--load", folder / "two"),
        case("another engine", 4, "--load", folder / "four", *COMPRESSED, *int4, edgc=False),
        case("untied", 3, "--save", folder / "untied", "--save-interval", 3, *untied),
        case("another model", 4, "--load", folder / "untied"),
        case("another size", 4, "--load", folder / "four", "--max-position-embeddings", 128),
        case("another version", 4, "--load", folder / "another version", *legacy),
        case("incomplete", 4, "--load", folder / "incomplete", *legacy),
        case("without", 4, "--load", folder / "plain", "--edgc-reset-state"),
        case("without legacy", 4, "--load", folder / "incomplete", "--edgc-reset-state", *legacy),
        case("other ranks", 5, "--load", folder / "four", *by_entropy, edgc=False),
        case("a volume", 5, "--load", folder / "four", *volume, edgc=False),
    ]
    return results(runs, folder)


@pytest.mark.slow
def test_the_sum_of_errors_survives_another_data_parallel_size(four: Left, two: Left, later: Left) -> None:
    for saved, loaded in (
        (whole(four, "four"), whole(two, "two of four")),
        (whole(four, "legacy"), whole(two, "two of legacy")),
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
    for name in ("from plain", "to plain", "from plain legacy", "to plain legacy"):
        for result in whole(four, name):
            assert all(torch.isfinite(parameter).all() for parameter in result["parameters"].values())
    output = (folder / "output-4.txt").read_text()
    assert output.count("iter_0000003 was written without EDGC: its state starts anew") == 2
    assert "load_return" not in output  # Megatron's line where a strict load has failed


def test_each_process_writes_its_share_of_the_errors_once(folder: Path, four: Left) -> None:
    whole(four, "four")
    written = FileSystemReader(str(folder / "four" / "iter_0000003")).read_metadata().storage_data
    names, files = [], Counter[str]()
    for index, where in written.items():
        if index.fqn.startswith("edgc.stage0-tp0.error."):
            names.append(index.fqn)
            files[where.relative_path] += where.length
    assert len(names) == len(set(names)) == len([total for total in four["four"][0]["owed"].values() if total.any()])
    assert len(files) == 4 and max(files.values()) < 2 * min(files.values())


def test_another_pipeline_size_drops_the_state_with_one_line(folder: Path, four: Left) -> None:
    whole(four, "to a pipeline")
    assert (folder / "output-4.txt").read_text().count(
        "this run has tensor-parallel size 1, sequence-parallel size 1, pipeline-parallel size 2"
    ) == 1


def test_a_process_that_needs_nothing_of_the_state_goes_on(folder: Path, four: Left, two: Left) -> None:
    """An engine without errors: a process asks for nothing but measurements, which at another size are not its own."""
    whole(four, "dense")
    whole(two, "two of dense")
    output = (folder / "output-2.txt").read_text()
    assert output.count("iter_0000003 was written by 4 data-parallel processes") == 3, "and twice with errors"


def test_gradients_of_another_unit_or_of_other_parts_drop_the_state_with_one_line(folder: Path, four: Left) -> None:
    for name in ("without sequence", "to sums over tokens"):
        for result in whole(four, name):
            assert all(torch.isfinite(parameter).all() for parameter in result["parameters"].values())
    output = (folder / "output-4.txt").read_text()
    assert output.count("this run has tensor-parallel size 2, sequence-parallel size 1") == 1
    assert output.count("and so in the unit of gradients: the EDGC state starts anew") == 1


@pytest.mark.parametrize("how", REFUSED)
def test_state_that_does_not_fit_is_refused_with_what_is_wrong(later: Left, how: str) -> None:
    for result in later[how]:
        assert "ConfigError" in result["failed"] and REFUSED[how] in result["failed"]
        assert "give --edgc-reset-state to go on without it" in result["failed"]


def test_a_resumed_run_that_asks_for_other_ranks_gets_them(folder: Path, later: Left) -> None:
    whole(later, "other ranks")
    output = (folder / "output-4.txt").read_text()
    assert (
        output.count("iter_0000003 was written with other ranks or another link given: this run's settings hold") == 1
    )
    assert "rank 4 to 12, window 2" in output


def test_a_run_that_goes_on_with_a_volume_keeps_its_errors(folder: Path, later: Left) -> None:
    for result in whole(later, "a volume"):
        assert result["reductions"] > 0 and any(total.any() for total in result["owed"].values())
    output = (folder / "output-4.txt").read_text()
    line = "iter_0000003 was written without --edgc-volume: error feedback goes on, plans start anew"
    assert output.count(line) == 1 and "engine powersgd: 12x fewer bytes" in output


def test_state_can_be_left_behind(later: Left) -> None:
    whole(later, "without")
    whole(later, "without legacy")


@pytest.fixture(scope="module")
def kinds(folder: Path) -> Left:
    """Saves of which one is kept, and non-persistent ones; each run is resumed after its third step."""
    kept, again = folder / "kept", folder / "kept again"
    checked = ["--save-interval", 1, "--save-retain-interval", 3, "--verify-integrity"]
    rarely = ["--save-interval", 100]
    passing = ["--non-persistent-save-interval", 3, "--non-persistent-ckpt-type", "global", *rarely]
    runs = [
        case("kept", 5, *checked, "--save", kept),
        {
            **case("kept resumed", 5, *checked, "--load", kept, "--save", again),
            "latest": [str(kept), 3],
        },
        case("passing", 5, "--save", folder / "passing", *passing),
        {
            **case("passing resumed", 5, "--load", folder / "passing", "--save", folder / "passing again", *passing),
            "latest": [str(folder / "passing"), 1],  # older than the non-persistent one
        },
    ]
    if LOCAL:
        local = ["--non-persistent-save-interval", 3, "--non-persistent-ckpt-type", "local", *rarely]
        for algorithm in ("fully_parallel", "atomic"):
            near = folder / f"near {algorithm}"
            flags = [*local, "--non-persistent-local-ckpt-dir", near / "local", "--save", near]
            flags += ["--non-persistent-local-ckpt-algo", algorithm]
            runs += [
                case(f"near {algorithm}", 5, *flags),
                {**case(f"near {algorithm} resumed", 5, "--load", near, *flags), "latest": [str(near), 1]},
            ]
    return results(runs, folder)


LOCAL = find_spec("nvidia_resiliency_ext") is not None


@pytest.mark.slow
def test_a_save_holds_the_state_and_goes_when_megatron_removes_it(folder: Path, kinds: Left) -> None:
    resumed_same(kinds, "kept", "kept resumed")
    kept = {path.relative_to(folder / "kept").parts for path in (folder / "kept").rglob("*")}
    assert {parts[0] for parts in kept} == {"iter_0000003", "iter_0000005", "latest_checkpointed_iteration.txt"}
    # Megatron's own files alone
    assert {parts[1] for parts in kept if len(parts) > 1 and not parts[1].endswith(".distcp")} == {
        ".metadata",
        "metadata.json",
        "integrity.json",
    }


@pytest.mark.slow
def test_a_non_persistent_checkpoint_holds_the_state(kinds: Left) -> None:
    resumed_same(kinds, "passing", "passing resumed")


@pytest.mark.slow
@pytest.mark.skipif(not LOCAL, reason="Megatron's local checkpoints need nvidia-resiliency-ext")
@pytest.mark.parametrize("algorithm", ["fully_parallel", "atomic"])
def test_a_local_checkpoint_holds_the_state(kinds: Left, algorithm: str) -> None:
    resumed_same(kinds, f"near {algorithm}", f"near {algorithm} resumed")


@pytest.fixture(scope="module")
def doubted(folder: Path) -> Left:
    """A run whose sixth step, which closes a window, Megatron doubts: it saves without the step and ends."""
    dynamic = [*DYNAMIC, "--save-interval", 1]
    inject = ["--error-injection-rate", 1, "--error-injection-type", "persistent_error"]
    inject += ["--load", folder / "undisturbed", "--save", folder / "doubted"]
    going_on = ["--load", folder / "doubted", "--save", folder / "after"]  # it saves where the other run did
    runs = [
        case("undisturbed", 9, *dynamic, "--save", folder / "undisturbed", edgc=False),
        {**case("doubted", 9, *dynamic, *inject, edgc=False), "latest": [str(folder / "undisturbed"), 4]},
        # Megatron would end again: the step ran on the same device
        case("after", 9, *dynamic, "--rerun-mode", "disabled", *going_on, edgc=False),
    ]
    return results(runs, folder)


@pytest.mark.slow
def test_a_checkpoint_before_a_doubted_step_holds_nothing_of_it(folder: Path, doubted: Left) -> None:
    for result in doubted["doubted"]:
        assert "SystemExit: 16" in result["failed"]
    assert (folder / "doubted" / "latest_checkpointed_iteration.txt").read_text() == "5"
    resumed_same(doubted, "undisturbed", "after")
    for one, other in zip(doubted["undisturbed"], doubted["after"], strict=True):
        assert one["message_ranks"][-len(other["message_ranks"]) :] == other["message_ranks"]
        assert len(set(one["message_ranks"])) > 1 or one["place"][0] == 0
