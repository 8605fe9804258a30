"""Norms and activations of a GPT as fused kernels, forward and backward, and their dispatch.

A call goes from a norm to its Triton kernel in three steps: a function of this file names the
arguments and chooses the implementation; binding.py gives it a gradient; row_norm.py starts the
kernel (through rows.launch).

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
from typing import Any

import torch
from torch import Tensor

from . import reference
from .reference import KINDS, Inputs, Outputs

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


def implementation(given: Inputs, mode: str = "auto") -> Callable[..., tuple]:
    """Return what computes Outputs of these Inputs: a Triton kernel with its gradient, or `plain`.

    Raises:
        UserError: the inputs do not fit, or `mode` asks for Triton where it cannot run.
    """
    check(given)
    x = given.x
    # The kernels compute in float32, which would not be enough here.
    if mode == "torch" or x.dtype == torch.float64:
        return plain
    is_compiling = torch.compiler.is_compiling()
    if mode == "auto":
        # Inductor fuses the plain formula with its neighbours, and cannot look into an operator.
        # Whether it is then faster under torch.compile has not been measured yet.
        if binding is None or is_compiling or not x.is_cuda:
            return plain
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
        return plain
    return binding.Fused.apply


def check(given: Inputs) -> None:
    """Check arguments: a kernel would read beyond the end of anything that is smaller.

    Raises:
        UserError: a shape or the groups do not fit.
    """
    x = given.x
    channels = x.shape[-1:]
    row = (*x.shape[:-1], 1)  # of a statistic
    shapes = (x.shape, x.shape, row, *[channels] * 4, (2,))
    for name, tensor, shape in zip(Inputs._fields, given, shapes):
        if tensor is not None and tensor.shape != shape:
            raise UserError(
                f"{name} of shape {tuple(tensor.shape)} beside x of {tuple(x.shape)}: "
                f"give it in {tuple(shape)}"
            )
    if given.groups < 1 or channels[0] % given.groups:
        raise UserError(
            f"groups={given.groups} for {channels[0]} channels: give a number that divides them"
        )
    if given.kind in reference.GATED and channels[0] % 2:
        raise UserError(f"{given.kind} of {channels[0]} channels: gate and up are equally many")
    in_group = channels[0] // given.groups  # C / G
    if given.counted is not None and not 1 <= given.counted <= in_group:
        raise UserError(
            f"counted={given.counted} for groups of {in_group} channels: "
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


def plain(*arguments) -> Outputs:
    """Compute Outputs of Inputs in plain PyTorch."""
    given = Inputs(*arguments)
    x, a = given.x, given.a
    if a is None:
        return reference.normalize(x, given)
    if given.eps_out is None:

        def normalize(h: Tensor, statistic: Tensor | None) -> tuple[Tensor, Tensor | None]:
            found = reference.normalize(h, given._replace(given=statistic))
            return found.y, found.inv

        y, h, inv = add_then(normalize, x, a, given.given)
        return Outputs(y, h, inv=inv)
    # No adds_in_rows: the gradient of a comes from a reduction over each row, so inductor makes the
    # same kernels of (B, T, C) and of (B T, C).
    h, inv_out, *normed = reference.AddNormed.apply(
        x, a, given.w_out, given.w, given.eps_out, given.eps if given.kind else None
    )
    y, inv = normed or (None, None)
    return Outputs(y, h, None, inv, inv_out)


def run(mode: str, *tensors: Tensor | None, **others: Any) -> tuple:
    """Compute Outputs of Inputs(*tensors, **others)."""
    given = Inputs(*tensors, **others)
    return implementation(given, mode)(*given)


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
    y, _, _, inv_rms, _ = run(
        mode, x, w=w, b=b, eps=eps, groups=groups, counted=counted, kind="rms"
    )
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
    y, h, _, inv_rms, _ = run(
        mode, x, a, w=w, b=b, eps=eps, groups=groups, counted=counted, kind="rms"
    )
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
    y, h, _, inv_rms, _ = run(mode, x, a, w=w_in, w_out=w_out, eps=eps, eps_out=eps_out, kind="rms")
    return y, h, inv_rms


def add_normed(
    x: Tensor, a: Tensor, w_out: Tensor | None, eps: float, mode: str = "auto"
) -> Tensor:
    """Return h = x + N(a), an RMSNorm: the boundary of OLMo 2, whose sublayers read h itself.

    a is (..., C) like x, in any dtype. h has the type of x, and N(a) is not rounded before.
    """
    return run(mode, x, a, w_out=w_out, eps_out=eps)[1]


def layer_norm(
    x: Tensor, w: Tensor | None, b: Tensor | None, eps: float, mode: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, mean, inv_std): y = (x - mean) * inv_std * w + b.

    Ba et al. 2016, with the biased variance and eps inside the root. mean and inv_std (..., 1)
    carry no gradient.
    """
    y, _, mean, inv_std, _ = run(mode, x, w=w, b=b, eps=eps, kind="layer")
    return y, mean, inv_std


def shared_rms_scale(h: Tensor, inv_rms: Tensor, w: Tensor | None, mode: str = "auto") -> Tensor:
    """Return h * inv_rms * w; inv_rms (..., 1) is a constant that was computed elsewhere.

    Loretz & Hochreiter 2026, equation 6.
    """
    return run(mode, h, given=inv_rms, w=w, kind="shared")[0]


def add_shared_rms_scale(
    x: Tensor, a: Tensor, inv_rms: Tensor, w: Tensor | None, mode: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Return (y, h): h = x + a, y = h * inv_rms * w; inv_rms (..., 1) is a constant."""
    return run(mode, x, a, inv_rms, w, kind="shared")[:2]


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
    if kind not in KINDS:
        raise UserError(f"activation {kind!r}: it is one of {', '.join(KINDS)}")
    return run(mode, z, given=inv_rms, b=b, kind=kind)[0]


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
    y, _, _, inv_rms, _ = run(mode, h, w=w, w_tilde=w_tilde, gate_c=gate_c, eps=eps, kind="taper")
    return y, inv_rms
