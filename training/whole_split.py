"""The loss over a whole split, every token once, document by document.

`val_loss` is over the first tokens of the val split, which may be a handful of documents. What is
said about a text should rest on all of it, and show what a single document does to the result.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common.distributed import Ranks
from model import GPT
from training.dataloader import Blocks
from training.stream import evaluating

LOGITS_BYTES = 1 << 29  # the most that the float32 logits of one batch may take
MAX_DOCUMENTS = 1000  # of a split with more, the sums of single documents are not recorded


def split_record(tokens: np.ndarray, nats: np.ndarray) -> dict[str, Any]:
    """Return for the log what split_loss has found."""
    found: dict[str, Any] = {
        "val_loss_full": float(nats.sum() / tokens.sum()),  # nats per token
        "tokens": int(tokens.sum()),
    }
    if len(tokens) <= MAX_DOCUMENTS:
        found["document_tokens"] = tokens.tolist()
        found["document_nats"] = nats.tolist()
    return found


class Windows:
    """A split cut into windows of block_size targets; the last one of a shard may be shorter.

    Args:
        blocks: the split.
        end_of_text: id of the token with which each document begins; None: unknown, so that the
            split counts as one document.
    """

    def __init__(self, blocks: Blocks, end_of_text: int | None):
        self.blocks = blocks
        length = blocks.block_size
        self.starts = [
            (number, start)
            for number, shard in enumerate(blocks.shards)
            for start in range(0, len(shard) - 1, length)
        ]
        # Where documents begin in each shard, and how many have begun before it.
        self.begins = [
            np.flatnonzero(shard == end_of_text) if end_of_text is not None else np.zeros(0, int)
            for shard in blocks.shards
        ]
        self.before = np.cumsum([0] + [len(begin) for begin in self.begins])

    def __len__(self) -> int:
        return len(self.starts)

    def batch(self, indices: range) -> tuple[Tensor, Tensor, np.ndarray]:
        """Read windows.

        Returns:
            x, y: int64 (B, T) each; y is -1 behind the end of a shard.
            documents: number of each target's document, (B, T); meaningless where y is -1. The
                token that begins a document belongs to it.
        """
        length = self.blocks.block_size
        x = np.zeros((len(indices), length), np.int64)
        y = np.full((len(indices), length), -1, np.int64)
        documents = np.zeros((len(indices), length), np.int64)
        for row, index in enumerate(indices):
            number, start = self.starts[index]
            tokens = self.blocks.shards[number][start : start + length + 1].astype(np.int64)
            count = len(tokens) - 1
            x[row, :count] = tokens[:-1]
            y[row, :count] = tokens[1:]
            places = np.arange(start + 1, start + 1 + count)
            begun = np.searchsorted(self.begins[number], places, side="right")
            documents[row, :count] = self.before[number] + begun
        return torch.from_numpy(x), torch.from_numpy(y), documents


def split_loss(
    model: GPT, windows: Windows, batch_size: int, ranks: Ranks, autocast: Callable
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the loss of every target of a split once, with the context of its own window.

    The ranks share the windows. All of them must call it.

    Args:
        model: not compiled. Its mode of training is restored.
        windows: the split.
        batch_size: windows at once; fewer if their logits would be too many.
        ranks: this process and the others.
        autocast: Precision.autocast.

    Returns:
        One entry for each document that has a target: the number of its targets, int64, and the sum
        of their losses in nats, float64.
    """
    fitting = LOGITS_BYTES // (4 * windows.blocks.block_size * model.n_vocab)
    rows = max(1, min(batch_size, fitting))
    starts = range(0, len(windows), rows)
    # Tokens and nats; the text before the first document is number 0.
    totals = torch.zeros(2, int(windows.before[-1]) + 1, dtype=torch.float64)
    with evaluating(model):
        for start, counts in ranks.deal(starts):
            x, y, documents = windows.batch(range(start, min(start + rows, len(windows))))
            with autocast():
                logits = model(x.to(ranks.device))  # (B, T, n_vocab)
            losses = token_losses(logits, y.to(ranks.device))  # (B T,)
            if counts:
                valid = (y != -1).flatten()
                index = torch.from_numpy(documents).flatten()[valid]
                nats = losses.cpu().double()[valid]
                totals[0].index_add_(0, index, torch.ones_like(nats))
                totals[1].index_add_(0, index, nats)
    # MPS has no float64; it has one rank, which needs no sum.
    if ranks.world_size > 1:
        totals = ranks.sum(totals.to(ranks.device)).cpu()
    tokens, nats = totals.numpy()
    is_there = tokens > 0
    return tokens[is_there].astype(np.int64), nats[is_there]


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each target (B T,); 0 where it is -1."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    flat = logits.to(wide).flatten(0, 1)  # (B T, n_vocab)
    return F.cross_entropy(flat, targets.flatten(), ignore_index=-1, reduction="none")
