"""TaperNorm: a norm that a gate turns, during training, into a fixed scaling that can be folded
into weights.

Kanavalau, Amo Alonso & Lall 2026. With the gate g, the norm's gain gamma and a second gain gamma~:

    y = g * norm(h) + (1 - g) * c * h * gamma~

Three phases: "warm" (g = 1; statistics are collected), "blend" (g falls along a cosine), "fixed" (g
= 0, a linear map). The phase is a Python attribute, so that torch.compile makes one graph for each;
g is a 0-dim buffer, so that its movement recompiles nothing.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.distributed import whole
from common.errors import ConfigError
from kernels import taper_norm
from kernels.reference import inverse_rms, statistics_dtype
from norms import Handover, LayerNorm, Norm, center

EMA_DECAY = 0.99  # per optimiser step
PHASES = ("warm", "blend", "fixed")


class TaperSchedule:
    """Gate g(k): 1 up to the warm-up's end, a half cosine, 0 from the taper's end on.

    Numbers below 1 are shares.
    """

    def __init__(self, warmup: float, end: float):
        self.warmup, self.end = warmup, end

    def steps(self, max_iters: int) -> tuple[int, int]:
        """(last step of the warm-up, first step without the norm). At least one warm step collects
        the statistics.

        Raises ConfigError where the warm-up would end after the taper.
        """
        warmup, end = (
            round(when * max_iters if when < 1 else when) for when in (self.warmup, self.end)
        )
        if warmup > end:
            raise ConfigError(
                f"taper_warmup={self.warmup:g} is step {warmup} of {max_iters}, after taper_end="
                f"{self.end:g}, which is step {end}: change one of them"
            )
        return max(1, warmup), max(2, warmup + 1, end)

    def at(self, step: int, max_iters: int) -> tuple[str, float]:
        """(phase, gate) of training step `step`."""
        warmup, end = self.steps(max_iters)
        if step <= warmup:
            return "warm", 1.0
        if step >= end:
            return "fixed", 0.0
        return "blend", 0.5 * (1 + math.cos(math.pi * (step - warmup) / (end - warmup)))


class StepMean(nn.Module):
    """Exponential moving average, over steps, of a vector's mean over all tokens of a step.

    Micro-batches add to a sum; `update` forms the mean over micro-batches and ranks and moves the
    average once a step. So the value is the same on any number of ranks, and rank 0's checkpoint is
    everybody's.
    """

    def __init__(self, size: int):
        super().__init__()
        # last element: number of tokens
        self.register_buffer("sum", torch.zeros(size + 1), persistent=False)
        self.register_buffer("average", torch.zeros(size))
        # 1 - decay^n: what bias correction divides by
        self.register_buffer("weight", torch.zeros(()))

    @torch.no_grad()
    def add(self, values: Tensor) -> None:
        """values: (tokens, size)."""
        self.sum[:-1] += values.sum(0)
        self.sum[-1] += values.shape[0]

    @torch.no_grad()
    def update(self) -> None:
        """Settle the step.

        Without tokens (right after a resume) nothing moves; no host synchronisation.
        """
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self.sum)
        rate = (1 - EMA_DECAY) * (self.sum[-1] > 0)
        self.average.lerp_(self.sum[:-1] / self.sum[-1].clamp(min=1), rate)
        self.weight.lerp_(torch.ones_like(self.weight), rate)
        self.sum.zero_()

    def value(self) -> Tensor:
        """Bias-corrected average (size,)."""
        return self.average / self.weight.clamp(min=1e-12)


class TaperNorm(Norm):
    """`base` (RMSNorm or LayerNorm, with gain gamma) blended into c * h * gamma~ (h centred for
    LayerNorm; + bias).

    Calibration at the warm-up's end: c* = E[|h gamma|^2 / r] / E[|h gamma|^2], from the per-channel
    averages A = E[h^2 / r] and B = E[h^2], so that it is right for the gamma of that moment; and
    gamma~ <- gamma. With `fit_channels` each channel has a c* of its own (C,), A / B, whatever
    gamma is.
    """

    def __init__(self, base: Norm, schedule: TaperSchedule, fit_channels: bool = False):
        super().__init__(base.channels, base.eps, affine=False)
        self.base, self.schedule, self.fit_channels = base, schedule, fit_channels
        self.centers = isinstance(base, LayerNorm)
        self.weight_tilde = None if base.weight is None else nn.Parameter(torch.ones(base.channels))
        self.moments = StepMean(2 * base.channels)  # A and B
        self.register_buffer("gate", torch.ones(()))
        self.register_buffer("scale", torch.ones(base.channels if fit_channels else ()))  # c
        self.register_buffer("calibrated", torch.zeros((), dtype=torch.bool))
        self.phase = "warm"
        self.register_load_state_dict_post_hook(TaperNorm._restore_phase)

    def _restore_phase(self, _incompatible_keys: object) -> None:
        self.phase = "warm" if not self.calibrated else "fixed" if self.gate == 0 else "blend"

    def normalize(self, x: Tensor, inv_rms: Tensor | None) -> tuple[Tensor, None]:
        if self.phase == "fixed" and not self.centers and self.base.bias is None:
            # one rounding, few launches
            return keep_in_graph((x * self.c_tilde()).to(x.dtype), self.base.weight), None
        if self.phase == "warm":
            if self.training:
                self._collect(self._input(x.detach()))
            return keep_in_graph(self.base.normalize(x, None)[0], self.weight_tilde), None
        if self.phase == "blend" and not self.centers and self.base.bias is None:
            c, tilde = self.scale, self.weight_tilde
            if self.fit_channels:  # the kernel takes one c
                c, tilde = torch.ones_like(self.gate), self.c_tilde()
            gate_c = torch.stack((self.gate, c))
            return taper_norm(x, self.base.weight, tilde, gate_c, self.eps, self.kernels)[0], None
        h = self._input(x)
        y = h * self.c_tilde()
        if self.base.bias is not None:
            y = y + self.base.bias
        if self.phase == "fixed":
            return keep_in_graph(y.to(x.dtype), self.base.weight), None
        base = self.base.normalize(x.to(h.dtype), None)[0]  # rounded once, with the rest
        return (self.gate * base + (1 - self.gate) * y).to(x.dtype), None

    def _input(self, x: Tensor) -> Tensor:
        """h: x in the precision of statistics, centred where the base centres."""
        h = x.to(statistics_dtype(x))
        return center(h) if self.centers else h

    def c_tilde(self) -> Tensor:
        """c gamma~, what the fixed map multiplies by: (C,), or () with neither gains nor
        fit_channels.
        """
        return self.scale if self.weight_tilde is None else self.scale * self.weight_tilde

    def fixed_map(self) -> tuple[Tensor, Tensor | None, bool]:
        """What is left at gate 0, in float64: (c gamma~ (C,), bias (C,) or None, is h centred?)."""
        tilde = 1.0 if self.weight_tilde is None else self.weight_tilde.double()
        return (self.scale.double() * tilde).expand(self.channels), self.base.bias, self.centers

    def _collect(self, h: Tensor) -> None:
        inv_r = inverse_rms(h, self.eps)  # (B, T, 1)
        square = h.square()
        self.moments.add(torch.cat([square * inv_r, square], -1).flatten(0, -2))

    @torch.no_grad()
    def set_step(self, step: int, max_iters: int) -> list[Handover]:
        handovers, before = super().set_step(step, max_iters), self.phase
        self.phase, gate = self.schedule.at(step, max_iters)
        if PHASES.index(self.phase) < PHASES.index(before):
            raise ConfigError(
                f"the taper would run backwards: this model is in its {before!r} phase, step "
                f"{step} of {max_iters} is {self.phase!r}: keep max_iters, or fold the finished "
                "taper (convert.py --to=folded) and train that on"
            )
        if before == "warm":
            self.moments.update()
            if self.phase != "warm":
                handovers += self._calibrate()
        self.gate.fill_(gate)
        return handovers

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *words: object) -> None:
        for name in ("weight", "bias"):  # of a model with the plain norm: its gain is the base's
            if f"{prefix}{name}" in state_dict:
                state_dict[f"{prefix}base.{name}"] = state_dict.pop(f"{prefix}{name}")
        super()._load_from_state_dict(state_dict, prefix, *words)

    def _calibrate(self) -> list[Handover]:
        a, b = self.moments.average.chunk(2)  # bias correction cancels in the ratio
        gamma_square = 1.0 if self.base.weight is None else whole(self.base.weight).square()
        common = (gamma_square * a).sum() / (gamma_square * b).sum()
        # A channel that has always been zero takes the common factor.
        self.scale.copy_(torch.where(b > 0, a / b, common) if self.fit_channels else common)
        self.calibrated.fill_(True)
        if self.weight_tilde is None:
            return []
        self.weight_tilde.copy_(self.base.weight)
        return [(self.base.weight, self.weight_tilde)]


def tapers(model: nn.Module) -> list[TaperNorm]:
    return [norm for norm in model.norms() if isinstance(norm, TaperNorm)]


def is_tapered(model: nn.Module) -> bool:
    """Has `model` norms that taper, and are they all gone? Does not wait for the device."""
    found = tapers(model)
    return bool(found) and all(norm.phase == "fixed" for norm in found)


def taper_gate(model: nn.Module) -> float | None:
    """The gate of `model`'s tapers, None if it has none."""
    found = tapers(model)
    return float(found[0].gate) if found else None


class ScaleAnchor(nn.Module):
    """Scale loss weight * E[(s(h) - target)^2], s the RMS (or, centred, the standard deviation) of
    each token.

    The target is a bias-corrected average of E[s] over the warm steps, frozen when the taper
    starts.
    """

    def __init__(self, schedule: TaperSchedule, weight: float, eps: float, centers: bool):
        super().__init__()
        self.schedule, self.weight, self.eps, self.centers = schedule, weight, eps, centers
        self.target = StepMean(1)
        self.frozen = False
        self.loss: Tensor | float = 0.0

    def forward(self, x: Tensor) -> None:
        self.loss = 0.0
        if not self.training:
            return
        h = x.to(statistics_dtype(x))
        s = 1 / inverse_rms(center(h) if self.centers else h, self.eps)  # (B, T, 1)
        if self.frozen:
            self.loss = self.weight * (s - self.target.value()).square().mean()
        else:
            self.target.add(s.detach().flatten(0, -2))

    def set_step(self, step: int, max_iters: int) -> list[Handover]:
        if not self.frozen:
            self.target.update()
        self.frozen = self.schedule.at(step, max_iters)[0] != "warm"
        return []


class _KeepInGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor, parameter: Tensor) -> Tensor:
        ctx.save_for_backward(parameter)
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.zeros_like(ctx.saved_tensors[0])


def keep_in_graph(y: Tensor, parameter: Tensor | None) -> Tensor:
    """y, with a zero gradient for a parameter that this phase leaves out: DDP waits for one from
    each parameter.
    """
    return (
        y if parameter is None or not torch.is_grad_enabled() else _KeepInGraph.apply(y, parameter)
    )
