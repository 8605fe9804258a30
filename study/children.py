"""Have the programs that a study starts end with it, even where it is killed."""

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


# For subprocess's preexec_fn. Elsewhere than on Linux a child goes on until it is done.
end_with_parent = _end_with_parent if sys.platform == "linux" else None
