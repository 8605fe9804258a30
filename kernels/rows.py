"""What all Triton kernels share: how a tensor is split into tiles and programs, loads and stores.

A kernel works on tiles of (ROWS, COLUMNS) elements. A program of a forward kernel takes one row of
tiles. A program of a backward kernel goes through a chunk of rows, and leaves its part of the
gradients of gain and bias as one row of float32 partial sums: (programs, C). One more launch sums
all of these in a fixed order. There are no atomic additions, so the result has the same bits every
time.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.library import CustomOpDef

# The widest row that one tile holds. A backward kernel that held 16384 columns would spill. Beyond
# this width a kernel before it takes the sums over a row, so x and dy are read twice: 5 passes over
# (rows, C) instead of 3.
WHOLE = 8192
# Most columns of a tile of an activation and of a shared place, which reduce nothing: wider ones
# gain nothing.
NARROW = 1024
THREADS = 128  # of a program; more where a row is long
# The widest row of a forward kernel that one warp reduces by itself, without a barrier.
WARP_ROW = 1024
# Elements of a tile for each thread: one or two 128-bit loads of bfloat16. Backward kernels hold
# more tiles at a time, so theirs are smaller: at C = 768 on sm_90, 8 elements take 32 to 72
# registers a thread, and 16 took 80 to 127, some of which Triton 3.6 spilled.
FORWARD = 16
BACKWARD = 8
# Most warps of a backward kernel on each multiprocessor, in all its programs. With 64 registers a
# thread all of them are resident; of a kernel with more registers fewer are launched (`resident`).
WARPS_PER_SM = 32
# The fewest rows of a backward program. It leaves one row of float32 partial sums, which is as many
# bytes as two rows of bfloat16.
LEAST = 4
# Of the kernel that sums what these programs leave: the most gradients of gains and biases that an
# operator has, and the shape of its tile. Eight float32 columns are a sector of memory, 32 bytes;
# with so few, 768 channels are 96 programs. 512 rows are four loads of 128 bits for each thread.
SUMS = 2
SUM_COLUMNS = 8
SUM_ROWS = 512


class Work(NamedTuple):
    """How a kernel's work is split: row_tiles times column_tiles tiles."""

    row_tiles: int
    column_tiles: int
    meta: dict[str, int]  # arguments of every launch: the tile's shape (powers of two) and warps


def ceil_div(size: int, part: int) -> int:
    """Divide and round up; triton.cdiv takes some microseconds of the host."""
    return -(-size // part)


def split(
    x: Tensor,
    channels: int,
    each: int,
    widest: int = WHOLE,
    reduces: bool = False,
    most_warps: int = 16,
) -> Work:
    """Split the work on x (rows, ...) into tiles.

    A tile's shape does not depend on the number of rows, so neither do the bits of a row.

    Args:
        x: input.
        channels: elements that the tiles have to cover in each row and group.
        each: elements for each thread, FORWARD or BACKWARD.
        widest: most columns of a tile.
        reduces: is it a forward kernel with sums over a row?
        most_warps: of a program; the threads of a long row have more elements then.
    """
    width = min(1 << (int(channels) - 1).bit_length(), widest)
    height = max(1, THREADS * each // width)
    warps = min(most_warps, max(1, height * width // (32 * each)))
    at_once = 32 * 16 // x.dtype.itemsize  # elements that a warp loads in one instruction
    if reduces and at_once < width <= WARP_ROW:  # a row in one piece already needs no other warp
        height = 1
        warps = 1
    return Work(
        row_tiles=ceil_div(x.shape[0], height),
        column_tiles=ceil_div(channels, width),
        meta={"ROWS": height, "COLUMNS": width, "num_warps": warps},
    )


# ------------------------------------------------------------------------------- backward kernels


def resident(registers: int, warps: int, registers_per_sm: int) -> int:
    """Return how many programs of a backward kernel are launched for each multiprocessor.

    No more than it holds at a time: the rest would be a second, sparse wave. Their shared memory,
    some bytes for each warp, is no limit.

    Args:
        registers: of a thread.
        warps: of a program.
        registers_per_sm: of a multiprocessor, whose four parts have a quarter each.
    """
    of_a_warp = 32 * 8 * ceil_div(registers, 8)  # registers are given out by eights
    held = 4 * (registers_per_sm // 4 // of_a_warp)
    return max(1, min(held, WARPS_PER_SM) // warps)


@functools.cache
def programs(
    kernel: Any,
    types: tuple[tuple[str, Any], ...],
    constants: tuple[tuple[str, Any], ...],
    device: torch.device,
) -> int:
    """Return the number of programs of a backward kernel on `device`.

    Args:
        kernel: the kernel, which is compiled to know its registers.
        types: name and type of each argument that is not of compile time; None: there is none.
        constants: name and value of each one that is, and of the launch's options.
        device: of the tensors.
    """
    if device.type != "cuda":
        return 4  # for Triton's interpreter
    type_of = dict(types)
    # warmup takes types for tensors only where they are passed by position.
    signature = [type_of[name] for name in kernel.arg_names if name in type_of]
    with torch.cuda.device(device):  # it compiles and loads for the current one
        compiled = kernel.warmup(*signature, grid=(1,), **dict(constants))
        compiled._init_handles()  # loads it, and only then its registers are known
    properties = torch.cuda.get_device_properties(device)
    each = resident(
        compiled.n_regs, dict(constants)["num_warps"], properties.regs_per_multiprocessor
    )
    return each * properties.multi_processor_count


def launch_backward(
    kernel: Any,
    like: Tensor,
    work: Work,
    n_rows: int,
    tensors: dict[str, Tensor | None],
    strides: dict[str, int],
    parameters: dict[str, Tensor | None],
    groups: int = 1,
    **constants: Any,
) -> dict[str, Tensor | None]:
    """Launch a backward kernel over chunks of rows, and sum what its programs leave.

    A program gets at least LEAST rows, so that short inputs leave few partial sums, also on a large
    device.

    Args:
        kernel: its grid is (programs, groups, column tiles). Beside what follows it takes n_rows,
            and `chunk`, the rows of a program.
        like: a tensor of the device.
        work: what `split` returned.
        n_rows: rows of the input.
        tensors: arguments that it reads or fills.
        strides: arguments, from one row to the next.
        parameters: gains and biases (C,) whose gradients it sums over rows, by the names of the
            arguments that take its partial sums; None for a sum that is not wanted.
        groups: channel groups, each with programs of its own.
        constants: its compile-time arguments, but for the tile's shape.

    Returns:
        The gradients of the parameters (C,), in their types and by the same names.
    """
    constants = constants | work.meta
    # The types of the arguments, for a large aligned input: so the grid, which decides the order of
    # the sums, does not depend on the input that happens to come first.
    types = {name: None if tensor is None else tensor.dtype for name, tensor in tensors.items()}
    types |= {name: None if of is None else torch.float32 for name, of in parameters.items()}
    types |= dict.fromkeys(("n_rows", "chunk", *strides), 16)
    at_most = 1  # without a launch, of a fake tensor
    if not isinstance(like, FakeTensor):
        at_most = programs(kernel, tuple(types.items()), tuple(constants.items()), like.device)
    at_most = max(1, at_most // (groups * work.column_tiles))
    height = work.meta["ROWS"]
    tiles_each = max(ceil_div(LEAST, height), ceil_div(work.row_tiles, at_most))
    n_programs = ceil_div(work.row_tiles, tiles_each)
    sums = {
        name: None if of is None else empty((n_programs, len(of)), torch.float32, like.device)
        for name, of in parameters.items()
    }
    launch(
        kernel,
        (n_programs, groups, work.column_tiles),
        like,
        **tensors,
        **sums,
        n_rows=n_rows,
        chunk=tiles_each * height,
        **strides,
        **constants,
    )
    return sum_partial(sums, parameters)


def sum_partial(
    sums: dict[str, Tensor | None], parameters: dict[str, Tensor | None]
) -> dict[str, Tensor | None]:
    """Sum partial sums (programs, C) over programs, all in one launch, in a fixed order.

    Args:
        sums: at most SUMS, of one shape; None for those that there are not.
        parameters: of the same names, whose types the results (C,) get.
    """
    found = dict.fromkeys(sums)
    names = [name for name, partial in sums.items() if partial is not None]
    if not names:
        return found
    like = sums[names[0]]
    n_programs, channels = like.shape
    arguments = {}
    for i in range(SUMS):
        arguments[f"P{i}"] = None
        arguments[f"S{i}"] = None
    for i, name in enumerate(names):
        found[name] = empty((channels,), parameters[name].dtype, like.device)
        arguments[f"P{i}"] = sums[name]
        arguments[f"S{i}"] = found[name]
    launch(
        sum_kernel,
        (ceil_div(channels, SUM_COLUMNS), len(names)),
        like,
        **arguments,
        n_rows=n_programs,
        width=channels,
        ROWS=SUM_ROWS,
        COLUMNS=SUM_COLUMNS,
        num_warps=8,
    )
    return found


# ---------------------------------------------------------------------------------------- tensors


def as_rows(x: Tensor | None) -> Tensor | None:
    """Reshape (..., C) to (rows, C), with the elements of a row adjacent in memory.

    Returns a view where that is possible, else a copy; None for None.
    """
    if x is None:
        return None
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def adjacent(tensor: Tensor | None) -> Tensor | None:
    """Return a gain, a bias or a statistic with its elements adjacent in memory."""
    return None if tensor is None else tensor.contiguous()


def empty(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate memory for a kernel to fill.

    Every output is allocated here, so that a test can fill it with NaNs first.
    """
    return torch.empty(shape, dtype=dtype, device=device)


def stride(x: Tensor | None) -> int:
    """Return the number of elements from one row of x (rows, C) to the next; 0 for None."""
    return 0 if x is None else x.stride(0)


def operator(function: Callable, mutates: tuple[str, ...] = ()) -> CustomOpDef:
    """Make a launch function an operator, nanonorm::NAME: torch.compile does not look into it."""
    made = torch.library.custom_op(f"nanonorm::{function.__name__}", function, mutates_args=mutates)
    made.register_fake(function)  # see `launch`
    return made


def launch(kernel: Any, grid: tuple[int, ...], like: Tensor, **arguments: Any) -> None:
    """Launch a kernel on the GPU that holds `like`, with arguments and options by name.

    Where torch.compile only asks for the results' shapes (a fake `like`) nothing is launched. So a
    launch function is its own fake implementation.
    """
    if not isinstance(like, FakeTensor):
        with torch.cuda.device_of(like):  # on a CPU it does nothing
            kernel[grid](**arguments)


@triton.jit
def offsets(row, col, stride):
    """(ROWS, COLUMNS) element offsets, in 64 bits: a large batch has more than 2^31 elements."""
    return row.to(tl.int64)[:, None] * stride + col[None, :]


@triton.jit
def load(X, row, col, stride, mask):
    """Load a tile (ROWS, COLUMNS) in float32, with 0 where it reaches beyond the tensor."""
    return tl.load(X + offsets(row, col, stride), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store(Y, row, col, stride, value, mask):
    """Store a tile, rounded to the type of Y."""
    tl.store(Y + offsets(row, col, stride), value.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def load_gain(W, ROWS: tl.constexpr, col, size):
    """Load a gain or bias as (ROWS, COLUMNS) in float32, the same in each row.

    It has the shape of the stream's tiles, and so their layout. A vector, or a single row, would
    have another one, and Triton would bring it into theirs through shared memory, behind a barrier.
    """
    at = tl.zeros((ROWS,), tl.int32)[:, None] + col[None, :]
    return tl.load(W + at, mask=at < size, other=0.0).to(tl.float32)


@triton.jit
def load_vector(W, col, size):
    """Load a gain or bias as (1, COLUMNS) in float32: of a product, whose layout is not a row's."""
    return tl.load(W + col, mask=col < size, other=0.0).to(tl.float32)[None, :]


@triton.jit
def inverse_root(square, eps, COUNTED: tl.constexpr):
    """Compute 1 / sqrt(mean square + eps) of each row: equation 4 of Zhang & Sennrich 2019."""
    return tl.rsqrt(tl.sum(square, 1) / COUNTED + tl.cast(eps, tl.float32))


@triton.jit
def store_partial(P, program, col, size, width, value):
    """Store the sum over rows of a (ROWS, COLUMNS) tile in row `program` of P (programs, width)."""
    if P is not None:
        tl.store(P + program.to(tl.int64) * width + col, tl.sum(value, 0), mask=col < size)


@triton.jit
def sum_rows(P, S, n_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store in COLUMNS elements of S (width,) the sums of those columns of P (n_rows, width)."""
    col = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, n_rows, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < n_rows)[:, None] & (col < width)[None, :]
        total += load(P, row, col, width, mask)
    tl.store(S + col, tl.sum(total, 0).to(S.dtype.element_ty), mask=col < width)


@triton.jit
def sum_kernel(P0, S0, P1, S1, n_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum P0 into S0 and P1, if it is there, into S1: the second axis of the grid says which."""
    if tl.program_id(1) == 0:
        sum_rows(P0, S0, n_rows, width, ROWS, COLUMNS)
    elif P1 is not None:
        sum_rows(P1, S1, n_rows, width, ROWS, COLUMNS)
