"""Ctrl-C while a program still imports: one line and exit code 130, as later in run_program.

Every program imports this module before all others (`first` in pyproject.toml), because torch and
other large packages take seconds.
"""

import sys
from types import TracebackType

from common.errors import say_interrupted


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Say of Ctrl-C that it was one; show any other exception as Python does."""
    is_interactive = hasattr(sys, "ps1")
    if issubclass(kind, KeyboardInterrupt) and not is_interactive:
        say_interrupted()
    sys.__excepthook__(kind, error, trace)


sys.excepthook = _hook
