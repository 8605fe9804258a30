"""The launches of a decoding step on a GPU, as the namespaces that decode/step.py chooses from.

FUSED         our Triton kernels, called as they are: a CUDA graph takes the launching away
COMPILED      for a step that goes through torch.compile: heads, attention and what adds to the
              stream, as operators that inductor calls and cannot look into; it makes the rest, and
              the library multiplies. The search for the next token, too: inductor's is one program
              for a whole vocabulary
COMPILED_ROW  the same for one row where inductor writes the products itself: it adds to the stream
              in them, so it must see the sum
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from . import attention as decode_attention
from . import epilogue as decode_epilogue
from . import project as decode_project
from . import reference as decode_reference
from .reference import Epilogue

REFERENCE = {
    name: value for name, value in vars(decode_reference).items() if not name.startswith("_")
}
OWN = {
    name: getattr(decode_attention, name)
    for name in (
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
}
OWN |= {
    name: getattr(decode_project, name) for name in ("project", "norm_project", "shared_project")
}


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
    eps: float,
) -> Tensor:
    epilogue = None if inv_rms is None else Epilogue(inv_rms.contiguous(), bias)
    rope = None if cos is None else (cos, sin)
    return decode_attention.heads(
        z.contiguous(), epilogue, (k_cache, v_cache), pos, rope, q_gain, k_gain, eps
    )


@heads_operator.register_fake
def _(z, inv_rms, bias, k_cache, v_cache, pos, cos, sin, q_gain, k_gain, eps):
    batch, kv_heads, _, channels = k_cache.shape
    return z.new_empty(
        (batch, z.shape[-1] // channels - 2 * kv_heads, 1, channels), dtype=k_cache.dtype
    )


@torch.library.custom_op("nanonorm::decode_attend", mutates_args=())
def attend_operator(q: Tensor, k_cache: Tensor, v_cache: Tensor, pos: Tensor) -> Tensor:
    return decode_attention.attend(q, (k_cache, v_cache), pos)


@attend_operator.register_fake
def _(q, k_cache, v_cache, pos):
    return q.new_empty((q.shape[0], 1, q.shape[1] * q.shape[3]))


def heads(z, epilogue, cache, pos, rope, q_gain, k_gain, eps):
    return heads_operator(
        z, *(epilogue or (None, None)), *cache, pos, *(rope or (None, None)), q_gain, k_gain, eps
    )


def attend(q, cache, pos):
    return attend_operator(q, *cache, pos)


@torch.library.custom_op("nanonorm::decode_attend_parts", mutates_args=())
def attend_parts_operator(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, pos: Tensor, parts: int
) -> tuple[Tensor, Tensor, Tensor]:
    return decode_attention.attend_parts(q, (k_cache, v_cache), pos, parts)


@attend_parts_operator.register_fake
def _(q, k_cache, v_cache, pos, parts):
    shape = (*q.shape[:2], parts)
    sums = q.new_empty((*shape, q.shape[3]), dtype=torch.float32)
    return sums, *(q.new_empty(shape, dtype=torch.float32) for _ in range(2))


def attend_parts(q, cache, pos, parts):
    return attend_parts_operator(q, *cache, pos, parts)


@torch.library.custom_op("nanonorm::decode_best", mutates_args=())
def best_operator(logits: Tensor) -> tuple[Tensor, Tensor]:
    return decode_attention.best(logits.contiguous())


@best_operator.register_fake
def _(logits):
    shape = (logits.shape[0], decode_attention.PARTS)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)


def best(logits):
    return best_operator(logits)


@torch.library.custom_op("nanonorm::decode_take", mutates_args=("token", "pos", "out"))
def take_operator(values: Tensor, tokens: Tensor, token: Tensor, pos: Tensor, out: Tensor) -> None:
    decode_attention.take(values, tokens, token, pos, out)


@take_operator.register_fake
def _(values, tokens, token, pos, out):
    return None


def take(values, tokens, token, pos, out):
    take_operator(values, tokens, token, pos, out)


def add_in_place(a, weight, x):
    """With another result than its operand, ATen's addmm on CUDA begins with a copy, one more
    launch.
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
def project_operator(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return decode_project.project(x.contiguous(), weight, bias, residual.contiguous())


@project_operator.register_fake
def _(x, weight, bias, residual):
    return residual.new_empty(residual.shape)


def project(x, weight, bias, residual):
    return project_operator(x, weight, bias, residual)


def matmul_add(a, weight, x):
    add_operator(x, a, weight)
    return x


def matmul_add_visible(a, weight, x):
    """As product and sum: addmm would stay the library's whatever inductor's options are."""
    return x + F.linear(a, weight)


EPILOGUES = {
    name: getattr(decode_epilogue, name) for name in ("norm_activation", "activation", "scale")
}
EPILOGUES["matmul_add"] = add_in_place
FUSED = SimpleNamespace(**REFERENCE | OWN | EPILOGUES)
OPERATORS = {
    "heads": heads,
    "attend": attend,
    "attend_parts": attend_parts,
    "matmul_add": matmul_add,
    "project": project,
    "best": best,
    "take": take,
}
COMPILED = SimpleNamespace(**REFERENCE | OPERATORS)
COMPILED_ROW = SimpleNamespace(**vars(COMPILED) | {"matmul_add": matmul_add_visible})
