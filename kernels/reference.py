"""What every kernel computes, in plain PyTorch: the meaning of kernels/, and what runs where Triton
does not.

Forward functions are for autograd to differentiate and for inductor to fuse. The backward functions
are the same gradients written out, term by term as the Triton kernels compute them.

Shapes: x (..., C), gains and biases (C,) or None, statistics (..., 1), or (..., G) with G channel
groups. Statistics and all maths are in float32, in float64 where x is; a result is rounded once, to
the type of x. Backward functions leave out the gradients of gains and biases unless `gains` is set.
A gradient that nobody wants comes back as a tensor without elements, because an operator cannot
return None.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# ------------------------------------------------------------------------------------- shared maths


def statistics_dtype(x: Tensor) -> torch.dtype:
    """float64 for float64 input, else float32: a square overflows float16 beyond 255."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def inverse_rms(x: Tensor, eps: float, groups: int = 1, counted: int | None = None) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the first `counted` channels of each group: (..., C) -> (...,
    groups).
    """
    x = x.to(statistics_dtype(x))
    if groups > 1:
        x = x.unflatten(-1, (groups, -1))  # (..., C) -> (..., G, C / G)
    mean_square = x[..., :counted].square().mean(-1, keepdim=groups == 1)
    return torch.rsqrt(mean_square + eps)


def scale_groups(x: Tensor, scale: Tensor) -> Tensor:
    """x (..., C) times scale (..., G), one number per channel group; computed in the precision of
    `scale`.
    """
    groups, x = scale.shape[-1], x.to(scale.dtype)
    if groups == 1:
        return x * scale
    return (x.unflatten(-1, (groups, -1)) * scale.unsqueeze(-1)).flatten(-2)


def affine(y: Tensor, w: Tensor | None, b: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Gain and bias in the precision of y, then one rounding to `dtype`."""
    if w is not None:
        y = y * w
    if b is not None:
        y = y + b
    return y.to(dtype)


def _sum_rows(terms: Tensor, like: Tensor | None, wanted: bool) -> Tensor:
    """Gradient of a (C,) parameter from its terms (..., C), in the parameter's type; nothing if it
    is not wanted.
    """
    return (
        terms.new_empty(0)
        if like is None or not wanted
        else terms.flatten(0, -2).sum(0).to(like.dtype)
    )


# ---------------------------------------------------------------------------- RMSNorm and LayerNorm


def rms_norm(
    x: Tensor, w: Tensor | None, b: Tensor | None, eps: float, groups: int, counted: int
) -> tuple[Tensor, Tensor]:
    """(y, inv_rms), y = x * inv_rms * w + b; Zhang & Sennrich 2019, equation 4, with eps inside the
    root.
    """
    inv_rms = inverse_rms(x, eps, groups, counted)
    return affine(scale_groups(x, inv_rms), w, b, x.dtype), inv_rms


def add_rms_norm(
    x: Tensor, a: Tensor, w: Tensor | None, b: Tensor | None, eps: float, groups: int, counted: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, h, inv_rms) with h = x + a; the statistics are of h as rounded, which is what backward
    will see.
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
    """(dx, dw, db) for the gradients dy of y, ds of inv_rms and dh of the residual stream x itself.

    With s = inv_rms, v = x s, u = dy w and n = counted: dx = s (u - v (<u, v> + s ds) / n) + dh,
    where the part with v reaches only the counted channels.
    """
    dy, v, groups = dy.to(inv_rms.dtype), scale_groups(x, inv_rms), inv_rms.shape[-1]
    u = dy if w is None else dy * w
    dot = (u * v).unflatten(-1, (groups, -1)).sum(-1)  # (..., C) -> (..., G)
    if ds is not None:
        dot = dot + inv_rms * ds
    through = scale_groups(v, dot / counted).unflatten(-1, (groups, -1))
    through = F.pad(through[..., :counted], (0, through.shape[-1] - counted)).flatten(-2)
    dx = scale_groups(u - through, inv_rms)
    if dh is not None:
        dx = dx + dh
    return dx.to(x.dtype), _sum_rows(dy * v, w, gains), _sum_rows(dy, b, gains)


def inverse_rms_backward(ds: Tensor, x: Tensor, inv_rms: Tensor, counted: int) -> Tensor:
    """dx for the gradient ds (..., G) of inv_rms alone: -x s^3 ds / n in the n counted channels of
    each group.
    """
    dx = scale_groups(x, -ds * inv_rms**3 / counted).unflatten(-1, (inv_rms.shape[-1], -1))
    return F.pad(dx[..., :counted], (0, dx.shape[-1] - counted)).flatten(-2).to(x.dtype)


def layer_norm(
    x: Tensor, w: Tensor | None, b: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, inv_std), y = (x - mean) * inv_std * w + b; Ba et al.

    2016. The statistics carry no gradient.
    """
    # a copy in eager mode, but a CPU kernel on 16 bits leaves its statistics in 16 bits
    wide = statistics_dtype(x)
    w, b = (None if p is None else p.to(wide) for p in (w, b))
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
    """(dx, dw, db).

    With v = (x - mean) inv_std and u = dy w: dx = inv_std (u - mean(u) - v mean(u v)).
    """
    dy, v = dy.to(inv_std.dtype), (x.to(inv_std.dtype) - mean) * inv_std
    u = dy if w is None else dy * w
    dx = inv_std * (u - u.mean(-1, keepdim=True) - v * (u * v).mean(-1, keepdim=True))
    return dx.to(x.dtype), _sum_rows(dy * v, w, gains), _sum_rows(dy, b, gains)


# ----------------------------------------------------------------------------- the coupled position


class SharedRMSScale(torch.autograd.Function):
    """h * inv_rms * w with inv_rms a constant; Loretz & Hochreiter 2026, equation 6.

    Written by hand because of what autograd would keep: it saves h * inv_rms, which inductor then
    stores in float32. This saves h alone, in its own type, and the backward reads no more than it
    must: (dy * s) * w and (dy * s) * h. The result is rounded outside: dynamo of torch 2.11 loses
    the gradient of a Function that returns the alias which a cast to the same type is
    (pytorch/pytorch#180642).
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
        # This is differentiable too, and the statistic is a constant in a second derivative as
        # well.
        gains = ctx.needs_input_grad[2]
        dh, dw = shared_rms_scale_backward(dy, None, h, inv_rms.detach(), w, gains)
        return dh, None, dw if gains else None


def shared_rms_scale(h: Tensor, inv_rms: Tensor, w: Tensor | None) -> Tensor:
    """y = h * inv_rms * w, differentiable in h and w alone."""
    return SharedRMSScale.apply(h, inv_rms, w).to(h.dtype)


def add_shared_rms_scale(
    x: Tensor, a: Tensor, inv_rms: Tensor, w: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(y, h), h = x + a rounded, y = h * inv_rms * w."""
    h = x + a
    return shared_rms_scale(h, inv_rms, w), h


def shared_rms_scale_backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, inv_rms: Tensor, w: Tensor | None, gains: bool
) -> tuple[Tensor, Tensor]:
    """(dh, dw): no reduction over C. dh is (dy * s) * w plus the gradient of the residual stream
    itself.
    """
    q = dy.to(inv_rms.dtype) * inv_rms
    out = q if w is None else q * w
    if dh is not None:
        out = out + dh
    return out.to(h.dtype), _sum_rows(q * h.to(q.dtype), w, gains)


# -------------------------------------------------------------------------------- scaled activation


KINDS = ("gelu", "gelu_tanh", "relu2", "swiglu")


def activate(z: Tensor, kind: str) -> Tensor:
    """The MLP's activation: gelu, gelu_tanh, relu2 or swiglu; for swiglu z is (..., 2 F): gate,
    then up.
    """
    if kind == "swiglu":
        gate, up = z.chunk(2, dim=-1)
        return F.silu(gate) * up
    if kind == "relu2":
        return F.relu(z).square()
    return F.gelu(z, approximate="tanh" if kind == "gelu_tanh" else "none")


def scaled_activation(z: Tensor, inv_rms: Tensor, b: Tensor | None, kind: str) -> Tensor:
    """activate(z * inv_rms + b), inv_rms a constant: z (..., F), or (..., 2 F) for swiglu, -> (...,
    F).
    """
    return wide_activation(z, inv_rms, b, kind).to(z.dtype)


def wide_activation(z: Tensor, inv_rms: Tensor, b: Tensor | None, kind: str) -> Tensor:
    """The same in the type of inv_rms, before it is rounded."""
    u = z.to(inv_rms.dtype) * inv_rms.detach()
    return activate(u if b is None else u + b, kind)


def scaled_activation_backward(
    dy: Tensor, z: Tensor, inv_rms: Tensor, b: Tensor | None, kind: str, gains: bool
) -> tuple[Tensor, Tensor]:
    """(dz, db), the activation's input formed again from z."""
    dy, u = dy.to(inv_rms.dtype), z.to(inv_rms.dtype) * inv_rms
    u = u if b is None else u + b
    if kind == "swiglu":
        gate, up = u.chunk(2, dim=-1)
        sigma = gate.sigmoid()
        du = torch.cat([dy * up * sigma * (1 + gate * (1 - sigma)), dy * gate * sigma], -1)
    else:
        du = dy * activation_slope(u, kind)
    return (du * inv_rms).to(z.dtype), _sum_rows(du, b, gains)


def activation_slope(u: Tensor, kind: str) -> Tensor:
    """Derivative of gelu, gelu_tanh or relu2 at u."""
    if kind == "relu2":
        return 2 * F.relu(u)
    if kind == "gelu_tanh":  # gelu_tanh(u) = u sigmoid(2 t)
        root = math.sqrt(2 / math.pi)
        sigma = (2 * root * (u + 0.044715 * u**3)).sigmoid()
        return sigma + 2 * u * sigma * (1 - sigma) * root * (1 + 3 * 0.044715 * u * u)
    return 0.5 * (1 + torch.erf(u * math.sqrt(0.5))) + u * torch.exp(-0.5 * u * u) / math.sqrt(
        2 * math.pi
    )


# ---------------------------------------------------------------------------------------- TaperNorm


def taper_norm(
    h: Tensor, w: Tensor | None, w_tilde: Tensor | None, gate_c: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(y, inv_rms), y = g * h * inv_rms * w + (1 - g) * c * h * w_tilde; Kanavalau et al. 2026.

    gate_c (2,) holds the gate g and the scale c, both constants. inv_rms carries no gradient.
    """
    gate, c = gate_c.detach().unbind()
    x = h.to(statistics_dtype(h))
    fixed = x * (c if w_tilde is None else c * w_tilde)
    inv_rms = inverse_rms(x, eps)
    y = gate * affine(x * inv_rms, w, None, x.dtype) + (1 - gate) * fixed
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
    """(dh, dw, dw_tilde): RMSNorm's gradient weighted by g, the fixed scaling's by (1 - g) c."""
    gate, rest = gate_c[0], (1 - gate_c[0]) * gate_c[1]
    dy, v = dy.to(inv_rms.dtype), h.to(inv_rms.dtype) * inv_rms
    u = dy if w is None else dy * w
    fixed = dy if w_tilde is None else dy * w_tilde
    dh = gate * (inv_rms * (u - v * (u * v).mean(-1, keepdim=True))) + rest * fixed
    dw, dw_tilde = (
        _sum_rows(gate * (dy * v), w, gains),
        _sum_rows(rest * (dy * h.to(dy.dtype)), w_tilde, gains),
    )
    return dh.to(h.dtype), dw, dw_tilde
