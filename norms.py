"""The norms, one class each. The formulas are functions of kernels/, in PyTorch and in Triton.

Each norm adds and normalises, with the same interface:

    forward(x, delta, inv_rms) -> (y, h, inv_rms)

    x        residual stream (B, T, C)
    delta    output of the previous sublayer (B, T, C), or None
    h        x + delta, the residual stream from here on
    y        h normalised, which the next sublayer reads (B, T, C)
    inv_rms  1 / RMS of each token (B, T, 1), or None; (B, T, G) with norm_groups = G.
             float64 if x is float64, else float32

RMSNorm ignores the incoming statistic and hands on its own. SharedRMSNorm uses the incoming one and
hands it on. Most others hand on None. norm_plan.py decides which norm sits at which position.

Two classes are not norms themselves but say how others are used at a position:

    PostNorm    h is the normalised sum: the norm replaces the residual stream
    OutputNorm  delta is normalised before it is added
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import (
    add_normed,
    add_residual,
    add_rms_norm,
    add_shared_rms_scale,
    add_then,
    layer_norm,
    norm_add_norm,
    rms_norm,
    shared_rms_scale,
)
from kernels.reference import affine, inverse_rms, scale_groups, statistics_dtype

# (from, to): the parameter `to` takes over the role of `from`, so the optimiser copies its state.
Handover = tuple[nn.Parameter, nn.Parameter]


class FoldedForm(NamedTuple):
    """A norm as y = r * P h * gain + shift: the parts that a linear after it can take over.

    P is the centring over channels if `centers`, else the identity. The factor r of a token is
    1 / RMS(h) ("own"), the statistic that an earlier position handed on ("shared"), or 1 ("none").
    """

    statistic: str  # own, shared, none
    gain: Tensor | None = None  # (C,) or (), float64; None for ones
    shift: Tensor | None = None  # (C,); None for zeros
    centers: bool = False


class Norm(nn.Module):
    """Add delta, then normalise: the base of all norms.

    A subclass gives `normalize`, or `forward` where one kernel adds and normalises.
    The parameters `weight` and `bias` are (C,), float32 by default. The gain is the weight itself,
    or (gain_offset + weight) / sqrt(depth).
    """

    # Which implementation runs: auto, torch or triton (kernels/__init__.py). The plan sets it.
    kernels = "auto"
    centers = False  # does it subtract the mean over channels?
    gain_offset = 0.0  # 1 for gains stored as 1 + weight (Gemma, Qwen3-Next)

    def __init__(self, channels: int, eps: float = 1e-5, affine: bool = True, bias: bool = False):
        super().__init__()
        self.channels = channels
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels)) if affine else None
        self.bias = nn.Parameter(torch.zeros(channels)) if affine and bias else None
        self.anchor: nn.Module | None = None  # taper.ScaleAnchor, if the plan has one here
        # Block number l, for LayerNorm scaling by 1 / sqrt(l). A tensor (), because torch.compile
        # would make one graph for each value of a Python number. Not its root, because l is exact
        # in every type.
        self.register_buffer("depth", None)

    def forward(
        self, x: Tensor, delta: Tensor | None = None, inv_rms: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return (y, x + delta, the statistic handed on)."""
        if delta is not None:
            # h = x + delta, then normalise h. A function of kernels/ adds, because a compiled model
            # moves fewer bytes if it adds rows (B T, C).
            return add_then(self._observe_and_normalize, x, delta, inv_rms)
        y, inv_rms = self._observe_and_normalize(x, inv_rms)
        return y, x, inv_rms

    def _observe_and_normalize(
        self, x: Tensor, inv_rms: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if self.anchor is not None:
            self.anchor(x)
        return self.normalize(x, inv_rms)

    def normalize(self, x: Tensor, inv_rms: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return (y, the statistic handed on) for a residual stream x that has its delta."""
        raise NotImplementedError

    @property
    def gain(self) -> Tensor | None:
        """What the normalised stream is multiplied by (C,); None for ones."""
        gain = self.weight
        if gain is None:
            return None
        if self.has_plain_gain:
            return gain
        # In float32 at least: near 1, a bfloat16 sum would round small weights away.
        wide = statistics_dtype(gain)
        gain = self.gain_offset + gain.to(wide)
        return gain if self.depth is None else gain / self.depth.to(wide).sqrt()

    @property
    def has_plain_gain(self) -> bool:
        """Is the gain the weight itself?"""
        return not self.gain_offset and self.depth is None

    @property
    def exact_gain(self) -> Tensor:
        """The gain (C,) in float64; () without a weight."""
        if self.weight is None:
            return torch.ones((), dtype=torch.float64)
        gain = self.gain_offset + self.weight.detach().double()
        return gain if self.depth is None else gain / self.depth.double().sqrt()

    def weight_for(self, source: "Norm") -> Tensor:
        """Return the weight (C,) with which this norm has the gain of `source`, rounded once."""
        weight = source.weight
        # Stored alike: 1 + weight would lose the last digits of a small weight.
        has_no_depth = self.depth is None and source.depth is None
        if weight is not None and has_no_depth and self.gain_offset == source.gain_offset:
            return weight
        like = self.weight if weight is None else weight
        return self.weight_of(source.exact_gain.expand(self.channels)).to(like.dtype)

    def weight_of(self, gain: Tensor) -> Tensor:
        """Return the weight with which this norm has a gain (C,), in float64."""
        gain = gain.double()
        if self.depth is not None:
            gain = gain * self.depth.double().sqrt()
        return gain - self.gain_offset

    def gains(self) -> list[nn.Parameter]:
        """Return the parameters that weight decay of gains acts on."""
        return [] if self.weight is None else [self.weight]

    def affine(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """Apply gain and bias in the precision of y, then round once to `dtype`."""
        return affine(y, self.gain, self.bias, dtype)

    # What training asks of a norm between steps

    def set_step(self, step: int, max_iters: int) -> list[Handover]:
        """Prepare for training step `step` (from 1), on every rank: schedules and statistics move.

        Returns the parameters that have changed their roles.
        """
        return [] if self.anchor is None else self.anchor.set_step(step, max_iters)

    def aux_loss(self) -> Tensor | float:
        """Return this norm's part of the objective in the last forward pass; 0 for most norms."""
        return 0.0 if self.anchor is None else self.anchor.loss

    # What conversions and measurements ask of a norm

    @property
    def core(self) -> "Norm":
        """The norm that holds the gain and the bias: itself, or what it wraps."""
        return self

    def folded_form(self) -> FoldedForm | None:
        """Return the form in which this norm folds into the linear after it; None if it cannot."""
        return None

    def normalized_stream(self, x: Tensor, delta: Tensor | None, h: Tensor) -> Tensor:
        """Return what `normalize` normalises, for the arguments and the h of `forward`."""
        return h

    def log_drift(self, h: Tensor, inv_rms: Tensor | None) -> Tensor:
        """Return log(RMS(h) / RMS that was assumed) of each token, float64 (B, T, 1).

        It is 0 for a norm with a statistic of its own.

        Args:
            h: the residual stream (B, T, C) that was normalised.
            inv_rms: what `forward` handed on.
        """
        return torch.zeros(*h.shape[:-1], 1, dtype=torch.float64, device=h.device)

    def calibrate(self, drift: Tensor) -> None:
        """Compensate for a drift () that was measured here, if this norm has a free scalar."""


class NoNorm(Norm):
    """Return the residual stream unchanged: a position that has lost its norm."""

    def normalize(self, x: Tensor, inv_rms: Tensor | None) -> tuple[Tensor, None]:
        return x, None

    def folded_form(self) -> FoldedForm:
        return FoldedForm("none")


class LayerNorm(Norm):
    """(x - mean) / sqrt(var + eps) * gain + bias; Ba et al. 2016."""

    centers = True

    def normalize(self, x: Tensor, inv_rms: Tensor | None) -> tuple[Tensor, None]:
        y, _, _ = layer_norm(x, self.gain, self.bias, self.eps, self.kernels)
        return y, None


class RMSNorm(Norm):
    """x / sqrt(mean(x^2) + eps) * gain (+ bias); Zhang & Sennrich 2019.

    Args:
        fraction: p takes the mean over the first max(1, floor(p C)) channels (partial RMSNorm).
        groups: number of equal channel groups, each with its own statistic (group RMSNorm).
    """

    def __init__(
        self,
        channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        bias: bool = False,
        fraction: float = 1.0,
        groups: int = 1,
    ):
        super().__init__(channels, eps, affine, bias)
        self.groups = groups
        # Channels in each mean, at least one
        self.counted = max(1, int(channels // groups * fraction))

    def forward(
        self, x: Tensor, delta: Tensor | None = None, inv_rms: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if delta is None or self.anchor is not None:
            # The anchor reads x + delta before it is normalised, so no kernel may do both.
            return super().forward(x, delta, inv_rms)
        return add_rms_norm(
            x, delta, self.gain, self.eps, self.bias, self.groups, self.counted, self.kernels
        )

    def normalize(self, x: Tensor, inv_rms: Tensor | None) -> tuple[Tensor, Tensor]:
        return rms_norm(x, self.gain, self.eps, self.bias, self.groups, self.counted, self.kernels)

    def folded_form(self) -> FoldedForm | None:
        if not self.is_whole:
            return None
        gain = None if self.weight is None else self.exact_gain
        return FoldedForm("own", gain, self.bias)

    @property
    def is_whole(self) -> bool:
        """Is there one statistic, over all channels?"""
        return self.groups == 1 and self.counted == self.channels


class SharedRMSNorm(Norm):
    """CoupledNorm's shared position: h * inv_rms / alpha * gain, inv_rms from an earlier position.

    Loretz & Hochreiter 2026, equation 6; alpha is that of section 5.3.

    Args:
        alpha: typical RMS(h) / RMS at the position that computed the statistic.
        detach: no gradient flows into the statistic (section 4.3: "a scalar constant"), so that
            backward needs no reduction over channels for x. The tensor inv_rms that is handed on
            stays attached to the graph: each function that uses it returns no gradient for it
            (kernels/reference.py, SharedRMSScale; kernels/binding.py, _shared_gradient).
        calibrated: alpha is a buffer, which `calibrate` sets to the measured drift.
    """

    def __init__(
        self,
        channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        alpha: float = 1.0,
        detach: bool = True,
        calibrated: bool = False,
    ):
        super().__init__(channels, eps, affine)
        self.detach = detach
        if calibrated:
            self.register_buffer("alpha", torch.tensor(float(alpha)))
        else:
            self.alpha = float(alpha)

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None = None,
        inv_rms: Tensor | None = None,
        defer: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (y, x + delta, inv_rms).

        With `defer` this only adds, and y is x + delta: the caller applies `scale(inv_rms)` and the
        gain later (model.py, FoldedBlock).
        """
        if defer:
            # Nothing is left here but the add, which may become part of the product before it.
            h = x if delta is None else add_residual(x, delta)
            return h, h, inv_rms
        if delta is None or not self.detach:
            # There is no kernel for a statistic that carries a gradient: plain PyTorch.
            return super().forward(x, delta, inv_rms)
        y, h = add_shared_rms_scale(x, delta, self.scale(inv_rms), self.gain, self.kernels)
        return y, h, inv_rms

    def normalize(self, x: Tensor, inv_rms: Tensor) -> tuple[Tensor, Tensor]:
        scale = self.scale(inv_rms)
        if self.detach:
            # The kernel's backward gives no gradient for `scale`: here the statistic is detached.
            return shared_rms_scale(x, scale, self.gain, self.kernels), inv_rms
        return self.affine(x.to(scale.dtype) * scale, x.dtype), inv_rms

    def scale(self, inv_rms: Tensor) -> Tensor:
        """Return what h is multiplied by, inv_rms / alpha (B, T, 1)."""
        if isinstance(self.alpha, float) and self.alpha == 1:
            return inv_rms  # no kernel for a division by 1
        return inv_rms / self.alpha

    def folded_form(self) -> FoldedForm:
        return FoldedForm("shared", self.exact_gain / self.alpha)

    def log_drift(self, h: Tensor, inv_rms: Tensor) -> Tensor:
        return (inv_rms / inverse_rms(h, self.eps)).log().double()

    def calibrate(self, drift: Tensor) -> None:
        # Measured and not learned: the gain is a learned scale already, and it did not keep spans
        # of several blocks from diverging. A model that has just diverged keeps its alpha: the next
        # loss stops the run.
        if isinstance(self.alpha, Tensor) and drift.isfinite() and drift > 0:
            self.alpha.fill_(drift)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: object) -> None:
        checkpoint_has_alpha = f"{prefix}alpha" in state_dict
        if checkpoint_has_alpha and isinstance(self.alpha, float) and self.weight is not None:
            # The checkpoint's alpha was calibrated, ours is fixed: the gain takes the difference.
            ratio = self.alpha / state_dict.pop(f"{prefix}alpha")
            gain = (self.gain_offset + state_dict[f"{prefix}weight"]) * ratio
            state_dict[f"{prefix}weight"] = gain - self.gain_offset
        super()._load_from_state_dict(state_dict, prefix, *args)


class DynamicTanh(Norm):
    """tanh(alpha x) * gain + bias, without any statistic; Zhu et al. 2025, equation 3."""

    def __init__(
        self,
        channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        bias: bool = False,
        alpha: float = 0.5,
    ):
        super().__init__(channels, eps, affine, bias)
        # (1,) and not (): FSDP refuses 0-dim parameters, and a 0-dim factor would leave alpha x in
        # the type of x instead of float32.
        self.alpha = nn.Parameter(torch.full((1,), alpha))

    def normalize(self, x: Tensor, inv_rms: Tensor | None) -> tuple[Tensor, None]:
        return self.affine(torch.tanh(self.alpha * x), x.dtype), None


class DynamicErf(DynamicTanh):
    """erf(alpha x + shift) * gain + bias, without any statistic: Derf, arXiv 2512.10938."""

    def __init__(self, *args: object, **keys: object):
        super().__init__(*args, **keys)
        self.shift = nn.Parameter(torch.zeros(1))

    def normalize(self, x: Tensor, inv_rms: Tensor | None) -> tuple[Tensor, None]:
        return self.affine(torch.erf(self.alpha * x + self.shift), x.dtype), None


class LearnedScale(Norm):
    """scale * x with one learned number: DyT and Derf multiply the embeddings by it."""

    def __init__(self, channels: int, initial: float):
        super().__init__(channels, affine=False)
        self.scale = nn.Parameter(torch.full((1,), initial))

    def normalize(self, x: Tensor, inv_rms: Tensor | None) -> tuple[Tensor, None]:
        return (x * self.scale).to(x.dtype), None

    def folded_form(self) -> FoldedForm:
        return FoldedForm("none", self.scale.double())


class PostNorm(Norm):
    """Replace the stream by the normalised sum: h = base(residual_weight * x + delta).

    Post-LN (Vaswani et al. 2017) with residual_weight 1; DeepNorm (Wang et al. 2022, equation 2)
    with alpha. The next sublayer reads h itself, or `reader`'s norm of it: at the border of Mix-LN
    a Post-LN block is followed by a Pre-LN one, and KEEL has both norms everywhere.

    Args:
        base: its output is the new stream.
        residual_weight: of the stream in the sum.
        reader: norm of what the next sublayer reads, or None.
    """

    def __init__(self, base: Norm, residual_weight: float = 1.0, reader: Norm | None = None):
        super().__init__(base.channels, base.eps, affine=False)
        self.base = base
        self.residual_weight = residual_weight
        self.reader = reader

    def forward(
        self, x: Tensor, delta: Tensor | None = None, inv_rms: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        if delta is not None and self.residual_weight != 1:
            x = self.normalized_stream(x, delta, x)
            delta = None
        h, _, _ = self.base(x, delta)
        if self.reader is None:
            return h, h, None
        return self.reader(h)

    def normalize(self, x: Tensor, inv_rms: Tensor | None) -> tuple[Tensor, Tensor | None]:
        h, _ = self.base.normalize(x, None)
        return (h, None) if self.reader is None else self.reader.normalize(h, None)

    def normalized_stream(self, x: Tensor, delta: Tensor | None, h: Tensor) -> Tensor:
        # The sum: h is normalised already.
        return x if delta is None else torch.add(delta, x, alpha=self.residual_weight)

    @property
    def core(self) -> Norm:
        return (self.reader or self.base).core


class OutputNorm(Norm):
    """Normalise a sublayer's output before it is added: h = x + output(delta), y = input(h).

    Peri-LN (arXiv 2502.02732) and Gemma's sandwich; with NoNorm as `input` OLMo 2's order. The
    position that adds delta has the norm of delta too, because one kernel does all three.

    Args:
        output: norm of delta.
        input: norm of the stream that the next sublayer reads.
    """

    def __init__(self, output: Norm, input: Norm):
        super().__init__(input.channels, input.eps, affine=False)
        self.output = output
        self.input = input
        self.kernels = input.kernels

    def forward(
        self, x: Tensor, delta: Tensor, inv_rms: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        output = self.output
        following = self.input
        if is_plain_rms(output) and is_plain_rms(following):
            # one kernel for both statistics and the sum
            return norm_add_norm(
                x, delta, output.gain, following.gain, output.eps, following.eps, self.kernels
            )
        if is_plain_rms(output):
            # The same rounding whatever follows: N(delta) is rounded with the sum.
            h = add_normed(x, delta, output.gain, output.eps, self.kernels)
            return following(h, None, inv_rms)
        delta, _ = output.normalize(delta, None)
        return following(x, delta, inv_rms)

    def normalize(self, x: Tensor, inv_rms: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self.input.normalize(x, inv_rms)

    @property
    def core(self) -> Norm:
        return self.input.core

    def log_drift(self, h: Tensor, inv_rms: Tensor | None) -> Tensor:
        return self.input.log_drift(h, inv_rms)

    def calibrate(self, drift: Tensor) -> None:
        self.input.calibrate(drift)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: object) -> None:
        for name in ("weight", "bias"):  # of a model without output norms: of its input norm
            if f"{prefix}{name}" in state_dict:
                state_dict[f"{prefix}input.{name}"] = state_dict.pop(f"{prefix}{name}")
        super()._load_from_state_dict(state_dict, prefix, *args)


def is_plain_rms(norm: Norm) -> bool:
    """Is it an RMSNorm with one statistic and without a bias, as the kernels of OutputNorm are?"""
    return type(norm) is RMSNorm and norm.is_whole and norm.bias is None


class GatedRMSNorm(nn.Module):
    """RMSNorm(x * silu(z)) * gain, or with norm_before_gate RMSNorm(x) * gain * silu(z).

    The first is Mamba-2's order. No norm plan has it: it is for Mamba blocks of your own. x and z
    are (..., C). Each of `groups` equal channel groups has its own statistic.
    """

    def __init__(
        self, channels: int, eps: float = 1e-5, norm_before_gate: bool = False, groups: int = 1
    ):
        super().__init__()
        self.eps = eps
        self.groups = groups
        self.norm_before_gate = norm_before_gate
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        wide = statistics_dtype(x)  # a square overflows float16 beyond 255
        h = x.to(wide)
        gate = F.silu(z.to(wide))
        if not self.norm_before_gate:
            h = h * gate
        y = scale_groups(h, inverse_rms(h, self.eps, self.groups)) * self.weight
        if self.norm_before_gate:
            y = y * gate
        return y.to(x.dtype)


class CenteredLinear(nn.Linear):
    """A linear whose weight is centred: V = W - mean of W over outputs; the bias likewise.

    CBWC, equation 7. Its output has zero mean over channels for every input, so that RMSNorm of a
    sum of such outputs is LayerNorm. The parameters W stay uncentred, as in the LayerNorm model;
    weight decay acts on W (appendix C.4).
    """

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean(0, keepdim=True)  # over outputs
        bias = None if self.bias is None else self.bias - self.bias.mean()
        return F.linear(x, weight, bias)


def center(x: Tensor) -> Tensor:
    """Subtract from x (..., C) its mean over channels."""
    return x - x.mean(-1, keepdim=True)


def fold_affine(
    weight: Tensor, bias: Tensor | None, form: FoldedForm
) -> tuple[Tensor, Tensor | None]:
    """Fold gain, shift and centring of a norm into the linear W x + b after it.

    W (r P h * gain + shift) + b = r [W diag(gain) P] h + (b + W shift)

    Args:
        weight: W (N, C).
        bias: b (N,), or None.
        form: what the norm computes.

    Returns:
        Weight (N, C) in float64; bias (N,), in float64 if it has changed, or None.
    """
    weight = weight.double()
    if form.shift is not None:
        shift = weight @ form.shift.double()
        bias = shift + (0.0 if bias is None else bias.double())
    if form.gain is not None:
        weight = weight * form.gain
    if form.centers:
        weight = center(weight)
    return weight, bias
