"""The plan of a study, and the runs of its stages (repro/which_norm.toml explains both).

A stage says which runs it wants, given what has been found so far. Whoever trains asks again until
nothing is wanted that is not finished; a stage whose later runs depend on its earlier ones then
goes on by itself. The answer depends on the logs alone, so any number of workers can ask.
"""

import hashlib
import math
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import ConfigError, UserError
from evidence.runs import Run, find_runs

# Stages that choose what the others compare. Those compare runs of the same seed with each other.
CHOOSING = ("initialisation", "rates")
# What all runs of a study must have in common.
CONDITIONS = ("data", "versions")
STUDY = ("the study",)  # the group of all its runs
# What runs that are compared must have in common. Older logs have no `processor`.
PLACE = ("device", "processor")

Rates = dict[float, dict[int, float]]  # learning rate -> seed -> loss, infinite if it diverged


@dataclass(frozen=True)
class Wanted:
    """One run that a stage wants.

    Attributes:
        stage: name of the stage.
        shape: name of the shape.
        arm: short name of the arm.
        words: norm type and keys, as ARMS of sweep.sh takes them.
        seed: of the run.
    """

    stage: str
    shape: str
    arm: str
    words: str
    seed: int


@dataclass(frozen=True)
class Shape:
    """One shape of a scale."""

    name: str
    keys: dict[str, Any]
    n_layer: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "n_layer", self.keys["n_layer"])


class Plan:
    """A plan file at one scale.

    Args:
        path: the file.
        scale: name of the scale.

    Raises:
        ConfigError: no such file or scale, or the file is damaged.
    """

    def __init__(self, path: Path, scale: str):
        try:
            content = path.read_bytes()
            plan = tomllib.loads(content.decode())
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: no plan, or damaged ({error})") from None
        try:
            if scale not in plan["scales"]:
                known = ", ".join(plan["scales"])
                raise ConfigError(f"{scale}: unknown scale: it is one of {known}")
            found = plan["scales"][scale]
            self.config: str = found["config"]
            self.rates: list[float] = found["rates"]
            self.shapes = [Shape(name, keys) for name, keys in found["shapes"].items()]
            self.arms: dict[str, str] = plan["arms"]
            self.baseline: str = plan["baseline"]
            self.name: str = plan["name"]
            for stage, rules in found.get("rules", {}).items():
                plan[stage] |= rules
        except KeyError as error:
            raise ConfigError(f"{path}: it has no {error}") from None
        except (AttributeError, TypeError) as error:
            raise ConfigError(f"{path}: a value stands where a [table] must be ({error})") from None
        self.path = path
        self.scale = scale
        self.plan = plan
        self.hash = hashlib.sha256(content).hexdigest()

    @property
    def study(self) -> str:
        """The key `study` of every run: name, scale, the first 16 digits of the plan's hash."""
        return self._study(self.hash)

    def studies(self, stage: str) -> list[str]:
        """Return the keys `study` that runs of a stage may have.

        The plan's own, and those of the versions that it amends and whose stage it leaves alone.
        """
        amended: dict[str, list[str]] = self.plan.get("amends", {})
        older = [self._study(digest) for digest, stages in amended.items() if stage in stages]
        return [self.study, *older]

    def _study(self, digest: str) -> str:
        return f"{self.name} {self.scale} {digest[:16]}"

    def words(self, arm: str, shape: Shape, **keys: Any) -> str:
        """Return the arm's norm type and keys in a shape, with further keys."""
        block_0 = " ".join(["Rs", *["RR"] * (shape.n_layer - 1), "R"])
        words = self.arms[arm].format(block_0=block_0)
        return " ".join([words, *(f"--{name}={_short(value)}" for name, value in keys.items())])


def _short(value: Any) -> str:
    """Write a value for the command line; a float with the digits that it has."""
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Result:
    """What a finished run of a study found.

    Attributes:
        run: its log.
        loss: val_loss_full, nats per token; infinite if it diverged.
    """

    run: Run
    loss: float


class Results:
    """The finished runs of a study.

    Args:
        plan: whose runs they are.
        places: stage -> shape -> folders and archives with its runs; those that do not exist yet
            are passed over.
        earlier: data and versions of the stages before, which these runs must have too.

    Raises:
        UserError: a run has another plan's hash, other settings than its name says, other data,
            versions or code than the rest of its stage, or another processor than the runs that it
            is compared with; or a log is damaged.
    """

    def __init__(
        self,
        plan: Plan,
        places: dict[str, dict[str, list[Path]]],
        earlier: dict[str, Any] | None = None,
    ):
        self.plan = plan
        self.found: dict[tuple[str, str, str, int], Result] = {}
        # Stage, or stage, shape and seed -> name of the first run, and what the others must have.
        self.first: dict[tuple[str, ...], tuple[str, dict[str, Any]]] = {}
        if earlier is not None:
            self.first[STUDY] = ("an earlier stage", earlier)
        for stage, shapes in places.items():
            for shape, paths in shapes.items():
                for path in paths:
                    self._read(stage, shape, path)

    def _read(self, stage: str, shape: str, path: Path) -> None:
        """Read the runs of one stage and shape."""
        if path.is_dir():
            logs = sorted(path.glob("*/log.jsonl"))
            runs = [Run(log.parent) for log in logs if has_begun(log)]
        elif path.exists():
            runs = find_runs([path])
        else:
            return
        for run in runs:
            if run.config.get("study") not in self.plan.studies(stage):
                raise UserError(
                    f"{run.name}: of study {run.config.get('study')!r}, not {self.plan.study!r}: "
                    f"the plan was changed after the run: bring it back, or {move_away(run)}"
                )
            check_name(run)
            if run.changed:
                raise UserError(f"{run.name}: {run.problem()}: to train it again, {move_away(run)}")
            self._must_agree(STUDY, run, *CONDITIONS)
            self._must_agree((stage,), run, "git")
            if stage not in CHOOSING:
                self._must_agree(pair_of(stage, shape, run.seed), run, *PLACE)
            loss = final_loss(run)
            if loss is not None:
                self.found[stage, shape, run_name(run.path), run.seed] = Result(run, loss)

    def _must_agree(self, group: tuple[str, ...], run: Run, *names: str) -> None:
        """Raise UserError if a run's `start` differs in these from the first run of its group."""
        here = {name: run.start.get(name) for name in names}
        name, first = self.first.setdefault(group, (run.name, here))
        for key, value in here.items():
            if value != first[key]:
                raise UserError(
                    f"{run.name}: {key} {value}, but {name} had {first[key]}: {move_away(run)}"
                )

    def place_of(self, run: Wanted) -> dict[str, Any] | None:
        """Return device and processor of the first run of the same seed, None if there is none."""
        if run.stage in CHOOSING:
            return None
        found = self.first.get(pair_of(run.stage, run.shape, run.seed))
        return found and found[1]

    def conditions(self) -> dict[str, Any]:
        """Return data and versions of the runs."""
        return self.first[STUDY][1]

    def devices(self, stage: str) -> Counter[str]:
        """Return device -> number of finished runs of a stage."""
        return Counter(run.start["device"] for run in self.runs(stage))

    def runs(self, stage: str) -> list[Run]:
        """Return the finished runs of a stage."""
        return [result.run for key, result in self.found.items() if key[0] == stage]

    def commits(self, stage: str) -> list[str]:
        """Return the commits of a stage's runs."""
        return sorted({run.start["git"] for run in self.runs(stage)})

    def hashes(self, stage: str) -> list[str]:
        """Return the hashes of the plans that a stage's runs were trained under, 16 digits."""
        return sorted({run.config["study"].split()[-1] for run in self.runs(stage)})

    def of(self, wanted: Wanted) -> Result | None:
        """Return the result of a run, None if it is not finished."""
        key = (wanted.stage, wanted.shape, name_of(wanted.words), wanted.seed)
        return self.found.get(key)

    def missing(self, wanted: list[Wanted]) -> list[Wanted]:
        """Return the runs that are not finished."""
        return [run for run in wanted if self.of(run) is None]


def move_away(run: Run) -> str:
    """Say how a run is moved away, from wherever it was read."""
    return (
        f"move its folder away, or take it out of the archive (python -m evidence.archive FILE "
        f"--remove {run.path.name})"
    )


def pair_of(stage: str, shape: str, seed: int) -> tuple[str, ...]:
    """Name the runs that share random draws and are subtracted from each other."""
    return stage, shape, f"seed {seed}"


def has_begun(log: Path) -> bool:
    """Is there a start event in a log? A process that is killed early leaves none."""
    try:
        with log.open(encoding="utf-8", errors="replace") as file:
            return file.readline().endswith("\n")
    except FileNotFoundError:  # a new run begins just now
        return False


def name_of(words: str) -> str:
    """Return the name that sweep.sh gives the runs of an arm, without the seed."""
    name = words.replace("'", "").replace(" --", "+")
    return name.replace(" ", "_").replace("/", "_")


def run_name(path: Path) -> str:
    """Return the arm's part of a run folder's name, which ends in the seed."""
    return path.name.rpartition("-")[0]


def check_name(run: Run) -> None:
    """Raise UserError if a run's settings are not those that its folder's name says.

    Stages look for runs by name. A run with another learning rate than the one that was selected
    must not pass for it.
    """
    norm_type, *keys = run_name(run.path).split("+")
    settings = dict(key.split("=", 1) for key in keys) | {"norm_type": norm_type}
    settings["seed"] = run.path.name.rpartition("-")[2]
    for name, text in settings.items():
        value = run.config.get(name)
        is_same = str(value).replace(" ", "_") == text
        if isinstance(value, float):
            is_same = value == float(text)
        if not is_same:
            raise UserError(
                f"{run.name}: its log says {name}={value}, its name {name}={text}: it is not the "
                "run that the plan wants; move it away"
            )


def final_loss(run: Run) -> float | None:
    """Return val_loss_full, infinite if the run diverged, None if it is not finished."""
    if run.diverged:
        return math.inf
    ends = [event for event in run.events_of("end") if event["reason"] == "done"]
    if not ends or not run.whole_split:
        return None
    loss = run.whole_split["val_loss_full"]
    return math.inf if loss is None else loss
