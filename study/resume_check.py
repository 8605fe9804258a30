"""Check that a run of an arm that is stopped and goes on is, to the bit, the run that was not."""

import contextlib
import dataclasses
import math
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import ConfigError, one_line
from common.norm_file import KEY as NORM_FILE
from evidence.runs import Run
from norm_plan import NormPlan
from training.checkpoint import LAST, read_checkpoint
from training.config import TrainConfig

from .children import end_with_parent
from .finding import Finding

ROOT = Path(__file__).resolve().parents[1]
# The run that is resumed: small, and seconds long
SMALL = {
    "n_head": 2,
    "n_kv_head": 0,
    "head_dim": 0,
    "n_inner": 0,
    "block_size": 16,
    "batch_size": 2,
    "gradient_accumulation_steps": 1,
    "warmup_iters": 10,
    "log_interval": 1,
    "eval_tokens": 256,
    "sample_tokens": 0,
    "hellaswag": "off",
    "full_val": False,
    "tracker": "off",
    "device": "cpu",
    "dtype": "float32",
    "compile": False,
    "parallel": "ddp",
    "init_from": "",
    "resume": "auto",
}
LARGEST_RATE = 3e-3  # a model this small may diverge with more
WHAT = "resumed"  # the name of this check
# Steps: should a run be over before it can be stopped, the next length is taken.
LENGTHS = (100, 400, 1600)
MOST_SECONDS = 600.0
POLL = 0.005  # seconds


def check_resumed(config: TrainConfig, words: list[str]) -> Finding:
    """Train a small model of the arm, stop it on the way, go on, and compare it with one run.

    Args:
        words: train.py's for the arm, of which --norm_file is needed.
    """
    named = [word for word in words if word.startswith(f"--{NORM_FILE}=")]
    for length in LENGTHS:
        with tempfile.TemporaryDirectory() as folder:
            found = check_length(config, length, named, Path(folder))
        if found is not None:
            return found
    return Finding(WHAT, True, f"not checked: {LENGTHS[-1]} steps were over before the stop")


def check_length(
    config: TrainConfig, length: int, named: list[str], folder: Path
) -> Finding | None:
    """Do it with a run of `length` steps; None if all of them were over before the stop."""
    settings = folder / "settings.py"
    settings.write_text(as_config_file(small(config, length)))
    command = [sys.executable, str(ROOT / "train.py"), str(settings), *named]
    stopped = folder / "stopped"
    whole = folder / "whole"
    problem, step = train_and_stop([*command, f"--out_dir={stopped}"], stopped)
    if problem:
        return Finding(WHAT, False, problem)
    if step == length:
        return None
    for out in (stopped, whole):
        problem = train([*command, f"--out_dir={out}"])
        if problem:
            return Finding(WHAT, False, problem)
    difference = difference_of(stopped, whole)
    figure = f"stopped after step {step} of {length}: {difference or 'the same'}, to the bit"
    return Finding(WHAT, not difference, figure)


def small(config: TrainConfig, length: int) -> TrainConfig:
    """Return the arm at a small shape, for a run of so many steps."""
    rate = min(config.learning_rate, LARGEST_RATE)
    return dataclasses.replace(
        config,
        **SMALL,
        n_layer=fewest_blocks(config),
        n_embd=math.lcm(32, config.norm_groups),
        max_iters=length,
        eval_interval=length,
        checkpoint_interval=length // 2,
        learning_rate=rate,
        min_lr=min(config.min_lr, rate),
    )


def fewest_blocks(config: TrainConfig) -> int:
    """Return the fewest blocks, 2 in most plans, in which every norm of the arm has a place.

    As many as the arm has if its plan or its numbers are for so many.
    """
    wanted = letters_of(config, config.n_layer)
    for n_layer in range(2, config.n_layer):
        with contextlib.suppress(ConfigError):
            if letters_of(config, n_layer) == wanted:
                return n_layer
    return config.n_layer


def letters_of(config: TrainConfig, n_layer: int) -> list[set[str]]:
    """Return the letters of inputs, of outputs and of the embeddings' norm."""
    plan = NormPlan(config, n_layer, config.n_embd, config.bias)
    return [set(plan.letters), set(plan.outputs), set(plan.embedding)]


def as_config_file(config: TrainConfig) -> str:
    """Return all keys as a config file has them."""
    return "".join(f"{name} = {value!r}\n" for name, value in vars(config).items())


def train_and_stop(command: list[str], folder: Path) -> tuple[str, int]:
    """Start a run, and stop it after its first checkpoint, in the middle.

    Returns:
        What went wrong, "" for nothing; and the step after which it stopped.
    """
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            preexec_fn=end_with_parent,
        )
        try:
            began = time.monotonic()
            while child.poll() is None and not (folder / LAST).exists():
                if time.monotonic() > began + MOST_SECONDS:
                    return f"no checkpoint after {MOST_SECONDS:g} s", 0
                time.sleep(POLL)
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
            code = child.wait(MOST_SECONDS)
        finally:
            child.kill()
            child.wait()
        output.seek(0)
        if code:
            return last_error(output.read()), 0
    return "", Run(folder).steps[-1]["step"]


def train(command: list[str]) -> str:
    """Train to the end. Returns what went wrong, "" for nothing."""
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        preexec_fn=end_with_parent,
    )
    return last_error(done.stdout) if done.returncode else ""


def last_error(output: bytes) -> str:
    """Return the last line that a run printed."""
    lines = output.decode(errors="replace").strip().splitlines()
    return one_line(f"train.py fails: {lines[-1] if lines else 'it says nothing'}")


def difference_of(resumed: Path, whole: Path) -> str:
    """Say in what two finished runs differ, "" if in nothing: logged losses, weights, moments."""
    losses = [
        {event["step"]: event["loss"] for event in Run(out).steps} for out in (resumed, whole)
    ]
    apart = [step for step in losses[1] if losses[0].get(step) != losses[1][step]]
    if apart:
        largest = max(abs(losses[0].get(step, math.inf) - losses[1][step]) for step in apart)
        return (
            f"losses differ from step {apart[0]} on, by at most {largest:.1e}; they must be equal"
        )
    states = [read_checkpoint(out / LAST) for out in (resumed, whole)]
    tensors = [tensors_of({key: one[key] for key in ("model", "optimizer")}) for one in states]
    for name, tensor in tensors[1].items():
        if not torch.equal(tensors[0][name], tensor):
            size = float((tensors[0][name] - tensor).abs().max())
            return f"{name} differs by {size:.1e}; it must be equal"
    return ""


def tensors_of(state: Any, name: str = "") -> dict[str, Tensor]:
    """Return all tensors in nested dicts, by their path."""
    if isinstance(state, Tensor):
        return {name: state}
    if not isinstance(state, dict):
        return {}
    parts = (tensors_of(value, f"{name}.{key}".lstrip(".")) for key, value in state.items())
    return {path: tensor for part in parts for path, tensor in part.items()}
