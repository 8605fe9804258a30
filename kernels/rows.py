"""What all Triton kernels share: how a tensor is split into tiles and programs, loads and stores.

A kernel works on tiles of (ROWS, COLUMNS) elements. A program of a forward kernel takes one tile,
or one row of tiles. A program of a backward kernel goes through a chunk of rows, and leaves its
part of the gradients of gain and bias as one row of float32 partial sums: (programs, C). One more
pass sums these in a fixed order. There are no atomic additions, so the result has the same bits
every time.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# The widest row that one tile holds. A backward kernel that held 16384 columns would spill. Beyond
# this width a kernel before it takes the sums over a row, so x and dy are read twice: 5 passes over
# (rows, C) instead of 3.
WHOLE = 8192
THREADS = 128  # of a program; more where a row is long
# Elements of a tile for each thread: one or two 128-bit loads of bfloat16. Backward kernels hold
# more tiles at a time, so theirs are smaller: at C = 768 on sm_90, 8 elements take 32 to 72
# registers a thread, and 16 took 80 to 127, some of which Triton 3.6 spilled.
FORWARD = 16
BACKWARD = 8
# Warps of a backward kernel on each multiprocessor, in all its programs. With 64 registers a thread
# all of them are resident (with 84, 24 of them).
WARPS_PER_SM = 32
# The fewest rows of a backward program. It leaves one row of float32 partial sums, which is as many
# bytes as two rows of bfloat16.
LEAST = 4


class Tile(NamedTuple):
    """The shape of a tile (powers of two), and the warps that work on it."""

    rows: int
    columns: int
    warps: int


class Chunks(NamedTuple):
    """How the rows are split among the programs of a backward kernel."""

    programs: int
    rows: int  # of each program


class Work(NamedTuple):
    """How a kernel's work is split.

    A forward kernel has row_tiles times column_tiles programs. A backward kernel has `programs`
    times column_tiles, each for `chunk` rows.
    """

    row_tiles: int
    column_tiles: int
    programs: int
    chunk: int
    meta: dict[str, int]  # arguments of every launch: the tile's shape and warps


def tile(columns: int, each: int, widest: int = WHOLE) -> Tile:
    """Choose the tile for rows of `columns` elements.

    Args:
        columns: elements of a row.
        each: elements for each thread.
        widest: most columns of a tile.
    """
    width = min(triton.next_power_of_2(columns), widest)
    height = max(1, THREADS * each // width)
    elements_per_warp = 32 * each
    warps = min(16, max(1, height * width // elements_per_warp))
    return Tile(height, width, warps)


@functools.cache
def programs(device: torch.device, warps: int) -> int:
    """Return the number of programs, of `warps` warps each, that a backward kernel aims at."""
    if device.type != "cuda":
        return 4  # for Triton's interpreter
    n_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, WARPS_PER_SM // warps) * n_multiprocessors


def chunks(n_rows: int, shape: Tile, sharing: int, device: torch.device) -> Chunks:
    """Split n_rows among the programs of a backward kernel.

    A program gets at least LEAST rows, so that short inputs leave few partial sums, also on a large
    device.

    Args:
        n_rows: rows of the input.
        shape: the tile.
        sharing: programs that share each chunk of rows, for other groups or columns.
        device: that the kernel runs on.
    """
    n_tiles = triton.cdiv(n_rows, shape.rows)
    n_chunks = max(1, programs(device, shape.warps) // sharing)
    least_tiles = triton.cdiv(LEAST, shape.rows)
    tiles_each = max(least_tiles, triton.cdiv(n_tiles, n_chunks))
    return Chunks(triton.cdiv(n_tiles, tiles_each), tiles_each * shape.rows)


def split(x: Tensor, channels: int, each: int, widest: int = WHOLE, groups: int = 1) -> Work:
    """Split the work on x into tiles and programs.

    Args:
        x: input (rows, ...).
        channels: elements that the tiles have to cover in each row and group.
        each: elements for each thread, FORWARD or BACKWARD.
        widest: most columns of a tile.
        groups: channel groups, each with programs of its own.
    """
    n_rows = x.shape[0]
    shape = tile(channels, each, widest)
    column_tiles = triton.cdiv(channels, shape.columns)
    chunk = chunks(n_rows, shape, groups * column_tiles, x.device)
    return Work(
        row_tiles=triton.cdiv(n_rows, shape.rows),
        column_tiles=column_tiles,
        programs=chunk.programs,
        chunk=chunk.rows,
        meta={"ROWS": shape.rows, "COLUMNS": shape.columns, "num_warps": shape.warps},
    )


def as_rows(x: Tensor | None) -> Tensor | None:
    """Reshape (..., C) to (rows, C), with the elements of a row adjacent in memory.

    Returns a view where that is possible, else a copy; None for None.
    """
    if x is None:
        return None
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def empty(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate memory for a kernel to fill.

    Every output is allocated here, so that a test can fill it with NaNs first.
    """
    return torch.empty(shape, dtype=dtype, device=device)


def stride(x: Tensor | None) -> int:
    """Return the number of elements from one row of x (rows, C) to the next; 0 for None."""
    return 0 if x is None else x.stride(0)


def outputs(x: Tensor, a: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Allocate y and h = x + a, in the type of h; h is None where a is."""
    if a is None:
        return empty(x.shape, x.dtype, x.device), None
    dtype = torch.promote_types(x.dtype, a.dtype)
    y = empty(x.shape, dtype, x.device)
    h = empty(x.shape, dtype, x.device)
    return y, h


def partial_sums(n_programs: int, parameter: Tensor | None, wanted: bool) -> Tensor | None:
    """Allocate float32 partial sums (programs, C) for the gradient of a parameter (C,).

    Returns None where there is no parameter or no gradient is wanted.
    """
    if parameter is None or not wanted:
        return None
    return empty((n_programs, parameter.shape[0]), torch.float32, parameter.device)


def sum_partials(partials: Tensor | None, parameter: Tensor | None, x: Tensor) -> Tensor:
    """Sum partial sums (programs, C) -> (C,), in the parameter's type.

    Returns a tensor without elements for None, as reference.py does.
    """
    if partials is None:
        return x.new_empty(0, dtype=torch.float32)
    return partials.sum(0).to(parameter.dtype)


def vector(parameter: Tensor | None) -> Tensor | None:
    """Return a gain or bias (C,) with its elements adjacent in memory."""
    return None if parameter is None else parameter.contiguous()


# `with on_device(x)` sends launches to the GPU that holds x; on a CPU it does nothing.
on_device = torch.cuda.device_of


@triton.jit
def offsets(row, col, stride):
    """(ROWS, COLUMNS) element offsets, in 64 bits: a large batch has more than 2^31 elements."""
    return row.to(tl.int64)[:, None] * stride + col[None, :]


@triton.jit
def load(X, row, col, stride, mask):
    """Load a tile (ROWS, COLUMNS) in float32, with 0 where it reaches beyond the tensor."""
    return tl.load(X + offsets(row, col, stride), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_sum(X, A, H, row, col, x_stride, a_stride, mask):
    """Load a tile of x, or of h = x + a rounded to the type of h, in float32."""
    h = load(X, row, col, x_stride, mask)
    if A is not None:
        h = (h + load(A, row, col, a_stride, mask)).to(H.dtype.element_ty).to(tl.float32)
    return h


@triton.jit
def store(Y, row, col, stride, value, mask):
    """Store a tile, rounded to the type of Y."""
    tl.store(Y + offsets(row, col, stride), value.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def load_vector(W, col, size):
    """Load a gain or bias as (1, COLUMNS) in float32."""
    return tl.load(W + col, mask=col < size, other=0.0).to(tl.float32)[None, :]


@triton.jit
def store_partial(P, program, col, size, width, value):
    """Store the sum over rows of a (ROWS, COLUMNS) tile in row `program` of P (programs, width)."""
    tl.store(P + program.to(tl.int64) * width + col, tl.sum(value, 0), mask=col < size)
