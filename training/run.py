"""The folder of a run while this process works in it: lock, checkpoints, log, what has changed.

Log and checkpoints keep where the run trains: its data, the number of ranks, the device, the
versions, the commit, a digest of the code. A run that is resumed compares this provenance. Other
data would be another experiment, and are refused. Every other change is noted in the log, and
report.py leaves the run out.

train.py leaves config.json, log.jsonl, ckpt_last.pt, ckpt_best.pt and samples.txt there; distill.py
log.jsonl, distill_last.pt, and at its end a model. A tracker adds tracker_id or tensorboard/, and
code that is not committed uncommitted.diff.
"""

import json
from collections.abc import Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.code_digest import (
    UNCOMMITTED,
    check_digests,
    code_digest,
    uncommitted_changes,
)
from common.distributed import Ranks, StopSignal
from common.environment import DTYPES, environment, is_same_code
from common.errors import CheckpointError, ConfigError, UserError, cannot_write
from common.fingerprint import data_difference
from common.lock import FolderLock
from common.output import RUN_CONFIG, check_replaceable, read_json, write_bytes_atomically
from common.past import chosen_then
from configurator import key
from model import GPT
from training.checkpoint import BEST, FoundCheckpoint, find_checkpoint, save_checkpoint
from training.log import RunLog
from training.optim import AdamKeys
from training.tracker import TRACKERS

# Entries that are compared; versions are compared too, one by one. An older one may lack some.
COMPARED = ("git", "code", "world_size", "device", "processor", "float32_products")
# Keys that a finished run may be asked for again with: they change nothing that it has measured.
FREE_AT_THE_END = {
    "out_dir",
    "resume",
    "same_code",
    "log_interval",
    "jobs",
    "tracker",
    "tracker_project",
    "export",
}


@dataclass(frozen=True)
class RunKeys:
    """Run folder, log and checkpoints"""

    out_dir: str = key("out/run", "run folder")
    resume: str = key(
        "auto", "auto: continue the run in out_dir if there is one; never; or a checkpoint's path"
    )
    # by default 10 B tokens, an epoch of FineWeb-Edu's sample, in steps of 491,520
    max_iters: int = key(20345, "optimiser steps", least=1)
    eval_interval: int = key(250, "steps between evaluations", least=1)
    log_interval: int = key(10, "steps between log lines", least=1)
    checkpoint_interval: int = key(
        0, "steps between checkpoints beside those of evaluations (0: none)", least=0
    )
    tracker: str = key("off", "log to an experiment tracker too", TRACKERS)
    tracker_project: str = key("nanonorm", "project in Weights & Biases or Trackio")
    same_code: tuple[str, ...] = key(
        (), "digests of other code by which a recorded run, trained anew, was equal to the bit"
    )


@dataclass(frozen=True)
class MachineKeys:
    """Seed and machine"""

    seed: int = key(1337, "of initial weights, data order and dropout", least=0, most=(1 << 32) - 1)
    device: str = key(
        "auto", "auto: the first available of cuda, mps, cpu", ("auto", "cpu", "cuda", "mps")
    )
    dtype: str = key(
        "auto",
        "of the computation; weights are float32 (auto: bfloat16 on CUDA and where a CPU gains)",
        ("auto", *DTYPES),
    )


@dataclass(frozen=True)
class ComparisonKeys:
    """For report.py: what must be declared before the results are known"""

    arm: str = key("", "name of the arm in tables ('': norm type and norm keys)")
    study: str = key(
        "", "the study, whose arms may have rates of their own; runs of others are not compared"
    )
    planned_seeds: int = key(
        0, "seeds of the comparison; report.py gives no verdict before (0: not planned)", least=0
    )
    delta_train_loss: float = key(
        0.0,
        "equivalence margin for report.py, nats per token, declared now (0: none)",
        least=0,
        most=100.0,
    )
    delta_val_loss: float = key(
        0.0, "equivalence margin, nats per token (0: none)", least=0, most=100.0
    )
    delta_hellaswag_acc: float = key(
        0.0, "equivalence margin, share of items (0: none)", least=0, most=1.0
    )
    delta_hellaswag_acc_norm: float = key(
        0.0, "equivalence margin, share of items (0: none)", least=0, most=1.0
    )
    delta_tok_per_s: float = key(
        0.0, "equivalence margin, share of the baseline's throughput (0: none)", least=0, most=1.0
    )
    jobs: int = key(
        1,
        "runs side by side on this machine, as sweep.sh says: above 1 no speed is judged",
        least=1,
    )


@dataclass(frozen=True)
class LoopKeys(MachineKeys, AdamKeys, RunKeys):
    """What every training run has (training/loop.py)."""


class RunFolder:
    """A run's folder, from its lock to its end. Of several ranks the main one locks and writes.

    Args:
        config: every key of the run; nothing need be chosen for `auto` yet.
        ranks: this process and the others.

    Raises:
        UserError: another process works in the folder.
    """

    def __init__(self, config: RunKeys, ranks: Ranks):
        if not config.out_dir:
            raise ConfigError("out_dir is empty: name a run folder")
        self.path = Path(config.out_dir)
        self.ranks = ranks
        self.stop_signal = StopSignal()
        self.found: FoundCheckpoint | None = None  # what the run goes on from
        self.notes: list[str] = []  # lines for people, shown once the log is open
        self.provenance: dict[str, Any] = {}  # data, machine and code
        self.changed: list[str] = []  # what differs from the run that is resumed
        self.uncommitted = b""  # how the code differs from the commit, on the main rank
        is_main = ranks.is_main
        self.log = RunLog(self.path, config.max_iters, is_main)

        def lock() -> FolderLock:
            return FolderLock(self.path, lambda: self.stop_signal.name, active=is_main)

        # No other process may be in the folder when we look for a checkpoint there.
        self.lock = ranks.together(lock)

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    def find(self, resume: str, names: tuple[str, ...]) -> FoundCheckpoint | None:
        """Find the checkpoint to resume from, the same on every rank; None: start from scratch.

        Args:
            resume: auto, never, or a checkpoint's path.
            names: of checkpoints in this folder, the latest first.
        """
        found = self.ranks.together(lambda: find_checkpoint(self.path, resume, names))
        # -1 for no checkpoint: on that, too, the ranks must agree.
        step = -1 if found is None else found.state["step"]
        self.ranks.check_same(
            step, f"ranks found different checkpoints in {self.path}: it must be a shared folder"
        )
        if found is not None:
            device = found.provenance.get("device", self.ranks.device.type)
            found.state["config"] = chosen_then(found.state["config"], device)
        self.found = found
        return found

    def end_of(self, max_iters: int) -> dict[str, Any] | None:
        """Return the `end` event of a run that has finished, {} if its log is elsewhere.

        None: something is left to do, if only what comes after the last step.
        """
        found = self.found
        if found is None or found.state["step"] < max_iters:
            return None
        then = found.state["config"].get("max_iters", max_iters)
        if found.state["step"] < then:  # no evaluation at the end would ever be made
            raise ConfigError(
                f"{found.path} is at step {found.state['step']} of {then}, and "
                f"max_iters={max_iters}: give more steps than it has"
            )
        log = self.path / "log.jsonl"
        end = {}
        if found.path.parent == self.path and log.exists():
            event = (read_json(log) or [{}])[-1]
            end = event if event.get("reason") == "done" else None
        # As the main rank sees it: others may not have the folder.
        return self.ranks.of_main(end)

    def repeat(self, config: RunKeys) -> None:
        """Say that the run has finished. Nothing in its folder is touched.

        Raises ConfigError if it had other settings than `config`.
        """
        if changed := self.changed_keys(config, FREE_AT_THE_END):
            raise ConfigError(
                f"{self.found.path} is of a run that has finished with other settings "
                f"({', '.join(changed)}): choose another out_dir, or give the settings that it had"
            )
        if self.found.problem:
            self.log.say(f"not usable: {self.found.problem}; taken: {self.found.path}")
        self.log.say(
            f"finished already: step {self.found.state['step']} of max_iters={config.max_iters}"
        )

    def changed_keys(self, config: RunKeys, free: Set[str] = frozenset()) -> list[str]:
        """List how the keys of `config`, but for `free` ones, differ from the run before."""
        asked = {name: value for name, value in asdict(config).items() if name not in free}
        return changed_keys(self.found.state["config"], asked, self.found.provenance)

    def compare(self, config: RunKeys, data: str, remedy: str) -> None:
        """Describe where this run trains, and list what has changed since the checkpoint found.

        Args:
            config: every key of the run.
            data: the fingerprint of its data.
            remedy: what to do about other data.

        Raises:
            DataError: ranks see different data.
            CheckpointError: the run has seen other data than these.
            ConfigError: same_code has what is no digest.
        """
        ranks = self.ranks
        check_digests("same_code", config.same_code)
        ranks.check_same(data, "ranks see different data: copy the same to each machine")
        self.provenance = {
            "data": data,
            "world_size": ranks.world_size,
            "code": code_digest(),
            **environment(ranks.device),
        }
        if ranks.is_main:
            self.uncommitted = uncommitted_changes()
        found = self.found
        if found is None:
            return
        then = found.provenance
        self.ranks.together(lambda: check_same_data(then, self.provenance, found.path, remedy))
        self.changed = self.changed_keys(config) + changes(then, self.provenance)
        if found.problem:
            self.notes.append(f"not usable: {found.problem}")
        self.notes.append(f"resuming from {found.path}, after step {found.state['step']}")
        if self.changed:
            self.notes.append(f"changed since then: {', '.join(self.changed)}")

    def open_log(self, config: RunKeys, start: dict[str, Any], config_file: str = "") -> None:
        """Open log.jsonl, and show the notes. What fails before this leaves the folder untouched.

        Args:
            config: every key of the run.
            start: values of the `start` event, besides config and provenance.
            config_file: name of the file that gets the keys; "" for none.
        """
        self.ranks.together(lambda: self._open_log(config, start, config_file))
        for note in self.notes:
            self.log.say(note)

    def _open_log(self, config: RunKeys, start: dict[str, Any], config_file: str) -> None:
        if not self.ranks.is_main:
            return
        resume_step = None
        logged_until = 0  # the last step that the log of a resumed run must have
        if self.found is not None:
            resume_step = self.found.state["step"]
            if self.found.path.parent == self.path:
                logged_until = max(
                    min(1, resume_step), resume_step - resume_step % config.log_interval
                )
        path = self.path / config_file
        keys = asdict(config)
        if config_file:
            check_replaceable(path, RUN_CONFIG)
        if resume_step is None:
            self._keep_uncommitted()
        self.log.open(
            keys,
            resume_step,
            start | self.provenance,
            self.changed,
            logged_until,
            config.same_code,
        )
        if config_file:
            write_text(path, json.dumps(keys, indent=1))

    def _keep_uncommitted(self) -> None:
        """Leave the changes of the code that no commit has, or remove those of a run before."""
        path = self.path / UNCOMMITTED
        check_replaceable(path, b"diff --git ")
        try:
            if self.uncommitted:
                write_bytes_atomically(path, self.uncommitted)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(cannot_write(path, error)) from None


def write_model(model: GPT, folder: Path, step: int = 0, kept: str = "") -> None:
    """Write a GPT's config.json and weights, a checkpoint without an optimiser's state.

    Raises UserError, which says what is `kept`.
    """
    config = asdict(model.config)
    write_text(folder / "config.json", json.dumps(config, indent=1), kept)
    state = {"step": step, "config": config, "meta": model.meta, "model": model.state_dict()}
    save_checkpoint(folder / BEST, state)


def write_text(path: Path, text: str, kept: str = "") -> None:
    """Write `text` and a newline atomically. Raises UserError, which says what is `kept`."""
    try:
        write_bytes_atomically(path, f"{text}\n".encode())
    except OSError as error:
        raise UserError(cannot_write(path, error, kept)) from None


# ------------------------------------------------------------------------------ where it trains


def check_same_data(then: dict[str, Any], now: dict[str, Any], path: Path, remedy: str) -> None:
    """Check that the run of the checkpoint `path` has seen the same data.

    Raises:
        CheckpointError: it has seen other data. `remedy` is part of the message.
    """
    if not then.get("data"):
        return
    difference = data_difference(then["data"], now["data"])
    if difference:
        raise CheckpointError(f"{path} was trained on other data ({difference}): {remedy}")


def changed_keys(then: dict[str, Any], now: dict[str, Any], saved: dict[str, Any]) -> list[str]:
    """List the keys that differ between two configs, as "max_iters 40 -> 45".

    Left out: data_dir and device, if the older provenance `saved` tells the data and the real
    device, which are compared instead.
    """
    # Through JSON, so that a tuple equals a list of the same numbers.
    then = json.loads(json.dumps(then))
    now = json.loads(json.dumps(now))
    compared = {"data_dir": "data", "device": "device"}
    names = [name for name in sorted(now.keys() & then.keys()) if now[name] != then[name]]
    names = [name for name in names if compared.get(name) not in saved]
    return [f"{name} {then[name]} -> {now[name]}" for name in names]


def changes(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """List what has changed between two provenances, as "torch 2.11.0 -> 2.13.0".

    Left out: what the older one does not tell, and commits between which the code of training did
    not change.
    """
    both = [name for name in COMPARED if then.get(name) is not None and name in now]
    names = [name for name in both if then[name] != now[name]]
    # Another commit is a change only if the code that trains has changed between the two. Digests
    # tell; an older log has none, and git does.
    if "git" in names:
        if "code" in both:
            is_same = then["code"] == now["code"]
        else:
            is_same = is_same_code(then["git"], now["git"])
        if is_same:
            names.remove("git")
    found = [f"{name} {then[name]} -> {now[name]}" for name in names]
    old = then.get("versions", {})
    new = now.get("versions", {})
    packages = [name for name in new if name in old and old[name] != new[name]]
    return found + [f"{name} {old[name]} -> {new[name]}" for name in packages]
