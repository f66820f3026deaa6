"""The files of configs/models/ and configs/clusters/, and the lines of configs/methods.yaml."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from tools._root import REPOSITORY
from tools.launching import flat_yaml

try:
    import yaml

    NOT_YAML: type[Exception] = yaml.YAMLError
except ImportError:
    yaml = None
    NOT_YAML = ValueError

MODELS = REPOSITORY / "configs" / "models"
CLUSTERS = REPOSITORY / "configs" / "clusters"
METHODS = REPOSITORY / "configs" / "methods.yaml"


class LaunchError(Exception):
    """A run that cannot work; the message is one line that names the value and the rule."""


@dataclass(frozen=True)
class Model:
    """What is trained: shape, parallel sizes, optimizer. ``cluster``: the one it is meant for; ``billions``: of
    parameters, by its name; ``methods``: flags that a method has to have otherwise at this size.
    """

    name: str
    title: str
    cluster: str
    flags: str
    billions: float | None = None
    methods: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cluster:
    """What it is trained on. ``link_gbps``: Gbit/s of one process to other nodes; ``gpu``: none for CPUs.

    The rest is for tools/plan.py alone. ``inside_gbps``: of one process to others in its node, in the place of NVLink's
    between SXM modules. ``racks``: equal groups of nodes; all GPUs of one share ``uplink_gbps`` to the
    others, and what crosses takes ``uplink_ms`` longer. The first ``slow_nodes`` have ``slow_gbps`` in the place of
    ``link_gbps``.
    """

    name: str
    gpu: str
    nodes: int
    gpus_per_node: int
    flags: str
    compute_capability: float | None = None
    memory_gib: float | None = None
    link_gbps: float | None = None
    inside_gbps: float | None = None
    racks: int | None = None
    uplink_gbps: float | None = None
    uplink_ms: float | None = None
    slow_nodes: int | None = None
    slow_gbps: float | None = None


T = TypeVar("T", Model, Cluster)


def read(kind: type[T], folder: Path, name: str) -> T:
    """The file ``name``.yaml of a folder, or any file by its path. Raises ``LaunchError``."""
    path = Path(name) if name.endswith(".yaml") else folder / f"{name}.yaml"
    content = read_yaml(path)
    known = {key.name: key for key in fields(kind) if key.name != "name"}
    if unknown := sorted(content.keys() - known.keys()):
        raise LaunchError(f"{path}: unknown key {', '.join(unknown)}; keys are {', '.join(known)}")
    needed = {name for name, key in known.items() if key.default is MISSING and key.default_factory is MISSING}
    if missing := sorted(needed - content.keys()):
        raise LaunchError(f"{path}: lacks {', '.join(missing)}")
    for key, value in content.items():
        rule, holds = _RULES[str(known[key].type)]
        if not holds(value):
            raise LaunchError(f"{path}: {key} = {value!r}: must be {rule}")
    return kind(**content, name=path.stem)


def _positive(value: Any, kinds: Any) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool) and value > 0


def _texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for pair in value.items() for text in pair)


_RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("text", lambda value: isinstance(value, str)),
    "int": ("a positive whole number", lambda value: _positive(value, int)),
    "int | None": ("a positive whole number", lambda value: _positive(value, int)),
    "float | None": ("a positive number", lambda value: _positive(value, (int, float))),
    "dict[str, str]": ("names with text", _texts),
}


def read_yaml(path: Path) -> dict[str, Any]:
    """Keys and values of a YAML file. Raises ``LaunchError``."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        others = ", ".join(sorted(file.stem for file in path.parent.glob("*.yaml")))
        there = f"; those that are there: {others}" if others else ""
        raise LaunchError(f"{path}: there is no such file{there}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"{path}: {error}") from error
    try:
        content = flat_yaml.mapping(text) if yaml is None else yaml.safe_load(text)
    except NOT_YAML as error:
        raise LaunchError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise LaunchError(f"{path}: must hold keys and values")
    return content


def split_flags(text: str, where: object) -> list[str]:
    """The flags in a text. Raises ``LaunchError`` for an open quote."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise LaunchError(f"{where}: flags: {error}") from None


def method_flags(name: str, model: Model) -> list[str]:
    """The flags of a method, with what this model changes."""
    methods = read_yaml(METHODS)
    if name not in methods:
        raise LaunchError(f"{METHODS}: there is no method {name}; methods are {', '.join(methods)}")
    return split_flags(f"{methods[name]} {model.methods.get(name, '')}", METHODS)
