"""The parts of a training step: precision, learning-rate schedule, forward and backward of a
micro-batch, AdamW, and the guarded update: a step that is not finite is never applied.
"""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.distributed import is_sharded, share
from common.environment import Precision


def micro_step(
    forward: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    x: Tensor,
    y: Tensor,
    precision: Precision,
    micro_batches: int,
) -> Tensor:
    """Forward and backward of one of `micro_batches` micro-batches x, y (B, T); gradients add up in
    the parameters.

    Returns its part (2,) of the step's loss and auxiliary loss. Nothing here waits for the device.
    """
    with precision.autocast():
        pair = torch.stack(forward(x, y))  # loss and auxiliary loss
    # Micro-batches have equally many tokens, so the mean of their means is the mean over tokens.
    precision.scaler.scale(pair.sum() / micro_batches).backward()
    return pair.detach() / micro_batches


def learning_rate(
    step: int,
    schedule: str,
    warmup: int,
    max_iters: int,
    highest: float,
    lowest: float,
    wsd_decay: float,
) -> float:
    """Learning rate of `step` (1 .. max_iters): linear warm-up, then cosine, wsd or constant; never
    zero at first.

    wsd (warm-up, stable, decay): constant, then linear over the last `wsd_decay` share of all
    steps.
    """
    if step <= warmup:
        return highest * step / warmup
    if schedule == "constant":
        return highest
    start = max(warmup, round((1 - wsd_decay) * max_iters)) if schedule == "wsd" else warmup
    # share of the decay that is over
    over = min(1.0, max(0, step - start) / max(1, max_iters - start))
    height = 1 - over if schedule == "wsd" else 0.5 * (1 + math.cos(math.pi * over))
    return lowest + height * (highest - lowest)


def make_optimizer(
    model: nn.Module, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """Fused AdamW; weight decay on tensors of two dimensions or more, that is not on gains and
    biases.
    """
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr, betas, eps, fused=True
    )


@torch.no_grad()
def guarded_update(
    optimizer: torch.optim.AdamW,
    scaler: torch.amp.GradScaler,
    parameters: list[nn.Parameter],
    clip: float,
    loss_is_bad: Tensor,
) -> Tensor:
    """Clip to global gradient norm `clip` (0: not) and update, unless something is not finite.

    That is decided on the device. Returns (1 + number of parameters,): the global norm, then each
    gradient's norm.
    """
    scaler.unscale_(optimizer)
    gradients = [share(parameter.grad) for parameter in parameters]
    norms = torch.stack(torch._foreach_norm(gradients)).to(loss_is_bad.dtype)
    if is_sharded(parameters[0]):  # each rank has the norms of its shares
        squares = norms.double().square()  # which can be beyond float32
        dist.all_reduce(squares)
        norms = squares.sqrt().to(norms.dtype)
    total = torch.linalg.vector_norm(norms)
    shrink = ((total + 1e-6) / clip).clamp(min=1.0) if clip else torch.ones_like(total)
    # Fused AdamW can divide by a float32 grad_scale as it reads the gradients, which saves clipping
    # a pass of its own.
    in_kernel = shrink.dtype == torch.float32 and not scaler.is_enabled()
    if not in_kernel:
        torch._foreach_div_(gradients, shrink)
    if scaler.is_enabled():
        # float16: leaves out a step with infinite gradients and lowers the scale
        scaler.step(optimizer)
        scaler.update()
    else:
        # It reads found_inf on the device too, so the host need not wait to learn whether the step
        # is sound.
        optimizer.grad_scale = shrink if in_kernel else None
        optimizer.found_inf = (~torch.isfinite(total) | (loss_is_bad > 0)).float()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return torch.cat([total.view(1), norms])


def carry_state(
    optimizer: torch.optim.Optimizer, source: nn.Parameter, target: nn.Parameter
) -> None:
    """`target` takes over the role of `source`: it gets a copy of its moments too."""
    optimizer.state[target] = {
        name: value.clone() for name, value in optimizer.state[source].items()
    }
