"""Attributes replaced for a while: how Triton and inductor are asked about a GPU that is not here.

Neither has another way in: both ask their own modules for the device. Of our own code that is done
to one method of the models that bench/bytes.py counts, whose graphs never run: Attention.attend.
"""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(target: Any, **values: Any) -> Iterator[None]:
    """Within the block, `target` (a module, a class, an object) has these attributes; then again
    its own.

    Raises AttributeError for a name that `target` does not have: a library that has renamed it
    would not see the value.
    """
    with contextlib.ExitStack() as undo:
        for name, value in values.items():
            getattr(target, name)
            if name in vars(target):
                undo.callback(setattr, target, name, vars(target)[name])
            else:  # inherited
                undo.callback(delattr, target, name)
            setattr(target, name, value)
        yield
