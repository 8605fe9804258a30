"""The norm plan: which norm sits at each of the 2L + 1 norm positions of a GPT with L blocks.

Position 2i is before attention of block i, 2i + 1 before its MLP, 2L is the final norm. One letter
a position: R computes an RMS statistic, s shares the one before, L LayerNorm, T taper, D Dynamic
Tanh, I nothing at all.

    coupled, 4 blocks, coupled_first=1:   RR Rs Rs Rs R
    coupled, 4 blocks, coupled_span=2:    Rs ss Rs ss R

So CoupledNorm is no special block, only a plan in which some positions share. The norms are in
norms.py and taper.py; a new norm type is one class there, and one row in NORM_TYPES at the end of
this file (see dyt).
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
        "coupled: blocks that share one statistic (0: all; the last group may be shorter)",
        least=0,
    )
    coupled_alpha: float | tuple[float, ...] = key(
        1.0, "coupled: y = h * inv_rms / alpha * gain; 1 or 2L+1 numbers"
    )
    coupled_calibrate: int = key(
        0,
        "coupled: steps between settings of alpha to the measured drift (0: alpha stays)",
        least=0,
    )
    coupled_grad: str = key(
        "detach", "coupled: gradient through the shared statistic", ("detach", "full")
    )
    coupled_impl: str = key(
        "scale",
        "coupled: the same function by other arithmetic (norms.py)",
        ("scale", "fold", "auto"),
    )
    taper_base: str = key("rms", "taper: the norm that is tapered away", ("rms", "layer"))
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
        for name, other in foreign_keys(self.norm_type).items():
            if getattr(self, name) != _default(name):
                raise ConfigError(
                    f"{name} is a key of norm_type={other}, this is {self.norm_type}: remove one"
                )
        check_least(self)
        if self.coupled_impl != "scale" and self.coupled_grad != "detach":
            raise ConfigError(
                f"coupled_impl={self.coupled_impl} wants coupled_grad=detach: change one of them"
            )
        if not 0 < self.rms_fraction <= 1:
            raise ConfigError(
                f"rms_fraction={self.rms_fraction}: wants a share above 0 and up to 1"
            )
        if self.taper_end == 1:
            raise ConfigError(
                "taper_end=1: is it a step or the whole run? Give a later step, or a share below 1"
            )
        same_unit = (self.taper_warmup < 1) == (self.taper_end < 1)
        if self.taper_end <= 0 or (same_unit and self.taper_warmup > self.taper_end):
            raise ConfigError(
                f"taper_warmup={self.taper_warmup} must not come after taper_end={self.taper_end}"
            )


def foreign_keys(norm_type: str) -> dict[str, str]:
    """{key: norm type that reads it}, of the keys that `norm_type` does not. A saved config's
    values of them mean nothing: they are the defaults of its day.
    """
    return {
        name: other for other, row in NORM_TYPES.items() if other != norm_type for name in row.keys
    }


def keys_of(norm_type: str) -> dict[str, object]:
    """{norm key: default} of the keys that `norm_type` reads."""
    others = {"norm_type", *foreign_keys(norm_type)}
    return {field.name: field.default for field in fields(NormConfig) if field.name not in others}


def _default(name: str) -> object:
    return next(field.default for field in fields(NormConfig) if field.name == name)


@dataclass(frozen=True)
class Site:
    """What a builder knows of the place it builds for. `bias`: does the model have biases?"""

    position: int
    final: bool
    channels: int
    bias: bool


Builder = Callable[[NormConfig, Site], Norm]


@dataclass(frozen=True)
class NormType:
    """One row of the registry."""

    letters: Callable[[NormConfig, int], str]  # (config, n_layer) -> 2L + 1 letters
    builders: dict[str, Builder]  # letter -> norm
    keys: tuple[str, ...] = ()  # config keys that only this type reads
    residual_linear: type[nn.Linear] = nn.Linear  # the linears that write into the residual stream
    embed: Callable[[Tensor], Tensor] | None = None  # applied once, after the embeddings


class NormPlan:
    """The norms of one model. Raises ConfigError where plan and model do not fit."""

    def __init__(self, config: NormConfig, n_layer: int, channels: int, bias: bool):
        self.config, self.channels, self.bias = config, channels, bias
        self.type = NORM_TYPES[config.norm_type]
        self.letters = config.norm_plan.replace(" ", "") or self.type.letters(config, n_layer)
        self._check(n_layer)

    def _check(self, n_layer: int) -> None:
        config, wanted = self.config, 2 * n_layer + 1
        if config.coupled_first > n_layer:
            raise ConfigError(
                f"coupled_first={config.coupled_first}: the model has only {n_layer} blocks"
            )
        if len(self.letters) != wanted:
            raise ConfigError(
                f"norm_plan {config.norm_plan!r} has {len(self.letters)} letters, {n_layer} blocks "
                f"want {wanted}"
            )
        for position, letter in enumerate(self.letters):
            if letter not in self.type.builders:
                raise ConfigError(
                    f"norm_plan letter {letter!r}: norm_type={config.norm_type} knows "
                    f"{', '.join(self.type.builders)}"
                )
            if letter == "s" and self.letters[:position].rstrip("s")[-1:] != "R":
                raise ConfigError(
                    f"norm_plan {self}: position {position} shares a statistic that no R computed"
                )
        alpha = config.coupled_alpha
        alphas = alpha if isinstance(alpha, tuple) else (alpha,)
        if (
            len(alphas) not in {wanted, 1} - ({1} if isinstance(alpha, tuple) else set())
            or min(alphas) <= 0
        ):
            raise ConfigError(
                f"coupled_alpha wants one positive number, or {wanted} (one for each position)"
            )
        if self.channels % config.norm_groups:
            raise ConfigError(
                f"norm_groups={config.norm_groups} does not divide n_embd={self.channels}"
            )

    def norm(self, position: int) -> Norm:
        """The norm at `position` (0 .. 2L)."""
        site = Site(position, position == len(self.letters) - 1, self.channels, self.bias)
        return self._on_its_kernels(self.type.builders[self.letters[position]](self.config, site))

    def qk_norm(self, head_dim: int) -> Norm | None:
        """The norm of queries or keys, over the channels of a head; None without qk_norm."""
        if not self.config.qk_norm:
            return None
        return self._on_its_kernels(
            RMSNorm(head_dim, self.config.norm_eps, self.config.norm_affine)
        )

    def _on_its_kernels(self, norm: Norm) -> Norm:
        """`norm`, and the norms within it (a taper's base), told which implementation runs."""
        for module in norm.modules():
            if isinstance(module, Norm):
                module.kernels = self.config.kernels
        return norm

    def residual_linear(self, in_features: int, out_features: int, bias: bool) -> nn.Linear:
        """A linear whose output is added to the residual stream."""
        return self.type.residual_linear(in_features, out_features, bias=bias)

    def embed(self, x: Tensor) -> Tensor:
        """What the plan does to the sum of the embeddings (B, T, C)."""
        return x if self.type.embed is None else self.type.embed(x)

    def __str__(self) -> str:
        return " ".join(self.letters[i : i + 2] for i in range(0, len(self.letters), 2))


# ------------------------------------------------------------------------------- plans and builders


def uniform(letter: str) -> Callable[[NormConfig, int], str]:
    """The plan with the same letter everywhere."""
    return lambda config, n_layer: letter * (2 * n_layer + 1)


def coupled_letters(config: NormConfig, n_layer: int) -> str:
    """RR for the standard blocks, then groups of coupled_span blocks: R at their first position, s
    at the others.
    """
    first, span = config.coupled_first, config.coupled_span or max(1, n_layer)
    blocks = ["Rs" if (block - first) % span == 0 else "ss" for block in range(first, n_layer)]
    return "RR" * first + "".join(blocks) + "R"


def taper_letters(config: NormConfig, n_layer: int) -> str:
    """T everywhere; the final norm stays what the base is, unless taper_final."""
    return "TT" * n_layer + ("T" if config.taper_final else BASE_LETTER[config.taper_base])


def layer_norm(config: NormConfig, site: Site) -> Norm:
    return LayerNorm(site.channels, config.norm_eps, config.norm_affine, site.bias)


def rms_norm(config: NormConfig, site: Site) -> Norm:
    return RMSNorm(
        site.channels,
        config.norm_eps,
        config.norm_affine,
        site.bias and config.rms_bias,
        config.rms_fraction,
        config.norm_groups,
    )


def rms_norm_with_bias(config: NormConfig, site: Site) -> Norm:
    """LayerNorm without its centring: what CBWC leaves of it."""
    return RMSNorm(site.channels, config.norm_eps, config.norm_affine, site.bias)


def shared_norm(config: NormConfig, site: Site) -> Norm:
    alpha = config.coupled_alpha
    return SharedRMSNorm(
        site.channels,
        config.norm_eps,
        config.norm_affine,
        detach=config.coupled_grad == "detach",
        alpha=alpha[site.position] if isinstance(alpha, tuple) else alpha,
        calibrated=config.coupled_calibrate > 0,
        impl=config.coupled_impl if site.position % 2 else "scale",
    )


def taper_norm(config: NormConfig, site: Site) -> Norm:
    base = (layer_norm if config.taper_base == "layer" else rms_norm)(config, site)
    return TaperNorm(
        base, TaperSchedule(config.taper_warmup, config.taper_end), config.taper_fit == "channel"
    )


def anchored(builder: Builder) -> Builder:
    """`builder`, with the scale anchor on the final norm if the config weighs one."""

    def build(config: NormConfig, site: Site) -> Norm:
        norm = builder(config, site)
        if site.final and config.taper_anchor:
            schedule = TaperSchedule(config.taper_warmup, config.taper_end)
            norm.anchor = ScaleAnchor(
                schedule, config.taper_anchor, config.norm_eps, config.taper_base == "layer"
            )
        return norm

    return build


def no_norm(config: NormConfig, site: Site) -> Norm:
    return NoNorm(site.channels, affine=False)


def dynamic_tanh(config: NormConfig, site: Site) -> Norm:
    return DynamicTanh(site.channels, config.norm_eps, config.norm_affine, site.bias)


BASE_LETTER = {"rms": "R", "layer": "L"}
RMS_KEYS = ("rms_fraction", "norm_groups", "rms_bias")
COUPLED_KEYS = (
    "coupled_first",
    "coupled_span",
    "coupled_alpha",
    "coupled_calibrate",
    "coupled_grad",
    "coupled_impl",
)
TAPER_KEYS = ("taper_base", "taper_warmup", "taper_end", "taper_fit", "taper_final", "taper_anchor")
TAPER_NORMS = {"T": taper_norm, "R": rms_norm, "L": layer_norm}

NORM_TYPES = {
    "layer": NormType(uniform("L"), {"L": layer_norm}),
    "rms": NormType(uniform("R"), {"R": rms_norm}, RMS_KEYS),
    "coupled": NormType(coupled_letters, {"R": rms_norm, "s": shared_norm}, COUPLED_KEYS),
    "cbwc": NormType(uniform("R"), {"R": rms_norm_with_bias}, (), CenteredLinear, center),
    "taper": NormType(
        taper_letters, {name: anchored(norm) for name, norm in TAPER_NORMS.items()}, TAPER_KEYS
    ),
    "dyt": NormType(uniform("D"), {"D": dynamic_tanh}),
    # a taper's folded form
    "none": NormType(uniform("I"), {"I": no_norm, "R": rms_norm, "L": layer_norm}),
}
