"""Your own text as token shards.

    python data/prepare.py input.txt --tokenizer=chars --out_dir=data/mine
        one text: its last tenth is validation data
    python data/prepare.py a.jsonl.xz 'b-*.parquet' --out_dir=data/mine --val_share=0.01
        many documents: every hundredth is validation data
    python data/prepare.py train.jsonl --val=val.jsonl --out_dir=data/mine

Files are jsonl or jsonl.xz (one {"text": ...} a line), parquet (a column "text") or txt (one
document a file). Of fewer documents than 1 / val_share, the end of each is validation data.

It writes text_train_000000.bin, text_val_000000.bin, ... of 100 M tokens each (data/shards.py),
with the end-of-text token before each document, unless tokens are characters; meta.json; and
progress.json, which it needs to go on after an interruption. Kill it at any moment and run the same
command again: finished shards are kept, and the result is the same to the byte.

The data sets in the folders beside this file are written by the same code.
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

if __name__ == "__main__":
    # In place of this folder: its tokenizers.py is not the package of that name.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
from tqdm import tqdm

from common.errors import ConfigError, DataError, run_program
from common.lock import FolderLock
from common.output import parse_json, write_bytes_atomically
from configurator import key, parse_args
from data.documents import BROKEN, EMPTY, NO_TEXT, REPLACED, Document, input_files, read_files
from data.shards import HEADER_BYTES, MOST_TOKENS, write_meta, write_shard
from data.tokenizers import HFTokenizer, document_start, load_tokenizer

SPLITS = ("val", "train")
TOKENIZERS = ("gpt2", "bytes", "chars")
MAX_PIECE = 16384  # characters that the tokenizer sees at once; see `pieces`
AHEAD = 16  # documents a thread that are read ahead
# Up to the last non-whitespace before a space or newline: GPT-2's pattern never matches across such
# a place.
SAFE_SPLIT = re.compile(r".*\S(?=[ \n])", re.DOTALL)


@dataclass(frozen=True)
class ShardKeys:
    """Shards"""

    out_dir: str = key("data/mine", "folder for the shards")
    tokenizer: str = key(
        "gpt2",
        "gpt2, bytes (for models of few parameters), chars, or a Hugging Face folder with a "
        "tokenizer.json",
    )
    shard_tokens: int = key(
        100_000_000, "tokens in a shard; only the last has fewer", least=1, most=2**31 - 1
    )
    processes: int | None = key(
        None,
        "threads that tokenise; the shards do not depend on it (auto: one a CPU core)",
        least=1,
        most=1024,
    )

    def __post_init__(self) -> None:
        if self.tokenizer not in TOKENIZERS and not os.path.isdir(self.tokenizer):
            raise ConfigError(
                f"tokenizer={self.tokenizer}: give gpt2, bytes, chars, or a Hugging Face folder"
            )


@dataclass(frozen=True)
class PrepareConfig(ShardKeys):
    """Validation data"""

    val: str = key("", "files of validation data, with commas between ('': a share of the text)")
    val_share: float = key(0.1, "without `val`: this share of the text", least=1e-6, most=0.5)


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


def encode(document: Document, tokenizer: Any) -> np.ndarray:
    """Return the uint16 tokens of a document, what stands before each first; none if skipped."""
    if document.problem not in ("", REPLACED):
        return np.empty(0, np.uint16)
    # Hugging Face's cut text in ways of their own, and add BOS to each piece.
    is_hf = isinstance(tokenizer, HFTokenizer)
    parts = [document.text] if is_hf else pieces(document.text)
    # encode_ordinary: "<|endoftext|>" inside a document stays text.
    tokens = [np.array(tokenizer.encode_ordinary(part), np.uint16) for part in parts]
    return np.concatenate([np.array(document_start(tokenizer), np.uint16), *tokens])


def tokenise(
    documents: Iterator[Document], tokenizer: Any, threads: int
) -> Iterator[tuple[Document, np.ndarray]]:
    """Yield each document and its tokens, in the order of the input.

    The tokenizer computes without Python's lock, so threads are enough.
    """
    with ThreadPoolExecutor(threads) as pool:
        # Bounded, so that reading does not get far ahead of tokenising.
        while batch := list(islice(documents, AHEAD * threads)):
            yield from zip(batch, pool.map(encode, batch, repeat(tokenizer)), strict=True)


def meta_of(tokenizer: str, documents: Iterator[Document]) -> dict[str, Any]:
    """Return the meta.json of a tokenizer, which for characters are those of the documents.

    Raises ConfigError for one with more tokens than a shard can tell apart.
    """
    meta = {"tokenizer": tokenizer}
    if tokenizer == "chars":
        found: set[str] = set()
        for document in documents:
            found.update(document.text)
        meta["chars"] = "".join(sorted(found))
    elif tokenizer not in TOKENIZERS:
        meta = {"tokenizer": "hf", "path": str(Path(tokenizer).resolve())}
    loaded = load_tokenizer(meta)
    meta["vocab_size"] = loaded.n_vocab
    if meta["tokenizer"] == "hf":
        meta["checksum"] = loaded.checksum
    if meta["vocab_size"] > MOST_TOKENS:
        raise ConfigError(
            f"tokenizer={tokenizer}: it has {meta['vocab_size']:,} tokens, and shards hold ids "
            f"below {MOST_TOKENS:,}: take another one"
        )
    return meta


# ------------------------------------------------------------------------------------------ writing


class Progress:
    """The file progress.json: how far the work has come.

    It holds the settings, and for each shard how much of the input had been used when it was full.
    A shard is noted before it is written, and counts once its file is there; both are atomic. So a
    kill at any moment loses no finished shard, and only the unfinished shard's tokens are computed
    again.

    Args:
        folder: of the shards.
        settings: what they depend on.
        meta: meta.json, which names their tokenizer. Of a Hugging Face folder's, the checksum
            belongs to the settings.

    Raises DataError if the folder holds shards of other settings or of another program.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], meta: dict[str, Any]):
        self.folder = folder
        self.meta = meta
        self.path = folder / "progress.json"
        if meta["tokenizer"] == "hf":
            settings = settings | {"tokenizer files": meta["checksum"]}
        # With the commit of data on the hub, "" until it is known
        self.settings = {**settings, "revision": ""}
        self.notes: dict[str, dict] = {}
        present = {path.name for path in folder.glob("*.bin")}
        if not present:
            return
        remedy = f"choose another --out_dir, or delete its shards and {self.path.name}"
        try:
            found = parse_json(self.path.read_text(encoding="utf-8"))
            self.notes = found["shards"]
            self.settings = found["settings"]
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
        meta = dict(self.meta)
        if self.settings.get("revision"):
            meta["revision"] = self.settings["revision"]
        write_meta(self.folder, meta)
        write_shard(self.folder / name, tokens)
        tqdm.write(f"{name}: {len(tokens):,} tokens")

    def say(self, counts: Counter) -> None:
        """Print how many tokens there are now, and what became of the documents."""
        for split in SPLITS:
            sizes = [note["tokens"] for name, note in self.notes.items() if f"_{split}_" in name]
            print(f"{split}: {sum(sizes):,} tokens in {len(sizes)} shards")
        print(summary(counts))


def remove_shards(folder: Path, name: str) -> None:
    """Remove the shards of this name, and how far they had come, to begin anew."""
    for path in [*folder.glob(f"{name}_*.bin"), folder / "progress.json"]:
        path.unlink(missing_ok=True)


def write_shards(
    read: Callable[[int], Iterator[Document]],
    name_of: Callable[[int], str],
    config: ShardKeys,
    progress: Progress,
    limit: int = 0,
) -> Counter:
    """Tokenise documents into shards; go on where a killed run stopped.

    Args:
        read: yields the documents after a number that are skipped.
        name_of: file name of the shard with this number.
        limit: number of tokens to write, 0 for all.

    Returns:
        How many documents there were of each kind.

    Raises:
        DataError: there is no usable document.
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
    tokenizer = load_tokenizer(progress.meta)
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
    progress.write(name_of(index), shard[:filled], counts=dict(counts), offset=0, is_last=True)
    return counts


def summary(counts: Counter) -> str:
    """Return the counts in one line: `12 documents; skipped: 3 empty, ...`."""
    skipped = ", ".join(
        f"{counts[kind]:,} {kind}" for kind in (EMPTY, BROKEN, NO_TEXT) if counts[kind]
    )
    replaced = f"; {counts[REPLACED]:,} with {REPLACED}" if counts[REPLACED] else ""
    return f"{counts['documents']:,} documents; skipped: {skipped or 'none'}{replaced}"


# ----------------------------------------------------------------------------------------- own text


def identity(paths: list[Path]) -> list[list]:
    """Return what tells versions of files apart: path, bytes, time of the last change."""
    found = [(str(path.resolve()), path.stat()) for path in paths]
    return [[name, status.st_size, status.st_mtime_ns] for name, status in found]


def part_of(split: str, share: float, cuts: bool, paths: list[Path]) -> Iterator[Document]:
    """Yield the documents of a split, train or val, of files that hold both.

    Args:
        share: of validation data: so many of the documents, evenly spread.
        cuts: the share is the end of each document instead.
    """
    is_val = split == "val"
    number = 0  # of usable documents
    for document in read_files(paths):
        if cuts:
            end = int(len(document.text) * (1 - share))
            text = document.text[end:] if is_val else document.text[:end]
            yield document._replace(text=text)
        elif is_val == (int((number + 1) * share) > int(number * share)):
            yield document
        number += bool(document.text)


def prepare(config: PrepareConfig, files: str, name: str = "text") -> None:
    """Write the shards of the files that a comma-separated list names. Raises UserError.

    Args:
        name: how the names of the shards begin.
    """
    train, val = input_files(files), input_files(config.val)
    # by inode, as one file can have two names
    inodes = {(status.st_dev, status.st_ino) for status in map(Path.stat, train + val)}
    if len(inodes) < len(train + val):
        raise ConfigError("the same file is named twice")
    settings = {
        "files": identity(train),
        "val": identity(val),
        "val_share": config.val_share,
        "shard_tokens": config.shard_tokens,
        "tokenizer": config.tokenizer,
    }
    meta = meta_of(config.tokenizer, read_files(train + val))
    progress = Progress(Path(config.out_dir), settings, meta)
    usable = filter(lambda document: document.text, read_files(train))
    some = islice(usable, int(1 / config.val_share) + 1)
    cuts = sum(1 for _ in some) * config.val_share < 1
    sources = {split: partial(part_of, split, config.val_share, cuts, train) for split in SPLITS}
    if val:
        sources = {"val": partial(read_files, val), "train": partial(read_files, train)}
    counts = write_splits(sources, name, config, progress)
    # The documents of both splits are the same where they are cut.
    progress.say(counts["train"] if cuts and not val else counts["val"] + counts["train"])


def write_splits(
    sources: dict[str, Callable[[], Iterator[Document]]],
    name: str,
    config: ShardKeys,
    progress: Progress,
) -> dict[str, Counter]:
    """Write the shards of each split; return how many documents of each kind it had.

    Args:
        sources: split -> what yields its documents.
        name: how the names of the shards begin.
    """
    counts = {}
    for split, source in sources.items():
        read = partial(after, source)
        counts[split] = write_shards(read, partial(shard_name, name, split), config, progress)
    return counts


def write_bytes_anew(
    folder: Path, name: str, sources: dict[str, Callable[[], Iterator[Document]]]
) -> None:
    """Write byte-level shards of each split, without those that are there.

    For a source that differs from machine to machine, as another Python has another library. The
    caller holds the folder's lock.

    Args:
        name: how the names of the shards begin.
        sources: split -> what yields its documents.
    """
    config = ShardKeys(out_dir=str(folder), tokenizer="bytes")
    remove_shards(folder, name)
    progress = Progress(folder, {"tokenizer": "bytes"}, meta_of("bytes", iter(())))
    counts = write_splits(sources, name, config, progress)
    progress.say(counts["val"] + counts["train"])


def after(source: Callable[[], Iterator[Document]], skip: int) -> Iterator[Document]:
    """Yield the documents of a source without the first `skip`."""
    return islice(source(), skip, None)


def shard_name(name: str, split: str, index: int) -> str:
    """Return the name of the file of a shard."""
    return f"{name}_{split}_{index:06d}.bin"


def main(argv: list[str]) -> None:
    """Run the program with these command-line arguments."""
    files = [word for word in argv if not word.startswith("-")]
    config, _ = parse_args(PrepareConfig, [word for word in argv if word not in files], __doc__)
    if not files:
        raise ConfigError("name at least one file: jsonl, jsonl.xz, parquet or txt")
    with FolderLock(Path(config.out_dir)):
        prepare(config, ",".join(files))


if __name__ == "__main__":
    run_program(main)
