"""Triton: what a decoding step does between its products, for one new token of every sequence.

    heads                norms of queries, keys, values; rotary positions; the write into the cache
    attend               attention to the cache, up to the position; of a long cache in parts, over
                         more programs
    combine              the parts together
    heads_attend         heads and attend in one launch
    embed, best, take    the ends of a step

Pointers of the kernels, for B rows (sequences), H query heads and H_kv key and value heads of D
channels, and a cache with room for S tokens:

    Z            output of qkv (B, (H + 2 H_kv) D): queries, then keys, then values
    INV, BIAS    its epilogue: (B,) float32, ((H + 2 H_kv) D,); None: Z is complete
    COS, SIN     rotary positions (S or more, D) float32, or None
    Q_GAIN, ...  of the norms of queries, keys, values, or None: (D,) or (heads D,)
    Q            queries (B, H, D)
    K, V         the cache (B, H_kv, S, D)
    A            attention (B, H, D)

The functions are those of kernels/decode/reference.py. The position is read from the device, so
that one CUDA graph serves all steps.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import rows
from . import overlap
from .reference import RawHeads, Reach

# Keys that an attention program holds at a time. 16 to 32 programs on 132 multiprocessors are bound
# by latency, so a tile is on its way while the one before is used. A single tile of 128 keys would
# take 254 registers, for less than 1 % of a step.
KEYS = 64
CHUNK = tl.constexpr(512)  # channels that are squared at a time, for a norm over all heads
# Of an attention program. Tiles that live from one round to the next cost registers: with 4 warps
# 162 instead of 96, with 8 warps 98 to 110.
WARPS = 8
PARTS = 32  # of the vocabulary, each searched by a program of its own


@triton.jit
def load_finished(Z, INV, BIAS, row, first, col, mask, width):
    """Channels first + col of a row of z, with its epilogue applied: z * inv + bias, float32."""
    z = tl.load(Z + row * width + first + col, mask=mask, other=0.0).to(tl.float32)
    if INV is not None:
        z = z * tl.load(INV + row)
        if BIAS is not None:
            z += tl.load(BIAS + first + col, mask=mask, other=0.0).to(tl.float32)
    return z


@triton.jit
def sum_of_squares(Z, INV, BIAS, row, first, width, N: tl.constexpr):
    """The sum over N channels from `first` on of a row of z, with its epilogue applied; float32."""
    squares = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, N, CHUNK):
        col = start + tl.arange(0, CHUNK)
        z = load_finished(Z, INV, BIAS, row, first, col, col < N, width)
        squares += z * z
    return tl.sum(squares, 0)


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
    start,
    pos,
    eps,
    width,
    NORM: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A query, key or value (WIDE,) of a row of z, after epilogue, norm and positions; float32.

    It begins at channel `first`. The norm's statistic is over NORM channels: its own D, or those of
    all its kind, from channel `start` on. The latter every program takes anew, so that none waits
    for another.
    Each channel turns with a partner half a head away, so the partner is made here a second time.
    """
    col = tl.arange(0, WIDE)
    mask = col < D
    half = D // 2
    other = tl.where(col < half, col + half, col - half)  # the partner's channel
    z = load_finished(Z, INV, BIAS, row, first, col, mask, width)
    partner = load_finished(Z, INV, BIAS, row, first, other, mask, width)
    if GAIN is not None:
        if NORM == D:
            total = tl.sum(z * z, 0)
        else:
            total = sum_of_squares(Z, INV, BIAS, row, start, width, NORM)
            GAIN += first - start
        inv = tl.rsqrt(total / NORM + tl.cast(eps, tl.float32))
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
    V_GAIN,
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
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One head of one sequence: a query, a key or a value."""
    overlap.wait(PDL)
    row = tl.program_id(0)
    head = tl.program_id(1)
    pos = tl.load(POS)
    col = tl.arange(0, WIDE)
    mask = col < D
    width = (HEADS + 2 * KV_HEADS) * D  # of a row of z
    # where the key or value goes in the cache
    place = ((row * KV_HEADS + (head - HEADS) % KV_HEADS) * length + pos) * D
    k_at: tl.constexpr = HEADS * D  # channel at which the keys begin
    v_at: tl.constexpr = (HEADS + KV_HEADS) * D
    if head < HEADS:
        q = load_head(
            Z, INV, BIAS, Q_GAIN, COS, SIN, row, head * D, 0, pos, eps, width, Q_NORM, D, WIDE
        )
        tl.store(Q + (row * HEADS + head) * D + col, q.to(Q.dtype.element_ty), mask=mask)
    elif head < HEADS + KV_HEADS:
        k = load_head(
            Z, INV, BIAS, K_GAIN, COS, SIN, row, head * D, k_at, pos, eps, width, K_NORM, D, WIDE
        )
        tl.store(K + place + col, k.to(K.dtype.element_ty), mask=mask)
    else:
        v = load_head(
            Z, INV, BIAS, V_GAIN, None, None, row, head * D, v_at, pos, eps, width, K_NORM, D, WIDE
        )
        tl.store(V + place + col, v.to(V.dtype.element_ty), mask=mask)


@triton.jit
def load_tile(CACHE, first, key, end, col, D: tl.constexpr):
    """(KEYS, WIDE) of the cache, in its own type; zero from the key `end` on.

    first: number of the head's first key among all keys of the cache.
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
    V_GAIN,
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
    WINDOW: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One query head of one sequence: softmax over the keys, or over a part of them, in one pass.

    The keys are those up to the position; with WINDOW only the last WINDOW of them, and no other
    is read.

    The pass keeps a running maximum and rescales its sums when that grows. With PARTS > 1 the sums
    A (rows, HEADS, PARTS, D) are not divided by the total of the weights yet.

    With Q, heads_kernel has made the query, and the cache has the new key and value. With Z
    instead, every query head of a group makes them from Z. Only the first head of the group writes
    them into the cache, and no program of this launch reads them there, so none has to wait.
    """
    if Z is None:
        overlap.wait(PDL)  # the launch before has written the newest key
    row = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.program_id(2)
    col = tl.arange(0, WIDE)
    lane = tl.arange(0, KEYS)
    channel = col < D
    group = head // (HEADS // KV_HEADS)  # key and value head
    first = (row * KV_HEADS + group).to(tl.int64) * length
    pos = tl.load(POS).to(tl.int32)
    begin = part * part_keys
    if WINDOW > 0:
        begin += tl.maximum(pos + 1 - WINDOW, 0)
    end = tl.minimum(pos + 1 if Z is None else pos, begin + part_keys)
    # Keys and values of earlier steps need nothing of the launch before: their loads run while the
    # query is made.
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
        k_at: tl.constexpr = HEADS * D  # channel at which the keys begin
        v_at: tl.constexpr = (HEADS + KV_HEADS) * D
        q = load_head(
            Z, INV, BIAS, Q_GAIN, COS, SIN, row, head * D, 0, pos, eps, width, Q_NORM, D, WIDE
        )
        k_first = (HEADS + group) * D
        key = load_head(
            Z, INV, BIAS, K_GAIN, COS, SIN, row, k_first, k_at, pos, eps, width, K_NORM, D, WIDE
        )
        v_first = (HEADS + KV_HEADS + group) * D
        value = load_head(
            Z, INV, BIAS, V_GAIN, None, None, row, v_first, v_at, pos, eps, width, K_NORM, D, WIDE
        )
        # all three are rounded to the cache's type, as heads_kernel does
        key = key.to(K.dtype.element_ty)
        value = value.to(V.dtype.element_ty)
        q = q.to(K.dtype.element_ty).to(tl.float32) * tl.cast(scale, tl.float32)
        here = (begin <= pos) & (pos < begin + part_keys)  # the new key is in this part
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
        before = largest
        largest = tl.maximum(largest, tl.max(score, 0))
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
    """Combine the parts of one head of one sequence."""
    overlap.wait(PDL)
    head = tl.program_id(0)  # of all sequences
    col = tl.arange(0, WIDE)
    part = tl.arange(0, MANY)
    largest = tl.load(LARGEST + head * PARTS + part, mask=part < PARTS, other=float("-inf"))
    share = tl.exp(largest - tl.max(largest, 0))  # each part has its own maximum
    total = tl.sum(share * tl.load(TOTAL + head * PARTS + part, mask=part < PARTS, other=0.0), 0)
    mask = (part < PARTS)[:, None] & (col < D)[None, :]
    sums = tl.load(SUMS + (head * PARTS + part)[:, None] * D + col[None, :], mask=mask, other=0.0)
    a = tl.sum(share[:, None] * sums, 0) / total
    tl.store(A + head * D + col, a.to(A.dtype.element_ty), mask=col < D)


@triton.jit
def embed_kernel(TOKEN, POS, WTE, WPE, X, C: tl.constexpr, WIDE: tl.constexpr):
    """WIDE channels of one token's embedding."""
    row = tl.program_id(0)
    col = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    mask = col < C
    x = tl.load(WTE + tl.load(TOKEN + row) * C + col, mask=mask, other=0.0)
    if WPE is not None:
        place = tl.load(WPE + tl.load(POS) * C + col, mask=mask, other=0.0)
        x = (x.to(tl.float32) + place.to(tl.float32)).to(x.dtype)
    tl.store(X + row * C + col, x, mask=mask)


@triton.jit
def best_kernel(
    Z, VALUES, TOKENS, V, part, PARTS: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr
):
    """The largest logit of one part of the vocabulary, and its token; of equal ones the first."""
    overlap.wait(PDL)
    row = tl.program_id(0)
    first = tl.program_id(1) * part
    end = tl.minimum(first + part, V)
    largest = tl.full((WIDE,), float("-inf"), tl.float32)
    token = tl.full((WIDE,), 0, tl.int32) + first
    for start in range(first, end, WIDE):
        col = start + tl.arange(0, WIDE)
        z = tl.load(Z + row.to(tl.int64) * V + col, mask=col < end, other=float("-inf"))
        z = z.to(tl.float32)
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
    """The next token of all sequences, by one program, so that the position moves once."""
    overlap.wait(PDL)
    pos = tl.load(POS) + 1
    row = tl.arange(0, ROWS)
    part = tl.arange(0, PARTS)
    valid = row < n_rows
    place = row[:, None] * PARTS + part[None, :]
    value = tl.load(VALUES + place, mask=valid[:, None], other=0.0)
    token = tl.load(TOKENS + place, mask=valid[:, None], other=0)
    token = tl.min(tl.where(value == tl.max(value, 1)[:, None], token, 2147483647), 1)
    tl.store(TOKEN + row, token, mask=valid)
    tl.store(OUT + row * length + pos, token, mask=valid)
    tl.debug_barrier()  # every thread has read the old position
    tl.store(POS, pos)


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
    batch, kv_heads, length, channels = k_cache.shape
    n_heads = z.shape[-1] // channels - 2 * kv_heads
    q = rows.empty((batch, n_heads, 1, channels), k_cache.dtype, z.device)
    # inductor may hand over any strides, and the kernel takes elements that are adjacent
    raw = RawHeads(
        z=rows.adjacent(z),
        inv_rms=rows.adjacent(inv_rms),
        bias=bias,
        cos=cos,
        sin=sin,
        q_gain=q_gain,
        k_gain=k_gain,
        v_gain=v_gain,
        eps=eps,
    )
    rows.launch(
        heads_kernel,
        (batch, n_heads + 2 * kv_heads),
        z,
        **heads_arguments(raw, channels),
        Q=q,
        K=k_cache,
        V=v_cache,
        POS=pos,
        length=length,
        HEADS=n_heads,
        KV_HEADS=kv_heads,
        D=channels,
        WIDE=triton.next_power_of_2(channels),
        num_warps=1,
        **overlap.launch_options(),
    )
    return q


def heads_arguments(raw: RawHeads, channels: int) -> dict[str, Any]:
    """Return the arguments of a kernel that makes queries, keys and values, by their names.

    Over how many channels queries, and keys and values, are normalised is how many their gains
    have.
    """
    return {
        "Z": raw.z,
        "INV": raw.inv_rms,
        "BIAS": raw.bias,
        "COS": raw.cos,
        "SIN": raw.sin,
        "Q_GAIN": raw.q_gain,
        "K_GAIN": raw.k_gain,
        "V_GAIN": raw.v_gain,
        "eps": raw.eps,
        "Q_NORM": channels if raw.q_gain is None else raw.q_gain.numel(),
        "K_NORM": channels if raw.k_gain is None else raw.k_gain.numel(),
    }


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    pos: Tensor,
    parts: int = 1,
    scale: float = 0.0,
    window: int = 0,
) -> list[Tensor]:
    nothing_to_make = RawHeads()
    reach = Reach(parts, scale, window)
    return _attend(q, nothing_to_make, q.shape[1], k_cache, v_cache, pos, reach)


def heads_attend(
    raw: RawHeads, k_cache: Tensor, v_cache: Tensor, pos: Tensor, reach: Reach
) -> list[Tensor]:
    _, kv_heads, _, channels = k_cache.shape
    n_heads = raw.z.shape[-1] // channels - 2 * kv_heads
    return _attend(None, raw, n_heads, k_cache, v_cache, pos, reach)


def _attend(
    q: Tensor | None,
    raw: RawHeads,
    n_heads: int,
    k_cache: Tensor,
    v_cache: Tensor,
    pos: Tensor,
    reach: Reach,
) -> list[Tensor]:
    """Launch attend_kernel on a query, or on what makes one."""
    batch, kv_heads, length, channels = k_cache.shape
    parts = reach.parts
    window = reach.window if reach.window < length else 0  # 0: it cuts nothing off
    largest = None
    totals = None
    if parts == 1:
        a = rows.empty((batch, 1, n_heads * channels), k_cache.dtype, pos.device)
    else:  # sums that are not divided by the totals yet
        shape = (batch, n_heads, parts)
        a = rows.empty((*shape, channels), torch.float32, pos.device)
        largest = rows.empty(shape, torch.float32, pos.device)
        totals = rows.empty(shape, torch.float32, pos.device)
    rows.launch(
        attend_kernel,
        (batch, n_heads, parts),
        pos,
        Q=q,
        **heads_arguments(raw, channels),
        K=k_cache,
        V=v_cache,
        POS=pos,
        A=a,
        LARGEST=largest,
        TOTAL=totals,
        scale=reach.scale or channels**-0.5,
        length=length,
        part_keys=triton.cdiv(window or length, parts),
        HEADS=n_heads,
        KV_HEADS=kv_heads,
        D=channels,
        WIDE=triton.next_power_of_2(channels),
        KEYS=KEYS,
        PARTS=parts,
        WINDOW=window,
        num_warps=WARPS,
        **overlap.launch_options(),
    )
    return [a] if parts == 1 else [a, largest, totals]


def combine(sums: Tensor, largest: Tensor, totals: Tensor, dtype: torch.dtype) -> Tensor:
    batch, n_heads, parts, channels = sums.shape
    a = rows.empty((batch, 1, n_heads * channels), dtype, sums.device)
    rows.launch(
        combine_kernel,
        (batch * n_heads,),
        sums,
        SUMS=sums,
        LARGEST=largest,
        TOTAL=totals,
        A=a,
        D=channels,
        WIDE=triton.next_power_of_2(channels),
        PARTS=parts,
        MANY=triton.next_power_of_2(parts),
        num_warps=4,
        **overlap.launch_options(),
    )
    return a


def embed(token: Tensor, pos: Tensor, wte: Tensor, wpe: Tensor | None) -> Tensor:
    batch = token.shape[0]
    channels = wte.shape[1]
    x = rows.empty((batch, 1, channels), wte.dtype, wte.device)
    rows.launch(
        embed_kernel,
        (batch, triton.cdiv(channels, 1024)),
        wte,
        TOKEN=token,
        POS=pos,
        WTE=wte,
        WPE=wpe,
        X=x,
        C=channels,
        WIDE=1024,
        num_warps=4,
    )
    return x


def best(logits: Tensor) -> tuple[Tensor, Tensor]:
    batch = logits.shape[0]
    size = logits.shape[-1]
    values = rows.empty((batch, PARTS), torch.float32, logits.device)
    tokens = rows.empty((batch, PARTS), torch.int64, logits.device)
    rows.launch(
        best_kernel,
        (batch, PARTS),
        logits,
        Z=logits.contiguous(),
        VALUES=values,
        TOKENS=tokens,
        V=size,
        part=triton.cdiv(size, PARTS),
        PARTS=PARTS,
        WIDE=1024,
        num_warps=4,
        **overlap.launch_options(),
    )
    return values, tokens


def take(values: Tensor, tokens: Tensor, token: Tensor, pos: Tensor, out: Tensor) -> None:
    rows.launch(
        take_kernel,
        (1,),
        values,
        VALUES=values,
        TOKENS=tokens,
        TOKEN=token,
        POS=pos,
        OUT=out,
        n_rows=len(token),
        length=out.shape[1],
        PARTS=PARTS,
        ROWS=triton.next_power_of_2(len(token)),
        num_warps=4,
        **overlap.launch_options(),
    )
