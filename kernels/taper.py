"""Triton kernels of TaperNorm, g RMSNorm(h) + (1 - g) c h w_tilde, one pass in each direction.

The kernels read the gate g and the scale c from device memory, so that a gate that changes causes
neither a compilation nor a wait for the host.

The functions have the signatures of reference.py, which says what they compute. Long rows are
treated as in row_norm.py, and kernel arguments are named as there. WT is w_tilde, and GATE_C holds
g and c.
"""

import torch
import triton
import triton.language as tl

from . import rows
from .row_norm import row_sums
from .rows import load, load_vector, store, store_partial


@triton.jit
def write(Y, W, WT, h, inv, gate, rest, row, col, mask, C: tl.constexpr):
    """Store y = g (h inv w) + rest (h w_tilde), with rest = (1 - g) c."""
    normed = h * inv[:, None]
    if W is not None:
        normed = normed * load_vector(W, col, C)
    if WT is not None:
        h = h * load_vector(WT, col, C)
    store(Y, row, col, C, gate * normed + rest * h, mask)


@triton.jit
def forward_kernel(
    X,
    W,
    WT,
    GATE_C,
    Y,
    INV,
    n_rows,
    x_stride,
    eps,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute y and inv for a tile of rows. W and WT may be None."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    gate = tl.load(GATE_C)
    rest = (1.0 - gate) * tl.load(GATE_C + 1)
    if COLUMNS >= C:  # one tile holds whole rows
        col = tl.arange(0, COLUMNS)
        mask = (row < n_rows)[:, None] & (col < C)[None, :]
        h = load(X, row, col, x_stride, mask)
        inv = tl.rsqrt(tl.sum(h * h, 1) / C + tl.cast(eps, tl.float32))
        write(Y, W, WT, h, inv, gate, rest, row, col, mask, C)
    else:  # one pass over the row for the square, one for the result
        square = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, C, COLUMNS):
            col = start + tl.arange(0, COLUMNS)
            mask = (row < n_rows)[:, None] & (col < C)[None, :]
            h = load(X, row, col, x_stride, mask)
            square += h * h
        inv = tl.rsqrt(tl.sum(square, 1) / C + tl.cast(eps, tl.float32))
        for start in range(0, C, COLUMNS):
            col = start + tl.arange(0, COLUMNS)
            mask = (row < n_rows)[:, None] & (col < C)[None, :]
            h = load(X, row, col, x_stride, mask)
            write(Y, W, WT, h, inv, gate, rest, row, col, mask, C)
    tl.store(INV + row, inv, mask=row < n_rows)


@triton.jit
def backward_kernel(
    DY,
    X,
    W,
    WT,
    GATE_C,
    INV,
    DOT,
    DX,
    DW,
    DWT,
    n_rows,
    chunk,
    dy_stride,
    x_stride,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the gradients for one chunk of rows and one tile of columns.

    The formulas are in reference.taper_norm_backward. W, WT, DW and DWT may be None. DOT, which is
    <dy w, v>, is given where a row has several tiles, else None.
    """
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    gate = tl.load(GATE_C)
    rest = (1.0 - gate) * tl.load(GATE_C + 1)
    if W is not None:
        w = load_vector(W, col, C)
    if WT is not None:
        wt = load_vector(WT, col, C)
    dw = tl.zeros((ROWS, COLUMNS), tl.float32)
    dwt = tl.zeros((ROWS, COLUMNS), tl.float32)
    begin = tl.program_id(0) * chunk
    for start in range(begin, tl.minimum(begin + chunk, n_rows), ROWS):
        row = start + tl.arange(0, ROWS)
        valid = row < n_rows
        mask = valid[:, None] & (col < C)[None, :]
        inv = tl.load(INV + row, mask=valid, other=0.0)
        h = load(X, row, col, x_stride, mask)
        dy = load(DY, row, col, dy_stride, mask)
        v = h * inv[:, None]
        u = dy
        fixed = dy
        if DW is not None:
            dw += dy * v
        if W is not None:
            u = dy * w
        if DWT is not None:
            dwt += dy * h
        if WT is not None:
            fixed = dy * wt
        dot = tl.load(DOT + row, mask=valid, other=0.0) if DOT is not None else tl.sum(u * v, 1)
        normed = (u - v * (dot / C)[:, None]) * inv[:, None]
        store(DX, row, col, C, gate * normed + rest * fixed, mask)
    if DW is not None:
        store_partial(DW, tl.program_id(0), col, C, C, gate * dw)
    if DWT is not None:
        store_partial(DWT, tl.program_id(0), col, C, C, rest * dwt)


def taper_norm(h, w, w_tilde, gate_c, eps):
    """Compute reference.taper_norm."""
    channels = h.shape[-1]
    y = rows.empty(h.shape, h.dtype, h.device)
    inv_rms = rows.empty((*h.shape[:-1], 1), torch.float32, h.device)
    x = rows.as_rows(h)
    work = rows.split(x, channels, rows.FORWARD)
    with rows.on_device(x):
        forward_kernel[(work.row_tiles,)](
            x,
            rows.vector(w),
            rows.vector(w_tilde),
            gate_c.float().contiguous(),
            y,
            inv_rms,
            x.shape[0],
            rows.stride(x),
            eps,
            C=channels,
            **work.meta,
        )
    return y, inv_rms


def taper_norm_backward(dy, h, w, w_tilde, gate_c, inv_rms, gains):
    """Compute reference.taper_norm_backward."""
    channels = h.shape[-1]
    dx = rows.empty(h.shape, h.dtype, h.device)
    dy = rows.as_rows(dy)
    x = rows.as_rows(h)
    w = rows.vector(w)
    w_tilde = rows.vector(w_tilde)
    work = rows.split(x, channels, rows.BACKWARD)
    dw = rows.partial_sums(work.programs, w, gains)
    dwt = rows.partial_sums(work.programs, w_tilde, gains)
    with rows.on_device(x):
        dot, _ = row_sums(dy, x, w, None, inv_rms, channels, work)
        backward_kernel[(work.programs, work.column_tiles)](
            dy,
            x,
            w,
            w_tilde,
            gate_c.float().contiguous(),
            inv_rms,
            dot,
            dx,
            dw,
            dwt,
            x.shape[0],
            work.chunk,
            rows.stride(dy),
            rows.stride(x),
            C=channels,
            **work.meta,
        )
    return dx, rows.sum_partials(dw, w, h), rows.sum_partials(dwt, w_tilde, h)
