"""What a study does before its first run: check, match starts, time some steps, declare."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from common.code_digest import code_digest
from common.errors import ConfigError, UserError
from common.norm_file import PIN, NormFile
from common.output import parse_json
from data.shards import Shards, find_shards
from evidence.archive import SUFFIX, read
from evidence.runs import NAMES
from training.config import TrainConfig

from .arms import CHOICES, check_word, named, own_choices, own_values, read_arm, read_arms, split
from .checks import NORM_KEYS, as_logged, check_arms, data_of, parse
from .declaration import RULES, Declaration, JudgedArm, Record
from .finished import JUDGED, SCREENING
from .norm_check import check_arm, size_of
from .plan import ArmTime, cost, power_lines, seeds_within, time_arm
from .starts import matched_gain, may_be_matched, starts, why_unmatched

SEEDS = 4  # of the verdict, where neither --seeds nor --hours says
# Keys that the study sets itself, beside those that a sweep does; and of its arms alone
OWN = {"study", "planned_seeds", "full_val", "delta_val_loss"}
OWN_OF_ARMS = {*OWN, "learning_rate", "min_lr"}
NOT_DECLARED = {"seed", "learning_rate", "data_dir", "norm_type", "norm_sha256"}
BEFORE_FIRST = (-100, -99)  # seeds of the screenings, from the first one of the verdict

Say = Callable[[str], None]


class Asked(NamedTuple):
    """What the command line asks for.

    Attributes:
        arms: as ARMS has them, the baseline first.
        common: words of train.py for all arms, with the norm file and its digest.
        norm_file: None without one.
        first_seed: of the verdict.
        config: of the baseline, without what it has of its own.
    """

    arms: tuple[str, ...]
    common: tuple[str, ...]
    norm_file: NormFile | None
    first_seed: int
    config: TrainConfig


@dataclass(frozen=True)
class Choices:
    """How many seeds, and what is known beforehand; as the keys of judge.py."""

    seeds: int
    hours: float
    sd: float
    sd_from: str
    anyway: bool


class Prepared(NamedTuple):
    """What is known of an arm before it is trained."""

    checks: list[list[Any]]  # what, is it right, figure
    starts: list[list[Any]]  # place, RMS, RMS of the baseline
    size: dict[str, Any]
    seconds: float  # that a run takes
    matched: JudgedArm | None


def read_asked(
    arms: str, common: list[str], norm_file: NormFile | None, first_seed: int, out: Path
) -> Asked:
    """Read and check what is asked for. Raises ConfigError."""
    texts = split(arms)
    if len(texts) < 2:
        raise ConfigError(
            f"arms={arms!r}: a verdict needs two arms or more, the baseline first, such as "
            "--arms='rms peri'"
        )
    for word in common:
        check_word(word, word)
        refuse_words(word, OWN, "the study sets it itself: leave it out")
    for text in texts:
        for word in read_arm(text).words:
            refuse_words(word, OWN_OF_ARMS, "the study finds it for each arm: leave it out")
    names = [arm.name for arm in read_arms(arms)]
    if again := next((name for name in names if names.count(name) > 1), ""):
        raise ConfigError(f"arms: {again} is the name of two arms: give one another by NAME:")
    options = [option.arm for text in texts for option in JudgedArm(text, "").options]
    configs = [parse([*common, *arm.words], out) for arm in options]
    check_arms(options, configs, own_choices(texts))
    shared = [word for word in options[0].words if not sets_any(word, {*CHOICES} - NORM_KEYS)]
    config = parse([*common, *shared], out)
    return Asked(tuple(texts), tuple(common), norm_file, first_seed, config)


def refuse_words(word: str, names: set[str], why: str) -> None:
    """Raise ConfigError for a word that sets one of these keys."""
    if sets_any(word, names):
        raise ConfigError(f"{word}: {why}")


def sets_any(word: str, names: set[str]) -> bool:
    """Tell whether a word sets one of these keys."""
    return word.startswith("--") and word.removeprefix("--").partition("=")[0] in names


def config_of(asked: Asked, text: str, out: Path) -> TrainConfig:
    """Return the settings of an arm, of its first option at the rate of the config."""
    return parse([*asked.common, *first_words(text)], out)


def first_words(text: str) -> tuple[str, ...]:
    """Return the words for train.py of an arm's first option."""
    return JudgedArm(text, "").options[0].arm.words


# ------------------------------------------------------------------------------------- declaration


def declare(asked: Asked, arms: tuple[JudgedArm, ...]) -> Declaration:
    """Declare a study of these arms."""
    first = asked.first_seed
    # Norm keys that no arm has of its own are those of all.
    own = {key for judged in arms for key in own_values(read_arm(judged.text))}
    not_declared = (NORM_KEYS & own) | NAMES | OWN | NOT_DECLARED
    shared = as_logged(asked.config)
    return Declaration(
        rules=RULES,
        arms=arms,
        rate=asked.config.learning_rate,
        screen_seeds=(first + BEFORE_FIRST[0], first + BEFORE_FIRST[1]),
        first_seed=first,
        settings={key: value for key, value in shared.items() if key not in not_declared},
        code=code_digest(),
        data=data_of(asked.config.data_dir),
        norm_sha256=asked.norm_file.sha256 if asked.norm_file else "",
    )


def studies_in(out: Path) -> set[str]:
    """Return the key `study` of the runs of a study's folder."""
    return {str(its["study"]) for its in configs_in(out, SCREENING, JUDGED) if "study" in its}


def planned_in(out: Path) -> int:
    """Return how many seeds the judged runs in a folder were planned with; 0 without any."""
    return next((int(its.get("planned_seeds", 0)) for its in configs_in(out, JUDGED)), 0)


def configs_in(out: Path, *stages: str) -> Iterator[dict[str, Any]]:
    """Yield the settings of the runs of stages: in run folders, and in archives of these."""
    for stage in stages:
        archived = read(out / f"{stage}{SUFFIX}")
        texts = [text for name, text in archived.items() if name.endswith("/config.json")]
        for path in out.glob(f"{stage}/*/config.json"):
            with contextlib.suppress(OSError):  # another worker may move a run away
                texts.append(path.read_bytes())
        for text in texts:
            with contextlib.suppress(ValueError):  # train.py says what is wrong
                its = parse_json(text)
                if isinstance(its, dict):
                    yield its


# --------------------------------------------------------------------------------- before the runs


def prepare_arm(
    asked: Asked,
    text: str,
    baseline: str,
    command: tuple[str, ...],
    out: Path,
    say: Say,
    anyway: bool = False,
) -> Prepared:
    """Check an arm, compare its start with the baseline's, and time it. Raises UserError.

    Args:
        text: the arm.
        baseline: the first arm.
        command: how train.py is started.
        say: prints a line.
        anyway: go on although a check failed.
    """
    config, base = config_of(asked, text, out), config_of(asked, baseline, out)
    words = [*asked.common, *first_words(text)]
    checks, places, matched = [], [], None
    if text != baseline:
        say(f"check {text}: some minutes")
        for finding in check_arm(config, words):
            checks.append(list(finding))
            failed = "" if finding.is_ok else "FAILED: "
            say(f"check {text}: {finding.what}: {failed}{finding.figure}")
        if not anyway:
            refuse_failed(text, checks)
        found = starts(config, base)
        places = [list(start) for start in found]
        matched = matched_arm(text, config, found, say)
    seconds = time_arm(command, words, config, val_tokens(config.data_dir), out)
    say(f"time {text}: {seconds / 60:.1f} minutes a run; what its norms move is counted next")
    return Prepared(checks, places, size_of(config)._asdict(), seconds, matched)


def matched_arm(text: str, config: TrainConfig, found: list[Any], say: Say) -> JudgedArm | None:
    """Return the arm that starts at the baseline's scale; None if it needs or may have none."""
    if not may_be_matched(JudgedArm(text, "")):
        return None
    gain = matched_gain(found, config)
    if gain is None:
        if why := why_unmatched(found):
            say(f"start {text}: {why}")
        return None
    say(
        f"start {text}: its norms put out {config.initial_gain / gain:.2f} times what the "
        f"baseline's do: a second arm begins with --initial_gain={gain:.3g}"
    )
    name, colon, words = named(text)
    own = f"{name}-matched:" if colon else ""
    return JudgedArm(f"{own}{words} --initial_gain={gain:.3g}", text)


def val_tokens(data_dir: str) -> int:
    """Return the tokens of the val split. Raises UserError."""
    return sum(map(len, Shards(find_shards(data_dir, "val"))))


def prepare(
    asked: Asked,
    choices: Choices,
    command: tuple[str, ...],
    jobs: int,
    machine: str,
    words: list[str],
    out: Path,
    say: Say,
) -> Record:
    """Prepare a study and return its record; nothing is written. Raises UserError.

    Args:
        jobs, machine: as the stages have them.
        words: of judge.py.
    """
    baseline = asked.arms[0]
    # The baseline last: what is wrong with a new norm shows at once.
    order = (*asked.arms[1:], baseline)
    found = {
        text: prepare_arm(asked, text, baseline, command, out, say, choices.anyway)
        for text in order
    }
    for matched in [its.matched for its in found.values() if its.matched]:
        # Unless somebody has named that arm too, which then has checks of its own.
        found.setdefault(matched.text, found[matched.matches]._replace(checks=[], starts=[]))
    failed = has_failed(found)
    family, later = split_family(asked, found, out)
    seconds = {text: its.seconds for text, its in found.items()}
    times = [time_of(JudgedArm(text, ""), seconds) for text in found]
    seeds, why = choose_seeds(choices, times, jobs, out)
    record = Record(
        declaration=declare(asked, family),
        day=date.today().isoformat(),
        seeds=seeds,
        seeds_from=why,
        sd=choices.sd,
        sd_from=choices.sd_from,
        anyway=failed,
        checks={text: its.checks for text, its in found.items()},
        starts={text: its.starts for text, its in found.items()},
        sizes={text: its.size for text, its in found.items()},
        seconds=seconds,
        jobs=jobs,
        machine=machine,
        command=words,
        norm_file_name=asked.norm_file.name if asked.norm_file else "",
    )
    return record.with_later(later) if later else record


def refuse_failed(text: str, checks: list[list[Any]]) -> None:
    """Raise UserError if a check of an arm failed."""
    if not all(is_ok for _, is_ok, _ in checks):
        raise UserError(
            f"{text}: a check failed (above): correct the norm, or go on with --anyway, which the "
            "page says"
        )


def has_failed(found: dict[str, Prepared]) -> bool:
    """Tell whether a check of an arm failed."""
    return any(not is_ok for its in found.values() for _, is_ok, _ in its.checks)


def split_family(
    asked: Asked, found: dict[str, Prepared], out: Path
) -> tuple[tuple[JudgedArm, ...], tuple[JudgedArm, ...]]:
    """Return the arms that are declared together, and those that came later.

    All are declared together, unless runs in `out` are of a declaration of the first ones: then
    its judge.json was lost. Raises UserError if they are of any other declaration.
    """
    there = studies_in(out)
    for count in range(len(asked.arms), 1, -1):
        family = with_matched(asked.arms[:count], found)
        if not there or there == {declare(asked, family).study}:
            return family, with_matched(asked.arms[count:], found)
    raise UserError(
        f"out={out}: its runs are of another study (other arms, settings, data or code) and its "
        "judge.json is lost: repeat that command, or choose another --out"
    )


def with_matched(texts: tuple[str, ...], found: dict[str, Prepared]) -> tuple[JudgedArm, ...]:
    """Return arms, each followed by the one with a matched start, if it has one."""
    arms: list[JudgedArm] = []
    for text in texts:
        arms.append(JudgedArm(text, ""))
        matched = found[text].matched
        # Somebody may have named that one too.
        if matched and matched.text not in texts:
            arms.append(matched)
    return tuple(arms)


def time_of(judged: JudgedArm, seconds: dict[str, float]) -> ArmTime:
    """Return what an arm takes, by the seconds of a run of each arm."""
    return ArmTime(seconds[judged.text], len(judged.options))


def choose_seeds(choices: Choices, times: list[ArmTime], jobs: int, out: Path) -> tuple[int, str]:
    """Return how many seeds the verdict has, and why. Raises UserError."""
    planned = planned_in(out)
    # Of runs whose judge.json is lost the number stays, whatever is timed now.
    if planned and planned != (choices.seeds or (0 if choices.hours else SEEDS)):
        return planned, "as the runs that are there were planned"
    if choices.seeds:
        return choices.seeds, f"--seeds={choices.seeds}"
    if choices.hours:
        return seeds_within(times, jobs, choices.hours), f"--hours={choices.hours:g}"
    return SEEDS, "the default"


def plan_lines(record: Record) -> list[str]:
    """Say what the study will do, cost and find."""
    times = [time_of(judged, record.seconds) for judged in record.arms]
    whole = cost(times, record.seeds, record.jobs)
    family = len(record.declaration.arms) - 1
    lines = [
        f"plan: {len(times)} arms, at most about {whole.runs} runs, {whole.hours:.1f} hours with "
        f"{record.jobs} side by side; {record.seeds} seeds of the verdict ({record.seeds_from})"
    ]
    lines += [
        f"plan: {line}" for line in power_lines(record.seeds, family, record.sd, record.sd_from)
    ]
    return lines


# ------------------------------------------------------------------------------------- going on


def go_on(
    asked: Asked,
    record: Record,
    choices: Choices,
    command: tuple[str, ...],
    out: Path,
    say: Say,
) -> Record:
    """Compare what is asked for with the declaration that is there, and add arms that are new.

    Raises UserError if anything else differs.
    """
    declared = declare(asked, record.declaration.arms)
    if difference := declared.difference(record.declaration):
        raise UserError(
            f"out={out} was declared with {difference}: repeat that command, or choose another "
            "--out"
        )
    own = [judged.text for judged in record.arms if not judged.matches]
    if missing := [text for text in own if text not in asked.arms]:
        raise UserError(
            f"out={out} was declared with the arm {missing[0]}: name it, or choose another --out"
        )
    if own[0] != asked.arms[0]:
        raise UserError(f"out={out} was declared against {own[0]}: name that arm first")
    if choices.seeds not in (0, record.seeds):
        raise UserError(
            f"seeds={choices.seeds}: {record.seeds} are declared in {out}, and no seed is added to "
            "a verdict: take new seeds in another folder (--first_seed, --out)"
        )
    known = {judged.text for judged in record.arms}
    new = tuple(text for text in asked.arms if text not in known)
    if not new:
        return record
    found = {
        text: prepare_arm(asked, text, own[0], command, out, say, choices.anyway) for text in new
    }
    arms = tuple(judged for judged in with_matched(new, found) if judged.text not in known)
    for judged in arms:
        its = found[judged.matches or judged.text]
        record.checks[judged.text] = [] if judged.matches else its.checks
        record.starts[judged.text] = [] if judged.matches else its.starts
        record.sizes[judged.text] = its.size
        record.seconds[judged.text] = its.seconds
    return replace(record.with_later(arms), anyway=record.anyway or has_failed(found))


def words_without_folder(words: list[str]) -> list[str]:
    """Return words of a command line without folders: the norm file by its name alone."""
    kept = []
    for word in words:
        name, _, value = word.partition("=")
        if name in (f"--{PIN}", "--out", "--keep"):
            continue
        kept.append(f"{name}={Path(value).name}" if name == "--norm_file" else word)
    return kept
