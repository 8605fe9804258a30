"""Attributes of other libraries, replaced for a while: how Triton and inductor are asked about a GPU that is not here.

Neither has another way in: both ask their own modules for the device. Our own code is never replaced like that.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

_MISSING = object()


@contextlib.contextmanager
def replaced(target: Any, **values: Any) -> Iterator[None]:
    """Within the block, `target` (a module or a class) has these attributes; then again its own."""
    own = {name: vars(target).get(name, _MISSING) for name in values}
    try:
        for name, value in values.items():
            setattr(target, name, value)
        yield
    finally:
        for name, value in own.items():
            if value is _MISSING:  # it was inherited
                delattr(target, name)
            else:
                setattr(target, name, value)
