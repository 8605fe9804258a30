"""TaperNorm's throughput table: logits of the last token, with norms folded or not.

After Kanavalau, Amo Alonso & Lall 2026: about 30 M parameters, batches of 1 and 4, contexts of 128,
256 and 512 tokens. The rows of a batch and context are

    eager                forward passes as in the paper, bound by launches (counted as well)
    CUDA graph           the same captured (on a CPU: compiled): only the GPU's own time is left
    cached               tokens decoded one by one, with a cache of that context
    cached, CUDA graph   the same captured

The arms are RMSNorm and the finished taper as they are trained, and both folded into the weights
(of RMSNorm the gain). So the effect of the taper is not mixed with the effect of folding. Norms are
plain PyTorch, as in the paper; on a GPU there is also RMSNorm by our kernel, in one launch. All
arms of a row run in the same way and take turns in paired rounds.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from common.environment import find_dtype
from common.output import card, markdown, span, write_results
from common.stats import median_ratio
from decode.arms import with_norms
from decode.ledger import LaunchLedger
from decode.pack import pack
from decode.step import Decoder, compiled_alone
from decode.timing import captured, time_arms
from fold.gpt import to_folded
from kernels.decode import reference as decode_reference
from model import GPT, GPTConfig

# 30.3 M parameters
SHAPE = GPTConfig(norm_type="rms", n_layer=6, n_head=6, n_embd=384, n_vocab=50257)
# (batch, context) -> thousand tokens/s on an H100, of RMSNorm and of the folded taper
PUBLISHED = {
    (1, 128): (40.7, 48.7),
    (1, 256): (79.3, 96.8),
    (1, 512): (163.2, 195.5),
    (4, 128): (149.3, 180.4),
    (4, 256): (290.5, 344.9),
    (4, 512): (546.3, 615.9),
}
STEPS = 16  # tokens decoded with a cache, for one timing
# Arm -> norm type, and keys of the model. The gains of a random model are 1, so RMSNorm without
# gains is RMSNorm with its gains folded.
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "rms": ("rms", {}),
    "taper": ("taper", {}),
    "rms_folded": ("rms", {"norm_gain": "none"}),
    "taper_folded": ("taper", {}),
    "rms_triton": ("rms", {"kernels": "triton"}),
}
PAIRS = (
    ("taper", "rms"),
    ("rms_folded", "rms"),
    ("taper_folded", "rms"),
    ("taper_folded", "rms_folded"),
    ("taper_folded", "rms_triton"),
)


def make_call(model: GPT, idx: Tensor, mode: str) -> Callable[[], None]:
    """Return a call in one of the modes, for tokens idx (B, T).

    It computes the logits of each sequence's last token; cached, it decodes STEPS tokens after idx
    by the eager pass's operations.
    """
    batch, T = idx.shape
    if "cached" in mode:
        packed = pack(model, "plain")
        decoder = Decoder(packed, batch, T + STEPS, decode_reference, graph="graph" in mode)
        decoder.prefill(idx)
        return partial(decoder.go_on, T, STEPS)

    def compute() -> Tensor:
        return last_logits(model, idx)

    if mode == "CUDA graph":
        return captured(lambda: compute)
    if mode == "compiled":
        return compiled_alone(compute)
    return compute


def last_logits(model: GPT, idx: Tensor) -> Tensor:
    """Compute the logits (B, 1, n_vocab) of the last of tokens (B, T)."""
    return model.logits(model.hidden(idx)[:, -1:])


def eager_launches(model: GPT, idx: Tensor) -> Counter:
    """Count the operations that compute in one eager forward pass on idx (B, T), by name.

    Each is a launch on a GPU.
    """
    with LaunchLedger() as ledger:
        last_logits(model, idx)
    return Counter(ledger.launches)


def make_models(dtype: torch.dtype, device: torch.device, calibration: Tensor) -> dict[str, GPT]:
    """Return every arm's model, with the same random weights."""
    models = {}
    for name, (norm, keys) in ARMS.items():
        if name == "rms_triton" and device.type != "cuda":
            continue
        shape = dataclasses.replace(SHAPE, **{"kernels": "torch"} | keys)
        with device:
            base = GPT(shape).to(dtype).eval()
        models[name] = with_norms(base, norm, calibration)
    models["taper_folded"] = to_folded(models["taper_folded"])
    return models


@torch.no_grad()
def bench_last_token(config: Any, device: torch.device, place: dict[str, Any]) -> dict[str, Any]:
    """Measure every row, print the table, and write last_token.jsonl and .md into config.out.

    With config.ledger, only count launches, and write launches.jsonl and .md.
    """
    dtype = find_dtype(config.dtype, device)
    generator = torch.Generator(device).manual_seed(0)
    with device:
        calibration = torch.randint(0, 50257, (4, 128), generator=generator)
    models = make_models(dtype, device, calibration)
    launches = {name: eager_launches(model, calibration[:1, :32]) for name, model in models.items()}
    place |= {"dtype": str(dtype).removeprefix("torch."), "parameters": models["rms"].num_params()}
    if config.ledger:
        record = place | {"launches": launches}
        write(config.out, "launches", [record], launches_table(record))
        return record
    modes = ("eager", "compiled", "cached")
    if device.type == "cuda":
        modes = ("eager", "CUDA graph", "cached", "cached, CUDA graph")
    records = []
    for batch, context in PUBLISHED:
        idx = calibration.repeat(1, 4)[:batch, :context].contiguous()
        for mode in modes:
            torch._dynamo.reset()
            tokens = batch * (STEPS if "cached" in mode else context)
            calls = {name: make_call(model, idx, mode) for name, model in models.items()}
            for _ in range(3):  # warm-up: compilation, memory, clocks
                for call in calls.values():
                    call()
            times = time_arms(calls, config.rounds, device, least=6)
            row = {
                "batch": batch,
                "context": context,
                "mode": mode,
                "launches": {name: counts.total() for name, counts in launches.items()},
                "tokens_per_s": {name: tokens / median(taken) for name, taken in times.items()},
                "speed_up": {
                    f"{x}/{y}": median_ratio(times[y], times[x])
                    for x, y in PAIRS
                    if x in times and y in times
                },
                "seconds": times,
            }
            records.append(place | row)
    write(config.out, "last_token", records, last_token_table(records))
    return {"rows": [row | {"seconds": None} for row in records]}


def write(out: str, name: str, records: list[dict[str, Any]], text: str) -> None:
    """Print `text`; if `out` names a folder, write NAME.jsonl and NAME.md into it."""
    print(text)
    if out:
        write_results(Path(out), name, records, f"{name}.md", text)


def launches_table(record: dict[str, Any]) -> str:
    """Return Markdown: a row for each arm, a column for each operation."""
    launches = record["launches"]
    names = list(sum(launches.values(), Counter()))  # of operations
    lines = [
        "# Launches of an eager forward pass: TaperNorm's protocol",
        "",
        "Counted, not timed (`python bench_decode.py --last_token --ledger`): "
        f"{record['parameters'] / 1e6:.1f} M parameters, {record['dtype']}, norms in plain "
        f"PyTorch; torch {record['versions']['torch']}; commit {record['git']}. Every operation "
        "that computes is a launch on a GPU.",
        "",
    ]
    most = launches["rms"].total()
    rows = [
        [arm, counts.total(), most - counts.total(), *(counts[name] for name in names)]
        for arm, counts in launches.items()
    ]
    return "\n".join([*lines, markdown(["arm", "all", "fewer", *names], rows)])


def last_token_table(records: list[dict[str, Any]]) -> str:
    """Return Markdown: speeds and speed-ups, with the published speed-up of the folded taper."""
    row = records[0]
    launches = ", ".join(f"{name} {count}" for name, count in row["launches"].items())
    lines = [
        "# Logits of the last token: TaperNorm's protocol",
        "",
        f"{card(row)}; {row['parameters'] / 1e6:.1f} M parameters, "
        f"{row['dtype']}. Thousand tokens/s; speed-ups with 95 % intervals of "
        f"{len(row['seconds']['rms'])} paired rounds; published: the folded taper over RMSNorm "
        "(not folded: 1.08 to 1.15; with a cache, eager: 1.14, folded 1.18). "
        "`cached` decodes tokens behind so many.",
        "",
        f"Launches of an eager forward pass: {launches}.",
        "",
    ]
    heads = ["batch", "context", "mode", *row["seconds"], *row["speed_up"], "published"]
    rows = []
    for row in records:
        speeds = (f"{1e-3 * row['tokens_per_s'][name]:.2f}" for name in row["seconds"])
        ups = (span(ratio, "{:.3f}") for ratio in row["speed_up"].values())
        before, after = PUBLISHED[row["batch"], row["context"]]
        published = f"{after / before:.2f}" if row["mode"] == "eager" else ""
        rows.append([row["batch"], row["context"], row["mode"], *speeds, *ups, published])
    return "\n".join([*lines, markdown(heads, rows)])
