"""The parts of a training step: micro-batch, learning rate, optimiser, guarded update.

A step whose loss or gradient is not finite is never applied.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.distributed import is_sharded, share
from common.environment import Precision
from common.errors import ConfigError
from configurator import key
from model import GPT
from norms import Norm
from training.muon import MuonWithAdamW

Optimizer: TypeAlias = torch.optim.AdamW | MuonWithAdamW


@dataclass(frozen=True)
class AdamKeys:
    """Learning rate and AdamW"""

    learning_rate: float = key(6e-4, "highest learning rate", least=1e-30, most=1000.0)
    min_lr: float = key(
        6e-5, "lowest learning rate, at the end of the schedule", least=0, most=1000.0
    )
    warmup_iters: int = key(2000, "steps of linear warm-up; the first is not zero", least=0)
    lr_schedule: str = key(
        "cosine", "wsd: constant, then linear decay", ("cosine", "wsd", "constant")
    )
    wsd_decay: float = key(
        0.2, "wsd: share of max_iters that the decay takes", least=0, most=0.999999
    )
    weight_decay: float = key(
        0.1,
        "on tensors of two dimensions or more; each step multiplies it by its lr",
        least=0,
        most=1000.0,
    )
    beta1: float = key(0.9, "of AdamW", least=0, most=0.999999)
    beta2: float = key(0.95, "of AdamW", least=0, most=0.999999)
    adam_eps: float = key(1e-8, "of AdamW", least=1e-30, most=1.0)
    grad_clip: float = key(
        1.0, "largest global gradient norm (0: no clipping)", least=1e-6, zero=True
    )


@dataclass(frozen=True)
class OptimKeys(AdamKeys):
    """Optimiser"""

    optimizer: str = key(
        "adamw",
        "muon updates the blocks' matrices (q, k, v, gate and up apart), AdamW all the rest",
        ("adamw", "muon"),
    )
    decay_per_step: float = key(
        0.0,
        "sets weight_decay to decay_per_step / learning_rate: a sweep of learning_rate then keeps "
        "lr weight_decay, which follows the schedule (0: off)",
        least=0,
        most=1.0,
    )

    @property
    def decay(self) -> float:
        """The weight decay that the optimiser gets."""
        if self.decay_per_step:
            return self.decay_per_step / self.learning_rate
        return self.weight_decay


def check_optimizer_keys(config: AdamKeys) -> None:
    """Raise ConfigError for a learning rate that would rise to min_lr."""
    if config.lr_schedule != "constant" and config.min_lr > config.learning_rate:
        raise ConfigError(
            f"learning_rate={config.learning_rate} is below min_lr={config.min_lr}: lower min_lr"
        )


class GradientNorms(NamedTuple):
    """L2 norms of the gradients of a step, before clipping."""

    total: Tensor  # (), of all gradients together
    each: Tensor  # (P,), of the gradient of each parameter


def micro_step(
    forward: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    x: Tensor,
    y: Tensor,
    precision: Precision,
    micro_batches: int,
) -> Tensor:
    """Do forward and backward of one micro-batch. Gradients add up in the parameters.

    Nothing here waits for the device.

    Args:
        forward: the model, (x, y) -> (loss, auxiliary loss).
        x, y: (B, T) tokens and the tokens that follow them.
        precision: autocast and loss scale.
        micro_batches: how many of them make this rank's step.

    Returns:
        (2,) this micro-batch's part of the step's loss and auxiliary loss.
    """
    with precision.autocast():
        losses = torch.stack(forward(x, y))  # (2,)
    # All micro-batches have the same number of tokens, so the mean of their means is the mean
    # over all tokens.
    precision.scaler.scale(losses.sum() / micro_batches).backward()
    return losses.detach() / micro_batches


def learning_rate(step: int, config: Any) -> float:
    """Compute the learning rate of `step` (1 .. max_iters) from the keys of a run.

    Linear warm-up, whose first step is not zero; then one of the schedules:

        cosine    half a cosine from `learning_rate` to `min_lr`
        wsd       constant, then linear to `min_lr` over the last `wsd_decay` share of all steps
        constant  `learning_rate`
    """
    highest = config.learning_rate
    start = config.warmup_iters
    end = config.max_iters
    # Step 1 has highest / warmup_iters: a step at 0 would be lost.
    if step <= start:
        return highest * step / start
    if config.lr_schedule == "constant":
        return highest
    if config.lr_schedule == "wsd":
        start = max(start, round((1 - config.wsd_decay) * end))
    # The share of the decay that is over: 0 at its start, 1 at max_iters.
    over = min(1.0, max(0, step - start) / max(1, end - start))
    height = 1 - over
    if config.lr_schedule == "cosine":
        height = 0.5 * (1 + math.cos(math.pi * over))  # 1 to 0, flat at both ends
    return config.min_lr + height * (highest - config.min_lr)


def make_optimizer(
    model: nn.Module,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decay_gains: bool = False,
    kind: str = "adamw",
) -> Optimizer:
    """Make the optimiser. Matrices and embeddings decay; biases and scalars never do.

    Args:
        model: a GPT; for adamw it may be any module.
        lr: learning rate.
        betas, eps: of AdamW.
        weight_decay: multiplied by the learning rate in each step.
        decay_gains: the gains of norms decay too.
        kind: adamw for all parameters; or muon for the matrices of the blocks, and adamw for the
            rest.
    """
    hidden = model.hidden_matrices() if kind == "muon" else {}
    norms = [module for module in model.modules() if isinstance(module, Norm)]
    gains = {gain for norm in norms for gain in norm.gains()} if decay_gains else set()
    rest = [p for p in model.parameters() if p not in hidden]
    decayed = [p for p in rest if p.dim() >= 2 or p in gains]
    others = [p for p in rest if p.dim() < 2 and p not in gains]
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    adamw = torch.optim.AdamW(groups, lr, betas, eps, fused=True)
    return MuonWithAdamW(hidden, adamw, lr, weight_decay) if hidden else adamw


def optimizer_of(config: OptimKeys, model: GPT) -> Optimizer:
    """Make the optimiser that `config` describes."""
    return make_optimizer(
        model,
        config.learning_rate,
        (config.beta1, config.beta2),
        config.adam_eps,
        config.decay,
        decay_gains=model.config.decays_gains,
        kind=config.optimizer,
    )


@torch.no_grad()
def guarded_update(
    optimizer: Optimizer,
    scaler: torch.amp.GradScaler,
    parameters: list[nn.Parameter],
    clip: float,
    bad_losses: Tensor,
) -> GradientNorms:
    """Clip the gradients and update the parameters, unless something is not finite.

    The device decides whether to update, so the host need not wait to learn it. Gradients are
    None afterwards.

    Args:
        optimizer: of make_optimizer.
        scaler: the loss scale of float16; not enabled otherwise.
        parameters: those of the optimiser, in the order in which norms are returned.
        clip: largest global gradient norm; 0 does not clip.
        bad_losses: () above 0 if a loss is not finite.

    Returns:
        Norms before clipping, in the dtype of bad_losses.
    """
    # Does nothing where there is no loss scale.
    scaler.unscale_(optimizer)
    # Under FSDP this rank's part, in the same memory.
    gradients = [share(parameter.grad) for parameter in parameters]
    norms = _gradient_norms(gradients, is_sharded(parameters[0]), bad_losses.dtype)
    # What all gradients are divided by, so that their norm is at most `clip`: 1 or more
    divisor = torch.ones_like(norms.total)
    if clip:
        # as torch.nn.utils.clip_grad_norm_ does
        divisor = ((norms.total + 1e-6) / clip).clamp(min=1.0)
    # A loss may be infinite while the gradients are not, which scaler.step would not see.
    # bad_losses is a sum over ranks, and so is the norm under FSDP: all ranks skip together.
    is_bad = ~torch.isfinite(norms.total) | (bad_losses > 0)
    _apply(optimizer, gradients, divisor, is_bad)
    # Lowers the loss scale after infinite gradients. Does nothing where there is none.
    scaler.update()
    for parameter in parameters:
        parameter.grad = None
    return norms


def _gradient_norms(gradients: list[Tensor], are_shares: bool, dtype: torch.dtype) -> GradientNorms:
    """Compute the norm of each gradient, and of all. Under FSDP each rank has shares of them."""
    # A few launches for all parameters, not one for each.
    norms = torch.stack(torch._foreach_norm(gradients)).to(dtype)  # (P,)
    if are_shares:
        squares = norms.double().square()  # a square can be beyond float32
        dist.all_reduce(squares)
        norms = squares.sqrt().to(norms.dtype)
    return GradientNorms(total=torch.linalg.vector_norm(norms), each=norms)


def _apply(optimizer: Optimizer, gradients: list[Tensor], divisor: Tensor, is_bad: Tensor) -> None:
    """Update with gradients / divisor, unless `is_bad`."""
    # Fused AdamW reads both attributes on the device, and so does MuonWithAdamW.
    optimizer.found_inf = is_bad.float()
    optimizer.grad_scale = None
    if divisor.dtype == torch.float32:
        # It divides as it reads the gradients, which saves a pass over them.
        optimizer.grad_scale = divisor
    else:
        torch._foreach_div_(gradients, divisor)
    optimizer.step()


def carry_state(optimizer: Optimizer, source: nn.Parameter, target: nn.Parameter) -> None:
    """Give `target`, which takes over the role of `source`, a copy of AdamW's moments."""
    moments = optimizer.state[source]
    optimizer.state[target] = {name: value.clone() for name, value in moments.items()}
