"""Ctrl-C while a program still imports: one line and exit code 130, as later in run_program.

Every program imports this module before all others (`first` in pyproject.toml), because torch and
other large packages take seconds. Within their imports a KeyboardInterrupt would become another
exception, or be lost, so the process ends in the signal handler: there is nothing to lose yet.
"""

import signal
import sys

from common.errors import end_interrupted

# of importlib's own frames, before and after somebody imports it by name
IMPORTERS = ("_frozen_importlib", "importlib.")


def _is_imported_by_program() -> bool:
    """Is the module that imports this one the program itself, not a test or another module?"""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals["__name__"].startswith(IMPORTERS):
        frame = frame.f_back
    return frame is not None and frame.f_globals["__name__"] == "__main__"


# In the background of a shell script Ctrl-C is ignored, and stays so.
is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
if is_default and _is_imported_by_program():
    signal.signal(signal.SIGINT, end_interrupted)
