"""TaperNorm's throughput table (Kanavalau, Amo Alonso & Lall 2026): logits of the last token, norms
folded or not.

About 30 M parameters, batches of 1 and 4, contexts of 128, 256 and 512 tokens. Rows: eager forward
passes, as the paper has them, which are bound by launches (counted beside); the same captured in a
CUDA graph (on a CPU: compiled), where only the GPU's own time is left; and tokens decoded one by
one with a cache of that context. Arms: RMSNorm and the finished taper as they are trained, and both
folded into the weights (of RMSNorm the gain), so that what the taper is worth is not mixed with
what folding is; norms in plain PyTorch as in the paper; on a GPU also RMSNorm by our kernel, one
launch. All arms of a row run in the same way and take turns in paired rounds.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from common.environment import find_dtype
from common.errors import UserError
from common.output import card, markdown, span, write_results
from common.stats import median_ratio, paired_times
from decode.arms import with_norms
from decode.ledger import LaunchLedger
from decode.pack import pack
from decode.step import Decoder, compiled_alone
from fold.gpt import to_folded
from kernels.decode import reference as decode_reference
from model import GPT, GPTConfig

# 30.3 M parameters
SHAPE = GPTConfig(norm_type="rms", n_layer=6, n_head=6, n_embd=384, n_vocab=50257)
# Thousand tokens/s on an H100: (batch, context) -> RMSNorm, folded taper
PUBLISHED = {
    (1, 128): (40.7, 48.7),
    (1, 256): (79.3, 96.8),
    (1, 512): (163.2, 195.5),
    (4, 128): (149.3, 180.4),
    (4, 256): (290.5, 344.9),
    (4, 512): (546.3, 615.9),
}
STEPS = 16  # decoded with a cache, for one timing
# Norm type and keys of the model. Gains are 1 at random: without them RMSNorm is what it is when
# they are folded.
ARMS = {
    "rms": ("rms", {}),
    "taper": ("taper", {}),
    "rms_folded": ("rms", {"norm_affine": False}),
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


def forward_call(model: GPT, idx: Tensor, mode: str) -> Callable[[], None]:
    """A call that computes the logits of the last of T tokens of each sequence in idx (B, T)."""

    def compute() -> Tensor:
        return last_logits(model, idx)

    if mode == "eager":
        return waiting(compute, idx)
    if not idx.is_cuda:
        return waiting(compiled_alone(compute), idx)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            compute()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        graph.output = compute()
    return waiting(graph.replay, idx)


def last_logits(model: GPT, idx: Tensor) -> Tensor:
    """(B, T) -> (B, 1, V)."""
    return model.logits(model.hidden(idx)[:, -1:])


def eager_launches(model: GPT, idx: Tensor) -> Counter:
    """Operations that compute in one eager forward pass on idx (B, T), by name: each is a launch on
    a GPU.
    """
    with LaunchLedger() as ledger:
        last_logits(model, idx)
    return Counter(ledger.launches)


def decode_call(model: GPT, idx: Tensor, graph: bool) -> Callable[[], None]:
    """A call that decodes STEPS tokens behind the T tokens of idx (B, T), by the operations of the
    eager pass.
    """
    decoder = Decoder(
        pack(model, "plain"), idx.shape[0], idx.shape[1] + STEPS, decode_reference, graph=graph
    )
    decoder.prefill(idx)

    def steps() -> None:
        decoder.rewind(idx.shape[1])
        for _ in range(STEPS):
            decoder.step()

    return waiting(steps, idx)


def waiting(call: Callable[[], Any], like: Tensor) -> Callable[[], None]:
    @torch.no_grad()
    def run() -> None:
        call()
        if like.is_cuda:
            torch.cuda.synchronize()

    return run


def make_models(dtype: torch.dtype, device: torch.device, calibration: Tensor) -> dict[str, GPT]:
    """Every arm's model, with the same random weights.

    Raises UserError unless folding keeps the taper's logits.
    """
    models = {}
    for name, (norm, keys) in ARMS.items():
        if name != "rms_triton" or device.type == "cuda":
            with device:
                base = (
                    GPT(dataclasses.replace(SHAPE, **{"kernels": "torch"} | keys)).to(dtype).eval()
                )
            models[name] = with_norms(base, norm, calibration)
    models["taper_folded"] = to_folded(models["taper_folded"])
    idx = calibration[:, :32]
    ours, own = (last_logits(models[name], idx).float() for name in ("taper_folded", "taper"))
    if not (ours - own).norm() <= 0.02 * own.norm():
        raise UserError("taper_folded: its logits are not the taper's: mend fold/gpt.py first")
    return models


@torch.no_grad()
def bench_last_token(config: Any, device: torch.device, place: dict[str, Any]) -> dict[str, Any]:
    """Measures every row, prints the table, writes last_token.jsonl and last_token.md into
    config.out.
    """
    dtype = find_dtype(config.dtype, device)
    with device:
        calibration = torch.randint(
            0, 50257, (4, 128), generator=torch.Generator(device).manual_seed(0)
        )
    models = make_models(dtype, device, calibration)
    launches = {name: eager_launches(model, calibration[:1, :32]) for name, model in models.items()}
    place |= {"dtype": str(dtype).removeprefix("torch."), "parameters": models["rms"].num_params()}
    if config.ledger:
        record = place | {"launches": launches}
        write(config.out, "launches", [record], launches_table(record))
        return record
    modes = ("eager", "CUDA graph", "cached", "cached, CUDA graph")
    modes = modes if device.type == "cuda" else ("eager", "compiled", "cached")
    records = []
    for batch, context in PUBLISHED:
        idx = calibration.repeat(1, 4)[:batch, :context].contiguous()
        for mode in modes:
            torch._dynamo.reset()
            calls = {
                name: decode_call(model, idx, "graph" in mode)
                if "cached" in mode
                else forward_call(model, idx, mode)
                for name, model in models.items()
            }
            for _ in range(3):
                for call in calls.values():
                    call()
            times = paired_times(calls, config.rounds)
            tokens = batch * (STEPS if "cached" in mode else context)
            records.append(
                place
                | {
                    "batch": batch,
                    "context": context,
                    "mode": mode,
                    "launches": {name: counts.total() for name, counts in launches.items()},
                    "tokens_per_s": {n: tokens / median(t) for n, t in times.items()},
                    "speed_up": {
                        f"{x}/{y}": median_ratio(times[y], times[x])
                        for x, y in PAIRS
                        if {x, y} <= times.keys()
                    },
                    "seconds": times,
                }
            )
    write(config.out, "last_token", records, last_token_table(records))
    return {
        "rows": [
            {name: value for name, value in record.items() if name != "seconds"}
            for record in records
        ]
    }


def write(out: str, name: str, records: list[dict[str, Any]], text: str) -> None:
    """Prints `text`; if there is a folder `out`, writes NAME.jsonl and NAME.md into it."""
    print(text)
    if out:
        write_results(Path(out), name, records, f"{name}.md", text)


def launches_table(record: dict[str, Any]) -> str:
    """Markdown: arms down, operations across."""
    launches = record["launches"]
    names = list(
        dict.fromkeys(name for counts in launches.values() for name, _ in counts.most_common())
    )
    lines = [
        "# Launches of an eager forward pass: TaperNorm's protocol",
        "",
        "Counted, not timed (`python bench_decode.py --last_token --ledger`): "
        f"{record['parameters'] / 1e6:.1f} M parameters, {record['dtype']}, norms in plain "
        f"PyTorch; torch {record['versions']['torch']}; commit {record['git']}. Every operation "
        "that computes is a launch on a GPU.",
        "",
    ]
    rows = [
        [
            arm,
            counts.total(),
            launches["rms"].total() - counts.total(),
            *(counts[name] for name in names),
        ]
        for arm, counts in launches.items()
    ]
    return "\n".join([*lines, markdown(["arm", "all", "fewer", *names], rows)])


def last_token_table(records: list[dict[str, Any]]) -> str:
    """Markdown, the published speed-up of the folded taper beside ours."""
    row = records[0]
    lines = [
        "# Logits of the last token: TaperNorm's protocol",
        "",
        f"{card(row)}; {row['parameters'] / 1e6:.1f} M parameters, "
        f"{row['dtype']}. Thousand tokens/s; speed-ups with 95 % intervals of "
        f"{len(row['seconds']['rms'])} paired rounds; published: the folded taper over RMSNorm "
        "(not folded: 1.08 to 1.15; with a cache, eager: 1.14, folded 1.18). "
        "`cached` decodes tokens behind so many.",
        "",
        (
            "Launches of an eager forward pass: "
            f"{', '.join(f'{n} {k}' for n, k in row['launches'].items())}."
        ),
        "",
    ]
    heads, rows = ["batch", "context", "mode", *row["seconds"], *row["speed_up"], "published"], []
    for row in records:
        speeds = (f"{1e-3 * row['tokens_per_s'][name]:.2f}" for name in row["seconds"])
        ups = (span(ratio, "{:.3f}") for ratio in row["speed_up"].values())
        before, after = PUBLISHED[row["batch"], row["context"]]
        published = f"{after / before:.2f}" if row["mode"] == "eager" else ""
        rows.append([row["batch"], row["context"], row["mode"], *speeds, *ups, published])
    return "\n".join([*lines, markdown(heads, rows)])
