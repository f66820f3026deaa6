"""Check on every node, before training, that what the flags ask for is there.

    python tools/preflight.py [--processes-per-node 8] [flags of pretrain_gpt.py]

checks this machine. On several nodes each prints what it has as one line, and one process compares:

    srun --ntasks-per-node 1 python tools/preflight.py --facts [flags] >facts
    python tools/preflight.py --nodes 8 [--processes-per-node 8] [flags] <facts

scripts/pretrain.sh does so before it trains; ``PREFLIGHT_ONLY=1`` stops there. Each problem is one line on stderr that
names the nodes and what mends it; the status is then 1. Where only kernels are missing that Megatron can do without,
the flags that turn them off are printed on stdout. No process group is made.
"""

import argparse
import base64
import hashlib
import importlib
import json
import os
import platform
import sys
import zlib
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from tools.launch import LaunchError, installed, shape_of, too_new  # noqa: E402

PACKAGES = ("torch", "megatron-core", "edgc", "transformer-engine")  # on which all nodes have to agree
TRANSFORMER_ENGINE = "transformer_engine.pytorch.fp8"  # what Megatron imports of it
APEX = "apex.optimizers"  # which the package of that name on PyPI lacks
APEX_NORM = "fused_layer_norm_cuda"
APEX_GRADIENTS = "fused_weight_gradient_mlp_cuda"
APEX_SOFTMAX = "scaled_upper_triang_masked_softmax_cuda"
APEX_MASK = "scaled_masked_softmax_cuda"
PREFIX = "preflight-facts "  # of a node's line
EXTENSIONS = (TRANSFORMER_ENGINE, APEX, APEX_NORM, APEX_GRADIENTS, APEX_SOFTMAX, APEX_MASK)


@dataclass(frozen=True)
class Facts:
    """What a node has. ``gpus``: name and compute capability (major, minor) of each; ``cuda``: the version that torch
    was built for; ``architectures``: those it has kernels for, as in ``sm_90``; ``failed``: for each of ``EXTENSIONS``
    that cannot be imported, why.
    """

    node: str
    versions: dict[str, str | None]
    cuda: str | None = None
    gpus: list[tuple[str, int, int]] = field(default_factory=list)
    architectures: list[str] = field(default_factory=list)
    backends: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def has(self, extension: str) -> bool:
        return extension not in self.failed


def gather(on_cpu: bool) -> Facts:
    """The facts of this machine; on a CPU no extension is tried."""
    versions = {package: installed(package) for package in PACKAGES}
    versions["edgc"] = f"{versions['edgc']} (source {_source_hash()})"
    node = platform.node().split(".")[0]
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:  # a broken installation raises OSError and worse
        return Facts(node, {**versions, "torch": None}, failed={"torch": _reason(error)})
    versions["torch"] = str(torch.__version__)
    backends = [name for name in ("nccl", "gloo") if dist.is_available() and getattr(dist, f"is_{name}_available")()]
    if on_cpu:
        return Facts(node, versions, backends=backends)
    gpus: list[tuple[str, int, int]] = []
    if torch.cuda.is_available():
        gpus = [
            (torch.cuda.get_device_name(place), *torch.cuda.get_device_capability(place))
            for place in range(torch.cuda.device_count())
        ]
    failed = {}
    for name in EXTENSIONS:
        try:
            importlib.import_module(name)
        except Exception as error:  # an extension of another torch fails with OSError or worse
            failed[name] = _reason(error)
    if APEX in failed and installed("apex") is not None:
        failed[APEX] = f"apex {installed('apex')} is installed, but {failed[APEX]}"
    if "nccl" in backends and gpus:
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return Facts(node, versions, torch.version.cuda, gpus, torch.cuda.get_arch_list(), backends, failed)


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _source_hash() -> str:
    """Of the code that training runs: its version number says little in an editable installation."""
    found = hashlib.sha256()
    for folder in ("edgc", "megatron/edgc"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            found.update(str(path.relative_to(REPOSITORY)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:10]


def runs_on(architectures: Sequence[str], major: int, minor: int) -> bool:
    """Whether code for these architectures runs on a GPU: machine code of the same major version and no later minor
    one, or PTX of no later version.
    """
    for name in architectures:
        kind, _, number = name.partition("_")
        built = divmod(int("".join(filter(str.isdigit, number))), 10)
        if number.endswith("a"):  # sm_90a runs on that GPU alone
            fits = kind == "sm" and built == (major, minor)
        elif kind == "sm":
            fits = built[0] == major and built[1] <= minor
        else:
            fits = built <= (major, minor)
        if fits:
            return True
    return False


def problems(facts: Facts, shape: Namespace, processes: int) -> list[str]:
    """What keeps this node from training with these flags, one line each, with what mends it."""
    if "torch" in facts.failed:
        return [f"torch cannot be imported ({facts.failed['torch']}): bash scripts/setup_env.sh, or set PYTHON"]
    torch = f"torch {facts.versions['torch']}"
    found = []
    if facts.versions["megatron-core"] is None:
        found.append("megatron-core is not installed: bash scripts/setup_env.sh, or pip install -e '.[megatron]'")
    if "gloo" not in facts.backends:
        found.append(f"{torch} was built without gloo: install another torch")
    if shape.edgc_cpu:
        return found
    if shape.distributed_backend == "nccl" and "nccl" not in facts.backends:
        found.append(f"{torch} was built without NCCL: install a CUDA build for Linux, or use an image of NVIDIA's")
    if not facts.gpus:
        why = f"is built for CUDA {facts.cuda} and finds no GPU or no driver" if facts.cuda else "is built without CUDA"
        return [*found, f"{torch} {why}: nvidia-smi tells which; --edgc-cpu trains on the CPU"]
    if len(facts.gpus) < processes:
        found.append(
            f"{len(facts.gpus)} GPUs for {processes} processes: ask for more (sbatch --gpus-per-node {processes}), or "
            "start fewer processes (--ntasks-per-node)"
        )
    for name, major, minor in dict.fromkeys(map(tuple, facts.gpus)):
        if not runs_on(facts.architectures, major, minor):
            found.append(
                f"{torch} has no kernels for {name} (sm_{major}{minor}), only for {' '.join(facts.architectures)}: "
                "docs/install.md says which torch has them"
            )
        if refused := too_new(shape, name, float(f"{major}.{minor}")):
            found.append(f"{refused}: CLUSTER=v100_32 has flags for such a GPU")
    if shape.transformer_impl != "local" and not facts.has(TRANSFORMER_ENGINE):
        found.append(
            f"--transformer-impl {shape.transformer_impl} needs Transformer Engine "
            f"({facts.failed[TRANSFORMER_ENGINE]}): use an image of NVIDIA's, pip install -e '.[te]', or "
            "--transformer-impl local"
        )
    if facts.failed.get(APEX, "").startswith("apex "):
        found.append(
            f"{facts.failed[APEX]}: is it PyPI's other project of that name? pip uninstall apex, or build NVIDIA's "
            "(docs/install.md)"
        )
    elif shape.transformer_impl == "local" and facts.has(APEX) and not facts.has(APEX_NORM):
        found.append(
            "apex was built without its CUDA extensions, which Megatron's local layers need "
            f"({facts.failed[APEX_NORM]}): build it with them (docs/install.md), or pip uninstall apex"
        )
    elif shape.transformer_impl == "local" and shape.sequence_parallel and not facts.has(APEX):
        found.append(
            "--sequence-parallel with --transformer-impl local needs NVIDIA's apex, for its norms: build it "
            "(docs/install.md), or leave out --sequence-parallel"
        )
    return found


def differences(nodes: Sequence[Facts]) -> list[str]:
    """One line for each node whose versions are not those of the first, or that lacks other extensions."""
    first = nodes[0]
    found = []
    for other in nodes[1:]:
        parts = [
            f"{package} {theirs}, not {ours}"
            for package in dict.fromkeys((*first.versions, *other.versions))
            if (theirs := other.versions.get(package)) != (ours := first.versions.get(package))
        ]
        parts += [
            f"{'has' if other.has(name) else 'lacks'} {name}"
            for name in EXTENSIONS
            if other.has(name) != first.has(name)
        ]
        if parts:
            found.append(f"{other.node} differs from {first.node}: {'; '.join(parts)}: install the same on all nodes")
    return found


def fitting_flags(facts: Facts, shape: Namespace, given: Sequence[str]) -> dict[str, str]:
    """Flags that turn off the kernels of apex that are missing, and what each is for; none that ``given`` has."""
    if shape.edgc_cpu:
        return {}
    local = shape.transformer_impl == "local"
    wanted = {
        # also with Transformer Engine: the output layer is Megatron's own
        "--no-gradient-accumulation-fusion": (True, [APEX_GRADIENTS]),
        "--no-masked-softmax-fusion": (local, [APEX_SOFTMAX, APEX_MASK]),
        "--no-persist-layer-norm": (local, [APEX]),
    }
    return {
        flag: f"{missing[0]} is missing"
        for flag, (used, extensions) in wanted.items()
        if used and flag not in given and (missing := [name for name in extensions if not facts.has(name)])
    }


def check(nodes: Sequence[Facts], expected: int, shape: Namespace, processes: int) -> list[str]:
    """All problems of all nodes, one line each; nodes with the same one share a line."""
    by_problem: dict[str, list[str]] = {}
    for facts in nodes:
        for problem in problems(facts, shape, processes):
            by_problem.setdefault(problem, []).append(facts.node)
    found = [f"{', '.join(names)}: {problem}" for problem, names in by_problem.items()]
    if len(nodes) != expected:
        answered = ", ".join(facts.node for facts in nodes) or "none"
        found.insert(0, f"{len(nodes)} of {expected} nodes answered ({answered}): the lines above say why")
    return found + (differences(nodes) if nodes else [])


def summary(nodes: Sequence[Facts]) -> str:
    """What has been found good."""
    versions = ", ".join(f"{package} {version}" for package, version in nodes[0].versions.items() if version)
    gpus = sorted({f"{len(facts.gpus)} x {facts.gpus[0][0]}" for facts in nodes if facts.gpus})
    return f"nothing is missing on {', '.join(facts.node for facts in nodes)}: {'; '.join([*gpus, versions])}"


def to_line(facts: Facts) -> str:
    """Facts as a node prints them. Packed: srun mixes the lines of several tasks once they have 1024 bytes."""
    return PREFIX + base64.b64encode(zlib.compress(json.dumps(asdict(facts)).encode(), 9)).decode()


def from_lines(lines: Sequence[str]) -> list[Facts]:
    """The facts that nodes have printed, in the order of their names; other lines are a prologue's or an image's.

    Raises ``LaunchError``.
    """
    packed = [line.removeprefix(PREFIX) for line in lines if line.startswith(PREFIX)]
    try:
        found: list[dict[str, Any]] = [json.loads(zlib.decompress(base64.b64decode(one))) for one in packed]
        return sorted((Facts(**facts) for facts in found), key=lambda facts: facts.node)
    except (ValueError, TypeError, zlib.error) as error:
        raise LaunchError(f"what a node has printed cannot be read ({error})") from error


def main(argv: list[str] | None = None) -> int:
    """Check and print; returns the exit status."""
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--processes-per-node", type=int, default=1, help="for training, on each node (default: 1)")
    parser.add_argument("--facts", action="store_true", help="print what this node has, and check nothing")
    parser.add_argument("--nodes", type=int, help="read what this many nodes have printed from the standard input")
    options, flags = parser.parse_known_args(argv)
    try:
        shape = shape_of(flags)
        if options.nodes is None:
            printed = os.dup(1)
            os.dup2(2, 1)  # what an import prints is no fact
            nodes = [gather(shape.edgc_cpu)]
            sys.stdout.flush()
            os.dup2(printed, 1)
        else:
            nodes = from_lines(sys.stdin.read().splitlines())
    except LaunchError as error:
        print(f"preflight: error: {error}", file=sys.stderr)
        return 2
    if options.facts:
        print(to_line(nodes[0]))
        return 0
    found = check(nodes, options.nodes or 1, shape, options.processes_per_node)
    for problem in found:
        print(f"preflight: error: {problem}", file=sys.stderr)
    if found:
        return 1
    added = fitting_flags(nodes[0], shape, flags)
    for flag, why in added.items():
        print(f"preflight: {why}: adding {flag}", file=sys.stderr)
    print(f"preflight: {summary(nodes)}", file=sys.stderr)
    print(*added)
    return 0


if __name__ == "__main__":
    sys.exit(main())
