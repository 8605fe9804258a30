"""Score HellaSwag: which of four endings continues a text?

Zellers et al. 2019; 10,042 validation items, chance 25 %.

One item:  {"ctx": "A man is sitting on a roof. he", "label": 3,
            "endings": ["is using wrap to wrap a pair of skis.", "is ripping level tiles off.",
                        "is holding a rubik's cube.", "starts pulling up roofing on a roof."]}

The context and " " + ending are tokenised as in lm-evaluation-harness. acc chooses the ending with
the lowest summed loss, acc_norm the one with the lowest mean loss per ending token. Neither is
comparable to that harness's task `hellaswag`, which puts the activity label before a context,
capitalises its second sentence, and divides by bytes for its acc_norm. A text longer than the
model's context loses its beginning; the share of such texts is reported.
"""

import http.client
import json
import lzma
import math
import sys
import urllib.request
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from common.distributed import Ranks, gather_root
from common.errors import DataError, UserError, cannot_write
from common.inputs import check_regular
from common.output import parse_json, write_bytes_atomically
from data.tokenizers import encode_pair
from model import GPT

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
STORED = Path(__file__).resolve().parents[1] / "data" / "hellaswag" / "hellaswag_val.jsonl"
ITEMS_FILE = "hellaswag.jsonl"  # in a run folder: per-item results
BATCH_SIZE = 64
RULES = ("acc", "acc_norm")


# -------------------------------------------------------------------------------------------- items


def load_items(path: str = "", count: int = 0) -> list[dict[str, Any]]:
    """Read the items of a jsonl or jsonl.xz file.

    Args:
        path: the file; "" for the stored items, which are downloaded at first use.
        count: number of items, spread evenly over the file; 0 for all.

    Raises:
        DataError: names file and line.
    """
    source = Path(path) if path else download()
    check_regular(source)
    items = []
    try:
        with lzma.open(source) if source.suffix == ".xz" else source.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                items.append(check_item(parse_json(line), number - 1))
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise DataError(
            f"{source}: cannot be read ({error}): it should be a file of HellaSwag items"
        ) from None
    except (ValueError, KeyError, TypeError, OverflowError):
        raise DataError(
            f"{source}:{number}: no HellaSwag item; "
            "needs JSON with ctx, four endings and a label from 0 to 3"
        ) from None
    if not 0 < max(1, count) <= len(items):
        raise DataError(
            f"{source}: holds {len(items)} items, {count or 'some'} were wanted: check the file"
        )
    if not count:
        return items
    return [items[i * len(items) // count] for i in range(count)]


def check_item(item: dict[str, Any], index: int) -> dict[str, Any]:
    """Return the parts of an item that are used. Raises ValueError, KeyError or TypeError.

    Args:
        index: the number of an item that has no "ind" of its own.
    """
    endings = item["endings"]
    label = int(item["label"])
    is_text = all(isinstance(text, str) for text in [item["ctx"], *endings])
    if len(endings) != 4 or not 0 <= label < 4 or not is_text:
        raise ValueError
    return {"item": item.get("ind", index), "ctx": item["ctx"], "endings": endings, "label": label}


def download() -> Path:
    """Return the file of stored items; it is downloaded at first use. Raises DataError."""
    if not STORED.exists():
        try:
            with urllib.request.urlopen(URL, timeout=60) as response:
                content = response.read()
            STORED.parent.mkdir(parents=True, exist_ok=True)
            write_bytes_atomically(STORED, content)
        except (OSError, http.client.HTTPException) as error:
            raise DataError(
                f"{URL}: {error}: fetch it by hand and name the file (hellaswag.py --data=FILE, "
                "train.py --hellaswag=FILE, sweep.sh HELLASWAG=FILE), or do without "
                "(--hellaswag=off, HELLASWAG=off)"
            ) from None
    return STORED


# ------------------------------------------------------------------------------------------ scoring


@dataclass(frozen=True)
class Ending:
    """One ending to score."""

    ids: list[int]  # of context and ending
    n_ending: int  # how many of them, at the end, are the ending's
    cut: bool  # the whole text did not fit


def make_endings(items: list[dict[str, Any]], tokenizer: Any, block_size: int) -> list[Ending]:
    """Return four rows an item, cut on the left to block_size + 1 tokens.

    The model reads all but the last, which is a target only. Raises DataError, as encode_pair does.
    """
    rows = []
    for item in items:
        for ending in item["endings"]:
            context, tokens = encode_pair(tokenizer, item["ctx"], " " + ending)
            ids = (context + tokens)[-(block_size + 1) :]
            # The first token of all has nothing before it, so it has no loss.
            n_ending = min(len(tokens), len(ids) - 1)
            is_cut = len(context) + len(tokens) > len(ids)
            rows.append(Ending(ids, n_ending, is_cut))
    return rows


def score_endings(model: GPT, rows: list[Ending], device: torch.device) -> Tensor:
    """Return the summed loss (nats) of each row's ending, float64 (B,)."""
    length = max(len(row.ids) for row in rows)  # T + 1
    # Padding comes after the text, where a causal model cannot see it.
    padded = [row.ids + [0] * (length - len(row.ids)) for row in rows]
    ids = torch.tensor(padded, device=device)  # (B, T + 1)
    ends = torch.tensor([len(row.ids) for row in rows], device=device).unsqueeze(1)  # (B, 1)
    counts = torch.tensor([row.n_ending for row in rows], device=device).unsqueeze(1)
    starts = ends - counts
    position = torch.arange(1, length, device=device)  # (T,), of the targets
    is_ending = (position >= starts) & (position < ends)  # (B, T)
    # Logits of the endings alone: N targets in all rows.
    hidden = model.hidden(ids[:, :-1])[is_ending]  # (B, T, C) -> (N, C)
    logits = model.logits(hidden)  # (N, n_vocab)
    wide = torch.promote_types(logits.dtype, torch.float32)
    targets = ids[:, 1:][is_ending]  # (N,)
    losses = F.cross_entropy(logits.to(wide), targets, reduction="none").double().cpu()  # (N,)
    row_of = is_ending.nonzero()[:, 0].cpu()  # (N,)
    return torch.zeros(len(rows), dtype=torch.float64).index_add_(0, row_of, losses)


@dataclass(frozen=True)
class Scores:
    """Results of each item, and their means."""

    items: list[dict[str, int]]  # item, acc_choice, acc_norm_choice, label
    texts_cut: float  # share of the texts that were longer than the model's context
    items_id: str  # checksum of the items, to tell versions apart

    def accuracy(self, rule: str) -> tuple[float, float]:
        """Return the share of items where `rule` chose the label, and its standard error.

        Args:
            rule: acc or acc_norm.
        """
        n = len(self.items)
        share = sum(item[f"{rule}_choice"] == item["label"] for item in self.items) / n
        return share, math.sqrt(share * (1 - share) / max(1, n - 1))

    def __str__(self) -> str:
        parts = []
        for rule in RULES:
            share, error = self.accuracy(rule)
            parts.append(f"{rule} {share:.4f} +- {error:.4f}")
        if self.texts_cut:
            parts.append(f"{self.texts_cut:.0%} of the texts cut")
        return ", ".join(parts)

    def summary(self) -> dict[str, float]:
        """Return the record for a log."""
        found: dict[str, Any] = {}
        for rule in RULES:
            found[rule], found[f"{rule}_stderr"] = self.accuracy(rule)
        found["n_items"] = len(self.items)
        found["texts_cut"] = self.texts_cut
        found["items_id"] = self.items_id
        return found

    def write(self, path: Path) -> None:
        """Write one JSON line an item. Raises UserError."""
        lines = "".join(json.dumps(item) + "\n" for item in self.items)
        try:
            write_bytes_atomically(path, lines.encode())
        except OSError as error:
            raise UserError(cannot_write(path, error)) from None


@torch.no_grad()
def evaluate_hellaswag(
    model: GPT,
    tokenizer: Any,
    items: list[dict[str, Any]],
    ranks: Ranks,
    batch_size: int = BATCH_SIZE,
    autocast: Callable = nullcontext,
) -> Scores:
    """Score all items; every rank returns the same.

    Batches of rows of about the same length are shared out between the ranks.

    Args:
        autocast: context in which the model computes.

    Raises:
        DataError: a loss is not finite.
    """
    was_training = model.training
    model.eval()
    rows = make_endings(items, tokenizer, model.config.block_size)
    # Longest first, so that too little memory shows at once.
    order = sorted(range(len(rows)), key=lambda row: -len(rows[row].ids))
    batches = [order[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    mine = list(ranks.deal(batches))
    wide = torch.float32 if ranks.device.type == "mps" else torch.float64
    losses = torch.zeros(len(rows), dtype=torch.float64)
    with tqdm(
        total=sum(len(batch) for batch, _ in mine),
        unit="ending",
        desc="HellaSwag",
        leave=False,
        disable=not (ranks.is_main and sys.stderr.isatty()),
    ) as bar:
        for batch, counts in mine:
            with autocast():
                found = score_endings(model, [rows[row] for row in batch], ranks.device)
            # A batch that only fills up a rank's share does not count.
            losses[batch] = found * counts
            bar.update(len(batch))
    # Each row was scored by one rank and the others add zero, so the sum is the same on any number
    # of ranks.
    losses = ranks.sum(losses.to(ranks.device, wide)).cpu().double().numpy()
    model.train(was_training)
    if not np.isfinite(losses).all():
        raise DataError("HellaSwag: the model's losses are not finite: is this a good checkpoint?")
    lengths = np.array([row.n_ending for row in rows])
    acc = losses.reshape(-1, 4).argmin(1)  # (items,)
    acc_norm = (losses / lengths).reshape(-1, 4).argmin(1)
    results = []
    for item, choice, choice_norm in zip(items, acc, acc_norm, strict=True):
        result = {
            "item": item["item"],
            "acc_choice": int(choice),
            "acc_norm_choice": int(choice_norm),
            "label": item["label"],
        }
        results.append(result)
    texts_cut = sum(row.cut for row in rows) / len(rows)
    checksum = f"{zlib.crc32(json.dumps(items).encode()):08x}"
    return Scores(results, texts_cut, checksum)


class HellaSwag:
    """Score models on the same items, on all ranks: `scorer(model)`.

    Args:
        file: as `path` of load_items.
        count: as of load_items.
        autocast: context in which the model computes.

    Raises:
        DataError: the items cannot be read, which shows at once, not after hours of training.
    """

    def __init__(
        self,
        file: str,
        count: int,
        tokenizer: Any,
        ranks: Ranks,
        autocast: Callable,
        batch_size: int = BATCH_SIZE,
    ):
        self.tokenizer = tokenizer
        self.ranks = ranks
        self.autocast = autocast
        self.batch_size = batch_size
        if not file and ranks.is_main:
            download()
        ranks.wait()
        self.items = load_items(file, count)

    def __call__(self, model: GPT) -> Scores:
        """Score `model`; every rank calls it and returns the same."""
        gather_root(model)
        return evaluate_hellaswag(
            model, self.tokenizer, self.items, self.ranks, self.batch_size, self.autocast
        )
