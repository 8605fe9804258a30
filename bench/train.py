"""Time training steps of any list of arms, in one process, in randomised paired rounds.

    python -m bench.train config/rms.py --arms="rms; coupled; coupled coupled_impl=fold" \\
      --rounds=40 --out=out/speed
    python -m bench.train config/rms.py \\
      --arms="coupled; coupled coupled_span=2; coupled compile=False"
    python -m bench.train config/shakespeare_char.py --dropout=0 --batch_size=12 --vocab_size=65 \\
      --controls=False --nanogpt=../nanoGPT \\
      --arms="layer; layer compile=False; nanogpt; nanogpt compile=False"

bench/train_arms.py says how arms are written. Three controls are added to every list: rms,
rms-no-mlp-gamma and layer; and an A/A arm, a second copy of the first, whose ratio shows the
machine's noise by its distance from 1. With nanogpt=FOLDER (a clone of karpathy/nanoGPT),
upstream's model and optimiser take part.

Under `torchrun --nproc_per_node=1 -m bench.train` all arms run in DDP, as on several GPUs, but for
the time that gradients take between them: its buckets cut a compiled model.

A step is what train.py does with gradient_accumulation_steps micro-batches: forward, backward,
clipping, AdamW, the norms' schedules; nanoGPT's is its own. What train.py sets for the whole
process (memory, float32 products) holds for all arms. Batches are random tokens, the same for all,
and on the device beforehand. All keys of train.py are accepted, so that its config files can be
used; those of data, schedule and evaluation have no effect. In each round all arms take turns in a
new random order. Ratios are geometric means over rounds with 95 % t intervals, not corrected for
their number; above 1 the arm is faster. Ctrl-C and SIGTERM end the measurement and keep the rounds
so far. The last line is JSON.

As soon as an arm is compiled, a few steps of it are timed by themselves, and OUT/unpaired.jsonl has
its speed, MFU and peak memory: what a machine that is taken away has told by then. rounds=0 ends
there, which also fills the caches of compiled code for the next process.
"""

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from bench.train_arms import NANOGPT, Batch, Step, TrainArm, build_step, parse_arms, settle
from bench.train_profile import by_class, profile_step, profile_table
from common.auto import AUTO
from common.distributed import Ranks
from common.environment import faster_float32_products, peak_flops, timing_environment
from common.errors import ConfigError, run_program
from common.output import append_json, card, markdown, span, write_results
from common.stats import paired_ratio
from configurator import key, parse_args
from decode.timing import time_arms
from model import GPT
from train import TrainConfig

CONTROLS = ("rms", "rms-no-mlp-gamma", "layer")
WARM_UP = 2  # steps after the first, which compiles and allocates
ALONE = 5  # steps that are timed as soon as an arm is ready
AGAIN = " (A/A)"
LOW = ("bfloat16", "float16")
Record = dict[str, Any]


@dataclass(frozen=True)
class TrainBenchConfig(TrainConfig):
    """Keys of bench/train.py, in addition to those of train.py."""

    vocab_size: int = key(50304, "rows of the embedding", least=1)
    compile: bool | None = key(True, "torch.compile, unless an arm sets it (auto: as train.py)")
    arms: str = key(
        "rms", "arms, with semicolons between: 'rms; coupled coupled_span=2; layer compile=False'"
    )
    controls: bool = key(True, f"add the arms that every comparison needs: {', '.join(CONTROLS)}")
    nanogpt: str = key("", "folder with upstream nanoGPT, for the arm of that name")
    rounds: int = key(
        20, "rounds; in each, all arms take turns (0: each arm by itself)", least=2, zero=True
    )
    steps: int = key(1, "optimiser steps of an arm's turn, timed together", least=1)
    profile: bool = key(
        False, "afterwards, where each arm's time goes, kernels by kind (bench/train_profile.py)"
    )
    sync: bool = key(False, "warn where the host waits for the GPU in a step")
    optimize_ddp: bool = key(True, "under torchrun: cut a compiled model where DDP's buckets end")
    out: str = key("", "write README.md, steps.jsonl and unpaired.jsonl into this folder")


def all_arms(config: TrainBenchConfig) -> list[TrainArm]:
    """Return the arms of the list, the controls that it lacks, and a second copy of its first.

    Raises ConfigError.
    """
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    common = TrainConfig(**{name: getattr(config, name) for name in names})
    arms = parse_arms(config.arms, common)
    added = CONTROLS if config.controls else ()
    if config.nanogpt and not any(arm.is_nanogpt for arm in arms):
        added += (NANOGPT,)
    there = {arm.name for arm in arms}
    arms += [arm for arm in parse_arms(";".join(added), common) if arm.name not in there]
    if not config.nanogpt and any(arm.is_nanogpt for arm in arms):
        raise ConfigError("arms: nanogpt needs --nanogpt=FOLDER, a clone of karpathy/nanoGPT")
    if not config.rounds:  # nothing is compared
        return arms
    return [*arms, dataclasses.replace(arms[0], name=arms[0].name + AGAIN)]


# ---------------------------------------------------------------------------------------- measuring


def make_batches(config: TrainConfig, device: torch.device) -> list[Batch]:
    """Return the micro-batches of a step: random tokens (B, T) and their successors."""
    shape = (config.gradient_accumulation_steps, config.batch_size, config.block_size + 1)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.n_vocab or config.vocab_size, shape, generator=generator)
    tokens = tokens.to(device)  # (micro-batches, B, T + 1)
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in tokens]


def prepare(
    config: TrainBenchConfig, arms: list[TrainArm], place: Record, device: torch.device
) -> tuple[list[Record], dict[str, Step]]:
    """Build, compile and warm up the arms in turn; return a record for each, and steps by name.

    A record has the arm's figures by itself, and is printed and written at once. Other arms keep
    their weights in memory; they do not count for its peak.
    """
    torch._dynamo.config.recompile_limit = 64  # all arms' models share the code of one forward
    torch._dynamo.config.optimize_ddp = config.optimize_ddp
    on_cuda = device.type == "cuda"
    batches = make_batches(config, device)
    flops = flops_per_token(arms)
    steps: dict[str, Step] = {}
    records: list[Record] = []
    for arm in tqdm(arms, desc="compiling", unit="arm", disable=not sys.stderr.isatty()):
        before = torch.cuda.memory_allocated(device) if on_cuda else 0
        step = steps[arm.name] = build_step(arm, batches, device, config.nanogpt)
        record: Record = {"arm": arm.name, "peak_memory": None}
        record |= {name: getattr(arm.config, name) for name in AUTO}
        record["first_loss"] = step().item()
        for _ in range(WARM_UP):
            step()
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(device)
            step()
            record["peak_memory"] = torch.cuda.max_memory_allocated(device) - before
        if config.sync and on_cuda:
            report_waits(step)
        alone = time_arms({arm.name: step}, ALONE, device, least=0)[arm.name]
        records.append(record | figures(config, arm, alone, flops, device))
        print(f"by itself: {json.dumps(shown(records[-1]))}", flush=True)
        if config.out:
            append_json(Path(config.out) / "unpaired.jsonl", records[-1] | place)
    return records, steps


def report_waits(step: Step) -> None:
    """Run a step in which PyTorch warns of each call that makes the host wait for the GPU."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def flops_per_token(arms: list[TrainArm]) -> float:
    """Return the first arm's operations per token: MFU counts no other work."""
    with torch.device("meta"):
        return GPT(arms[0].config).flops_per_token()


def figures(
    config: TrainBenchConfig,
    arm: TrainArm,
    seconds: list[float],
    flops: float,
    device: torch.device,
) -> Record:
    """Return an arm's speed and MFU, from the seconds of its steps and operations per token."""
    tokens = config.gradient_accumulation_steps * config.batch_size * config.block_size
    speed = tokens / median(seconds)
    peak = peak_flops(device)
    # The peak that is known is that of 16-bit products.
    mfu = speed * flops / peak if peak and arm.config.dtype in LOW else None
    return {"seconds": seconds, "tokens_per_s": speed, "mfu": mfu}


def measure(
    config: TrainBenchConfig, place: Record, device: torch.device
) -> tuple[list[Record], dict[str, Step]]:
    """Prepare and time all arms; return a record for each, and their steps by name."""
    arms = [settle(arm, device) for arm in all_arms(config)]
    records, steps = prepare(config, arms, place, device)
    if not config.rounds:
        return records, steps
    times = time_arms(steps, config.rounds, device, steps=config.steps)
    flops = flops_per_token(arms)
    # The arms that all others are compared with: the first, rms, and nanoGPT.
    bases = [arm.name for arm in arms[:-1] if arm is arms[0] or arm.name == "rms" or arm.is_nanogpt]
    for arm, record in zip(arms, records, strict=True):
        own = times[arm.name]
        record |= figures(config, arm, own, flops, device)
        record["speed_over"] = {
            base: paired_ratio(times[base], own) for base in bases if base != arm.name
        }
    return records, steps


# ------------------------------------------------------------------------------------------ results


def table(records: list[Record]) -> str:
    """Return a Markdown table, one row an arm, without columns that are empty for all arms."""
    rows = []
    for row in records:
        how = [row["dtype"], "compiled" if row["compile"] else "eager"]
        if row["merge_micro_batches"] > 1:
            how.append(f"{row['merge_micro_batches']} micro-batches at once")
        cells = {"arm": row["arm"], "runs in": ", ".join(how)}
        cells["tokens/s"] = f"{row['tokens_per_s']:,.0f}"
        if row["mfu"] is not None:
            cells["MFU"] = f"{row['mfu']:.1%}"
        if row["peak_memory"] is not None:
            cells["peak memory"] = f"{row['peak_memory'] / 1e9:.1f} GB"
        for base, ratio in row["speed_over"].items():
            cells[f"speed over {base}"] = span(ratio)
        rows.append(cells)
    heads = list(dict.fromkeys(head for cells in rows for head in cells))
    return markdown(heads, ([cells.get(head, "") for head in heads] for cells in rows))


def report(config: TrainBenchConfig, place: Record, records: list[Record]) -> str:
    """Return the results folder's README.md."""
    n = len(records[0]["seconds"])
    cut = f" (interrupted, {config.rounds} were wanted)" if n < config.rounds else ""
    lines = [
        "# Speed of training steps",
        "",
        f"{card(place)}.",
        f"{config.n_layer} layers, {config.n_embd} wide, {config.n_head} heads, vocabulary "
        f"{config.vocab_size}; a step has {config.gradient_accumulation_steps} x "
        f"{config.batch_size} sequences of {config.block_size} tokens. {n} rounds{cut}, in each "
        f"{config.steps} step(s) of every arm, in random order.",
        "",
        "Speed over another arm: geometric mean of the rounds' ratios with its 95 % t interval, "
        f"not corrected for how many there are; above 1 the arm is faster.{AGAIN}: a second copy "
        "of the first arm. tokens/s: median.",
        "",
        table(records),
        "",
    ]
    profiles = {
        row["arm"]: by_class(row["kernels"], 1e6 * median(row["seconds"]))
        for row in records
        if "kernels" in row
    }
    if profiles:
        lines += [profile_table(profiles), ""]
    return "\n".join(lines).rstrip() + "\n"


def save(config: TrainBenchConfig, place: Record, records: list[Record]) -> None:
    """Print the report, and write what `out` asks for."""
    text = report(config, place, records)
    print(text, flush=True)
    if config.out:
        settings = dataclasses.asdict(config)
        del settings["nanogpt"], settings["out"]  # paths of this machine
        lines = [row | {"config": settings, **place} for row in records]
        write_results(Path(config.out), "steps", lines, "README.md", text)


def main(argv: list[str]) -> None:
    """Run the program with these command-line arguments."""
    config, _ = parse_args(TrainBenchConfig, argv, __doc__)
    all_arms(config)  # checks them before anything is started
    ranks = Ranks.start(config.device)
    if ranks.world_size > 1:
        raise ConfigError("bench/train.py is one process: give torchrun --nproc_per_node=1")
    if ranks.device.type == "cpu":
        faster_float32_products(config.n_embd, config.head_channels)
    place = timing_environment(ranks.device)
    records, steps = measure(config, place, ranks.device)
    if config.rounds:
        save(config, place, records)  # before the profiler, which takes minutes on a GPU
    is_whole = len(records[0]["seconds"]) == config.rounds  # not interrupted
    if config.profile and is_whole:
        for record in records:
            record["kernels"] = profile_step(steps[record["arm"]], ranks.device)
        save(config, place, records)
    print(json.dumps([shown(row) for row in records]))


def shown(record: Record) -> Record:
    """Return what a terminal sees of a record."""
    names = ("arm", *AUTO, "tokens_per_s", "mfu", "peak_memory", "speed_over")
    return {name: record[name] for name in names if name in record}


if __name__ == "__main__":
    run_program(main)
