"""Triton: what a decoding step does between its products, for one new token of every sequence.

heads: QK-norm, rotary positions and the write into the cache; attend: attention to the cache up to the position, which
is read from the device; attend_parts and combine: the same for a long cache, over more programs; embed, best and take:
the ends of a step. Functions are those of kernels/decode_reference.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import rows
from kernels.decode_reference import Debt

KEYS = 64  # of an attention program at a time
PARTS = 32  # of the vocabulary, each searched by its own program


@triton.jit
def load_paid(Z, INV, BIAS, row, first, col, mask, width):
    """Channels first + col of a row of z in float32, its debt paid."""
    z = tl.load(Z + row * width + first + col, mask=mask, other=0.0).to(tl.float32)
    if INV is not None:
        z = z * tl.load(INV + row)
        if BIAS is not None:
            z += tl.load(BIAS + first + col, mask=mask, other=0.0).to(tl.float32)
    return z


@triton.jit
def load_gain(GAIN, col, mask):
    return tl.load(GAIN + col, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def heads_kernel(
    Z, INV, BIAS, Q, K, V, POS, COS, SIN, Q_GAIN, K_GAIN, eps, length,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One head of one sequence: a query, a key or a value."""
    row, head = tl.program_id(0), tl.program_id(1)
    col = tl.arange(0, WIDE)
    mask, half = col < D, D // 2
    other = tl.where(col < half, col + half, col - half)  # the channel that this one turns with
    width = (HEADS + 2 * KV_HEADS) * D
    z = load_paid(Z, INV, BIAS, row, head * D, col, mask, width)
    partner = load_paid(Z, INV, BIAS, row, head * D, other, mask, width)
    pos = tl.load(POS)
    if head < HEADS + KV_HEADS:
        if Q_GAIN is not None:
            inv = tl.rsqrt(tl.sum(z * z, 0) / D + tl.cast(eps, tl.float32))
            of_query = head < HEADS
            gain = tl.where(of_query, load_gain(Q_GAIN, col, mask), load_gain(K_GAIN, col, mask))
            partner_gain = tl.where(of_query, load_gain(Q_GAIN, other, mask), load_gain(K_GAIN, other, mask))
            z, partner = z * inv * gain, partner * inv * partner_gain
        if COS is not None:
            cos = tl.load(COS + pos * D + col, mask=mask, other=0.0)
            sin = tl.load(SIN + pos * D + col, mask=mask, other=0.0)
            z = z * cos + tl.where(col < half, -partner, partner) * sin
    if head < HEADS:
        tl.store(Q + (row * HEADS + head) * D + col, z.to(Q.dtype.element_ty), mask=mask)
    elif head < HEADS + KV_HEADS:
        place = ((row * KV_HEADS + head - HEADS) * length + pos) * D
        tl.store(K + place + col, z.to(K.dtype.element_ty), mask=mask)
    else:
        place = ((row * KV_HEADS + head - HEADS - KV_HEADS) * length + pos) * D
        tl.store(V + place + col, z.to(V.dtype.element_ty), mask=mask)


@triton.jit
def attend_kernel(
    Q, K, V, POS, A, LARGEST, TOTAL, scale, length, part_keys, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    D: tl.constexpr, WIDE: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One query head of one sequence: softmax over the keys, or a part of them, in one pass with a running maximum.
    With PARTS, A (rows, HEADS, PARTS, D) is not divided by the weights' sum yet."""
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    col = tl.arange(0, WIDE)
    channel = col < D
    q = tl.load(Q + (row * HEADS + head) * D + col, mask=channel, other=0.0).to(tl.float32)
    q = q * tl.cast(scale, tl.float32)
    first = (row * KV_HEADS + head // (HEADS // KV_HEADS)).to(tl.int64) * length
    end = tl.minimum(tl.load(POS).to(tl.int32) + 1, (part + 1) * part_keys)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    a = tl.zeros((WIDE,), tl.float32)
    for start in range(part * part_keys, end, KEYS):
        key = start + tl.arange(0, KEYS)
        mask = (key < end)[:, None] & channel[None, :]
        place = (first + key)[:, None] * D + col[None, :]
        k = tl.load(K + place, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(V + place, mask=mask, other=0.0).to(tl.float32)
        score = tl.where(key < end, tl.sum(k * q[None, :], 1), float("-inf"))
        before, largest = largest, tl.maximum(largest, tl.max(score, 0))
        weight = tl.exp(score - largest)
        shrink = tl.exp(before - largest)
        total = total * shrink + tl.sum(weight, 0)
        a = a * shrink + tl.sum(weight[:, None] * v, 0)
    place = (row * HEADS + head) * PARTS + part
    if PARTS == 1:
        a = a / total
    else:
        tl.store(LARGEST + place, largest)
        tl.store(TOTAL + place, total)
    tl.store(A + place * D + col, a.to(A.dtype.element_ty), mask=channel)


@triton.jit
def combine_kernel(SUMS, LARGEST, TOTAL, A, D: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr,
                   MANY: tl.constexpr):  # fmt: skip
    """The parts of one head of one sequence as one."""
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
        x = (x.to(tl.float32) + tl.load(WPE + tl.load(POS) * C + col, mask=mask, other=0.0).to(tl.float32)).to(x.dtype)
    tl.store(X + row * C + col, x, mask=mask)


@triton.jit
def best_kernel(Z, VALUES, TOKENS, V, part, PARTS: tl.constexpr, WIDE: tl.constexpr):
    """The largest logit of one part of the vocabulary; of equal ones the first."""
    row, first = tl.program_id(0), tl.program_id(1) * part
    end = tl.minimum(first + part, V)
    largest = tl.full((WIDE,), float("-inf"), tl.float32)
    token = tl.full((WIDE,), 0, tl.int32) + first
    for start in range(first, end, WIDE):
        col = start + tl.arange(0, WIDE)
        z = tl.load(Z + row.to(tl.int64) * V + col, mask=col < end, other=float("-inf")).to(tl.float32)
        token = tl.where(z > largest, col, token)
        largest = tl.maximum(z, largest)
    top = tl.max(largest, 0)
    place = row * PARTS + tl.program_id(1)
    tl.store(VALUES + place, top)
    tl.store(TOKENS + place, tl.min(tl.where(largest == top, token, V), 0))


@triton.jit
def take_kernel(VALUES, TOKENS, TOKEN, POS, OUT, n_rows, length, PARTS: tl.constexpr, ROWS: tl.constexpr):
    """One program for all sequences, so that the position moves once."""
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
    z: Tensor, debt: Debt | None, cache: tuple[Tensor, Tensor], pos: Tensor, rope: tuple[Tensor, Tensor] | None,
    q_gain: Tensor | None, k_gain: Tensor | None, eps: float,
) -> Tensor:  # fmt: skip
    k_cache, v_cache = cache
    batch, kv_heads, length, channels = k_cache.shape
    n_heads = z.shape[-1] // channels - 2 * kv_heads
    q = rows.empty((batch, n_heads, 1, channels), k_cache.dtype, z.device)
    inv_rms, bias = debt or (None, None)
    cos, sin = rope or (None, None)
    with rows.on_device(z):
        heads_kernel[(batch, n_heads + 2 * kv_heads)](
            z, inv_rms, bias, q, k_cache, v_cache, pos, cos, sin, q_gain, k_gain, eps, length, HEADS=n_heads,
            KV_HEADS=kv_heads, D=channels, WIDE=triton.next_power_of_2(channels), num_warps=1,
        )  # fmt: skip
    return q


def attend(q: Tensor, cache: tuple[Tensor, Tensor], pos: Tensor) -> Tensor:
    a = rows.empty((q.shape[0], 1, q.shape[1] * q.shape[3]), q.dtype, q.device)
    _attend(q, cache, pos, 1, a, None, None)
    return a


def attend_parts(
    q: Tensor, cache: tuple[Tensor, Tensor], pos: Tensor, parts: int
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    batch, n_heads, _, channels = q.shape
    sums = rows.empty((batch, n_heads, parts, channels), torch.float32, q.device)
    largest, totals = (rows.empty((batch, n_heads, parts), torch.float32, q.device) for _ in range(2))
    _attend(q, cache, pos, parts, sums, largest, totals)
    return sums, largest, totals


def _attend(q, cache, pos, parts, a, largest, totals):
    batch, n_heads, _, channels = q.shape
    length = cache[0].shape[2]
    with rows.on_device(q):
        attend_kernel[(batch, n_heads, parts)](
            q, *cache, pos, a, largest, totals, channels**-0.5, length, triton.cdiv(length, parts), HEADS=n_heads,
            KV_HEADS=cache[0].shape[1], D=channels, WIDE=triton.next_power_of_2(channels), KEYS=KEYS, PARTS=parts,
            num_warps=4,
        )  # fmt: skip


def combine(sums: Tensor, largest: Tensor, totals: Tensor, dtype: torch.dtype) -> Tensor:
    batch, n_heads, parts, channels = sums.shape
    a = rows.empty((batch, 1, n_heads * channels), dtype, sums.device)
    with rows.on_device(sums):
        combine_kernel[(batch * n_heads,)](
            sums, largest, totals, a, D=channels, WIDE=triton.next_power_of_2(channels), PARTS=parts,
            MANY=triton.next_power_of_2(parts), num_warps=4,
        )  # fmt: skip
    return a


def embed(token: Tensor, pos: Tensor, wte: Tensor, wpe: Tensor | None) -> Tensor:
    batch, channels = token.shape[0], wte.shape[1]
    x = rows.empty((batch, 1, channels), wte.dtype, wte.device)
    with rows.on_device(wte):
        embed_kernel[(batch, triton.cdiv(channels, 1024))](token, pos, wte, wpe, x, C=channels, WIDE=1024, num_warps=4)
    return x


def best(logits: Tensor) -> tuple[Tensor, Tensor]:
    batch, size = logits.shape[0], logits.shape[-1]
    values = rows.empty((batch, PARTS), torch.float32, logits.device)
    tokens = rows.empty((batch, PARTS), torch.int64, logits.device)
    with rows.on_device(logits):
        best_kernel[(batch, PARTS)](logits, values, tokens, size, triton.cdiv(size, PARTS), PARTS=PARTS, WIDE=1024,
                                    num_warps=4)  # fmt: skip
    return values, tokens


def take(values: Tensor, tokens: Tensor, token: Tensor, pos: Tensor, out: Tensor) -> None:
    with rows.on_device(values):
        take_kernel[(1,)](values, tokens, token, pos, out, len(token), out.shape[1], PARTS=PARTS,
                          ROWS=triton.next_power_of_2(len(token)), num_warps=4)  # fmt: skip
