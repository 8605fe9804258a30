"""Triton kernels of RMSNorm, add + RMSNorm and LayerNorm: one forward and one backward kernel.

LayerNorm differs only in that it centres as well. The functions have the signatures of
reference.py, which says what they compute.

A row of at most WHOLE channels is held in registers. A longer row is read tile by tile. The forward
program then reads its row once more for each statistic (from cache). The backward kernel needs
<u, v> and sum(u) of the whole row, which a kernel before it computes. Each channel group has
programs of its own, so that norms without groups cost nothing more.

Names: X input, A summand, H = X + A, W gain, B bias, Y output, INV the statistic (1 / rms or
1 / std). DX is the gradient of X, and so on.
"""

from typing import NamedTuple

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
    """Normalise a tile of rows of one group, for y = v w + b with v = (h - mean) inv.

    C is the number of channels of each group. A and H are None without the residual add, MEAN is
    None for RMSNorm (its mean is not subtracted).
    """
    group = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # (ROWS,)
    first = group * C  # the first channel of this group
    if COLUMNS >= C:  # one tile holds whole rows
        col = tl.arange(0, COLUMNS)  # (COLUMNS,), a power of two, so some may be beyond C
        mask = (row < n_rows)[:, None] & (col < C)[None, :]
        h = load_sum(X, A, H, row, first + col, x_stride, a_stride, mask)  # (ROWS, COLUMNS)
        v = h
        if MEAN is not None:
            mean = tl.sum(h, 1) / C  # (ROWS,)
            # 0 beyond the row, where h - mean is not
            v = tl.where((col < C)[None, :], h - mean[:, None], 0.0)
        # 1 / sqrt(mean square + eps), (ROWS,): equation 4 of Zhang & Sennrich 2019
        inv = tl.rsqrt(
            tl.sum(counted_square(v, col, C, COUNTED), 1) / COUNTED + tl.cast(eps, tl.float32)
        )
        write(Y, H, W, B, h, v * inv[:, None], row, col, first, mask, C, GROUPS)
    else:  # one pass over the row for the mean, one for the square, one for the result
        # Two passes for the variance: E[x^2] - E[x]^2 in one would cancel where the mean is large.
        if MEAN is not None:
            # A sum for each column of the tile; one reduction over columns at the end.
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
    # INV is (rows, GROUPS); 64 bits as in rows.offsets.
    tl.store(INV + row.to(tl.int64) * GROUPS + group, inv, mask=row < n_rows)


@triton.jit
def counted_square(v, col, C: tl.constexpr, COUNTED: tl.constexpr):
    """Compute v^2, with 0 beyond the counted channels (partial RMSNorm)."""
    if COUNTED < C:
        v = tl.where((col < COUNTED)[None, :], v, 0.0)
    return v * v


@triton.jit
def write(Y, H, W, B, h, v, row, col, first, mask, C: tl.constexpr, GROUPS: tl.constexpr):
    """Store h, where there was a residual add, and y = v w + b."""
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
    """Compute DOT = <u, v> and, for LayerNorm, SUM = sum(u), with u = dy w.

    For rows that are too long for one tile.
    """
    group = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = row < n_rows
    first = group * C
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
        dot += u * (v * inv[:, None])  # v is only x, or x - mean, until here
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
    """Compute the gradients for one chunk of rows, one group and one tile of columns.

    The formulas are in reference.rms_norm_backward and layer_norm_backward. DH (gradient of the
    residual stream), DS (gradient of INV), MEAN, W, DW and DB may be None. DOT and SUM are given
    where a row has several tiles, else None.
    """
    group = tl.program_id(1)
    first = group * C  # the first channel of this group
    col = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    if W is not None:
        w = load_vector(W + first, col, C)
    # dw and db are sums over rows. They stay in registers while the program goes through its rows.
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
        v = v * inv[:, None]  # the normalised input, computed again
        u = load(DY, row, first + col, dy_stride, mask)
        if DB is not None:
            db += u
        if DW is not None:
            dw += u * v
        if W is not None:
            u = u * w
        # <u, v> of the whole row, (ROWS,)
        if DOT is not None:
            dot = tl.load(DOT + statistic, mask=valid, other=0.0)
        else:
            dot = tl.sum(u * v, 1)
        if DS is not None:
            # inv depends on x too: d inv / dx = -inv^2 v / n, so <u, v> and inv ds go the same way.
            dot += inv * tl.load(DS + statistic, mask=valid, other=0.0)
        # what the statistics take away from u: v (<u, v> + inv ds) / n, and sum(u) / C for the mean
        through = v * (dot / COUNTED)[:, None]
        if COUNTED < C:  # channels that are not counted do not change inv
            through = tl.where((col < COUNTED)[None, :], through, 0.0)
        if MEAN is not None:
            total = tl.load(SUM + row, mask=valid, other=0.0) if SUM is not None else tl.sum(u, 1)
            through += (total / C)[:, None]
        dx = (u - through) * inv[:, None]
        if DH is not None:  # h goes on as the residual stream as well
            dx += load(DH, row, first + col, dh_stride, mask)
        store(DX, row, first + col, C * GROUPS, dx, mask)
    if DW is not None:
        # One row of partial sums for each program; no atomic additions, so the bits are always the
        # same.
        store_partial(DW + first, tl.program_id(0), col, C, C * GROUPS, dw)
    if DB is not None:
        store_partial(DB + first, tl.program_id(0), col, C, C * GROUPS, db)


# ---------------------------------------------------------------------------------------- launchers


class _Forward(NamedTuple):
    """The outputs of the forward kernel."""

    y: Tensor  # (..., C)
    h: Tensor | None  # (..., C); None without the residual add
    mean: Tensor | None  # (..., 1) float32; None for RMSNorm
    inv: Tensor  # (..., G) float32


def _forward(
    x: Tensor,
    a: Tensor | None,
    w: Tensor | None,
    b: Tensor | None,
    eps: float,
    groups: int,
    counted: int,
    center: bool,
) -> _Forward:
    """Launch the forward kernel. With `center` it is LayerNorm, else RMSNorm."""
    channels = x.shape[-1] // groups
    y, h = rows.outputs(x, a)
    # Also for 16-bit x: a statistic is one number for a whole row.
    inv = rows.empty((*x.shape[:-1], groups), torch.float32, x.device)
    mean = rows.empty((*x.shape[:-1], 1), torch.float32, x.device) if center else None
    x = rows.as_rows(x)
    a = rows.as_rows(a)
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
    return _Forward(y, h, mean, inv)


def row_sums(
    dy: Tensor,
    x: Tensor,
    w: Tensor | None,
    mean: Tensor | None,
    inv: Tensor,
    channels: int,
    work: rows.Work,
) -> tuple[Tensor | None, Tensor | None]:
    """Compute <u, v> and, with a mean, sum(u) of rows that are too long for one tile.

    Returns (None, None) for shorter rows, where the backward kernel computes them itself.
    """
    if work.column_tiles == 1:
        return None, None
    groups = inv.shape[-1]
    dot = rows.empty(inv.shape, torch.float32, x.device)
    total = None if mean is None else rows.empty(mean.shape, torch.float32, x.device)
    dots_kernel[(work.row_tiles, groups)](
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
        GROUPS=groups,
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
    """Launch the backward kernel. With a mean it is LayerNorm's, else RMSNorm's.

    Returns:
        (dx, dw, db)
    """
    groups = inv.shape[-1]
    channels = x.shape[-1] // groups
    dx = rows.empty(x.shape, x.dtype, x.device)
    dy = rows.as_rows(dy)
    dh = rows.as_rows(dh)
    ds = None if ds is None else ds.contiguous()
    x = rows.as_rows(x)
    w = rows.vector(w)
    work = rows.split(x, channels, rows.BACKWARD, groups=groups)
    # (programs, C), summed over programs at the end
    dw = rows.partial_sums(work.programs, w, gains)
    db = rows.partial_sums(work.programs, b, gains)
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
    """Compute reference.rms_norm."""
    out = _forward(x, None, w, b, eps, groups, counted, center=False)
    return out.y, out.inv


def add_rms_norm(x, a, w, b, eps, groups, counted):
    """Compute reference.add_rms_norm."""
    out = _forward(x, a, w, b, eps, groups, counted, center=False)
    return out.y, out.h, out.inv


def rms_norm_backward(dy, dh, ds, x, w, b, inv_rms, counted, gains):
    """Compute reference.rms_norm_backward."""
    return _backward(dy, dh, ds, x, w, b, None, inv_rms, counted, gains)


def layer_norm(x, w, b, eps):
    """Compute reference.layer_norm."""
    out = _forward(x, None, w, b, eps, groups=1, counted=x.shape[-1], center=True)
    return out.y, out.mean, out.inv


def layer_norm_backward(dy, x, w, b, mean, inv_std, gains):
    """Compute reference.layer_norm_backward."""
    return _backward(dy, None, None, x, w, b, mean, inv_std, x.shape[-1], gains)
