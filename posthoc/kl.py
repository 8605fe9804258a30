"""Compute KL(teacher || student) of next-token distributions, never with all logits at once.

The vocabulary is processed in chunks, whose logits are computed again in backward. So only three
numbers a token and chunk are kept, whatever the chunk's size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK = 16384  # rows of the output head at once: 64 kB of float32 logits a token, on each side


def kl_divergence(
    x: Tensor,
    head: Tensor,
    x_teacher: Tensor,
    head_teacher: Tensor,
    n_vocab: int,
    chunk: int = CHUNK,
) -> Tensor:
    """Return KL (...,) in nats, float32 at least.

    Gradients go to x and head alone.

    Args:
        x: the student's final hidden states, normalised, (..., C).
        head: the student's output head, (V, C).
        x_teacher: the teacher's states, (..., C).
        head_teacher: the teacher's head, (V, C).
        n_vocab: rows of the heads beyond it are padding.
        chunk: rows of the heads at once.
    """
    own = head[:n_vocab].split(chunk)
    theirs = head_teacher.detach()[:n_vocab].split(chunk)
    taught = x_teacher.detach()
    # Once, not in each chunk: the gradient would be rounded as often.
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    options = {"use_reentrant": False, "preserve_rng_state": False}
    parts = [
        checkpoint(_chunk, x, part, taught, part_teacher, **options)
        for part, part_teacher in zip(own, theirs, strict=True)
    ]
    log_s, log_t, gaps = (torch.stack(terms) for terms in zip(*parts, strict=True))  # (chunks, ...)
    # KL = sum_v p_t (t - s) - (log Z_t - log Z_s), with logits s, t and p_t = exp(t) / Z_t
    sum_t = log_t.logsumexp(0)
    gap = ((log_t - sum_t).exp() * gaps).sum(0)
    return gap - (sum_t - log_s.logsumexp(0))


def _chunk(
    x: Tensor, head: Tensor, x_teacher: Tensor, head_teacher: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log Z_s, log Z_t and the mean of t - s under p_t, of a chunk alone, (...,) each."""
    s = _logits(x, head)  # (..., chunk)
    t = _logits(x_teacher, head_teacher)  # (..., chunk)
    log_t = t.logsumexp(-1)
    gap = ((t - log_t[..., None]).exp() * (t - s)).sum(-1)
    return s.logsumexp(-1), log_t, gap


def _logits(x: Tensor, head: Tensor) -> Tensor:
    """Return logits of some tokens of the vocabulary, (..., rows of head), float32 at least.

    Also for bfloat16 weights: rounding the logits alone would make a KL of some 1e-3 nats.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.to(wide), head.to(wide))
