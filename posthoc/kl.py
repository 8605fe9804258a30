"""Compute KL(teacher || student) of next-token distributions, never with all logits at once.

The vocabulary is processed in chunks, with running log-sum-exps (Milakov & Gimelshein 2018). The
backward pass computes each chunk's logits again, so only two numbers a token are kept, whatever the
size of the vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 16384  # rows of the output head at once: 64 kB of float32 logits a token, on each side


def kl_divergence(
    x: Tensor,
    head: Tensor,
    x_teacher: Tensor,
    head_teacher: Tensor,
    n_vocab: int,
    chunk: int = CHUNK,
) -> Tensor:
    """Return KL (N,) in nats, float32 at least.

    Gradients go to x and head alone.

    Args:
        x: the student's final hidden states, normalised, (N, C).
        head: the student's output head, (V, C).
        x_teacher: the teacher's states, (N, C).
        head_teacher: the teacher's head, (V, C).
        n_vocab: rows of the heads beyond it are padding.
        chunk: rows of the heads at once.
    """
    return _ChunkedKL.apply(x, head, x_teacher.detach(), head_teacher.detach(), n_vocab, chunk)


def _logits(x: Tensor, head: Tensor, start: int, stop: int) -> Tensor:
    """Return logits of some tokens of the vocabulary, (N, stop - start), float32 at least.

    Also for bfloat16 weights: rounding the logits alone would make a KL of some 1e-3 nats.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.to(wide), head[start:stop].to(wide))


class _ChunkedKL(torch.autograd.Function):
    """KL = sum_v p_t (t - s) - (log Z_t - log Z_s), with logits s, t and p_t = exp(t) / Z_t."""

    @staticmethod
    def forward(ctx, x, head, x_teacher, head_teacher, n_vocab: int, chunk: int) -> Tensor:
        bounds = [(start, min(start + chunk, n_vocab)) for start in range(0, n_vocab, chunk)]
        # Of the chunks so far, (N,) each: log Z_s, log Z_t, and `gap`, the mean of t - s under p_t.
        sum_s = sum_t = gap = None
        for start, stop in bounds:
            s = _logits(x, head, start, stop)  # (N, chunk)
            t = _logits(x_teacher, head_teacher, start, stop)  # (N, chunk)
            new_s = s.logsumexp(-1)
            new_t = t.logsumexp(-1)
            if gap is not None:
                new_s = sum_s.logaddexp(new_s)
                new_t = sum_t.logaddexp(new_t)
            mean = ((t - new_t[:, None]).exp() * (t - s)).sum(-1)
            # Earlier chunks had a smaller Z_t, so their part of the mean shrinks.
            gap = mean if gap is None else gap * (sum_t - new_t).exp() + mean
            sum_s = new_s
            sum_t = new_t
        ctx.save_for_backward(x, head, x_teacher, head_teacher, sum_s, sum_t)
        ctx.bounds = bounds
        return gap - (sum_t - sum_s)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, head, x_teacher, head_teacher, sum_s, sum_t = ctx.saved_tensors
        needs_x, needs_head = ctx.needs_input_grad[:2]
        grad_x = torch.zeros_like(x, dtype=grad.dtype) if needs_x else None
        grad_head = torch.zeros_like(head, dtype=grad.dtype) if needs_head else None
        for start, stop in ctx.bounds:
            p_s = (_logits(x, head, start, stop) - sum_s[:, None]).exp()
            p_t = (_logits(x_teacher, head_teacher, start, stop) - sum_t[:, None]).exp()
            d = (p_s - p_t) * grad[:, None]  # (N, chunk), gradient of the student's logits
            if needs_x:
                grad_x += d @ head[start:stop].to(d.dtype)
            if needs_head:
                grad_head[start:stop] = d.T @ x.to(d.dtype)
        if needs_x:
            grad_x = grad_x.to(x.dtype)
        if needs_head:
            grad_head = grad_head.to(head.dtype)
        return grad_x, grad_head, None, None, None, None
