"""Compute log-likelihoods of texts under a GPT, as lm-evaluation-harness asks for them.

evals/lm_eval_model.py is the program.
"""

import sys
from collections import Counter, defaultdict
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from common.environment import Precision
from data.tokenizers import encode_pair, load_tokenizer
from model import GPT


class Request(NamedTuple):
    """A continuation to score, of the group of requests with the same ids but the last."""

    number: int  # its place among the results
    last: int  # its last token id
    count: int  # how many of its ids, at the end, are the continuation's


class Scorer:
    """Log-likelihoods of continuations under a model.

    The head's product is float32 whatever the dtype: rounded to bfloat16, the logits of two choices
    are often equal. `seen` counts requests, those of them that were cut, and forward passes.

    Args:
        model: it is moved to the device of `precision` and takes its dtype.
        batch_size: forward passes at once.
        context: a text of more than `context` tokens, not counting the last, loses its beginning; 0
            for the model's block_size.
    """

    def __init__(self, model: GPT, precision: Precision, batch_size: int, context: int = 0):
        self.model = model.to(precision.device, precision.weights).eval()
        self.precision = precision
        self.batch_size = batch_size
        self.context = context or model.config.block_size
        self.tokenizer = load_tokenizer(model.meta)
        self.seen: Counter[str] = Counter()

    @torch.no_grad()
    def score(self, pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Score pairs of context and continuation.

        Requests that differ only in their last token share one forward pass.

        Returns:
            For each pair the log-likelihood of the continuation, and whether greedy decoding would
            give it.

        Raises:
            DataError: as of encode_pair.
        """
        # All ids but the last -> the requests that need this forward pass.
        groups: dict[tuple[int, ...], list[Request]] = defaultdict(list)
        for number, (context, continuation) in enumerate(pairs):
            start, tokens = encode_pair(self.tokenizer, context, continuation)
            whole = start + tokens
            ids = whole[-(self.context + 1) :]
            self.seen.update(requests=1, cut=len(whole) > len(ids))
            count = min(len(tokens), len(ids) - 1)
            groups[tuple(ids[:-1])].append(Request(number, ids[-1], count))
        found: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
        # Longest first, so that too little memory shows at once. Neighbours in this order need
        # little padding.
        ordered = sorted(groups, key=len, reverse=True)
        with tqdm(
            total=len(ordered), unit="forward", leave=False, disable=not sys.stderr.isatty()
        ) as bar:
            for at in range(0, len(ordered), self.batch_size):
                rows = ordered[at : at + self.batch_size]
                counts = [max(request.count for request in groups[row]) for row in rows]
                for row, log_p in zip(rows, self._log_p(rows, counts), strict=True):
                    for number, last, count in groups[row]:
                        tokens = [*row[len(row) - count + 1 :], last]
                        found[number] = self._read(log_p[-count:], tokens)
                self.seen.update(forwards=len(rows))
                bar.update(len(rows))
        return found

    def _log_p(self, rows: list[tuple[int, ...]], counts: list[int]) -> list[Tensor]:
        """Return log-probabilities of what follows each row's last `count` ids.

        One float32 (count, V) for each row, on the CPU.
        """
        longest = max(len(row) for row in rows)
        # Padding comes after the text, where a causal model cannot see it.
        idx = torch.tensor([list(row) + [0] * (longest - len(row)) for row in rows])  # (B, T)
        with self.precision.autocast():
            hidden = self.model.hidden(idx.to(self.precision.device))  # (B, T, C)
        # Of float32 weights this is no copy.
        head = self.model.head_weight()[: self.model.n_vocab].float()  # (V, C)
        found = []
        for row, count, states in zip(rows, counts, hidden, strict=True):
            last = states[len(row) - count : len(row)].float()  # (count, C)
            found.append(F.linear(last, head).log_softmax(-1).cpu())
        return found

    @staticmethod
    def _read(log_p: Tensor, tokens: list[int]) -> tuple[float, bool]:
        """Read the score of tokens (count,) from log_p (count, V)."""
        targets = torch.tensor(tokens)
        total = float(log_p.gather(1, targets[:, None]).sum())
        is_greedy = bool((log_p.argmax(1) == targets).all())
        return total, is_greedy
