"""Read documents: text files (jsonl, jsonl.xz, parquet and txt) and data sets of the hub.

Whatever a file contains, a document is either text that can be used or a reason why it is skipped.
Only a file that cannot be read at all is an error.
"""

import glob
import lzma
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import ConfigError, DataError, failure_line
from common.inputs import check_regular
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

    What is not text becomes U+FFFD: bytes that are not UTF-8, and half of a surrogate pair, which
    JSON can spell.
    """
    if isinstance(text, str):
        raw, code = text.encode("utf-16", "surrogatepass"), "utf-16"
    elif isinstance(text, bytes):
        raw, code = text, "utf-8"
    else:
        return Document("", NO_TEXT)
    problem = ""
    try:
        text = raw.decode(code)
    except UnicodeDecodeError:
        text = raw.decode(code, "replace")
        problem = REPLACED
    return Document(text, problem) if text.strip() else Document("", EMPTY)


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


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, perhaps compressed (.xz). Raises DataError."""
    check_regular(path)
    try:
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as lines:
            yield from lines
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise DataError(f"{path}: cannot be read ({error}): fetch it again") from None


def read_jsonl(path: Path, text_of: TextOf = plain_text) -> Iterator[Document]:
    """Yield the documents of a file of JSON lines, perhaps compressed. Raises DataError."""
    for line in read_lines(path):
        line = line.removeprefix(BYTE_ORDER_MARK)
        if not line.isspace():
            yield parse_line(line, text_of)


def read_parquet(path: Path, text_of: TextOf = plain_text) -> Iterator[Document]:
    """Yield the documents of a parquet file: its column "text".

    If there is no such column, `text_of` turns a row into text. Raises DataError.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            has_text = "text" in names
            if not has_text and text_of is plain_text:
                raise DataError(f"{path}: no column 'text', only {', '.join(names)}")
            columns = ["text"] if has_text else None  # None: all
            for batch in file.iter_batches(256, columns=columns):
                if has_text:
                    # As binary, because pyarrow would stop at the first invalid UTF-8.
                    texts = batch.column(0).cast(pyarrow.large_binary()).to_pylist()
                else:
                    texts = map(text_of, batch.to_pylist())
                yield from map(checked, texts)
    except (pyarrow.ArrowException, OSError) as error:  # OSError for damaged pages
        reason = str(error).partition("\n")[0]
        raise DataError(
            f"{path}: not a parquet file with a text column, or damaged ({reason})"
        ) from None


@contextmanager
def asking_hub(name: str) -> Iterator[None]:
    """Turn what a block raises that asks the Hugging Face hub for data into a DataError."""
    try:
        yield
    except (DataError, ImportError):
        raise
    except Exception as error:  # its HTTP libraries raise many kinds
        raise DataError(
            f"dataset={name}: reading from the hub failed ({failure_line(error)}): check name and "
            "network, and run the same command again, or take files"
        ) from None


def newest_commit(dataset: str) -> str:
    """Return the commit that a data set of the hub has now. Raises DataError."""
    with asking_hub(dataset):
        from huggingface_hub import HfApi

        return HfApi().dataset_info(dataset).sha


def read_hub(
    dataset: str, text_of: TextOf = plain_text, skip: int = 0, **options: Any
) -> Iterator[Document]:
    """Stream the rows of a data set of the hub, without the first `skip`. Raises DataError.

    Args:
        options: of datasets.load_dataset.
    """
    with asking_hub(f"{dataset}, commit {options.get('revision', 'newest')}"):
        from datasets import load_dataset

        rows = load_dataset(dataset, streaming=True, **options)
        if text_of is plain_text:
            rows = rows.select_columns(["text"])
        for row in rows.skip(skip):
            yield checked(text_of(row))


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
    """Return the files that a comma-separated list of names or patterns (a-*.parquet) names.

    Raises UserError for one that cannot be an input.
    """
    names = filter(None, text.split(","))
    paths = []
    for name in names:  # a file's own name may hold [ or *
        found = [] if Path(name).exists() else sorted(glob.glob(name))
        paths += map(Path, found or [name])
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
