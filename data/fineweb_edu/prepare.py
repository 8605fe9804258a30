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
some 27 GB. One process tokenises about 2.5 M tokens a second, an hour for all; with several, the
download sets the pace. Kill it at any moment and run the same command again: finished shards are
kept, and the result is the same to the byte.
"""

import json
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import common.interrupt  # noqa: F401

import numpy as np
from tqdm import tqdm

from common.errors import ConfigError, DataError, cannot_write, run_program
from common.lock import FolderLock
from common.output import parse_json, write_bytes_atomically
from configurator import key, parse_args
from data.documents import (
    BROKEN,
    EMPTY,
    NO_TEXT,
    REPLACED,
    Document,
    checked,
    input_files,
    read_files,
)
from data.shards import HEADER_BYTES, write_meta, write_shard
from data.tokenizers import END_OF_TEXT, load_tokenizer

HUB = "HuggingFaceFW/fineweb-edu"
SUBSET = "sample-10BT"
VOCABULARIES = {"gpt2": 50257, "bytes": 257}
MAX_PIECE = 16384  # characters that the tokenizer sees at once; see `pieces`
MOST_PROCESSES = 1024
BATCH_CHARS = 1 << 20  # text sent to a process at once
NOTE_KEYS = {"tokens", "counts", "offset", "is_last"}  # of a shard in progress.json; see Progress
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
    shard_tokens: int = key(100_000_000, "tokens in a shard; only the last has fewer")
    max_tokens: int = key(0, "stop after this many tokens, val files not counted (0: all)")
    processes: int | None = key(
        None, "tokenising processes; the shards do not depend on it (auto: one a CPU core)"
    )


def read_hub(progress: "Progress", skip: int) -> Iterator[Document]:
    """Stream sample-10BT from the hub, in its order, without the first `skip` documents.

    A folder stays with the commit that it began with.
    """
    try:
        from datasets import load_dataset
        from huggingface_hub import HfApi
    except ImportError:
        raise DataError(
            "streaming FineWeb-Edu needs datasets: pip install datasets, or pass --local FILES"
        ) from None
    revision = progress.settings.get("revision")
    if revision is None:
        raise DataError(
            f"{progress.path} does not name the commit of {HUB} that its shards are from, as it "
            f"was written by an older version: {progress.remedy}"
        )
    try:
        if not revision:
            revision = HfApi().dataset_info(HUB).sha
            progress.settings["revision"] = revision
        rows = (
            load_dataset(HUB, name=SUBSET, split="train", revision=revision, streaming=True)
            .select_columns(["text"])
            .skip(skip)
        )
        for row in rows:
            yield checked(row["text"])
    except Exception as error:  # its HTTP libraries raise many kinds
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise DataError(
            f"reading {HUB}, commit {revision or 'unknown'}, failed ({what}): run the same command "
            "again to go on, or if the hub has no such commit any more, choose another --out_dir"
        ) from None


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


def encode(texts: list[str], name: str) -> list[np.ndarray]:
    """Return the uint16 tokens of each text, end of text first; none for a skipped text ("")."""
    tokenizer = load_tokenizer({"tokenizer": name})
    first = np.array([tokenizer.encode_single_token(END_OF_TEXT)], np.uint16)
    encoded = []
    for text in texts:
        if not text:
            encoded.append(np.empty(0, np.uint16))
            continue
        # encode_ordinary: "<|endoftext|>" inside a document stays text.
        parts = [np.array(tokenizer.encode_ordinary(piece), np.uint16) for piece in pieces(text)]
        encoded.append(np.concatenate([first, *parts]))
    return encoded


def batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Group documents into lists of about BATCH_CHARS characters."""
    batch = []
    size = 0
    for document in documents:
        batch.append(document)
        # The 100 keep a million empty documents from filling the memory.
        size += len(document.text) + 100
        if size >= BATCH_CHARS:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def start_worker() -> None:
    """Leave Ctrl-C to the parent process, and do not outlive it when it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def follow_parent() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=follow_parent, daemon=True).start()


def tokenise(
    documents: Iterator[Document], name: str, processes: int
) -> Iterator[tuple[Document, np.ndarray]]:
    """Yield each document and its tokens, in the order of the input."""
    if processes == 1:
        for document in documents:
            yield document, encode([document.text], name)[0]
        return
    # spawn, because forking is unsafe once datasets has started threads.
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), start_worker)
    try:
        # Bounded, so that reading does not get far ahead of tokenising.
        pending: deque = deque()
        for batch in batches(documents):
            texts = [document.text for document in batch]
            pending.append((batch, pool.submit(encode, texts, name)))
            if len(pending) > 2 * processes:
                batch, encoded = pending.popleft()
                yield from zip(batch, encoded.result(), strict=True)
        for batch, encoded in pending:
            yield from zip(batch, encoded.result(), strict=True)
    except BrokenProcessPool:
        raise DataError(
            "a tokenising process was killed; out of memory? Run again with fewer --processes"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


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
        self.remedy = (
            f"choose another --out_dir, or delete its shards and {self.path.name} to begin again"
        )
        present = {path.name for path in folder.glob("*.bin")}
        if not present:
            return
        try:
            found = parse_json(self.path.read_text())
            noted = {name for name, note in found["shards"].items() if note.keys() >= NOTE_KEYS}
            # In older folders it does not name the tokenizer gpt2, nor a commit.
            self.settings = found["settings"]
            self.settings.setdefault("tokenizer", "gpt2")
            different = [
                name for name, value in settings.items() if self.settings.get(name) != value
            ]
        except FileNotFoundError:
            raise DataError(
                f"{folder} holds shards that this script did not make: {self.remedy}"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise DataError(f"{self.path} is damaged: {self.remedy}") from None
        if different:
            raise DataError(
                f"{folder} holds shards made with other settings ({', '.join(different)}): "
                f"{self.remedy}"
            )
        if strangers := present - noted:
            raise DataError(
                f"{folder} holds {min(strangers)}, which this run did not make: {self.remedy}"
            )
        self.notes = found["shards"]

    def last_finished(self, name_of: Callable[[int], str]) -> tuple[int, dict | None]:
        """Count the finished shards up to the first gap; return that and the last one's note."""
        index = 0
        last = None
        while True:
            name = name_of(index)
            note = self.notes.get(name)
            if not note or not self._is_there(name, note["tokens"]):
                return index, last
            last = note
            index += 1

    def _is_there(self, name: str, tokens: int) -> bool:
        """Does the shard's file exist, with this number of tokens?"""
        path = self.folder / name
        return path.is_file() and path.stat().st_size == HEADER_BYTES + 2 * tokens

    def write(self, name: str, tokens: np.ndarray, **note: Any) -> None:
        """Note a shard, then write it."""
        self.notes[name] = {"tokens": len(tokens), **note}
        content = {"settings": self.settings, "shards": self.notes}
        try:
            write_bytes_atomically(self.path, json.dumps(content, indent=1).encode())
        except OSError as error:
            raise DataError(cannot_write(self.path, error)) from None
        # Always: one that is there may be of shards that were deleted to begin again.
        tokenizer = self.settings["tokenizer"]
        meta = {"tokenizer": tokenizer, "vocab_size": VOCABULARIES[tokenizer]}
        if self.settings.get("revision"):
            meta["revision"] = self.settings["revision"]
        write_meta(self.folder, meta)
        write_shard(self.folder / name, tokens)
        tqdm.write(f"{name}: {len(tokens):,} tokens")


def up_to(
    limit: int, encoded: Iterator[tuple[Document, np.ndarray]]
) -> Iterator[tuple[Document, np.ndarray]]:
    """Yield the first `limit` tokens, and the documents that they come from."""
    for document, tokens in encoded:
        yield document, tokens[:limit]
        limit -= len(tokens)
        if limit <= 0:
            return


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
    counts: Counter = Counter()
    offset = 0  # tokens of the first document that are in finished shards already
    if note:
        counts = Counter(note["counts"])
        offset = note["offset"]
        if note["is_last"]:
            return counts
    size = config.shard_tokens
    shard = np.empty(size, np.uint16)
    filled = 0
    # Counted from the beginning of the document in which the last shard ended.
    left = (limit or sys.maxsize) - index * size + offset
    processes = config.processes or os.cpu_count() or 1
    documents = read(counts["records"])
    encoded = up_to(left, tokenise(documents, config.tokenizer, processes))
    interval = 0.5 if sys.stderr.isatty() else 60  # a log file needs fewer lines than a terminal
    with tqdm(
        unit="tok", unit_scale=True, initial=index * size, total=limit or None, mininterval=interval
    ) as bar:
        for document, tokens in encoded:
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
        follows_list = bool(joined) and joined[-1].startswith(("--local=", "--val="))
        if argument in ("--local", "--val"):
            joined.append(argument + "=")
        elif follows_list and not argument.startswith("-"):
            comma = "" if joined[-1].endswith("=") else ","
            joined[-1] += comma + argument
        else:
            joined.append(argument)
    for argument in joined:
        if argument in ("--local=", "--val="):
            raise ConfigError(f"{argument.rstrip('=')} needs at least one file")
    return joined


def identity(paths: list[Path]) -> list[list]:
    """Return what tells versions of files apart: path, bytes, time of the last change."""
    found = []
    for path in paths:
        status = path.stat()
        found.append([str(path.resolve()), status.st_size, status.st_mtime_ns])
    return found


def prepare(config: PrepareConfig) -> None:
    """Write all shards. Raises UserError."""
    local = input_files(config.local)
    val = input_files(config.val)
    # by inode, as one file can have two names
    files = {(status.st_dev, status.st_ino) for status in map(Path.stat, local + val)}
    if len(files) < len(local + val):
        raise ConfigError("the same file is named twice in --local and --val")
    # GPT-2's may be downloaded here; if it cannot be, the error says what to do.
    load_tokenizer({"tokenizer": config.tokenizer})
    settings = {
        "local": identity(local) or f"{HUB} {SUBSET}",
        "val": identity(val),
        "shard_tokens": config.shard_tokens,
        "max_tokens": config.max_tokens,
        "tokenizer": config.tokenizer,
    }
    progress = Progress(Path(config.out_dir), settings)

    def read(paths: list[Path], skip: int) -> Iterator[Document]:
        return islice(read_files(paths), skip, None) if paths else read_hub(progress, skip)

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
    if not 0 < config.shard_tokens < 2**31 or config.max_tokens < 0:
        raise ConfigError("shard_tokens lies in 1..2147483647, and max_tokens is 0 or more")
    if config.processes is not None and not 1 <= config.processes <= MOST_PROCESSES:
        raise ConfigError(f"processes={config.processes}: must be from 1 to {MOST_PROCESSES}")
    if not config.val and 0 < config.max_tokens <= config.shard_tokens:
        raise ConfigError(
            "max_tokens fits in the first shard, which is validation data: "
            "set a smaller shard_tokens"
        )
    try:
        with FolderLock(Path(config.out_dir)):
            prepare(config)
    except OSError as error:  # a full disk, an unreadable file
        raise DataError(
            f"{error}: put that right, and run the same command again to go on"
        ) from None
    except KeyboardInterrupt:
        raise DataError("interrupted: run the same command again to go on") from None


if __name__ == "__main__":
    run_program(main)
