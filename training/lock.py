"""One process at a time in a run folder."""

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO

from common.errors import UserError

PATIENCE = 60.0  # seconds: a job that is queued anew may begin while the one before it still saves
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class FolderLock:
    """Keeps other processes out of a folder, which is made if need be, until `release` or the end
    of this process.

    Another process may be about to end: wait for it, PATIENCE seconds at most.

    Args:
        folder: the run folder; the lock is on the file `lock` in it.
        is_told_to_stop: asked while waiting.
        say: prints a line for people.

    Raises:
        UserError: another process stays there, the folder cannot be made, or the program is told to
        stop.
    """

    def __init__(
        self,
        folder: Path,
        is_told_to_stop: Callable[[], str | bool],
        say: Callable[[str], None] | None = None,
    ):
        self.folder, self.is_told_to_stop, self.say = (
            folder,
            is_told_to_stop,
            say or partial(print, flush=True),
        )
        self.is_new = False
        self.end: float | None = None  # of the patience, once another process is met
        self.file = self._open()
        while self.file is not None and not self._try():
            self.file.close()
            self._wait()
            self.file = (
                self._open()
            )  # anew, because the other process may take away a folder that remained empty

    def _open(self) -> IO[str] | None:
        """The lock file; None in a folder in which nobody can write, so that there is nothing to
        keep others from.
        """
        try:
            self.is_new |= not self.folder.exists()
            self.folder.mkdir(parents=True, exist_ok=True)
            return open(self.folder / "lock", "a")
        except OSError as error:
            if self.folder.is_dir() and not os.access(self.folder, os.W_OK):
                return None
            raise UserError(
                f"out_dir={self.folder}: cannot be written ({error.strerror})"
            ) from None

    def _try(self) -> bool:
        """Is the folder ours now?"""
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):  # another process has it
                return False
            if error.errno not in NO_LOCKS:
                raise UserError(
                    f"{self.folder / 'lock'}: cannot be locked ({error.strerror})"
                ) from None
            self.say(
                f"{self.folder} is on a file system without locks: let no other run write there"
            )
        try:  # it must still be the file that others will open
            return os.path.samestat(os.fstat(self.file.fileno()), os.stat(self.folder / "lock"))
        except OSError:
            return False

    def _wait(self) -> None:
        """A moment; raises UserError when there is no sense in waiting any longer."""
        if self.end is None:
            self.end = time.monotonic() + PATIENCE
            self.say(
                f"{self.folder}: another process is training there: "
                f"waiting for its end, {PATIENCE:.0f} s at most"
            )
        if self.is_told_to_stop():
            raise UserError(f"{self.folder}: told to stop while another process is training there")
        if time.monotonic() > self.end:
            raise UserError(
                f"{self.folder}: another process is training there: "
                "wait for it, or choose another out_dir"
            )
        time.sleep(0.2)

    def release(self) -> None:
        """Let others in. A folder that was made here, and in which there is nothing yet, goes."""
        if self.file is None:
            return
        with contextlib.suppress(OSError):
            if self.is_new and os.listdir(self.folder) == ["lock"]:
                (self.folder / "lock").unlink()
                self.folder.rmdir()
        self.file.close()
        self.file = None
