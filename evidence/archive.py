"""Keep run folders in one compressed file, as a study does in results/ and sweep.sh with KEEP.

python -m evidence.archive runs.tar.xz
    print the names of its runs, one a line
python -m evidence.archive runs.tar.xz out/small/rms-8
    add a run (config, log, HellaSwag items), or replace the one of this name
python -m evidence.archive runs.tar.xz out/small/rms-8 --diff
    with the changes of its code that no commit has (uncommitted.diff), if there are any
"""

import contextlib
import fcntl
import io
import lzma
import os
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from common.code_digest import UNCOMMITTED
from common.errors import ConfigError, UserError, run_program
from common.inputs import read_regular
from common.output import write_bytes_atomically, writing

SUFFIX = ".tar.xz"
FILES = ("config.json", "log.jsonl", "hellaswag.jsonl")  # the files of a run that are kept
MOST = 1 << 30  # bytes that an archive may unpack to, and that a file of a run may have
END = bytes(2 * tarfile.BLOCKSIZE)  # how a tar archive ends

Content = dict[str, bytes]  # "run/file" -> its bytes


def read(archive: Path) -> Content:
    """Read an archive into memory; empty if there is no such file.

    Raises UserError if it is damaged, or unpacks to more than MOST bytes.
    """
    if not archive.exists():
        return {}
    try:
        return members_of(unpack(read_file(archive)))
    # What tarfile raises for headers that somebody has made up
    except (tarfile.TarError, lzma.LZMAError, ValueError, OverflowError, RecursionError) as error:
        raise UserError(
            f"{archive}: torn, or no archive of runs ({error}): fetch it again, or pack it again"
        ) from None


def unpack(packed: bytes) -> bytes:
    """Unpack all streams of an xz file: parallel packers write several, and so does `cat`.

    Raises LZMAError if one is torn or damaged, or for more than MOST bytes in all.
    """
    parts: list[bytes] = []
    left = MOST
    while True:
        unpacker = lzma.LZMADecompressor()
        part = unpacker.decompress(packed, left)
        if not unpacker.eof:
            raise lzma.LZMAError(f"cut off, or more than {MOST:,} bytes")
        parts.append(part)
        left -= len(part)
        packed = unpacker.unused_data.lstrip(b"\0")  # zeros may stand between streams
        if not packed:
            return b"".join(parts)


def members_of(unpacked: bytes) -> Content:
    """Return the files of one tar archive, or of several that follow one another.

    Raises TarError, or another of those that `read` names, for what is no whole archive of regular
    files: what is left out here would be lost at the next `add`.
    """
    content: Content = {}
    while True:
        with tarfile.open(fileobj=io.BytesIO(unpacked), mode="r:") as file:
            for member in file:
                if member.isdir():
                    continue
                name = name_of(member)
                part = part_of(member, unpacked)
                if content.setdefault(name, part) != part:
                    raise tarfile.TarError(f"{name} is in it twice, with different content")
            rest = unpacked[file.offset :]
        # tarfile stops without a word at a damaged header, and at the end of a file that was cut.
        if not rest.startswith(END):
            raise tarfile.TarError("cut off, or a damaged header")
        unpacked = rest.lstrip(b"\0")
        if not unpacked:
            return content


def part_of(member: tarfile.TarInfo, unpacked: bytes) -> bytes:
    """Return the bytes of a member. Raises TarError if it does not have those that it announces."""
    # A sparse file of some bytes may announce terabytes of zeros.
    if not member.isreg() or member.issparse():
        raise tarfile.TarError(
            f"{member.name} is a link, a sparse file or a device: pack files (tar --dereference "
            "--hard-dereference)"
        )
    part = unpacked[member.offset_data : member.offset_data + max(member.size, 0)]
    if len(part) != member.size:
        raise tarfile.TarError(f"{member.name} is cut off")
    return part


def name_of(member: tarfile.TarInfo) -> str:
    """Return a member's name, run/file. `tar` may write /run/file and ./run/file as well."""
    parts = [part for part in member.name.split("/") if part not in ("", ".")]
    if len(parts) < 2 or ".." in parts:
        raise tarfile.TarError(f"{member.name} is not in the folder of a run")
    return "/".join(parts)


def read_file(path: Path) -> bytes:
    """Read a file of a run. Raises UserError for what never ends: a device, or one beyond MOST."""
    try:
        return read_regular(path, MOST)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}): name a run folder") from None


def files_of(run: Path) -> Content:
    """Read the files of a run folder; of a log file alone, that."""
    if not run.is_dir():
        return {"log.jsonl": read_file(run)}
    # Without a log, the error names it.
    found = [name for name in FILES if name == "log.jsonl" or (run / name).exists()]
    return {name: read_file(run / name) for name in found}


def by_run(content: Content) -> dict[str, Content]:
    """Sort an archive's content: name of a run -> its files."""
    runs: dict[str, Content] = {}
    for name, part in content.items():
        run, _, file = name.partition("/")
        runs.setdefault(run, {})[file] = part
    return runs


def write(archive: Path, content: Content) -> None:
    """Write an archive atomically; the same content gives the same bytes. Raises OSError."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz", preset=9, format=tarfile.PAX_FORMAT) as file:
        for name in sorted(content):
            member = tarfile.TarInfo(name)
            member.size = len(content[name])
            file.addfile(member, io.BytesIO(content[name]))
    write_bytes_atomically(archive, packed.getvalue())


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from changing an archive in this folder, which is made if need be.

    Two sweeps may keep their runs in one archive. The lock is on the folder, because the archive
    itself is replaced by each write. Raises UserError if it cannot be written.
    """
    with writing(folder):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def add(archive: Path, *runs: Path, diff: bool = False) -> None:
    """Put run folders into the archive; each replaces the run of the same name.

    With `diff` the changes of their code that no commit has are kept: somebody may not want to show
    them.

    Raises UserError, and then leaves the archive unchanged.
    """
    added: Content = {}
    names: set[str] = set()
    for run in runs:
        name = Path(os.path.abspath(run)).name  # "." has a name, too
        if name in names:
            raise UserError(f"{run}: two runs are named {name}: rename one, or name one alone")
        names.add(name)
        added |= {f"{name}/{file}": part for file, part in files_of(run).items()}
        if diff and (run / UNCOMMITTED).exists():
            added[f"{name}/{UNCOMMITTED}"] = read_file(run / UNCOMMITTED)
    with locked(archive.parent):
        content = read(archive)
        others = {name: part for name, part in content.items() if name.split("/")[0] not in names}
        write(archive, others | added)


def main(argv: list[str]) -> None:
    """List the runs of an archive, or add some."""
    if not argv or not argv[0].endswith(SUFFIX):
        raise ConfigError(f"name an archive first, which ends in {SUFFIX} (--help says more)")
    archive, *runs = [Path(word) for word in argv if word != "--diff"]
    if runs:
        add(archive, *runs, diff="--diff" in argv)
    else:
        sys.stdout.writelines(f"{name}\n" for name in sorted(by_run(read(archive))))


if __name__ == "__main__":
    run_program(main, __doc__)
