"""What programs write: folders, files that are whole at any moment, JSON lines, Markdown tables,
results folders.
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from common.errors import UserError


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Makes the folder that the key `out` names.

    What the system then refuses to write becomes a UserError.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(f"out={folder}: cannot be written ({error.strerror})") from None


def write_bytes_atomically(path: Path, *chunks: bytes) -> None:
    """Write, fsync, rename: after a crash at any moment `path` holds the old content or the new,
    never a part.
    """
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
            # by a kill: what there is stays a line of its own
            is_torn = file.read(1) not in (b"", b"\n")
            file.write(b"\n" * is_torn + json.dumps(record).encode() + b"\n")
    except OSError as error:
        raise UserError(f"out={path}: cannot be written ({error.strerror})") from None


def markdown(header: Iterable[Any], rows: Iterable[Iterable[Any]]) -> str:
    """The lines of a table, without a newline at the end."""
    header = list(header)
    return "\n".join(
        "| " + " | ".join(map(str, line)) + " |" for line in (header, ["---"] * len(header), *rows)
    )


def read_json(path: Path) -> list[dict[str, Any]]:
    """The records of a JSONL file; none where there is no file.

    Lines torn by a kill are left out.
    """
    found = []
    for line in (
        path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    ):
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def write_results(
    folder: Path, name: str, records: list[dict[str, Any]], page: str, text: str
) -> None:
    """NAME.jsonl, a line for each record, and `text` as the file `page` beside it; atomically.

    Raises UserError.
    """
    lines = "".join(json.dumps(record) + "\n" for record in records)
    with writing(folder):
        write_bytes_atomically(folder / f"{name}.jsonl", lines.encode())
        write_bytes_atomically(folder / page, f"{text.rstrip()}\n".encode())


def made_with(config: Any) -> str:
    """The keys of a config that are not at their defaults, as the command line takes them."""
    return " ".join(
        f"--{field.name}={_word(getattr(config, field.name))}"
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != field.default
    )


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(f"{part:g}" if isinstance(part, float) else str(part) for part in value)
    return str(value)


def card(record: dict[str, Any]) -> str:
    """Where a record was measured: device, versions, commit; of a CPU also threads and load before
    it.
    """
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    parts = [record["device"], versions, f"commit {record['git']}"]
    if record["device"].startswith("cpu") and "threads" in record:
        parts.append(
            f"{record['threads']} CPU threads, load average {record['load_average']} at the start"
        )
    return "; ".join(parts)


def middle(ratio: dict[str, float]) -> float:
    """What a ratio with its interval is: a median, or a mean."""
    return ratio["median"] if "median" in ratio else ratio["mean"]


def span(ratio: dict[str, float], form: str = "{:.4f}") -> str:
    """A ratio with its interval: its median or mean (low .. high)."""
    return (
        f"{form.format(middle(ratio))} "
        f"({form.format(ratio['low'])} .. {form.format(ratio['high'])})"
    )
