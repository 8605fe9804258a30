"""The Triton kernels of a decoding step against their PyTorch references, in the interpreter or on
a GPU.

    python -m pytest tests/kernels/test_decode.py
"""

import dataclasses

import pytest
import torch
from decode_models import decoded, make, prompt
from helpers import draw

pytest.importorskip("triton", reason="Triton has no wheels for this platform")

from decode.pack import pack
from decode.step import Decoder, overlapped
from kernels import binding, rows
from kernels.decode import attention as decode_attention
from kernels.decode import epilogue as decode_epilogue
from kernels.decode import overlap
from kernels.decode import project as decode_project
from kernels.decode import reference as decode_reference
from kernels.decode import triton_launches as decode_triton
from kernels.decode.reference import Epilogue
from kernels.reference import GATED, KINDS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if not binding.INTERPRETED and DEVICE.type == "cpu":
    pytest.skip("no GPU, and TRITON_INTERPRET is off", allow_module_level=True)
# a rounding to the next number, at most
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def tensor(*shape, seed=0, dtype=torch.float32):
    return draw(*shape, seed=seed, dtype=dtype).to(DEVICE)


def near(actual, expected):
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    scale = expected.double().abs().max()
    assert ((actual.double() - expected.double()).abs().max() / scale).item() <= TOLERANCE.get(
        expected.dtype, 0
    )


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
    for j, kind in enumerate(("", *KINDS))
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
    for b, r in ((bias, residual), (None, None)):
        near(
            decode_project.project(x, weight, b, r, kind),
            decode_reference.project(x, weight, b, r, kind),
        )
    for b in (bias, None):
        near(
            decode_project.shared_project(x, inv_rms, weight, b, kind),
            decode_reference.shared_project(x, inv_rms, weight, b, kind),
        )
        ours, plain = (
            of.norm_project(x, weight, b, 1e-2, kind) for of in (decode_project, decode_reference)
        )
        near(ours[0], plain[0])
        near(ours[1], plain[1])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("kind", ("", *KINDS))
def test_epilogues_of_library_products(kind, dtype):
    """Wider than a program's columns, and a row of x longer than it sums at a time."""
    F, C = decode_epilogue.WIDE + 30, decode_epilogue.WIDE + 70
    wide = 2 * F if kind in GATED else F
    z, x = tensor(3, 1, wide, dtype=dtype), tensor(3, 1, C, seed=1, dtype=dtype)
    bias = tensor(wide, seed=2, dtype=dtype)
    epilogue = Epilogue(tensor(3, 1, 1, seed=3).abs() + 0.5, bias)
    for b in (bias, None):
        ours, plain = (
            of.norm_activation(z, x, b, 1e-2, kind or "gelu")
            for of in (decode_epilogue, decode_reference)
        )
        near(ours[0], plain[0])
        near(ours[1], plain[1])
    for owed in (epilogue, Epilogue(epilogue.inv_rms, None), None) if kind else ():
        near(decode_epilogue.activation(z, owed, kind), decode_reference.activation(z, owed, kind))
    near(decode_epilogue.scale(z, epilogue), decode_reference.scale(z, epilogue))


def test_more_rows_than_a_tile():
    x, weight = tensor(130, 1, 32), tensor(20, 32, seed=1)
    ours, plain = (
        of.norm_project(x, weight, None, 1e-5) for of in (decode_project, decode_reference)
    )
    near(ours[0], plain[0])
    near(ours[1], plain[1])


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


CASES = (
    "plain",
    "rope",
    "norm",
    "rope norm epilogue",
    "epilogue bias",
    "norm values",
    "full rope",
    "full rope values epilogue bias",
)


@pytest.mark.parametrize("case", CASES)
def test_heads_and_attention(case):
    B, H, G, channels, length, at = 2, 4, 2, 12, 9, 5
    z = tensor(B, 1, (H + 2 * G) * channels)
    rope = (
        (tensor(length, channels, seed=1).cos(), tensor(length, channels, seed=1).sin())
        if "rope" in case
        else None
    )
    gains = gains_of(case, H, G, channels)
    epilogue = None
    if "epilogue" in case:
        bias = tensor(z.shape[-1], seed=5) if "bias" in case else None
        epilogue = Epilogue(tensor(B, 1, 1, seed=6).abs() + 0.5, bias)
    pos, found = torch.tensor([at], device=DEVICE), []
    for of in (decode_attention, decode_reference):
        cache = tensor(B, G, length, channels, seed=7), tensor(B, G, length, channels, seed=8)
        q = of.heads(z, epilogue, cache, pos, rope, *gains, 1e-6)
        found.append((q, *cache, of.attend(q, cache, pos)))
    for ours, plain in zip(*found, strict=True):
        near(ours, plain)
    untouched = torch.arange(length, device=DEVICE) != at
    assert torch.equal(
        found[0][1][:, :, untouched], tensor(B, G, length, channels, seed=7)[:, :, untouched]
    )


# Of four query heads and 2 KEYS + 41 = 169 places, in three parts of 57. Positions: around a tile
# of keys, and in every part, alone in it as well.
AT_ONCE = [
    (1, 4, 64, "", torch.float32, 0, 1),
    (3, 2, 12, "rope", torch.float32, 1, 1),
    (1, 1, 128, "norm rope epilogue", torch.bfloat16, 63, 1),
    (1, 2, 80, "norm epilogue bias", torch.float32, 64, 1),
    (3, 1, 80, "norm rope epilogue bias", torch.bfloat16, 65, 1),
    (1, 2, 64, "norm rope", torch.bfloat16, 0, 3),
    (1, 4, 12, "epilogue bias", torch.float32, 57, 3),
    (1, 1, 80, "norm rope epilogue", torch.float32, 100, 3),
    (1, 2, 128, "rope", torch.bfloat16, 168, 3),
    # 4 x 160 query channels are more than a program squares at a time
    (2, 2, 160, "full rope values", torch.float32, 65, 1),
    (1, 1, 80, "full rope epilogue bias", torch.bfloat16, 3, 1),
    (1, 2, 12, "norm values rope", torch.float32, 60, 3),
    (1, 2, 160, "full values", torch.bfloat16, 110, 3),
]


@pytest.mark.parametrize(("B", "G", "channels", "case", "dtype", "at", "parts"), AT_ONCE, ids=str)
def test_heads_and_attention_at_once(B, G, channels, case, dtype, at, parts):
    """Against float64 attention of what heads rounds; nothing is read at the position or behind it,
    where NaN is.
    """
    assert decode_attention.KEYS == 64, "positions are chosen for tiles of 64 keys"
    H, length = 4, 169
    z = tensor(B, 1, (H + 2 * G) * channels, dtype=dtype)
    rope = (
        (tensor(length, channels, seed=1).cos(), tensor(length, channels, seed=1).sin())
        if "rope" in case
        else None
    )
    gains = gains_of(case, H, G, channels, dtype, 3)
    bias = tensor(z.shape[-1], seed=5, dtype=dtype) if "bias" in case else None
    epilogue = Epilogue(tensor(B, 1, 1, seed=6).abs() + 0.5, bias) if "epilogue" in case else None
    pos = torch.tensor([at], device=DEVICE)
    full, cache = (
        [tensor(B, G, length, channels, seed=seed, dtype=dtype) for seed in (7, 8)]
        for _ in range(2)
    )
    for part in cache:
        part[:, :, at:] = float("nan")
    given = epilogue, cache, pos, rope, *gains, 1e-6
    q = decode_reference.heads(z, epilogue, full, *given[2:]).double()
    exact = [part.double() for part in full]
    whole = decode_reference.attend(q, exact, pos).to(dtype)
    if parts == 1:
        near(decode_attention.heads_attend(z, *given), whole)
    else:
        ours = decode_attention.heads_attend_parts(z, *given, parts)
        near(decode_attention.combine(*ours, dtype), whole)
        for a, b in zip(ours, decode_reference.attend_parts(q, exact, pos, parts), strict=True):
            assert torch.equal(a.isfinite(), b.isfinite())
            near(a.where(a.isfinite(), 0), b.where(b.isfinite(), 0).float())
    for ours, plain in zip(cache, full, strict=True):
        near(ours[:, :, at], plain[:, :, at])
        assert torch.equal(ours[:, :, :at], plain[:, :, :at]) and ours[:, :, at + 1 :].isnan().all()


def test_attention_over_several_tiles_of_keys():
    B, H, D, length = 1, 2, 8, 2 * decode_attention.KEYS + 40
    q, cache = (
        3 * tensor(B, H, 1, D),
        (tensor(B, H, length, D, seed=1), tensor(B, H, length, D, seed=2)),
    )
    for at in (0, decode_attention.KEYS - 1, decode_attention.KEYS, 2 * decode_attention.KEYS + 7):
        pos = torch.tensor([at], device=DEVICE)
        near(decode_attention.attend(q, cache, pos), decode_reference.attend(q, cache, pos))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_attention_in_parts(dtype):
    """Parts that end in the middle of a tile of keys, parts with one key, and parts that have none
    yet.
    """
    B, H, G, D, length, parts = 2, 4, 2, 12, 2 * decode_attention.KEYS + 41, 3
    q = 3 * tensor(B, H, 1, D, dtype=dtype)
    cache = (
        tensor(B, G, length, D, seed=1, dtype=dtype),
        tensor(B, G, length, D, seed=2, dtype=dtype),
    )
    for at in (0, length // parts + 1, length - 1):
        pos = torch.tensor([at], device=DEVICE)
        ours, plain = (
            of.attend_parts(q, cache, pos, parts) for of in (decode_attention, decode_reference)
        )
        whole = decode_reference.attend(q, cache, pos)
        near(decode_attention.combine(*ours, dtype), whole)
        near(decode_reference.combine(*plain, dtype), whole)
        for a, b in zip(ours, plain, strict=True):
            assert torch.equal(a.isfinite(), b.isfinite())
            near(a.where(a.isfinite(), 0), b.where(b.isfinite(), 0))


# (window, position, parts): a window of one key, of one tile, of a tile and one key, of the whole
# cache and beyond; positions at which it is not full yet, is just full, and has moved on.
WINDOWS = [
    (1, 0, 1),
    (1, 100, 1),
    (64, 63, 1),
    (64, 64, 1),
    (65, 168, 1),
    (100, 120, 3),
    (100, 40, 3),
    (65, 168, 3),
    (169, 168, 3),
    (500, 168, 1),
]


@pytest.mark.parametrize(("window", "at", "parts"), WINDOWS, ids=str)
def test_attention_within_a_window(window, at, parts):
    """With a scale of its own. Nothing is read outside of the window, where NaN is: by attention
    alone, and by heads and attention at once, which makes the last key itself.
    """
    B, H, G, D, length, scale = 2, 4, 2, 12, 169, 0.5
    z, pos = tensor(B, 1, (H + 2 * G) * D), torch.tensor([at], device=DEVICE)
    rope = (tensor(length, D, seed=1).cos(), tensor(length, D, seed=1).sin())
    full = [tensor(B, G, length, D, seed=seed) for seed in (7, 8)]
    made = (rope, None, None, None, 1e-6)
    q = decode_reference.heads(z, None, full, pos, *made)
    # written out: the softmax over the keys of the window
    seen = slice(max(0, at + 1 - window), at + 1)
    k, v = (part[:, :, seen].double().repeat_interleave(2, 1) for part in full)
    exact = ((q.double() * scale) @ k.mT).softmax(-1) @ v  # (B, H, 1, D)
    exact = exact.transpose(1, 2).flatten(2).float()
    poisoned = [part.clone() for part in full]
    for part in poisoned:
        part[:, :, : seen.start] = float("nan")
        part[:, :, at + 1 :] = float("nan")
    for of, cache in ((decode_attention, poisoned), (decode_reference, full)):
        if parts == 1:
            near(of.attend(q, cache, pos, scale, window), exact)
        found = of.attend_parts(q, cache, pos, parts, scale, window)
        if parts > 1:
            near(of.combine(*found, torch.float32), exact)
            # the same parts, whoever computes them
            for ours, plain in zip(
                found,
                decode_reference.attend_parts(q, full, pos, parts, scale, window),
                strict=True,
            ):
                assert torch.equal(ours.isfinite(), plain.isfinite())
                near(ours.where(ours.isfinite(), 0), plain.where(plain.isfinite(), 0))
        for part in cache:
            part[:, :, at] = float("nan") if of is decode_attention else 0.0
        if parts == 1:
            near(of.heads_attend(z, None, cache, pos, *made, scale, window), exact)
        else:
            found = of.heads_attend_parts(z, None, cache, pos, *made, parts, scale, window)
            near(of.combine(*found, torch.float32), exact)


@pytest.mark.parametrize("size", (61, 3000))
def test_the_ends_of_a_step(size):
    B, C = 3, 20
    token, pos = torch.tensor([[1], [0], [60]], device=DEVICE), torch.tensor([4], device=DEVICE)
    wte, wpe = tensor(size, C), tensor(9, C, seed=1)
    for table in (None, wpe):
        near(
            decode_attention.embed(token, pos, wte, table),
            decode_reference.embed(token, pos, wte, table),
        )
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
    """Inductor sees heads and attention as operators that write the cache; a step of them computes
    the same.
    """
    model, idx = make("qwen3", "coupled").float().to(DEVICE), prompt(1, 9)
    expected = decoded(model, "paper", idx.to(DEVICE), 7)
    decoder = Decoder(pack(model, "paper"), 1, 9, ops=decode_triton.COMPILED, graph=False)
    decoder.prefill(idx[:, :7].to(DEVICE))
    for i in (7, 8):
        decoder.out[:, i] = idx[:, i]
        decoder.rewind(i)
        near(decoder.step(), expected[:, i - 6 : i - 5])
    z, cache = tensor(1, 1, 8 * 16), (tensor(1, 2, 9, 16), tensor(1, 2, 9, 16))
    tests = ("test_schema", "test_faketensor")
    for gains in ((None, None, None), gains_of("full values", 4, 2, 16)):
        words = (z, None, None, *cache, decoder.pos - 1, None, None, *gains, 1e-6)
        torch.library.opcheck(decode_triton.heads_operator, words, test_utils=tests)
    x, weight = tensor(2, 1, 16), tensor(24, 16, seed=1)
    # all four uses of a step: with and without bias, stream and activation
    for bias, residual, kind in (
        (tensor(24, seed=2), tensor(2, 1, 24, seed=3), ""),
        (None, tensor(2, 1, 24, seed=3), ""),
        (None, None, ""),
        (tensor(24, seed=2), None, "swiglu"),
    ):
        words = (x, weight, bias, residual, kind)
        torch.library.opcheck(decode_triton.project_operator, words, test_utils=tests)
        near(decode_triton.project(*words), decode_reference.project(*words))
    words = (tensor(1, 4, 1, 16), *cache, decoder.pos - 1, 2, 0.3, 5)
    torch.library.opcheck(decode_triton.attend_parts_operator, words, test_utils=tests)
    logits, places = tensor(2, 1, 61), torch.zeros(2, 1, dtype=torch.int64, device=DEVICE)
    torch.library.opcheck(decode_triton.best_operator, (logits,), test_utils=tests)
    words = (
        *decode_triton.best(logits),
        places,
        places[0].clone(),
        places.expand(2, 9).contiguous(),
    )
    torch.library.opcheck(decode_triton.take_operator, words, test_utils=tests)


def test_launches_overlap_only_where_they_are_told_to():
    def plain() -> bool:
        return overlap.launch_options() == {"PDL": False}

    assert (
        plain()
        and overlapped(lambda: overlap.launch_options())() == {"PDL": True, "launch_pdl": True}
        and plain()
    )
    with pytest.raises(ZeroDivisionError):
        overlapped(lambda: 1 / 0)()
    assert plain()
