"""Cross-entropy of a language model, without ever holding all its logits."""

import torch
import torch.nn.functional as F
from torch import Tensor

# Logits that would be more in float32 are never there at once in training. Compiled under autocast
# there are none in float32, and fewer chunks are fewer gradients of the head to add up.
LOGITS_BYTES, COMPILED_LOGITS_BYTES = 1 << 29, 1 << 31


def cross_entropy(x: Tensor, head: Tensor, targets: Tensor, n_vocab: int) -> Tensor:
    """Mean cross-entropy (nats per token) of logits x head^T. x (N, C), head (V, C), targets (N,),
    -1 is left out.
    """
    narrow = x.dtype.itemsize < 4 or torch.is_autocast_enabled(x.device.type)
    limit = COMPILED_LOGITS_BYTES if narrow and torch.compiler.is_compiling() else LOGITS_BYTES
    chunks = -(-4 * x.shape[0] * head.shape[0] // limit)
    if chunks > 1:
        total = _ChunkedCrossEntropy.apply(
            x, head, targets, n_vocab, chunks, torch.is_grad_enabled()
        )
        return total / (targets >= 0).sum()
    logits = F.linear(x, head)[:, :n_vocab]
    return F.cross_entropy(
        logits.to(torch.promote_types(logits.dtype, torch.float32)), targets, ignore_index=-1
    )


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy, chunk by chunk. The gradient is taken in the forward pass while a
    chunk's logits are at hand, so that no logits are kept and none are computed twice (the method
    of Liger-Kernel's fused linear loss).
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, head: Tensor, targets: Tensor, n_vocab: int, chunks: int, needs_grad: bool
    ) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=x.device)
        grad_x, grad_head = [], torch.zeros_like(head, dtype=wide) if needs_grad else None
        for x_part, target in zip(x.chunk(chunks), targets.chunk(chunks), strict=True):
            logits = F.linear(x_part, head)  # (n, V), in autocast's type
            log_p = logits[:, :n_vocab].to(wide).log_softmax(-1)
            valid = (target >= 0).unsqueeze(1)
            index = target.clamp(min=0).unsqueeze(1)
            # in place, torch 2.11 would lose its gradient
            total = total - (log_p.gather(1, index) * valid).sum()
            if needs_grad:
                p = log_p.exp()
                # inductor fuses this; for a scatter it would write out all of p
                if torch.compiler.is_compiling():
                    p = p - (torch.arange(n_vocab, device=x.device) == index).to(wide)
                else:
                    p.scatter_add_(1, index, -torch.ones_like(index, dtype=wide))
                grad = p * valid
                # softmax - one-hot, (n, V)
                grad = F.pad(grad, (0, head.shape[0] - n_vocab)).to(logits.dtype)
                grad_x.append((grad @ head.to(grad.dtype)).to(x.dtype))
                grad_head += (grad.t() @ x_part.to(grad.dtype)).to(wide)
        if needs_grad:
            ctx.save_for_backward(torch.cat(grad_x), grad_head.to(head.dtype))
        return total

    @staticmethod
    def backward(ctx, grad_total: Tensor):
        grad_x, grad_head = ctx.saved_tensors
        return (
            (grad_total * grad_x).to(grad_x.dtype),
            (grad_total * grad_head).to(grad_head.dtype),
            *[None] * 4,
        )
