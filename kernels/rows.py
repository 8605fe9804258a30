"""What all Triton kernels share: rows of a tensor, the shape of a tile, how many programs, loads.

A kernel works on tiles of (ROWS, COLUMNS) elements. Forward kernels take one tile (or one row of
tiles) a program. Backward kernels walk down a chunk of rows, and leave the gradients of gain and
bias as one float32 row of partial sums a program: (programs, C), summed by one more pass in a fixed
order. No atomics, so the same bits every time.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# widest row that one tile holds; an untiled backward of 16384 columns spills registers
WHOLE = 8192
THREADS = 128  # of a program, or more where a row is long
# elements a thread: one or two 128-bit loads of bfloat16. Backward kernels hold more of them
FORWARD, BACKWARD = 16, 8
# of a backward kernel, in all its programs: all resident at 64 registers a thread (84: 24 of them)
WARPS_PER_SM = 32
# rows of a backward program: one leaves a row of float32 partial sums, as many bytes as two
# bfloat16 rows
LEAST = 4


class Tile(NamedTuple):
    """Rows and columns of a tile (powers of two), and the warps that work on it."""

    rows: int
    columns: int
    warps: int


class Work(NamedTuple):
    """How a kernel's work is split: tiles down and across, or programs that walk down `chunk` rows
    each.
    """

    row_tiles: int
    column_tiles: int
    programs: int
    chunk: int
    meta: dict[str, int]  # of every launch: the tile's shape and the warps on it


def tile(columns: int, each: int, widest: int = WHOLE) -> Tile:
    """The tile for rows of `columns` elements, at most `widest` at a time and `each` a thread."""
    width = min(triton.next_power_of_2(columns), widest)
    rows = max(1, THREADS * each // width)
    return Tile(rows, width, min(16, max(1, rows * width // (32 * each))))


@functools.cache
def programs(device: torch.device, warps: int) -> int:
    """Programs of `warps` warps that a backward kernel is spread over.

    The CPU's number is for the interpreter.
    """
    if device.type != "cuda":
        return 4
    return (
        max(1, WARPS_PER_SM // warps)
        * torch.cuda.get_device_properties(device).multi_processor_count
    )


def chunks(n_rows: int, shape: Tile, beside: int, device: torch.device) -> tuple[int, int]:
    """(programs, rows of each) that cover n_rows with tiles of `shape`; `beside` programs share
    each chunk of rows.

    Never fewer than LEAST rows each, so that short inputs leave few partial sums on however large a
    device.
    """
    tiles = triton.cdiv(n_rows, shape.rows)
    spread = triton.cdiv(tiles, max(1, programs(device, shape.warps) // beside))
    each = max(triton.cdiv(LEAST, shape.rows), spread)
    return triton.cdiv(tiles, each), each * shape.rows


def split(x: Tensor, channels: int, each: int, widest: int = WHOLE, groups: int = 1) -> Work:
    """The work on x (rows, ...) in tiles of `each` elements a thread, at most `widest` of the
    `channels` across.
    """
    shape = tile(channels, each, widest)
    row_tiles, column_tiles = (
        triton.cdiv(x.shape[0], shape.rows),
        triton.cdiv(channels, shape.columns),
    )
    meta = {"ROWS": shape.rows, "COLUMNS": shape.columns, "num_warps": shape.warps}
    return Work(
        row_tiles, column_tiles, *chunks(x.shape[0], shape, groups * column_tiles, x.device), meta
    )


def as_rows(x: Tensor | None) -> Tensor | None:
    """(..., C) -> (rows, C) with unit stride along C: a view where there is one, else a copy. None
    for None.
    """
    if x is None:
        return None
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def empty(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for a kernel to fill. Every output comes from here, so that a test can poison it."""
    return torch.empty(shape, dtype=dtype, device=device)


def stride(x: Tensor | None) -> int:
    """Elements from one row of x (rows, C) to the next; of no consequence for None."""
    return 0 if x is None else x.stride(0)


def outputs(x: Tensor, a: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(y, h) for a kernel to fill, of the type of h = x + a; without a there is no h."""
    dtype = x.dtype if a is None else torch.promote_types(x.dtype, a.dtype)
    return empty(x.shape, dtype, x.device), None if a is None else empty(x.shape, dtype, x.device)


def partial_sums(n_programs: int, like: Tensor | None, wanted: bool) -> Tensor | None:
    """(programs, C) float32 for the gradient of a (C,) parameter; None if there is none, or it is
    not wanted.
    """
    return (
        None
        if like is None or not wanted
        else empty((n_programs, like.shape[0]), torch.float32, like.device)
    )


def sum_partials(partials: Tensor | None, like: Tensor | None, x: Tensor) -> Tensor:
    """(programs, C) -> (C,) in the parameter's type; for None a tensor without elements, as in
    reference.
    """
    return (
        x.new_empty(0, dtype=torch.float32) if partials is None else partials.sum(0).to(like.dtype)
    )


def vector(parameter: Tensor | None) -> Tensor | None:
    """A gain or bias (C,), adjacent in memory."""
    return None if parameter is None else parameter.contiguous()


# with on_device(x): launches go to the GPU that holds x; nothing on a CPU
on_device = torch.cuda.device_of


@triton.jit
def offsets(row, col, stride):
    """(ROWS, COLUMNS) element offsets, in 64 bits: a large batch has more than 2^31 elements."""
    return row.to(tl.int64)[:, None] * stride + col[None, :]


@triton.jit
def load(X, row, col, stride, mask):
    """A tile in float32, zero where it reaches beyond the tensor."""
    return tl.load(X + offsets(row, col, stride), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_sum(X, A, H, row, col, x_stride, a_stride, mask):
    """A tile of x, or of h = x + a rounded to the type of h, in float32."""
    h = load(X, row, col, x_stride, mask)
    if A is not None:
        h = (h + load(A, row, col, a_stride, mask)).to(H.dtype.element_ty).to(tl.float32)
    return h


@triton.jit
def store(Y, row, col, stride, value, mask):
    """A tile, rounded to the type of Y."""
    tl.store(Y + offsets(row, col, stride), value.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def load_vector(W, col, size):
    """(1, COLUMNS) of a gain or bias in float32."""
    return tl.load(W + col, mask=col < size, other=0.0).to(tl.float32)[None, :]


@triton.jit
def store_partial(P, program, col, size, width, value):
    """Store the sum over rows of a (ROWS, COLUMNS) tile in row `program` of P (programs, width)."""
    tl.store(P + program.to(tl.int64) * width + col, tl.sum(value, 0), mask=col < size)
