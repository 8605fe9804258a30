"""Write what programs leave: files that are whole at any moment, JSON lines, Markdown tables."""

import contextlib
import dataclasses
import errno
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from .errors import ConfigError, UserError, cannot_write, printable
from .inputs import check_regular

BEGINNING = 1 << 16  # bytes of a file that tell its kind
RUN_CONFIG = rb'(?s)\s*\{.*"norm_type"'  # how the config.json of a run folder begins


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Make the folder that the key `out` names, for a block that writes into it.

    What the system refuses to write becomes a UserError.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(cannot_write(f"out={folder}", error)) from None


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to write into. It takes the name `folder`, of none or of an empty one, when
    the block ends; if the block raises, it is removed.

    After a kill, what was written is left under a hidden name, until this is called again.

    Raises:
        OSError: the folder cannot be written, or another process writes it just now (EBUSY).
    """
    folder = Path(os.path.realpath(folder))  # Path.resolve raises RuntimeError at a loop of links
    partial = folder.with_name(f".{folder.name}.unfinished")
    partial.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        _lock(descriptor, partial)
        for left in partial.iterdir():  # of a program that was killed
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        try:
            yield partial
            os.replace(partial, folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    """Lock an open folder for this process. Raises OSError (EBUSY) if another one has the lock."""
    try:
        import fcntl  # not on Windows

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(folder)) from None
    except (ImportError, OSError):
        pass  # a system or a file system without locks


def check_replaceable(path: Path, begins: bytes = b"") -> None:
    """Check that a file may take the name `path`.

    A rename puts a regular file into the place of whatever has the name; of /dev/null too.

    Args:
        begins: pattern of how the files begin that the program writes. Only such a file is
            replaced, or appended to, or an empty one. So no other file of the user is lost, be it
            an input of the program or not.

    Raises:
        UserError: something has the name that is no regular file, or a file that begins otherwise.
    """
    if not os.path.exists(path):
        return
    if not os.path.isfile(path):
        kind = "a folder" if os.path.isdir(path) else "a device, a pipe or a socket"
        raise UserError(f"{path}: this is {kind}, and a file would take its place: name a file")
    if begins:
        try:
            with open(path, "rb") as file:
                head = file.read(BEGINNING)
        except OSError as error:
            raise UserError(cannot_write(path, error)) from None
        if head and not re.match(begins, head):
            raise UserError(
                f"{path}: a file of another kind is there, and would be lost: name another file"
            )


def check_apart(source: str, folder: Path) -> None:
    """Raise ConfigError if a run in `folder` would write over the model that it starts from.

    Args:
        source: the model's folder, or a file in it.
    """
    read = os.path.realpath(source)
    if os.path.realpath(folder) in (read, os.path.dirname(read)):
        raise ConfigError(
            f"out_dir={folder}: the run starts from a model there, and would write over it: "
            "choose another out_dir"
        )


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file to write, which takes the name `path` when the block ends.

    After a crash at any moment `path` holds the old content or the new, never a part: the new one
    is written next to it, forced to the disk, and renamed. If the block raises, it is removed.

    Raises:
        UserError: of check_replaceable.
        OSError: the file cannot be written; it names `path`.
    """
    check_replaceable(path)
    # In the same folder, since a rename is atomic within one file system only.
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except Exception as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)
            error.filename2 = None
        raise


def write_bytes_atomically(path: Path, *chunks: bytes) -> None:
    """Write chunks to a file, one after the other, as `replacing`, which raises."""
    with replacing(path) as file:
        for chunk in chunks:
            file.write(chunk)


def append_json(path: Path, record: dict[str, Any]) -> None:
    """Append one line to the file that the key `out` names, atomically. Raises UserError."""
    with writing(path.parent):
        before = path.read_bytes() if path.exists() else b""
        write_bytes_atomically(path, before, json.dumps(record).encode() + b"\n")


def markdown(header: Iterable[Any], rows: Iterable[Iterable[Any]]) -> str:
    """Return a table's lines, without a newline at the end."""
    header = list(header)
    table = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in table)


def _cell(content: Any) -> str:
    """Return what a cell shows: a | in it does not end it."""
    return re.sub(r"(?<!\\)\|", r"\\|", str(content))


def prose(text: str) -> str:
    """Return text of others, as a name that they gave, for a Markdown page: nothing in it acts."""
    return re.sub(r"([\\`*<>\[\]|&])", r"\\\1", printable(text))


def code(text: str) -> str:
    """Return text of others as code in a Markdown page."""
    text = printable(text)
    if "`" not in text:
        return f"`{text}`"
    fence = "`" * (1 + max(map(len, re.findall("`+", text))))
    return f"{fence} {text} {fence}"


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError, for text that is nested too deeply as well."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json(path: Path) -> list[dict[str, Any]]:
    """Read the records of a JSONL file; none if there is no file.

    Lines that were cut off by a kill are left out. Raises UserError for a pipe or a device.
    """
    if not path.exists():
        return []
    check_regular(path)
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            found.append(parse_json(line))
    return found


def write_results(
    folder: Path, name: str, records: list[dict[str, Any]], page: str, text: str
) -> None:
    """Write NAME.jsonl, one line a record, and `text` as the file `page` in the same folder.

    Each file is written atomically. Raises UserError.
    """
    lines = "".join(json.dumps(record) + "\n" for record in records)
    with writing(folder):
        write_bytes_atomically(folder / f"{name}.jsonl", lines.encode())
        # A path in it may not be UTF-8.
        content = f"{text.rstrip()}\n".encode(errors="backslashreplace")
        # A page of another title is somebody's own, as a project's README.md.
        check_replaceable(folder / page, re.escape(content.partition(b"\n")[0]))
        write_bytes_atomically(folder / page, content)


def made_with(config: Any) -> str:
    """Return the keys of a config that are not at their defaults, as on a command line."""
    arguments = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != field.default:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else value
            arguments.append(f"--{field.name}={text}")
    return " ".join(arguments)


def card(record: dict[str, Any]) -> str:
    """Say where a record was measured: device, versions, commit; for a CPU its threads and load."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    parts = [record["device"], versions, f"commit {record['git']}"]
    if record["device"].startswith("cpu") and "threads" in record:
        parts.append(
            f"{record['threads']} CPU threads, load average {record['load_average']} at the start"
        )
    return "; ".join(parts)


def middle(ratio: dict[str, float]) -> float:
    """Return the centre of a ratio with an interval: its median, else its mean."""
    return ratio["median"] if "median" in ratio else ratio["mean"]


def span(ratio: dict[str, float], form: str = "{:.4f}") -> str:
    """Format a ratio with its interval: median or mean (low .. high)."""
    low = form.format(ratio["low"])
    high = form.format(ratio["high"])
    return f"{form.format(middle(ratio))} ({low} .. {high})"
