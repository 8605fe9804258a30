"""A Python that has imported torch and train.py already, for tests of scripts that start many.

    write_python(folder) -> a program that scripts can call in place of python

`python train.py ...` and `python -c ...` run in a fork of one server. The process that the script
has started stays until the fork ends: it passes signals on, and the fork dies with it. Everything
else is the usual Python's.
"""

import json
import os
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def write_python(folder: Path) -> Path:
    """Write the program, and start its server, which ends with this process."""
    address = folder / "server"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(address))
    listener.listen()
    if os.fork() == 0:
        serve(listener)
    listener.close()
    program = folder / "python"
    forked = f"{sys.executable} -I -S {__file__} {address}"
    program.write_text(
        f'#!/bin/bash\ncase $1 in\n  train.py | -c) exec {forked} "$@" ;;\n'
        f'  *) exec {sys.executable} "$@" ;;\nesac\n'
    )
    program.chmod(0o755)
    return program


def serve(listener: socket.socket) -> None:
    """Fork for each call, until the process that started the server has gone."""
    import torch._dynamo  # noqa: F401  AdamW imports it

    import train  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    parent = os.getppid()
    listener.settimeout(1)
    while os.getppid() == parent:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        if os.fork() == 0:
            os._exit(answer(connection))
        connection.close()
    os._exit(0)


def answer(connection: socket.socket) -> int:
    """Run what a call asks for, with its files, folder and environment; tell it the exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    connection.settimeout(None)
    message, files, *_ = socket.recv_fds(connection, 1 << 20, 3)
    words, folder, environment = json.loads(message)
    for target, file in enumerate(files):
        os.dup2(file, target)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    connection.send(str(os.getpid()).encode())
    threading.Thread(target=die_with, args=(connection,), daemon=True).start()
    code = run(words)
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send(str(code).encode())
    return code


def die_with(connection: socket.socket) -> None:
    """End this process at once when the call has been killed."""
    connection.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


def run(words: list[str]) -> int:
    """Run train.py or a piece of code; return its exit code."""
    import train
    from common.errors import run_program

    sys.argv = words
    try:
        if words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            exec(words[1], {"__name__": "__main__"})
        else:
            run_program(train.main)
    except SystemExit as end:
        return int(end.code or 0)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def call(address: str, words: list[str]) -> int:
    """Have the server run `python words`; return the exit code."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        message = json.dumps([words, os.getcwd(), dict(os.environ)]).encode()
        socket.send_fds(connection, [message], [0, 1, 2])
        fork = int(connection.recv(100))
        for number in SIGNALS:
            signal.signal(number, lambda number, frame: os.kill(fork, number))
        return int(connection.recv(100) or 137)


if __name__ == "__main__":
    sys.exit(call(sys.argv[1], sys.argv[2:]))
