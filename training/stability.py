"""How stable a training run is: clipped steps, spikes of the loss, the largest attention logit.

Too large a learning rate shows here before it diverges (Wortsman et al. 2023, arXiv 2309.14322).
"""

from dataclasses import dataclass, field
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from model import GPT, Attention
from training.stream import evaluating

WINDOW = 50  # steps whose losses a step is compared with
SPIKE = 0.5  # nats per token above their median


@dataclass
class Stability:
    """Counts over the steps of a run."""

    grad_clip: float  # largest global gradient norm, 0 if gradients are not clipped
    steps: int = 0
    clipped: int = 0
    spikes: int = 0
    recent: list[float] = field(default_factory=list)  # losses of the last WINDOW steps

    def add(self, loss: float, grad_norm: float) -> None:
        """Count a step with this loss and this gradient norm before clipping.

        A step is a spike if its loss is more than SPIKE above the median of the WINDOW steps before
        it. The first WINDOW steps are none.
        """
        self.steps += 1
        self.clipped += 0 < self.grad_clip < grad_norm
        if len(self.recent) == WINDOW:
            self.spikes += loss > median(self.recent) + SPIKE
        self.recent = [*self.recent, loss][-WINDOW:]

    def record(self) -> dict[str, float]:
        """Return the counts for the log: steps counted, share of them clipped, spikes."""
        return {
            "steps": self.steps,
            "clipped": self.clipped / max(1, self.steps),
            "spikes": self.spikes,
        }

    def state(self) -> dict[str, Any]:
        """Return what Stability takes besides grad_clip, for a checkpoint."""
        return {name: value for name, value in vars(self).items() if name != "grad_clip"}


def largest_attention_logit(model: GPT, idx: Tensor) -> float:
    """Return the largest logit of attention on token ids idx (B, T), over all blocks and heads.

    It is the largest scale q k^T that a query may see. Dropout is off. Under FSDP all ranks must
    call it.
    """
    found: list[Tensor] = []
    attend = Attention.attend

    def watched(layer: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        found.append(largest_logit(q, k, mask, layer.scale))
        return attend(layer, q, k, v, mask)

    with evaluating(model), mock.patch.object(Attention, "attend", watched):
        # with targets, as in training: FSDP's hooks run, and no whole logits are made
        model(idx, idx)
    return float(torch.stack(found).max())


def largest_logit(q: Tensor, k: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Return the largest logit () of queries q (B, H, T, head_dim), in float32.

    Args:
        q: queries.
        k: keys (B, H_kv, T, head_dim).
        mask: (T, T), what a query may see; None for all up to itself.
        scale: factor on the products; None for 1 / sqrt(head_dim).
    """
    T = q.shape[2]
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)  # (B, H, T, head_dim)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    if mask is None:  # query i sees the keys up to i
        mask = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
    largest = []
    # One head at a time, because all logits would need much memory.
    with torch.autocast(q.device.type, enabled=False):
        for queries, keys in zip(q.flatten(0, 1), k.flatten(0, 1), strict=True):  # (T, head_dim)
            logits = scale * queries.float() @ keys.float().T  # (T, T)
            largest.append(logits.masked_fill(~mask, -torch.inf).max())
    return torch.stack(largest).max()
