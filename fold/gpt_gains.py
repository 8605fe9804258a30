"""Rewrite a trained GPT so that its norms have no gains.

    to_weightless   gains and biases of norms -> the linears that read them: exact

It works as the conversions of fold/gpt.py do. The source is proposition 1 of FlashNorm (arXiv
2407.09577).

Shapes: C channels of the residual stream, H heads of D channels, H_kv key and value heads.
"""

import re
from dataclasses import replace

import torch
from torch import Tensor

from model import GPT
from norm_plan import SHARED
from norms import FoldedForm, SharedRMSNorm

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
