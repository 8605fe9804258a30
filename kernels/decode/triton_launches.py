"""The launches of a decoding step on a GPU: the namespaces from which decode/step.py chooses.

FUSED         our Triton kernels, called directly: a CUDA graph removes the cost of launching
COMPILED      for a step that goes through torch.compile. Heads, attention, the adds to the residual
              stream and the choice of the next token are operators, which inductor calls without
              looking into them. It generates everything else, and the library multiplies. The
              choice is ours because inductor's is one program for a whole vocabulary
COMPILED_ROW  the same for one sequence where inductor writes the products itself: it adds to the
              stream inside of them, so it must see the sum
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..reference import GATED
from . import attention as decode_attention
from . import epilogue as decode_epilogue
from . import project as decode_project
from . import reference as decode_reference
from .reference import Cache, Epilogue

# Without a kernel of our own: PyTorch's, or what inductor makes of it.
REFERENCE = {
    name: value for name, value in vars(decode_reference).items() if not name.startswith("_")
}
OWN_ATTENTION = (
    "embed",
    "heads",
    "attend",
    "attend_parts",
    "heads_attend",
    "heads_attend_parts",
    "combine",
    "best",
    "take",
)
OWN_PRODUCTS = ("project", "norm_project", "shared_project")
OWN_EPILOGUES = ("norm_activation", "activation", "scale")


# ------------------------------------------------------------------- operators for torch.compile
# Each has a fake implementation, which tells inductor the shape and type of what it returns. The
# function of the launch's name is called instead of the reference's: an operator takes no tuples.


@torch.library.custom_op("nanonorm::decode_heads", mutates_args=("k_cache", "v_cache"))
def heads_operator(
    z: Tensor,
    inv_rms: Tensor | None,
    bias: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    pos: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_gain: Tensor | None,
    k_gain: Tensor | None,
    v_gain: Tensor | None,
    eps: float,
) -> Tensor:
    # inductor may hand over any strides, and the kernel takes rows that are adjacent in memory
    z = z.contiguous()
    epilogue = None if inv_rms is None else Epilogue(inv_rms.contiguous(), bias)
    cache = (k_cache, v_cache)
    rope = None if cos is None else (cos, sin)
    return decode_attention.heads(z, epilogue, cache, pos, rope, q_gain, k_gain, v_gain, eps)


@heads_operator.register_fake
def _(z, inv_rms, bias, k_cache, v_cache, pos, cos, sin, q_gain, k_gain, v_gain, eps):
    batch, kv_heads, _, channels = k_cache.shape
    n_heads = z.shape[-1] // channels - 2 * kv_heads
    return z.new_empty((batch, n_heads, 1, channels), dtype=k_cache.dtype)


def heads(
    z: Tensor,
    epilogue: Epilogue | None,
    cache: Cache,
    pos: Tensor,
    rope: tuple[Tensor, Tensor] | None,
    q_gain: Tensor | None,
    k_gain: Tensor | None,
    v_gain: Tensor | None,
    eps: float,
) -> Tensor:
    inv_rms, bias = epilogue or (None, None)
    cos, sin = rope or (None, None)
    return heads_operator(z, inv_rms, bias, *cache, pos, cos, sin, q_gain, k_gain, v_gain, eps)


@torch.library.custom_op("nanonorm::decode_attend", mutates_args=())
def attend_operator(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, pos: Tensor, scale: float, window: int
) -> Tensor:
    return decode_attention.attend(q, (k_cache, v_cache), pos, scale, window)


@attend_operator.register_fake
def _(q, k_cache, v_cache, pos, scale, window):
    batch, n_heads, _, channels = q.shape
    return q.new_empty((batch, 1, n_heads * channels))


def attend(q: Tensor, cache: Cache, pos: Tensor, scale: float = 0.0, window: int = 0) -> Tensor:
    return attend_operator(q, *cache, pos, scale, window)


@torch.library.custom_op("nanonorm::decode_attend_parts", mutates_args=())
def attend_parts_operator(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, pos: Tensor, parts: int, scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    return decode_attention.attend_parts(q, (k_cache, v_cache), pos, parts, scale, window)


@attend_parts_operator.register_fake
def _(q, k_cache, v_cache, pos, parts, scale, window):
    batch, n_heads, _, channels = q.shape
    sums = q.new_empty((batch, n_heads, parts, channels), dtype=torch.float32)
    largest = q.new_empty((batch, n_heads, parts), dtype=torch.float32)
    totals = q.new_empty((batch, n_heads, parts), dtype=torch.float32)
    return sums, largest, totals


def attend_parts(
    q: Tensor, cache: Cache, pos: Tensor, parts: int, scale: float = 0.0, window: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    return attend_parts_operator(q, *cache, pos, parts, scale, window)


@torch.library.custom_op("nanonorm::decode_best", mutates_args=())
def best_operator(logits: Tensor) -> tuple[Tensor, Tensor]:
    return decode_attention.best(logits.contiguous())


@best_operator.register_fake
def _(logits):
    shape = (logits.shape[0], decode_attention.PARTS)
    values = logits.new_empty(shape, dtype=torch.float32)
    tokens = logits.new_empty(shape, dtype=torch.int64)
    return values, tokens


def best(logits: Tensor) -> tuple[Tensor, Tensor]:
    return best_operator(logits)


@torch.library.custom_op("nanonorm::decode_take", mutates_args=("token", "pos", "out"))
def take_operator(values: Tensor, tokens: Tensor, token: Tensor, pos: Tensor, out: Tensor) -> None:
    decode_attention.take(values, tokens, token, pos, out)


@take_operator.register_fake
def _(values, tokens, token, pos, out):
    return None


def take(values: Tensor, tokens: Tensor, token: Tensor, pos: Tensor, out: Tensor) -> None:
    take_operator(values, tokens, token, pos, out)


def add_in_place(a: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """Return x + a weight^T, written into x.

    On CUDA, ATen's addmm into another tensor begins with a copy of x, which is one more launch. So
    the stream is only ever added to: after a pointwise add of inductor's, this would cost a launch
    too.
    """
    x.flatten(0, 1).addmm_(a.flatten(0, 1), weight.T)
    return x


@torch.library.custom_op("nanonorm::decode_matmul_add", mutates_args=("x",))
def add_operator(x: Tensor, a: Tensor, weight: Tensor) -> None:
    add_in_place(a, weight, x)


@add_operator.register_fake
def _(x, a, weight):
    return None


@torch.library.custom_op("nanonorm::decode_project", mutates_args=())
def project_operator(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, kind: str
) -> Tensor:
    if residual is not None:
        residual = residual.contiguous()
    return decode_project.project(x.contiguous(), weight, bias, residual, kind)


@project_operator.register_fake
def _(x, weight, bias, residual, kind):
    outputs = weight.shape[0] // (2 if kind in GATED else 1)
    return x.new_empty((*x.shape[:-1], outputs))


def project(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, kind: str = ""
) -> Tensor:
    return project_operator(x, weight, bias, residual, kind)


def matmul_add(a: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    add_operator(x, a, weight)
    return x


def matmul_add_visible(a: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """Return x + a weight^T as product and sum: inductor leaves addmm to the library, always.

    It must see the product: as an operator of its own, it leaves arm B with 8 launches instead of 7
    under gpt-fast's options.
    """
    return x + F.linear(a, weight)


# ---------------------------------------------------------------------------- the namespaces

FUSED = SimpleNamespace(
    **REFERENCE
    | {name: getattr(decode_attention, name) for name in OWN_ATTENTION}
    | {name: getattr(decode_project, name) for name in OWN_PRODUCTS}
    | {name: getattr(decode_epilogue, name) for name in OWN_EPILOGUES}
    | {"matmul_add": add_in_place}
)
COMPILED = SimpleNamespace(
    **REFERENCE
    | {
        "heads": heads,
        "attend": attend,
        "attend_parts": attend_parts,
        "matmul_add": matmul_add,
        "project": project,
        "best": best,
        "take": take,
    }
)
COMPILED_ROW = SimpleNamespace(**vars(COMPILED) | {"matmul_add": matmul_add_visible})
