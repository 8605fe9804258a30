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
    B  replaced so, then read through a second norm     G  GatedNorm
    H  bounded tanh, which computes a statistic         V  SeeDNorm, whose gain varies
    h  bounded tanh with the statistic of the last H

    coupled, 4 blocks, coupled_first=1    RR Rs Rs Rs R
    coupled, 4 blocks, coupled_span=2     Rs ss Rs ss R
    Post-LN, DeepNorm, 2 blocks           IP PP P
    Mix-LN, 4 blocks (the first Post-LN)  IP BR RR RR R
    HybridNorm, 2 blocks                  IP IP R
    OLMo 2, 2 blocks                      II II R | RR RR
    Peri-LN, 2 blocks                     RR RR R | RR RR | R
    BHyT, 2 blocks                        Hh Hh R

So CoupledNorm is not a special block: it is a plan in which some positions share. Numbers, such as
a residual weight, and norms within attention are keys: `NormPlan.notes` prints them beside it.

To add a norm type: docs/norms.md says how.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from common.errors import ConfigError, NormFileError
from common.norm_file import KEY, PIN
from configurator import check_ranges, key
from kernels import MODES
from norm_types import (
    COMMON,
    INIT_PARTS,
    NONE,
    NORM_TYPES,
    REPLACING,
    SHARED,
    SOURCES,
    NormType,
    Recipe,
    added_types,
    base_letter,
)
from norms import (
    BoundedTanh,
    DynamicErf,
    DynamicTanh,
    GatedNorm,
    LayerNorm,
    LearnedScale,
    NoNorm,
    Norm,
    Place,
    RMSNorm,
    SeeDNorm,
    SharedBoundedTanh,
    SharedRMSNorm,
)
from taper import ScaleAnchor, TaperNorm, TaperSchedule

SHOWN = 200  # characters of a plan in a message
QK_NORMS = ("none", "head", "full")


@dataclass(frozen=True)
class NormConfig:
    """Keys that decide the norm plan.

    A key of one norm type is refused when another type is chosen.
    """

    norm_type: str = key("layer", f"normalisation: {', '.join(NORM_TYPES)}")
    norm_plan: str = key("", "a plan as printed, e.g. 'Rs Rs R': overrides that of the norm type")
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
        "gains at the start: one number or 2L+1, of the input norms, or 4L+2 (all)",
        least=0,
        most=1e6,
    )
    paired_gains: float = key(
        0.0, "a: gains of a block start at 1 - a s and 1 + a s, s random signs", least=0, most=1.0
    )
    norm_recipe: str = key(
        "paper",
        "initial values; paper: the authors' for language models, common: as other norm types",
        ("paper", "common"),
    )
    qk_norm: str | None = key(
        None,
        "RMSNorm of queries and of keys; head: over the channels of each head, full: of all heads "
        "(auto: as the norm type, else none)",
        QK_NORMS,
    )
    kernels: str = key(
        "auto", "norms by Triton or plain PyTorch (auto: Triton on a GPU unless compiled)", MODES
    )
    rms_fraction: float = key(
        1.0, "rms: share of the channels, the first ones, that are counted", least=1e-6, most=1.0
    )
    norm_groups: int = key(1, "rms: groups of channels, normalised independently", least=1)
    rms_bias: bool = key(False, "rms, coupled: LayerNorm's bias, but in norms that share")
    post_base: str = key("rms", "the norm at P and B, which replace the stream", ("rms", "layer"))
    residual_weight: float | None = key(
        None,
        "weight of the stream in the sum at P and B, but 1 at keel's first B (auto: as the type)",
        least=1e-6,
        most=1e6,
    )
    mixln_share: float = key(0.25, "mixln: share of Post-LN blocks, the first", least=0, most=1.0)
    point_alpha: float | tuple[float, ...] | None = key(
        None,
        "dyt, derf, bhyt: alpha at the start, one number or that of attention, MLP and final norm "
        "(auto: as norm_recipe)",
        least=1e-6,
        most=1e6,
    )
    gate_start: str = key(
        "half",
        "gatednorm: gates start at 1/2; identity: twice as large, at 1",
        ("half", "identity"),
    )
    coupled_first: int = key(0, "coupled: blocks at the start with own statistics", least=0)
    coupled_span: int = key(
        1,
        "coupled: blocks that share one statistic (0: all; above 1 training may diverge without "
        "coupled_calibrate)",
        least=0,
    )
    coupled_alpha: float | tuple[float, ...] = key(
        1.0, "coupled: divides the shared statistic; one number, or 2L+1", least=1e-6, most=1e6
    )
    # Alpha is calibrated and not learned: the gain is a learned scale already, and it did not keep
    # spans of several blocks from diverging.
    coupled_calibrate: int = key(
        0, "coupled: steps after which alpha is set to the measured drift (0: never)", least=0
    )
    coupled_grad: str = key(
        "detach", "coupled: gradient of shared positions in the statistic", ("detach", "full")
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
        0.5, "taper: full norm up to this step (below 1: share of max_iters)", least=0
    )
    taper_end: float = key(
        0.75,
        "taper: no norm from this step on (below 1: share; as taper_warmup: gone at once)",
        least=1e-9,
    )
    taper_fit: str = key(
        "norm", "taper: one least-squares scale a norm, or one a channel", ("norm", "channel")
    )
    taper_final: bool = key(False, "taper: taper the final norm too")
    taper_anchor: float = key(
        0.0, "taper: weight of the loss that holds the final stream's scale", least=0, most=1e6
    )
    # The digest and never the path: a saved config names the code that it needs, and cannot run it.
    norm_sha256: str = key(
        "", "SHA-256 of the norm file that has the norm type ('': the one that is given)"
    )

    def __post_init__(self) -> None:
        if not re.fullmatch("([0-9a-f]{64})?", self.norm_sha256):
            raise ConfigError(f"{PIN}={self.norm_sha256!r}: a SHA-256 has 64 digits, 0-9 and a-f")
        if self.norm_type not in NORM_TYPES:
            raise self._unknown_type()
        source = self.type.source
        if source is not None and self.norm_sha256 not in ("", source.sha256):
            raise NormFileError(
                f"norm_type {self.norm_type!r} is that of a norm file with the SHA-256 "
                f"{self.norm_sha256}, and {KEY}={source.path} has {source.sha256}: give that file"
            )
        if source is not None:
            object.__setattr__(self, PIN, source.sha256)  # frozen for everybody else
        # A key that would do nothing is a mistake of its user.
        for name, readers in foreign_keys(self.norm_type).items():
            if getattr(self, name) != getattr(NormConfig, name):
                raise ConfigError(
                    f"{name} is a key of norm_type={readers}, this is {self.norm_type}: remove one"
                )
        check_ranges(self)
        if self.norm_gain not in self.type.gain_kinds:
            raise ConfigError(
                f"norm_gain={self.norm_gain}: norm_type={self.norm_type} knows "
                f"{', '.join(self.type.gain_kinds)}"
            )
        if self.coupled_impl != "scale" and self.coupled_grad != "detach":
            raise ConfigError(
                f"coupled_impl={self.coupled_impl} needs coupled_grad=detach: change one of them"
            )
        if self.taper_end == 1:
            raise ConfigError(
                "taper_end=1: is it a step or the whole run? Give a later step, or a share below 1"
            )

    def _unknown_type(self) -> ConfigError:
        """Say what to do about a norm type that is not in the registry."""
        if self.norm_sha256:
            return NormFileError(
                f"norm_type {self.norm_type!r} is of a norm file: give the file with the SHA-256 "
                f"{self.norm_sha256}, --{KEY}=FILE"
            )
        of_file = added_types()
        if of_file:
            return ConfigError(
                f"unknown norm_type {self.norm_type!r}: the norm file adds {', '.join(of_file)} "
                "(its subclasses of Norm, and the names in its TYPES)"
            )
        bare = self.norm_type.lower().removesuffix("norm")  # RMSNorm is rms
        near = difflib.get_close_matches(bare, NORM_TYPES, n=1, cutoff=0.0)
        return ConfigError(
            f"unknown norm_type {self.norm_type!r}: did you mean {near[0]}? (A norm of your own "
            f"needs --{KEY}=FILE.)"
        )

    @property
    def type(self) -> NormType:
        """The row of the norm type."""
        return NORM_TYPES[self.norm_type]

    @property
    def recipe(self) -> Recipe:
        """Initial values and weight decay: the authors' or the common ones."""
        return self.type.recipe if self.norm_recipe == "paper" else COMMON

    @property
    def has_gain(self) -> bool:
        return self.norm_gain != "none"

    @property
    def decays_gains(self) -> bool:
        """Does weight decay act on gains?"""
        return self.recipe.decay_gains and self.has_gain

    @property
    def qk_kind(self) -> str:
        """Over which channels queries and keys are normalised: none, head or full."""
        return self.type.qk_norm if self.qk_norm is None else self.qk_norm

    @property
    def has_v_norm(self) -> bool:
        """Are values normalised, as queries and keys are?"""
        return self.type.v_norm and self.qk_kind != "none"


def foreign_keys(norm_type: str) -> dict[str, str]:
    """Return {key: norm types that read it} for the norm keys that `norm_type` does not read.

    Their values in a saved config mean nothing: they are the defaults of its time.
    """
    readers: dict[str, list[str]] = {PIN: ["one of a norm file"]}
    for other, row in NORM_TYPES.items():
        for name in row.keys:
            readers.setdefault(name, []).append(other)
    if norm_type not in NORM_TYPES:
        del readers[PIN]  # it says which file has this type
    return {name: " or ".join(types) for name, types in readers.items() if norm_type not in types}


def keys_of(norm_type: str) -> dict[str, object]:
    """Return {norm key: default} for the keys that `norm_type` reads, itself left out."""
    others = {"norm_type", *foreign_keys(norm_type)}
    if NORM_TYPES[norm_type].recipe is COMMON:
        others.add("norm_recipe")  # both values are the same
    return {field.name: field.default for field in fields(NormConfig) if field.name not in others}


class NormPlan:
    """The norms of a model with n_layer = L blocks; `bias` says whether it has biases.

    Raises:
        ConfigError: plan and model do not fit.
    """

    def __init__(self, config: NormConfig, n_layer: int, channels: int, bias: bool):
        self.config = config
        self.n_layer = n_layer
        self.channels = channels
        self.bias = bias
        self.type = config.type
        # The plan that is given, else that of the norm type
        text = config.norm_plan or self.type.default_plan(config, n_layer)
        if not isinstance(text, str):
            raise ConfigError(
                f"norm type {config.norm_type}: its plan function returned {text!r}, no text: "
                "correct the norm file"
            )
        inputs, _, rest = text.replace(" ", "").partition("|")
        outputs, _, embedding = rest.partition("|")
        self.text = text
        self.letters = inputs  # 2L + 1 letters
        self.outputs = outputs or NONE * 2 * n_layer  # 2L letters
        self.embedding = embedding or NONE  # one letter
        self._check()

    def _check(self) -> None:
        """Raise ConfigError for letters, or numbers for each letter, that do not fit the model."""
        config = self.config
        positions = 2 * self.n_layer + 1
        self._check_letters("", self.letters, positions, "allowed_letters")
        self._check_letters(" of the outputs", self.outputs, positions - 1, "outputs")
        self._check_letters(" of the embedding", self.embedding, 1, "embeddings")
        for index, letter in enumerate(self.letters):
            source = SOURCES.get(letter)
            # The letter before, all s (or h) left out, must be R (or H): it computes a statistic.
            if source and self.letters[:index].rstrip(letter)[-1:] != source:
                raise ConfigError(
                    f"norm_plan {self}: position {index} shares a statistic that no {source} "
                    "computed"
                )
        if config.coupled_impl != "scale" and not self.adds_plainly:
            raise ConfigError(
                f"coupled_impl={config.coupled_impl} adds within the products, and norm_plan "
                f"{self} has output norms between: use coupled_impl=scale"
            )
        if config.paired_gains and (NONE in self.letters[:-1] or not config.has_gain):
            raise ConfigError(
                f"paired_gains needs two gains in each block, not {self}: leave it out"
            )
        if config.residual_weight is not None and set(REPLACING).isdisjoint(self.letters):
            raise ConfigError(
                f"residual_weight={config.residual_weight:g} acts where a norm replaces the stream "
                f"({' and '.join(REPLACING)}), and norm_plan {self} has none: leave it out"
            )
        if self.type.source:
            self._check_row()
        # Of initial_gain one for each letter of the plan may be given too.
        counts = {"coupled_alpha": (positions,), "initial_gain": (positions, 2 * positions)}
        for name, allowed in counts.items():
            values = getattr(config, name)
            if isinstance(values, tuple) and len(values) not in allowed:
                raise ConfigError(
                    f"{name} needs one number or {' or '.join(map(str, allowed))}: {values}"
                )

    def _check_row(self) -> None:
        """Raise ConfigError for what the row of a norm file says and no module reads."""
        where = f"norm type {self.config.norm_type}"
        weight = self.type.residual_weight(self.n_layer)
        if not is_positive(weight):
            raise ConfigError(
                f"{where}: its residual_weight returned {weight!r}, no number above 0: correct the "
                "norm file"
            )
        is_own_plan = not self.config.norm_plan
        if is_own_plan and weight != 1 and set(REPLACING).isdisjoint(self.letters):
            raise ConfigError(
                f"{where}: its residual_weight acts where a norm replaces the stream "
                f"({' and '.join(REPLACING)}), and its plan {self} has none: leave it out, or "
                "train more blocks"
            )
        factors = self.config.recipe.init_factors(self.n_layer)
        if not isinstance(factors, dict) or not all(map(is_positive, factors.values())):
            raise ConfigError(
                f"{where}: its init_factors returned {factors!r}, no dict of parts and numbers "
                "above 0: correct the norm file"
            )
        if unknown := sorted(factors.keys() - set(INIT_PARTS)):
            raise ConfigError(
                f"{where}: its init_factors name {', '.join(unknown)}, and the parts of a block "
                f"are {', '.join(INIT_PARTS)}: correct the norm file"
            )

    def _check_letters(self, what: str, letters: str, count: int, field: str) -> None:
        """Raise ConfigError unless a section has `count` letters that a field of the row allows."""
        allowed = getattr(self.type, field)
        if field != "allowed_letters":
            allowed += NONE
        wrong = sorted(set(letters) - set(allowed))
        if len(letters) == count and not wrong:
            return
        found = f"; not so: {', '.join(wrong)}" if wrong else f"; found {len(letters)}"
        if wrong and self.type.source:
            found += f" ({field} of its row in TYPES says which may stand there)"
        raise ConfigError(
            f"norm_plan {self.text[:SHOWN]!r}: {self.n_layer} blocks of norm_type="
            f"{self.config.norm_type} need {count} letters{what}, each one of {allowed}{found}"
        )

    @property
    def adds_plainly(self) -> bool:
        """Is delta added as it is at every position: no output norm, no replaced stream?"""
        is_replaced = not set(REPLACING).isdisjoint(self.letters)
        return not is_replaced and set(self.outputs) <= {NONE}

    # The norms. Letters have numbers: 0 .. 2L the inputs, then 2L outputs, then the embedding.

    def places(self) -> list[Place]:
        """Build all places of the stream: two a block, and the one before the head."""
        return [self.place(index) for index in range(2 * self.n_layer + 1)]

    def place(self, index: int) -> Place:
        """Return place `index` (0 .. 2L): its norm, and the output norm before it, if any."""
        config = self.config
        letter = self.letters[index]
        norm = NORMS[letter](self, index)
        replaces = letter in REPLACING
        # the next norm of the same kind reads the new stream
        reader = NORMS[letter](self, index) if letter == "B" else None
        weight = self.residual_weight(index) if replaces else 1.0
        # The final norm sees the stream that the anchor holds.
        is_anchored = config.taper_anchor and index == 2 * self.n_layer
        anchor = ScaleAnchor(config) if is_anchored else None
        output = self._norm(self.outputs[index - 1], 2 * self.n_layer + index) if index else None
        return Place(norm, output, replaces, reader, weight, anchor)

    def _norm(self, letter: str, number: int) -> Norm | None:
        return None if letter == NONE else NORMS[letter](self, number)

    def embedding_norm(self) -> Place | None:
        """Return what the embeddings go through before the first block, or None."""
        norm = self._norm(self.embedding, 4 * self.n_layer + 1)
        if self.has_learned_scale:
            norm = LearnedScale(self.channels, math.sqrt(self.channels))
        return None if norm is None else Place(norm)

    def attention_norms(self, widths: list[int], head_dim: int) -> list[Norm | None]:
        """Return the norms of queries, keys and values, None where there is none.

        `widths` are the channels of all heads together, of each of the three.
        """
        kind = self.config.qk_kind
        norms: list[Norm | None] = []
        for part, width in zip("qkv", widths, strict=True):
            has_norm = self.config.has_v_norm if part == "v" else kind != "none"
            keys = self.common(None) | {"channels": head_dim if kind == "head" else width}
            norms.append(RMSNorm(**keys) if has_norm else None)
        return norms

    def common(self, number: int | None) -> dict[str, Any]:
        """Return the arguments of every norm, for letter `number`; None: of one in attention."""
        config = self.config
        keys = {
            "channels": self.channels,
            "eps": config.norm_eps,
            "affine": config.has_gain,
            "offset": 1.0 if config.norm_gain == "one_plus" else 0.0,
            "kernels": config.kernels,
        }
        if number is None:
            return keys
        last = 2 * self.n_layer  # of the inputs
        if last < number <= 2 * last:
            keys["eps"] = config.output_eps
        if self.type.scales_by_depth and number < last:
            keys["depth"] = number // 2 + 1  # the block that reads this place, from 1 on
        gains = config.initial_gain
        if not isinstance(gains, tuple):
            gains = (gains,) * (last + 1)
        return keys | {"initial": gains[number] if number < len(gains) else 1.0}

    @property
    def has_bias(self) -> bool:
        """Do norms have biases, where their formula has one?"""
        return self.bias or self.config.recipe.has_bias

    @property
    def rms_has_bias(self) -> bool:
        """Has R a bias? By default RMSNorm has none. In cbwc it stands for LayerNorm."""
        return self.has_bias and (self.config.rms_bias or self.type.rms_has_bias)

    @property
    def has_learned_scale(self) -> bool:
        """Are the embeddings multiplied by a learned number, as they have no norm?"""
        return self.embedding == NONE and self.config.recipe.learned_scale

    def residual_weight(self, index: int) -> float:
        """Return the weight of the stream in the sum of place `index`, which is P or B."""
        if self.type.first_border_is_plain and index == 2:
            return 1.0
        return self.config.residual_weight or self.type.residual_weight(self.n_layer)

    def point_alpha(self, index: int) -> float:
        """Return the initial alpha of a norm without a statistic."""
        alpha = self.config.point_alpha
        if alpha is None:
            alpha = self.config.recipe.point_alpha(self.channels)
        if not isinstance(alpha, tuple):
            return alpha
        of_attention, of_mlp, of_final_norm = alpha
        if index == 2 * self.n_layer:
            return of_final_norm
        return of_mlp if index % 2 else of_attention

    def embed(self, x: Tensor) -> Tensor:
        """Return the sum of the embeddings x (B, T, C) as the linears of the type need it."""
        return x if self.type.embed is None else self.type.embed(x)

    # For people

    def __str__(self) -> str:
        sections = [self.letters, self.outputs, self.embedding]
        while len(sections) > 1 and set(sections[-1]) <= {NONE}:
            sections.pop()
        return " | ".join(map(_in_pairs, sections))

    def notes(self, at_start: bool = True) -> list[str]:
        """Return what belongs to the layout and is not in the letters, a phrase each.

        Args:
            at_start: initial values too. A run that starts from other weights does not use them.
        """
        config = self.config
        recipe = config.recipe
        said = []
        replacing = [index for index, letter in enumerate(self.letters) if letter in REPLACING]
        if replacing:
            base = "LayerNorm" if config.post_base == "layer" else "RMSNorm"
            weights = dict.fromkeys(self.residual_weight(index) for index in replacing)
            said.append(f"{base} at P and B, residual weights {_listed(weights)}")
        elif "mixln_share" in self.type.keys:
            said.append("no block is Post-LN: give a larger mixln_share or more blocks")
        if at_start and not set("DEHh").isdisjoint(self.letters):
            alphas = [self.point_alpha(index) for index in (0, 1, 2 * self.n_layer)]
            said.append(f"alpha {_listed(alphas)} in attention, MLP and final norm")
        if config.qk_kind != "none":
            normed = "queries, keys and values" if config.has_v_norm else "queries and keys"
            gains = "" if config.has_gain else ", no gain"
            said.append(f"norms of {normed} ({config.qk_kind}{gains})")
        if "G" in self.letters:
            said.append(f"gates of rank 16 (start: {config.gate_start})")
        if self.type.scales_by_depth:
            said.append("gains of block l divided by sqrt(l)")
        if config.norm_gain != "plain":
            said.append(f"gains {config.norm_gain}")
        if at_start and config.initial_gain != 1:
            unused = "" if config.has_gain else " (unused)"
            said.append(f"initial gains {config.initial_gain}{unused}")
        if at_start and config.paired_gains:
            said.append(f"gains in pairs, -+ {config.paired_gains:g}")
        if recipe.has_bias and not self.bias:
            said.append("biases in norms")
        if self.letters[-1] == NONE and set(self.letters) != {NONE}:
            said.append("no norm before the head")
        if set(self.outputs) != {NONE}:
            said.append(f"eps {config.output_eps:g} in output norms")
        if config.decays_gains:
            said.append("weight decay on gains")
        if config.taper_final and not config.taper_anchor:
            said.append("logits may grow: no taper_anchor")
        if self.has_learned_scale:
            said.append(f"embeddings times a learned {math.sqrt(self.channels):.4g}")
        if at_start:
            for part, factor in recipe.init_factors(self.n_layer).items():
                if not math.isclose(factor, 1):
                    said.append(f"initial {part} {factor:.4g} times the common")
        return said


def is_positive(value: object) -> bool:
    """Is it a finite number above 0?"""
    return isinstance(value, int | float) and 0 < value < math.inf


def _in_pairs(letters: str) -> str:
    """Write a section of a plan with blanks between blocks: RRRsR as RR Rs R."""
    return " ".join(letters[i : i + 2] for i in range(0, len(letters), 2))


def _listed(numbers: Iterable[float]) -> str:
    return ", ".join(f"{number:.4g}" for number in numbers)


# --------------------------------------------------------------------------- from letters to norms


def build_layer(plan: NormPlan, number: int) -> Norm:
    return LayerNorm(bias=plan.has_bias, **plan.common(number))


def build_rms(plan: NormPlan, number: int) -> Norm:
    config = plan.config
    return RMSNorm(
        bias=plan.rms_has_bias,
        fraction=config.rms_fraction,
        groups=config.norm_groups,
        **plan.common(number),
    )


def build_base(plan: NormPlan, number: int) -> Norm:
    return NORMS[base_letter(plan.config.post_base)](plan, number)


def build_shared(plan: NormPlan, number: int) -> Norm:
    config = plan.config
    alpha = config.coupled_alpha
    return SharedRMSNorm(
        alpha=alpha[number] if isinstance(alpha, tuple) else alpha,
        detach=config.coupled_grad == "detach",
        # then alpha is a buffer, which training/stream.py sets
        calibrated=config.coupled_calibrate > 0,
        **plan.common(number),
    )


def build_taper(plan: NormPlan, number: int) -> Norm:
    config = plan.config
    base = NORMS[base_letter(config.taper_base)](plan, number)
    return TaperNorm(base, TaperSchedule.of(config), fit_channels=config.taper_fit == "channel")


def build_point(plan: NormPlan, number: int) -> Norm:
    kind = POINT_NORMS[plan.letters[number]]
    return kind(bias=plan.has_bias, alpha=plan.point_alpha(number), **plan.common(number))


def build_gated(plan: NormPlan, number: int) -> Norm:
    factor = 2.0 if plan.config.gate_start == "identity" else 1.0
    return GatedNorm(factor=factor, **plan.common(number))


def build_varying(plan: NormPlan, number: int) -> Norm:
    return SeeDNorm(**plan.common(number))


def build_none(plan: NormPlan, number: int) -> Norm:
    return NoNorm(plan.channels, affine=False)


# Norms that act on each channel by itself, some after a statistic, and have an alpha
POINT_NORMS = {"D": DynamicTanh, "E": DynamicErf, "H": BoundedTanh, "h": SharedBoundedTanh}
# letter -> (plan, number of the letter) -> its norm
NORMS: dict[str, Callable[[NormPlan, int], Norm]] = {
    "L": build_layer,
    "R": build_rms,
    SHARED: build_shared,
    "T": build_taper,
    "P": build_base,
    "B": build_base,
    "D": build_point,
    "E": build_point,
    "H": build_point,
    "h": build_point,
    "G": build_gated,
    "V": build_varying,
    NONE: build_none,
}
