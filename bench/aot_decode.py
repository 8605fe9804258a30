"""The kernels of a decoding step, for all published shapes: what bench/aot.py compiles."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.stand_in import meta
from hf.config import shape_config
from kernels.decode import attention as decode_attention
from kernels.decode import epilogue as decode_epilogue
from kernels.decode import project
from kernels.decode.reference import Epilogue, attention_parts
from kernels.reference import GATED

EARLY = ("vector_kernel", "attend_kernel")  # these begin to load before they wait


def cases(name: str, batch: int) -> Iterator[tuple[str, int, Callable]]:
    """(launch's name, C, launch) of a step of the fused arms.

    Heads and attention also apart, as the other arms have them.
    """
    dtype = torch.bfloat16
    shape = shape_config(name)
    n_heads, kv_heads, channels = shape.n_head, shape.kv_heads, shape.head_channels
    # outputs x inputs of the matrices
    qkv = ((n_heads + 2 * kv_heads) * channels, shape.n_embd)
    up = (shape.inner, shape.n_embd)
    kind = shape.activation
    copies = 2 if kind in GATED else 1  # a gated MLP's matrix holds the gate too
    vocabulary = shape.n_vocab or shape.vocab_size

    def x(size: int) -> torch.Tensor:
        return meta(batch, 1, size, dtype=dtype)

    def weight(sizes: tuple[int, int], copies: int = 1) -> torch.Tensor:
        return meta(copies * sizes[0], sizes[1], dtype=dtype)

    def vector(size: int) -> torch.Tensor | None:
        return meta(size, dtype=dtype) if name == "gpt2" else None

    inv_rms = meta(batch, 1, 1)
    yield "qkv", qkv[1], lambda: project.norm_project(x(qkv[1]), weight(qkv), vector(qkv[0]), 1e-6)
    for operator, matrix in (
        ("proj", (shape.n_embd, n_heads * channels)),
        ("down", (shape.n_embd, shape.inner)),
    ):
        yield (
            operator,
            matrix[1],
            lambda m=matrix: project.project(x(m[1]), weight(m), vector(m[0]), x(m[0])),
        )
    bias = vector(up[0])
    yield "up", up[1], lambda: project.norm_project(x(up[1]), weight(up, copies), bias, 1e-6, kind)
    yield (
        "up shared",
        up[1],
        lambda: project.shared_project(x(up[1]), inv_rms, weight(up, copies), bias, kind),
    )
    head = (vocabulary, qkv[1])
    yield "head", qkv[1], lambda: project.norm_project(x(qkv[1]), weight(head), None, 1e-6)
    short = [meta(batch, kv_heads, 256, channels, dtype=dtype) for _ in range(2)]
    pos = meta(1, dtype=torch.int64)
    token = meta(batch, 1, dtype=torch.int64)
    rope = None if name == "gpt2" else (meta(256, channels), meta(256, channels))
    gain = meta(channels, dtype=dtype) if name.startswith(("qwen3", "gemma3")) else None
    gains = (gain, gain, None)  # of queries, keys and values
    z = x((n_heads + 2 * kv_heads) * channels)
    q = meta(batch, n_heads, 1, channels, dtype=dtype)
    with_bias = Epilogue(inv_rms, vector(z.shape[-1]))
    for suffix, epilogue in (("", None), (" epilogue", with_bias)):
        given = (z, epilogue, short, pos, rope, *gains, 1e-6)
        yield f"heads{suffix}", channels, lambda g=given: decode_attention.heads(*g)
        yield f"heads + attend{suffix}", channels, lambda g=given: decode_attention.heads_attend(*g)
    # norms over all heads, as OLMo 2 has them of queries and keys; of values too
    full = [meta(count * channels, dtype=dtype) for count in (n_heads, kv_heads, kv_heads)]
    given_full = (z, None, short, pos, rope, *full, 1e-6)
    yield "heads full", channels, lambda: decode_attention.heads(*given_full)
    yield "heads + attend full", channels, lambda: decode_attention.heads_attend(*given_full)
    yield "attend", channels, lambda: decode_attention.attend(q, short, pos)
    # of a local block: 0.3 is a scale of the scores, 100 a window
    given = (z, None, short, pos, rope, *gains, 1e-6, 0.3, 100)
    yield "heads + attend window", channels, lambda g=given: decode_attention.heads_attend(*g)
    yield "attend window", channels, lambda: decode_attention.attend(q, short, pos, 0.3, 100)
    parts = attention_parts(batch, n_heads, 4096)
    if parts > 1:
        long = [meta(batch, kv_heads, 4096, channels, dtype=dtype) for _ in range(2)]
        yield "attend parts", channels, lambda: decode_attention.attend_parts(q, long, pos, parts)
        whole = (z, None, long, pos, rope, *gains, 1e-6, parts)
        yield "heads + attend parts", channels, lambda: decode_attention.heads_attend_parts(*whole)
        local = (*whole, 0.3, 2048)
        yield (
            "heads + attend window parts",
            channels,
            lambda: decode_attention.heads_attend_parts(*local),
        )
        sums = meta(batch, n_heads, parts, channels)
        statistics = [meta(batch, n_heads, parts) for _ in range(2)]
        yield "combine", channels, lambda: decode_attention.combine(sums, *statistics, dtype)
    raw = x(up[0] * copies)
    yield (
        "epilogue",
        up[1],
        lambda: decode_epilogue.norm_activation(raw, x(up[1]), bias, 1e-6, kind),
    )
    yield (
        "epilogue shared",
        up[1],
        lambda: decode_epilogue.activation(raw, Epilogue(inv_rms, bias), kind),
    )
    wpe = meta(256, qkv[1], dtype=dtype) if name == "gpt2" else None
    yield "embed", qkv[1], lambda: decode_attention.embed(token, pos, weight(head), wpe)
    yield "best", vocabulary, lambda: decode_attention.best(x(vocabulary))
    searched = decode_attention.PARTS
    logits = meta(batch, searched)
    ids = meta(batch, searched, dtype=torch.int64)
    found = meta(batch, 257, dtype=torch.int64)
    yield "take", searched, lambda: decode_attention.take(logits, ids, token, pos, found)


def first_tile(kernel: str, keywords: dict[str, Any]) -> dict[str, int]:
    """{"tile": how often a thread of `vector_kernel` loads for the weights of a first tile}."""
    if kernel != "vector_kernel":
        return {}
    weights = keywords["OUT"] * keywords["IN"]
    if keywords["KIND"] in GATED:
        weights *= 2
    # weights of 16 bits, in loads of 128 by every thread of the warps
    return {"tile": weights * 16 // (32 * keywords["num_warps"] * 128)}
