"""The norm types: one row each, with its default plan, its letters, its keys and its recipe.

To add a norm type: docs/norms.md says how.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from common.norm_file import NormFile
from norms import CenteredLinear, center

Config = Any  # norm_plan.NormConfig

SHARED = "s"
# letter that takes a statistic -> letter that computes it
SOURCES = {SHARED: "R", "h": "H"}
NONE = "I"
REPLACING = "PB"  # the normalised sum is the stream from here on; at B a second norm reads it


# Of a block, each with initial weights of its own
INIT_PARTS = ("attn.qk", "attn.v", "attn.proj", "mlp.up", "mlp.down")


@dataclass(frozen=True)
class Recipe:
    """How the authors of a norm type set it up for language models.

    Attributes:
        init_factors: n_layer -> {part of a block: factor on its initial weights}; the parts are
            INIT_PARTS.
        point_alpha: channels -> initial alpha of DynamicTanh, DynamicErf and BoundedTanh, at
            attention, MLP and final norm.
        learned_scale: are the embeddings multiplied by a learned number, sqrt(channels) at first?
        decay_gains: does weight decay act on gains?
        has_bias: do norms have biases even where the model has none?
    """

    init_factors: Callable[[int], dict[str, float]] = lambda n_layer: {}
    point_alpha: Callable[[int], tuple[float, float, float]] = lambda channels: (0.5, 0.5, 0.5)
    learned_scale: bool = False
    decay_gains: bool = False
    has_bias: bool = False


COMMON = Recipe()


@dataclass(frozen=True)
class NormType:
    """One row of the registry of norm types.

    Attributes:
        default_plan: (config, n_layer) -> the plan as printed.
        allowed_letters: that a plan of this type may have as input and final norms.
        outputs: letters that output norms may have; I is always allowed.
        embeddings: the same for the norm of the embeddings.
        keys: of norm_plan.NormConfig that this type reads beside those that all types read.
        rms_has_bias: has R a bias where the model has biases?
        residual_linear: the class of linears that write into the residual stream.
        embed: applied once, after the embeddings.
        gain_kinds: values that norm_gain may have.
        qk_norm: default of the key: none, head or full.
        v_norm: are values normalised as queries and keys are?
        residual_weight: n_layer -> the weight of the stream in the sum, at P and B.
        first_border_is_plain: is that weight 1 at position 2 (KEEL)?
        scales_by_depth: are gains of block l divided by sqrt(l)?
        recipe: initial values and weight decay.
        source: the file, where it is one of the user's own (norm_files.py).
    """

    default_plan: Callable[[Config, int], str]
    allowed_letters: str
    outputs: str = ""
    embeddings: str = ""
    keys: tuple[str, ...] = ()
    rms_has_bias: bool = False
    residual_linear: type[nn.Linear] = nn.Linear
    embed: Callable[[Tensor], Tensor] | None = None
    gain_kinds: tuple[str, ...] = ("plain", "one_plus", "none")
    qk_norm: str = "none"
    v_norm: bool = False
    residual_weight: Callable[[int], float] = lambda n_layer: 1.0
    first_border_is_plain: bool = False
    scales_by_depth: bool = False
    recipe: Recipe = COMMON
    source: NormFile | None = None


# ---------------------------------------------------------------------------------- default plans

Plan = Callable[[Config, int], str]


def uniform(letter: str) -> Plan:
    """Return the function whose plan has the same letter everywhere."""
    return lambda config, n_layer: letter * (2 * n_layer + 1)


def coupled_letters(config: Config, n_layer: int) -> str:
    """Return RR for the first blocks, then groups of coupled_span blocks.

    Each group has R at its first position and s at all others. The final norm is R.
    """
    first = config.coupled_first
    # 0 is one group of all blocks; at least 1, because a model may have no blocks.
    span = config.coupled_span or max(1, n_layer)
    plan = "RR" * first
    for block in range(first, n_layer):
        starts_group = (block - first) % span == 0
        plan += "Rs" if starts_group else "ss"
    return plan + "R"


def taper_letters(config: Config, n_layer: int) -> str:
    """Return T everywhere; the final norm stays what the base is, unless taper_final."""
    # Without a final norm nothing holds the scale of the logits (training/stream.py).
    base = base_letter(config.taper_base)
    return "TT" * n_layer + ("T" if config.taper_final else base)


def post_letters(config: Config, n_layer: int) -> str:
    """Return I, then P everywhere: each sum is normalised, and read as it is."""
    return NONE + "P" * 2 * n_layer


def mixln_letters(config: Config, n_layer: int) -> str:
    """Return Post-LN for the first mixln_share of the blocks, Pre-LN for the others."""
    base = base_letter(config.post_base)
    # rounded first, because 0.7 * 90 is below 63
    first = math.floor(round(config.mixln_share * n_layer, 9))
    if not first:
        return base * (2 * n_layer + 1)
    # The sum that leaves the last Post-LN block is normalised, and read through the norm of the
    # next block, or through the final norm.
    return NONE + "P" * (2 * first - 1) + "B" + base * 2 * (n_layer - first)


def hybrid_letters(config: Config, n_layer: int) -> str:
    """Return IP: attention reads the stream, the MLP reads and adds to its norm."""
    base = base_letter(config.post_base)
    return (NONE + "P") * n_layer + base


def keel_letters(config: Config, n_layer: int) -> str:
    """Return R before each sublayer, and P after each but the first attention; so B between."""
    base = base_letter(config.post_base)
    return base if not n_layer else base * 2 + "B" * (2 * n_layer - 2) + "P"


def peri_letters(config: Config, n_layer: int) -> str:
    """Return R before and after each sublayer, and after the embeddings."""
    return f"{'R' * (2 * n_layer + 1)}|{'R' * 2 * n_layer}|R"


def olmo2_letters(config: Config, n_layer: int) -> str:
    """Return R after each sublayer, and a final R."""
    return f"{NONE * 2 * n_layer}R|{'R' * 2 * n_layer}"


def bhyt_letters(config: Config, n_layer: int) -> str:
    """Return Hh for each block. The final norm is R."""
    return "Hh" * n_layer + "R"


def base_letter(base: str) -> str:
    """Return the letter of a norm that a key names: rms or layer."""
    return "L" if base == "layer" else "R"


# ----------------------------------------------------------------------------------------- recipes


def same_std(n_layer: int) -> dict[str, float]:
    """Return the factors that undo 1 / sqrt(2 L): all linears have the same initial scale."""
    depth = math.sqrt(2 * n_layer)
    return {"attn.proj": depth, "mlp.down": depth}


def deepnorm_factors(n_layer: int) -> dict[str, float]:
    """Return beta for values, projection and MLP, without 1 / sqrt(2 L) (DeepNet, section 4.3)."""
    beta = (8 * n_layer) ** -0.25
    residual = {part: beta * factor for part, factor in same_std(n_layer).items()}
    return {"attn.v": beta, "mlp.up": beta, **residual}


def tanh_alpha(channels: int) -> tuple[float, float, float]:
    """Return alpha of DyT in attention, MLP and final norm, of the next narrower model measured."""
    # Zhu et al. 2025, tables 10 and 11: width -> (attention, others). Narrower ones: as 1024.
    measured = {1024: (1.0, 1.0), 2048: (1.0, 0.5), 4096: (0.8, 0.2), 5120: (0.6, 0.15)}
    measured[8192] = (0.2, 0.05)
    width = max((width for width in measured if width <= channels), default=1024)
    attention, others = measured[width]
    return attention, others, others


# DeepNet, section 4.3
DEEPNORM = Recipe(deepnorm_factors)
# The code of LayerNorm scaling, which has post, mixln and lns
SAME_STD = Recipe(same_std)
# OLMo-core
OLMO2 = Recipe(same_std, decay_gains=True)
# The authors' code, based on OLMo
HYBRID = Recipe(decay_gains=True)
# The authors' LLaMA
DYT = Recipe(same_std, tanh_alpha, learned_scale=True, decay_gains=True)
# The authors' nanoGPT
DERF = Recipe(point_alpha=lambda channels: (1.0, 1.0, 1.0), learned_scale=True, has_bias=True)

# The authors' code, based on Llama; alpha is that of the model of 1 B parameters there
BHYT = Recipe(same_std, point_alpha=lambda channels: (2.0, 1.0, 1.0))
# The paper: on alpha and beta (SeeDNorm.gains)
SEEDNORM = Recipe(decay_gains=True)

RMS_KEYS = ("rms_fraction", "norm_groups", "rms_bias")
COUPLED_KEYS = (
    "coupled_first",
    "coupled_span",
    "coupled_alpha",
    "coupled_calibrate",
    "coupled_grad",
    "coupled_impl",
    "rms_bias",
)
TAPER_KEYS = ("taper_base", "taper_warmup", "taper_end", "taper_fit", "taper_final", "taper_anchor")
POST_KEYS = ("post_base", "residual_weight")

NORM_TYPES: dict[str, NormType] = {
    "layer": NormType(uniform("L"), "L", outputs="L", embeddings="L"),
    "rms": NormType(uniform("R"), "R", outputs="R", embeddings="R", keys=RMS_KEYS),
    "coupled": NormType(coupled_letters, "Rs", outputs="R", embeddings="R", keys=COUPLED_KEYS),
    # CBWC: RMSNorm is LayerNorm on a stream to which only centred linears write.
    "cbwc": NormType(
        uniform("R"), "R", rms_has_bias=True, residual_linear=CenteredLinear, embed=center
    ),
    # R and L: norms that stay, as the final one does by default
    "taper": NormType(taper_letters, "TRL", keys=TAPER_KEYS, gain_kinds=("plain", "none")),
    # Post-LN, Vaswani et al. 2017
    "post": NormType(post_letters, "IPRL", keys=POST_KEYS, recipe=SAME_STD),
    # Wang et al. 2022 (DeepNet, arXiv 2203.00555): alpha of a decoder
    "deepnorm": NormType(
        post_letters,
        "IPRL",
        keys=POST_KEYS,
        residual_weight=lambda n_layer: (2 * n_layer) ** 0.25,
        recipe=DEEPNORM,
    ),
    # Mix-LN, arXiv 2412.13795
    "mixln": NormType(mixln_letters, "IPBRL", keys=(*POST_KEYS, "mixln_share"), recipe=SAME_STD),
    # Peri-LN, arXiv 2502.02732; Gemma 2 and 3 have no norm of the embeddings
    "peri": NormType(peri_letters, "RLI", outputs="RL", embeddings="RL"),
    # OLMo 2, arXiv 2501.00656
    "olmo2": NormType(olmo2_letters, "IRL", outputs="RL", qk_norm="full", recipe=OLMO2),
    # HybridNorm, arXiv 2503.04598
    "hybrid": NormType(
        hybrid_letters, "IPRL", keys=POST_KEYS, qk_norm="head", v_norm=True, recipe=HYBRID
    ),
    # KEEL, arXiv 2601.19895, equation 8. It has no initialisation of its own: that of post.
    "keel": NormType(
        keel_letters,
        "IPBRL",
        keys=POST_KEYS,
        residual_weight=lambda n_layer: 2.0 * n_layer,  # the number of sublayers
        first_border_is_plain=True,
        recipe=SAME_STD,
    ),
    # LayerNorm scaling, arXiv 2502.05795, equation 12
    "lns": NormType(
        uniform("R"),
        "R",  # not L, whose bias would have to be scaled with the gain
        gain_kinds=("plain", "one_plus"),
        scales_by_depth=True,
        recipe=SAME_STD,
    ),
    # Dynamic Tanh, arXiv 2503.10622
    "dyt": NormType(uniform("D"), "D", keys=("point_alpha",), recipe=DYT),
    # Derf, arXiv 2512.10938
    "derf": NormType(uniform("E"), "E", keys=("point_alpha",), recipe=DERF),
    # Bounded hyperbolic tanh, arXiv 2601.09719, third version
    "bhyt": NormType(bhyt_letters, "HhR", keys=("point_alpha",), recipe=BHYT),
    # GatedNorm, arXiv 2601.22966
    "gatednorm": NormType(uniform("G"), "G", keys=("gate_start",)),
    # SeeDNorm, arXiv 2510.22777
    "seednorm": NormType(uniform("V"), "V", gain_kinds=("plain", "one_plus"), recipe=SEEDNORM),
    # What a finished taper folds into; R and L as above
    "none": NormType(uniform(NONE), "IRL"),
}


def added_types() -> list[str]:
    """Name the norm types that a norm file has added."""
    return [name for name, row in NORM_TYPES.items() if row.source is not None]
