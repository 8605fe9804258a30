"""HellaSwag's scorer: which of four endings continues a text? Zellers et al. 2019; 10,042
validation items, chance 25%.

One item:  {"ctx": "A man is sitting on a roof. he", "label": 3,
            "endings": ["is using wrap to wrap a pair of skis.", "is ripping level tiles off.",
                        "is holding a rubik's cube.", "starts pulling up roofing on a roof."]}

The context and " " + ending are tokenised apart. acc chooses the ending with the lowest summed
loss, acc_norm the one with the lowest mean loss per ending token. (lm-evaluation-harness divides by
bytes for its acc_norm, so only its acc is comparable item by item.) A text longer than the model's
context loses its beginning; how many did is counted.
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
from common.errors import DataError, UserError
from common.output import write_bytes_atomically
from model import GPT

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
STORED = Path(__file__).resolve().parents[1] / "data" / "hellaswag" / "hellaswag_val.jsonl"
ITEMS_FILE = "hellaswag.jsonl"  # in a run folder: per-item results
BATCH_SIZE = 64


# -------------------------------------------------------------------------------------------- items


def load_items(path: str = "", count: int = 0) -> list[dict[str, Any]]:
    """Items of a jsonl or jsonl.xz file (downloaded if `path` is ""), or `count` of them, evenly
    spread.

    Raises DataError naming file and line.
    """
    source = Path(path) if path else download()
    items = []
    try:
        with lzma.open(source) if source.suffix == ".xz" else source.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                items.append(check_item(json.loads(line), number - 1))
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise DataError(
            f"{source}: cannot be read ({error}): it should be a file of HellaSwag items"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise DataError(
            f"{source}:{number}: no HellaSwag item; "
            "wants JSON with ctx, four endings and a label from 0 to 3"
        ) from None
    if not 0 < max(1, count) <= len(items):
        raise DataError(
            f"{source}: holds {len(items)} items, {count or 'some'} were wanted: check the file"
        )
    return items if not count else [items[i * len(items) // count] for i in range(count)]


def check_item(item: dict[str, Any], index: int) -> dict[str, Any]:
    """The parts that matter, checked; `index` names an item that has no number of its own."""
    endings, label = item["endings"], int(item["label"])
    if not (
        len(endings) == 4
        and 0 <= label < 4
        and all(isinstance(e, str) for e in [item["ctx"], *endings])
    ):
        raise ValueError
    return {"item": item.get("ind", index), "ctx": item["ctx"], "endings": endings, "label": label}


def download() -> Path:
    """The stored items, fetched at first use."""
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
    """One ending to score: token ids of context and ending, of which the last `n_ending` are the
    ending's; `cut` if the whole text did not fit.
    """

    ids: list[int]
    n_ending: int
    cut: bool


def make_endings(items: list[dict[str, Any]], tokenizer: Any, block_size: int) -> list[Ending]:
    """Four rows an item, cut on the left to what the model can read: block_size tokens and one more
    target.
    """
    rows = []
    for item in items:
        context = tokenizer.encode_ordinary(item["ctx"])
        for ending in item["endings"]:
            tokens = tokenizer.encode_ordinary(" " + ending)
            ids = (context + tokens)[-(block_size + 1) :]
            # the first token of all has nothing before it
            n_ending = min(len(tokens), len(ids) - 1)
            if n_ending < 1:
                raise DataError(
                    f"HellaSwag item {item['item']}: an ending without context or text: "
                    "check the file"
                )
            rows.append(Ending(ids, n_ending, len(context) + len(tokens) > len(ids)))
    return rows


def score_endings(model: GPT, rows: list[Ending], device: torch.device) -> Tensor:
    """Summed loss (nats) of each row's ending, float64 (rows,)."""
    length = max(len(row.ids) for row in rows)
    # Padding comes after the text, where a causal model cannot see it.
    # (B, T + 1)
    ids = torch.tensor([row.ids + [0] * (length - len(row.ids)) for row in rows], device=device)
    ends = torch.tensor([len(row.ids) for row in rows], device=device).unsqueeze(1)
    starts = ends - torch.tensor([row.n_ending for row in rows], device=device).unsqueeze(1)
    position = torch.arange(1, length, device=device)  # of the targets
    wanted = (position >= starts) & (position < ends)  # (B, T): targets that belong to the ending
    logits = model.logits(model.hidden(ids[:, :-1])[wanted])  # (B, T, C) -> (N, C) -> (N, n_vocab)
    wide = torch.promote_types(logits.dtype, torch.float32)
    # (N,)
    losses = F.cross_entropy(logits.to(wide), ids[:, 1:][wanted], reduction="none").double().cpu()
    row_of = wanted.nonzero()[:, 0].cpu()
    return torch.zeros(len(rows), dtype=torch.float64).index_add_(0, row_of, losses)


@dataclass(frozen=True)
class Scores:
    """Per-item results and what they come to."""

    items: list[dict[str, int]]  # item, acc_choice, acc_norm_choice, label
    texts_cut: float  # share of the texts that were longer than the model's context
    items_id: str  # checksum of the items, to tell versions apart

    def accuracy(self, rule: str) -> tuple[float, float]:
        """(share of items where `rule` (acc or acc_norm) chose the label, its standard error)."""
        share = sum(item[f"{rule}_choice"] == item["label"] for item in self.items) / len(
            self.items
        )
        return share, math.sqrt(share * (1 - share) / max(1, len(self.items) - 1))

    def __str__(self) -> str:
        both = ((rule, *self.accuracy(rule)) for rule in ("acc", "acc_norm"))
        shown = ", ".join(f"{rule} {share:.4f} +- {error:.4f}" for rule, share, error in both)
        return shown + (f", {self.texts_cut:.0%} of the texts cut" if self.texts_cut else "")

    def summary(self) -> dict[str, float]:
        found = {rule: self.accuracy(rule) for rule in ("acc", "acc_norm")}
        pairs = [
            (name, share)
            for rule, (value, error) in found.items()
            for name, share in ((rule, value), (f"{rule}_stderr", error))
        ]
        return {
            **dict(pairs),
            "n_items": len(self.items),
            "texts_cut": self.texts_cut,
            "items_id": self.items_id,
        }

    def write(self, path: Path) -> None:
        lines = "".join(json.dumps(item) + "\n" for item in self.items)
        try:
            write_bytes_atomically(path, lines.encode())
        except OSError as error:
            raise UserError(f"out={path}: cannot be written ({error.strerror})") from None


@torch.no_grad()
def evaluate_hellaswag(
    model: GPT,
    tokenizer: Any,
    items: list[dict[str, Any]],
    ranks: Ranks,
    batch_size: int = BATCH_SIZE,
    autocast: Callable = nullcontext,
) -> Scores:
    """Score all items; batches of rows of like length are dealt out to the ranks. The same on every
    rank.
    """
    was_training = model.training
    model.eval()
    rows = make_endings(items, tokenizer, model.config.block_size)
    # longest first: memory fails at once
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
                losses[batch] = (
                    score_endings(model, [rows[row] for row in batch], ranks.device) * counts
                )
            bar.update(len(batch))
    # Each row was scored by one rank, the others add zero: the sum is the same on any number of
    # ranks.
    losses = ranks.sum(losses.to(ranks.device, wide)).cpu().double().numpy()
    model.train(was_training)
    if not np.isfinite(losses).all():
        raise DataError("HellaSwag: the model's losses are not finite: is this a good checkpoint?")
    lengths = np.array([row.n_ending for row in rows])
    acc, acc_norm = losses.reshape(-1, 4).argmin(1), (losses / lengths).reshape(-1, 4).argmin(1)
    results = [
        {
            "item": item["item"],
            "acc_choice": int(a),
            "acc_norm_choice": int(n),
            "label": item["label"],
        }
        for item, a, n in zip(items, acc, acc_norm, strict=True)
    ]
    checksum = f"{zlib.crc32(json.dumps(items).encode()):08x}"
    return Scores(results, sum(row.cut for row in rows) / len(rows), checksum)


class HellaSwag:
    """`scorer(model)` scores the items of a file, or of the stored ones ("", downloaded at first
    use) on all ranks.

    file, count: as for load_items. Raises DataError at once, not after hours of training, where
    they cannot be had.
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
        self.tokenizer, self.ranks, self.autocast, self.batch_size = (
            tokenizer,
            ranks,
            autocast,
            batch_size,
        )
        if not file and ranks.is_main:
            download()
        ranks.wait()
        self.items = load_items(file, count)

    def __call__(self, model: GPT) -> Scores:
        gather_root(model)
        return evaluate_hellaswag(
            model, self.tokenizer, self.items, self.ranks, self.batch_size, self.autocast
        )
