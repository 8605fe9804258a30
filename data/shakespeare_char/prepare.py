"""Tiny Shakespeare, one token per character: about 1.0 M training tokens, 65 distinct characters.

    python data/shakespeare_char/prepare.py [--local=FILE]

Downloads the 1.1 MB text once, or reads it from FILE. The first 90 % is training data, the rest
validation. The text is one document, so no end-of-text token is needed.
"""

import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from common.errors import DataError, run_program
from configurator import key, parse_args
from data.shards import write_data_set
from data.tokenizers import CharTokenizer

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
MOST_CHARACTERS = 1000  # distinct ones


@dataclass(frozen=True)
class ShakespeareConfig:
    """Keys of data/shakespeare_char/prepare.py."""

    local: str = key("", "the text ('': downloaded)")


def read_text(local: str) -> str:
    """Read the text from a file, or from the network if that is "". Raises DataError."""
    try:
        if local:
            return Path(local).read_text(encoding="utf-8")
        with urllib.request.urlopen(URL, timeout=60) as response:
            return response.read().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{local or URL}: {error}: fetch the text by hand and pass --local=FILE"
        ) from None


def main(argv: list[str]) -> None:
    """Write the shards and meta.json next to this file."""
    if argv[:1] == ["--local"]:
        argv = ["=".join(argv)]
    config, _ = parse_args(ShakespeareConfig, argv, __doc__)
    text = read_text(config.local)
    tokenizer = CharTokenizer("".join(sorted(set(text))))
    if len(text) < 100 or tokenizer.n_vocab > MOST_CHARACTERS:
        raise DataError(
            f"{len(text)} characters, {tokenizer.n_vocab} distinct: this is not the expected text"
        )
    tokens = np.array(tokenizer.encode_ordinary(text), dtype=np.uint16)
    boundary = int(0.9 * len(tokens))
    splits = {"train": tokens[:boundary], "val": tokens[boundary:]}
    meta = {"tokenizer": "chars", "vocab_size": tokenizer.n_vocab, "chars": tokenizer.chars}
    write_data_set(Path(__file__).resolve().parent, "shakespeare_char", splits, meta)


if __name__ == "__main__":
    run_program(main)
