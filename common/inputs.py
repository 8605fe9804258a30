"""Check the files that people name, before they are read."""

from pathlib import Path

from .errors import UserError


def check_regular(path: Path) -> None:
    """Raise UserError if `path` is a device, a pipe or a socket: to read it may never end.

    A folder, or a file that is not there, is left to whoever opens it.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserError(f"{path}: this is a device, a pipe or a socket: name a file")


def read_regular(path: Path, most: int) -> bytes:
    """Read a regular file of at most `most` bytes: one from others may never end.

    Raises:
        UserError: it is a device, a pipe, a socket, or larger.
        OSError: as `open` does.
    """
    check_regular(path)
    with open(path, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise UserError(f"{path}: larger than {most >> 20:,} MiB: not what its name says")
    return content
