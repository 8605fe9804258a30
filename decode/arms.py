"""The arms that bench_decode.py compares: one model's weights under several norms, at several
levels of fusion.

    A rms             RMSNorm, torch.compile around the library's products, or gpt-fast's options,
                      under which inductor writes its own; the faster of the two is the baseline
    B coupled         CoupledNorm with the paper's fusion, otherwise as A. The paper's claim is B
                      against A
    C rms_fused       exact RMSNorm with everything fused: no norm launch
    D coupled_fused   CoupledNorm with everything fused: D against C is what the shared statistic is
                      worth
    E taper_folded    TaperNorm after its taper, folded: no statistics but the final norm's
    L layer           LayerNorm, as A
    M layer_fused     LayerNorm as its exact centred form (cbwc), everything fused
"""

import copy
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.errors import ConfigError, UserError
from decode.pack import PackedGPT, level_at, pack
from decode.step import Decoder
from fold.gpt import retype
from model import GPT
from norm_plan import NormPlan
from norms import Norm
from taper import TaperNorm, is_tapered


@dataclass(frozen=True)
class DecodeArm:
    """A norm type and a level of decode.pack.LEVELS."""

    letter: str
    name: str
    norm_type: str
    level: str


ARMS = {
    arm.letter: arm
    for arm in (
        DecodeArm("A", "rms", "rms", "plain"),
        DecodeArm("B", "coupled", "coupled", "paper"),
        DecodeArm("C", "rms_fused", "rms", "fused"),
        DecodeArm("D", "coupled_fused", "coupled", "fused"),
        DecodeArm("E", "taper_folded", "taper", "fused"),
        DecodeArm("L", "layer", "layer", "plain"),
        DecodeArm("M", "layer_fused", "cbwc", "fused"),
    )
}


def find_arms(words: str) -> list[DecodeArm]:
    """Arms by letter or name, separated by commas. Raises ConfigError."""
    by_word = ARMS | {arm.name: arm for arm in ARMS.values()}
    for word in words.split(","):
        if word not in by_word:
            there = ", ".join(f"{arm.letter} {arm.name}" for arm in ARMS.values())
            raise ConfigError(f"arms: {word!r} is none of {there}")
    return list({by_word[word].letter: by_word[word] for word in words.split(",")}.values())


def with_norms(model: GPT, norm_type: str, calibration: Tensor | None = None, **keys: Any) -> GPT:
    """`model` under another norm type, all other weights shared with it; the same model if it has
    that type already.

    Gains are kept, biases where the new norm has them. `keys` are those of the norm type
    (coupled_alpha, ...). A taper is run through its schedule on `calibration` (B, T), token ids,
    which sets the scale of each norm.
    """
    if model.config.norm_type == norm_type and (norm_type != "taper" or is_tapered(model)):
        return model
    schedule = {"taper_warmup": 1.0, "taper_end": 2.0} if norm_type == "taper" else {}
    device, config = model.wte.weight.device, retype(model.config, norm_type, **schedule | keys)
    twin = copy.deepcopy(
        model,
        {id(tensor): tensor for tensor in itertools.chain(model.parameters(), model.buffers())},
    )
    twin.config, twin.plan = config, NormPlan(config, config.n_layer, config.n_embd, config.bias)
    for index, block in enumerate(twin.blocks):
        block.norm1 = replaced(block.norm1, twin.plan, 2 * index, device)
        block.norm2 = replaced(block.norm2, twin.plan, 2 * index + 1, device)
        for linear in (block.attn.proj, block.mlp.down):
            # the same parameters, centred in forward or not
            linear.__class__ = twin.plan.type.residual_linear
    twin.norm_f = replaced(twin.norm_f, twin.plan, 2 * config.n_layer, device)
    if norm_type == "taper":
        run_taper(twin, calibration)
    return twin.eval()


def packed_arm(
    model: GPT,
    arm: DecodeArm,
    batch: int,
    idx: Tensor,
    keys: dict[str, dict[str, Any]],
    library_from: int,
) -> tuple[GPT, PackedGPT]:
    """(`model` under the arm's norms, that packed for `batch` sequences); `keys` by norm type, the
    rest as above.
    """
    twin = with_norms(model, arm.norm_type, idx, **keys.get(arm.norm_type, {}))
    return twin, pack(twin, level_at(arm.level, batch, library_from))


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


@torch.no_grad()
def run_taper(model: GPT, idx: Tensor) -> None:
    """Takes a model through its taper: statistics on idx (B, T), calibration of every scale, gate
    shut.
    """
    for norm in model.norms():
        norm.train()
    model.set_step(1, 10)
    model.hidden(idx)
    model.set_step(10, 10)


# ------------------------------------------------------------------------------------ before timing

# An arm whose error is more than so many times that of its unfused definition computes something
# else.
MAX_ERROR_RATIO = 1.5
# What an arm is to keep to in 16 bits, where errors are what is rounded after every launch. A
# verdict and no condition: a few tokens of one model are a sample, in which correct arms lie on
# both sides.
AIM = 1.05


@torch.no_grad()
def exact_logits(model: GPT, idx: Tensor) -> Tensor:
    """Logits (B, T, n_vocab) in float64, whatever the model's type; one block at a time, so that
    large models fit.
    """
    T = idx.shape[1]
    x, rope = model.wte(idx).double(), None
    if model.wpe is not None:
        x = x + model.wpe.weight[:T].double()
    else:
        rope = model.rope_cos[:T].double(), model.rope_sin[:T].double()
    x, delta, inv_rms = model.plan.embed(x), None, None
    for block in model.blocks:
        x, delta, inv_rms = copy.deepcopy(block).double()(x, delta, inv_rms, rope, None)
    y = copy.deepcopy(model.norm_f).double()(x, delta, inv_rms)[0]
    return y @ model.head_weight()[: model.n_vocab].double().T


@torch.no_grad()
def check_arm(model: GPT, decoder: Decoder, idx: Tensor, tokens: int) -> dict[str, Any]:
    """Decodes `tokens` tokens behind prompts idx (B, T) and compares: logits with float64, tokens
    with generate's.

    {"error", "error_unfused": root mean square, relative, over the new tokens' logits;
    "within_aim": is the former at most AIM times the latter? (in 16 bits only); "same_tokens": how
    many agree before the first that differs}, for the first and the last sequence. Tokens may
    differ only where float64 has a tie within the errors. Raises UserError for an arm that computes
    something else.
    """
    T, rows = idx.shape[1], sorted({0, len(idx) - 1})
    logits = [decoder.prefill(idx)[rows].clone()]
    for _ in range(tokens - 1):
        logits.append(decoder.step()[rows].clone())
    out = decoder.out[rows, : T + tokens].clone()
    exact, found = exact_logits(model, out[:, :-1])[:, T - 1 :], torch.cat(logits, 1).double()
    unfused = model(out[:, :-1])[:, T - 1 :].double()
    size, (error, error_unfused) = (
        exact.std(),
        (rms_error(part, exact) for part in (found, unfused)),
    )
    if not error <= MAX_ERROR_RATIO * error_unfused + 1e-12 * size:
        raise UserError(
            f"logits are {error / size:.3g} off float64, {error / error_unfused:.3g} times as far "
            f"as the unfused model's; {MAX_ERROR_RATIO} times is allowed: "
            "the step, or a kernel, is wrong"
        )
    gap = exact.max(-1).values - exact.gather(-1, out[:, T:, None]).squeeze(-1)  # (rows, tokens)
    if gap.max() > 2 * max((part - exact).abs().max() for part in (found, unfused)):
        raise UserError(
            f"a token was taken that float64 puts {gap.max():.3g} below the best: the step is wrong"
        )
    same = (
        (model.generate(idx[rows], tokens, temperature=0)[:, T:] == out[:, T:])
        .int()
        .cumprod(1)
        .sum(1)
        .min()
    )
    verdict = (
        {"within_aim": bool(error <= AIM * error_unfused)}
        if model.wte.weight.element_size() == 2
        else {}
    )
    return {
        "error": (error / size).item(),
        "error_unfused": (error_unfused / size).item(),
        **verdict,
        "same_tokens": same.item(),
    }


def rms_error(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).square().mean().sqrt()
