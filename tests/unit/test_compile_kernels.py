"""Triton compiles the fused kernels for GPUs that are not there. In processes of their own: here it interprets."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools._root import REPOSITORY

pytest.importorskip("triton", reason="Triton comes with torch's CUDA build")


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600)


def test_no_kernel_spills_registers_and_memory_is_moved_by_16_bytes(tmp_path: Path) -> None:
    done = python("tools/compile_kernels.py", "--output", str(tmp_path / "compiled"))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "compiled.json").read_text())["rows"]
    assert {(one["capability"], one["kernel"]) for one in rows} == {
        (capability, kernel) for capability in (80, 90) for kernel in ("project", "write_back")
    }
    assert {one["rank"] for one in rows} == {16, 32, 64, 68, 128, 200, 256} and len(rows) == 28
    assert all(one["spilled_bytes"] == 0 and 0 < one["registers"] <= 255 for one in rows)
    assert all(one["load_bytes"] == one["store_bytes"] == 16 for one in rows)
    assert all("mma" in one["product"] for one in rows)
    assert any(one["product"].startswith("wgmma") for one in rows if one["capability"] == 90)


SPILLING = """
from edgc.compress import kernels
own = kernels.write_back_blocks
kernels.write_back_blocks = lambda rank, hopper: {**own(rank, hopper), "num_warps": 1}
from tools.benchmarks.compiled import compile_kernels
print([one.spilled_bytes for one in compile_kernels(80, 64)])
"""


def test_a_kernel_that_spills_is_noticed() -> None:
    done = python("-c", SPILLING)
    assert done.returncode == 0, done.stderr
    project, write_back = json.loads(done.stdout)
    assert project == 0 and write_back > 0
