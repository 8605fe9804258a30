"""Triton: what a decoding step does between its products, for one new token of every sequence.

heads: QK-norm, rotary positions and the write into the cache; attend: attention to the cache up to
the position, which is read from the device; attend_parts and combine: the same for a long cache,
over more programs; heads_attend and heads_attend_parts: both at once; embed, best and take: the
ends of a step. Functions are those of kernels/decode/reference.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import rows
from . import overlap
from .reference import Epilogue

KEYS, WARPS = 64, 8  # of an attention program: keys at a time
PARTS = 32  # of the vocabulary, each searched by its own program


@triton.jit
def load_paid(Z, INV, BIAS, row, first, col, mask, width):
    """Channels first + col of a row of z in float32, its epilogue applied."""
    z = tl.load(Z + row * width + first + col, mask=mask, other=0.0).to(tl.float32)
    if INV is not None:
        z = z * tl.load(INV + row)
        if BIAS is not None:
            z += tl.load(BIAS + first + col, mask=mask, other=0.0).to(tl.float32)
    return z


@triton.jit
def load_head(
    Z,
    INV,
    BIAS,
    GAIN,
    COS,
    SIN,
    row,
    first,
    pos,
    eps,
    width,
    D: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A query or key (WIDE,) of a row of z in float32: its epilogue applied, QK-norm, rotary
    positions.
    """
    col = tl.arange(0, WIDE)
    mask, half = col < D, D // 2
    other = tl.where(col < half, col + half, col - half)  # the channel that this one turns with
    z = load_paid(Z, INV, BIAS, row, first, col, mask, width)
    partner = load_paid(Z, INV, BIAS, row, first, other, mask, width)
    if GAIN is not None:
        inv = tl.rsqrt(tl.sum(z * z, 0) / D + tl.cast(eps, tl.float32))
        z = z * inv * tl.load(GAIN + col, mask=mask, other=0.0).to(tl.float32)
        partner = partner * inv * tl.load(GAIN + other, mask=mask, other=0.0).to(tl.float32)
    if COS is not None:
        cos = tl.load(COS + pos * D + col, mask=mask, other=0.0)
        sin = tl.load(SIN + pos * D + col, mask=mask, other=0.0)
        z = z * cos + tl.where(col < half, -partner, partner) * sin
    return z


@triton.jit
def heads_kernel(
    Z,
    INV,
    BIAS,
    COS,
    SIN,
    Q_GAIN,
    K_GAIN,
    eps,
    Q,
    K,
    V,
    POS,
    length,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One head of one sequence: a query, a key or a value."""
    overlap.wait(PDL)
    row, head, pos = tl.program_id(0), tl.program_id(1), tl.load(POS)
    col = tl.arange(0, WIDE)
    mask, width = col < D, (HEADS + 2 * KV_HEADS) * D
    place = ((row * KV_HEADS + (head - HEADS) % KV_HEADS) * length + pos) * D  # of a key or value
    if head < HEADS:
        q = load_head(Z, INV, BIAS, Q_GAIN, COS, SIN, row, head * D, pos, eps, width, D, WIDE)
        tl.store(Q + (row * HEADS + head) * D + col, q.to(Q.dtype.element_ty), mask=mask)
    elif head < HEADS + KV_HEADS:
        k = load_head(Z, INV, BIAS, K_GAIN, COS, SIN, row, head * D, pos, eps, width, D, WIDE)
        tl.store(K + place + col, k.to(K.dtype.element_ty), mask=mask)
    else:
        v = load_paid(Z, INV, BIAS, row, head * D, col, mask, width)
        tl.store(V + place + col, v.to(V.dtype.element_ty), mask=mask)


@triton.jit
def load_tile(CACHE, first, key, end, col, D: tl.constexpr):
    """(KEYS, WIDE) of the cache, in its own type; zero from `end` on. first: where the head's keys
    begin.
    """
    mask = (key < end)[:, None] & (col < D)[None, :]
    return tl.load(CACHE + (first + key)[:, None] * D + col[None, :], mask=mask, other=0.0)


@triton.jit
def attend_kernel(
    Q,
    Z,
    INV,
    BIAS,
    COS,
    SIN,
    Q_GAIN,
    K_GAIN,
    eps,
    K,
    V,
    POS,
    A,
    LARGEST,
    TOTAL,
    scale,
    length,
    part_keys,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One query head of one sequence: softmax over the keys, or a part of them, in one pass with a
    running maximum. With PARTS, A (rows, HEADS, PARTS, D) is not divided by the weights' sum yet.

    Without Q, query and new key and value come from Z, by every query head of their group. The
    first of these writes them into the cache, where no program of this launch reads them: so none
    has to wait.
    """
    if Z is None:
        overlap.wait(PDL)  # the launch before has written the newest key
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    col, lane = tl.arange(0, WIDE), tl.arange(0, KEYS)
    channel, group = col < D, head // (HEADS // KV_HEADS)
    first = (row * KV_HEADS + group).to(tl.int64) * length
    pos, begin = tl.load(POS).to(tl.int32), part * part_keys
    end = tl.minimum(pos + 1 if Z is None else pos, begin + part_keys)
    # of steps before; under way while the query is made
    k = load_tile(K, first, begin + lane, end, col, D)
    v = load_tile(V, first, begin + lane, end, col, D)
    if Z is not None:
        overlap.wait(PDL)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    a = tl.zeros((WIDE,), tl.float32)
    if Z is None:
        q = tl.load(Q + (row * HEADS + head) * D + col, mask=channel, other=0.0).to(tl.float32)
        q = q * tl.cast(scale, tl.float32)
    else:
        width = (HEADS + 2 * KV_HEADS) * D
        q = load_head(Z, INV, BIAS, Q_GAIN, COS, SIN, row, head * D, pos, eps, width, D, WIDE)
        key = load_head(
            Z, INV, BIAS, K_GAIN, COS, SIN, row, (HEADS + group) * D, pos, eps, width, D, WIDE
        )
        value = load_paid(Z, INV, BIAS, row, (HEADS + KV_HEADS + group) * D, col, channel, width)
        # rounded as the cache has them
        key, value = key.to(K.dtype.element_ty), value.to(V.dtype.element_ty)
        q = q.to(K.dtype.element_ty).to(tl.float32) * tl.cast(scale, tl.float32)
        here = (begin <= pos) & (pos < begin + part_keys)
        largest = tl.where(here, tl.sum(q * key.to(tl.float32), 0), largest)
        total = tl.where(here, 1.0, total)
        a = tl.where(here, value.to(tl.float32), a)
        if here and head % (HEADS // KV_HEADS) == 0:
            tl.store(K + (first + pos) * D + col, key, mask=channel)
            tl.store(V + (first + pos) * D + col, value, mask=channel)
    for start in range(begin, end, KEYS):
        score = tl.where(
            start + lane < end, tl.sum(k.to(tl.float32) * q[None, :], 1), float("-inf")
        )
        k = load_tile(K, first, start + KEYS + lane, end, col, D)
        before, largest = largest, tl.maximum(largest, tl.max(score, 0))
        weight = tl.exp(score - largest)
        shrink = tl.exp(before - largest)
        total = total * shrink + tl.sum(weight, 0)
        a = a * shrink + tl.sum(weight[:, None] * v.to(tl.float32), 0)
        v = load_tile(V, first, start + KEYS + lane, end, col, D)
    place = (row * HEADS + head) * PARTS + part
    if PARTS == 1:
        a = a / total
    else:
        tl.store(LARGEST + place, largest)
        tl.store(TOTAL + place, total)
    tl.store(A + place * D + col, a.to(A.dtype.element_ty), mask=channel)


@triton.jit
def combine_kernel(
    SUMS,
    LARGEST,
    TOTAL,
    A,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    PARTS: tl.constexpr,
    MANY: tl.constexpr,
    PDL: tl.constexpr,
):
    """The parts of one head of one sequence as one."""
    overlap.wait(PDL)
    head, col, part = tl.program_id(0), tl.arange(0, WIDE), tl.arange(0, MANY)
    largest = tl.load(LARGEST + head * PARTS + part, mask=part < PARTS, other=float("-inf"))
    share = tl.exp(largest - tl.max(largest, 0))
    total = tl.sum(share * tl.load(TOTAL + head * PARTS + part, mask=part < PARTS, other=0.0), 0)
    mask = (part < PARTS)[:, None] & (col < D)[None, :]
    sums = tl.load(SUMS + (head * PARTS + part)[:, None] * D + col[None, :], mask=mask, other=0.0)
    a = tl.sum(share[:, None] * sums, 0) / total
    tl.store(A + head * D + col, a.to(A.dtype.element_ty), mask=col < D)


@triton.jit
def embed_kernel(TOKEN, POS, WTE, WPE, X, C: tl.constexpr, WIDE: tl.constexpr):
    row, col = tl.program_id(0), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    mask = col < C
    x = tl.load(WTE + tl.load(TOKEN + row) * C + col, mask=mask, other=0.0)
    if WPE is not None:
        x = (
            x.to(tl.float32)
            + tl.load(WPE + tl.load(POS) * C + col, mask=mask, other=0.0).to(tl.float32)
        ).to(x.dtype)
    tl.store(X + row * C + col, x, mask=mask)


@triton.jit
def best_kernel(
    Z, VALUES, TOKENS, V, part, PARTS: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr
):
    """The largest logit of one part of the vocabulary; of equal ones the first."""
    overlap.wait(PDL)
    row, first = tl.program_id(0), tl.program_id(1) * part
    end = tl.minimum(first + part, V)
    largest = tl.full((WIDE,), float("-inf"), tl.float32)
    token = tl.full((WIDE,), 0, tl.int32) + first
    for start in range(first, end, WIDE):
        col = start + tl.arange(0, WIDE)
        z = tl.load(Z + row.to(tl.int64) * V + col, mask=col < end, other=float("-inf")).to(
            tl.float32
        )
        token = tl.where(z > largest, col, token)
        largest = tl.maximum(z, largest)
    top = tl.max(largest, 0)
    place = row * PARTS + tl.program_id(1)
    tl.store(VALUES + place, top)
    tl.store(TOKENS + place, tl.min(tl.where(largest == top, token, V), 0))


@triton.jit
def take_kernel(
    VALUES,
    TOKENS,
    TOKEN,
    POS,
    OUT,
    n_rows,
    length,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for all sequences, so that the position moves once."""
    overlap.wait(PDL)
    pos = tl.load(POS) + 1
    row, part = tl.arange(0, ROWS), tl.arange(0, PARTS)
    valid = row < n_rows
    place = row[:, None] * PARTS + part[None, :]
    value = tl.load(VALUES + place, mask=valid[:, None], other=0.0)
    token = tl.load(TOKENS + place, mask=valid[:, None], other=0)
    token = tl.min(tl.where(value == tl.max(value, 1)[:, None], token, 2147483647), 1)
    tl.store(TOKEN + row, token, mask=valid)
    tl.store(OUT + row * length + pos, token, mask=valid)
    tl.debug_barrier()
    tl.store(POS, pos)


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
    k_cache, v_cache = cache
    batch, kv_heads, length, channels = k_cache.shape
    n_heads = z.shape[-1] // channels - 2 * kv_heads
    q = rows.empty((batch, n_heads, 1, channels), k_cache.dtype, z.device)
    with rows.on_device(z):
        heads_kernel[(batch, n_heads + 2 * kv_heads)](
            z,
            *(epilogue or (None, None)),
            *(rope or (None, None)),
            q_gain,
            k_gain,
            eps,
            q,
            k_cache,
            v_cache,
            pos,
            length,
            HEADS=n_heads,
            KV_HEADS=kv_heads,
            D=channels,
            WIDE=triton.next_power_of_2(channels),
            num_warps=1,
            **overlap.launch_options(),
        )
    return q


def attend(q: Tensor, cache: tuple[Tensor, Tensor], pos: Tensor) -> Tensor:
    return _attend((q, *[None] * 7, 0.0), q.shape[1], cache, pos, 1)[0]


def attend_parts(
    q: Tensor, cache: tuple[Tensor, Tensor], pos: Tensor, parts: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _attend((q, *[None] * 7, 0.0), q.shape[1], cache, pos, parts)


def heads_attend(
    z: Tensor,
    epilogue: Epilogue | None,
    cache: tuple[Tensor, Tensor],
    pos: Tensor,
    rope: tuple[Tensor, Tensor] | None,
    q_gain: Tensor | None,
    k_gain: Tensor | None,
    eps: float,
) -> Tensor:
    return heads_attend_parts(z, epilogue, cache, pos, rope, q_gain, k_gain, eps, 1)[0]


def heads_attend_parts(
    z: Tensor,
    epilogue: Epilogue | None,
    cache: tuple[Tensor, Tensor],
    pos: Tensor,
    rope: tuple[Tensor, Tensor] | None,
    q_gain: Tensor | None,
    k_gain: Tensor | None,
    eps: float,
    parts: int,
) -> tuple[Tensor, Tensor, Tensor]:
    _, kv_heads, _, channels = cache[0].shape
    words = (None, z, *(epilogue or (None, None)), *(rope or (None, None)), q_gain, k_gain, eps)
    return _attend(words, z.shape[-1] // channels - 2 * kv_heads, cache, pos, parts)


def _attend(words, n_heads, cache, pos, parts):
    """(sums, largest, totals); of one part (a, None, None). words: the kernel's arguments before
    the cache.
    """
    batch, kv_heads, length, channels = cache[0].shape
    if parts == 1:
        found = rows.empty((batch, 1, n_heads * channels), cache[0].dtype, pos.device), None, None
    else:
        shape = (batch, n_heads, parts)
        found = [
            rows.empty(size, torch.float32, pos.device)
            for size in ((*shape, channels), shape, shape)
        ]
    with rows.on_device(pos):
        attend_kernel[(batch, n_heads, parts)](
            *words,
            *cache,
            pos,
            *found,
            channels**-0.5,
            length,
            triton.cdiv(length, parts),
            HEADS=n_heads,
            KV_HEADS=kv_heads,
            D=channels,
            WIDE=triton.next_power_of_2(channels),
            KEYS=KEYS,
            PARTS=parts,
            num_warps=WARPS,
            **overlap.launch_options(),
        )
    return tuple(found)


def combine(sums: Tensor, largest: Tensor, totals: Tensor, dtype: torch.dtype) -> Tensor:
    batch, n_heads, parts, channels = sums.shape
    a = rows.empty((batch, 1, n_heads * channels), dtype, sums.device)
    with rows.on_device(sums):
        combine_kernel[(batch * n_heads,)](
            sums,
            largest,
            totals,
            a,
            D=channels,
            WIDE=triton.next_power_of_2(channels),
            PARTS=parts,
            MANY=triton.next_power_of_2(parts),
            num_warps=4,
            **overlap.launch_options(),
        )
    return a


def embed(token: Tensor, pos: Tensor, wte: Tensor, wpe: Tensor | None) -> Tensor:
    batch, channels = token.shape[0], wte.shape[1]
    x = rows.empty((batch, 1, channels), wte.dtype, wte.device)
    with rows.on_device(wte):
        embed_kernel[(batch, triton.cdiv(channels, 1024))](
            token, pos, wte, wpe, x, C=channels, WIDE=1024, num_warps=4
        )
    return x


def best(logits: Tensor) -> tuple[Tensor, Tensor]:
    batch, size = logits.shape[0], logits.shape[-1]
    values = rows.empty((batch, PARTS), torch.float32, logits.device)
    tokens = rows.empty((batch, PARTS), torch.int64, logits.device)
    with rows.on_device(logits):
        best_kernel[(batch, PARTS)](
            logits,
            values,
            tokens,
            size,
            triton.cdiv(size, PARTS),
            PARTS=PARTS,
            WIDE=1024,
            num_warps=4,
            **overlap.launch_options(),
        )
    return values, tokens


def take(values: Tensor, tokens: Tensor, token: Tensor, pos: Tensor, out: Tensor) -> None:
    with rows.on_device(values):
        take_kernel[(1,)](
            values,
            tokens,
            token,
            pos,
            out,
            len(token),
            out.shape[1],
            PARTS=PARTS,
            ROWS=triton.next_power_of_2(len(token)),
            num_warps=4,
            **overlap.launch_options(),
        )
