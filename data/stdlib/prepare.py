"""Byte-level shards of the Python standard library that runs this script, without a download.

    python data/stdlib/prepare.py

About 10 MB of real text on every machine (tests and code tables left out): one document a source
file, with the end-of-text token before each. About every 40th file, chosen by a hash of its name,
is validation data.
"""

import sys
import sysconfig
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import common.interrupt  # noqa: F401

import numpy as np

from common.errors import ConfigError, DataError, run_program
from common.lock import FolderLock
from data.shards import write_meta, write_shard
from data.tokenizers import END_OF_TEXT, byte_tokenizer

# Tests, installed packages, and `encodings`, whose files are mostly tables of code points.
LEFT_OUT = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "lib2to3",
    "encodings",
}


def documents(root: Path) -> dict[str, list[bytes]]:
    """Read the source files below `root` as bytes, by split, in the order of their names."""
    splits: dict[str, list[bytes]] = {"train": [], "val": []}
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        name = path.relative_to(root)
        if not LEFT_OUT.intersection(name.parts):
            split = "val" if zlib.crc32(name.as_posix().encode()) % 40 == 0 else "train"
            splits[split].append(path.read_bytes())
    return splits


def main(argv: list[str]) -> None:
    """Run the program with these command-line arguments."""
    if argv and argv[0] in ("--help", "-h"):
        print(__doc__)
        return
    if argv:
        raise ConfigError(f"{argv[0]}: this script takes no settings")
    folder = Path(__file__).resolve().parent
    with FolderLock(folder):
        prepare(folder)


def prepare(folder: Path) -> None:
    """Write the shards and meta.json."""
    root = Path(sysconfig.get_paths()["stdlib"])
    tokenizer = byte_tokenizer()
    end_of_text = tokenizer.encode_single_token(END_OF_TEXT)
    for split, texts in documents(root).items():
        if not texts:
            raise DataError(
                f"no Python sources in {root}: "
                "is this Python's standard library packed into an archive?"
            )
        parts = []
        for text in texts:
            parts.append(np.array([end_of_text], np.uint16))
            # A byte is its own token id, so the bytes themselves are the tokens (a test compares
            # with the tokenizer).
            parts.append(np.frombuffer(text, dtype=np.uint8).astype(np.uint16))
        tokens = np.concatenate(parts)
        write_shard(folder / f"stdlib_{split}_000000.bin", tokens)
        print(f"{split}: {len(texts)} files, {len(tokens):,} tokens")
    write_meta(folder, {"tokenizer": "bytes", "vocab_size": tokenizer.n_vocab})


if __name__ == "__main__":
    run_program(main)
