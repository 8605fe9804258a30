"""Byte-level shards of the Python standard library that runs this script, without a download.

    python data/stdlib/prepare.py

About 10 MB of real text on every machine (tests and code tables left out): one document a source
file, with the end-of-text token before each. About every 40th file, chosen by a hash of its name,
is validation data.
"""

import sys
import sysconfig
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.errors import ConfigError, run_program
from common.lock import FolderLock
from data.documents import Document
from data.prepare import SPLITS, write_bytes_anew

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


def documents(root: Path, split: str) -> Iterator[Document]:
    """Yield the source files below `root` of a split, in the order of their names.

    Empty ones too: there is one end-of-text token for each file.
    """
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        name = path.relative_to(root)
        is_val = zlib.crc32(name.as_posix().encode()) % 40 == 0
        if is_val == (split == "val") and not LEFT_OUT.intersection(name.parts):
            yield Document(path.read_bytes().decode(errors="replace"), "")


def main(argv: list[str]) -> None:
    """Write the shards and meta.json next to this file."""
    if argv:
        raise ConfigError(f"{argv[0]}: this script takes no settings")
    root = Path(sysconfig.get_paths()["stdlib"])
    folder = Path(__file__).resolve().parent
    with FolderLock(folder):
        sources = {split: partial(documents, root, split) for split in SPLITS}
        write_bytes_anew(folder, "stdlib", sources)


if __name__ == "__main__":
    run_program(main, __doc__)
