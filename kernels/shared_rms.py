"""CoupledNorm's shared position: a row's statistic is known already, and a constant.

So there is no reduction over the channels, neither forward nor backward: no program needs a whole row, columns are
tiled freely, and no thread waits for another (section 4.3 of Loretz & Hochreiter 2026). Only the gradient of the gain
sums, over rows, within a thread. Functions have the signatures of kernels/reference.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import rows
from kernels.rows import load, load_sum, load_vector, store, store_partial, tile

WIDEST = 1024  # columns of a tile; narrow, because nothing is gained by wide ones


@triton.jit
def forward_kernel(
    X, A, INV, W, Y, H, n_rows, x_stride, a_stride, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """y = h inv w, with h = x + a where A is not None."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid = row < n_rows
    mask = valid[:, None] & (col < C)[None, :]
    h = load_sum(X, A, H, row, col, x_stride, a_stride, mask)
    if H is not None:
        store(H, row, col, C, h, mask)
    y = h * tl.load(INV + row, mask=valid, other=0.0)[:, None]
    if W is not None:
        y = y * load_vector(W, col, C)
    store(Y, row, col, C, y, mask)


@triton.jit
def backward_kernel(
    DY, DH, H, INV, W, DX, DW, n_rows, chunk, dy_stride, dh_stride, h_stride,
    C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """With q = dy inv: dx = q w + dh, dw = sum of q h over the rows of a chunk."""
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if W is not None:
        w = load_vector(W, col, C)
    dw = tl.zeros((ROWS, COLUMNS), tl.float32)
    begin = tl.program_id(0) * chunk
    for start in range(begin, tl.minimum(begin + chunk, n_rows), ROWS):
        row = start + tl.arange(0, ROWS)
        valid = row < n_rows
        mask = valid[:, None] & (col < C)[None, :]
        dx = load(DY, row, col, dy_stride, mask)  # long loads before the short one: else float32 spills on sm_90
        if W is not None:
            h = load(H, row, col, h_stride, mask)
        dx = dx * tl.load(INV + row, mask=valid, other=0.0)[:, None]
        if W is not None:
            dw += dx * h
            dx = dx * w
        if DH is not None:
            dx += load(DH, row, col, dh_stride, mask)
        store(DX, row, col, C, dx, mask)
    if W is not None:
        store_partial(DW, tl.program_id(0), col, C, C, dw)


def _forward(x: Tensor, a: Tensor | None, inv_rms: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor | None]:
    x_rows, a_rows = rows.as_rows(x), None if a is None else rows.as_rows(a)
    n_rows, channels = x_rows.shape
    dtype = x.dtype if a is None else torch.promote_types(x.dtype, a.dtype)
    y = rows.empty(x.shape, dtype, x.device)
    h = None if a is None else rows.empty(x.shape, dtype, x.device)
    shape = tile(channels, rows.FORWARD, WIDEST)
    with rows.on_device(x):
        forward_kernel[(triton.cdiv(n_rows, shape.rows), triton.cdiv(channels, shape.columns))](
            x_rows, a_rows, inv_rms.contiguous(), rows.vector(w), y, h, n_rows, x_rows.stride(0),
            0 if a is None else a_rows.stride(0), C=channels, ROWS=shape.rows, COLUMNS=shape.columns,
            num_warps=shape.warps,
        )  # fmt: skip
    return y, h


def shared_rms_scale(h, inv_rms, w):
    return _forward(h, None, inv_rms, w)[0]


def add_shared_rms_scale(x, a, inv_rms, w):
    return _forward(x, a, inv_rms, w)


def shared_rms_scale_backward(dy, dh, h, inv_rms, w):
    dy, h_rows, dh = rows.as_rows(dy), rows.as_rows(h), None if dh is None else rows.as_rows(dh)
    n_rows, channels = h_rows.shape
    shape = tile(channels, rows.BACKWARD, WIDEST)
    column_tiles = triton.cdiv(channels, shape.columns)
    n_programs, chunk = rows.chunks(n_rows, shape, column_tiles, h.device)
    dx, dw = rows.empty(h.shape, h.dtype, h.device), rows.partial_sums(n_programs, w)
    with rows.on_device(h):
        backward_kernel[(n_programs, column_tiles)](
            dy, dh, h_rows, inv_rms.contiguous(), rows.vector(w), dx, dw, n_rows, chunk, dy.stride(0),
            0 if dh is None else dh.stride(0), h_rows.stride(0), C=channels, ROWS=shape.rows, COLUMNS=shape.columns,
            num_warps=shape.warps,
        )  # fmt: skip
    return dx, rows.sum_partials(dw, w, h)
