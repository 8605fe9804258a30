"""One process at a time in a folder."""

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO

from common.errors import UserError, cannot_write

# Seconds. A job that is queued again may start while the previous one still saves.
PATIENCE = 60.0
POLL = 0.2  # seconds between two attempts to get the lock
ATTEMPTS = 100  # to open its file
HELD = (errno.EACCES, errno.EAGAIN)  # another process has the lock
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # of a file system without locks


class FolderLock:
    """Keep other processes out of a folder until `release`, or until this process ends.

    As a context manager it is released when the block ends.

    Makes the folder if there is none. Another process may be about to finish: waits for it,
    PATIENCE seconds at most.

    Args:
        folder: of a run or of data; the lock is on the file `lock` in it.
        should_stop: asked while waiting.
        active: without it nothing is locked, as on ranks for which the main one locks.
        say: prints a line for people.

    Raises:
        UserError: another process stays, the folder cannot be made, or this process is told to
            stop.
    """

    def __init__(
        self,
        folder: Path,
        should_stop: Callable[[], str | bool] = lambda: False,
        active: bool = True,
        say: Callable[[str], None] | None = None,
    ):
        self.folder = folder
        self.should_stop = should_stop
        self.say = say or partial(print, flush=True)
        self.is_new = False  # this process made the folder
        self.deadline: float | None = None  # set when another process is met
        self.file = self._open() if active else None
        while self.file is not None and not self._try():
            self.file.close()
            self._wait()
            # Open it again: the other process may have removed a folder that stayed empty.
            self.file = self._open()

    def _open(self) -> IO[str]:
        """Open the lock file."""
        for _ in range(ATTEMPTS):
            try:
                # os.path, because Path.exists raises for a name that is too long
                self.is_new |= not os.path.exists(self.folder)
                self.folder.mkdir(parents=True, exist_ok=True)
                return open(self.folder / "lock", "a")
            except FileNotFoundError as error:
                problem = error  # another process has just removed its empty folder
            except OSError as error:
                problem = error
                break
        raise UserError(cannot_write(f"out_dir={self.folder}: its file `lock`", problem))

    def _try(self) -> bool:
        """Try to get the lock. Returns whether the folder is ours now."""
        path = self.folder / "lock"
        try:
            # A POSIX record lock ends with its process, however that ends, so a killed one leaves
            # none behind. It does not keep out a second one within the same process, as in tests.
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in HELD:
                return False
            if error.errno not in NO_LOCKS:
                raise UserError(f"{path}: cannot be locked ({error.strerror})") from None
            self.say(
                f"{self.folder} is on a file system without locks: let no other process write there"
            )
        # The previous process may have removed the file between our open and our lock. Others
        # would then open, and lock, another file of this name.
        try:
            return os.path.samestat(os.fstat(self.file.fileno()), os.stat(path))
        except OSError:
            return False

    def _wait(self) -> None:
        """Wait a moment. Raises UserError when waiting has lasted long enough."""
        if self.deadline is None:
            self.deadline = time.monotonic() + PATIENCE
            self.say(
                f"{self.folder}: another process is working there: "
                f"waiting for its end, {PATIENCE:.0f} s at most"
            )
        if self.should_stop():
            raise UserError(f"{self.folder}: told to stop while another process is working there")
        if time.monotonic() > self.deadline:
            raise UserError(
                f"{self.folder}: another process is working there: "
                "wait for it, or choose another folder"
            )
        time.sleep(POLL)

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Let others in. Removes a folder that was made here and stayed empty."""
        if self.file is None:
            return
        with contextlib.suppress(OSError):
            # While the lock is held: see the end of _try.
            if self.is_new and os.listdir(self.folder) == ["lock"]:
                (self.folder / "lock").unlink()
                self.folder.rmdir()
        self.file.close()  # gives up the lock
        self.file = None
