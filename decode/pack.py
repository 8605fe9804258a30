"""Exact packing of a GPT's weights for decoding: norms fold into the projections that read them.

A norm y = (x - m) * s * g + b in front of a linear W, c is one linear on x itself, scaled by the
statistic s:

    W y + c = s * W' x + c',   W' = W diag(g) P,   c' = c + W b

where P is the identity, or centring where a mean is taken;

so a norm leaves behind nothing but s (Loretz & Hochreiter 2026, section 4.3, for the shared
position; the same algebra serves every other). Which norms fold is the fusion level's choice:

    plain     none: norms stay modules, as in training
    paper     positions that share a statistic; 1 / alpha goes along with the gain
    fused     also RMSNorm (the reader computes the statistic), and a finished taper or no norm (no
              statistic is left)
    library   as fused, but RMSNorm only in front of an activation, which then computes the
              statistic: for the library's products, where a norm that stays a launch may as well
              keep its gain

Folding is done in float64 and rounded once, to the type of the weights. Centred linears (cbwc) are
stored centred. What cannot fold (LayerNorm: use its cbwc form; partial and group RMSNorm; dyt; a
taper under way) stays a module.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from model import GPT, GPTConfig
from norms import CenteredLinear, NoNorm, Norm, RMSNorm, SharedRMSNorm, center, fold_affine
from taper import TaperNorm

LEVELS = {
    "plain": (),
    "paper": ("shared",),
    "library": ("own", "shared", "none"),
    "fused": ("own", "shared", "none"),
}
# Sequences from which on `library` is taken instead of `fused`, whose programs read all rows of x
# for 16 outputs: at 16 rows x is as much traffic from the L2 cache as the weight is, at 32 twice as
# much. Reckoned, not measured.
LIBRARY_FROM = 32


def level_at(level: str, batch: int, library_from: int = LIBRARY_FROM) -> str:
    """The level at which to pack for `batch` sequences where `level` is wanted."""
    return "library" if level == "fused" and batch >= library_from else level


@dataclass
class Entry:
    """A norm position and the projection that reads it. weight (N, C), bias (N,) or None."""

    weight: Tensor
    bias: Tensor | None
    norm: Norm | None  # None: folded
    statistic: str = ""  # of a folded norm: own, shared, none
    eps: float = 0.0  # for an own statistic
    kind: str = ""  # activation behind the projection, or none


@dataclass
class Exit:
    """A projection that writes into the residual stream. weight (C, K), bias (C,) or None."""

    weight: Tensor
    bias: Tensor | None


@dataclass
class PackedBlock:
    """A block: qkv and up read the stream, proj and down write it; gains (head_dim,) of QK-norm."""

    qkv: Entry
    proj: Exit
    up: Entry
    down: Exit
    q_gain: Tensor | None
    k_gain: Tensor | None


@dataclass
class PackedGPT:
    """Everything that a decoding step reads. wte (V, C), wpe (T, C) or None, rope tables (T,
    head_dim) or None.
    """

    config: GPTConfig
    level: str
    wte: Tensor
    wpe: Tensor | None
    rope: tuple[Tensor, Tensor] | None  # cos and sin, in float32, in float64 for a float64 model
    blocks: list[PackedBlock]
    head: Entry  # the final norm and the n_vocab rows that exist

    @property
    def dtype(self) -> torch.dtype:
        return self.wte.dtype

    @property
    def entries(self) -> list[Entry]:
        """Those of the 2L + 1 norm positions, in order."""
        return [entry for block in self.blocks for entry in (block.qkv, block.up)] + [self.head]

    @property
    def exits(self) -> list[Exit]:
        return [part for block in self.blocks for part in (block.proj, block.down)]


@torch.no_grad()
def pack(model: GPT, level: str) -> PackedGPT:
    """`model` for decoding, at a fusion level (a key of LEVELS).

    Tensors that nothing is folded into are shared.
    """
    wide = torch.float64 if model.wte.weight.dtype == torch.float64 else torch.float32
    blocks = [
        PackedBlock(
            enter(block.norm1, *weights(block.attn.qkv), level),
            Exit(*weights(block.attn.proj)),
            enter(block.norm2, *weights(block.mlp.up), level, block.mlp.activation),
            Exit(*weights(block.mlp.down)),
            *(
                None if norm is None else gain(norm, block.attn.qkv.weight)
                for norm in (block.attn.q_norm, block.attn.k_norm)
            ),
        )
        for block in model.blocks
    ]
    wte, wpe = (
        None if table is None else embedding(model, table.weight.detach())
        for table in (model.wte, model.wpe)
    )
    rope = None if model.wpe is not None else (model.rope_cos.to(wide), model.rope_sin.to(wide))
    head = enter(model.norm_f, model.head_weight().detach()[: model.n_vocab], None, level)
    return PackedGPT(model.config, level, wte, wpe, rope, blocks, head)


def embedding(model: GPT, table: Tensor) -> Tensor:
    """A table (n, C) as it acts: cbwc centres the sum of the embeddings, which is linear, so each
    table may be.
    """
    return (
        table if model.plan.type.embed is None else model.plan.embed(table.double()).to(table.dtype)
    )


def weights(linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """(weight, bias) of a linear as it acts: centred over outputs if it is a CenteredLinear."""
    weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
    if isinstance(linear, CenteredLinear):
        weight = center(weight.T.double()).T.to(weight.dtype).contiguous()
        bias = None if bias is None else center(bias.double()).to(bias.dtype)
    return weight, bias


def gain(norm: Norm, like: Tensor) -> Tensor:
    """Gain (C,) of a norm; where it has none ones, of `like`'s type and on its device."""
    return like.new_ones(norm.channels) if norm.weight is None else norm.weight.detach()


def enter(norm: Norm, weight: Tensor, bias: Tensor | None, level: str, kind: str = "") -> Entry:
    """The entry of `norm` and the linear behind it, which has an activation `kind` or none; folded
    if `level` does.
    """
    statistic, scale, shift, centers = remains(norm)
    if statistic not in LEVELS[level] or (level == "library" and statistic == "own" and not kind):
        # it would leave its scaling to the MLP
        if isinstance(norm, SharedRMSNorm) and norm.impl != "scale":
            norm = copy.copy(norm)
            norm.impl = "scale"
        return Entry(weight, bias, norm, kind=kind)
    folded, bias = fold_affine(weight, bias, scale, shift, centers)
    bias = None if bias is None else bias.to(weight.dtype)
    return Entry(folded.to(weight.dtype), bias, None, statistic, norm.eps, kind)


def remains(norm: Norm) -> tuple[str, Tensor | float | None, Tensor | None, bool]:
    """(statistic, gain (C,) or a number, bias (C,), does it centre?) of a norm; "module" if it
    cannot fold.
    """
    if isinstance(norm, TaperNorm) and norm.phase == "fixed":
        return "none", *norm.fixed_map()
    if isinstance(norm, NoNorm):
        return "none", None, None, False
    if isinstance(norm, SharedRMSNorm):
        return (
            "shared",
            (1.0 if norm.weight is None else norm.weight.double()) / norm.alpha,
            None,
            False,
        )
    if isinstance(norm, RMSNorm) and norm.groups == 1 and norm.counted == norm.channels:
        return "own", None if norm.weight is None else norm.weight.double(), norm.bias, False
    return "module", None, None, False
