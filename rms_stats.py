"""The size of the residual stream at every norm position, and its drift from a shared statistic.

CoupledNorm divides the stream by the RMS of an earlier position. How much larger the stream is by then is the drift
RMS(h) / RMS(shared), one number a token. Its typical value can be compensated by a scalar at each position (alpha,
section 5.3 of Loretz & Hochreiter 2026), its spread over tokens cannot.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kernels.reference import inverse_rms
from norm_layers import SharedRMSNorm
from parallel import gather_root


@dataclass(frozen=True)
class RMSStats:
    """One float64 number for each norm position (2L + 1,)."""

    rms: Tensor  # root of the mean square over tokens and channels
    drift: Tensor  # geometric mean over tokens of RMS(h) / RMS(statistic used); 1 where the position has its own
    spread: Tensor  # standard deviation over tokens of the logarithm of that ratio

    def record(self) -> dict[str, list[float]]:
        """For a log."""
        return {"rms": self.rms.tolist(), "drift": self.drift.tolist(), "spread": self.spread.tolist()}


@torch.no_grad()
def measure(model: nn.Module, idx: Tensor) -> RMSStats:
    """Statistics of a GPT (model.py) on tokens idx (B, T), dropout off. Under FSDP all ranks must call it."""
    rows: list[tuple[Tensor, Tensor, Tensor]] = []

    def note(norm: nn.Module, inputs: tuple, outputs: tuple[Tensor, Tensor, Tensor | None]) -> None:
        _, h, used = outputs
        own = inverse_rms(h, norm.eps)  # (B, T, 1)
        # Norms with channel groups, and norms without a shared statistic, have no drift.
        log_ratio = (used / own).log().double() if isinstance(norm, SharedRMSNorm) else torch.zeros_like(own).double()
        rows.append((h.double().square().mean().sqrt(), log_ratio.mean().exp(), log_ratio.std(correction=0)))

    handles = [norm.register_forward_hook(note) for norm in model.norms()]
    was_training = model.training
    gather_root(model)
    try:
        model.eval().hidden(idx)
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    return RMSStats(*(torch.stack(column).cpu() for column in zip(*rows, strict=True)))


@torch.no_grad()
def calibrate(model: nn.Module, idx: Tensor) -> RMSStats:
    """Set alpha of every shared position to its drift on tokens idx (B, T), where the config lets it move
    (coupled_calibrate); the statistics before that."""
    stats = measure(model, idx)
    for norm, drift in zip(model.norms(), stats.drift, strict=True):
        if isinstance(norm, SharedRMSNorm) and isinstance(norm.alpha, Tensor):
            norm.alpha.fill_(drift)
    return stats
