"""Read documents from text files: jsonl, jsonl.xz, parquet and txt.

Whatever a file contains, a document is either text that can be used or a reason why it is skipped.
Only a file that cannot be read at all is an error.
"""

import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import ConfigError, DataError
from common.output import parse_json

FORMATS = (".jsonl", ".jsonl.xz", ".parquet", ".txt")
# What can be wrong with a document; one with REPLACED is used all the same.
EMPTY = "empty"
BROKEN = "broken JSON"
NO_TEXT = 'no "text"'
REPLACED = "invalid UTF-8, replaced"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some editors begin a UTF-8 file with it


class Document(NamedTuple):
    """One record of the input."""

    text: str  # "" for one that is skipped
    problem: str  # why it is skipped, or "" or REPLACED for one that is used


def checked(text: Any) -> Document:
    """Return the document for bytes or str as found in a file.

    Bytes that are not UTF-8 become U+FFFD.
    """
    if not isinstance(text, str | bytes):
        return Document("", NO_TEXT)
    problem = ""
    try:
        if isinstance(text, bytes):
            text = text.decode()
        else:
            # JSON can spell half of a surrogate pair, "\\ud800", which is not text either.
            text.encode()
    except UnicodeDecodeError:
        text = text.decode(errors="replace")
        problem = REPLACED
    except UnicodeEncodeError:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        problem = REPLACED
    if not text or text.isspace():
        return Document("", EMPTY)
    return Document(text, problem)


TextOf = Callable[[dict], Any]  # from a row to its text


def plain_text(row: dict) -> Any:
    """Return what a row has as "text"; None if it has none."""
    return row.get("text")


def parse_line(line: bytes, text_of: TextOf = plain_text) -> Document:
    """Return the document of one JSON line."""
    whole = checked(line)
    try:
        row = parse_json(whole.text)
    except (ValueError, RecursionError):
        return Document("", BROKEN)
    document = checked(text_of(row) if isinstance(row, dict) else None)
    return document if document.problem else Document(document.text, whole.problem)


def read_jsonl(path: Path, text_of: TextOf = plain_text) -> Iterator[Document]:
    """Yield the documents of a file of JSON lines, perhaps compressed. Raises DataError."""
    with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as lines:
        try:
            for line in lines:
                line = line.removeprefix(BYTE_ORDER_MARK)
                if not line.isspace():
                    yield parse_line(line, text_of)
        except (EOFError, lzma.LZMAError) as error:
            raise DataError(
                f"{path}: truncated or damaged .xz file ({error}): fetch it again"
            ) from None


def read_parquet(path: Path, text_of: TextOf = plain_text) -> Iterator[Document]:
    """Yield the documents of a parquet file: its column "text".

    If there is no such column, `text_of` turns a row into text. Raises DataError.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{path}: parquet files need pyarrow: pip install pyarrow") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if "text" not in file.schema_arrow.names:
                if text_of is plain_text:
                    raise DataError(
                        f"{path}: no column 'text', only {', '.join(file.schema_arrow.names)}"
                    )
                for batch in file.iter_batches(batch_size=256):
                    yield from (checked(text_of(row)) for row in batch.to_pylist())
                return
            for batch in file.iter_batches(columns=["text"], batch_size=256):
                # As binary, because pyarrow would stop at the first invalid UTF-8.
                texts = batch.column(0).cast(pyarrow.large_binary())
                yield from map(checked, texts.to_pylist())
    except (pyarrow.ArrowException, OSError) as error:  # OSError for damaged pages
        reason = str(error).partition("\n")[0]
        raise DataError(
            f"{path}: not a parquet file with a text column, or damaged ({reason})"
        ) from None


def read_files(paths: list[Path], text_of: TextOf = plain_text) -> Iterator[Document]:
    """Yield the documents of all files, in order.

    Args:
        text_of: turns a row into text, for JSON lines and for parquet without a column "text".
    """
    for path in paths:
        if path.suffix == ".parquet":
            yield from read_parquet(path, text_of)
        elif path.suffix == ".txt":
            yield checked(path.read_bytes().removeprefix(BYTE_ORDER_MARK))
        else:
            yield from read_jsonl(path, text_of)


def input_files(text: str) -> list[Path]:
    """Return the files that a comma-separated list names.

    Raises UserError for one that cannot be an input.
    """
    paths = [Path(name) for name in text.split(",") if name]
    for path in paths:
        if not path.name.endswith(FORMATS):
            raise ConfigError(
                f"{path}: the name of an input file ends in one of {', '.join(FORMATS)}"
            )
        if not path.is_file():
            raise DataError(
                f"no file {path}: check the path (in a list of several, no path may hold a comma)"
            )
    return paths
