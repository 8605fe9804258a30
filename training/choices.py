"""What a run takes where its config says `auto`: vocabulary, dtype, compile, merge_micro_batches.

A run chooses once, when it begins. Its checkpoints and its log hold what it chose, and a run that
is resumed keeps that. The rules look at shape, length and processor, never at the norms: runs that
are compared choose alike. docs/log.md has the measurements behind the numbers.
"""

import dataclasses
import math
import shutil
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

import torch

from common.distributed import Ranks
from common.environment import DTYPES, cpuinfo, machine_memory
from common.errors import CheckpointError, ConfigError
from common.old_keys import AUTO, by_device, chosen_then, device_kind
from model import check_memory
from training.checkpoint import FoundCheckpoint
from training.provenance import saved_provenance

# bfloat16 pays from this many channels on, and this many tokens times channels in a pass. Small
# products gain nothing that makes up for the casts.
LOW_CHANNELS = 64
LOW_WORK = 1 << 15
# AMD's AVX512-BF16 gains less than Intel's AMX.
LOW_CHANNELS_AMD = 128
# Compiling saves some 20 ns of one core for each token, layer and channel, and costs 30 to 60 s.
COMPILED_WORK = 5e9
# Larger passes have fewer calls; beyond this nothing was gained.
MERGED_TOKENS = 8192


def resolve(config: Any, found: FoundCheckpoint | None, ranks: Ranks) -> tuple[Any, str]:
    """Replace what `config` (a TrainConfig) leaves to `auto`, the same on every rank.

    A run that is resumed keeps what it chose. One that moves to another kind of device chooses
    anew.

    Returns:
        The config, and what was chosen and why, as one line for people.
    """
    device = ranks.device
    place = ""
    if found is not None:
        place = saved_provenance(found.state, found.path).get("device", device.type)
    if found is not None and device_kind(place) == device.type:
        chosen, line = keep(config, found.state["config"], place, found.path)
    else:
        chosen, line = choose(config, device, ranks.world_size)
    # Other ranks may run on other processors.
    chosen, line = ranks.of_main((chosen, line))
    return dataclasses.replace(config, **chosen), line


def with_vocabulary(config: Any, n_tokens: int) -> Any:
    """Complete a TrainConfig with the vocabulary of its data: `n_tokens`, 0 if they do not say.

    Raises ConfigError.
    """
    if 0 < config.n_vocab < n_tokens:
        raise ConfigError(
            f"n_vocab={config.n_vocab}: the data's vocabulary has {n_tokens} tokens: leave it at 0"
        )
    # Up to a multiple of 64, where the head's product uses the GPU's matrix units best. Rows beyond
    # n_vocab take no part in the loss.
    rows = config.vocab_size or math.ceil(n_tokens / 64) * 64
    rows = rows or 50304  # shards without meta.json are nanoGPT's, of GPT-2 tokens
    return dataclasses.replace(config, vocab_size=rows, n_vocab=config.n_vocab or n_tokens)


def check_fits(config: Any, device: torch.device) -> None:
    """Raise ConfigError for a model or a micro-batch that the memory of this machine cannot hold.

    Of a micro-batch it counts less than a step needs: tokens and targets, and on a CPU in 16 bits
    what backward reads of each block's stream and MLP.
    """
    # To save an FSDP run, rank 0 gathers weights and both moments, 4 bytes each.
    check_memory(config, 12 if config.parallel == "fsdp" else 4)
    of_token = 16
    if device.type == "cpu":
        of_token += 2 * config.n_layer * (config.n_embd + config.inner)
    needed = of_token * config.batch_size * config.block_size
    if needed > machine_memory():
        raise ConfigError(
            f"batch_size={config.batch_size} and block_size={config.block_size}: a micro-batch "
            f"takes more than {needed / 1e9:,.0f} GB, and this machine has "
            f"{machine_memory() / 1e9:,.0f} GB of memory: lower batch_size, with as many times "
            "more gradient_accumulation_steps"
        )


def choose(config: Any, device: torch.device, world_size: int = 1) -> tuple[dict[str, Any], str]:
    """Choose a value for each key of `config` (a TrainConfig) that is at auto.

    Returns:
        {key: value} for dtype, compile and merge_micro_batches, and what was chosen and why, as one
        line for people; "" if the config leaves nothing open.
    """
    on_cpu = device.type == "cpu"
    usual = by_device(device.type)
    why_usual = f"on {device.type}"
    merged = config.merge_micro_batches
    if merged == AUTO["merge_micro_batches"]:
        merged = merged_micro_batches(config) if on_cpu else usual["merge_micro_batches"]
    dtype, why_dtype = config.dtype, "as set"
    if dtype == AUTO["dtype"]:
        dtype, why_dtype = cpu_dtype(config, merged) if on_cpu else (usual["dtype"], why_usual)
    compiled, why_compiled = config.compile, "as set"
    if compiled is AUTO["compile"]:
        compiled, why_compiled = cpu_compile(config) if on_cpu else (usual["compile"], why_usual)
    chosen = {"dtype": dtype, "compile": compiled, "merge_micro_batches": merged}
    if all(chosen[key] == getattr(config, key) for key in AUTO):
        return chosen, ""
    word = "compiled" if compiled else "not compiled"
    line = f"{dtype} ({why_dtype}), {word} ({why_compiled})"
    at_once = math.gcd(config.gradient_accumulation_steps // world_size, merged)
    if at_once > 1:
        line += f", {at_once} micro-batches at once"
    return chosen, line


def keep(config: Any, then: dict[str, Any], device: str, path: Path) -> tuple[dict[str, Any], str]:
    """Take what a run chose when it began, for each key of `config` that is at auto.

    Args:
        config: a TrainConfig.
        then: the config in the checkpoint that is resumed.
        device: where that run was, as its provenance says.
        path: of that checkpoint.

    Returns:
        As `choose`.

    Raises:
        CheckpointError: the checkpoint has a value that no run chooses.
    """
    then = chosen_then(then, device)
    merged = then["merge_micro_batches"]
    is_sound = then["compile"] in (True, False) and type(merged) is int and merged > 0
    if not is_sound or str(then["dtype"]) not in DTYPES:
        raise CheckpointError(f"{path}: not a nanonorm checkpoint: its config is damaged")
    kept = {key: then[key] for key, auto in AUTO.items() if getattr(config, key) == auto}
    chosen = {key: kept.get(key, getattr(config, key)) for key in AUTO}
    listed = ", ".join(f"{key}={value}" for key, value in kept.items())
    return chosen, f"{listed}, as when the run began" if kept else ""


def merged_micro_batches(config: Any) -> int:
    """Count the micro-batches of a step that a CPU computes at once.

    The largest divisor of their number whose tokens do not exceed MERGED_TOKENS. It depends on the
    config alone; of several ranks each takes the common divisor with the number that it has.
    """
    count = config.gradient_accumulation_steps
    tokens = config.batch_size * config.block_size
    most = min(count, MERGED_TOKENS // tokens)
    fits = [n for n in range(1, most + 1) if count % n == 0]
    return max(fits, default=1)


def cpu_dtype(config: Any, merged: int) -> tuple[str, str]:
    """Choose the dtype of a run on a CPU. Returns it, and why."""
    channels, feature = native_bfloat16()
    if not feature:
        return "float32", "this processor has no fast bfloat16 products"
    work = merged * config.batch_size * config.block_size * config.n_embd
    if config.n_embd < channels or work < LOW_WORK:
        return "float32", "too small a step to gain from bfloat16"
    return "bfloat16", f"this processor has {feature}"


def slow_bfloat16(config: Any, device: torch.device) -> str:
    """Return a warning if a run computes in bfloat16 on a CPU that is slow at it, else "".

    Args:
        config: a TrainConfig whose dtype is chosen.
        device: of the run.
    """
    if device.type != "cpu" or native_bfloat16()[1]:
        return ""
    if config.dtype == "bfloat16":
        cause, remedy = "dtype=bfloat16", "use dtype=float32"
    elif config.optimizer == "muon":
        cause, remedy = "optimizer=muon, whose updates are computed in it,", "adamw is not affected"
    else:
        return ""
    return (
        f"warning: no fast bfloat16 products are known of this processor: {cause} can make a step "
        f"many times as slow; {remedy}"
    )


def cpu_compile(config: Any) -> tuple[bool, str]:
    """Decide whether a run on a CPU is compiled. Returns it, and why."""
    tokens = (
        config.max_iters
        * config.gradient_accumulation_steps
        * config.batch_size
        * config.block_size
    )
    if tokens * config.n_layer * config.n_embd < COMPILED_WORK:
        return False, "too short to earn it back"
    if not has_compiler():
        return False, "there is no C++ compiler, or Python's headers are missing"
    return True, "long enough to earn it back"


@cache
def native_bfloat16() -> tuple[int, str]:
    """Find whether this processor multiplies bfloat16 faster than float32.

    Returns:
        The fewest channels for which that pays, and the instruction set; (0, "") if it does not.
        Intel's AVX512-BF16 without AMX is slower than float32; ARM was not measured.
    """
    cpu = cpuinfo()
    if "amx_bf16" in cpu:
        return LOW_CHANNELS, "AMX"
    if "AuthenticAMD" in cpu and "avx512_bf16" in cpu:
        return LOW_CHANNELS_AMD, "AVX512-BF16"
    return 0, ""


@cache
def has_compiler() -> bool:
    """Can inductor compile C++ here?"""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return headers.exists() and any(map(shutil.which, ("g++", "clang++", "c++")))
