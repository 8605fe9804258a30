"""Programmatic dependent launch: a kernel begins while the one before it ends (NVIDIA, sm_90 on).

Within `overlapping()`, programs of a kernel may be on the GPU while the kernel before still works.
A kernel then

1. allows the next one to be launched, at once;
2. does what needs nothing of the kernels before: a product of one row loads its first weights,
   heads_attend loads from the cache;
3. waits until the kernel before has ended and its results are visible.

Every kernel of the chain waits. So when the kernel before has ended, all earlier ones have too. The
first kernel of a step is launched in the ordinary way: what the last step has written (cache,
position) is complete for it and for all kernels after it. So is the work of any kernel between
that is launched in the ordinary way.

Behind an operator of ours inductor does not know which kernel came before, so its own next kernel
waits before it loads anything. Kernels of both kinds may follow each other in any order.

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
    """Launch the kernels within so that they overlap, those that can."""
    global _is_on
    before = _is_on
    _is_on = True
    try:
        yield
    finally:
        _is_on = before


def launch_options() -> dict[str, Any]:
    """Return the keywords of the launch of a kernel with a parameter PDL: it, and Triton's own."""
    if _is_on:
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@triton.jit
def wait(PDL: tl.constexpr):
    """Let the next kernel be launched, and wait until the one before has ended.

    What that one writes may be read, and what it reads may be written, only after this line.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
