"""KV-cached greedy decoding of any GPT from packed weights, at four levels of fusion.

    packed = pack(load_model("random:qwen3-0.6b"), "fused")
    decoder = Decoder(packed, batch=1, length=256)
    tokens = decoder.generate(prompt, 128)  # (B, T) -> (B, T + 128)

A step is a chain of launches, each one function of kernels/decode/reference.py; on a GPU, those of
triton_launches.py there. Read here from the top: decode_block, decode_logits, then the functions of
one level in FUSIONS, then the Decoder around them. Launches of a block of a coupled model:

                        plain        paper        library          fused
    norm                norm         norm         norm             -
    qkv                 matmul       matmul       matmul           norm_project
    QK-norm, rotary,    heads        heads        heads_attend     heads_attend
      cache
    attention           attend       attend       -                -
    proj                matmul       matmul_add   matmul_add       project
    shared norm         norm         -            -                -
    up                  matmul       matmul       matmul           shared_project
    activation          activation   activation   activation       -
    down                matmul       matmul_add   matmul_add       project
    launches            9            8            7                5

RMSNorm at the second position is a norm again in `paper` (9), norm_activation for activation in
`library` and norm_project in `fused`. An output norm, or a norm that replaces the stream, is a norm
at every level: it adds, and the product before it does not. QK-norm, rotary positions and biases
cost no launch. A long cache is split over more programs and takes a launch more (combine). Before
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
    norm_project  the product reads all of x anyway, so its loop sums the squares along the way:
                  the gain is in the weight, and the statistic scales the result
    best, take    the largest logit of each part of the vocabulary, then of all parts: two launches,
                  because the second needs all programs of the first

`library` replaces `fused` from some batch size on (pack.level_at), where the library's products are
the faster ones. Token and position stay on the device; there the whole step is one CUDA graph.
"""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from decode.pack import Entry, Exit, PackedBlock, PackedGPT
from kernels.decode import reference as decode_reference
from kernels.decode.reference import Cache, Epilogue

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
    epilogue: Epilogue | None  # scale and bias that z still lacks; None: z is complete
    stream: Stream  # x with delta added, and the statistic taken here


class HeadOptions(NamedTuple):
    """How heads are made of z: parameters of the launch functions, in their order."""

    rope: tuple[Tensor, Tensor] | None  # cos and sin (block_size, D)
    q_gain: Tensor | None  # (D,) or (H D,)
    k_gain: Tensor | None  # (D,) or (H_kv D,)
    v_gain: Tensor | None  # (D,) or (H_kv D,)
    eps: float  # of these norms


class Reach(NamedTuple):
    """How queries see keys: the last parameters of the launch functions, in their order."""

    scale: float  # of the scores; 0: 1 / sqrt(D)
    window: int  # tokens that a query sees, itself included; 0: all before it


def decode_block(
    ops: Ops, packed: PackedGPT, block: PackedBlock, cache: Cache, pos: Tensor, stream: Stream
) -> Stream:
    """Run one block on the stream of tokens at positions pos (T,); extend its cache."""
    fusion = FUSIONS[packed.level]
    gains = (block.q_gain, block.k_gain, block.v_gain)
    options = HeadOptions(block.rope, *gains, packed.config.norm_eps)
    reach = Reach(packed.config.attn_scale, block.window)

    # The second norm may use the statistic of the first: it travels in `stream`.
    qkv = fusion.read(ops, block.qkv, stream)  # z (B, T, (H + 2 H_kv) D)
    a = fusion.attend(ops, qkv, cache, pos, options, reach)  # (B, T, H D)
    stream = fusion.write(ops, block.proj, a, qkv.stream)  # x (B, T, C)

    up = fusion.read(ops, block.up, stream)  # z (B, T, F)
    return fusion.write(ops, block.down, up.z, up.stream)  # x (B, T, C)


def decode_logits(
    ops: Ops,
    packed: PackedGPT,
    caches: list[Cache],
    token: Tensor,
    pos: Tensor,
    last: bool = False,
    run_block: Callable[..., Stream] = decode_block,
) -> Tensor:
    """Compute the logits of tokens (B, T) at positions pos (T,), and extend the caches.

    Args:
        last: only those of the last token.
        run_block: what runs a block; decode/ledger.py counts launches there.

    Returns:
        (B, T, n_vocab), or (B, 1, n_vocab) if `last`, in the type of the weights.
    """
    x = ops.embed(token, pos, packed.wte, packed.wpe)  # (B, T, C)
    if packed.norm_e is not None:
        x, _, _ = ops.norm(packed.norm_e, x, None, None)
    stream = Stream(x, None, None)
    for block, cache in zip(packed.blocks, caches, strict=True):
        stream = run_block(ops, packed, block, cache, pos, stream)
    if last:
        # Of a prompt, only the last token's logits are read.
        stream = last_token(stream)  # x (B, 1, C)

    head = FUSIONS[packed.level].read(ops, packed.head, stream)  # z (B, T, n_vocab)
    if head.epilogue is None:
        return head.z
    # a final norm that shares its statistic: there is no activation to take the scale along
    return ops.scale(head.z, head.epilogue)


def last_token(stream: Stream) -> Stream:
    """Return the stream of the last token alone: (B, T, ...) -> (B, 1, ...)."""
    return Stream(*(None if part is None else part[:, -1:] for part in stream))


# ---------------------------------------------- reading the stream: norm, product, activation


def read_by_library(ops: Ops, entry: Entry, stream: Stream) -> Projected:
    """Norm, product of the library, activation: a launch each.

    Behind a folded norm the product is z = W' x of (2) in decode/pack.py, which lacks the scale s
    and the bias c'. The activation applies them, or else the launch that reads z.
    """
    if entry.norm is not None:
        y, x, inv_rms = ops.norm(entry.norm, *stream)  # y (B, T, C)
        z = ops.matmul(y, entry.weight, entry.bias)  # (B, T, N)
        return activated(ops, entry, z, None, Stream(x, None, inv_rms))

    # delta is None here: in front of a norm that folds, the projection adds to the stream itself
    x = stream.x
    if entry.statistic == "none":  # s = 1: (2) is an ordinary linear
        z = ops.matmul(x, entry.weight, entry.bias)
        return activated(ops, entry, z, None, stream)

    z = ops.matmul(x, entry.weight, None)  # W' x, (B, T, N)
    if entry.statistic == "shared":
        return activated(ops, entry, z, Epilogue(stream.inv_rms, entry.bias), stream)
    # its own statistic, taken by the launch of the activation; pack folds it nowhere else
    z, inv_rms = ops.norm_activation(z, x, entry.bias, entry.eps, entry.kind)
    return Projected(z, None, Stream(x, None, inv_rms))


def activated(
    ops: Ops, entry: Entry, z: Tensor, epilogue: Epilogue | None, stream: Stream
) -> Projected:
    """Apply the activation after z, and the epilogue with it. Without one, change nothing."""
    if not entry.kind:
        return Projected(z, epilogue, stream)
    z = ops.activation(z, epilogue, entry.kind)  # (B, T, N), of a gated MLP (B, T, N / 2)
    return Projected(z, None, stream)


def read_fused(ops: Ops, entry: Entry, stream: Stream) -> Projected:
    """Norm, product, bias and activation in one launch; two where the norm cannot fold."""
    x = stream.x
    if entry.statistic == "own":
        z, inv_rms = ops.norm_project(x, entry.weight, entry.bias, entry.eps, entry.kind)
        return Projected(z, None, Stream(x, None, inv_rms))
    if entry.statistic == "shared":
        z = ops.shared_project(x, stream.inv_rms, entry.weight, entry.bias, entry.kind)
        return Projected(z, None, stream)

    y = x
    if entry.norm is not None:
        y, x, inv_rms = ops.norm(entry.norm, *stream)  # y (B, T, C)
        stream = Stream(x, None, inv_rms)
    z = ops.project(y, entry.weight, entry.bias, None, entry.kind)
    return Projected(z, None, stream)


# --------------------------------------------------------------- attention to the cache


def attend_separately(
    ops: Ops, qkv: Projected, cache: Cache, pos: Tensor, options: HeadOptions, reach: Reach
) -> Tensor:
    """Compute attention (B, T, H D) in two launches: heads into the cache, then attention to it.

    A long cache is attended to in parts, and one launch more combines them.
    """
    q = ops.heads(qkv.z, qkv.epilogue, cache, pos, *options)  # (B, H, T, D)
    parts = cache_parts(cache, n_heads=q.shape[1], tokens=q.shape[2], window=reach.window)
    if parts == 1:
        return ops.attend(q, cache, pos, *reach)
    sums, largest, totals = ops.attend_parts(q, cache, pos, parts, *reach)
    return ops.combine(sums, largest, totals, q.dtype)


def attend_fused(
    ops: Ops, qkv: Projected, cache: Cache, pos: Tensor, options: HeadOptions, reach: Reach
) -> Tensor:
    """Compute attention (B, T, H D), heads included, in one launch; in two if the cache is long."""
    _, kv_heads, _, channels = cache[0].shape
    n_heads = qkv.z.shape[2] // channels - 2 * kv_heads  # H of z (B, T, (H + 2 H_kv) D)
    # Known before the launch, from shapes alone, so a captured graph holds for every position.
    parts = cache_parts(cache, n_heads, tokens=qkv.z.shape[1], window=reach.window)
    if parts == 1:
        return ops.heads_attend(qkv.z, qkv.epilogue, cache, pos, *options, *reach)
    sums, largest, totals = ops.heads_attend_parts(
        qkv.z, qkv.epilogue, cache, pos, *options, parts, *reach
    )
    return ops.combine(sums, largest, totals, qkv.z.dtype)


def cache_parts(cache: Cache, n_heads: int, tokens: int, window: int) -> int:
    """Return the number of parts of the cache, or of a window, that are attended to separately."""
    if tokens > 1:  # a prompt has programs enough
        return 1
    batch, _, length, _ = cache[0].shape
    return decode_reference.attention_parts(batch, n_heads, min(length, window or length))


# ------------------------------------------------ writing into the stream: product, residual add


def write_plain(ops: Ops, part: Exit, a: Tensor, stream: Stream) -> Stream:
    """Leave the residual add to the next norm, as in training."""
    delta = ops.matmul(a, part.weight, part.bias)  # (B, T, C)
    return Stream(stream.x, delta, stream.inv_rms)


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
    x = ops.matmul_add(a, part.weight, stream.x)  # (B, T, C)
    return Stream(x, None, stream.inv_rms)


def write_fused(ops: Ops, part: Exit, a: Tensor, stream: Stream) -> Stream:
    """Add the bias and the stream in the epilogue of our own product.

    The stream only where the next norm does not add itself.
    """
    if not part.adds:
        delta = ops.project(a, part.weight, part.bias, None)  # (B, T, C)
        return Stream(stream.x, delta, stream.inv_rms)
    x = ops.project(a, part.weight, part.bias, stream.x)  # (B, T, C)
    return Stream(x, None, stream.inv_rms)


class Fusion(NamedTuple):
    """How a level of decode/pack.py runs the three kinds of work of a block."""

    read: Callable[..., Projected]  # norm, product, activation
    attend: Callable[..., Tensor]  # heads, cache, attention
    write: Callable[..., Stream]  # product, residual add


FUSIONS = {
    "plain": Fusion(read_by_library, attend_separately, write_plain),
    "paper": Fusion(read_by_library, attend_separately, write_by_library),
    "library": Fusion(read_by_library, attend_fused, write_by_library),
    "fused": Fusion(read_fused, attend_fused, write_fused),
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
        if length > config.block_size:
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
        self.caches = []
        for _ in packed.blocks:
            keys = torch.zeros(shape, dtype=packed.dtype, device=device)
            values = torch.zeros(shape, dtype=packed.dtype, device=device)
            self.caches.append((keys, values))
        # the token that the next step reads, and its position, the same for all sequences
        self.token = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.pos = torch.zeros(1, dtype=torch.int64, device=device)
        # all tokens so far; the last step finds one that no step reads any more
        self.out = torch.zeros(batch, length + 1, dtype=torch.int64, device=device)
        self.logits = torch.empty(0, device=device)  # (B, 1, n_vocab) of the last step

        self.filled = 0  # tokens in the cache; the host's copy of pos
        self.peak_bytes = 0  # what a captured step takes besides storages()
        self._run: Callable[[], Tensor] | None = None  # the step as built by the first call
        self._compute: Callable | None = None  # kept alive for _run

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
        self.logits = decode_logits(decode_reference, self.packed, self.caches, idx, pos, last=True)
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
        if self._run is None:
            self._run = self._build()
        self.logits = self._run()
        self.filled += 1
        return self.logits

    def generate(self, idx: Tensor, new_tokens: int) -> Tensor:
        """Return the greedy continuation (B, T + new_tokens) of prompts idx (B, T)."""
        self.prefill(idx)  # the first new token
        for _ in range(new_tokens - 1):
            self.step()
        return self.out[:, : idx.shape[1] + new_tokens].clone()

    def storages(self) -> dict[int, int]:
        """Return {address: bytes} of the memory that a step keeps: packed weights and cache.

        Decoders of one model may share weights, so a sum over several goes by address.
        """
        packed = self.packed
        tensors = [packed.wte, packed.wpe]
        for block in packed.blocks:
            tensors += block.rope or ()
        for part in (*packed.entries, *packed.exits):
            tensors += [part.weight, part.bias]
        for keys, values in self.caches:
            tensors += [keys, values]
        storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
        return {storage.data_ptr(): storage.nbytes() for storage in storages}

    def _choose(self, ops: Ops, logits: Tensor, token: Tensor, pos: Tensor) -> None:
        """Write the largest logit's token into `token` and into `out`, and move pos by one."""
        # The same kernels at all levels. Inductor does not split an argmax: one program would
        # search 151,936 logits, by estimate 3 to 7 % of a step, which the fused arms would be
        # credited with.
        values, tokens = ops.best(logits)  # (B, parts of the vocabulary)
        ops.take(values, tokens, token, pos, self.out)

    def _build(self) -> Callable[[], Tensor]:
        """Return the step as a call that returns logits: compiled and captured as configured."""

        # token and pos are parameters, so that torch.compile sees them as inputs of its graph
        def compute(token: Tensor, pos: Tensor) -> Tensor:
            logits = decode_logits(self.ops, self.packed, self.caches, token, pos)
            self._choose(self.ops, logits, token, pos)
            return logits

        if self.compiled:
            compute = compiled_alone(compute, self.tuned)
        # A captured graph uses what a compiled function allocates and loads, so the function must
        # live as long as the graph.
        self._compute = compute
        is_built = self.compiled or self.graph
        if is_built and self.tuned and can_overlap(self.token.device):
            compute = overlapped(compute)
        if self.graph:
            return self._capture(compute)
        return lambda: compute(self.token, self.pos)

    def _capture(self, compute: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Tensor]:
        """Capture a step in a CUDA graph; return the call that replays it."""
        filled = self.filled
        # A graph cannot be captured on the default stream.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        # Compilation, tuning and the libraries' own memory must come before the capture. These
        # calls decode tokens, so each of them is undone.
        with torch.cuda.stream(stream):
            for _ in range(3):
                compute(self.token, self.pos)
                self.rewind(filled)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            logits = compute(self.token, self.pos)  # every replay writes its logits here
        # A graph has memory of its own, which the capture allocates.
        self.peak_bytes = torch.cuda.max_memory_allocated() - before
        self.rewind(filled)

        def replay() -> Tensor:
            graph.replay()
            # The tensor that the graph writes, not self.logits, which prefill replaces.
            return logits

        return replay


# ----------------------------------------------------------------- how a step is launched


def best_ops(packed: PackedGPT, batch: int, compiled: bool, tuned: bool) -> Ops:
    """Return the launch functions for this device and type.

    They are our own kernels on a GPU with Triton, else plain PyTorch. The kernels have no float64.
    """
    if not packed.wte.is_cuda or packed.dtype == torch.float64:
        return decode_reference
    try:
        from kernels.decode import triton_launches as decode_triton
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        return decode_reference
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

    def run(*args: Tensor) -> Tensor:
        with overlapping():
            return function(*args)

    return run
