"""Token shards -> batches. A batch is a pure function of (seed, step, micro-batch), on any number
of ranks.

The shards of a split are cut into blocks of block_size tokens (plus one, for the shifted targets).
Each epoch visits every block once, in a new order seeded by (seed, epoch). Sample s of a run is
block `order[s % n]` of epoch `s // n`, so resuming at step N needs no other state than N, and
evaluation cannot disturb it.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import DataError
from common.fingerprint import fingerprint
from data.shards import find_shards, open_shard

SCAN_LIMIT = (
    1 << 28
)  # splits of up to this many tokens are checked whole at the start, in about a tenth of a second


class Blocks:
    """The blocks of one split: `blocks[i]` is block i as int64 (block_size + 1,)."""

    def __init__(self, data_dir: str, split: str, block_size: int, vocab_size: int):
        self.paths = find_shards(data_dir, split)
        self.shards = [open_shard(path) for path in self.paths]
        self.block_size, self.vocab_size = block_size, vocab_size
        counts = [(len(shard) - 1) // block_size for shard in self.shards]
        self.ends = np.cumsum(counts)  # block i lies in the first shard whose end is beyond i
        if not self.ends[-1]:
            longest = max(len(shard) for shard in self.shards)
            raise DataError(
                f"block_size={block_size} needs {block_size + 1} tokens, the longest {split} shard "
                f"in {data_dir} has {longest}: choose a smaller block_size"
            )
        if sum(len(shard) for shard in self.shards) <= SCAN_LIMIT:
            for path, shard in zip(self.paths, self.shards, strict=True):
                self._check(shard, path)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: int) -> np.ndarray:
        number = int(np.searchsorted(self.ends, index, side="right"))
        shard = self.shards[number]
        start = (index - (int(self.ends[number - 1]) if number else 0)) * self.block_size
        block = shard[start : start + self.block_size + 1].astype(np.int64)
        self._check(block, self.paths[number])
        return block

    def _check(self, tokens: np.ndarray, path: object) -> None:
        highest = int(tokens.max())
        if highest >= self.vocab_size:
            raise DataError(
                f"{path}: token id {highest} is beyond the vocabulary of {self.vocab_size}: the "
                "shard is corrupt, or vocab_size belongs to another tokenizer"
            )

    def fingerprint(self) -> str:
        """Name the tokens, for telling runs on different data apart (common/fingerprint.py)."""
        return fingerprint(self.paths[0].name, self.shards)

    def batch(self, indices: list[int], rows: int = 0) -> tuple[Tensor, Tensor]:
        """Inputs and next-token targets, int64 (max(rows, len(indices)), block_size) each.

        Rows beyond the indices have targets -1, which the loss leaves out: so a compiled model sees
        one shape only.
        """
        blocks = torch.from_numpy(
            np.stack([self[index] for index in indices])
        )  # (B, block_size + 1)
        x, y = blocks[:, :-1].contiguous(), blocks[:, 1:].contiguous()
        missing = max(0, rows - len(indices))
        return F.pad(x, (0, 0, 0, missing)), F.pad(y, (0, 0, 0, missing), value=-1)


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, n_blocks: int) -> np.ndarray:
    """Permutation (n_blocks,) of one epoch.

    RandomState, because NumPy guarantees that its streams never change.
    """
    return np.random.RandomState([seed, epoch]).permutation(n_blocks)


class TrainLoader:
    """Training batches.

    Micro-batch m of step N (both global) is the same set of blocks on any number of ranks.
    """

    def __init__(self, blocks: Blocks, batch_size: int, micro_batches: int, seed: int):
        self.blocks, self.batch_size, self.micro_batches, self.seed = (
            blocks,
            batch_size,
            micro_batches,
            seed,
        )

    def sample_ids(self, step: int, micro: int) -> list[int]:
        """Block numbers of micro-batch `micro` (0 .. micro_batches - 1) of `step` (from 1)."""
        first = ((step - 1) * self.micro_batches + micro) * self.batch_size
        n = len(self.blocks)
        samples = range(first, first + self.batch_size)
        return [int(epoch_order(self.seed, sample // n, n)[sample % n]) for sample in samples]

    def batches(
        self, first_step: int, rank: int, world_size: int, pin: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's micro-batches from `first_step` on, read ahead by a background thread, pinned
        for the GPU.
        """

        def load(position: int) -> tuple[Tensor, Tensor]:
            step, micro = divmod(position, self.micro_batches // world_size)
            batch = self.blocks.batch(self.sample_ids(first_step + step, micro * world_size + rank))
            return tuple(part.pin_memory() for part in batch) if pin else batch

        with ThreadPoolExecutor(max_workers=1) as reader:
            ahead = [reader.submit(load, position) for position in range(2)]
            for position in range(2, 1 << 62):
                yield ahead.pop(0).result()
                ahead.append(reader.submit(load, position))


def bytes_per_token(blocks: Blocks, batches: list[list[int]], lengths: np.ndarray) -> float:
    """Mean length of the evaluation's target tokens: nats per token / (ln 2 * this) is bits per
    byte.
    """
    totals = [lengths[blocks[index][1:]].sum() for batch in batches for index in batch]
    return float(sum(totals)) / (len(totals) * blocks.block_size)


def eval_batches(blocks: Blocks, batch_size: int, eval_tokens: int) -> list[list[int]]:
    """Block numbers of each evaluation batch: the first eval_tokens of the split, in order, for
    every run alike.
    """
    count = min(len(blocks), max(1, eval_tokens // blocks.block_size))
    return [
        list(range(start, min(start + batch_size, count))) for start in range(0, count, batch_size)
    ]
