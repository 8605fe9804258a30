"""Where the time of a training step goes: kernels by class, for bench/train.py's arms side by side
(its key `profile`).

A ratio says that an arm is faster; this says where. On a GPU the kernels and copies of a few steps
are summed, and what they leave of a step's measured time is the GPU waiting; on a CPU it is the
operators, each without those that it calls.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from common.output import markdown
from decode.trace import profiled

STEPS = 3  # under the profiler
ELEMENTWISE = "norms and elementwise"
REST = "rest of the step"
# What a kernel is, by its name: the first match counts. Names are inductor's, cuBLAS', flash
# attention's and ATen's.
CLASSES = (
    ("copy", ("memcpy", "memset")),
    ("optimizer", ("adam", "multi_tensor_apply", "lpnorm", "foreach", "linalg_vector_norm")),
    ("loss", ("log_softmax", "logsumexp", "nll_loss", "cross_entropy")),
    # Inductor names its kernels after the operators that they fuse, and after some next to them. On
    # a CPU they are the call of their graph.
    (ELEMENTWISE, ("triton_per", "triton_red", "triton_poi", "cpp_fused", "compiledfxgraph")),
    ("attention", ("flash", "fmha", "sdpa", "attention", "cudnn")),
    (
        "product",
        (
            "gemm",
            "gemv",
            "cutlass",
            "nvjet",
            "xmma",
            "splitk",
            "triton_tem",
            "::mm",
            "bmm",
            "addmm",
            "linear",
        ),
    ),
    ("embedding", ("embedding", "index_put", "indexing_backward")),
    (ELEMENTWISE, ("",)),
)
NAMES = tuple(dict.fromkeys(name for name, _ in CLASSES))


def kernel_class(name: str) -> str:
    """Return the class of a kernel or operator."""
    name = name.lower()
    return next(label for label, parts in CLASSES if any(part in name for part in parts))


def profile_step(step: Callable[[], Tensor], device: torch.device) -> list[dict[str, Any]]:
    """{name, class, launches, us} of each kernel of a step, means over STEPS of them, longest
    first; none where the profiler sees nothing.
    """
    cuda = device.type == "cuda"
    _, events = profiled(lambda: [step() for _ in range(STEPS)], cuda)
    launches, spent = Counter(), Counter()
    for event in events:
        # A GPU's events hold annotations too (optimiser step, compiled region). They span kernels
        # that count themselves, and AdamW would be there twice.
        if not event.is_user_annotation:
            launches[event.name] += 1
            us = event.time_range.elapsed_us() if cuda else event.self_cpu_time_total
            spent[event.name] += us
    return [
        {
            "name": name,
            "class": kernel_class(name),
            "launches": launches[name] / STEPS,
            "us": us / STEPS,
        }
        for name, us in spent.most_common()
    ]


def by_class(kernels: list[dict[str, Any]], step_us: float) -> dict[str, tuple[float, float]]:
    """class -> (milliseconds of a step, launches), classes without any left out; REST: what they
    leave of the step.
    """
    spent, launches = Counter(), Counter()
    for kernel in kernels:
        spent[kernel["class"]] += kernel["us"] / 1e3
        launches[kernel["class"]] += kernel["launches"]
    spent[REST] = step_us / 1e3 - math.fsum(spent.values())
    return {name: (spent[name], launches[name]) for name in (*NAMES, REST) if name in spent}


def profile_table(arms: dict[str, dict[str, tuple[float, float]]]) -> str:
    """Markdown: classes down, `by_class` of each arm across."""
    first = next(iter(arms.values()))
    rows = []
    for name in (*NAMES, REST):
        cells = [name]
        for classes in arms.values():
            ms, launches = classes.get(name, (0.0, 0))
            cells.append(f"{ms:.3f} ({launches:,.0f}; {ms - first.get(name, (0.0, 0))[0]:+.3f})")
        if any(name in classes for classes in arms.values()):
            rows.append(cells)
    return (
        "Milliseconds of a step by kind of kernel, from the profiler; in brackets launches, and "
        f"how much more than in the first arm. {REST}: what they leave of its median time. Below "
        "0, profiling itself, or other work beside, has taken so much that differences mean "
        "little: compare with those of the A/A arm.\n\n" + markdown(["kind", *arms], rows)
    )
