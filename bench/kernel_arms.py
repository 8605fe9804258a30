"""What bench/kernels.py times: the operators of kernels/, what PyTorch has instead, and other
people's kernels.
"""

import importlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from common.errors import failure_line

EPS = 1e-5

Function = Callable[..., Any]  # inputs -> output, or several


@dataclass(frozen=True)
class Operator:
    """One operator of kernels/. `inputs` has a letter for each: see make_inputs."""

    inputs: str
    ours: Callable[[str], Function]  # mode -> function
    plain: Function  # what one writes in PyTorch without this repository
    streams: tuple[int, int]  # (rows, C) tensors that forward and backward cannot but read or write
    statistics: int = 1  # float32 numbers a row that go with them


# Gains are float32, as in training. PyTorch's own norms are fused for gains of the stream's type
# only: they get a cast.


def plain_rms(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], w.to(x.dtype), EPS)


def plain_layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w.to(x.dtype), b.to(x.dtype), EPS)


def plain_scale(h: Tensor, s: Tensor, w: Tensor) -> Tensor:
    return (h.float() * s * w).to(h.dtype)


def plain_taper(h: Tensor, w: Tensor, u: Tensor, g: Tensor) -> Tensor:
    return g[0] * plain_rms(h, w) + (1 - g[0]) * g[1] * u.to(h.dtype) * h


def plain_swiglu(z: Tensor) -> Tensor:
    gate, up = z.chunk(2, -1)
    return F.silu(gate) * up


def plain_add_rms(x: Tensor, a: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return plain_rms(h := x + a, w), h


def plain_add_normed(x: Tensor, a: Tensor, w: Tensor) -> Tensor:
    return x + plain_rms(a, w)


def plain_norm_add_norm(x: Tensor, a: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    return plain_rms(h := x + plain_rms(a, w), u), h


def plain_add_scale(x: Tensor, a: Tensor, s: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return plain_scale(h := x + a, s, w), h


OPERATORS = {
    "rms_norm": Operator(
        "xw",
        lambda mode: lambda x, w: kernels.rms_norm(x, w, EPS, mode=mode)[0],
        plain_rms,
        (2, 3),
    ),
    "layer_norm": Operator(
        "xwb",
        lambda mode: lambda x, w, b: kernels.layer_norm(x, w, b, EPS, mode)[0],
        plain_layer,
        (2, 3),
        2,
    ),
    "add_rms_norm": Operator(
        "xaw",
        lambda mode: lambda x, a, w: kernels.add_rms_norm(x, a, w, EPS, mode=mode)[:2],
        plain_add_rms,
        (4, 4),
    ),
    # Backward without an input norm: the gradient of x is that of h, which is not copied.
    "add_normed": Operator(
        "xaw",
        lambda mode: lambda x, a, w: kernels.add_normed(x, a, w, EPS, mode),
        plain_add_normed,
        (3, 3),
    ),
    "norm_add_norm": Operator(
        "xawu",
        lambda mode: lambda x, a, w, u: kernels.norm_add_norm(x, a, w, u, EPS, EPS, mode)[:2],
        plain_norm_add_norm,
        (4, 6),
        2,
    ),
    "shared_rms_scale": Operator(
        "xsw",
        lambda mode: lambda x, s, w: kernels.shared_rms_scale(x, s, w, mode),
        plain_scale,
        (2, 3),
    ),
    "add_shared_rms_scale": Operator(
        "xasw",
        lambda mode: lambda x, a, s, w: kernels.add_shared_rms_scale(x, a, s, w, mode),
        plain_add_scale,
        (4, 4),
    ),
    "scaled_gelu": Operator(
        "xs",
        lambda mode: lambda x, s: kernels.scaled_activation(x, s, None, "gelu", mode),
        lambda x, s: F.gelu((x.float() * s).to(x.dtype)),
        (2, 3),
    ),
    "scaled_swiglu": Operator(
        "zs",
        lambda mode: lambda z, s: kernels.scaled_activation(z, s, None, "swiglu", mode),
        lambda z, s: plain_swiglu((z.float() * s).to(z.dtype)),
        (3, 5),
    ),
    "taper_norm": Operator(
        "xwug",
        lambda mode: lambda x, w, u, g: kernels.taper_norm(x, w, u, g, EPS, mode)[0],
        plain_taper,
        (2, 3),
    ),
}

# The activations without their scale, by PyTorch's own functions: no rivals, they compute less.
UNSCALED = "torch, unscaled"
UNSCALED_ACTIVATIONS = {
    "scaled_gelu": lambda x, s: F.gelu(x),
    "scaled_swiglu": lambda z, s: plain_swiglu(z),
}


def with_gains(module: type[torch.nn.Module], x: Tensor, **gains: Tensor) -> Tensor:
    """Call a norm that exists as a module alone."""
    norm = module(x.shape[-1], eps=EPS, device=x.device)
    return torch.func.functional_call(norm, gains, (x,))


# Other libraries: module to import, and how each of our operators is called there. In-place
# variants, which overwrite the gradient that comes in, are off: they are no drop-in.
PEERS: dict[str, tuple[str, dict[str, Callable[[Any], Function]]]] = {
    "Liger": (
        "liger_kernel.transformers.functional",
        {
            "rms_norm": lambda lib: lambda x, w: lib.liger_rms_norm(x, w, EPS, in_place=False),
            "layer_norm": lambda lib: lambda x, w, b: lib.liger_layer_norm(x, w, b, EPS),
            "add_rms_norm": lambda lib: (
                lambda x, a, w: lib.liger_fused_add_rms_norm(x, a, w, EPS, in_place=False)
            ),
        },
    ),
    "quack": (
        "quack",
        {
            "rms_norm": lambda lib: lambda x, w: lib.rmsnorm(x, w, eps=EPS),
            "add_rms_norm": lambda lib: (
                lambda x, a, w: lib.rmsnorm(x, w, residual=a, eps=EPS, prenorm=True)
            ),
        },
    ),
    "flash-attn": (
        "flash_attn.ops.triton.layer_norm",
        {
            "rms_norm": lambda lib: lambda x, w: lib.rms_norm_fn(x, w, None, eps=EPS),
            "layer_norm": lambda lib: lambda x, w, b: lib.layer_norm_fn(x, w, b, eps=EPS),
            "add_rms_norm": lambda lib: (
                lambda x, a, w: lib.rms_norm_fn(x, w, None, residual=a, eps=EPS, prenorm=True)
            ),
        },
    ),
    "TransformerEngine": (
        "transformer_engine.pytorch",
        {
            "rms_norm": lambda lib: lambda x, w: with_gains(lib.RMSNorm, x, weight=w),
            "layer_norm": lambda lib: (
                lambda x, w, b: with_gains(lib.LayerNorm, x, weight=w, bias=b)
            ),
        },
    ),
}


ARMS = ("triton", "reference", "torch", "compiled", *PEERS)


def make_inputs(
    letters: str, rows: int, channels: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """x, a (rows, C) and z (rows, 2 C) in `dtype`, gains and biases w, u, b (C,) in float32, all
    want gradients; s (rows, 1) and g (2,), float32, do not.
    """
    shapes = {"s": (rows, 1), "g": (2,), "z": (rows, 2 * channels)}
    shapes |= dict.fromkeys("wub", (channels,))
    found = []
    for letter in letters:
        value = torch.randn(shapes.get(letter, (rows, channels)), device=device)
        if letter in "sg":
            value = value.abs() + 0.5
        elif letter in "xaz":
            value = value.to(dtype)
        found.append(value.requires_grad_(letter not in "sg"))
    return found


def arms_of(
    name: str, device: torch.device, only: Collection[str] = ()
) -> tuple[dict[str, Function], list[str]]:
    """Return the contestants for operator `name`, and why others are missing.

    The first contestant is ours.

    Args:
        only: of ARMS, those that take part beside ours; empty: all. UNSCALED comes with "torch".
    """
    operator = OPERATORS[name]
    on_gpu = device.type == "cuda"
    wanted = {*(only or ARMS)}
    missing = []
    arms = {"triton": operator.ours("triton")} if on_gpu else {}
    if not on_gpu or "reference" in wanted:
        arms["reference"] = operator.ours("torch")
    if "torch" in wanted:
        arms["torch"] = operator.plain
        if name in UNSCALED_ACTIVATIONS:
            arms[UNSCALED] = UNSCALED_ACTIVATIONS[name]
    if on_gpu and "compiled" in wanted:
        arms["compiled"] = torch.compile(operator.ours("torch"), dynamic=False)
    for peer, (module, calls) in PEERS.items() if on_gpu else ():
        if name in calls and peer in wanted:
            try:
                arms[peer] = calls[name](importlib.import_module(module))
            except Exception as error:  # not installed, or not for this GPU or torch
                missing.append(f"{peer}: {failure_line(error)}")
    return arms, missing


def torch_runs_quack() -> bool:
    """Are PyTorch's own norms quack's? torch >= 2.13 puts them in their place where cutlass-dsl is
    installed, on sm_90 and sm_100.
    """
    try:
        from torch._native.registry import get_dsl_operations
    except ImportError:  # an older torch
        return False
    return "_fused_rms_norm" in get_dsl_operations("cutedsl")
