"""The wheel in an environment that holds torch, numpy and what these two need, and nothing else."""

import os
import shutil
import subprocess
import sys
import sysconfig
import warnings
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = sorted((REPOSITORY / "examples").glob("ddp*.py"))


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A command that is run away from the repository."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environment["PYTHONFAULTHANDLER"] = "1"  # a crash of native code says where
    return subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)


def outside(*command: str | Path, cwd: Path) -> str:
    """What it prints; a failure shows what it said."""
    done = run(*command, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def link(name: str, folder: Path, extras: frozenset[str] = frozenset()) -> None:
    """Links to all that a distribution installed, and to that of those it requires."""
    found = distribution(name)
    for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
        if not (folder / top).exists():
            (folder / top).symlink_to(found.locate_file(top))
    for requirement in map(Requirement, found.requires or ()):
        if not requirement.marker or any(requirement.marker.evaluate({"extra": extra}) for extra in {"", *extras}):
            link(requirement.name, folder, frozenset(requirement.extras))


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of that environment."""
    folder = tmp_path_factory.mktemp("wheel")
    # A copy: setuptools would leave its build folder in the checkout, and would ship what an older one holds.
    source = folder / "source"
    for name in ("edgc", "megatron"):
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
    outside(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source, cwd=folder)
    environment, links = folder / "environment", folder / "links"
    outside(sys.executable, "-m", "venv", "--without-pip", environment, cwd=folder)
    links.mkdir()
    for name in ("torch", "numpy"):
        link(name, links)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(environment)}))
    (packages / "links.pth").write_text(f"{links}\n")
    interpreter = environment / "bin" / "python"
    # With its dependencies and without an index: it installs only where torch and numpy are all that it requires.
    (wheel,) = folder.glob("*.whl")
    outside(*pip, "--python", interpreter, "install", "--no-index", wheel, cwd=folder)
    return interpreter


def test_the_core_imports_with_types_and_without_megatron(python: Path, tmp_path: Path) -> None:
    script = """
import importlib.util, pathlib, sys
import edgc
folder = pathlib.Path(edgc.__file__).parent
assert folder.is_relative_to(sys.prefix), folder
assert (folder / "py.typed").exists() and (folder.parent / "megatron" / "edgc" / "py.typed").exists()
assert not any(map(importlib.util.find_spec, ("megatron.core", "psutil", "transformers", "sentencepiece", "pytest")))
from edgc.config import ConfigError
from megatron.edgc.compatibility import check_megatron
try:
    check_megatron()
except ConfigError as error:
    print(error)
"""
    refusal = outside(python, "-c", script, cwd=tmp_path)
    assert "megatron-core is not installed: install EDGC with its extra 'megatron'" in refusal
    assert "--edgc-preset" in outside(python, "-m", "edgc", "flags", cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_run(python: Path, tmp_path: Path, example: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(example.read_text())
    done = run(python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, cwd=tmp_path)
    said = done.stderr  # torchrun's, and what native code says; EDGC's report goes to stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    assert {"dense", "balanced"} <= {row[0] for row in rows if row}, said
    if done.returncode and "SIGABRT" in said:  # under heavy load gloo was seen to abort while processes end
        warnings.warn(f"its work was done, then native code has aborted: {said}", stacklevel=1)
    else:
        assert done.returncode == 0, said
