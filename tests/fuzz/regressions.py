"""Commands that were faults once: the program and its arguments in the folder of world.py."""

REGRESSIONS: tuple[tuple[str, tuple[str, ...]], ...] = ()
