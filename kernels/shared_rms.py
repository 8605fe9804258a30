"""Triton kernels of CoupledNorm's shared position: a row's statistic is given, and a constant.

So there is no reduction over the channels, neither forward nor backward. No program needs a whole
row, and no thread waits for another (Loretz & Hochreiter 2026, section 4.3). Only the gradient of
the gain is a sum, over rows, within a thread.

The functions have the signatures of reference.py, which says what they compute. Kernel arguments
are named as in row_norm.py.
"""

import triton
import triton.language as tl
from torch import Tensor

from . import rows
from .rows import load, load_sum, load_vector, store, store_partial

WIDEST = 1024  # most columns of a tile; without a reduction, wider tiles gain nothing


@triton.jit
def forward_kernel(
    X,
    A,
    INV,
    W,
    Y,
    H,
    n_rows,
    x_stride,
    a_stride,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute y = h inv w for one tile, with h = x + a where A is not None (equation 6)."""
    # Columns are divided among programs too: no program needs the rest of a row.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid = row < n_rows
    mask = valid[:, None] & (col < C)[None, :]
    h = load_sum(X, A, H, row, col, x_stride, a_stride, mask)  # (ROWS, COLUMNS)
    if H is not None:
        store(H, row, col, C, h, mask)
    y = h * tl.load(INV + row, mask=valid, other=0.0)[:, None]
    if W is not None:
        y = y * load_vector(W, col, C)
    store(Y, row, col, C, y, mask)


@triton.jit
def backward_kernel(
    DY,
    DH,
    H,
    INV,
    W,
    DX,
    DW,
    n_rows,
    chunk,
    dy_stride,
    dh_stride,
    h_stride,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute dx = q w + dh and dw = sum of q h, with q = dy inv, for one chunk of rows.

    DH, W and DW may be None.
    """
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if W is not None:
        w = load_vector(W, col, C)
    dw = tl.zeros((ROWS, COLUMNS), tl.float32)  # its sum over rows stays in registers
    begin = tl.program_id(0) * chunk
    for start in range(begin, tl.minimum(begin + chunk, n_rows), ROWS):
        row = start + tl.arange(0, ROWS)
        valid = row < n_rows
        mask = valid[:, None] & (col < C)[None, :]
        # The long loads come before the short one, or 8 bytes of registers spill with a float32
        # stream on sm_90, at C = 768.
        dx = load(DY, row, col, dy_stride, mask)
        if DW is not None:
            h = load(H, row, col, h_stride, mask)
        dx = dx * tl.load(INV + row, mask=valid, other=0.0)[:, None]  # q
        if DW is not None:
            dw += dx * h
        if W is not None:
            dx = dx * w
        if DH is not None:  # h goes on as the residual stream as well
            dx += load(DH, row, col, dh_stride, mask)
        store(DX, row, col, C, dx, mask)
    if DW is not None:
        store_partial(DW, tl.program_id(0), col, C, C, dw)


def _forward(
    x: Tensor, a: Tensor | None, inv_rms: Tensor, w: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Launch the forward kernel; return (y, h), with h None where a is."""
    channels = x.shape[-1]
    y, h = rows.outputs(x, a)
    x = rows.as_rows(x)
    a = rows.as_rows(a)
    work = rows.split(x, channels, rows.FORWARD, WIDEST)
    with rows.on_device(x):
        forward_kernel[(work.row_tiles, work.column_tiles)](
            x,
            a,
            inv_rms.contiguous(),
            rows.vector(w),
            y,
            h,
            x.shape[0],
            rows.stride(x),
            rows.stride(a),
            C=channels,
            **work.meta,
        )
    return y, h


def shared_rms_scale(h, inv_rms, w):
    """Compute reference.shared_rms_scale."""
    y, _ = _forward(h, None, inv_rms, w)
    return y


def add_shared_rms_scale(x, a, inv_rms, w):
    """Compute reference.add_shared_rms_scale."""
    return _forward(x, a, inv_rms, w)


def shared_rms_scale_backward(dy, dh, h, inv_rms, w, gains):
    """Compute reference.shared_rms_scale_backward."""
    channels = h.shape[-1]
    dx = rows.empty(h.shape, h.dtype, h.device)
    dy = rows.as_rows(dy)
    dh = rows.as_rows(dh)
    h = rows.as_rows(h)
    work = rows.split(h, channels, rows.BACKWARD, WIDEST)
    # (programs, C), summed over programs at the end
    dw = rows.partial_sums(work.programs, w, gains)
    with rows.on_device(h):
        backward_kernel[(work.programs, work.column_tiles)](
            dy,
            dh,
            h,
            inv_rms.contiguous(),
            rows.vector(w),
            dx,
            dw,
            h.shape[0],
            work.chunk,
            rows.stride(dy),
            rows.stride(dh),
            rows.stride(h),
            C=channels,
            **work.meta,
        )
    return dx, rows.sum_partials(dw, w, h)
