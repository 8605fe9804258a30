"""Compute the cross-entropy of a language model, its many logits in chunks, never all at once."""

import torch
import torch.nn.functional as F
from torch import Tensor

# The most bytes that the logits may take in float32; more are computed chunk by chunk.
LOGITS_BYTES = 1 << 29
# Compiled under autocast, no logits are stored in float32. And every chunk adds a gradient of the
# whole head, so fewer chunks are better.
COMPILED_LOGITS_BYTES = 1 << 31


def cross_entropy(x: Tensor, head: Tensor, targets: Tensor, n_vocab: int) -> Tensor:
    """Compute the mean cross-entropy of the logits x head^T.

    Args:
        x: hidden states (N, C).
        head: weight of the output layer (V, C).
        targets: token ids (N,); rows with -1 are left out.
        n_vocab: the first n_vocab rows of the head are tokens, the others are padding.

    Returns:
        A scalar, in nats per token.
    """
    narrow = x.dtype.itemsize < 4 or torch.is_autocast_enabled(x.device.type)
    limit = COMPILED_LOGITS_BYTES if narrow and torch.compiler.is_compiling() else LOGITS_BYTES
    logits_bytes = 4 * x.shape[0] * head.shape[0]
    n_chunks = -(-logits_bytes // limit)  # rounded up
    if n_chunks > 1:
        total = _ChunkedCrossEntropy.apply(
            x, head, targets, n_vocab, n_chunks, torch.is_grad_enabled()
        )
        return total / (targets >= 0).sum()
    logits = F.linear(x, head)[:, :n_vocab]  # (N, n_vocab)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(wide), targets, ignore_index=-1)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum the cross-entropy chunk by chunk.

    The gradient is computed in the forward pass, while a chunk's logits are in memory. So no logits
    are kept and none are computed twice (the method of Liger-Kernel's fused linear loss).
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, head: Tensor, targets: Tensor, n_vocab: int, n_chunks: int, needs_grad: bool
    ) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=x.device)
        grad_x = []
        grad_head = torch.zeros_like(head, dtype=wide) if needs_grad else None
        # Inductor does not keep to this order: by its own, 13 to 24 chunks are alive at once, 12.4
        # GB at most by estimate for a micro-batch of 60 x 1024 tokens.
        for x_chunk, target in zip(x.chunk(n_chunks), targets.chunk(n_chunks), strict=True):
            logits = F.linear(x_chunk, head)  # (n, V), in autocast's type
            log_p = logits[:, :n_vocab].to(wide).log_softmax(-1)  # (n, n_vocab)
            valid = (target >= 0).unsqueeze(1)  # (n, 1)
            index = target.clamp(min=0).unsqueeze(1)  # (n, 1)
            # Not in place: torch 2.11 would lose the gradient of `total`.
            total = total - (log_p.gather(1, index) * valid).sum()
            if not needs_grad:
                continue
            # The gradient of the logits is softmax - one-hot.
            p = log_p.exp()
            if torch.compiler.is_compiling():
                # Inductor fuses this; for a scatter it would write all of p to memory.
                p = p - (torch.arange(n_vocab, device=x.device) == index).to(wide)
            else:
                # In eager mode the scatter is faster, and takes less memory: 4.1 chunks instead of
                # 4.9.
                p.scatter_add_(1, index, -torch.ones_like(index, dtype=wide))
            grad = p * valid
            grad = F.pad(grad, (0, head.shape[0] - n_vocab)).to(logits.dtype)  # (n, V)
            grad_x.append((grad @ head.to(grad.dtype)).to(x.dtype))  # (n, C)
            grad_head += (grad.t() @ x_chunk.to(grad.dtype)).to(wide)  # (V, C)
        if needs_grad:
            ctx.save_for_backward(torch.cat(grad_x), grad_head.to(head.dtype))
        return total

    @staticmethod
    def backward(ctx, grad_total: Tensor):
        grad_x, grad_head = ctx.saved_tensors
        dx = (grad_total * grad_x).to(grad_x.dtype)
        d_head = (grad_total * grad_head).to(grad_head.dtype)
        return dx, d_head, None, None, None, None
