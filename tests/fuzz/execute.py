"""Run a case in a forked process, where torch and the program are imported already."""

import importlib
import multiprocessing
import os
import resource
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.cases import Case
from tests.fuzz.programs import Program

FORK = multiprocessing.get_context("fork")
# Address space that a case may take beyond what its imports have.
MEMORY = 3 << 30
FILE_SIZE = 1 << 28
# Seconds that a long run gets from each Ctrl-C to its end.
PATIENCE = 10.0


@dataclass(frozen=True)
class Outcome:
    """What a case did."""

    code: int  # of the exit; negative for a signal
    stdout: str
    stderr: str
    seconds: float
    interrupted: bool  # it took longer than it may, and Ctrl-C was sent


def load(program: Program) -> None:
    """Import a program, and what it imports when it runs; what is not installed is left out."""
    importlib.import_module(program.module)
    for name in program.imports:
        try:
            importlib.import_module(name)
        except ImportError:
            continue


def address_space() -> int:
    """Return the bytes of address space of this process."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _refuse(*arguments: object) -> None:
    raise OSError(101, "Network is unreachable")


def _child(program: Program, argv: list[str], folder: Path) -> None:
    """Be `python PROGRAM argv` in `folder`, with outputs in files beside it."""
    os.setsid()
    for number, name in ((0, os.devnull), (1, f"{folder}.out"), (2, f"{folder}.err")):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        os.dup2(os.open(name, flags), number)
    sys.stdin = open(0, closefd=False)
    # As a program's own streams: UTF-8, strict but for stderr.
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    os.chdir(folder)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE, FILE_SIZE))
    limit = address_space() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    socket.socket.connect = _refuse
    socket.getaddrinfo = _refuse
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )
    module = importlib.import_module(program.module)
    for name, value in program.preset:
        (folder / value).parent.mkdir(exist_ok=True)
        setattr(module, name, str(folder / value))
    sys.argv = [module.__file__, *argv]
    from common.errors import run_program

    run_program(module.main)


def run(program: Program, case: Case, folder: Path, seconds: float) -> Outcome:
    """Run a case in `folder`, which is its own.

    Args:
        seconds: after them comes Ctrl-C, twice if the first does not end it.
    """
    if case.config is not None:
        (folder / "case.py").write_bytes(case.config)
    process = FORK.Process(target=_child, args=(program, list(case.argv), folder))
    start = time.monotonic()
    process.start()
    _wait(process, seconds)
    interrupted = process.is_alive()
    for wait in (PATIENCE / 2, PATIENCE / 2):
        if process.is_alive():
            os.kill(process.pid, signal.SIGINT)
            _wait(process, wait)
    _kill_group(process.pid)
    process.join()
    texts = []
    for end in ("out", "err"):
        path = Path(f"{folder}.{end}")
        texts.append(path.read_text(encoding="utf-8", errors="replace") if path.exists() else "")
    return Outcome(process.exitcode, *texts, time.monotonic() - start, interrupted)


def _wait(process: multiprocessing.Process, seconds: float) -> None:
    """Wait until a process has ended, or has had `seconds`: on a busy machine, of the processor."""
    first = used = _processor_seconds(process.pid)
    end = time.monotonic() + seconds
    process.join(seconds)
    while process.is_alive() and time.monotonic() < end + 5 * seconds:
        before, used = used, _processor_seconds(process.pid)
        if used >= first + seconds or used == before:
            return
        process.join(1)


def _processor_seconds(number: int) -> float:
    """Return the time that a process has had of the processor; it may have ended."""
    try:
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _kill_group(number: int) -> None:
    """End what is left of a case: its own group of processes alone."""
    try:
        os.killpg(number, signal.SIGKILL)
    except ProcessLookupError:
        return
