"""How stable a training run is: clipped steps, spikes of the loss, the largest attention logit.

Too large a learning rate shows here before it diverges (Wortsman et al. 2023, arXiv 2309.14322).
"""

from collections import deque
from statistics import median
from typing import Any

import torch
from torch import Tensor

from model import GPT, Attention

WINDOW = 50  # steps whose losses a step is compared with
SPIKE = 0.5  # nats per token above their median
QUERIES = 1024  # whose attention logits are computed at once


class Stability:
    """Counts over the steps of a run.

    Args:
        grad_clip: largest global gradient norm, 0 if gradients are not clipped.
    """

    def __init__(self, grad_clip: float):
        self.grad_clip = grad_clip
        self.steps = 0
        self.clipped = 0
        self.spikes = 0
        self.recent: deque[float] = deque(maxlen=WINDOW)  # losses of the last steps

    def add(self, loss: float, grad_norm: float) -> None:
        """Count a step with this loss and this gradient norm before clipping.

        A step is a spike if its loss is more than SPIKE above the median of the WINDOW steps before
        it. The first WINDOW steps are none.
        """
        self.steps += 1
        self.clipped += 0 < self.grad_clip < grad_norm
        if len(self.recent) == WINDOW:
            self.spikes += loss > median(self.recent) + SPIKE
        self.recent.append(loss)

    def record(self) -> dict[str, float]:
        """Return the counts for the log: steps counted, share of them clipped, spikes."""
        return {
            "steps": self.steps,
            "clipped": self.clipped / max(1, self.steps),
            "spikes": self.spikes,
        }

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {
            "steps": self.steps,
            "clipped": self.clipped,
            "spikes": self.spikes,
            "recent": list(self.recent),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`; from zero if it is empty, as that of an older checkpoint is."""
        self.steps = state.get("steps", 0)
        self.clipped = state.get("clipped", 0)
        self.spikes = state.get("spikes", 0)
        self.recent = deque(state.get("recent", []), maxlen=WINDOW)


@torch.no_grad()
def largest_attention_logit(model: GPT, idx: Tensor) -> float:
    """Return the largest logit of attention on token ids idx (B, T), over all blocks and heads.

    It is the largest scale q k^T that a query may see. Dropout is off. Under FSDP all ranks must
    call it.
    """
    found: list[Tensor] = []
    layers = [module for module in model.modules() if isinstance(module, Attention)]

    def watch(layer: Attention) -> None:
        attend = layer.attend

        def watched(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            found.append(largest_logit(q, k, mask, layer.scale))
            return attend(q, k, v, mask)

        layer.attend = watched

    was_training = model.training
    try:
        for layer in layers:
            watch(layer)
        # with targets, as in training: FSDP's hooks run, and no whole logits are made
        model.eval()(idx, idx)
    finally:
        model.train(was_training)
        for layer in layers:
            vars(layer).pop("attend", None)  # what stood before the method of the class
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
    keys = k.flatten(0, 1)  # (B H, T, head_dim)
    largest = []
    # QUERIES of one head at a time, because all logits would need much memory.
    with torch.autocast(q.device.type, enabled=False):
        for head, queries in enumerate(q.flatten(0, 1)):
            for start in range(0, T, QUERIES):
                end = min(start + QUERIES, T)
                logits = scale * queries[start:end].float() @ keys[head, :end].float().T
                largest.append(
                    logits.masked_fill(~seen(mask, start, end, q.device), -torch.inf).max()
                )
    return torch.stack(largest).max()


def seen(mask: Tensor | None, start: int, end: int, device: torch.device) -> Tensor:
    """Return which of the first `end` keys queries `start` to `end` - 1 may see."""
    if mask is not None:
        return mask[start:end, :end]
    return torch.ones(end - start, end, dtype=torch.bool, device=device).tril(start)
