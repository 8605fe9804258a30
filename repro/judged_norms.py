"""Judged norms -> the table in docs/norms.md, from the archives of each study.

    python -m repro.judged_norms

A study is a folder results/judged/NAME with judge.json, rates.tar.xz and verdict.tar.xz. That of a
norm file has the file's text in norms_of_others/NAME.py.
"""

import hashlib
from pathlib import Path

from common.errors import UserError, run_program
from common.output import markdown, write_bytes_atomically
from study.declaration import Record, read_record
from study.page import row_cells
from study.verdict import read_outcome

ROOT = Path(__file__).resolve().parents[1]
STUDIES = ROOT / "results" / "judged"
FILES = ROOT / "norms_of_others"
PAGE = ROOT / "docs" / "norms.md"
MARKERS = ("<!-- judged: python -m repro.judged_norms -->", "<!-- end of judged norms -->")
HEADER = (
    "arm",
    "against",
    "shape, tokens",
    "difference, nats (interval)",
    "in tokens",
    "seeds",
    "verdict",
    "study",
)


def check_file(path: Path, record: Record) -> None:
    """Raise UserError unless `path` is the norm file of a study, as it was trained."""
    declared = record.declaration.norm_sha256
    if not declared:
        return
    found = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "no such file"
    if found != declared:
        raise UserError(f"{path}: {found}, and the study declared the SHA-256 {declared}")


def table(studies: Path, files: Path) -> str:
    """Return the table: a row for each arm of each study. Raises UserError.

    Args:
        studies: a folder for each.
        files: folder of the norm files.
    """
    rows = []
    for folder in sorted(path for path in studies.glob("*") if path.is_dir()):
        record = read_record(folder)
        if record is None:
            raise UserError(f"{folder}: no judge.json in it: it declares the study")
        check_file(files / f"{folder.name}.py", record)
        outcome = read_outcome(folder, record)
        link = f"[{folder.name}](../results/judged/{folder.name})"
        rows += [[*row_cells(outcome, judged), link] for judged in record.arms[1:]]
    return markdown(HEADER, rows)


def page_with(text: str, found: str) -> str:
    """Return a page's text with the table between its markers."""
    begin, end = MARKERS
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n\n{found}\n\n{end}{after}"


def main(argv: list[str]) -> None:
    """Write the table."""
    text = page_with(PAGE.read_text(encoding="utf-8"), table(STUDIES, FILES))
    write_bytes_atomically(PAGE, text.encode())


if __name__ == "__main__":
    run_program(main, __doc__)
