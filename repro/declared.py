"""What a declared study asks of its runs, for the programs that decide about them.

A study is a script repro/NAME.sh whose head is the declaration. Its runs carry the SHA-256 of that
text, and go to archives below results/cpu/NAME.
"""

import functools
import hashlib
from collections.abc import Callable, Hashable

from common.errors import UserError
from common.output import write_bytes_atomically, writing
from evidence.runs import Run
from repro import which_norm


@functools.cache
def read(study: str, archive: str) -> list[Run]:
    """Return the runs of an archive; none if it is not there yet.

    Raises UserError if one does not carry the declaration as it stands.
    """
    runs = which_norm.read(f"{study}/{archive}")
    declaration = declared(study)
    for run in runs:
        if run.config.get("study") != declaration:
            raise UserError(f"{run.name}: study={run.config.get('study')}, not {declaration}")
    return runs


def declared(study: str) -> str:
    """Return the key `study` of its runs."""
    text = (which_norm.ROOT / "repro" / f"{study}.sh").read_bytes()
    return f"{study} {hashlib.sha256(text).hexdigest()[:16]}"


def check_processors(runs: list[Run], key: Callable[[Run], Hashable]) -> None:
    """Raise UserError if runs with the same key are of processors of two models."""
    found: dict[Hashable, Run] = {}
    for run in runs:
        first = found.setdefault(key(run), run)
        if processor(run) != processor(first):
            raise UserError(f"{first.name} and {run.name}: not on processors of one model")


def processor(run: Run) -> tuple[str, str]:
    """Return what a log says of the processor: a virtual machine's name alone does not tell."""
    return run.start["device"], run.start.get("processor", "")


def check_seeds(runs: list[Run], seeds: set[int]) -> None:
    """Raise UserError if a run has another seed."""
    for run in runs:
        if run.seed not in seeds:
            raise UserError(f"{run.name}: seed {run.seed} is not one of the declaration")


def write_page(study: str, page: Callable[[], str]) -> None:
    """Write what `page` returns as README.md of the study's results."""
    folder = which_norm.RESULTS / study
    with writing(folder):
        write_bytes_atomically(folder / "README.md", page().encode())
    print(f"wrote {folder / 'README.md'}")
