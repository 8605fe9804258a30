"""Say before the first run what a study will cost, and what it can find."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from common.errors import UserError
from common.output import parse_json
from common.stats import ALPHA, detectable_effect
from training.config import TrainConfig

from .children import end_with_parent
from .rates import worst_rate_error
from .workers import STOPPED, lines_of

STEPS = 6  # steps of an arm that are timed, after those that compile
WARM = 3  # steps that are not
EVALUATED = (
    1 / 3
)  # of the time of a trained token, for one of an evaluation: the forward pass alone
# Runs of an arm's screening: three rates and an octave more, and the second seed at three
OF_SCREENING = 7
PATIENCE = 900.0  # seconds in which the steps must be done
FEWEST, MOST = 3, 64  # seeds that --hours may choose


class ArmTime(NamedTuple):
    """What an arm takes."""

    seconds: float  # a run
    options: int  # that are screened


class Cost(NamedTuple):
    """What a whole study takes."""

    runs: int
    hours: float


def time_arm(
    command: tuple[str, ...], words: list[str], config: TrainConfig, val_tokens: int, out: Path
) -> float:
    """Train some steps of a run, and return the seconds that the whole run would take.

    Args:
        command: Python or torchrun, and train.py.
        words: of train.py.
        config: the same.
        val_tokens: of the whole val split.
        out: a folder for the run, which is removed.

    Raises:
        UserError: train.py ends before these steps.
    """
    folder = out / "timing"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    output = folder / "train.txt"
    began = time.monotonic()
    with open(output, "wb") as file:
        own = ["--log_interval=1", "--tracker=off", "--hellaswag=off", f"--out_dir={folder}"]
        child = subprocess.Popen(
            [*command, *words, *own],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
    # So that the run ends with this program.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(STOPPED))
    try:
        speeds, until_first = speeds_of(child, folder, began)
    finally:
        signal.signal(signal.SIGTERM, before)
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if not speeds:
        last = (lines_of(output, 0) or ["nothing"])[-1]
        raise UserError(f"{' '.join(words)}: its first steps failed: {last}")
    shutil.rmtree(folder)
    return seconds_of_run(config, val_tokens, median(speeds), until_first)


def speeds_of(child: subprocess.Popen, folder: Path, began: float) -> tuple[list[float], float]:
    """Wait until a run has logged its steps.

    Returns:
        Tokens a second of the timed steps, and the seconds until the first one was done.
    """
    until_first = 0.0
    speeds: list[float] = []
    while time.monotonic() - began < PATIENCE:
        is_over = child.poll() is not None
        steps = steps_of(folder / "log.jsonl")
        if steps and not until_first:
            until_first = time.monotonic() - began
        speeds = [step["tok_per_s"] for step in steps[WARM:] if step.get("tok_per_s")]
        if is_over or len(speeds) >= STEPS:
            break
        time.sleep(0.1)
    return speeds, until_first


def steps_of(log: Path) -> list[dict[str, Any]]:
    """Return the steps that a log has so far."""
    found = []
    for line in lines_of(log, 0):
        try:
            event = parse_json(line)
        except ValueError:
            continue  # being written
        if event.get("event") == "step":
            found.append(event)
    return found


def seconds_of_run(config: TrainConfig, val_tokens: int, speed: float, until_first: float) -> float:
    """Return the seconds of a whole run.

    Args:
        val_tokens: of the whole val split, which is evaluated at the end.
        speed: trained tokens a second.
        until_first: seconds until the first step was done, with compilation and the evaluation
            before it.
    """
    tokens_per_step = config.batch_size * config.gradient_accumulation_steps * config.block_size
    trained = config.max_iters * tokens_per_step
    evaluated = config.max_iters // config.eval_interval * config.eval_tokens + val_tokens
    return until_first + (trained + EVALUATED * evaluated) / speed


def cost(times: list[ArmTime], seeds: int, jobs: int) -> Cost:
    """Return runs and hours of a study.

    Args:
        times: of each arm.
        jobs: runs side by side.
    """
    runs = [OF_SCREENING * arm.options + seeds for arm in times]
    seconds = sum(arm.seconds * count for arm, count in zip(times, runs, strict=True))
    return Cost(sum(runs), seconds / jobs / 3600)


def seeds_within(times: list[ArmTime], jobs: int, hours: float) -> int:
    """Return the most seeds with which a study ends within hours. Raises UserError if none do."""
    possible = [
        count for count in range(FEWEST, MOST + 1) if cost(times, count, jobs).hours <= hours
    ]
    if not possible:
        least = cost(times, FEWEST, jobs).hours
        raise UserError(
            f"hours={hours:g}: {FEWEST} seeds take {least:.1f} hours: give more hours, fewer arms, "
            "or a shorter run"
        )
    return possible[-1]


def power_lines(seeds: int, arms: int, sd: float, sd_from: str) -> list[str]:
    """Say what a verdict will find, with 80 % chance.

    Args:
        seeds: pairs of each arm.
        arms: tested together; Holm's first step divides the level by their number.
        sd: of the pairs' differences, nats; 0 if it is not known.
        sd_from: where it is known from.
    """
    sharp, flat = (found_by(seeds, arms, error) for error in (0.0, worst_rate_error()))
    lines = [
        f"{seeds} seeds find, with 80 % chance, a difference of {sharp:.2f} SD of the pairs; "
        f"{flat:.2f} SD where the loss is flat over the rate, so that the best one stays open"
    ]
    if sd:
        lines.append(
            f"with an SD of {sd:.4f} nats ({sd_from}) these are {sharp * sd:.4f} and "
            f"{flat * sd:.4f} nats"
        )
    return lines


def found_by(seeds: int, arms: int, rate_error: float) -> float:
    """Return the smallest difference that a verdict finds with 80 % chance, in SDs of the pairs.

    Args:
        rate_error: standard error of an arm's rate, in SDs of a run.
    """
    # Both arms of a pair have a rate, and a pair's variance is that of two runs.
    return detectable_effect(1.0, seeds, ALPHA / max(arms, 1), rate_error)


def jobs_here(processes: int) -> int:
    """Return how many runs go side by side: one a GPU, or one a core; with torchrun one."""
    if processes > 1:
        return 1
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
