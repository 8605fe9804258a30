"""Compute in plain PyTorch what every kernel computes.

These functions define the meaning of kernels/, and run where Triton does not. Autograd
differentiates the forward functions, and inductor fuses them. The backward functions write the same
gradients out, term by term as the Triton kernels compute them: tests compare the kernels with them,
and the operators of binding.py call them where no kernel runs (float64, CPU). In plain PyTorch only
the shared position and norm_add_norm use their backward functions.

Shapes: x is (..., C), gains and biases are (C,) or None, statistics are (..., 1), or (..., G) with
G channel groups. Statistics and all arithmetic are in float32, or in float64 where x is float64. A
result is rounded once, to the type of x.

Backward functions compute the gradients of gains and biases only if `gains` is set. A gradient that
is not computed comes back as a tensor without elements, because an operator cannot return None.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# ------------------------------------------------------------------------------- shared arithmetic


def statistics_dtype(x: Tensor) -> torch.dtype:
    """Return float64 for float64 input, else float32: a square overflows float16 beyond 255."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def inverse_rms(x: Tensor, eps: float, groups: int = 1, counted: int | None = None) -> Tensor:
    """Compute 1 / sqrt(mean(x^2) + eps) for each row and group: (..., C) -> (..., groups).

    The mean is over the first `counted` channels of each group (None: all of them).
    """
    x = x.to(statistics_dtype(x))
    if groups > 1:
        x = x.unflatten(-1, (groups, -1))  # (..., C) -> (..., G, C / G)
    mean_square = x[..., :counted].square().mean(-1, keepdim=groups == 1)  # (..., G)
    return torch.rsqrt(mean_square + eps)


def scale_groups(x: Tensor, scale: Tensor) -> Tensor:
    """Multiply each channel group of x (..., C) by its number in scale (..., G).

    The result (..., C) has the type of `scale`.
    """
    groups = scale.shape[-1]
    x = x.to(scale.dtype)
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
    return y.to(dtype)


def _sum_rows(terms: Tensor, parameter: Tensor | None, wanted: bool) -> Tensor:
    """Sum the terms (..., C) of a parameter's gradient over rows: (C,), in the parameter's type.

    Returns a tensor without elements where there is no parameter or no gradient is wanted.
    """
    if parameter is None or not wanted:
        return terms.new_empty(0)
    return terms.flatten(0, -2).sum(0).to(parameter.dtype)


# ---------------------------------------------------------------------------- RMSNorm and LayerNorm


def rms_norm(
    x: Tensor, w: Tensor | None, b: Tensor | None, eps: float, groups: int, counted: int
) -> tuple[Tensor, Tensor]:
    """Compute RMSNorm, y = x * inv_rms * w + b.

    Zhang & Sennrich 2019, equation 4, with eps inside the root. The mean is over the first
    `counted` channels of each group.

    Returns:
        (y, inv_rms): (..., C) and (..., G)
    """
    inv_rms = inverse_rms(x, eps, groups, counted)
    return affine(scale_groups(x, inv_rms), w, b, x.dtype), inv_rms


def add_rms_norm(
    x: Tensor, a: Tensor, w: Tensor | None, b: Tensor | None, eps: float, groups: int, counted: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute h = x + a and RMSNorm of h.

    The statistics are those of h after rounding, because backward reads the rounded h.

    Returns:
        (y, h, inv_rms)
    """
    h = x + a
    y, inv_rms = rms_norm(h, w, b, eps, groups, counted)
    return y, h, inv_rms


def rms_norm_backward(
    dy: Tensor,
    dh: Tensor | None,
    ds: Tensor | None,
    x: Tensor,
    w: Tensor | None,
    b: Tensor | None,
    inv_rms: Tensor,
    counted: int,
    gains: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of RMSNorm.

    With s = inv_rms, v = x s, u = dy w and n = counted, in each group:

        dx = s (u - v (<u, v> + s ds) / n) + dh,    dw = sum of dy v,    db = sum of dy

    The part with v reaches only the counted channels; the sums are over rows.

    Args:
        dy: gradient of y.
        dh: gradient of the residual stream x itself, or None.
        ds: gradient of inv_rms, or None.
        x: the norm's input, rounded (h of add_rms_norm).
        w: gain.
        b: bias.
        inv_rms: from the forward pass.
        counted: channels of each group that the mean is over.
        gains: compute dw and db.

    Returns:
        (dx, dw, db)
    """
    dy = dy.to(inv_rms.dtype)
    groups = inv_rms.shape[-1]
    v = scale_groups(x, inv_rms)
    u = dy if w is None else dy * w
    dot = (u * v).unflatten(-1, (groups, -1)).sum(-1)  # <u, v>: (..., C) -> (..., G)
    if ds is not None:
        dot = dot + inv_rms * ds
    through = scale_groups(v, dot / counted)  # what flows back through the statistic
    through = _zero_beyond(through, groups, counted)
    dx = scale_groups(u - through, inv_rms)
    if dh is not None:
        dx = dx + dh
    return dx.to(x.dtype), _sum_rows(dy * v, w, gains), _sum_rows(dy, b, gains)


def _zero_beyond(x: Tensor, groups: int, counted: int) -> Tensor:
    """Set x (..., C) to 0 beyond the counted channels of each group."""
    x = x.unflatten(-1, (groups, -1))  # (..., C) -> (..., G, C / G)
    return F.pad(x[..., :counted], (0, x.shape[-1] - counted)).flatten(-2)


def inverse_rms_backward(ds: Tensor, x: Tensor, inv_rms: Tensor, counted: int) -> Tensor:
    """Compute dx for the gradient ds (..., G) of inv_rms alone.

    It is -x s^3 ds / n in the n = counted channels of each group, with s = inv_rms, and else 0.
    """
    dx = scale_groups(x, -ds * inv_rms**3 / counted)
    return _zero_beyond(dx, inv_rms.shape[-1], counted).to(x.dtype)


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


def layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    w: Tensor | None,
    b: Tensor | None,
    mean: Tensor,
    inv_std: Tensor,
    gains: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of LayerNorm.

    With v = (x - mean) inv_std and u = dy w:

        dx = inv_std (u - mean(u) - v mean(u v)),    dw = sum of dy v,    db = sum of dy

    Returns:
        (dx, dw, db)
    """
    dy = dy.to(inv_std.dtype)
    v = (x.to(inv_std.dtype) - mean) * inv_std
    u = dy if w is None else dy * w
    dx = inv_std * (u - u.mean(-1, keepdim=True) - v * (u * v).mean(-1, keepdim=True))
    return dx.to(x.dtype), _sum_rows(dy * v, w, gains), _sum_rows(dy, b, gains)


# ---------------------------------------------------------------------- output norm + add + norm


def _add_normed(x: Tensor, a: Tensor, w_out: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Compute h = x + N(a), rounded once to the type of x, and the statistic of a."""
    wide = statistics_dtype(x)
    a = a.to(wide)
    inv_out = inverse_rms(a, eps)
    h = x + affine(a * inv_out, w_out, None, wide)
    return _rounded(h, x.dtype), inv_out


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round x to `dtype`; a cast to its own type is left out, for it would return an alias.

    SharedRMSScale says why a torch.autograd.Function may not return one.
    """
    return x if x.dtype == dtype else x.to(dtype)


class AddNormed(torch.autograd.Function):
    """Compute h = x + N(a), with N an RMSNorm of gain w_out.

    What a sublayer returns is normalised before it is added (OLMo Team 2024, OLMo 2).

    It is written by hand because of what inductor makes of it. Kept for backward is a alone, which
    the product before wrote anyway, and one statistic a row. Between products in a bfloat16 stream
    of 768 channels it moves 17.9 kB a token this way, forward and backward with the adds of
    gradients, and 23.2 kB by autograd (counted as in bench/bytes.py).
    """

    generate_vmap_rule = True  # for torch.func

    @staticmethod
    def forward(x: Tensor, a: Tensor, w_out: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        return _add_normed(x, a, w_out, eps)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, a, w_out, ctx.eps = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(a, w_out, output[1])

    @staticmethod
    def backward(ctx, dh: Tensor, _) -> tuple[Tensor | None, ...]:
        a, w_out, inv_out = ctx.saved_tensors
        inv_out = _unless_second(inv_out, a, ctx.eps)
        gains = ctx.needs_input_grad[2]
        da, dw_out = _output_norm_backward(dh, a, w_out, inv_out, gains)
        return dh, da, dw_out if gains else None, None


def _unless_second(inv_out: Tensor, a: Tensor, eps: float) -> Tensor:
    """Return the statistic of a that forward kept, or in a second derivative one that depends on a.

    A tensor that is kept is a constant there, unless it is an input or a differentiable output.
    """
    return inverse_rms(a.to(inv_out.dtype), eps) if torch.is_grad_enabled() else inv_out


def _output_norm_backward(
    dh: Tensor, a: Tensor, w_out: Tensor | None, inv_out: Tensor, gains: bool
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of a and of w_out, given that of h = x + N(a), which is that of N(a).

    See norm_add_norm_backward.
    """
    scaled = dh.to(inv_out.dtype) * inv_out
    dw_out = _sum_rows(scaled * a, w_out, gains)
    da = _through_norm(affine(scaled, w_out, None, inv_out.dtype), a, inv_out, None)
    return da.to(a.dtype), dw_out


def add_normed(x: Tensor, a: Tensor, w_out: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Compute h = x + N(a): see AddNormed. N(a) is not rounded before the sum.

    Returns:
        (h, inv_out): (..., C) in the type of x, and (..., 1). inv_out, the statistic of a, carries
        no gradient.
    """
    return AddNormed.apply(x, a, w_out, eps)


class NormAddNorm(torch.autograd.Function):
    """Compute h = x + N_out(a) and y = N_in(h), both RMSNorms.

    The boundary between two sublayers of a sandwich: output norm, residual add, input norm (Gemma
    Team 2024, Gemma 2; Kim et al. 2025, Peri-LN).

    It is written by hand because of what is kept for backward: h, which lives on as the residual
    stream, a, which the product before wrote anyway, and two statistics a row. x is not kept, for
    the gradient of a sum needs no summand. a has to be: h - x is N_out(a) without the digits that
    the sum rounded off. Between products in a bfloat16 stream of 768 channels inductor's kernels
    move 17.3 kB a token this way, forward and backward, and 21.9 kB by autograd, where the gradient
    of h passes from one kernel to another in float32 (counted as in bench/bytes.py).
    """

    generate_vmap_rule = True  # for torch.func

    @staticmethod
    def forward(
        x: Tensor,
        a: Tensor,
        w_out: Tensor | None,
        w_in: Tensor | None,
        eps_out: float,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        h, inv_out = _add_normed(x, a, w_out, eps_out)
        inv_rms = inverse_rms(h, eps)
        y = affine(scale_groups(h, inv_rms), w_in, None, inv_rms.dtype)
        return _rounded(y, x.dtype), h, inv_rms, inv_out

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, a, w_out, w_in, ctx.eps_out, _ = inputs
        _, h, inv_rms, inv_out = output
        ctx.mark_non_differentiable(inv_out)
        ctx.save_for_backward(h, a, w_out, w_in, inv_rms, inv_out)

    @staticmethod
    def backward(ctx, dy: Tensor, dh: Tensor, ds: Tensor, _) -> tuple[Tensor | None, ...]:
        h, a, w_out, w_in, inv_rms, inv_out = ctx.saved_tensors
        inv_out = _unless_second(inv_out, a, ctx.eps_out)
        gains = ctx.needs_input_grad[2:4]
        dx, da, dw_out, dw_in = norm_add_norm_backward(
            dy, dh, ds, h, a, w_out, w_in, inv_rms, inv_out, any(gains)
        )
        return dx, da, dw_out if gains[0] else None, dw_in if gains[1] else None, None, None


def norm_add_norm(
    x: Tensor, a: Tensor, w_out: Tensor | None, w_in: Tensor | None, eps_out: float, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute h = x + N_out(a), rounded once, and y = N_in(h): see NormAddNorm.

    Args:
        x: residual stream (..., C).
        a: what the sublayer returns (..., C), in any type.
        w_out: gain of the norm of a, or None.
        w_in: gain of the norm of h, or None.
        eps_out: added to the mean square of a.
        eps: added to the mean square of h.

    Returns:
        (y, h, inv_rms, inv_out): y and h in the type of x; the statistics of h and of a (..., 1).
        inv_out carries no gradient.
    """
    return NormAddNorm.apply(x, a, w_out, w_in, eps_out, eps)


def norm_add_norm_backward(
    dy: Tensor,
    dh: Tensor | None,
    ds: Tensor | None,
    h: Tensor,
    a: Tensor,
    w_out: Tensor | None,
    w_in: Tensor | None,
    inv_rms: Tensor,
    inv_out: Tensor,
    gains: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of norm_add_norm.

    With s = inv_rms, p = inv_out and n = C:

        q = dy w_in s,   dx = q - h s^2 (<q, h> + s ds) / n + dh,   dw_in = sum of dy s h
        r = dx w_out p,  da = r - a p^2 <r, a> / n,                 dw_out = sum of dx p a

    These are the formulas of rms_norm_backward in terms of h and of a, which are kept, and not of
    h s and a p, which inductor would keep in float32. dx is rounded before it is used for da: so
    inductor, which makes a kernel for each line, hands it on in the type of h.

    Args:
        dy: gradient of y.
        dh: gradient of the residual stream h itself, or None.
        ds: gradient of inv_rms, or None.
        h: x + N_out(a), rounded.
        a: input of the output norm.
        w_out: its gain.
        w_in: gain of the input norm.
        inv_rms: statistic of h.
        inv_out: statistic of a.
        gains: compute dw_out and dw_in.

    Returns:
        (dx, da, dw_out, dw_in)
    """
    wide = inv_rms.dtype
    scaled = dy.to(wide) * inv_rms
    dw_in = _sum_rows(scaled * h, w_in, gains)
    dx = _through_norm(affine(scaled, w_in, None, wide), h, inv_rms, ds)
    if dh is not None:
        dx = dx + dh
    dx = dx.to(h.dtype)
    da, dw_out = _output_norm_backward(dx, a, w_out, inv_out, gains)
    return dx, da, dw_out, dw_in


def _through_norm(q: Tensor, x: Tensor, inv_rms: Tensor, ds: Tensor | None) -> Tensor:
    """Compute q - x s^2 (<q, x> + s ds) / C, with s = inv_rms.

    It is the gradient of RMSNorm's input x, given q = dy w s.
    """
    x = x.to(q.dtype)
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

    The result is rounded outside. A cast to the same type returns an alias, and dynamo of torch
    2.11 loses the gradient of a Function that returns an alias (pytorch/pytorch#180642).
    """

    generate_vmap_rule = True  # for torch.func

    @staticmethod
    def forward(h: Tensor, inv_rms: Tensor, w: Tensor | None) -> Tensor:
        y = h.to(inv_rms.dtype) * inv_rms
        return y if w is None else y * w

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, Tensor | None]:
        h, inv_rms, w = ctx.saved_tensors
        gains = ctx.needs_input_grad[2]
        # This is differentiable too, and in a second derivative the statistic is again a constant.
        dh, dw = shared_rms_scale_backward(dy, None, h, inv_rms.detach(), w, gains)
        return dh, None, dw if gains else None  # None: here the shared statistic is detached


def shared_rms_scale(h: Tensor, inv_rms: Tensor, w: Tensor | None) -> Tensor:
    """Compute y = h * inv_rms * w, differentiable in h and w alone."""
    return SharedRMSScale.apply(h, inv_rms, w).to(h.dtype)


def add_shared_rms_scale(
    x: Tensor, a: Tensor, inv_rms: Tensor, w: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute h = x + a, rounded, and y = h * inv_rms * w.

    Returns:
        (y, h)
    """
    h = x + a
    return shared_rms_scale(h, inv_rms, w), h


def shared_rms_scale_backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, inv_rms: Tensor, w: Tensor | None, gains: bool
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of shared_rms_scale, without a reduction over C.

    With q = dy inv_rms: dh = q w, plus the gradient `dh` of the residual stream h itself, and
    dw = sum of q h over rows.

    Returns:
        (dh, dw)
    """
    q = dy.to(inv_rms.dtype) * inv_rms
    total_dh = q if w is None else q * w
    if dh is not None:
        total_dh = total_dh + dh
    return total_dh.to(h.dtype), _sum_rows(q * h.to(q.dtype), w, gains)


# -------------------------------------------------------------------------------- scaled activation


# For these z is (..., 2 F), first the gate, then the up projection, and the result (..., F).
# Shazeer 2020: swiglu is silu(gate) * up. geglu is gelu_tanh(gate) * up, as in Gemma.
GATED = ("swiglu", "geglu")
KINDS = ("gelu", "gelu_tanh", "relu2", *GATED)


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
    return wide_activation(z, inv_rms, b, kind).to(z.dtype)


def wide_activation(z: Tensor, inv_rms: Tensor, b: Tensor | None, kind: str) -> Tensor:
    """Compute scaled_activation in the type of inv_rms, before it is rounded.

    A function of its own, because kernels/__init__.py checkpoints it under torch.compile.
    """
    u = z.to(inv_rms.dtype) * inv_rms.detach()
    if b is not None:
        u = u + b
    return activate(u, kind)


def scaled_activation_backward(
    dy: Tensor, z: Tensor, inv_rms: Tensor, b: Tensor | None, kind: str, gains: bool
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of scaled_activation.

    With u = z inv_rms + b, computed again from z: dz = dy act'(u) inv_rms, and db = sum of
    dy act'(u) over rows.

    Returns:
        (dz, db)
    """
    dy = dy.to(inv_rms.dtype)
    u = z.to(inv_rms.dtype) * inv_rms
    if b is not None:
        u = u + b
    if kind == "swiglu":
        gate, up = u.chunk(2, dim=-1)
        sigma = gate.sigmoid()
        # silu(g) = g sigma(g), silu'(g) = sigma(g) (1 + g (1 - sigma(g)))
        d_gate = dy * up * sigma * (1 + gate * (1 - sigma))
        d_up = dy * gate * sigma
        du = torch.cat([d_gate, d_up], -1)
    elif kind == "geglu":
        gate, up = u.chunk(2, dim=-1)
        d_gate = dy * up * activation_slope(gate, "gelu_tanh")
        d_up = dy * activate(gate, "gelu_tanh")
        du = torch.cat([d_gate, d_up], -1)
    else:
        du = dy * activation_slope(u, kind)
    return (du * inv_rms).to(z.dtype), _sum_rows(du, b, gains)


def activation_slope(u: Tensor, kind: str) -> Tensor:
    """Compute the derivative of gelu, gelu_tanh or relu2 at u."""
    if kind == "relu2":
        return 2 * F.relu(u)
    if kind == "gelu_tanh":
        # gelu_tanh(u) = u sigma(2 t), t = sqrt(2 / pi) (u + 0.044715 u^3)
        root = math.sqrt(2 / math.pi)
        sigma = (2 * root * (u + 0.044715 * u**3)).sigmoid()
        return sigma + 2 * u * sigma * (1 - sigma) * root * (1 + 3 * 0.044715 * u * u)
    # gelu(u) = u cdf(u), gelu'(u) = cdf(u) + u pdf(u), of the standard normal
    cdf = 0.5 * (1 + torch.erf(u * math.sqrt(0.5)))
    return cdf + u * torch.exp(-0.5 * u * u) / math.sqrt(2 * math.pi)


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


def taper_norm_backward(
    dy: Tensor,
    h: Tensor,
    w: Tensor | None,
    w_tilde: Tensor | None,
    gate_c: Tensor,
    inv_rms: Tensor,
    gains: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of TaperNorm.

    They are RMSNorm's gradient times g, and the fixed scaling's times (1 - g) c.

    Returns:
        (dh, dw, dw_tilde)
    """
    gate = gate_c[0]
    rest = (1 - gate_c[0]) * gate_c[1]  # (1 - g) c
    dy = dy.to(inv_rms.dtype)
    v = h.to(inv_rms.dtype) * inv_rms
    u = dy if w is None else dy * w
    fixed = dy if w_tilde is None else dy * w_tilde
    normed = inv_rms * (u - v * (u * v).mean(-1, keepdim=True))
    dh = gate * normed + rest * fixed
    dw = _sum_rows(gate * (dy * v), w, gains)
    dw_tilde = _sum_rows(rest * (dy * h.to(dy.dtype)), w_tilde, gains)
    return dh.to(h.dtype), dw, dw_tilde
