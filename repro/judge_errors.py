"""How often is judge.py wrong? Simulated studies, whose losses are parabolas and noise.

    python -m repro.judge_errors --studies=2000 --out=results/judge

A study screens its arms with the rules of study/rates.py, and tests new seeds as study/verdict.py
does. The best rate of each arm lies anywhere within 1.5 octaves of the middle. An octave from it
the loss rises by `bend`; a run has the SD `sd`. Nothing is trained.

Without a true difference, a study is wrong if it names one for any arm. With one of 2 SD of the
pairs in the first arm, it is right if it names that. Beside it stands what the plan says: the
chance where rates are sharp, and where they are open.
"""

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.errors import run_program
from common.output import made_with, markdown, write_bytes_atomically, writing
from common.stats import ALPHA, decide, paired, power_with_error
from configurator import key, parse_args
from evidence.comparison import with_error
from study.rates import Screen, noise, rate_error, worst_rate_error

BENDS = (0.003, 0.01, 0.03, 0.06)  # nats
SDS = (0.005, 0.015)  # of a run, nats
ARMS = (1, 4)  # beside the baseline
SEEDS = (4, 16)
FAR = 1.5  # octaves
PLANTED = 2.0  # SDs of the pairs


class Setting(NamedTuple):
    """What the studies of one line have."""

    bend: float
    sd: float
    arms: int
    seeds: int


@dataclass(frozen=True)
class ErrorsConfig:
    """The keys of this program."""

    studies: int = key(2000, "simulated for each setting, without and with a difference", least=1)
    out: str = key("results/judge", "folder for README.md")


def screened(best: float, setting: Setting, draw: np.random.Generator) -> Screen:
    """Screen an arm whose best rate lies `best` octaves from the middle."""
    screen = Screen()
    while wanted := screen.next_runs():
        for octave, seed in wanted:
            loss = setting.bend * (octave - best) ** 2 + draw.normal(0, setting.sd)
            screen.losses.setdefault(octave, {})[seed] = loss
    return screen


def study(setting: Setting, planted: float, draw: np.random.Generator) -> list[bool] | None:
    """Return for each arm whether a difference is named; None without a verdict on the first arm.

    Args:
        planted: by which the first arm is worse, nats.
    """
    best = draw.uniform(-FAR, FAR, setting.arms + 1)
    screens = [screened(one, setting, draw) for one in best]
    chosen = [screen.choice() for screen in screens]
    if chosen[0] is None or chosen[1] is None:
        return None
    sd = noise(screens) or 0.0
    losses, errors = [], []
    for screen, rate, one in zip(screens, chosen, best, strict=True):
        excess = math.nan if rate is None else setting.bend * (rate - one) ** 2
        losses.append(excess + draw.normal(0, setting.sd, setting.seeds))
        errors.append(0.0 if rate is None else rate_error(screen.bend, sd))
    losses[1] += planted
    judged = [arm for arm in range(1, setting.arms + 1) if chosen[arm] is not None]
    estimates = [
        with_error(paired(losses[arm] - losses[0]), math.hypot(errors[arm], errors[0]))
        for arm in judged
    ]
    verdicts = decide(estimates, 0.0, lower_is_better=True, planned=setting.arms)
    return [verdict.p_holm < ALPHA for verdict in verdicts]


def planned_power(setting: Setting, rate_error: float) -> float:
    """Return the chance to find PLANTED that the plan says, for a rate's error in SDs of a run."""
    return power_with_error(PLANTED, setting.seeds, ALPHA / setting.arms, rate_error)


def line_of(setting: Setting, studies: int) -> list[Any]:
    """Simulate one setting; return its line of the table."""
    draw = np.random.default_rng(0)
    pair_sd = setting.sd * 2**0.5
    equal = [study(setting, 0.0, draw) for _ in range(studies)]
    other = [study(setting, PLANTED * pair_sd, draw) for _ in range(studies)]
    named = [any(found) for found in equal if found is not None]
    right = [found[0] for found in other if found is not None]
    return [
        *setting,
        f"{100 * (studies - len(named)) / studies:.1f} %",
        f"{100 * np.mean(named):.1f} %",
        f"{100 * np.mean(right):.0f} %",
        f"{100 * planned_power(setting, worst_rate_error()):.0f} to "
        f"{100 * planned_power(setting, 0.0):.0f} %",
    ]


def main(argv: list[str]) -> None:
    """Simulate all settings, and write the table."""
    config, _ = parse_args(ErrorsConfig, argv, __doc__)
    rows = []
    for setting in itertools.starmap(Setting, itertools.product(BENDS, SDS, ARMS, SEEDS)):
        rows.append(line_of(setting, config.studies))
        print(*rows[-1], flush=True)
    header = ["bend, nats", "SD of a run", "arms", "seeds", "no verdict", "wrong"]
    table = markdown([*header, "2 SD found", "the plan says"], rows)
    text = (
        "# How often judge.py is wrong\n\n"
        f"{config.studies:,} simulated studies for each line, without a difference and with one "
        "of 2 SD of the pairs in the first arm. Losses are parabolas over the logarithm of the "
        "learning rate, and noise; nothing is trained. *bend*: what the loss rises by an octave "
        "from its lowest point. *wrong*: studies of equal arms that name a difference for any of "
        "them, of those with a verdict. *the plan says*: where rates are open, to where they "
        "are sharp.\n\n"
        f"{table}\n\n`python -m repro.judge_errors {made_with(config)}".rstrip()
        + "`\n"
    )
    out = Path(config.out)
    with writing(out):
        write_bytes_atomically(out / "README.md", text.encode())


if __name__ == "__main__":
    run_program(main)
