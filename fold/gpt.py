"""Rewrites of a trained GPT's weights that leave its function as it is.

    to_rms       LayerNorm (or cbwc) -> RMSNorm: what writes into the residual stream is centred
    to_folded    taper at gate 0 -> nothing: its scaling goes into the linear that reads it
    absorb_alpha CoupledNorm with alpha -> with alpha = 1, in the gains

Each takes a GPT and returns another one, in eval mode, with the config that describes it; the
argument stays as it is. The arithmetic is in float64, rounded once to the type of the weights. A
model that the rewrite does not fit raises FoldError with the reason. Whoever needs to know that
function and weights fit asks fold.certificate.certify. (RMSNorm -> CoupledNorm is not exact:
posthoc/coupling.py.)

Shapes: C channels of the residual stream, V rows of the vocabulary; a linear's weight is (out, in).
"""

import re
from dataclasses import fields, replace

import torch
from torch import Tensor

from common.errors import FoldError
from load import NORM_NAMES
from model import GPT, GPTConfig
from norm_plan import NORM_TYPES
from norms import SharedRMSNorm, center, fold_affine
from taper import TaperNorm

Weights = dict[str, Tensor]


def to_rms(model: GPT) -> GPT:
    """The same function with RMSNorm: norm_type layer or cbwc -> rms, with the norms' biases
    (rms_bias).

    With a zero-mean stream LayerNorm is RMSNorm, so every linear that adds to the stream is centred
    over its outputs, weights and bias (CBWC, equation 7), and the embeddings over their channels. A
    tied head reads the embedding as it was, so it gets weights of its own. Exact with dropout off:
    with it the stream's mean is not zero.
    """
    config = model.config
    if config.norm_type not in ("layer", "cbwc"):
        raise FoldError(f"norm_type={config.norm_type}: --to=rms is for LayerNorm (layer, cbwc)")
    weights = untied(model)
    center_stream(weights)
    return rebuild(
        model, retype(config, "rms", rms_bias=config.bias, tie_embeddings=False), weights
    )


def to_folded(model: GPT, exact: bool = True) -> GPT:
    """The same function without the norms that were tapered away: norm_type taper -> none.

    At gate 0 a taper is y = c * P h * gamma~ + beta, with P the centring of a LayerNorm base (else
    the identity). The linear that reads y computes W y + b = [W diag(c gamma~) P] h + (b + W beta).
    Norms that were not tapered stay. Raises FoldError if a gate is not at 0; with exact=False only
    if the scaling was never calibrated.
    """
    config = model.config
    if config.norm_type != "taper":
        raise FoldError(
            f"norm_type={config.norm_type}: "
            "--to=folded is for taper, whose gate leaves a fixed scaling"
        )
    for position, norm in enumerate(model.norms()):
        if isinstance(norm, TaperNorm) and norm.phase != "fixed" and (exact or not norm.calibrated):
            raise FoldError(
                f"norm position {position}: its gate is at {float(norm.gate):.3g}, not at 0: train "
                "to the end of the taper first"
            )
    final = model.norm_f if isinstance(model.norm_f, TaperNorm) else None
    weights, tapers = wide_state(model) if final is None else untied(model), {}
    for index, block in enumerate(model.blocks):
        tapers |= {f"blocks.{index}.attn.qkv": block.norm1, f"blocks.{index}.mlp.up": block.norm2}
    tapers = {reader: norm for reader, norm in tapers.items() if isinstance(norm, TaperNorm)}
    for reader, norm in tapers.items():
        fold_taper(norm, weights, reader)
    grown = model.blocks[0].attn.qkv.bias is None and any(
        name.endswith(".qkv.bias") for name in weights
    )
    # a LayerNorm's bias before attention without biases: attn_bias stands for all its linears
    if grown:
        for index, block in enumerate(model.blocks):
            for name, linear in (("qkv", block.attn.qkv), ("proj", block.attn.proj)):
                zeros = linear.weight.new_zeros(linear.out_features, dtype=torch.float64)
                weights.setdefault(f"blocks.{index}.attn.{name}.bias", zeros)
    if final is not None:
        fold_final_taper(model, final, weights)
    keys = ({"attn_bias": True} if grown else {}) | (
        {"tie_embeddings": False} if final is not None else {}
    )
    plan = str(model.plan).replace("T", "I")
    return rebuild(model, retype(config, "none", norm_plan=plan, **keys), weights)


def absorb_alpha(model: GPT) -> GPT:
    """The same function with coupled_alpha = 1: gains of shared positions are divided by their
    alpha. All other tensors are those of `model` itself.
    """
    config = model.config
    if config.norm_type != "coupled" or not config.norm_affine:
        raise FoldError(
            f"norm_type={config.norm_type}: alpha is absorbed into the gains of a coupled model"
        )
    weights = model.state_dict()
    for name, norm in model.named_modules():
        if isinstance(norm, SharedRMSNorm):
            weights[f"{name}.weight"] = weights[f"{name}.weight"].double() / norm.alpha
            weights.pop(f"{name}.alpha", None)
    return rebuild(model, replace(config, coupled_alpha=1.0, coupled_calibrate=0), weights)


# ------------------------------------------------------------------------------------------- pieces


def center_stream(weights: Weights) -> None:
    """Center everything that adds to the residual stream over its channels, in place."""
    for name, tensor in weights.items():
        if name in ("wte.weight", "wpe.weight"):
            weights[name] = center(tensor)  # (V, C)
        elif name.endswith((".proj.weight", ".proj.bias", ".down.weight", ".down.bias")):
            weights[name] = tensor - tensor.mean(0)  # (C, in) or (C,)


def fold_taper(norm: TaperNorm, weights: Weights, reader: str) -> None:
    """Move the scaling, centring and bias of a taper at gate 0 into the linear that reads it, in
    place.
    """
    weight, bias = fold_affine(
        weights[f"{reader}.weight"], weights.get(f"{reader}.bias"), *norm.fixed_map()
    )
    weights[f"{reader}.weight"] = weight
    if bias is not None:
        weights[f"{reader}.bias"] = bias


def fold_final_taper(model: GPT, norm: TaperNorm, weights: Weights) -> None:
    """fold_taper into the head, which has no bias for W beta. A zero-mean stream, whose mean nobody
    reads, can carry a constant s to it: one more term W beta 1^T / (C s) in the head's weight reads
    W beta back.
    """
    if norm.base.bias is not None and "R" in model.plan.letters:
        raise FoldError(
            f"norm_plan {model.plan}: the final taper's bias cannot be moved past an RMSNorm"
        )
    fold_taper(norm, weights, "lm_head")
    bias = weights.pop("lm_head.bias", None)  # (V,)
    if bias is not None:
        center_stream(weights)
        # of the embedding's size, so that rounding loses nothing
        s = weights["wte.weight"].square().mean().sqrt()
        weights["wte.weight"] += s
        weights["lm_head.weight"] += bias[:, None] / (model.config.n_embd * s)


def wide_state(model: GPT) -> Weights:
    """Weights in float64, copied."""
    return {name: tensor.detach().double().clone() for name, tensor in model.state_dict().items()}


def untied(model: GPT) -> Weights:
    """wide_state, in which the output head has weights of its own."""
    weights = wide_state(model)
    weights.setdefault("lm_head.weight", weights["wte.weight"].clone())
    return weights


def retype(config: GPTConfig, norm_type: str, **keys: object) -> GPTConfig:
    """`config` with another norm type, without the old one's keys."""
    default = {field.name: field.default for field in fields(config)}
    old = {name: default[name] for name in ("norm_plan", *NORM_TYPES[config.norm_type].keys)}
    return replace(config, **old | {"norm_type": norm_type} | keys)


def rebuild(model: GPT, config: GPTConfig, weights: Weights) -> GPT:
    """A GPT of `config` with these weights, of the model's type and tokenizer. Norms may have fewer
    tensors now.

    It takes the tensors themselves where they are of that type, and makes no others beside them.
    """
    with torch.device("meta"):
        new = GPT(config)
    own = new.state_dict()  # an alpha goes into its gain as it is loaded
    new.load_state_dict(
        {
            name: tensor.to(model.wte.weight)
            for name, tensor in weights.items()
            if name in own or not re.fullmatch(NORM_NAMES, name) or name.endswith(".alpha")
        },
        assign=True,
    )
    if config.position == "rope":
        new.rope_cos, new.rope_sin = model.rope_cos, model.rope_sin
    new.meta = dict(model.meta)
    return new.eval()
