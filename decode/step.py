"""KV-cached greedy decoding of any GPT from packed weights, at four levels of fusion.

    packed = pack(load_model("random:qwen3-0.6b"), "fused")
    decoder = Decoder(packed, batch=1, length=256)
    tokens = decoder.generate(prompt, 128)  # (B, T) -> (B, T + 128)

A step is a chain of launches, each one function of kernels/decode/reference.py; on a GPU, those of
triton_launches.py there. Read here from the top: decode_block, decode_logits, then the functions of
one level in FUSIONS, then the Decoder around them. Launches of a block of a coupled model:

                        plain        paper        library          fused
    norm                norm         norm         norm             -
    qkv                 matmul       matmul       matmul           project
    QK-norm, rotary,    heads        heads        heads_attend     heads_attend
      cache
    attention           attend       attend       -                -
    proj                matmul       matmul_add   matmul_add       project
    shared norm         norm         -            -                -
    up                  matmul       matmul       matmul           project
    activation          activation   activation   activation       -
    down                matmul       matmul_add   matmul_add       project
    launches            9            8            7                5

RMSNorm at the second position is a norm again in `paper` (9); in `library` the activation takes its
statistic, in `fused` the product. An output norm, or a norm that replaces the stream, is a norm at
every level: it adds, and the product before it does not. QK-norm, rotary positions and biases cost
no launch. A long cache is split over more programs and takes a launch more (combine). Before
the first block come embed and the embeddings' norm, if there is one; after the last block the head,
which is like qkv, then best and take for the next token.

Why a launch is one launch:

    norm          a norm reads whole rows, which a product of the library cannot do on its way in;
                  it adds the sublayer's output (delta) in the same pass, if need be normalised
    matmul_add    the library's addmm adds the residual stream in the product's epilogue
    activation    it works on single elements, so it takes a deferred scale and bias along
    heads_attend  each query head makes query, key and value of its group from qkv's output by
                  itself, so no program waits for another one to write the cache; a norm over all
                  heads is taken by every program anew
    project       the product reads all of x anyway, so its loop sums the squares along the way: the
                  gain is in the weight, and the statistic scales the result
    best, take    the largest logit of each part of the vocabulary, then of all parts: two launches,
                  because the second needs all programs of the first

`library` replaces `fused` from some batch size on (pack.level_at), where the library's products are
the faster ones. Token and position stay on the device; there the whole step is one CUDA graph.
"""

import functools
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from decode.pack import Entry, Exit, PackedBlock, PackedGPT
from decode.timing import captured
from kernels import binding
from kernels.decode import reference as decode_reference
from kernels.decode.reference import Cache, RawHeads, Reach
from model import GPTConfig

Ops = ModuleType | SimpleNamespace  # the launch functions
# gpt-fast sets these for its compiled step. Inductor then writes products of one row itself, and
# tunes their tiles.
TUNED = {
    "coordinate_descent_tuning": True,
    "triton.unique_kernel_names": True,
    "fx_graph_cache": True,
}
# Inductor's own programmatic dependent launches. They are safe in our step, where only our own
# operators write into existing tensors: after such a write of its own, inductor would read without
# waiting. gpt-fast's model has such writes, so it runs without this option.
OVERLAPPED = {"triton.enable_pdl": True}


# ------------------------------------------------------------- one step, from tokens to logits


class Stream(NamedTuple):
    """What one position of the model hands to the next."""

    x: Tensor  # residual stream (B, T, C), in the type of the weights
    delta: Tensor | None  # (B, T, C) that the next norm adds to x; None: x is complete
    inv_rms: Tensor | None  # (B, T, 1), the last statistic taken; float64 if x is, else float32


class Projected(NamedTuple):
    """What a projection makes of the stream that it reads."""

    z: Tensor  # (B, T, N), in the type of the weights
    stream: Stream  # x with delta added, and the statistic taken here
    # what z still lacks: a scale (B, T, 1) and a bias (N,); None: z is complete
    inv_rms: Tensor | None = None
    bias: Tensor | None = None


def decode_block(
    ops: Ops, packed: PackedGPT, block: PackedBlock, cache: Cache, pos: Tensor, stream: Stream
) -> Stream:
    """Run one block on the stream of tokens at positions pos (T,); extend its cache."""
    fusion = FUSIONS[packed.level]
    # The second norm may use the statistic of the first: it travels in `stream`.
    qkv = fusion.read(ops, block.qkv, stream)  # z (B, T, (H + 2 H_kv) D)
    a = attention(ops, fusion.joins_heads, packed.config, block, qkv, cache, pos)  # (B, T, H D)
    stream = fusion.write(ops, block.proj, a, qkv.stream)  # x (B, T, C)

    up = fusion.read(ops, block.up, stream)  # z (B, T, F)
    return fusion.write(ops, block.down, up.z, up.stream)  # x (B, T, C)


def decode_logits(
    ops: Ops,
    packed: PackedGPT,
    caches: list[Cache],
    token: Tensor,
    pos: Tensor,
    run_block: Callable[..., Stream] = decode_block,
) -> Tensor:
    """Read tokens (B, T) at positions pos (T,) into the caches, and compute the last one's logits.

    Args:
        run_block: what runs a block; decode/ledger.py counts launches there.

    Returns:
        (B, 1, n_vocab), in the type of the weights.
    """
    x = ops.embed(token, pos, packed.wte, packed.wpe)  # (B, T, C)
    if packed.norm_e is not None:
        x, _, _ = ops.norm(packed.norm_e, x, None, None)
    stream = Stream(x, None, None)
    for block, cache in zip(packed.blocks, caches, strict=True):
        stream = run_block(ops, packed, block, cache, pos, stream)
    # Of a prompt, only the last token's logits are read: x (B, 1, C).
    stream = Stream(*(None if part is None else part[:, -1:] for part in stream))

    head = FUSIONS[packed.level].read(ops, packed.head, stream)  # z (B, 1, n_vocab)
    if head.inv_rms is None:
        return head.z
    # a final norm that shares its statistic: there is no activation to take the scale along
    return ops.activation(head.z, head.inv_rms, head.bias, "")[0]


# ---------------------------------------------- reading the stream: norm, product, activation


def read_by_library(ops: Ops, entry: Entry, stream: Stream) -> Projected:
    """Norm, product of the library, activation: a launch each.

    Behind a folded norm the product is z = W' x of (2) in decode/pack.py, which lacks the scale s
    and the bias c'. The activation applies them, or else the launch that reads z.
    """
    if entry.norm is not None:
        y, x, inv_rms = ops.norm(entry.norm, *stream)  # y (B, T, C)
        found = Projected(ops.matmul(y, entry.weight, entry.bias), Stream(x, None, inv_rms))
    # delta is None from here on: in front of a norm that folds, the projection adds to the stream
    elif entry.statistic == "none":  # s = 1: (2) is an ordinary linear
        found = Projected(ops.matmul(stream.x, entry.weight, entry.bias), stream)
    else:  # z = W' x, (B, T, N)
        z = ops.matmul(stream.x, entry.weight, None)
        found = Projected(z, stream, stream.inv_rms, entry.bias)

    if not entry.kind:
        return found
    owed = (found.inv_rms, found.bias, entry.kind)
    if entry.statistic != "own":
        (z,) = ops.activation(found.z, *owed)  # (B, T, N), of a gated MLP (B, T, N / 2)
        return Projected(z, found.stream)
    # its own statistic, taken by the launch of the activation; pack folds it nowhere else
    z, inv_rms = ops.activation(found.z, *owed, stream.x, entry.eps)
    return Projected(z, Stream(stream.x, None, inv_rms))


def read_fused(ops: Ops, entry: Entry, stream: Stream) -> Projected:
    """Norm, product, bias and activation in one launch; two where the norm cannot fold."""
    y = stream.x
    if entry.norm is not None:
        y, x, inv_rms = ops.norm(entry.norm, *stream)  # y (B, T, C)
        stream = Stream(x, None, inv_rms)
    inv_rms = stream.inv_rms if entry.statistic == "shared" else None
    eps = entry.eps if entry.statistic == "own" else None
    z, *taken = ops.project(y, entry.weight, entry.bias, None, inv_rms, eps, entry.kind)
    if taken:
        (own,) = taken
        stream = stream._replace(inv_rms=own)
    return Projected(z, stream)


# --------------------------------------------------------------- attention to the cache


def attention(
    ops: Ops,
    joins_heads: bool,
    config: GPTConfig,
    block: PackedBlock,
    qkv: Projected,
    cache: Cache,
    pos: Tensor,
) -> Tensor:
    """Compute attention (B, T, H D): heads into the cache, then attention to it; or both in one.

    A long cache is attended to in parts, and one launch more combines them.
    """
    cos, sin = block.rope or (None, None)
    raw = RawHeads(
        z=qkv.z,
        inv_rms=qkv.inv_rms,
        bias=qkv.bias,
        cos=cos,
        sin=sin,
        q_gain=block.q_gain,
        k_gain=block.k_gain,
        v_gain=block.v_gain,
        eps=config.norm_eps,
    )
    k_cache, v_cache = cache
    batch, _, length, _ = k_cache.shape
    # Known before the launch, from shapes alone, so a captured graph holds for every position.
    parts = 1
    if qkv.z.shape[1] == 1:  # a prompt has programs enough
        seen = min(length, block.window or length)
        parts = decode_reference.attention_parts(batch, config.n_head, seen)
    reach = Reach(parts, config.attn_scale, block.window)
    if joins_heads:
        found = ops.heads_attend(raw, k_cache, v_cache, pos, reach)
    else:
        q = ops.heads(*raw, k_cache, v_cache, pos)  # (B, H, T, D)
        found = ops.attend(q, k_cache, v_cache, pos, *reach)
    if parts == 1:
        (a,) = found
        return a
    sums, largest, totals = found
    return ops.combine(sums, largest, totals, qkv.z.dtype)


# ------------------------------------------------ writing into the stream: product, residual add


def write_plain(ops: Ops, part: Exit, a: Tensor, stream: Stream) -> Stream:
    """Leave the residual add to the next norm, as in training."""
    return stream._replace(delta=ops.matmul(a, part.weight, part.bias))  # (B, T, C)


def write_by_library(ops: Ops, part: Exit, a: Tensor, stream: Stream) -> Stream:
    """Add to the stream in the library's product; a bias as well takes a product of our own.

    addmm has room for one summand. The bias cannot wait for the next norm: that would round the
    stream once more (1.08 to 1.16 times the error of `plain` in bfloat16). A norm that adds itself
    gets delta as in training.
    """
    if not part.adds:
        return write_plain(ops, part, a, stream)
    if part.bias is not None:
        return write_fused(ops, part, a, stream)
    return stream._replace(x=ops.matmul_add(a, part.weight, stream.x))  # (B, T, C)


def write_fused(ops: Ops, part: Exit, a: Tensor, stream: Stream) -> Stream:
    """Add the bias and the stream in the epilogue of our own product.

    The stream only where the next norm does not add itself.
    """
    (x,) = ops.project(a, part.weight, part.bias, stream.x if part.adds else None)  # (B, T, C)
    return stream._replace(x=x) if part.adds else stream._replace(delta=x)


class Fusion(NamedTuple):
    """How a level of decode/pack.py runs the three kinds of work of a block."""

    read: Callable[..., Projected]  # norm, product, activation
    joins_heads: bool  # are heads made and attended to in one launch?
    write: Callable[..., Stream]  # product, residual add


FUSIONS = {
    "plain": Fusion(read_by_library, False, write_plain),
    "paper": Fusion(read_by_library, False, write_by_library),
    "library": Fusion(read_by_library, True, write_by_library),
    "fused": Fusion(read_fused, True, write_fused),
}


# ------------------------------------------------------------------- token by token


class Decoder:
    """Greedy decoding of `batch` sequences with a KV cache.

    Args:
        packed: the model (decode/pack.py).
        batch: B, sequences decoded at once.
        length: tokens that the cache has room for, prompt included.
        ops: the launch functions of a step; None takes the best ones here (best_ops).
        compiled: the step goes through torch.compile.
        tuned: that with gpt-fast's options. Kernels, inductor's and ours, also begin while the one
            before ends, where the device can (kernels/decode/overlap.py).
        graph: the step is captured in a CUDA graph; None: if it is on a CUDA device.

    Raises:
        ValueError: `length` is beyond the model's block_size.
    """

    def __init__(
        self,
        packed: PackedGPT,
        batch: int,
        length: int,
        ops: Ops | None = None,
        compiled: bool = False,
        tuned: bool = False,
        graph: bool | None = None,
    ):
        config = packed.config
        device = packed.wte.device
        if length > config.block_size:  # a kernel would read beyond the tables of positions
            raise ValueError(
                f"length={length} is beyond the model's block_size={config.block_size}: "
                "make it shorter"
            )
        self.packed = packed
        self.length = length
        self.ops = ops or best_ops(packed, batch, compiled, tuned)
        self.compiled = compiled
        self.tuned = tuned
        self.graph = device.type == "cuda" if graph is None else graph

        # What a step reads and writes stays in place, as a captured graph needs it.
        # keys and values of each block, (B, H_kv, length, D) each
        shape = (batch, config.kv_heads, length, config.head_channels)
        zeros = functools.partial(torch.zeros, shape, dtype=packed.dtype, device=device)
        self.caches = [(zeros(), zeros()) for _ in packed.blocks]
        # the token that the next step reads, and its position, the same for all sequences
        self.token = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.pos = torch.zeros(1, dtype=torch.int64, device=device)
        # all tokens so far; the last step finds one that no step reads any more
        self.out = torch.zeros(batch, length + 1, dtype=torch.int64, device=device)
        self.logits = torch.empty(0, device=device)  # (B, 1, n_vocab) of the last step

        self.filled = 0  # tokens in the cache; the host's copy of pos

    @torch.no_grad()
    def prefill(self, idx: Tensor) -> Tensor:
        """Read prompts idx (B, T) into the cache, and choose the token that follows each.

        Many tokens at once are large matrix products, at which the library is good. So this runs
        the functions of kernels/decode/reference.py on every device.

        Returns:
            Logits (B, 1, n_vocab) of the last token.
        """
        T = idx.shape[1]
        pos = torch.arange(T, device=idx.device)
        self.logits = decode_logits(decode_reference, self.packed, self.caches, idx, pos)
        # All of these in place: a captured graph knows their addresses.
        self.out.zero_()
        self.out[:, :T] = idx
        # of the last token that was read; _choose moves it on by one
        self.pos.fill_(T - 1)
        self._choose(decode_reference, self.logits, self.token, self.pos)  # pos = T
        self.filled = T
        return self.logits

    def rewind(self, filled: int) -> None:
        """Go back to a cache of `filled` tokens: the next step reads the token at that position."""
        self.filled = filled
        self.pos.fill_(filled)
        self.token.copy_(self.out[:, filled : filled + 1])

    @torch.no_grad()
    def step(self) -> Tensor:
        """Decode one token, and choose the one that the next step reads.

        The first call compiles and captures the step.

        Returns:
            Logits (B, 1, n_vocab); the next step may overwrite them.

        Raises:
            ValueError: the cache is full.
        """
        if self.filled >= self.length:
            raise ValueError(
                f"all {self.length} positions of the cache are taken: make the decoder longer"
            )
        self.logits = self._run()
        self.filled += 1
        return self.logits

    def go_on(self, filled: int, steps: int) -> None:
        """Decode `steps` tokens after the first `filled`, which are in the cache already."""
        self.rewind(filled)
        for _ in range(steps):
            self.step()

    def generate(self, idx: Tensor, new_tokens: int) -> Tensor:
        """Return the greedy continuation (B, T + new_tokens) of prompts idx (B, T)."""
        self.prefill(idx)  # the first new token
        self.go_on(idx.shape[1], new_tokens - 1)
        return self.out[:, : idx.shape[1] + new_tokens].clone()

    def _choose(self, ops: Ops, logits: Tensor, token: Tensor, pos: Tensor) -> None:
        """Write the largest logit's token into `token` and into `out`, and move pos by one."""
        # The same kernels at all levels. Inductor does not split an argmax: one program would
        # search 151,936 logits, by estimate 3 to 7 % of a step, which the fused arms would be
        # credited with.
        values, tokens = ops.best(logits)  # (B, parts of the vocabulary)
        ops.take(values, tokens, token, pos, self.out)

    @functools.cached_property
    def _run(self) -> Callable[[], Tensor]:
        """Build the step, once: a call that returns logits, compiled and captured as configured."""

        # token and pos are parameters, so that torch.compile sees them as inputs of its graph
        def compute(token: Tensor, pos: Tensor) -> Tensor:
            logits = decode_logits(self.ops, self.packed, self.caches, token, pos)
            self._choose(self.ops, logits, token, pos)
            return logits

        if self.compiled:
            compute = compiled_alone(compute, self.tuned)
        is_built = self.compiled or self.graph
        if is_built and self.tuned and can_overlap(self.token.device):
            compute = overlapped(compute)
        if not self.graph:
            return lambda: compute(self.token, self.pos)

        written: list[Tensor] = []  # the logits of each call, the last of them by every replay

        def work() -> None:
            written.append(compute(self.token, self.pos))

        filled = self.filled
        # The calls before the capture decode tokens, so each of them is undone.
        replay = captured(lambda: work, undo=lambda: self.rewind(filled))
        del written[:-1]

        def run() -> Tensor:
            replay()
            # The tensor that the graph writes, not self.logits, which prefill replaces.
            return written[0]

        return run


# ----------------------------------------------------------------- how a step is launched


def best_ops(packed: PackedGPT, batch: int, compiled: bool, tuned: bool) -> Ops:
    """Return the launch functions for this device and type.

    They are our own kernels on a GPU with Triton, else plain PyTorch. The kernels have no float64.
    """
    if not packed.wte.is_cuda or packed.dtype == torch.float64 or binding is None:
        return decode_reference
    from kernels.decode import triton_launches as decode_triton

    if not compiled:
        return decode_triton.FUSED
    if tuned and batch == 1:
        return decode_triton.COMPILED_ROW
    return decode_triton.COMPILED


def compiled_alone(function: Callable, tuned: bool = False) -> Callable:
    """torch.compile, with a cache of compiled versions of its own; `tuned` with gpt-fast's options.

    Dynamo keeps compiled versions by code object, which all closures of one function share. The
    arms of a bench would search each other's versions at every call, and together reach dynamo's
    limit. So each gets a copy of the code.
    """
    # an equal code object, but another one
    function.__code__ = function.__code__.replace()
    options = TUNED | OVERLAPPED if tuned else None
    # Not dynamic: every batch size is compiled apart. Else, from the second one on, dynamo would
    # compile for all sizes.
    return torch.compile(function, fullgraph=True, dynamic=False, options=options)


def can_overlap(device: torch.device) -> bool:
    """Return whether a kernel can begin there before the one before it has ended."""
    # griddepcontrol is of sm_90 (Hopper) and later.
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) >= (9, 0)


def overlapped(function: Callable) -> Callable:
    """Return `function` with its launches overlapped (kernels/decode/overlap.py)."""
    # needs Triton, which not every platform has
    from kernels.decode.overlap import overlapping

    return overlapping()(function)
