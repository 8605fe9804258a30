"""Triton: the rest of a folded norm, and the activation, after a product of the library.

    y = act(inv_rms * z + b)

for a raw product z (B, T, N), N = F, or 2 F for swiglu and geglu, in one launch. The statistic of
RMSNorm is taken here as well: every program sums over its row of x, which is small compared with z.
The functions are those of kernels/decode/reference.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import rows
from ..activation import is_gated, value
from ..reference import GATED
from .reference import Epilogue

WIDE = 1024  # columns that a program computes


@triton.jit
def load_scaled(Z, B, place, col, inv, mask):
    """inv z + b, the argument of the activation, in float32; the row begins at `place` in Z."""
    z = tl.load(Z + place + col, mask=mask, other=0.0).to(tl.float32) * inv
    if B is not None:
        z += tl.load(B + col, mask=mask, other=0.0).to(tl.float32)
    return z


@triton.jit
def epilogue_kernel(
    Z,
    X,
    INV,
    B,
    Y,
    INV_OUT,
    eps,
    F: tl.constexpr,
    C: tl.constexpr,
    KIND: tl.constexpr,
    WIDE: tl.constexpr,
):
    """WIDE columns of one row of y.

    The statistic is taken from X (rows, C); where that is None it is INV, and without INV it is 1.
    """
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    mask = col < F
    inv = 1.0
    if X is not None:
        squares = tl.zeros((WIDE,), tl.float32)
        lane = tl.arange(0, WIDE)
        for start in range(0, C, WIDE):
            x = tl.load(X + row * C + start + lane, mask=start + lane < C, other=0.0).to(tl.float32)
            squares += x * x
        inv = tl.rsqrt(tl.sum(squares, 0) / C + tl.cast(eps, tl.float32))
        if tl.program_id(1) == 0:  # all programs of a row have the same statistic
            tl.store(INV_OUT + row, inv)
    elif INV is not None:
        inv = tl.load(INV + row)
    if is_gated(KIND):
        y = value(load_scaled(Z, B, row * 2 * F, col, inv, mask), KIND)
        y *= load_scaled(Z, B, row * 2 * F, F + col, inv, mask)
    else:
        y = load_scaled(Z, B, row * F, col, inv, mask)
        if KIND != "":
            y = value(y, KIND)
    tl.store(Y + row * F + col, y.to(Y.dtype.element_ty), mask=mask)


def _launch(
    z: Tensor,
    x: Tensor | None,
    inv_rms: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kind: str,
) -> tuple[Tensor, Tensor | None]:
    """Return (y, the statistic of x); the latter is None if x is."""
    z_rows = z.reshape(-1, z.shape[-1])
    width = z.shape[-1] // (2 if kind in GATED else 1)
    y = rows.empty((*z.shape[:-1], width), z.dtype, z.device)
    taken = None
    channels = 1
    if x is not None:
        x = x.contiguous()
        channels = x.shape[-1]
        taken = rows.empty((*z.shape[:-1], 1), torch.float32, z.device)
    with rows.on_device(z):
        epilogue_kernel[(len(z_rows), triton.cdiv(width, WIDE))](
            z_rows,
            x,
            inv_rms,
            bias,
            y,
            taken,
            eps,
            F=width,
            C=channels,
            KIND=kind,
            WIDE=WIDE,
            num_warps=4,
        )
    return y, taken


def norm_activation(
    z: Tensor, x: Tensor, bias: Tensor | None, eps: float, kind: str
) -> tuple[Tensor, Tensor]:
    return _launch(z, x, None, bias, eps, kind)


def activation(z: Tensor, epilogue: Epilogue | None, kind: str) -> Tensor:
    inv_rms, bias = epilogue or (None, None)
    y, _ = _launch(z, None, inv_rms, bias, 0.0, kind)
    return y


def scale(z: Tensor, epilogue: Epilogue) -> Tensor:
    return activation(z, epilogue, "")
