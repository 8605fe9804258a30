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
import math
import urllib.request
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.distributed import Ranks, gather_root
from common.errors import DataError
from common.output import parse_json, write_bytes_atomically
from data.documents import read_lines
from evals.likelihood import encode_pairs, log_likelihoods
from model import GPT

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
STORED = Path(__file__).resolve().parents[1] / "data" / "hellaswag" / "hellaswag_val.jsonl"
ITEMS_FILE = "hellaswag.jsonl"  # in a run folder: per-item results
BATCH_SIZE = 64
RULES = ("acc", "acc_norm")


def load_items(path: str = "", count: int = 0) -> list[dict[str, Any]]:
    """Read the items of a jsonl or jsonl.xz file.

    Args:
        path: the file; "" for the stored items, which are downloaded at first use.
        count: number of items, spread evenly over the file; 0 for all.

    Raises:
        DataError: names file and line.
    """
    source = Path(path) if path else download()
    items = []
    for number, line in enumerate(read_lines(source), 1):
        try:
            item = parse_json(line)
            label = int(item["label"])
            texts = [item["ctx"], *item["endings"]]
            if len(texts) != 5 or label not in range(4) or not "".join(texts):
                raise ValueError
        except (ValueError, KeyError, TypeError, OverflowError):
            raise DataError(
                f"{source}:{number}: no HellaSwag item; "
                "needs JSON with ctx, four endings and a label from 0 to 3"
            ) from None
        index = item.get("ind", number - 1)
        items.append({"item": index, "ctx": texts[0], "endings": texts[1:], "label": label})
    if not 0 < max(1, count) <= len(items):
        raise DataError(
            f"{source}: holds {len(items)} items, {count or 'some'} were wanted: check the file"
        )
    return [items[i * len(items) // count] for i in range(count)] if count else items


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
        parts = ["{} {:.4f} +- {:.4f}".format(rule, *self.accuracy(rule)) for rule in RULES]
        if self.texts_cut:
            parts.append(f"{self.texts_cut:.0%} of the texts cut")
        return ", ".join(parts)

    def summary(self) -> dict[str, Any]:
        """Return the record for a log."""
        found: dict[str, Any] = {"n_items": len(self.items), "texts_cut": self.texts_cut}
        for rule in RULES:
            found[rule], found[f"{rule}_stderr"] = self.accuracy(rule)
        return found | {"items_id": self.items_id}

    def write(self, path: Path) -> None:
        """Write one JSON line an item."""
        lines = "".join(json.dumps(item) + "\n" for item in self.items)
        write_bytes_atomically(path, lines.encode())


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
        if not file:
            ranks.together(lambda: download() if ranks.is_main else None)
        self.items = load_items(file, count)

    def __call__(self, model: GPT) -> Scores:
        """Score `model`; every rank calls it and returns the same.

        Raises DataError if a loss is not finite.
        """
        gather_root(model)
        pairs = [(item["ctx"], " " + ending) for item in self.items for ending in item["endings"]]
        texts = encode_pairs(self.tokenizer, pairs, model.config.block_size)
        found, _ = log_likelihoods(model, texts, self.ranks, self.batch_size, self.autocast)
        losses = -found.numpy().reshape(-1, 4)  # (items, 4)
        if not np.isfinite(losses).all():
            raise DataError(
                "HellaSwag: the model's losses are not finite: is this a good checkpoint?"
            )
        lengths = np.array([text.count for text in texts]).reshape(-1, 4)
        acc = losses.argmin(1)  # (items,)
        acc_norm = (losses / lengths).argmin(1)
        results = []
        for item, choice, choice_norm in zip(self.items, acc, acc_norm, strict=True):
            result = {
                "item": item["item"],
                "acc_choice": int(choice),
                "acc_norm_choice": int(choice_norm),
                "label": item["label"],
            }
            results.append(result)
        texts_cut = sum(text.is_cut for text in texts) / len(texts)
        checksum = f"{zlib.crc32(json.dumps(self.items).encode()):08x}"
        return Scores(results, texts_cut, checksum)
