"""What finished runs wrote, read back: run folders -> arms, metrics, pairs. Nothing here knows a
model.

An arm is the set of all norm keys; runs pair by seed, and only if they differ in nothing else but
their names.
"""

import contextlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError
from common.fingerprint import data_difference
from evidence.archive import SUFFIX, unpack

# Norm keys and their defaults, for logs that do not tell them: of all norm types, and of one alone.
OLD_NORM_KEYS: dict[str, dict[str, Any]] = {
    "": {
        "norm_plan": "",
        "norm_eps": 1e-5,
        "norm_affine": True,
        "qk_norm": False,
        "kernels": "auto",
    },
    "rms": {"rms_fraction": 1.0, "norm_groups": 1, "rms_bias": False},
    "coupled": {
        "coupled_first": 0,
        "coupled_span": 1,
        "coupled_alpha": 1.0,
        "coupled_calibrate": 0,
        "coupled_grad": "detach",
        "coupled_impl": "scale",
    },
    "taper": {
        "taper_base": "rms",
        "taper_warmup": 0.5,
        "taper_end": 0.75,
        "taper_fit": "norm",
        "taper_final": False,
        "taper_anchor": 0.0,
    },
}
# Settings that do nothing to a result. HellaSwag is scored beside training, and compared only on
# the same items.
NAMES = {
    "out_dir",
    "resume",
    "wandb",
    "wandb_project",
    "parallel",
    "hellaswag",
    "hellaswag_interval",
    "hellaswag_items",
}
# Versions with which a run may go on and still be compared
HARMLESS_VERSIONS = {"python", "numpy"}
# What a run did whose program did not have the key yet
BEFORE = {"compile_mode": "default", "residual": "float32"}
LAST_PART = 0.1  # train_loss is the mean over this share of the steps, at the end


@dataclass(frozen=True)
class Metric:
    """One number of a run. Differences of a `relative` one are of logarithms, shown as per cent."""

    name: str
    unit: str
    lower_is_better: bool
    relative: bool = False


METRICS = {
    metric.name: metric
    for metric in (
        Metric("val_loss", "nats per token", True),
        Metric("train_loss", "nats per token", True),
        Metric("hellaswag_acc", "share of items", False),
        Metric("hellaswag_acc_norm", "share of items", False),
        Metric("tok_per_s", "tokens/s", False, relative=True),
    )
}


class Run:
    """One run: its config, the events of its log, its HellaSwag items."""

    def __init__(self, path: Path, name: str = ""):
        self.path, self.name = path, name or str(path)  # the name as people know it, for messages
        self.events = read_log(path)
        self.start = self.events[0]
        self.config: dict[str, Any] = self.start["config"]

    @property
    def seed(self) -> int:
        return self.config["seed"]

    @property
    def on_cpu(self) -> bool:
        return self.start["device"].startswith("cpu")

    @cached_property
    def norm_keys(self) -> dict[str, Any]:
        """Norm keys that the run's norm type reads, with their defaults: as its log tells them."""
        old = OLD_NORM_KEYS[""] | OLD_NORM_KEYS.get(self.config["norm_type"], {})
        return self.start.get("norm_keys", old)

    @cached_property
    def arm(self) -> str:
        """The norm type and every norm key that is not at its default, as sweep.sh takes it."""
        words = [self.config["norm_type"]]
        for name, default in self.norm_keys.items():
            value = self.config.get(name, default)
            if _plain(value) != _plain(default):
                words.append(f"--{name}={_text(value)}")
        return " ".join(words)

    @cached_property
    def curve(self) -> np.ndarray:
        """Validation losses (n, 2): training tokens, nats per token."""
        evals = [
            (e["step"], e["val_loss"])
            for e in self.events
            if e["event"] == "eval" and e["val_loss"] is not None
        ]
        return np.array(
            [(step * self.start["tokens_per_step"], loss) for step, loss in evals]
        ).reshape(-1, 2)

    @cached_property
    def steps(self) -> list[dict]:
        return [
            event for event in self.events if event["event"] == "step" and event["loss"] is not None
        ]

    @cached_property
    def stream(self) -> dict[str, np.ndarray]:
        """At the last evaluation: size, drift and spread of the residual stream at each norm
        position, (2L + 1,) each (training/stream.py). Empty in logs that do not have them.
        """
        last = next((event for event in reversed(self.events) if event["event"] == "rms"), {})
        return {
            name: np.array(last[name], dtype=float)
            for name in ("rms", "drift", "spread")
            if name in last
        }

    @cached_property
    def history(self) -> dict[str, np.ndarray]:
        """At all n evaluations: "tokens" (n,), "rms" and "drift" at each norm position (n, 2L + 1),
        "logit_norm" and "radial_gradient" (n,). Empty in logs that do not have them.
        """
        events = [
            event for event in self.events if event["event"] == "rms" and "logit_norm" in event
        ]
        names = ("rms", "drift", "logit_norm", "radial_gradient") if events else ()
        found = {name: np.array([event[name] for event in events], dtype=float) for name in names}
        tokens = np.array([event["step"] * self.start["tokens_per_step"] for event in events])
        return found | ({"tokens": tokens} if events else {})

    def problem(self) -> str:
        """Why the run cannot be compared, or ""."""
        resumes = [event.get("changed", []) for event in self.events if event["event"] == "resume"]
        harmless = NAMES | HARMLESS_VERSIONS
        if changed := [
            change for changes in resumes for change in changes if change.split()[0] not in harmless
        ]:
            return f"resumed with other settings, code or machine ({', '.join(changed)})"
        if self.diverged:
            return next(e["reason"] for e in self.events if e["event"] == "end")
        last = max((e["step"] for e in self.events if e["event"] == "eval"), default=0)
        if last < self.config["max_iters"]:
            return f"not finished: last evaluation at step {last} of {self.config['max_iters']}"
        finite = len(self.curve) and self.curve[-1, 0] == last * self.start["tokens_per_step"]
        return "" if finite else "its last val loss is not finite"

    @property
    def diverged(self) -> bool:
        """Did a loss or gradient become infinite or NaN?"""
        return any(e["event"] == "end" and "not finite" in e["reason"] for e in self.events)

    @cached_property
    def items(self) -> dict[str, np.ndarray]:
        """HellaSwag: rule -> which items were right, bool (m,); "item" -> (number, label) of each,
        (m, 2). Empty if it was not scored.
        """
        path = self.path / "hellaswag.jsonl"
        if not self.path.is_dir() or not path.exists():
            return {}
        try:
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            right = {
                rule: np.array([row[f"{rule}_choice"] == row["label"] for row in rows])
                for rule in RULES
            }
            return {**right, "item": np.array([(row["item"], row["label"]) for row in rows])}
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{self.name}: its hellaswag.jsonl is damaged: remove it and score the run again"
            ) from None

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Metric name -> value, of those that the run measured."""
        first = (1 - LAST_PART) * self.config["max_iters"]
        losses = [step["loss"] for step in self.steps if step["step"] > first]
        seconds = [1 / step["tok_per_s"] for step in self.steps if step["tok_per_s"]]
        found = {"val_loss": float(self.curve[-1, 1])}
        found |= {"train_loss": float(np.mean(losses))} if losses else {}
        found |= {
            f"hellaswag_{rule}": float(self.items[rule].mean()) for rule in RULES if self.items
        }
        return found | ({"tok_per_s": float(1 / np.mean(seconds))} if seconds else {})


RULES = ("acc", "acc_norm")


def _plain(value: Any) -> Any:
    """A config value as JSON gives it back."""
    return list(value) if isinstance(value, tuple) else value


def _text(value: Any) -> str:
    """A config value as the command line takes it."""
    words = [str(part) for part in value] if isinstance(value, tuple | list) else [str(value)]
    return repr(",".join(words)) if " " in words[0] else ",".join(words)


def read_log(run: Path) -> list[dict]:
    """Events of a run's log.jsonl (or of a log file); a last line torn by a kill is left out.

    Raises UserError.
    """
    path = run / "log.jsonl" if run.is_dir() else run
    records, lines = [], []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        for line in lines[:-1]:
            records.append(json.loads(line))
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}): is {run} a run folder?"
        ) from None
    except ValueError:
        where = f"{path}:{len(records) + 1}: no JSON, so no run's log, or a damaged one"
        raise UserError(
            f"{where}: name run folders, and move a damaged one away or train it again"
        ) from None
    with contextlib.suppress(ValueError, IndexError):
        records.append(json.loads(lines[-1]))
    if not records or not isinstance(records[0], dict) or records[0].get("event") != "start":
        raise UserError(
            f"{path}: does not begin with a start event: no run's log, or damaged: leave it out"
        )
    return records


def find_runs(paths: list[Path]) -> list[Run]:
    """The runs that paths name: run folders, log files, archives of runs (.tar.xz), and folders
    that hold run folders, or archives alone, at any depth.
    """
    runs = []
    for path in paths:
        if path.name.endswith(SUFFIX):
            runs += in_archive(path)
        elif path.is_dir() and not (path / "log.jsonl").exists():
            inside = [Run(folder) for folder in run_folders(path)]
            if not inside:  # else archives are copies of them
                inside = [
                    run
                    for archive in sorted(path.rglob(f"*{SUFFIX}"))
                    for run in in_archive(archive)
                ]
            if not inside:
                raise UserError(
                    f"{path}: no run folder in it: name run folders, or the folder that holds them"
                )
            runs += inside
        else:
            runs.append(Run(path))
    return runs


def run_folders(path: Path) -> list[Path]:
    """The run folders in a folder, at any depth."""
    return [log.parent for log in sorted(path.rglob("log.jsonl"))]


def in_archive(archive: Path) -> list[Run]:
    """The runs in an archive. Raises UserError if there are none."""
    inside = [Run(folder, f"{archive}: {folder.name}") for folder in run_folders(unpack(archive))]
    if not inside:
        raise UserError(f"{archive}: no run in it: check the path")
    return inside


def by_arm(runs: list[Run]) -> dict[str, dict[int, Run]]:
    """arm -> seed -> run. Raises UserError if two runs have the same arm and seed, and if a default
    that changed between two runs gives them one name for different norms.
    """
    arms: dict[str, dict[int, Run]] = {}
    for run in runs:
        its = arms.setdefault(run.arm, {})
        check_same_norms(next(iter(its.values()), run), run)
        other = its.setdefault(run.seed, run)
        if other is not run:
            raise UserError(
                f"{other.name} and {run.name}: both are {run.arm}, seed {run.seed}: "
                "name one of them"
            )
    return arms


def check_same_norms(first: Run, run: Run) -> None:
    """Raise UserError where two runs of one arm differ in a norm key, which is then at the default
    of either's day.
    """
    for name in run.norm_keys.keys() & first.norm_keys:
        there, here = (_plain(r.config.get(name, r.norm_keys[name])) for r in (first, run))
        if here != there:
            raise UserError(
                f"{first.name} and {run.name}: both are {run.arm}, but {name} is {there} and "
                f"{here}, each the default of its day: report on them apart"
            )


def difference_in_settings(run: Run, baseline: Run, but: tuple[str, ...] = ()) -> str:
    """The first thing beside norms, names and the keys `but` in which two runs differ, or ""."""
    told = (
        name
        for r in (run, baseline)
        for name in (*r.norm_keys, *r.start.get("other_norm_keys", ()))
    )
    of_norms = {"norm_type", *told}.union(*OLD_NORM_KEYS.values())
    for name in sorted({*run.config, *baseline.config} - NAMES - of_norms - {*but}):
        here, there = (_plain(r.config.get(name, BEFORE.get(name))) for r in (run, baseline))
        if here != there:
            return f"{name}={here or repr(here)} against {there or repr(there)}"
    data = [r.start.get("data") for r in (run, baseline)]
    if data[0] != data[1] and (None in data or data_difference(data[1], data[0])):
        return f"data: {data[0]} against {data[1]}"
    for name, before in {"world_size": None, "device": None, "float32_products": "highest"}.items():
        here, there = (r.start.get(name, before) for r in (run, baseline))
        if here != there:
            return f"{name}: {here} against {there}"
    here, there = (r.start["versions"]["torch"] for r in (run, baseline))
    return "" if here == there else f"torch {here} against {there}"


def item_differences(run: Run, baseline: Run, rule: str) -> np.ndarray | None:
    """Right (1) less right (1) on each HellaSwag item (m,); None unless both scored the same."""
    if (
        not run.items
        or not baseline.items
        or not np.array_equal(run.items["item"], baseline.items["item"])
    ):
        return None
    return run.items[rule].astype(float) - baseline.items[rule].astype(float)
