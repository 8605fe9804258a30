"""KV-cached greedy decoding of any GPT from packed weights, at three levels of fusion.

    packed = pack(load_model("random:qwen3-0.6b"), "fused")
    decoder = Decoder(packed, batch=1, length=256)
    tokens = decoder.generate(prompt, 128)                       # (B, T) -> (B, T + 128)

A step is a chain of launches, each one function of kernels/decode/reference.py (on a GPU of
triton_launches.py there). Launches per block, with or without QK-norm, rotary positions and biases:

    plain   add + norm, qkv, heads, attention, proj, add + norm, up, activation, down     9
    paper   norm, qkv, heads, attention, proj + add, up, scale + activation, down + add   8
    fused   qkv, heads + attention, proj + add, up + activation, down + add               5

and one more where a long cache splits the attention (kernels/decode/reference.py, LONG). In `fused`
a norm is part of the product behind it: the gain is in the weight, the sum of squares is taken in
the loop over x that the product runs anyway (or the statistic is shared, or there is none), the
scale is in the epilogue. From some batch size on (pack.level_at) the library's products are the
better ones: `library` is as `paper`, but for attention, with 7 launches for exact RMSNorm too,
whose second statistic the activation takes. Tokens and positions stay on the device; there the
whole step is one CUDA graph.
"""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor

from decode.pack import Entry, Exit, PackedBlock, PackedGPT
from kernels.decode import reference as decode_reference
from kernels.decode.reference import Epilogue

Ops = ModuleType | SimpleNamespace  # the launches
# What gpt-fast sets for its compiled step: inductor then writes the products of one row by itself
# and tunes its tiles.
TUNED = {
    "coordinate_descent_tuning": True,
    "triton.unique_kernel_names": True,
    "fx_graph_cache": True,
}
# Inductor's own programmatic dependent launches. In a step of ours nothing but our operators writes
# into what is there already; inductor would read behind such a write of its own without waiting, so
# gpt-fast's model goes without.
OVERLAPPED = {"triton.enable_pdl": True}


def enter_library(
    ops: Ops, entry: Entry, x: Tensor, delta: Tensor | None, inv_rms: Tensor | None
) -> tuple:
    """(z, epilogue, x, inv_rms): norm, library product and activation. A folded norm leaves its
    scale as an epilogue, which the activation applies, or whatever comes after the product.
    """
    epilogue = None
    if entry.norm is not None:
        y, x, inv_rms = ops.norm(entry.norm, x, delta, inv_rms)
        z = ops.matmul(y, entry.weight, entry.bias)
    elif entry.statistic == "own":
        z, inv_rms = ops.norm_activation(
            ops.matmul(x, entry.weight, None), x, entry.bias, entry.eps, entry.kind
        )
        return z, None, x, inv_rms
    elif entry.statistic == "shared":
        z, epilogue = ops.matmul(x, entry.weight, None), Epilogue(inv_rms, entry.bias)
    else:
        z = ops.matmul(x, entry.weight, entry.bias)
    if entry.kind:
        z, epilogue = ops.activation(z, epilogue, entry.kind), None
    return z, epilogue, x, inv_rms


def enter_fused(ops: Ops, entry: Entry, x: Tensor, delta: None, inv_rms: Tensor | None) -> tuple:
    """(z, None, x, inv_rms): norm, product, bias and activation in one launch; in two where the
    norm cannot fold.
    """
    if entry.statistic == "own":
        z, inv_rms = ops.norm_project(x, entry.weight, entry.bias, entry.eps, entry.kind)
    elif entry.statistic == "shared":
        z = ops.shared_project(x, inv_rms, entry.weight, entry.bias, entry.kind)
    else:
        y = x
        if entry.norm is not None:
            y, x, inv_rms = ops.norm(entry.norm, x, None, inv_rms)
        z = ops.project(y, entry.weight, entry.bias, None, entry.kind)
    return z, None, x, inv_rms


# What a projection into the stream does: (x, what the next norm still has to add).


def leave_plain(ops: Ops, part: Exit, a: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return x, ops.matmul(a, part.weight, part.bias)


def leave_paper(ops: Ops, part: Exit, a: Tensor, x: Tensor) -> tuple[Tensor, None]:
    """addmm has room for one summand: with a bias besides, the product is our own."""
    if part.bias is None:
        return ops.matmul_add(a, part.weight, x), None
    return ops.project(a, part.weight, part.bias, x), None


def leave_fused(ops: Ops, part: Exit, a: Tensor, x: Tensor) -> tuple[Tensor, None]:
    return ops.project(a, part.weight, part.bias, x), None


# Attention (B, T, H D) of a product z to the cache, into which z's keys and values go. given: the
# rest of heads' arguments. Of one token to a long cache it is in parts, which takes a launch more.


def attend_apart(
    ops: Ops, z: Tensor, epilogue: Epilogue | None, cache, pos: Tensor, given: tuple, parts: int
) -> Tensor:
    q = ops.heads(z, epilogue, cache, pos, *given)
    return (
        ops.attend(q, cache, pos)
        if parts == 1
        else ops.combine(*ops.attend_parts(q, cache, pos, parts), q.dtype)
    )


def attend_at_once(
    ops: Ops, z: Tensor, epilogue: Epilogue | None, cache, pos: Tensor, given: tuple, parts: int
) -> Tensor:
    if parts == 1:
        return ops.heads_attend(z, epilogue, cache, pos, *given)
    return ops.combine(*ops.heads_attend_parts(z, epilogue, cache, pos, *given, parts), z.dtype)


STYLES = {
    "plain": (enter_library, attend_apart, leave_plain),
    "paper": (enter_library, attend_apart, leave_paper),
    "fused": (enter_fused, attend_at_once, leave_fused),
    "library": (enter_library, attend_at_once, leave_paper),
}


def decode_block(
    ops: Ops, packed: PackedGPT, block: PackedBlock, cache, pos, x, delta, inv_rms
) -> tuple:
    """(x, delta, inv_rms) behind one block."""
    enter, attend, leave = STYLES[packed.level]
    config, (B, T, _) = packed.config, x.shape
    z, epilogue, x, inv_rms = enter(ops, block.qkv, x, delta, inv_rms)  # (B, T, (H + 2 H_kv) D)
    given = packed.rope, block.q_gain, block.k_gain, config.norm_eps
    parts = 1 if T > 1 else decode_reference.attention_parts(B, config.n_head, cache[0].shape[2])
    x, delta = leave(ops, block.proj, attend(ops, z, epilogue, cache, pos, given, parts), x)
    z, _, x, inv_rms = enter(ops, block.up, x, delta, inv_rms)  # (B, T, inner)
    x, delta = leave(ops, block.down, z, x)
    return x, delta, inv_rms


def decode_logits(
    ops: Ops,
    packed: PackedGPT,
    caches: list,
    token: Tensor,
    pos: Tensor,
    last: bool = False,
    run_block: Callable = decode_block,
) -> Tensor:
    """Logits (B, T, V) of tokens (B, T) at positions pos (T,); of the last token alone (B, 1, V) if
    `last`. Each block goes through `run_block`, where decode/ledger.py counts its launches.
    """
    x, delta, inv_rms = ops.embed(token, pos, packed.wte, packed.wpe), None, None
    for block, cache in zip(packed.blocks, caches, strict=True):
        x, delta, inv_rms = run_block(ops, packed, block, cache, pos, x, delta, inv_rms)
    if last:
        x, delta, inv_rms = (None if part is None else part[:, -1:] for part in (x, delta, inv_rms))
    enter = STYLES[packed.level][0]
    logits, epilogue, _, _ = enter(ops, packed.head, x, delta, inv_rms)
    return logits if epilogue is None else ops.scale(logits, epilogue)


class Decoder:
    """Decodes `batch` sequences of at most `length` tokens. ops: the launches of a step (None: what
    is best here).

    compiled: the step goes through torch.compile. tuned: with gpt-fast's options; and its kernels,
    ours as well as inductor's, begin while the one before ends where that can be
    (kernels/decode/overlap.py). graph: captured in a CUDA graph (None: where there is CUDA).
    peak_bytes: what a captured step takes beside storages(). Raises ValueError if `length` is
    beyond the model's block_size.
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
        config, device = packed.config, packed.wte.device
        if length > config.block_size:
            raise ValueError(
                f"length={length} is beyond the model's block_size={config.block_size}: "
                "make it shorter"
            )
        self.packed, self.length, self.ops = (
            packed,
            length,
            ops or best_ops(packed, batch, compiled, tuned),
        )
        shape = (batch, config.kv_heads, length, config.head_channels)
        self.caches = [
            tuple(torch.zeros(shape, dtype=packed.dtype, device=device) for _ in range(2))
            for _ in packed.blocks
        ]
        self.token = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.pos = torch.zeros(1, dtype=torch.int64, device=device)
        self.out = torch.zeros(batch, length + 1, dtype=torch.int64, device=device)
        self.logits = torch.empty(0, device=device)  # (B, 1, V) of the last step
        self._step: Callable[[], None] = self._compute
        self._function: Callable | None = None
        self.filled = self.peak_bytes = 0
        self.compiled, self.tuned = compiled, tuned
        self.graph = device.type == "cuda" if graph is None else graph

    @torch.no_grad()
    def prefill(self, idx: Tensor) -> Tensor:
        """Reads prompts idx (B, T) into the cache and takes their next token; logits (B, 1, V) of
        the last one.

        Many tokens at once are matrix products, at which the library is good, so the plain launches
        run here.
        """
        T = idx.shape[1]
        pos = torch.arange(T, device=idx.device)
        self.logits = decode_logits(decode_reference, self.packed, self.caches, idx, pos, last=True)
        self.out.zero_()
        self.out[:, :T] = idx
        self.pos.fill_(T - 1)
        decode_reference.take(*decode_reference.best(self.logits), self.token, self.pos, self.out)
        self.filled = T
        return self.logits

    def rewind(self, filled: int) -> None:
        """Back to where the first `filled` tokens were in the cache: the next step reads token
        number `filled`.
        """
        self.filled = filled
        self.pos.fill_(filled)
        self.token.copy_(self.out[:, filled : filled + 1])

    @torch.no_grad()
    def step(self) -> Tensor:
        """Decodes one token: logits (B, 1, V), and the token that is read next.

        Raises ValueError when full.
        """
        if self.filled >= self.length:
            raise ValueError(
                f"all {self.length} places of the cache are taken: make the decoder longer"
            )
        if self._step == self._compute and (self.compiled or self.graph):
            self._build()
        self._step()
        self.filled += 1
        return self.logits

    def generate(self, idx: Tensor, new_tokens: int) -> Tensor:
        """Greedy continuation (B, T + new_tokens) of idx (B, T)."""
        self.prefill(idx)
        for _ in range(new_tokens - 1):
            self.step()
        return self.out[:, : idx.shape[1] + new_tokens].clone()

    def storages(self) -> dict[int, int]:
        """{address: bytes} of the memory that a step holds: packed weights, which arms may share,
        and the cache.
        """
        packed = self.packed
        parts = [
            getattr(part, name)
            for part in (*packed.entries, *packed.exits)
            for name in ("weight", "bias")
        ]
        parts += [
            packed.wte,
            packed.wpe,
            *(packed.rope or ()),
            *(part for cache in self.caches for part in cache),
        ]
        storages = [part.untyped_storage() for part in parts if part is not None]
        return {storage.data_ptr(): storage.nbytes() for storage in storages}

    def _compute(self) -> None:
        self.logits = decode_logits(self.ops, self.packed, self.caches, self.token, self.pos)
        self.ops.take(*self.ops.best(self.logits), self.token, self.pos, self.out)

    def _build(self) -> None:
        """Compiles and captures the step at the first call.

        A capture needs a few calls before, which are undone.
        """

        def compute(token: Tensor, pos: Tensor) -> Tensor:
            logits = decode_logits(self.ops, self.packed, self.caches, token, pos)
            self.ops.take(*self.ops.best(logits), token, pos, self.out)
            return logits

        # A captured graph uses what a compiled function allocates and loads, so the function must
        # live as long.
        function = self._function = (
            compiled_alone(compute, self.tuned) if self.compiled else compute
        )
        if self.tuned and can_overlap(self.token.device):
            function = overlapped(function)
        if not self.graph:
            self._step = lambda: setattr(self, "logits", function(self.token, self.pos))
            return
        filled, stream = self.filled, torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                function(self.token, self.pos)
                self.rewind(filled)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, graph = torch.cuda.memory_allocated(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            static = function(self.token, self.pos)
        self.peak_bytes = torch.cuda.max_memory_allocated() - before

        def replay() -> None:
            graph.replay()
            self.logits = static  # a prefill since may have put its own there

        self._step = replay
        self.rewind(filled)


def can_overlap(device: torch.device) -> bool:
    """Whether kernels can be launched there before the one before has ended."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) >= (9, 0)


def overlapped(function: Callable) -> Callable:
    """`function`, each of whose kernels begins while the one before ends."""
    from kernels.decode.overlap import overlapping

    def run(*words: Tensor) -> Tensor:
        with overlapping():
            return function(*words)

    return run


def compiled_alone(function: Callable, tuned: bool = False) -> Callable:
    """torch.compile with a cache of its own. Compiled versions are kept by code object, which all
    closures of one function share: arms would search each other's at every call, and together run
    into dynamo's limit.
    """
    function.__code__ = function.__code__.replace()
    return torch.compile(
        function, fullgraph=True, dynamic=False, options=TUNED | OVERLAPPED if tuned else None
    )


def best_ops(packed: PackedGPT, batch: int, compiled: bool, tuned: bool) -> Ops:
    """The launches for this device and type: our own kernels on a GPU where there is Triton, else
    plain PyTorch.
    """
    if not packed.wte.is_cuda or packed.dtype == torch.float64:
        return decode_reference
    try:
        from kernels.decode import triton_launches as decode_triton
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        return decode_reference
    if compiled:
        return decode_triton.COMPILED_ROW if tuned and batch == 1 else decode_triton.COMPILED
    return decode_triton.FUSED
