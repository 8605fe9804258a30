"""Triton kernels of the MLP's activation with the norm's statistic inside: act(z inv + b).

They serve a norm whose gain is folded into the projection before the activation. In training there
is no reduction over channels; only the gradient of the bias is a sum, over rows. In decoding
RMSNorm's statistic may be taken here as well.

KIND is gelu, gelu_tanh, relu2, swiglu or geglu. For the last two z is (..., 2 F), first the gate,
then the up projection.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import rows
from .operands import Gradients, Inputs, Outputs, Saved, Settings, Upstream
from .reference import GATED
from .rows import inverse_root, load, load_gain, store, store_partial


@triton.constexpr_function
def is_gated(kind):
    return kind in GATED


@triton.jit
def argument(Z, B, row, col, first, inv, z_stride, mask, F: tl.constexpr, ROWS: tl.constexpr):
    """Load u = z inv + b, to which the activation is applied, at columns first + col of z."""
    u = load(Z, row, first + col, z_stride, mask) * inv[:, None]
    if B is not None:
        u += load_gain(B + first, ROWS, col, F)
    return u


@triton.jit
def normal(u):
    """Compute the standard normal distribution: (cdf(u), sqrt(2 pi) pdf(u)).

    cdf(-x) is exp(-x^2 / 2) times a polynomial in t = 1 / (1 + p x), as in Abramowitz & Stegun
    26.2.17. One exponential serves both, where erf and exp would take two. The six coefficients are
    fitted for the smallest absolute error: 1e-8 by itself, 1.5 units of 2^-23 with float32's
    rounding. Below -1 the relative error, which erf's has not, stays within bfloat16's.
    """
    t = 1.0 / (1.0 + 0.28 * tl.abs(u))
    bell = tl.exp(-0.5 * u * u)
    tail = 0.389877587556839 - 0.10580910742282867 * t
    tail = 0.26891493797302246 + t * (-0.23699933290481567 + t * tail)
    tail = bell * t * (0.11652109026908875 + t * (0.06749481707811356 + t * tail))
    return tl.where(u < 0.0, tail, 1.0 - tail), bell


@triton.jit
def tanh_argument(u):
    """Compute t for gelu_tanh(u) = u sigmoid(t)."""
    return 1.5957691216057308 * (u + 0.044715 * u * u * u)  # the first number is 2 sqrt(2 / pi)


@triton.jit
def value(u, KIND: tl.constexpr):
    """Compute gelu, gelu_tanh, relu2, or what a gated kind applies to its gate, at u."""
    if KIND == "gelu":
        cdf, _ = normal(u)
        return u * cdf
    elif KIND == "gelu_tanh" or KIND == "geglu":
        return u * tl.sigmoid(tanh_argument(u))
    elif KIND == "relu2":
        positive = tl.where(u < 0.0, 0.0, u)  # a NaN stays one, as in PyTorch
        return positive * positive
    else:
        return u * tl.sigmoid(u)


@triton.jit
def slope(u, KIND: tl.constexpr):
    """Compute the derivative of `value` at u."""
    if KIND == "gelu":
        cdf, bell = normal(u)
        return cdf + u * bell * 0.3989422804014327  # 1 / sqrt(2 pi)
    elif KIND == "geglu":
        # As below, but with fewer registers at a time: a gated kind's backward is short of them.
        sigma = tl.sigmoid(tanh_argument(u))
        rest = 1.5957691216057308 * u * (1.0 - sigma)
        return sigma * (1.0 + rest * (1.0 + 0.134145 * u * u))
    elif KIND == "gelu_tanh":
        sigma = tl.sigmoid(tanh_argument(u))
        # 0.134145 is 3 * 0.044715
        return sigma + u * sigma * (1.0 - sigma) * 1.5957691216057308 * (1.0 + 0.134145 * u * u)
    elif KIND == "relu2":
        return 2.0 * tl.where(u < 0.0, 0.0, u)
    else:
        sigma = tl.sigmoid(u)
        return sigma * (1.0 + u * (1.0 - sigma))


@triton.jit
def activation_kernel(
    Z,
    X,
    INV,
    B,
    Y,
    INV_OUT,
    n_rows,
    z_stride,
    eps,
    F: tl.constexpr,
    C: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute one tile of y (..., F); KIND may be "" for no activation.

    The statistic is taken from X (rows, C), by every program of a row: X is small compared with Z.
    Where X is None it is INV, and without INV it is 1.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid = row < n_rows
    mask = valid[:, None] & (col < F)[None, :]
    inv = tl.full((ROWS,), 1.0, tl.float32)
    if X is not None:
        squares = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, C, COLUMNS):
            lane = start + tl.arange(0, COLUMNS)
            x = load(X, row, lane, C, valid[:, None] & (lane < C)[None, :])
            squares += x * x
        inv = inverse_root(squares, eps, C)
        if tl.program_id(1) == 0:
            tl.store(INV_OUT + row, inv, mask=valid)
    elif INV is not None:
        inv = tl.load(INV + row, mask=valid, other=0.0)
    y = argument(Z, B, row, col, 0, inv, z_stride, mask, F, ROWS)
    if KIND != "":
        y = value(y, KIND)
    if is_gated(KIND):
        y = y * argument(Z, B, row, col, F, inv, z_stride, mask, F, ROWS)
    store(Y, row, col, F, y, mask)


@triton.jit
def backward_kernel(
    DY,
    Z,
    INV,
    B,
    DZ,
    DB,
    n_rows,
    chunk,
    dy_stride,
    z_stride,
    F: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute dz = dy act'(u) inv and db = sum of dy act'(u) for one chunk of rows.

    u is computed again from z. B and DB may be None.
    """
    col = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    width: tl.constexpr = 2 * F if is_gated(KIND) else F
    db = tl.zeros((ROWS, COLUMNS), tl.float32)
    db_up = tl.zeros((ROWS, COLUMNS), tl.float32)
    begin = tl.program_id(0) * chunk
    for start in range(begin, tl.minimum(begin + chunk, n_rows), ROWS):
        row = start + tl.arange(0, ROWS)
        valid = row < n_rows
        mask = valid[:, None] & (col < F)[None, :]
        inv = tl.load(INV + row, mask=valid, other=0.0)
        dy = load(DY, row, col, dy_stride, mask)
        u = argument(Z, B, row, col, 0, inv, z_stride, mask, F, ROWS)
        du = dy * slope(u, KIND)
        if is_gated(KIND):
            du = du * argument(Z, B, row, col, F, inv, z_stride, mask, F, ROWS)
            du_up = dy * value(u, KIND)
            store(DZ, row, F + col, width, du_up * inv[:, None], mask)
            db_up += du_up
        store(DZ, row, col, width, du * inv[:, None], mask)
        db += du
    if DB is not None:
        store_partial(DB, tl.program_id(0), col, F, width, db)
        if is_gated(KIND):
            store_partial(DB + F, tl.program_id(0), col, F, width, db_up)


def activation(
    z: Tensor,
    inv_rms: Tensor | None,
    b: Tensor | None,
    kind: str,
    x: Tensor | None = None,
    eps: float = 0.0,
    each: int = rows.BACKWARD,
) -> list[Tensor]:
    """Compute the function of this name of decode/reference.py: a launch of a decoding step.

    `each`: elements for each thread. A step has few rows, so few tiles: they are small ones.
    """
    channels = z.shape[-1] // (2 if kind in GATED else 1)
    row = (*z.shape[:-1], 1)
    y = rows.empty((*z.shape[:-1], channels), z.dtype, z.device)
    taken = None if x is None else rows.empty(row, torch.float32, z.device)
    z = rows.as_rows(z)
    work = rows.split(z, channels, each, rows.NARROW)
    rows.launch(
        activation_kernel,
        (work.row_tiles, work.column_tiles),
        z,
        Z=z,
        X=rows.adjacent(x),
        INV=rows.adjacent(inv_rms),
        B=rows.adjacent(b),
        Y=y,
        INV_OUT=taken,
        n_rows=z.shape[0],
        z_stride=rows.stride(z),
        eps=eps,
        F=channels,
        C=1 if x is None else x.shape[-1],
        KIND=kind,
        **work.meta,
    )
    return [y] if taken is None else [y, taken]


def forward(inputs: Inputs, settings: Settings) -> Outputs:
    """Launch the forward kernel of reference.scaled_activation: y alone."""
    (y,) = activation(inputs.x, inputs.given, inputs.b, settings.kind, each=rows.FORWARD)
    return Outputs(y)


def backward(upstream: Upstream, saved: Saved, settings: Settings, gains: bool) -> Gradients:
    """Launch the backward kernel: the gradients of z and, if `gains`, of b."""
    channels = upstream.dy.shape[-1]
    dz = rows.empty(saved.x.shape, saved.x.dtype, saved.x.device)
    dy = rows.as_rows(upstream.dy)
    z = rows.as_rows(saved.x)
    work = rows.split(z, channels, rows.BACKWARD, rows.NARROW)
    tensors = {
        "DY": dy,
        "Z": z,
        "INV": rows.adjacent(saved.inv),
        "B": rows.adjacent(saved.b),
        "DZ": dz,
    }
    sums = rows.launch_backward(
        backward_kernel,
        z,
        work,
        z.shape[0],
        tensors,
        strides={"dy_stride": rows.stride(dy), "z_stride": rows.stride(z)},
        parameters={"DB": saved.b if gains else None},
        F=channels,
        KIND=settings.kind,
    )
    return Gradients(x=dz, b=sums["DB"])
