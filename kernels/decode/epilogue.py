"""Triton: what remains of a norm and an activation behind the library's product, in one launch.

y = act(inv_rms * z + b) for a raw product z (B, T, N), N = 2 F for swiglu. Exact RMSNorm has its
statistic taken here, too: every program sums over its row of x, which is small beside z. Functions
are those of kernels/decode/reference.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import rows
from ..activation import value
from .reference import Epilogue

WIDE = 1024  # columns of a program


@triton.jit
def load_argument(Z, B, place, col, inv, mask):
    """inv z + b in float32; place: where the row begins in Z."""
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
    """WIDE columns of one row.

    X (rows, C) or None: the statistic is taken from it; else it is INV, or 1.
    """
    row, col = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    mask = col < F
    inv = 1.0
    if X is not None:
        squares, lane = tl.zeros((WIDE,), tl.float32), tl.arange(0, WIDE)
        for start in range(0, C, WIDE):
            x = tl.load(X + row * C + start + lane, mask=start + lane < C, other=0.0).to(tl.float32)
            squares += x * x
        inv = tl.rsqrt(tl.sum(squares, 0) / C + tl.cast(eps, tl.float32))
        if tl.program_id(1) == 0:
            tl.store(INV_OUT + row, inv)
    elif INV is not None:
        inv = tl.load(INV + row)
    if KIND == "swiglu":
        y = value(load_argument(Z, B, row * 2 * F, col, inv, mask), KIND)
        y *= load_argument(Z, B, row * 2 * F, F + col, inv, mask)
    else:
        y = load_argument(Z, B, row * F, col, inv, mask)
        if KIND != "":
            y = value(y, KIND)
    tl.store(Y + row * F + col, y.to(Y.dtype.element_ty), mask=mask)


def _launch(z, x, inv_rms, bias, eps, kind):
    """(y, inv_rms or None); x not None: the statistic is taken here."""
    z_rows = z.reshape(-1, z.shape[-1])
    width = z.shape[-1] // (2 if kind == "swiglu" else 1)
    y = rows.empty((*z.shape[:-1], width), z.dtype, z.device)
    taken = None if x is None else rows.empty((*z.shape[:-1], 1), torch.float32, z.device)
    with rows.on_device(z):
        epilogue_kernel[(len(z_rows), triton.cdiv(width, WIDE))](
            z_rows,
            None if x is None else x.contiguous(),
            inv_rms,
            bias,
            y,
            taken,
            eps,
            F=width,
            C=1 if x is None else x.shape[-1],
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
    return _launch(z, None, *(epilogue or (None, None)), 0.0, kind)[0]


def scale(z: Tensor, epilogue: Epilogue) -> Tensor:
    return activation(z, epilogue, "")
