"""Training steps per second of any list of arms, in one process, in randomised paired rounds.

    python -m bench.train config/rms.py --arms="rms; coupled; coupled coupled_impl=fold" \\
      --rounds=40 --out=out/speed
    python -m bench.train config/rms.py \\
      --arms="coupled; coupled coupled_span=2; coupled compile=False"
    python -m bench.train config/shakespeare_char.py --dropout=0 --batch_size=12 --vocab_size=65 \\
      --controls=False --nanogpt=../nanoGPT \\
      --arms="layer; layer compile=False; nanogpt; nanogpt compile=False"

bench/train_arms.py says how arms are written. Three controls are added to every list: rms,
rms-no-mlp-gamma and layer; so is an A/A arm, a second copy of the first: how far its ratio is from
1 is the machine's noise. With nanogpt=FOLDER (a clone of karpathy/nanoGPT), upstream's model and
optimiser take part.

A step is what train.py does with gradient_accumulation_steps micro-batches: forward, backward,
clipping, AdamW, the norms' schedules; nanoGPT's is its own. What train.py sets for the whole
process (memory, float32 products) serves all arms alike. Batches are random tokens, the same for
all, on the device beforehand. All keys of train.py are taken, so that its config files serve; those
of data, schedule and evaluation do nothing here. In each round all arms take turns in a new random
order. Ratios are geometric means of the rounds' with 95 % t intervals, each on its own; above 1 the
arm is faster. Ctrl-C ends the measurement and keeps the rounds so far. The last line is JSON.
"""

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
from bench.train_arms import NANOGPT, Batch, Step, TrainArm, build_step, is_compiled, parse_arms
from bench.train_profile import by_class, profile_step, profile_table
from common.distributed import Ranks
from common.environment import Precision, faster_float32_products, peak_flops, timing_environment
from common.errors import ConfigError, UserError, run_program
from common.output import card, markdown, span, write_results
from common.plotting import plt, save, style
from common.stats import paired_ratio, paired_times
from configurator import key, parse_args
from model import GPT
from train import TrainConfig

CONTROLS = ("rms", "rms-no-mlp-gamma", "layer")
WARM_UP = 2  # steps after the first, which compiles and allocates
AGAIN = " (A/A)"


@dataclass(frozen=True)
class TrainBenchConfig(TrainConfig):
    """Keys of bench/train.py beside those of train.py."""

    vocab_size: int = key(50304, "rows of the embedding", least=1)
    compile: bool | None = key(
        True, "torch.compile, where an arm says nothing else (auto: on CUDA)"
    )
    arms: str = key(
        "rms", "arms, with semicolons between: 'rms; coupled coupled_span=2; layer compile=False'"
    )
    controls: bool = key(True, f"add the arms that every comparison wants: {', '.join(CONTROLS)}")
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
    """The arms of the list, the controls it lacks, and the second copy of its first.

    Raises ConfigError.
    """
    common = TrainConfig(
        **{field.name: getattr(config, field.name) for field in dataclasses.fields(TrainConfig)}
    )
    arms = parse_arms(config.arms, common)
    if not arms:
        raise ConfigError("arms: name one or more, e.g. --arms='rms; coupled'")
    added = CONTROLS if config.controls else ()
    if config.nanogpt and not any(arm.is_nanogpt for arm in arms):
        added += (NANOGPT,)
    there = {arm.name for arm in arms}
    arms += [arm for arm in parse_arms(";".join(added), common) if arm.name not in there]
    if not config.nanogpt and any(arm.is_nanogpt for arm in arms):
        raise ConfigError("arms: nanogpt wants --nanogpt=FOLDER, a clone of karpathy/nanoGPT")
    return [*arms, dataclasses.replace(arms[0], name=arms[0].name + AGAIN)]


# ---------------------------------------------------------------------------------------- measuring


def make_batches(config: TrainConfig, device: torch.device) -> list[Batch]:
    """The micro-batches of a step: random tokens (B, T) and their successors."""
    shape = config.gradient_accumulation_steps, config.batch_size, config.block_size + 1
    tokens = torch.randint(
        config.n_vocab or config.vocab_size, shape, generator=torch.Generator().manual_seed(0)
    )
    return [
        (part[:, :-1].contiguous().to(device), part[:, 1:].contiguous().to(device))
        for part in tokens
    ]


def prepare(
    arm: TrainArm, batches: list[Batch], device: torch.device, nanogpt: str
) -> tuple[Step, dict[str, Any]]:
    """(the arm's step, compiled and warm; its loss at the first step, and on CUDA the bytes that it
    takes at most).
    """
    on_cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if on_cuda else 0
    step = build_step(arm, batches, device, nanogpt)
    first_loss, peak = step().item(), None
    for _ in range(WARM_UP):
        step()
    if on_cuda:  # other arms keep their weights in memory meanwhile: they do not count
        torch.cuda.reset_peak_memory_stats(device)
        step()
        peak = torch.cuda.max_memory_allocated(device) - before
    return step, {"first_loss": first_loss, "peak_memory": peak}


def count_bytes(arm: TrainArm) -> tuple[float | None, str]:
    """(bytes that the norms and residual adds of a block move for a token in training, why there is
    no figure).
    """
    tokens = max(2, arm.config.batch_size) * arm.config.block_size
    try:
        figures = [(3, False)]  # an addmm copies its operand (ATen)
        return bytes_of_one_more_block(arm.config, tokens, figures, arm.strip)[0], ""
    # inductor's private interfaces are another torch's, or the norm is opaque to them
    except Exception as error:
        return (
            None,
            f"bytes of {arm.name}: {(str(error).splitlines() or [type(error).__name__])[0]}",
        )


def time_rounds(
    steps: dict[str, Step], config: TrainBenchConfig, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of one step of each arm in each round.

    Ctrl-C ends it; a round cut short is left out.
    """
    wait = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else lambda: None

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


def measure(
    config: TrainBenchConfig, device: torch.device
) -> tuple[list[dict[str, Any]], list[str]]:
    """(a record for each arm, remarks)."""
    torch._dynamo.config.recompile_limit = 64  # all arms' models share the code of one forward
    arms, batches, steps, facts, remarks = (
        all_arms(config),
        make_batches(config, device),
        {},
        {},
        [],
    )
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
    counted, ledger = {}, config.ledger and config.compile_mode == "default"
    if config.ledger and not ledger:
        remarks.append(
            "the norms' bytes are counted in inductor's default code, "
            f"not with {config.compile_mode}"
        )
    elif ledger and not any(is_compiled(arm.config, device) for arm in arms):
        remarks.append("the norms' bytes are counted in compiled code, and no arm is compiled")
    for arm in arms:  # before the rounds, so that what an interrupt leaves of those can be shown
        if (
            ledger
            and is_compiled(arm.config, device)
            and not arm.is_nanogpt
            and not arm.name.endswith(AGAIN)
        ):
            counted[arm.name], remark = count_bytes(arm)
            remarks += [remark] if remark else []
    times = time_rounds(steps, config, device)
    with torch.device("meta"):
        flops = GPT(arms[0].config).flops_per_token()
    peak, records = peak_flops(device) if Precision(config.dtype, device).is_low else None, []
    for arm in arms:
        speed = tokens_per_step(config) / median(times[arm.name])
        records.append(
            {
                "arm": arm.name,
                "tokens_per_s": speed,
                "mfu": speed * flops / peak if peak else None,
                "norm_bytes_per_token": counted.get(arm.name),
                **facts[arm.name],
                "speed_over": {
                    base: dataclasses.asdict(paired_ratio(times[base], times[arm.name]))
                    for base in baselines(arms)
                    if base != arm.name
                },
                "seconds": times[arm.name],
            }
        )
    if config.profile:
        with contextlib.suppress(KeyboardInterrupt):
            for row in records:
                row["kernels"] = profile_step(steps[row["arm"]], device)
    return records, remarks


def tokens_per_step(config: TrainConfig) -> int:
    return config.gradient_accumulation_steps * config.batch_size * config.block_size


def baselines(arms: list[TrainArm]) -> list[str]:
    """What all arms are compared with: the first arm, rms, and nanoGPT."""
    listed = [arm.name for arm in arms if arm is arms[0] or arm.name == "rms" or arm.is_nanogpt]
    return [name for name in listed if not name.endswith(AGAIN)]


# ------------------------------------------------------------------------------------------ results


def table(records: list[dict[str, Any]]) -> str:
    """Markdown, one row an arm; columns that say nothing about any arm are left out."""
    bases = [
        row["arm"] for row in records if any(row["arm"] in other["speed_over"] for other in records)
    ]
    cells = {
        "arm": [row["arm"] for row in records],
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


def _cell(form: str, value: float | None, unit: float = 1.0) -> str:
    return "" if value is None else form.format(value / unit)


def report(
    config: TrainBenchConfig, place: dict[str, Any], records: list, remarks: list[str]
) -> str:
    """README.md of the results folder."""
    n = len(records[0]["seconds"])
    cut = f" (interrupted, {config.rounds} were wanted)" if n < config.rounds else ""
    lines = [
        "# Speed of training steps",
        "",
        f"{card(place)}.",
        f"{config.n_layer} layers, {config.n_embd} wide, {config.n_head} heads, vocabulary "
        f"{config.vocab_size}; a step has {config.gradient_accumulation_steps} x "
        f"{config.batch_size} sequences of {config.block_size} tokens; {place['dtype']}. {n} "
        f"rounds{cut}, in each {config.steps} step(s) of every arm, in random order.",
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
    """Every arm's speed over the first one's, in per cent, with its interval."""
    first, *others = records
    figure, axis = plt.subplots(figsize=(7.5, 1.2 + 0.4 * len(others)), layout="constrained")
    for index, row in enumerate(others):
        ratio, look = row["speed_over"][first["arm"]], style(index + 1)
        low, middle, high = (100 * (ratio[name] - 1) for name in ("low", "mean", "high"))
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
    config, _ = parse_args(TrainBenchConfig, argv, __doc__)
    all_arms(config)  # what is wrong with them is said before anything is started
    ranks = Ranks.start(config.device)
    if ranks.world_size > 1:
        raise ConfigError("bench/train.py is one process: start it without torchrun")
    if ranks.device.type == "cpu":
        faster_float32_products(config.n_embd, config.head_channels)
    place = timing_environment(ranks.device)
    place["dtype"] = str(Precision(config.dtype, ranks.device).dtype).removeprefix("torch.")
    records, remarks = measure(config, ranks.device)
    text = report(config, place, records, remarks)
    print(text)
    if config.out:
        settings = {
            name: value
            for name, value in dataclasses.asdict(config).items()
            if name not in ("nanogpt", "out")
        }
        folder, text = Path(config.out), text + "\n![Speed of the arms](speed.png)\n"
        write_results(
            folder,
            "steps",
            [row | {"config": settings, **place} for row in records],
            "README.md",
            text,
        )
        plot(records, folder / "speed.png", place["device"])
    shown = ("arm", "tokens_per_s", "mfu", "peak_memory", "norm_bytes_per_token", "speed_over")
    print(json.dumps([{name: row[name] for name in shown} for row in records]))


if __name__ == "__main__":
    run_program(main)
