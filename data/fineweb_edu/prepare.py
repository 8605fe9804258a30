"""FineWeb-Edu sample-10BT as GPT-2 token shards, or any text files in the same form.

    python data/fineweb_edu/prepare.py
        stream sample-10BT from the Hugging Face hub
    python data/fineweb_edu/prepare.py --max_tokens=1000000000
        only its first 1 B tokens
    python data/fineweb_edu/prepare.py --local a.jsonl.xz b.parquet
        files instead; also written --local=a.jsonl.xz,b.parquet
    python data/fineweb_edu/prepare.py --local train.jsonl --val val.jsonl --out_dir=data/mine

Files are jsonl or jsonl.xz (one {"text": ...} a line), parquet (a column "text") or txt (one
document a file).

It writes fineweb_edu_val_000000.bin, fineweb_edu_train_000001.bin, ... of 100 M tokens each
(data/shards.py), with the end-of-text token before each document; meta.json; and progress.json,
which it needs to go on after an interruption. Both name the commit of the data on the hub, which a
folder keeps to. The first shard is validation data. With --val, those files are the validation
data, and the training shards count from 0.

The whole sample has about 9.7 M documents and 10 B tokens: 100 shards, 20 GB, from a download of
some 27 GB. One thread tokenises about 2.5 M tokens a second, an hour for all; with several, the
download sets the pace. Kill it at any moment and run the same command again: finished shards are
kept, and the result is the same to the byte.
"""

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice, repeat
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from tqdm import tqdm

from common.errors import ConfigError, DataError, run_program
from common.lock import FolderLock
from common.output import parse_json, write_bytes_atomically
from configurator import check_ranges, key, parse_args
from data.documents import (
    BROKEN,
    EMPTY,
    NO_TEXT,
    REPLACED,
    Document,
    asking_hub,
    input_files,
    read_files,
    read_hub,
)
from data.shards import HEADER_BYTES, write_meta, write_shard
from data.tokenizers import load_tokenizer

HUB = "HuggingFaceFW/fineweb-edu"
SUBSET = "sample-10BT"
VOCABULARIES = {"gpt2": 50257, "bytes": 257}
MAX_PIECE = 16384  # characters that the tokenizer sees at once; see `pieces`
AHEAD = 16  # documents a thread that are read ahead
# Up to the last non-whitespace before a space or newline: GPT-2's pattern never matches across such
# a place.
SAFE_SPLIT = re.compile(r".*\S(?=[ \n])", re.DOTALL)


@dataclass(frozen=True)
class PrepareConfig:
    """Keys of data/fineweb_edu/prepare.py."""

    local: str = key(
        "", "files to tokenise, with commas between ('': stream sample-10BT from the hub)"
    )
    val: str = key("", "files for the val shards ('': the first shard is validation data)")
    out_dir: str = key(str(Path(__file__).resolve().parent), "folder for the shards")
    tokenizer: str = key(
        "gpt2", "GPT-2's BPE, or single bytes for models of few parameters", tuple(VOCABULARIES)
    )
    shard_tokens: int = key(
        100_000_000, "tokens in a shard; only the last has fewer", least=1, most=2**31 - 1
    )
    max_tokens: int = key(0, "stop after this many tokens, val files not counted (0: all)", least=0)
    processes: int | None = key(
        None,
        "threads that tokenise; the shards do not depend on it (auto: one a CPU core)",
        least=1,
        most=1024,
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.val and 0 < self.max_tokens <= self.shard_tokens:
            raise ConfigError(
                "max_tokens fits in the first shard, which is validation data: "
                "set a smaller shard_tokens"
            )


# --------------------------------------------------------------------------------------- tokenising


def pieces(text: str) -> Iterator[str]:
    """Cut `text` into pieces of at most MAX_PIECE characters, where that changes no token.

    A run without whitespace costs the tokenizer more than linear time (quadratic in older
    versions), and a run of whitespace needs a deep stack. So runs longer than MAX_PIECE are cut
    anywhere, which still decodes to the same text.
    """
    start = 0
    while len(text) - start > MAX_PIECE:
        safe = SAFE_SPLIT.match(text, start, start + MAX_PIECE)
        end = safe.end() if safe else start + MAX_PIECE
        yield text[start:end]
        start = end
    yield text[start:]


def encode(text: str, tokenizer: Any) -> np.ndarray:
    """Return the uint16 tokens of a text, end of text first; none for a skipped text ("")."""
    if not text:
        return np.empty(0, np.uint16)
    # encode_ordinary: "<|endoftext|>" inside a document stays text.
    parts = [np.array(tokenizer.encode_ordinary(piece), np.uint16) for piece in pieces(text)]
    return np.concatenate([np.array([tokenizer.eot_token], np.uint16), *parts])


def tokenise(
    documents: Iterator[Document], tokenizer: Any, threads: int
) -> Iterator[tuple[Document, np.ndarray]]:
    """Yield each document and its tokens, in the order of the input.

    The tokenizer computes without Python's lock, so threads are enough.
    """
    with ThreadPoolExecutor(threads) as pool:
        # Bounded, so that reading does not get far ahead of tokenising.
        while batch := list(islice(documents, AHEAD * threads)):
            texts = [document.text for document in batch]
            yield from zip(batch, pool.map(encode, texts, repeat(tokenizer)), strict=True)


# ------------------------------------------------------------------------------------------ writing


class Progress:
    """The file progress.json: how far the work has come.

    It holds the settings, and for each shard how much of the input had been used when it was full.
    A shard is noted before it is written, and counts once its file is there; both are atomic. So a
    kill at any moment loses no finished shard, and only the unfinished shard's tokens are computed
    again.

    Raises DataError if the folder holds shards of other settings or of another program.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]):
        self.folder = folder
        self.path = folder / "progress.json"
        # With the commit of the data on the hub, "" until it is known
        self.settings = {**settings, "revision": ""}
        self.notes: dict[str, dict] = {}
        present = {path.name for path in folder.glob("*.bin")}
        if not present:
            return
        remedy = f"choose another --out_dir, or delete its shards and {self.path.name}"
        try:
            found = parse_json(self.path.read_text(encoding="utf-8"))
            self.notes = found["shards"]
            # In older folders it does not name the tokenizer gpt2, nor a commit.
            self.settings = found["settings"]
            self.settings.setdefault("tokenizer", "gpt2")
        except (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError):
            raise DataError(
                f"{folder} holds shards, and no good {self.path.name} of this script: {remedy}"
            ) from None
        different = [name for name, value in settings.items() if self.settings.get(name) != value]
        if different:
            raise DataError(
                f"{folder} holds shards made with other settings ({', '.join(different)}): {remedy}"
            )
        if strangers := present - self.notes.keys():
            raise DataError(
                f"{folder} holds {min(strangers)}, which this run did not make: {remedy}"
            )

    def last_finished(self, name_of: Callable[[int], str]) -> tuple[int, dict[str, Any]]:
        """Count the finished shards up to the first gap; return that and the last one's note."""
        index = 0
        last = {"counts": {}, "offset": 0, "is_last": False}
        while note := self.notes.get(name_of(index)):
            path = self.folder / name_of(index)
            if not path.is_file() or path.stat().st_size != HEADER_BYTES + 2 * note["tokens"]:
                break
            last = note
            index += 1
        return index, last

    def write(self, name: str, tokens: np.ndarray, **note: Any) -> None:
        """Note a shard, then write it."""
        self.notes[name] = {"tokens": len(tokens), **note}
        content = {"settings": self.settings, "shards": self.notes}
        write_bytes_atomically(self.path, json.dumps(content, indent=1).encode())
        # Always: one that is there may be of shards that were deleted to begin again.
        tokenizer = self.settings["tokenizer"]
        meta = {"tokenizer": tokenizer, "vocab_size": VOCABULARIES[tokenizer]}
        if self.settings.get("revision"):
            meta["revision"] = self.settings["revision"]
        write_meta(self.folder, meta)
        write_shard(self.folder / name, tokens)
        tqdm.write(f"{name}: {len(tokens):,} tokens")


def write_shards(
    read: Callable[[int], Iterator[Document]],
    name_of: Callable[[int], str],
    first_is_val: bool,
    limit: int,
    config: PrepareConfig,
    progress: Progress,
) -> Counter:
    """Tokenise documents into shards; go on where a killed run stopped.

    Args:
        read: yields the documents after a number that are skipped.
        name_of: file name of the shard with this number.
        first_is_val: the first shard is validation data, so there must be a second.
        limit: number of tokens to write, 0 for all.

    Returns:
        How many documents there were of each kind.

    Raises:
        DataError: there is no usable document, or no shard for training.
    """
    index, note = progress.last_finished(name_of)
    counts = Counter(note["counts"])
    if note["is_last"]:
        return counts
    offset = note["offset"]  # tokens of the first document that are in finished shards already
    size = config.shard_tokens
    shard = np.empty(size, np.uint16)
    filled = 0
    # Counted from the beginning of the document in which the last shard ended.
    left = (limit or sys.maxsize) - index * size + offset
    tokenizer = load_tokenizer({"tokenizer": config.tokenizer})
    threads = config.processes or os.cpu_count() or 1
    interval = 0.5 if sys.stderr.isatty() else 60  # a log file needs fewer lines than a terminal
    with tqdm(
        unit="tok", unit_scale=True, initial=index * size, total=limit or None, mininterval=interval
    ) as bar:
        for document, tokens in tokenise(read(counts["records"]), tokenizer, threads):
            tokens = tokens[:left]
            left -= len(tokens)
            while offset < len(tokens):
                # A full shard is written only when there is one more token, so that the last shard
                # is known to be the last.
                if filled == size:
                    progress.write(
                        name_of(index), shard, counts=dict(counts), offset=offset, is_last=False
                    )
                    index += 1
                    filled = 0
                part = tokens[offset : offset + size - filled]
                shard[filled : filled + len(part)] = part
                offset += len(part)
                filled += len(part)
                bar.update(len(part))
            offset = 0
            counts["records"] += 1
            counts["documents"] += len(tokens) > 0
            if document.problem:
                counts[document.problem] += 1
            if left <= 0:
                break
    if not filled:
        raise DataError(
            f"{name_of(0)}: no usable document in the input ({summary(counts)}): is it text, and "
            'for jsonl one {"text": ...} a line?'
        )
    if first_is_val and index == 0:
        raise DataError(
            f"{filled:,} tokens fit in one shard, which leaves none for training: set a "
            "--shard_tokens below that, or name validation files with --val"
        )
    progress.write(name_of(index), shard[:filled], counts=dict(counts), offset=0, is_last=True)
    return counts


def summary(counts: Counter) -> str:
    """Return the counts in one line: `12 documents; skipped: 3 empty, ...`."""
    skipped = ", ".join(
        f"{counts[kind]:,} {kind}" for kind in (EMPTY, BROKEN, NO_TEXT) if counts[kind]
    )
    replaced = f"; {counts[REPLACED]:,} with {REPLACED}" if counts[REPLACED] else ""
    return f"{counts['documents']:,} documents; skipped: {skipped or 'none'}{replaced}"


# --------------------------------------------------------------------------------------------- main


def join_paths(argv: list[str]) -> list[str]:
    """Write `--local a b` as `--local=a,b`, which the configurator understands; --val likewise.

    Raises ConfigError for one of them without a file.
    """
    joined: list[str] = []
    for argument in argv:
        if argument in ("--local", "--val"):
            joined.append(argument + "=")
        elif joined and re.match("--(local|val)=", joined[-1]) and not argument.startswith("-"):
            joined[-1] += "," + argument
        else:
            joined.append(argument)
    for argument in joined:
        if argument in ("--local=", "--val="):
            raise ConfigError(f"{argument.rstrip('=')} needs at least one file")
    return joined


def identity(paths: list[Path]) -> list[list]:
    """Return what tells versions of files apart: path, bytes, time of the last change."""
    statuses = [path.stat() for path in paths]
    return [
        [str(path.resolve()), status.st_size, status.st_mtime_ns]
        for path, status in zip(paths, statuses, strict=True)
    ]


def read_sample(progress: Progress, skip: int) -> Iterator[Document]:
    """Stream sample-10BT from the hub without the first `skip` documents.

    A folder stays with the commit that it began with. Raises DataError.
    """
    revision = progress.settings.get("revision")
    if revision is None:
        raise DataError(
            f"{progress.path} was written by an older version, and does not name the commit of "
            f"{HUB} that its shards are from: choose another --out_dir"
        )
    if not revision:
        with asking_hub(HUB):
            from huggingface_hub import HfApi

            revision = HfApi().dataset_info(HUB).sha
            progress.settings["revision"] = revision
    yield from read_hub(HUB, skip=skip, name=SUBSET, split="train", revision=revision)


def prepare(config: PrepareConfig) -> None:
    """Write all shards. Raises UserError."""
    local = input_files(config.local)
    val = input_files(config.val)
    # by inode, as one file can have two names
    files = {(status.st_dev, status.st_ino) for status in map(Path.stat, local + val)}
    if len(files) < len(local + val):
        raise ConfigError("the same file is named twice in --local and --val")
    settings = {
        "local": identity(local) or f"{HUB} {SUBSET}",
        "val": identity(val),
        "shard_tokens": config.shard_tokens,
        "max_tokens": config.max_tokens,
        "tokenizer": config.tokenizer,
    }
    progress = Progress(Path(config.out_dir), settings)

    def read(paths: list[Path], skip: int) -> Iterator[Document]:
        return islice(read_files(paths), skip, None) if paths else read_sample(progress, skip)

    def name_of(split: str, index: int) -> str:
        if not split:  # no files for validation, so the first shard is that
            split = "val" if index == 0 else "train"
        return f"fineweb_edu_{split}_{index:06d}.bin"

    counts: Counter = Counter()
    if val:
        counts += write_shards(
            partial(read, val), partial(name_of, "val"), False, 0, config, progress
        )
    split = "train" if val else ""
    counts += write_shards(
        partial(read, local), partial(name_of, split), not val, config.max_tokens, config, progress
    )
    for split in ("train", "val"):
        sizes = [note["tokens"] for name, note in progress.notes.items() if f"_{split}_" in name]
        print(f"{split}: {sum(sizes):,} tokens in {len(sizes)} shards")
    print(summary(counts))


def main(argv: list[str]) -> None:
    """Run the program with these command-line arguments."""
    config, _ = parse_args(PrepareConfig, join_paths(argv), __doc__)
    with FolderLock(Path(config.out_dir)):
        prepare(config)


if __name__ == "__main__":
    run_program(main)
