"""What starts the paper's runs: shapes that go together, one line for those that do not, and twins that are twins."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tools import launch
from tools.launching import flat_yaml, node
from tools.launching.attempts import ATTEMPTS, last_value
from tools.launching.configs import CLUSTERS, METHODS, MODELS, read_yaml
from tools.shared.megatron import TRACKER
from tools.shared.processes import IN_HEAP

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = {
    "title": "a model",
    "cluster": "laptop",
    "flags": "--num-layers 4 --train-iters 10 --global-batch-size 8 --save-interval 5",
}


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
    model = written(tmp_path, **{**MODEL, "flags": "--num-layers 4 --global-batch-size 8 --save-interval 5"})
    samples = ["--mock-data", "--train-samples", "160"]
    assert printed(capsys, "--model", model, "--method", "edgc", *samples)["iterations"] == "20"
    growing = [*samples, "--step-batch-size-schedule", "0:8", "80:16"]
    assert "only Megatron can count the iterations" in refusal(capsys, "--model", model, *growing)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "tiny", "--nodes", "1", "--processes-per-node", "3"], "3 processes do not divide by 2"),
        (["--model", "tiny", "--processes-per-node", "-4"], "1 x -4 processes: there must be at least one of each"),
        (["--model", "gpt2_2.5b", "--nodes", "3"], "--global-batch-size 512 does not divide by 6"),
        (["--model", "gpt2_2.5b", "--bf16"], "--bf16 on NVIDIA V100: needs compute capability 8.0, not 7.0"),
        (["--model", "gpt2_12.1b", "--cluster", "v100_32", "--fp8-format", "hybrid"], "--fp8-format hybrid on NVIDIA"),
        (["--model", "gpt3"], "no such file; those that are there: gpt2_12.1b, gpt2_2.5b, gpt2_42m, tiny"),
        (["--model", "tiny", "--cluster", "moon"], "moon.yaml: there is no such file"),
        (["--model", "tiny", "--method", "zip"], "there is no method zip; methods are dense, edgc, powersgd, optimus"),
        (["--model", "tiny", "--micro-batch-size", "many"], "invalid int value: 'many'"),
        (["--model", "tiny", "--global-batch-size=0"], "--global-batch-size 0: must be at least 1"),
        (["--model", "tiny", "--load", "elsewhere"], "--load: checkpoints are in the run's folder"),
        (["--model", "tiny", "--train-samples", "64"], "exactly one of --train-iters and --train-samples"),
        (["--model", "gpt2_12.1b", "--save-interval", "300"], "--save-retain-interval 5000 is no multiple of --save-"),
        (["--model", "tiny", "--save-interval", "0"], "--save-interval 0: must be at least 1"),
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
        ({"flags": "--bf16 'and"}, "own: flags: No closing quotation"),
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


@pytest.mark.parametrize(
    ("model", "method", "flags", "within"),
    [
        ("gpt2_2.5b", "edgc", [], True),
        ("gpt2_2.5b", "dense", [], False),
        ("gpt2_2.5b", "edgc", ["--use-tp-pp-dp-mapping"], False),
        ("gpt2_2.5b", "edgc", ["--pipeline-model-parallel-size", "2"], False),  # 16 GPUs a stage
        ("gpt2_12.1b", "edgc", [], False),
    ],
)
def test_a_launch_says_where_gradients_use_no_network(
    capsys: pytest.CaptureFixture[str], model: str, method: str, flags: list[str], within: bool
) -> None:
    notes = printed(capsys, "--model", model, "--method", method, "--mock-data", *flags)["notes"]
    assert ("all 8 GPUs of a stage share a node" in notes) == within


@pytest.mark.parametrize("model", ["gpt2_12.1b", "gpt2_2.5b", "tiny"])
def test_few_checkpoints_are_kept_and_the_launch_says_which(capsys: pytest.CaptureFixture[str], model: str) -> None:
    found = printed(capsys, "--model", model, "--method", "edgc", "--mock-data")
    arguments = shlex.split(found["arguments"].strip("()"))
    assert int(last_value("--save-retain-interval", arguments) or 0) > int(
        last_value("--save-interval", arguments) or 0
    )
    note = shlex.split(found["notes"].strip("()"))[-1]
    if model == "gpt2_12.1b":  # 12.1 billion parameters of 18 bytes
        assert note == (
            "checkpoints: one every 500 iterations; those of every 5000th iteration and the newest one are kept, 4 at "
            "the end, about 218 GB each, 0.9 TB in all"
        )
        dense = printed(capsys, "--model", model, "--method", "dense", "--mock-data")["notes"]
        assert "about 169 GB each, 0.7 TB in all" in dense
    uneven = printed(capsys, "--model", "tiny", "--method", "edgc", "--mock-data", "--train-iters", "250")["notes"]
    assert "every 100th iteration and the newest one are kept, 3 at the end" in uneven
    all_kept = printed(capsys, "--model", "tiny", "--method", "edgc", "--mock-data", "--save-retain-interval", "50")
    assert "those of every 50th iteration are kept, 4 at the end" in all_kept["notes"]


def test_our_files_read_the_same_without_pyyaml() -> None:
    files = [*MODELS.glob("*.yaml"), *CLUSTERS.glob("*.yaml"), METHODS]
    assert len(files) >= 7
    for file in files:
        text = file.read_text()
        assert flat_yaml.mapping(text) == yaml.safe_load(text), file


@pytest.mark.parametrize(
    "text",
    [
        *(
            "a: [1]",
            "a: {b: 1}",
            "a: 'b'",
            'a: "b"',
            "a: yes",
            "a: 0x10",
            "a: 1e3",
            "a: -1.",
            "a: b: c",
            "- a",
            "a",
            "yes: 1",
        ),
        *(
            "a: &x b",
            "a: |\n  b",
            "  a: b",
            "a: 1\na: 2",
            "a:\n  b:\n    c: d\n   e: f",
            "a: 012",
            "a: 2026-01-01",
            "a:\tb",
        ),
    ],
)
def test_yaml_that_only_pyyaml_reads_is_refused_without_it(text: str) -> None:
    with pytest.raises(ValueError, match="^line "):
        flat_yaml.mapping(text)


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
    lines = (tmp_path / "edgc" / ATTEMPTS).read_text().splitlines()
    assert len(lines) == 2
    last = json.loads(lines[-1])
    assert last["processes"] == 4
    assert last["arguments"][-1] == "--mock-data"
    assert last["versions"]["megatron-core"].startswith("0.19")


def test_checkpoints_of_another_shape_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "tiny", "--method", "edgc", "--run", str(tmp_path), "--mock-data", "--record"]
    assert launch.main(arguments) == 0  # nothing is saved yet, so the shape may still change
    assert launch.main([*arguments, "--hidden-size", "256"]) == 0
    tracker = tmp_path / "edgc" / "checkpoints" / TRACKER
    tracker.parent.mkdir()
    tracker.write_text("10")
    assert launch.main([*arguments, "--hidden-size", "256", "--lr", "1e-4"]) == 0
    capsys.readouterr()
    assert launch.main(arguments) == 2
    said = capsys.readouterr().err
    assert "has checkpoints of a run with --hidden-size 256, this one has --hidden-size 128" in said
    assert launch.main([*arguments, "--hidden-size", "256", "--edgc-preset", "balanced"]) == 2
    said = capsys.readouterr().err
    assert "of a run with --edgc-preset paper, this one has --edgc-preset balanced: set RUN to another folder" in said
    assert launch.main([*arguments, "--hidden-size", "256", "--seed", "2"]) == 2
    (tmp_path / "edgc" / ATTEMPTS).unlink()
    assert launch.main(arguments) == 0


def started(
    script: str, *arguments: str, path: str | None = None, cwd: Path = REPOSITORY, **environment: str
) -> subprocess.CompletedProcess[str]:
    """What a script of scripts/ does; ``environment`` has no variable of Slurm but those given."""
    known = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    variables = {**known, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", **environment}
    if path is not None:
        variables["PATH"] = path
    return subprocess.run(
        ["bash", REPOSITORY / "scripts" / script, *arguments], env=variables, cwd=cwd, capture_output=True, text=True
    )


def dry_run(script: str, *arguments: str, **environment: str) -> str:
    """What the dry run of a script prints."""
    done = started(script, *arguments, **{"DRY_RUN": "1", **environment})
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def fake_slurm(folder: Path, nodes: int) -> str:
    """A PATH with a Slurm whose srun runs a step's tasks one after the other."""
    program(folder / "scontrol", f"for node in {{0..{nodes - 1}}}; do echo n$node; done")
    program(
        folder / "srun",
        """
tasks=$SLURM_NTASKS container=
while [[ $1 == -* ]]; do
    case $1 in
        --ntasks) tasks=$2; shift 2 ;;
        --nodes | --ntasks-per-node) shift 2 ;;
        --container-*) container=1; shift 2 ;;
        *) shift ;;
    esac
done
status=0
for ((task = 0; task < tasks; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$((task % 8)) CONTAINER=$container "$@" || status=$?
done
exit $status""",
    )
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.parametrize("size", ["12b", "2.5b"])
def test_twins_differ_in_what_they_compare_alone(size: str) -> None:
    commands = {}
    for kind, method in {"baseline": "dense", "edgc": "edgc", "powersgd": "powersgd", "optimus": "optimus"}.items():
        command = dry_run(f"pretrain_gpt2_{size}_{kind}.sh", "--mock-data").splitlines()[-1]
        assert command.startswith("srun ")
        own = read_yaml(METHODS)[method]
        assert own in command
        model = "gpt2_12.1b" if size == "12b" else "gpt2_2.5b"
        commands[kind] = command.replace(own, "FLAGS").replace(f"runs/{model}/{method}", "FOLDER")
    assert len(set(commands.values())) == 1


def test_one_machine_without_slurm_takes_torchrun_and_several_are_refused() -> None:
    printed = dry_run("pretrain_gpt2_12b_edgc.sh", "--mock-data", MODEL="tiny")
    assert "-m torch.distributed.run --standalone --nproc-per-node 4 pretrain_gpt.py --edgc-cpu" in printed
    done = started("pretrain_gpt2_12b_edgc.sh", "--mock-data")
    assert done.returncode == 1
    assert "8 nodes and no Slurm" in done.stderr


@pytest.mark.parametrize("in_allocation", [False, True])
def test_ctrl_c_before_torchrun_handles_it_ends_the_training(in_allocation: bool, tmp_path: Path) -> None:
    program(tmp_path / "bin" / "srun", 'until [[ $1 == */own-python ]]; do shift; done; exec "$@"')
    program(tmp_path / "bin" / "scontrol", "echo n0")
    program(
        tmp_path / "bin" / "own-python",
        f"""
if [[ $* == *--facts* ]]; then
    echo '{node_facts(gpus=[])}'
elif [[ $1 == tools/* ]]; then
    exec {sys.executable} "$@"
else
    echo $$ >{tmp_path}/training
    exec sleep 60
fi""",
    )
    known = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    own = {"PYTHON": str(tmp_path / "bin" / "own-python"), "MODEL": "tiny", "RUN": str(tmp_path / "run")}
    if in_allocation:
        own |= {"SLURM_JOB_ID": "20007", "SLURM_JOB_NODELIST": "n0", "SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "4"}
        own["PATH"] = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    command = ["bash", REPOSITORY / "scripts" / "pretrain_gpt2_12b_edgc.sh", "--mock-data"]
    script = subprocess.Popen(
        command,
        env={**known, **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # as from a terminal: what a shell has put in the background ignores Ctrl-C, and so would the script
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    pid = tmp_path / "training"
    while script.poll() is None and not (pid.is_file() and pid.read_text()):
        time.sleep(0.05)
    time.sleep(0.2)  # until the script waits
    os.killpg(script.pid, signal.SIGINT)
    try:
        _, errors = script.communicate(timeout=20)
        assert script.returncode != 0 and "saved up to iteration 0 of" in errors
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)


def test_a_refused_run_starts_nothing_and_says_why_once() -> None:
    done = started("pretrain_gpt2_2.5b_edgc.sh", "--mock-data", CLUSTER="moon")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "moon.yaml" in done.stderr
    step = {"SLURM_JOB_ID": "20007", "SLURM_NNODES": "1", "SLURM_STEP_ID": "0"}
    done = started("pretrain_gpt2_12b_edgc.sh", "--mock-data", MODEL="tiny", **step)
    assert done.returncode == 1 and "started inside srun: start it in salloc" in done.stderr


def test_a_dry_run_needs_no_more_than_bash_and_python(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    for part in ("scripts", "tools", "configs"):
        shutil.copytree(REPOSITORY / part, clone / part, ignore=shutil.ignore_patterns("__pycache__"))
    before = sorted(clone.rglob("*"))
    bare = tmp_path / "bin"
    program(bare / "python3", f'exec {sys.executable} -S -B "$@"')  # without site-packages: no yaml, no torch
    for name in ("bash", "dirname", "env"):
        (bare / name).symlink_to(shutil.which(name) or name)
    variables = {"PATH": str(bare), "DRY_RUN": "1"}
    script = clone / "scripts" / "pretrain_gpt2_12b_edgc.sh"
    done = subprocess.run(["bash", script], env=variables, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(clone.rglob("*")) == before
    assert "# no data: set DATA" in done.stdout
    assert "--data-path /path/to/data_text_document" in done.stdout
    assert "there is no .venv/bin/python yet" in done.stdout
    known = dry_run("pretrain_gpt2_12b_edgc.sh", PYTHON=".venv/bin/python").splitlines()[-1]
    assert done.stdout.splitlines()[-1] == known


def test_paths_are_meant_where_the_script_is_started(tmp_path: Path) -> None:
    shutil.copy(CLUSTERS / "laptop.yaml", tmp_path / "own.yaml")
    paths = {"DATA": "data/web", "RUN": "results", "CLUSTER": "own.yaml", "MODEL": "tiny"}
    done = started("pretrain_gpt2_12b_edgc.sh", cwd=tmp_path, DRY_RUN="1", **paths)
    assert done.returncode == 0, done.stderr
    command = done.stdout.splitlines()[-1]
    assert f"{tmp_path}/data/web_text_document" in command and f"{tmp_path}/results/edgc" in command
    assert "/results/" not in command.replace(f"{tmp_path}/results/", "")
    own = started("pretrain_gpt2_12b_edgc.sh", cwd=tmp_path, DRY_RUN="1", PYTHON="env/bin/python", **paths)
    assert f"{tmp_path}/env/bin/python " in own.stdout.splitlines()[-1]
    here = dry_run("pretrain_gpt2_12b_edgc.sh", MODEL="tiny", DATA="runs/data/web").splitlines()[-1]
    assert " runs/data/web_text_document" in here and " runs/tiny/edgc" in here
    by_path = dry_run("pretrain_gpt2_12b_edgc.sh", MODEL="configs/models/tiny.yaml", DATA="runs/data/web")
    assert " runs/tiny/edgc" in by_path.splitlines()[-1]


def test_a_container_must_see_the_folder_of_the_run(tmp_path: Path) -> None:
    given = {"DRY_RUN": "1", "CONTAINER_IMAGE": "image", "MODEL": "tiny"}
    outside = started("pretrain_gpt2_12b_edgc.sh", RUN=str(tmp_path), **given)
    assert outside.returncode == 1 and f"name {tmp_path} in CONTAINER_MOUNTS" in outside.stderr
    mounts = f"{REPOSITORY}:{REPOSITORY},{tmp_path}:{tmp_path}"
    unseen = started("pretrain_gpt2_12b_edgc.sh", DATA=str(tmp_path / "data"), **given)
    assert unseen.returncode == 1 and f"name {tmp_path}/data in CONTAINER_MOUNTS" in unseen.stderr
    for known in ({"RUN": str(tmp_path), "CONTAINER_MOUNTS": mounts}, {"RUN": f"{REPOSITORY}/runs/own"}, {}):
        done = started("pretrain_gpt2_12b_edgc.sh", **known, **given)
        assert done.returncode == 0, done.stderr


def test_the_printed_command_can_be_pasted_into_an_allocation(tmp_path: Path) -> None:
    printed = dry_run("pretrain_gpt2_12b_edgc.sh", PYTHON="own-python", DATA="/data/a b")
    program(tmp_path / "bin" / "own-python", 'printf "%s|" "$PWD" "$MASTER_ADDR:$MASTER_PORT" "$RANK" "$LOCAL_RANK" '
            '"$WORLD_SIZE" "$OMP_NUM_THREADS" "$CUDA_DEVICE_MAX_CONNECTIONS" "$@"; echo')  # fmt: skip
    known = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMP_", "CUDA_"))}
    allocation = {"SLURM_JOB_ID": "20007", "SLURM_JOB_NODELIST": "n[0-7]", "SLURM_NTASKS": "64", "SLURM_NNODES": "8"}
    path = fake_slurm(tmp_path / "bin", nodes=8)
    pasted = subprocess.run(
        ["bash", "-e"], input=printed, env={**known, **allocation, "PATH": path}, capture_output=True, text=True
    )
    assert pasted.returncode == 0, pasted.stderr
    tasks = [line.split("|") for line in pasted.stdout.splitlines()]
    assert len(tasks) == 64
    assert tasks[9][:8] == [str(REPOSITORY), "n0:20007", "9", "1", "64", "1", "1", "pretrain_gpt.py"]
    assert "/data/a b_text_document" in tasks[9]


def node_facts(failed: dict[str, str] | None = None, **changed: object) -> str:
    """What ``tools/preflight.py --facts`` prints on a node with 8 H100."""
    versions = {"torch": "2.9.0", "megatron-core": "0.19.2", "edgc": "0.1.0", "transformer-engine": "2.8"}
    facts = node.Facts(
        *("n0", versions, "12.8"),
        gpus=[("NVIDIA H100", 9, 0)] * 8,
        architectures=["sm_90"],
        backends=["nccl", "gloo"],
        failed=failed or {},
    )
    return node.to_line(replace(facts, **changed))  # type: ignore[arg-type]


def in_slurm(tmp_path: Path, *facts: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A paper's script in an allocation of as many nodes as there are facts, with tasks that print and end."""
    for place, line in enumerate(facts):
        (tmp_path / f"facts{place}").write_text(line + "\n")
    program(
        tmp_path / "bin" / "own-python",
        f"""
if [[ $* == *--facts* ]]; then
    cat {tmp_path}/facts$SLURM_PROCID
elif [[ $1 == tools/* ]]; then
    exec {sys.executable} "$@"
else
    echo "task $RANK of $WORLD_SIZE at $MASTER_ADDR: $*"
fi""",
    )
    nodes = len(facts)
    allocation = {"SLURM_JOB_ID": "20007", "SLURM_JOB_NODELIST": "n", "SLURM_NNODES": str(nodes)}
    return started(
        "pretrain_gpt2_12b_edgc.sh",
        "--mock-data",
        path=fake_slurm(tmp_path / "bin", nodes),
        **{**allocation, "SLURM_NTASKS": str(8 * nodes), "PYTHON": "own-python", "RUN": str(tmp_path / "run")},
        **environment,
    )


def test_every_node_is_checked_before_training_and_missing_kernels_are_turned_off(tmp_path: Path) -> None:
    no_apex = {"fused_weight_gradient_mlp_cuda": "missing"}
    done = in_slurm(tmp_path, node_facts(no_apex), node_facts(no_apex, node="n1"))
    assert "adding --no-gradient-accumulation-fusion" in done.stderr
    log = (tmp_path / "run" / "edgc" / "log.txt").read_text().splitlines()
    assert len(log) == 16
    assert log[9].startswith("task 9 of 16 at n0: pretrain_gpt.py ")
    assert log[9].endswith(" --mock-data --no-gradient-accumulation-fusion")
    attempt = json.loads((tmp_path / "run" / "edgc" / ATTEMPTS).read_text())
    assert attempt["arguments"][-1] == "--no-gradient-accumulation-fusion"
    assert "edgc: checkpoints: one every 500 iterations" in done.stdout
    assert done.returncode == 1  # nothing was saved


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ({"node": "n1", "architectures": ["sm_80"]}, "n1: torch 2.9.0 has no kernels for NVIDIA H100 (sm_90)"),
        (
            {"node": "n1", "failed": {node.TRANSFORMER_ENGINE: "missing"}},
            "n1: --transformer-impl transformer_engine",
        ),
        ({"node": "n1", "versions": {"torch": "2.8.0"}}, "n1 differs from n0: torch 2.8.0, not 2.9.0"),
        (None, "1 of 2 nodes answered (n0)"),
    ],
)
def test_a_node_that_cannot_train_keeps_all_from_starting(
    tmp_path: Path, second: dict[str, object] | None, says: str
) -> None:
    if second is not None and "versions" in second:
        second["versions"] = {**node.from_lines([node_facts()])[0].versions, "torch": "2.8.0"}
    done = in_slurm(tmp_path, node_facts(), "" if second is None else node_facts(**second))  # type: ignore[arg-type]
    assert done.returncode == 1
    assert says in done.stderr
    assert not (tmp_path / "run").exists()


def test_the_check_can_run_alone_and_without_data(tmp_path: Path) -> None:
    done = in_slurm(tmp_path, node_facts(), PREFLIGHT_ONLY="1")
    assert done.returncode == 0, done.stderr
    assert "preflight: nothing is missing on n0: 8 x NVIDIA H100" in done.stderr
    done = started("pretrain_gpt2_12b_edgc.sh", MODEL="tiny", RUN=str(tmp_path / "run"), PREFLIGHT_ONLY="1")
    assert done.returncode == 0, done.stderr
    assert "nothing is missing" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_machine_without_the_gpu_that_is_asked_for_is_told_in_one_line(tmp_path: Path) -> None:
    cluster = written(tmp_path, gpu="a GPU", nodes=1, gpus_per_node=4, flags="--transformer-impl local")
    run = str(tmp_path / "run")
    done = started("pretrain_gpt2_12b_edgc.sh", "--mock-data", MODEL="tiny", CLUSTER=cluster, RUN=run)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "--edgc-cpu trains on the CPU" in done.stderr
    assert not Path(run).exists()


def test_the_quickstart_keeps_tensors_in_the_heap_as_other_runs_on_the_cpu_do() -> None:
    text = (REPOSITORY / "scripts" / "quickstart.sh").read_text()
    assert all(f" {name}={value}" in text for name, value in IN_HEAP.items())


def test_the_quickstart_keeps_finished_runs_of_the_same_code_and_data_alone(tmp_path: Path) -> None:
    for name in ("scripts/quickstart.sh", "configs/quickstart.args"):
        (tmp_path / name).parent.mkdir()
        shutil.copy(REPOSITORY / name, tmp_path / name)
    program(tmp_path / "scripts" / "setup_env.sh", "true")
    (tmp_path / ".venv").mkdir()
    program(tmp_path / ".venv" / "bin" / "python", "[[ $* != *pretrain_gpt.py* ]] || echo run >>trained")
    for name in (
        "pretrain_gpt.py",
        "edgc/config/presets.py",
        "megatron/edgc/checkpointing.py",
        "runs/data/stdlib_meta.json",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("first")

    def trained() -> int:
        done = subprocess.run(["bash", tmp_path / "scripts" / "quickstart.sh"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return (tmp_path / "trained").read_text().count("run")

    assert [trained(), trained()] == [3, 3], "kept"
    (tmp_path / "edgc" / "config" / "presets.py").write_text("today's")
    assert trained() == 6
    (tmp_path / "runs" / "data" / "stdlib_meta.json").write_text("another library's")
    assert trained() == 9


def test_the_rehearsal_that_is_shown_ran_what_the_scripts_run() -> None:
    for preset, most in {"paper": 0.9, "balanced": 0.1}.items():
        summary = json.loads((REPOSITORY / "docs" / "rehearsal" / preset / "summary.json").read_text())
        assert summary["settings"]["preset"] == preset
        assert 0 < summary["dp_bytes_ratio"] < most
        assert summary["iterations"] == 200
    assert "--edgc-preset paper" in read_yaml(METHODS)["edgc"]
