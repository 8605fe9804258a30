"""Triton kernels of a sublayer's output norm with the residual add: h = x + N_out(a), and with the
input norm of the next sublayer y = N_in(h). Both norms are RMSNorms.

Forward reads x and a once and takes both statistics from that. Backward computes the gradients of
both norms in one pass over the rows: it reads dy, dh, h and a, and writes dx and da. Without an
input norm the gradient of x is that of h, and RMSNorm's kernel (row_norm.py) computes that of a.
The functions have the signatures of reference.py, which says what they compute.

Long rows are treated as in row_norm.py, and kernel arguments are named as there. W_OUT and INV_OUT
belong to N_out, W_IN and INV to N_in. DX is the whole gradient of h, which is that of x.
"""

import torch
import triton
import triton.language as tl

from . import rows
from .row_norm import row_sums
from .rows import load, load_vector, store, store_partial


@triton.jit
def add(x, a, inv_out, W_OUT, H, col, C: tl.constexpr):
    """Compute a tile of h = x + a inv_out w_out, rounded to the type of H, in float32."""
    d = a * inv_out[:, None]
    if W_OUT is not None:
        d = d * load_vector(W_OUT, col, C)
    return (x + d).to(H.dtype.element_ty).to(tl.float32)


@triton.jit
def inverse_rms(square, eps, C: tl.constexpr):
    """Compute 1 / sqrt(mean square + eps) of each row, (ROWS, COLUMNS) -> (ROWS,)."""
    return tl.rsqrt(tl.sum(square, 1) / C + tl.cast(eps, tl.float32))


@triton.jit
def write_normed(Y, W_IN, h, inv, row, col, mask, C: tl.constexpr):
    """Store y = h inv w_in."""
    y = h * inv[:, None]
    if W_IN is not None:
        y = y * load_vector(W_IN, col, C)
    store(Y, row, col, C, y, mask)


@triton.jit
def forward_kernel(
    X,
    A,
    W_OUT,
    W_IN,
    Y,
    H,
    INV,
    INV_OUT,
    n_rows,
    x_stride,
    a_stride,
    eps_out,
    eps,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute h, y and both statistics for a tile of rows.

    Y, INV and W_IN are None without an input norm; either gain may be None.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = row < n_rows
    if COLUMNS >= C:  # one tile holds whole rows
        col = tl.arange(0, COLUMNS)
        mask = valid[:, None] & (col < C)[None, :]
        a = load(A, row, col, a_stride, mask)
        x = load(X, row, col, x_stride, mask)
        inv_out = inverse_rms(a * a, eps_out, C)
        h = add(x, a, inv_out, W_OUT, H, col, C)
        store(H, row, col, C, h, mask)
        if Y is not None:
            inv = inverse_rms(h * h, eps, C)
            write_normed(Y, W_IN, h, inv, row, col, mask, C)
    else:  # one pass over the row for the square of a, one for h and its square, one for y
        square = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, C, COLUMNS):
            col = start + tl.arange(0, COLUMNS)
            mask = valid[:, None] & (col < C)[None, :]
            a = load(A, row, col, a_stride, mask)
            square += a * a
        inv_out = inverse_rms(square, eps_out, C)
        square = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, C, COLUMNS):
            col = start + tl.arange(0, COLUMNS)
            mask = valid[:, None] & (col < C)[None, :]
            a = load(A, row, col, a_stride, mask)
            x = load(X, row, col, x_stride, mask)
            h = add(x, a, inv_out, W_OUT, H, col, C)
            store(H, row, col, C, h, mask)
            square += h * h
        if Y is not None:
            inv = inverse_rms(square, eps, C)
            for start in range(0, C, COLUMNS):
                col = start + tl.arange(0, COLUMNS)
                mask = valid[:, None] & (col < C)[None, :]
                a = load(A, row, col, a_stride, mask)
                x = load(X, row, col, x_stride, mask)
                # Computed again: what this program has stored it may not read without a barrier.
                h = add(x, a, inv_out, W_OUT, H, col, C)
                write_normed(Y, W_IN, h, inv, row, col, mask, C)
    tl.store(INV_OUT + row, inv_out, mask=valid)
    if Y is not None:
        tl.store(INV + row, inv, mask=valid)


@triton.jit
def through_norm(q, x, dot, inv, C: tl.constexpr):
    """Compute q - x inv^2 dot / C, the gradient of a norm's input (reference._through_norm)."""
    return q - x * (dot * inv / C)[:, None] * inv[:, None]


@triton.jit
def dots_kernel(
    DY,
    DH,
    DS,
    H,
    A,
    W_OUT,
    W_IN,
    INV,
    INV_OUT,
    DOT,
    DX,
    DOT_OUT,
    n_rows,
    dy_stride,
    dh_stride,
    h_stride,
    a_stride,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute DOT_OUT = <r, a> of rows that are too long for one tile, given DOT = <q, h>.

    q and r are those of reference.norm_add_norm_backward. Of DX only the type is used.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = row < n_rows
    inv = tl.load(INV + row, mask=valid, other=0.0)
    inv_out = tl.load(INV_OUT + row, mask=valid, other=0.0)
    dot = tl.load(DOT + row, mask=valid, other=0.0)
    if DS is not None:
        dot += inv * tl.load(DS + row, mask=valid, other=0.0)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, C, COLUMNS):
        col = start + tl.arange(0, COLUMNS)
        mask = valid[:, None] & (col < C)[None, :]
        h = load(H, row, col, h_stride, mask)
        q = load(DY, row, col, dy_stride, mask) * inv[:, None]
        if W_IN is not None:
            q = q * load_vector(W_IN, col, C)
        dx = through_norm(q, h, dot, inv, C)
        if DH is not None:
            dx += load(DH, row, col, dh_stride, mask)
        r = dx.to(DX.dtype.element_ty).to(tl.float32) * inv_out[:, None]
        if W_OUT is not None:
            r = r * load_vector(W_OUT, col, C)
        total += r * load(A, row, col, a_stride, mask)
    tl.store(DOT_OUT + row, tl.sum(total, 1), mask=valid)


@triton.jit
def backward_kernel(
    DY,
    DH,
    DS,
    H,
    A,
    W_OUT,
    W_IN,
    INV,
    INV_OUT,
    DOT,
    DOT_OUT,
    DX,
    DA,
    DW_OUT,
    DW_IN,
    n_rows,
    chunk,
    dy_stride,
    dh_stride,
    h_stride,
    a_stride,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the gradients for one chunk of rows and one tile of columns.

    The formulas are in reference.norm_add_norm_backward. DH, DS, gains and their gradients may be
    None. DOT and DOT_OUT are given where a row has several tiles, else None.
    """
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    # Sums over rows, which stay in registers while the program goes through its rows
    dw_out = tl.zeros((ROWS, COLUMNS), tl.float32)
    dw_in = tl.zeros((ROWS, COLUMNS), tl.float32)
    begin = tl.program_id(0) * chunk
    for start in range(begin, tl.minimum(begin + chunk, n_rows), ROWS):
        row = start + tl.arange(0, ROWS)
        valid = row < n_rows
        mask = valid[:, None] & (col < C)[None, :]
        inv = tl.load(INV + row, mask=valid, other=0.0)
        inv_out = tl.load(INV_OUT + row, mask=valid, other=0.0)
        # The input norm
        h = load(H, row, col, h_stride, mask)
        q = load(DY, row, col, dy_stride, mask) * inv[:, None]
        if DW_IN is not None:
            dw_in += q * h
        if W_IN is not None:
            q = q * load_vector(W_IN, col, C)
        dot = tl.load(DOT + row, mask=valid, other=0.0) if DOT is not None else tl.sum(q * h, 1)
        if DS is not None:
            dot += inv * tl.load(DS + row, mask=valid, other=0.0)
        dx = through_norm(q, h, dot, inv, C)
        if DH is not None:  # h goes on as the residual stream as well
            dx += load(DH, row, col, dh_stride, mask)
        dx = dx.to(DX.dtype.element_ty).to(tl.float32)
        store(DX, row, col, C, dx, mask)
        # The output norm. a is read only here: before the store of dx it would take registers that
        # at 8192 columns are not there.
        a = load(A, row, col, a_stride, mask)
        r = dx * inv_out[:, None]
        if DW_OUT is not None:
            dw_out += r * a
        if W_OUT is not None:
            r = r * load_vector(W_OUT, col, C)
        if DOT_OUT is not None:
            dot_out = tl.load(DOT_OUT + row, mask=valid, other=0.0)
        else:
            dot_out = tl.sum(r * a, 1)
        store(DA, row, col, C, through_norm(r, a, dot_out, inv_out, C), mask)
    if DW_OUT is not None:
        store_partial(DW_OUT, tl.program_id(0), col, C, C, dw_out)
    if DW_IN is not None:
        store_partial(DW_IN, tl.program_id(0), col, C, C, dw_in)


# ---------------------------------------------------------------------------------------- launchers


def _forward(x, a, w_out, w_in, eps_out, eps, has_input_norm):
    """Launch the forward kernel; y and inv are None without an input norm.

    Returns:
        (y, h, inv, inv_out)
    """
    channels = x.shape[-1]
    h = rows.empty(x.shape, x.dtype, x.device)
    inv_out = rows.empty((*x.shape[:-1], 1), torch.float32, x.device)
    y = rows.empty(x.shape, x.dtype, x.device) if has_input_norm else None
    inv = rows.empty(inv_out.shape, torch.float32, x.device) if has_input_norm else None
    x = rows.as_rows(x)
    a = rows.as_rows(a)
    work = rows.split(x, channels, rows.FORWARD)
    with rows.on_device(x):
        forward_kernel[(work.row_tiles,)](
            x,
            a,
            rows.vector(w_out),
            rows.vector(w_in),
            y,
            h,
            inv,
            inv_out,
            x.shape[0],
            rows.stride(x),
            rows.stride(a),
            eps_out,
            eps,
            C=channels,
            **work.meta,
        )
    return y, h, inv, inv_out


def add_normed(x, a, w_out, eps):
    """Compute reference.add_normed."""
    _, h, _, inv_out = _forward(x, a, w_out, None, eps, eps, has_input_norm=False)
    return h, inv_out


def norm_add_norm(x, a, w_out, w_in, eps_out, eps):
    """Compute reference.norm_add_norm."""
    return _forward(x, a, w_out, w_in, eps_out, eps, has_input_norm=True)


def norm_add_norm_backward(dy, dh, ds, h, a, w_out, w_in, inv_rms, inv_out, gains):
    """Compute reference.norm_add_norm_backward."""
    channels = h.shape[-1]
    dx = rows.empty(h.shape, h.dtype, h.device)
    da = rows.empty(a.shape, a.dtype, a.device)
    dy = rows.as_rows(dy)
    dh = rows.as_rows(dh)
    ds = None if ds is None else ds.contiguous()
    h = rows.as_rows(h)
    a = rows.as_rows(a)
    w_out = rows.vector(w_out)
    w_in = rows.vector(w_in)
    strides = (rows.stride(dy), rows.stride(dh), rows.stride(h), rows.stride(a))
    # A kernel before takes the sums of a row beyond WHOLE; its tiles may then be narrower, and with
    # four streams and two sums over rows WHOLE columns are more than registers hold in float32.
    widest = rows.WHOLE if channels <= rows.WHOLE else rows.WHOLE // 2
    work = rows.split(h, channels, rows.BACKWARD, widest)
    # (programs, C), summed over programs at the end
    dw_out = rows.partial_sums(work.programs, w_out, gains)
    dw_in = rows.partial_sums(work.programs, w_in, gains)
    given = (dy, dh, ds, h, a, w_out, w_in, inv_rms, inv_out)
    with rows.on_device(h):
        dot, _ = row_sums(dy, h, w_in, None, inv_rms, channels, work)
        dot_out = None
        if dot is not None:
            dot_out = rows.empty(inv_out.shape, torch.float32, h.device)
            dots_kernel[(work.row_tiles,)](
                *given, dot, dx, dot_out, h.shape[0], *strides, C=channels, **work.meta
            )
        backward_kernel[(work.programs, work.column_tiles)](
            *given,
            dot,
            dot_out,
            dx,
            da,
            dw_out,
            dw_in,
            h.shape[0],
            work.chunk,
            *strides,
            C=channels,
            **work.meta,
        )
    return dx, da, rows.sum_partials(dw_out, w_out, h), rows.sum_partials(dw_in, w_in, h)
