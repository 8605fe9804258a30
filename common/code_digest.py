"""Name the code that trains, as it is on the disk: a commit does not tell of untracked files."""

import hashlib
from pathlib import Path

from .environment import ROOT

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
