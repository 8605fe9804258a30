"""Programmatic dependent launch: a kernel begins while the one before it ends (NVIDIA, sm_90 and
later).

Within `overlapping()`, the kernels of a decoding step are launched so that their programs may be on
the GPU already when the kernel before is still at work. Each says at once that the next may come,
too, does what needs nothing of the kernels before (a product of one row sets out for its first
weights, the joint attention for the cache), and then waits until the one before has ended and its
results can be seen. Every kernel of the chain waits, so that what ran before the one before has
ended as well. The step's first kernel is launched as usual: what it and all others find from the
step before (cache, position) is complete. So is what a kernel that is launched as usual in between
has done.

PTX ISA, griddepcontrol; CUDA programming guide, programmatic dependent launch.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl

_is_on = False


@contextlib.contextmanager
def overlapping() -> Iterator[None]:
    """Kernels that can are launched so within."""
    global _is_on
    before, _is_on = _is_on, True
    try:
        yield
    finally:
        _is_on = before


def launch_options() -> dict[str, Any]:
    """For the launch of a kernel with a parameter PDL: that, and what Triton wants to know."""
    return {"PDL": True, "launch_pdl": True} if _is_on else {"PDL": False}


@triton.jit
def wait(PDL: tl.constexpr):
    """The next kernel may come; until the one before has ended, nothing of it is read behind this
    line, nor written.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
