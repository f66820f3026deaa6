"""The arrows of the house: edgc needs torch and numpy alone; megatron/ stays a namespace package."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_edgc_imports_neither_megatron_nor_anything_beyond_torch_and_numpy() -> None:
    modules = ",".join(
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
        for path in (REPOSITORY / "edgc").rglob("*.py")
        if path.name != "kernels.py"  # imported only where they are asked for: they need Triton, as torch brings it
    )
    script = (
        f"import torch, numpy, sys; before = set(sys.modules); import {modules}; print(*(set(sys.modules) - before))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.split()
    packages = {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names
    assert packages <= {"edgc", "torch", "numpy"}


def test_megatron_is_a_namespace_package() -> None:
    assert not (REPOSITORY / "megatron" / "__init__.py").exists()
