"""Read what finished runs wrote: run folders -> arms, metrics, pairs. No model is loaded.

An arm is the norm type with all its norm keys. Runs are paired by seed, and only if they differ in
nothing else but their names.
"""

import math
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from common.code_digest import SHORT, digest_of_commit, shortened
from common.errors import UserError
from common.fingerprint import data_difference
from common.past import (
    BEFORE_THE_ENTRY,
    BEFORE_THE_KEY,
    OLD_NORM_KEYS,
    as_today,
    chosen_then,
)
from evidence.archive import SUFFIX, Content, by_run, files_of, read
from evidence.log import damaged, lacking, parse_items, parse_log
from evidence.names import told_apart

# Settings that do not change a result. HellaSwag is scored at evaluations and does not touch the
# training; it is compared only on the same items.
NAMES = {
    "arm",
    "out_dir",
    "resume",
    "tracker",
    "tracker_project",
    "wandb",
    "wandb_project",
    "parallel",
    "recompute",
    "jobs",
    "hellaswag",
    "hellaswag_interval",
    "hellaswag_items",
    "full_val",
    "same_code",
}
# The arms of a declared study may have rates of their own, chosen beforehand, and no warm-up.
RATES = ("learning_rate", "min_lr", "warmup_iters")
# Packages of which a run may be resumed with another version and still be compared.
HARMLESS_VERSIONS = {"python", "numpy"}
# What is compared beside the config, as the start event tells it
PLACE = ("world_size", "device", "float32_products")
# What a change of the code is noted by at a resume
CODE = ("git", "code")
LAST_PART = 0.1  # train_loss is the mean over this share of the steps, at the end
RULES = ("acc", "acc_norm")  # how HellaSwag's choice is made (evals/hellaswag.py)


@dataclass(frozen=True)
class Metric:
    """One number that a run is judged by."""

    name: str
    unit: str
    lower_is_better: bool
    relative: bool = False  # compared as a ratio: by differences of logarithms, shown in per cent


METRICS = {
    metric.name: metric
    for metric in (
        Metric("val_loss_full", "nats per token", True),
        Metric("val_loss", "nats per token", True),
        Metric("train_loss", "nats per token", True),
        Metric("hellaswag_acc", "share of items", False),
        Metric("hellaswag_acc_norm", "share of items", False),
        Metric("tok_per_s", "tokens/s", False, relative=True),
    )
}


class Run:
    """One run: its config, the events of its log, its HellaSwag items.

    Args:
        path: a run folder, a log file alone, or archive/run; messages call the run by it.
        files: its files, if they are not to be read from `path`.
    """

    def __init__(self, path: Path, files: Content | None = None):
        self.path = path
        self.name = str(path)
        self.files = files_of(path) if files is None else files
        self.events = parse_log(self.files.get("log.jsonl", b""), self.name)
        self.start = self.events[0]
        device = self.start.get("device", "")
        self.config: dict[str, Any] = chosen_then(as_today(self.start["config"]), device)
        # Digests that whoever reports says are one code (report.py --same_code)
        self.said_same: set[str] = set()

    def check(self) -> None:
        """Raise UserError for a run that cannot be compared with those of train.py."""
        if "teacher" in self.config:
            raise UserError(
                f"{self.name}: a run of distill.py, and only runs of train.py are compared: name "
                "those (docs/posthoc.md says how a student is judged)"
            )
        if name := lacking(self.start):
            raise damaged(self.name, f"line 1 of its log (without {name})")

    @property
    def seed(self) -> int:
        """Seed of the initialisation and the data's order; runs are paired by it."""
        return self.config["seed"]

    @property
    def speed_problem(self) -> str:
        """Why the run's speed is not judged; "" if it is."""
        if self.start["device"].startswith("cpu"):
            return "of runs on a CPU"
        is_shared = any(change.startswith("jobs ") for change in self._changes)
        if is_shared or self.config.get("jobs", 1) > 1:
            return "of runs side by side on one machine"
        return ""

    @cached_property
    def norm_keys(self) -> dict[str, Any]:
        """The norm keys that the run's norm type reads, with the defaults of its day."""
        old = OLD_NORM_KEYS[""] | OLD_NORM_KEYS.get(self.config["norm_type"], {})
        keys = as_today(self.start.get("norm_keys", old))
        if "norm_recipe" in self.config:  # an older dyt run has it by translation alone
            keys.setdefault("norm_recipe", "paper")
        return keys

    @property
    def arm(self) -> str:
        """The name that the run's arm was given, else its words."""
        return self.config.get("arm") or self.words

    @cached_property
    def words(self) -> str:
        """The norm type and every norm key that is not at its default, as sweep.sh takes it."""
        parts = [self.config["norm_type"]]
        for name, default in self.norm_keys.items():
            value = self.norm_value(name)
            if _plain(value) != _plain(default):
                parts.append(f"--{name}={_text(value)}")
        return " ".join(parts)

    def norm_value(self, key: str) -> Any:
        """The value of a norm key; "" for one that the run's norm type does not read."""
        return self.config.get(key, self.norm_keys[key]) if key in self.norm_keys else ""

    @cached_property
    def _by_kind(self) -> dict[str, list[dict]]:
        """Kind -> the log's events, in order."""
        kinds: dict[str, list[dict]] = {}
        for event in self.events:
            kinds.setdefault(event["event"], []).append(event)
        return kinds

    def events_of(self, kind: str) -> list[dict]:
        """The log's events of one kind, in order."""
        return self._by_kind.get(kind, [])

    def last(self, kind: str) -> dict[str, Any]:
        """The last event of a kind; empty in logs that do not have it."""
        events = self.events_of(kind)
        return events[-1] if events else {}

    @cached_property
    def curve(self) -> np.ndarray:
        """Validation losses (n, 2): training tokens, nats per token. Infinite ones are left out."""
        points = [
            (event["step"] * self.start["tokens_per_step"], event["val_loss"])
            for event in self.events_of("eval")
            if event["val_loss"] is not None
        ]
        return np.array(points).reshape(-1, 2)  # (0, 2) without an evaluation

    @cached_property
    def steps(self) -> list[dict]:
        """The logged steps whose loss was finite."""
        return [event for event in self.events_of("step") if event["loss"] is not None]

    def stream(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """One figure of the residual stream or the output at the n evaluations that measured it.

        Args:
            name: as training/stream.py logs it. "rms", "drift", "spread" and "mean_share" stand at
                each of the 2L + 1 norm positions, "logit_norm" and "radial_gradient" once.

        Returns:
            Training tokens (n,), and the figure (n, 2L + 1) or (n,).
        """
        events = [event for event in self.events_of("rms") if name in event]
        tokens = [event["step"] * self.start["tokens_per_step"] for event in events]
        return np.array(tokens), np.array([event[name] for event in events], dtype=float)

    @property
    def stability(self) -> dict[str, float | None]:
        """The last record of training/stability.py; empty in logs that do not have it.

        "clipped", the share of steps whose gradient was clipped, "spikes", and "attention_logit",
        the largest one. A value is None if it was not finite.
        """
        return self.last("stability")

    @cached_property
    def whole_split(self) -> dict[str, Any]:
        """The loss over the whole val split after the last step; empty without that event."""
        last = self.last("val_full")
        return last if last.get("step") == self.config["max_iters"] else {}

    @cached_property
    def document_tokens(self) -> np.ndarray:
        """Tokens of each document of the val split, (documents,); (0,) if the log lacks them."""
        return np.array(self.whole_split.get("document_tokens", []), dtype=float)

    @cached_property
    def document_nats(self) -> np.ndarray:
        """Summed loss of each document of the val split, in nats, as document_tokens."""
        return np.array(self.whole_split.get("document_nats", []), dtype=float)

    @cached_property
    def _codes_and_changes(self) -> tuple[set[str], list[str]]:
        codes = self._one_code({self.start["code"]} if "code" in self.start else set(), self.config)
        changes: list[str] = []
        for event in self.events_of("resume"):
            changed = event.get("changed", [])
            edited = [change for change in changed if change.startswith("code ")]
            if edited:
                today = self._one_code({edited[0].split()[-1]}, event)
                if today & codes:
                    codes |= today
                    changed = [change for change in changed if change.split()[0] not in CODE]
            changes += changed
        return codes, changes

    def _one_code(self, digests: set[str], event: dict[str, Any]) -> set[str]:
        """Return short digests of code that is one with `digests`, as was said then or now."""
        found = shortened(digests)
        if found:
            found |= shortened(event.get("same_code", []))
        return found | self.said_same if found & self.said_same else found

    @property
    def codes(self) -> set[str]:
        """Short digests of the code that trained the run, and of such as is said to train alike.

        Empty in logs without a digest.
        """
        return self._codes_and_changes[0]

    @cached_property
    def codes_of_commit(self) -> set[str]:
        """The short digest of the commit's tree; empty if git here does not know the commit."""
        digest = digest_of_commit(str(self.start.get("git")))
        return self._one_code({digest}, {}) if digest else set()

    @property
    def code_name(self) -> str:
        """What messages call the code that trained the run."""
        digest = self.start.get("code") or next(iter(self.codes_of_commit), "")
        return digest[:SHORT] or f"of commit {self.start.get('git')}, without a digest,"

    @property
    def _changes(self) -> list[str]:
        """What was other when the run was resumed, "key old -> new" each.

        Code that is said to be the same is not other.
        """
        return self._codes_and_changes[1]

    @property
    def changed(self) -> list[str]:
        """The same, without what is harmless."""
        harmless = NAMES | HARMLESS_VERSIONS
        return [change for change in self._changes if change.split()[0] not in harmless]

    def problem(self) -> str:
        """Why the run cannot be compared; "" if it can."""
        gaps = [event["gap"] for event in self.events_of("resume") if event.get("gap")]
        if gaps:
            return f"its log has lost steps ({', '.join(map(str, gaps))})"
        if self.changed:
            return f"resumed with other settings, code or machine ({', '.join(self.changed)})"
        if self.diverged:
            # Not the first end: the run may have been stopped and resumed before.
            reasons = [event["reason"] for event in self.events_of("end")]
            bad = (reason for reason in reasons if "not finite" in reason)
            return next(bad, "its last val loss is not finite")
        last = max((event["step"] for event in self.events_of("eval")), default=0)
        if last < self.config["max_iters"]:
            return f"not finished: last evaluation at step {last} of {self.config['max_iters']}"
        return ""

    @property
    def diverged(self) -> bool:
        """Did a loss or gradient of training, or a val loss after the last step, become infinite
        or NaN?
        """
        if any("not finite" in event["reason"] for event in self.events_of("end")):
            return True
        steps = {event["step"]: event["val_loss"] for event in self.events_of("eval")}
        last = steps.get(self.config["max_iters"], 0.0)  # not finished without one
        return None in (last, self.whole_split.get("val_loss_full", 0.0))

    @cached_property
    def items(self) -> dict[str, np.ndarray]:
        """What the run chose on HellaSwag's m items; empty if it was not scored.

        For each rule, bool (m,): was the choice right? And "item" (m, 2): number and label of each
        item.
        """
        if "hellaswag.jsonl" not in self.files:
            return {}
        rows = parse_items(self.files["hellaswag.jsonl"], self.name)
        items = {"item": np.array([(row["item"], row["label"]) for row in rows])}
        for rule in RULES:
            items[rule] = np.array([row[f"{rule}_choice"] == row["label"] for row in rows])
        return items

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Metric name -> value, for the metrics that the run measured."""
        found = {}
        if not self.diverged:  # the curve has finite losses alone
            found["val_loss"] = float(self.curve[-1, 1])
        if self.whole_split.get("val_loss_full") is not None:
            found["val_loss_full"] = float(self.whole_split["val_loss_full"])
        first = (1 - LAST_PART) * self.config["max_iters"]
        losses = [step["loss"] for step in self.steps if step["step"] > first]
        if losses:
            found["train_loss"] = float(np.mean(losses))
        if self.items:
            for rule in RULES:
                found[f"hellaswag_{rule}"] = float(self.items[rule].mean())
        # The harmonic mean of speeds is the speed of the mean time.
        times = [1 / step["tok_per_s"] for step in self.steps if step["tok_per_s"]]
        if times:
            found["tok_per_s"] = float(1 / np.mean(times))
        return found


def _plain(value: Any) -> Any:
    """Return a config value as JSON gives it back: a tuple as a list."""
    return list(value) if isinstance(value, tuple) else value


def _text(value: Any) -> str:
    """Return a config value as the command line takes it."""
    parts = value if isinstance(value, tuple | list) else [value]
    return shlex.quote(",".join(map(str, parts)))  # only a norm plan, with its spaces, gets quotes


def find_runs(paths: list[Path]) -> list[Run]:
    """Read the runs that paths name.

    A path is a run folder, a log file, an archive of runs (.tar.xz), or a folder that holds any of
    these at any depth. Raises UserError.
    """
    runs: list[Run] = []
    for path in paths:
        if path.name.endswith(SUFFIX):
            found = in_archive(path)
        elif not path.is_dir() or (path / "log.jsonl").exists():
            found = [Run(path)]
        else:
            found = [Run(log.parent) for log in sorted(path.rglob("log.jsonl"))]
            # Where there are run folders, archives next to them hold copies of the same runs.
            archives = [] if found else sorted(path.rglob(f"*{SUFFIX}"))
            found += [run for archive in archives for run in in_archive(archive)]
        if not found:
            raise UserError(f"{path}: no run in it: name run folders, or what holds them")
        runs += found
    return runs


def in_archive(archive: Path) -> list[Run]:
    """Read the runs in an archive; none if it is not there."""
    return [Run(archive / name, files) for name, files in sorted(by_run(read(archive)).items())]


def arms_of(runs: list[Run]) -> list[str]:
    """Return the name of each run's arm.

    It is that of the run, with its rates after it where the arm has runs of several: they are arms
    of their own, and no mean is over two of them. Short names are distinct.
    """
    names = [run.arm for run in runs]
    for rate in RATES:
        values: dict[str, set[Any]] = {}
        for run, name in zip(runs, names, strict=True):
            values.setdefault(name, set()).add(run.config[rate])
        names = [
            f"{name} --{rate}={run.config[rate]}" if len(values[name]) > 1 else name
            for run, name in zip(runs, names, strict=True)
        ]
    distinct = told_apart(names)
    return [distinct[name] for name in names]


def by_arm(runs: list[Run]) -> dict[str, dict[int, Run]]:
    """Sort runs: arm, as `arms_of` names it -> seed -> run.

    Raises UserError if two runs have the same arm and seed, or if a default that changed between
    two runs gives different norms one name.
    """
    arms: dict[str, dict[int, Run]] = {}
    for run, arm in zip(runs, arms_of(runs), strict=True):
        seeds = arms.setdefault(arm, {})
        first = next(iter(seeds.values()), run)
        check_same_norms(first, run)
        other = seeds.setdefault(run.seed, run)
        if other is not run:
            raise UserError(
                f"{other.name} and {run.name}: both are {arm}, seed {run.seed}: name one of them"
            )
    return arms


def by_value(runs: list[Run], factor: str) -> dict[str, dict[int, Run]]:
    """Sort runs of one norm that compare another setting: its value -> seed -> run.

    Raises UserError if they have several norms, or those of one value several learning rates.
    """
    found: dict[str, list[Run]] = {}
    for run in runs:
        if norms_of(run) != norms_of(runs[0]):
            raise UserError(f"{run.name} and {runs[0].name}: other norms, and {factor} is compared")
        found.setdefault(str(run.config[factor]), []).append(run)
    arms = {}
    for value, its in found.items():
        sorted_runs = by_arm(its)
        if len(sorted_runs) > 1:
            names = ", ".join(sorted_runs)
            raise UserError(f"{factor}={value}: runs of {names}: name those of one")
        [arms[value]] = sorted_runs.values()
    return arms


def norms_of(run: Run) -> dict[str, Any]:
    """Return the run's norm type and the values of all norm keys that it reads."""
    values = {name: _plain(run.norm_value(name)) for name in run.norm_keys}
    return {"norm_type": run.config["norm_type"], **values}


def check_same_norms(first: Run, run: Run) -> None:
    """Raise UserError where two runs of one arm differ in a norm key.

    Each is then at the default of its own day, so their arms have the same name; or they were given
    the same one.
    """
    theirs, ours = norms_of(first), norms_of(run)
    for name in theirs.keys() & ours:
        if theirs[name] != ours[name]:
            raise UserError(
                f"{first.name} and {run.name}: both are named {run.arm}, but {name} is "
                f"{theirs[name]} and {ours[name]}: report on them apart"
            )


def final_loss(run: Run, remedy: str = "such a run is not compared") -> float:
    """Return val_loss_full, nats per token; infinite if the run diverged.

    Raises UserError, which ends in the remedy, if the run is not finished, was resumed with other
    settings, or has no such loss.
    """
    if run.diverged:
        return math.inf
    problem = run.problem()
    if not problem and "val_loss_full" not in run.whole_split:
        problem = "no loss over the whole val split after its last step"
    if problem:
        raise UserError(f"{run.name}: {problem}: {remedy}")
    return run.whole_split["val_loss_full"]


def norm_key_names(run: Run) -> set[str]:
    """Name all norm keys that a run's program knew, those of other norm types too."""
    recorded = {*run.norm_keys, *run.start.get("other_norm_keys", ())}
    return {"norm_type"}.union(recorded, *OLD_NORM_KEYS.values())


def settings(run: Run) -> dict[str, Any]:
    """Return what a run was trained with and where, without its names: key -> value."""
    chosen = {name: _plain(value) for name, value in run.config.items() if name not in NAMES}
    place = {name: run.start.get(name, BEFORE_THE_ENTRY.get(name)) for name in PLACE}
    return BEFORE_THE_KEY | chosen | place | {"torch": run.start["versions"]["torch"]}


def difference_in_data(run: Run, baseline: Run) -> str:
    """Describe how the data of two runs differ; "" if they do not."""
    data = run.start.get("data")
    base_data = baseline.start.get("data")
    if data == base_data or (data and base_data and not data_difference(base_data, data)):
        return ""
    return f"data: {data} against {base_data}"


def difference_in_settings(run: Run, baseline: Run, but: tuple[str, ...] = ()) -> str:
    """Describe the first difference between two runs apart from their norms and names.

    Args:
        but: keys that may differ too.

    Returns:
        The difference in one phrase, or "" if there is none.
    """
    ours, theirs = settings(run), settings(baseline)
    may_differ = norm_key_names(run) | norm_key_names(baseline) | {*but}
    if ours.get("study"):
        may_differ |= {*RATES}
    for name in sorted({*ours, *theirs} - may_differ):
        here, there = ours.get(name), theirs.get(name)
        if here != there:
            return f"{name}={here or repr(here)} against {there or repr(there)}"
    return difference_in_code(run, baseline) or difference_in_data(run, baseline)


def difference_in_code(run: Run, other: Run) -> str:
    """Describe in one phrase that other code trained two runs; "" if it did not.

    Two logs without a digest of the code do not tell. One without is compared with one that has a
    digest by that of its commit's tree.
    """
    if not run.codes and not other.codes:
        return ""
    if (run.codes or run.codes_of_commit) & (other.codes or other.codes_of_commit):
        return ""
    return f"code {run.code_name} against {other.code_name}"


def item_differences(run: Run, baseline: Run, rule: str) -> np.ndarray:
    """Return right (1) less right (1) on each of m HellaSwag items: float (m,) of -1, 0 and 1.

    Empty unless both runs scored the same items.
    """
    if not np.array_equal(run.items["item"], baseline.items["item"]):
        return np.zeros(0)
    return run.items[rule].astype(float) - baseline.items[rule].astype(float)
