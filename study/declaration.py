"""What a study declares before its first run, and its file judge.json.

The declaration's digest is in every run of the study, in the key `study`: runs of another
declaration are not compared. judge.json has it in words. Where the file is lost, the same command
declares the same again, and finds its runs.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import ConfigError, UserError
from common.fingerprint import data_difference
from common.inputs import read_regular
from common.norm_file import check_none_is_named
from common.output import parse_json, write_bytes_atomically, writing

from .arms import Arm, options_of, read_arm

FILE = "judge.json"
LARGEST = 1 << 24  # bytes of a judge.json
RULES = (
    "Rates: each arm by itself, octaves around the config's rate, one more beyond an end that is "
    "best, three on either side at most; a second seed at the best two rates and beside the best; "
    "the vertex of the parabola over log2 of the rate. An arm whose best rate is still at an end "
    "has no verdict. min_lr keeps its share of the rate.",
    "Choices: an arm that has several values of init_std, initial_gain or optimizer is screened "
    "with each; the lowest loss decides which goes on.",
    "Starts: an arm of a norm file that starts outside 0.95 to 1.05 of the baseline's scale has a "
    "second arm at the matched initial_gain, in the same family, unless it has a choice of gains.",
    "Verdict: val_loss_full after the last step on new seeds, each arm at its own rate, paired by "
    "seed with the first arm; t test, two-sided, Holm over the other arms, level 0.05. The error "
    "that the screening leaves in the rates is added to the standard error.",
    "No verdict before all planned seeds; an arm of which a run diverged has none but that.",
    "An arm that comes after the verdict is tested alone, and the old family stays.",
)


class JudgedArm(NamedTuple):
    """An arm as it is declared."""

    text: str  # as ARMS has it
    matches: str  # text of the arm whose start it matches to the baseline's scale; "" for none

    @property
    def arm(self) -> Arm:
        """Its name, and its words for train.py."""
        return read_arm(self.text)

    @property
    def options(self) -> tuple["JudgedArm", ...]:
        """The arms that its screenings decide between: mostly itself alone."""
        return tuple(JudgedArm(text, self.matches) for text in options_of(self.text))


@dataclass(frozen=True)
class Declaration:
    """What is fixed before the first run.

    Attributes:
        rules: RULES.
        arms: the baseline first.
        rate: the learning rate in the middle of the screenings.
        screen_seeds: of the screenings, the first one at every rate.
        first_seed: of the verdict; those after it follow.
        settings: what all arms share, by its keys in train.py.
        code: digest of the code that trains.
        data: fingerprint of the data.
        norm_sha256: digest of the norm file; "" without one.
    """

    rules: tuple[str, ...]
    arms: tuple[JudgedArm, ...]
    rate: float
    screen_seeds: tuple[int, int]
    first_seed: int
    settings: dict[str, Any]
    code: str
    data: str
    norm_sha256: str

    @functools.cached_property
    def study(self) -> str:
        """The key `study` of its runs."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return f"judge {hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def seeds(self, count: int) -> list[int]:
        """Return the seeds of the verdict."""
        return list(range(self.first_seed, self.first_seed + count))

    def difference(self, other: "Declaration") -> str:
        """Name the first thing in which another declaration differs, its arms left out; or ""."""
        for field in dataclasses.fields(self):
            here, there = getattr(self, field.name), getattr(other, field.name)
            if field.name == "settings":
                if keys := [key for key in here | there if here.get(key) != there.get(key)]:
                    key = min(keys)
                    return f"{key}={there.get(key)}, and now {here.get(key)}"
            elif field.name == "rate" and here != there:
                return f"learning_rate={there:g}, and now {here:g}"
            elif field.name == "data":
                if not here:
                    return "data that cannot be read now: see data_dir"
                if difference := data_difference(there, here):
                    return f"other data, {difference}"
            elif field.name in ("code", "norm_sha256"):
                what = "code" if field.name == "code" else "norm file"
                if here != there:
                    return f"another {what}, {there[:12] or 'none'}, and now {here[:12] or 'none'}"
            elif field.name != "arms" and here != there:
                return f"{field.name} {there}, and now {here}"
        return ""


@dataclass(frozen=True)
class Later:
    """Arms that came after the verdict."""

    arms: tuple[JudgedArm, ...]
    day: str


@dataclass(frozen=True)
class Record:
    """All of judge.json.

    Attributes:
        declaration: of the family that was declared first.
        day: when.
        seeds: number of seeds of the verdict.
        seeds_from: why so many.
        sd: SD of the pairs' differences that the plan took, nats; 0 if it was not known.
        sd_from: where that was known from.
        anyway: was the study begun although a check failed?
        checks: arm -> lines (what, is it right, figure).
        starts: arm -> lines (place, RMS, RMS of the baseline), of the untrained model.
        sizes: arm -> what it has and moves, as the page shows it.
        seconds: arm -> seconds that a run takes, measured over some steps.
        jobs: runs side by side.
        machine: where that was measured.
        command: the words of judge.py, without the norm file's folder.
        norm_file_name: of the norm file; "" for none.
        later: arms that came after the verdict.
    """

    declaration: Declaration
    day: str
    seeds: int
    seeds_from: str
    sd: float
    sd_from: str
    anyway: bool
    checks: dict[str, list[list[Any]]]
    starts: dict[str, list[list[Any]]]
    sizes: dict[str, dict[str, Any]]
    seconds: dict[str, float]
    jobs: int
    machine: str
    command: list[str]
    norm_file_name: str
    later: tuple[Later, ...] = ()

    @property
    def families(self) -> Iterator[tuple[JudgedArm, ...]]:
        """The arms that are tested together, the baseline left out; those that came later alone."""
        yield self.declaration.arms[1:]
        for later in self.later:
            for judged in later.arms:
                yield (judged,)

    @property
    def arms(self) -> tuple[JudgedArm, ...]:
        """All arms, the baseline first."""
        return (
            *self.declaration.arms,
            *(judged for later in self.later for judged in later.arms),
        )

    @property
    def baseline(self) -> JudgedArm:
        """What the others are compared with."""
        return self.declaration.arms[0]

    def with_later(self, arms: tuple[JudgedArm, ...]) -> "Record":
        """Return the record with arms that come now, after the verdict."""
        added = Later(arms, date.today().isoformat())
        return dataclasses.replace(self, later=(*self.later, added))


def read_record(out: Path) -> Record | None:
    """Read judge.json in a folder; None if there is none. Raises UserError if it is damaged."""
    path = out / FILE
    if not path.exists():
        return None
    try:
        content = parse_json(read_regular(path, LARGEST))
        check_none_is_named(content)
        return record_of(content)
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise UserError(
            f"{path}: damaged, or not written by judge.py ({type(error).__name__}): remove it; the "
            "same command writes it again, and its runs stay"
        ) from None


def record_of(content: dict[str, Any]) -> Record:
    """Return a record from the content of judge.json."""
    declared = content["declaration"]
    declaration = Declaration(
        **declared
        | {
            "rules": tuple(declared["rules"]),
            "arms": arms_of(declared["arms"]),
            "screen_seeds": tuple(declared["screen_seeds"]),
        }
    )
    later = tuple(Later(arms_of(its["arms"]), str(its["day"])) for its in content["later"])
    return Record(**content | {"declaration": declaration, "later": later})


def arms_of(content: list[list[str]]) -> tuple[JudgedArm, ...]:
    """Return arms from judge.json; each is read once, so that a damaged one shows here."""
    arms = tuple(JudgedArm(*map(str, its)) for its in content)
    for judged in arms:
        read_arm(judged.text)
    return arms


def write_record(out: Path, record: Record) -> None:
    """Write judge.json atomically. Raises UserError."""
    with writing(out):
        text = json.dumps(dataclasses.asdict(record), indent=1, ensure_ascii=True)
        write_bytes_atomically(out / FILE, text.encode() + b"\n")
