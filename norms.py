"""The norms: each class is a formula, and a Place adds and normalises.

    norm(h, inv_rms) -> (y, inv_rms)

    h        residual stream (B, T, C), to which all has been added
    y        h normalised, which the next sublayer reads (B, T, C)
    inv_rms  1 / RMS of each token (B, T, 1), or None; (B, T, G) with norm_groups = G.
             float64 if h is float64, else float32

RMSNorm ignores the statistic that comes in and hands on its own. SharedRMSNorm uses the one that
comes in and hands it on. Most others hand on None. At a place of the norm plan (norm_plan.py):

    place(x, delta, inv_rms) -> (y, h, inv_rms)

    x        residual stream (B, T, C)
    delta    output of the sublayer before (B, T, C), or None
    h        the residual stream from here on: x + delta, in most plans
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.distributed import whole
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
from kernels.reference import affine, inverse_rms, statistics_dtype

# BHyT bounds all channels but 1 % of any distribution by 10 times its RMS (Chebyshev).
KAPPA = 10.0

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
    """A formula: the base of all norms, and the interface of those in a file of the user's own.

    A subclass has to write `forward` alone:

        forward(h, inv_rms) -> (y, inv_rms)

    h is the stream (B, T, C), as in the head of this file. inv_rms is what the norm before handed
    on, None for most: hand on None, or a statistic (B, T, 1) of its own. y has the type of h. These
    names are stable; whatever else is here may change.

        self.affine(y, dtype)     gain and bias in the precision of y, rounded once to `dtype`
        self.eps, self.channels   as given; self.training as in every module
        self.weight, self.gain    (C,) or None (norm_gain=none); the gain is the weight itself, or
                                  (offset + weight) / sqrt(depth)
        self.bias                 (C,), or None unless `of_plan` gives bias=plan.has_bias
        set_step(step, max_iters) called before each training step, on every rank; here a norm
                                  moves its schedules and statistics. It returns nothing, or a list
                                  of Handover
        gains()                   parameters that a recipe with decay_gains decays
        of_plan(plan, number)     how a norm is made, where it takes more than the arguments below.
                                  Letters have numbers: 0 to 2L the inputs, then the 2L outputs,
                                  then the embeddings. eps, initial and offset come from the keys
        letter                    its letter in norm plans; "" for one of its name
        log_drift, calibrate, folded_form
                                  for a norm that shares a statistic, has a free scalar, or folds

    For the formula: norms.statistics_dtype(h), float64 for float64 and else float32;
    norms.inverse_rms(h, eps), which is 1 / RMS(h) (..., 1) in that type; norms.whole(parameter),
    the whole tensor under FSDP (all ranks must call it). A statistic that runs over steps is a
    taper.StepMean. A parameter that a phase does not use goes through taper.keep_in_graph, because
    DDP waits for its gradient. A layout is a norm_types.NormType. At P and B of a plan the norm is
    RMSNorm or LayerNorm, never one of a file.

    Rules: What forward or set_step changes is a buffer, or a StepMean: a resume loses the rest. In
    evaluation nothing changes and nothing is drawn. A learned scalar is (1,), because FSDP refuses
    (). What __init__ draws is the same for every seed; linears are drawn anew from the seed, as
    those of the model are. forward must be one graph for torch.compile: no branch on values of a
    tensor, no .item().

    Args:
        channels: C.
        eps: added to the mean square, inside the root.
        affine, bias: is there a gain, and a bias?
        initial: the gain at the start, without depth.
        offset: 1 for gains stored as 1 + weight (Gemma, Qwen3-Next).
        depth: block number l, for LayerNorm scaling by 1 / sqrt(l).
        kernels: which implementation runs: auto, torch or triton (kernels/__init__.py).
    """

    centers = False  # does it subtract the mean over channels?
    letter = ""
    is_of_file = False  # made by norm_files.py: then h is (B, T, C) in compiled models, too

    def __init__(
        self,
        channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        bias: bool = False,
        *,
        initial: float = 1.0,
        offset: float = 0.0,
        depth: int | None = None,
        kernels: str = "auto",
    ):
        super().__init__()
        self.channels = channels
        self.eps = eps
        self.gain_offset = offset
        self.kernels = kernels
        self.weight = nn.Parameter(torch.full((channels,), initial - offset)) if affine else None
        self.bias = nn.Parameter(torch.zeros(channels)) if affine and bias else None
        # A tensor (), because torch.compile would make one graph for each value of a Python number.
        # Not its root, because l is exact in every type.
        self.register_buffer("depth", None if depth is None else torch.tensor(float(depth)))

    @classmethod
    def of_plan(cls, plan: Any, number: int) -> "Norm":
        """Make the norm for letter `number` of a norm plan (norm_plan.NormPlan).

        A norm of a norm file is made so. It may read keys of plan.config.
        """
        return cls(**plan.common(number))

    @property
    def gain(self) -> Tensor | None:
        """What the normalised stream is multiplied by (C,); None for ones."""
        if self.weight is None or self.has_plain_gain:
            return self.weight
        # In float32 at least: near 1, a bfloat16 sum would round small weights away.
        return self._gain_in(statistics_dtype(self.weight))

    def _gain_in(self, dtype: torch.dtype) -> Tensor:
        gain = self.gain_offset + self.weight.to(dtype)
        return gain if self.depth is None else gain / self.depth.to(dtype).sqrt()

    @property
    def has_plain_gain(self) -> bool:
        """Is the gain the weight itself?"""
        return not self.gain_offset and self.depth is None

    @property
    def exact_gain(self) -> Tensor:
        """The gain (C,) in float64; () without a weight."""
        if self.weight is None:
            return torch.ones((), dtype=torch.float64)
        return self._gain_in(torch.float64).detach()

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
        divisor = 1.0 if self.depth is None else self.depth.double().sqrt()
        return gain.double() * divisor - self.gain_offset

    def gains(self) -> list[nn.Parameter]:
        """Return the parameters that weight decay of gains acts on."""
        return [] if self.weight is None else [self.weight]

    def affine(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """Apply gain and bias in the precision of y, then round once to `dtype`."""
        return affine(y, self.gain, self.bias, dtype)

    # What training asks of a norm between steps

    def set_step(self, step: int, max_iters: int) -> list[Handover] | None:
        """Prepare for training step `step` (from 1), on every rank: schedules and statistics move.

        Returns the parameters that have changed their roles, if any.
        """
        return None

    def expect(self, attention: nn.Module, tokens: int) -> None:
        """Prepare for what `attention` adds to the stream of so many tokens a sequence."""

    # What conversions and measurements ask of a norm

    @property
    def core(self) -> "Norm":
        """The norm that holds the gain and the bias: itself, or the one that is tapered away."""
        return self

    def folded_form(self) -> FoldedForm | None:
        """Return the form in which this norm folds into the linear after it; None if it cannot."""
        return None

    def log_drift(self, h: Tensor, inv_rms: Tensor | None) -> Tensor:
        """Return log(RMS(h) / RMS that was assumed) of each token, float64 (B, T, 1).

        h (B, T, C) is the stream that was normalised, inv_rms what `forward` handed on. It is 0 for
        a norm with a statistic of its own.
        """
        return torch.zeros(*h.shape[:-1], 1, dtype=torch.float64, device=h.device)

    def calibrate(self, drift: Tensor) -> None:
        """Compensate for a drift () that was measured here, if this norm has a free scalar."""


def keeps_formula(norm: Norm, kind: type[Norm]) -> bool:
    """Tell whether a norm computes what `kind` does: a subclass may compute something else."""
    names = ("forward", "gain", "exact_gain", "_gain_in", "affine")
    return all(getattr(type(norm), name) is getattr(kind, name) for name in names)


class NoNorm(Norm):
    """Return the residual stream unchanged: a position that has lost its norm."""

    def forward(self, h: Tensor, inv_rms: Tensor | None = None) -> tuple[Tensor, None]:
        return h, None

    def folded_form(self) -> FoldedForm:
        return FoldedForm("none")


class LayerNorm(Norm):
    """(x - mean) / sqrt(var + eps) * gain + bias; Ba et al. 2016."""

    centers = True

    def forward(self, h: Tensor, inv_rms: Tensor | None = None) -> tuple[Tensor, None]:
        y, _, _ = layer_norm(h, self.gain, self.bias, self.eps, self.kernels)
        return y, None


class RMSNorm(Norm):
    """x / sqrt(mean(x^2) + eps) * gain (+ bias); Zhang & Sennrich 2019.

    Args:
        fraction: p takes the mean over the first max(1, floor(p C)) channels (partial RMSNorm).
        groups: number of equal channel groups, each with its own statistic (group RMSNorm).
    """

    def __init__(self, channels: int, *args: Any, fraction: float = 1.0, groups: int = 1, **keys):
        super().__init__(channels, *args, **keys)
        self.groups = groups
        # Channels in each mean, at least one
        self.counted = max(1, int(channels // groups * fraction))

    def forward(self, h: Tensor, inv_rms: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return rms_norm(h, self.gain, self.eps, self.bias, self.groups, self.counted, self.kernels)

    def folded_form(self) -> FoldedForm | None:
        if not keeps_formula(self, RMSNorm) or not self.is_whole:
            return None
        gain = None if self.weight is None else self.exact_gain
        return FoldedForm("own", gain, self.bias)

    @property
    def is_whole(self) -> bool:
        """Is there one statistic, over all channels?"""
        return self.groups == 1 and self.counted == self.channels


class SharedRMSNorm(Norm):
    """CoupledNorm's shared position: h * inv_rms / alpha * gain, inv_rms from an earlier position.

    So the statistic is of the stream as it was there, before the sublayers between were added.
    Loretz & Hochreiter 2026, equation 6; alpha is that of section 5.3.

    Args:
        alpha: typical RMS(h) / RMS at the position that computed the statistic.
        detach: this position sends no gradient into the statistic (section 4.3: "a scalar
            constant"): backward needs no reduction over channels. The norm that computed it keeps
            its own gradient. The cut is in SharedRMSScale.backward (kernels/reference.py).
        calibrated: alpha is a buffer, which `calibrate` sets to the measured drift.
    """

    def __init__(
        self,
        *args: Any,
        alpha: float = 1.0,
        detach: bool = True,
        calibrated: bool = False,
        **keys: Any,
    ):
        super().__init__(*args, **keys)
        self.detach = detach
        if calibrated:
            self.register_buffer("alpha", torch.tensor(float(alpha)))
        else:
            self.alpha = float(alpha)

    def forward(self, h: Tensor, inv_rms: Tensor) -> tuple[Tensor, Tensor]:
        scale = self.scale(inv_rms)
        if self.detach:
            return shared_rms_scale(h, scale, self.gain, self.kernels), inv_rms
        # There is no kernel for a statistic that carries a gradient: plain PyTorch.
        return self.affine(h.to(scale.dtype) * scale, h.dtype), inv_rms

    def scale(self, inv_rms: Tensor) -> Tensor:
        """Return what h is multiplied by, inv_rms / alpha (B, T, 1)."""
        is_one = isinstance(self.alpha, float) and self.alpha == 1
        return inv_rms if is_one else inv_rms / self.alpha  # no kernel for a division by 1

    def folded_form(self) -> FoldedForm | None:
        if not keeps_formula(self, SharedRMSNorm):
            return None
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
    """tanh(alpha h) * gain + bias, without any statistic; Zhu et al. 2025, equation 3."""

    def __init__(self, *args: Any, alpha: float = 0.5, **keys: Any):
        super().__init__(*args, **keys)
        # (1,) and not (): FSDP refuses 0-dim parameters, and a 0-dim factor would leave alpha h in
        # the type of h instead of float32.
        self.alpha = nn.Parameter(torch.full((1,), alpha))

    def forward(self, h: Tensor, inv_rms: Tensor | None = None) -> tuple[Tensor, None]:
        return self.affine(torch.tanh(self.alpha * h), h.dtype), None


class DynamicErf(DynamicTanh):
    """erf(alpha h + shift) * gain + bias, without any statistic: Derf, arXiv 2512.10938."""

    def __init__(self, *args: Any, **keys: Any):
        super().__init__(*args, **keys)
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, h: Tensor, inv_rms: Tensor | None = None) -> tuple[Tensor, None]:
        return self.affine(torch.erf(self.alpha * h + self.shift), h.dtype), None


class SharedBoundedTanh(DynamicTanh):
    """tanh(alpha h / (KAPPA RMS(h))) * gain + bias with an inv_rms that comes in.

    BHyT, arXiv 2601.09719, after attention; its lambda is alpha.
    """

    log_drift = SharedRMSNorm.log_drift

    def forward(self, h: Tensor, inv_rms: Tensor) -> tuple[Tensor, Tensor]:
        y, _ = super().forward(h * (inv_rms / KAPPA))
        return y.to(h.dtype), inv_rms


class BoundedTanh(SharedBoundedTanh):
    """The same with a statistic of its own. It hands on the one for the norm after attention.

    That is its mean square plus what attention adds if it takes the mean of T independent tokens:

        drift = |W_V W_O|^2 / (T C) * (alpha / KAPPA)^2

    As in the authors' code, drift is a constant in backward, the mean square is not, and the gain
    does not count. The buffer `attention` () is the first factor.
    """

    log_drift = Norm.log_drift

    def __init__(self, *args: Any, **keys: Any):
        super().__init__(*args, **keys)
        self.register_buffer("attention", torch.zeros(()))

    def forward(self, h: Tensor, inv_rms: Tensor | None = None) -> tuple[Tensor, Tensor]:
        inv_rms = inverse_rms(h, self.eps)  # (B, T, 1)
        y, _ = super().forward(h, inv_rms)
        drift = self.attention * (self.alpha.detach() / KAPPA).square()  # (1,)
        return y, (inv_rms.pow(-2) + drift).rsqrt()

    @torch.no_grad()
    def expect(self, attention: nn.Module, tokens: int) -> None:
        value = whole(attention.qkv.weight)[-attention.widths[2] :]  # (H_kv D, C)
        readers = attention.heads // attention.kv_heads
        value = value.unflatten(0, (attention.kv_heads, -1)).repeat_interleave(readers, 0)
        value = value.flatten(0, 1)  # (H D, C)
        product = whole(attention.proj.weight) @ value  # (C, C)
        self.attention.copy_(product.square().sum() / (tokens * self.channels))


class GatedNorm(Norm):
    """y sigmoid(W_up silu(W_down y)), y = RMSNorm(h): arXiv 2601.22966, section 3.4.

    W_down is (16, C). W_up (C, 16) starts at 0 (model.py), and so the gate at 1/2.

    Args:
        factor: of the gate; with 2 the norm starts as RMSNorm.
    """

    RANK = 16

    def __init__(self, channels: int, *args: Any, factor: float = 1.0, **keys: Any):
        super().__init__(channels, *args, **keys)
        self.factor = factor
        self.gate_down = nn.Linear(channels, self.RANK, bias=False)
        self.gate_up = nn.Linear(self.RANK, channels, bias=False)

    def forward(self, h: Tensor, inv_rms: Tensor | None = None) -> tuple[Tensor, None]:
        y, _ = rms_norm(h, self.gain, self.eps, mode=self.kernels)
        hidden = F.silu(self.gate_down(y))  # (B, T, 16)
        gate = torch.sigmoid(self.gate_up(hidden))  # (B, T, C)
        return (y * gate * self.factor).to(h.dtype), None


class SeeDNorm(Norm):
    """[tanh(h . beta) alpha + gain] h / RMS(h): a gain that depends on the token; arXiv 2510.22777.

    beta (C,) starts at 0, and so this as RMSNorm. Weight decay acts on alpha (C,) and beta.
    """

    def __init__(self, channels: int, *args: Any, **keys: Any):
        super().__init__(channels, *args, **keys)
        self.alpha = nn.Parameter(torch.ones(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def forward(self, h: Tensor, inv_rms: Tensor | None = None) -> tuple[Tensor, None]:
        wide = h.to(statistics_dtype(h))
        product = (wide * self.beta).sum(-1, keepdim=True)  # (B, T, 1)
        gain = self.gain + torch.tanh(product) * self.alpha  # (B, T, C)
        return (wide * inverse_rms(h, self.eps) * gain).to(h.dtype), None

    def gains(self) -> list[nn.Parameter]:
        return [self.alpha, self.beta]


class LearnedScale(Norm):
    """scale * h with one learned number: DyT and Derf multiply the embeddings by it."""

    def __init__(self, channels: int, initial: float):
        super().__init__(channels, affine=False)
        self.scale = nn.Parameter(torch.full((1,), initial))

    def forward(self, h: Tensor, inv_rms: Tensor | None = None) -> tuple[Tensor, None]:
        return (h * self.scale).to(h.dtype), None

    def folded_form(self) -> FoldedForm:
        return FoldedForm("none", self.scale.double())


class Place(nn.Module):
    """One letter of the plan: add what the sublayer gave, then normalise what is read next.

        h = residual_weight x + output(delta)    the sum (B, T, C)
        y = norm(h)

    The next sublayer reads y, and h is the stream from here on. With `replaces` that stream is y,
    and the next sublayer reads y, or reader(y) if there is a reader. In most plans
    h = x + delta. This class (and model.FoldedBlock) decides which function of kernels/ does what:

        output      norm        function that adds
        RMSNorm     RMSNorm     norm_add_norm, all three at once
        RMSNorm     another     add_normed, output norm and sum; then the norm
        other, none RMSNorm     the output norm; add_rms_norm, sum and norm at once
        other, none shared      the output norm; add_shared_rms_scale, sum and norm at once
        other, none another     the output norm; add_then, the sum and then the norm
        with a residual_weight  the output norm; torch.add; then the norm
        delta is None           the norm alone: nothing is added before the first one

    At norm_add_norm and add_normed, RMSNorm has one statistic and no bias (is_plain_rms). A shared
    norm with coupled_grad=full is "another". An anchor has to see h, so with one the norm always
    comes after the sum.

    Args:
        norm: of the sum h.
        output: norm of delta before it is added: Peri-LN (arXiv 2502.02732), Gemma's sandwich, and
            with NoNorm as `norm` OLMo 2's order.
        replaces: is y the stream from here on? Post-LN (Vaswani et al. 2017).
        reader: where y replaces the stream: the border of Mix-LN, KEEL.
        residual_weight: DeepNorm, Wang et al. 2022, equation 2. Plans have one at P and B alone.
        anchor: sees h before it is normalised (taper.ScaleAnchor), or None.
    """

    def __init__(
        self,
        norm: Norm,
        output: Norm | None = None,
        replaces: bool = False,
        reader: Norm | None = None,
        residual_weight: float = 1.0,
        anchor: nn.Module | None = None,
    ):
        super().__init__()
        # First: then all parameters, and the sum of their squared gradients, are in the order of
        # older models.
        self.output = output
        self.norm = norm
        self.replaces = replaces
        self.reader = reader
        self.residual_weight = residual_weight
        self.anchor = anchor

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None = None,
        inv_rms: Tensor | None = None,
        defer: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return (what the next sublayer reads, the stream from here on, the statistic handed on).

        Args:
            x: residual stream (B, T, C).
            delta: what the sublayer before gave (B, T, C); None before the first one.
            inv_rms: the statistic that the place before handed on, or None.
            defer: only add. The caller applies the scale and the gain of a shared norm later
                (model.py, FoldedBlock), and what is returned to be read is h.
        """
        if defer:
            # Nothing but an add, which may become part of the product before it.
            h = x if delta is None else add_residual(x, delta)
            return h, h, inv_rms
        y, h, inv_rms = self._add_and_normalize(x, delta, inv_rms)
        if not self.replaces:
            return y, h, inv_rms
        if self.reader is None:
            # No statistic: inv_rms is that of h, and the stream is y now.
            return y, y, None
        read, inv_rms = self.reader(y)
        return read, y, inv_rms

    def _add_and_normalize(
        self, x: Tensor, delta: Tensor | None, inv_rms: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return (norm(h), h, statistic)."""
        if delta is None:
            y, inv_rms = self._normalize(x, inv_rms)
            return y, x, inv_rms
        if self.residual_weight == 1 and is_plain_rms(self.output):
            return self._add_normed(x, delta, inv_rms)
        if self.output is not None:
            delta = self._normed(delta)
        return self._add(x, delta, inv_rms)

    def _add_normed(
        self, x: Tensor, delta: Tensor, inv_rms: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the same, with an output norm that a function of kernels/ applies as it adds.

        Such functions are written for RMSNorm, and take no weight of the stream.
        """
        output = self.output
        norm = self.norm
        if self.anchor is None and is_plain_rms(norm):
            return norm_add_norm(
                x, delta, output.gain, norm.gain, output.eps, norm.eps, norm.kernels
            )
        h = add_normed(x, delta, output.gain, output.eps, output.kernels)
        y, inv_rms = self._normalize(h, inv_rms)
        return y, h, inv_rms

    def _add(
        self, x: Tensor, delta: Tensor, inv_rms: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the same, for delta after its output norm, if it has one."""
        norm = self.norm
        if self.residual_weight != 1:
            h = self._weighted(x, delta)
            y, inv_rms = self._normalize(h, inv_rms)
            return y, h, inv_rms
        # Two norms have a kernel that adds, too. It cannot show the sum to an anchor. The type is
        # compared, and not by isinstance, because a subclass is another formula.
        if self.anchor is None and type(norm) is RMSNorm:
            return add_rms_norm(
                x, delta, norm.gain, norm.eps, norm.bias, norm.groups, norm.counted, norm.kernels
            )
        # That kernel sends no gradient into the statistic.
        if self.anchor is None and type(norm) is SharedRMSNorm and norm.detach:
            y, h = add_shared_rms_scale(x, delta, norm.scale(inv_rms), norm.gain, norm.kernels)
            return y, h, inv_rms
        if norm.is_of_file:
            h = add_residual(x, delta)
            y, inv_rms = self._normalize(h, inv_rms)
            return y, h, inv_rms
        # A function of kernels/ adds here too, because a compiled model moves fewer bytes if it
        # adds rows (B T, C), and norms of the house take rows.
        return add_then(self._normalize, x, delta, inv_rms)

    def _normalize(self, h: Tensor, inv_rms: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return (norm(h), statistic). The anchor sees h."""
        if self.anchor is not None:
            self.anchor(h)
        return self.norm(h, inv_rms)

    def _normed(self, delta: Tensor) -> Tensor:
        """Return output(delta)."""
        if is_plain_rms(self.output):
            # A norm returns the type that it reads. In float32 it is rounded only once, with the
            # sum, as in the functions that normalise and add (_add_normed).
            delta = delta.to(statistics_dtype(delta))
        y, _ = self.output(delta, None)
        return y

    def _weighted(self, x: Tensor, delta: Tensor) -> Tensor:
        """Return residual_weight x + delta, for delta after its output norm, if it has one."""
        h = torch.add(delta, x, alpha=self.residual_weight)
        if self.output is not None:
            h = h.to(x.dtype)  # delta may be in a wider type than the stream (_normed)
        return h

    def sum(self, x: Tensor, delta: Tensor | None) -> Tensor:
        """Return the sum h that `norm` reads, with the output norm; x if delta is None."""
        if delta is None:
            return x
        if self.output is not None:
            delta = self._normed(delta)
        return self._weighted(x, delta)

    # What training asks of a place between steps

    def set_step(self, step: int, max_iters: int) -> list[Handover]:
        """Prepare for training step `step` (from 1), on every rank (Norm.set_step)."""
        if self.anchor is not None:
            self.anchor.set_step(step, max_iters)
        handovers = []
        for norm in (self.output, self.norm, self.reader):
            if norm is not None:
                handovers += norm.set_step(step, max_iters) or []
        return handovers

    def aux_loss(self) -> Tensor | float:
        """Return this place's part of the objective in the last forward pass; 0 in most plans."""
        return 0.0 if self.anchor is None else self.anchor.loss

    # What conversions and measurements ask of a place

    @property
    def core(self) -> Norm:
        """The norm with the gain and the bias of what the next sublayer reads."""
        return (self.reader or self.norm).core

    @property
    def adds_plainly(self) -> bool:
        """Is the stream from here on x + delta?"""
        return self.output is None and not self.replaces and self.residual_weight == 1

    def folded_form(self) -> FoldedForm | None:
        """Return the form of the norm, if it may fold into the linear after it."""
        return self.norm.folded_form() if self.adds_plainly else None

    def read(self, h: Tensor, inv_rms: Tensor | None) -> Tensor:
        """Return what the next sublayer reads, for the sum h."""
        y, _ = self.norm(h, inv_rms)
        return y if self.reader is None else self.reader(y)[0]


def is_plain_rms(norm: Norm | None) -> bool:
    """Is it an RMSNorm with one statistic and no bias, as the kernels of output norms take it?"""
    return type(norm) is RMSNorm and norm.is_whole and norm.bias is None


class GatedRMSNorm(RMSNorm):
    """RMSNorm(x * silu(z)) * gain, or with norm_before_gate RMSNorm(x) * gain * silu(z).

    The first is Mamba-2's order. No norm plan has it: it is for Mamba blocks of your own. x and z
    are (..., C). Each of `groups` equal channel groups has its own statistic.
    """

    def __init__(
        self, channels: int, eps: float = 1e-5, norm_before_gate: bool = False, groups: int = 1
    ):
        super().__init__(channels, eps, groups=groups)
        self.norm_before_gate = norm_before_gate

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        h = x.to(statistics_dtype(x))
        gate = F.silu(z.to(h.dtype))
        if not self.norm_before_gate:
            h = h * gate
        y, _ = super().forward(h)
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
