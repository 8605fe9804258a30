"""One decoding step as the profiler sees it: a Chrome trace per arm, kernels per block, a picture
like Figure 4.

Kernels and device copies of a block, by the difference of a step with all blocks and one with the
first alone, are compared with what the launch ledger counts for the same blocks.
"""

import dataclasses
import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from common.errors import UserError
from common.output import writing
from decode.arms import find_arms, packed_arm
from decode.ledger import launches, mean, total
from decode.step import Decoder
from model import GPT

# What a kernel is, by its name: the first match counts. Names are inductor's, Triton's, cuBLAS',
# ATen's and ours. Activation before norm: inductor names the paper's activation kernel after the
# statistic that it applies, too. A Triton kernel with an mm of its own (gpt-fast's options) is a
# product, whatever else inductor put into it.
CLASSES = (
    ("copy", ("memcpy", "memset")),
    ("other", ("argmax",)),
    ("attention", ("attend", "combine", "attention", "flash", "fmha", "softmax")),
    ("activation", ("silu", "gelu", "activation", "epilogue", "sigmoid", "relu", "tanh")),
    ("norm", ("norm", "rsqrt", "_red_", "_per_", "mean_pow", "forward_kernel")),
    (
        "product",
        (
            "gemv",
            "gemm",
            "splitk",
            "cutlass",
            "xmma",
            "wgmma",
            "nvjet",
            "mm",
            "linear",
            "vector_kernel",
            "matrix_kernel",
        ),
    ),
    ("heads", ("heads", "rope", "index_put", "index_copy")),
    ("other", ("",)),
)
# The class of a launch of the ledger.
LAUNCHES = {
    "norm": "norm",
    "heads": "heads",
    "attend": "attention",
    "attend_parts": "attention",
    "heads_attend": "attention",
    "heads_attend_parts": "attention",
    "combine": "attention",
    "activation": "activation",
    "norm_activation": "activation",
    "matmul": "product",
    "matmul_add": "product",
    "project": "product",
    "norm_project": "product",
    "shared_project": "product",
}
WINDOW = 40  # kernels in the picture
COLOURS = {
    "norm": "#0072B2",
    "product": "#D55E00",
    "activation": "#F0E442",
    "attention": "#009E73",
    "heads": "#CC79A7",
    "copy": "#56B4E9",
    "other": "#999999",
}


def kind(name: str) -> str:
    """The class of a kernel."""
    name = name.lower()
    if name.startswith("triton_") and "_mm_" in f"{name}_":
        return "product"
    return next(word for word, parts in CLASSES if any(part in name for part in parts))


def traced(decoder: Decoder, filled: int, path: Path | None) -> list[dict[str, Any]]:
    """{name, start, us} of each kernel and device copy of one step, in order; on a CPU the
    operators that no other one called.

    The trace is written to `path`. A CUDA graph's kernels appear one by one, as they ran. Raises
    UserError for a trace without any: then it is the profiler that saw nothing.
    """
    cuda = decoder.token.is_cuda
    for _ in range(3):
        decoder.rewind(filled)
        decoder.step()
    decoder.rewind(filled)
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    ) as profiler:
        decoder.step()
        if cuda:
            torch.cuda.synchronize()
    if path is not None:
        profiler.export_chrome_trace(str(path))
    wanted = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    events = [
        event
        for event in profiler.events()
        if event.device_type == wanted and event.cpu_parent is None
    ]
    events = [event for event in events if not event.name.lower().startswith("torch-compiled")]
    if not events:
        raise UserError(
            "trace: the profiler saw no kernels: end other profilers; "
            "is torch built for this driver?"
        )
    return [
        {"name": event.name, "start": event.time_range.start, "us": event.time_range.elapsed_us()}
        for event in sorted(events, key=lambda event: event.time_range.start)
    ]


def compare(kernels: Counter, ledger: Counter, blocks: int) -> dict[str, Any]:
    """What a trace and the ledger say of the same `blocks` blocks: names of kernels, names of
    launches, and a line.
    """
    traced_kinds, counted = Counter(), Counter()
    for name, count in kernels.items():
        traced_kinds[kind(name)] += count
    for name, count in ledger.items():
        counted[LAUNCHES.get(name, "other")] += count
    found, expected = mean(kernels.total(), blocks), mean(ledger.total(), blocks)
    verdict = "equal"
    # no launch of the ledger is a copy
    if kernels.total() != ledger.total() or traced_kinds["copy"]:
        apart = {
            word: traced_kinds[word] - counted[word] for word in sorted(traced_kinds | counted)
        }
        names = [
            f"{word} {n / blocks:+g} "
            f"({', '.join(name for name in kernels if kind(name) == word) or 'none'})"
            for word, n in apart.items()
            if n
        ]
        verdict = f"differs: {'; '.join(names)}"
    return {
        "kernels_per_block": found,
        "ledger_per_block": expected,
        "equal": verdict == "equal",
        "per_block_by_class": {word: mean(n, blocks) for word, n in traced_kinds.items() if n},
        "line": f"{found} kernels per block, the ledger's {expected}: {verdict}",
    }


def trace_arms(config: Any, spec: str, model: GPT, prompt: Tensor, batch: int) -> dict[str, Any]:
    """Traces every arm into config.out; {"arms": {name: compare()'s, kernels_per_step, us}}. Raises
    UserError for a model of one block, or a folder that cannot be written.
    """
    if model.config.n_layer < 2:
        raise UserError(
            "trace: kernels per block are a difference, so it takes a model of two blocks or more"
        )
    folder, idx = Path(config.out), prompt.expand(batch, -1).contiguous()
    with writing(folder):  # said now, not after the traces
        pass
    filled, rows, pictures = idx.shape[1], {}, {}
    for arm in find_arms(config.arms):
        packed = packed_arm(model, arm, batch, prompt, config.norm_keys, config.library_from)[1]
        shorter = dataclasses.replace(packed, blocks=packed.blocks[:1])
        for name, compiled, tuned in config.variants(arm, packed.level, idx.device):
            names = []
            for part, path in ((packed, folder / f"{name}-{batch}.json"), (shorter, None)):
                decoder = Decoder(part, batch, filled + 8, compiled=compiled, tuned=tuned)
                decoder.prefill(idx)
                events = traced(decoder, filled, path)
                names.append(Counter(event["name"] for event in events))
                if path is not None:
                    pictures[name] = events
                torch._dynamo.reset()
            ledger = total(launches(packed, batch, filled + 8)[2:])
            rows[name] = compare(difference(*names), ledger, len(packed.blocks) - 1)
            rows[name] |= {"kernels_per_step": names[0].total(), "us": busy(pictures[name])}
            print(f"{name}: {names[0].total()} kernels in a step, {rows[name]['line']}")
    draw(
        pictures,
        folder / f"trace-{batch}.png",
        f"{spec}, batch {batch}: {WINDOW} kernels from the middle of a step",
    )
    return {"model": spec, "batch": batch, "arms": rows}


def busy(events: list[dict[str, Any]]) -> float:
    """Microseconds in which one kernel or more was there: those that overlap wait for each other in
    part of theirs.
    """
    spent, end = 0.0, -math.inf
    for event in events:  # in the order of their starts
        last = event["start"] + event["us"]
        spent, end = spent + max(0.0, last - max(event["start"], end)), max(end, last)
    return spent


def difference(more: Counter, fewer: Counter) -> Counter:
    """Names of the kernels that more blocks add. Two compilations number their kernels differently,
    so what only the shorter step has is taken off by class.
    """
    left = Counter(more)
    for name, count in fewer.items():
        same = min(left[name], count)
        left[name] -= same
        for _ in range(count - same):
            like = max(
                (other for other in left if kind(other) == kind(name)),
                key=left.__getitem__,
                default=None,
            )
            left[like if like is not None and left[like] else max(left, key=left.__getitem__)] -= 1
    return +left


def draw(pictures: dict[str, list[dict[str, Any]]], path: Path, title: str) -> None:
    """A row for each arm: the kernels of its middle blocks over time, norms flagged."""
    from matplotlib.patches import Patch

    from common.plotting import plt, save  # matplotlib takes a second to import

    figure, axes = plt.subplots(
        len(pictures),
        1,
        figsize=(12, 1 + 1.1 * len(pictures)),
        layout="constrained",
        squeeze=False,
        sharex=True,
    )
    for axis, (name, events) in zip(axes[:, 0], pictures.items()):
        middle = max(0, len(events) // 2 - WINDOW // 2)
        shown = events[middle : middle + WINDOW]
        done = 0.0
        for event in shown:
            start, what = event["start"] - shown[0]["start"], kind(event["name"])
            # from where the one before has ended
            start, done = max(start, done), max(done, start + event["us"])
            axis.barh(
                0, done - start, left=start, color=COLOURS[what], edgecolor="black", linewidth=0.3
            )
            if what == "norm":
                axis.annotate(
                    "▼", ((start + done) / 2, 0.45), ha="center", color=COLOURS["norm"], fontsize=9
                )
        axis.set_yticks([0], [name])
        axis.set_ylim(-0.5, 0.8)
    axes[-1, 0].set_xlabel("microseconds")
    figure.legend(
        handles=[Patch(color=color, label=name) for name, color in COLOURS.items()],
        loc="outside lower center",
        ncols=len(COLOURS),
        fontsize=9,
    )
    figure.suptitle(title, fontsize=10)
    save(figure, path)
