"""Puts the repository's root on Python's path, for a command that is started by its path: it then finds the rooms.

The root takes the place of this folder, which Python puts first: a command here may have the name of a package
(``evaluate``, which lm_eval imports). A package that is not installed is named in one line. Python 3.9 is enough.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import TracebackType

REPOSITORY = Path(__file__).resolve().parents[1]

if Path(sys.path[0]).resolve() == REPOSITORY / "tools":
    sys.path[0] = str(REPOSITORY)


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # that of the package which it is in
        return False


def _name_what_is_missing(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    top = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    module = "megatron.core" if top == "megatron" else top  # a part of megatron is in this repository
    if top not in ("", "edgc", "tools") and not _found(module):
        command = Path(sys.argv[0]).stem
        hint = "bash scripts/setup_env.sh makes an environment with all packages, .venv"
        print(f"{command}: error: the package {module.replace('.', '-')} is not installed: {hint}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


if __name__ != "tools._root":  # a command was started by its path
    sys.excepthook = _name_what_is_missing
