"""Check a sweep before its first run, and say what it can show (a step of sweep.sh).

A wrong key in the last arm must not show only after the others have trained. And a run that is
there already must be the one that the sweep would make: else another learning rate in the same
folder would be "done already".
"""

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import ConfigError, UserError
from common.old_keys import AUTO
from common.stats import ALPHA, detectable_effect, largest_sd
from evidence.runs import NAMES, RATES, Run

FROM_DATA = {"vocab_size": 0, "n_vocab": 0}  # a run takes them from its data


def check(parse: Callable[[list[str]], Any], of_norms: set[str], argv: list[str]) -> None:
    """Check what a sweep is about to train.

    Args:
        parse: words of train.py -> its TrainConfig. Raises ConfigError.
        of_norms: keys that are about norms.
        argv: OUT, the seeds with blanks between, the words that all runs have; then for each arm
            `::`, its runs' name without the seed, and its words.

    Prints what the sweep's seeds will be able to show.

    Raises:
        ConfigError: a word is wrong, or a run is there with other settings.
    """
    out, seeds, *words = argv
    marks = [place for place, word in enumerate(words) if word == "::"] + [len(words)]
    arms: dict[str, str] = {}  # settings -> name
    first: dict[str, Any] = {}  # settings of the first arm
    for start, end in itertools.pairwise(marks):
        name, *keys = words[start + 1 : end]
        config = parse(words[: marks[0]] + keys)
        own = {k: v for k, v in dataclasses.asdict(config).items() if k not in NAMES | {"seed"}}
        settings = json.dumps(own)
        if settings in arms or name in arms.values():
            twice = arms.get(settings, name)
            raise ConfigError(f"ARMS: {name} is {twice}, an arm that is named twice: name it once")
        arms[settings] = name
        own = json.loads(settings)  # a tuple as a list, in all arms
        first = first or own
        check_comparable(name, own, first, own.keys() - of_norms)
        for seed in seeds.split():
            wanted = dataclasses.asdict(config) | {"seed": int(seed)}
            check_settings(Path(out) / f"{name}-{seed}", wanted)
    count = config.planned_seeds or len(seeds.split())
    if line := power(count, len(arms) - 1, config.delta_val_loss):
        print(line)


def check_comparable(name: str, own: dict[str, Any], first: dict[str, Any], keys: set[str]) -> None:
    """Check that report.py will compare an arm with the first one.

    Args:
        own, first: settings of both.
        keys: those that are not about norms.

    Raises ConfigError that names a setting in which they differ.
    """
    for key in sorted(keys):
        is_rate = key in RATES
        if own[key] != first[key] and not (is_rate and own["study"]):
            declared = "declare them with --study=NAME, or " if is_rate else ""
            raise ConfigError(
                f"ARMS: {name} has {key}={own[key]}, the first arm {first[key]}. Arms that are "
                f"compared differ in their norms alone: {declared}give all the same {key}"
            )


def power(seeds: int, arms: int, delta: float) -> str:
    """Say what a sweep can show, in SDs of paired differences; "" of fewer than two seeds or arms.

    Args:
        seeds: pairs of each arm.
        arms: compared with the baseline; Holm's first step divides the level by their number.
        delta: margin of val loss, 0 for none.
    """
    if seeds < 2 or arms < 1:
        return ""
    found = detectable_effect(1.0, seeds, ALPHA / arms)
    line = (
        f"power: {seeds} seeds find, with 80 % chance, a difference of {found:.2f} SD of the pairs"
    )
    if delta:
        largest = largest_sd(delta, seeds, ALPHA / arms)
        line += f'; and "within the margin" of {delta:g}, if that SD is at most {largest:.3g}'
    return line


def check_settings(run: Path, wanted: dict[str, Any]) -> None:
    """Check that the run in a folder, if there is one, has the settings `wanted`.

    Raises ConfigError that names the first difference.
    """
    if not (run / "log.jsonl").exists():
        return
    try:
        there = Run(run).config
    except UserError:
        return  # a damaged log: train.py looks at the checkpoint
    wanted = json.loads(json.dumps(wanted))  # a tuple as a list, as in the log
    open_keys = AUTO | FROM_DATA
    for key in sorted(wanted.keys() & there.keys() - NAMES):
        is_open = key in open_keys and wanted[key] == open_keys[key]
        is_same = there[key] == wanted[key]
        if key == "data_dir":  # may be written in several ways
            is_same = Path(there[key]).resolve() == Path(wanted[key]).resolve()
        if not is_open and not is_same:
            raise ConfigError(
                f"{run}: it was trained with {key}={there[key]}, and this sweep has "
                f"{key}={wanted[key]}: choose another OUT"
            )
