"""Operators of kernels/ and the same in float64; inputs of all shapes, layouts, types, contents."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from helpers import draw

import kernels
from kernels import binding
from kernels.reference import ACTIVATIONS, GATED, statistics_dtype

ON_GPU = torch.cuda.is_available() and not binding.INTERPRETED
DEVICE = "cuda" if ON_GPU else "cpu"
EPS = 1e-5
EPS_OUT = 0.02  # of output norms

AXES = {
    "C": (17, 96, 499, 1023, 1600, 8193),
    "rows": (7, 64, 1),
    "dtype": (torch.float32, torch.float16, torch.bfloat16),
    "dims": (2, 3),
    "layout": ("contiguous", "strided", "transposed", "expanded"),
    "grad_layout": ("contiguous", "strided", "transposed", "expanded"),
    "weights": ("same", "other", "none"),
    "content": ("normal", "zeros", "scaled", "inf"),
    # outputs with a gradient; other: the second one alone, where there are several
    "given": ("y", "all", "other"),
}


# ---------------------------------------------------------------------------- operators and float64


class Rounded(torch.autograd.Function):
    """Stand for a sum by what the kernel rounded it to; the gradient is the sum's."""

    @staticmethod
    def forward(ctx, total, rounded):
        return rounded.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def kept_sum(t, total):
    """The residual stream h of an operator that adds: the kernel's, which `total` is checked by."""
    t.total = total.detach()
    return Rounded.apply(total, t.rounded)


def exact_rms(t, h, groups=1, counted=None, eps=EPS):
    parts = h.unflatten(-1, (groups, -1))
    inv = (parts[..., :counted].square().mean(-1, keepdim=True) + eps).rsqrt()
    return gain_and_bias((parts * inv).flatten(-2), t), inv.squeeze(-1)


def exact_add_rms(t):
    h = kept_sum(t, t.x + t.a)
    y, inv = exact_rms(t, h)
    return y, h, inv


def exact_add_shared(t):
    h = kept_sum(t, t.x + t.a)
    return gain_and_bias(h * t.s, t), h


def exact_add_normed(t):
    return (kept_sum(t, t.x + exact_rms(t, t.a, eps=EPS_OUT)[0]),)


def exact_norm_add_norm(t):
    (h,) = exact_add_normed(t)
    y, inv = exact_rms(SimpleNamespace(w=t.wt, b=None), h)
    return y, h, inv


def exact_layer(t):
    centred = t.x - t.x.mean(-1, keepdim=True)
    return (gain_and_bias(centred * (centred.square().mean(-1, keepdim=True) + EPS).rsqrt(), t),)


def gain_and_bias(y, t):
    y = y if t.w is None else y * t.w
    return y if t.b is None else y + t.b


def exact_activation(t, kind):
    u = t.x * t.s if t.b is None else t.x * t.s + t.b
    if kind in GATED:
        gate, up = u.chunk(2, -1)
        return (up * (F.silu(gate) if kind == "swiglu" else F.gelu(gate, approximate="tanh")),)
    tanh = "tanh" if kind == "gelu_tanh" else "none"
    return (F.relu(u) ** 2 if kind == "relu2" else F.gelu(u, approximate=tanh),)


def exact_taper(t):
    gate, c = t.gate_c
    plain = t.x if t.wt is None else t.x * t.wt
    return (gate * exact_rms(t, t.x)[0] + (1 - gate) * c * plain,)


def quarter(C):
    return max(1, C // 4)


def groups_of(C):
    return next(n for n in (8, 5, 4, 3, 2, 1) if C % n == 0)


# name: (inputs, the operator, the same in float64). With "a" among the inputs the operator adds,
# and what follows is of the kernel's rounded sum.
OPERATORS = {
    "rms": (
        "xwb",
        lambda t: kernels.rms_norm(t.x, t.w, EPS, t.b, mode="triton"),
        lambda t: exact_rms(t, t.x),
    ),
    "partial": (
        "xw",
        lambda t: kernels.rms_norm(t.x, t.w, EPS, counted=quarter(t.C), mode="triton"),
        lambda t: exact_rms(t, t.x, counted=quarter(t.C)),
    ),
    "group": (
        "xwb",
        lambda t: kernels.rms_norm(t.x, t.w, EPS, t.b, groups_of(t.C), mode="triton"),
        lambda t: exact_rms(t, t.x, groups_of(t.C)),
    ),
    "add_rms": (
        "xawb",
        lambda t: kernels.add_rms_norm(t.x, t.a, t.w, EPS, t.b, mode="triton"),
        exact_add_rms,
    ),
    "add_normed": (
        "xaw",
        lambda t: (kernels.add_normed(t.x, t.a, t.w, EPS_OUT, mode="triton"),),
        exact_add_normed,
    ),
    "norm_add_norm": (
        "xawv",
        lambda t: kernels.norm_add_norm(t.x, t.a, t.w, t.wt, EPS_OUT, EPS, mode="triton"),
        exact_norm_add_norm,
    ),
    "layer": (
        "xwb",
        lambda t: kernels.layer_norm(t.x, t.w, t.b, EPS, mode="triton")[:1],
        exact_layer,
    ),
    "shared": (
        "xw",
        lambda t: (kernels.shared_rms_scale(t.x, t.s, t.w, mode="triton"),),
        lambda t: (gain_and_bias(t.x * t.s, t),),
    ),
    "add_shared": (
        "xaw",
        lambda t: kernels.add_shared_rms_scale(t.x, t.a, t.s, t.w, mode="triton"),
        exact_add_shared,
    ),
    "taper": (
        "xwv",
        lambda t: kernels.taper_norm(t.x, t.w, t.wt, t.gate_c, EPS, mode="triton")[:1],
        exact_taper,
    ),
} | {
    kind: (
        "xb",
        lambda t, kind=kind: (kernels.scaled_activation(t.x, t.s, t.b, kind, mode="triton"),),
        lambda t, kind=kind: exact_activation(t, kind),
    )
    for kind in ACTIVATIONS
}


def laid_out(case, width, layout, seed, dtype):
    """(rows, width), or (..., rows / ..., width) in three dimensions; strides as `layout` says."""
    n = case.rows
    flat = {
        "contiguous": lambda: draw(n, width, seed=seed),
        "strided": lambda: draw(2 * n, width + 16, seed=seed)[::2, :width],
        "transposed": lambda: draw(width, n, seed=seed).t(),
        "expanded": lambda: draw(1, width, seed=seed).expand(n, width),
    }[layout]()
    if layout == "strided":  # a view of something larger
        x = torch.zeros(2 * n, width + 16, dtype=dtype, device=DEVICE)[::2, :width].copy_(flat)
    else:
        x = torch.empty_strided(flat.shape, flat.stride(), dtype=dtype, device=DEVICE)
    if layout == "expanded":
        x = with_content(draw(1, width, seed=seed).to(DEVICE, dtype), case.content).expand(n, width)
    else:
        x = with_content(x.copy_(flat), case.content)
    return x.unflatten(0, (4, -1) if n == 64 else (n, -1) if n else (0, 3)) if case.dims == 3 else x


def with_content(x, content):
    x[::3] *= {"zeros": 0.0, "scaled": 1e4}.get(content, 1.0)
    if content == "inf" and len(x):
        x[-1, 0] = -torch.inf
        x[0, -1] = torch.inf
    return x


def inputs_of(name, case):
    """Namespace of x, a, w, b, wt (None where the operator or the case has none), s, gate_c."""
    wanted, C = OPERATORS[name][0], case.C
    width = 2 * C if name in GATED else C
    other = torch.bfloat16 if case.dtype == torch.float32 else torch.float32
    kind = other if case.weights == "other" else case.dtype
    t = SimpleNamespace(C=C, a=None, w=None, b=None, wt=None)
    t.x = laid_out(case, width, case.layout, 0, case.dtype)
    if "a" in wanted:
        t.a = laid_out(case, width, case.grad_layout, 1, kind)
    if case.weights != "none":
        for letter, field, seed in (("w", "w", 2), ("b", "b", 3), ("v", "wt", 4)):
            if letter in wanted:
                setattr(t, field, draw(width, seed=seed).to(DEVICE, kind))
    square = t.x.double() if t.a is None else t.x.double() + t.a.double()
    t.s = (square.square().mean(-1, keepdim=True) + EPS).rsqrt().to(statistics_dtype(t.x))
    t.gate_c = torch.tensor([0.3, 0.01], device=DEVICE)
    leaves(t)
    return t


DIFFERENTIABLE = ("x", "a", "w", "b", "wt")


def leaves(t, fields=DIFFERENTIABLE):
    return [
        tensor.requires_grad_() for field in fields if (tensor := getattr(t, field)) is not None
    ]


def upstream(case, outputs):
    """Gradients for the outputs, in the layout of the case; None for those that get none."""
    plain = SimpleNamespace(**vars(case) | {"content": "normal"})
    chosen = {"y": {0}, "all": {*range(len(outputs))}, "other": {min(1, len(outputs) - 1)}}[
        case.given
    ]
    return [
        laid_out(plain, y.shape[-1], case.grad_layout, 10 + i, y.dtype) if i in chosen else None
        for i, y in enumerate(outputs)
    ]


def gradients_of(outputs, grads, wanted):
    """For `wanted`; None where no output with a gradient depends on one."""
    pairs = [
        (output, grad) for output, grad in zip(outputs, grads, strict=True) if grad is not None
    ]
    return torch.autograd.grad(
        [y for y, _ in pairs], wanted, [grad for _, grad in pairs], allow_unused=True
    )


def in_double(t, h):
    """The same inputs as float64 leaves, and h, if the operator adds, as the kernel rounded it."""
    twin = SimpleNamespace(**vars(t))
    for field in (*DIFFERENTIABLE, "s", "gate_c"):
        value = getattr(t, field)
        setattr(twin, field, None if value is None else value.detach().double().contiguous())
    twin.rounded = None if h is None else h.detach().double()
    return twin


def leaves_of(t):
    return [field for field in DIFFERENTIABLE if getattr(t, field) is not None]


def plain_case(C, n_rows, **changes):
    case = {axis: values[0] for axis, values in AXES.items()} | {"C": C, "rows": n_rows} | changes
    return SimpleNamespace(**case)
