"""RMSNorm, add + RMSNorm and LayerNorm: one forward and one backward kernel; LayerNorm only centres
as well.

Functions here have the signatures of kernels/reference.py, which says what they compute.

Rows of at most WHOLE channels are held in registers. Longer ones are read tile by tile: the forward
program goes over its row once more for each statistic (from cache), and the backward takes <u, v>
and sum(u) from a kernel that runs before it. Groups are programs side by side, so that the plain
norms pay nothing for them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import rows
from .rows import load, load_sum, load_vector, store, store_partial


@triton.jit
def forward_kernel(
    X,
    A,
    W,
    B,
    Y,
    H,
    MEAN,
    INV,
    n_rows,
    x_stride,
    a_stride,
    eps,
    C: tl.constexpr,
    COUNTED: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """C channels of each of GROUPS groups; A and H for the residual add, MEAN for LayerNorm, else
    None.
    """
    group = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = group * C
    if COLUMNS >= C:
        col = tl.arange(0, COLUMNS)
        mask = (row < n_rows)[:, None] & (col < C)[None, :]
        h = load_sum(X, A, H, row, first + col, x_stride, a_stride, mask)
        v = h
        if MEAN is not None:
            mean = tl.sum(h, 1) / C
            v = tl.where((col < C)[None, :], h - mean[:, None], 0.0)
        inv = tl.rsqrt(
            tl.sum(counted_square(v, col, C, COUNTED), 1) / COUNTED + tl.cast(eps, tl.float32)
        )
        write(Y, H, W, B, h, v * inv[:, None], row, col, first, mask, C, GROUPS)
    else:
        if MEAN is not None:
            total = tl.zeros((ROWS, COLUMNS), tl.float32)
            for start in range(0, C, COLUMNS):
                col = start + tl.arange(0, COLUMNS)
                mask = (row < n_rows)[:, None] & (col < C)[None, :]
                total += load_sum(X, A, H, row, first + col, x_stride, a_stride, mask)
            mean = tl.sum(total, 1) / C
        square = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, C, COLUMNS):
            col = start + tl.arange(0, COLUMNS)
            mask = (row < n_rows)[:, None] & (col < C)[None, :]
            v = load_sum(X, A, H, row, first + col, x_stride, a_stride, mask)
            if MEAN is not None:
                v = tl.where((col < C)[None, :], v - mean[:, None], 0.0)
            square += counted_square(v, col, C, COUNTED)
        inv = tl.rsqrt(tl.sum(square, 1) / COUNTED + tl.cast(eps, tl.float32))
        for start in range(0, C, COLUMNS):
            col = start + tl.arange(0, COLUMNS)
            mask = (row < n_rows)[:, None] & (col < C)[None, :]
            h = load_sum(X, A, H, row, first + col, x_stride, a_stride, mask)
            v = h
            if MEAN is not None:
                v = h - mean[:, None]
            write(Y, H, W, B, h, v * inv[:, None], row, col, first, mask, C, GROUPS)
    if MEAN is not None:
        tl.store(MEAN + row, mean, mask=row < n_rows)
    tl.store(INV + row.to(tl.int64) * GROUPS + group, inv, mask=row < n_rows)


@triton.jit
def counted_square(v, col, C: tl.constexpr, COUNTED: tl.constexpr):
    """v^2, zero beyond the counted channels (partial RMSNorm)."""
    if COUNTED < C:
        v = tl.where((col < COUNTED)[None, :], v, 0.0)
    return v * v


@triton.jit
def write(Y, H, W, B, h, v, row, col, first, mask, C: tl.constexpr, GROUPS: tl.constexpr):
    """The residual h, where it is new, and y = v w + b."""
    if H is not None:
        store(H, row, first + col, C * GROUPS, h, mask)
    if W is not None:
        v = v * load_vector(W + first, col, C)
    if B is not None:
        v = v + load_vector(B + first, col, C)
    store(Y, row, first + col, C * GROUPS, v, mask)


@triton.jit
def dots_kernel(
    DY,
    X,
    W,
    MEAN,
    INV,
    DOT,
    SUM,
    n_rows,
    dy_stride,
    x_stride,
    C: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """DOT = <u, v> and, for LayerNorm, SUM = sum(u) of every row that is too long for one tile; u =
    dy w.
    """
    group = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid, first = row < n_rows, group * C
    inv = tl.load(INV + row.to(tl.int64) * GROUPS + group, mask=valid, other=0.0)
    dot = tl.zeros((ROWS, COLUMNS), tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, C, COLUMNS):
        col = start + tl.arange(0, COLUMNS)
        mask = valid[:, None] & (col < C)[None, :]
        u = load(DY, row, first + col, dy_stride, mask)
        v = load(X, row, first + col, x_stride, mask)
        if W is not None:
            u = u * load_vector(W + first, col, C)
        if MEAN is not None:
            v = v - tl.load(MEAN + row, mask=valid, other=0.0)[:, None]
            total += u
        dot += u * (v * inv[:, None])
    tl.store(DOT + row.to(tl.int64) * GROUPS + group, tl.sum(dot, 1), mask=valid)
    if MEAN is not None:
        tl.store(SUM + row, tl.sum(total, 1), mask=valid)


@triton.jit
def backward_kernel(
    DY,
    DH,
    DS,
    X,
    W,
    MEAN,
    INV,
    DOT,
    SUM,
    DX,
    DW,
    DB,
    n_rows,
    chunk,
    dy_stride,
    dh_stride,
    x_stride,
    C: tl.constexpr,
    COUNTED: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One chunk of rows, one group, one tile of columns.

    DOT and SUM are given where a row has several tiles.
    """
    group = tl.program_id(1)
    first = group * C
    col = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    if W is not None:
        w = load_vector(W + first, col, C)
    dw = tl.zeros((ROWS, COLUMNS), tl.float32)
    db = tl.zeros((ROWS, COLUMNS), tl.float32)
    begin = tl.program_id(0) * chunk
    for start in range(begin, tl.minimum(begin + chunk, n_rows), ROWS):
        row = start + tl.arange(0, ROWS)
        valid = row < n_rows
        mask = valid[:, None] & (col < C)[None, :]
        statistic = row.to(tl.int64) * GROUPS + group
        inv = tl.load(INV + statistic, mask=valid, other=0.0)
        v = load(X, row, first + col, x_stride, mask)
        if MEAN is not None:
            v = v - tl.load(MEAN + row, mask=valid, other=0.0)[:, None]
        v = v * inv[:, None]
        u = load(DY, row, first + col, dy_stride, mask)
        if DB is not None:
            db += u
        if DW is not None:
            dw += u * v
        if W is not None:
            u = u * w
        dot = (
            tl.load(DOT + statistic, mask=valid, other=0.0) if DOT is not None else tl.sum(u * v, 1)
        )
        if DS is not None:
            dot += inv * tl.load(DS + statistic, mask=valid, other=0.0)
        through = v * (dot / COUNTED)[:, None]
        if COUNTED < C:
            through = tl.where((col < COUNTED)[None, :], through, 0.0)
        if MEAN is not None:
            total = tl.load(SUM + row, mask=valid, other=0.0) if SUM is not None else tl.sum(u, 1)
            through += (total / C)[:, None]
        dx = (u - through) * inv[:, None]
        if DH is not None:
            dx += load(DH, row, first + col, dh_stride, mask)
        store(DX, row, first + col, C * GROUPS, dx, mask)
    if DW is not None:
        store_partial(DW + first, tl.program_id(0), col, C, C * GROUPS, dw)
    if DB is not None:
        store_partial(DB + first, tl.program_id(0), col, C, C * GROUPS, db)


# ---------------------------------------------------------------------------------------- launchers


def _forward(
    x: Tensor,
    a: Tensor | None,
    w: Tensor | None,
    b: Tensor | None,
    eps: float,
    groups: int,
    counted: int,
    center: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """(y, h or None, mean or None, inv)"""
    (y, h), channels = rows.outputs(x, a), x.shape[-1] // groups
    inv = rows.empty((*x.shape[:-1], groups), torch.float32, x.device)
    mean = rows.empty((*x.shape[:-1], 1), torch.float32, x.device) if center else None
    x, a = rows.as_rows(x), rows.as_rows(a)
    work = rows.split(x, channels, rows.FORWARD)
    with rows.on_device(x):
        forward_kernel[(work.row_tiles, groups)](
            x,
            a,
            rows.vector(w),
            rows.vector(b),
            y,
            h,
            mean,
            inv,
            x.shape[0],
            rows.stride(x),
            rows.stride(a),
            eps,
            C=channels,
            COUNTED=counted,
            GROUPS=groups,
            **work.meta,
        )
    return y, h, mean, inv


def row_sums(
    dy: Tensor,
    x: Tensor,
    w: Tensor | None,
    mean: Tensor | None,
    inv: Tensor,
    channels: int,
    work: rows.Work,
) -> tuple[Tensor | None, Tensor | None]:
    """(<u, v>, sum(u) or None) of rows that are too long for one tile; (None, None) for others."""
    if work.column_tiles == 1:
        return None, None
    dot = rows.empty(inv.shape, torch.float32, x.device)
    total = None if mean is None else rows.empty(mean.shape, torch.float32, x.device)
    dots_kernel[(work.row_tiles, inv.shape[-1])](
        dy,
        x,
        w,
        mean,
        inv,
        dot,
        total,
        x.shape[0],
        rows.stride(dy),
        rows.stride(x),
        C=channels,
        GROUPS=inv.shape[-1],
        **work.meta,
    )
    return dot, total


def _backward(
    dy: Tensor,
    dh: Tensor | None,
    ds: Tensor | None,
    x: Tensor,
    w: Tensor | None,
    b: Tensor | None,
    mean: Tensor | None,
    inv: Tensor,
    counted: int,
    gains: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dx, groups, channels = (
        rows.empty(x.shape, x.dtype, x.device),
        inv.shape[-1],
        x.shape[-1] // inv.shape[-1],
    )
    dy, dh, x, w = rows.as_rows(dy), rows.as_rows(dh), rows.as_rows(x), rows.vector(w)
    ds = None if ds is None else ds.contiguous()
    work = rows.split(x, channels, rows.BACKWARD, groups=groups)
    dw, db = (rows.partial_sums(work.programs, parameter, gains) for parameter in (w, b))
    with rows.on_device(x):
        dot, total = row_sums(dy, x, w, mean, inv, channels, work)
        backward_kernel[(work.programs, groups, work.column_tiles)](
            dy,
            dh,
            ds,
            x,
            w,
            mean,
            inv,
            dot,
            total,
            dx,
            dw,
            db,
            x.shape[0],
            work.chunk,
            rows.stride(dy),
            rows.stride(dh),
            rows.stride(x),
            C=channels,
            COUNTED=counted,
            GROUPS=groups,
            **work.meta,
        )
    return dx, rows.sum_partials(dw, w, x), rows.sum_partials(db, b, x)


def rms_norm(x, w, b, eps, groups, counted):
    y, _, _, inv_rms = _forward(x, None, w, b, eps, groups, counted, center=False)
    return y, inv_rms


def add_rms_norm(x, a, w, b, eps, groups, counted):
    y, h, _, inv_rms = _forward(x, a, w, b, eps, groups, counted, center=False)
    return y, h, inv_rms


def rms_norm_backward(dy, dh, ds, x, w, b, inv_rms, counted, gains):
    return _backward(dy, dh, ds, x, w, b, None, inv_rms, counted, gains)


def layer_norm(x, w, b, eps):
    y, _, mean, inv_std = _forward(x, None, w, b, eps, 1, x.shape[-1], center=True)
    return y, mean, inv_std


def layer_norm_backward(dy, x, w, b, mean, inv_std, gains):
    return _backward(dy, None, None, x, w, b, mean, inv_std, x.shape[-1], gains)
