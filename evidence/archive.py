"""Run folders in one compressed file: what a study leaves in results/, and what sweep.sh keeps.

python -m evidence.archive runs.tar.xz
    the names of its runs, a line each
python -m evidence.archive runs.tar.xz out/small/rms-8
    add a run: config, log, HellaSwag items; or replace it
python -m evidence.archive runs.tar.xz --remove rms-8
    take a run out
"""

import atexit
import contextlib
import fcntl
import io
import lzma
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from common.errors import ConfigError, UserError, run_program
from common.output import write_bytes_atomically

SUFFIX = ".tar.xz"
FILES = ("config.json", "log.jsonl", "hellaswag.jsonl")  # of a run folder


def read(archive: Path) -> dict[str, bytes]:
    """name/file -> content; empty if there is no such archive. Raises UserError."""
    try:
        with tarfile.open(archive, "r:xz") as file:
            return {
                member.name: file.extractfile(member).read() for member in file if member.isfile()
            }
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(
            f"{archive}: cannot be read ({error.strerror or error}): check the path"
        ) from None
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise UserError(
            f"{archive}: torn, or no archive of runs ({error}): fetch it again"
        ) from None


def write(archive: Path, content: dict[str, bytes]) -> None:
    """Atomically; the same content gives the same bytes. Raises UserError."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz", preset=9, format=tarfile.PAX_FORMAT) as file:
        for name in sorted(content):
            member = tarfile.TarInfo(name)
            member.size = len(content[name])
            file.addfile(member, io.BytesIO(content[name]))
    try:
        write_bytes_atomically(archive, packed.getvalue())
    except OSError as error:
        raise UserError(f"{archive}: cannot be written ({error.strerror})") from None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Within it no other process changes an archive in this folder: two sweeps may keep their runs
    in one.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        number = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"{folder}: cannot be opened ({error.strerror}): check the path") from None
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


def names(content: dict[str, bytes]) -> set[str]:
    """The names of the runs in it."""
    return {name.split("/")[0] for name in content}


def without(content: dict[str, bytes], runs: set[str]) -> dict[str, bytes]:
    """What is left when the runs of these names are taken out."""
    return {name: part for name, part in content.items() if not names({name: part}) & runs}


def add(archive: Path, *runs: Path) -> None:
    """Put run folders into the archive, each in place of one of its name.

    Raises UserError; then all is as before.
    """
    added = {}
    for run in runs:
        if not (run / "log.jsonl").is_file():
            raise UserError(f"{run}: no log.jsonl there: name a run folder")
        files = (run / name for name in FILES)
        added |= {f"{run.name}/{file.name}": file.read_bytes() for file in files if file.is_file()}
    with locked(archive.parent):
        write(archive, without(read(archive), names(added)) | added)


def remove(archive: Path, runs: list[str]) -> None:
    """Take the runs of these names out. Raises UserError if one is not there; then all stay."""
    with locked(archive.parent):
        content = read(archive)
        if missing := set(runs) - names(content):
            raise UserError(
                f"{archive}: no run {missing.pop()} in it: "
                "the same command without --remove lists them"
            )
        write(archive, without(content, set(runs)))


def unpack(archive: Path) -> Path:
    """A temporary folder with the run folders of `archive`; it goes when the process ends.

    Raises UserError.
    """
    if not archive.exists():
        raise UserError(f"{archive}: no such archive: check the path")
    folder = Path(tempfile.mkdtemp(prefix="runs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, part in read(archive).items():
        target = (folder / name).resolve()
        if not target.is_relative_to(folder.resolve()):
            raise UserError(f"{archive}: {name} would be written elsewhere: no archive of ours")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(part)
    return folder


def main(argv: list[str]) -> None:
    if not argv or argv[0] in ("--help", "-h"):
        print(__doc__)
        return
    archive, *runs = Path(argv[0]), *argv[1:]
    if not archive.name.endswith(SUFFIX):
        raise ConfigError(f"{archive}: wants a name that ends in {SUFFIX}")
    if runs[:1] == ["--remove"]:
        return remove(archive, runs[1:])
    if unknown := [run for run in runs if run.startswith("-")]:
        raise ConfigError(f"{unknown[0]}: wants run folders, or --remove and names of runs")
    if runs:
        return add(archive, *map(Path, runs))
    sys.stdout.writelines(f"{name}\n" for name in sorted(names(read(archive))))


if __name__ == "__main__":
    run_program(main)
