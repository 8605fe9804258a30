"""KL(teacher || student) of next-token distributions, never with all logits at once.

The vocabulary is gone through in chunks, with running sums (Milakov & Gimelshein 2018 for the
logarithms of sums); the backward pass computes each chunk's logits again. What is kept is two
numbers a token, whatever the vocabulary.
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
    """KL (N,) in nats for normalised hidden states x, x_teacher (N, C) under output heads (V, C);
    float32 at least.

    Rows of the heads beyond n_vocab are padding. Gradients go to x and head alone.
    """
    return _ChunkedKL.apply(x, head, x_teacher.detach(), head_teacher.detach(), n_vocab, chunk)


def _logits(x: Tensor, head: Tensor, start: int, stop: int) -> Tensor:
    """Float32 at least, also of bfloat16 weights: rounded logits alone would make a KL of some 1e-3
    nats.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.to(wide), head[start:stop].to(wide))  # (N, chunk)


class _ChunkedKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, head, x_teacher, head_teacher, n_vocab: int, chunk: int) -> Tensor:
        bounds = [(start, min(start + chunk, n_vocab)) for start in range(0, n_vocab, chunk)]
        # logarithms of the sums so far, and the mean of (teacher - student) logits under t
        sum_s = sum_t = gap = None
        for start, stop in bounds:
            s, t = _logits(x, head, start, stop), _logits(x_teacher, head_teacher, start, stop)
            part_s, part_t = s.logsumexp(-1), t.logsumexp(-1)
            new_s, new_t = (
                (part_s, part_t)
                if gap is None
                else (sum_s.logaddexp(part_s), sum_t.logaddexp(part_t))
            )
            mean = ((t - new_t[:, None]).exp() * (t - s)).sum(-1)
            gap = mean if gap is None else gap * (sum_t - new_t).exp() + mean
            sum_s, sum_t = new_s, new_t
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
            d = (p_s - p_t) * grad[:, None]  # (N, chunk): d KL / d logits of the student
            if needs_x:
                grad_x += d @ head[start:stop].to(d.dtype)
            if needs_head:
                grad_head[start:stop] = d.T @ x.to(d.dtype)
        return (
            grad_x.to(x.dtype) if needs_x else None,
            grad_head.to(head.dtype) if needs_head else None,
            None,
            None,
            None,
            None,
        )
