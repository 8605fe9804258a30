"""A norm file: Python code with norms of the user's own, named by who types the command.

It is code that runs, so it is named on the command line (--norm_file=FILE) or in the environment
(NANONORM_NORMS=FILE), and nowhere else: a config file, a checkpoint or an archive that names one
is refused. This module only reads and hashes it; norm_files.py runs it.
"""

import hashlib
import os
from pathlib import Path
from typing import Any, NamedTuple

from .errors import ConfigError
from .inputs import read_regular

KEY = "norm_file"
PIN = "norm_sha256"
VARIABLE = "NANONORM_NORMS"
COPY = "norm_file.txt"  # in a run folder: its text, which no program runs
LARGEST = 1 << 20  # bytes; a norm is some lines
PROGRAMS = "train.py, sample.py, hellaswag.py, report.py, convert.py and judge.py"


class NormFile(NamedTuple):
    """A norm file as it was read: once, so that the bytes that are hashed are those that run."""

    path: str
    content: bytes

    @property
    def name(self) -> str:
        """The last part of its path, which a log may tell."""
        return Path(self.path).name

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


def split_norm_file(argv: list[str], default: str = "") -> tuple[list[str], NormFile | None]:
    """Take --norm_file=FILE, and with it --norm_sha256=DIGEST, out of the words of a command line.

    Args:
        default: the file if none is named.

    Returns:
        The other words, and the file; None if there is none.

    Raises:
        UserError: it cannot be read, or has another digest.
    """
    given = {}
    others = []
    for word in argv:
        name, _, value = word.partition("=")
        if word.startswith((f"--{KEY}=", f"--{PIN}=")):
            given[name.removeprefix("--")] = value
        else:
            others.append(word)
    path = given.get(KEY, default)
    if path:
        return others, read_norm_file(path, given.get(PIN, ""))
    # Without a file the digest is a key like others.
    return [word for word in argv if not word.startswith(f"--{KEY}=")], None


def read_norm_file(path: str, sha256: str = "") -> NormFile:
    """Read a norm file, which must have this digest, if one is given. Raises UserError."""
    try:
        file = NormFile(path, read_regular(Path(path), LARGEST))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"norm_file={path}: cannot be read ({why}): check the path") from None
    if sha256 not in ("", file.sha256):
        raise ConfigError(
            f"norm_file={path} has the SHA-256 {file.sha256}, and {PIN}={sha256}: give the file "
            "that it is of"
        )
    return file


def refuse(where: str) -> None:
    """Raise ConfigError for a norm file that is named where no code may be named."""
    raise ConfigError(
        f"{where}: a norm file is code that runs, so it is named on the command line "
        f"(--{KEY}=FILE) of {PROGRAMS}, and nowhere else: remove it here"
    )


def check_none_is_named(config: dict[str, Any]) -> None:
    """Raise ConfigError if a saved config names a norm file. What runs has none saved."""
    if KEY in config:
        refuse(f"{KEY}={config[KEY]!r} in a saved config")


def default_norm_file() -> str:
    """Return the norm file that the environment names, or ""."""
    return os.environ.get(VARIABLE, "")
