"""The finished runs of a study: in run folders, or in archives that were made of these.

OUT/rates/ARM+learning_rate=RATE-SEED      or in OUT/rates.tar.xz
OUT/verdict/ARM-SEED                       or in OUT/verdict.tar.xz
"""

from pathlib import Path
from typing import Any, NamedTuple

from common.code_digest import SHORT, shortened
from common.errors import UserError
from common.fingerprint import data_difference
from common.output import writing
from evidence.archive import SUFFIX, by_run, read, write
from evidence.runs import RATES, Run, difference_in_settings, final_loss

from .arms import CHOICES, own_values
from .checks import compared_keys
from .declaration import JudgedArm, Record
from .rates import FIRST, MOST, SECOND, Screen
from .workers import state_by_log, state_of

SCREENING, JUDGED = "rates", "verdict"  # stages that train
AGAIN = "remove its folder, and it is trained again"
OCTAVES = range(-MOST - 1, MOST + 2)  # of which a screening may have runs

Finished = dict[str, Run]  # name of a run -> it


def finished(out: Path, stage: str) -> Finished:
    """Read the runs of a stage that are over; one in a folder counts before one in the archive.

    Raises UserError for a damaged log.
    """
    archive = out / f"{stage}{SUFFIX}"
    runs = {
        name: Run(archive / name, files)
        for name, files in by_run(read(archive)).items()
        if state_by_log(files.get("log.jsonl", b"")).is_over
    }
    for folder in sorted((out / stage).glob("*")):
        if state_of(folder).is_over:
            runs[folder.name] = Run(folder)
    return runs


def keep(out: Path, folder: Path) -> None:
    """Write all finished runs of a study into two archives in a folder. Raises UserError."""
    with writing(folder):
        for stage in (SCREENING, JUDGED):
            content = {}
            for name, run in finished(out, stage).items():
                content |= {f"{name}/{file}": part for file, part in run.files.items()}
            write(folder / f"{stage}{SUFFIX}", content)


class Chosen(NamedTuple):
    """Which of its options an arm is judged with, and at which learning rate."""

    option: JudgedArm
    screen: Screen
    rate: float | None  # None if no screening has settled it


def mismatch(run: Run, record: Record, option: JudgedArm, seed: int, rate: float) -> str:
    """Say why a run of the study's name is not one of it; "" if it is.

    Args:
        option, seed, rate: that it should have.
    """
    declared = record.declaration
    wanted = {"study": declared.study, "seed": seed, "learning_rate": rate}
    for key, value in wanted.items():
        if (there := run.config.get(key)) != value:
            return f"{key}={there}, and the study's is {value}"
    own = own_values(option.arm)
    settings = declared.settings | {"norm_type": run.config.get("norm_type")}
    if lowest := declared.settings.get("min_lr"):  # its share of the rate is kept
        settings["min_lr"] = float(f"{rate * (lowest / declared.rate):.6g}")
    for key in sorted(compared_keys(settings, run.config) - own.keys() - {"learning_rate"}):
        if (there := run.config[key]) != settings[key]:
            return f"{key}={there}, and the study's is {settings[key]}"
    if (there := run.config.get("norm_sha256")) and there != declared.norm_sha256:
        return f"norm file {there[:SHORT]}, and the study's is {declared.norm_sha256[:SHORT]}"
    for key in own.keys() & {*CHOICES}:
        if not has_value(there := run.config.get(key), own[key]):
            return f"{key}={there}, and the screening chose {own[key]}"
    if run.codes and not run.codes & shortened({declared.code}):
        return f"code {run.start['code'][:SHORT]}, and the study's is {declared.code[:SHORT]}"
    if data_difference(declared.data, data := str(run.start.get("data"))):
        return f"data: {data}, and the study's are {declared.data}"
    return ""


def has_value(there: Any, text: str) -> bool:
    """Tell whether a setting of a run is what a word says."""
    if isinstance(there, str):
        return there == text
    if isinstance(there, list | tuple):  # one number for each norm
        return ",".join(f"{number:g}" for number in there) == ",".join(
            f"{float(number):g}" for number in text.split(",")
        )
    try:
        return float(text) == there
    except ValueError:
        return True  # auto, which a run works out


def rate_at(record: Record, octave: float) -> float:
    """Return the learning rate so many octaves from that of the config, to three digits."""
    return float(f"{record.declaration.rate * 2**octave:.3g}")


def screening_name(judged: JudgedArm, rate: float) -> str:
    """Return what the runs of an arm at one rate are called, without the seed."""
    return f"{judged.arm.name}+learning_rate={rate:g}"


def screening_runs(runs: Finished, record: Record, judged: JudgedArm) -> dict[int, dict[int, Run]]:
    """Return an arm's runs: octave -> FIRST or SECOND -> run. The second seed is never alone."""
    found: dict[int, dict[int, Run]] = {}
    for octave in OCTAVES:
        name = screening_name(judged, rate_at(record, octave))
        its = {
            which: runs[f"{name}-{record.declaration.screen_seeds[which]}"]
            for which in (FIRST, SECOND)
            if f"{name}-{record.declaration.screen_seeds[which]}" in runs
        }
        if FIRST in its:
            found[octave] = its
    return found


def screen_of(runs: Finished, record: Record, judged: JudgedArm) -> Screen:
    """Return what an arm's screening says so far.

    Raises UserError for a run without a loss, or of another study.
    """
    its = screening_runs(runs, record, judged)
    for octave, seeds in its.items():
        for which, run in seeds.items():
            seed = record.declaration.screen_seeds[which]
            if why := mismatch(run, record, judged, seed, rate_at(record, octave)):
                raise UserError(f"{run.name}: {why}: {AGAIN}")
    for which in (FIRST, SECOND):
        check_alike([seeds[which] for seeds in its.values() if which in seeds])
    losses = {}
    for octave, seeds in its.items():
        losses[octave] = {which: final_loss(run, AGAIN) for which, run in seeds.items()}
    return Screen(losses)


def check_alike(runs: list[Run]) -> None:
    """Raise UserError if runs of one arm and seed differ in more than their rates.

    A screening may go on with another version of torch.
    """
    for run in runs[1:]:
        if why := difference_in_settings(run, runs[0], (*RATES, "torch")):
            raise UserError(
                f"{run.name} and {runs[0].name}: {why}: remove the folders of those that are not "
                "as the others, and they are trained again"
            )


def chosen_rate(record: Record, screen: Screen) -> float | None:
    """Return an arm's learning rate, to two digits; None if the screening did not settle it."""
    octave = screen.choice()
    return None if octave is None else float(f"{record.declaration.rate * 2**octave:.1e}")


def chosen(record: Record, screens: dict[JudgedArm, Screen]) -> Chosen:
    """Return what an arm's screenings choose: of its options, the one with the lowest loss.

    Args:
        screens: what `screens_of` returned for the arm.
    """
    best = min(screens, key=lambda option: screens[option].lowest)
    is_over = all(screen.is_over for screen in screens.values())
    return Chosen(best, screens[best], chosen_rate(record, screens[best]) if is_over else None)


def screens_of(runs: Finished, record: Record, judged: JudgedArm) -> dict[JudgedArm, Screen]:
    """Return the screening of each option of an arm."""
    return {option: screen_of(runs, record, option) for option in judged.options}


def judged_runs(runs: Finished, record: Record, judged: JudgedArm) -> dict[int, Run]:
    """Return an arm's runs of the verdict: seed -> run."""
    name = judged.arm.name
    seeds = record.declaration.seeds(record.seeds)
    return {seed: runs[f"{name}-{seed}"] for seed in seeds if f"{name}-{seed}" in runs}
