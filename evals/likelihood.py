"""Log-likelihoods of texts under a GPT, as lm-evaluation-harness asks for them
(evals/lm_eval_model.py).
"""

import sys
from collections import Counter, defaultdict

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from common.environment import Precision
from common.errors import DataError
from data.tokenizers import load_tokenizer
from model import GPT


class Scorer:
    """Log-likelihoods of continuations under `model`, which moves to the device of `precision` and
    takes its dtype.

    The head's product is float32 whatever the dtype: rounded to bfloat16, logits of two choices are
    easily the same. Texts of more than `context` tokens (0: the model's block_size), the last one
    apart, lose their beginning. `seen` counts requests, those of them that were cut, and forward
    passes.
    """

    def __init__(self, model: GPT, precision: Precision, batch_size: int, context: int = 0):
        self.model = model.to(precision.device, precision.weights).eval()
        self.precision, self.batch_size, self.context = (
            precision,
            batch_size,
            context or model.config.block_size,
        )
        self.tokenizer, self.seen = load_tokenizer(model.meta), Counter[str]()

    def encode(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Token ids of both; a space at the context's end belongs to the continuation, as the
        harness has it.
        """
        spaces = len(context) - len(context.rstrip())
        context, continuation = (
            context[: len(context) - spaces],
            context[len(context) - spaces :] + continuation,
        )
        whole, start = (
            self.tokenizer.encode_ordinary(text) for text in (context + continuation, context)
        )
        return whole[: len(start)], whole[len(start) :]

    @torch.no_grad()
    def score(self, pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
        """(log-likelihood of the continuation, is it what greedy decoding gives) of each (context,
        continuation).

        Requests that differ in their last token alone share one forward pass. Raises DataError for
        an empty text.
        """
        # ids but the last -> [(request, last id, how many ids are the continuation's)]
        groups = defaultdict(list)
        for number, (context, continuation) in enumerate(pairs):
            start, tokens = self.encode(context, continuation)
            if not tokens:
                raise DataError("a task asks for the likelihood of no text: check its choices")
            whole = [0] * (not start) + start + tokens  # something must come before the first token
            ids = whole[-(self.context + 1) :]
            self.seen.update(requests=1, cut=len(whole) > len(ids))
            groups[tuple(ids[:-1])].append((number, ids[-1], min(len(tokens), len(ids) - 1)))
        found: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
        # longest first: memory fails at once; and little is padding
        ordered = sorted(groups, key=len, reverse=True)
        with tqdm(
            total=len(ordered), unit="forward", leave=False, disable=not sys.stderr.isatty()
        ) as bar:
            for at in range(0, len(ordered), self.batch_size):
                rows = ordered[at : at + self.batch_size]
                counts = [max(count for _, _, count in groups[row]) for row in rows]
                for row, log_p in zip(rows, self._log_p(rows, counts), strict=True):
                    for number, last, count in groups[row]:
                        found[number] = self._read(
                            log_p[-count:], [*row[len(row) - count + 1 :], last]
                        )
                self.seen.update(forwards=len(rows))
                bar.update(len(rows))
        return found

    def _log_p(self, rows: list[tuple[int, ...]], counts: list[int]) -> list[Tensor]:
        """Log-probabilities (count, V), float32, of what follows a row's last `count` ids."""
        longest = max(len(row) for row in rows)
        # padding comes after, unseen
        idx = torch.tensor([list(row) + [0] * (longest - len(row)) for row in rows])
        with self.precision.autocast():
            hidden = self.model.hidden(idx.to(self.precision.device))  # (B, T, C)
        # (V, C), and no copy if that is what it is
        head = self.model.head_weight()[: self.model.n_vocab].float()
        return [
            F.linear(states[len(row) - count : len(row)].float(), head).log_softmax(-1).cpu()
            for row, count, states in zip(rows, counts, hidden, strict=True)
        ]

    @staticmethod
    def _read(log_p: Tensor, tokens: list[int]) -> tuple[float, bool]:
        targets = torch.tensor(tokens)
        return float(log_p.gather(1, targets[:, None]).sum()), bool(
            (log_p.argmax(1) == targets).all()
        )
