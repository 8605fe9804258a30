"""Tiny Shakespeare, one token per character: about 1.0 M training tokens, 65 distinct characters.

    python data/shakespeare_char/prepare.py [--local=FILE]

Downloads the 1.1 MB text once, or reads it from FILE. The first 90 % is training data, the rest
validation. The text is one document, so no end-of-text token is needed.
"""

import sys
import urllib.error
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import common.interrupt  # noqa: F401

import numpy as np

from common.errors import ConfigError, DataError, run_program
from common.lock import FolderLock
from data.shards import write_meta, write_shard
from data.tokenizers import CharTokenizer

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"


def read_text(argv: list[str]) -> str:
    """Read the text from --local=FILE (or --local FILE), else from the network.

    Raises ConfigError for other arguments, DataError if the text cannot be read.
    """
    if not argv:
        source = URL
    elif len(argv) == 1 and argv[0].startswith("--local="):
        source = argv[0].removeprefix("--local=")
    elif len(argv) == 2 and argv[0] == "--local":
        source = argv[1]
    else:
        raise ConfigError(f"{' '.join(argv)}: usage: prepare.py [--local=FILE]")
    try:
        if not argv:
            with urllib.request.urlopen(URL, timeout=60) as response:
                raw = response.read()
        else:
            raw = Path(source).read_bytes()
        return raw.decode("utf-8")
    except (OSError, urllib.error.URLError) as error:
        raise DataError(f"{source}: {error}: fetch it by hand and pass --local=FILE") from None
    except UnicodeDecodeError:
        raise DataError(f"{source}: not UTF-8 text") from None


def main(argv: list[str]) -> None:
    """Write the shards and meta.json next to this file."""
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return
    folder = Path(__file__).resolve().parent
    text = read_text(argv)
    tokenizer = CharTokenizer("".join(sorted(set(text))))
    if len(text) < 100 or tokenizer.n_vocab > 1000:
        raise DataError(
            f"{len(text)} characters, {tokenizer.n_vocab} distinct: this is not the expected text"
        )
    tokens = np.array(tokenizer.encode_ordinary(text), dtype=np.uint16)
    boundary = int(0.9 * len(tokens))
    meta = {"tokenizer": "chars", "vocab_size": tokenizer.n_vocab, "chars": tokenizer.chars}
    with FolderLock(folder):
        for split, part in (("train", tokens[:boundary]), ("val", tokens[boundary:])):
            write_shard(folder / f"shakespeare_char_{split}_000000.bin", part)
            print(f"{split}: {len(part):,} tokens")
        write_meta(folder, meta)


if __name__ == "__main__":
    run_program(main)
