"""From an idea for a norm to a verdict: check, plan, learning rates, judged runs, page.

    python judge.py --norm_file=my_norm.py --arms="rms MeanAbs" config/demo.py --out=out/judge
    python judge.py --arms="rms peri 'coupled --coupled_span=0'" config/which_norm_124m.py --nproc=8
    python judge.py --arms="rms peri" config/demo.py --dry_run=True      # what it would cost
    python judge.py --out=out/judge                                      # its page again

The first arm is the baseline. An arm is written as for sweep.sh: a norm type, any norm keys, and
NAME: before it if it is to have a name. Config files and other keys are those of train.py, for all
arms; `learning_rate` is the middle of the rates that are tried.

    check    gradients, low precision, extreme rows, compilation, resuming; the scale at the start
    plan     times some steps of each arm; says runs, hours and what the verdict can find; declares
    rates    the learning rate of each arm, by two seeds of their own
    verdict  new seeds, each arm at its rate, paired with the baseline by seed
    page     OUT/report.html and report.md

A norm of a norm file that starts at another scale than the baseline is judged twice: as it is
written, and with the `initial_gain` at which both start alike. After an interruption, repeat the
command: a run is lost at most. The same command on other machines that share OUT helps. An arm that
is added to --arms after the verdict is tested alone, and said to be. docs/judge.md says more.
"""

import contextlib
import difflib
import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path

from common.errors import ConfigError, UserError, run_program
from common.norm_file import KEY as NORM_FILE
from common.norm_file import default_norm_file, split_norm_file
from common.output import writing
from configurator import key, parse_args
from evidence.archive import locked
from study.declaration import Record, read_record, write_record
from study.finished import keep as keep_study
from study.page import write_page
from study.plan import jobs_here
from study.prepare import (
    Asked,
    Choices,
    go_on,
    plan_lines,
    prepare,
    read_asked,
    words_without_folder,
)
from study.stages import Stopped, Training, judge_arms, screen_arms
from study.sweep import command as start_of_train
from study.sweep import gpus_of_workers, machine_here, pin_norm_file, variable
from study.verdict import read_outcome
from study.workers import STOPPED
from training.config import TrainConfig


@dataclass(frozen=True)
class JudgeConfig:
    """The keys of judge.py."""

    arms: str = key(
        "", "arms with blanks between, each in quotes if it has keys; first the baseline"
    )
    out: str = key("out/judge", "folder of the study")
    seeds: int = key(
        0, "seeds of the verdict (0: as many as `hours` allow, else 4)", least=2, zero=True
    )
    hours: float = key(0.0, "hours that the whole study may take (0: any)", least=0.0)
    first_seed: int = key(200, "of the verdict; those of the rates are 100 and 99 less", least=100)
    sd: float = key(
        0.0, "SD of the pairs' differences, nats, for the plan (0: not known)", least=0.0
    )
    sd_from: str = key("", "where that SD is known from; with `sd` it must be given")
    dry_run: bool = key(False, "end after the plan; nothing is declared")
    anyway: bool = key(False, "go on although a check failed; the page says so")
    nproc: int = key(1, "processes a run, started by torchrun", least=1)
    jobs: int = key(0, "runs side by side (0: one a GPU, or one a core)", least=0)
    keep: str = key("", "folder for the study in two archives and judge.json, at the end")
    hellaswag: str = key("off", "score HellaSwag after training: off, auto or the items' file")


OWN_KEYS = {field.name for field in fields(JudgeConfig)}


def split_words(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split a command line into the words of judge.py and those of train.py."""
    own, others = [], []
    for word in argv:
        is_own = word == "-h" or (word.startswith("--") and is_own_key(word[2:].partition("=")[0]))
        (own if is_own else others).append(word)
    return own, others


def is_own_key(name: str) -> bool:
    """Tell whether a key is one of judge.py, or is nearer to one of these than to train.py's."""
    keys = [*OWN_KEYS, "help", NORM_FILE, *(field.name for field in fields(TrainConfig))]
    near = [name] if name in keys else difflib.get_close_matches(name, keys, n=1, cutoff=0.5)
    return bool(near) and near[0] in {*OWN_KEYS, "help"}


def training_of(config: JudgeConfig, asked: Asked, study: str) -> Training:
    """Return how the runs of a study are trained here."""
    jobs = config.jobs or jobs_here(config.nproc)
    common = [*asked.common, "--full_val=True", f"--study={study}"]
    if jobs > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        common.append(f"--jobs={jobs}")
    share = asked.config.min_lr / asked.config.learning_rate
    return Training(
        command=start_of_train(variable("PYTHON", sys.executable), config.nproc),
        common=tuple(common),
        hellaswag=config.hellaswag,
        gpus=gpus_of_workers(config.nproc, jobs),
        machine=machine_here(asked.config.device),
        jobs=jobs,
        min_lr_share=share,
    )


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def record_for(config: JudgeConfig, asked: Asked, words: list[str]) -> Record:
    """Return the study's record: as it is there, or prepared now. Raises UserError."""
    out = Path(config.out)
    training = training_of(config, asked, "")
    choices = Choices(config.seeds, config.hours, config.sd, config.sd_from, config.anyway)
    record = read_record(out)
    if record is not None:
        return go_on(asked, record, choices, training.command, out, say)
    return prepare(
        asked,
        choices,
        training.command,
        training.jobs,
        training.machine,
        words_without_folder(words),
        out,
        say,
    )


def main(argv: list[str]) -> int:
    """Run all stages that are not done. Returns the exit code."""
    own, others = split_words(argv)
    config, _ = parse_args(JudgeConfig, own, __doc__)
    if bool(config.sd) != bool(config.sd_from):
        raise ConfigError("sd and sd_from go together: say where the SD is known from")
    out = Path(config.out)
    if not config.arms and not others:
        return page_again(out, config.keep)
    _, norm_file = split_norm_file(others, default_norm_file())
    asked = read_asked(config.arms, pin_norm_file(others), norm_file, config.first_seed, out)
    with writing(out), locked(out):  # another worker waits, and finds what this one declares
        record = record_for(config, asked, argv)
        if not config.dry_run:
            write_record(out, record)
    for line in plan_lines(record):
        say(line)
    if config.dry_run:
        say("dry run: nothing was declared or trained for the study")
        with contextlib.suppress(OSError):
            out.rmdir()  # made for the timing; not one that holds anything
        return 0
    training = training_of(config, asked, record.declaration.study)
    try:
        say("rates: the learning rate of each arm, some runs at a time")
        screen_arms(out, record, training)
        say("verdict: new seeds, each arm at its rate")
        judge_arms(out, record, training)
    except Stopped:
        say("stopped; repeat the command to go on")
        return STOPPED
    tell(out, record, config.keep)
    return 0


def page_again(out: Path, keep: str) -> int:
    """Write the page of a study as it stands; nothing is trained. Returns the exit code."""
    record = read_record(out)
    if record is None:
        raise ConfigError(
            f"out={out}: no study is there: name the arms of one, --arms='rms peri', or its --out"
        )
    tell(out, record, keep)
    return 0


def tell(out: Path, record: Record, keep: str) -> None:
    """Write the page, and the archives if they are wanted; print the page's first sentence."""
    outcome = read_outcome(out, record)
    page = write_page(out, outcome)
    say(f"\n{outcome.sentence()}\n\nwrote {page}, and report.md beside it")
    if keep and outcome.is_open:
        raise UserError(f"keep={keep}: the study is not over: repeat its command first")
    if keep:
        there = read_record(Path(keep))
        if there and there.declaration != record.declaration:
            raise UserError(f"keep={keep}: another study is kept there: name another folder")
        keep_study(out, Path(keep))
        write_record(Path(keep), record)
        say(f"kept the study in {keep}")


if __name__ == "__main__":
    run_program(main)
