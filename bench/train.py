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

A step is what train.py does with gradient_accumulation_steps micro-batches: forward, backward,
clipping, AdamW, the norms' schedules; nanoGPT's is its own. What train.py sets for the whole
process (memory, float32 products) holds for all arms. Batches are random tokens, the same for all,
and on the device beforehand. All keys of train.py are accepted, so that its config files can be
used; those of data, schedule and evaluation have no effect. In each round all arms take turns in a
new random order. Ratios are geometric means over rounds with 95 % t intervals, not corrected for
their number; above 1 the arm is faster. Ctrl-C ends the measurement and keeps the rounds so far.
The last line is JSON.
"""

import common.interrupt  # noqa: F401

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from bench.bytes import bytes_of_one_more_block
from bench.train_arms import NANOGPT, Batch, Step, TrainArm, build_step, parse_arms, settle
from bench.train_profile import by_class, profile_step, profile_table
from common.distributed import Ranks
from common.environment import faster_float32_products, peak_flops, timing_environment
from common.errors import ConfigError, UserError, run_program
from common.old_keys import AUTO
from common.output import card, markdown, span, write_results
from common.plotting import plt, save, style
from common.stats import paired_ratio, paired_times
from configurator import key, parse_args
from model import GPT
from train import TrainConfig

CONTROLS = ("rms", "rms-no-mlp-gamma", "layer")
WARM_UP = 2  # steps after the first, which compiles and allocates
AGAIN = " (A/A)"
LOW = ("bfloat16", "float16")


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
    rounds: int = key(20, "rounds; in each, all arms take turns", least=2)
    steps: int = key(1, "optimiser steps of an arm's turn, timed together", least=1)
    ledger: bool = key(
        True, "count the bytes that an arm's norms would move on an H200 (bench/bytes.py)"
    )
    profile: bool = key(
        False, "afterwards, where each arm's time goes, kernels by kind (bench/train_profile.py)"
    )
    out: str = key("", "write README.md, steps.jsonl and speed.png into this folder")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nanogpt and not (Path(self.nanogpt) / "model.py").is_file():
            raise ConfigError(
                f"nanogpt={self.nanogpt}: there is no model.py: give the folder of a clone of "
                "karpathy/nanoGPT"
            )


def all_arms(config: TrainBenchConfig) -> list[TrainArm]:
    """Return the arms of the list, the controls that it lacks, and the second copy of its first.

    Raises ConfigError.
    """
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    common = TrainConfig(**{name: getattr(config, name) for name in names})
    arms = parse_arms(config.arms, common)
    if not arms:
        raise ConfigError("arms: name one or more, e.g. --arms='rms; coupled'")
    added = CONTROLS if config.controls else ()
    if config.nanogpt and not any(arm.is_nanogpt for arm in arms):
        added += (NANOGPT,)
    there = {arm.name for arm in arms}
    arms += [arm for arm in parse_arms(";".join(added), common) if arm.name not in there]
    if not config.nanogpt and any(arm.is_nanogpt for arm in arms):
        raise ConfigError("arms: nanogpt needs --nanogpt=FOLDER, a clone of karpathy/nanoGPT")
    return [*arms, dataclasses.replace(arms[0], name=arms[0].name + AGAIN)]


# ---------------------------------------------------------------------------------------- measuring


def make_batches(config: TrainConfig, device: torch.device) -> list[Batch]:
    """Return the micro-batches of a step: random tokens (B, T) and their successors."""
    shape = (config.gradient_accumulation_steps, config.batch_size, config.block_size + 1)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.n_vocab or config.vocab_size, shape, generator=generator)
    batches = []
    for part in tokens:  # (B, T + 1)
        x = part[:, :-1].contiguous().to(device)
        y = part[:, 1:].contiguous().to(device)
        batches.append((x, y))
    return batches


def prepare(
    arm: TrainArm, batches: list[Batch], device: torch.device, nanogpt: str
) -> tuple[Step, dict[str, Any]]:
    """Build the arm's step, compile it and warm it up.

    Returns:
        The step, and a record: its loss at the first step, and on CUDA its peak memory in bytes.
    """
    on_cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if on_cuda else 0
    step = build_step(arm, batches, device, nanogpt)
    first_loss = step().item()
    for _ in range(WARM_UP):
        step()
    peak = None
    if on_cuda:
        # Other arms keep their weights in memory at the same time; they do not count.
        torch.cuda.reset_peak_memory_stats(device)
        step()
        peak = torch.cuda.max_memory_allocated(device) - before
    return step, {"first_loss": first_loss, "peak_memory": peak}


def count_bytes(arm: TrainArm) -> tuple[float | None, str]:
    """Count the bytes that norms and residual adds of a block move for a token in training.

    Returns:
        The bytes, or None and the reason.
    """
    tokens = max(2, arm.config.batch_size) * arm.config.block_size
    try:
        figures = [(3, False)]  # an addmm copies its operand (ATen)
        return bytes_of_one_more_block(arm.config, tokens, figures, arm.strip)[0], ""
    except Exception as error:
        # This torch has other private interfaces of inductor, or inductor cannot see into the norm.
        lines = str(error).splitlines() or [type(error).__name__]
        return None, f"bytes of {arm.name}: {lines[0]}"


def time_rounds(
    steps: dict[str, Step], config: TrainBenchConfig, device: torch.device
) -> dict[str, list[float]]:
    """Return the seconds of one step of each arm in each round.

    Ctrl-C ends it; an unfinished round is left out. Raises UserError if there are fewer than two.
    """

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def turn(step: Step) -> Callable[[], None]:
        def run() -> None:
            for _ in range(config.steps):
                step()
            wait()

        return run

    turns = {name: turn(step) for name, step in steps.items()}
    wait()
    try:
        with tqdm(total=config.rounds, unit="round", disable=not sys.stderr.isatty()) as bar:
            times = paired_times(turns, config.rounds, after_round=bar.update, least=2)
    except KeyboardInterrupt:
        raise UserError(
            "interrupted before the second round was over: there is nothing to compare"
        ) from None
    return {name: [value / config.steps for value in values] for name, values in times.items()}


def prepare_all(
    config: TrainBenchConfig, arms: list[TrainArm], device: torch.device
) -> tuple[dict[str, Step], dict[str, dict[str, Any]]]:
    """Prepare the step of every arm: arm -> step, and arm -> record. Raises UserError."""
    batches = make_batches(config, device)
    steps: dict[str, Step] = {}
    facts: dict[str, dict[str, Any]] = {}
    for arm in tqdm(arms, desc="compiling", unit="arm", disable=not sys.stderr.isatty()):
        try:
            steps[arm.name], facts[arm.name] = prepare(arm, batches, device, config.nanogpt)
        except torch.OutOfMemoryError:
            raise UserError(
                f"arm {arm.name}: the GPU's memory is too small for {len(arms)} arms at "
                f"batch_size={config.batch_size}: lower it"
            ) from None
        except KeyboardInterrupt:
            raise UserError(
                "interrupted before the first round: there is nothing to compare"
            ) from None
    return steps, facts


def count_all(
    config: TrainBenchConfig, arms: list[TrainArm], device: torch.device
) -> tuple[dict[str, float | None], list[str]]:
    """Count the bytes of every compiled arm's norms: arm -> bytes, and remarks."""
    if not config.ledger:
        return {}, []
    if not any(arm.config.compile for arm in arms):
        return {}, ["the norms' bytes are counted in compiled code, and no arm is compiled"]
    counted: dict[str, float | None] = {}
    remarks: list[str] = []
    for arm in arms:
        is_copy = arm.name.endswith(AGAIN)
        if is_copy or arm.is_nanogpt or not arm.config.compile:
            continue
        counted[arm.name], remark = count_bytes(arm)
        if remark:
            remarks.append(remark)
    return counted, remarks


def measure(
    config: TrainBenchConfig, device: torch.device
) -> tuple[list[dict[str, Any]], list[str]]:
    """Prepare, count and time all arms.

    Returns:
        A record for each arm, and remarks for the report.

    Raises:
        UserError: an arm does not fit into memory, or the measurement was interrupted too early.
    """
    torch._dynamo.config.recompile_limit = 64  # all arms' models share the code of one forward
    arms = [settle(arm, device) for arm in all_arms(config)]
    steps, facts = prepare_all(config, arms, device)
    # Before the rounds, so that an interrupted measurement can show it too.
    counted, remarks = count_all(config, arms, device)
    times = time_rounds(steps, config, device)
    with torch.device("meta"):
        flops = GPT(arms[0].config).flops_per_token()
    peak = peak_flops(device)
    records = []
    for arm in arms:
        speed = tokens_per_step(config) / median(times[arm.name])
        ratios = {}
        for base in baselines(arms):
            if base != arm.name:
                ratio = paired_ratio(times[base], times[arm.name])
                ratios[base] = dataclasses.asdict(ratio)
        record = {
            "arm": arm.name,
            **{name: getattr(arm.config, name) for name in AUTO},
            "tokens_per_s": speed,
            # The peak that is known is that of 16-bit products.
            "mfu": speed * flops / peak if peak and arm.config.dtype in LOW else None,
            "norm_bytes_per_token": counted.get(arm.name),
            **facts[arm.name],
            "speed_over": ratios,
            "seconds": times[arm.name],
        }
        records.append(record)
    if config.profile:
        with contextlib.suppress(KeyboardInterrupt):
            for record in records:
                record["kernels"] = profile_step(steps[record["arm"]], device)
    return records, remarks


def tokens_per_step(config: TrainConfig) -> int:
    """Count the tokens of an optimiser step."""
    return config.gradient_accumulation_steps * config.batch_size * config.block_size


def baselines(arms: list[TrainArm]) -> list[str]:
    """Name the arms that all others are compared with: the first, rms, and nanoGPT."""
    names = []
    for arm in arms:
        is_base = arm is arms[0] or arm.name == "rms" or arm.is_nanogpt
        if is_base and not arm.name.endswith(AGAIN):
            names.append(arm.name)
    return names


# ------------------------------------------------------------------------------------------ results


def table(records: list[dict[str, Any]]) -> str:
    """Return a Markdown table, one row an arm, without columns that are empty for all arms."""
    bases = [
        row["arm"] for row in records if any(row["arm"] in other["speed_over"] for other in records)
    ]
    cells = {
        "arm": [row["arm"] for row in records],
        "runs in": [how_it_runs(row) for row in records],
        "tokens/s": [f"{row['tokens_per_s']:,.0f}" for row in records],
        "MFU": [_cell("{:.1%}", row["mfu"]) for row in records],
        "peak memory": [_cell("{:.1f} GB", row["peak_memory"], 1e9) for row in records],
        "norms' bytes": [_cell("{:.1f} kB", row["norm_bytes_per_token"], 1e3) for row in records],
    }
    for base in bases:
        ratios = (row["speed_over"].get(base) for row in records)
        cells[f"speed over {base}"] = [span(ratio) if ratio else "" for ratio in ratios]
    cells = {head: column for head, column in cells.items() if any(column)}
    return markdown(cells, zip(*cells.values()))


def how_it_runs(row: dict[str, Any]) -> str:
    """Say what an arm's step runs with, for a table."""
    parts = [row["dtype"], "compiled" if row["compile"] else "eager"]
    if row["merge_micro_batches"] > 1:
        parts.append(f"{row['merge_micro_batches']} micro-batches at once")
    return ", ".join(parts)


def _cell(form: str, value: float | None, unit: float = 1.0) -> str:
    """Format value / unit; "" if there is no value."""
    return "" if value is None else form.format(value / unit)


def report(
    config: TrainBenchConfig, place: dict[str, Any], records: list, remarks: list[str]
) -> str:
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
        "of the first arm. tokens/s: median. norms' bytes: what norms and residual adds of a "
        "block move for a token under autocast on an H200, counted, not measured.",
        "",
        table(records),
        "",
    ]
    if config.profile:
        profiles = {
            row["arm"]: by_class(row["kernels"], 1e6 * median(row["seconds"]))
            for row in records
            if "kernels" in row
        }
        lines += [profile_table(profiles), ""] if profiles else []
    return "\n".join([*lines, *(f"- {remark}" for remark in remarks)]).rstrip() + "\n"


def plot(records: list[dict[str, Any]], target: Path, title: str) -> None:
    """Draw every arm's speed over the first one's, in per cent, with its interval."""
    first, *others = records
    figure, axis = plt.subplots(figsize=(7.5, 1.2 + 0.4 * len(others)), layout="constrained")
    for index, row in enumerate(others):
        ratio = row["speed_over"][first["arm"]]
        look = style(index + 1)
        low = 100 * (ratio["low"] - 1)
        middle = 100 * (ratio["mean"] - 1)
        high = 100 * (ratio["high"] - 1)
        axis.plot([low, high], [-index, -index], color=look["color"], linewidth=2.2)
        axis.plot(middle, -index, linestyle="", **look | {"markersize": 8})
    axis.axvline(0, color="black", linewidth=1)
    axis.set_yticks([-index for index in range(len(others))], [row["arm"] for row in others])
    axis.set_ylim(0.6 - len(others), 0.6)
    axis.set_xlabel(f"faster than {first['arm']} by per cent of its tokens/s, with 95 % interval")
    axis.set_title(title, fontsize=9)
    axis.grid(axis="x", alpha=0.3)
    save(figure, target)


def main(argv: list[str]) -> None:
    """Run the program with these command-line arguments."""
    config, _ = parse_args(TrainBenchConfig, argv, __doc__)
    all_arms(config)  # checks them before anything is started
    ranks = Ranks.start(config.device)
    if ranks.world_size > 1:
        raise ConfigError("bench/train.py is one process: start it without torchrun")
    if ranks.device.type == "cpu":
        faster_float32_products(config.n_embd, config.head_channels)
    place = timing_environment(ranks.device)
    records, remarks = measure(config, ranks.device)
    text = report(config, place, records, remarks)
    print(text)
    if config.out:
        settings = dataclasses.asdict(config)
        del settings["nanogpt"], settings["out"]  # paths of this machine
        lines = [row | {"config": settings, **place} for row in records]
        folder = Path(config.out)
        text += "\n![Speed of the arms](speed.png)\n"
        write_results(folder, "steps", lines, "README.md", text)
        plot(records, folder / "speed.png", place["device"])
    shown = (
        "arm",
        *AUTO,
        "tokens_per_s",
        "mfu",
        "peak_memory",
        "norm_bytes_per_token",
        "speed_over",
    )
    print(json.dumps([{name: row[name] for name in shown} for row in records]))


if __name__ == "__main__":
    run_program(main)
