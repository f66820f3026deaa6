"""The arrows of the house: edgc needs torch and numpy alone; megatron/ stays a namespace package."""

import re
import subprocess
import sys
from pathlib import Path

import edgc

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


def test_settings_and_what_decides_import_no_torch() -> None:
    modules = ",".join(
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
        for room in ("config", "plan")
        for path in (REPOSITORY / "edgc" / room).rglob("[!_]*.py")
    )
    script = f"import {modules}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY).returncode == 0


# Who may import whom: a room imports itself, those to its left, and what lies beside the rooms, which imports no room
# except in the entries.
ORDER = ("plan", "observe", "comm", "compress", "hosts")
ENTRIES = ("__init__.py", "__main__.py")


def test_arrows_between_rooms_point_one_way() -> None:
    for place, room in enumerate(ORDER):
        for path in (REPOSITORY / "edgc" / room).rglob("*.py"):
            found = set(re.findall(r"^\s*from edgc\.(\w+)", path.read_text(), re.MULTILINE)) & set(ORDER)
            assert found <= set(ORDER[: place + 1]), f"{path.relative_to(REPOSITORY)} imports {found}"
    shared = {*(REPOSITORY / "edgc").glob("*.py"), *(REPOSITORY / "edgc" / "config").glob("*.py")}
    for path in shared - {REPOSITORY / "edgc" / name for name in ENTRIES}:
        found = set(re.findall(r"^\s*from edgc\.(\w+)", path.read_text(), re.MULTILINE)) & set(ORDER)
        assert not found, f"{path.relative_to(REPOSITORY)} imports {found}"
    for path in (REPOSITORY / "edgc").rglob("*.py"):
        if path.parent.name != "comm":
            assert "torch.distributed" not in path.read_text(), path


def test_only_entries_import_recipes() -> None:
    recipes = REPOSITORY / "megatron" / "edgc" / "recipes"
    for path in set((REPOSITORY / "megatron" / "edgc").rglob("*.py")) - set(recipes.glob("*.py")):
        assert "megatron.edgc.recipes" not in path.read_text(), path


def test_megatron_is_a_namespace_package() -> None:
    assert not (REPOSITORY / "megatron" / "__init__.py").exists()


def test_edgc_offers_at_most_ten_names_and_imports_torch_for_none_that_needs_no_tensor() -> None:
    assert len(edgc.__all__) <= 10
    assert all(getattr(edgc, name) is not None for name in edgc.__all__)
    script = "import edgc, sys; edgc.EDGCConfig, edgc.PRESETS, edgc.ConfigError; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY).returncode == 0
