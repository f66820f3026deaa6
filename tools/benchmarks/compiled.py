"""What Triton's compiler makes of the fused kernels for a GPU that need not be there."""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
from triton.runtime import driver  # type: ignore[import-untyped]
from triton.runtime.jit import MockTensor  # type: ignore[import-untyped]

from edgc.compress import kernels

ROWS, COLS = 6720, 4480  # the QKV weight of GPT2-12.1B on one of two tensor-parallel GPUs
RANKS = (16, 32, 64, 68, 128, 200, 256)
GPUS = {80: "A100", 90: "H100, H200"}  # by compute capability
# Of PTX: what loads from global memory, what stores there, and products on tensor cores.
_LOAD, _STORE = r"(?:ld\.global|cp\.async\.c[ag]\.shared\.global)\S*", r"st\.global\S*"
_PRODUCT = r"(?:wgmma\.mma_async|mma\.sync)\S*"


@dataclass(frozen=True)
class Compiled:
    """One kernel at one rank for one compute capability.

    ``registers`` and ``spilled_bytes`` are those of a thread, ``shared_bytes`` those of a block. ``load_bytes`` and
    ``store_bytes``: the most that one instruction moves for a thread. ``product``: the instruction of tensor cores.
    """

    kernel: str
    capability: int
    rank: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    load_bytes: int
    store_bytes: int
    product: str


class _Driver:
    """Stands for the driver of a GPU: enough to compile for it."""

    def __init__(self, capability: int):
        self._capability = capability
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return self._capability  # Triton keeps what it has compiled by this number

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_kernels(capability: int, rank: int) -> list[Compiled]:
    """Both kernels, for a loss scale, errors in bf16 of which a part waits, and row-major matrices.

    Triton must not be told to interpret.
    """
    driver.set_active(_Driver(capability))
    hopper = capability // 10 == 9
    number = MockTensor(torch.float32)

    def matrix(cols: int, dtype: torch.dtype = torch.float32) -> tuple[Any, int, int]:
        return MockTensor(dtype), cols, 1

    project = kernels._project_kernel.warmup(
        matrix(COLS), matrix(ROWS), matrix(COLS, torch.bfloat16), number, 0.5, number, ROWS, COLS, rank, ROWS,
        CHANGED=True, grid=(1,), **kernels.project_blocks(rank, hopper),
    )  # fmt: skip
    write_back = kernels._write_back_kernel.warmup(
        matrix(COLS), matrix(rank), matrix(COLS), matrix(rank), matrix(COLS), MockTensor(torch.bool),
        matrix(COLS, torch.bfloat16), matrix(COLS, torch.bfloat16), number, number, 0.5, ROWS, COLS, rank, 0, ROWS, 1,
        WAITS=True, grid=(1,), **kernels.write_back_blocks(rank, hopper),
    )  # fmt: skip
    return [
        _described(name, capability, rank, made) for name, made in (("project", project), ("write_back", write_back))
    ]


def _described(name: str, capability: int, rank: int, made: Any) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(made.asm["cubin"])
        cubin.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.run(
            [tool, "--dump-resource-usage", cubin.name], check=True, capture_output=True, text=True
        ).stdout
    found = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage))
    ptx = made.asm["ptx"]
    products = Counter(re.findall(_PRODUCT, ptx))
    return Compiled(
        name,
        capability,
        rank,
        registers=int(found["REG"]),
        spilled_bytes=int(found["STACK"]) + int(found["LOCAL"]),
        shared_bytes=made.metadata.shared,
        load_bytes=max(map(_bytes, re.findall(_LOAD + r"[^;]*;", ptx))),
        store_bytes=max(map(_bytes, re.findall(_STORE + r"[^;]*;", ptx))),
        product=max(products, key=lambda one: products[one]) if products else "",
    )


def _bytes(instruction: str) -> int:
    """That one instruction of PTX moves for a thread."""
    if instruction.startswith("cp.async"):
        sizes = re.findall(r"0x([0-9a-f]+)|\b(\d+)\b", instruction.rsplit("]", 1)[-1])
        return int(sizes[0][0], 16) if sizes[0][0] else int(sizes[0][1])
    vector = re.search(r"\.v(\d)", instruction)
    bits = re.findall(r"\.[bfus](\d+)", instruction)
    return (int(vector[1]) if vector else 1) * int(bits[-1]) // 8
