"""Exact packing of a GPT's weights for decoding: norms fold into the projections that read them.

A norm with statistic s, gain g and bias b, and the linear after it:

    y = s * (P x) g + b                                     (1)
    W y + c = s * W' x + c'                                 (2)
    W' = W diag(g) P,   c' = c + W b                        (3)

P is the centring over channels where the norm takes a mean, else the identity. A constant factor,
such as 1 / alpha of a shared position or the scale of a finished taper, is part of g. In (2) the
product reads x itself, and of the norm only s is left, one number a token, which is applied to the
result. This is section 4.3 of Loretz & Hochreiter 2026 for the position that shares its statistic.
The same algebra holds at the other positions.

The fusion level decides which norms fold:

    plain     none: norms stay modules, as in training
    paper     norms that share a statistic; 1 / alpha is part of their gain
    fused     also RMSNorm, whose statistic the product computes, and norms without a statistic (a
              finished taper, or no norm)
    library   as fused, but RMSNorm folds only in front of an activation, whose launch then computes
              the statistic. In front of other products of the library, which cannot compute it,
              the statistic needs a launch of its own, so the norm may as well stay: its gain,
              folded all the same, cost bfloat16 accuracy (1.065 times the error) and saved nothing.

Folding is done in float64 and rounded once, to the type of the weights. Centred linears (cbwc) are
stored centred. These norms cannot fold and stay modules: LayerNorm (its cbwc form folds), partial
and group RMSNorm, DynamicTanh, and a taper that has not finished.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kernels.reference import statistics_dtype
from model import GPT, Block, GPTConfig, Rope
from norms import CenteredLinear, Norm, center, fold_affine

# Level -> statistics of the norms that fold there (Entry.statistic).
LEVELS = {
    "plain": (),
    "paper": ("shared",),
    "library": ("own", "shared", "none"),
    "fused": ("own", "shared", "none"),
}
# Batch size from which `library` replaces `fused`. A program of `fused` computes 16 outputs and
# reads all rows of x for them. At 16 rows x is as much traffic from the L2 cache as the weight, at
# 32 rows twice as much. This is an estimate, not a measurement.
LIBRARY_FROM = 32


def level_at(level: str, batch: int, library_from: int = LIBRARY_FROM) -> str:
    """Return the level to pack for `batch` sequences, given the level of the arm."""
    if level == "fused" and batch >= library_from:
        return "library"
    return level


# ---------------------------------------------------------------------------- what a step reads


@dataclass
class Entry:
    """A projection that reads the residual stream, with the norm in front of it."""

    weight: Tensor  # (N, C), W' of (3) if the norm is folded; of a gated MLP N = 2 F, gate then up
    bias: Tensor | None  # (N,), c' of (3)
    norm: Norm | None  # None: folded
    statistic: str = ""  # of a folded norm, where s comes from: own, shared, none (s = 1)
    eps: float = 0.0  # of a folded norm with its own statistic
    kind: str = ""  # activation after the projection; empty for none


@dataclass
class Exit:
    """A projection that writes into the residual stream."""

    weight: Tensor  # (C, K)
    bias: Tensor | None  # (C,)


@dataclass
class PackedBlock:
    """The weights of one block. H heads, H_kv key and value heads, of D channels each."""

    qkv: Entry  # N = (H + 2 H_kv) D
    proj: Exit  # K = H D
    up: Entry  # N = F, or 2 F where the MLP is gated
    down: Exit  # K = F
    q_gain: Tensor | None  # (D,) of QK-norm; None: no QK-norm
    k_gain: Tensor | None  # (D,)
    rope: tuple[Tensor, Tensor] | None  # cos and sin (block_size, D), float32 or float64
    window: int  # tokens that a query sees, itself included; 0: all before it


@dataclass
class PackedGPT:
    """All tensors that a decoding step reads. Weights have the type of the model's weights."""

    config: GPTConfig
    level: str  # a key of LEVELS
    wte: Tensor  # (vocab_size, C)
    wpe: Tensor | None  # (block_size, C); None: positions are rotary
    blocks: list[PackedBlock]
    head: Entry  # the final norm and the head's n_vocab rows that exist

    @property
    def dtype(self) -> torch.dtype:
        return self.wte.dtype

    @property
    def entries(self) -> list[Entry]:
        """Those of the 2 L + 1 norm positions, in order."""
        found = []
        for block in self.blocks:
            found += [block.qkv, block.up]
        return [*found, self.head]

    @property
    def exits(self) -> list[Exit]:
        """Those of the 2 L sublayers, in order."""
        found = []
        for block in self.blocks:
            found += [block.proj, block.down]
        return found


# ------------------------------------------------------------------------------------ packing


@torch.no_grad()
def pack(model: GPT, level: str) -> PackedGPT:
    """Pack `model` for decoding at a fusion level, a key of LEVELS.

    Tensors into which nothing is folded are shared with the model.
    """
    # rows that pad the vocabulary would cost time and give no logits
    head_weight = model.head_weight().detach()[: model.n_vocab]  # (n_vocab, C)
    scale = None if model.config.embed_scale == 1 else model.token_scale()
    return PackedGPT(
        config=model.config,
        level=level,
        wte=embedding(model, model.wte.weight.detach(), scale),
        wpe=None if model.wpe is None else embedding(model, model.wpe.weight.detach()),
        blocks=[
            pack_block(block, rope, level)
            for block, rope in zip(model.blocks, rope_of_blocks(model), strict=True)
        ],
        # The final norm folds into the head as any other into the linear after it.
        head=enter(model.norm_f, head_weight, None, level),
    )


def pack_block(block: Block, rope: Rope, level: str) -> PackedBlock:
    """Pack a block: qkv and up take the norm in front of them, proj and down stay linears."""
    attn = block.attn
    mlp = block.mlp
    return PackedBlock(
        qkv=enter(block.norm1, *weights(attn.qkv), level),
        proj=Exit(*weights(attn.proj)),
        up=enter(block.norm2, *weights(mlp.up), level, mlp.activation),
        down=Exit(*weights(mlp.down)),
        q_gain=gain(attn.q_norm, attn.qkv.weight),
        k_gain=gain(attn.k_norm, attn.qkv.weight),
        rope=rope,
        window=attn.window,
    )


def embedding(model: GPT, table: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return the rows (n, C) that a table of embeddings adds to the stream.

    cbwc centres the sum of the embeddings. Centring is linear, so here each table is centred.

    Args:
        model: the model.
        table: the weights (n, C).
        scale: a factor (), or None.
    """
    if model.plan.type.embed is None and scale is None:
        return table
    # in float64, and rounded once, as all that is packed
    rows = table.double()
    if scale is not None:
        rows = rows * scale.double()
    return model.plan.embed(rows).to(table.dtype)


def rope_of_blocks(model: GPT) -> list[Rope]:
    """Return cos and sin (block_size, D) for each block, in the precision in which heads turn.

    Blocks with the same tables share them.
    """
    dtype = statistics_dtype(model.wte.weight)
    ropes = model.ropes(0, model.config.block_size)
    packed = {id(rope): rope and tuple(table.to(dtype) for table in rope) for rope in ropes}
    return [packed[id(rope)] for rope in ropes]


def weights(linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Return the effective weight (N, K) and bias (N,) of a linear: centred for a CenteredLinear.

    Column-based weight centring (CBWC, equation 7): V = W - mean of W over outputs.
    """
    weight = linear.weight.detach()
    bias = None if linear.bias is None else linear.bias.detach()
    if isinstance(linear, CenteredLinear):
        # `center` acts on the last dimension, and outputs are the first
        weight = center(weight.T.double()).T.to(weight.dtype).contiguous()
        if bias is not None:
            bias = center(bias.double()).to(bias.dtype)
    return weight, bias


def gain(norm: Norm | None, like: Tensor) -> Tensor | None:
    """Return the gain (D,) of a QK-norm: of one without a gain, ones like `like`. None for None."""
    if norm is None:
        return None
    if norm.weight is None:
        # The launches take "no gain" to mean "no QK-norm".
        return like.new_ones(norm.channels)
    return norm.weight.detach()


def enter(norm: Norm, weight: Tensor, bias: Tensor | None, level: str, kind: str = "") -> Entry:
    """Return the entry of `norm` and the linear after it, folded if `level` folds this norm.

    Args:
        norm: the norm.
        weight: (N, C) of the linear.
        bias: (N,) of the linear, or None.
        level: which statistics are folded (LEVELS).
        kind: activation after the linear, "" for none.
    """
    # s, g, b and P of (1); None for a norm that cannot fold
    form = norm.folded_form()
    can_fold = form is not None and form.statistic in LEVELS[level]
    # `not kind`: after this linear there is no activation, whose launch could compute the
    # statistic.
    if not can_fold or (level == "library" and form.statistic == "own" and not kind):
        return Entry(weight, bias, norm, kind=kind)
    # W' and c' of (3), in float64
    folded, bias = fold_affine(weight, bias, form)
    bias = None if bias is None else bias.to(weight.dtype)
    return Entry(folded.to(weight.dtype), bias, None, form.statistic, norm.eps, kind)
