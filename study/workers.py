"""Train the runs of a sweep: workers share them out, with those of other sweeps on one folder.

A worker claims a run by a lock on the file `claim` in its folder, which the training process
inherits: it ends with that process, however it ends.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

from common.errors import UserError, one_line
from evidence import archive

from .arms import PlannedRun

DONE = "done"
# Seconds between lines about runs that go on: without a terminal, and in one
QUIET, DISPLAYED = 60.0, 1.0
TERMINAL_WIDTH = 80
TAIL = 4096  # bytes of an output in which its last line is looked for
BUSY = ": another process is working there"  # ends what train.py says then
STOPPED = 130  # exit code after a signal
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
WRONG = 2  # exit code of a wrong setting


class Job(NamedTuple):
    """What all runs of a sweep have."""

    command: tuple[str, ...]  # Python or torchrun, and train.py
    common: tuple[str, ...]  # words of train.py
    hellaswag: str
    out: Path  # folder of the run folders
    keep: Path | None  # archive for finished runs
    gpus: tuple[str, ...]  # CUDA_VISIBLE_DEVICES of each worker in turn; () to leave it alone
    machine: str  # what `machine_of` calls the device here
    diff: bool = False  # keep uncommitted changes of the code in the archive too


class State(NamedTuple):
    """How far a run has come, by its log."""

    is_over: bool = False
    has_diverged: bool = False


def state_of(folder: Path) -> State:
    """Read how far the run in a folder has come."""
    try:
        return state_by_log((folder / "log.jsonl").read_bytes())
    except OSError:
        return State()


def state_by_log(content: bytes) -> State:
    """Read from a run's log whether it is over, and whether it diverged.

    It did if a loss in training or the last one of validation is not finite. A damaged log is left
    to train.py.
    """
    reason = ""
    last: dict[str, bool] = {}  # kind of event -> is its last loss finite?
    for line in content.splitlines():
        # Most lines are steps.
        if b'"end"' not in line and b'"eval"' not in line and b'"val_full"' not in line:
            continue
        try:
            event = json.loads(line)
            kind = event["event"]
        except (ValueError, LookupError, TypeError, RecursionError):
            continue
        if kind == "end":
            reason = str(event.get("reason"))
        elif kind in ("eval", "val_full"):
            loss = event.get("val_loss" if kind == "eval" else "val_loss_full")
            last[kind] = loss is not None
    broke = reason.startswith("step ") and reason.endswith(" is not finite")
    return State(broke or reason == DONE, broke or not all(last.values()))


def machine_of(place: dict[str, Any]) -> str:
    """Name the kind of device by what a log's start event, or `environment`, tells of it."""
    return " ".join(str(place.get(name, "")) for name in ("device", "processor")).strip()


def trained_on(folder: Path) -> str:
    """Return the kind of device on which the run in a folder was begun; "" if that is not known.

    A process that has not begun its log yet is told by the claim.
    """
    try:
        with open(folder / "log.jsonl", "rb") as file:
            place = json.loads(file.readline())
    except (OSError, ValueError, RecursionError):
        place = None
    if isinstance(place, dict) and "device" in place:
        return machine_of(place)
    return (folder / "claim").read_text() if is_claimed(folder) else ""


class Sweep:
    """Runs, and the workers that train them.

    All runs of a seed are made on one kind of device, because they are compared with one another.

    Args:
        runs: all of them, in order.
        kept: names of runs that are over, and in the archive already.
        peers: returns all runs in the folder that are compared with one another, as others may
            have begun some since; without, `runs`.
    """

    def __init__(
        self,
        job: Job,
        runs: list[PlannedRun],
        kept: set[str],
        peers: Callable[[], list[PlannedRun]] | None = None,
    ):
        self.job = job
        self.runs = runs
        self.kept = kept
        self.peers = peers or (lambda: runs)
        # A second signal may come while the first one's handler holds it.
        self.lock = threading.RLock()
        self.said: set[str] = set()  # runs that a line was printed of
        self.warned: set[str] = set()  # warnings that were printed
        self.began: set[str] = set()  # runs that were trained here
        self.elsewhere: set[str] = set()  # runs that others have claimed
        self.children: dict[int, subprocess.Popen] = {}  # worker -> its training process
        self.shown: dict[int, tuple[str, Path]] = {}  # worker -> name and output of its run
        self.code = 0  # exit code so far
        self.stopped = threading.Event()

    # ------------------------------------------------------------------------------------- a worker

    def work(self, worker: int) -> None:
        """Go through all runs, and train those that nobody has."""
        for number, run in enumerate(self.runs, 1):
            if self.stopped.is_set():
                return
            with self.lock:
                if run.name in self.began:
                    continue
            label = f"[{number}/{len(self.runs)}] {run.name}"
            try:
                self.attend(worker, run, label)
            except (UserError, OSError) as error:
                self.fail(1)
                # Of its own key: a run that is done, and cannot be kept, has its line already.
                self.tell(f"{run.name}: {error}", f"{label}: FAILED: {error}")
            except Exception:
                self.fail(1)  # threading prints the traceback
                raise

    def attend(self, worker: int, run: PlannedRun, label: str) -> None:
        """Train one run, unless it is done or somebody has it; then keep it."""
        folder = self.job.out / run.name
        if run.name in self.kept:
            self.tell(run.name, f"{label}: in {self.job.keep} already")
            return
        state = state_of(folder)
        if state.has_diverged and state.is_over:
            again = "diverged; it would again: remove its folder to train it once more"
            if not self.tell(run.name, f"{label}: {again}"):
                return
            self.fail(1)
        elif state.is_over:
            if not self.tell(run.name, f"{label}: done already"):
                return
        elif not self.train(worker, run, label):
            return
        if self.job.keep and state_of(folder).is_over:
            archive.add(self.job.keep, folder, diff=self.job.diff)

    def train(self, worker: int, run: PlannedRun, label: str) -> bool:
        """Train a run. Returns False if another worker has it."""
        claim = self.claim(run)
        if claim is None:
            with self.lock:
                self.elsewhere.add(run.name)
            return False
        output = self.job.out / run.name / "train.txt"
        began = time.monotonic()
        with claim, open(output, "ab") as file, self.lock:
            if self.stopped.is_set():
                return False
            self.began.add(run.name)
            start = file.tell()  # below what earlier attempts printed
            self.shown[worker] = label, output
            self.children[worker] = child = self.start(worker, run, claim, file)
        status = child.wait()
        with self.lock:
            del self.children[worker], self.shown[worker]
        lines = lines_of(output, start)
        return self.report(run, label, status, lines, time.monotonic() - began)

    def claim(self, run: PlannedRun) -> IO | None:
        """Claim a run; None if it is over, if another has it, or if its seed belongs elsewhere.

        The claim names the kind of device, as the log will once the training process has begun it.
        """
        folder = self.job.out / run.name
        # So that no two kinds of device begin a seed at once, nor move it away from each other.
        with archive.locked(self.job.out):
            if self.belongs_elsewhere(run):
                return None
            folder.mkdir(parents=True, exist_ok=True)
            claim = open(folder / "claim", "a")
            if is_claimed_by_us(claim) and not state_of(folder).is_over:
                claim.truncate(0)
                claim.write(self.job.machine)
                claim.flush()
                return claim
            claim.close()
            return None

    def belongs_elsewhere(self, run: PlannedRun) -> bool:
        """Does a run's seed belong to workers on another kind of device, which train just now?

        Where it was begun on another kind that trains nothing any more, what is there of it moves
        out of the way: the seed begins again whole, here. Called with the lock on the folder.
        """
        peers = self.peers()
        its = [self.job.out / other.name for other in peers if other.seed == run.seed]
        foreign = [folder for folder in its if self.is_foreign(folder)]
        if not foreign:
            return False
        others = [self.job.out / other.name for other in peers]
        if any(is_claimed(folder) for folder in others if self.is_foreign(folder)):
            return True
        there = ", ".join(sorted({trained_on(folder) for folder in foreign}))
        left = self.job.out.with_name(f"{self.job.out.name}-left")
        for folder in foreign:
            move_away(folder, left)
        self.tell(
            f"seed {run.seed}",
            f"seed {run.seed} was begun on {there} and is not whole: it begins again here; its "
            f"runs are in {left}",
        )
        return False

    def is_foreign(self, folder: Path) -> bool:
        """Was the run in a folder begun on another kind of device?"""
        return trained_on(folder) not in ("", self.job.machine)

    def start(self, worker: int, run: PlannedRun, claim: IO, output: IO) -> subprocess.Popen:
        """Start the training process, which inherits the claim."""
        job = self.job
        words = [f"--seed={run.seed}", f"--out_dir={job.out / run.name}"]
        environment = dict(os.environ)
        if job.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = job.gpus[worker % len(job.gpus)]
        return subprocess.Popen(
            [*job.command, *job.common, *run.arm.words, *words, f"--hellaswag={job.hellaswag}"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[claim.fileno()],
            env=environment,
        )

    def report(
        self, run: PlannedRun, label: str, status: int, lines: list[str], seconds: float
    ) -> bool:
        """Say how a training process ended. Returns False if another one has the run.

        Args:
            status: its exit code, below zero for a signal.
            lines: what it printed.
        """
        folder = self.job.out / run.name
        self.tell_warnings(lines, label)
        errors = [line for line in lines if line.startswith("error:")]
        # torchrun prints its own report below the error of a rank, so the last line will not do.
        last = (errors if status and errors else lines or [""])[-1]
        if status == 1 and BUSY in last:
            with self.lock:
                self.began.discard(run.name)
                self.elsewhere.add(run.name)
            return False
        if status == 0 and last.startswith("stopped"):
            self.tell(run.name, f"{label}: {last}")
            self.stop(STOPPED)
        elif status and self.stopped.is_set():
            pass  # it was stopped before it could save
        elif status == 0:
            if state_of(folder).has_diverged:
                last = "diverged: its last val loss is not finite"
                self.fail(1)
            self.tell(run.name, f"{label}: {last}  ({seconds:.0f} s)")
        else:
            if not last.startswith("error:"):  # a full disk takes no message either
                last += (
                    f" (see {folder}/train.txt; if the disk is full, make room and run it again)"
                )
            code = status if status > 0 else 128 - status  # of a signal as a shell says it
            self.tell(run.name, f"{label}: FAILED with exit code {code}: {last}")
            self.fail(1)
            if status == WRONG:
                self.stop(WRONG)
        return True

    # -------------------------------------------------------------------------------- what is said

    def tell(self, name: str, line: str) -> bool:
        """Print the first line about a run; return whether it is the first.

        In a terminal it takes the place of the display, which goes on below.
        """
        with self.lock:
            if name in self.said:
                return False
            self.said.add(name)
            self.say(line)
        return True

    def tell_warnings(self, lines: list[str], label: str) -> None:
        """Print the warnings of a run that no run before it had. They stay in its train.txt."""
        with self.lock:
            for line in lines:
                if line.startswith("warning:") and line not in self.warned:
                    self.warned.add(line)
                    self.say(f"{label}: {line}")

    def say(self, line: str) -> None:
        """Print a line, with the lock held."""
        print(f"{clear_display()}{one_line(line)}", flush=True)

    def show(self) -> None:
        """Show for each worker its run and the last line of it, until the sweep ends."""
        is_terminal = sys.stdout.isatty()
        while not self.stopped.wait(DISPLAYED if is_terminal else QUIET):
            with self.lock:
                lines = [
                    f"{label}: {(lines_of(output, -TAIL) or ['begins'])[-1]}"
                    for _, (label, output) in sorted(self.shown.items())
                ]
                if is_terminal and lines:
                    width = terminal_width() - 1
                    text = "".join(f"\r\033[K{one_line(line)[:width]}\n" for line in lines)
                    print(f"{text}\033[{len(lines)}A", end="", flush=True)
                elif not is_terminal:
                    for line in lines:
                        self.say(line)

    # --------------------------------------------------------------------------------- how it ends

    def fail(self, code: int) -> None:
        """Note that a run failed or diverged; the others go on."""
        with self.lock:
            self.code = self.code or code

    def stop(self, code: int) -> None:
        """Stop all workers; their runs save and end."""
        with self.lock:
            if self.stopped.is_set():
                return
            self.stopped.set()
            self.code = code
            children = list(self.children.values())
        for child in children:
            child.send_signal(signal.SIGTERM)

    def run(self, workers: int) -> int:
        """Train all runs with so many workers; return the exit code."""
        before = {number: signal.getsignal(number) for number in STOPPING}
        for number, handler in before.items():
            # What is ignored stays so: SIGHUP under nohup, SIGINT in the background of a script.
            if handler != signal.SIG_IGN:
                signal.signal(number, lambda number, frame: self.stop(STOPPED))
        threads = [threading.Thread(target=self.work, args=(number,)) for number in range(workers)]
        display = threading.Thread(target=self.show, daemon=True)
        for thread in threads:
            thread.start()
        display.start()
        for thread in threads:
            thread.join()
        self.stopped.set()
        display.join()
        print(clear_display(), end="", flush=True)  # of a run that was stopped no line was said
        for number, handler in before.items():
            signal.signal(number, handler)
        return self.code

    def done(self) -> list[str]:
        """Return the names of the runs that are over, here or in the archive."""
        return [
            run.name
            for run in self.runs
            if run.name in self.kept or state_of(self.job.out / run.name).is_over
        ]

    def left_to_others(self) -> list[str]:
        """Return the names of the runs that others are training."""
        left = self.elsewhere - self.began - {*self.done()}
        return [run.name for run in self.runs if run.name in left]


def is_claimed_by_us(claim: IO) -> bool:
    """Claim a run, unless another worker has. On a file system without locks nobody can."""
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # no locks there: train.py's own lock decides
    return True


def is_claimed(folder: Path) -> bool:
    """Does a worker train the run in a folder just now?"""
    try:
        with open(folder / "claim", "rb") as claim:
            fcntl.flock(claim, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass  # never claimed, or no locks there
    return False


def move_away(folder: Path, to: Path) -> None:
    """Move a run folder into another folder, with a number after its name if that is taken."""
    to.mkdir(parents=True, exist_ok=True)
    target = to / folder.name
    number = 1
    while target.exists():
        number += 1
        target = to / f"{folder.name}-{number}"
    folder.rename(target)


def lines_of(output: Path, start: int) -> list[str]:
    """Read lines that a training process printed, without empty ones.

    Args:
        start: the byte where they begin; below zero, counted from the end.
    """
    try:
        with open(output, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(start if start >= 0 else max(size + start, 0))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.replace("\r", "\n").split("\n") if line.strip()]


def clear_display() -> str:
    """Return what clears the display, below the cursor; "" if there is no terminal."""
    return "\r\033[J" if sys.stdout.isatty() else ""


def terminal_width() -> int:
    """Return the columns of the terminal."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except OSError:
        return TERMINAL_WIDTH
