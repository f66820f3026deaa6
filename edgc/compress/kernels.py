"""Triton kernels for what a step of low-rank compression does with whole gradients: each goes over the data once.

Plain torch reads and writes a gradient several times for the same: unscaling, error feedback, a product with a factor;
later what was left, its rounding, and the average. Results are those of the plain path up to the order of sums (and to
what is drawn for rounding). On an H100 plain torch took less time with large matrices (docs/gpu.md), so they are not
the default. Triton's interpreter (TRITON_INTERPRET=1, set before triton is imported) runs them on a CPU, for tests.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import functools

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from edgc.compress.lowrank import Product

LARGEST_RANK = 256  # the sums of a program, which has all of the rank, stay in registers
_PROGRAMS = 256  # that fill a GPU
_ERROR_TYPES = (torch.float32, torch.bfloat16)

# Kernels take a matrix as (pointer, row stride, column stride): Triton compiles a stride of 1 as such, in either place,
# and lets neighbouring threads go along it. Offsets are int64, as a gradient may have more than 2^31 elements. Of
# Triton's library only builtins are called: jitted functions (tl.zeros, tl.randint) are interpreted only if the very
# first import of triton was told so.


@triton.jit
def _at(matrix, rows, cols):
    return matrix[0] + rows[:, None] * matrix[1] + cols[None, :] * matrix[2]


@triton.jit
def _dot(a, b, sums):
    # Three tf32 products make about one of fp32. A single one, with 10 bits of mantissa, would lose what error feedback
    # never sees: what errors are relieved of would not be what the average has.
    return tl.dot(a, b, sums, input_precision="tf32x3")


@triton.jit
def _project_kernel(
    matrix, factor, error, divisor, gain, partials, row_count, col_count, rank, share,
    CHANGED: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Block x of the columns of factor @ matrix, summed over the share y of the rows."""
    cols = tl.program_id(0).to(tl.int64) * COLS + tl.arange(0, COLS)
    part = tl.program_id(1).to(tl.int64)
    ranks = tl.arange(0, RANK)
    if divisor is not None:
        by = tl.load(divisor)
    sums = tl.full((RANK, COLS), 0.0, tl.float32)
    for start in range(part * share, tl.minimum((part + 1) * share, row_count), ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < row_count)[:, None] & (cols < col_count)[None, :]
        values = tl.load(_at(matrix, rows, cols), mask=inside, other=0.0)
        if divisor is not None:
            values = tl.div_rn(values, by)
        if error is not None:
            values += gain * tl.load(_at(error, rows, cols), mask=inside, other=0.0).to(tl.float32)
        if CHANGED:
            tl.store(_at(matrix, rows, cols), values, mask=inside)
        weights_inside = (ranks < rank)[:, None] & (rows < row_count)[None, :]
        weights = tl.load(_at(factor, ranks, rows), mask=weights_inside, other=0.0)
        sums = _dot(weights, values, sums)
    indices = partials + ((part * rank + ranks)[:, None] * col_count + cols[None, :])
    tl.store(indices, sums, mask=(ranks < rank)[:, None] & (cols < col_count)[None, :])


def project(
    matrix: Tensor,
    factor: Tensor,
    error: Tensor | None = None,
    divisor: Tensor | None = None,
    gain: float = 1.0,
) -> Tensor:
    """factor @ M (rank x cols, contiguous), and M into ``matrix`` where that is not M already.

    M (rows x cols) = matrix / divisor + gain * error, in fp32. ``matrix`` and ``factor`` (rank x rows, rank up to 256)
    are fp32, ``error`` fp32 or bf16 of the matrix's shape, all with any strides; ``divisor`` is 0-dimensional on the
    device, fp32. Reads the matrix and the error once and writes the matrix once, or not at all with neither of the
    two. Sums come in the same order for the same shapes. Raises ValueError for another shape or type. Source: PowerSGD
    (arXiv 1905.13727), algorithms 1 (compress) and 2.
    """
    rows, cols = matrix.shape
    rank = factor.shape[0]
    _check("matrix", matrix, (rows, cols))
    _check("factor", factor, (rank, rows))
    _check("error", error, (rows, cols), *_ERROR_TYPES)
    _check("divisor", divisor, ())
    if not 1 <= rank <= LARGEST_RANK:
        raise ValueError(f"rank {rank}: must be from 1 to {LARGEST_RANK}")
    blocks = project_blocks(rank, _hopper(matrix.device))
    col_blocks, row_blocks = triton.cdiv(cols, blocks["COLS"]), triton.cdiv(rows, blocks["ROWS"])
    # Few blocks of columns: the rows are shared out too, as far as partial sums stay small against the matrix.
    parts = max(1, min(_PROGRAMS // col_blocks, rows // (8 * blocks["RANK"])))
    share = triton.cdiv(row_blocks, parts) * blocks["ROWS"]
    parts = triton.cdiv(rows, share)
    partials = torch.empty(parts, rank, cols, dtype=torch.float32, device=matrix.device)
    _project_kernel[(col_blocks, parts)](
        _view(matrix), _view(factor), _view(error), divisor, float(gain), partials, rows, cols, rank, share,
        CHANGED=error is not None or divisor is not None, **blocks,
    )  # fmt: skip
    return partials[0] if parts == 1 else partials.sum(dim=0)


def project_blocks(rank: int, hopper: bool) -> dict[str, int]:
    """How ``project`` is compiled at a rank. Those for Hopper were among the three fastest on an H100 at ranks 64 and
    128, and spill no registers (docs/bench/kernel_blocks.md).
    """
    padded = max(16, triton.next_power_of_2(rank))  # 16 is the least that tl.dot takes
    if hopper and padded == 64:
        return {"RANK": padded, "ROWS": 32, "COLS": 64, "num_warps": 4, "num_stages": 3}
    if hopper and padded == 128:
        return {"RANK": padded, "ROWS": 32, "COLS": 128, "num_warps": 8, "num_stages": 3}
    return {"RANK": padded, "ROWS": 32, "COLS": min(128, max(32, 4096 // padded)), "num_warps": 8, "num_stages": 2}


@triton.jit
def _product(
    left, right, rows, cols, row_count, col_count, rank,
    RANKS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """These rows and columns of left @ right."""
    sums = tl.full((ROWS, COLS), 0.0, tl.float32)
    for start in range(0, rank, RANKS):
        ranks = start + tl.arange(0, RANKS)
        a_inside = (rows < row_count)[:, None] & (ranks < rank)[None, :]
        b_inside = (ranks < rank)[:, None] & (cols < col_count)[None, :]
        a = tl.load(_at(left, rows, ranks), mask=a_inside, other=0.0)
        b = tl.load(_at(right, ranks, cols), mask=b_inside, other=0.0)
        sums = _dot(a, b, sums)
    return sums


@triton.jit
def _mixed(word):
    """uint32 to uint32, one to one, so that all bits look random: the finaliser of MurmurHash3 (Appleby 2011)."""
    word = tl.mul(word ^ (word >> 16), 0x85EBCA6B, sanitize_overflow=False)
    word = tl.mul(word ^ (word >> 13), 0xC2B2AE35, sanitize_overflow=False)
    return word ^ (word >> 16)


@triton.jit
def _bf16(values, rows, cols, seed):
    """Rounded up or down at random: a number below the weight of bf16's last bit is added, and the rest cut off."""
    # A hash of seed and place is random enough for this. Philox (tl.randint) has about five times the instructions: by
    # their count, more time than the memory takes.
    keys = _mixed(rows.to(tl.uint32) ^ _mixed(seed.to(tl.uint32)))
    noise = _mixed(keys[:, None] ^ cols.to(tl.uint32)[None, :]) >> 16
    bits = values.to(tl.uint32, bitcast=True)
    rounded = (tl.add(bits, noise, sanitize_overflow=False) & 0xFFFF0000).to(tl.float32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000  # adding to the bits of others could make numbers of them
    return tl.where(finite, rounded, values).to(tl.bfloat16)


@triton.jit(do_not_specialize=["first_row", "last_row", "seed"])
def _write_back_kernel(
    matrix, own_left, own_right, left, right, finite, older, error, loss_scale, excess, waiting,
    row_count, col_count, rank, first_row, last_row, seed,
    WAITS: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """One block of the matrix and of the error."""
    col_blocks = (col_count + COLS - 1) // COLS
    start = (tl.program_id(0) // col_blocks).to(tl.int64) * ROWS
    rows = start + tl.arange(0, ROWS)
    cols = (tl.program_id(0) % col_blocks).to(tl.int64) * COLS + tl.arange(0, COLS)
    inside = (rows < row_count)[:, None] & (cols < col_count)[None, :]
    wanted = inside & ((rows >= first_row) & (rows < last_row))[:, None]
    if tl.load(finite):
        values = tl.load(_at(matrix, rows, cols), mask=inside, other=0.0)
        tl.debug_barrier()  # another thread may write what this one reads
        values -= _product(own_left, own_right, rows, cols, row_count, col_count, rank, RANKS, ROWS, COLS)
        if excess is not None:
            values = tl.div_rn(values, tl.load(excess))
        if WAITS:
            values += waiting * tl.load(_at(older, rows, cols), mask=inside, other=0.0).to(tl.float32)
        if error[0].dtype.element_ty == tl.bfloat16:
            tl.store(_at(error, rows, cols), _bf16(values, rows, cols, seed), mask=inside)
        else:
            tl.store(_at(error, rows, cols), values, mask=inside)
        if (start < last_row) & (start + ROWS > first_row):
            average = _product(left, right, rows, cols, row_count, col_count, rank, RANKS, ROWS, COLS)
            if loss_scale is not None:
                average *= tl.load(loss_scale)
            tl.store(_at(matrix, rows, cols), average, mask=wanted)
    else:
        if older is None:
            tl.store(_at(error, rows, cols), tl.full((ROWS, COLS), 0.0, tl.float32), mask=inside)
        else:
            tl.store(_at(error, rows, cols), tl.load(_at(older, rows, cols), mask=inside, other=0.0), mask=inside)
        tl.store(_at(matrix, rows, cols), tl.full((ROWS, COLS), float("nan"), tl.float32), mask=wanted)


def write_back(
    matrix: Tensor,
    share: Product,
    product: Product,
    finite: Tensor,
    older: Tensor | None,
    error: Tensor,
    rows: slice = slice(None),
    loss_scale: Tensor | None = None,
    seed: int = 0,
    excess: Tensor | None = None,
    waiting: float = 0.0,
) -> None:
    """error = (M - share) / excess + waiting * older; then these rows of ``matrix``, which held M, =
    product * loss_scale.

    Where ``finite`` (bool, 0-dimensional, never read by the CPU) is false: error = older, bit for bit, or zeros for
    None, and those rows are NaN. ``matrix`` (rows x cols) and the factors of ``share`` and ``product``, of
    the same rank, are fp32; ``error``, new memory, and ``older`` have the matrix's shape and one type, fp32 or bf16;
    all have any strides. ``loss_scale`` and ``excess`` are 0-dimensional on the device, fp32. ``seed``, from 0 to
    2^31 - 1, draws the rounding to bf16, which is unbiased: a place is rounded in the same way whatever the strides.
    Reads the matrix once and writes both once; reads ``older`` once where some of it is ``waiting``, the share that
    ``project`` has not added, else only for want of finite values. Raises ValueError for
    another shape or type, rows with a step, or such a seed. Source: PowerSGD (arXiv 1905.13727), algorithms 1
    (decompress) and 2.
    """
    row_count, col_count = matrix.shape
    rank = share.left.shape[1]
    _check("matrix", matrix, (row_count, col_count))
    for name, factors in (("share", share), ("product", product)):
        _check(f"{name}.left", factors.left, (row_count, rank))
        _check(f"{name}.right", factors.right, (rank, col_count))
    _check("finite", finite, (), torch.bool)
    _check("error", error, (row_count, col_count), *_ERROR_TYPES)
    _check("older", older, (row_count, col_count), error.dtype)
    _check("loss_scale", loss_scale, ())
    _check("excess", excess, ())
    first_row, last_row, step = rows.indices(row_count)
    if step != 1:
        raise ValueError(f"rows {rows}: must have step 1")
    if not 0 <= seed < 2**31:
        raise ValueError(f"seed {seed}: must be from 0 to 2^31 - 1")
    blocks = write_back_blocks(rank, _hopper(matrix.device))
    _write_back_kernel[(triton.cdiv(row_count, blocks["ROWS"]) * triton.cdiv(col_count, blocks["COLS"]),)](
        _view(matrix), _view(share.left), _view(share.right), _view(product.left), _view(product.right),
        finite, _view(older), _view(error), loss_scale, excess, float(waiting),
        row_count, col_count, rank, first_row, last_row, seed,
        WAITS=waiting > 0 and older is not None, **blocks,
    )  # fmt: skip


def write_back_blocks(rank: int, hopper: bool) -> dict[str, int]:
    """How ``write_back`` is compiled at a rank. Those for Hopper were fast on an H100 at ranks 64 and 128, and spill no
    registers (docs/bench/kernel_blocks.md).
    """
    if hopper and rank > 32:
        return {"RANKS": 32, "ROWS": 64, "COLS": 64, "num_warps": 4, "num_stages": 3}
    return {"RANKS": 16, "ROWS": 64, "COLS": 64, "num_warps": 8, "num_stages": 2}


@functools.cache
def _hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _check(name: str, tensor: Tensor | None, shape: tuple[int, ...], *types: torch.dtype) -> None:
    types = types or (torch.float32,)
    if tensor is not None and (tensor.shape != shape or tensor.dtype not in types):
        allowed = " or ".join(map(str, types))
        raise ValueError(f"{name} {tuple(tensor.shape)} {tensor.dtype}: must be {shape} of {allowed}")


def _view(matrix: Tensor | None) -> tuple[Tensor, int, int] | None:
    """What kernels take a matrix as."""
    return None if matrix is None else (matrix, matrix.stride(0), matrix.stride(1))
