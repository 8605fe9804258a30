"""Byte-level shards of Python wheels: 54 MB of source text that anybody with pip can make again.

    python data/wheels/prepare.py

pip fetches the wheels of WHEELS, some 80 MB, into this folder and checks each SHA-256. They are
read as archives, never installed. A document is a .py file that is no test; one that stands in two
places is taken once. Training data are the wheels' files but for every 40th, chosen by a hash of
its name. Validation data are first those of data/stdlib, then the files that were held out.
"""

import hashlib
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.errors import ConfigError, DataError, run_program
from common.lock import FolderLock
from data.documents import Document
from data.prepare import SPLITS, write_bytes_anew
from data.stdlib import prepare as stdlib

# Requirement -> SHA-256 of its wheel. torch is not among them: its wheel differs from index to
# index.
WHEELS = {
    "networkx==3.6.1": "d47fbf302e7d9cbbb9e2555a0d267983d2aa476bac30e90dfbe5669bd57f3762",
    "numpy==2.4.6": "90f9849678c75fe7afa2d348ac842c168b0a4d3d61919687216dfc547976d853",
    "pandas==3.1.1": "028490c8ac2e03e18c9b08b7f3612e149b03570209bcf741d23833a7a5377ab2",
    "scikit-learn==1.9.1": "e5d7b18a5b9dca241a74695f3275fa4c895a9dadc72b3d8df5fa9d1083c9b83e",
    "scipy==1.17.1": "02ae3b274fde71c5e92ac4d54bc06c42d80e399fec704383dcd99b301df37458",
    "sympy==1.14.0": "e091cc3e99d2141a0ba2847328f5479b05d94a6635cb96148ccb3f34671bd8f5",
}
# The wheels for this system, whatever system and Python run this script
PLATFORM = [f"--platform=manylinux_2_{version}_x86_64" for version in (17, 24, 27, 28)]
PYTHON = ["--python-version=3.12", "--implementation=cp", "--abi=cp312"]
TESTS = {"test", "tests", "testing", "conftest.py"}


def fetch(folder: Path) -> list[Path]:
    """Return the wheels, in the order of WHEELS; pip fetches those that are not in the folder.

    Raises DataError if pip cannot get one, or gets another file.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as requirements:
        requirements.writelines(f"{name} --hash=sha256:{hash}\n" for name, hash in WHEELS.items())
        requirements.flush()
        options = ["--quiet", "--no-deps", "--only-binary=:all:", f"--dest={folder}"]
        command = [sys.executable, "-m", "pip", "download", *options, *PLATFORM, *PYTHON]
        if subprocess.run([*command, f"--requirement={requirements.name}"]).returncode:
            raise DataError(
                "pip did not fetch the wheels (its lines above say why): check network and index"
            )
    wheels = {hashlib.sha256(path.read_bytes()).hexdigest(): path for path in folder.glob("*.whl")}
    return [wheels[hash] for hash in WHEELS.values()]


def files_of(wheels: list[Path]) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of each source file, in the order of wheels and names.

    Without tests, and without files that were seen before or validate as part of data/stdlib.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    seen = {document.text.encode() for document in stdlib.documents(library, "val")}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in sorted(archive.namelist()):
                if not name.endswith(".py") or TESTS.intersection(name.split("/")):
                    continue
                content = archive.read(name)
                if content not in seen:
                    seen.add(content)
                    yield name, content


def documents(wheels: list[Path], split: str) -> Iterator[Document]:
    """Yield the documents of a split; for validation those of the standard library come first."""
    if split == "val":
        yield from stdlib.documents(Path(sysconfig.get_paths()["stdlib"]), "val")
    for name, content in files_of(wheels):
        is_val = zlib.crc32(name.encode()) % 40 == 0
        if is_val == (split == "val"):
            yield Document(content.decode(errors="replace"), "")


def main(argv: list[str]) -> None:
    """Write the shards and meta.json next to this file."""
    if argv:
        raise ConfigError(f"{argv[0]}: this script takes no settings")
    folder = Path(__file__).resolve().parent
    with FolderLock(folder):
        wheels = fetch(folder)
        sources = {split: partial(documents, wheels, split) for split in SPLITS}
        write_bytes_anew(folder, "wheels", sources)


if __name__ == "__main__":
    run_program(main, __doc__)
