"""Token shards on disk: a 1 KiB header, then uint16 tokens, little-endian.

It is the format of llm.c's .bin files.

    header: 256 int32 = [20240520 (magic), 1 (version), number of tokens, 0, ...]
    files:  NAME_{train,val}_000000.bin, and meta.json next to them:
            {"tokenizer": ..., "vocab_size": ...}

nanoGPT's headerless `train.bin` and `val.bin` are read too, and the `meta.pkl` of its character
data. The end-of-text token goes before each document.
"""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from common.errors import DataError
from common.inputs import check_regular
from common.nanogpt import read_pickled_meta
from common.output import parse_json, write_bytes_atomically

MAGIC = 20240520
VERSION = 1
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
MOST_TOKENS = 65536  # ids are uint16
MAPPED = 128  # shards of a split that are open at once: a process may have 256 or 1,024 descriptors
NUMBERED = re.compile(r"(?P<name>.+)_(?P<split>train|val)_(?P<number>\d{6})\.bin")


def write_shard(path: Path, tokens: np.ndarray) -> None:
    """Write 1-D integer `tokens`, each in [0, 65535], as a shard, atomically. Raises DataError."""
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) <= 65535:
        raise DataError(f"{path}: token ids must lie in 0..65535 to be stored as uint16")
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    write_bytes_atomically(path, header.tobytes(), tokens.astype("<u2").tobytes())


def open_shard(path: Path) -> np.ndarray:
    """Map the tokens of one shard into memory, uint16 (n,).

    Raises:
        DataError: it is damaged.
        UserError: it is a pipe or a device.
    """
    check_regular(path)
    size = path.stat().st_size
    header = np.fromfile(path, dtype="<i4", count=min(3, size // 4)).tolist()
    if header[:2] == [MAGIC, VERSION] and len(header) == 3:
        offset, count = HEADER_BYTES, header[2]
    elif path.name in ("train.bin", "val.bin") and header[:1] != [MAGIC]:
        # nanoGPT's form has no header; only the name tells.
        offset, count = 0, size // 2
    else:
        raise DataError(
            f"{path}: begins with {header}, a shard with {MAGIC}, {VERSION} and the number of its "
            "tokens: is it another kind of file?"
        )
    if count <= 0 or size != offset + 2 * count:
        raise DataError(
            f"{path}: empty, truncated or overlong: {size} bytes, {offset + 2 * count} for "
            f"{count} tokens: prepare or copy it again"
        )
    tokens = np.memmap(path, dtype="<u2", mode="r", offset=offset, shape=(count,))
    # Of whole numbers of 4 or 8 bytes the upper halves are 0, and a loss would look wonderful.
    # A few tokens say nothing: the only one of a file has none beside it.
    if not offset and count > 16 and not tokens[1 : 1 << 20 : 2].any():
        raise DataError(f"{path}: every second token is 0: is it int32 or int64? Write uint16")
    return tokens


class Shards(Sequence[np.ndarray]):
    """The tokens of each shard of a split, uint16 (n,), mapped into memory as they are needed.

    A map keeps a descriptor, so the latest MAPPED of them stay. All are opened once at the start.

    Raises:
        DataError: a shard is damaged, or is another file than it was at the start.
    """

    def __init__(self, paths: list[Path]):
        self.paths = paths
        self.lengths: list[int] = []
        self.seen = [_state(path) for path in paths]
        self.opened = lru_cache(MAPPED)(self._open)
        for number in range(len(paths)):
            self.lengths.append(len(self.opened(number)))

    def _open(self, number: int) -> np.ndarray:
        path = self.paths[number]
        tokens = open_shard(path)
        if _state(path) != self.seen[number]:
            raise DataError(f"{path} has changed since this program began: start it again")
        return tokens

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> np.ndarray:
        if number >= len(self.paths):
            raise IndexError(number)  # what ends a loop over a sequence
        return self.opened(number)


def _state(path: Path) -> tuple[int, int]:
    """Return what tells whether a file was written again: its size and the time."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def find_shards(data_dir: str | Path, split: str) -> list[Path]:
    """List the shard files of `split` ("train" or "val") in `data_dir`, in order.

    Raises DataError if there are none, if one is missing, or if they are of several data sets.
    """
    folder = Path(data_dir)
    names = {path: NUMBERED.fullmatch(path.name) for path in sorted(folder.glob("*.bin"))}
    shards = [path for path, match in names.items() if match and match["split"] == split]
    if not shards and (folder / f"{split}.bin").is_file():
        return [folder / f"{split}.bin"]
    if not shards:
        script = folder / "prepare.py"
        remedy = f"run `python {script}`" if script.is_file() else "prepare the data"
        raise DataError(
            f"no {split} shards in {folder}: {remedy}, or set data_dir to the folder that has them"
        )
    if len({match["name"] for match in names.values() if match}) > 1:
        raise DataError(f"{folder} holds shards of several data sets: keep one data set per folder")
    numbers = [int(names[path]["number"]) for path in shards]
    for before, after in pairwise(numbers):
        if after != before + 1:
            raise DataError(
                f"{folder}: {split} shard {before + 1:06d} is missing: prepare or copy it again"
            )
    return shards


def write_meta(folder: Path, meta: dict) -> None:
    """Write meta.json: {"tokenizer": "gpt2" | "bytes" | "chars", "vocab_size": int, ...}."""
    write_bytes_atomically(folder / "meta.json", json.dumps(meta, ensure_ascii=False).encode())


def read_meta(data_dir: str | Path) -> dict:
    """Read meta.json, else nanoGPT's meta.pkl; {} for a data folder without. Raises DataError."""
    path = Path(data_dir) / "meta.json"
    if not path.is_file():
        pickled = path.with_suffix(".pkl")
        return read_pickled_meta(pickled) if pickled.is_file() else {}
    try:
        meta = parse_json(path.read_text(encoding="utf-8"))
        size, name = meta["vocab_size"], meta["tokenizer"]
        if type(size) is not int or not 0 < size <= MOST_TOKENS or not isinstance(name, str):
            raise ValueError
    except (ValueError, TypeError, KeyError, RecursionError):
        raise DataError(
            f"{path}: needs tokenizer and vocab_size as JSON: prepare the data again"
        ) from None
    return meta
