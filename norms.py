"""The norms themselves; their maths is in kernels/. Every one is an add-and-norm with the same
face:

    forward(x, delta, inv_rms) -> (y, x, inv_rms)

    x        residual stream (B, T, C)
    delta    what the sublayer before produced (B, T, C), or None; it is added to x first
    y        what the next sublayer reads (B, T, C)
    inv_rms  1 / RMS (B, T, G), G = norm_groups: the statistic handed on, or None. float64 if x is,
             else float32

A norm that computes a statistic ignores the one that comes in and hands on its own; a norm that
shares uses the one that comes in. Which norm sits where is decided in norm_plan.py.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import add_rms_norm, add_shared_rms_scale, layer_norm, rms_norm, shared_rms_scale
from kernels.reference import affine, inverse_rms, scale_groups, statistics_dtype

# Tokens a channel from which on a compiled step moves fewer bytes if it folds. With a bfloat16
# stream that saves 4 C bytes a token (3.1 kB at C = 768, the column "copied" of bench/bytes.py; a
# float32 stream saves more) and costs, for the gain's gradient, one more read of the 4 C^2 float32
# weights that it folds and of their bfloat16 gradient.
FOLD_PAYS = 24 / 4

# (from, to): `to` has taken over the role, and the optimiser state
Handover = tuple[nn.Parameter, nn.Parameter]


class DeferredScale(NamedTuple):
    """What a norm leaves to the projection that reads it: y * scale * gain."""

    gain: Tensor | None  # (C,)
    scale: Tensor  # (B, T, 1)


class Norm(nn.Module):
    """Adds delta, then normalises: subclasses give `normalize`.

    Gain (and bias) are (C,), float32 by default.
    """

    kernels = "auto"  # which implementation runs (kernels/): the norm plan sets it

    def __init__(self, channels: int, eps: float = 1e-5, affine: bool = True, bias: bool = False):
        super().__init__()
        self.channels, self.eps = channels, eps
        self.weight = nn.Parameter(torch.ones(channels)) if affine else None
        self.bias = nn.Parameter(torch.zeros(channels)) if affine and bias else None
        self.anchor: nn.Module | None = None  # taper.ScaleAnchor, where the plan wants one

    def forward(
        self, x: Tensor, delta: Tensor | None = None, inv_rms: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        if delta is None or delta.dtype == x.dtype or not torch.compiler.is_compiling():
            return self.of_rows(x, delta, inv_rms)
        # As rows (B T, C), like the products: inductor makes one kernel of the stream's gradient
        # and its cast for the product behind only where both have the same loops. (Without a cast,
        # the add would go into an addmm, which copies its operand.)
        rows = (None if part is None else part.flatten(0, -2) for part in (x, delta, inv_rms))
        return tuple(
            None if part is None else part.view(*x.shape[:-1], -1) for part in self.of_rows(*rows)
        )

    def of_rows(
        self, x: Tensor, delta: Tensor | None, inv_rms: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """`forward` for streams of any shape (..., C)."""
        if delta is not None and self.anchor is None:
            return self.add_and_normalize(x, delta, inv_rms)
        if delta is not None:
            x = x + delta
        if self.anchor is not None:
            self.anchor(x)
        y, inv_rms = self.normalize(x, inv_rms)
        return y, x, inv_rms

    def normalize(self, x: Tensor, inv_rms: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(y, statistic handed on) for the residual stream x, delta already added."""
        raise NotImplementedError

    def add_and_normalize(
        self, x: Tensor, delta: Tensor, inv_rms: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(y, x + delta, statistic handed on); norms whose kernel also adds do it in one pass."""
        x = x + delta
        y, inv_rms = self.normalize(x, inv_rms)
        return y, x, inv_rms

    def folds(self, x: Tensor) -> bool:
        """Is scaling a stream x (B, T, C) left to the projection that reads it? Not by most."""
        return False

    def deferred_scale(self, x: Tensor, inv_rms: Tensor | None) -> DeferredScale | None:
        """What y lacks and the projection that reads it must apply; None for most. x and inv_rms
        are what `forward` returned.
        """
        return None

    def set_step(self, step: int, max_iters: int) -> list[Handover]:
        """Called before training step `step` (from 1) on every rank: schedules move, statistics
        settle.
        """
        return self.anchor.set_step(step, max_iters) if self.anchor is not None else []

    def aux_loss(self) -> Tensor | float:
        """This norm's part of the objective in the forward pass just done (0 for most)."""
        return self.anchor.loss if self.anchor is not None else 0.0

    def affine(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """Gain and bias in the precision of the statistics, then one rounding to `dtype`."""
        return affine(y, self.weight, self.bias, dtype)


class NoNorm(Norm):
    """The residual stream as it is: a position that has lost its norm."""

    def normalize(self, x: Tensor, inv_rms: Tensor | None) -> tuple[Tensor, None]:
        return x, None


class LayerNorm(Norm):
    """(x - mean) / sqrt(var + eps) * gain + bias; Ba et al. 2016."""

    def normalize(self, x: Tensor, inv_rms: Tensor | None) -> tuple[Tensor, None]:
        return layer_norm(x, self.weight, self.bias, self.eps, self.kernels)[0], None


class RMSNorm(Norm):
    """x / sqrt(mean(x^2) + eps) * gain (+ bias); Zhang & Sennrich 2019, with its partial and group
    variants.

    fraction = p takes the mean over the first max(1, floor(p C)) channels only (partial RMSNorm);
    groups = G gives each of G equal channel groups a statistic of its own (group RMSNorm).
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
        self.counted = max(1, int(channels // groups * fraction))

    def normalize(self, x: Tensor, inv_rms: Tensor | None) -> tuple[Tensor, Tensor]:
        return rms_norm(
            x, self.weight, self.eps, self.bias, self.groups, self.counted, self.kernels
        )

    def add_and_normalize(
        self, x: Tensor, delta: Tensor, inv_rms: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return add_rms_norm(
            x, delta, self.weight, self.eps, self.bias, self.groups, self.counted, self.kernels
        )


class SharedRMSNorm(Norm):
    """CoupledNorm's shared position: h * inv_rms / alpha * gain, with the statistic of an earlier
    position.

    Loretz & Hochreiter 2026, equation 6; alpha from section 5.3. With `detach` the shared statistic
    is a constant in backward (section 4.3: "a scalar constant"), which then needs no reduction over
    channels for x. If `calibrated`, alpha is a buffer, which training/stream.py's calibrate sets to
    the measured drift.

    impl is "scale" or "fold" (section 4.3 in training): y is the stream itself and the scaling is
    deferred, the gain for the input projection's weight, the scale for after the product. Nothing
    but the residual add is left here, and that the attention output projection can do in its
    epilogue. "auto" folds where it moves fewer bytes: compiled and with many tokens (in eager mode
    the folded weight is written out, and nothing fuses).
    """

    def __init__(
        self,
        channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        alpha: float = 1.0,
        detach: bool = True,
        calibrated: bool = False,
        impl: str = "scale",
    ):
        super().__init__(channels, eps, affine)
        self.detach, self.impl = detach, impl
        if calibrated:
            self.register_buffer("alpha", torch.tensor(float(alpha)))
        else:
            self.alpha = float(alpha)

    def folds(self, x: Tensor) -> bool:
        pays = torch.compiler.is_compiling() and x.numel() > FOLD_PAYS * self.channels**2
        return self.impl == "fold" or (self.impl == "auto" and pays)

    def deferred_scale(self, x: Tensor, inv_rms: Tensor) -> DeferredScale | None:
        return DeferredScale(self.weight, self.scale(inv_rms)) if self.folds(x) else None

    def normalize(self, x: Tensor, inv_rms: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.folds(x):
            return x, inv_rms
        scale = self.scale(inv_rms)
        if self.detach:
            return shared_rms_scale(x, scale, self.weight, self.kernels), inv_rms
        return self.affine(x.to(scale.dtype) * scale, x.dtype), inv_rms

    def add_and_normalize(
        self, x: Tensor, delta: Tensor, inv_rms: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.folds(x) or not self.detach:
            return super().add_and_normalize(x, delta, inv_rms)
        y, h = add_shared_rms_scale(x, delta, self.scale(inv_rms), self.weight, self.kernels)
        return y, h, inv_rms

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *words: object) -> None:
        if (
            f"{prefix}alpha" in state_dict
            and isinstance(self.alpha, float)
            and self.weight is not None
        ):
            # of a calibrated model: absorbed into the gain
            theirs = state_dict.pop(f"{prefix}alpha")
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] * (self.alpha / theirs)
        super()._load_from_state_dict(state_dict, prefix, *words)

    def scale(self, inv_rms: Tensor) -> Tensor:
        """What x is multiplied by (B, T, 1); alpha = 1 costs no kernel."""
        return (
            inv_rms if isinstance(self.alpha, float) and self.alpha == 1 else inv_rms / self.alpha
        )


class DynamicTanh(Norm):
    """tanh(alpha x) * gain + bias: no statistic at all; Zhu et al.

    2025, with their alpha of 0.5 at the start.
    """

    def __init__(
        self,
        channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        bias: bool = False,
        alpha: float = 0.5,
    ):
        super().__init__(channels, eps, affine, bias)
        self.alpha = nn.Parameter(torch.full((1,), alpha))

    def normalize(self, x: Tensor, inv_rms: Tensor | None) -> tuple[Tensor, None]:
        return self.affine(torch.tanh(self.alpha * x), x.dtype), None


class GatedRMSNorm(nn.Module):
    """RMSNorm(x * silu(z)) * gain, Mamba-2's order; RMSNorm(x) * gain * silu(z) with
    norm_before_gate.

    x and z are (..., C). With groups, each of `groups` equal channel groups has its own statistic.
    """

    def __init__(
        self, channels: int, eps: float = 1e-5, norm_before_gate: bool = False, groups: int = 1
    ):
        super().__init__()
        self.eps, self.groups, self.norm_before_gate = eps, groups, norm_before_gate
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        wide = statistics_dtype(x)
        gate = F.silu(z.to(wide))
        h = x.to(wide) if self.norm_before_gate else x.to(wide) * gate
        y = scale_groups(h, inverse_rms(h, self.eps, self.groups)) * self.weight
        return (y * gate if self.norm_before_gate else y).to(x.dtype)


class CenteredLinear(nn.Linear):
    """Column-based weight centring (CBWC, equation 7): V = W - mean of W over outputs; the bias
    likewise.

    Its output has zero mean over channels for every input, so that RMSNorm on a sum of such outputs
    is LayerNorm. The parameters W stay uncentred, as in the LayerNorm model; weight decay acts on W
    (appendix C.4).
    """

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias - self.bias.mean()
        return F.linear(x, self.weight - self.weight.mean(0, keepdim=True), bias)


def center(x: Tensor) -> Tensor:
    """x (..., C) minus its mean over channels: CBWC's auxiliary centring, after the embeddings."""
    return x - x.mean(-1, keepdim=True)


def fold_affine(
    weight: Tensor,
    bias: Tensor | None,
    gain: Tensor | float | None,
    shift: Tensor | None,
    centers: bool,
) -> tuple[Tensor, Tensor | None]:
    """Weight (N, C) and bias (N,), in float64 unless nothing is added to it, of the linear W x + c
    behind x = P h * gain + shift: [W diag(gain) P] h + (c + W shift), P the centring if it
    `centers`.
    """
    weight = weight.double()
    if shift is not None:
        bias = weight @ shift.double() + (0.0 if bias is None else bias.double())
    if gain is not None:
        weight = weight * gain
    return center(weight) if centers else weight, bias
