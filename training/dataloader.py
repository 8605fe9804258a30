"""Token shards -> batches. A batch is a pure function of (seed, step, micro-batch).

The shards of a split are cut into blocks of block_size tokens, plus one for the shifted targets.
Each epoch visits every block once, in a new order seeded by (seed, epoch). Sample s of a run is
block `order[s % n]` of epoch `s // n`. So a run that resumes at step N needs no other state than
N, evaluation cannot disturb the order, and the number of ranks does not change it.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import DataError
from common.fingerprint import fingerprint
from configurator import key
from data.shards import Shards, find_shards, read_meta
from training.choices import with_vocabulary

# Tokens. Splits up to this size are checked whole at the start, which takes about 0.1 s.
SCAN_LIMIT = 1 << 28
AHEAD = 2  # batches that are read while another one is computed
Item = TypeVar("Item")
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class DataKeys:
    """Data and batch"""

    data_dir: str = key("data/fineweb_edu", "folder with token shards")
    batch_size: int = key(12, "sequences in a micro-batch", least=1)
    gradient_accumulation_steps: int = key(40, "micro-batches in a step, over all ranks", least=1)
    merge_micro_batches: int = key(
        0,
        "micro-batches of a rank computed at once (0: on a CPU up to 8,192 tokens, else 1)",
        least=0,
    )


class Blocks:
    """The blocks of one split: `blocks[i]` is block i, int64 (block_size + 1,).

    Raises:
        DataError: no shard has a block's length, or a token is beyond the vocabulary. In a split
            beyond SCAN_LIMIT such a token is only found when its block is read.
    """

    def __init__(self, data_dir: str, split: str, block_size: int, vocab_size: int):
        self.paths = find_shards(data_dir, split)
        self.shards = Shards(self.paths)
        self.block_size = block_size
        self.vocab_size = vocab_size
        # - 1, because the last target of a block is the first token of the next one.
        counts = [(length - 1) // block_size for length in self.shards.lengths]
        # Block i lies in the first shard whose end is beyond i.
        self.ends = np.cumsum(counts)
        if not self.ends[-1]:
            longest = max(self.shards.lengths)
            raise DataError(
                f"block_size={block_size} needs {block_size + 1} tokens, the longest {split} shard "
                f"in {data_dir} has {longest}: choose a smaller block_size"
            )
        if sum(self.shards.lengths) <= SCAN_LIMIT:
            for path, shard in zip(self.paths, self.shards, strict=True):
                self._check(shard, path)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: int) -> np.ndarray:
        # side="right": block ends[k] is the first one of shard k + 1.
        number = int(np.searchsorted(self.ends, index, side="right"))
        first = int(self.ends[number - 1]) if number else 0  # the first block of this shard
        start = (index - first) * self.block_size
        # Shards are memory maps: this line reads the disk, and copies. (T + 1,)
        block = self.shards[number][start : start + self.block_size + 1].astype(np.int64)
        self._check(block, self.paths[number])
        return block

    def _check(self, tokens: np.ndarray, path: object) -> None:
        highest = int(tokens.max())
        if highest >= self.vocab_size:
            raise DataError(
                f"{path}: token id {highest} is beyond the vocabulary of {self.vocab_size}: the "
                "shard is corrupt or not of uint16, or vocab_size belongs to another tokenizer"
            )

    def fingerprint(self) -> str:
        """Name the tokens, so that runs on different data can be told apart."""
        return fingerprint(self.paths[0].name, self.shards)

    def batch(self, indices: list[int], rows: int = 0, pin: bool = False) -> Batch:
        """Read inputs and next-token targets of these blocks.

        Args:
            indices: block numbers.
            rows: smallest number of rows. A compiled model then sees one shape only.
            pin: for an asynchronous copy to a GPU.

        Returns:
            x, y: int64 (max(rows, len(indices)), T) each, T = block_size. Rows beyond the indices
            have targets -1, which the loss ignores.
        """
        blocks = torch.from_numpy(np.stack([self[index] for index in indices]))  # (B, T + 1)
        x = blocks[:, :-1].contiguous()  # (B, T)
        y = blocks[:, 1:].contiguous()  # (B, T)
        missing = max(0, rows - len(indices))
        padding = (0, 0, 0, missing)
        x, y = F.pad(x, padding), F.pad(y, padding, value=-1)
        return (x.pin_memory(), y.pin_memory()) if pin else (x, y)


class Data(NamedTuple):
    """The data of a run."""

    train: Blocks
    val: Blocks
    meta: dict[str, Any]  # meta.json, which names the tokenizer
    note: str  # what they do not say, and what they are taken for; "" for nothing

    def fingerprint(self) -> str:
        """Name the tokens of both splits."""
        return f"{self.train.fingerprint()} {self.val.fingerprint()}"


def open_data(config: Any) -> tuple[Any, Data]:
    """Open the data of a run. Returns its TrainConfig with their vocabulary, and the data.

    Raises:
        ConfigError: the config gives fewer tokens than the data have.
        DataError: as Blocks.
    """
    found = read_meta(config.data_dir)
    config, meta = with_vocabulary(config, found)
    note = ""
    if meta != found:
        note = (
            f"{config.data_dir} has no meta.json and no meta.pkl: its tokens are taken for GPT-2's"
        )
    # The embedding may have more rows than there are tokens. An id beyond n_vocab is an error.
    n_vocab = meta.get("vocab_size") or config.n_vocab or config.vocab_size
    train = Blocks(config.data_dir, "train", config.block_size, n_vocab)
    val = Blocks(config.data_dir, "val", config.block_size, n_vocab)
    return config, Data(train, val, meta, note)


def read_ahead(read: Callable[[Item], Batch], items: Iterable[Item]) -> Iterator[Batch]:
    """Yield read(item) of each item. A background thread reads AHEAD of them in advance."""
    waiting = deque()
    with ThreadPoolExecutor(max_workers=1) as reader:
        for item in items:
            waiting.append(reader.submit(read, item))
            if len(waiting) > AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


# Two, because a micro-batch may lie across the end of an epoch.
@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, n_blocks: int) -> np.ndarray:
    """Draw the order (n_blocks,) in which an epoch visits the blocks."""
    # RandomState, because NumPy guarantees that its streams never change.
    return np.random.RandomState([seed, epoch]).permutation(n_blocks)


class TrainLoader:
    """Training batches.

    Micro-batch m of step N (both counted over all ranks) holds the same blocks on any number of
    ranks.
    """

    def __init__(self, blocks: Blocks, batch_size: int, micro_batches: int, seed: int):
        self.blocks = blocks
        self.batch_size = batch_size
        self.micro_batches = micro_batches
        self.seed = seed

    def sample_ids(self, step: int, micro: int) -> list[int]:
        """List the block numbers of micro-batch `micro` (from 0) of `step` (from 1)."""
        # Samples are numbered over all steps, micro-batches and ranks.
        first = ((step - 1) * self.micro_batches + micro) * self.batch_size
        n_blocks = len(self.blocks)
        found = []
        for sample in range(first, first + self.batch_size):
            epoch, place = divmod(sample, n_blocks)
            found.append(int(epoch_order(self.seed, epoch, n_blocks)[place]))
        return found

    def batches(
        self, first_step: int, rank: int, world_size: int, pin: bool, at_once: int = 1
    ) -> Iterator[Batch]:
        """Yield this rank's batches from `first_step` on, for ever, read ahead.

        Args:
            first_step: from 1.
            rank, world_size: which of how many processes.
            pin: for an asynchronous copy to a GPU.
            at_once: micro-batches in a batch; divides those of a rank.

        Yields:
            x, y: int64 (at_once B, T) each.
        """
        passes = self.micro_batches // world_size // at_once

        def read(position: int) -> Batch:
            step, number = divmod(position, passes)
            ids = []
            for micro in range(number * at_once, (number + 1) * at_once):
                # Ranks take turns, so any number of them does the same micro-batches in a step.
                ids += self.sample_ids(first_step + step, micro * world_size + rank)
            return self.blocks.batch(ids, pin=pin)

        return read_ahead(read, itertools.count())


def eval_batches(blocks: Blocks, batch_size: int, eval_tokens: int) -> list[list[int]]:
    """List the block numbers of each evaluation batch.

    They are the first eval_tokens of the split, in order, the same for every run.
    """
    count = min(len(blocks), max(1, eval_tokens // blocks.block_size))
    starts = range(0, count, batch_size)
    return [list(range(start, min(start + batch_size, count))) for start in starts]


def bytes_per_token(blocks: Blocks, batches: list[list[int]], lengths: np.ndarray) -> float:
    """Compute the mean length in bytes of the targets of an evaluation.

    Args:
        blocks: the val split.
        batches: of eval_batches.
        lengths: (vocabulary,) bytes of each token.

    Returns:
        b, so that L nats per token are L / (ln 2 * b) bits per byte.
    """
    # [1:], the targets: the first token of a block is not predicted.
    totals = [lengths[blocks[index][1:]].sum() for batch in batches for index in batch]
    return float(sum(totals)) / (len(totals) * blocks.block_size)
