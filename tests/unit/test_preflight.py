"""What is checked on every node before training: from what nodes have to one line for each problem."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tools.launching import node, node_checks
from tools.launching.checks import shape_of

REPOSITORY = Path(__file__).resolve().parents[2]
VERSIONS = {
    "torch": "2.9.0+cu128",
    "megatron-core": "0.19.2",
    "edgc": "0.1.0 (source abc)",
    "transformer-engine": "2.8",
}
MISSING = "ModuleNotFoundError: No module named"
WHOLE = node.Facts(
    node="n0",
    versions=dict(VERSIONS),
    cuda="12.8",
    gpus=[("NVIDIA H100 80GB HBM3", 9, 0)] * 8,
    architectures=["sm_80", "sm_90"],
    backends=["nccl", "gloo"],
)
NO_APEX = {name: f"{MISSING} {name!r}" for name in node.EXTENSIONS if name != node.TRANSFORMER_ENGINE}
NO_TE = {node.TRANSFORMER_ENGINE: f"{MISSING} 'transformer_engine'"}
V100 = replace(
    WHOLE, gpus=[("Tesla V100-SXM2-16GB", 7, 0)] * 8, architectures=["sm_70", "sm_80"], failed={**NO_APEX, **NO_TE}
)
LOCAL = ["--transformer-impl", "local"]


def found(facts: node.Facts, *flags: str, processes: int = 8) -> list[str]:
    return node_checks.problems(facts, shape_of(flags), processes)


def added(facts: node.Facts, *flags: str) -> list[str]:
    return list(node_checks.fitting_flags(facts, shape_of(flags), flags))


def test_a_whole_node_has_no_problem_and_keeps_the_kernels_of_apex() -> None:
    for flags in (["--bf16"], LOCAL, [*LOCAL, "--sequence-parallel"]):
        assert found(WHOLE, *flags) == []
        assert added(WHOLE, *flags) == []


@pytest.mark.parametrize(
    ("changed", "flags", "says"),
    [
        (
            {"architectures": ["sm_75", "sm_80"], "gpus": V100.gpus},
            [*LOCAL, "--fp16"],
            "torch 2.9.0+cu128 has no kernels for Tesla V100-SXM2-16GB (sm_70), only for sm_75 sm_80: docs/install.md",
        ),
        ({"gpus": []}, [], "is built for CUDA 12.8 and finds no GPU or no driver: nvidia-smi tells which; --edgc-cpu"),
        ({"gpus": [], "cuda": None}, [], "torch 2.9.0+cu128 is built without CUDA"),
        (
            {"gpus": WHOLE.gpus[:5]},
            [],
            "5 GPUs for 8 processes: ask for more (sbatch --gpus-per-node 8), or start fewer",
        ),
        ({"backends": ["gloo"]}, [], "was built without NCCL"),
        ({"backends": ["nccl"]}, [], "was built without gloo"),
        ({"gpus": V100.gpus, "architectures": ["sm_70"]}, [], "needs compute capability 8.0, not 7.0: CLUSTER=v100_32"),
        ({"gpus": V100.gpus, "architectures": ["sm_70"]}, [*LOCAL, "--bf16"], "--bf16 on Tesla V100-SXM2-16GB: needs"),
        (
            {"failed": NO_TE},
            [],
            "--transformer-impl transformer_engine needs Transformer Engine (ModuleNotFoundError: No module named "
            "'transformer_engine'): use an image of NVIDIA's, pip install -e '.[te]', or --transformer-impl local",
        ),
        (
            {"failed": {**NO_APEX, node.APEX: f"apex 0.9.10.dev0 is installed, but {MISSING} 'apex.optimizers'"}},
            [],
            "is it PyPI's other project of that name? pip uninstall apex, or build NVIDIA's",
        ),
        (
            {"failed": {node.APEX_NORM: f"{MISSING} 'fused_layer_norm_cuda'"}},
            LOCAL,
            "apex was built without its CUDA extensions, which Megatron's local layers need",
        ),
        ({"failed": NO_APEX}, [*LOCAL, "--sequence-parallel"], "leave out --sequence-parallel"),
        ({"versions": {**VERSIONS, "megatron-core": None}}, [], "megatron-core is not installed"),
        (
            {"failed": {node.TENSORBOARD: "it is not installed"}},
            ["--tensorboard-dir", "runs"],
            "TensorBoard is not installed, to which Megatron",
        ),
        ({"wrong_flags": "EDGC has no flag --edgc-windw"}, [], "EDGC has no flag --edgc-windw"),
        ({"failed": {"torch": "OSError: libcudart.so.12"}}, [], "torch cannot be imported (OSError: libcudart.so.12)"),
    ],
)
def test_each_thing_that_is_missing_is_one_line_with_what_mends_it(
    changed: dict[str, object], flags: list[str], says: str
) -> None:
    lines = found(replace(WHOLE, **changed), *flags)  # type: ignore[arg-type]
    assert len(lines) == 1
    assert says in lines[0]
    assert "\n" not in lines[0]


def test_a_run_that_writes_no_tensorboard_files_needs_no_tensorboard() -> None:
    assert found(replace(WHOLE, failed={node.TENSORBOARD: "it is not installed"})) == []


def test_a_cpu_run_asks_for_no_gpu() -> None:
    bare = node.Facts("laptop", dict(VERSIONS), backends=["gloo"])
    assert found(bare, "--edgc-cpu", processes=4) == []
    assert added(bare, "--edgc-cpu") == []
    assert len(found(bare, processes=4)) == 2  # no NCCL, no GPU


def test_kernels_of_apex_that_are_missing_are_turned_off_and_no_others() -> None:
    without = replace(WHOLE, failed=NO_APEX)
    assert found(without, "--bf16") == []
    assert added(without, "--bf16") == ["--no-gradient-accumulation-fusion"]
    everything = ["--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--no-persist-layer-norm"]
    assert found(V100, *LOCAL, "--fp16") == []
    assert added(V100, *LOCAL, "--fp16") == everything
    assert added(V100, *LOCAL, *everything) == []
    one = replace(WHOLE, failed={node.APEX_MASK: "missing"})
    assert added(one, *LOCAL) == ["--no-masked-softmax-fusion"]


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        (["sm_75", "sm_80"], (7, 0), False),
        (["sm_70"], (7, 0), True),
        (["sm_80"], (8, 9), True),  # machine code of the same major version
        (["sm_89"], (8, 0), False),
        (["sm_80"], (9, 0), False),
        (["sm_80", "compute_80"], (9, 0), True),  # PTX
        (["compute_90"], (8, 0), False),
        (["sm_90a"], (9, 0), True),
        (["sm_100a"], (10, 3), False),
        (["sm_100f"], (10, 3), True),
        (["sm_100", "sm_120"], (12, 1), True),
        ([], (9, 0), False),
    ],
)
def test_which_gpu_an_architecture_runs_on(architectures: list[str], capability: tuple[int, int], runs: bool) -> None:
    assert node_checks.runs_on(architectures, *capability) is runs


def test_nodes_have_to_agree_and_each_that_does_not_is_one_line() -> None:
    other = replace(WHOLE, node="n1", versions={**VERSIONS, "torch": "2.8.0", "edgc": "0.1.0 (source def)"})
    third = replace(WHOLE, node="n2", failed={node.APEX_GRADIENTS: "missing"})
    same = replace(WHOLE, node="n3")
    lines = node_checks.check([WHOLE, other, third, same], 4, shape_of([]), 8)
    assert lines == [
        "n1 differs from n0: torch 2.8.0, not 2.9.0+cu128; edgc 0.1.0 (source def), not 0.1.0 (source abc): install "
        "the same on all nodes",
        "n2 differs from n0: lacks fused_weight_gradient_mlp_cuda: install the same on all nodes",
    ]
    assert node_checks.check([WHOLE, same], 2, shape_of([]), 8) == []


def test_a_problem_of_several_nodes_is_one_line_and_a_node_that_is_silent_another() -> None:
    nodes = [replace(WHOLE, node=f"n{place}", gpus=WHOLE.gpus[:4]) for place in range(3)]
    lines = node_checks.check(nodes, 4, shape_of([]), 8)
    assert len(lines) == 2
    assert lines[0].startswith("3 of 4 nodes answered (n0, n1, n2)")
    assert lines[1].startswith("n0, n1, n2: 4 GPUs for 8 processes")


def run(
    *arguments: str, facts: list[node.Facts] | None = None, modules: Path | None = None
) -> subprocess.CompletedProcess[str]:
    lines = None if facts is None else "\n".join(["a prologue's line", *map(node.to_line, facts)]) + "\n"
    return subprocess.run(
        [sys.executable, "tools/preflight.py", *arguments],
        cwd=REPOSITORY,
        input=lines,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **({} if modules is None else {"PYTHONPATH": str(modules)})},
        capture_output=True,
        text=True,
    )


def test_it_runs_alone_and_its_status_tells() -> None:
    done = run("--processes-per-node", "4", "--edgc-cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
    assert "nothing is missing" in done.stderr
    done = run("--processes-per-node", "4", "--bf16")  # no GPU is visible
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("preflight: error: ") and "--edgc-cpu trains on the CPU" in done.stderr


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--edgc --edgc-cpu --edgc-window 20 --edgc-study error_gain=1 --lr 2e-3 --bf16", None),
        ("--edgc --edgc-windw 20 --lr 2e-3", "EDGC has no flag --edgc-windw: python -m edgc flags prints"),
        ("--edgc --edgc-window often", "argument --edgc-window: invalid int value: 'often'"),
        ("--edgc --edgc-rmax -4", "--edgc-rmax = -4.0: must be a rank, or a share of the width below 1"),
        ("--edgc-window 20", "--edgc-window given without --edgc: add --edgc to compress gradients"),
    ],
)
def test_what_edgc_would_refuse_in_each_process_is_found_before(flags: str, says: str | None) -> None:
    why = node.wrong_flags(flags.split())
    assert why is None if says is None else why is not None and why.startswith(says)


def test_what_nodes_print_is_compared_by_another_process() -> None:
    printed = run("--facts", "--edgc-cpu")
    (own,) = node.from_lines(printed.stdout.splitlines())
    assert own.versions["torch"] and own.versions["megatron-core"] and "gloo" in own.backends
    without = [replace(WHOLE, node=node, failed=NO_APEX) for node in ("n1", "n0")]
    done = run("--nodes", "2", "--processes-per-node", "8", "--bf16", facts=without)
    assert done.returncode == 0
    assert done.stdout == "--no-gradient-accumulation-fusion\n"
    assert "fused_weight_gradient_mlp_cuda is missing: adding --no-gradient-accumulation-fusion" in done.stderr
    assert "n0, n1: 8 x NVIDIA H100" in done.stderr
    assert run("--nodes", "3", "--processes-per-node", "8", facts=without).returncode == 1
    done = subprocess.run(
        [sys.executable, "tools/preflight.py", "--nodes", "1"],
        cwd=REPOSITORY,
        input=f"{node.PREFIX}cut short",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "cannot be read" in done.stderr


def test_the_facts_say_what_can_be_imported_whatever_it_prints(tmp_path: Path) -> None:
    contents = {
        "apex/__init__.py": "",  # as PyPI's, without optimizers
        "apex-0.9.10.dev0.dist-info/METADATA": "Metadata-Version: 2.1\nName: apex\nVersion: 0.9.10.dev0\n",
        "transformer_engine/pytorch/fp8.py": "raise OSError('libtransformer_engine.so:\\nundefined symbol')",
        "fused_weight_gradient_mlp_cuda.py": "print('hello')",
    }
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    done = run("--facts", "--bf16", modules=tmp_path)
    assert "hello" in done.stderr
    (facts,) = node.from_lines(done.stdout.splitlines())
    assert len(done.stdout) < 1024  # longer lines of several tasks srun may mix
    assert facts.has(node.APEX_GRADIENTS) and not facts.has(node.APEX_SOFTMAX)
    assert facts.failed[node.APEX].startswith("apex 0.9.10.dev0 is installed, but ModuleNotFoundError")
    assert facts.failed[node.TRANSFORMER_ENGINE] == "OSError: libtransformer_engine.so: undefined symbol"
