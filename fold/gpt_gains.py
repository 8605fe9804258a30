"""Rewrite a trained GPT so that its norms have no gains, or leave out norms that others undo.

    to_weightless   gains and biases of norms -> the linears that read them: exact
    to_cancelled    norms before normalised queries, keys and values -> nothing: exact up to eps

Both work as those of fold/gpt.py do. The sources are propositions 1 and 3 of FlashNorm (arXiv
2407.09577).

Shapes: C channels of the residual stream, H heads of D channels, H_kv key and value heads.
"""

import copy
import re
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from model import GPT, Attention
from norm_plan import NONE, NORM_TYPES, SHARED
from norms import FoldedForm, LayerNorm, Norm, RMSNorm, SharedRMSNorm, fold_affine

from .gpt import (
    FoldError,
    Weights,
    add_biases,
    fold_form,
    norms_with_gains,
    rebuild,
    retype,
    untied,
    wide_state,
)

POSITION = re.compile(r"(?:norm_f|(blocks\.\d+)\.norm([12]))\.?(.*)")
HEAD = "lm_head"


# --------------------------------------------------------------------------------- weightless norms


def to_weightless(model: GPT, untie: bool = True) -> GPT:
    """Move the gains and biases of norms into the linears that alone read them.

        W (n gain + bias) + b = W diag(gain) n + (b + W bias)

    A linear of the blocks without a bias gets one where it has to. The head has none: the bias of
    the final norm stays, divided by the gain. A head that is the embedding gets weights of its own.
    The gains of values go into the projection, because attention mixes tokens and not channels. A
    model without any gain left has norm_gain=none, another one gains of 1.

    Args:
        untie: may the head get weights of its own? Else the final norm keeps its gain.

    Raises:
        FoldError: no gain is read by linears alone, or a norm is being tapered.
    """
    config = model.config
    readers, left = gains_read_by_linears(model, untie)
    weights = untied(model) if HEAD in readers.values() else wide_state(model)
    norms = norms_with_gains(model)
    for name, linear in readers.items():
        norm = norms[name]
        gain = norm.folded_form().gain if isinstance(norm, SharedRMSNorm) else norm.exact_gain
        if name.endswith(".v_norm"):
            fold_value_gain(model, gain, weights, linear)
        elif linear == HEAD and norm.bias is not None:
            fold_form(FoldedForm("none", gain), weights, linear)
            weights[f"{name}.bias"] /= torch.where(gain == 0, 1.0, gain)
        else:
            fold_form(FoldedForm("none", gain, norm.bias), weights, linear)
            if norm.bias is not None:
                weights[f"{name}.bias"].zero_()
        weights[f"{name}.weight"] = torch.full_like(gain, 1 - norm.gain_offset)
        # Both are in the gain that was folded. (DynamicTanh has an alpha that stays.)
        weights.pop(f"{name}.depth", None)
        if isinstance(norm, SharedRMSNorm):
            weights.pop(f"{name}.alpha", None)
    keys = add_biases(model, weights)
    if HEAD in readers.values():
        keys["tie_embeddings"] = False
    if not left:
        keys |= {"norm_gain": "none", "initial_gain": 1.0}
    if SHARED in model.plan.letters:
        keys |= {"coupled_alpha": 1.0, "coupled_calibrate": 0}
    if model.plan.type.scales_by_depth:
        return rebuild(model, retype(config, "rms", **keys), weights)
    return rebuild(model, replace(config, **keys), weights)


def gains_read_by_linears(model: GPT, untie: bool = True) -> tuple[dict[str, str], dict[str, str]]:
    """Find out which gains `to_weightless` moves, and where to.

    Returns:
        {norm: the linear that takes over its gain and bias}, {parameter that stays: why}.

    Raises:
        FoldError: there is none, or a norm is being tapered.
    """
    what = f"norm_type={model.config.norm_type}, norm_plan {model.plan}"
    if "T" in model.plan.letters:
        raise FoldError(
            f"{what}: a taper has two gains: train to its end, and fold it (--to=folded) first"
        )
    readers = {}
    left = {}
    for name, norm in norms_with_gains(model).items():
        linear, why = reader(name)
        is_tied = linear == HEAD and model.lm_head is None
        if is_tied and not untie:
            why = "the head is the embedding: untie gives it weights of its own"
        elif linear == HEAD and norm.bias is not None:
            left[f"{name}.bias"] = "the head has no bias that could take it over"
            if norm.bias[norm.exact_gain == 0].any():
                why = "the bias has to stay, and the gain is 0 where the bias is not"
        if why:
            left[f"{name}.weight"] = why
            if norm.bias is not None:
                left[f"{name}.bias"] = why
        else:
            readers[name] = linear
    if not readers:
        reasons = "".join(f"; {name} stays: {why}" for name, why in list(left.items())[:1])
        raise FoldError(f"{what}: none of its norms has a gain that linears alone read{reasons}")
    return readers, left


def reader(name: str) -> tuple[str, str]:
    """Return the linear that alone reads the norm of this name, or why there is none.

    Returns:
        (name of the linear, ""), or ("", why).
    """
    if name.endswith(".v_norm"):
        return name.replace("v_norm", "proj"), ""
    if ".attn." in name:
        return "", "queries and keys are rotated or multiplied, and no linear reads them"
    found = POSITION.fullmatch(name)
    if found is None:
        return "", "the norm of the embeddings gives the residual stream itself"
    block, number, part = found.groups()
    if part == "output":
        return "", "what an output norm gives is added to the residual stream"
    if part == "base" and block:
        return "", "what it gives is the residual stream itself"
    if not block:
        return HEAD, ""
    return f"{block}.{'attn.qkv' if number == '1' else 'mlp.up'}", ""


def fold_value_gain(model: GPT, gain: Tensor, weights: Weights, linear: str) -> None:
    """Move a gain of values, (D,) or (H_kv D,), into the projection (C, H D), in place."""
    config = model.config
    groups = gain.expand(config.kv_heads, -1) if gain.numel() == config.head_channels else gain
    of_heads = groups.reshape(config.kv_heads, -1)
    of_heads = of_heads.repeat_interleave(config.n_head // config.kv_heads, 0)  # (H, D)
    fold_form(FoldedForm("none", of_heads.flatten()), weights, linear)


# ------------------------------------------------------------------------------------- cancellation


def to_cancelled(model: GPT, idx: Tensor) -> GPT:
    """Leave out the norms before attention where queries, keys and values are normalised again.

    Such a norm multiplies x of a token by a gain and by one number s. The gain goes into the
    linear; the norm after it undoes s, but for its eps:

        s W x / sqrt(mean((s W x)^2) + eps) = W x / sqrt(mean((W x)^2) + eps / s^2)

    So W is multiplied by the typical s of the tokens `idx` (B, T). What is left is the spread of s
    between tokens, times eps: `eps_effect` measures it.

    Raises:
        FoldError: the model has no such norms.
    """
    config = model.config
    plan = model.plan
    blocks = cancellable(model)
    weights = wide_state(model)
    found = streams(model, idx)
    for block in blocks:
        norm = model.blocks[block].norm1.core
        name = f"blocks.{block}.attn.qkv.weight"
        typical = mean_square(norm, found[block]).log().mean().mul(-0.5).exp()
        weights[name] = typical * folded_weight(norm, weights[name])
    letters = list(plan.letters)
    for block in blocks:
        letters[2 * block] = NONE
    text = "|".join(["".join(letters), plan.outputs, plan.embedding])
    if NONE in plan.type.allowed_letters:
        return rebuild(model, replace(config, norm_plan=text), weights)
    has_others = set(plan.outputs + plan.embedding) != {NONE}
    new_type = "peri" if has_others else "none"
    return rebuild(model, retype(config, new_type, norm_plan=text), weights)


def cancellable(model: GPT) -> list[int]:
    """Return the blocks whose norm before attention `to_cancelled` leaves out.

    Raises:
        FoldError: there are none.
    """
    config = model.config
    plan = model.plan
    what = f"norm_type={config.norm_type}, norm_plan {plan}"
    if not plan.has_v_norm:
        raise FoldError(
            f"{what}, qk_norm={plan.qk_kind}: a norm before attention is cancelled where queries, "
            "keys and values are normalised (qk_norm and v_norm)"
        )
    if model.blocks[0].attn.qkv.bias is not None:
        raise FoldError(f"{what}: queries, keys and values have biases, which no norm scales")
    norms = {index: block.norm1.core for index, block in enumerate(model.blocks)}
    found = [index for index in norms if plan.letters[2 * index] in "RL"]
    if not found:
        raise FoldError(f"{what}: attention reads no RMSNorm or LayerNorm that could be left out")
    if NONE not in plan.type.allowed_letters and config.norm_type not in ("rms", "layer"):
        convertible = NORM_TYPES[config.norm_type].allowed_letters == "R"
        remedy = "convert it first (--to=rms)" if convertible else "train another norm_type"
        raise FoldError(f"{what}: this norm_type has no plan without these norms: {remedy}")
    for index in found:
        norm = norms[index]
        is_whole = isinstance(norm, LayerNorm) or (isinstance(norm, RMSNorm) and norm.is_whole)
        if not is_whole or norm.bias is not None:
            raise FoldError(
                f"{what}: norms with biases, in groups or over a part of the channels do more than "
                "scale a token"
            )
    return found


@torch.no_grad()
def streams(model: GPT, idx: Tensor) -> dict[int, Tensor]:
    """Return the residual stream (B, T, C) before attention of each block, for tokens (B, T)."""
    found: dict[int, Tensor] = {}

    def keep(index: int):
        def hook(norm: Norm, args: tuple, output: tuple) -> None:
            found[index] = output[1]

        return hook

    hooks = [
        block.norm1.register_forward_hook(keep(index)) for index, block in enumerate(model.blocks)
    ]
    try:
        model(idx)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def mean_square(norm: Norm, h: Tensor) -> Tensor:
    """Return 1 / s^2 (B, T) of a norm for the stream h (B, T, C): the mean square plus eps."""
    h = h.double()
    if norm.centers:
        h = h - h.mean(-1, keepdim=True)
    return h.square().mean(-1) + norm.eps


@torch.no_grad()
def eps_effect(model: GPT, calibration: Tensor, idx: Tensor) -> tuple[float, float]:
    """Measure how far `to_cancelled` moves normalised queries, keys and values, and bound it.

    With M the mean square of what the norm of a head reads after the conversion, and t what 1 / s^2
    is in units of its typical value, that norm divides by sqrt(M + eps) instead of
    sqrt(M + eps t). The relative error is at most eps |t - 1| / (2 (M + eps min(t, 1))).

    Args:
        model: before the conversion.
        calibration: the tokens (B, T) from which `to_cancelled` takes the typical s.
        idx: the tokens (B, T) that are measured.

    Returns:
        (largest relative error of a vector that is normalised, largest bound), over tokens, heads
        and blocks, in float64. Both forms read the same stream, that of `model`.
    """
    before = copy.deepcopy(model).double()
    after = to_cancelled(before, calibration)
    found = streams(before, idx)
    error = bound = 0.0
    for index in cancellable(before):
        h = found[index]
        attention = before.blocks[index].attn, after.blocks[index].attn
        norm = before.blocks[index].norm1.core
        weight = attention[1].qkv.weight
        scale = weight.square().sum() / folded_weight(norm, attention[0].qkv.weight).square().sum()
        t = mean_square(norm, h)[..., None] * scale  # (B, T, 1)
        y, _ = norm.normalize(h, None)
        pairs = zip(heads(attention[0], y), heads(attention[1], h), strict=True)
        for (_, old, _), (z, new, own) in pairs:
            M = z.square().mean(-1)  # (B, T, heads)
            limit = own.eps * (t - 1).abs() / (2 * (M + own.eps * t.clamp(max=1)))
            bound = max(bound, float(limit.max()))
            tiny = torch.finfo(old.dtype).tiny
            moved = (new - old).norm(dim=-1) / old.norm(dim=-1).clamp(min=tiny)
            error = max(error, float(moved.max()))
    return error, bound


def heads(attn: Attention, y: Tensor) -> Iterator[tuple[Tensor, Tensor, Norm]]:
    """Yield what the norms of queries, keys and values read and give for y (B, T, C), and the norm.

    Both are (B, T, heads, D), with one head of all channels for norms of the whole width.
    """
    widths = [count * attn.head_dim for count in (attn.heads, attn.kv_heads, attn.kv_heads)]
    parts = attn.qkv(y).split(widths, -1)
    for part, norm in zip(parts, (attn.q_norm, attn.k_norm, attn.v_norm), strict=True):
        z = part.unflatten(-1, (-1, norm.channels))
        normed, _ = norm.normalize(z, None)
        yield z, normed, norm


def folded_weight(norm: Norm, weight: Tensor) -> Tensor:
    """Return W diag(gain) P in float64, with P the centring if the norm does it."""
    gain = None if norm.weight is None else norm.exact_gain
    folded, _ = fold_affine(weight.detach(), None, FoldedForm("own", gain, centers=norm.centers))
    return folded
