"""The stages of a study that train: screenings of the rates, and the judged runs.

What is done is read from the run folders each time, so a stage that was killed goes on where it
stopped, and several workers on one folder need no message to one another.
"""

import re
import time
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError

from .arms import Arm, PlannedRun, in_order
from .declaration import JudgedArm, Record
from .finished import (
    JUDGED,
    SCREENING,
    chosen,
    finished,
    rate_at,
    screening_name,
    screens_of,
)
from .workers import STOPPED, Job, Sweep, state_of

RUN_FOLDER = re.compile("(.+)-([0-9]+)")  # arm and seed
WAIT = 5.0  # seconds between two looks at runs that other workers train


class Stopped(Exception):
    """The study was stopped by a signal; its runs were saved."""


@dataclass(frozen=True)
class Training:
    """How runs are trained here.

    Attributes:
        command: Python or torchrun, and train.py.
        common: words of train.py that all runs have.
        hellaswag: the key of that name.
        gpus, machine: as Job has them.
        jobs: runs side by side.
        min_lr_share: of learning_rate, what the config's min_lr is.
    """

    command: tuple[str, ...]
    common: tuple[str, ...]
    hellaswag: str
    gpus: tuple[str, ...]
    machine: str
    jobs: int
    min_lr_share: float

    def rate_words(self, rate: float) -> tuple[str, ...]:
        """Return the words of a learning rate."""
        words = (f"--learning_rate={rate:g}",)
        if self.min_lr_share:
            words += (f"--min_lr={rate * self.min_lr_share:.6g}",)
        return words


def arm_at(judged: JudgedArm, rate: float, training: Training) -> Arm:
    """Return an arm of a screening: at one learning rate."""
    return Arm(screening_name(judged, rate), (*judged.arm.words, *training.rate_words(rate)))


def screen_arms(out: Path, record: Record, training: Training) -> None:
    """Train the runs of all screenings, until none is wanted. Raises UserError, Stopped."""
    while True:
        done, runs = finished(out, SCREENING), []
        for judged in record.arms:
            for option, screen in screens_of(done, record, judged).items():
                for octave, which in screen.next_runs():
                    arm = arm_at(option, rate_at(record, octave), training)
                    runs.append(PlannedRun(arm, record.declaration.screen_seeds[which]))
        if not runs:
            return
        train(runs, out / SCREENING, training, training.common)


def planned_runs(out: Path, record: Record, training: Training) -> list[PlannedRun]:
    """Return the runs of the verdict to make: of every arm with a rate, if the baseline has one."""
    arms = []
    done = finished(out, SCREENING)
    for judged in record.arms:
        option, _, rate = chosen(record, screens_of(done, record, judged))
        if rate is not None:
            arms.append(Arm(judged.arm.name, (*option.arm.words, *training.rate_words(rate))))
        elif judged == record.baseline:
            return []
    if len(arms) < 2:  # the baseline alone is compared with nothing
        return []
    runs = in_order(arms, record.declaration.seeds(record.seeds))
    over = finished(out, JUDGED)
    return [run for run in runs if run.name not in over]


def judge_arms(out: Path, record: Record, training: Training) -> None:
    """Train the runs of the verdict. Raises UserError, Stopped."""
    # Once more, where runs of a seed moved away that another machine had begun.
    while runs := planned_runs(out, record, training):
        common = (*training.common, f"--planned_seeds={record.seeds}")
        train(runs, out / JUDGED, training, common)


def not_over(runs: list[PlannedRun], folder: Path) -> list[PlannedRun]:
    """Return the runs that are not over. One may have been moved away since it was."""
    return [run for run in runs if not state_of(folder / run.name).is_over]


def runs_in(folder: Path) -> list[PlannedRun]:
    """Return all runs in the folder of a stage; they are compared with one another."""
    found = (RUN_FOLDER.fullmatch(path.name) for path in folder.iterdir())
    return [PlannedRun(Arm(name[1], ()), int(name[2])) for name in found if name]


def train(
    runs: list[PlannedRun], folder: Path, training: Training, common: tuple[str, ...]
) -> None:
    """Train runs until all are over, some by other workers. Raises UserError, Stopped."""
    job = Job(
        command=training.command,
        common=common,
        hellaswag=training.hellaswag,
        out=folder,
        keep=None,
        gpus=training.gpus,
        machine=training.machine,
    )
    folder.mkdir(parents=True, exist_ok=True)
    waiting = ""
    while left := not_over(runs, folder):
        sweep = Sweep(job, left, set(), lambda: runs_in(folder))
        code = sweep.run(training.jobs)
        if code == STOPPED:
            raise Stopped
        others = sweep.left_to_others()
        if failed := [run.name for run in not_over(left, folder) if run.name not in others]:
            raise UserError(
                f"{folder / failed[0]}: the run failed (see train.txt in it): put that right, and "
                "repeat the command"
            )
        if others:
            said = f"others are training: {' '.join(others)}"
            if said != waiting:
                print(said, flush=True)
            waiting = said
            time.sleep(WAIT)
