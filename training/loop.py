"""The loop of a run: steps, log, evaluations, checkpoints. train.py and distill.py give it what to
train, an Objective.
"""

import dataclasses
import math
import zlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.distributed import Ranks, accumulate
from common.environment import Precision, peak_flops
from common.errors import CheckpointError, UserError
from training.checkpoint import (
    FoundCheckpoint,
    first_not_finite,
    load_moments,
    moments_of,
    save_checkpoint,
)
from training.log import Throughput
from training.optim import Optimizer, guarded_update, learning_rate, micro_step
from training.run import LoopKeys, RunFolder
from training.stability import Stability
from training.step_report import PendingReport, StepReport, count_bad, pack

# float16: after a step with infinite gradients, which is not applied, GradScaler lowers the loss
# scale. If this many steps in a row are skipped, the cause is something else, and the run stops.
MAX_SKIPPED = 20


class NonFiniteError(UserError):
    """A loss or a gradient became NaN or infinite."""

    on_every_rank = True


class Objective:
    """What a Loop trains: NextToken of train.py, Distillation of distill.py.

    Args:
        config: every key of the run.
        ranks: this process and the others.
        model: its parameters that are not frozen are trained.
        length: tokens of a sequence.
    """

    checkpoint: str  # the name of its file
    forward: nn.Module  # x, y (B, T) -> loss and auxiliary loss; DDP's module on several ranks
    flops_per_token = 0.0  # of a step, for the log's MFU; 0: not known

    def __init__(self, config: Any, ranks: Ranks, model: nn.Module, length: int):
        self.config = config
        self.ranks = ranks
        # what the optimiser updates
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        # micro_batches counts over all ranks, and so does tokens_per_step.
        micro_batches = config.gradient_accumulation_steps
        self.passes = micro_batches // ranks.world_size  # batches of this rank in a step
        self.tokens_per_step = config.batch_size * micro_batches * length

    def batches(self, first_step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's batches x, y (B, T) from `first_step` on, for ever."""

    def state(self) -> dict[str, Any]:
        """Return its entries in a checkpoint; "model" is one."""

    def restore(self, state: dict[str, Any], path: Path) -> None:
        """Take what `state` returned from a checkpoint. Raises CheckpointError."""

    def evaluate(self, loop: "Loop") -> None:
        """Measure the model, and log it."""

    def prepare(self, loop: "Loop") -> None:
        """Move the model on to the step after loop.step."""

    def finish(self, loop: "Loop") -> dict[str, Any]:
        """Do what comes after the last step. Returns values for the `end` event."""
        return {}


class Loop:
    """Train an objective: steps, log, evaluations, checkpoints.

    Args:
        objective: what is trained.
        config: every key of the run.
        run: its folder, with the checkpoint to go on from if one was found.
        optimizer: of the objective's parameters.
        precision: autocast and loss scale.

    Raises:
        CheckpointError: the checkpoint is of another model.
    """

    def __init__(
        self,
        objective: Objective,
        config: LoopKeys,
        run: RunFolder,
        optimizer: Optimizer,
        precision: Precision,
    ):
        self.objective = objective
        self.config = config
        self.folder = run
        self.ranks = run.ranks
        self.log = run.log
        self.optimizer = optimizer
        self.precision = precision
        self.step = 0  # steps done; the first one is step 1
        self.skipped = 0  # steps in a row whose gradients were not finite
        self.stability = Stability(config.grad_clip)
        self.clock = Throughput(objective.tokens_per_step)
        # MFU is a share of the peak in low precision.
        self.peak_flops = peak_flops(self.ranks.device) if precision.is_low else None
        if config.warmup_iters >= config.max_iters:
            run.notes.append(
                f"warning: warm-up takes warmup_iters={config.warmup_iters} of "
                f"max_iters={config.max_iters} steps: it is not over before the run ends"
            )
        if run.found is not None:
            self._restore(run.found)

    def _restore(self, found: FoundCheckpoint) -> None:
        """Go on from a checkpoint."""
        state, path = found.state, found.path
        if not {"optimizer", "scaler"} <= state.keys():
            raise CheckpointError(
                f"{path} holds weights only: choose another out_dir, and --init_from={path}"
            )
        self.objective.restore(state, path)
        load_moments(path, state, self.objective.parameters, self.optimizer)
        if state["scaler"]:  # {} where the loss was not scaled
            self.precision.scaler.load_state_dict(state["scaler"])
        # Older checkpoints have none.
        self.stability = Stability(self.config.grad_clip, **state.get("stability", {}))
        self.step = state["step"]

    # ------------------------------------------------------------------------------------- the loop

    def run(self) -> None:
        """Train until max_iters or a signal, and close the log."""
        # A new run is measured before its first step. One that is resumed has been.
        if self.step == 0:
            self.objective.evaluate(self)
        reason = self._steps()
        speed = self.clock.steady()  # tokens/s
        found = {}
        if reason:
            self.log.say(f"{reason}: the same command continues")
        else:
            found = self.objective.finish(self)
        self.log.close(reason or "done", step=self.step, tok_per_s=speed, **found)

    def _steps(self) -> str:
        """Take all steps that are left. Returns why it stopped before max_iters, or ""."""
        config, objective = self.config, self.objective
        # Batches are a function of the step, so there is no state of a loader to restore.
        batches = objective.batches(self.step + 1)
        # reports of steps that the host has not read yet; on a GPU one is left from step to step
        pending: deque[PendingReport] = deque()
        reason = ""
        self.clock.restart()
        while not reason and self.step < config.max_iters:
            self.step += 1
            pending.append(self._train_step(batches))
            # Before evaluation and checkpoints: norms sum their statistics over ranks here, so the
            # checkpoint that rank 0 writes is complete.
            objective.prepare(self)
            due_eval = self.step % config.eval_interval == 0 or self.step == config.max_iters
            due_save = due_eval
            if config.checkpoint_interval and self.step % config.checkpoint_interval == 0:
                due_save = True
            # On a GPU a report is read when the next step is queued, so that the GPU never waits
            # for the host. A checkpoint is only made of steps whose reports were read.
            in_flight = 1 if self.ranks.on_cuda and not due_save else 0
            # Once the run must stop, all of them are read: the checkpoint below has their steps in
            # it.
            while len(pending) > in_flight or (reason and pending):
                report = pending.popleft().read()
                reason = self._end_step(report) or reason
            if due_eval:
                objective.evaluate(self)
            if due_save or reason:
                self.save(objective.checkpoint)
                # An evaluation always ends here, so its time and that of saving do not count.
                self.clock.restart()
        return reason

    # -------------------------------------------------------------------------------------- a step

    def _train_step(self, batches: Iterator[tuple[Tensor, Tensor]]) -> PendingReport:
        """Do forward and backward of this rank's batches, then the update.

        Nothing here waits for the device.
        """
        config, ranks = self.config, self.ranks
        lr = learning_rate(self.step, config)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        # The random stream of dropout is a function of (seed, step, rank): no evaluation disturbs
        # it, and a resumed run has the same.
        torch.manual_seed(zlib.crc32(f"{config.seed} {self.step} {ranks.rank}".encode()))
        losses = self._backward(batches)  # (2,)
        report = pack(losses, bool(self.folder.stop_signal.name), ranks)  # (3 + ranks,)
        # One small reduction a step: losses, requests to stop and bad losses together.
        ranks.sum(report)
        # The device itself skips the update if a loss or a gradient is not finite. The host learns
        # of it when it reads the report, and raises.
        grad_norms = guarded_update(
            self.optimizer,
            self.precision.scaler,
            list(self.objective.parameters.values()),
            config.grad_clip,
            count_bad(report),
        )
        return PendingReport(self.step, lr, report, grad_norms)

    def _backward(self, batches: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
        """Add up gradients over this rank's batches. Returns its mean losses (2,)."""
        device, passes = self.ranks.device, self.objective.passes
        forward = self.objective.forward
        losses = 0.0
        for number in range(passes):
            x, y = next(batches)
            # From pinned memory to a GPU; the host goes on at once. (B, T) each
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            # Gradients add up; DDP reduces them over ranks in the last backward only.
            with accumulate(forward, last=number == passes - 1):
                losses = losses + micro_step(forward, x, y, self.precision, passes)
        return losses

    def _end_step(self, report: StepReport) -> str:
        """Check a step and log it. Returns why the run must stop after it, or ""."""
        self.clock.tick()
        # All ranks have the same report, so all of them raise, or stop, after the same step.
        self._check_finite(report)
        self.stability.add(report.loss, report.grad_norm)
        if report.step % self.config.log_interval == 0 or report.step in (1, self.config.max_iters):
            self._log_step(report)
        self.log.advance(report.step)
        if report.stops:
            return f"stopped by {self.folder.stop_signal.name or 'a signal'} after step {self.step}"
        return ""

    def _check_finite(self, report: StepReport) -> None:
        """Raise NonFiniteError, and say so in the log, if a step cannot be used."""
        self.skipped = 0 if math.isfinite(report.grad_norm) else self.skipped + 1
        # Only float16 has a loss scale, which it still looks for in the first steps.
        allowed = MAX_SKIPPED if self.precision.scaler.is_enabled() else 1
        if report.bad_ranks:
            culprit = f"the loss on rank {report.bad_ranks[0]}"
        elif self.skipped >= allowed:
            norms = zip(self.objective.parameters, report.gradient_norms, strict=True)
            bad = [f"the gradient of {name}" for name, norm in norms if not math.isfinite(norm)]
            culprit = bad[0] if bad else "the global gradient norm"
        else:
            return
        self._stop(f"step {report.step}: {culprit} is not finite", "it was not applied")

    def _stop(self, reason: str, done: str) -> None:
        """End the log, and raise NonFiniteError. Checkpoints hold finite numbers only."""
        self.log.close(reason, step=self.step)
        folder = self.folder.path
        kept = "and there is no checkpoint yet"
        if (folder / self.objective.checkpoint).exists():
            kept = f"the last checkpoint in {folder} is good"
        raise NonFiniteError(f"{reason}; {done}, {kept}: lower learning_rate, or look at the data")

    def _log_step(self, report: StepReport) -> None:
        """Log losses and speed."""
        speed = self.clock.window()
        mfu = None  # model FLOPs utilisation
        if speed and self.peak_flops and self.objective.flops_per_token:
            # The share of the GPUs' peak that the model's own FLOPs take (Chowdhery et al. 2022).
            peak = self.peak_flops * self.ranks.world_size
            mfu = speed * self.objective.flops_per_token / peak
        auxiliary = {"aux_loss": report.aux_loss} if report.aux_loss else {}
        self.log.step(
            step=report.step,
            loss=report.loss,
            lr=report.lr,
            grad_norm=report.grad_norm,
            tok_per_s=speed,
            mfu=mfu,
            tokens=report.step * self.objective.tokens_per_step,
            **auxiliary,
        )

    def save(self, name: str) -> None:
        """Save everything that a resume needs as the file `name`. All ranks take part."""
        state = {
            "step": self.step,
            "config": dataclasses.asdict(self.config),
            "optimizer": moments_of(self.objective.parameters, self.optimizer),
            "scaler": self.precision.scaler.state_dict(),
            "stability": self.stability.state(),
            "provenance": self.folder.provenance,
            **self.objective.state(),
        }
        bad = next(filter(None, self.ranks.of_all(first_not_finite(state))), "")
        if bad:
            self._stop(f"step {self.step}: {bad} is not finite", "it was not saved")
        self.log.sync()
        self.ranks.together(self.folder.lock.check)
        save_checkpoint(self.folder.path / name, state, self.ranks)
