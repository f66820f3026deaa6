"""What a node has, and the line by which it tells."""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib
import json
import platform
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

from tools._root import REPOSITORY
from tools.launching.configs import LaunchError
from tools.shared.machine import installed

PACKAGES = ("torch", "megatron-core", "edgc", "transformer-engine")  # on which all nodes have to agree
TRANSFORMER_ENGINE = "transformer_engine.pytorch.fp8"  # what Megatron imports of it
TENSORBOARD = "tensorboard"
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
    and packages that cannot be imported, why; ``wrong_flags``: why EDGC refuses its own flags.
    """

    node: str
    versions: dict[str, str | None]
    cuda: str | None = None
    gpus: list[tuple[str, int, int]] = field(default_factory=list)
    architectures: list[str] = field(default_factory=list)
    backends: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    wrong_flags: str | None = None

    def has(self, extension: str) -> bool:
        return extension not in self.failed


def gather(on_cpu: bool, flags: Sequence[str]) -> Facts:
    """The facts of this machine, for training with these flags; on a CPU no extension is tried."""
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
    wrong = wrong_flags(flags)
    failed = {}
    if installed(TENSORBOARD) is None:
        failed[TENSORBOARD] = "it is not installed"
    if on_cpu:
        return Facts(node, versions, backends=backends, failed=failed, wrong_flags=wrong)
    gpus: list[tuple[str, int, int]] = []
    if torch.cuda.is_available():
        gpus = [
            (torch.cuda.get_device_name(place), *torch.cuda.get_device_capability(place))
            for place in range(torch.cuda.device_count())
        ]
    for name in EXTENSIONS:
        try:
            importlib.import_module(name)
        except Exception as error:  # an extension of another torch fails with OSError or worse
            failed[name] = _reason(error)
    if APEX in failed and installed("apex") is not None:
        failed[APEX] = f"apex {installed('apex')} is installed, but {failed[APEX]}"
    if "nccl" in backends and gpus:
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return Facts(node, versions, torch.version.cuda, gpus, torch.cuda.get_arch_list(), backends, failed, wrong)


def wrong_flags(flags: Sequence[str]) -> str | None:
    """Why EDGC refuses its own flags among those of a run; None if it does not."""
    from edgc.config import ConfigError
    from megatron.edgc.arguments import add_arguments, config_from_args

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ConfigError(message)

    parser = add_arguments(Parser(add_help=False))
    parser.add_argument("--edgc-cpu", action="store_true")  # of pretrain_gpt.py
    try:
        known, others = parser.parse_known_args(flags)
        if unknown := [flag for flag in others if flag.startswith("--edgc")]:
            return f"EDGC has no flag {', '.join(unknown)}: python -m edgc flags prints those that it has"
        config_from_args(known)
    except ConfigError as error:
        return str(error)
    return None


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _source_hash() -> str:
    """Of the code that training runs: its version number says little in an editable installation."""
    found = hashlib.sha256()
    for folder in ("edgc", "megatron/edgc"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            found.update(str(path.relative_to(REPOSITORY)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:10]


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
