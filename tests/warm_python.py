"""A Python that has imported torch and train.py already, for tests of scripts that start many.

    warm_python() -> a program that scripts can call in place of python

What it is called with (`-c CODE ...`, `-m MODULE ...`, `FILE ...`) runs in a fork of the server of
helpers.py, with the folder, environment, stdout and stderr of the call. The call stays until that
ends, passes SIGTERM, SIGINT and SIGHUP on, and takes the fork with it if it is killed. Its stdin
and other open files stay with it.
"""

import contextlib
import functools
import os
import runpy
import signal
import sys
import threading
from multiprocessing import util
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path

ONE_AT_A_TIME = threading.Lock()  # a start looks after all processes, as a join does


@functools.cache
def warm_python() -> str:
    """Write the program, once; this process answers its calls."""
    folder = Path(util.get_temp_dir())  # until this process ends
    listener = Listener(str(folder / "warm"))
    threading.Thread(target=serve, args=(listener,), daemon=True).start()
    program = folder / "python"
    program.write_text(
        f'#!/bin/bash\nexec {sys.executable} -S {__file__} {listener.address} "$@"\n'
    )
    program.chmod(0o755)
    return str(program)


def serve(listener: Listener) -> None:
    while True:
        threading.Thread(target=answer, args=(listener.accept(),), daemon=True).start()


def answer(caller: Connection) -> None:
    """Start the fork that a call asks for, pass on its signals, and tell it the exit code."""
    from helpers import FORKS

    with caller, contextlib.suppress(BrokenPipeError):
        process = FORKS.Process(target=run, args=caller.recv())
        with ONE_AT_A_TIME:
            process.start()
        while process.sentinel not in wait([caller, process.sentinel]):
            with contextlib.suppress(ProcessLookupError):
                try:
                    os.kill(process.pid, caller.recv())
                except EOFError:  # the call was killed, and with it what it had started
                    os.killpg(process.pid, signal.SIGKILL)
        with ONE_AT_A_TIME:
            process.join()
        caller.send(process.exitcode)


def run(words: tuple[str, ...], folder: str, environment: dict[str, str], caller: int) -> None:
    """In the fork: what Python does with these words, on one core."""
    import torch

    torch.set_num_threads(1)
    os.setpgid(0, 0)  # with what it starts, a group that can be killed
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number in (1, 2):
        os.dup2(os.open(f"/proc/{caller}/fd/{number}", os.O_WRONLY | os.O_APPEND), number)
    sys.stdout, sys.stderr = (open(number, "w", 1, closefd=False) for number in (1, 2))
    kind, *sys.argv = words if words[0] in ("-c", "-m", "-u") else ("", *words)
    if kind == "-c":
        exec(sys.argv[0], {"__name__": "__main__"})
    elif kind == "-m":
        sys.modules.pop(sys.argv[0], None)  # of which Python would warn
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


def call(address: str, *words: str) -> int:
    with Client(address) as server:
        server.send((words, os.getcwd(), dict(os.environ), os.getpid()))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, frame: server.send(number))
        code = server.recv()
    if code < 0:  # end by the signal that ended the fork
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        signal.raise_signal(-code)
    return code


if __name__ == "__main__":
    sys.exit(call(*sys.argv[1:]))
