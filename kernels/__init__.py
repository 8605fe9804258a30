"""Norms and activations of a GPT as fused kernels, forward and backward, and their dispatch.

A call goes from a norm to its Triton kernel in five steps: a function of this file names the
operands; `apply` chooses the implementation; binding.Fused gives it a gradient; `forward` of
row_norm.py or activation.py names the kernel's arguments; rows.launch starts it.

    operands.py    what operators take, keep and return, by name
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

A mode is about these functions alone. All else is plain PyTorch in every mode: norms of other
letters than R, L, s and T, a shared position with coupled_grad=full, a taper's fixed phase, and the
blending itself of a taper over LayerNorm or with a bias.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from . import reference
from .operands import Inputs, Outputs, Settings
from .reference import ACTIVATIONS

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


def apply(inputs: Inputs, settings: Settings, mode: str) -> Outputs:
    """Compute an operator: by its Triton kernel, which has a gradient, or in plain PyTorch.

    Raises:
        UserError: the inputs do not fit, or `mode` asks for Triton where it cannot run.
    """
    check(inputs, settings)
    if not takes_kernel(inputs.x, mode):
        return plain(inputs, settings)
    if torch.compiler.is_compiling():
        return binding.compiled(inputs, settings)
    return Outputs(*binding.Fused.apply(*inputs, settings))


def takes_kernel(x: Tensor, mode: str) -> bool:
    """Decide whether a Triton kernel runs on x, and not plain PyTorch.

    Raises:
        UserError: `mode` asks for Triton where it cannot run.
    """
    # The kernels compute in float32, which would not be enough for float64.
    if mode == "torch" or x.dtype == torch.float64:
        return False
    is_compiling = torch.compiler.is_compiling()
    if mode == "auto":
        # Inductor fuses the plain formula with its neighbours, and cannot look into an operator.
        # Whether it is then faster under torch.compile has not been measured yet.
        if binding is None or is_compiling or not x.is_cuda:
            return False
    elif binding is None:
        raise UserError(
            "kernels=triton, but Triton is not installed: pip install triton, or kernels=auto"
        )
    elif not x.is_cuda and not binding.INTERPRETED:
        raise UserError(
            f"kernels=triton on {x.device.type}: Triton needs a GPU (or TRITON_INTERPRET=1); "
            "kernels=auto"
        )
    # torch.func.grad and vmap are those of plain PyTorch.
    return is_compiling or not torch._C._are_functorch_transforms_active()


def check(inputs: Inputs, settings: Settings) -> None:
    """Check arguments: a kernel would read beyond the end of anything that is smaller.

    Raises:
        UserError: a shape or the groups do not fit.
    """
    x = inputs.x
    vector = x.shape[-1:]
    shapes = Inputs(
        x=x.shape,
        a=x.shape,
        given=(*x.shape[:-1], 1),
        w=vector,
        b=vector,
        w_out=vector,
        w_tilde=vector,
        gate_c=(2,),
    )
    for name, tensor, shape in zip(Inputs._fields, inputs, shapes):
        if tensor is not None and tensor.shape != shape:
            raise UserError(
                f"{name} of shape {tuple(tensor.shape)} beside x of {tuple(x.shape)}: "
                f"give it in {tuple(shape)}"
            )
    (channels,) = vector
    groups, counted = settings.groups, settings.counted
    if groups < 1 or channels % groups:
        raise UserError(f"groups={groups} for {channels} channels: give a number that divides them")
    if settings.kind in reference.GATED and channels % 2:
        raise UserError(f"{settings.kind} of {channels} channels: gate and up are equally many")
    in_group = channels // groups  # C / G
    if counted is not None and not 1 <= counted <= in_group:
        raise UserError(
            f"counted={counted} for groups of {in_group} channels: "
            f"give a number from 1 to {in_group}, or None for all"
        )


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
    shape = x.shape
    if adds_in_rows(x, a):  # (B, T, C) -> (B T, C), and back at the end
        x, a = x.flatten(0, -2), a.flatten(0, -2)
        inv_rms = None if inv_rms is None else inv_rms.flatten(0, -2)
    h = x + a
    y, statistic = normalize(h, inv_rms)
    if x.shape != shape:
        y, h = y.view(shape), h.view(shape)
        statistic = None if statistic is None else statistic.view(*shape[:-1], -1)
    return y, h, statistic


def plain(inputs: Inputs, settings: Settings) -> Outputs:
    """Compute an operator in plain PyTorch."""
    x, a = inputs.x, inputs.a
    if a is None:
        return reference.normalize(x, inputs, settings)
    if settings.eps_out is None:

        def normalize(h: Tensor, statistic: Tensor | None) -> tuple[Tensor, Tensor | None]:
            found = reference.normalize(h, inputs._replace(given=statistic), settings)
            return found.y, found.inv

        y, h, inv = add_then(normalize, x, a, inputs.given)
        return Outputs(y, h, inv=inv)
    # No adds_in_rows: the gradient of a comes from a reduction over each row, so inductor makes the
    # same kernels of (B, T, C) and of (B T, C).
    return reference.add_normed(inputs, settings)


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
    settings = Settings("rms", eps, groups=groups, counted=counted)
    found = apply(Inputs(x, w=w, b=b), settings, mode)
    return found.y, found.inv


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
    settings = Settings("rms", eps, groups=groups, counted=counted)
    found = apply(Inputs(x, a, w=w, b=b), settings, mode)
    return found.y, found.h, found.inv


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
    found = apply(Inputs(x, a, w=w_in, w_out=w_out), Settings("rms", eps, eps_out), mode)
    return found.y, found.h, found.inv


def add_normed(
    x: Tensor, a: Tensor, w_out: Tensor | None, eps: float, mode: str = "auto"
) -> Tensor:
    """Return h = x + N(a), an RMSNorm: the boundary of OLMo 2, whose sublayers read h itself.

    a is (..., C) like x, in any dtype. h has the type of x, and N(a) is not rounded before.
    """
    return apply(Inputs(x, a, w_out=w_out), Settings(eps_out=eps), mode).h


def layer_norm(
    x: Tensor, w: Tensor | None, b: Tensor | None, eps: float, mode: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, mean, inv_std): y = (x - mean) * inv_std * w + b.

    Ba et al. 2016, with the biased variance and eps inside the root. mean and inv_std (..., 1)
    carry no gradient.
    """
    found = apply(Inputs(x, w=w, b=b), Settings("layer", eps), mode)
    return found.y, found.mean, found.inv


def shared_rms_scale(h: Tensor, inv_rms: Tensor, w: Tensor | None, mode: str = "auto") -> Tensor:
    """Return h * inv_rms * w; inv_rms (..., 1) is a constant that was computed elsewhere.

    Loretz & Hochreiter 2026, equation 6.
    """
    return apply(Inputs(h, given=inv_rms, w=w), Settings("shared"), mode).y


def add_shared_rms_scale(
    x: Tensor, a: Tensor, inv_rms: Tensor, w: Tensor | None, mode: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Return (y, h): h = x + a, y = h * inv_rms * w; inv_rms (..., 1) is a constant."""
    found = apply(Inputs(x, a, given=inv_rms, w=w), Settings("shared"), mode)
    return found.y, found.h


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
    if kind not in ACTIVATIONS:
        raise UserError(f"activation {kind!r}: it is one of {', '.join(ACTIVATIONS)}")
    return apply(Inputs(z, given=inv_rms, b=b), Settings(kind), mode).y


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
    inputs = Inputs(h, w=w, w_tilde=w_tilde, gate_c=gate_c)
    found = apply(inputs, Settings("taper", eps), mode)
    return found.y, found.inv
