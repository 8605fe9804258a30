"""The arms that bench_decode.py compares: the weights of one model under several norms and levels.

A rms             RMSNorm around the library's products. torch.compile with its own options, or
                  with gpt-fast's, under which inductor writes the products; the faster one is
                  the baseline
B coupled         CoupledNorm with the paper's fusion, otherwise as A. B against A is the
                  paper's claim
C rms_fused       RMSNorm, exact, with everything fused: no launch of a norm
D coupled_fused   CoupledNorm with everything fused. D against C is what the shared statistic
                  alone is worth
E taper_folded    TaperNorm after its taper, folded: no statistic but the final norm's
L layer           LayerNorm, as A
M layer_fused     LayerNorm in its exact centred form (cbwc), everything fused
O own             the model's own norms, as A
P own_fused       the model's own norms, everything fused that can be

The arms A to M put another norm at every position of a pre-norm layout of R, L, s, T or I. All
others (output norms, norms that replace the stream, a norm of the embeddings, norms of other
letters) have the arms O and P alone: with A's norms they would be other models.
"""

import copy
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from common.errors import ConfigError, UserError
from decode.pack import PackedGPT, level_at, pack
from decode.step import Decoder
from fold.gpt import retype
from model import GPT, Block
from norm_plan import NormPlan
from norms import Place
from taper import is_tapered, tapers

OWN = ""
AUTO = "auto"  # instead of names of arms
# The norms that the arms A to M can replace by others.
PRE_NORMS = set("RLsTI")
# of the bench, for the arms that couple
COUPLED_KEYS = ("coupled_first", "coupled_span", "coupled_alpha")


@dataclass(frozen=True)
class DecodeArm:
    """A norm type, and how far it is fused."""

    letter: str
    name: str
    norm_type: str  # OWN: that of the model
    level: str  # a key of decode.pack.LEVELS


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
        DecodeArm("O", "own", OWN, "plain"),
        DecodeArm("P", "own_fused", OWN, "fused"),
    )
}


def find_arms(names: str) -> list[DecodeArm]:
    """Return the arms with these letters or names, separated by commas.

    Raises:
        ConfigError: there is no arm of one of the names.
    """
    by_name = ARMS | {arm.name: arm for arm in ARMS.values()}
    for name in names.split(","):
        if name not in by_name:
            known = ", ".join(f"{arm.letter} {arm.name}" for arm in ARMS.values())
            raise ConfigError(f"arms: {name!r} is none of {known}")
    return [by_name[name] for name in names.split(",")]


def arms_of(names: str, model: GPT) -> list[DecodeArm]:
    """Return the arms with these names for `model`; for AUTO those of its layout.

    Raises:
        ConfigError: an arm has norms that cannot take the place of the model's.
    """
    is_plain = is_plain_pre_norm(model)
    if names == AUTO:
        return find_arms("A,B,C,D" if is_plain else "O,P")
    arms = find_arms(names)
    for arm in arms:
        if arm.norm_type != OWN and not is_plain:
            raise ConfigError(
                f"arms: {arm.letter} {arm.name} puts other norms into a pre-norm layout, and this "
                f"one of norm_type={model.config.norm_type} is {model.plan}: take O,P"
            )
    return arms


def is_plain_pre_norm(model: GPT) -> bool:
    """Return whether the model's norms can be replaced by others, and nothing else changes."""
    has_known = set(model.plan.letters) <= PRE_NORMS
    return has_known and model.plan.adds_plainly and model.norm_e is None


def with_norms(model: GPT, norm_type: str, calibration: Tensor | None = None, **keys: Any) -> GPT:
    """Return `model` under another norm type; all other weights are shared with it.

    Gains are kept, and biases where the new norm has them. A model that has the type already is
    returned itself.

    Args:
        calibration: token ids (B, T) for a taper, which is run through its schedule on them. They
            determine the scale of each norm.
        keys: of the norm type (coupled_alpha, ...).
    """
    is_done = not tapers(model) or is_tapered(model)
    if model.config.norm_type == norm_type and is_done:
        return model
    device = model.wte.weight.device
    config = retype(model.config, norm_type, **keys)

    # a copy in which all tensors are those of the model
    tensors = itertools.chain(model.parameters(), model.buffers())
    changed = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    plan = NormPlan(config, config.n_layer, config.n_embd, config.bias)
    changed.config = config
    changed.plan = plan
    for index, block in enumerate(changed.blocks):
        block.__class__ = Block  # decoding folds by itself, and a FoldedBlock needs a shared norm
        block.norm1 = replaced(block.norm1, plan, 2 * index, device)
        block.norm2 = replaced(block.norm2, plan, 2 * index + 1, device)
        for linear in (block.attn.proj, block.mlp.down):
            # the same parameters; the class decides whether `forward` centres them
            linear.__class__ = plan.type.residual_linear
    changed.norm_f = replaced(changed.norm_f, plan, 2 * config.n_layer, device)
    if tapers(changed):
        run_taper(changed, calibration)
    return changed.eval()


def packed_arm(
    config: Any, model: GPT, arm: DecodeArm, batch: int, idx: Tensor
) -> tuple[GPT, PackedGPT]:
    """Return (`model` under the arm's norms, the same packed for `batch` sequences).

    Args:
        config: a DecodeBenchConfig; library_from and the keys of coupled are used.
        idx: token ids (B, T), the calibration of `with_norms`.
    """
    changed = model
    if arm.norm_type != OWN:
        used = COUPLED_KEYS if arm.norm_type == "coupled" else ()
        keys = {name: getattr(config, name) for name in used}
        changed = with_norms(model, arm.norm_type, idx, **keys)
    return changed, pack(changed, level_at(arm.level, batch, config.library_from))


def replaced(old: Place, plan: NormPlan, position: int, device: torch.device) -> Place:
    """The plan's place `position`, with the old one's gain, and its bias if there is room.

    The tensors are those of the old one, unless its gain is not its weight (LayerNorm scaling).
    """
    with device:
        new = plan.place(position)
    if new.core.bias is not None and old.core.bias is not None:
        new.core.bias = old.core.bias
    if new.core.weight is not None and old.core.weight is not None:
        weight = new.core.weight_for(old.core)
        new.core.weight = weight if weight is old.core.weight else nn.Parameter(weight)
    return new


@torch.no_grad()
def run_taper(model: GPT, idx: Tensor) -> None:
    """Take a model through its taper: statistics of idx (B, T), calibration, gates closed."""
    for place in model.places():
        place.train()
    model.set_step(1, 10)
    model.hidden(idx)
    model.set_step(10, 10)


# ------------------------------------------------------------------------- checks before timing

# An arm whose error exceeds this many times that of its unfused definition computes something else.
MAX_ERROR_RATIO = 1.5


@torch.no_grad()
def exact_logits(model: GPT, idx: Tensor) -> Tensor:
    """Compute logits (B, T, n_vocab) in float64 for a model of any type.

    One block at a time is widened, so that large models fit into memory.
    """
    T = idx.shape[1]
    x = model.wte(idx).double() * model.token_scale().double()  # (B, T, C)
    if model.wpe is not None:
        x = x + model.wpe.weight[:T].double()
    x = model.plan.embed(x)
    if model.norm_e is not None:
        x, _, _ = copy.deepcopy(model.norm_e).double()(x)
    delta = None
    inv_rms = None
    for block, rope in zip(model.blocks, model.ropes(0, T), strict=True):
        wide = copy.deepcopy(block).double()
        if rope is not None:
            rope = tuple(table.double() for table in rope)
        x, delta, inv_rms = wide(x, delta, inv_rms, rope, None)
    y, _, _ = copy.deepcopy(model.norm_f).double()(x, delta, inv_rms)
    head = model.head_weight()[: model.n_vocab].double()  # (n_vocab, C)
    return y @ head.T


@torch.no_grad()
def check_arm(model: GPT, decoder: Decoder, idx: Tensor, tokens: int) -> dict[str, Any]:
    """Decode `tokens` tokens after prompts idx (B, T), and compare the first and last sequence.

    Logits are compared with float64, tokens with those of `model.generate`. Tokens may differ only
    where float64 has a tie within the errors.

    Returns:
        error, error_unfused: root mean square over the new tokens' logits, relative; of the arm and
            of the model itself.
        same_tokens: tokens that agree, in all rows, before the first that differs.

    Raises:
        UserError: the arm computes something else.
    """
    T = idx.shape[1]
    rows = sorted({0, len(idx) - 1})
    logits = [decoder.prefill(idx)[rows].clone()]
    for _ in range(tokens - 1):
        logits.append(decoder.step()[rows].clone())
    found = torch.cat(logits, 1).double()  # (rows, tokens, n_vocab)
    out = decoder.out[rows, : T + tokens].clone()

    # the logits after the prompt's last token and after all new tokens but the last
    exact = exact_logits(model, out[:, :-1])[:, T - 1 :]
    unfused = model(out[:, :-1])[:, T - 1 :].double()
    size = exact.std()
    error = rms_error(found, exact)
    error_unfused = rms_error(unfused, exact)
    if not error <= MAX_ERROR_RATIO * error_unfused + 1e-12 * size:  # also for NaN
        raise UserError(
            f"logits are {error / size:.3g} off float64, {error / error_unfused:.3g} times as far "
            f"as the unfused model's; {MAX_ERROR_RATIO} times is allowed: "
            "the step, or a kernel, is wrong"
        )

    taken = exact.gather(-1, out[:, T:, None]).squeeze(-1)  # (rows, tokens)
    gap = exact.max(-1).values - taken
    largest_error = max((found - exact).abs().max(), (unfused - exact).abs().max())
    if gap.max() > 2 * largest_error:
        raise UserError(
            f"a token was taken that float64 puts {gap.max():.3g} below the best: the step is wrong"
        )

    generated = model.generate(idx[rows], tokens, temperature=0)
    # 1 up to the first token that differs
    agree = (generated[:, T:] == out[:, T:]).int().cumprod(1)
    return {
        "error": (error / size).item(),
        "error_unfused": (error_unfused / size).item(),
        "same_tokens": agree.sum(1).min().item(),
    }


def rms_error(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).square().mean().sqrt()
