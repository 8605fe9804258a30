"""How readable is the code? Comments, line lengths, and the calls from a norm to its kernel.

    python repro/code_shape.py                                # this repository, and its core
    python repro/code_shape.py --peers=../nanoGPT,../litgpt   # other checkouts in the same table

A line with a comment counts wherever the comment begins; docstrings are counted apart. Calls are
the functions of this repository that are on the stack when a Triton kernel starts, from a norm's
`forward` on, counted in Triton's interpreter.
"""

import ast
import io
import os
import subprocess
import sys
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.interrupt  # noqa: F401

from common.errors import ConfigError, run_program
from common.output import markdown
from configurator import key, parse_args

ROOT = Path(__file__).resolve().parents[1]
CORE = ("train.py", "model.py", "norms.py", "norm_plan.py", "taper.py", "training", "kernels")
SKIPPED = ("tests", ".venv", "build")  # folders


@dataclass(frozen=True)
class ShapeConfig:
    """Keys of repro/code_shape.py."""

    peers: str = key("", "checkouts of other repositories, with commas between")


@dataclass
class Shape:
    """Counts over some files."""

    files: int = 0
    lines: int = 0  # that are not empty
    characters: int = 0  # of these lines
    comments: int = 0  # lines with a comment
    docstrings: int = 0  # lines of docstrings that are not empty
    long: int = 0  # lines beyond 100 characters

    def add(self, source: str) -> None:
        """Count the lines of one file."""
        lines = source.splitlines()
        written = [line for line in lines if line.strip()]
        self.files += 1
        self.lines += len(written)
        self.characters += sum(map(len, written))
        self.long += sum(len(line) > 100 for line in written)
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        self.comments += len({t.start[0] for t in tokens if t.type == tokenize.COMMENT})
        self.docstrings += sum(bool(lines[n - 1].strip()) for n in docstring_lines(source))

    def row(self, name: str) -> list[str]:
        return [
            name,
            str(self.files),
            f"{self.lines:,}",
            f"{self.characters / self.lines:.1f}",
            f"{100 * self.comments / self.lines:.1f}",
            f"{100 * self.docstrings / self.lines:.1f}",
            f"{100 * self.long / self.lines:.1f}",
        ]


COLUMNS = [
    "code",
    "files",
    "lines",
    "mean length",
    "comments in 100",
    "docstrings in 100",
    "beyond 100 characters, in 100",
]


def docstring_lines(source: str) -> set[int]:
    """Return the numbers (from 1) of all lines that belong to a docstring."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) or not body:
            continue
        first = body[0]
        if not isinstance(first, ast.Expr) or not isinstance(first.value, ast.Constant):
            continue
        if isinstance(first.value.value, str):
            found.update(range(first.lineno, first.end_lineno + 1))
    return found


def shape_of(paths: Iterable[Path]) -> Shape:
    """Count all Python files of `paths`, which are files and folders; tests are left out."""
    shape = Shape()
    for path in paths:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            if any(part in SKIPPED for part in file.parts[len(path.parts) :]):
                continue
            source = file.read_text(encoding="utf-8")
            shape.add(source)
    return shape


def calls_to_kernel() -> dict[str, list[str]]:
    """Return for RMSNorm and SharedRMSNorm the functions between `forward` and the kernel.

    In a process of its own, because Triton reads TRITON_INTERPRET when it is imported.
    """
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); "
    code += "import code_shape; code_shape.trace()"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    found = {}
    for line in done.stdout.splitlines():
        norm, calls = line.split(": ")
        found[norm] = calls.split()
    return found


def trace() -> None:
    """Print, for each norm, the functions of this repository from `forward` to the kernel."""
    import torch

    from kernels import row_norm, shared_rms
    from norms import RMSNorm, SharedRMSNorm

    x = torch.randn(1, 4, 32)
    inv_rms = torch.ones(1, 4, 1)
    for norm, module in ((RMSNorm(32), row_norm), (SharedRMSNorm(32), shared_rms)):
        norm.kernels = "triton"
        kernel = module.forward_kernel
        module.forward_kernel = Noting(kernel)
        norm(x, x, inv_rms)
        print(f"{type(norm).__name__}: {' '.join(module.forward_kernel.calls)}")
        module.forward_kernel = kernel


class Noting:
    """A kernel that notes, when it starts, which functions of this repository are on the stack."""

    def __init__(self, kernel: object):
        self.kernel = kernel
        self.calls: list[str] = []

    def __getitem__(self, grid: object) -> object:
        frame = sys._getframe(1)
        names = []
        while frame is not None:
            file = Path(frame.f_code.co_filename)
            if file.is_relative_to(ROOT) and ".venv" not in file.parts and file != Path(__file__):
                names.append(f"{file.stem}.{frame.f_code.co_name}")
            frame = frame.f_back
        self.calls = names[::-1]
        return self.kernel[grid]


def main(argv: list[str]) -> None:
    config, _ = parse_args(ShapeConfig, argv, __doc__)
    listed = subprocess.run(
        ["git", "ls-files", "*.py", ":!tests"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    rows = [
        shape_of(ROOT / name for name in listed.stdout.split()).row("nanonorm"),
        shape_of(ROOT / name for name in CORE).row("nanonorm, the core"),
    ]
    for peer in filter(None, config.peers.split(",")):
        if not Path(peer).is_dir():
            raise ConfigError(f"peers={peer}: no such folder: clone the repository there")
        rows.append(shape_of([Path(peer)]).row(Path(peer).name))
    print(markdown(COLUMNS, rows))
    for norm, calls in calls_to_kernel().items():
        print(f"{norm}: {len(calls)} functions to the kernel: {', '.join(calls)}")


if __name__ == "__main__":
    run_program(main)
