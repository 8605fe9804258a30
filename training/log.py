"""What a run tells while it trains: log.jsonl, lines or a progress bar for people, wandb if asked;
throughput.
"""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from common.errors import UserError


class RunLog:
    """Log of one run. On ranks other than 0 (`active` false) every method does nothing."""

    def __init__(self, out_dir: Path, config: dict[str, Any], max_iters: int, active: bool):
        self.path, self.config, self.active = out_dir / "log.jsonl", config, active
        self.file, self.bar, self.wandb = None, None, None
        self.max_iters = max_iters

    def open(self, resume_step: int | None, start: dict[str, Any], changed: list[str]) -> None:
        """Begin a new log, or cut an old one back to the checkpoint at `resume_step` and go on,
        noting what settings have changed since.
        """
        if not self.active:
            return
        try:
            if self.path.exists() and resume_step is None:
                self.path.replace(
                    self.path.with_name("log.jsonl.old")
                )  # of a run that left no checkpoint
            elif self.path.exists():
                self._cut_back(resume_step)
            is_new = not self.path.exists()
            self.file = open(self.path, "a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror})") from None
        if self.config["wandb"] != "off":
            self.wandb = _start_wandb(self.config)
        if sys.stderr.isatty():
            self.bar = tqdm(
                total=self.max_iters, initial=resume_step or 0, unit="step", dynamic_ncols=True
            )
        if is_new:
            self.event("start", config=self.config, **start)
        if resume_step is not None:
            self.event("resume", step=resume_step, **({"changed": changed} if changed else {}))

    def _cut_back(self, step: int) -> None:
        """Drop what was logged after the checkpoint (and a last line torn by a kill); atomic."""
        kept = []
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
                step_of = record.get("step", 0)
            except (ValueError, AttributeError):
                break
            # A resume at this very step trained nothing that is kept: the one that comes now says
            # what has changed.
            is_idle = record.get("event") == "resume" and step_of == step
            if step_of <= step and record.get("event") != "end" and not is_idle:
                kept.append(line + "\n")
        cut = self.path.with_name("log.jsonl.tmp")
        cut.write_text("".join(kept), encoding="utf-8")
        cut.replace(self.path)

    def event(self, event: str, **values: Any) -> None:
        """One line of log.jsonl. Floats keep all their digits; what is not finite becomes null."""
        if not self.active or self.file is None:
            return
        clean = {
            k: [_finite(part) for part in v] if isinstance(v, list) else _finite(v)
            for k, v in values.items()
        }
        self.file.write(json.dumps({"event": event, **clean}) + "\n")
        self.file.flush()
        if self.wandb is not None and event in ("step", "eval"):
            numbers = {k: v for k, v in clean.items() if k != "step" and v is not None}
            self.wandb.log(numbers, step=values["step"])

    def step(self, **values: Any) -> None:
        """One training step, for the log and for people."""
        self.event("step", **values)
        if not self.active:
            return
        speed = (
            "" if values["tok_per_s"] is None else f"  {values['tok_per_s'] / 1000:.1f} k tokens/s"
        )
        mfu = "n/a" if values["mfu"] is None else f"{values['mfu']:.1%}"
        norm = "inf" if values["grad_norm"] is None else f"{values['grad_norm']:.3f}"
        loss = format(
            values["loss"], ".2e" if 0 < values["loss"] < 0.01 else ".4f"
        )  # a KL may be small
        facts = f"loss {loss}  lr {values['lr']:.2e}  grad norm {norm}{speed}  MFU {mfu}"
        if self.bar is None:
            self.say(f"step {values['step']}/{self.max_iters}  {facts}")
        else:
            self.bar.set_postfix_str(facts, refresh=False)
            self.bar.update(values["step"] - self.bar.n)

    def say(self, text: str) -> None:
        """A line for people; on a terminal it goes above the progress bar."""
        if not self.active:
            return
        if self.bar is None:
            print(text, flush=True)
        else:
            self.bar.write(text)

    def close(self, reason: str, **values: Any) -> None:
        self.event("end", reason=reason, **values)
        if self.bar is not None:
            self.bar.close()
        if self.wandb is not None:
            self.wandb.finish()
        if self.file is not None:
            self.file.close()
        self.file = None


def last_event(path: Path) -> dict[str, Any]:
    """The last event of a log.jsonl; {} where there is no log, and where its last line is torn."""
    try:
        record = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return {}
    return record if isinstance(record, dict) else {}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _start_wandb(config: dict[str, Any]) -> Any:
    try:
        import wandb
    except ImportError:
        raise UserError("wandb is not installed: pip install wandb, or --wandb=off") from None
    out_dir = config["out_dir"]
    return wandb.init(
        project=config["wandb_project"],
        name=Path(out_dir).name,
        mode=config["wandb"],
        config=config,
        dir=out_dir,
        resume="allow",
        id=Path(out_dir).as_posix().replace("/", "-"),
    )


class StepReport:
    """Numbers of one step on their way from device to host, without making the device wait."""

    def __init__(self, step: int, lr: float, values: Tensor):
        self.step, self.lr, self.values, self.arrived = step, lr, values, None
        if values.is_cuda:
            self.values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self.values.copy_(values, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def read(self) -> list[float]:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.values.tolist()


class Throughput:
    """Tokens per second of training steps alone: evaluation, checkpoints and the first steps are
    left out.
    """

    WARM_UP = 5  # steps: compilation, first allocations

    def __init__(self, tokens_per_step: int):
        self.tokens_per_step, self.steps = tokens_per_step, 0
        self.all, self.recent = [0, 0.0], [0, 0.0]  # steps and seconds
        self.last = time.perf_counter()

    def restart(self) -> None:
        """Something else took time: the next step begins now."""
        self.last = time.perf_counter()

    def tick(self) -> None:
        """A step has ended."""
        now = time.perf_counter()
        self.steps += 1
        if self.steps > self.WARM_UP:
            for total in (self.all, self.recent):
                total[0] += 1
                total[1] += now - self.last
        self.last = now

    def window(self) -> float | None:
        """Over the steps since the last call; None where there are only warm-up steps."""
        (steps, seconds), self.recent = self.recent, [0, 0.0]
        return steps * self.tokens_per_step / seconds if seconds else None

    def steady(self) -> float | None:
        """Over all steps after the warm-up."""
        return self.all[0] * self.tokens_per_step / self.all[1] if self.all[1] else None
