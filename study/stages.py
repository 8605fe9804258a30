"""The stages of a study that train: screenings of the rates, and the judged runs.

What is done is read from the run folders each time, so a stage that was killed goes on where it
stopped, and several workers on one folder need no message to one another.

    OUT/rates/ARM+learning_rate=RATE-SEED
    OUT/verdict/ARM-SEED
"""

import math
import time
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from evidence.runs import Run

from .arms import Arm, PlannedRun, in_order
from .declaration import JudgedArm, Record
from .rates import FIRST, SECOND, Screen
from .workers import STOPPED, Job, Sweep, state_of

SCREENING, JUDGED = "rates", "verdict"  # folders
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


def rate_at(record: Record, octave: float) -> float:
    """Return the learning rate so many octaves from that of the config, to three digits."""
    return float(f"{record.declaration.rate * 2**octave:.3g}")


def arm_at(judged: JudgedArm, rate: float, training: Training) -> Arm:
    """Return an arm of a screening: at one learning rate."""
    arm = judged.arm
    return Arm(f"{arm.name}+learning_rate={rate:g}", (*arm.words, *training.rate_words(rate)))


def final_loss(run: Run) -> float:
    """Return val_loss_full, nats per token; infinite where the run diverged.

    Raises UserError for a run that cannot be compared.
    """
    if run.diverged:
        return math.inf
    problem = run.problem()
    if not problem and "val_loss_full" not in run.whole_split:
        problem = "no loss over the whole val split after its last step"
    if problem:
        raise UserError(f"{run.name}: {problem}: remove its folder, and it is trained again")
    return run.whole_split["val_loss_full"]


def screen_of(out: Path, record: Record, judged: JudgedArm) -> Screen:
    """Read what an arm's screening says so far. Raises UserError for a damaged run."""
    screen = Screen()
    name = judged.arm.name
    for folder in sorted((out / SCREENING).glob("*")):
        for which in (FIRST, SECOND):
            octave = octave_of(folder.name, name, record, which)
            if octave is not None and state_of(folder).is_over:
                screen.losses.setdefault(octave, {})[which] = final_loss(Run(folder))
    # The second seed alone says nothing: its first run was lost.
    screen.losses = {octave: its for octave, its in screen.losses.items() if FIRST in its}
    return screen


def octave_of(folder: str, name: str, record: Record, which: int) -> int | None:
    """Return the octave of a run folder of a screening; None for one of another arm or seed."""
    seed = record.declaration.screen_seeds[which]
    for octave in range(-4, 5):
        if folder == f"{name}+learning_rate={rate_at(record, octave):g}-{seed}":
            return octave
    return None


def screen_arms(out: Path, record: Record, training: Training) -> None:
    """Train the runs of all screenings, until none is wanted. Raises UserError, Stopped."""
    while True:
        runs = []
        for judged in record.arms:
            for octave, which in screen_of(out, record, judged).next_runs():
                arm = arm_at(judged, rate_at(record, octave), training)
                runs.append(PlannedRun(arm, record.declaration.screen_seeds[which]))
        if not runs:
            return
        train(runs, out / SCREENING, training, training.common)


def chosen_rate(record: Record, screen: Screen) -> float | None:
    """Return an arm's learning rate, to two digits; None if the screening did not settle it."""
    octave = screen.choice()
    return None if octave is None else float(f"{record.declaration.rate * 2**octave:.1e}")


def judged_runs(out: Path, record: Record, training: Training) -> list[PlannedRun]:
    """Return the runs of the verdict: of every arm with a rate, if the baseline has one."""
    arms = []
    for judged in record.arms:
        rate = chosen_rate(record, screen_of(out, record, judged))
        if rate is not None:
            arms.append(Arm(judged.arm.name, (*judged.arm.words, *training.rate_words(rate))))
        elif judged == record.baseline:
            return []
    return in_order(arms, record.declaration.seeds(record.seeds))


def judge_arms(out: Path, record: Record, training: Training) -> None:
    """Train the runs of the verdict. Raises UserError, Stopped."""
    runs = judged_runs(out, record, training)
    if runs:
        common = (*training.common, f"--planned_seeds={record.seeds}")
        train(runs, out / JUDGED, training, common)


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
    left = [run for run in runs if not state_of(folder / run.name).is_over]
    waiting = ""
    while left:
        sweep = Sweep(job, left, set())
        code = sweep.run(training.jobs)
        if code == STOPPED:
            raise Stopped
        left = [run for run in left if not state_of(folder / run.name).is_over]
        others = sweep.left_to_others()
        if failed := [run.name for run in left if run.name not in others]:
            raise UserError(
                f"{folder / failed[0]}: the run failed (see train.txt in it): put that right, and "
                "repeat the command"
            )
        if left:
            said = f"others are training: {' '.join(others)}"
            if said != waiting:
                print(said, flush=True)
            waiting = said
            time.sleep(WAIT)
