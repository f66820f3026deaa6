"""The record of every start of a run, and what its checkpoints allow."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tools._root import REPOSITORY
from tools.launching.configs import LaunchError
from tools.launching.plan import Launch
from tools.shared.checkout import commit
from tools.shared.machine import installed
from tools.shared.megatron import TRACKER

ATTEMPTS = "attempts.jsonl"  # in a run's folder: a line for every time that it was started
PACKAGES = ("edgc", "torch", "megatron-core", "transformer-engine", "apex", "numpy")
# What a run is. With another value it is another run, whose checkpoints go elsewhere.
IDENTITY = (
    *("--seed", "--edgc-preset", "--edgc-engine", "--edgc-static-rank", "--edgc-volume"),
    *("--data-path", "--train-data-path", "--tokenizer-type", "--num-layers", "--hidden-size"),
    *("--ffn-hidden-size", "--num-attention-heads", "--max-position-embeddings"),
)


def check_checkpoint(launch: Launch) -> None:
    """Raise ``LaunchError`` if the run's folder holds checkpoints of another run: of another model, on other data, or
    compressed in another way.
    """
    attempts = launch.folder / ATTEMPTS
    if not (launch.folder / "checkpoints" / TRACKER).is_file() or not attempts.is_file():
        return
    try:
        before = json.loads(attempts.read_text(encoding="utf-8").splitlines()[-1])["arguments"]
    except (ValueError, IndexError, KeyError):
        return  # cut short by a full disk; Megatron also compares the shapes
    for flag in IDENTITY:
        known, wanted = (last_value(flag, arguments) for arguments in (before, launch.arguments))
        if known != wanted:
            raise LaunchError(
                f"{launch.folder} has checkpoints of a run with {_named(flag, known)}, this one has "
                f"{_named(flag, wanted)}: set RUN to another folder, or delete {attempts} to go on from them"
            )


def _named(flag: str, value: str | None) -> str:
    return f"no {flag}" if value is None else f"{flag} {value}"


def last_value(flag: str, arguments: Sequence[str]) -> str | None:
    """What follows a flag; of one that is given several times the last counts."""
    places = [place for place, name in enumerate(arguments[:-1]) if name == flag]
    return arguments[places[-1] + 1] if places else None


def record(launch: Launch) -> None:
    """Add a line with the exact arguments and the versions that a run starts under to its folder."""
    line: Mapping[str, Any] = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "processes": launch.nodes * launch.processes_per_node,
        "arguments": launch.arguments,
        "commit": commit(REPOSITORY),
        "python": sys.version.split()[0],
        "versions": {package: installed(package) for package in PACKAGES},
    }
    launch.folder.mkdir(parents=True, exist_ok=True)
    with (launch.folder / ATTEMPTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
