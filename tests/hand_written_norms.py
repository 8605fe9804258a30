"""Norms written by hand, with what each is, for tests/test_doctor.py.

Each is a module of x (2, 16, 4, 16): the axes of a batch, channels, positions, channels again.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

C = 16
SHAPE = (2, C, 4, C)


class Written(NamedTuple):
    """A norm: its function of (module with w, b of C numbers, g of 4 and a of one, x), and what
    it is.

    kind is the start of what is said; "" for what is no norm, and need not be mentioned.
    """

    function: object
    kind: str
    eps: float | None = None
    place: str = ""
    gain: str = ""
    inline: str | None = None  # what is said of it where it stands in a forward, if that differs


class Hand(nn.Module):
    """A norm by hand as a module."""

    def __init__(self, function, zero: bool = False):
        super().__init__()
        self.function = function
        self.w = nn.Parameter(torch.linspace(0.5, 2, C))
        self.b = nn.Parameter(torch.linspace(-1, 1, C))
        self.a = nn.Parameter(torch.tensor(0.7))
        self.g = nn.Parameter(torch.linspace(0.5, 2, 4))
        if zero:
            self.w.data[3] = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Inline(Hand):
    """The same within a forward that does more."""

    def __init__(self, function, zero: bool = False):
        super().__init__(function, zero)
        self.out = nn.Linear(C, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.function(self, x))


def ms(x: Tensor, axis=-1) -> Tensor:
    return x.pow(2).mean(axis, keepdim=True)


def centre(x: Tensor, axis=-1) -> Tensor:
    return x - x.mean(axis, keepdim=True)


def first(w: Tensor) -> Tensor:
    """The gain along axis 1."""
    return w.view(C, 1, 1)


INSIDE = "inside the root"
OUTSIDE = "outside the root"
CLAMP = "as the least divisor"

WRITTEN = {
    "rms": Written(lambda m, x: x * torch.rsqrt(ms(x) + 1e-6) * m.w, "RMSNorm", 1e-6, INSIDE, "w"),
    "rms in float32": Written(
        lambda m, x: m.w * (x.float() * torch.rsqrt(ms(x.float()) + 1e-5)).type_as(x),
        "RMSNorm",
        1e-5,
        INSIDE,
        "w",
    ),
    "one plus w": Written(
        lambda m, x: x / torch.sqrt(ms(x) + 1e-6) * (1 + m.w), "RMSNorm", 1e-6, INSIDE, "1 + w"
    ),
    "w over root 3": Written(
        lambda m, x: x * torch.rsqrt(ms(x) + 1e-6) * m.w / 3**0.5,
        "RMSNorm",
        1e-6,
        INSIDE,
        "w / sqrt(3)",
    ),
    "eps outside": Written(
        lambda m, x: x / (torch.sqrt(ms(x)) + 1e-3) * m.w, "RMSNorm", 1e-3, OUTSIDE, "w"
    ),
    "eps by clamp": Written(
        lambda m, x: x / torch.sqrt(ms(x)).clamp_min(1e-3) * m.w, "RMSNorm", 1e-3, CLAMP, "w"
    ),
    "eps clamps the square": Written(
        lambda m, x: x * torch.rsqrt(ms(x).clamp_min(1e-6)), "RMSNorm", 1e-3, CLAMP, "none"
    ),
    "eps squared": Written(
        lambda m, x: x / torch.sqrt(ms(x) + 1e-3**2), "RMSNorm", 1e-6, INSIDE, "none"
    ),
    "no eps": Written(lambda m, x: x * torch.rsqrt(ms(x)) * m.w, "RMSNorm", None, "none", "w"),
    "eps in both places": Written(
        lambda m, x: x / (torch.sqrt(ms(x) + 1e-4) + 1e-2), "unknown formula"
    ),
    "eps under a fourth root": Written(
        lambda m, x: x / (ms(x).square() + 1e-6).pow(0.25), "unknown formula"
    ),
    "zero below a size": Written(
        lambda m, x: torch.where(ms(x) > 1e-4, x * torch.rsqrt(ms(x)), torch.zeros_like(x)),
        "unknown formula",
        None,
        "none",
        "none",
        inline="RMSNorm",
    ),
    "eps added to x": Written(lambda m, x: x / torch.sqrt(ms(x + 0.1)), "unknown formula"),
    "one gain of zero": Written(
        lambda m, x: x * torch.rsqrt(ms(x) + 1e-6) * m.w, "RMSNorm", 1e-6, INSIDE, "w"
    ),
    "a fixed gain": Written(
        lambda m, x: 3 * x * torch.rsqrt(ms(x) + 1e-6), "RMSNorm", 1e-6, INSIDE, "fixed 3"
    ),
    "exp of w": Written(
        lambda m, x: x * torch.rsqrt(ms(x) + 1e-6) * m.w.exp(),
        "RMSNorm",
        1e-6,
        INSIDE,
        "not known",
    ),
    "one minus w": Written(
        lambda m, x: x * torch.rsqrt(ms(x) + 1e-6) * (1 - m.w), "RMSNorm", 1e-6, INSIDE, "1 - w"
    ),
    "the root of w": Written(
        lambda m, x: x * torch.rsqrt(ms(x) + 1e-6) * m.w.sqrt(),
        "RMSNorm",
        1e-6,
        INSIDE,
        "not known",
    ),
    "eps that is learned": Written(
        lambda m, x: x * torch.rsqrt(ms(x) + m.a.abs() / 7),
        "RMSNorm",
        0.1,
        INSIDE,
        "not known",
    ),
    "w reversed": Written(
        lambda m, x: x * torch.rsqrt(ms(x) + 1e-6) * m.w.flip(0),
        "RMSNorm",
        1e-6,
        INSIDE,
        "not known",
    ),
    "exp of one number": Written(
        lambda m, x: x * torch.rsqrt(ms(x) + 1e-6) * m.a.exp(),
        "RMSNorm",
        1e-6,
        INSIDE,
        "not known",
    ),
    "one gain for all": Written(
        lambda m, x: m.a * x * torch.rsqrt(ms(x) + 1e-6), "RMSNorm", 1e-6, INSIDE, "w"
    ),
    "torch's rms_norm": Written(
        lambda m, x: F.rms_norm(x, (C,), m.w, 1e-6), "RMSNorm", 1e-6, INSIDE, "w"
    ),
    "channels first": Written(
        lambda m, x: x * torch.rsqrt(ms(x, 1) + 1e-6) * first(m.w),
        "RMSNorm (axis 1 of 4)",
        1e-6,
        INSIDE,
        "w",
    ),
    "over two axes": Written(
        lambda m, x: x * torch.rsqrt(ms(x, (2, 3)) + 1e-6),
        "RMSNorm (axes 2, 3 of 4)",
        1e-6,
        INSIDE,
        "none",
    ),
    "in groups": Written(
        lambda m, x: (y := x.unflatten(-1, (4, 4))).mul(torch.rsqrt(ms(y) + 1e-6)).flatten(-2),
        "RMSNorm (4 groups)",
        1e-6,
        INSIDE,
        "none",
        inline="RMSNorm",
    ),
    "in groups, with their gain": Written(
        lambda m, x: (
            (y := x.unflatten(-1, (4, 4))).mul(torch.rsqrt(ms(y) + 1e-6)).mul(m.g).flatten(-2)
        ),
        "RMSNorm (4 groups)",
        1e-6,
        INSIDE,
        "w",
        inline="RMSNorm",
    ),
    "in interleaved groups": Written(
        lambda m, x: (y := x.unflatten(-1, (4, 4))).mul(torch.rsqrt(ms(y, -2) + 1e-6)).flatten(-2),
        "unknown formula",
        1e-6,
        INSIDE,
        "none",
        inline="RMSNorm (axis 3 of 5)",
    ),
    "of each other channel": Written(
        lambda m, x: x * torch.rsqrt(ms(x[..., ::2]) + 1e-6) * m.w, "unknown formula"
    ),
    "with weights in the statistic": Written(
        lambda m, x: x * torch.rsqrt((x.pow(2) * m.w.square()).mean(-1, keepdim=True) + 1e-6),
        "unknown formula",
    ),
    "partial": Written(
        lambda m, x: x * torch.rsqrt(ms(x[..., :5]) + 1e-6) * m.w,
        "RMSNorm (of the first 5 of 16)",
        1e-6,
        INSIDE,
        "w",
    ),
    "of the last channels": Written(
        lambda m, x: x * torch.rsqrt(ms(x[..., 8:]) + 1e-6) * m.w, "unknown formula"
    ),
    "layer": Written(
        lambda m, x: centre(x) * torch.rsqrt(ms(centre(x)) + 1e-5) * m.w + m.b,
        "LayerNorm",
        1e-5,
        INSIDE,
        "w",
    ),
    "layer by var": Written(
        lambda m, x: centre(x) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5) * m.w,
        "LayerNorm",
        1e-5,
        INSIDE,
        "w",
    ),
    "layer by std": Written(
        lambda m, x: m.w * centre(x) / (x.std(-1, keepdim=True) + 1e-6) + m.b,
        "LayerNorm (variance over n - 1)",
        1e-6,
        OUTSIDE,
        "w",
    ),
    "layer, channels first": Written(
        lambda m, x: (
            first(m.w) * centre(x, 1) / torch.sqrt(ms(centre(x, 1), 1) + 1e-6) + first(m.b)
        ),
        "LayerNorm (axis 1 of 4)",
        1e-6,
        INSIDE,
        "w",
    ),
    "permuted layer": Written(
        lambda m, x: F.layer_norm(x.movedim(1, -1), (C,), m.w, m.b, 1e-6).movedim(-1, 1),
        "LayerNorm (axis 1 of 4)",
        1e-6,
        INSIDE,
        "w",
        inline="LayerNorm",
    ),
    "torch's group_norm": Written(
        lambda m, x: F.group_norm(x, 4, m.w, m.b, 1e-5),
        "GroupNorm (4 groups of axis 1, axes 2, 3 of 4)",
        1e-5,
        INSIDE,
        "w",
    ),
    "batch norm of this batch": Written(
        lambda m, x: F.batch_norm(x, None, None, m.w, m.b, True, 0.0, 1e-4),
        "LayerNorm (axes 0, 2, 3 of 4)",
        1e-4,
        INSIDE,
        "w",
    ),
    "instance norm": Written(
        lambda m, x: F.instance_norm(x, eps=1e-4),
        "LayerNorm (axes 2, 3 of 4)",
        1e-4,
        INSIDE,
        "none",
    ),
    "centred, mean kept": Written(
        lambda m, x: x * torch.rsqrt(ms(centre(x)) + 1e-6), "unknown formula"
    ),
    "moment of what is not centred": Written(
        lambda m, x: centre(x) * torch.rsqrt(ms(x) + 1e-6) * m.w, "unknown formula"
    ),
    "over matrices": Written(
        lambda m, x: x / torch.linalg.matrix_norm(x, keepdim=True),
        "L2 (axes 2, 3 of 4)",
        None,
        "none",
        "none",
    ),
    "l2": Written(lambda m, x: F.normalize(x, dim=-1), "L2", 1e-12, CLAMP, "none"),
    "l2, eps inside": Written(
        lambda m, x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) * m.w,
        "L2",
        1e-6,
        INSIDE,
        "w",
    ),
    "l1": Written(
        lambda m, x: x / (x.abs().mean(-1, keepdim=True) + 1e-5) * m.w,
        "L1 (mean of |x|)",
        1e-5,
        OUTSIDE,
        "w",
    ),
    "l1, a sum": Written(
        lambda m, x: F.normalize(x, p=1.0, dim=-1), "L1 (sum of |x|)", 1e-12, CLAMP, "none"
    ),
    "l3": Written(lambda m, x: F.normalize(x, p=3.0, dim=-1), "unknown formula"),
    "median": Written(
        lambda m, x: x / (x.abs().median(-1, keepdim=True).values + 1e-5) * m.w, "unknown formula"
    ),
    "range": Written(
        lambda m, x: (x - x.amin(-1, keepdim=True)) / (x.amax(-1, True) - x.amin(-1, True) + 1e-5),
        "unknown formula",
    ),
    "max": Written(
        lambda m, x: x / (x.abs().amax(-1, keepdim=True) + 1e-4), "max", 1e-4, OUTSIDE, "none"
    ),
    "dyt": Written(lambda m, x: torch.tanh(m.a * x) * m.w + m.b, "point-wise tanh(a x)", inline=""),
    "derf": Written(lambda m, x: torch.erf(m.a * x) * m.w, "point-wise erf(a x)", inline=""),
    "hardtanh": Written(lambda m, x: x.clamp(-2, 2), "point-wise clamp(a x)", inline=""),
    "sign": Written(lambda m, x: x.sign(), "not a norm", inline=""),
    "softmax": Written(lambda m, x: x.softmax(-1), "not a norm", inline=""),
    "a norm gated by itself": Written(
        lambda m, x: (y := x * torch.rsqrt(ms(x) + 1e-6) * m.w) * torch.sigmoid(y),
        "unknown formula",
        1e-6,
        INSIDE,
        "w",
        inline="RMSNorm",
    ),
    "a norm in steps": Written(
        lambda m, x: torch.round(x * torch.rsqrt(ms(x) + 1e-6) * 64),
        "not a norm",
        1e-6,
        INSIDE,
        "fixed 64",
        inline="RMSNorm",
    ),
    "of the first position": Written(
        lambda m, x: x * torch.rsqrt(ms(x[:, :, :1]) + 1e-6),
        "RMSNorm (of the first 16 of 64, axes 2, 3 of 4)",
        1e-6,
        INSIDE,
        "none",
    ),
    "half of the size": Written(lambda m, x: x * torch.rsqrt(ms(x) + 1e-6).sqrt(), ""),
    "batch norm of other batches": Written(
        lambda m, x: F.batch_norm(x, m.b, m.w, m.w, m.b, False, 0.0, 1e-4), ""
    ),
    "silu": Written(lambda m, x: F.silu(x), ""),
    "linear": Written(lambda m, x: x * m.w + m.b, ""),
}
