"""The log of a run: log.jsonl, lines or a progress bar for people, a tracker; throughput."""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from common.errors import UserError, cannot_write
from common.output import check_replaceable, parse_json, read_json, write_bytes_atomically
from training.tracker import start_tracker


class RunLog:
    """The log of one run. On ranks other than 0 (`active` is false) its methods do nothing."""

    def __init__(self, out_dir: Path, max_iters: int, active: bool):
        self.path = out_dir / "log.jsonl"
        self.max_iters = max_iters
        self.active = active
        self.file: IO[str] | None = None
        self.last_step = 0  # in the log that is gone on with
        self.bar: tqdm | None = None
        self.tracker: Any = None  # training/tracker.py

    def open(
        self,
        config: dict[str, Any],
        resume_step: int | None,
        start: dict[str, Any],
        changed: list[str],
        logged_until: int = 0,
        same_code: tuple[str, ...] = (),
    ) -> None:
        """Begin a new log, or go on with the log of a run that is resumed.

        If steps are missing in that log, the `resume` event says which, as `gap`. A log that has
        lost its `start` event gets a new one.

        Args:
            config: every key of the run.
            resume_step: step of the checkpoint; what was logged after it is removed. None: a new
                run.
            start: values of the `start` event of a new log.
            changed: settings that have changed since the run was last resumed or started.
            logged_until: the last step that the log of a resumed run must have.
            same_code: digests of code that is said to train as today's.
        """
        if not self.active:
            return
        # First: if it fails, the log is untouched.
        is_another = self._is_another(resume_step, changed)
        self.tracker = start_tracker(config, resume_step, is_another)
        try:
            is_new = self._make_room(resume_step)
            self.file = open(self.path, "a", encoding="utf-8")
        except OSError as error:
            raise UserError(cannot_write(self.path, error)) from None
        if sys.stderr.isatty():
            done = resume_step or 0
            self.bar = tqdm(total=self.max_iters, initial=done, unit="step", dynamic_ncols=True)
        if is_new:
            self.event("start", config=config, **start)
        if resume_step is not None:
            more: dict[str, Any] = {"changed": changed} if changed else {}
            if same_code:
                more["same_code"] = same_code
            if self.last_step < logged_until:
                more["gap"] = [self.last_step + 1, logged_until]
            self.event("resume", step=resume_step, **more)

    def _is_another(self, resume_step: int | None, changed: list[str]) -> bool:
        """Is this another run than the log's, if there is one, to whoever keeps what it was told?

        So is one that does steps again, from an earlier checkpoint, and not as they were done.
        """
        if resume_step is None or not self.path.exists():
            return True
        if not changed:
            return False
        records = [record for record in read_json(self.path) if isinstance(record, dict)]
        steps = [record["step"] for record in records if isinstance(record.get("step"), int)]
        return max(steps, default=0) > resume_step

    def _make_room(self, resume_step: int | None) -> bool:
        """Treat the log that is already there. Returns whether a new one begins."""
        if not self.path.exists():
            return True
        check_replaceable(self.path)
        if resume_step is not None:
            return not self._cut_back(resume_step)
        # This log is of a run that left no checkpoint: put it aside.
        self.path.replace(self.path.with_name("log.jsonl.old"))
        return True

    def _cut_back(self, step: int) -> bool:
        """Remove what was logged after the checkpoint of `step`, atomically.

        A last line that was torn when the process was killed goes too.

        Returns:
            Whether a `start` event is left.
        """
        kept: list[str] = []
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = parse_json(line)
                # The start event has no step.
                step_of = record.get("step", 0)
            # torn, or JSON that is no object: nothing behind it can be trusted
            except (ValueError, AttributeError):
                break
            event = record.get("event")
            if not kept and event != "start":
                break  # without its start event the rest has no meaning
            # A resume at this very step has trained nothing that is kept. The resume that follows
            # now says what has changed.
            is_idle = event == "resume" and step_of == step
            # What follows the last step is done, and logged, once more.
            is_ending = event in ("merged", "end")
            if step_of <= step and not is_ending and not is_idle:
                kept.append(line + "\n")
                if event == "step":
                    self.last_step = step_of
        write_bytes_atomically(self.path, "".join(kept).encode())
        return bool(kept)

    def sync(self) -> None:
        """Wait until the log is on the disk: a checkpoint must not outlive the steps before it.

        Raises UserError.
        """
        if self.file is not None:
            try:
                os.fsync(self.file.fileno())
            except OSError as error:
                raise self._refused(error) from None

    def event(self, event: str, **values: Any) -> None:
        """Write one line of log.jsonl. Floats keep all digits; infinite and NaN become null."""
        if self.file is None:
            return
        # JSON has neither infinity nor NaN.
        clean = {name: _finite(value) for name, value in values.items()}
        try:
            self.file.write(json.dumps({"event": event, **clean}) + "\n")
            self.file.flush()  # a process that is killed loses no line
        except OSError as error:
            with contextlib.suppress(OSError):
                self.file.close()  # what could not be written is lost, and not tried again
            self.file = None
            raise self._refused(error) from None
        if self.tracker is not None and event in ("step", "eval"):
            numbers = {k: v for k, v in clean.items() if k != "step" and v is not None}
            self.tracker.log(numbers, step=values["step"])

    def _refused(self, error: OSError) -> UserError:
        return UserError(cannot_write(self.path, error, "the last checkpoint is untouched"))

    def step(self, **values: Any) -> None:
        """Log one training step, for programs and for people."""
        self.event("step", **values)
        if self.bar is None:
            self.say(f"step {values['step']}/{self.max_iters}  {_facts(values)}")
        else:
            self.bar.set_postfix_str(_facts(values), refresh=False)

    def advance(self, step: int) -> None:
        """Move the progress bar of a terminal to this step."""
        if self.bar is not None:
            _show(self.bar.update, step - self.bar.n)

    def say(self, text: str) -> None:
        """Print a line for people; on a terminal it goes above the progress bar."""
        if self.active:
            _show(partial(print, flush=True) if self.bar is None else self.bar.write, text)

    def close(self, reason: str, **values: Any) -> None:
        """Write the `end` event, and close everything."""
        self.event("end", reason=reason, **values)
        if self.bar is not None:
            _show(self.bar.close)
        if self.tracker is not None:
            self.tracker.finish()
        if self.file is not None:
            self.file.close()
        self.file = None


def _show(write: Callable[..., Any], *values: Any) -> None:
    """Show something to people. Without them (`train.py | head`, a closed terminal) go on."""
    try:
        write(*values)
    except OSError:
        # What is in the buffers, and whatever is printed later, goes nowhere.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _finite(value: Any) -> Any:
    """Replace numbers that JSON cannot hold by None, in a value or a list of values."""
    if isinstance(value, list):
        return [_finite(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _facts(values: dict[str, Any]) -> str:
    """Describe a step in one line."""
    # The loss of a distillation is a KL divergence, which may be small.
    is_small = 0 < values["loss"] < 0.01
    loss = format(values["loss"], ".2e" if is_small else ".4f")
    norm = "inf" if values["grad_norm"] is None else f"{values['grad_norm']:.3f}"
    speed = ""
    if values["tok_per_s"] is not None:
        speed = f"  {values['tok_per_s'] / 1000:.1f} k tokens/s"
    mfu = "" if values["mfu"] is None else f"  MFU {values['mfu']:.1%}"
    return f"loss {loss}  lr {values['lr']:.2e}  grad norm {norm}{speed}{mfu}"


class Throughput:
    """Tokens per second of training steps only.

    Evaluation, checkpoints and the first steps do not count.
    """

    WARM_UP = 5  # steps: compilation, first allocations

    def __init__(self, tokens_per_step: int):
        self.tokens_per_step = tokens_per_step
        self.seconds: list[float] = []  # of each step
        self.shown = 0  # steps that `window` has returned
        self.last = time.perf_counter()

    def restart(self) -> None:
        """Begin the next step now, because something else took time."""
        self.last = time.perf_counter()

    def tick(self) -> None:
        """Note that a step has ended."""
        now = time.perf_counter()
        self.seconds.append(now - self.last)
        self.last = now

    def window(self) -> float | None:
        """Compute tokens per second since the last call; None if all steps were warm-up."""
        start = max(self.WARM_UP, self.shown)
        self.shown = len(self.seconds)
        return self._speed(self.seconds[start:])

    def steady(self) -> float | None:
        """Compute tokens per second of all steps after the warm-up."""
        return self._speed(self.seconds[self.WARM_UP :])

    def _speed(self, seconds: list[float]) -> float | None:
        return len(seconds) * self.tokens_per_step / sum(seconds) if seconds else None
