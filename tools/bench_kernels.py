"""Time both Triton kernels with many sizes of blocks, for choosing those that edgc/compress/kernels.py takes.

    python tools/bench_kernels.py [--output docs/bench/kernel_blocks] [--report]

Writes OUTPUT.json and OUTPUT.md. With ``--report`` only the page is made, from the OUTPUT.json that is there: this
needs no GPU. One matrix of 5120 x 10240 in fp32, errors in fp32 of which a half waits, ranks 64 and 128. All sizes are
compiled first, in parallel processes. Then they are timed one after another, by triton.testing.do_bench: medians, and
the cache is emptied before each call.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import _root  # noqa: F401

import torch

from edgc.compress.lowrank import Product
from tools.benchmarks.common import versions
from tools.shared.command import command_parser, reason, say_error
from tools.shared.files import with_ending, write, write_json
from tools.shared.machine import device_name
from tools.shared.markdown import header, row

# edgc.compress.kernels imports triton, which not every torch brings: functions import it, so that --help needs none.

ROWS, COLS = 5120, 10240
SMALL_ROWS, SMALL_COLS = 512, 1024  # to compile with: Triton makes the same of both, as 16 divides all of these
RANKS = (64, 128)
WAITING = 0.5
# Passes over the matrix, as a copy is two. project: matrix and error are read, and their sum is written. write_back:
# matrix and older error are read, and both are written.
PASSES = {"project": 3, "write_back": 4}
MOST_COMPILERS = 16  # each has a CUDA context
FASTEST = 10  # rows of a table
Blocks = dict[str, int]


@dataclass(frozen=True)
class Row:
    """A kernel at a rank with these blocks: the median time. Without one: the shared memory that they would need."""

    kernel: str
    rank: int
    blocks: Blocks
    ms: float | None
    shared_bytes: int | None = None


def main(argv: list[str] | None = None) -> int:
    """Measure, or only make the page; returns the exit status."""
    parser = command_parser(__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path("docs/bench/kernel_blocks"), help="of both files, without ending"
    )
    parser.add_argument("--report", action="store_true", help="make the page from OUTPUT.json, measure nothing")
    options = parser.parse_args(argv)
    figures, text = with_ending(options.output, ".json"), with_ending(options.output, ".md")
    if options.report:
        try:
            result = json.loads(figures.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            say_error("bench_kernels", f"{figures}: {reason(error)}")
            return 2
    elif torch.cuda.is_available():
        os.environ.pop("TRITON_INTERPRET", None)
        result = measure(torch.device("cuda"))
        write_json(figures, result, indent=1)
    else:
        say_error("bench_kernels", "there is no CUDA device; --report makes the page without one")
        return 2
    write(text, page(result, figures.name).encode())
    print(f"written: {text}" if options.report else f"written: {figures}, {text}")
    return 0


def measure(device: torch.device) -> dict[str, Any]:
    """All times, with what they depend on."""
    import triton  # type: ignore[import-untyped]

    hopper = torch.cuda.get_device_capability(device)[0] == 9
    todo = [
        (kernel, rank, blocks)
        for kernel in PASSES
        for rank in RANKS
        for blocks in candidates(kernel, rank, used(kernel, rank, hopper))
    ]
    with get_context("spawn").Pool(min(MOST_COMPILERS, os.cpu_count() or 1)) as pool:
        pool.starmap(compile_blocks, todo, chunksize=1)
    matrix = torch.randn(ROWS, COLS, device=device)
    copy = torch.empty_like(matrix)
    return {
        "device": device_name(on_gpu=True),
        "versions": {**versions(), "triton": triton.__version__},
        "hopper": hopper,
        "matrix": [ROWS, COLS],
        "copy_ms": milliseconds(lambda: copy.copy_(matrix)),
        "rows": [asdict(one) for one in timed(todo, ROWS, COLS, device)],
    }


def used(kernel: str, rank: int, hopper: bool) -> Blocks:
    """The blocks that the kernel takes at this rank."""
    from edgc.compress import kernels

    return kernels.project_blocks(rank, hopper) if kernel == "project" else kernels.write_back_blocks(rank, hopper)


def candidates(kernel: str, rank: int, in_use: Blocks) -> list[Blocks]:
    """What is tried; ``in_use`` is in any case."""
    found = list(_project_candidates(rank) if kernel == "project" else _write_back_candidates())
    return found if in_use in found else [*found, in_use]


def _project_candidates(rank: int) -> Iterator[Blocks]:
    for rows, cols, warps, stages in product((16, 32, 64), (64, 128, 256), (4, 8), (2, 3)):
        if rank * cols <= 128 * 128 and rows * cols <= 8192:  # sums and values of a program are in registers
            yield {"RANK": rank, "ROWS": rows, "COLS": cols, "num_warps": warps, "num_stages": stages}


def _write_back_candidates() -> Iterator[Blocks]:
    shapes = ((64, 64), (64, 128), (128, 64), (128, 128))
    for ranks, (rows, cols), warps, stages in product((32, 64), shapes, (4, 8), (2, 3)):
        if rows * cols <= 8192 or warps > 4:
            yield {"RANKS": ranks, "ROWS": rows, "COLS": cols, "num_warps": warps, "num_stages": stages}


def compile_blocks(kernel: str, rank: int, blocks: Blocks) -> None:
    """In a process of its own; Triton keeps what it has compiled on the disk."""
    from triton.runtime.errors import OutOfResources  # type: ignore[import-untyped]

    # shared memory that is not there is told of when times are taken
    with suppress(OutOfResources), compiled_for(kernel, blocks):
        call_of(kernel, rank, SMALL_ROWS, SMALL_COLS, torch.device("cuda"))()
        torch.cuda.synchronize()


def timed(todo: list[tuple[str, int, Blocks]], rows: int, cols: int, device: torch.device) -> Iterator[Row]:
    """One after another."""
    from triton.runtime.errors import OutOfResources

    for kernel, rank, blocks in todo:
        try:
            with compiled_for(kernel, blocks):
                ms = milliseconds(call_of(kernel, rank, rows, cols, device))
        except OutOfResources as error:
            yield Row(kernel, rank, blocks, None, error.required)
        else:
            yield Row(kernel, rank, blocks, ms)


def milliseconds(call: Callable[[], object]) -> float:
    """The median on the GPU."""
    from triton.testing import do_bench  # type: ignore[import-untyped]

    return float(do_bench(call, warmup=4, rep=16, return_mode="median"))


def call_of(kernel: str, rank: int, rows: int, cols: int, device: torch.device) -> Callable[[], object]:
    """A call of the kernel on normal values."""
    from edgc.compress import kernels

    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator)

    matrix, older, factor = normal(rows, cols), normal(rows, cols), normal(rank, rows)
    if kernel == "project":
        return lambda: kernels.project(matrix, factor, older, gain=1 - WAITING)
    share = Product(factor.T, normal(rank, cols))
    finite, excess = torch.ones((), dtype=torch.bool, device=device), torch.ones((), device=device)
    error = torch.empty_like(matrix)
    return lambda: kernels.write_back(matrix, share, share, finite, older, error, excess=excess, waiting=WAITING)


@contextmanager
def compiled_for(kernel: str, blocks: Blocks) -> Iterator[None]:
    """Calls of the kernel take these blocks."""
    from edgc.compress import kernels

    name = f"{kernel}_blocks"
    own = getattr(kernels, name)
    setattr(kernels, name, lambda rank, hopper: blocks)
    try:
        yield
    finally:
        setattr(kernels, name, own)


def page(result: dict[str, Any], name: str) -> str:
    """The page in Markdown; ``name`` is that of the file of figures beside it."""
    rows = [Row(**one) for one in result["rows"]]
    told = ", ".join(f"{what} {number}" for what, number in result["versions"].items())
    note = f"The times were {result['note']}. " if "note" in result else ""
    height, width = result["matrix"]
    lines = [
        "# Blocks of the Triton kernels",
        "",
        f"Made by `tools/bench_kernels.py` on one {result['device']} ({told}); every time is in [{name}]({name}).",
        f"{note}Triton compiles both kernels of `--edgc-study kernels=fused` for blocks of a fixed size. Each size",
        "here was timed, for choosing those of `project_blocks` and `write_back_blocks` in",
        f"`edgc/compress/kernels.py`. A call takes one matrix of {height:,} x {width:,} in fp32, with an error in fp32",
        "of which a half waits. Times are medians, and the cache is emptied before each call.",
        "",
        "- *place*: 1 is the fastest of all sizes that were timed. The table has the ten fastest, the slowest, and the",
        "  size that is *in use*.",
        "- *rows*, *columns*: of the matrix, in one block.",
        "- *ranks*: of the factors, in one step of `write_back`. `project` takes the whole rank in each step.",
        "- *warps*, *stages*: Triton's `num_warps` and `num_stages`.",
        "- *of the floor*: the time over that of the floor, which is what a copy would take for as many passes over",
        f"  the matrix as the kernel makes: {PASSES['project']} for `project`, {PASSES['write_back']} for `write_back`."
        f" A copy makes 2, in {result['copy_ms']:.3f} ms.",
    ]
    for kernel, passes in PASSES.items():
        floor = result["copy_ms"] * passes / 2
        for rank in sorted({one.rank for one in rows if one.kernel == kernel}):
            own = [one for one in rows if (one.kernel, one.rank) == (kernel, rank)]
            lines += ["", f"## `{kernel}`, rank {rank}", "", *_table(own, floor, used(kernel, rank, result["hopper"]))]
    return "\n".join([*lines, ""])


_NAMES = {"RANKS": "ranks", "ROWS": "rows", "COLS": "columns", "num_warps": "warps", "num_stages": "stages"}


def _table(rows: list[Row], floor: float, in_use: Blocks) -> list[str]:
    """Of one kernel at one rank."""
    fastest_first = sorted((one.ms, place) for place, one in enumerate(rows) if one.ms is not None)
    sizes = [name for name in _NAMES if name in rows[0].blocks]
    lines = header(["place", *(_NAMES[name] for name in sizes), "time, ms", "of the floor"])
    for place, (ms, index) in enumerate(fastest_first, 1):
        one = rows[index]
        if place <= FASTEST or place == len(fastest_first) or one.blocks == in_use:
            said = f"{place}, in use" if one.blocks == in_use else place
            lines.append(row([said, *(one.blocks[name] for name in sizes), f"{ms:.3f}", f"{ms / floor:.2f}x"]))
    lines.append(row(["floor", *("" for _ in sizes), f"{floor:.3f}", "1.00x"]))
    if all(one.blocks != in_use for one in rows):
        lines += ["", f"The size in use was not timed: {_size(in_use)}."]
    too_large = [f"{_size(one.blocks)} ({one.shared_bytes / 1024:g} KiB)" for one in rows if one.shared_bytes]
    if too_large:
        lines += ["", f"These need more shared memory than there is: {'; '.join(too_large)}."]
    return lines


def _size(blocks: Blocks) -> str:
    return ", ".join(f"{blocks[name]} {said}" for name, said in _NAMES.items() if name in blocks)


if __name__ == "__main__":
    sys.exit(main())
