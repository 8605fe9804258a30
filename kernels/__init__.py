"""Norms and activations of a GPT as fused kernels: functional, forward and backward, chosen by
plain dispatch.

    reference.py   what each function computes, in plain PyTorch, forward and backward: also
                   float64, also inductor
    row_norm.py    Triton: RMSNorm, add + RMSNorm, LayerNorm
    shared_rms.py  CoupledNorm's shared position
    taper.py       Triton: TaperNorm's blend
    activation.py  activations, the norm's scale inside
    rows.py        what the Triton kernels share
    binding.py     Triton kernels as PyTorch operators
    decode/        the launches of a decoding step

x is (..., C) in float16, bfloat16, float32 or float64; gains and biases are (C,) of any of these
types, or None. Statistics and maths are in float32 (float64 for float64); results have the type of
x. Nothing is written in place. `mode` says which implementation runs:

    auto     Triton for CUDA tensors in eager mode, plain PyTorch elsewhere and under torch.compile
    torch    plain PyTorch
    triton   Triton; an error without Triton or a GPU. float64 has no kernels and always runs in
             PyTorch

A mode is about these functions alone. In every mode some norms are plain PyTorch: a shared position
with coupled_grad=full, dyt, taper's fixed phase, and the blending itself of a taper over LayerNorm
or with a bias.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from . import reference

if __package__ == "kernels":  # a clone
    from common.errors import UserError
else:  # installed, as nanonorm.kernels
    from ..common.errors import UserError

try:
    from . import binding
except ModuleNotFoundError as error:  # Triton has no wheels for macOS and Windows
    if error.name != "triton":
        raise
    binding = None

MODES = ("auto", "torch", "triton")


def implementation(x: Tensor, mode: str = "auto"):
    """The module whose functions are to run on x: binding (Triton) or reference.

    Raises UserError.
    """
    if mode == "torch" or x.dtype == torch.float64:
        return reference
    if mode == "auto":
        # Inductor fuses the plain formula with its neighbours, and cannot look into an operator.
        # Whether it is then the faster one under torch.compile is not yet measured.
        return (
            binding
            if x.is_cuda and binding is not None and not torch.compiler.is_compiling()
            else reference
        )
    if mode != "triton":
        raise UserError(f"kernels={mode!r}: it is one of {', '.join(MODES)}")
    if binding is None:
        raise UserError(
            "kernels=triton, but Triton is not installed: pip install triton, or kernels=auto"
        )
    if not x.is_cuda and not binding.INTERPRETED:
        raise UserError(
            f"kernels=triton on {x.device.type}: Triton needs a GPU (or TRITON_INTERPRET=1); "
            "kernels=auto"
        )
    return binding


def fits(
    x: Tensor, *vectors: Tensor | None, add: Tensor | None = None, statistic: Tensor | None = None
) -> None:
    """Raises UserError unless the vectors are (C,), `add` is like x, `statistic` one number a row:
    a kernel would read beyond anything smaller.
    """
    for vector in vectors:
        if vector is not None and vector.shape != x.shape[-1:]:
            raise UserError(
                f"a gain or bias of shape {tuple(vector.shape)} for {x.shape[-1]} channels: "
                "give one each"
            )
    if add is not None and add.shape != x.shape:
        raise UserError(
            f"{tuple(add.shape)} cannot be added to {tuple(x.shape)} here: expand it first"
        )
    if add is not None and add.dtype == torch.float64 != x.dtype:
        raise UserError(
            f"a float64 tensor cannot be added to {x.dtype} here: convert one of them first"
        )
    if statistic is not None and statistic.shape != (*x.shape[:-1], 1):
        raise UserError(
            f"a statistic of shape {tuple(statistic.shape)} for {tuple(x.shape)}: "
            "give one number a row"
        )
    if statistic is not None and statistic.dtype != reference.statistics_dtype(x):
        raise UserError(
            f"a {statistic.dtype} statistic for {x.dtype}: give it in "
            f"{reference.statistics_dtype(x)}"
        )


def count(x: Tensor, groups: int, counted: int | None) -> int:
    """The channels of each group that the mean is over.

    Raises UserError unless groups divide C and hold `counted`.
    """
    if groups < 1 or x.shape[-1] % groups:
        raise UserError(
            f"groups={groups} for {x.shape[-1]} channels: give a number that divides them"
        )
    of = x.shape[-1] // groups
    if counted is not None and not 1 <= counted <= of:
        raise UserError(
            f"counted={counted} for groups of {of} channels: "
            f"give a number from 1 to {of}, or None for all"
        )
    return of if counted is None else counted


def rms_norm(
    x: Tensor,
    w: Tensor | None,
    eps: float,
    b: Tensor | None = None,
    groups: int = 1,
    counted: int | None = None,
    mode: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(y, inv_rms): y = x * inv_rms * w + b, inv_rms (..., groups) = 1 / sqrt(mean(x^2) + eps).

    The mean is over the first `counted` channels of each group (None: all). Both outputs are
    differentiable. Zhang & Sennrich 2019, equation 4.
    """
    fits(x, w, b)
    return implementation(x, mode).rms_norm(x, w, b, eps, groups, count(x, groups, counted))


def add_rms_norm(
    x: Tensor,
    a: Tensor,
    w: Tensor | None,
    eps: float,
    b: Tensor | None = None,
    groups: int = 1,
    counted: int | None = None,
    mode: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, h, inv_rms): h = x + a, and rms_norm of h as rounded; a is (..., C) like x, any type."""
    fits(x, w, b, add=a)
    return implementation(x, mode).add_rms_norm(x, a, w, b, eps, groups, count(x, groups, counted))


def layer_norm(
    x: Tensor, w: Tensor | None, b: Tensor | None, eps: float, mode: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, inv_std): y = (x - mean) * inv_std * w + b; mean and inv_std (..., 1) carry no
    gradient.

    Ba et al. 2016, with the biased variance and eps inside the root.
    """
    fits(x, w, b)
    return implementation(x, mode).layer_norm(x, w, b, eps)


def shared_rms_scale(h: Tensor, inv_rms: Tensor, w: Tensor | None, mode: str = "auto") -> Tensor:
    """h * inv_rms * w, with a statistic (..., 1) from elsewhere, a constant; Loretz & Hochreiter
    2026, equation 6.
    """
    fits(h, w, statistic=inv_rms)
    return implementation(h, mode).shared_rms_scale(h, inv_rms, w)


def add_shared_rms_scale(
    x: Tensor, a: Tensor, inv_rms: Tensor, w: Tensor | None, mode: str = "auto"
) -> tuple[Tensor, Tensor]:
    """(y, h): h = x + a, y = h * inv_rms * w, with inv_rms (..., 1) a constant."""
    fits(x, w, add=a, statistic=inv_rms)
    return implementation(x, mode).add_shared_rms_scale(x, a, inv_rms, w)


def scaled_activation(
    z: Tensor, inv_rms: Tensor, b: Tensor | None, kind: str, mode: str = "auto"
) -> Tensor:
    """act(z * inv_rms + b), inv_rms (..., 1) a constant; kind is gelu, gelu_tanh, relu2 or swiglu.

    z is (..., F); for swiglu (..., 2 F), gate then up, and the result silu(gate) * up is (..., F).
    """
    fits(z, b, statistic=inv_rms)
    if kind not in reference.KINDS:
        raise UserError(f"activation {kind!r}: it is one of {', '.join(reference.KINDS)}")
    if kind == "swiglu" and z.shape[-1] % 2:
        raise UserError(
            f"swiglu of {z.shape[-1]} channels: give an even number, gate and up side by side"
        )
    module = implementation(z, mode)
    if module is reference and torch.compiler.is_compiling() and z.dtype != inv_rms.dtype:
        # Inductor may else keep the slope for backward, in inv_rms's type: twice z's bytes, more
        # than sharing saves.
        wide = checkpoint(
            reference.wide_activation,
            z,
            inv_rms,
            b,
            kind,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        return wide.to(z.dtype)
    return module.scaled_activation(z, inv_rms, b, kind)


def taper_norm(
    h: Tensor,
    w: Tensor | None,
    w_tilde: Tensor | None,
    gate_c: Tensor,
    eps: float,
    mode: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(y, inv_rms): y = g * h * inv_rms * w + (1 - g) * c * h * w_tilde; gate_c (2,) is g, c on h's
    device.

    gate_c and inv_rms (..., 1) carry no gradient. Kanavalau, Amo Alonso & Lall 2026.
    """
    fits(h, w, w_tilde)
    if gate_c.shape != (2,):
        raise UserError(f"gate_c of shape {tuple(gate_c.shape)}: give two numbers, the gate and c")
    return implementation(h, mode).taper_norm(h, w, w_tilde, gate_c, eps)
