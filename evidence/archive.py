"""Keep run folders in one compressed file, as a study does in results/ and sweep.sh with KEEP.

python -m evidence.archive runs.tar.xz
    print the names of its runs, one a line
python -m evidence.archive runs.tar.xz out/small/rms-8
    add a run (config, log, HellaSwag items), or replace the one of this name
python -m evidence.archive runs.tar.xz --remove rms-8
    take a run out
"""

import common.interrupt  # noqa: F401

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

from common.errors import ConfigError, UserError, cannot_write, run_program
from common.inputs import check_regular
from common.output import write_bytes_atomically

SUFFIX = ".tar.xz"
FILES = ("config.json", "log.jsonl", "hellaswag.jsonl")  # the files of a run that are kept

Content = dict[str, bytes]  # "run/file" -> its bytes


def read(archive: Path) -> Content:
    """Read an archive; empty if there is no such file. Raises UserError."""
    check_regular(archive)
    content: Content = {}
    try:
        with tarfile.open(archive, "r:xz") as file:
            for member in file:
                if member.isfile():
                    content[member.name] = file.extractfile(member).read()
        return content
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


def write(archive: Path, content: Content) -> None:
    """Write an archive atomically; the same content gives the same bytes. Raises UserError."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz", preset=9, format=tarfile.PAX_FORMAT) as file:
        for name in sorted(content):
            member = tarfile.TarInfo(name)
            member.size = len(content[name])
            file.addfile(member, io.BytesIO(content[name]))
    try:
        write_bytes_atomically(archive, packed.getvalue())
    except OSError as error:
        raise UserError(cannot_write(archive, error)) from None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from changing an archive in this folder.

    Two sweeps may keep their runs in one archive. The lock is on the folder, because the archive
    itself is replaced by each write.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise UserError(cannot_write(folder, error)) from None
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def names(content: Content) -> set[str]:
    """Return the names of the runs in an archive's content."""
    return {name.split("/")[0] for name in content}


def without(content: Content, runs: set[str]) -> Content:
    """Return the content without the runs of these names."""
    return {name: part for name, part in content.items() if name.split("/")[0] not in runs}


def add(archive: Path, *runs: Path) -> None:
    """Put run folders into the archive; each replaces the run of the same name.

    Raises UserError, and then leaves the archive unchanged.
    """
    added: Content = {}
    for run in runs:
        if not (run / "log.jsonl").is_file():
            raise UserError(f"{run}: no log.jsonl there: name a run folder")
        for name in FILES:
            file = run / name
            if file.is_file():
                added[f"{run.name}/{name}"] = file.read_bytes()
    with locked(archive.parent):
        others = without(read(archive), names(added))
        write(archive, others | added)


def remove(archive: Path, runs: list[str]) -> None:
    """Take the runs of these names out.

    Raises UserError if one of them is not there, and then leaves the archive unchanged.
    """
    with locked(archive.parent):
        content = read(archive)
        missing = set(runs) - names(content)
        if missing:
            raise UserError(
                f"{archive}: no run {missing.pop()} in it: "
                "the same command without --remove lists them"
            )
        write(archive, without(content, set(runs)))


def unpack(archive: Path) -> Path:
    """Unpack the runs of `archive` into a temporary folder, removed when the process ends.

    Raises UserError.
    """
    if not archive.exists():
        raise UserError(f"{archive}: no such archive: check the path")
    folder = Path(tempfile.mkdtemp(prefix="runs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, part in read(archive).items():
        target = (folder / name).resolve()
        if not target.is_relative_to(folder.resolve()):
            raise UserError(
                f"{archive}: {name} would be written outside the folder: no archive of ours"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(part)
    return folder


def main(argv: list[str]) -> None:
    """List, add or remove runs."""
    if not argv or argv[0] in ("--help", "-h"):
        print(__doc__)
        return
    archive = Path(argv[0])
    runs = argv[1:]
    if not archive.name.endswith(SUFFIX):
        raise ConfigError(f"{archive}: needs a name that ends in {SUFFIX}")
    if runs[:1] == ["--remove"]:
        remove(archive, runs[1:])
        return
    if unknown := [run for run in runs if run.startswith("-")]:
        raise ConfigError(f"{unknown[0]}: needs run folders, or --remove and names of runs")
    if runs:
        add(archive, *map(Path, runs))
        return
    sys.stdout.writelines(f"{name}\n" for name in sorted(names(read(archive))))


if __name__ == "__main__":
    run_program(main)
