"""One process at a time in a folder.

Where the file system has locks, the kernel frees one when its process ends, however it ends.
Elsewhere a file names the owner, a process that touches it every BEAT seconds. Another one that has
seen no sign of life for STALE seconds, by its own clock, takes the folder over by a rename. An
owner that only stood still finds another name in the file before its next checkpoint, and stops.
"""

import errno
import fcntl
import os
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from common.errors import UserError, cannot_write
from common.inputs import check_regular

# Seconds. A job that is queued again may start while the previous one still saves.
PATIENCE = 60.0
POLL = 0.2  # seconds between two attempts to get the lock
BEAT = 5.0
STALE = 45.0
HELD = (errno.EACCES, errno.EAGAIN)  # another process has the lock
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # of a file system without locks


class FolderLock:
    """Keep other processes out of a folder until `release`, or until this process ends.

    As a context manager it is released when the block ends.

    Makes the folder if there is none. Another process may be about to finish: waits for it,
    PATIENCE seconds at most.

    Args:
        folder: of a run or of data; the lock is on the file `lock` in it, or `lock.owner` names the
            owner.
        should_stop: asked while waiting.
        active: without it nothing is locked, as on ranks for which the main one locks.

    Raises:
        UserError: another process stays, the folder cannot be made, a file of the lock is a pipe,
            or this process is told to stop.
    """

    def __init__(
        self,
        folder: Path,
        should_stop: Callable[[], str | bool] = lambda: False,
        active: bool = True,
    ):
        self.folder = folder
        self.file = None
        self.owner = folder / "lock.owner"
        self.token = ""  # our name in that file; "" where there are locks
        self.seen: tuple[str, int] | None = None  # its latest state, seen first at self.since
        self.ended = threading.Event()
        if not active:
            return
        for path in (folder / "lock", self.owner):
            check_regular(path)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.file = open(folder / "lock", "a")
        except OSError as error:
            raise UserError(cannot_write(f"out_dir={folder}: its file `lock`", error)) from None
        is_busy = f"{folder}: another process is working there: "
        deadline = None
        while not self._try():
            if deadline is None:
                deadline = time.monotonic() + PATIENCE
                print(f"{is_busy}waiting for its end, {PATIENCE:.0f} s at most", flush=True)
            if should_stop():
                raise UserError(f"{folder}: told to stop while another process is working there")
            if time.monotonic() > deadline:
                raise UserError(f"{is_busy}wait for it, or choose another folder")
            time.sleep(POLL)

    def _try(self) -> bool:
        """Try to get the lock. Returns whether the folder is ours now."""
        try:
            # A POSIX record lock ends with its process, however that ends, so a killed one leaves
            # none behind. It does not keep out a second one within the same process, as in tests.
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in HELD:
                return False
            if error.errno not in NO_LOCKS:
                raise UserError(
                    f"{self.folder} cannot be locked ({error.strerror}): put that right, or choose "
                    "another folder"
                ) from None
            return self._try_by_name()
        return True

    def _try_by_name(self) -> bool:
        """Try to become the owner without a lock. Returns whether the folder is ours now."""
        self.token = uuid.uuid4().hex
        try:
            with open(self.owner, "x") as file:
                file.write(self.token)
        except FileExistsError:
            seen = self._look()
            if seen != self.seen:
                self.seen, self.since = seen, time.monotonic()
            if time.monotonic() - self.since < STALE:
                return False
            new = self.owner.with_suffix(f".{self.token}")
            new.write_text(self.token)
            os.replace(new, self.owner)
            time.sleep(POLL)  # of two that take it over at once, the later one has it
            if self._look()[0] != self.token:
                return False
        threading.Thread(target=self._beat, daemon=True).start()
        return True

    def _look(self) -> tuple[str, int]:
        """Return the owner's name and the time of its last sign of life."""
        try:
            # Opened, a file of a network has its present state.
            with open(self.owner) as file:
                return file.read(), os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            return "", 0

    def _beat(self) -> None:
        """Give signs of life until the end."""
        while not self.ended.wait(BEAT) and self._look()[0] == self.token:
            os.utime(self.owner)

    def check(self) -> None:
        """Raise UserError if another process has taken the folder over."""
        if self.token and self._look()[0] != self.token:
            raise UserError(
                f"{self.folder}: this process stood still for more than {STALE:.0f} s, and another "
                "one works there now: nothing more is written"
            )

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Let others in."""
        self.ended.set()
        if self.token and self._look()[0] == self.token:
            self.owner.unlink()
        if self.file is not None:
            self.file.close()
