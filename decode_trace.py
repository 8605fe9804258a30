"""One decoding step as the profiler sees it: a Chrome trace per arm, kernels per block, a picture like Figure 4."""

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from decode import Decoder
from decode_arms import find_arms, with_norms
from model import GPT
from packing import PackedGPT, pack

# What a kernel is, by its name: the first match counts. Names are inductor's, Triton's, cuBLAS', ATen's and ours.
# Activation before norm: inductor names the paper's activation kernel after the statistic that it applies, too.
CLASSES = (
    ("attention", ("attend", "attention", "flash", "fmha", "softmax")),
    ("activation", ("silu", "gelu", "activation", "sigmoid", "relu", "tanh")),
    ("norm", ("norm", "rsqrt", "_red_", "_per_", "mean_pow")),
    ("product", ("gemv", "gemm", "splitk", "cutlass", "xmma", "wgmma", "nvjet", "mm", "linear", "vector_kernel",
                 "matrix_kernel")),
    ("heads", ("heads", "rope", "index_put", "index_copy")),
    ("other", ("",)),
)  # fmt: skip
COLOURS = {"norm": "#0072B2", "product": "#D55E00", "activation": "#F0E442", "attention": "#009E73", "heads": "#CC79A7",
           "other": "#999999"}  # fmt: skip


def kind(name: str) -> str:
    """The class of a kernel."""
    return next(word for word, parts in CLASSES if any(part in name.lower() for part in parts))


def traced(decoder: Decoder, filled: int, path: Path | None) -> list[dict[str, Any]]:
    """{name, start, us} of each kernel of one step, in order; on a CPU the operators that no other one called.

    The trace is written to `path`. A CUDA graph's kernels appear one by one, as they ran.
    """
    cuda = decoder.token.is_cuda
    for _ in range(3):
        decoder.rewind(filled)
        decoder.step()
    decoder.rewind(filled)
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as profiler:
        decoder.step()
        if cuda:
            torch.cuda.synchronize()
    if path is not None:
        profiler.export_chrome_trace(str(path))
    wanted = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    events = [event for event in profiler.events() if event.device_type == wanted and event.cpu_parent is None]
    events = [event for event in events if not event.name.lower().startswith(("memcpy", "memset", "torch-compiled"))]
    return [{"name": event.name, "start": event.time_range.start, "us": event.time_range.elapsed_us()}
            for event in sorted(events, key=lambda event: event.time_range.start)]  # fmt: skip


def trace_arms(config: Any, spec: str, model: GPT, prompt: Tensor) -> dict[str, Any]:
    """Traces every arm into config.out; {"arms": {name: {kernels_per_step, kernels_per_block, by_class}}}.

    Kernels per block are those of L blocks less those of L - 1.
    """
    folder, batch = Path(config.out), config.batches[0]
    folder.mkdir(parents=True, exist_ok=True)
    idx, rows, pictures = prompt.expand(batch, -1).contiguous(), {}, {}
    for arm in find_arms(config.arms):
        packed = pack(with_norms(model, arm.norm_type, prompt, **config.norm_keys.get(arm.norm_type, {})), arm.level)
        shorter = PackedGPT(**{**vars(packed), "blocks": packed.blocks[:-1]})
        compiled = config.compiled and (arm.level != "fused" or not idx.is_cuda)
        events = []
        for part, path in ((packed, folder / f"{arm.name}.json"), (shorter, None)):
            decoder = Decoder(part, batch, idx.shape[1] + 8, compiled=compiled)
            decoder.prefill(idx)
            events.append(traced(decoder, idx.shape[1], path))
            torch._dynamo.reset()
        counts = [Counter(event["name"] for event in part) for part in events]
        block = counts[0].total() - counts[1].total()
        by_class = Counter(kind(event["name"]) for event in events[0])
        by_class.subtract(Counter(kind(event["name"]) for event in events[1]))
        rows[arm.name] = {"kernels_per_step": counts[0].total(), "kernels_per_block": block,
                          "per_block_by_class": {name: n for name, n in by_class.items() if n},
                          "us": sum(event["us"] for event in events[0])}  # fmt: skip
        pictures[arm.name] = events[0]
        print(f"{arm.name}: {counts[0].total()} kernels in a step, {block} per block: {dict(by_class)}")
    draw(pictures, folder / "trace.png", f"{spec}, batch {batch}: kernels of one step")
    return {"model": spec, "batch": batch, "arms": rows}


def draw(pictures: dict[str, list[dict[str, Any]]], path: Path, title: str, window: int = 40) -> None:
    """A row for each arm: the kernels of its middle blocks over time, norms flagged."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import patches, pyplot

    figure, axes = pyplot.subplots(len(pictures), 1, figsize=(12, 1 + 1.1 * len(pictures)), squeeze=False)
    for axis, (name, events) in zip(axes[:, 0], pictures.items()):
        middle = max(0, len(events) // 2 - window // 2)
        shown = events[middle : middle + window]
        for event in shown:
            start, what = event["start"] - shown[0]["start"], kind(event["name"])
            axis.barh(0, event["us"], left=start, color=COLOURS[what], edgecolor="black", linewidth=0.3)
            if what == "norm":
                axis.annotate("▼", (start + event["us"] / 2, 0.45), ha="center", color=COLOURS["norm"], fontsize=9)
        axis.set_yticks([0], [name])
        axis.set_ylim(-0.5, 0.8)
    axes[-1, 0].set_xlabel("microseconds")
    figure.legend(handles=[patches.Patch(color=color, label=name) for name, color in COLOURS.items()],
                  loc="outside lower center", ncols=len(COLOURS), fontsize=9)  # fmt: skip
    figure.suptitle(title, fontsize=10)
    figure.set_layout_engine("constrained")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
