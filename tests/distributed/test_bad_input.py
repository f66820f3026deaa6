"""Bad input ends the real command with one clear line and a non-zero status before training starts."""

import socket
from pathlib import Path

import pytest

from tests.distributed.megatron_runs import PRETRAIN, TINY_GPT, launch, launch_each
from tools import preprocess_data

TWO_STEPS = ["--edgc-cpu", *TINY_GPT, "--train-iters", "10"]
EDGC = [*TWO_STEPS, "--edgc", "--edgc-preset", "paper", "--edgc-window", "10"]


def without(arguments: list[str], flag: str) -> list[str]:
    return [argument for argument in arguments if argument != flag]


CASES = {
    "rmin above rmax": (
        [*EDGC, "--edgc-rmin", "64", "--edgc-rmax", "32"],
        "--edgc-rmin = 64: must not exceed rmax = 32",
    ),
    "rank": ([*EDGC, "--edgc-static-rank", "0"], "--edgc-static-rank = 0.0: must be a rank, or a share of the width"),
    "rate": ([*EDGC, "--edgc-gradient-sampling-rate", "2"], "--edgc-gradient-sampling-rate = 2.0: a sampling rate"),
    "window of the default": (
        [*TWO_STEPS, "--edgc", "--edgc-preset", "paper"],
        "--edgc-window = 1000: is longer than the run of 10 iterations",
    ),
    "estimator": (
        [*EDGC, "--edgc-study", "entropy_estimator=guess"],
        "--edgc-study entropy_estimator = guess: must be one of",
    ),
    "edgc flag alone": ([*TWO_STEPS, "--edgc-rmax", "8"], "--edgc-rmax given without --edgc"),
    "option": ([*EDGC, "--save-wgrads-interval", "10"], "--edgc does not support yet: --save-wgrads-interval"),
    "weights": ([*EDGC, "--edgc-param-wire", "int8"], "--edgc-param-wire = int8: needs --use-distributed-optimizer"),
    "one rank": (EDGC, "--edgc needs at least 2 data-parallel ranks"),
    "other batches": (
        [*TWO_STEPS, "--sft"],
        "pretrain_gpt.py does not implement --sft",
    ),
    "no data": (without(TWO_STEPS, "--mock-data"), "there is no data: give --data-path"),
    "no list of data": (
        [*without(TWO_STEPS, "--mock-data"), "--data-args-path", "nowhere/list"],
        "the data that the flags name cannot be listed: FileNotFoundError",
    ),
    "no dataset": (
        [*without(TWO_STEPS, "--mock-data"), "--data-path", "nowhere/corpus"],
        "dataset nowhere/corpus: there is no file nowhere/corpus.idx",
    ),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, tuple[int, str]]:
    return dict(zip(CASES, launch_each(PRETRAIN, [arguments for arguments, _ in CASES.values()]), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_one_clear_line(case: str, outcomes: dict[str, tuple[int, str]]) -> None:
    status, output = outcomes[case]
    assert status == 2
    lines = [line for line in output.splitlines() if "error: " in line]
    assert len(lines) == 1 and CASES[case][1] in lines[0]
    assert "Traceback" not in output
    assert "iteration        1/" not in output


def test_a_rank_without_a_gpu_says_so_and_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    for name, value in place.items():  # the second node of two, whose first never comes
        monkeypatch.setenv(name, value)
    finished = launch(PRETRAIN, without(EDGC, "--edgc-cpu"), timeout=60)
    assert finished.returncode == 2
    (line,) = finished.stdout.splitlines()
    assert line.startswith(f"edgc: error: rank 1 on {socket.gethostname()} cannot use GPU 0 (")
    assert line.endswith("): give --edgc-cpu to train on the CPU")


def test_help_lists_megatrons_flags_and_ours() -> None:
    finished = launch(PRETRAIN, ["--help"])  # which needs no GPU
    assert finished.returncode == 0, finished.stdout[-500:]
    assert "--pipeline-model-parallel-size" in finished.stdout and "--edgc-window" in finished.stdout


def write_dataset(prefix: Path) -> None:
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in range(20):
        builder.add_document(torch.arange(50) + document, [50])
    builder.finalize(f"{prefix}.idx")


@pytest.mark.parametrize(("file", "message"), [("bin", "is cut short: 1000 of 2000 bytes"), ("idx", "is cut short")])
def test_a_truncated_dataset_is_refused(tmp_path: Path, file: str, message: str) -> None:
    write_dataset(tmp_path / "corpus")
    path = tmp_path / f"corpus.{file}"
    path.write_bytes(path.read_bytes()[: 1000 if file == "bin" else 60])
    arguments = [*without(TWO_STEPS, "--mock-data"), "--data-path", str(tmp_path / "corpus")]
    ((status, output),) = launch_each(PRETRAIN, [arguments])
    assert status == 2
    (line,) = (line for line in output.splitlines() if "error: " in line)
    assert message in line


def test_another_tokenizer_than_that_of_the_data_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "corpus.txt"
    text.write_text("".join(f"line {number} of the corpus\n" for number in range(300)))
    prefix = str(tmp_path / "corpus")
    assert preprocess_data.main(["--input", str(text), "--train-sentencepiece", "300", "--output-prefix", prefix]) == 0
    data = [*without(TWO_STEPS, "--mock-data"), "--data-path", f"{prefix}_text_document"]
    ((status, output),) = launch_each(PRETRAIN, [data])
    assert status == 2
    (line,) = (line for line in output.splitlines() if "error: " in line)
    assert "encoded with SentencePieceTokenizer corpus.model, but --tokenizer-type NullTokenizer is another" in line
