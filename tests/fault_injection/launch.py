"""Start a program with a fault, or without.

This process has preload.c loaded, has imported torch and our programs once, and forks for each
start. So a run of train.py takes a fraction of a second. sweep.sh is started as it is; it gets
client.py for a Python, which asks this process to fork.
"""

import atexit
import contextlib
import ctypes
import errno
import gc
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TIMEOUT = 100.0  # seconds until a run counts as hanging
GRACE = 30.0  # seconds between SIGTERM and SIGKILL, as torchrun has them
POLL = 0.004  # seconds between two looks at what is running


class Fault(NamedTuple):
    """What happens, at which call of which rank."""

    mode: str  # kill, torn, full, or the name of an errno
    point: int  # from 1
    rank: int = 0


class Call(NamedTuple):
    """A call that changes a file, as preload.c describes it."""

    number: int
    name: str
    bytes: int
    needs_room: bool
    path: str

    @property
    def target(self) -> tuple[str, str]:
        return self.name, self.path


@dataclass
class Ended:
    """What a start of a program led to; lists have one item a rank."""

    codes: list[int]
    texts: list[str]
    calls: list[list[Call]]
    hangs: bool = False

    @property
    def is_good(self) -> bool:
        return not self.hangs and not any(self.codes)


@dataclass
class Place:
    """Folders of a program under test, empty for each point."""

    base: Path
    files: Path = field(init=False)  # where the program writes, and faults happen
    notes: Path = field(init=False)  # what the harness itself writes

    def __post_init__(self) -> None:
        self.files = self.base / "files"
        self.notes = self.base / "notes"

    def clear(self) -> None:
        for folder in (self.files, self.notes):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)

    def settings(self, fault: Fault | None, rank: int) -> dict[str, str]:
        """Make the environment for preload.c."""
        for name in ("counter", "trace"):
            (self.notes / f"{name}.{rank}").unlink(missing_ok=True)
        settings = {
            "FAULT_ROOT": str(self.files),
            "FAULT_COUNTER": str(self.notes / f"counter.{rank}"),
            "FAULT_TRACE": str(self.notes / f"trace.{rank}"),
        }
        if fault is not None and fault.rank == rank:
            settings["FAULT_POINT"] = str(fault.point)
            settings["FAULT_MODE"] = str(getattr(errno, fault.mode, fault.mode))
        return settings

    def calls(self, rank: int) -> list[Call]:
        """Read what preload.c noted."""
        path = self.notes / f"trace.{rank}"
        found = []
        for line in path.read_text().splitlines() if path.exists() else []:
            number, name, size, needs_room, where = line.split(" ", 4)
            found.append(Call(int(number), name, int(size), needs_room == "1", where))
        return found


# --------------------------------------------------------------------------------- this process


def build(folder: Path) -> Path:
    """Compile preload.c into `folder`; raises RuntimeError without a compiler."""
    library = folder / "preload.so"
    command = ["gcc", "-O1", "-Wall", "-Werror", "-fPIC", "-shared"]
    try:
        subprocess.run(
            [*command, "-o", str(library), str(HERE / "preload.c"), "-ldl"],
            check=True,
            capture_output=True,
            text=True,
        )
    except FileNotFoundError:
        raise RuntimeError("gcc is not installed, which compiles preload.c") from None
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"gcc does not compile preload.c: {error.stderr}") from None
    return library


def import_programs() -> None:
    """Import now what the programs import sooner or later."""
    import peft  # noqa: F401
    import tokenizers  # noqa: F401
    import torch
    import torch._dynamo
    import torch.distributed.fsdp

    import convert  # noqa: F401
    import distill  # noqa: F401
    import evidence.archive
    import evidence.claim
    import evidence.sweep  # noqa: F401
    import train  # noqa: F401

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # a fork's collector need not touch these pages


def fork(
    words: list[str], env: dict[str, str], streams: tuple[int, int, int], cwd: str, group: int = 0
) -> int:
    """Start `python WORDS` in a fork of this process. Returns its process id.

    Args:
        words: FILE, -m MODULE or -c CODE, and the arguments.
        env: the whole environment.
        streams: file descriptors of its input, output and errors.
        group: the process group that it joins (0: ours).
    """
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        atexit._clear()  # what was registered belongs to this process
        if group:
            os.setpgid(0, group)
        os.environ.clear()
        os.environ.update(env)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        sys.stdin, sys.stdout, sys.stderr = (
            open(number, kind, closefd=False) for number, kind in enumerate("rww")
        )
        os.chdir(cwd)
        ctypes.CDLL(None).fault_arm()
        code = _become(words)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        # Not sys.exit: it would unwind through the harness.
        os._exit(code)


def _become(words: list[str]) -> int:
    """Run `python WORDS`. Returns the exit code."""
    kind, *rest = words
    try:
        if kind == "-c":
            sys.argv = ["-c", *rest[1:]]
            exec(rest[0], {"__name__": "__main__"})
        elif kind == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        atexit._run_exitfuncs()
    return 0


# ------------------------------------------------------------------------------ one or more ranks


def run_ranks(
    place: Place, words: list[str], ranks: int, is_job: bool, fault: Fault | None
) -> Ended:
    """Run `python WORDS` on `ranks` processes, as torchrun does.

    Args:
        is_job: announce the ranks in the environment, as torchrun does for a single one too.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = []
    outputs = [place.notes / f"output.{rank}" for rank in range(ranks)]
    nothing = os.open(os.devnull, os.O_RDONLY)
    for rank, output in enumerate(outputs):
        env = dict(os.environ)
        env |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(place.notes)}
        env |= place.settings(fault, rank)
        if is_job:
            env |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        stream = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        pids.append(fork(words, env, (nothing, stream, stream), str(ROOT)))
        os.close(stream)
    os.close(nothing)
    codes, hangs = _wait_for_ranks(pids)
    texts = [path.read_text(errors="replace") for path in outputs]
    return Ended(codes, texts, [place.calls(rank) for rank in range(ranks)], hangs)


def _wait_for_ranks(pids: list[int]) -> tuple[list[int], bool]:
    """Wait for all ranks; when one fails, stop the others. Returns (codes, whether one hung)."""
    codes: dict[int, int] = {}
    end = time.monotonic() + TIMEOUT
    has_failed = False
    hangs = False
    while len(codes) < len(pids):
        for pid in set(pids) - codes.keys():
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes[pid] = os.waitstatus_to_exitcode(status)
        left = set(pids) - codes.keys()
        if any(codes.values()) and not has_failed:
            has_failed = True
            end = time.monotonic() + GRACE
            for pid in left:
                os.kill(pid, signal.SIGTERM)
        if left and time.monotonic() > end:
            hangs = True
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL)
    return [codes[pid] for pid in pids], hangs


# --------------------------------------------------------------------------------------- sweep.sh


def run_script(place: Place, words: list[str], env: dict[str, str], fault: Fault | None) -> Ended:
    """Run a shell script whose Python is a fork of this process.

    A kill ends all its processes at once.
    """
    path = str(place.notes / "socket")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    settings = place.settings(fault, 0)
    (place.notes / "tmp").mkdir(exist_ok=True)
    whole = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(place.notes / "tmp")}
    whole |= {"PYTHON": str(HERE / "client.py"), "FAULT_SOCKET": path, "FAULT_GROUP": "1"}
    whole |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with open(place.notes / "output.0", "wb") as output:
        script = subprocess.Popen(
            words,
            cwd=ROOT,
            env=whole | settings | env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,
        )
    hangs = _serve(listener, script)
    listener.close()
    text = (place.notes / "output.0").read_text(errors="replace")
    return Ended([script.returncode], [text], [place.calls(0)], hangs)


def _serve(listener: socket.socket, script: subprocess.Popen) -> bool:
    """Fork for the script's clients until it ends. Returns whether it hung."""
    end = time.monotonic() + TIMEOUT
    # process id -> the client that waits for it; None if that was killed
    clients: dict[int, socket.socket | None] = {}
    hangs = False
    while script.poll() is None or clients:
        if time.monotonic() > end and not hangs:
            hangs = True
            os.killpg(script.pid, signal.SIGKILL)
        for pid in list(clients):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                _answer(clients.pop(pid), os.waitstatus_to_exitcode(status))
        waiting = {connection: pid for pid, connection in clients.items() if connection}
        ready, _, _ = select.select([listener, *waiting], [], [], POLL)
        for source in ready:
            if source is listener:
                connection, _ = listener.accept()
                clients[_fork_for(connection, script.pid)] = connection
            elif number := source.recv(8):
                os.kill(waiting[source], int(number))
            else:
                clients[waiting[source]] = None
                source.close()
    return hangs


def _answer(client: socket.socket | None, code: int) -> None:
    """Tell a client the exit code of its process."""
    if client is None:
        return
    with contextlib.suppress(OSError):
        client.send(str(code).encode())
    client.close()


def _fork_for(connection: socket.socket, group: int) -> int:
    """Read a client's request, and fork."""
    data, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    while not data.endswith(b"\n"):
        data += connection.recv(1 << 20)
    request = json.loads(data)
    pid = fork(request["words"], request["env"], tuple(streams), request["cwd"], group)
    for stream in streams:
        os.close(stream)
    return pid
