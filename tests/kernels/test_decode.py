"""The Triton kernels of a decoding step against their PyTorch references, in the interpreter or on
a GPU.

    python -m pytest tests/kernels/test_decode.py
"""

import dataclasses

import pytest
import torch
from decode_models import distance, make, prompt
from helpers import draw

pytest.importorskip("triton", reason="Triton has no wheels for this platform")

from decode.pack import pack
from decode.step import Decoder, overlapped
from kernels import activation, binding, rows
from kernels.decode import attention as decode_attention
from kernels.decode import overlap
from kernels.decode import project as decode_project
from kernels.decode import reference as decode_reference
from kernels.decode import triton_launches as decode_triton
from kernels.decode.reference import RawHeads, Reach
from kernels.reference import ACTIVATIONS, GATED

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if not binding.INTERPRETED and DEVICE.type == "cpu":
    pytest.skip("no GPU, and TRITON_INTERPRET is off", allow_module_level=True)
# a rounding to the next number, at most
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def tensor(*shape, seed=0, dtype=torch.float32):
    return draw(*shape, seed=seed, dtype=dtype).to(DEVICE)


def near(actual, expected):
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    assert distance(actual, expected) <= TOLERANCE.get(expected.dtype, 0)


def near_all(found, expected):
    for ours, plain in zip(found, expected, strict=True):
        near(ours, plain)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Outputs begin as NaN: what a kernel leaves out shows."""

    def empty(shape, dtype, device):
        return torch.full(
            tuple(shape),
            float("nan") if dtype.is_floating_point else -1,
            dtype=dtype,
            device=device,
        )

    monkeypatch.setattr(rows, "empty", empty)


# The two larger sizes take turns: each of them meets every number of rows and every kind.
PRODUCTS = [
    (n_rows, sizes, kind)
    for i, n_rows in enumerate((1, 3, 20))
    for j, kind in enumerate(("", *ACTIVATIONS))
    for sizes in ((24, 40), ((7, 300), (33, 256))[(i + j) % 2])
]


@pytest.mark.parametrize(("n_rows", "sizes", "kind"), PRODUCTS, ids=str)
def test_products(n_rows, sizes, kind):
    """Low precision at the first size, float32 at the others."""
    N, K = sizes
    # the interpreter's dot reads bfloat16 as integers
    half = torch.float16 if binding.INTERPRETED else torch.bfloat16
    dtype = {1: torch.bfloat16, 3: half, 20: torch.float16}[n_rows] if K == 40 else torch.float32
    wide = 2 * N if kind in GATED else N
    x, weight = tensor(n_rows, 1, K, dtype=dtype), tensor(wide, K, seed=1, dtype=dtype) / K**0.5
    bias, residual = tensor(wide, seed=2, dtype=dtype), tensor(n_rows, 1, N, seed=3, dtype=dtype)
    inv_rms = tensor(n_rows, 1, 1, seed=4).abs() + 0.5
    uses = [(b, r, None, None) for b, r in ((bias, residual), (None, None))]
    uses += [(b, None, inv_rms, None) for b in (bias, None)]
    uses += [(b, None, None, 1e-2) for b in (bias, None)]
    for use in uses:
        near_all(*(of.project(x, weight, *use, kind) for of in (decode_project, decode_reference)))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("kind", ("", *ACTIVATIONS))
def test_epilogues_of_library_products(kind, dtype):
    """Wider than a program's columns, and a row of x longer than it sums at a time."""
    F, C = rows.NARROW + 30, rows.NARROW + 70
    wide = 2 * F if kind in GATED else F
    z, x = tensor(3, 1, wide, dtype=dtype), tensor(3, 1, C, seed=1, dtype=dtype)
    bias, inv_rms = tensor(wide, seed=2, dtype=dtype), tensor(3, 1, 1, seed=3).abs() + 0.5
    uses = [(inv_rms, bias, kind), (inv_rms, None, kind), (None, None, kind)]
    uses += [(None, b, kind, x, 1e-2) for b in (bias, None)]
    for use in uses:
        near_all(*(of.activation(z, *use) for of in (activation, decode_reference)))


def test_more_rows_than_a_tile():
    given = tensor(130, 1, 32), tensor(20, 32, seed=1), None, None, None, 1e-5
    near_all(*(of.project(*given) for of in (decode_project, decode_reference)))


def gains_of(case, H, G, channels, dtype=torch.float32, scale=1.0):
    """Gains of queries, keys and values, as far as the words of a case ask for them: "norm" over
    each head, "full" over all heads, "values" too.
    """
    kinds = [("norm" in case or "full" in case, H), ("norm" in case or "full" in case, G)]
    kinds.append(("values" in case, G))
    return [
        scale * tensor((count if "full" in case else 1) * channels, seed=seed, dtype=dtype)
        if wanted
        else None
        for seed, (wanted, count) in enumerate(kinds, 2)
    ]


# Sequences, key heads, channels, what is done to them, position, parts, window. Of four query heads
# and 2 KEYS + 41 = 169 places, in three parts of 57. Positions: around a tile of keys, and in every
# part, alone in it as well. Windows of one key, of one tile, of a tile and one key, of the whole
# cache and beyond; positions at which it is not full yet, is just full, and has moved on.
ATTENTION = [
    (1, 4, 64, "", torch.float32, 0, 1, 0),
    (3, 2, 12, "rope", torch.float32, 1, 1, 0),
    (1, 1, 128, "norm rope epilogue", torch.bfloat16, 63, 1, 0),
    (1, 2, 80, "norm epilogue bias", torch.float32, 64, 1, 0),
    (3, 1, 80, "norm rope epilogue bias", torch.bfloat16, 65, 1, 0),
    (2, 2, 8, "norm", torch.float32, 135, 1, 0),
    (1, 2, 64, "norm rope", torch.bfloat16, 0, 3, 0),
    (1, 4, 12, "epilogue bias", torch.float32, 57, 3, 0),
    (1, 1, 80, "norm rope epilogue", torch.float32, 100, 3, 0),
    (1, 2, 128, "rope", torch.bfloat16, 168, 3, 0),
    # 4 x 160 query channels are more than a program squares at a time
    (2, 2, 160, "full rope values", torch.float32, 65, 1, 0),
    (1, 1, 80, "full rope epilogue bias", torch.bfloat16, 3, 1, 0),
    (1, 2, 12, "norm values rope", torch.float32, 60, 3, 0),
    (1, 2, 160, "full values", torch.bfloat16, 110, 3, 0),
    (2, 2, 12, "rope", torch.float32, 0, 1, 1),
    (2, 2, 12, "rope", torch.float32, 100, 1, 1),
    (2, 2, 12, "rope", torch.float32, 63, 1, 64),
    (2, 2, 12, "rope", torch.float32, 64, 1, 64),
    (2, 2, 12, "rope", torch.bfloat16, 168, 1, 65),
    (2, 2, 12, "rope", torch.float32, 120, 3, 100),
    (2, 2, 12, "rope", torch.float32, 40, 3, 100),
    (2, 2, 12, "rope", torch.float32, 168, 3, 65),
    (2, 2, 12, "rope", torch.float32, 168, 3, 169),
    (2, 2, 12, "rope", torch.float32, 168, 1, 500),
]


@pytest.mark.parametrize(("B", "G", "D", "words", "dtype", "at", "parts", "window"), ATTENTION)
def test_heads_and_attention(B, G, D, words, dtype, at, parts, window):
    """One after the other and at once, against a softmax in float64 over the keys that are seen.

    Nothing else is read, for NaN is there, and nothing is written but the new key and value.
    """
    assert decode_attention.KEYS == 64, "positions are chosen for tiles of 64 keys"
    H, length, scale = 4, 169, 0.5 if window else 0.0
    z, pos = tensor(B, 1, (H + 2 * G) * D, dtype=dtype), torch.tensor([at], device=DEVICE)
    angle = tensor(length, D, seed=1)
    rope = (angle.cos(), angle.sin()) if "rope" in words else (None, None)
    inv_rms = tensor(B, 1, 1, seed=6).abs() + 0.5 if "epilogue" in words else None
    bias = tensor(z.shape[-1], seed=5, dtype=dtype) if "bias" in words else None
    made = RawHeads(z, inv_rms, bias, *rope, *gains_of(words, H, G, D, dtype, 3), 1e-6)
    reach = Reach(parts, scale, window)
    before = [tensor(B, G, length, D, seed=seed, dtype=dtype) for seed in (7, 8)]
    full = [part.clone() for part in before]
    q = decode_reference.heads(*made, *full, pos)
    seen = slice(max(0, at + 1 - (window or length)), at + 1)
    k, v = (part[:, :, seen].double().repeat_interleave(H // G, 1) for part in full)
    exact = ((q.double() * (scale or D**-0.5)) @ k.mT).softmax(-1) @ v  # (B, H, 1, D)
    exact = exact.transpose(1, 2).flatten(2).to(dtype)
    poisoned = [part.clone() for part in before]
    for part in poisoned:
        part[:, :, : seen.start] = part[:, :, at:] = float("nan")
    for of, old in ((decode_attention, poisoned), (decode_reference, before)):
        for at_once in (False, True):
            cache = [part.clone() for part in old]
            if at_once:
                found = of.heads_attend(made, *cache, pos, reach)
            else:
                near(of.heads(*made, *cache, pos), q)
                found = of.attend(q, *cache, pos, *reach)
            near(found[0] if parts == 1 else of.combine(*found, dtype), exact)
            if parts > 1:  # the same parts, whoever computes them
                plain = decode_reference.attend(q, *full, pos, *reach)
                for a, b in zip(found, plain, strict=True):
                    assert torch.equal(a.isfinite(), b.isfinite())
                    near(a.where(a.isfinite(), 0), b.where(b.isfinite(), 0))
            for part, written, rest in zip(cache, full, old, strict=True):
                near(part[:, :, at], written[:, :, at])
                part[:, :, at] = rest[:, :, at]
                assert torch.equal(part.nan_to_num(9), rest.nan_to_num(9))


def of_sequences(part, parts):
    """(name, outputs) of each launch of a step but the products, for these of three sequences."""
    B, H, G, D, length = 3, 2, 1, 12, 169
    F, V = 100, 61
    dtype = torch.bfloat16
    z, x = tensor(B, 1, 2 * F, dtype=dtype)[part], tensor(B, 1, 70, seed=1, dtype=dtype)[part]
    yield "activation", activation.activation(z, None, None, "swiglu", x, 1e-2)
    raw = tensor(B, 1, (H + 2 * G) * D, seed=2, dtype=dtype)[part]
    angle = tensor(length, D, seed=3)
    gains = gains_of("norm values", H, G, D, dtype)
    made = RawHeads(raw, None, None, angle.cos(), angle.sin(), *gains, 1e-6)
    caches = [tensor(B, G, length, D, seed=seed, dtype=dtype)[part].clone() for seed in (4, 5)]
    pos = torch.tensor([100], device=DEVICE)
    joint = [cache.clone() for cache in caches]
    yield "heads_attend", decode_attention.heads_attend(made, *joint, pos, Reach(parts))
    q = decode_attention.heads(*made, *caches, pos)
    yield "heads", [q, *caches]
    found = decode_attention.attend(q, *caches, pos, parts)
    yield "attend", found
    if parts > 1:
        yield "combine", [decode_attention.combine(*found, dtype)]
    token = (torch.arange(B, device=DEVICE)[:, None] * 7)[part]
    tables = tensor(61, 20, seed=6, dtype=dtype), tensor(length, 20, seed=7, dtype=dtype)
    yield "embed", [decode_attention.embed(token, pos, *tables)]
    best = decode_attention.best(tensor(B, 1, V, seed=8, dtype=dtype)[part].contiguous())
    yield "best", list(best)
    taken, out = token.clone(), torch.zeros(len(token), length, dtype=torch.int64, device=DEVICE)
    decode_attention.take(*best, taken, pos, out)
    yield "take", [taken, out]


@pytest.mark.parametrize("parts", (1, 3))
def test_a_sequence_has_the_same_bits_however_many_there_are(parts):
    """Of all launches but our products: those of one row are another kernel than those of more."""
    of_all = dict(of_sequences(slice(0, 3), parts))
    for part in (slice(1, 2), slice(1, 3)):
        for name, of_some in of_sequences(part, parts):
            for whole, piece in zip(of_all[name], of_some, strict=True):
                assert torch.equal(whole[part], piece), (name, part)


@pytest.mark.parametrize("n_rows", (1, 3))
def test_strides_do_not_matter(n_rows):
    """Inductor may hand over any."""

    def both(*shape, seed):
        given = tensor(*shape, seed=seed)
        wide = torch.full((*shape[:-1], 2 * shape[-1] + 3), float("nan"), device=DEVICE)
        strided = wide[..., : 2 * shape[-1] : 2].copy_(given)
        return given, strided

    G, D = 2, 16
    weight, angle = tensor(24, 40, seed=1), tensor(9, D, seed=2)
    gains, pos = gains_of("full values", 4, G, D), torch.tensor([8], device=DEVICE)
    plain, strided = [], []
    inputs = zip(
        both(n_rows, 1, 40, seed=3),
        both(n_rows, 1, 24, seed=4),
        both(n_rows, 1, 60, seed=5),
        both(n_rows, 1, (4 + 2 * G) * D, seed=6),
        both(n_rows, 1, 61, seed=7),
    )
    for (x, residual, z, raw, logits), found in zip(inputs, (plain, strided), strict=True):
        caches = [tensor(n_rows, G, 9, D, seed=seed) for seed in (8, 9)]
        made = RawHeads(raw, None, None, angle.cos(), angle.sin(), *gains, 1e-6)
        found += decode_project.project(x, weight, None, residual, eps=1e-2)
        found += activation.activation(z, None, None, "swiglu", x, 1e-2)
        found += [decode_attention.heads(*made, *caches, pos), *caches]
        found += decode_attention.best(logits)
    assert all(map(torch.equal, strided, plain))


@pytest.mark.parametrize("size", (61, 3000))
def test_the_ends_of_a_step(size):
    B, C = 3, 20
    token, pos = torch.tensor([[1], [0], [60]], device=DEVICE), torch.tensor([4], device=DEVICE)
    wte, wpe = tensor(size, C), tensor(9, C, seed=1)
    for table in (None, wpe):
        given = (token, pos, wte, table)
        near(decode_attention.embed(*given), decode_reference.embed(*given))
    logits = tensor(B, 1, size, seed=2).round(decimals=1)  # with ties: the first of equals is taken
    found = []
    for of in (decode_attention, decode_reference):
        state = token.clone(), pos.clone(), torch.zeros(B, 9, dtype=torch.int64, device=DEVICE)
        of.take(*of.best(logits), *state)
        found.append(state)
    for ours, plain in zip(*found, strict=True):
        assert torch.equal(ours, plain)
    assert found[0][1].item() == 5 and torch.equal(found[0][0], logits.argmax(-1))


@pytest.mark.parametrize(
    ("shape", "norm"),
    [
        ("gpt2-bias", "coupled"),
        ("qwen3", "rms"),
        ("llama", "coupled-span"),
        ("gpt2-bias", "cbwc"),
        ("gemma3", "taper"),
        ("llama", "hybrid-full"),
    ],
    ids=str,
)
def test_a_whole_step_of_kernels(shape, norm, monkeypatch):
    """Two steps by our kernels, as on a GPU, against those by PyTorch: logits and tokens. Also with
    the library's products, and there the attention is split, too.
    """
    model, idx = make(shape, norm).float().to(DEVICE), prompt(3).to(DEVICE)
    for batch, level in ((1, "fused"), (3, "fused"), (3, "library")):
        if level == "library":
            monkeypatch.setattr(decode_reference, "LONG", 8)
            monkeypatch.setattr(decode_reference, "PART", 4)
        packed, found = pack(model, level), []
        packed = dataclasses.replace(packed, blocks=packed.blocks[:2])
        for ops in (decode_triton.FUSED, decode_reference):
            decoder = Decoder(packed, batch, 10, ops=ops, graph=False)
            decoder.prefill(idx[:batch])
            found.append((torch.cat([decoder.step().clone() for _ in range(2)], 1), decoder.out))
        near(found[0][0], found[1][0])
        assert torch.equal(found[0][1], found[1][1])


def test_operators_for_compiled_steps():
    """Inductor sees them as operators, and has to know what each of them writes."""
    z, cache = tensor(1, 1, 8 * 16), (tensor(1, 2, 9, 16), tensor(1, 2, 9, 16))
    ops, at = decode_triton.COMPILED, torch.tensor([8], device=DEVICE)
    logits, token = tensor(2, 1, 61), torch.zeros(2, 1, dtype=torch.int64, device=DEVICE)
    out = token.expand(2, 9).contiguous()
    gains = gains_of("full values", 4, 2, 16)
    x, weight, bias = tensor(2, 1, 16), tensor(24, 16, seed=1), tensor(24, seed=2)
    stream = tensor(2, 1, 24, seed=3)
    for operator, given in (
        (ops.heads, (z, None, None, None, None, *gains, 1e-6, *cache, at)),
        (ops.attend, (tensor(1, 4, 1, 16), *cache, at, 1, 0.3, 5)),
        (ops.attend, (tensor(1, 4, 1, 16), *cache, at, 2, 0.3, 5)),
        (ops.best, (logits,)),
        (ops.take, (*ops.best(logits), token, token[0], out)),
        (ops.project, (x, weight, bias, stream)),
        (decode_triton.add_product, (x, weight, stream)),
    ):
        torch.library.opcheck(operator, given, test_utils=("test_schema", "test_faketensor"))


def test_launches_overlap_only_where_they_are_told_to():
    assert overlapped(overlap.launch_options)() == {"PDL": True, "launch_pdl": True}
    with pytest.raises(ZeroDivisionError):
        overlapped(lambda: 1 / 0)()
    assert overlap.launch_options() == {"PDL": False}
