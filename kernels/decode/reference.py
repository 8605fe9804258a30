"""What each launch of a decoding step computes, in plain PyTorch: one function for each launch.

B sequences of T tokens, T = 1 in a step. Positions pos (T,), int64, are the same for all sequences.
The residual stream x is (B, T, C). H query heads and H_kv key and value heads have D channels. The
computation between a product and its rounding is in float32, for float64 input in float64, as the
accumulators of a kernel are.

kernels/decode/triton_launches.py has the same functions for a GPU.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..reference import activate, inverse_rms, statistics_dtype

# Keys and values of a block: (B, H_kv, S, D) each, with room for S tokens.
Cache = tuple[Tensor, Tensor]


class RawHeads(NamedTuple):
    """What queries, keys and values are made of: the first arguments of `heads`."""

    z: Tensor | None = None  # the product (B, T, (H + 2 H_kv) D)
    inv_rms: Tensor | None = None  # what it still lacks (`finished`)
    bias: Tensor | None = None
    cos: Tensor | None = None  # of rotary positions (positions, D)
    sin: Tensor | None = None
    # Of the RMSNorms of queries, keys and values; None: no norm. A gain (D,) is of a norm over each
    # head, a gain (heads D,) of a norm over all heads.
    q_gain: Tensor | None = None
    k_gain: Tensor | None = None
    v_gain: Tensor | None = None
    eps: float = 0.0  # of these norms


class Reach(NamedTuple):
    """How a token attends to the cache: the last arguments of `attend`."""

    parts: int = 1  # equal parts of the cache, or of the window, attended to separately
    scale: float = 0.0  # of the scores; 0: 1 / sqrt(D)
    window: int = 0  # keys that a query sees, that of its own position included; 0: all before it


def finished(z: Tensor, inv_rms: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return z * inv_rms + bias, as far as they are given, in the precision of the statistics.

    z (B, T, N) is a product, inv_rms (B, T, 1), bias (N,).
    """
    z = z.to(statistics_dtype(z))
    if inv_rms is not None:
        z = z * inv_rms
    return z if bias is None else z + bias


# ------------------------------------------------------------------- launches of every level


def embed(token: Tensor, pos: Tensor, wte: Tensor, wpe: Tensor | None) -> Tensor:
    """Return the embeddings (B, T, C) of tokens (B, T), with learned positions if there are any."""
    x = F.embedding(token, wte)  # (B, T, C)
    if wpe is None:
        return x
    return x + F.embedding(pos, wpe)


def norm(
    module: torch.nn.Module, x: Tensor, delta: Tensor | None, inv_rms: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (y, x + delta, inv_rms) of an add-and-norm (norms.py); delta (B, T, C) or None."""
    return module(x, delta, inv_rms)


def heads(
    z: Tensor,
    inv_rms: Tensor | None,
    bias: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    q_gain: Tensor | None,
    k_gain: Tensor | None,
    v_gain: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    pos: Tensor,
) -> Tensor:
    """Make queries of z (B, T, (H + 2 H_kv) D), and write keys and values into the cache at pos.

    Args:
        z to eps: the fields of RawHeads.
        k_cache, v_cache: (B, H_kv, S, D).
        pos: (T,).

    Returns:
        Queries (B, H, T, D), in the type of the cache.
    """
    _, kv_heads, _, channels = k_cache.shape
    z = finished(z, inv_rms, bias).unflatten(-1, (-1, channels))  # (B, T, H + 2 H_kv, D)
    z = z.transpose(1, 2)  # (B, H + 2 H_kv, T, D)
    n_heads = z.shape[1] - 2 * kv_heads
    q, k, v = z.split([n_heads, kv_heads, kv_heads], dim=1)
    q = normalized_heads(q, q_gain, eps)
    k = normalized_heads(k, k_gain, eps)
    v = normalized_heads(v, v_gain, eps)
    if cos is not None:
        q = turn(q, cos[pos], sin[pos])
        k = turn(k, cos[pos], sin[pos])
    k_cache.index_copy_(2, pos, k.to(k_cache.dtype))
    v_cache.index_copy_(2, pos, v.to(v_cache.dtype))
    return q.to(k_cache.dtype)


def normalized_heads(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """Return RMSNorm of x (B, heads, T, D) over each head, or over all heads if the gain is."""
    if gain is None:
        return x
    channels = x.shape[-1]
    if gain.numel() == channels:
        return x * inverse_rms(x, eps) * gain
    # the order of OLMo 2 and of the model: all heads of a token side by side
    x = x.transpose(1, 2).flatten(2)  # (B, T, heads D)
    x = x * inverse_rms(x, eps) * gain
    return x.unflatten(-1, (-1, channels)).transpose(1, 2)  # (B, heads, T, D)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (B, H, T, D) by its positions, channel i with channel i + D / 2; tables (T, D)."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pos: Tensor,
    parts: int = 1,
    scale: float = 0.0,
    window: int = 0,
) -> list[Tensor]:
    """Attend with q (B, H, T, D) to the cache, (B, H_kv, S, D) each, up to its position.

    Several tokens (T > 1) are a prompt, which begins at position 0, in one part. parts, scale and
    window are the fields of Reach.

    Returns:
        [attention (B, T, H D)], or what attend_parts returns, for `combine`.
    """
    if parts > 1:
        return attend_parts(q, k, v, pos, parts, scale, window)
    tokens = q.shape[2]
    groups = q.shape[1] // k.shape[1]  # query heads of a key and value head
    if tokens > 1:
        k = k[:, :, :tokens]
        v = v[:, :, :tokens]
    if tokens > 1 and (not window or window >= tokens):
        a = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale or None, enable_gqa=groups > 1
        )
    else:
        key = torch.arange(k.shape[2], device=pos.device)
        mask = key <= pos[:, None]  # (T, S)
        if window:
            mask = mask & (key > pos[:, None] - window)
        if groups > 1:  # a mask with enable_gqa is left to a kernel that stores all scores, on CUDA
            k = k.repeat_interleave(groups, 1)
            v = v.repeat_interleave(groups, 1)
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale or None)
    return [a.transpose(1, 2).flatten(2)]  # (B, H, T, D) -> (B, T, H D)


# A long cache is split into parts, so that more programs work on it than there are heads ("flash
# decoding"), which costs one more launch. These numbers are estimates, not measurements.
LONG = 1024  # a cache with room for more tokens than this is split
PART = 128  # keys of a part, at least
PROGRAMS = 264  # limit for sequences x heads x parts: two programs for each SM of an H200


def attention_parts(batch: int, n_heads: int, length: int) -> int:
    """Return the number of parts for the attention of one token to `length` tokens of a cache."""
    if length <= LONG:
        return 1
    return max(1, min(length // PART, PROGRAMS // (batch * n_heads)))


def attend_parts(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, parts: int, scale: float, window: int
) -> list[Tensor]:
    """Attend with one token q (B, H, 1, D) to each of equal parts of the cache separately.

    With a window, to parts of the keys that are in it. `scale` and `window` are as in attend.

    Returns:
        The values' weighted sums (B, H, parts, D), not divided by the totals; the largest scores
        (B, H, parts), -inf for a part without a key yet; the totals of the weights (B, H, parts).
        All in the precision of the statistics.
    """
    dtype = statistics_dtype(q)
    key = torch.arange(k.shape[2], device=pos.device)
    if 0 < window < len(key):
        # Near the start of the cache some of these are still to come; they are masked below.
        key = (pos + 1 - window).clamp(min=0) + key[:window]
        k = k.index_select(2, key)
        v = v.index_select(2, key)
    groups = q.shape[1] // k.shape[1]  # query heads of a key and value head
    k = k.to(dtype).repeat_interleave(groups, 1)  # (B, H, S, D)
    v = v.to(dtype).repeat_interleave(groups, 1)
    length = k.shape[2]
    score = (q.to(dtype) @ k.mT).squeeze(2) * (scale or q.shape[-1] ** -0.5)  # (B, H, S)
    score = score.masked_fill(key > pos, float("-inf"))
    # the last part is filled up with keys that get no weight
    missing = -length % parts
    score = F.pad(score, (0, missing), value=float("-inf"))
    score = score.unflatten(-1, (parts, -1))  # (B, H, parts, S / parts)
    v = F.pad(v, (0, 0, 0, missing)).unflatten(2, (parts, -1))  # (B, H, parts, S / parts, D)
    largest = score.amax(-1)  # (B, H, parts)
    # -inf minus -inf is NaN; with the clamp, weights of a part without a key yet are zeros
    finite = largest.clamp(min=torch.finfo(dtype).min)
    weight = (score - finite[..., None]).exp()
    sums = (weight.unsqueeze(-2) @ v).squeeze(-2)  # (B, H, parts, D)
    return [sums, largest, weight.sum(-1)]


def combine(sums: Tensor, largest: Tensor, totals: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the attention (B, 1, H D) that the parts of attend_parts make together."""
    # each part's weights are relative to its own largest score
    share = (largest - largest.amax(-1, keepdim=True)).exp()  # (B, H, parts)
    total = (share * totals).sum(-1, keepdim=True)  # (B, H, 1)
    a = (share[..., None] * sums).sum(2) / total  # (B, H, D)
    return a.flatten(1).unsqueeze(1).to(dtype)


def heads_attend(
    raw: RawHeads, k_cache: Tensor, v_cache: Tensor, pos: Tensor, reach: Reach
) -> list[Tensor]:
    """heads and attend in one launch. It rounds where these two round."""
    q = heads(*raw, k_cache, v_cache, pos)
    return attend(q, k_cache, v_cache, pos, *reach)


def best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest of logits (B, 1, V) and their tokens, (B, n) each.

    n is the number of parts in which the vocabulary is searched, here 1.
    """
    return logits[:, -1].max(-1, keepdim=True)


def take(values: Tensor, tokens: Tensor, token: Tensor, pos: Tensor, out: Tensor) -> None:
    """Write the token of the largest value into token (B, 1) and out (B, length); move pos by one.

    In `out` it stands at the new position.
    """
    token.copy_(tokens.gather(1, values.argmax(-1, keepdim=True)))
    pos.add_(1)
    out.index_copy_(1, pos, token)


# ------------------------------------------------- the library's products, and launches after them


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the library's product x weight^T + bias: (B, T, K) -> (B, T, N)."""
    return F.linear(x, weight, bias)


def matmul_add(a: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """Return x + a weight^T, (B, T, C): addmm has the residual add in its epilogue.

    On a GPU the result is written into x.
    """
    return torch.addmm(x.flatten(0, 1), a.flatten(0, 1), weight.T).view_as(x)


def activation(
    z: Tensor,
    inv_rms: Tensor | None,
    bias: Tensor | None,
    kind: str,
    x: Tensor | None = None,
    eps: float = 0.0,
) -> list[Tensor]:
    """Return [act(z)], or [act(inv_rms * z + bias)] for a raw product z; act is 1 for kind "".

    The latter is how the paper applies 1 / sigma (Loretz & Hochreiter 2026, section 4.3). With x
    the statistic is that of x, and is returned too.
    """
    taken = []
    if x is not None:
        inv_rms = inverse_rms(x, eps)
        taken.append(inv_rms)
    y = z if inv_rms is None else finished(z, inv_rms, bias)
    if kind:
        y = activate(y, kind)
    return [y.to(z.dtype), *taken]


# ------------------------------------------------------------------------- our own, fused products


def project(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    inv_rms: Tensor | None = None,
    eps: float | None = None,
    kind: str = "",
) -> list[Tensor]:
    """Return [act(inv_rms * x weight^T + bias) + residual] (B, T, N), in one launch.

    With eps the statistic is x's own, and is returned too: the kernel sums the squares in the
    product's own loop over x.
    """
    taken = []
    if eps is not None:
        inv_rms = inverse_rms(x, eps)
        taken.append(inv_rms)
    z = finished(_product(x, weight), inv_rms, bias)
    if kind:
        z = activate(z, kind)
    if residual is not None:
        z = residual + z
    return [z.to(x.dtype), *taken]


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x weight^T (..., N) as accumulated, not rounded yet."""
    wide = statistics_dtype(x)
    if x.is_cuda and x.dtype != wide:
        # without a float32 copy of the weights, for which a GPU may have no room
        z = torch.mm(x.flatten(0, -2), weight.T, out_dtype=wide)
        return z.unflatten(0, x.shape[:-1])
    return F.linear(x.to(wide), weight.to(wide))
