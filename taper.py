"""TaperNorm: a norm that becomes, during training, a fixed scaling that folds into weights.

Kanavalau, Amo Alonso & Lall 2026. With the gate g, the norm's gain gamma and a second gain gamma~:

    y = g * norm(h) + (1 - g) * c * h * gamma~

Three phases: "warm" (g = 1; statistics are collected), "blend" (g falls along a cosine) and
"fixed" (g = 0; a linear map). The phase is a Python attribute, so torch.compile makes one graph for
each. g is a 0-dim buffer, so its change recompiles nothing.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.distributed import whole
from common.errors import ConfigError
from kernels import taper_norm
from kernels.reference import inverse_rms, statistics_dtype
from norms import FoldedForm, Handover, Norm, center

# Per optimiser step, so the average is over some 100 of them. The stream moves meanwhile: c is 4 to
# 13 % off the drift of the moment when it is set. A shorter average has not been tried.
EMA_DECAY = 0.99
PHASES = ("warm", "blend", "fixed")


@dataclass(frozen=True)
class TaperSchedule:
    """Gate g(k) of step k: 1 during the warm-up, then half a cosine, 0 from the taper's end on.

    Args:
        warmup: last step of the warm-up. A number below 1 is a share of max_iters, as for `end`.
        end: first step without the norm.
    """

    warmup: float
    end: float

    @classmethod
    def of(cls, config: Any) -> "TaperSchedule":
        """Return the schedule of a NormConfig."""
        return cls(config.taper_warmup, config.taper_end)

    def steps(self, max_iters: int) -> tuple[int, int]:
        """Return (last step of the warm-up, at least 1, and first step without the norm).

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
        # One warm step at least collects the statistics. The end comes after the warm-up, also
        # where both are given as the same step.
        return max(1, warmup), max(2, warmup + 1, end)

    def at(self, step: int, max_iters: int) -> tuple[str, float]:
        """Return (phase, gate) of training step `step`."""
        warmup, end = self.steps(max_iters)
        if step <= warmup:
            return "warm", 1.0
        if step >= end:
            return "fixed", 0.0
        progress = (step - warmup) / (end - warmup)  # above 0, below 1
        return "blend", 0.5 * (1 + math.cos(math.pi * progress))


class StepMean(nn.Module):
    """Exponential moving average, over steps, of a vector's mean over all tokens of a step.

    A statistic of a norm that runs over steps: `forward` calls `add` while self.training, and
    `set_step` calls `update`; `value` may be read at any time, and is 0 before the first step.

    Micro-batches add to a sum. `update` forms the mean over micro-batches and ranks, and moves the
    average once a step. So the value does not depend on the number of ranks, and the checkpoint of
    rank 0 is right for all of them.

    Args:
        size: of the vector.
        decay: the share of the average that stays in a step.
    """

    def __init__(self, size: int, decay: float = EMA_DECAY):
        super().__init__()
        self.decay = decay
        # The last element of the sum is the number of tokens. It is 0 between steps, when
        # checkpoints are made, so it is not saved.
        self.register_buffer("sum", torch.zeros(size + 1), persistent=False)
        self.register_buffer("average", torch.zeros(size))
        # 1 - decay^n after n steps: what the bias correction divides by
        self.register_buffer("weight", torch.zeros(()))

    @torch.no_grad()
    def add(self, values: Tensor) -> None:
        """Add values (tokens, size) of a micro-batch.

        Where blocks are computed again in backward (recompute), the second time does not count.
        """
        if is_recomputing():
            return
        self.sum[:-1] += values.sum(0)
        self.sum[-1] += values.shape[0]

    @torch.no_grad()
    def update(self) -> None:
        """Close the step. Without tokens (after a resume) nothing moves. The host does not wait."""
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self.sum)
        tokens = self.sum[-1]
        rate = (1 - self.decay) * (tokens > 0)  # a tensor: an `if` would make the host wait
        # clamp: 0 / 0 would be NaN, at a rate of 0 too.
        self.average.lerp_(self.sum[:-1] / tokens.clamp(min=1), rate)
        self.weight.lerp_(torch.ones_like(self.weight), rate)
        self.sum.zero_()

    def value(self) -> Tensor:
        """Return the bias-corrected average (size,)."""
        return self.average / self.weight.clamp(min=1e-12)


class TaperNorm(Norm):
    """`base` (RMSNorm or LayerNorm, gain gamma) blended into the fixed map c * h * gamma~ (+ bias).

    h is x, centred if the base is LayerNorm. When the warm-up ends, gamma~ becomes gamma, and c is
    fitted by least squares (calibration):

        c* = E[|h gamma|^2 / r] / E[|h gamma|^2],  r = RMS(h)

    It is computed from the averages of each channel A = E[h^2 / r] and B = E[h^2], so that it is
    right for the gamma of that moment. With `fit_channels` each channel has its own c* = A / B.

    Args:
        base: the norm that is tapered away.
        schedule: when.
        fit_channels: fit one c for each channel, not one for the norm.
    """

    def __init__(self, base: Norm, schedule: TaperSchedule, fit_channels: bool = False):
        super().__init__(base.channels, base.eps, affine=False, kernels=base.kernels)
        self.base = base
        self.schedule = schedule
        self.fit_channels = fit_channels
        self.centers = base.centers
        self.weight_tilde = None if base.weight is None else nn.Parameter(torch.ones(base.channels))
        self.moments = StepMean(2 * base.channels)  # A and B
        self.register_buffer("gate", torch.ones(()))  # g
        # c is kept apart from gamma~, also where it is a vector: gamma~ then starts as gamma, and
        # takes over its optimiser state.
        self.register_buffer("scale", torch.ones(base.channels if fit_channels else ()))
        self.register_buffer("calibrated", torch.zeros((), dtype=torch.bool))
        self.phase = "warm"
        self.register_load_state_dict_post_hook(TaperNorm._restore_phase)

    def _restore_phase(self, _incompatible_keys: object) -> None:
        """Set the phase from the buffers that have just been loaded."""
        calibrated_phase = "fixed" if self.gate == 0 else "blend"
        self.phase = calibrated_phase if self.calibrated else "warm"

    def forward(self, h: Tensor, inv_rms: Tensor | None = None) -> tuple[Tensor, None]:
        if self.phase == "warm":
            return self._warm(h), None
        if self.phase == "blend":
            return self._blend(h), None
        return keep_in_graph(self._fixed(h).to(h.dtype), self.base.weight), None

    def _warm(self, x: Tensor) -> Tensor:
        """The base norm; in training, statistics for the calibration are collected."""
        # Without gradients: c is fitted and not learned.
        if self.training and not is_recomputing():
            h = self._centered(x.detach())  # (B, T, C)
            square = h.square()
            # the terms of A and B (B, T, 2 C)
            terms = torch.cat([square * inverse_rms(h, self.eps), square], -1)
            self.moments.add(terms.flatten(0, -2))
        y, _ = self.base(x)
        return keep_in_graph(y, self.weight_tilde)

    def _blend(self, x: Tensor) -> Tensor:
        """g * norm(h) + (1 - g) * c * h * gamma~ + bias; LayerNorm is RMSNorm of the centred h."""
        c, tilde = self.scale, self.weight_tilde
        if self.fit_channels:  # the kernel takes one number c: move the c of each channel to gamma~
            c, tilde = torch.ones_like(self.gate), self.c_tilde()
        # (2,), on the device: the kernel reads both there, and the host never waits for the gate.
        gate_c = torch.stack((self.gate, c))
        h = self._centered(x) if self.centers else x
        y, _ = taper_norm(h, self.base.weight, tilde, gate_c, self.eps, self.kernels)
        return (y if self.base.bias is None else y + self.base.bias).to(x.dtype)

    def _fixed(self, x: Tensor) -> Tensor:
        """c * h * gamma~ + bias in the precision of statistics."""
        y = self._centered(x) * self.c_tilde()
        return y if self.base.bias is None else y + self.base.bias

    def _centered(self, x: Tensor) -> Tensor:
        """h: x in the precision of statistics, centred where the base centres."""
        h = x.to(statistics_dtype(x))
        return center(h) if self.centers else h

    def c_tilde(self) -> Tensor:
        """Return c gamma~ (C,); () without gains and fit_channels."""
        return self.scale if self.weight_tilde is None else self.scale * self.weight_tilde

    @property
    def core(self) -> Norm:
        return self.base

    def gains(self) -> list[nn.Parameter]:
        return [] if self.weight_tilde is None else [self.weight_tilde]  # the base has its own

    def folded_form(self) -> FoldedForm | None:
        """The fixed map, once it is all that is left."""
        return self.form_at_gate_zero() if self.phase == "fixed" else None

    def form_at_gate_zero(self) -> FoldedForm:
        """Return the fixed map y = c gamma~ * P h + bias in float64, whatever the gate is."""
        tilde = 1.0 if self.weight_tilde is None else self.weight_tilde.double()
        gain = (self.scale.double() * tilde).expand(self.channels)
        return FoldedForm("none", gain, self.base.bias, self.centers)

    def log_drift(self, h: Tensor, inv_rms: Tensor | None) -> Tensor:
        """log RMS(c h): the fixed map assumes that it is 1."""
        if self.phase == "warm":
            return super().log_drift(h, inv_rms)
        h = center(h) if self.centers else h
        # inverse_rms is 1 / RMS, hence the minus.
        return -inverse_rms(h * self.scale, self.eps).log().double()

    @torch.no_grad()
    def set_step(self, step: int, max_iters: int) -> list[Handover]:
        before = self.phase
        self.phase, gate = self.schedule.at(step, max_iters)
        if PHASES.index(self.phase) < PHASES.index(before):
            raise ConfigError(
                f"the taper would run backwards: this model is in its {before!r} phase, step "
                f"{step} of {max_iters} is {self.phase!r}: keep max_iters, or fold the finished "
                "taper (convert.py --to=folded) and train that on"
            )
        # Close the step before this one first. It was warm, and calibration needs its tokens too.
        if before == "warm":
            self.moments.update()
        self.gate.fill_(gate)
        is_calibrated_now = before == "warm" and self.phase != "warm"
        return self._calibrate() if is_calibrated_now else []

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: object) -> None:
        for name in ("weight", "bias"):  # of a model with the plain norm, which becomes the base
            if f"{prefix}{name}" in state_dict:
                state_dict[f"{prefix}base.{name}"] = state_dict.pop(f"{prefix}{name}")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _calibrate(self) -> list[Handover]:
        """Set c and gamma~. Returns the hand-over from gamma to gamma~."""
        a, b = self.moments.average.chunk(2)  # (C,) each; the bias correction cancels in the ratio
        # whole: under FSDP a rank has a share of the gain, and c must be the same on all.
        gamma_square = 1.0 if self.base.weight is None else whole(self.base.weight).square()
        # c* = E[|h gamma|^2 / r] / E[|h gamma|^2]
        c = (gamma_square * a).sum() / (gamma_square * b).sum()
        if self.fit_channels:
            c = torch.where(b > 0, a / b, c)  # a channel that has always been 0 takes the common c
        self.scale.copy_(c)
        self.calibrated.fill_(True)
        if self.weight_tilde is None:
            return []
        # gamma~ starts as gamma, and gets its optimiser state from the caller (carry_state).
        self.weight_tilde.copy_(self.base.weight)
        return [(self.base.weight, self.weight_tilde)]


def tapers(model: nn.Module) -> list[TaperNorm]:
    """Return the norms of a GPT that taper."""
    return [place.norm for place in model.places() if isinstance(place.norm, TaperNorm)]


def is_tapered(model: nn.Module) -> bool:
    """Does `model` have norms that taper, and are all of them gone? The device is not asked."""
    found = tapers(model)
    return bool(found) and all(norm.phase == "fixed" for norm in found)


class ScaleAnchor(nn.Module):
    """Loss weight * E[(s(h) - target)^2], which holds the scale of the final residual stream.

    s is the RMS of a token; over LayerNorm its standard deviation. The target is the bias-corrected
    average of E[s] over the warm steps. It is frozen when the taper starts.
    """

    def __init__(self, config: Any):
        super().__init__()
        self.schedule = TaperSchedule.of(config)
        self.weight = config.taper_anchor
        self.eps = config.norm_eps
        self.centers = config.taper_base == "layer"
        self.target = StepMean(1)
        self.frozen = False
        self.loss: Tensor | float = 0.0

    def forward(self, x: Tensor) -> None:
        """Set `loss` for a residual stream x (B, T, C); during the warm-up collect the target."""
        self.loss = 0.0
        if not self.training:
            return
        h = x.to(statistics_dtype(x))
        h = center(h) if self.centers else h
        s = 1 / inverse_rms(h, self.eps)  # (B, T, 1)
        # Before the taper, the norms hold the scale: the loss is 0, and the target is measured.
        if self.frozen:
            self.loss = self.weight * (s - self.target.value()).square().mean()
        else:
            self.target.add(s.detach().flatten(0, -2))

    def set_step(self, step: int, max_iters: int) -> None:
        """Prepare for training step `step`, as Norm.set_step."""
        if not self.frozen:
            self.target.update()
        phase, _ = self.schedule.at(step, max_iters)
        self.frozen = phase != "warm"


def is_recomputing() -> bool:
    """Is this a forward pass of torch.utils.checkpoint within backward?

    A compiled backward repeats no writes to buffers.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class _KeepInGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor, parameter: Tensor) -> Tensor:
        ctx.save_for_backward(parameter)
        return y.view_as(y)  # the same memory, as an output of this Function

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.zeros_like(ctx.saved_tensors[0])


def keep_in_graph(y: Tensor, parameter: Tensor | None) -> Tensor:
    """Return y, with a zero gradient for a parameter that this phase does not use.

    DDP waits for a gradient of each parameter.
    """
    if parameter is None or not torch.is_grad_enabled():
        return y
    return _KeepInGraph.apply(y, parameter)
