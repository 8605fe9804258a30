"""The norm plan: which norm sits where in a GPT with L blocks.

A plan is printed and parsed as one string of up to three sections with bars between:

    2L + 1 input norms: before attention and MLP of each block, and the final norm
    2L output norms: of what attention and MLP of each block give, before it is added
    1 norm of the embeddings

Each position has one letter. Sections at the end that are all I are left out.

    R  RMSNorm, which computes a statistic              T  TaperNorm
    s  RMSNorm with the statistic of the last R         D  Dynamic Tanh
    L  LayerNorm                                        E  Derf, dynamic erf
    P  the stream is replaced by the normalised sum     I  no norm
    B  replaced so, then read through a second norm

    coupled, 4 blocks, coupled_first=1    RR Rs Rs Rs R
    coupled, 4 blocks, coupled_span=2     Rs ss Rs ss R
    Post-LN, DeepNorm, 2 blocks           IP PP P
    Mix-LN, 4 blocks (the first Post-LN)  IP BR RR RR R
    HybridNorm, 2 blocks                  IP IP R
    OLMo 2, 2 blocks                      II II R | RR RR
    Peri-LN, 2 blocks                     RR RR R | RR RR | R

So CoupledNorm is not a special block: it is a plan in which some positions share. Numbers, such as
a residual weight, and norms within attention are keys: `NormPlan.notes` prints them beside it.

To add a norm type: its class goes into norms.py, its letter into NORMS at the end of this file, its
row into NORM_TYPES (norm_types.py). See DynamicTanh, D and dyt for an example.
"""

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor, nn

from common.errors import ConfigError
from configurator import check_ranges, key
from kernels import MODES
from norm_types import COMMON, NONE, NORM_TYPES, REPLACING, SHARED, Recipe, base_letter
from norms import (
    DynamicErf,
    DynamicTanh,
    LayerNorm,
    LearnedScale,
    NoNorm,
    Norm,
    Place,
    RMSNorm,
    SharedRMSNorm,
)
from taper import ScaleAnchor, TaperNorm, TaperSchedule

SHOWN = 200  # characters of a plan in a message


@dataclass(frozen=True)
class NormConfig:
    """Keys that decide the norm plan.

    A key of one norm type is refused when another type is chosen.
    """

    norm_type: str = key(
        "layer",
        "normalisation: layer, rms, coupled, cbwc, taper, post, deepnorm, mixln, peri, olmo2, "
        "hybrid, keel, lns, dyt, derf, none",
    )
    norm_plan: str = key(
        "", "a plan as printed, e.g. 'Rs Rs R': overrides the shorthands of the norm type"
    )
    norm_eps: float = key(1e-5, "added to the mean square, inside the root", least=0, most=1.0)
    # What a sublayer gives at the start is small. With 1e-5 its norm would give 0.2 to 0.05 instead
    # of 1, with 1e-6, OLMo 2's and Gemma's value, 0.6 to 0.14.
    output_eps: float = key(1e-6, "norm_eps of the output norms", least=0, most=1.0)
    norm_gain: str = key(
        "plain",
        "gains of norms; plain: learned, one_plus: stored as 1 + weight, none: no gains and biases",
        ("plain", "one_plus", "none"),
    )
    initial_gain: float | tuple[float, ...] = key(
        1.0,
        "gains at the start: one number for the input norms, or one for each letter of the plan "
        "(2L+1, or all 4L+2)",
        least=0,
        most=1e6,
    )
    norm_recipe: str = key(
        "paper",
        "initial values of the norm type; paper: its authors' for language models, common: those "
        "of the other norm types",
        ("paper", "common"),
    )
    qk_norm: str | None = key(
        None,
        "RMSNorm of queries and of keys; head: over the channels of each head, full: of all heads "
        "(auto: as the norm type, else none)",
        ("none", "head", "full"),
    )
    kernels: str = key(
        "auto", "norms by Triton or plain PyTorch (auto: Triton on a GPU unless compiled)", MODES
    )
    rms_fraction: float = key(
        1.0,
        "rms: share of the channels, from the first on, that the RMS is taken over",
        least=1e-6,
        most=1.0,
    )
    norm_groups: int = key(
        1, "rms: number of channel groups that are normalised independently", least=1
    )
    rms_bias: bool = key(False, "rms: norms have LayerNorm's bias, where the model has biases")
    post_base: str = key(
        "rms",
        "post, deepnorm, mixln, hybrid, keel: the norm that replaces the stream (P and B)",
        ("rms", "layer"),
    )
    residual_weight: float | None = key(
        None,
        "post, deepnorm, mixln, hybrid, keel: weight of the stream in the sum at P and B, but 1 "
        "at keel's first B (auto: as the norm type)",
        least=1e-6,
        most=1e6,
    )
    mixln_share: float = key(
        0.25, "mixln: share of the blocks, from the first on, with Post-LN", least=0, most=1.0
    )
    point_alpha: float | tuple[float, ...] | None = key(
        None,
        "dyt, derf: alpha at the start, one number or that of attention, MLP and final norm "
        "(auto: as norm_recipe)",
        least=1e-6,
        most=1e6,
    )
    coupled_first: int = key(
        0,
        "coupled: this many blocks at the start keep their own statistics",
        least=0,
    )
    coupled_span: int = key(
        1,
        "coupled: blocks that share one statistic (0: all; above 1, set coupled_calibrate too, "
        "or training may diverge)",
        least=0,
    )
    coupled_alpha: float | tuple[float, ...] = key(
        1.0,
        "coupled: divides the shared statistic; one number, or 2L+1 (those at s are used)",
        least=1e-6,
        most=1e6,
    )
    # Alpha is calibrated and not learned: the gain is a learned scale already, and it did not keep
    # spans of several blocks from diverging.
    coupled_calibrate: int = key(
        0,
        "coupled: steps after which alpha is set to the measured drift again (0: never)",
        least=0,
    )
    coupled_grad: str = key(
        "detach", "coupled: gradient through the shared statistic", ("detach", "full")
    )
    coupled_impl: str = key(
        "scale",
        "coupled: where the scale is applied; scale: before the MLP's first matmul, fold: after "
        "it, auto: fold if compiled and the batch is large",
        ("scale", "fold", "auto"),
    )
    taper_base: str = key("rms", "taper: the norm that is tapered away", ("rms", "layer"))
    # A warm-up of 0.1 was too short: the stream then grew threefold after c was set, and the run
    # ended 0.25 nats worse (results/cpu/taper).
    taper_warmup: float = key(
        0.5,
        "taper: full norm up to this step (below 1: share of max_iters)",
        least=0,
    )
    taper_end: float = key(
        0.75,
        "taper: norm gone from this step on (below 1: share of max_iters; as taper_warmup: "
        "gone at once)",
    )
    taper_fit: str = key(
        "norm",
        "taper: least-squares scale for each norm, or for each of its channels",
        ("norm", "channel"),
    )
    taper_final: bool = key(False, "taper: taper the final norm too")
    taper_anchor: float = key(
        0.0,
        "taper: weight of the loss that holds the scale of the final residual stream",
        least=0,
        most=1e6,
    )

    def __post_init__(self) -> None:
        if self.norm_type not in NORM_TYPES:
            near = difflib.get_close_matches(self.norm_type, NORM_TYPES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it is one of {', '.join(NORM_TYPES)}"
            raise ConfigError(f"unknown norm_type {self.norm_type!r}: {hint}")
        # A key that would do nothing is a mistake of its user.
        for name, others in foreign_keys(self.norm_type).items():
            if getattr(self, name) != _default(name):
                raise ConfigError(
                    f"{name} is a key of norm_type={others}, this is {self.norm_type}: remove one"
                )
        check_ranges(self)
        self._check_gains()
        self._check_layout()
        if self.coupled_impl != "scale" and self.coupled_grad != "detach":
            raise ConfigError(
                f"coupled_impl={self.coupled_impl} needs coupled_grad=detach: change one of them"
            )
        if self.taper_end == 1:
            raise ConfigError(
                "taper_end=1: is it a step or the whole run? Give a later step, or a share below 1"
            )
        # A step and a share are compared once max_iters is known (TaperSchedule.steps).
        same_unit = (self.taper_warmup < 1) == (self.taper_end < 1)
        if self.taper_end <= 0 or (same_unit and self.taper_warmup > self.taper_end):
            raise ConfigError(
                f"taper_warmup={self.taper_warmup} must not come after taper_end={self.taper_end}"
            )

    def _check_gains(self) -> None:
        kinds = NORM_TYPES[self.norm_type].gain_kinds
        if self.norm_gain not in kinds:
            raise ConfigError(
                f"norm_gain={self.norm_gain}: norm_type={self.norm_type} knows {', '.join(kinds)}"
            )
        gains = self.initial_gain
        if gains == 0 or (isinstance(gains, tuple) and not any(gains)):
            # The model would not see its text.
            raise ConfigError(f"initial_gain={gains}: must be above 0 at one norm or more")
        if not has_gain(self) and self.initial_gain != 1:
            raise ConfigError("initial_gain needs gains, and norm_gain=none has none: remove one")

    def _check_layout(self) -> None:
        alpha = self.point_alpha
        values = alpha if isinstance(alpha, tuple) else (alpha or 1.0,) * 3
        if len(values) != 3:
            raise ConfigError(
                "point_alpha needs one positive number, or three: attention, MLP, final norm"
            )


def foreign_keys(norm_type: str) -> dict[str, str]:
    """Return {key: norm types that read it} for the norm keys that `norm_type` does not read.

    Their values in a saved config mean nothing: they are the defaults of its time.
    """
    own = NORM_TYPES[norm_type].keys if norm_type in NORM_TYPES else ()
    readers: dict[str, list[str]] = {}
    for other, row in NORM_TYPES.items():
        for name in row.keys:
            readers.setdefault(name, []).append(other)
    return {name: " or ".join(others) for name, others in readers.items() if name not in own}


def keys_of(norm_type: str) -> dict[str, object]:
    """Return {norm key: default} for the keys that `norm_type` reads."""
    others = {"norm_type", *foreign_keys(norm_type)}
    if NORM_TYPES[norm_type].recipe is COMMON:
        others.add("norm_recipe")  # both values are the same
    # norm_type itself is not one of them.
    return {field.name: field.default for field in fields(NormConfig) if field.name not in others}


def _default(name: str) -> object:
    return next(field.default for field in fields(NormConfig) if field.name == name)


@dataclass(frozen=True)
class Position:
    """A place of the plan, as far as a builder of norms has to know it."""

    index: int  # 0 .. 2L for input norms and the final norm
    n_layer: int
    channels: int
    has_bias: bool  # does the model have biases?
    eps: float
    initial: float  # gain at the start
    depth: int | None = None  # block number that gains are scaled by, or None

    @property
    def is_final(self) -> bool:
        return self.index == 2 * self.n_layer


Builder = Callable[[NormConfig, Position], Norm]


class NormPlan:
    """The norms of one model.

    Args:
        config: the norm keys.
        n_layer: number of blocks L.
        channels: of the residual stream.
        bias: does the model have biases?

    Raises:
        ConfigError: plan and model do not fit.
    """

    def __init__(self, config: NormConfig, n_layer: int, channels: int, bias: bool):
        self.config = config
        self.n_layer = n_layer
        self.channels = channels
        self.bias = bias
        self.type = NORM_TYPES[config.norm_type]
        self.recipe = recipe_of(config)
        if config.coupled_first > n_layer:
            raise ConfigError(
                f"coupled_first={config.coupled_first}: the model has only {n_layer} blocks"
            )
        # The plan that is given, else that of the norm type
        text = config.norm_plan or self.type.default_plan(config, n_layer)
        # 2L + 1 letters, 2L letters, one letter
        self.letters, self.outputs, self.embedding = self._parse(text)
        self._check_letters()
        self._check_alpha()
        if channels % config.norm_groups:
            raise ConfigError(f"norm_groups={config.norm_groups} does not divide n_embd={channels}")

    # What is where

    @property
    def qk_kind(self) -> str:
        """Over which channels queries and keys are normalised: none, head or full."""
        return qk_kind(self.config)

    @property
    def has_v_norm(self) -> bool:
        return has_v_norm(self.config)

    @property
    def decays_gains(self) -> bool:
        """Does weight decay act on gains?"""
        return decays_gains(self.config)

    @property
    def adds_plainly(self) -> bool:
        """Is delta added as it is at every position: no output norm, no replaced stream?"""
        is_replaced = not set(REPLACING).isdisjoint(self.letters)
        return not is_replaced and set(self.outputs) <= {NONE}

    def init_factors(self) -> dict[str, float]:
        """Return {part of a block: factor on its initial weights} (Recipe.init_factors)."""
        return self.recipe.init_factors(self.n_layer)

    def _parse(self, text: str) -> tuple[str, str, str]:
        """Return the letters of the inputs, the outputs and the embedding of a printed plan."""
        sections = text.replace(" ", "").split("|")
        if len(sections) > 3:
            raise ConfigError(
                f"norm_plan {text[:SHOWN]!r} has {len(sections)} sections: "
                "inputs | outputs | embedding"
            )
        inputs, outputs, embedding = sections + [""] * (3 - len(sections))
        return inputs, outputs or NONE * 2 * self.n_layer, embedding or NONE

    def _check_letters(self) -> None:
        positions = 2 * self.n_layer + 1
        sections = (
            ("", self.letters, positions, self.type.allowed_letters),
            (" for the outputs", self.outputs, positions - 1, self.type.outputs + NONE),
            (" for the embedding", self.embedding, 1, self.type.embeddings + NONE),
        )
        for where, letters, count, allowed in sections:
            if len(letters) != count:
                shown = self.config.norm_plan[:SHOWN]
                raise ConfigError(
                    f"norm_plan {shown!r} has {len(letters)} letters{where}, "
                    f"{self.n_layer} blocks need {count}"
                )
            for letter in letters:
                if letter not in allowed:
                    others = [
                        name
                        for name, row in NORM_TYPES.items()
                        if not where and letter in row.allowed_letters
                    ]
                    known = f"; {', '.join(others)} know {letter}" if others else ""
                    raise ConfigError(
                        f"norm_plan letter {letter!r}{where}: norm_type={self.config.norm_type} "
                        f"knows {', '.join(allowed)}{known}"
                    )
        for index, letter in enumerate(self.letters):
            # The letter before, all s left out, must be R: that norm has computed a statistic.
            if letter == SHARED and self.letters[:index].rstrip(SHARED)[-1:] != "R":
                raise ConfigError(
                    f"norm_plan {self}: position {index} shares a statistic that no R computed"
                )
        if self.config.coupled_impl != "scale" and not self.adds_plainly:
            raise ConfigError(
                f"coupled_impl={self.config.coupled_impl} adds within the products, and norm_plan "
                f"{self} has output norms between: use coupled_impl=scale"
            )

    def _check_alpha(self) -> None:
        positions = 2 * self.n_layer + 1
        alpha = self.config.coupled_alpha
        if isinstance(alpha, tuple):
            is_valid = len(alpha) == positions and all(value > 0 for value in alpha)
        else:
            is_valid = alpha > 0
        if not is_valid:
            raise ConfigError(
                f"coupled_alpha needs one positive number, or {positions} (one for each position)"
            )
        gains = self.config.initial_gain
        letters = 2 * positions  # of inputs, outputs and embedding
        if isinstance(gains, tuple) and len(gains) not in (positions, letters):
            raise ConfigError(
                f"initial_gain needs one number, {positions} (one for each input norm) or "
                f"{letters} (one for each letter of the plan)"
            )

    # The norms

    def place(self, index: int) -> Place:
        """Return place `index` (0 .. 2L): its norm, and the output norm before it, if any."""
        config = self.config
        letter = self.letters[index]
        replaces = letter in REPLACING
        position = self._position(index)
        base = base_letter(config.post_base)
        norm = NORMS[base if replaces else letter](config, position)
        # the next norm of the same kind reads the new stream
        reader = NORMS[base](config, position) if letter == "B" else None
        weight = residual_weight(config, position) if replaces else 1.0
        anchor = None
        # The final norm sees the stream that the anchor holds.
        if position.is_final and config.taper_anchor:
            centers = config.taper_base == "layer"
            anchor = ScaleAnchor(schedule(config), config.taper_anchor, config.norm_eps, centers)
        return Place(norm, self._output(index), replaces, reader, weight, anchor)

    def _output(self, index: int) -> Norm | None:
        """Return the norm of what the sublayer before place `index` gives, or None."""
        letter = self.outputs[index - 1] if index else NONE
        if letter == NONE:
            return None
        initial = self._initial_gain(2 * self.n_layer + index)
        position = replace(self._position(index), eps=self.config.output_eps, initial=initial)
        return NORMS[letter](self.config, replace(position, depth=None))

    def embedding_norm(self) -> Place | None:
        """Return what the embeddings go through before the first block, or None."""
        if self.embedding != NONE:
            initial = self._initial_gain(4 * self.n_layer + 1)
            position = replace(self._position(0), initial=initial, depth=None)
            return Place(NORMS[self.embedding](self.config, position))
        if self.recipe.learned_scale:
            return Place(LearnedScale(self.channels, math.sqrt(self.channels)))
        return None

    def qk_norm(self, heads: int, head_dim: int) -> Norm | None:
        """Return a norm of queries or keys, with `heads` heads; None without qk_norm."""
        if self.qk_kind == "none":
            return None
        channels = {"head": head_dim, "full": heads * head_dim}[self.qk_kind]
        position = Position(0, self.n_layer, channels, False, self.config.norm_eps, 1.0)
        return RMSNorm(**common(self.config, position))

    def v_norm(self, heads: int, head_dim: int) -> Norm | None:
        """Return a norm of values, as `qk_norm` returns one of keys; None without v_norm."""
        return self.qk_norm(heads, head_dim) if self.has_v_norm else None

    def _position(self, index: int) -> Position:
        has_bias = self.bias or self.recipe.has_bias
        # the block that reads this place, from 1 on
        block = index // 2 + 1 if self.type.scales_by_depth and index < 2 * self.n_layer else None
        return Position(
            index,
            self.n_layer,
            self.channels,
            has_bias,
            self.config.norm_eps,
            self._initial_gain(index),
            block,
        )

    def _initial_gain(self, letter: int) -> float:
        """Return the initial gain of letter `letter` of the plan (0 .. 4L + 1)."""
        gains = self.config.initial_gain
        is_input = letter <= 2 * self.n_layer
        if not isinstance(gains, tuple):
            return gains if is_input else 1.0
        return gains[letter] if letter < len(gains) else 1.0

    def residual_linear(self, in_features: int, out_features: int, bias: bool) -> nn.Linear:
        """Return a linear whose output is added to the residual stream."""
        return self.type.residual_linear(in_features, out_features, bias=bias)

    def embed(self, x: Tensor) -> Tensor:
        """Return the sum of the embeddings x (B, T, C) as the linears of the type need it."""
        return x if self.type.embed is None else self.type.embed(x)

    # For people

    def __str__(self) -> str:
        sections = [self.letters, self.outputs, self.embedding]
        while len(sections) > 1 and set(sections[-1]) <= {NONE}:
            sections.pop()
        pairs = (
            " ".join(letters[i : i + 2] for i in range(0, len(letters), 2)) for letters in sections
        )
        return " | ".join(pairs)

    def notes(self, at_start: bool = True) -> list[str]:
        """Return what belongs to the layout and is not in the letters, a phrase each.

        Args:
            at_start: initial values too. A run that starts from other weights does not use them.
        """
        config = self.config
        found = []
        weights = {
            index: residual_weight(config, self._position(index))
            for index, letter in enumerate(self.letters)
            if letter in REPLACING
        }
        if weights:
            base = "LayerNorm" if config.post_base == "layer" else "RMSNorm"
            first, *others = weights.values()
            text = f"{first:.4g}"
            if set(others) - {first}:
                text += f" at position {min(weights)}, {others[-1]:.4g} at the others"
            letters = " and ".join(sorted({self.letters[index] for index in weights}, reverse=True))
            found.append(f"{base} at {letters}, residual weight {text}")
        elif "mixln_share" in self.type.keys:
            found.append("no block is Post-LN: give a larger mixln_share or more blocks")
        if at_start and set(self.letters) & set("DE"):
            numbers = [point_alpha(config, self._position(index)) for index in range(2)]
            numbers.append(point_alpha(config, self._position(2 * self.n_layer)))
            text = ", ".join(f"{number:g}" for number in numbers)
            found.append(f"alpha {text} in attention, MLP and final norm")
        if self.qk_kind != "none":
            what = "queries, keys and values" if self.has_v_norm else "queries and keys"
            gain = "" if has_gain(config) else ", no gain"
            found.append(f"norms of {what} ({self.qk_kind}{gain})")
        if self.type.scales_by_depth:
            found.append("gains of block l divided by sqrt(l)")
        if config.norm_gain != "plain":
            found.append(f"gains {config.norm_gain}")
        if at_start and config.initial_gain != 1:
            found.append(f"initial gains {config.initial_gain}")
        if self.recipe.has_bias and not self.bias:
            found.append("biases in norms")
        if not set(self.outputs) <= {NONE}:
            found.append(f"eps {config.output_eps:g} in output norms")
        if self.decays_gains:
            found.append("weight decay on gains")
        if self.recipe.learned_scale:
            found.append(f"embeddings times a learned {math.sqrt(self.channels):.4g}")
        factors = self.init_factors() if at_start else {}
        found += [
            f"initial {part} {factor:.4g} times the common"
            for part, factor in factors.items()
            if not math.isclose(factor, 1)
        ]
        return found


# --------------------------------------------------------------------------- from letters to norms


def has_gain(config: NormConfig) -> bool:
    return config.norm_gain != "none"


def qk_kind(config: NormConfig) -> str:
    """Return over which channels queries and keys are normalised: none, head or full."""
    return NORM_TYPES[config.norm_type].qk_norm if config.qk_norm is None else config.qk_norm


def resolved(config: NormConfig, name: str) -> object:
    """Return the value of a key, and for one that is auto what the norm type makes of it."""
    return qk_kind(config) if name == "qk_norm" else getattr(config, name)


def has_v_norm(config: NormConfig) -> bool:
    """Are values normalised, as queries and keys are?"""
    return NORM_TYPES[config.norm_type].v_norm and qk_kind(config) != "none"


def decays_gains(config: NormConfig) -> bool:
    """Does weight decay act on gains?"""
    return recipe_of(config).decay_gains and has_gain(config)


def recipe_of(config: NormConfig) -> Recipe:
    return NORM_TYPES[config.norm_type].recipe if config.norm_recipe == "paper" else COMMON


def residual_weight(config: NormConfig, position: Position) -> float:
    """Return the weight of the stream in the sum at P and B."""
    row = NORM_TYPES[config.norm_type]
    if row.first_border_is_plain and position.index == 2:
        return 1.0
    if config.residual_weight is not None:
        return config.residual_weight
    return row.residual_weight(position.n_layer)


def common(config: NormConfig, position: Position) -> dict[str, Any]:
    """Return the arguments that all norms of a place have."""
    return {
        "channels": position.channels,
        "eps": position.eps,
        "affine": has_gain(config),
        "initial": position.initial,
        "offset": 1.0 if config.norm_gain == "one_plus" else 0.0,
        "depth": position.depth,
        "kernels": config.kernels,
    }


def build_layer(config: NormConfig, position: Position) -> Norm:
    return LayerNorm(bias=position.has_bias, **common(config, position))


def build_rms(config: NormConfig, position: Position) -> Norm:
    # RMSNorm has no bias by default. In cbwc it stands for LayerNorm, bias included.
    wants_bias = config.rms_bias or NORM_TYPES[config.norm_type].rms_has_bias
    return RMSNorm(
        bias=position.has_bias and wants_bias,
        fraction=config.rms_fraction,
        groups=config.norm_groups,
        **common(config, position),
    )


def build_shared(config: NormConfig, position: Position) -> Norm:
    alpha = config.coupled_alpha
    return SharedRMSNorm(
        alpha=alpha[position.index] if isinstance(alpha, tuple) else alpha,
        detach=config.coupled_grad == "detach",
        # then alpha is a buffer, which training/stream.py sets
        calibrated=config.coupled_calibrate > 0,
        **common(config, position),
    )


def build_taper(config: NormConfig, position: Position) -> Norm:
    base = NORMS[base_letter(config.taper_base)](config, position)
    return TaperNorm(base, schedule(config), fit_channels=config.taper_fit == "channel")


def schedule(config: NormConfig) -> TaperSchedule:
    return TaperSchedule(config.taper_warmup, config.taper_end)


def point_alpha(config: NormConfig, position: Position) -> float:
    """Return the initial alpha of a norm without a statistic."""
    alpha = config.point_alpha
    if alpha is None:
        alpha = recipe_of(config).point_alpha(position.channels)
    if isinstance(alpha, tuple):  # of attention, MLP and final norm
        alpha = alpha[2 if position.is_final else position.index % 2]
    return alpha


def build_tanh(config: NormConfig, position: Position) -> Norm:
    alpha = point_alpha(config, position)
    return DynamicTanh(bias=position.has_bias, alpha=alpha, **common(config, position))


def build_erf(config: NormConfig, position: Position) -> Norm:
    alpha = point_alpha(config, position)
    return DynamicErf(bias=position.has_bias, alpha=alpha, **common(config, position))


def build_none(config: NormConfig, position: Position) -> Norm:
    return NoNorm(position.channels, affine=False)


NORMS: dict[str, Builder] = {
    "L": build_layer,
    "R": build_rms,
    SHARED: build_shared,
    "T": build_taper,
    "D": build_tanh,
    "E": build_erf,
    NONE: build_none,
}
