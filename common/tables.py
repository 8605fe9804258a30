"""Tables as Markdown."""

from collections.abc import Iterable
from typing import Any


def markdown(header: Iterable[Any], rows: Iterable[Iterable[Any]]) -> str:
    """The lines of a table, without a newline at the end."""
    header = list(header)
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in (header, ["---"] * len(header), *rows))
