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
stored centred, and a learned scale of the embeddings is part of their tables. These norms cannot
fold and stay modules, a launch each: LayerNorm (its cbwc form folds), partial and group RMSNorm,
DynamicTanh, DynamicErf and BoundedTanh (tanh stands between norm and linear: only its gain would
fold, which saves no launch), SeeDNorm (its gain depends on the token), a taper that has not
finished, and the norm of the embeddings. GatedNorm, whose gate reads what its gain gave, is five
launches.

At some positions the stream is not x + delta, and the product before may not add:

    output norm   h = x + output(delta). The statistic of delta needs all of it, so output norm and
                  sum are a launch of their own, which has all of h at hand: it applies the input
                  norm too. Folded, that norm would save nothing.
    P and B       y = norm(residual_weight * x + delta) is the next stream, so the norm has to be
                  computed, and it adds on its way in.

The norms of queries, keys and values belong to the launch that makes heads.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kernels.reference import statistics_dtype
from model import GPT, Block, GPTConfig, Rope
from norms import CenteredLinear, Norm, Place, center, fold_affine

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
    norm: Place | None  # None: folded
    statistic: str = ""  # of a folded norm, where s comes from: own, shared, none (s = 1)
    eps: float = 0.0  # of a folded norm with its own statistic
    kind: str = ""  # activation after the projection; empty for none


@dataclass
class Exit:
    """A projection that writes into the residual stream."""

    weight: Tensor  # (C, K)
    bias: Tensor | None  # (C,)
    adds: bool  # is the sum x + delta? Else the next norm makes the stream of both.


@dataclass
class PackedBlock:
    """The weights of one block. H heads, H_kv key and value heads, of D channels each."""

    qkv: Entry  # N = (H + 2 H_kv) D
    proj: Exit  # K = H D
    up: Entry  # N = F, or 2 F where the MLP is gated
    down: Exit  # K = F
    # of the norms of queries, keys and values: (D,) over each head, (H D,) or (H_kv D,) over all;
    # None: no norm
    q_gain: Tensor | None
    k_gain: Tensor | None
    v_gain: Tensor | None
    rope: tuple[Tensor, Tensor] | None  # cos and sin (block_size, D), float32 or float64
    window: int  # tokens that a query sees, itself included; 0: all before it


@dataclass
class PackedGPT:
    """All tensors that a decoding step reads. Weights have the type of the model's weights."""

    config: GPTConfig
    level: str  # a key of LEVELS
    wte: Tensor  # (vocab_size, C)
    wpe: Tensor | None  # (block_size, C); None: positions are rotary
    norm_e: Place | None  # of the embeddings; None: there is none, or it is part of wte and wpe
    blocks: list[PackedBlock]
    head: Entry  # the final norm and the head's n_vocab rows that exist

    @property
    def dtype(self) -> torch.dtype:
        return self.wte.dtype

    @property
    def entries(self) -> list[Entry]:
        """Those of the 2 L + 1 norm positions, in order."""
        of_blocks = [entry for block in self.blocks for entry in (block.qkv, block.up)]
        return [*of_blocks, self.head]

    @property
    def exits(self) -> list[Exit]:
        """Those of the 2 L sublayers, in order."""
        return [part for block in self.blocks for part in (block.proj, block.down)]


# ------------------------------------------------------------------------------------ packing


@torch.no_grad()
def pack(model: GPT, level: str) -> PackedGPT:
    """Pack `model` for decoding at a fusion level, a key of LEVELS.

    Tensors into which nothing is folded are shared with the model.
    """
    # rows that pad the vocabulary would cost time and give no logits
    head_weight = model.head_weight().detach()[: model.n_vocab]  # (n_vocab, C)
    scale = None if model.config.embed_scale == 1 else model.token_scale()
    norm_e = model.norm_e
    learned = None
    form = None if norm_e is None else norm_e.folded_form()
    if form is not None and form.statistic == "none":  # no more than a factor (LearnedScale)
        learned = form.gain
        norm_e = None
    # The norm that adds what a block's MLP gives is in the next block, or the final one.
    following = [*(block.norm1 for block in model.blocks[1:]), model.norm_f]
    parts = zip(model.blocks, following, rope_of_blocks(model), strict=True)
    return PackedGPT(
        config=model.config,
        level=level,
        wte=embedding(model, model.wte.weight.detach(), scale, learned),
        wpe=None if model.wpe is None else embedding(model, model.wpe.weight.detach(), learned),
        norm_e=None if norm_e is None else with_plain_gains(norm_e),
        blocks=[pack_block(block, norm, rope, level) for block, norm, rope in parts],
        # The final norm folds into the head as any other into the linear after it.
        head=enter(model.norm_f, head_weight, None, level),
    )


def pack_block(block: Block, following: Place, rope: Rope, level: str) -> PackedBlock:
    """Pack a block: qkv and up take the norm in front of them, proj and down stay linears.

    Args:
        block: the block.
        following: the place behind it.
        rope: its cos and sin (block_size, D), or None.
        level: a key of LEVELS.
    """
    attn = block.attn
    mlp = block.mlp
    return PackedBlock(
        qkv=enter(block.norm1, *weights(attn.qkv), level),
        proj=Exit(*weights(attn.proj), block.norm2.adds_plainly),
        up=enter(block.norm2, *weights(mlp.up), level, mlp.activation),
        down=Exit(*weights(mlp.down), following.adds_plainly),
        q_gain=gain(attn.q_norm, attn.qkv.weight),
        k_gain=gain(attn.k_norm, attn.qkv.weight),
        v_gain=gain(attn.v_norm, attn.qkv.weight),
        rope=rope,
        window=attn.window,
    )


def embedding(model: GPT, table: Tensor, *factors: Tensor | None) -> Tensor:
    """Return the rows (n, C) that a table of embeddings adds to the stream.

    cbwc centres the sum of the embeddings, dyt and derf multiply it by a learned number. Both are
    linear, so here it is done to each table. A head that shares the table keeps its own weight.

    Args:
        model: the model.
        table: the weights (n, C).
        factors: of this table, () each, or None.
    """
    known = [factor for factor in factors if factor is not None]
    if model.plan.type.embed is None and not known:
        return table
    # in float64, and rounded once, as all that is packed
    rows = table.double()
    for factor in known:
        rows = rows * factor.double()
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
    """Return the gain of a norm of queries, keys or values, (D,) or (heads D,); None for no norm.

    That of a norm without gains is ones like `like`: the launches take None to mean "no norm".
    """
    if norm is None:
        return None
    if norm.weight is None:
        return like.new_ones(norm.channels)
    return norm.gain.detach()


def with_plain_gains(place: Place) -> Place:
    """Return `place` with the gains themselves for weights: a copy where it stores others.

    Else each step would compute them again: 1 + weight, or weight / sqrt(l) of lns.
    """
    parts = [part for part in place.modules() if isinstance(part, Norm)]
    if all(part.has_plain_gain for part in parts):
        return place
    place = copy.deepcopy(place)
    for part in place.modules():
        if isinstance(part, Norm) and part.weight is not None:
            part.weight = nn.Parameter(part.gain.detach())
            part.gain_offset = 0.0
            part.depth = None
    return place


def enter(place: Place, weight: Tensor, bias: Tensor | None, level: str, kind: str = "") -> Entry:
    """Return the entry of a place and the linear after it, folded if `level` folds its norm.

    Args:
        place: where the norm is.
        weight: (N, C) of the linear.
        bias: (N,) of the linear, or None.
        level: which statistics are folded (LEVELS).
        kind: activation after the linear, "" for none.
    """
    # s, g, b and P of (1); None for a norm that cannot fold
    form = place.folded_form()
    can_fold = form is not None and form.statistic in LEVELS[level]
    # `not kind`: after this linear there is no activation, whose launch could compute the
    # statistic.
    if not can_fold or (level == "library" and form.statistic == "own" and not kind):
        return Entry(weight, bias, with_plain_gains(place), kind=kind)
    # W' and c' of (3), in float64
    folded, bias = fold_affine(weight, bias, form)
    bias = None if bias is None else bias.to(weight.dtype)
    return Entry(folded.to(weight.dtype), bias, None, form.statistic, place.norm.eps, kind)
