"""One decoding step in the profiler: a Chrome trace per arm, kernels per block, and a picture.

The picture is like Figure 4 of Loretz & Hochreiter 2026. Kernels and device copies of a block are
the difference of a step with all blocks and a step with the first block alone. They are compared
with what the launch ledger counts for the same blocks.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from common.errors import UserError
from decode.arms import arms_of, packed_arm
from decode.ledger import launches, mean, total
from decode.step import Decoder
from model import GPT

# Class of a kernel -> parts of its name; the first match counts. Names are those of inductor,
# Triton, cuBLAS, ATen and ours. Activation comes before norm, because inductor names the paper's
# activation kernel after the statistic that it applies as well.
CLASSES = (
    ("copy", ("memcpy", "memset")),
    ("other", ("argmax",)),
    ("attention", ("attend", "combine", "attention", "flash", "fmha", "softmax")),
    ("activation", ("silu", "gelu", "activation", "sigmoid", "relu", "tanh")),
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
    """Return the class of a kernel."""
    name = name.lower()
    # with gpt-fast's options inductor writes products, and puts other work into them
    if name.startswith("triton_") and "_mm_" in f"{name}_":
        return "product"
    return next(group for group, parts in CLASSES if any(part in name for part in parts))


def profiled(call: Callable[[], Any], cuda: bool) -> tuple[profile, list]:
    """Return (profiler, its events on the GPU, or on the CPU) of a call."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as profiler:
        call()
        if cuda:
            torch.cuda.synchronize()
    wanted = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    return profiler, [event for event in profiler.events() if event.device_type == wanted]


def traced(decoder: Decoder, idx: Tensor, path: Path | None) -> list[dict[str, Any]]:
    """Trace one step after the prompts idx (B, T); write the trace to `path`, if there is one.

    Returns:
        {name, start, us} of each kernel and device copy, in the order of their starts. Kernels of a
        CUDA graph appear one by one. On a CPU these are the operators that no other one called.
    """
    for _ in range(3):
        decoder.prefill(idx)
        decoder.step()
    decoder.rewind(idx.shape[1])
    profiler, events = profiled(decoder.step, idx.is_cuda)
    if path is not None:
        profiler.export_chrome_trace(str(path))
    events = [event for event in events if event.cpu_parent is None]
    events = [event for event in events if not event.name.lower().startswith("torch-compiled")]
    return [
        {"name": event.name, "start": event.time_range.start, "us": event.time_range.elapsed_us()}
        for event in sorted(events, key=lambda event: event.time_range.start)
    ]


def compare(kernels: Counter, ledger: Counter, blocks: int) -> dict[str, Any]:
    """Compare the kernels of a trace with the launches of the ledger, for the same `blocks` blocks.

    Returns:
        kernels_per_block, ledger_per_block, equal, kernels (by name), and a line for people.
    """
    found = mean(kernels.total(), blocks)
    expected = mean(ledger.total(), blocks)
    # A copy always differs: no launch of the ledger is one. Below 0: of the shorter step alone.
    names = {name: mean(count, blocks) for name, count in kernels.items() if count}
    is_equal = kernels.total() == ledger.total() and "copy" not in map(kind, names)
    verdict = "equal" if is_equal else f"differs: {names}"
    return {
        "kernels_per_block": found,
        "ledger_per_block": expected,
        "equal": is_equal,
        "kernels": names,
        "line": f"{found} kernels per block, the ledger's {expected}: {verdict}",
    }


def trace_arms(config: Any, spec: str, model: GPT, prompt: Tensor, batch: int) -> dict[str, Any]:
    """Trace every arm into config.out.

    Returns:
        {"arms": {name: what `compare` returns, kernels_per_step}}.

    Raises:
        UserError: the model has one block.
    """
    if model.config.n_layer < 2:
        raise UserError(
            "trace: kernels per block are a difference, so it takes a model of two blocks or more"
        )
    folder = Path(config.out)
    folder.mkdir(parents=True, exist_ok=True)
    idx = prompt.expand(batch, -1).contiguous()
    filled = idx.shape[1]
    rows = {}
    pictures = {}
    for arm in arms_of(config.arms, model):
        _, packed = packed_arm(config, model, arm, batch, prompt)
        shorter = dataclasses.replace(packed, blocks=packed.blocks[:1])
        for name, compiled, tuned in config.variants(arm, packed.level, idx.device):
            events = []
            for part, path in ((packed, folder / f"{name}-{batch}.json"), (shorter, None)):
                decoder = Decoder(part, batch, filled + 8, compiled=compiled, tuned=tuned)
                events.append(traced(decoder, idx, path))
                torch._dynamo.reset()
            names = [Counter(event["name"] for event in its) for its in events]
            ledger = total(launches(packed, batch, filled + 8)[2:])
            rows[name] = compare(difference(*names), ledger, len(packed.blocks) - 1)
            rows[name]["kernels_per_step"] = len(events[0])
            pictures[name] = events[0]
            print(f"{name}: {len(events[0])} kernels in a step, {rows[name]['line']}")
    draw(
        pictures,
        folder / f"trace-{batch}.png",
        f"{spec}, batch {batch}: {WINDOW} kernels from the middle of a step",
    )
    return {"model": spec, "batch": batch, "arms": rows}


def difference(more: Counter, fewer: Counter) -> Counter:
    """Return the names of the kernels that more blocks add, without inductor's numbers.

    Two compilations number their kernels differently.
    """
    left = Counter(re.sub(r"_\d+$", "", name) for name in more.elements())
    left.subtract(re.sub(r"_\d+$", "", name) for name in fewer.elements())
    return left


def draw(pictures: dict[str, list[dict[str, Any]]], path: Path, title: str) -> None:
    """Draw a row for each arm: the kernels of its middle blocks over time, norms marked."""
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
        done = shown[0]["start"]  # when the kernels drawn so far have ended
        for event in shown:
            what = kind(event["name"])
            # a kernel that overlaps the one before is drawn from the end of that one
            begin = max(event["start"], done)
            done = max(done, event["start"] + event["us"])
            left = begin - shown[0]["start"]
            look = {"color": COLOURS[what], "edgecolor": "black", "linewidth": 0.3}
            axis.barh(0, done - begin, left=left, **look)
            if what == "norm":
                at = (left + (done - begin) / 2, 0.45)
                axis.annotate("▼", at, ha="center", color=COLOURS["norm"], fontsize=9)
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
