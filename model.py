"""GPT in one file: the GPT-2 shape (learned positions, GELU) and the Llama / Qwen3 shape (rotary
positions, SwiGLU, grouped-query attention). What sits at its norm positions is the norm plan's
business (norm_plan.py).

Shapes: B batch, T tokens, C = n_embd channels, V vocabulary.
"""

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import ConfigError
from configurator import key
from kernels import scaled_activation
from kernels.cross_entropy import cross_entropy
from kernels.reference import KINDS, activate
from norm_plan import NormConfig, NormPlan
from norms import DeferredScale, Handover, Norm


@dataclass(frozen=True)
class GPTConfig(NormConfig):
    """Shape of the model; the defaults are GPT-2 124M without biases, as in nanoGPT."""

    vocab_size: int = key(
        50304, "rows of the embedding; 50257 GPT-2 tokens padded to a multiple of 64", least=0
    )
    n_vocab: int = key(
        0, "tokens that exist (0: vocab_size); padded rows beyond get no probability", least=0
    )
    block_size: int = key(1024, "longest context, tokens", least=1)
    n_layer: int = key(12, "number of blocks", least=1)
    n_head: int = key(12, "query heads", least=1)
    n_kv_head: int = key(0, "key and value heads (0: n_head); must divide n_head", least=0)
    n_embd: int = key(768, "channels of the residual stream", least=1)
    head_dim: int = key(0, "channels of a head (0: n_embd / n_head)", least=0)
    n_inner: int = key(
        0,
        "hidden channels of the MLP (0: 4 n_embd; for swiglu 8/3, up to a multiple of 64)",
        least=0,
    )
    activation: str = key("gelu", "of the MLP", KINDS)
    position: str = key(
        "learned",
        "learned positions are added to the embeddings, rope rotates queries and keys",
        ("learned", "rope"),
    )
    rope_theta: float = key(10000.0, "rope: base of the wavelengths")
    rope_scaling: tuple[float, ...] = key(
        (), "rope: Llama 3's factor,low_freq_factor,high_freq_factor,original_length"
    )
    tie_embeddings: bool = key(True, "the output head shares the embedding's weights")
    bias: bool = key(False, "biases in linears, LayerNorm and cbwc")
    attn_bias: bool | None = key(None, "biases in attention's linears (auto: as `bias`)")
    residual: str = key(
        "float32",
        "precision of the residual stream under autocast: float32, or autocast's own",
        ("float32", "autocast"),
    )
    dropout: float = key(0.0, "dropout probability, during training")
    init: str = key(
        "gpt2",
        "normal with init_std, or PyTorch's own layer defaults (unit-normal embeddings)",
        ("gpt2", "torch"),
    )
    init_std: float = key(
        0.02,
        "standard deviation; / sqrt(2 n_layer) for linears that write into the stream",
        least=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.head_dim and self.n_embd % self.n_head:
            raise ConfigError(
                f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}: change one of them"
            )
        if self.n_head % self.kv_heads:
            raise ConfigError(
                f"n_head={self.n_head} is not divisible by n_kv_head={self.n_kv_head}: change one"
            )
        if self.position == "rope" and self.head_channels % 2:
            raise ConfigError(
                f"rope rotates pairs of channels: a head has {self.head_channels}, make it even"
            )
        scaling = self.rope_scaling or (1.0, 1.0, 4.0, 1.0)
        if len(scaling) != 4 or min(scaling) <= 0 or scaling[1] >= scaling[2]:
            raise ConfigError(
                "rope_scaling wants factor,low_freq_factor,high_freq_factor,original_length, "
                "all above 0"
            )
        if self.rope_theta <= 0:
            raise ConfigError(f"rope_theta={self.rope_theta}: must be above 0")
        if 0 < self.vocab_size < self.n_vocab:
            raise ConfigError(
                f"vocab_size={self.vocab_size} is smaller than n_vocab={self.n_vocab}: raise it"
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout={self.dropout}: wants a probability below 1")

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def head_channels(self) -> int:
        return self.head_dim or self.n_embd // self.n_head

    @property
    def inner(self) -> int:
        wide = -(-8 * self.n_embd // 192) * 64 if self.activation == "swiglu" else 4 * self.n_embd
        return self.n_inner or wide


class KVCache:
    """Keys and values of every block, for at most `length` tokens: two tensors (B, n_kv_head,
    length, head_dim) each.

    `filled` tokens are valid. There is never room for more than block_size.
    """

    def __init__(self, config: GPTConfig, batch: int, length: int, like: Tensor):
        shape = (
            config.n_layer,
            2,
            batch,
            config.kv_heads,
            min(length, config.block_size),
            config.head_channels,
        )
        self.blocks = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.filled = 0

    def extend(self, block: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k, v (B, n_kv_head, T, head_dim) to a block's cache; all its valid keys and
        values.
        """
        end = self.filled + k.shape[2]
        for stored, new in zip(self.blocks[block], (k, v), strict=True):
            stored[:, :, self.filled : end] = new
        return self.blocks[block, 0, :, :, :end], self.blocks[block, 1, :, :, :end]


def rope_tables(config: GPTConfig) -> tuple[Tensor, Tensor]:
    """cos and sin (block_size, head_dim) of rotary positions, with Llama 3's frequency scaling."""
    channels = config.head_channels
    frequency = 1 / config.rope_theta ** (
        torch.arange(0, channels, 2, dtype=torch.float32) / channels
    )
    if config.rope_scaling:
        # Long wavelengths are stretched by `factor`, short ones kept, those between blended.
        factor, low, high, original = config.rope_scaling
        # how often a channel turns in the original context
        turns = original / (2 * math.pi / frequency)
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = (1 - keep) * frequency / factor + keep * frequency
    # (T, head_dim / 2)
    angle = torch.outer(torch.arange(config.block_size, dtype=torch.float32), frequency)
    # (T, head_dim): channel i turns with channel i + head_dim / 2
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on x (B, H, T, head_dim)."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return (x * cos + turned * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with grouped keys and values, QK-norm and rotary positions where the
    config has them.
    """

    def __init__(self, config: GPTConfig, plan: NormPlan, block: int):
        super().__init__()
        self.block, self.heads, self.kv_heads = block, config.n_head, config.kv_heads
        self.head_dim, self.dropout = config.head_channels, config.dropout
        bias = config.bias if config.attn_bias is None else config.attn_bias
        width = self.heads * self.head_dim
        self.qkv = nn.Linear(config.n_embd, width + 2 * self.kv_heads * self.head_dim, bias=bias)
        self.proj = plan.residual_linear(width, config.n_embd, bias)
        self.q_norm, self.k_norm = plan.qk_norm(self.head_dim), plan.qk_norm(self.head_dim)

    def forward(
        self,
        y: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        cache: KVCache | None,
        add: Tensor | None = None,
    ) -> Tensor:
        """(B, T, C) of normalised inputs y; `add`, if there is one, is added to the output."""
        B, T, _ = y.shape
        heads = (self.heads, self.kv_heads, self.kv_heads)
        # Split before the heads are moved: backward then joins the three gradients in the layout
        # that the linear reads. (B, T, H head_dim) and twice H_kv
        parts = self.qkv(y).split([n * self.head_dim for n in heads], dim=-1)
        # (B, H, T, head_dim)
        q, k, v = (part.view(B, T, -1, self.head_dim).transpose(1, 2) for part in parts)
        if self.q_norm is not None:
            q, k = self.q_norm(q)[0], self.k_norm(k)[0]
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        mask = None
        if cache is not None:
            k, v = cache.extend(self.block, k, v)
            # several new tokens on top of old ones: each sees all before it
            if cache.filled and T > 1:
                mask = torch.ones(T, k.shape[2], dtype=torch.bool, device=y.device).tril(
                    cache.filled
                )
        a = self.attend(q, k, v, mask)
        # (B, H, T, head_dim) -> (B, T, C)
        return project(self.proj, a.transpose(1, 2).reshape(B, T, -1), add)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of queries (B, H, T, head_dim) to keys and values (B, H_kv, S, head_dim): (B,
        H, T, head_dim). Causal, unless `mask` (T, S) says what may be seen.
        """
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None and q.shape[2] > 1,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=self.kv_heads != self.heads,
        )


def project(linear: nn.Linear, x: Tensor, add: Tensor | None) -> Tensor:
    """linear(x) (..., C); with `add` (..., C) their sum, part of the product (addmm), which has no
    room for a bias.
    """
    if add is None:
        return linear(x)
    assert type(linear) is nn.Linear and linear.bias is None  # another forward would be passed by
    return torch.addmm(add.flatten(0, -2), x.flatten(0, -2), linear.weight.t()).view(add.shape)


class MLP(nn.Module):
    """up -> activation -> down; swiglu computes gate and up in one product and multiplies
    silu(gate) * up.
    """

    def __init__(self, config: GPTConfig, plan: NormPlan):
        super().__init__()
        self.activation, self.kernels = config.activation, config.kernels
        self.up = nn.Linear(
            config.n_embd,
            config.inner * (2 if self.activation == "swiglu" else 1),
            bias=config.bias,
        )
        self.down = plan.residual_linear(config.inner, config.n_embd, config.bias)

    def forward(
        self, y: Tensor, deferred: DeferredScale | None = None, add: Tensor | None = None
    ) -> Tensor:
        """(B, T, C) of normalised inputs y; `add`, if there is one, is added to the output."""
        if deferred is None:
            return project(self.down, activate(self.up(y), self.activation), add)
        gain, scale = deferred  # of the norm before: W (y s g) + b = s (W diag(g)) y + b
        weight = (
            self.up.weight if gain is None else (self.up.weight * gain).to(self.up.weight.dtype)
        )
        z = F.linear(y, weight)
        return project(
            self.down, scaled_activation(z, scale, self.up.bias, self.activation, self.kernels), add
        )


class Block(nn.Module):
    """Attention and MLP, each behind an add-and-norm; `delta` is what the sublayer before still has
    to add.
    """

    def __init__(self, config: GPTConfig, plan: NormPlan, index: int):
        super().__init__()
        self.norm1, self.attn = plan.norm(2 * index), Attention(config, plan, index)
        self.norm2, self.mlp = plan.norm(2 * index + 1), MLP(config, plan)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, delta, inv_rms, rope, cache):
        y, x, inv_rms = self.norm1(x, delta, inv_rms)
        if self.norm2.folds(x) and self.adds_in_products(x):
            y, x, inv_rms = self.norm2(self.attn(y, rope, cache, x), None, inv_rms)
            gain, scale = self.norm2.deferred_scale(x, inv_rms)
            rows = y.flatten(0, -2)  # (B T, C), where inductor has a product add in backward, too
            return (
                self.mlp(rows, DeferredScale(gain, scale.flatten(0, -2)), rows).view(x.shape),
                None,
                inv_rms,
            )
        delta = self.dropout(self.attn(y, rope, cache))
        y, x, inv_rms = self.norm2(x, delta, inv_rms)
        delta = self.dropout(self.mlp(y, self.norm2.deferred_scale(x, inv_rms)))
        return x, delta, inv_rms

    def adds_in_products(self, x: Tensor) -> bool:
        """Can sublayers add to the stream x in their last products: no bias, dropout or cast of x
        in between?
        """
        device = x.device.type
        if (
            self.attn.proj.bias is not None
            or self.mlp.down.bias is not None
            or (self.training and self.dropout.p > 0)
        ):
            return False
        return not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) == x.dtype


class GPT(nn.Module):
    """model(idx) -> logits (B, T, n_vocab); model(idx, targets) -> (mean loss in nats per token,
    auxiliary loss).
    """

    def __init__(self, config: GPTConfig, seed: int = 0):
        super().__init__()
        if not config.vocab_size:
            raise ConfigError("vocab_size=0: say how many tokens there are")
        self.config = config
        self.plan = NormPlan(config, config.n_layer, config.n_embd, config.bias)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = (
            nn.Embedding(config.block_size, config.n_embd) if config.position == "learned" else None
        )
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            Block(config, self.plan, index) for index in range(config.n_layer)
        )
        self.norm_f = self.plan.norm(2 * config.n_layer)
        self.lm_head = (
            None
            if config.tie_embeddings
            else nn.Linear(config.n_embd, config.vocab_size, bias=False)
        )
        if config.position == "rope":
            for name, table in zip(("rope_cos", "rope_sin"), rope_tables(config), strict=True):
                self.register_buffer(name, table, persistent=False)
        self.meta: dict = {}  # tokenizer and vocabulary of the data it was trained on
        self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fill linears and embeddings. Each tensor has a random stream of its own, named by (seed,
        name), so that models which differ in their norms begin with identical other weights.
        """
        residual_std = self.config.init_std / math.sqrt(2 * self.config.n_layer)
        for name, module in self.named_modules():
            # a loader will fill it
            if not isinstance(module, nn.Linear | nn.Embedding) or module.weight.is_meta:
                continue
            for part, tensor in module.named_parameters():
                stream = torch.Generator(tensor.device).manual_seed(
                    zlib.crc32(f"{seed} {name}.{part}".encode())
                )
                if self.config.init == "torch" and isinstance(module, nn.Linear):
                    bound = 1 / math.sqrt(module.in_features)
                    tensor.uniform_(-bound, bound, generator=stream)
                elif part == "bias":
                    tensor.zero_()
                else:
                    std = (
                        residual_std if name.endswith((".proj", ".down")) else self.config.init_std
                    )
                    tensor.normal_(
                        0.0, 1.0 if self.config.init == "torch" else std, generator=stream
                    )

    def norms(self) -> Iterator[Norm]:
        """The 2L + 1 norms, in the order of their positions."""
        for block in self.blocks:
            yield from (block.norm1, block.norm2)
        yield self.norm_f

    def set_step(self, step: int, max_iters: int) -> list[Handover]:
        """Tell every norm which training step comes next; (from, to) pairs of parameters that
        changed roles.
        """
        return [pair for norm in self.norms() for pair in norm.set_step(step, max_iters)]

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        x = self.hidden(idx, cache)  # (B, T, C)
        if targets is None:
            return self.logits(x)
        loss = cross_entropy(x.flatten(0, 1), self.head_weight(), targets.flatten(), self.n_vocab)
        return loss, loss.new_zeros(()) + sum(norm.aux_loss() for norm in self.norms())

    @property
    def n_vocab(self) -> int:
        """Tokens that exist; rows of the embedding beyond are padding."""
        return self.config.n_vocab or self.config.vocab_size

    def head_weight(self) -> Tensor:
        """Weight (V, C) of the output head."""
        return self.wte.weight if self.lm_head is None else self.lm_head.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (..., n_vocab) of normalised hidden states (..., C)."""
        return F.linear(hidden, self.head_weight())[..., : self.n_vocab]

    def hidden(self, idx: Tensor, cache: KVCache | None = None) -> Tensor:
        """Normalised output of the last block (B, T, C) for token ids (B, T); with a cache, idx
        continues it.
        """
        start, T = cache.filled if cache is not None else 0, idx.shape[1]
        if start + T > self.config.block_size:
            raise ValueError(f"{start + T} tokens do not fit block_size={self.config.block_size}")
        x, rope = self.wte(idx), None
        if self.wpe is not None:
            x = x + self.wpe.weight[start : start + T]
        else:
            rope = self.rope_cos[start : start + T], self.rope_sin[start : start + T]
        if self.config.residual == "autocast" and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        x, delta, inv_rms = self.dropout(self.plan.embed(x)), None, None
        for block in self.blocks:
            x, delta, inv_rms = block(x, delta, inv_rms, rope, cache)
        if cache is not None:
            cache.filled += T
        return self.norm_f(x, delta, inv_rms)[0]

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
        """Continue idx (B, T) by max_new_tokens tokens: (B, T + max_new_tokens). temperature 0 is
        greedy.

        When the context is full, the later half of it is read again and generation goes on from
        there.
        """
        window, cache = idx[:, -self.config.block_size :], None
        for left in range(max_new_tokens, 0, -1):
            if window.shape[1] > self.config.block_size:
                window, cache = window[:, -max(1, self.config.block_size // 2) :], None
            if use_cache and cache is None:
                cache = KVCache(self.config, len(idx), window.shape[1] + left, self.wte.weight)
            new = window[:, cache.filled :] if cache is not None else window
            # (B, 1)
            token = sample_token(self(new, cache=cache)[:, -1], temperature, top_k, generator)
            window, idx = torch.cat([window, token], 1), torch.cat([idx, token], 1)
        return idx

    def num_params(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self) -> float:
        """Training FLOPs of a token: 6 per weight used in a matrix product, 12 L H head_dim T for
        attention (PaLM, appendix B; the causal half is not taken off).
        """
        config = self.config
        linears = (module for module in self.blocks.modules() if isinstance(module, nn.Linear))
        weights = self.head_weight().numel() + sum(linear.weight.numel() for linear in linears)
        return (
            6 * weights
            + 12 * config.n_layer * config.n_head * config.head_channels * config.block_size
        )


def sample_token(
    logits: Tensor, temperature: float, top_k: int, generator: torch.Generator | None
) -> Tensor:
    """One token (B, 1) from logits (B, V)."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = logits.float() / temperature
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -math.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)
