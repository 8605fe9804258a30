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

from common.auto import AUTO, by_device, device_kind
from common.distributed import Ranks
from common.environment import cpuinfo
from common.errors import CheckpointError, ConfigError
from common.nanogpt import GPT2, ROWS
from configurator import Overrides
from training.checkpoint import FoundCheckpoint

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
        The config, and what was chosen, as one line for people; "" if nothing was left open.

    Raises:
        CheckpointError: the run that is resumed has chosen what does not exist.
    """
    device = ranks.device
    place = "" if found is None else found.provenance.get("device", device.type)
    if found is not None and device_kind(place) == device.type:
        chosen = open_keys(config, found.state["config"])
        check_chosen(config, chosen, found.path)
        origin = "as when the run began"
    else:
        chosen = choose(config, device)
        origin = f"chosen for this run and this {device.type}"
    # Other ranks may run on other processors.
    chosen = ranks.of_main(chosen)
    listed = ", ".join(f"{key}={value}" for key, value in chosen.items())
    return dataclasses.replace(config, **chosen), f"{listed}: {origin}" if chosen else ""


def check_chosen(config: Any, chosen: dict[str, Any], path: Path) -> None:
    """Raise CheckpointError for a value, of the checkpoint `path`, that its key cannot have."""
    overrides = Overrides(type(config))
    try:
        for name, value in chosen.items():
            overrides.set(name, value, "its config")
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}: use another checkpoint") from None


def with_vocabulary(config: Any, meta: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Complete a TrainConfig with the vocabulary of its data, whose tokenizer `meta` names.

    Data that name none are nanoGPT's, of GPT-2 tokens, unless the config gives a vocabulary.

    Returns:
        The config, and the tokenizer.

    Raises:
        ConfigError: the config gives fewer tokens than the data have.
    """
    is_nanogpt = not meta and not config.vocab_size
    n_tokens = (GPT2 if is_nanogpt else meta).get("vocab_size", 0)
    if 0 < config.n_vocab < n_tokens:
        raise ConfigError(
            f"n_vocab={config.n_vocab}: the data's vocabulary has {n_tokens} tokens: leave it at 0"
        )
    if is_nanogpt:
        return dataclasses.replace(config, vocab_size=ROWS), GPT2
    # Up to a multiple of 64, where the head's product uses the GPU's matrix units best. Rows beyond
    # n_vocab take no part in the loss.
    rows = config.vocab_size or math.ceil(n_tokens / 64) * 64
    config = dataclasses.replace(config, vocab_size=rows, n_vocab=config.n_vocab or n_tokens)
    return config, meta


def choose(config: Any, device: torch.device) -> dict[str, Any]:
    """Choose a value for each key of `config` (a TrainConfig) that is at auto."""
    chosen = by_device(device.type)
    if device.type == "cpu":
        merged = config.merge_micro_batches or merged_micro_batches(config)
        chosen = {
            "dtype": cpu_dtype(config, merged),
            "compile": pays_to_compile(config) and has_compiler(),
            "merge_micro_batches": merged,
        }
    return open_keys(config, chosen)


def open_keys(config: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return those of `values` whose key `config` leaves to auto."""
    return {key: values[key] for key, auto in AUTO.items() if getattr(config, key) == auto}


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


def cpu_dtype(config: Any, merged: int) -> str:
    """Choose the dtype of a run on a CPU."""
    channels = native_bfloat16()
    work = merged * config.batch_size * config.block_size * config.n_embd
    is_large = config.n_embd >= channels and work >= LOW_WORK
    return "bfloat16" if channels and is_large else "float32"


def pays_to_compile(config: Any) -> bool:
    """Is the run on a CPU long enough to earn back what compiling costs?"""
    tokens = (
        config.max_iters
        * config.gradient_accumulation_steps
        * config.batch_size
        * config.block_size
    )
    return tokens * config.n_layer * config.n_embd >= COMPILED_WORK


@cache
def native_bfloat16() -> int:
    """Return the fewest channels for which bfloat16 products pay on this processor.

    0 where they are not faster than in float32. Intel's AVX512-BF16 without AMX is slower; ARM was
    not measured.
    """
    cpu = cpuinfo()
    if "amx_bf16" in cpu:
        return LOW_CHANNELS
    is_amd_with_it = "AuthenticAMD" in cpu and "avx512_bf16" in cpu
    return LOW_CHANNELS_AMD if is_amd_with_it else 0


@cache
def has_compiler() -> bool:
    """Can inductor compile C++ here?"""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return headers.exists() and any(map(shutil.which, ("g++", "clang++", "c++")))
