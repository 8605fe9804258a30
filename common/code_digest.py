"""Name the code that trains, as it is on the disk: a commit does not tell of untracked files.

Beside the digest: how the code differs from the commit, and which digests stand for one code.
"""

import functools
import hashlib
import re
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from .errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
UNCOMMITTED = "uncommitted.diff"  # in a run folder: what uncommitted_changes returned
SHORT = 12  # digits of a digest that messages show, and by which digests are compared

# What train.py and distill.py can import. A package stands for all its files.
MODULES = (
    "common",
    "configurator.py",
    "kernels",
    "data",
    "norms.py",
    "taper.py",
    "norm_types.py",
    "norm_plan.py",
    "norm_files.py",
    "model.py",
    "training",
    "hf",
    "load.py",
    "fold",
    "evals",
    "posthoc",
    "train.py",
    "distill.py",
)


def code_files(root: Path = ROOT) -> list[Path]:
    """List the files of MODULES in a tree, in the order of their names."""
    found: list[Path] = []
    for name in MODULES:
        path = root / name
        if path.is_dir():
            found += path.rglob("*.py")
        elif path.is_file():
            found.append(path)
    return sorted(found)


def code_digest(root: Path = ROOT) -> str:
    """Compute the SHA-256 of names and contents of code_files."""
    digest = hashlib.sha256()
    for path in code_files(root):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{content} {path.relative_to(root).as_posix()}\n".encode())
    return digest.hexdigest()


@functools.cache
def digest_of_commit(commit: str, root: Path = ROOT) -> str:
    """Compute what code_digest gives in the tree of a commit.

    "" if git does not know it, as where the code had changes that were not committed.
    """
    if not re.fullmatch("[0-9a-f]{7,64}", commit):
        return ""
    try:
        listed = _git(root, "ls-tree", "-r", "-z", "--name-only", commit, "--", *MODULES).decode()
        names = [name for name in listed.split("\0") if name.endswith(".py")]
        with tempfile.TemporaryDirectory() as folder:
            for name in names:
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(_git(root, "show", f"{commit}:./{name}"))
            return code_digest(Path(folder))
    except (OSError, ValueError, subprocess.CalledProcessError):
        return ""


def uncommitted_changes(root: Path = ROOT) -> bytes:
    """Return the diff from the commit to code_files, for `git apply`; new files are in it.

    b"" if nothing has changed, or without git, a repository or a commit.
    """
    plain = ("--no-ext-diff", "--no-textconv", "--no-color", "--binary")
    plain += ("--src-prefix=a/", "--dst-prefix=b/")
    paths = [name if name.endswith(".py") else f":(glob){name}/**/*.py" for name in MODULES]
    try:
        tracked = _git(root, "ls-files", "-z", "--", *paths).decode(errors="surrogateescape")
        parts = [_git(root, "diff", *plain, "--relative", "HEAD", "--", *paths)]
        there = {path.relative_to(root).as_posix() for path in code_files(root)}
        for path in sorted(there - {*tracked.split("\0")}):
            parts.append(_git(root, "diff", *plain, "--no-index", "--", "/dev/null", path))
    except (OSError, subprocess.CalledProcessError):
        return b""
    return b"".join(parts)


def _git(root: Path, *arguments: str) -> bytes:
    """Run git. Raises OSError, and CalledProcessError where it fails."""
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True)
    if done.returncode > ("--no-index" in arguments):  # 1: the two files differ
        done.check_returncode()
    return done.stdout


def check_digests(key: str, digests: tuple[str, ...]) -> None:
    """Raise ConfigError for a digest of code, given as `key`, that is none or is too short."""
    for digest in digests:
        if not re.fullmatch(f"[0-9a-f]{{{SHORT},64}}", digest):
            raise ConfigError(
                f"{key}={digest}: needs the digest `code` of a run's log, {SHORT} digits or more"
            )


def shortened(digests: Iterable[str]) -> set[str]:
    """Cut digests to the length by which they are compared."""
    return {digest[:SHORT] for digest in digests}
