"""Rewrite the weights of a trained GPT without changing its function.

    to_rms        LayerNorm (or cbwc) -> RMSNorm: what adds to the residual stream is centred;
                  gains that are stored in another way (one_plus, lns) -> plain gains
    to_folded     taper at gate 0 -> nothing: its scaling goes into the linear that reads it
    to_weightless gains and biases of norms -> the linears that read them (FlashNorm, arXiv
                  2407.09577, proposition 1)
    absorb_alpha  CoupledNorm with alpha -> with alpha = 1: alpha goes into the gains

Each takes a GPT and returns another one, in eval mode, with the config that describes it. The
argument is left unchanged. The arithmetic is in float64, rounded once to the type of the weights.
FoldError says why a rewrite does not fit a model. fold.certificate.certify checks that a rewrite
left the function unchanged. (RMSNorm -> CoupledNorm is not exact: posthoc/coupling.py.)

Shapes: C channels of the residual stream, V rows of the vocabulary, H heads of D channels, H_kv key
and value heads. A linear's weight is (out, in).
"""

import copy
import re
from collections.abc import Collection
from dataclasses import fields, replace

import torch
from torch import Tensor

from common.errors import FoldError
from load import NORM_NAMES
from model import GPT, GPTConfig
from norm_plan import NormPlan
from norm_types import NORM_TYPES, SHARED
from norms import CenteredLinear, FoldedForm, Norm, center, fold_affine
from taper import TaperNorm

from .gains import Fold, carry_out, plan_folds
from .graph import Graph

Weights = dict[str, Tensor]
# Keys with which a model computes the same in the plainest way
PLAIN = {"coupled_impl": "scale", "recompute": False}


def to_rms(model: GPT) -> GPT:
    """Replace LayerNorm by RMSNorm, and gains that are stored in another way by plain ones.

    With a zero-mean stream LayerNorm is RMSNorm. So every linear that adds to the stream is centred
    over its outputs, weights and bias (CBWC, equation 7), and the embeddings over their channels.
    The norms keep their biases (rms_bias). A tied head reads the uncentred embedding, so it gets
    weights of its own. The function is the same with dropout off only: dropout makes a mean.

    For an output LayerNorm the linear before it is centred, for one of the embeddings these. The
    weights of 1 + weight (norm_gain=one_plus) and weight / sqrt(l) (lns) become the gains.

    Other layouts have no exact form: what an output norm gives has a mean, say. Their certificate
    says so.

    Raises:
        FoldError: there is nothing to do, or a norm is of another kind.
    """
    config = model.config
    plan = model.plan
    gains = norms_with_gains(model)
    what = f"norm_type={config.norm_type}, norm_plan {plan}"
    # or an RMSNorm that is one because its input is centred (cbwc)
    has_layer_norms = centers_embeddings(model) or "L" in plan.outputs
    if not set(plan.letters) <= set("LRPBI"):
        raise FoldError(f"{what}: --to=rms is for LayerNorm and RMSNorm (layer, cbwc, lns, ...)")
    if all(norm.has_plain_gain for norm in gains.values()) and not has_layer_norms:
        raise FoldError(f"{what}: its norms are RMSNorms with plain gains already")
    weights = untied(model) if centers_embeddings(model) else wide_state(model)
    if centers_stream(plan):
        center_stream(weights)
    elif plan.embedding == "L":
        center_embeddings(weights)
    for index, letter in enumerate(plan.outputs):
        if letter == "L":
            center_linear(weights, f"blocks.{index // 2}.{('attn.proj', 'mlp.down')[index % 2]}")
    keys = plain_gains(model, weights)
    if set(plan.letters) <= {"R", "L"} and config.norm_type != "rms":
        if set(plan.outputs + plan.embedding) != {"I"}:
            keys["norm_plan"] = str(plan).replace("L", "R")
        keys["rms_bias"] = config.bias and has_layer_norms
        return rebuild(model, retype(config, "rms", **keys), weights)
    if replaces_stream(plan):
        keys["post_base"] = "rms"
    keys["norm_plan"] = config.norm_plan.replace("L", "R")
    return rebuild(model, replace(config, **keys), weights)


def to_folded(model: GPT, exact: bool = True) -> GPT:
    """The same function without the norms that were tapered away: norm_type taper -> none.

    At gate 0 a taper is y = c * P h * gamma~ + beta, with P the centring of a LayerNorm base (else
    the identity). The linear that reads y computes W y + b = [W diag(c gamma~) P] h + (b + W beta).
    Norms that were not tapered stay. Raises FoldError if a gate is not at 0; with exact=False only
    if the scaling was never calibrated.
    """
    config = model.config
    if "T" not in model.plan.letters:
        raise FoldError(
            f"norm_type={config.norm_type}: "
            "--to=folded is for taper, whose gate leaves a fixed scaling"
        )
    # position -> norm, of those that were tapered
    tapers = {
        position: place.norm
        for position, place in enumerate(model.places())
        if model.plan.letters[position] == "T"
    }
    for position, norm in tapers.items():
        if norm.phase != "fixed" and (exact or not norm.calibrated):
            raise FoldError(
                f"norm position {position}: its gate is at {float(norm.gate):.3g}, not at 0: train "
                "to the end of the taper first"
            )
    final = tapers.pop(2 * config.n_layer, None)
    weights = wide_state(model) if final is None else untied(model)
    for position, norm in tapers.items():
        fold_form(norm.form_at_gate_zero(), weights, linear_after(position))
    keys = bias_keys(model, weights)
    if final is not None:
        fold_final_taper(model, final, weights)
    plan = str(model.plan).replace("T", "I")
    return rebuild(model, retype(config, "none", norm_plan=plan, **keys), weights)


def gain_folds(model: GPT, untie: bool = True) -> tuple[list[Fold], dict[str, str]]:
    """Find out which gains `to_weightless` moves, and where to (gains.py).

    Args:
        untie: may the head get weights of its own? Else the final norm keeps its gain.

    Returns:
        The folds, and {parameter that stays: why}.

    Raises:
        FoldError: there is none, or a norm is being tapered.
    """
    if "T" in model.plan.letters:
        raise FoldError(
            f"norm_type={model.config.norm_type}, norm_plan {model.plan}: a taper has two gains: "
            "train to its end, and fold it (--to=folded) first"
        )
    tokens = torch.arange(min(model.config.block_size, 8)) % model.n_vocab
    return plan_folds(Graph(with_room(model, untie), (tokens[None],)), untie)


def to_weightless(model: GPT, folds: list[Fold], untie: bool = True) -> GPT:
    """Move the gains and biases of norms into the linears that alone read them.

        W (n gain + bias) + b = W diag(gain) n + (b + W bias)

    A linear of the blocks without a bias gets one where a norm has one. The head has none: the bias
    of the final norm stays, divided by the gain. A head that is the embedding gets weights of its
    own. A model without any gain left has norm_gain=none, another one gains of 1.

    Args:
        folds: of `gain_folds`.
        untie: as it had.
    """
    new = with_room(model, untie)
    carry_out(folds, new)
    whole = {fold.affine.gain for fold in folds if not fold.bias_stays}
    keys = {name: getattr(model.config, name) for name in PLAIN}
    if whole == {f"{name}.weight" for name in norms_with_gains(new)}:
        keys |= {"norm_gain": "none", "initial_gain": 1.0, "paired_gains": 0.0}
    return rebuild(model, replace(new.config, **keys), new.state_dict())


def with_room(model: GPT, untie: bool) -> GPT:
    """Return the same function in float64, with room for all gains and biases of norms.

    Alpha and block numbers are in the gains. Linears that read a norm with a bias have one. With
    `untie` the head that reads a gain has weights of its own.
    """
    new = copy.deepcopy(model).double()
    if SHARED in model.plan.letters and model.config.norm_gain != "none":
        new = absorb_alpha(new)
    reads_gain = model.norm_f.core.weight is not None
    weights = untied(new) if untie and reads_gain else wide_state(new)
    norms = enumerate(place.core for place in list(new.places())[:-1])
    read = {f"{linear_after(position)}.bias" for position, norm in norms if norm.bias is not None}
    keys = PLAIN | bias_keys(model, read) | plain_gains(new, weights)
    if model.plan.type.scales_by_depth:
        return rebuild(new, retype(new.config, "rms", **keys), weights)
    return rebuild(new, replace(new.config, **keys), weights)


def absorb_alpha(model: GPT) -> GPT:
    """The same function with coupled_alpha = 1: gains of shared positions are divided by their
    alpha. All other tensors are those of `model` itself.
    """
    config = model.config
    if SHARED not in model.plan.letters or config.norm_gain == "none":
        raise FoldError(
            f"norm_type={config.norm_type}: alpha is absorbed into the gains of a coupled model"
        )
    weights = model.state_dict()
    for name, norm in norms_with_gains(model).items():
        form = norm.folded_form()
        if form is not None and form.statistic == "shared":
            weights[f"{name}.weight"] = norm.weight_of(form.gain)
            weights.pop(f"{name}.alpha", None)
    return rebuild(model, replace(config, coupled_alpha=1.0, coupled_calibrate=0), weights)


# ------------------------------------------------------------------------------------------- pieces


def centers_stream(plan: NormPlan) -> bool:
    """Does a norm subtract the mean of the residual stream, or what adds to it?"""
    bases = replaces_stream(plan) and plan.config.post_base == "layer"
    return "L" in plan.letters or bases or plan.type.residual_linear is CenteredLinear


def centers_embeddings(model: GPT) -> bool:
    """Would `to_rms` centre the embeddings, which a tied head reads too?"""
    return centers_stream(model.plan) or model.plan.embedding == "L"


def replaces_stream(plan: NormPlan) -> bool:
    return not {"P", "B"}.isdisjoint(plan.letters)


def norms_with_gains(model: GPT) -> dict[str, Norm]:
    """Return all norms with gains by name, those within attention and within other norms too."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Norm) and module.weight is not None
    }


def plain_gains(model: GPT, weights: Weights) -> dict[str, object]:
    """Store gains as what norms multiply by, in place; return the keys of a config that say so."""
    for name, norm in norms_with_gains(model).items():
        weights[f"{name}.weight"] = norm.exact_gain
        weights.pop(f"{name}.depth", None)
    return {"norm_gain": "plain"} if model.config.norm_gain == "one_plus" else {}


def linear_after(position: int) -> str:
    """Return the name of the linear that reads this position of a plan, one of the blocks."""
    return f"blocks.{position // 2}.{('attn.qkv', 'mlp.up')[position % 2]}"


def center_stream(weights: Weights) -> None:
    """Centre everything that adds to the residual stream over its channels, in place.

    CBWC, equation 7.
    """
    center_embeddings(weights)
    for name in list(weights):
        if name.endswith((".proj.weight", ".down.weight")):
            center_linear(weights, name.removesuffix(".weight"))


def center_embeddings(weights: Weights) -> None:
    """Centre the embeddings (V, C) over their channels, in place."""
    for name in {"wte.weight", "wpe.weight"} & weights.keys():
        weights[name] = center(weights[name])


def center_linear(weights: Weights, linear: str) -> None:
    """Centre the linear of this name over its outputs, in place."""
    for name in {f"{linear}.weight", f"{linear}.bias"} & weights.keys():
        weights[name] = weights[name] - weights[name].mean(0)  # (C, in) or (C,)


def fold_form(form: FoldedForm, weights: Weights, reader: str) -> None:
    """Move gain, bias and centring of a norm into the linear that reads it, in place.

    Args:
        form: what is moved.
        weights: of the model.
        reader: name of the linear. It may get a bias that it had not.
    """
    weight, bias = fold_affine(weights[f"{reader}.weight"], weights.get(f"{reader}.bias"), form)
    weights[f"{reader}.weight"] = weight
    if bias is not None:
        weights[f"{reader}.bias"] = bias


def bias_keys(model: GPT, biases: Collection[str]) -> dict[str, object]:
    """Return the keys of a config in which linears of the blocks have these biases, by name.

    attn_bias and bias stand for several linears each; `rebuild` makes the others zero.
    """
    block = model.blocks[0]
    readers = {"attn_bias": ("attn.qkv", block.attn.qkv), "bias": ("mlp.up", block.mlp.up)}
    keys: dict[str, object] = {}
    for key, (name, linear) in readers.items():
        if linear.bias is None and any(bias.endswith(f".{name}.bias") for bias in biases):
            keys[key] = True
    if "bias" in keys:  # which attn_bias follows by default
        keys.setdefault("attn_bias", block.attn.qkv.bias is not None)
    return keys


def fold_final_taper(model: GPT, norm: TaperNorm, weights: Weights) -> None:
    """Move the final taper into the head, in place.

    The head has no bias that could hold W beta. But a zero-mean stream whose mean no norm reads can
    carry a constant s to it in every channel. One more term W beta 1^T / (C s) in the head's weight
    reads W beta back.

    Raises:
        FoldError: the taper has a bias and the plan has an RMSNorm, which would read the constant.
    """
    if norm.base.bias is not None and "R" in model.plan.letters:
        raise FoldError(
            f"norm_plan {model.plan}: the final taper's bias cannot be moved past an RMSNorm"
        )
    fold_form(norm.form_at_gate_zero(), weights, "lm_head")
    bias = weights.pop("lm_head.bias", None)  # (V,)
    if bias is not None:
        center_stream(weights)
        # s is as large as what the embedding adds to the stream, so that rounding loses nothing.
        scale = model.config.embed_scale
        s = scale * weights["wte.weight"].square().mean().sqrt()
        weights["wte.weight"] += s / scale
        weights["lm_head.weight"] += bias[:, None] / (model.config.n_embd * s)


def wide_state(model: GPT) -> Weights:
    """Return copies of a model's weights in float64."""
    return {name: tensor.detach().double().clone() for name, tensor in model.state_dict().items()}


def untied(model: GPT) -> Weights:
    """Return wide_state, in which the output head has weights of its own."""
    weights = wide_state(model)
    weights.setdefault("lm_head.weight", weights["wte.weight"].clone())
    return weights


def retype(config: GPTConfig, norm_type: str, **keys: object) -> GPTConfig:
    """Return `config` with another norm type and without the old one's keys.

    Args:
        config: the old one.
        norm_type: the new type.
        keys: further keys of the new config.

    Raises:
        FoldError: values are normalised, which the new type does not do.
    """
    default = {field.name: field.default for field in fields(config)}
    # Paired gains are gone too: a value at the start, which a type without gains refuses.
    gone = ("norm_plan", "paired_gains", *NORM_TYPES[config.norm_type].keys)
    old = {name: default[name] for name in gone}
    if config.has_v_norm and not NORM_TYPES[norm_type].v_norm:
        raise FoldError(
            f"norm_type={config.norm_type}: its values are normalised, and those of norm_type="
            f"{norm_type} are not: keep its type"
        )
    # Attention stays what it is, where one of the types has norms in it by default.
    if config.qk_kind != NORM_TYPES[norm_type].qk_norm:
        old["qk_norm"] = config.qk_kind
    return replace(config, **old | {"norm_type": norm_type} | keys)


def rebuild(model: GPT, config: GPTConfig, weights: Weights) -> GPT:
    """Build a GPT of `config` with these weights.

    It has the weights' type and the tokenizer of `model`. Weights of norms that the new config
    lacks are left out, and biases that `weights` lacks are zero. The head has weights of its own
    where `weights` has them. Tensors of that type are taken over without a copy.
    """
    config = replace(config, tie_embeddings="lm_head.weight" not in weights)
    with torch.device("meta"):
        new = GPT(config)
    own = new.state_dict()
    kept = {
        name: tensor.to(model.wte.weight)
        for name, tensor in weights.items()
        # A calibrated alpha that the new model lacks goes into its gain as it is loaded.
        if name in own or not re.fullmatch(NORM_NAMES, name) or name.endswith(".alpha")
    }
    for name, tensor in own.items():
        if name.endswith(".bias"):
            kept.setdefault(name, model.wte.weight.new_zeros(tensor.shape))
    new.load_state_dict(kept, assign=True)
    for name, table in model.named_buffers(recurse=False):  # of rotary positions
        setattr(new, name, table)
    new.meta = dict(model.meta)
    return new.eval()
