"""Run a command that trains into a folder, unless another process does so already.

    python -m evidence.claim out/small/rms-8 python train.py ... --out_dir=out/small/rms-8

Workers of one sweep, on one machine or on several with a common folder, so share out its runs. The
claim is a lock on the file `claim` in the folder. The command inherits it, so that it ends with the
command, however that ends: a worker that is killed leaves nothing behind. Exit code 75 if another
process has the claim, else the command's.
"""

import fcntl
import os
import sys
from pathlib import Path

from common.errors import ConfigError, UserError, cannot_write, run_program

TAKEN = 75  # EX_TEMPFAIL of sysexits.h


def main(argv: list[str]) -> None:
    """Claim the folder argv[0], made if there is none, and become the command argv[1:]."""
    if len(argv) < 2:
        raise ConfigError("give a run folder and a command: see the head of evidence/claim.py")
    path = Path(argv[0]) / "claim"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(cannot_write(path, error)) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        sys.exit(TAKEN)
    except OSError:
        pass  # a file system without locks: train.py keeps others out of its folder
    try:
        os.set_inheritable(descriptor, True)
        os.execvp(argv[1], argv[1:])
    except OSError as error:
        raise UserError(f"{argv[1]}: cannot be started ({error.strerror})") from None


if __name__ == "__main__":
    run_program(main, __doc__)
