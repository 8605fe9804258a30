"""Arms and seeds, as the user writes them.

An arm is a norm type and keys, `coupled --coupled_span=2`, with a name before it if it has one,
`wide:coupled --coupled_span=2`.
"""

import itertools
import re
import shlex
from collections.abc import Iterable
from typing import NamedTuple

from common.errors import ConfigError

NAMED = re.compile(r"(\w[\w.-]*):(?=.)", re.ASCII)
# What a sweep itself tells train.py of each run
SET_BY_SWEEP = {"arm", "hellaswag", "jobs", "norm_type", "out_dir", "seed"}
# Keys beside those of norms that the arms of a study may have of their own; where one has several
# values, with slashes between, the screening decides
CHOICES = ("init_std", "initial_gain", "optimizer")
# Without leading zeros: 08 would be seed 8 once more.
SEED = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)


class Arm(NamedTuple):
    """One of the things that are compared."""

    name: str  # of its runs, without the seed
    words: tuple[str, ...]  # for train.py


class PlannedRun(NamedTuple):
    """One arm with one seed."""

    arm: Arm
    seed: int

    @property
    def name(self) -> str:
        """What its folder is called."""
        return f"{self.arm.name}-{self.seed}"


def read_arms(text: str) -> list[Arm]:
    """Read the variable ARMS: arms with blanks between, each in quotes if it has keys."""
    arms = [read_arm(arm) for arm in split(text)]
    if not arms:
        raise ConfigError("ARMS: no arm is named: give norm types such as rms, blanks between")
    return arms


def read_arm(text: str) -> Arm:
    """Read one arm.

    Without a name of its own it is called by its words, with + between, without --, and with _ for
    blanks and slashes.
    """
    name, _, rest = named(text)
    norm_type, *keys = split(rest) or [""]
    if norm_type.startswith("--"):
        raise ConfigError(
            f"ARMS: {norm_type} stands alone: put an arm and its keys in quotes, "
            f"'coupled {norm_type}'"
        )
    for word in keys:
        if not word.startswith("--"):
            raise ConfigError(f"ARMS: {text}: {word} is no key: write --key=value")
        check_word(word, f"ARMS: {text}")
    words = (f"--norm_type={norm_type}", *keys)
    if name:
        return Arm(name, (*words, f"--arm={name}"))
    name = "+".join([norm_type, *keys]).replace("+--", "+")
    return Arm(re.sub("[ /]", "_", name), words)


def named(text: str) -> tuple[str, str, str]:
    """Split an arm into its name, a colon if it has a name, and the rest."""
    found = NAMED.match(text)
    return (found[1], ":", text[found.end() :]) if found else ("", "", text)


def options_of(text: str) -> tuple[str, ...]:
    """Return the arms that an arm stands for: one for each combination of its CHOICES.

    `peri --init_std=0.04/0.08` is two; most are one. (Numbers with commas between are one value.)
    """
    name, colon, rest = named(text)
    # For each word of the arm the words that it stands for: itself, or one for each value
    alternatives = []
    for word in split(rest):
        key, equals, values = word.partition("=")
        is_choice = equals and key.removeprefix("--") in CHOICES
        each = [f"{key}={value}" for value in values.split("/")] if is_choice else [word]
        alternatives.append(each)
    if all(len(each) == 1 for each in alternatives):
        return (text,)
    found = []
    for words in itertools.product(*alternatives):
        new_name = name
        if name:
            # wide:peri --init_std=0.04/0.08 is wide-init_std-0.04 and wide-init_std-0.08.
            for word, each in zip(words, alternatives, strict=True):
                if len(each) > 1:
                    new_name += "-" + word.removeprefix("--").replace("=", "-")
        found.append(new_name + colon + shlex.join(words))
    return tuple(found)


def own_choices(texts: Iterable[str]) -> set[str]:
    """Name the CHOICES that some of these arms have of their own."""
    return {key for text in texts for key in own_values(read_arm(text))} & {*CHOICES}


def own_values(arm: Arm) -> dict[str, str]:
    """Return the keys that an arm sets itself, with their values; the last word of a key counts."""
    pairs = (word.removeprefix("--").partition("=") for word in arm.words)
    return {key: value for key, _, value in pairs}


def check_word(word: str, where: str) -> None:
    """Raise ConfigError for a word that the sweep sets itself."""
    name = word.removeprefix("--").partition("=")[0]
    if word.startswith("--") and name in SET_BY_SWEEP:
        remedy = "give an arm a name by NAME: before it" if name == "arm" else "leave it out"
        raise ConfigError(f"{where}: the sweep sets {name} itself: {remedy}")


def split(text: str) -> list[str]:
    """Split text into words as a shell would, quotes included; nothing in it is executed.

    Raises ConfigError if a quote is not closed.
    """
    try:
        return shlex.split(text)
    except ValueError:
        raise ConfigError(f"ARMS: a quote is not closed in: {text}") from None


def read_seeds(text: str) -> list[int]:
    """Read the variable SEEDS: numbers, blanks or ends of lines between. Raises ConfigError."""
    words = text.split()
    if not words:
        raise ConfigError("SEEDS: no seed is named: give numbers such as 8, separated by blanks")
    for word in words:
        if not SEED.fullmatch(word):
            raise ConfigError(
                f"SEEDS: {word} is no seed: give numbers such as 8, separated by blanks"
            )
    if len(set(words)) < len(words):
        raise ConfigError("SEEDS: a seed is named twice")
    return [int(word) for word in words]


def in_order(arms: list[Arm], seeds: list[int]) -> list[PlannedRun]:
    """Order all runs: seed by seed, each time beginning with another arm.

    So a drift of the machine's speed affects all arms alike.
    """
    return [
        PlannedRun(arms[(turn + number) % len(arms)], seed)
        for number, seed in enumerate(seeds)
        for turn in range(len(arms))
    ]
