"""TaperNorm's throughput table (Kanavalau, Amo Alonso & Lall 2026): logits of the last token, norms folded or not.

About 30 M parameters, batches of 1 and 4, contexts of 128, 256 and 512 tokens. Rows: eager forward passes, as the paper
has them, which are bound by launches; the same captured in a CUDA graph (on a CPU: compiled), where only the GPU's own
time is left; and tokens decoded one by one with a cache of that context. Arms: RMSNorm and the finished taper as they
are trained, and both folded into the weights, so that what the taper is worth is not mixed with what folding is. All
arms of a row run in the same way: around the library's products, and all of them eager, captured, or compiled; they
take turns in paired rounds.
"""

import dataclasses
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from decode import Decoder, Ops, compiled_alone, decode_logits
from decode_arms import with_norms
from errors import UserError
from kernels import decode_reference
from model import GPT, GPTConfig
from packing import PackedGPT, pack
from stats import median_ratio, paired_times

SHAPE = GPTConfig(norm_type="rms", n_layer=6, n_head=6, n_embd=384, n_vocab=50257)  # 29.9 M parameters
# Thousand tokens/s on an H100: (batch, context) -> RMSNorm, folded taper
PUBLISHED = {(1, 128): (40.7, 48.7), (1, 256): (79.3, 96.8), (1, 512): (163.2, 195.5),
             (4, 128): (149.3, 180.4), (4, 256): (290.5, 344.9), (4, 512): (546.3, 615.9)}  # fmt: skip
STEPS = 16  # decoded with a cache, for one timing
ARMS = {"rms": ("rms", "plain"), "taper": ("taper", "plain"), "rms_folded": ("rms", "fused"),
        "taper_folded": ("taper", "fused")}  # fmt: skip
PAIRS = (("taper", "rms"), ("rms_folded", "rms"), ("taper_folded", "rms"), ("taper_folded", "rms_folded"))


def packed_for(model: GPT, level: str) -> PackedGPT:
    """Packed weights whose products are the library's at every batch size and for any number of tokens."""
    packed = pack(model, level)
    return dataclasses.replace(packed, level="library") if level == "fused" else packed


def launches_for(idx: Tensor) -> Ops:
    """The launches of an eager step of several tokens: norms and activations are one each on a GPU."""
    if not idx.is_cuda or not find_spec("triton"):
        return decode_reference
    from kernels import decode_triton

    return decode_triton.MANY


def forward_call(packed: PackedGPT, idx: Tensor, mode: str) -> Callable[[], None]:
    """A call that computes the logits of the last of T tokens of each sequence in idx (B, T)."""
    B, T = idx.shape
    caches, pos, ops = Decoder(packed, B, T).caches, torch.arange(T, device=idx.device), launches_for(idx)

    def compute() -> Tensor:
        return decode_logits(ops, packed, caches, idx, pos, last=True)

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


def decode_call(packed: PackedGPT, idx: Tensor, compiled: bool) -> Callable[[], None]:
    """A call that decodes STEPS tokens behind the T tokens of idx (B, T)."""
    decoder = Decoder(packed, idx.shape[0], idx.shape[1] + STEPS, compiled=compiled)
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


def check(packs: dict[str, PackedGPT], models: dict[str, GPT], idx: Tensor) -> None:
    """Raises UserError unless every arm's logits are its model's own, up to rounding."""
    for name, packed in packs.items():
        caches, pos = Decoder(packed, *idx.shape).caches, torch.arange(idx.shape[1], device=idx.device)
        ours = decode_logits(launches_for(idx), packed, caches, idx, pos, last=True).float()
        own = models[name](idx)[:, -1:].float()
        if not (ours - own).norm() <= 0.02 * own.norm():
            raise UserError(f"{name}: folded logits are not the model's own: mend packing first")


@torch.no_grad()
def bench_last_token(config: Any, device: torch.device, place: dict[str, Any]) -> dict[str, Any]:
    """Measures every row, prints the table, writes last_token.jsonl and last_token.md into config.out."""
    dtype = {"auto": torch.bfloat16 if device.type == "cuda" else torch.float32}.get(config.dtype)
    dtype = dtype or getattr(torch, config.dtype)
    with device:
        base = GPT(SHAPE).to(dtype).eval()
        calibration = torch.randint(0, 50257, (4, 128), generator=torch.Generator(device).manual_seed(0))
    models = {name: with_norms(base, norm, calibration) for name, (norm, _) in ARMS.items()}
    packs = {name: packed_for(models[name], level) for name, (_, level) in ARMS.items()}
    check(packs, models, calibration[:, :32])
    modes = ("eager", "CUDA graph" if device.type == "cuda" else "compiled", "cached")
    records = []
    for batch, context in PUBLISHED:
        idx = calibration.repeat(1, 4)[:batch, :context].contiguous()
        for mode in modes:
            torch._dynamo.reset()
            calls = {name: decode_call(packed, idx, config.compiled) if mode == "cached"
                     else forward_call(packed, idx, mode) for name, packed in packs.items()}  # fmt: skip
            for _ in range(3):
                for call in calls.values():
                    call()
            times = paired_times(calls, config.rounds)
            tokens = batch * (STEPS if mode == "cached" else context)
            records.append(place | {
                "batch": batch, "context": context, "mode": mode, "dtype": str(dtype).removeprefix("torch."),
                "parameters": base.num_params(), "tokens_per_s": {n: tokens / median(t) for n, t in times.items()},
                "speed_up": {f"{x}/{y}": median_ratio(times[y], times[x]) for x, y in PAIRS},
                "seconds": times,
            })  # fmt: skip
    text = last_token_table(records)
    print(text)
    if config.out:
        try:
            folder = Path(config.out)
            folder.mkdir(parents=True, exist_ok=True)
            lines = "".join(json.dumps(record) + "\n" for record in records)
            (folder / "last_token.jsonl").write_text(lines, encoding="utf-8")
            (folder / "last_token.md").write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"out={config.out}: cannot be written ({error.strerror})") from None
    return {"rows": [{name: value for name, value in record.items() if name != "seconds"} for record in records]}


def last_token_table(records: list[dict[str, Any]]) -> str:
    """Markdown, the published speed-up of the folded taper beside ours."""
    row = records[0]
    lines = ["# Logits of the last token: TaperNorm's protocol", "",
             f"{row['device']}; torch {row['versions']['torch']}; commit {row['git']}; {row['threads']} CPU threads, "
             f"load average {row['load_average']} at the start; {row['parameters'] / 1e6:.1f} M parameters, "
             f"{row['dtype']}. Thousand tokens/s; speed-ups with 95 % intervals of {len(row['seconds']['rms'])} paired "
             "rounds; published: the folded taper over RMSNorm. `cached` decodes tokens behind so many.", "",
             f"| batch | context | mode | {' | '.join(ARMS)} | {' | '.join(row['speed_up'])} | published |",
             "| --- " * (4 + len(ARMS) + len(PAIRS)) + "|"]  # fmt: skip
    for row in records:
        speeds = " | ".join(f"{1e-3 * row['tokens_per_s'][name]:.2f}" for name in ARMS)
        ups = " | ".join("{median:.3f} ({low:.3f} .. {high:.3f})".format(**ratio) for ratio in row["speed_up"].values())
        before, after = PUBLISHED[row["batch"], row["context"]]
        published = f"{after / before:.2f}" if row["mode"] == "eager" else ""
        lines.append(f"| {row['batch']} | {row['context']} | {row['mode']} | {speeds} | {ups} | {published} |")
    return "\n".join(lines)
