"""Stand-ins, to ask Triton and inductor about a GPU that is not here: tensors without memory, and
attributes replaced for a while.

There is no other way: both ask their own modules for the device. Of our own code, one method is
replaced, Attention.attend, in the models that bench/bytes.py counts and whose graphs never run.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


@contextlib.contextmanager
def replaced(target: Any, **values: Any) -> Iterator[None]:
    """Give `target` (a module, a class, an object) these attributes within the block.

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
