"""Tiny Shakespeare, one token per character: about 1.0 M training tokens, 65 distinct characters.

    python data/shakespeare_char/prepare.py

Downloads the 1.1 MB text, unless it is beside this file as input.txt. The first 90 % is training
data, the rest validation.
"""

import sys
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.errors import ConfigError, DataError, run_program
from common.lock import FolderLock
from common.output import write_bytes_atomically
from data.prepare import PrepareConfig, prepare, remove_shards

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"


def main(argv: list[str]) -> None:
    """Write the shards and meta.json next to this file."""
    if argv:
        raise ConfigError(f"{argv[0]}: this script takes no settings")
    text = Path(__file__).resolve().with_name("input.txt")
    with FolderLock(text.parent):
        # Anew each time: it takes a moment.
        remove_shards(text.parent, "shakespeare_char")
        if not text.exists():
            try:
                with urllib.request.urlopen(URL, timeout=60) as response:
                    write_bytes_atomically(text, response.read())
            except OSError as error:
                raise DataError(f"{URL}: {error}: fetch it by hand, as {text}") from None
        config = PrepareConfig(out_dir=str(text.parent), tokenizer="chars")
        prepare(config, str(text), "shakespeare_char")


if __name__ == "__main__":
    run_program(main, __doc__)
