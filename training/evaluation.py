"""What a run measures besides training: val loss, bits per byte, HellaSwag, a sample of its text.

Evaluation changes nothing in training: it draws nothing from training's random streams, and norms
collect no statistics.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.distributed import Ranks
from common.errors import DataError, UserError, cannot_write
from common.output import write_bytes_atomically
from data.tokenizers import decode, load_tokenizer, token_bytes
from model import GPT
from training.dataloader import Blocks, bytes_per_token, eval_batches
from training.stability import largest_attention_logit
from training.stream import RMSStats, measure
from training.whole_split import SplitLoss, Windows, split_loss

PROMPT = 32  # tokens of the val shards that a text sample continues
TEMPERATURE = 0.8
TOP_K = 200


class Evaluator:
    """The measurements of one run.

    Args:
        config: a TrainConfig.
        blocks: the val split.
        meta: meta.json of the data, which names the tokenizer.
        ranks: this process and the others.
        autocast: Precision.autocast.
        make_scorer: (tokenizer) -> what scores HellaSwag (evals/hellaswag.py); None: no HellaSwag.

    Raises:
        DataError: HellaSwag is required, and the tokenizer or its items are missing. So this is
            known before training, not after hours of it.
    """

    def __init__(
        self,
        config,
        blocks: Blocks,
        meta: dict,
        ranks: Ranks,
        autocast: Callable,
        make_scorer: Callable[[Any], Callable[[GPT], Any]] | None = None,
    ):
        self.config = config
        self.blocks = blocks
        self.ranks = ranks
        self.autocast = autocast
        self.batches = eval_batches(blocks, config.batch_size, config.eval_tokens)
        self._load_tokenizer(meta)
        self.scorer = None
        if make_scorer is not None:
            if self.tokenizer is None:
                raise DataError(f"HellaSwag needs the data's tokenizer: {self.no_tokenizer}")
            self.scorer = make_scorer(self.tokenizer)

    def _load_tokenizer(self, meta: dict) -> None:
        """Load the tokenizer. Without one there are no bits per byte and no text sample."""
        self.tokenizer = None
        self.no_tokenizer = ""  # why there is none
        self.bytes_per_token = 0.0  # 0: unknown
        try:
            self.tokenizer = load_tokenizer(meta)
            if self.ranks.is_main:
                lengths = token_bytes(self.tokenizer)
                self.bytes_per_token = bytes_per_token(self.blocks, self.batches, lengths)
        except DataError as error:
            self.no_tokenizer = str(error)

    @torch.no_grad()
    def val_loss(self, model: nn.Module) -> float:
        """Compute the mean loss over the evaluation batches, nats per token.

        The batches are divided among the ranks. The loss of each is kept apart and all are summed
        in one order, so the value does not depend on the number of ranks.
        """
        model.eval()
        device = self.ranks.device
        # The last batch is padded to the size of the others: another shape would be compiled as
        # well, and would make the graph of training dynamic.
        rows = len(self.batches[0])
        # MPS has no float64.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        losses = torch.zeros(len(self.batches), dtype=dtype, device=device)
        for number, counts in self.ranks.deal(range(len(self.batches))):
            x, y = self.blocks.batch(self.batches[number], rows=rows)  # (B, T) each
            with self.autocast():
                # counts is False, so 0, for a batch that was only done to keep the ranks together.
                losses[number] = model(x.to(device), y.to(device))[0] * counts
        model.train()
        losses = self.ranks.sum(losses).cpu().double()
        # The last batch may have fewer blocks.
        weights = torch.tensor([len(batch) for batch in self.batches], dtype=torch.float64)
        return float((losses * weights).sum() / weights.sum())

    def split_loss(self, model: GPT) -> SplitLoss:
        """Compute the loss over the whole val split, document by document."""
        # Without a tokenizer nothing says where documents begin.
        end_of_text = getattr(self.tokenizer, "eot_token", None)
        windows = Windows(self.blocks, end_of_text)
        return split_loss(model, windows, self.config.batch_size, self.ranks, self.autocast)

    def rms_stats(self, model: GPT) -> RMSStats:
        """Measure the residual stream at every norm position, and the output."""
        x, y = self._spread_windows()
        with self.autocast():
            return measure(model, x, y)

    def attention_logit(self, model: GPT) -> float:
        """Measure the largest attention logit on the windows of `rms_stats`."""
        x, _ = self._spread_windows()
        with self.autocast():
            return largest_attention_logit(model, x)

    def _spread_windows(self) -> tuple[Tensor, Tensor]:
        """Return one batch of windows and their targets (B, T), spread evenly over the text.

        Neighbouring windows are of one document, and would only tell how well the model predicts
        that one.
        """
        indices = [index for batch in self.batches for index in batch]
        # As many windows as a batch has, or a few less.
        stride = math.ceil(len(indices) / len(self.batches[0]))
        x, y = self.blocks.batch(indices[::stride])  # (B, T) each
        return x.to(self.ranks.device), y.to(self.ranks.device)

    def bits_per_byte(self, val_loss: float) -> float | None:
        """Convert `val_loss` to bits per byte of text; None without a tokenizer."""
        if not self.bytes_per_token:
            return None
        return val_loss / (math.log(2) * self.bytes_per_token)

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
            text = decode(self.tokenizer, tokens[0].tolist())
            try:
                write_bytes_atomically(path, f"{text}\n".encode())
            except OSError as error:
                raise UserError(cannot_write(path, error, "the run is saved")) from None
        return f"a sample of its text is in {path}"
