"""The arms that bench_decode.py compares: one model's weights under several norms, at several levels of fusion.

    A rms             RMSNorm, torch.compile around the library's products: the baseline, as well as we can do it
    B coupled         CoupledNorm with the paper's fusion, otherwise as A. The paper's claim is B against A
    C rms_fused       exact RMSNorm with everything fused: no norm launch
    D coupled_fused   CoupledNorm with everything fused: D against C is what the shared statistic is worth
    E taper_folded    TaperNorm after its taper, folded: no statistics but the final norm's
    L layer           LayerNorm, as A
    M layer_fused     LayerNorm as its exact centred form (cbwc), everything fused
"""

import copy
import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from errors import ConfigError
from model import GPT, GPTConfig
from norm_layers import Norm
from norms import NORM_TYPES, NormPlan
from taper import TaperNorm


@dataclass(frozen=True)
class Arm:
    """A norm type and a level of packing.LEVELS."""

    letter: str
    name: str
    norm_type: str
    level: str


ARMS = {
    arm.letter: arm
    for arm in (
        Arm("A", "rms", "rms", "plain"), Arm("B", "coupled", "coupled", "paper"),
        Arm("C", "rms_fused", "rms", "fused"), Arm("D", "coupled_fused", "coupled", "fused"),
        Arm("E", "taper_folded", "taper", "fused"),
        Arm("L", "layer", "layer", "plain"), Arm("M", "layer_fused", "cbwc", "fused"),
    )
}  # fmt: skip


def find_arms(words: str) -> list[Arm]:
    """Arms by letter or name, separated by commas. Raises ConfigError."""
    by_word = ARMS | {arm.name: arm for arm in ARMS.values()}
    for word in words.split(","):
        if word not in by_word:
            there = ", ".join(f"{arm.letter} {arm.name}" for arm in ARMS.values())
            raise ConfigError(f"arms: {word!r} is none of {there}")
    return list({by_word[word].letter: by_word[word] for word in words.split(",")}.values())


def with_norms(model: GPT, norm_type: str, calibration: Tensor | None = None, **keys: Any) -> GPT:
    """`model` under another norm type, all other weights shared with it; the same model if it has that type already.

    Gains are kept, biases where the new norm has them. `keys` are those of the norm type (coupled_alpha, ...). A taper
    is run through its schedule on `calibration` (B, T), token ids, which sets the scale of each norm.
    """
    if model.config.norm_type == norm_type and not (norm_type == "taper" and not finished(model)):
        return model
    own = {name for row in NORM_TYPES.values() for name in row.keys}
    defaults = {field.name: field.default for field in dataclasses.fields(GPTConfig) if field.name in own}
    if norm_type == "taper":
        defaults |= {"taper_warmup": 1.0, "taper_end": 2.0}
    device = model.wte.weight.device
    config = dataclasses.replace(model.config, norm_type=norm_type, norm_plan="", **defaults | keys)
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in itertools.chain(model.parameters(), model.buffers())})
    twin.config, twin.plan = config, NormPlan(config, config.n_layer, config.n_embd, config.bias)
    for index, block in enumerate(twin.blocks):
        block.norm1 = replaced(block.norm1, twin.plan, 2 * index, device)
        block.norm2 = replaced(block.norm2, twin.plan, 2 * index + 1, device)
        for linear in (block.attn.proj, block.mlp.down):
            linear.__class__ = twin.plan.type.residual_linear  # the same parameters, centred in forward or not
    twin.norm_f = replaced(twin.norm_f, twin.plan, 2 * config.n_layer, device)
    if norm_type == "taper":
        run_taper(twin, calibration)
    return twin.eval()


def replaced(old: Norm, plan: NormPlan, position: int, device: torch.device) -> Norm:
    """The plan's norm for `position`, with the old one's gain, and its bias if there is room."""
    if isinstance(old, TaperNorm):
        old = old.base
    with device:
        new = plan.norm(position)
    target = new.base if isinstance(new, TaperNorm) else new
    for name in ("weight", "bias"):
        if getattr(target, name) is not None and getattr(old, name) is not None:
            setattr(target, name, getattr(old, name))
    return new


def finished(model: GPT) -> bool:
    """No norm of this model is still tapering."""
    return all(norm.phase == "fixed" for norm in model.norms() if isinstance(norm, TaperNorm))


@torch.no_grad()
def run_taper(model: GPT, idx: Tensor) -> None:
    """Takes a model through its taper: statistics on idx (B, T), calibration of every scale, gate shut."""
    for norm in model.norms():
        norm.train()
    model.set_step(1, 10)
    model.hidden(idx)
    model.set_step(10, 10)
