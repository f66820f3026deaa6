"""The house of tools/: commands start by their path, rooms import shared parts alone, a launch needs Python 3.9."""

import ast
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tools._root import REPOSITORY

TOOLS = REPOSITORY / "tools"
COMMANDS = sorted(TOOLS.glob("[!_]*.py"))
# Which other rooms a room may import.
ARROWS = {
    "shared": set(),
    "launching": {"shared"},
    "benchmarks": {"shared", "launching"},
    "network": {"shared"},
    "planning": {"shared", "launching", "network"},
    **dict.fromkeys(("data", "evaluation", "experiments", "export", "reports"), {"shared"}),
}
# What starts a run on a login node, where there is an old Python and no package.
LAUNCH = [
    *(TOOLS / name for name in ("_root.py", "launch.py", "preflight.py")),
    *(TOOLS / "launching").glob("*.py"),
    *(TOOLS / "shared" / f"{name}.py" for name in ("checkout", "command", "machine", "megatron")),
]


def test_rooms_import_no_command_and_no_other_room_than_these() -> None:
    assert {path.parent.name for path in TOOLS.glob("*/__init__.py")} == set(ARROWS)
    for room, others in ARROWS.items():
        for path in (TOOLS / room).glob("*.py"):
            found = set(re.findall(r"^\s*(?:from|import) tools\.(\w+)", path.read_text(), re.MULTILINE))
            assert found <= {room, "_root", *others}, f"{path.relative_to(TOOLS)} imports {found}"


@pytest.mark.parametrize("path", LAUNCH, ids=lambda path: str(path.relative_to(TOOLS)))
def test_what_launches_is_python_3_9(path: Path) -> None:
    module = ast.parse(path.read_text(), feature_version=(3, 9))
    annotated = any(isinstance(node, ast.FunctionDef | ast.AnnAssign) for node in ast.walk(module))
    assert not annotated or "from __future__ import annotations" in path.read_text()


def test_what_launches_is_imported_without_a_package() -> None:
    names = [".".join(path.relative_to(REPOSITORY).with_suffix("").parts) for path in LAUNCH]
    script = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); import {', '.join(names)}"
    subprocess.run([sys.executable, "-I", "-S", "-B", "-c", script], check=True)


def test_a_package_that_is_not_installed_is_named_in_one_line() -> None:
    for name in ("report", "export_hf", "preprocess_data"):
        ran = subprocess.run([sys.executable, "-S", TOOLS / f"{name}.py"], capture_output=True, text=True)
        assert ran.returncode == 1 and ran.stderr.count("\n") == 1, ran.stderr
        assert re.match(rf"{name}: error: the package [\w-]+ is not installed: bash scripts/setup_env.sh", ran.stderr)


@pytest.mark.parametrize("missing", ["megatron.edgc.no_such_module", "torch.no_such_module", "tools.no_such_module"])
def test_a_module_that_an_installed_package_lacks_is_told_with_where_it_was_asked_for(missing: str) -> None:
    script = f"import sys; sys.path[0] = {str(TOOLS)!r}; import _root; import {missing}"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.stderr.startswith("Traceback") and "is not installed" not in ran.stderr


# One process for all, which imports torch once.
HELP = """
import runpy, sys
folder, *commands = sys.argv[1:]
for command in commands:
    sys.modules.pop("_root", None)
    sys.path.insert(0, folder)  # as Python does for a file
    sys.argv = [command, "--help"]
    try:
        runpy.run_path(command, run_name="__main__")
    except SystemExit as end:
        assert end.code == 0, command
    assert folder not in sys.path, command
    del sys.path[0]
"""


def test_every_command_starts_by_its_path_from_anywhere(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", HELP, str(TOOLS), *map(str, COMMANDS)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^usage: (\w+)", done.stdout, re.MULTILINE) == [path.stem for path in COMMANDS]


@pytest.mark.parametrize(
    ("number", "ignored", "status"),
    [
        (signal.SIGTERM, False, 128 + signal.SIGTERM),
        (signal.SIGHUP, False, 128 + signal.SIGHUP),
        (signal.SIGHUP, True, 0),
    ],
)
def test_a_signal_lets_a_command_clean_up(number: int, ignored: bool, status: int) -> None:
    """Under nohup the end of the terminal is ignored."""
    program = f"""
import os, signal
from tools.shared.command import end_on_signals
signal.signal({number}, signal.SIG_IGN if {ignored} else signal.SIG_DFL)
end_on_signals()
try:
    os.kill(os.getpid(), {number})
finally:
    print("cleaned up")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (status, "cleaned up\n"), done.stderr
