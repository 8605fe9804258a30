"""The norm plan: which norm sits at each of the 2L + 1 norm positions of a GPT with L blocks.

Position 2i is before attention of block i, 2i + 1 before its MLP, 2L is the final norm. A plan has
one letter for each position:

    R  RMSNorm, which computes a statistic      T  TaperNorm
    s  RMSNorm, statistic of the nearest R before       D  Dynamic Tanh
    L  LayerNorm                                I  no norm

    coupled, 4 blocks, coupled_first=1    RR Rs Rs Rs R
    coupled, 4 blocks, coupled_span=2     Rs ss Rs ss R

So CoupledNorm is not a special block: it is a plan in which some positions share.

To add a norm type: its class goes into norms.py, its letter into NORMS, its row into NORM_TYPES
(both at the end of this file). See DynamicTanh, D and dyt for the shortest example.
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass, fields

from torch import Tensor, nn

from common.errors import ConfigError
from configurator import check_least, key
from kernels import MODES
from norms import (
    CenteredLinear,
    DynamicTanh,
    LayerNorm,
    NoNorm,
    Norm,
    RMSNorm,
    SharedRMSNorm,
    center,
)
from taper import ScaleAnchor, TaperNorm, TaperSchedule


@dataclass(frozen=True)
class NormConfig:
    """Keys that decide the norm plan.

    A key of one norm type is refused when another type is chosen.
    """

    norm_type: str = key("layer", "normalisation: layer, rms, coupled, cbwc, taper, dyt, none")
    norm_plan: str = key(
        "", "a plan as printed, e.g. 'Rs Rs R': overrides the shorthands of the norm type"
    )
    norm_eps: float = key(1e-5, "added to the mean square, inside the root", least=0)
    norm_affine: bool = key(
        True, "norms have learned gains (and biases, where type and `bias` have them)"
    )
    qk_norm: bool = key(False, "RMSNorm on queries and keys, over the channels of each head")
    kernels: str = key(
        "auto", "norms by Triton or plain PyTorch (auto: Triton on a GPU unless compiled)", MODES
    )
    rms_fraction: float = key(
        1.0, "rms: share of the channels, from the first on, that the RMS is taken over"
    )
    norm_groups: int = key(
        1, "rms: number of channel groups that are normalised independently", least=1
    )
    rms_bias: bool = key(False, "rms: norms have LayerNorm's bias, where the model has biases")
    coupled_first: int = key(
        0, "coupled: this many blocks at the start keep their own statistics", least=0
    )
    coupled_span: int = key(
        1,
        "coupled: blocks that share one statistic (0: all; above 1, set coupled_calibrate too, "
        "or training may diverge)",
        least=0,
    )
    coupled_alpha: float | tuple[float, ...] = key(
        1.0, "coupled: divides the shared statistic; one number, or 2L+1 (those at s are used)"
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
        0.5, "taper: full norm up to this step (below 1: share of max_iters)", least=0
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
        0.0, "taper: weight of the loss that holds the scale of the final residual stream", least=0
    )

    def __post_init__(self) -> None:
        if self.norm_type not in NORM_TYPES:
            near = difflib.get_close_matches(self.norm_type, NORM_TYPES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it is one of {', '.join(NORM_TYPES)}"
            raise ConfigError(f"unknown norm_type {self.norm_type!r}: {hint}")
        # A key that would do nothing is a mistake of its user.
        for name, other in foreign_keys(self.norm_type).items():
            if getattr(self, name) != _default(name):
                raise ConfigError(
                    f"{name} is a key of norm_type={other}, this is {self.norm_type}: remove one"
                )
        check_least(self)
        if self.coupled_impl != "scale" and self.coupled_grad != "detach":
            raise ConfigError(
                f"coupled_impl={self.coupled_impl} needs coupled_grad=detach: change one of them"
            )
        if not 0 < self.rms_fraction <= 1:
            raise ConfigError(f"rms_fraction={self.rms_fraction}: must be above 0 and at most 1")
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


def foreign_keys(norm_type: str) -> dict[str, str]:
    """Return {key: norm type that reads it} for the norm keys that `norm_type` does not read.

    Their values in a saved config mean nothing: they are the defaults of its time.
    """
    return {
        name: other for other, row in NORM_TYPES.items() if other != norm_type for name in row.keys
    }


def keys_of(norm_type: str) -> dict[str, object]:
    """Return {norm key: default} for the keys that `norm_type` reads."""
    others = {"norm_type", *foreign_keys(norm_type)}
    # norm_type itself is not one of them.
    return {field.name: field.default for field in fields(NormConfig) if field.name not in others}


def _default(name: str) -> object:
    return next(field.default for field in fields(NormConfig) if field.name == name)


@dataclass(frozen=True)
class Position:
    """A norm position, as far as a builder of norms has to know it."""

    index: int  # 0 .. 2L
    is_final: bool
    channels: int
    has_bias: bool  # does the model have biases?


Builder = Callable[[NormConfig, Position], Norm]


@dataclass(frozen=True)
class NormType:
    """One row of the registry of norm types."""

    default_letters: Callable[[NormConfig, int], str]  # (config, n_layer) -> the default plan
    allowed_letters: str  # letters that a plan of this type may have
    keys: tuple[str, ...] = ()  # config keys that this type alone reads
    rms_has_bias: bool = False  # R has a bias where the model has biases
    residual_linear: type[nn.Linear] = nn.Linear  # the linears that write into the residual stream
    embed: Callable[[Tensor], Tensor] | None = None  # applied once, after the embeddings


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
        self.channels = channels
        self.bias = bias
        self.type = NORM_TYPES[config.norm_type]
        # 2L + 1 letters: the plan that is given, else that of the norm type
        self.letters = config.norm_plan.replace(" ", "")
        if not self.letters:
            self.letters = self.type.default_letters(config, n_layer)
        if config.coupled_first > n_layer:
            raise ConfigError(
                f"coupled_first={config.coupled_first}: the model has only {n_layer} blocks"
            )
        self._check_letters(n_layer)
        self._check_alpha(2 * n_layer + 1)
        if channels % config.norm_groups:
            raise ConfigError(f"norm_groups={config.norm_groups} does not divide n_embd={channels}")

    def _check_letters(self, n_layer: int) -> None:
        config = self.config
        positions = 2 * n_layer + 1
        if len(self.letters) != positions:
            raise ConfigError(
                f"norm_plan {config.norm_plan!r} has {len(self.letters)} letters, {n_layer} blocks "
                f"need {positions}"
            )
        for index, letter in enumerate(self.letters):
            if letter not in self.type.allowed_letters:
                raise ConfigError(
                    f"norm_plan letter {letter!r}: norm_type={config.norm_type} knows "
                    f"{', '.join(self.type.allowed_letters)}"
                )
            # The letter before, all s left out, must be R: that norm has computed a statistic.
            if letter == SHARED and self.letters[:index].rstrip(SHARED)[-1:] != "R":
                raise ConfigError(
                    f"norm_plan {self}: position {index} shares a statistic that no R computed"
                )

    def _check_alpha(self, positions: int) -> None:
        alpha = self.config.coupled_alpha
        if isinstance(alpha, tuple):
            is_valid = len(alpha) == positions and all(value > 0 for value in alpha)
        else:
            is_valid = alpha > 0
        if not is_valid:
            raise ConfigError(
                f"coupled_alpha needs one positive number, or {positions} (one for each position)"
            )

    def norm(self, index: int) -> Norm:
        """Return the norm of position `index` (0 .. 2L)."""
        config = self.config
        is_final = index == len(self.letters) - 1
        position = Position(index, is_final, self.channels, self.bias)
        norm = NORMS[self.letters[index]](config, position)
        # The final norm sees the stream that the anchor holds.
        if is_final and config.taper_anchor:
            centers = config.taper_base == "layer"
            norm.anchor = ScaleAnchor(
                schedule(config), config.taper_anchor, config.norm_eps, centers
            )
        return self._set_kernels(norm)

    def qk_norm(self, head_dim: int) -> Norm | None:
        """Return a norm of queries or keys, over the channels of a head; None without qk_norm."""
        if not self.config.qk_norm:
            return None
        return self._set_kernels(RMSNorm(head_dim, self.config.norm_eps, self.config.norm_affine))

    def _set_kernels(self, norm: Norm) -> Norm:
        """Tell `norm`, and a taper's base within it, which implementation runs."""
        for module in norm.modules():
            if isinstance(module, Norm):
                module.kernels = self.config.kernels
        return norm

    def residual_linear(self, in_features: int, out_features: int, bias: bool) -> nn.Linear:
        """Return a linear whose output is added to the residual stream."""
        return self.type.residual_linear(in_features, out_features, bias=bias)

    def embed(self, x: Tensor) -> Tensor:
        """Return what enters the first block, for the sum of the embeddings x (B, T, C)."""
        return x if self.type.embed is None else self.type.embed(x)

    def __str__(self) -> str:
        return " ".join(self.letters[i : i + 2] for i in range(0, len(self.letters), 2))


# ---------------------------------------------------------------------------------- default plans


def uniform(letter: str) -> Callable[[NormConfig, int], str]:
    """Return the function whose plan has the same letter everywhere."""
    return lambda config, n_layer: letter * (2 * n_layer + 1)


def coupled_letters(config: NormConfig, n_layer: int) -> str:
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


def taper_letters(config: NormConfig, n_layer: int) -> str:
    """Return T everywhere; the final norm stays what the base is, unless taper_final."""
    # Without a final norm nothing holds the scale of the logits (training/stream.py).
    base = "L" if config.taper_base == "layer" else "R"
    return "TT" * n_layer + ("T" if config.taper_final else base)


# --------------------------------------------------------------------------- from letters to norms


def build_plain(norm_class: type[Norm]) -> Builder:
    """Return the builder of a norm that needs nothing but channels, eps, affine and bias."""
    return lambda config, position: norm_class(
        position.channels, config.norm_eps, config.norm_affine, position.has_bias
    )


def build_rms(config: NormConfig, position: Position) -> Norm:
    # RMSNorm has no bias by default. In cbwc it stands for LayerNorm, bias included.
    wants_bias = config.rms_bias or NORM_TYPES[config.norm_type].rms_has_bias
    return RMSNorm(
        position.channels,
        config.norm_eps,
        config.norm_affine,
        bias=position.has_bias and wants_bias,
        fraction=config.rms_fraction,
        groups=config.norm_groups,
    )


def build_shared(config: NormConfig, position: Position) -> Norm:
    alpha = config.coupled_alpha
    return SharedRMSNorm(
        position.channels,
        config.norm_eps,
        config.norm_affine,
        alpha=alpha[position.index] if isinstance(alpha, tuple) else alpha,
        detach=config.coupled_grad == "detach",
        # then alpha is a buffer, which training/stream.py sets
        calibrated=config.coupled_calibrate > 0,
    )


def build_taper(config: NormConfig, position: Position) -> Norm:
    base = NORMS["L" if config.taper_base == "layer" else "R"](config, position)
    return TaperNorm(base, schedule(config), fit_channels=config.taper_fit == "channel")


def schedule(config: NormConfig) -> TaperSchedule:
    return TaperSchedule(config.taper_warmup, config.taper_end)


def build_none(config: NormConfig, position: Position) -> Norm:
    return NoNorm(position.channels, affine=False)


SHARED = "s"

NORMS: dict[str, Builder] = {
    "L": build_plain(LayerNorm),
    "R": build_rms,
    SHARED: build_shared,
    "T": build_taper,
    "D": build_plain(DynamicTanh),
    "I": build_none,
}

COUPLED_KEYS = (
    "coupled_first",
    "coupled_span",
    "coupled_alpha",
    "coupled_calibrate",
    "coupled_grad",
    "coupled_impl",
)
TAPER_KEYS = ("taper_base", "taper_warmup", "taper_end", "taper_fit", "taper_final", "taper_anchor")

NORM_TYPES: dict[str, NormType] = {
    "layer": NormType(uniform("L"), "L"),
    "rms": NormType(uniform("R"), "R", keys=("rms_fraction", "norm_groups", "rms_bias")),
    "coupled": NormType(coupled_letters, "Rs", keys=COUPLED_KEYS),
    # CBWC: RMSNorm is LayerNorm on a stream to which only centred linears write.
    "cbwc": NormType(
        uniform("R"), "R", rms_has_bias=True, residual_linear=CenteredLinear, embed=center
    ),
    # R and L: norms that stay, as the final one does by default
    "taper": NormType(taper_letters, "TRL", keys=TAPER_KEYS),
    "dyt": NormType(uniform("D"), "D"),
    # What a finished taper folds into; R and L as above
    "none": NormType(uniform("I"), "IRL"),
}
