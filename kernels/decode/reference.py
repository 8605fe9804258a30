"""What each launch of a decoding step computes, in plain PyTorch: one function, one launch on a
GPU.

Tokens (B, T), T = 1 in a step; the stream x (B, T, C); positions pos (T,) int64, the same for every
sequence. A block's cache is two tensors (B, n_kv_head, S, head_dim). Maths between a product and
its rounding is in float32, in float64 where x is, as a kernel's accumulators are.
kernels/decode/triton_launches.py has the same functions for a GPU.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..reference import activate, inverse_rms, statistics_dtype


class Epilogue(NamedTuple):
    """What is still to be applied to a raw product z: z * inv_rms + bias. inv_rms (B, T, 1), bias
    (N,) or None.
    """

    inv_rms: Tensor
    bias: Tensor | None


def apply_epilogue(z: Tensor, epilogue: Epilogue | None) -> Tensor:
    """z (B, T, N) in the precision of the statistics, its epilogue applied."""
    z = z.to(statistics_dtype(z))
    if epilogue is None:
        return z
    z = z * epilogue.inv_rms
    return z if epilogue.bias is None else z + epilogue.bias


# ----------------------------------------------------------------------------------- every step has


def embed(token: Tensor, pos: Tensor, wte: Tensor, wpe: Tensor | None) -> Tensor:
    """(B, T) -> (B, T, C)."""
    return (
        F.embedding(token, wte) if wpe is None else F.embedding(token, wte) + F.embedding(pos, wpe)
    )


def norm(module: torch.nn.Module, x: Tensor, delta: Tensor | None, inv_rms: Tensor | None) -> tuple:
    """(y, x + delta, inv_rms) of an add-and-norm (norms.py); delta (B, T, C) or None."""
    return module(x, delta, inv_rms)


def heads(
    z: Tensor,
    epilogue: Epilogue | None,
    cache: tuple[Tensor, Tensor],
    pos: Tensor,
    rope: tuple[Tensor, Tensor] | None,
    q_gain: Tensor | None,
    k_gain: Tensor | None,
    eps: float,
) -> Tensor:
    """Queries (B, H, T, D) of z (B, T, (H + 2 H_kv) D); keys and values go into the cache at pos.

    QK-norm where there are gains (D,), then rotary positions where there are tables (length, D).
    """
    k_cache, v_cache = cache
    kv_heads, channels = k_cache.shape[1], k_cache.shape[3]
    # (B, H + 2 H_kv, T, D)
    z = apply_epilogue(z, epilogue).unflatten(-1, (-1, channels)).transpose(1, 2)
    q, k, v = z.split([z.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if q_gain is not None:
        q, k = (part * inverse_rms(part, eps) * gain for part, gain in ((q, q_gain), (k, k_gain)))
    if rope is not None:
        q, k = (turn(part, rope[0][pos], rope[1][pos]) for part in (q, k))
    k_cache.index_copy_(2, pos, k.to(k_cache.dtype))
    v_cache.index_copy_(2, pos, v.to(v_cache.dtype))
    return q.to(k_cache.dtype)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: channel i of x (B, H, T, D) turns with channel i + D / 2; tables (T, D)."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def attend(q: Tensor, cache: tuple[Tensor, Tensor], pos: Tensor) -> Tensor:
    """Attention of q (B, H, T, D) to the keys and values up to its position: (B, T, H D)."""
    k, v = cache
    mask = torch.arange(k.shape[2], device=pos.device) <= pos[:, None]  # (T, S)
    a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=k.shape[1] != q.shape[1])
    return a.transpose(1, 2).flatten(2)


# A long cache is split over more programs than there are heads ("flash decoding"), for one more
# launch. By reckoning:
LONG = 1024  # tokens that a cache has room for, beyond which it is split
PART = 128  # keys of a part, at least
PROGRAMS = 264  # two for each SM of an H200: no more parts than they take


def attention_parts(batch: int, n_heads: int, length: int) -> int:
    """Parts that the attention of one token to a cache of `length` tokens is split into."""
    return 1 if length <= LONG else max(1, min(length // PART, PROGRAMS // (batch * n_heads)))


def attend_parts(
    q: Tensor, cache: tuple[Tensor, Tensor], pos: Tensor, parts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of one token q (B, H, 1, D) to each of equal parts of the cache, before it is
    divided by its sum: the values' weighted sums (B, H, parts, D), the largest scores and the
    weights' sums (B, H, parts).
    """
    wide, groups = statistics_dtype(q), q.shape[1] // cache[0].shape[1]
    k, v = (part.to(wide).repeat_interleave(groups, 1) for part in cache)  # (B, H, S, D)
    score = (q.to(wide) @ k.mT).squeeze(2) * q.shape[-1] ** -0.5  # (B, H, S)
    score = score.masked_fill(torch.arange(k.shape[2], device=pos.device) > pos, float("-inf"))
    missing = -k.shape[2] % parts
    # (B, H, parts, S / parts)
    score = F.pad(score, (0, missing), value=float("-inf")).unflatten(-1, (parts, -1))
    v = F.pad(v, (0, 0, 0, missing)).unflatten(2, (parts, -1))
    largest = score.amax(-1)
    # of a part without a key yet: zeros
    weight = (score - largest.clamp(min=torch.finfo(wide).min)[..., None]).exp()
    return (weight.unsqueeze(-2) @ v).squeeze(-2), largest, weight.sum(-1)


def combine(sums: Tensor, largest: Tensor, totals: Tensor, dtype: torch.dtype) -> Tensor:
    """The parts' attention (attend_parts) as one: (B, 1, H D)."""
    share = (largest - largest.amax(-1, keepdim=True)).exp()
    a = (share[..., None] * sums).sum(2) / (share * totals).sum(-1, keepdim=True)  # (B, H, D)
    return a.flatten(1).unsqueeze(1).to(dtype)


def heads_attend(z, epilogue, cache, pos, rope, q_gain, k_gain, eps) -> Tensor:
    """heads and attend at once: (B, T, H D). Rounded where these are."""
    return attend(heads(z, epilogue, cache, pos, rope, q_gain, k_gain, eps), cache, pos)


def heads_attend_parts(
    z, epilogue, cache, pos, rope, q_gain, k_gain, eps, parts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """heads and attend_parts at once."""
    return attend_parts(
        heads(z, epilogue, cache, pos, rope, q_gain, k_gain, eps), cache, pos, parts
    )


def best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Largest logits (B, n) of logits (B, 1, V) and their tokens (B, n), for one or more parts of
    the vocabulary.
    """
    return logits[:, -1].max(-1, keepdim=True)


def take(values: Tensor, tokens: Tensor, token: Tensor, pos: Tensor, out: Tensor) -> None:
    """The token of the largest value goes into token (B, 1) and, behind pos, into out (B, length);
    pos + 1.
    """
    token.copy_(tokens.gather(1, values.argmax(-1, keepdim=True)))
    pos.add_(1)
    out.index_copy_(1, pos, token)


# -------------------------------------------------------------------- around the library's products


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The library's product: (B, T, K) -> (B, T, N)."""
    return F.linear(x, weight, bias)


def matmul_add(a: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """x + a weight^T with the library's addmm: the residual add in the product's epilogue. On a
    GPU, x is written.
    """
    return torch.addmm(x.flatten(0, 1), a.flatten(0, 1), weight.T).view_as(x)


def activation(z: Tensor, epilogue: Epilogue | None, kind: str) -> Tensor:
    """The MLP's activation of a product that may still owe its scale: the paper's 1 / sigma inside
    the activation.
    """
    return activate(z if epilogue is None else apply_epilogue(z, epilogue), kind).to(z.dtype)


def norm_activation(
    z: Tensor, x: Tensor, bias: Tensor | None, eps: float, kind: str
) -> tuple[Tensor, Tensor]:
    """(y, inv_rms): act(inv_rms * z + bias) of a raw product z of x; inv_rms is taken of x."""
    inv_rms = inverse_rms(x, eps)
    return activation(z, Epilogue(inv_rms, bias), kind), inv_rms


def scale(z: Tensor, epilogue: Epilogue) -> Tensor:
    """A product (logits) with its epilogue applied."""
    return apply_epilogue(z, epilogue).to(z.dtype)


# ----------------------------------------------------------------------- products of our own: fused


def project(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, kind: str = ""
) -> Tensor:
    """act(x weight^T + bias), plus residual (B, T, N): everything in the product's epilogue."""
    return _epilogue(_product(x, weight), None, bias, residual, kind, x.dtype)


def norm_project(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kind: str = ""
) -> tuple[Tensor, Tensor]:
    """(y, inv_rms): act(inv_rms * x weight^T + bias).

    The sum of squares is taken in the product's own loop over x.
    """
    inv_rms = inverse_rms(x, eps)
    return _epilogue(_product(x, weight), inv_rms, bias, None, kind, x.dtype), inv_rms


def shared_project(
    x: Tensor, inv_rms: Tensor, weight: Tensor, bias: Tensor | None, kind: str = ""
) -> Tensor:
    """act(inv_rms * x weight^T + bias) with a statistic (B, T, 1) from elsewhere."""
    return _epilogue(_product(x, weight), inv_rms, bias, None, kind, x.dtype)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T with the accumulators not yet rounded."""
    wide = statistics_dtype(x)
    if x.is_cuda and x.dtype != wide:  # without a wide copy of the weights
        return torch.mm(x.flatten(0, -2), weight.T, out_dtype=wide).unflatten(0, x.shape[:-1])
    return F.linear(x.to(wide), weight.to(wide))


def _epilogue(z, inv_rms, bias, residual, kind, dtype):
    if inv_rms is not None:
        z = z * inv_rms
    if bias is not None:
        z = z + bias
    if kind:
        z = activate(z, kind)
    return (z if residual is None else residual + z).to(dtype)
