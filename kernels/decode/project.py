"""Triton: the products of a decoding step, a few rows by a large matrix, and all around them.

    y = act(inv_rms * x W^T + b) + residual

for x (B, T, K) and W (N, K), in one launch. A program reads OUT rows of W once, and all of x. So it
can sum the squares of x along the way, and RMSNorm costs no launch. One row is multiplied and
summed in registers; more rows are padded to 16 or more, for the tensor cores. So the bits of a row
depend on how many there are, which is so of no other kernel here. The functions are those of
kernels/decode/reference.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import rows
from ..activation import is_gated, value
from ..reference import GATED
from . import overlap

ELEMENTS = 4096  # of W in registers at a time, for one row of x: 32 for each thread of 4 warps
PROGRAMS = 1024  # at least, several for each SM, so that enough loads are under way


@triton.jit
def load_weight(W, out, col, N: tl.constexpr, K: tl.constexpr):
    """(OUT, IN) of W, in its own type; zero beyond its end."""
    mask = (out < N)[:, None] & (col < K)[None, :]
    return tl.load(W + out.to(tl.int64)[:, None] * K + col[None, :], mask=mask, other=0.0)


@triton.jit
def finish(z, z_up, B, R, Y, row, out, valid, N: tl.constexpr, KIND: tl.constexpr):
    """Store act(z + b) + residual, (ROWS, OUT); of a gated KIND z_up is the other half."""
    if B is not None:
        z += rows.load_vector(B, out, N)
        if is_gated(KIND):
            z_up += rows.load_vector(B + N, out, N)
    if KIND != "":
        z = value(z, KIND)
    if is_gated(KIND):
        z = z * z_up
    mask = valid[:, None] & (out < N)[None, :]
    if R is not None:
        z += rows.load(R, row, out, N, mask)
    rows.store(Y, row, out, N, z, mask)


@triton.jit
def vector_kernel(
    X,
    W,
    B,
    R,
    INV,
    Y,
    INV_OUT,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    OWN: tl.constexpr,
    KIND: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """OUT outputs of a single row. For a gated KIND W is (2 N, K), gate then up."""
    out = tl.program_id(0) * OUT + tl.arange(0, OUT)
    lane = tl.arange(0, IN)
    # The first weights need nothing of the kernel before, so they are loaded while that one ends.
    w = load_weight(W, out, lane, N, K)
    if is_gated(KIND):
        w_up = load_weight(W + N * K, out, lane, N, K)
    overlap.wait(PDL)
    x = tl.load(X + lane, mask=lane < K, other=0.0).to(tl.float32)
    acc = w.to(tl.float32) * x[None, :]
    acc_up = tl.zeros((OUT, IN), tl.float32)
    if is_gated(KIND):
        acc_up = w_up.to(tl.float32) * x[None, :]
    squares = x * x
    for start in tl.range(IN, K, IN, num_stages=STAGES):
        col = start + lane
        x = tl.load(X + col, mask=col < K, other=0.0).to(tl.float32)
        acc += load_weight(W, out, col, N, K).to(tl.float32) * x[None, :]
        if is_gated(KIND):
            acc_up += load_weight(W + N * K, out, col, N, K).to(tl.float32) * x[None, :]
        if OWN:
            squares += x * x
    inv = 1.0
    if OWN:
        inv = tl.rsqrt(tl.sum(squares, 0) / K + tl.cast(eps, tl.float32))
        if tl.program_id(0) == 0:
            tl.store(INV_OUT, inv)
    elif INV is not None:
        inv = tl.load(INV)
    z = (tl.sum(acc, 1) * inv)[None, :]  # (1, OUT)
    z_up = (tl.sum(acc_up, 1) * inv)[None, :]
    row = tl.arange(0, 1)
    finish(z, z_up, B, R, Y, row, out, row < 1, N, KIND)


@triton.jit
def matrix_kernel(
    X,
    W,
    B,
    R,
    INV,
    Y,
    INV_OUT,
    eps,
    n_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    OWN: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """OUT outputs of each of ROWS rows."""
    overlap.wait(PDL)
    out = tl.program_id(0) * OUT + tl.arange(0, OUT)
    lane = tl.arange(0, IN)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    acc = tl.zeros((ROWS, OUT), tl.float32)
    acc_up = tl.zeros((ROWS, OUT), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    for start in tl.range(0, K, IN, num_stages=STAGES):
        col = start + lane
        mask = (row < n_rows)[:, None] & (col < K)[None, :]
        x = tl.load(X + row[:, None] * K + col[None, :], mask=mask, other=0.0)
        acc = tl.dot(x, load_weight(W, out, col, N, K).T, acc, input_precision="ieee")
        if is_gated(KIND):
            acc_up = tl.dot(
                x, load_weight(W + N * K, out, col, N, K).T, acc_up, input_precision="ieee"
            )
        if OWN:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
    valid = row < n_rows
    if OWN:
        inv = tl.rsqrt(squares / K + tl.cast(eps, tl.float32))
        if tl.program_id(0) == 0:
            tl.store(INV_OUT + row, inv, mask=valid)
    if INV is not None:
        inv = tl.load(INV + row, mask=valid, other=0.0)
    if OWN or INV is not None:
        acc = acc * inv[:, None]
        acc_up = acc_up * inv[:, None]
    finish(acc, acc_up, B, R, Y, row, out, valid, N, KIND)


def vector_tile(N: int, K: int, kind: str) -> tuple[int, int]:
    """Return (outputs, inputs) of a program's tile of W, for a single row of x.

    Enough programs come first, then wide loads.
    """
    elements = ELEMENTS // 2 if kind in GATED else ELEMENTS  # gate and up have a tile each
    inputs = min(triton.next_power_of_2(K), 2048)
    while inputs > 256 and K % inputs:  # avoid a last tile that is partly beyond the end
        inputs //= 2
    outputs = max(1, min(16, triton.next_power_of_2(N // PROGRAMS + 1) // 2))
    outputs = max(outputs, 1024 // inputs)
    return min(outputs, max(1, elements // inputs)), inputs


def project(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    inv_rms: Tensor | None = None,
    eps: float | None = None,
    kind: str = "",
) -> list[Tensor]:
    # inductor may hand over any strides
    x_rows = x.reshape(-1, x.shape[-1]).contiguous()
    n_rows, K = x_rows.shape
    N = weight.shape[0] // (2 if kind in GATED else 1)
    y = rows.empty((*x.shape[:-1], N), x.dtype, x.device)
    own = eps is not None
    taken = rows.empty((*x.shape[:-1], 1), torch.float32, x.device) if own else None
    arguments = {
        "X": x_rows,
        "W": weight,
        "B": bias,
        "R": rows.adjacent(residual),
        "INV": inv_rms,
        "Y": y,
        "INV_OUT": taken,
        "eps": eps or 0.0,
    }
    options = {"N": N, "K": K, "OWN": own, "KIND": kind, "num_warps": 4, **overlap.launch_options()}
    if n_rows == 1:
        outputs, inputs = vector_tile(N, K, kind)
        grid = (triton.cdiv(N, outputs),)
        options |= {"OUT": outputs, "IN": inputs, "STAGES": 3}
        rows.launch(vector_kernel, grid, x, **arguments, **options)
    else:
        tall = min(128, max(16, triton.next_power_of_2(n_rows)))  # rows of a tile
        options |= {"ROWS": tall, "OUT": 16, "STAGES": 4}
        options["IN"] = 128 if tall <= 32 else 64  # four stages of x and W fit into shared memory
        grid = (triton.cdiv(N, 16), triton.cdiv(n_rows, tall))
        rows.launch(matrix_kernel, grid, x, **arguments, n_rows=n_rows, **options)
    return [y] if taken is None else [y, taken]
