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

import numpy as np

from common.errors import ConfigError, run_program
from data.shards import write_data_set
from data.tokenizers import byte_tokenizer

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
    """Write the shards and meta.json next to this file."""
    if argv:
        raise ConfigError(f"{argv[0]}: this script takes no settings")
    root = Path(sysconfig.get_paths()["stdlib"])
    tokenizer = byte_tokenizer()
    splits = {}
    for split, texts in documents(root).items():
        parts = []
        for text in texts:
            parts.append(np.array([tokenizer.eot_token], np.uint16))
            # A byte is its own token id, so the bytes themselves are the tokens (a test compares
            # with the tokenizer).
            parts.append(np.frombuffer(text, dtype=np.uint8).astype(np.uint16))
        splits[split] = np.concatenate(parts)
    meta = {"tokenizer": "bytes", "vocab_size": tokenizer.n_vocab}
    write_data_set(Path(__file__).resolve().parent, "stdlib", splits, meta)


if __name__ == "__main__":
    run_program(main, __doc__)
