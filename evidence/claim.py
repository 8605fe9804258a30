"""Run a command that trains into a folder, unless another process does so already.

    python -m evidence.claim out/small/rms-8 python train.py ... --out_dir=out/small/rms-8

Workers of one sweep, on one machine or on several with a common folder, so share out its runs. The
claim is a lock on the file `claim` in the folder. The command inherits it, so that it ends with the
command, however that ends: a worker that is killed leaves nothing behind. Exit code 75 if another
process has the claim, else the command's.
"""

import common.interrupt  # noqa: F401

import errno
import fcntl
import os
import sys
from pathlib import Path

from common.errors import ConfigError, UserError, cannot_write, run_program

TAKEN = 75  # EX_TEMPFAIL of sysexits.h


def claim(folder: Path) -> bool:
    """Claim `folder` for this process and those that it starts; make it if there is none.

    Returns:
        Whether it is ours. True on a file system without locks, too.

    Raises:
        UserError: the folder or the file in it cannot be written.
    """
    path = folder / "claim"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(cannot_write(path, error)) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        # else no locks here; train.py says so
    os.set_inheritable(descriptor, True)
    return True


def main(argv: list[str]) -> None:
    """Claim the folder argv[0], and become the command argv[1:]."""
    if argv[:1] in (["--help"], ["-h"]):
        print(__doc__)
        return
    if len(argv) < 2:
        raise ConfigError("give a run folder and a command: see the head of evidence/claim.py")
    folder, *command = argv
    if not claim(Path(folder)):
        sys.exit(TAKEN)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise UserError(f"{command[0]}: cannot be started ({error.strerror})") from None


if __name__ == "__main__":
    run_program(main)
