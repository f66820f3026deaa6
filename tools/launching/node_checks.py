"""What keeps nodes from training with given flags, and flags that help."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from tools.launching.checks import too_new
from tools.launching.node import (
    APEX,
    APEX_GRADIENTS,
    APEX_MASK,
    APEX_NORM,
    APEX_SOFTMAX,
    EXTENSIONS,
    TENSORBOARD,
    TRANSFORMER_ENGINE,
    Facts,
)


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
    if facts.wrong_flags:
        found.append(facts.wrong_flags)
    if shape.tensorboard_dir and TENSORBOARD in facts.failed:
        found.append("TensorBoard is not installed, to which Megatron writes the losses: pip install tensorboard")
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
    for name, major, minor in dict.fromkeys((name, major, minor) for name, major, minor in facts.gpus):
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
