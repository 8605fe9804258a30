"""Norms and activations of a GPT as fused kernels, forward and backward, and their dispatch.

A call goes from a norm to its Triton kernel in three steps: a function of this file checks its
arguments and chooses the implementation; binding.py gives it a gradient; row_norm.py, which is its
forward pass, starts the kernel.

    reference.py   what each function computes, in plain PyTorch; it runs in float64, on CPUs, under
                   torch.compile and torch.func, and has the second derivatives
    row_norm.py    Triton: all norms, with residual add, output norm, shared statistic and taper
    activation.py  Triton: activations, the norm's scale inside
    rows.py        what the Triton kernels share
    binding.py     the Triton kernels as one PyTorch operator with a gradient
    decode/        the launches of a decoding step

x is (..., C) in float16, bfloat16, float32 or float64; gains and biases are (C,) of any of these
types, or None. Statistics and maths are in float32 (float64 for float64); results have the type of
x. Nothing is written in place. `mode` says which implementation runs:

    auto     Triton for CUDA tensors in eager mode, plain PyTorch elsewhere and under torch.compile
    torch    plain PyTorch
    triton   Triton; an error without Triton or a GPU. float64 has no kernels and always runs in
             PyTorch

A mode is about these functions alone. Norms that have no function here are plain PyTorch in every
mode: DynamicTanh, a shared position with coupled_grad=full, a taper's fixed phase, and the blending
itself of a taper over LayerNorm or with a bias.
"""

from collections.abc import Callable

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


def kernel_for(x: Tensor, mode: str = "auto", activates: bool = False) -> Callable | None:
    """Return what computes binding.Inputs of x with a Triton kernel; None where PyTorch shall run.

    Raises:
        UserError: `mode` is unknown, or asks for Triton where it cannot run.
    """
    # The kernels compute in float32, which would not be enough here.
    if mode == "torch" or x.dtype == torch.float64:
        return None
    is_compiling = torch.compiler.is_compiling()
    if mode == "auto":
        # Inductor fuses the plain formula with its neighbours, and cannot look into an operator.
        # Whether it is then faster under torch.compile has not been measured yet.
        if binding is None or is_compiling or not x.is_cuda:
            return None
    elif mode != "triton":
        raise UserError(f"kernels={mode!r}: it is one of {', '.join(MODES)}")
    elif binding is None:
        raise UserError(
            "kernels=triton, but Triton is not installed: pip install triton, or kernels=auto"
        )
    elif not x.is_cuda and not binding.INTERPRETED:
        raise UserError(
            f"kernels=triton on {x.device.type}: Triton needs a GPU (or TRITON_INTERPRET=1); "
            "kernels=auto"
        )
    if is_compiling:
        return binding.compiled
    if torch._C._are_functorch_transforms_active():  # torch.func.grad, vmap: of plain PyTorch
        return None
    return binding.Activation.apply if activates else binding.Fused.apply


# ----------------------------------------------------------------------------- checks of arguments


def fits(
    x: Tensor, *vectors: Tensor | None, add: Tensor | None = None, statistic: Tensor | None = None
) -> None:
    """Check the arguments of a kernel, which would read beyond the end of anything smaller.

    Args:
        x: (..., C).
        vectors: gains and biases (C,), or None.
        add: a tensor like x, or None.
        statistic: one number for each row (..., 1), or None.

    Raises:
        UserError: a shape or a dtype does not fit.
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
    # h = x + a would be float64, while the statistics are in the type that x asks for.
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
    """Return how many channels of each group the mean is over.

    Raises:
        UserError: the groups do not divide C, or a group has fewer channels than `counted`.
    """
    if groups < 1 or x.shape[-1] % groups:
        raise UserError(
            f"groups={groups} for {x.shape[-1]} channels: give a number that divides them"
        )
    in_group = x.shape[-1] // groups  # C / G
    if counted is None:
        return in_group
    if not 1 <= counted <= in_group:
        raise UserError(
            f"counted={counted} for groups of {in_group} channels: "
            f"give a number from 1 to {in_group}, or None for all"
        )
    return counted


def adds_in_rows(x: Tensor, a: Tensor) -> bool:
    """Should the sum x + a (B, T, C) be computed on rows (B T, C), the shape of the products?

    Under torch.compile, where a comes from a product of lower precision: inductor makes one kernel
    of the stream's gradient and its cast for that product only if both have the same loops.
    (Without a cast the sum would become part of an addmm, which copies its operand.)
    """
    return torch.compiler.is_compiling() and a.dtype != x.dtype


# --------------------------------------------------------------------------------- the functions


def add_residual(x: Tensor, a: Tensor) -> Tensor:
    """Return x + a, both (..., C)."""
    if adds_in_rows(x, a):
        return (x.flatten(0, -2) + a.flatten(0, -2)).view(x.shape)
    return x + a


def add_then(
    normalize: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]],
    x: Tensor,
    a: Tensor,
    inv_rms: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (y, h, statistic): h = x + a, and (y, statistic) = normalize(h, inv_rms).

    For norms without a kernel that adds as well. x and a are (..., C), inv_rms (..., G) or None.
    """
    if not adds_in_rows(x, a):
        h = x + a
        y, statistic = normalize(h, inv_rms)
        return y, h, statistic
    # (B, T, C) -> (B T, C), and back at the end
    h = x.flatten(0, -2) + a.flatten(0, -2)
    y, statistic = normalize(h, None if inv_rms is None else inv_rms.flatten(0, -2))
    if statistic is not None:
        statistic = statistic.view(*x.shape[:-1], -1)
    return y.view(x.shape), h.view(x.shape), statistic


def rms_norm(
    x: Tensor,
    w: Tensor | None,
    eps: float,
    b: Tensor | None = None,
    groups: int = 1,
    counted: int | None = None,
    mode: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return (y, inv_rms): y = x * inv_rms * w + b, inv_rms = 1 / sqrt(mean(x^2) + eps).

    Zhang & Sennrich 2019, equation 4. Both outputs are differentiable.

    Args:
        x: (..., C).
        w: gain (C,), or None.
        eps: added to the mean square.
        b: bias (C,), or None.
        groups: number of equal channel groups, each with its own statistic.
        counted: the mean is over the first channels of each group, this many; None for all.
        mode: which implementation runs (see above).

    Returns:
        y (..., C) in the type of x; inv_rms (..., groups) in float32, float64 for float64.
    """
    fits(x, w, b)
    counted = count(x, groups, counted)
    kernel = kernel_for(x, mode)
    if kernel is None:
        return reference.rms_norm(x, w, b, eps, groups, counted)
    norm = {"eps": eps, "groups": groups, "counted": counted, "kind": "rms"}
    y, _, _, inv_rms, _ = kernel(*binding.Inputs(x, w=w, b=b, **norm))
    return y, inv_rms


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
    """Return (y, h, inv_rms): h = x + a, and rms_norm of h after its rounding.

    a is (..., C) like x, in any dtype; the rest as in rms_norm.
    """
    fits(x, w, b, add=a)
    counted = count(x, groups, counted)
    kernel = kernel_for(x, mode)
    if kernel is None:
        return add_then(lambda h, _: reference.rms_norm(h, w, b, eps, groups, counted), x, a, None)
    norm = {"eps": eps, "groups": groups, "counted": counted, "kind": "rms"}
    y, h, _, inv_rms, _ = kernel(*binding.Inputs(x, a, w=w, b=b, **norm))
    return y, h, inv_rms


def norm_add_norm(
    x: Tensor,
    a: Tensor,
    w_out: Tensor | None,
    w_in: Tensor | None,
    eps_out: float,
    eps: float,
    mode: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, h, inv_rms): h = x + N_out(a), and N_in of h after its rounding, both RMSNorms.

    The boundary of two sublayers with an output norm and an input norm (Gemma 2, Peri-LN). N_out(a)
    is not rounded before it is added. All outputs are differentiable.

    Args:
        x: residual stream (..., C).
        a: what the sublayer returns, (..., C) like x, in any dtype.
        w_out: gain (C,) of the norm of a, or None.
        w_in: gain (C,) of the norm of h, or None.
        eps_out: added to the mean square of a.
        eps: added to that of h.
        mode: which implementation runs (see above).

    Returns:
        y and h (..., C) in the type of x; inv_rms (..., 1), the statistic of h.
    """
    fits(x, w_out, w_in, add=a)
    # No adds_in_rows: the gradient of a comes from a reduction over each row, so inductor makes the
    # same kernels of (B, T, C) and of (B T, C).
    kernel = kernel_for(x, mode)
    if kernel is None:
        return reference.norm_add_norm(x, a, w_out, w_in, eps_out, eps)[:3]
    norm = {"eps": eps, "eps_out": eps_out, "counted": x.shape[-1], "kind": "rms"}
    y, h, _, inv_rms, _ = kernel(*binding.Inputs(x, a, w=w_in, w_out=w_out, **norm))
    return y, h, inv_rms


def add_normed(
    x: Tensor, a: Tensor, w_out: Tensor | None, eps: float, mode: str = "auto"
) -> Tensor:
    """Return h = x + N(a), an RMSNorm: the boundary of OLMo 2, whose sublayers read h itself.

    a is (..., C) like x, in any dtype. h has the type of x, and N(a) is not rounded before.
    """
    fits(x, w_out, add=a)
    kernel = kernel_for(x, mode)
    if kernel is None:
        return reference.add_normed(x, a, w_out, eps)[0]
    return kernel(*binding.Inputs(x, a, w_out=w_out, eps_out=eps))[1]


def layer_norm(
    x: Tensor, w: Tensor | None, b: Tensor | None, eps: float, mode: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, mean, inv_std): y = (x - mean) * inv_std * w + b.

    Ba et al. 2016, with the biased variance and eps inside the root. mean and inv_std (..., 1)
    carry no gradient.
    """
    fits(x, w, b)
    kernel = kernel_for(x, mode)
    if kernel is None:
        return reference.layer_norm(x, w, b, eps)
    norm = {"eps": eps, "counted": x.shape[-1], "kind": "layer"}
    y, _, mean, inv_std, _ = kernel(*binding.Inputs(x, w=w, b=b, **norm))
    return y, mean, inv_std


def shared_rms_scale(h: Tensor, inv_rms: Tensor, w: Tensor | None, mode: str = "auto") -> Tensor:
    """Return h * inv_rms * w; inv_rms (..., 1) is a constant that was computed elsewhere.

    Loretz & Hochreiter 2026, equation 6.
    """
    fits(h, w, statistic=inv_rms)
    kernel = kernel_for(h, mode)
    if kernel is None:
        return reference.shared_rms_scale(h, inv_rms, w)
    return kernel(*binding.Inputs(h, None, inv_rms, w, counted=h.shape[-1], kind="shared"))[0]


def add_shared_rms_scale(
    x: Tensor, a: Tensor, inv_rms: Tensor, w: Tensor | None, mode: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Return (y, h): h = x + a, y = h * inv_rms * w; inv_rms (..., 1) is a constant."""
    fits(x, w, add=a, statistic=inv_rms)
    kernel = kernel_for(x, mode)
    if kernel is None:
        return add_then(lambda h, s: (reference.shared_rms_scale(h, s, w), None), x, a, inv_rms)[:2]
    return kernel(*binding.Inputs(x, a, inv_rms, w, counted=x.shape[-1], kind="shared"))[:2]


def scaled_activation(
    z: Tensor, inv_rms: Tensor, b: Tensor | None, kind: str, mode: str = "auto"
) -> Tensor:
    """Return act(z * inv_rms + b); inv_rms (..., 1) is a constant.

    Args:
        z: (..., F); for swiglu and geglu (..., 2 F), gate then up.
        inv_rms: one number for each row.
        b: bias like the last dimension of z, or None.
        kind: gelu, gelu_tanh, relu2, swiglu, which is silu(gate) * up, or geglu, which is
            gelu_tanh(gate) * up.
        mode: which implementation runs (see above).

    Returns:
        (..., F) in the type of z.
    """
    fits(z, b, statistic=inv_rms)
    if kind not in reference.KINDS:
        raise UserError(f"activation {kind!r}: it is one of {', '.join(reference.KINDS)}")
    if kind in reference.GATED and z.shape[-1] % 2:
        raise UserError(
            f"{kind} of {z.shape[-1]} channels: give an even number, gate and up side by side"
        )
    kernel = kernel_for(z, mode, activates=True)
    if kernel is not None:
        return kernel(*binding.Inputs(z, given=inv_rms, b=b, kind=kind))[0]
    if torch.compiler.is_compiling() and z.dtype != inv_rms.dtype:
        # Without the checkpoint, inductor may keep the slope for backward in the type of inv_rms:
        # twice the bytes of z, more than sharing a statistic saves.
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
    return reference.scaled_activation(z, inv_rms, b, kind)


def taper_norm(
    h: Tensor,
    w: Tensor | None,
    w_tilde: Tensor | None,
    gate_c: Tensor,
    eps: float,
    mode: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return (y, inv_rms): y = g * h * inv_rms * w + (1 - g) * c * h * w_tilde.

    Kanavalau, Amo Alonso & Lall 2026. gate_c (2,) is (g, c), on the device of h. gate_c and inv_rms
    (..., 1) carry no gradient.
    """
    fits(h, w, w_tilde)
    if gate_c.shape != (2,):
        raise UserError(f"gate_c of shape {tuple(gate_c.shape)}: give two numbers, the gate and c")
    kernel = kernel_for(h, mode)
    if kernel is None:
        return reference.taper_norm(h, w, w_tilde, gate_c, eps)
    norm = {"eps": eps, "counted": h.shape[-1], "kind": "taper"}
    y, _, _, inv_rms, _ = kernel(*binding.Inputs(h, w=w, w_tilde=w_tilde, gate_c=gate_c, **norm))
    return y, inv_rms
