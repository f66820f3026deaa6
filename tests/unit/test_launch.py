"""What starts the paper's runs: shapes that go together, one line for those that do not, and twins that are twins."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tools import launch

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = {"title": "a model", "cluster": "laptop", "flags": "--num-layers 4 --train-iters 10 --global-batch-size 8"}


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The line with which a launch is refused."""
    assert launch.main(["--method", "edgc", "--run", "runs/x", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("launch: error: ")
    return captured.err


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    assert launch.main(["--run", "runs/x", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    return dict(line.split("=", 1) for line in lines)


def written(folder: Path, **content: object) -> str:
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


@pytest.mark.parametrize("model", ["gpt2_12.1b", "gpt2_2.5b", "tiny"])
@pytest.mark.parametrize("method", ["dense", "edgc", "powersgd", "optimus"])
def test_every_model_goes_with_its_cluster_and_every_method(
    capsys: pytest.CaptureFixture[str], model: str, method: str
) -> None:
    found = printed(capsys, "--model", model, "--method", method, "--mock-data", "--edgc-window", "7")
    arguments = shlex.split(found["arguments"].strip("()"))
    assert arguments[-3:] == ["--mock-data", "--edgc-window", "7"]
    assert f"runs/x/{method}/checkpoints" in arguments


def test_flags_on_the_command_line_win(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = ["--mock-data", "--train-iters", "55"]
    assert printed(capsys, "--model", "tiny", "--method", "edgc", *both)["iterations"] == "55"
    model = written(tmp_path, **{**MODEL, "flags": "--num-layers 4 --global-batch-size 8"})
    samples = ["--mock-data", "--train-samples", "160"]
    assert printed(capsys, "--model", model, "--method", "edgc", *samples)["iterations"] == "20"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "tiny", "--nodes", "1", "--processes-per-node", "3"], "3 processes do not divide by 2"),
        (["--model", "gpt2_2.5b", "--nodes", "3"], "--global-batch-size 512 does not divide by 6"),
        (["--model", "gpt2_2.5b", "--bf16"], "--bf16 on NVIDIA V100: needs compute capability 8.0, not 7.0"),
        (["--model", "gpt2_12.1b", "--cluster", "v100_32", "--fp8-format", "hybrid"], "--fp8-format hybrid on NVIDIA"),
        (["--model", "gpt3"], "gpt3.yaml: there is no such file; those that are there: gpt2_12.1b, gpt2_2.5b, tiny"),
        (["--model", "tiny", "--cluster", "moon"], "moon.yaml: there is no such file"),
        (["--model", "tiny", "--method", "zip"], "there is no method zip; methods are dense, edgc, powersgd, optimus"),
        (["--model", "tiny", "--micro-batch-size", "many"], "invalid int value: 'many'"),
        (["--model", "tiny", "--global-batch-size=0"], "--global-batch-size 0: must be at least 1"),
        (["--model", "tiny", "--load", "elsewhere"], "--load: checkpoints are in the run's folder"),
        (["--model", "tiny", "--train-samples", "64"], "exactly one of --train-iters and --train-samples"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert says in refusal(capsys, *arguments, "--mock-data")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"memory": 80}, "unknown key memory; keys are gpu, nodes, gpus_per_node"),
        ({"nodes": 0}, "nodes = 0: must be a positive whole number"),
        ({"nodes": "two"}, "nodes = 'two': must be a positive whole number"),
        ({"link_gbps": -1}, "link_gbps = -1: must be a positive number"),
        ({"flags": ["--bf16"]}, "flags = ['--bf16']: must be text"),
        ({"gpu": None}, "gpu = None: must be text"),
    ],
)
def test_a_cluster_file_with_a_wrong_key_or_value_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: dict[str, object], says: str
) -> None:
    whole: dict[str, object] = {"gpu": "none", "nodes": 1, "gpus_per_node": 4, "flags": ""}
    own = written(tmp_path, **{**whole, **changed})
    assert says in refusal(capsys, "--model", "tiny", "--cluster", own, "--mock-data")


def test_a_file_that_is_incomplete_or_no_yaml_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = written(tmp_path, title="a model", flags="")
    assert "lacks cluster" in refusal(capsys, "--model", own, "--mock-data")
    Path(own).write_text("a: [")
    assert "own.yaml" in refusal(capsys, "--model", own, "--mock-data")
    Path(own).write_text("- a")
    assert "must hold keys and values" in refusal(capsys, "--model", own, "--mock-data")
    own = written(tmp_path, **{**MODEL, "flags": "--num-layers 4"})
    assert "exactly one of --train-iters and --train-samples" in refusal(capsys, "--model", own, "--mock-data")


def test_data_brings_its_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = tmp_path / "text"
    assert "no data: set DATA" in refusal(capsys, "--model", "tiny")
    given = ["--model", "tiny", "--data", str(prefix)]
    assert "text_meta.json is missing or damaged" in refusal(capsys, *given)
    meta = {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": "text.model", "splits": {"train": {}}}
    Path(f"{prefix}_meta.json").write_text(json.dumps(meta))
    assert "its tokenizer" in refusal(capsys, *given)
    elsewhere = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", "elsewhere.model"]
    assert "text_train_text_document.idx" in refusal(capsys, *given, *elsewhere)
    (tmp_path / "text.model").touch()
    assert "text_train_text_document.idx" in refusal(capsys, *given)
    for ending in ("idx", "bin"):
        Path(f"{prefix}_train_text_document.{ending}").touch()
    found = printed(capsys, "--method", "edgc", *given)["arguments"]
    assert f"--tokenizer-type SentencePieceTokenizer --tokenizer-model {prefix}.model" in found
    assert f"--train-data-path {prefix}_train_text_document" in found
    own = ["--mock-data", "--tokenizer-type", "NullTokenizer"]
    assert str(prefix) not in printed(capsys, "--method", "edgc", *given, *own)["arguments"]


def test_a_start_is_recorded_with_its_versions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "tiny", "--method", "edgc", "--run", str(tmp_path), "--mock-data", "--record"]
    for _ in range(2):
        assert launch.main(arguments) == 0
    lines = (tmp_path / "edgc" / launch.ATTEMPTS).read_text().splitlines()
    assert len(lines) == 2
    last = json.loads(lines[-1])
    assert last["processes"] == 4
    assert last["arguments"][-1] == "--mock-data"
    assert last["versions"]["megatron-core"].startswith("0.19")


def test_checkpoints_of_another_shape_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "tiny", "--method", "edgc", "--run", str(tmp_path), "--mock-data", "--record"]
    assert launch.main(arguments) == 0  # nothing is saved yet, so the shape may still change
    assert launch.main([*arguments, "--hidden-size", "256"]) == 0
    tracker = tmp_path / "edgc" / "checkpoints" / launch.TRACKER
    tracker.parent.mkdir()
    tracker.write_text("10")
    assert launch.main([*arguments, "--hidden-size", "256", "--lr", "1e-4"]) == 0
    capsys.readouterr()
    assert launch.main(arguments) == 2
    assert "has checkpoints of --hidden-size 256, this run has --hidden-size 128" in capsys.readouterr().err


def dry_run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = REPOSITORY / "scripts" / script
    known = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    variables = {**known, "PYTHON": sys.executable, "DRY_RUN": "1", **environment}
    return subprocess.run(["bash", path, "--mock-data"], env=variables, capture_output=True, text=True)


@pytest.mark.parametrize("size", ["12b", "2.5b"])
def test_twins_differ_in_what_they_compare_alone(size: str) -> None:
    commands = {}
    for kind, method in {"baseline": "dense", "edgc": "edgc", "powersgd": "powersgd", "optimus": "optimus"}.items():
        done = dry_run(f"pretrain_gpt2_{size}_{kind}.sh")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("srun ")
        own = launch._mapping(launch.METHODS)[method]
        assert own in done.stdout
        model = "gpt2_12.1b" if size == "12b" else "gpt2_2.5b"
        commands[kind] = done.stdout.replace(own, "FLAGS").replace(f"runs/{model}/{method}", "FOLDER")
    assert len(set(commands.values())) == 1


def test_one_machine_without_slurm_takes_torchrun_and_several_are_refused() -> None:
    done = dry_run("pretrain_gpt2_12b_edgc.sh", MODEL="tiny")
    assert "-m torch.distributed.run --standalone --nproc-per-node 4 pretrain_gpt.py --edgc-cpu" in done.stdout
    done = dry_run("pretrain_gpt2_12b_edgc.sh", DRY_RUN="")
    assert done.returncode == 1
    assert "8 nodes and no Slurm" in done.stderr


def test_a_refused_run_starts_nothing_and_says_why_once() -> None:
    done = dry_run("pretrain_gpt2_2.5b_edgc.sh", CLUSTER="moon", DRY_RUN="")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "moon.yaml" in done.stderr
