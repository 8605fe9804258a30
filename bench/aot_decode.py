"""Compile the decoding kernels for a GPU that is not here, for all published shapes.

    # batch 1, 8, 31, 128, sm_90: registers, spills, widths of loads
    python -m bench.aot_decode
    python -m bench.aot_decode --batch=64 --sm=100

Columns, JSON line and exit code are those of `python -m bench.aot`; C is the number of inputs of a
product, of a head's channels, or of a row. Loads that go to shared memory ahead of use (LDGSTS) are
not among the load bits. From sm_90 on, kernels are those of overlapping launches; the JSON line has
how many loads each begins before it waits.
"""

import common.interrupt  # noqa: F401

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

from bench import aot
from bench.aot import meta
from common.errors import ConfigError, UserError, run_program
from common.output import check_replaceable
from configurator import key, parse_args
from kernels import binding
from kernels.decode import attention as decode_attention
from kernels.decode import epilogue as decode_epilogue
from kernels.decode import project as decode_project
from kernels.decode.overlap import overlapping
from kernels.decode.reference import Epilogue, attention_parts
from kernels.reference import GATED

# These begin to load before they wait, which may cost registers: compiled both ways.
EARLY = ("vector_kernel", "attend_kernel")


class Shape(NamedTuple):
    """Outputs x inputs of a model's matrices (up: inner), and the rest that kernels depend on."""

    qkv: tuple[int, int]
    up: tuple[int, int]
    proj: tuple[int, int]
    down: tuple[int, int]
    activation: str
    vocabulary: int
    heads: tuple[int, int, int]  # query heads, key and value heads, channels of a head


def shape_of(
    channels: int, inner: int, heads: tuple[int, int, int], activation: str, vocabulary: int
) -> Shape:
    """The shape of a model with `channels` channels in the stream and `inner` in the MLP."""
    query, shared, width = heads
    return Shape(
        qkv=((query + 2 * shared) * width, channels),
        up=(inner, channels),
        proj=(channels, query * width),
        down=(channels, inner),
        activation=activation,
        vocabulary=vocabulary,
        heads=heads,
    )


# The models of hf/config.py's SHAPES.
SHAPES = {
    "gpt2": shape_of(768, 3072, (12, 12, 64), "gelu_tanh", 50257),
    "qwen3-0.6b": shape_of(1024, 3072, (16, 8, 128), "swiglu", 151936),
    "qwen3-1.7b": shape_of(2048, 6144, (16, 8, 128), "swiglu", 151936),
    "qwen3-8b": shape_of(4096, 12288, (32, 8, 128), "swiglu", 151936),
    "llama3.2-1b": shape_of(2048, 8192, (32, 8, 64), "swiglu", 128256),
    "llama3.2-3b": shape_of(3072, 8192, (24, 8, 128), "swiglu", 128256),
    "olmo2-1b": shape_of(2048, 8192, (16, 16, 128), "swiglu", 100352),
    "gemma3-1b": shape_of(1152, 6912, (4, 1, 256), "geglu", 262144),
}


@dataclass(frozen=True)
class DecodeAotConfig:
    """Keys of bench/aot_decode.py."""

    batch: tuple[int, ...] = key((1, 8, 31, 128), "sequences decoded at once")
    sm: int = key(90, "compute capability times ten")
    shapes: str = key(",".join(SHAPES), "shapes, separated by commas")
    out: str = key("", "write the table to this Markdown file")

    def __post_init__(self) -> None:
        if not self.batch or min(self.batch) < 1:
            raise ConfigError("batch: give whole numbers from 1 on, separated by commas")
        if not {*self.shapes.split(",")} <= {*SHAPES}:
            raise ConfigError(f"shapes: give some of {', '.join(SHAPES)}, separated by commas")


def cases(name: str, batch: int) -> Iterator[tuple[str, int, Callable]]:
    """(launch's name, C, launch) of a step of the fused arms.

    Heads and attention also apart, as the other arms have them.
    """
    dtype = torch.bfloat16
    project = decode_project
    shape = SHAPES[name]
    n_heads, kv_heads, channels = shape.heads
    qkv = shape.qkv
    up = shape.up
    kind = shape.activation
    vocabulary = shape.vocabulary
    copies = 2 if kind in GATED else 1  # a gated MLP's matrix holds the gate too

    def x(size: int) -> torch.Tensor:
        return meta(batch, 1, size, dtype=dtype)

    def weight(sizes: tuple[int, int], copies: int = 1) -> torch.Tensor:
        return meta(copies * sizes[0], sizes[1], dtype=dtype)

    def vector(size: int) -> torch.Tensor | None:
        return meta(size, dtype=dtype) if name == "gpt2" else None

    inv_rms = meta(batch, 1, 1)
    yield "qkv", qkv[1], lambda: project.norm_project(x(qkv[1]), weight(qkv), vector(qkv[0]), 1e-6)
    for operator, matrix in (("proj", shape.proj), ("down", shape.down)):
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


def describe(operator: str, channels: int, sm: int, launch: aot.Launch) -> dict:
    """Return what is known of a row before its kernel is compiled.

    `tile`: how often a thread loads for the weights of a first tile.
    """
    kernel_name = launch.kernel.__name__
    keywords = launch.keywords
    record = {
        "operator": operator,
        "kernel": kernel_name,
        "C": channels,
        "sm": sm,
        "PDL": keywords.get("PDL"),
    }
    if kernel_name == "vector_kernel":
        weights = keywords["OUT"] * keywords["IN"]
        if keywords["KIND"] in GATED:
            weights *= 2
        # weights of 16 bits, in loads of 128 by every thread of the warps
        record["tile"] = weights * 16 // (32 * keywords["num_warps"] * 128)
    return record


def launches(call: Callable, is_overlapping: bool) -> list[aot.Launch]:
    """Return the launches that `call` would make, with or without overlap."""
    with overlapping() if is_overlapping else nullcontext():
        return aot.launches(call)


def main(argv: list[str]) -> int:
    config, _ = parse_args(DecodeAotConfig, argv, __doc__)
    if config.out:
        check_replaceable(Path(config.out), aot.TABLE)
    if binding.INTERPRETED:
        raise UserError("TRITON_INTERPRET is set, so there is nothing to compile: unset it")
    can_overlap = config.sm >= 90
    ways = (False, True) if can_overlap else (False,)
    compiled = []
    for name, batch in product(config.shapes.split(","), config.batch):
        for operator, size, call in cases(name, batch):
            title = f"{name} {operator}, batch {batch}"
            for is_overlapping in ways:
                for launch in launches(call, is_overlapping):
                    is_early = launch.kernel.__name__ in EARLY
                    if is_overlapping != can_overlap and not is_early:
                        continue
                    record = describe(title, size, config.sm, launch)
                    binary = aot.compile_launch(launch, config.sm)
                    compiled.append((record, binary))
    return aot.finish(aot.measured(compiled, config.sm), config.out)


if __name__ == "__main__":
    run_program(main)
