"""What programs write: folders, files that are whole at any moment, JSON lines, Markdown tables."""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from common.errors import UserError


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Makes the folder that the key `out` names. What the system then refuses to write becomes a UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(f"out={folder}: cannot be written ({error.strerror})") from None


def write_bytes_atomically(path: Path, *chunks: bytes) -> None:
    """Write, fsync, rename: after a crash at any moment `path` holds the old content or the new, never a part."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def append_json(path: Path, record: dict[str, Any]) -> None:
    """One line more in the file that the key `out` names. Raises UserError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab+") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            is_torn = file.read(1) not in (b"", b"\n")  # by a kill: what there is stays a line of its own
            file.write(b"\n" * is_torn + json.dumps(record).encode() + b"\n")
    except OSError as error:
        raise UserError(f"out={path}: cannot be written ({error.strerror})") from None


def markdown(header: Iterable[Any], rows: Iterable[Iterable[Any]]) -> str:
    """The lines of a table, without a newline at the end."""
    header = list(header)
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in (header, ["---"] * len(header), *rows))
