"""What a run measures besides training: val loss, bits per byte, its stream, a sample of its text.

Evaluation changes nothing in training: it draws nothing from training's random streams, and norms
collect no statistics.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.distributed import Ranks
from common.errors import DataError
from configurator import key
from data.tokenizers import (
    Edges,
    decode,
    document_begins,
    document_edges,
    load_tokenizer,
    token_bytes,
)
from model import GPT
from taper import tapers
from training.dataloader import Batch, Blocks, bytes_per_token, eval_batches, read_ahead
from training.log import RunLog
from training.run import write_text
from training.stability import Stability, largest_attention_logit
from training.stream import evaluating, measure

PROMPT = 32  # tokens of the val shards that a text sample continues
TEMPERATURE = 0.8
TOP_K = 200
LOGITS_BYTES = 1 << 29  # the most that the float32 logits of one batch may take
MAX_DOCUMENTS = 1000  # of a split with more, the sums of single documents are not recorded


@dataclass(frozen=True)
class EvalKeys:
    """Evaluation"""

    eval_tokens: int = key(
        2_097_152, "val_loss is over this many tokens of the val shards, always the same", least=1
    )
    full_val: bool = key(
        False, "at the end measure val_loss_full: the whole val split, every document"
    )
    sample_tokens: int = key(300, "length of the text sample at the end (0: none)", least=0)
    hellaswag: str = key(
        "off", "score HellaSwag at the end: off, auto (downloads the items), or a file of items"
    )
    hellaswag_items: int = key(
        0, "score this many items, spread evenly over the file (0: all)", least=0
    )


class Evaluator:
    """The measurements of one run.

    Args:
        config: a TrainConfig.
        blocks: the val split.
        meta: meta.json of the data, which names the tokenizer.
        ranks: this process and the others.
        autocast: Precision.autocast.
    """

    def __init__(
        self,
        config: Any,
        blocks: Blocks,
        meta: dict,
        ranks: Ranks,
        autocast: Callable,
    ):
        self.config = config
        self.blocks = blocks
        self.meta = meta
        self.ranks = ranks
        self.autocast = autocast
        self.batches = eval_batches(blocks, config.batch_size, config.eval_tokens)
        self.tokenizer = None  # then there is no text sample
        self.no_tokenizer = ""  # why there is none, or no number of bytes of its tokens
        self.bytes_per_token = 0.0  # 0: unknown
        try:
            self.tokenizer = load_tokenizer(meta)
            if ranks.is_main:
                lengths = token_bytes(self.tokenizer)
                self.bytes_per_token = bytes_per_token(blocks, self.batches, lengths)
        except DataError as error:
            self.no_tokenizer = str(error)

    def val_loss(self, model: nn.Module) -> float:
        """Compute the mean loss over the evaluation batches, nats per token.

        The batches are divided among the ranks. The loss of each is kept apart and all are summed
        in one order, so the value does not depend on the number of ranks.
        """
        device = self.ranks.device
        # The last batch is padded to the size of the others: another shape would be compiled as
        # well, and would make the graph of training dynamic.
        rows = len(self.batches[0])
        # MPS has no float64.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        losses = torch.zeros(len(self.batches), dtype=dtype, device=device)
        turns = list(self.ranks.deal(range(len(self.batches))))

        def read(turn: tuple[int, bool]) -> Batch:
            return self.blocks.batch(self.batches[turn[0]], rows, pin=device.type == "cuda")

        with evaluating(model):
            for (number, counts), (x, y) in zip(turns, read_ahead(read, turns), strict=True):
                x, y = (tokens.to(device, non_blocking=True) for tokens in (x, y))  # (B, T) each
                with self.autocast():
                    # counts is False, so 0, for a batch that only keeps the ranks together.
                    losses[number] = model(x, y)[0] * counts
        losses = self.ranks.sum(losses).cpu().double()
        # The last batch may have fewer blocks.
        weights = torch.tensor([len(batch) for batch in self.batches], dtype=torch.float64)
        return float((losses * weights).sum() / weights.sum())

    def log_val_loss(self, compiled: nn.Module, model: GPT, log: RunLog, step: int) -> float:
        """Measure the val loss, and log it with bits per byte and the taper's gate if there are.

        Args:
            compiled: what computes the loss: `model`, or the compiled one.
            model: the plain GPT.
        """
        loss = self.val_loss(compiled)
        record = {"val_loss": loss}
        line = f"step {step}  val loss {loss:.4f}"
        if self.bytes_per_token:
            bits = loss / (math.log(2) * self.bytes_per_token)
            record["bits_per_byte"] = bits
            line += f" nats per token, {bits:.4f} bits per byte"
        for norm in tapers(model)[:1]:  # all of them have the same gate
            record["gate"] = float(norm.gate)
            line += f", taper gate {norm.gate:.3g}"
        log.event("eval", step=step, **record)
        log.say(line)
        return loss

    def log_stability(self, model: GPT, log: RunLog, step: int, stability: Stability) -> None:
        """Log the residual stream at every norm position, and how stable the run has been.

        Args:
            model: not compiled: a compiled one ignores hooks that are registered later.
        """
        x, y = self.spread_windows()
        with self.autocast():
            stats = measure(model, x, y)
            logit = largest_attention_logit(model, x)
        log.event("rms", step=step, **stats.record())
        log.event("stability", step=step, attention_logit=logit, **stability.record())

    def spread_windows(self) -> tuple[Tensor, Tensor]:
        """Return one batch of windows and their targets (B, T), spread evenly over the text.

        Neighbouring windows are of one document, and would only tell how well the model predicts
        that one.
        """
        indices = [index for batch in self.batches for index in batch]
        # As many windows as a batch has, or a few less.
        stride = math.ceil(len(indices) / len(self.batches[0]))
        x, y = self.blocks.batch(indices[::stride])  # (B, T) each
        return x.to(self.ranks.device), y.to(self.ranks.device)

    def log_split_loss(self, model: GPT, log: RunLog, step: int) -> None:
        """Measure the loss over the whole val split, document by document, and log it."""
        # Without a tokenizer nothing says where documents begin.
        edges = document_edges(self.tokenizer)
        tokens, nats = split_loss(
            model, self.blocks, edges, self.config.batch_size, self.ranks, self.autocast
        )
        record = split_record(tokens, nats)
        log.event("val_full", step=step, **record)
        log.say(
            f"step {step}  val loss over the whole split {record['val_loss_full']:.4f} nats per "
            f"token, {record['tokens']:,} tokens, {len(tokens)} documents"
        )

    def write_sample(self, model: GPT, path: Path) -> str:
        """Write how the model continues the first tokens of the val shards.

        All ranks generate, since FSDP needs them. The main one writes.

        Returns:
            A line about it, for people.

        Raises:
            UserError: it cannot be written.
        """
        if self.tokenizer is None:
            return f"no text sample: {self.no_tokenizer}"
        device = self.ranks.device
        length = min(PROMPT, self.config.block_size)
        prompt = torch.from_numpy(self.blocks[0][:length])[None].to(device)  # (1, T)
        generator = torch.Generator(device).manual_seed(self.config.seed)
        model.eval()
        tokens = model.generate(prompt, self.config.sample_tokens, TEMPERATURE, TOP_K, generator)
        if self.ranks.is_main:
            write_text(path, decode(self.tokenizer, tokens[0].tolist()), "the run is saved")
        return f"a sample of its text is in {path}"


# ---------------------------------------------------------------------- the loss over a whole split

# `val_loss` is over the first tokens of the val split, which may be a handful of documents. What is
# said about a text should rest on all of it, and show what a single document does to the result.


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


def split_loss(
    model: GPT,
    blocks: Blocks,
    edges: Edges,
    batch_size: int,
    ranks: Ranks,
    autocast: Callable,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the loss of every target of a split once, with the context of its own window.

    Windows have block_size targets, the last one of a shard fewer. The ranks share the windows. All
    of them must call it.

    Args:
        model: not compiled. Its mode of training is restored.
        blocks: the split.
        edges: what tells documents apart; without any the split counts as one document.
        batch_size: windows at once; fewer if their logits would be too many.
        ranks: this process and the others.
        autocast: Precision.autocast.

    Returns:
        One entry for each document that has a target: the number of its targets, int64, and the sum
        of their losses in nats, float64. The token at a document's edge belongs to it.
    """
    length = blocks.block_size
    rows = max(1, min(batch_size, LOGITS_BYTES // (4 * length * model.n_vocab)))
    windows = []  # (number of the shard, place of the first token, place of the shard in the split)
    offset = 0
    for number, shard in enumerate(blocks.shards):
        windows += [(number, start, offset) for start in range(0, len(shard) - 1, length)]
        offset += len(shard)
    begun = torch.from_numpy(document_begins(blocks.shards, edges))
    # Tokens and nats; the text before the first document is number 0.
    totals = torch.zeros(2, len(begun) + 1, dtype=torch.float64)
    with evaluating(model):
        for first, counts in ranks.deal(range(0, len(windows), rows)):
            batch = windows[first : first + rows]
            ids = torch.full((len(batch), length + 1), -1)
            places = torch.zeros(len(batch), length, dtype=torch.long)  # of targets in the split
            for row, (number, start, offset) in enumerate(batch):
                shard = blocks.shards[number]
                tokens = torch.from_numpy(shard[start : start + length + 1].astype(np.int64))
                ids[row, : len(tokens)] = tokens
                places[row] = offset + start + 1 + torch.arange(length)
            y = ids[:, 1:]  # (B, T), -1 behind the end of a shard
            with autocast():
                logits = model(ids[:, :-1].clamp(min=0).to(ranks.device))  # (B, T, n_vocab)
            losses = token_losses(logits, y.to(ranks.device))  # (B T,)
            if counts:
                valid = (y != -1).flatten()
                documents = torch.searchsorted(begun, places.flatten()[valid], right=True)
                nats = losses.cpu().double()[valid]
                totals[0].index_add_(0, documents, torch.ones_like(nats))
                totals[1].index_add_(0, documents, nats)
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
