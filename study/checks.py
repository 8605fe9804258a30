"""Check a sweep before its first run, and say what it can show.

A wrong key in the last arm must not show only after the others have trained. And a run that is
there already, in a folder or in an archive, must be the one that the sweep would make: else another
learning rate would be "done already".
"""

import dataclasses
import json
import os
from collections.abc import Set
from pathlib import Path
from typing import Any, NamedTuple

import torch

from common.auto import AUTO
from common.code_digest import SHORT, code_digest, shortened
from common.errors import ConfigError, UserError
from common.fingerprint import data_difference, fingerprint
from common.stats import ALPHA, detectable_effect, largest_sd
from configurator import parse_args
from data.shards import Shards, find_shards
from evidence.runs import NAMES, RATES, Run, in_archive
from load import take_shape
from norm_files import take_norm_file
from norm_plan import NormConfig, foreign_keys, keys_of
from training.config import TrainConfig
from training.tracker import check_tracker

from .arms import Arm, PlannedRun, check_word
from .workers import state_of

NORM_KEYS = set(NormConfig.__dataclass_fields__)
FROM_DATA = {"vocab_size": 0, "n_vocab": 0}  # a run takes them from its data


class Here(NamedTuple):
    """What a run that is there must have been trained by and on, read once for all runs."""

    code: str  # digest of the code
    data: str  # fingerprint of the data; "" if they cannot be read


def check_sweep(
    common: list[str], arms: list[Arm], seeds: list[int], out: Path, keep: Path | None
) -> str:
    """Check all that a sweep is about to train, and what is there of it.

    Args:
        common: words of train.py that all runs have.
        out: the folder of the run folders.
        keep: the archive of finished runs.

    Returns:
        What its seeds will be able to show.

    Raises:
        ConfigError: a word is wrong, arms are the same or cannot be compared, or a run is there
            with other settings.
    """
    for word in common:
        check_word(word, word)
    # A seed that is too large shows here, not at its turn.
    largest = parse([*common, *arms[0].words, f"--seed={max(seeds)}"], out)
    check_tracker(largest.tracker)
    configs = [parse([*common, *arm.words], out) for arm in arms]
    check_arms(arms, configs)
    kept = {run.name: run for run in in_archive(keep)} if keep else {}
    here = Here(code_digest(), data_of(largest.data_dir))
    for arm, config in zip(arms, configs, strict=True):
        for seed in seeds:
            wanted = dataclasses.replace(config, seed=seed)
            name = PlannedRun(arm, seed).name
            check_folder(out / name, wanted, here)
            if keep and (run := kept.get(str(keep / name))):
                # The text of a declaration may have been amended since; its runs are the same.
                check_settings(run, wanted, here, "KEEP", but={"study"})
    count = largest.planned_seeds or len(seeds)
    return power(count, len(arms) - 1, largest.delta_val_loss)


def parse(words: list[str], out: Path) -> TrainConfig:
    """Read words of train.py as it would. Raises ConfigError."""
    words = [*take_norm_file(words), f"--out_dir={out}"]
    config, _ = parse_args(TrainConfig, words, complete=take_shape)
    return config


def check_arms(
    arms: list[Arm], configs: list[TrainConfig], may_differ: Set[str] = frozenset()
) -> None:
    """Check that arms differ, have names of their own, and can be compared with the first one.

    Args:
        may_differ: keys beside those of norms that arms may have of their own.
    """
    by_name: dict[str, Arm] = {}
    by_meaning: dict[str, Arm] = {}
    for arm, config in zip(arms, configs, strict=True):
        same = by_name.get(arm.name) or by_meaning.get(meaning(config))
        if same:
            raise ConfigError(
                f"ARMS: {arm.name} is {same.name}, an arm that is named twice: name it once"
            )
        by_name[arm.name] = by_meaning[meaning(config)] = arm
        check_comparable(arm.name, as_logged(config), as_logged(configs[0]), may_differ)


def as_logged(config: TrainConfig) -> dict[str, Any]:
    """Return the settings as a log has them: a tuple is a list there."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def meaning(config: TrainConfig) -> str:
    """Return what an arm does: the same for arms that only spell their keys in another way."""
    settings = as_logged(config)
    own = {key: value for key, value in settings.items() if key not in NAMES | NORM_KEYS | {"seed"}}
    norms = {key: settings[key] for key in keys_of(config.norm_type)}
    norms |= {"qk_norm": config.qk_kind, "decay_gains": config.decays_gains}
    if not torch.cuda.is_available():
        norms["kernels"] = "torch"  # whatever is asked for
    return json.dumps({**own, "norm_type": config.norm_type, **norms}, sort_keys=True)


def check_comparable(
    name: str, own: dict[str, Any], first: dict[str, Any], may_differ: Set[str] = frozenset()
) -> None:
    """Check that report.py will compare an arm with the first one.

    Args:
        own, first: settings of both.
        may_differ: as check_arms has it.

    Raises ConfigError that names a setting in which they differ, and which is not about norms.
    """
    for key in sorted(own.keys() - NORM_KEYS - NAMES - {"seed"} - may_differ):
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


def data_of(data_dir: str) -> str:
    """Return the fingerprint that a run on this folder logs; "" if it cannot be read."""
    try:
        paths = [find_shards(data_dir, split) for split in ("train", "val")]
        return " ".join(fingerprint(shards[0].name, Shards(shards)) for shards in paths)
    except (UserError, OSError):
        return ""  # train.py says what is wrong


def check_folder(folder: Path, wanted: TrainConfig, here: Here) -> None:
    """Check that the run in a folder, if there is one, is the one that is `wanted`."""
    if not (folder / "log.jsonl").exists():
        return
    try:
        run = Run(folder)
    except UserError as error:
        if state_of(folder).is_over:  # it would be "done already", whatever it was trained with
            raise ConfigError(f"{error} (remove its folder, or choose another OUT)") from None
        return  # train.py looks at the checkpoint
    check_settings(run, wanted, here, "OUT")


def check_settings(
    run: Run, wanted: TrainConfig, here: Here, variable: str, but: Set[str] = frozenset()
) -> None:
    """Check that a run has the settings `wanted`, today's code and the same data.

    Args:
        variable: which names the place where it is.
        but: keys that are not compared.

    Raises ConfigError that names the first difference.
    """
    if run.codes and not run.codes & shortened([here.code, *wanted.same_code]):
        raise ConfigError(
            f"{run.name}: other code trained it than stands here: go on with that, or choose "
            f"another {variable}; or train a recorded run again, and if it is equal to the bit "
            f"give --same_code={run.start['code'][:SHORT]}"
        )
    then = run.start.get("data")
    if here.data and then and (difference := data_difference(then, here.data)):
        raise ConfigError(
            f"{run.name}: it was trained on other data ({difference}): choose another {variable}"
        )
    there = run.config
    settings = as_logged(wanted)
    for key in sorted(compared_keys(settings, there) - but):
        is_same = there[key] == settings[key]
        if key == "data_dir":  # may be written in several ways
            is_same = os.path.realpath(there[key]) == os.path.realpath(settings[key])
        if not is_same:
            raise ConfigError(
                f"{run.name}: it was trained with {key}={there[key]}, and this sweep has "
                f"{key}={settings[key]}: choose another {variable}"
            )


def compared_keys(settings: dict[str, Any], there: dict[str, Any]) -> set[str]:
    """Return the keys that a run there must have as in `settings`.

    Not those that its norm type does not read, and not those that are left open.
    """
    is_open = AUTO | FROM_DATA
    unread = foreign_keys(settings["norm_type"]).keys()
    return {
        key
        for key in settings.keys() & there.keys() - NAMES - unread
        if key not in is_open or settings[key] != is_open[key]
    }
