"""GPT in one file.

It has the GPT-2 shape (learned positions, GELU) and the Llama / Qwen3 shape (rotary positions,
SwiGLU, grouped-query attention). The norm plan decides which norm sits where (norm_plan.py).

Shapes: B batch, T tokens, C = n_embd channels, H query heads, H_kv key and value heads,
V vocabulary.
"""

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from common.environment import machine_memory
from common.errors import ConfigError
from configurator import key
from kernels import scaled_activation
from kernels.cross_entropy import cross_entropy
from kernels.reference import ACTIVATIONS, GATED, activate
from norm_plan import NormConfig, NormPlan
from norm_types import SHARED
from norms import Handover, Norm, Place

# coupled_impl=auto folds if a batch has more than FOLD_PAYS * C tokens. Counted by bench/bytes.py
# for a compiled step, a bfloat16 stream and n_inner = 4 C (a float32 stream saves more):
#   saved: 4 C bytes for each token (3.1 kB at C = 768, its column "copied")
#   cost:  24 C^2 bytes for each step, because the gradient of the gain reads the 4 C^2 folded
#          weights (float32) and their gradient (bfloat16) once more
FOLD_PAYS = 24 / 4

# On a CPU a 16-bit run trains attention of fewer tokens than this in float32; measured
# (docs/log.md). The second number is for heads of fewer than 64 channels.
WIDE_ATTENTION = 192
WIDE_ATTENTION_NARROW = 512


class Llama3(NamedTuple):
    """The numbers of rope_scaling for llama3."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: float


class Yarn(NamedTuple):
    """The numbers of rope_scaling for yarn."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_length: float
    attention_factor: float


# rope_scaling_kind -> what the numbers of rope_scaling are
ROPE_SCALINGS = {
    "llama3": Llama3._fields,
    "linear": ("factor",),
    "yarn": Yarn._fields,
}
Rope = tuple[Tensor, Tensor] | None  # cos and sin (T, head_dim); None: positions are learned


@dataclass(frozen=True)
class GPTConfig(NormConfig):
    """Shape of the model; the defaults are GPT-2 124M without biases, as in nanoGPT."""

    # The default of vocab_size: 50257 GPT-2 tokens, padded to a multiple of 64
    vocab_size: int = key(50304, "rows of the embedding", least=0)
    n_vocab: int = key(
        0, "tokens that exist (0: all rows); rows beyond get no probability", least=0
    )
    block_size: int = key(1024, "longest context, tokens", least=1)
    n_layer: int = key(12, "number of blocks", least=1)
    n_head: int = key(12, "query heads", least=1)
    n_kv_head: int = key(0, "key and value heads (0: n_head); must divide n_head", least=0)
    n_embd: int = key(768, "channels of the residual stream", least=1)
    head_dim: int = key(0, "channels of a head (0: n_embd / n_head)", least=0)
    n_inner: int = key(
        0, "hidden channels of the MLP (0: 4 n_embd; gated 8/3, up to a multiple of 64)", least=0
    )
    activation: str = key("gelu", "of the MLP", ACTIVATIONS)
    position: str = key(
        "learned",
        "learned positions are added to the embeddings, rope rotates queries and keys",
        ("learned", "rope"),
    )
    rope_theta: float = key(10000.0, "rope: base of the wavelengths", least=2.0, most=1e15)
    rope_scaling: tuple[float, ...] = key(
        (), "rope: numbers of rope_scaling_kind, for global blocks", least=1e-6, most=1e15
    )
    rope_scaling_kind: str = key(
        "llama3",
        "; ".join(f"{kind}: {','.join(names)}" for kind, names in ROPE_SCALINGS.items()),
        tuple(ROPE_SCALINGS),
    )
    window: int = key(0, "tokens that a local block sees, itself included (0: all)", least=0)
    local_blocks: str = key(
        "", "with window: l (local) or g (global) for each block; repeats, e.g. lllg"
    )
    local_rope_theta: float = key(
        0.0,
        "rope: base in local blocks, which have no rope_scaling (0: rope_theta)",
        least=2.0,
        most=1e15,
        zero=True,
    )
    attn_scale: float = key(
        0.0, "factor of the scores (0: 1 / sqrt(head_dim))", least=1e-6, most=1e6, zero=True
    )
    embed_scale: float = key(1.0, "factor of the token embeddings", least=1e-6, most=1e6)
    tie_embeddings: bool = key(True, "the output head shares the embedding's weights")
    bias: bool = key(False, "biases in linears, LayerNorm and cbwc")
    attn_bias: bool | None = key(None, "biases in attention's linears (auto: as `bias`)")
    residual: str = key(
        "float32",
        "precision of the residual stream under autocast: float32, or autocast's own",
        ("float32", "autocast"),
    )
    recompute: bool = key(False, "compute blocks again in backward instead of keeping activations")
    dropout: float = key(0.0, "dropout probability, during training", least=0, most=0.99)
    init: str = key(
        "gpt2",
        "normal with init_std, or PyTorch's own layer defaults (unit-normal embeddings)",
        ("gpt2", "torch"),
    )
    # Linears that write into the stream have init_std / sqrt(2 n_layer).
    init_std: float | None = key(
        None,
        "standard deviation of initial weights (auto: GPT-2's 0.02; below its 768 channels "
        "0.02 (768 / n_embd)^0.75)",
        least=1e-6,
        most=100.0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        has_equal_heads = self.head_dim or self.n_embd % self.n_head == 0
        if not has_equal_heads or self.n_head % self.kv_heads:
            raise ConfigError(
                f"n_embd={self.n_embd}, n_head={self.n_head}, n_kv_head={self.n_kv_head}: each "
                "must be a multiple of the next, but n_embd with a head_dim"
            )
        if self.position == "rope" and self.head_channels % 2:
            raise ConfigError(
                f"position=rope turns pairs of channels, and a head has {self.head_channels}: "
                "change head_dim, or n_embd and n_head"
            )
        names = ROPE_SCALINGS[self.rope_scaling_kind]
        is_default = not self.rope_scaling and self.rope_scaling_kind == "llama3"
        if len(self.rope_scaling) != len(names) and not is_default:
            raise ConfigError(
                f"rope_scaling={self.rope_scaling}: {self.rope_scaling_kind} needs "
                f"{','.join(names)}"
            )
        # A window without local blocks, and local blocks without a window, would do nothing.
        has_local = "l" in self.local_blocks and set(self.local_blocks) <= set("lg")
        lacks_blocks = self.window and not has_local
        lacks_window = not self.window and (self.local_blocks or self.local_rope_theta)
        if lacks_blocks or lacks_window:
            raise ConfigError(
                f"window={self.window}, local_blocks={self.local_blocks!r}, local_rope_theta="
                f"{self.local_rope_theta}: a window needs letters l (local) and g (global), e.g. "
                "lllg, and the other two need a window"
            )
        if 0 < self.vocab_size < self.n_vocab:
            raise ConfigError(
                f"vocab_size={self.vocab_size} is smaller than n_vocab={self.n_vocab}: raise it"
            )
        if self.init == "torch" and self.recipe.init_factors(self.n_layer):
            # They are relative to init_std and its 1 / sqrt(2 n_layer), which torch does not have.
            raise ConfigError(
                f"init=torch does not fit the initial factors of norm_type={self.norm_type}: "
                "use init=gpt2, or norm_recipe=common"
            )

    def window_of(self, block: int) -> int:
        """Return how many tokens a query of a block sees, itself included; 0: all before it."""
        is_local = self.window and self.local_blocks[block % len(self.local_blocks)] == "l"
        return self.window if is_local else 0

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def head_channels(self) -> int:
        return self.head_dim or self.n_embd // self.n_head

    @property
    def initial_std(self) -> float:
        """Standard deviation of initial weights. The rule was tested at 64 to 384 channels."""
        if self.init_std is None:
            return 0.02 * max(1.0, 768 / self.n_embd) ** 0.75
        return self.init_std

    @property
    def n_weights(self) -> int:
        """Numbers in linears and embeddings, without biases and norms."""
        heads = (2 * self.n_head + 2 * self.kv_heads) * self.head_channels  # q and proj, k, v
        mlp = (3 if self.activation in GATED else 2) * self.inner
        rows = self.vocab_size if self.tie_embeddings else 2 * self.vocab_size
        if self.position == "learned":
            rows += self.block_size
        return self.n_embd * (rows + self.n_layer * (heads + mlp))

    @property
    def inner(self) -> int:
        """Hidden channels of the MLP."""
        gated = -(-8 * self.n_embd // 192) * 64  # 8/3 n_embd, up to a multiple of 64
        return self.n_inner or (gated if self.activation in GATED else 4 * self.n_embd)


def check_memory(config: GPTConfig, bytes_per_weight: int = 4) -> None:
    """Raise ConfigError for a model that the memory of this machine cannot hold.

    Weights are drawn in float32 on the CPU, wherever they are trained; those that are read from
    files may be in 16 bits.
    """
    tables = 2 * config.block_size * config.head_channels if config.position == "rope" else 0
    needed = bytes_per_weight * config.n_weights + 4 * tables
    if needed > machine_memory():
        raise ConfigError(
            f"a model of {config.n_weights:,} weights and block_size={config.block_size} takes "
            f"{needed / 1e9:,.0f} GB, and this machine has {machine_memory() / 1e9:,.0f} GB of "
            "memory: lower n_layer, n_embd, n_inner, head_dim, vocab_size or block_size"
        )


class KVCache:
    """Keys and values of every block, (B, H_kv, length, head_dim) each, for generation.

    `filled` tokens are valid. There is never room for more than block_size tokens.
    """

    def __init__(self, config: GPTConfig, batch: int, length: int, like: Tensor):
        length = min(length, config.block_size)
        shape = (config.n_layer, 2, batch, config.kv_heads, length, config.head_channels)
        # Not like.new_zeros: under FSDP `like` is sharded, and the cache is not.
        self.blocks = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.filled = 0

    def extend(self, block: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k, v (B, H_kv, T, head_dim) to a block's cache; return all its valid ones."""
        end = self.filled + k.shape[2]
        keys, values = self.blocks[block]  # (B, H_kv, length, head_dim)
        keys[:, :, self.filled : end] = k
        values[:, :, self.filled : end] = v
        return keys[:, :, :end], values[:, :, :end]


def rope_frequency(config: GPTConfig, local: bool) -> Tensor:
    """Return by how many radians each pair of channels turns from token to token (head_dim / 2,).

    `local` blocks keep their frequencies, global ones scale them by rope_scaling.
    """
    channels = config.head_channels
    exponent = torch.arange(0, channels, 2, dtype=torch.float32) / channels
    theta = config.rope_theta
    if local and config.local_rope_theta:
        theta = config.local_rope_theta
    frequency = 1 / theta**exponent  # (head_dim / 2,)
    if local or not config.rope_scaling:
        return frequency
    if config.rope_scaling_kind == "linear":
        # Position interpolation (Chen et al. 2023): as if tokens were `factor` times as close.
        (factor,) = config.rope_scaling
        return frequency / factor
    if config.rope_scaling_kind == "llama3":
        # Long wavelengths are stretched by `factor`, short ones are kept, and those between are a
        # mixture of both.
        llama = Llama3(*config.rope_scaling)
        low, high = llama.low_freq_factor, llama.high_freq_factor
        turns = llama.original_length / (2 * math.pi / frequency)  # within the original context
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - keep) * frequency / llama.factor + keep * frequency

    # YaRN (Peng et al. 2023, section 3.2): the same three ranges. Pairs of more than beta_fast
    # turns are kept, those of less than beta_slow stretched. As in the authors' code, the mixture
    # between is linear in the number of the pair.
    yarn = Yarn(*config.rope_scaling)

    def pair_of(turns: float) -> float:
        """Return the pair that makes so many turns within the original context."""
        context = yarn.original_length / (turns * 2 * math.pi)
        return channels * math.log(context) / (2 * math.log(theta))

    # Rounded outwards, as there and in transformers.
    first = max(math.floor(pair_of(yarn.beta_fast)), 0)
    last = min(math.ceil(pair_of(yarn.beta_slow)), channels - 1)
    last = max(last, first + 0.001)  # no division by zero below
    number = torch.arange(channels // 2, dtype=torch.float32)
    keep = 1 - ((number - first) / (last - first)).clamp(0, 1)
    return 1 / (yarn.factor * theta**exponent) * (1 - keep) + frequency * keep


def rope_tables(config: GPTConfig, local: bool = False) -> tuple[Tensor, Tensor]:
    """Return cos and sin (block_size, head_dim) of rotary positions (Su et al. 2021).

    `local` is as in rope_frequency.
    """
    position = torch.arange(config.block_size, dtype=torch.float32)
    angle = torch.outer(position, rope_frequency(config, local))  # (T, head_dim / 2)
    # Channel i turns together with channel i + head_dim / 2, as in Hugging Face's checkpoints.
    angle = torch.cat([angle, angle], -1)  # (T, head_dim)
    # YaRN's temperature (section 3.4). On queries and keys alike, so scores get its square.
    is_yarn = config.rope_scaling_kind == "yarn" and not local
    temperature = Yarn(*config.rope_scaling).attention_factor if is_yarn else 1.0
    return angle.cos() * temperature, angle.sin() * temperature


def rope_buffers(config: GPTConfig) -> dict[str, Tensor]:
    """Return the tables of the model by the names of their buffers.

    Local blocks have a pair of their own. Empty with learned positions.
    """
    if config.position != "rope":
        return {}
    buffers = {}
    prefixes = ["rope"]
    if config.window:
        prefixes.append("local_rope")
    for prefix in prefixes:
        tables = rope_tables(config, local=prefix == "local_rope")
        buffers[f"{prefix}_cos"], buffers[f"{prefix}_sin"] = tables
    return buffers


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of channels of x (B, H, T, head_dim) by the angles of cos, sin (T, head_dim)."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)  # each pair turned by 90 degrees
    return (x * cos + turned * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention. Options: QK-norm, rotary positions, grouped keys, a window."""

    def __init__(self, config: GPTConfig, plan: NormPlan, block: int):
        super().__init__()
        self.block = block  # its index, for the cache
        self.heads = config.n_head
        self.kv_heads = config.kv_heads
        self.head_dim = config.head_channels
        self.dropout = config.dropout
        self.window = config.window_of(block)  # tokens that a query sees; 0: all
        self.scale = config.attn_scale or None  # None: 1 / sqrt(head_dim)
        bias = config.bias if config.attn_bias is None else config.attn_bias
        # of queries, keys and values: one matmul makes all, for they read the same y
        self.widths = [n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        self.qkv = nn.Linear(config.n_embd, sum(self.widths), bias=bias)
        self.proj = plan.type.residual_linear(self.widths[0], config.n_embd, bias=bias)
        # None without qk_norm and v_norm
        self.q_norm, self.k_norm, self.v_norm = plan.attention_norms(self.widths, self.head_dim)
        self.norms_full_width = config.qk_kind == "full"  # all heads together, not each

    def forward(self, y: Tensor, rope: Rope = None, cache: KVCache | None = None) -> Tensor:
        """Return what attention adds to the residual stream (B, T, C), for normalised y (B, T, C).

        `rope` has cos and sin (T, head_dim) of the positions. Keys and values are appended to the
        `cache` of the tokens before.
        """
        return self.proj(self.mix(y, rope, cache))

    def mix(self, y: Tensor, rope: Rope, cache: KVCache | None) -> Tensor:
        """Return the heads' outputs side by side (B, T, n_head head_dim), before the projection."""
        B, T, _ = y.shape
        # Split before the heads are moved: in backward the three gradients are then joined in the
        # layout that the linear reads.
        q, k, v = self.qkv(y).split(self.widths, dim=-1)
        q = self.split_heads(q, self.q_norm)  # (B, H, T, head_dim)
        k = self.split_heads(k, self.k_norm)  # (B, H_kv, T, head_dim)
        v = self.split_heads(v, self.v_norm)
        if rope is not None:
            q = rotate(q, *rope)
            k = rotate(k, *rope)
        if cache is not None:
            k, v = cache.extend(self.block, k, v)  # (B, H_kv, S, head_dim), S tokens so far
            if self.window:
                # The first of the T queries sees no key before these.
                reach = T + self.window - 1
                k = k[:, :, -reach:]
                v = v[:, :, -reach:]
        a = self.attend(q, k, v, self.mask(T, k.shape[2], y.device))  # (B, H, T, head_dim)
        return a.transpose(1, 2).reshape(B, T, -1)  # (B, T, H head_dim)

    def split_heads(self, x: Tensor, norm: Norm | None) -> Tensor:
        """Return x (B, T, heads head_dim) as (B, heads, T, head_dim), normalised if `norm` is."""
        # A norm returns (y, statistic); here only y is of use.
        if norm is not None and self.norms_full_width:
            x, _ = norm(x)
        x = x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        if norm is not None and not self.norms_full_width:
            x, _ = norm(x)
        return x

    def mask(self, T: int, S: int, device: torch.device) -> Tensor | None:
        """Return which of S keys each of the last T of them may see (T, S).

        None where causal attention needs no mask: without old tokens, or for a single new one.
        """
        old = S - T
        is_cut = 0 < self.window < S
        if T == 1 or not (old or is_cut):
            return None
        mask = torch.ones(T, S, dtype=torch.bool, device=device)
        mask = mask.tril(old)  # each new token sees the old ones, and the new ones up to itself
        return mask.triu(old - self.window + 1) if is_cut else mask

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Return softmax(scale q k^T) v (B, H, T, head_dim), q likewise.

        k and v are (B, H_kv, S, head_dim); each serves H / H_kv query heads. `mask` (T, S) is what
        a query may see; None: causal attention.
        """
        # Flash attention. PyTorch's plain formula was faster in eager mode on a CPU (48 against
        # 61 ms a layer at T = 256), but 1.5 times as slow when compiled at T = 1024, and it keeps
        # tensors (B, H, T, T).
        if attends_wider(q):
            with torch.autocast(q.device.type, enabled=False):
                return self.attend(q.float(), k.float(), v.float(), mask).to(q.dtype)
        is_grouped = self.kv_heads != self.heads
        if is_grouped and mask is not None:
            # On CUDA no kernel but the plain formula, which stores all scores, takes grouped heads
            # and a mask together. So each key and value is copied for its query heads.
            k, v = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (k, v))
            is_grouped = False
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None and q.shape[2] > 1,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.scale,
            enable_gqa=is_grouped,
        )


def attends_wider(q: Tensor) -> bool:
    """Is attention of q (B, H, T, head_dim) faster in float32 than in 16 bits?

    In training on a CPU: its backward multiplies small tiles, and a 16-bit product costs some 15 us
    more to start.
    """
    limit = WIDE_ATTENTION if q.shape[3] >= 64 else WIDE_ATTENTION_NARROW
    is_low = q.device.type == "cpu" and q.dtype.itemsize == 2
    return torch.is_grad_enabled() and is_low and q.shape[2] < limit


class MLP(nn.Module):
    """down(activation(up(y))); for swiglu and geglu, `up` gives gate and up side by side."""

    def __init__(self, config: GPTConfig, plan: NormPlan):
        super().__init__()
        self.activation = config.activation
        self.kernels = config.kernels  # read by FoldedBlock
        width = 2 * config.inner if self.activation in GATED else config.inner
        self.up = nn.Linear(config.n_embd, width, bias=config.bias)
        self.down = plan.type.residual_linear(config.inner, config.n_embd, bias=config.bias)

    def forward(self, y: Tensor) -> Tensor:
        """Return what the MLP adds to the residual stream (B, T, C), for normalised y (B, T, C)."""
        return self.down(activate(self.up(y), self.activation))


class Block(nn.Module):
    """Attention and MLP, each after a norm that adds and normalises.

    The norms add: `delta` is the output of the last sublayer, and the next norm adds it to x.
    """

    def __init__(self, config: GPTConfig, plan: NormPlan, index: int, norms: Sequence[Place]):
        super().__init__()
        self.norm1, norm2 = norms
        self.attn = Attention(config, plan, index)
        self.norm2 = norm2  # after attn, so that parameters are in the order of older models
        self.mlp = MLP(config, plan)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        inv_rms: Tensor | None,
        rope: Rope,
        cache: KVCache | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return (x, delta, inv_rms) for the next block.

        x is the residual stream (B, T, C), delta the output of the last sublayer (B, T, C), not
        added to x yet, None at the start; inv_rms (B, T, 1) the statistic that the last norm handed
        on, or None. rope and cache are as in Attention.forward.
        """
        y, x, inv_rms = self.norm1(x, delta, inv_rms)  # x has its delta now; y is x normalised
        delta = self.dropout(self.attn(y, rope, cache))
        y, x, inv_rms = self.norm2(x, delta, inv_rms)
        delta = self.dropout(self.mlp(y))
        return x, delta, inv_rms


class FoldedBlock(Block):
    """A coupled block that applies norm2's scale after the MLP's first matmul, not before it.

    norm2 has a statistic that was computed before it. So its scale s of a token is known before the
    matmul, and it is a constant in backward. Section 4.3 of Loretz & Hochreiter 2026, here in
    training:

        W (x s gain) + b = s (W diag(gain)) x + b

    So nothing but the residual add is left between attention and MLP. Without biases and dropout
    the adds become part of the matmuls before them (addmm).

    coupled_impl is "fold", or "auto", which folds where that moves fewer bytes: compiled and with
    many tokens. (In eager mode the folded weight is written to memory, and nothing is fused.)
    """

    def __init__(self, config: GPTConfig, plan: NormPlan, index: int, norms: Sequence[Place]):
        super().__init__(config, plan, index, norms)
        self.impl = config.coupled_impl

    def forward(self, x, delta, inv_rms, rope, cache):
        if not self.folds(x):
            return super().forward(x, delta, inv_rms, rope, cache)
        y, x, inv_rms = self.norm1(x, delta, inv_rms)
        if self.adds_in_products(x):
            # As plain adds, inductor would make one of the two an addmm and compute the stream of
            # norm1 again in backward: 17.7 kB per token and block instead of 14.7.
            x = add_matmul(x, self.attn.mix(y, rope, cache), self.attn.proj)
            # Computes nothing, but is called so that forward hooks see this position (stream.py).
            _, x, inv_rms = self.norm2(x, None, inv_rms, defer=True)
            # In three dimensions the two gradients of the stream would meet in a kernel of their
            # own. For rows, inductor adds them within a matmul.
            rows = x.flatten(0, -2)  # (B T, C)
            scale = self.norm2.norm.scale(inv_rms).flatten(0, -2)  # (B T, 1)
            inner = self.scaled_inner(rows, scale)  # (B T, inner)
            x = add_matmul(rows, inner, self.mlp.down).view(x.shape)  # (B, T, C)
            return x, None, inv_rms  # nothing is left for the next norm to add
        delta = self.dropout(self.attn(y, rope, cache))
        _, x, inv_rms = self.norm2(x, delta, inv_rms, defer=True)
        inner = self.scaled_inner(x, self.norm2.norm.scale(inv_rms))  # (B, T, inner)
        delta = self.dropout(self.mlp.down(inner))
        return x, delta, inv_rms

    def folds(self, x: Tensor) -> bool:
        """Is the scale of a residual stream x (B, T, C) applied after the matmul?"""
        if self.impl == "fold":
            return True
        return torch.compiler.is_compiling() and x.numel() > FOLD_PAYS * x.shape[-1] ** 2

    def adds_in_products(self, x: Tensor) -> bool:
        """Can the sublayers add to x in their last matmul: no bias, dropout or cast between?"""
        has_bias = self.attn.proj.bias is not None or self.mlp.down.bias is not None
        drops = self.training and self.dropout.p > 0
        device = x.device.type
        casts = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != x.dtype
        return not (has_bias or drops or casts)

    def scaled_inner(self, x: Tensor, scale: Tensor) -> Tensor:
        """Return activation(scale (W diag(gain)) x + b), what `mlp.down` reads.

        x is the residual stream (..., C), not normalised; scale has a number a token (..., 1).
        """
        up = self.mlp.up
        gain = self.norm2.norm.gain
        weight = up.weight if gain is None else (up.weight * gain).to(up.weight.dtype)
        z = F.linear(x, weight)  # (..., inner)
        return scaled_activation(z, scale, up.bias, self.mlp.activation, self.mlp.kernels)


def add_matmul(x: Tensor, y: Tensor, linear: nn.Linear) -> Tensor:
    """Return x + linear(y) (..., C) as one matmul (addmm), which has no room for a bias.

    On CUDA, ATen copies x into the result first. So counted, a folded block moves 23.9 kB per token
    instead of 14.7 (results/cpu/bytes).
    """
    assert type(linear) is nn.Linear and linear.bias is None  # a subclass has its own forward
    total = torch.addmm(x.flatten(0, -2), y.flatten(0, -2), linear.weight.t())
    return total.view(x.shape)


def make_block(config: GPTConfig, plan: NormPlan, index: int, norms: Sequence[Place]) -> Block:
    """Return block `index` of its two places: a FoldedBlock if coupled_impl may fold norm2, an s.

    norm1 is never folded, even where it is s too (coupled_span > 1).
    """
    if plan.letters[2 * index + 1] == SHARED and config.coupled_impl != "scale":
        return FoldedBlock(config, plan, index, norms)
    return Block(config, plan, index, norms)


class GPT(nn.Module):
    """A GPT of any norm plan.

    model(idx) returns logits (B, T, n_vocab). model(idx, targets) returns (mean loss in nats per
    token, auxiliary loss of the norms).
    """

    def __init__(self, config: GPTConfig, seed: int = 0):
        super().__init__()
        if torch.get_default_device().type == "cpu":  # on meta a model takes no memory
            check_memory(config)
        self.config = config
        self.plan = NormPlan(config, config.n_layer, config.n_embd, config.bias)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)  # tokens
        self.wpe = None  # positions, where they are learned
        if config.position == "learned":
            self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.norm_e = self.plan.embedding_norm()  # of the embeddings; None in most plans
        self.dropout = nn.Dropout(config.dropout)
        places = self.plan.places()
        self.blocks = nn.ModuleList(
            make_block(config, self.plan, index, places[2 * index : 2 * index + 2])
            for index in range(config.n_layer)
        )
        self.norm_f = places[-1]
        self.lm_head = None  # None: the head shares the weight of wte
        if not config.tie_embeddings:
            self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        for name, table in rope_buffers(config).items():
            # Not saved: they follow from the config.
            self.register_buffer(name, table, persistent=False)
        self.recompute = config.recompute
        self.meta: dict = {}  # tokenizer and vocabulary of the data that it was trained on
        self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fill linears and embeddings.

        Each tensor has its own random stream, named by (seed, tensor's name). So models that differ
        in their norms begin with the same draws elsewhere; a recipe multiplies them.
        """
        config = self.config
        residual_std = config.initial_std / math.sqrt(2 * config.n_layer)
        for name, module in self.named_modules():
            # A loader will fill what is on meta.
            if not isinstance(module, nn.Linear | nn.Embedding) or module.weight.is_meta:
                continue
            is_uniform = config.init == "torch" and isinstance(module, nn.Linear)
            for part, tensor in module.named_parameters():
                stream = named_stream(seed, f"{name}.{part}", tensor.device)
                if name.endswith(".gate_up"):
                    tensor.zero_()  # GatedNorm: all gates are sigmoid(0)
                elif is_uniform:
                    bound = 1 / math.sqrt(module.in_features)
                    tensor.uniform_(-bound, bound, generator=stream)
                elif part == "bias":
                    tensor.zero_()
                else:
                    writes = name.endswith((".proj", ".down"))  # into the residual stream
                    std = residual_std if writes else config.initial_std
                    tensor.normal_(0.0, 1.0 if config.init == "torch" else std, generator=stream)
            self.apply_init_factors(name, module.weight)
        self.pair_gains(seed)

    def pair_gains(self, seed: int) -> None:
        """Move the gains of each block by -a s before attention and by a s before the MLP.

        a is paired_gains, s (C,) random signs, as many of either kind (modded-nanogpt #300).
        """
        size = self.config.paired_gains
        if not size or self.wte.weight.is_meta:
            return
        for index, block in enumerate(self.blocks):
            if block.norm1.core.weight is None or block.norm2.core.weight is None:
                raise ConfigError(
                    f"paired_gains needs norms with gains, and those of block {index} have none: "
                    "leave it out"
                )
            stream = named_stream(seed, f"blocks.{index}.signs", "cpu")
            order = torch.randperm(self.config.n_embd, generator=stream)
            move = size * (2 * (order % 2) - 1).to(self.wte.weight.device)  # (C,)
            block.norm1.core.weight -= move
            block.norm2.core.weight += move

    def apply_init_factors(self, name: str, weight: Tensor) -> None:
        """Multiply the initial weight (out, in) of module `name` as the norm type's recipe says.

        The draw stays the same, so that models differ in nothing but these factors.
        """
        factors = self.config.recipe.init_factors(self.config.n_layer)
        part = ".".join(name.split(".")[2:])  # without "blocks.N."
        weight *= factors.get(part, 1.0)
        if part == "attn.qkv":
            values = self.config.kv_heads * self.config.head_channels  # rows
            weight[:-values] *= factors.get("attn.qk", 1.0)
            weight[-values:] *= factors.get("attn.v", 1.0)

    def places(self) -> Iterator[Place]:
        """Yield the 2L + 1 places of the plan, in its order."""
        for block in self.blocks:
            yield block.norm1
            yield block.norm2
        yield self.norm_f

    def hidden_matrices(self) -> dict[nn.Parameter, list[int]]:
        """Return the weight of each linear in blocks and norms, and the rows of each matrix in it.

        One weight holds q, k and v, and in a gated MLP another one gate and up.
        """
        linears = [part for part in self.modules() if isinstance(part, nn.Linear)]
        rows = {part.weight: [part.out_features] for part in linears if part is not self.lm_head}
        parts = 2 if self.config.activation in GATED else 1
        for block in self.blocks:
            rows[block.attn.qkv.weight] = block.attn.widths
            rows[block.mlp.up.weight] = [block.mlp.up.out_features // parts] * parts
        return rows

    def set_step(self, step: int, max_iters: int) -> list[Handover]:
        """Prepare every norm for training step `step`; return the parameters that changed roles."""
        interval = min(1000, max(1, max_iters // 50))  # as in BHyT's code
        if (step - 1) % interval == 0:
            for block in self.blocks:
                block.norm1.norm.expect(block.attn, self.config.block_size)
        places = list(self.places())
        if self.norm_e is not None:
            places.insert(0, self.norm_e)
        handovers = []
        for place in places:
            handovers += place.set_step(step, max_iters)
        return handovers

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits (B, T, n_vocab) of token ids idx (B, T); with targets (B, T), the losses.

        Targets of -1 do not count. With a cache, idx continues the tokens that are in it.
        """
        x = self.hidden(idx, cache)  # (B, T, C)
        if targets is None:
            return self.logits(x)
        # From hidden states and the head's weight, chunk by chunk, because all logits at once,
        # (B T, V), would need much memory (kernels/cross_entropy.py).
        loss = cross_entropy(x.flatten(0, 1), self.head_weight(), targets.flatten(), self.n_vocab)
        aux_loss = loss.new_zeros(()) + sum(place.aux_loss() for place in self.places())
        return loss, aux_loss

    def hidden(self, idx: Tensor, cache: KVCache | None = None) -> Tensor:
        """Return the normalised output of the last block (B, T, C) for token ids (B, T)."""
        T = idx.shape[1]
        start = 0 if cache is None else cache.filled
        if start + T > self.config.block_size:
            raise ValueError(f"{start + T} tokens do not fit block_size={self.config.block_size}")
        x = self.wte(idx)  # (B, T, C)
        if self.config.embed_scale != 1:
            x = x * self.token_scale()
        if self.wpe is not None:
            x = x + self.wpe.weight[start : start + T]  # (T, C)
        device = x.device.type
        if self.config.residual == "autocast" and torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        x = self.plan.embed(x)
        if self.norm_e is not None:
            x, _, _ = self.norm_e(x)
        x = self.dropout(x)
        # Between blocks: the stream, what the next norm has to add to it, and the shared statistic.
        delta, inv_rms = None, None
        for block, rope in zip(self.blocks, self.ropes(start, start + T), strict=True):
            parts = x, delta, inv_rms, rope, cache
            if self.recompute:  # without gradients this is a plain call
                x, delta, inv_rms = checkpoint(block, *parts, use_reentrant=False)
            else:
                x, delta, inv_rms = block(*parts)
        if cache is not None:
            cache.filled += T
        y, _, _ = self.norm_f(x, delta, inv_rms)
        return y

    def token_scale(self) -> Tensor:
        """Return config.embed_scale as a tensor () of the embedding's type.

        Rounded to that type before it multiplies, as Gemma's is: 55.4256 is 55.5 in bfloat16.
        """
        return self.wte.weight.new_full((), self.config.embed_scale)

    def ropes(self, start: int, end: int) -> list[Rope]:
        """Return cos and sin (T, head_dim) of positions start to end - 1, for each block."""
        if self.wpe is not None:
            return [None] * len(self.blocks)
        rope = (self.rope_cos[start:end], self.rope_sin[start:end])
        if not self.config.window:
            return [rope] * len(self.blocks)
        local = (self.local_rope_cos[start:end], self.local_rope_sin[start:end])
        return [local if block.attn.window else rope for block in self.blocks]

    @property
    def n_vocab(self) -> int:
        """Tokens that exist; later rows of the embedding are padding."""
        return self.config.n_vocab or self.config.vocab_size

    def head_weight(self) -> Tensor:
        """Return the weight (V, C) of the output head."""
        return self.wte.weight if self.lm_head is None else self.lm_head.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (..., n_vocab) of normalised hidden states (..., C)."""
        return F.linear(hidden, self.head_weight())[..., : self.n_vocab]

    @torch.no_grad()
    def generate(
        self,
        idx: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int = 0,
        generator: torch.Generator | None = None,
        use_cache: bool = True,
    ) -> Tensor:
        """Continue token ids idx (B, T): return (B, T + max_new_tokens).

        Logits are divided by `temperature` (0: the most likely token is taken), and `top_k` tokens
        are in the draw (0: all). When the context is full, its later half is read again, and
        generation goes on from there. `use_cache` keeps keys and values of earlier tokens.
        """
        block_size = self.config.block_size
        window = idx[:, -block_size:]
        cache = None
        for left in range(max_new_tokens, 0, -1):
            if window.shape[1] > block_size:
                window = window[:, -max(1, block_size // 2) :]
                cache = None
            if use_cache and cache is None:
                cache = KVCache(self.config, len(idx), window.shape[1] + left, self.wte.weight)
            new = window if cache is None else window[:, cache.filled :]  # not in the cache yet
            logits = self(new, cache=cache)[:, -1]  # (B, n_vocab)
            token = sample_token(logits, temperature, top_k, generator)  # (B, 1)
            window = torch.cat([window, token], 1)
            idx = torch.cat([idx, token], 1)
        return idx

    def num_params(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self) -> float:
        """Return the training FLOPs of a token.

        6 for each weight of a matrix product, 12 H head_dim T for the attention of a block (PaLM,
        appendix B; the causal half is not subtracted), T at most the window in a local block.
        """
        config = self.config
        linears = [module for module in self.blocks.modules() if isinstance(module, nn.Linear)]
        weights = self.head_weight().numel() + sum(linear.weight.numel() for linear in linears)
        T = config.block_size
        seen = sum(min(config.window_of(i) or T, T) for i in range(config.n_layer))
        return 6 * weights + 12 * config.n_head * config.head_channels * seen


def named_stream(seed: int, name: str, device: torch.device | str) -> torch.Generator:
    """Return the random stream of (seed, name)."""
    stream = torch.Generator(device)
    return stream.manual_seed(zlib.crc32(f"{seed} {name}".encode()))


def sample_token(
    logits: Tensor, temperature: float, top_k: int, generator: torch.Generator | None
) -> Tensor:
    """Draw one token (B, 1) from logits (B, V)."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = logits.float() / temperature
    if 0 < top_k < logits.shape[-1]:
        lowest = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < lowest, -math.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)
