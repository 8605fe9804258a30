"""What bench/kernels.py times: the operators of kernels/, what PyTorch has instead, and other
people's kernels.
"""

import functools
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
    kernel: Function  # *inputs, mode -> output, or several
    plain: Function  # what one writes in PyTorch without this repository
    streams: tuple[int, int]  # (rows, C) tensors that forward and backward cannot but read or write
    statistics: int = 1  # float32 numbers a row that go with them

    def ours(self, mode: str) -> Function:
        """Return the operator of kernels/ in this mode, as a function of the inputs."""

        def call(*inputs: Tensor) -> Any:
            return self.kernel(*inputs, mode)

        return call


# ----------------------------------------------------------------------------------- ours and plain
# Gains are float32, as in training. PyTorch's own norms are fused for gains of the stream's type
# only: they get a cast.


def rms(x: Tensor, w: Tensor, mode: str) -> Tensor:
    y, _ = kernels.rms_norm(x, w, EPS, mode=mode)
    return y


def plain_rms(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], w.to(x.dtype), EPS)


def layer(x: Tensor, w: Tensor, b: Tensor, mode: str) -> Tensor:
    y, _, _ = kernels.layer_norm(x, w, b, EPS, mode)
    return y


def plain_layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w.to(x.dtype), b.to(x.dtype), EPS)


def add_rms(x: Tensor, a: Tensor, w: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    y, h, _ = kernels.add_rms_norm(x, a, w, EPS, mode=mode)
    return y, h


def plain_add_rms(x: Tensor, a: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = x + a
    return plain_rms(h, w), h


def add_normed(x: Tensor, a: Tensor, w: Tensor, mode: str) -> Tensor:
    return kernels.add_normed(x, a, w, EPS, mode)


def plain_add_normed(x: Tensor, a: Tensor, w: Tensor) -> Tensor:
    return x + plain_rms(a, w)


def norm_add_norm(x: Tensor, a: Tensor, w: Tensor, u: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    y, h, _ = kernels.norm_add_norm(x, a, w, u, EPS, EPS, mode)
    return y, h


def plain_norm_add_norm(x: Tensor, a: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    h = x + plain_rms(a, w)
    return plain_rms(h, u), h


def scale(h: Tensor, s: Tensor, w: Tensor, mode: str) -> Tensor:
    return kernels.shared_rms_scale(h, s, w, mode)


def plain_scale(h: Tensor, s: Tensor, w: Tensor) -> Tensor:
    return (h.float() * s * w).to(h.dtype)


def add_scale(x: Tensor, a: Tensor, s: Tensor, w: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    return kernels.add_shared_rms_scale(x, a, s, w, mode)


def plain_add_scale(x: Tensor, a: Tensor, s: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = x + a
    return plain_scale(h, s, w), h


def scaled_gelu(x: Tensor, s: Tensor, mode: str) -> Tensor:
    return kernels.scaled_activation(x, s, None, "gelu", mode)


def plain_scaled_gelu(x: Tensor, s: Tensor) -> Tensor:
    return F.gelu((x.float() * s).to(x.dtype))


def scaled_swiglu(z: Tensor, s: Tensor, mode: str) -> Tensor:
    return kernels.scaled_activation(z, s, None, "swiglu", mode)


def plain_swiglu(z: Tensor) -> Tensor:
    gate, up = z.chunk(2, -1)
    return F.silu(gate) * up


def plain_scaled_swiglu(z: Tensor, s: Tensor) -> Tensor:
    return plain_swiglu((z.float() * s).to(z.dtype))


def taper(x: Tensor, w: Tensor, u: Tensor, g: Tensor, mode: str) -> Tensor:
    y, _ = kernels.taper_norm(x, w, u, g, EPS, mode)
    return y


def plain_taper(h: Tensor, w: Tensor, u: Tensor, g: Tensor) -> Tensor:
    return g[0] * plain_rms(h, w) + (1 - g[0]) * g[1] * u.to(h.dtype) * h


OPERATORS = {
    "rms_norm": Operator("xw", rms, plain_rms, streams=(2, 3)),
    "layer_norm": Operator("xwb", layer, plain_layer, streams=(2, 3), statistics=2),
    "add_rms_norm": Operator("xaw", add_rms, plain_add_rms, streams=(4, 4)),
    # Backward without an input norm: the gradient of x is that of h, which is not copied.
    "add_normed": Operator("xaw", add_normed, plain_add_normed, streams=(3, 3)),
    "norm_add_norm": Operator(
        "xawu", norm_add_norm, plain_norm_add_norm, streams=(4, 6), statistics=2
    ),
    "shared_rms_scale": Operator("xsw", scale, plain_scale, streams=(2, 3)),
    "add_shared_rms_scale": Operator("xasw", add_scale, plain_add_scale, streams=(4, 4)),
    "scaled_gelu": Operator("xs", scaled_gelu, plain_scaled_gelu, streams=(2, 3)),
    "scaled_swiglu": Operator("zs", scaled_swiglu, plain_scaled_swiglu, streams=(3, 5)),
    "taper_norm": Operator("xwug", taper, plain_taper, streams=(2, 3)),
}


# The activations without their scale, by PyTorch's own functions: no rivals, they compute less.
UNSCALED = "torch, unscaled"


def unscaled_gelu(x: Tensor, s: Tensor) -> Tensor:
    return F.gelu(x)


def unscaled_swiglu(z: Tensor, s: Tensor) -> Tensor:
    return plain_swiglu(z)


UNSCALED_ACTIVATIONS = {"scaled_gelu": unscaled_gelu, "scaled_swiglu": unscaled_swiglu}

# ------------------------------------------------------------------------------- other libraries
# In-place variants, which overwrite the gradient that comes in, are off: they are no drop-in.


def liger_rms(lib: Any, x: Tensor, w: Tensor) -> Tensor:
    return lib.liger_rms_norm(x, w, EPS, in_place=False)


def liger_layer(lib: Any, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return lib.liger_layer_norm(x, w, b, EPS)


def liger_add_rms(lib: Any, x: Tensor, a: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return lib.liger_fused_add_rms_norm(x, a, w, EPS, in_place=False)


def quack_rms(lib: Any, x: Tensor, w: Tensor) -> Tensor:
    return lib.rmsnorm(x, w, eps=EPS)


def quack_add_rms(lib: Any, x: Tensor, a: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return lib.rmsnorm(x, w, residual=a, eps=EPS, prenorm=True)


def flash_attn_rms(lib: Any, x: Tensor, w: Tensor) -> Tensor:
    return lib.rms_norm_fn(x, w, None, eps=EPS)


def flash_attn_layer(lib: Any, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return lib.layer_norm_fn(x, w, b, eps=EPS)


def flash_attn_add_rms(lib: Any, x: Tensor, a: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return lib.rms_norm_fn(x, w, None, residual=a, eps=EPS, prenorm=True)


def with_gains(module: type[torch.nn.Module], x: Tensor, **gains: Tensor) -> Tensor:
    """Call a norm that exists as a module alone."""
    norm = module(x.shape[-1], eps=EPS, device=x.device)
    return torch.func.functional_call(norm, gains, (x,))


def transformer_engine_rms(lib: Any, x: Tensor, w: Tensor) -> Tensor:
    return with_gains(lib.RMSNorm, x, weight=w)


def transformer_engine_layer(lib: Any, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return with_gains(lib.LayerNorm, x, weight=w, bias=b)


@dataclass(frozen=True)
class Peer:
    """Another library: the module to import, and who calls what it has of our operators."""

    module: str
    calls: dict[str, Function]  # name of an operator -> module, *inputs -> output, or several


PEERS = {
    "Liger": Peer(
        "liger_kernel.transformers.functional",
        {"rms_norm": liger_rms, "layer_norm": liger_layer, "add_rms_norm": liger_add_rms},
    ),
    "quack": Peer("quack", {"rms_norm": quack_rms, "add_rms_norm": quack_add_rms}),
    "flash-attn": Peer(
        "flash_attn.ops.triton.layer_norm",
        {
            "rms_norm": flash_attn_rms,
            "layer_norm": flash_attn_layer,
            "add_rms_norm": flash_attn_add_rms,
        },
    ),
    "TransformerEngine": Peer(
        "transformer_engine.pytorch",
        {"rms_norm": transformer_engine_rms, "layer_norm": transformer_engine_layer},
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
    missing: list[str] = []
    arms = {"triton": operator.ours("triton")} if on_gpu else {}
    if not on_gpu or "reference" in wanted:
        arms["reference"] = operator.ours("torch")
    if "torch" in wanted:
        arms["torch"] = operator.plain
        if name in UNSCALED_ACTIVATIONS:
            arms[UNSCALED] = UNSCALED_ACTIVATIONS[name]
    if not on_gpu:
        return arms, missing
    if "compiled" in wanted:
        arms["compiled"] = torch.compile(operator.ours("torch"), dynamic=False)
    for peer_name, peer in PEERS.items():
        if name not in peer.calls or peer_name not in wanted:
            continue
        module = peer.module
        try:
            library = importlib.import_module(module)
        except Exception as error:  # not installed, or not for this GPU or torch
            missing.append(f"{peer_name}: {failure_line(error)}")
        else:
            arms[peer_name] = functools.partial(peer.calls[name], library)
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
