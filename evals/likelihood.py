"""Compute log-likelihoods of texts under a GPT, for HellaSwag and for lm-evaluation-harness."""

import sys
from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from common.distributed import Ranks
from common.errors import DataError
from data.tokenizers import encode_open, first_token
from model import GPT
from training.stream import evaluating


class Text(NamedTuple):
    """A context and its continuation, whose log-likelihood is wanted."""

    ids: tuple[int, ...]  # of both; the beginning is cut off where it does not fit
    count: int  # how many of them, at the end, are the continuation's
    is_cut: bool


def encode_pairs(tokenizer: Any, pairs: list[tuple[str, str]], context_size: int) -> list[Text]:
    """Encode pairs of context and continuation as lm-evaluation-harness does.

    Both are encoded together, so that spaces at the context's end belong to the continuation. BOS,
    else the end of a text, stands for an empty context. What a template appends (EOS) is left out:
    the harness keeps it, and so loses the first token of a continuation that has a context.

    Args:
        context_size: a text of more tokens, not counting the last, loses its beginning: the model
            reads all but the last, which is a target only.

    Raises:
        DataError: there is no BOS and no end of a text, or no token is the continuation's.
    """
    encode = cache(partial(encode_open, tokenizer))  # the choices of a question have one context
    texts = []
    for context, continuation in pairs:
        start = encode(context.rstrip())
        tokens = encode_open(tokenizer, context + continuation)[len(start) :]
        if not start:
            first = first_token(tokenizer)
            if first is None:
                raise DataError(
                    f"{continuation[:40]!r} has no context, and the tokenizer neither BOS nor EOS: "
                    "choose tasks with a context"
                )
            if tokens[:1] != [first]:
                tokens.insert(0, first)
            start, tokens = tokens[:1], tokens[1:]
        if not tokens:
            raise DataError(
                f"after {context[-40:]!r}, the continuation {continuation[:40]!r} has no token of "
                "its own: check the task's choices"
            )
        whole = start + tokens
        ids = whole[-(context_size + 1) :]
        # The first token of all has nothing before it, so it has no likelihood.
        count = min(len(tokens), len(ids) - 1)
        texts.append(Text(tuple(ids), count, len(whole) > len(ids)))
    return texts


def log_likelihoods(
    model: GPT, texts: list[Text], ranks: Ranks, batch_size: int, autocast: Callable
) -> tuple[Tensor, Tensor]:
    """Return the log-likelihood of each text's continuation, and whether greedy decoding gives it.

    Texts that differ only in their last token share one forward pass. The head's product is float32
    whatever the dtype: rounded to bfloat16, the logits of two choices are often equal.

    Args:
        ranks: batches of texts of about the same length are shared out between them.
        batch_size: forward passes at once.
        autocast: context in which the model computes.

    Returns:
        Nats, float64 (n,), and bool (n,); on every rank the same.
    """
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, text in enumerate(texts):
        groups[text.ids[:-1]].append(number)
    # Longest first, so that too little memory shows at once. Neighbours need little padding.
    rows = sorted(groups, key=len, reverse=True)
    batches = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    wide = torch.float32 if ranks.device.type == "mps" else torch.float64
    found = torch.zeros(2, len(texts), dtype=wide, device=ranks.device)
    shown = ranks.is_main and sys.stderr.isatty()
    with evaluating(model):
        for batch, counts in tqdm(
            list(ranks.deal(batches)), unit="batch", leave=False, disable=not shown
        ):
            longest = max(map(len, batch))  # T
            # Padding comes after the text, where a causal model cannot see it.
            padded = [[*row] + [0] * (longest - len(row)) for row in batch]
            with autocast():
                hidden = model.hidden(torch.tensor(padded, device=ranks.device))  # (B, T, C)
            if not counts:  # a batch that only fills up this rank's share
                continue
            most = [max(texts[number].count for number in groups[row]) for row in batch]
            log_p = last_log_p(model, hidden, [len(row) for row in batch], most)
            for row, log_p_row in zip(batch, log_p, strict=True):
                for number in groups[row]:
                    count = texts[number].count
                    targets = torch.tensor(texts[number].ids[-count:], device=ranks.device)
                    own = log_p_row[-count:]  # (count, V)
                    found[0, number] = own.gather(1, targets[:, None]).sum()
                    found[1, number] = (own.argmax(1) == targets).all()
    # Each text was scored by one rank and the others add zero, so the sum is the same on any number
    # of ranks.
    likelihoods, is_greedy = ranks.sum(found).cpu()
    return likelihoods.double(), is_greedy.bool()


def last_log_p(
    model: GPT, hidden: Tensor, lengths: list[int], counts: list[int]
) -> tuple[Tensor, ...]:
    """Return the log-probabilities of all tokens at the last `counts` positions of each row.

    Args:
        model: gives the head.
        hidden: of padded rows, (B, T, C).
        lengths: of the rows without padding, (B,).
        counts: how many positions of each row are needed, (B,).

    Returns:
        float32 (count, V) for each row.
    """
    last = [
        states[length - count : length]
        for states, length, count in zip(hidden, lengths, counts, strict=True)
    ]
    head = model.head_weight()[: model.n_vocab].float()  # (V, C); of float32 weights no copy
    return F.linear(torch.cat(last).float(), head).log_softmax(-1).split(counts)
