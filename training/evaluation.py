"""What a run measures beside training: val loss, bits per byte, HellaSwag, a sample of its text.

Nothing here draws from the random streams of training, and norms collect no statistics: with or
without it, training does the same.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.distributed import Ranks
from common.errors import DataError
from data.tokenizers import load_tokenizer, token_bytes
from model import GPT
from training.dataloader import Blocks, bytes_per_token, eval_batches
from training.stream import RMSStats, measure


class Evaluator:
    """The measurements of one run. `config` is a TrainConfig, `meta` its data's meta.json.
    make_scorer(tokenizer) gives what HellaSwag is scored with (evals/hellaswag.py); None where it
    is not wanted.

    Raises DataError at once, not after hours of training, where HellaSwag is wanted and cannot be
    had.
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
        self.config, self.blocks, self.ranks, self.autocast = config, blocks, ranks, autocast
        self.batches = eval_batches(blocks, config.batch_size, config.eval_tokens)
        self.tokenizer, self.no_tokenizer, self.bytes_per_token = None, "", 0.0
        try:
            self.tokenizer = load_tokenizer(meta)
            if ranks.is_main:
                self.bytes_per_token = bytes_per_token(
                    blocks, self.batches, token_bytes(self.tokenizer)
                )
        except DataError as error:
            self.no_tokenizer = str(error)
        if make_scorer is not None and self.tokenizer is None:
            raise DataError(f"HellaSwag needs the data's tokenizer: {self.no_tokenizer}")
        self.scorer = None if make_scorer is None else make_scorer(self.tokenizer)

    @torch.no_grad()
    def val_loss(self, model: nn.Module) -> float:
        """Mean loss (nats per token) over the evaluation batches, which are dealt out to the ranks.

        Every batch's loss is kept apart and summed in one order: the value does not depend on the
        number of ranks.
        """
        model.eval()
        wide = torch.float32 if self.ranks.device.type == "mps" else torch.float64
        losses = torch.zeros(len(self.batches), dtype=wide, device=self.ranks.device)
        for number, counts in self.ranks.deal(range(len(self.batches))):
            indices = self.batches[number]
            x, y = (
                part.to(self.ranks.device)
                for part in self.blocks.batch(indices, rows=len(self.batches[0]))
            )
            with self.autocast():
                losses[number] = model(x, y)[0] * counts
        model.train()
        tokens = torch.tensor([len(batch) for batch in self.batches], dtype=torch.float64)
        return float((self.ranks.sum(losses).cpu().double() * tokens).sum() / tokens.sum())

    def rms_stats(self, model: GPT) -> RMSStats:
        """The residual stream at every norm position, and the output, on as many windows as a batch
        has, spread evenly over the evaluation text: neighbours are of one document, and what they
        say of the output is of that one.
        """
        indices = [index for batch in self.batches for index in batch]
        spread = indices[:: -(-len(indices) // len(self.batches[0]))]
        x, y = (part.to(self.ranks.device) for part in self.blocks.batch(spread))
        with self.autocast():
            return measure(model, x, y)

    def bits_per_byte(self, val_loss: float) -> float | None:
        """`val_loss` in bits per byte of text; None if the data does not say how to decode it."""
        return val_loss / (math.log(2) * self.bytes_per_token) if self.bytes_per_token else None

    def hellaswag(self, model: GPT, step: int, last: bool) -> Any | None:
        """HellaSwag's Scores, if they are due after `step`."""
        interval = self.config.hellaswag_interval
        due = last or (interval and step and step % interval == 0)
        return self.scorer(model) if self.scorer is not None and due else None

    def write_sample(self, model: GPT, path: Path) -> str:
        """A file with how the model continues the first tokens of the val shards; a sentence about
        it. All ranks generate, since FSDP needs them; the main one writes.
        """
        if self.tokenizer is None:
            return f"no text sample: {self.no_tokenizer}"
        # (1, T)
        prompt: Tensor = torch.from_numpy(self.blocks[0][: min(32, self.config.block_size)])[None]
        device = self.ranks.device
        stream = torch.Generator(device).manual_seed(self.config.seed)
        tokens = (
            model.eval()
            .generate(prompt.to(device), self.config.sample_tokens, 0.8, 200, stream)[0]
            .tolist()
        )
        if self.ranks.is_main:
            path.write_text(self.tokenizer.decode(tokens) + "\n", encoding="utf-8")
        return f"a sample of its text is in {path}"
