"""Compute in plain PyTorch what every kernel computes.

These functions define the meaning of kernels/, and run where Triton does not. Autograd
differentiates them, and inductor fuses them. Only the shared position and the output norms have
backward functions of their own, for what they save.

Shapes: x is (..., C), gains and biases are (C,) or None, statistics are (..., 1), or (..., G) with
G channel groups. Statistics and all arithmetic are in float32, or in float64 where x is float64. A
result is rounded once, to the type of x.

Backward functions compute the gradients of gains only if `gains` is set.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .operands import Inputs, Outputs, Saved, Settings

# ------------------------------------------------------------------------------- shared arithmetic


def statistics_dtype(x: Tensor) -> torch.dtype:
    """Return float64 for float64 input, else float32: a square overflows float16 beyond 255."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in `dtype`; x itself where it has that type already.

    Not x.to, in what a torch.autograd.Function calls: of its own type that returns an alias, and
    dynamo of torch 2.11 then loses gradients in silence (pytorch/pytorch#180642).
    """
    return x if x.dtype == dtype else x.to(dtype)


def inverse_rms(x: Tensor, eps: float, groups: int = 1, counted: int | None = None) -> Tensor:
    """Compute 1 / sqrt(mean(x^2) + eps) for each row and group: (..., C) -> (..., groups).

    The mean is over the first `counted` channels of each group (None: all of them).
    """
    x = cast(x, statistics_dtype(x))
    if groups > 1:
        x = x.unflatten(-1, (groups, -1))  # (..., C) -> (..., G, C / G)
    mean_square = x[..., :counted].square().mean(-1, keepdim=groups == 1)  # (..., G)
    return torch.rsqrt(mean_square + eps)


def scale_groups(x: Tensor, scale: Tensor) -> Tensor:
    """Multiply each channel group of x (..., C) by its number in scale (..., G).

    The result (..., C) has the type of `scale`.
    """
    groups = scale.shape[-1]
    x = cast(x, scale.dtype)
    if groups == 1:
        return x * scale
    x = x.unflatten(-1, (groups, -1))  # (..., C) -> (..., G, C / G)
    return (x * scale.unsqueeze(-1)).flatten(-2)


def affine(y: Tensor, w: Tensor | None, b: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Apply gain w and bias b in the precision of y, then round once to `dtype`."""
    if w is not None:
        y = y * w
    if b is not None:
        y = y + b
    return cast(y, dtype)


def _sum_rows(terms: Tensor, parameter: Tensor | None, wanted: bool) -> Tensor | None:
    """Sum the terms (..., C) of a parameter's gradient over rows: (C,), in the parameter's type.

    Returns None where there is no parameter or no gradient is wanted.
    """
    if parameter is None or not wanted:
        return None
    return terms.flatten(0, -2).sum(0).to(parameter.dtype)


# ---------------------------------------------------------------------------- RMSNorm and LayerNorm


def rms_norm(
    x: Tensor,
    w: Tensor | None,
    b: Tensor | None,
    eps: float,
    groups: int = 1,
    counted: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute RMSNorm, y = x * inv_rms * w + b.

    Zhang & Sennrich 2019, equation 4, with eps inside the root. The mean is over the first
    `counted` channels of each group.

    Returns:
        (y, inv_rms): (..., C) and (..., G)
    """
    inv_rms = inverse_rms(x, eps, groups, counted)
    return affine(scale_groups(x, inv_rms), w, b, x.dtype), inv_rms


def layer_norm(
    x: Tensor, w: Tensor | None, b: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute LayerNorm, y = (x - mean) * inv_std * w + b; Ba et al. 2016.

    Returns:
        (y, mean, inv_std): (..., C), (..., 1) and (..., 1). The statistics carry no gradient.
    """
    # The cast is a copy in eager mode. But on 16-bit input PyTorch's CPU kernel leaves its
    # statistics in 16 bits.
    wide = statistics_dtype(x)
    w = None if w is None else w.to(wide)
    b = None if b is None else b.to(wide)
    y, mean, inv_std = torch.native_layer_norm(x.to(wide), x.shape[-1:], w, b, eps)
    return y.to(x.dtype), mean.detach(), inv_std.detach()


# ---------------------------------------------------------------------- output norm + add + norm


class AddNormedInputs(NamedTuple):
    """What AddNormed takes, and in backward the gradients of it."""

    x: Tensor
    a: Tensor
    w_out: Tensor | None
    w_in: Tensor | None
    eps_out: float | None = None
    eps: float | None = None


class AddNormedOutputs(NamedTuple):
    """What AddNormed returns, and in backward the gradients of it; y and inv_rms with an `eps`."""

    h: Tensor
    inv_out: Tensor | None
    y: Tensor | None = None
    inv_rms: Tensor | None = None


class AddNormed(torch.autograd.Function):
    """Compute h = x + N_out(a), rounded once, and with an `eps` y = N_in(h) too, both RMSNorms.

    What a sublayer returns is normalised before it is added (OLMo Team 2024, OLMo 2); with y it is
    the boundary between two sublayers of a sandwich: output norm, residual add, input norm (Gemma
    Team 2024, Gemma 2; Kim et al. 2025, Peri-LN). N_out(a) is not rounded before the sum. The
    outputs are h (..., C) in the type of x and the statistic of a (..., 1), which carries no
    gradient; then y, like h, and the statistic of h.

    It is written by hand because of what inductor makes of it, and of what is kept for backward: a,
    which the product before wrote anyway, h, which lives on as the residual stream, and a statistic
    a row of each. x is not kept, for the gradient of a sum needs no summand. a has to be: h - x is
    N_out(a) without the digits that the sum rounded off. Between products in a bfloat16 stream of
    768 channels it moves 17.9 kB a token this way, forward and backward with the adds of gradients,
    and 23.2 kB by autograd; with y 17.3 kB, and 21.9 kB by autograd, where the gradient of h passes
    from one kernel to another in float32 (counted as in bench/bytes.py).
    """

    generate_vmap_rule = True  # for torch.func

    @staticmethod
    def forward(
        x: Tensor,
        a: Tensor,
        w_out: Tensor | None,
        w_in: Tensor | None,
        eps_out: float,
        eps: float | None,
    ) -> tuple[Tensor, ...]:
        wide = statistics_dtype(x)
        a = cast(a, wide)
        inv_out = inverse_rms(a, eps_out)
        h = cast(x + affine(a * inv_out, w_out, None, wide), x.dtype)
        if eps is None:
            return h, inv_out
        inv_rms = inverse_rms(h, eps)
        y = affine(scale_groups(h, inv_rms), w_in, None, inv_rms.dtype)
        return h, inv_out, cast(y, x.dtype), inv_rms

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        given = AddNormedInputs(*inputs)
        found = AddNormedOutputs(*output)
        ctx.eps_out = given.eps_out
        ctx.mark_non_differentiable(found.inv_out)
        saved = Saved(x=None, a=given.a, w_out=given.w_out, inv_out=found.inv_out)
        if found.y is not None:
            saved = saved._replace(x=found.h, w=given.w_in, inv=found.inv_rms)
        ctx.save_for_backward(*saved)

    @staticmethod
    def backward(ctx, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Compute the gradients. With s = inv_rms, p = inv_out and n = C:

            q = dy w_in s,   dx = q - h s^2 (<q, h> + s ds) / n + dh,   dw_in = sum of dy s h
            r = dx w_out p,  da = r - a p^2 <r, a> / n,                 dw_out = sum of dx p a

        dh is the gradient of the residual stream h itself, which is dx where there is no y, and ds
        that of inv_rms. These are an RMSNorm's formulas in terms of h and of a, which are kept, and
        not of h s and a p, which inductor would keep in float32. dx is rounded before it is used
        for da: so inductor, which makes a kernel for each line, hands it on in the type of h.
        """
        upstream = AddNormedOutputs(*gradients)
        saved = Saved(*ctx.saved_tensors)
        a, inv_out = saved.a, saved.inv_out
        wide = inv_out.dtype
        wanted = AddNormedInputs(*ctx.needs_input_grad)
        gains = wanted.w_out or wanted.w_in
        if torch.is_grad_enabled():
            # A tensor that is kept is a constant in a second derivative, unless it is an input or a
            # differentiable output.
            inv_out = inverse_rms(a, ctx.eps_out)
        dx = upstream.h
        dw_in = None
        h = saved.x
        if h is not None:  # there is a y
            scaled = cast(upstream.y, wide) * saved.inv
            dw_in = _sum_rows(scaled * h, saved.w, gains)
            of_y = _through_norm(
                affine(scaled, saved.w, None, wide), h, saved.inv, upstream.inv_rms
            )
            dx = cast(of_y + upstream.h, h.dtype)
        scaled = cast(dx, wide) * inv_out  # the gradient of h is that of N_out(a)
        dw_out = _sum_rows(scaled * a, saved.w_out, gains)
        da = _through_norm(affine(scaled, saved.w_out, None, wide), a, inv_out, None)
        return tuple(AddNormedInputs(x=dx, a=cast(da, a.dtype), w_out=dw_out, w_in=dw_in))


def add_normed(inputs: Inputs, settings: Settings) -> Outputs:
    """Compute h = x + N_out(a), and y = N_in(h) unless the operator only adds."""
    eps = settings.eps if settings.kind else None
    given = AddNormedInputs(
        x=inputs.x,
        a=inputs.a,
        w_out=inputs.w_out,
        w_in=inputs.w,
        eps_out=settings.eps_out,
        eps=eps,
    )
    found = AddNormedOutputs(*AddNormed.apply(*given))
    return Outputs(y=found.y, h=found.h, inv=found.inv_rms, inv_out=found.inv_out)


def _through_norm(q: Tensor, x: Tensor, inv_rms: Tensor, ds: Tensor | None) -> Tensor:
    """Compute q - x s^2 (<q, x> + s ds) / C, with s = inv_rms.

    It is the gradient of RMSNorm's input x, given q = dy w s.
    """
    x = cast(x, q.dtype)
    dot = (q * x).sum(-1, keepdim=True)
    if ds is not None:
        dot = dot + inv_rms * ds
    # Not s^2: it is 0 in float32 where x is about 1e20, and x s is 1.
    return q - x * (dot * inv_rms / x.shape[-1]) * inv_rms


# ----------------------------------------------------------------- CoupledNorm's shared position


class SharedRMSScale(torch.autograd.Function):
    """Compute h * inv_rms * w with inv_rms a constant; Loretz & Hochreiter 2026, equation 6.

    inv_rms is what h is multiplied by: norms.py passes inv_rms / alpha.

    It is written by hand because of what autograd would save: h * inv_rms, which inductor then
    stores in float32. This saves h alone, in its own type, and backward computes no more than
    (dy * s) * w and the sum of (dy * s) * h, with s = inv_rms. In a bfloat16 block of 768 channels
    the norms move 23.4 kB a token this way, and 27.9 kB by autograd; RMSNorm takes 26.5 kB
    (bench/bytes.py).

    The result is rounded outside.
    """

    generate_vmap_rule = True  # for torch.func

    @staticmethod
    def forward(h: Tensor, inv_rms: Tensor, w: Tensor | None) -> Tensor:
        y = cast(h, inv_rms.dtype) * inv_rms
        return y if w is None else y * w

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, Tensor | None]:
        h, inv_rms, w = ctx.saved_tensors
        # This is differentiable too, and in a second derivative the statistic is again a constant.
        q = dy * inv_rms.detach()
        dh = q if w is None else q * w
        dw = _sum_rows(q * cast(h, q.dtype), w, ctx.needs_input_grad[2])
        return cast(dh, h.dtype), None, dw  # None: here the shared statistic is detached


def shared_rms_scale(h: Tensor, inv_rms: Tensor, w: Tensor | None) -> Tensor:
    """Compute y = h * inv_rms * w, differentiable in h and w alone."""
    return SharedRMSScale.apply(h, inv_rms, w).to(h.dtype)


# -------------------------------------------------------------------------------- scaled activation


# For these z is (..., 2 F), first the gate, then the up projection, and the result (..., F).
# Shazeer 2020: swiglu is silu(gate) * up. geglu is gelu_tanh(gate) * up, as in Gemma.
GATED = ("swiglu", "geglu")
ACTIVATIONS = ("gelu", "gelu_tanh", "relu2", *GATED)


def activate(z: Tensor, kind: str) -> Tensor:
    """Apply the MLP's activation: gelu, gelu_tanh, relu2, or one of GATED."""
    if kind in GATED:
        gate, up = z.chunk(2, dim=-1)
        if kind == "swiglu":
            return F.silu(gate) * up
        return F.gelu(gate, approximate="tanh") * up
    if kind == "relu2":
        return F.relu(z).square()
    return F.gelu(z, approximate="tanh" if kind == "gelu_tanh" else "none")


def scaled_activation(z: Tensor, inv_rms: Tensor, b: Tensor | None, kind: str) -> Tensor:
    """Compute act(z * inv_rms + b), with inv_rms (..., 1) a constant.

    z is (..., F), or (..., 2 F) for one of GATED; the result is (..., F).
    """
    if not torch.compiler.is_compiling() or z.dtype == inv_rms.dtype:
        return _wide_activation(z, inv_rms, b, kind).to(z.dtype)
    # Without the checkpoint, inductor may keep the slope for backward in the type of inv_rms: twice
    # the bytes of z, more than sharing a statistic saves.
    options = {"use_reentrant": False, "preserve_rng_state": False}
    return checkpoint(_wide_activation, z, inv_rms, b, kind, **options).to(z.dtype)


def _wide_activation(z: Tensor, inv_rms: Tensor, b: Tensor | None, kind: str) -> Tensor:
    """Compute scaled_activation in the type of inv_rms, before it is rounded."""
    u = z.to(inv_rms.dtype) * inv_rms.detach()
    if b is not None:
        u = u + b
    return activate(u, kind)


# ---------------------------------------------------------------------------------------- TaperNorm


def taper_norm(
    h: Tensor, w: Tensor | None, w_tilde: Tensor | None, gate_c: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute TaperNorm, y = g * h * inv_rms * w + (1 - g) * c * h * w_tilde.

    Kanavalau, Amo Alonso & Lall 2026.

    Args:
        h: input (..., C).
        w: gain of the RMSNorm, or None.
        w_tilde: gain of the fixed scaling, or None.
        gate_c: (2,), the gate g and the scale c, both constants.
        eps: of the RMSNorm.

    Returns:
        (y, inv_rms); inv_rms (..., 1) carries no gradient.
    """
    gate, c = gate_c.detach().unbind()
    x = h.to(statistics_dtype(h))
    fixed = x * (c if w_tilde is None else c * w_tilde)
    inv_rms = inverse_rms(x, eps)
    normed = affine(x * inv_rms, w, None, x.dtype)
    y = gate * normed + (1 - gate) * fixed
    return y.to(h.dtype), inv_rms.detach()


# ---------------------------------------------------------------------------------- all of them


def normalize(h: Tensor, inputs: Inputs, settings: Settings) -> Outputs:
    """Compute y and the statistics of the norm or activation of h; nothing is added.

    mean, and inv of LayerNorm and TaperNorm, carry no gradient.
    """
    kind, eps = settings.kind, settings.eps
    if kind == "rms":
        y, inv = rms_norm(h, inputs.w, inputs.b, eps, settings.groups, settings.counted)
        return Outputs(y, inv=inv)
    if kind == "layer":
        y, mean, inv = layer_norm(h, inputs.w, inputs.b, eps)
        return Outputs(y, mean=mean, inv=inv)
    if kind == "taper":
        y, inv = taper_norm(h, inputs.w, inputs.w_tilde, inputs.gate_c, eps)
        return Outputs(y, inv=inv)
    if kind == "shared":
        return Outputs(shared_rms_scale(h, inputs.given, inputs.w))
    if kind:
        return Outputs(scaled_activation(h, inputs.given, inputs.b, kind))
    return Outputs()
