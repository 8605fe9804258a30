"""Time of a decoded token under several norms and levels of fusion: all arms in one process.

    python bench_decode.py random:qwen3-0.6b --batch=1,2,4,8,16,32,64,128 --out=results/h100/decode
    python bench_decode.py random:gpt2 --arms=A,B,C,D,E,L,M --tokens=16 --out=results/cpu/decode
    python bench_decode.py random:qwen3-8b --ledger     # count launches, predict; no GPU, no memory
    python bench_decode.py random:qwen3-1.7b --batch=8 --trace --out=results/h100/trace
    # TaperNorm's protocol; with --ledger as well it only counts
    python bench_decode.py --last_token --out=results/h100/taper

The model is a run folder, a checkpoint, a Hugging Face folder or name, or `random:` and a published
shape, with random weights, which are never zeros. Arms (decode/arms.py), all from the same weights:
A rms, B coupled (the paper's fusion), C rms_fused, D coupled_fused, E taper_folded, L layer,
M layer_fused; O own and P own_fused have the model's own norms, and a layout that is not plain
pre-norm has these two alone. B/A is the paper's claim. D/A mixes fusion with the shared statistic,
so D/C is always shown with it, which does not.

On a GPU every arm is timed in two variants. Arms around the library's products are compiled with
inductor's defaults, and (`_tuned`) with gpt-fast's options. Arms of our own kernels launch them one
after the other, and (`_tuned`) each while the one before ends; so do our kernels in the compiled
`_tuned` arms. Ratios are of the faster variants, so that no baseline is weaker than it could be.
`gpt_fast=FOLDER` adds gpt-fast's own model (from a checkout of that repository) for shapes that it
can compute.

Decoding is greedy: `tokens` tokens after the prompt, and an end token does not stop it. Before
timing, every arm's logits are compared with float64, and its tokens with those of its own unfused
definition. An arm that fails is not timed. Then every arm decodes once a round, in random order. A
second copy of the first arm (A/A) shows what the method measures where there is no difference.
Ratios are medians of the rounds' ratios with a 95 % interval; above 1, the first arm is faster.
Prefill is not timed. On a CPU with one thread the process's own time is measured, which other
programs disturb less. Ctrl-C and SIGTERM end a measurement and keep the rounds so far, if there are
six or more. The last line is JSON.

As soon as an arm has passed its check, it is timed by itself, and OUT/unpaired.jsonl has its speed:
what a machine that is taken away has told by then. rounds=0 ends there, which also fills the caches
of compiled code.
"""

import dataclasses
import gc
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from common.environment import find_device, find_dtype, timing_environment
from common.errors import ConfigError, UserError, run_program
from common.output import append_json
from common.stats import median_ratio
from configurator import key, parse_args
from decode import peers, report
from decode.arms import AUTO, DecodeArm, arms_of, check_arm, find_arms, packed_arm
from decode.last_token import bench_last_token
from decode.ledger import floor_bytes, launches, make_ledger, per_block
from decode.pack import LIBRARY_FROM
from decode.step import Decoder, can_overlap
from decode.timing import time_arms
from decode.trace import trace_arms
from load import load_model
from model import GPT

CONTROL = "A/A"  # a second copy of the first arm
ALONE = 3  # times that an arm decodes by itself, as soon as it is ready
TUNED = "_tuned"  # suffix of the name of an arm's second variant


@dataclass(frozen=True)
class DecodeBenchConfig:
    """Keys of bench_decode.py."""

    arms: str = key(
        AUTO,
        "arms, by letter or name, separated by commas (auto: A,B,C,D; O,P for a model whose layout "
        "is not plain pre-norm)",
    )
    batch: tuple[int, ...] = key(
        (1,), "sequences decoded at once; several sizes, separated by commas", least=1
    )
    prompt_tokens: int = key(5, "length of the prompt, whose ids are arbitrary", least=1)
    tokens: int = key(128, "tokens to decode", least=2)
    rounds: int = key(
        40, "rounds; in each, every arm decodes once (0: each by itself)", least=6, zero=True
    )
    coupled_first: int = key(
        0,
        "coupled: this many blocks at the start keep their own statistics",
        least=0,
    )
    coupled_span: int = key(1, "coupled: blocks that share one statistic (0: all)", least=0)
    coupled_alpha: float = key(
        1.0, "coupled: the shared statistic is divided by this", least=1e-6, most=1e6
    )
    tuning: str = key(
        "auto",
        "inductor's defaults and plain launches (off), gpt-fast's options and programmatic "
        "dependent launches (on), both on a GPU (auto)",
        ("auto", "on", "off"),
    )
    library_from: int = key(
        LIBRARY_FROM,
        "fused arms: sequences from which on the library multiplies",
        least=1,
    )
    gpt_fast: str = key("", "folder of a gpt-fast checkout, whose model is timed too")
    peers: bool = key(True, "time Hugging Face's generate too, where transformers is installed")
    compiled: bool = key(
        True, "arms around the library's products go through torch.compile; on a CPU all arms do"
    )
    device: str = key("auto", "device", ("auto", "cpu", "cuda"))
    dtype: str = key(
        "auto",
        "type of all tensors (auto: bfloat16 on CUDA)",
        ("auto", "float32", "bfloat16", "float16"),
    )
    bandwidth: float = key(
        0.0,
        "bytes/s for the floor (0: a copy's; for the ledger an H200's 4.3e12)",
        least=1e6,
        most=1e18,
        zero=True,
    )
    launch_us: float = key(
        1.3, "ledger: microseconds of a launch within a CUDA graph", least=0, most=1e6
    )
    context: int = key(80, "ledger: tokens in the cache", least=1)
    ledger: bool = key(False, "only count launches and predict times")
    trace: bool = key(False, "only trace one step of each arm, with the profiler, into `out`")
    last_token: bool = key(
        False, "only TaperNorm's protocol: logits of the last token, about 30 M parameters"
    )
    out: str = key(
        "",
        "write README.md, decode.jsonl, unpaired.jsonl and decode.png (ledger.jsonl) into this "
        "folder; they are added to what is there",
    )

    def __post_init__(self) -> None:
        if self.arms != AUTO:
            find_arms(self.arms)
        if not self.batch:
            raise ConfigError("batch: give one size or more")
        if self.last_token and not self.rounds:
            raise ConfigError("rounds=0: TaperNorm's protocol has rounds, six or more")
        if self.trace and not self.out:
            raise ConfigError("trace: say where the traces go, --out=FOLDER")

    def variants(
        self, arm: DecodeArm, level: str, device: torch.device
    ) -> list[tuple[str, bool, bool]]:
        """Return (name, compiled?, tuned?) of each variant of an arm packed to `level`."""
        cuda = device.type == "cuda"
        compiled = self.compiled and not (arm.level == "fused" and cuda)
        overlaps = level == "fused" and can_overlap(device)  # the library's launches do not
        can_be_tuned = compiled or overlaps
        if self.tuning == "auto" and cuda and can_be_tuned:
            return [(arm.name, compiled, False), (f"{arm.name}{TUNED}", compiled, True)]
        return [(arm.name, compiled, can_be_tuned and self.tuning == "on")]


def load(spec: str, device: torch.device, dtype: torch.dtype) -> GPT:
    """Return the model on `device`; random weights are drawn there, on "meta" none are."""
    with torch.device(device if spec.startswith("random:") else "cpu"):
        model = load_model(spec)
    return model.to(device, dtype)


def prompt_of(config: DecodeBenchConfig, model: GPT) -> Tensor:
    """Return token ids (1, T) of a prompt. They are arbitrary: no time depends on them."""
    room = model.config.block_size
    if config.prompt_tokens + config.tokens > room:
        raise ConfigError(
            f"prompt_tokens={config.prompt_tokens} and tokens={config.tokens} do not fit "
            f"block_size={room}"
        )
    ids = 7919 * torch.arange(1, config.prompt_tokens + 1) % model.n_vocab
    return ids[None].to(model.wte.weight.device)


# ------------------------------------------------------------------------------------------- timing


def copy_bandwidth(device: torch.device) -> float:
    """Measure the bytes/s, read and written, of a large copy: the best of several."""
    # 4 GB on a GPU: with 2 GB the host's share of the time would be 2 %
    size = 1 << (32 if device.type == "cuda" else 27)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.ones(size, dtype=torch.uint8, device=device)
    times = time_arms({"copy": partial(target.copy_, source)}, 20, device)["copy"]
    return 2 * size / min(times[2:])  # without the warm-up


def prepare(
    config: DecodeBenchConfig,
    model: GPT,
    prompt: Tensor,
    batch: int,
    missing: list[str],
    ready: Callable[[dict[str, Any]], None],
) -> tuple[dict[str, Decoder], dict[str, dict[str, Any]], int]:
    """Pack, check and warm up each arm; CONTROL is a copy of the first one.

    Args:
        prompt: token ids (1, T).
        missing: the reason is appended for each arm that computes something else; it is left out.
        ready: called with the figures of each arm by itself, as soon as they are there.

    Returns:
        (decoders by name of the variant, what check and ledger found by name, bytes that a step
        must read)

    Raises:
        UserError: no arm passed its check.
    """
    device = model.wte.weight.device
    idx = prompt.expand(batch, -1).contiguous()  # (B, T)
    filled = idx.shape[1]
    length = filled + config.tokens - 1
    decoders: dict[str, Decoder] = {}
    rows: dict[str, dict[str, Any]] = {}
    for arm in arms_of(config.arms, model):
        changed, packed = packed_arm(config, model, arm, batch, prompt)
        counted = per_block(launches(packed, batch, length)[1:])
        floor = floor_bytes(packed, batch, filled + config.tokens // 2)
        for name, compiled, tuned in config.variants(arm, packed.level, device):
            decoder = Decoder(packed, batch, length, compiled=compiled, tuned=tuned)
            try:
                rows[name] = check_arm(changed, decoder, idx, config.tokens) | counted
            except UserError as error:
                missing.append(f"{name}: {error}")
                continue
            decoders[name] = decoder
            go_on = partial(decoder.go_on, filled, config.tokens - 1)
            alone = time_arms({name: go_on}, ALONE, device, least=0)[name]
            speed = speed_of(alone, batch, config.tokens - 1)
            ready({"arm": name, "batch": batch, **speed, **rows[name], "seconds": alone})
    if not decoders:
        raise UserError(f"batch {batch}: no arm passed its check: {'; '.join(missing)}")
    if not config.rounds:
        return decoders, rows, floor
    first = next(iter(decoders.values()))
    control = Decoder(first.packed, batch, length, compiled=first.compiled, tuned=first.tuned)
    control.generate(idx, config.tokens)  # compiles it
    return decoders | {CONTROL: control}, rows, floor


def speed_of(seconds: list[float], batch: int, steps: int) -> dict[str, float]:
    """Return an arm's speed, from the times of decoding `steps` tokens for each sequence."""
    ms = 1e3 * median(seconds) / steps
    return {"ms_per_token": ms, "tokens_per_s": batch * 1e3 / ms}


def measure(
    config: DecodeBenchConfig,
    spec: str,
    model: GPT,
    batch: int,
    bandwidth: float,
    ready: Callable[[dict[str, Any]], None],
) -> dict[str, Any] | None:
    """Check and time everything at one batch size; return the record, None without rounds.

    `ready` is called with each arm's figures as soon as they are there.
    """
    device = model.wte.weight.device
    missing: list[str] = []
    # A decoder refers to itself, so those of the last batch size are freed by the collector alone,
    # with their weights and graphs.
    gc.collect()
    if config.compiled:
        # else peers would be compiled for sizes of all kinds from the second batch size on
        torch.compiler.reset()
    prompt = prompt_of(config, model)
    idx = prompt.expand(batch, -1).contiguous()  # (B, T)
    filled = idx.shape[1]
    steps = config.tokens - 1

    # 1. what is timed: our arms, then the peers
    decoders, rows, floor = prepare(config, model, prompt, batch, missing, ready)
    if not config.rounds:
        return None
    calls: dict[str, Callable[[], Any]] = {
        name: partial(decoder.go_on, filled, steps) for name, decoder in decoders.items()
    }
    calls |= peers.calls_of(config, spec, model, idx, missing)

    # 2. decoding, in paired rounds
    for call in calls.values():  # warm-up: memory, clocks
        call()
    times = time_arms(calls, config.rounds, device, least=6)
    rounds = len(times[CONTROL])
    if rounds < config.rounds:
        missing.append(f"rounds {rounds + 1} to {config.rounds}: interrupted")
    for name in times.keys() & {*peers.NAMES}:
        # generate reads the prompt too: it is subtracted, round by round
        prefill = times.pop(f"{name} prefill")
        times[name] = [max(a - b, 1e-9) for a, b in zip(times[name], prefill)]

    # 3. the record
    for name in times:
        row = rows.setdefault(name, {})
        row |= speed_of(times[name], batch, steps)
        row["share_of_floor"] = 1e3 * floor / bandwidth / row["ms_per_token"]
    arms = [arm.name for arm in arms_of(config.arms, model)]
    faster = faster_variants(times, arms)
    return {
        "model": spec,
        "batch": batch,
        "prompt_tokens": filled,
        "tokens": config.tokens,
        "rounds": rounds,
        "dtype": str(model.wte.weight.dtype).removeprefix("torch."),
        "norm_type": model.config.norm_type,
        "random_weights": spec.startswith("random:"),
        "floor_bytes": floor,
        "bandwidth": bandwidth,
        "floor_ms_per_token": 1e3 * floor / bandwidth,
        "tuning": config.tuning,
        "faster": faster,
        "arms": rows,
        "speed_ups": speed_ups(times, arms, faster, next(iter(decoders))),
        "missing": missing,
        "seconds": times,
    }


def faster_variants(times: dict[str, list[float]], arms: list[str]) -> dict[str, str]:
    """Return arm -> name of its faster variant, for the arms with a tuned one."""
    faster = {}
    for arm in arms:
        variants = [name for name in (arm, arm + TUNED) if name in times]
        if variants and variants != [arm]:
            faster[arm] = min(variants, key=lambda name: median(times[name]))
    return faster


def speed_ups(
    times: dict[str, list[float]], arms: list[str], faster: dict[str, str], copied: str
) -> dict[str, dict[str, float]]:
    """Compute the speed-ups: "X/Y" is the time of Y over the time of X, for the pairs of interest.

    An arm with two variants counts with the faster one.

    Args:
        times: by name of the variant, seconds of each round.
        faster: arm -> name of its faster variant.
        copied: the variant that CONTROL is a second copy of.
    """
    pairs = [
        ("coupled", "rms"),
        ("coupled_fused", "rms"),
        ("coupled_fused", "rms_fused"),
        ("rms_fused", "rms"),
        ("taper_folded", "rms"),
        ("taper_folded", "rms_fused"),
        ("rms", "layer"),
        ("layer_fused", "layer"),
        ("own_fused", "own"),
    ]
    pairs += [(arm, peer) for arm in arms for peer in (*peers.NAMES, peers.GPT_FAST)]
    ratios = {}
    for x, y in pairs:
        x_variant = faster.get(x, x)
        y_variant = faster.get(y, y)
        if x_variant in times and y_variant in times:
            ratios[f"{x}/{y}"] = median_ratio(times[y_variant], times[x_variant])
    ratios[f"{CONTROL}/{copied}"] = median_ratio(times[copied], times[CONTROL])
    return ratios


# -------------------------------------------------------------------------------------- the program


def run_ledger(config: DecodeBenchConfig, spec: str) -> list[dict[str, Any]]:
    """Print the ledger of each batch size, and return them."""
    # A count needs no weights, so the model has no memory.
    model = load(spec, torch.device("meta"), find_dtype(config.dtype, torch.device("cuda")))
    found = [make_ledger(config, spec, model, batch) for batch in config.batch]
    print(report.ledgers(found))
    if config.out:
        report.write_ledgers(Path(config.out), found)
    return found


def main(argv: list[str]) -> None:
    # TaperNorm's protocol has a model of its own
    has_own = any(arg.lower() in ("--last_token", "--last_token=true") for arg in argv)
    config, spec = parse_args(DecodeBenchConfig, argv, __doc__, spec=not has_own)
    if config.ledger and not config.last_token:
        print(json.dumps({"batches": run_ledger(config, spec)}))
        return
    torch.manual_seed(0)
    device = find_device(config.device)
    place = timing_environment(device)
    if config.last_token:
        print(json.dumps(bench_last_token(config, device, place)))
        return
    if config.gpt_fast and not (Path(config.gpt_fast) / "generate.py").is_file():
        raise ConfigError(
            f"gpt_fast={config.gpt_fast}: there is no generate.py: give the folder of a gpt-fast "
            "checkout"
        )
    model = load(spec, device, find_dtype(config.dtype, device))
    if config.trace:
        prompt = prompt_of(config, model)
        traces = [trace_arms(config, spec, model, prompt, batch) for batch in config.batch]
        print(json.dumps({"batches": traces}))
        return
    bandwidth = config.bandwidth or copy_bandwidth(device)
    records = []

    def ready(figures: dict[str, Any]) -> None:
        """Print and write an arm's figures: the machine may be taken away."""
        print(f"by itself: {json.dumps(figures)}", flush=True)
        if config.out:
            append_json(Path(config.out) / "unpaired.jsonl", {"model": spec} | figures | place)

    for batch in config.batch:
        found = measure(config, spec, model, batch, bandwidth, ready)
        if found is None:
            continue
        records.append(place | found)
        if batch == config.batch[0]:
            print(report.card(records[0]))
        print(report.table(records[-1]), "\n", flush=True)
        if config.out:  # now, as a later batch size may fail
            report.write(Path(config.out), records[-1:], config)
        if records[-1]["rounds"] < config.rounds:
            break  # interrupted
    for record in records:
        del record["seconds"]  # decode.jsonl has them
    print(json.dumps({"model": spec, "batches": records, "config": dataclasses.asdict(config)}))


if __name__ == "__main__":
    run_program(main)
