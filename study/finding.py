"""What a check of a norm found, and the largest error of a check."""

from typing import NamedTuple

from common.errors import one_line
from model import GPTConfig
from norm_files import place_of


class Finding(NamedTuple):
    """What one check found."""

    what: str
    is_ok: bool
    figure: str  # the number, with its bound; or why there is none


class Worst:
    """The largest error of one check, and where it is."""

    def __init__(self, what: str, bound: float):
        self.what = what
        self.bound = bound
        self.error = 0.0
        self.where = ""

    def add(self, error: float, where: str) -> None:
        if error > self.error or not self.where:
            self.error, self.where = error, where

    def finding(self) -> Finding:
        figure = f"largest error {self.error:.1e} ({self.where}), at most {self.bound:.1e}"
        return Finding(self.what, self.error <= self.bound, figure)


def where_it_failed(error: Exception, config: GPTConfig) -> str:
    """Say in a line what a norm raised."""
    source = config.type.source
    where = f"{place_of(error, source)}: " if source else ""
    return one_line(f"{where}{type(error).__name__}: {error}")
