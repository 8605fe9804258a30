"""Distil CoupledNorm into a model that is trained already, the model itself being the teacher.

    # the setting of Loretz & Hochreiter 2026, section 5.3, on one GPU
    python distill.py config/distill_qwen3_0.6b.py
    # only estimate the memory that it needs
    python distill.py config/distill_qwen3_0.6b.py --estimate
    # any run of ours, any text
    python distill.py --teacher=out/rms --local=more.jsonl --method=full
    # several GPUs; without the -- torchrun would read --local as its own option
    torchrun --standalone --nproc_per_node=8 -- distill.py ...

The student is the teacher under a coupled norm plan, with calibrated alpha (posthoc/coupling.py).
Its loss is KL(teacher || student); it sees no labels. With adapters, student and teacher are views
of one copy of the weights, which never change. Only full fine-tuning gives the student weights of
its own.

out_dir gets log.jsonl and distill_last.pt, from which the same command resumes. At the end it gets
the student, adapters merged and alpha absorbed: ckpt_best.pt, and hf/ if the teacher is from
Hugging Face. The last line of output is JSON.
"""

import common.interrupt  # noqa: F401

import contextlib
import dataclasses
import json
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.distributed import Ranks, StopSignal, accumulate, replicate
from common.environment import (
    DTYPES,
    Precision,
    faster_float32_products,
    find_device,
    machine_memory,
)
from common.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    UserError,
    cannot_write,
    run_program,
)
from common.fingerprint import fingerprint
from common.lock import FolderLock
from common.output import RUN_CONFIG, check_apart, check_replaceable, write_bytes_atomically
from configurator import (
    check_ranges,
    key,
    parse_args,
)
from data.documents import input_files
from hf import weights
from load import load_model
from model import GPT, cross_entropy
from posthoc import adapters
from posthoc.coupling import Calibration, first_plan, own_statistics, spell, suggest_first, view
from posthoc.student import Pair, bytes_of, finished, make_student, teacher_config
from posthoc.text import open_stream, shuffled, text_fingerprint
from training.checkpoint import (
    BEST,
    DISTILLING,
    different_checkpoints,
    load_moments,
    load_scaler,
    moments_of,
    read_checkpoint,
    save_checkpoint,
)
from training.log import RunLog, Throughput, last_event
from training.optim import (
    check_optimizer_keys,
    guarded_update,
    learning_rate,
    make_optimizer,
    micro_step,
)
from training.provenance import (
    changed_keys,
    changes,
    check_same_data,
    find_provenance,
    saved_provenance,
)
from training.tracker import TRACKERS, check_tracker

# Calibration takes every 16th of the first blocks of the text, if there are that many, so that its
# blocks are of many documents.
SPREAD = 16
# Keys that may differ when a run is resumed.
FREE_KEYS = {
    "max_iters",
    "eval_interval",
    "log_interval",
    "device",
    "out_dir",
    "export",
    "tracker",
    "tracker_project",
}


@dataclass(frozen=True)
class DistillConfig:
    """Every key of distill.py. The defaults are the paper's where it gives a value."""

    # The teacher, and where everything goes
    teacher: str = key(
        "",
        "the model: run folder, checkpoint, Hugging Face folder or hub name, random:qwen3-0.6b, "
        "...",
    )
    out_dir: str = key("out/distill", "run folder")

    # Text
    local: str = key(
        "", "files of text or chats, with commas between ('': the data set below, from the hub)"
    )
    val: str = key(
        "", "files of held-out text ('': the first blocks of the training text are held out)"
    )
    dataset: str = key(
        "nvidia/Nemotron-Post-Training-Dataset-v2",
        "on the hub, streamed; random: random tokens instead of text",
    )
    split: str = key("stem", "split of the data set")
    shuffle: int = key(1024, "blocks in the buffer that shuffles the text", least=1)

    # The student
    norm_plan: str = key("", "the student's plan, e.g. 'RR Rs Rs R' ('': coupled_first)")
    coupled_first: int | None = key(
        None,
        "standard blocks at the start (auto: fewest whose KL is within the budget)",
        least=0,
    )
    budget: float = key(
        0.01,
        "largest KL before training, nats per token, for coupled_first=auto",
        least=0,
        most=100.0,
    )
    method: str = key(
        "dora", "what is trained: adapters, or a copy of all weights", ("dora", "lora", "full")
    )
    rank: int = key(1024, "of the adapters", least=1)
    adapter_alpha: float = key(
        2048.0, "the adapters are scaled by adapter_alpha / rank", least=1e-6, most=1e9
    )

    # Length and batch
    # Two tokens at least: in a block of one there is no next token to predict.
    block_size: int = key(1024, "tokens of a block, at most the teacher's context", least=2)
    batch_size: int = key(8, "blocks in a micro-batch", least=1)
    gradient_accumulation_steps: int = key(8, "micro-batches in a step, over all ranks", least=1)
    checkpoint_activations: bool = key(True, "recompute each block's activations in backward")
    max_iters: int = key(1000, "optimiser steps", least=1)

    # AdamW
    # AdamW's steps are of this size, however small the gradient is. Near the teacher it is small,
    # and a higher rate leaves noise (docs/log.md).
    learning_rate: float = key(1e-4, "highest learning rate", most=1000.0)
    min_lr: float = key(0.0, "lowest learning rate, at the end of the cosine", least=0, most=1000.0)
    warmup_iters: int = key(20, "steps of linear warm-up", least=0)
    weight_decay: float = key(0.0, "of AdamW", least=0, most=1000.0)
    beta1: float = key(0.9, "of AdamW", least=0)
    beta2: float = key(0.95, "of AdamW", least=0)
    grad_clip: float = key(
        1.0, "largest global gradient norm (0: no clipping)", least=1e-6, zero=True
    )

    # Calibration, evaluation and log
    calibration_blocks: int = key(
        32,
        "blocks of the training text that alpha and coupled_first are chosen on",
        least=1,
    )
    eval_blocks: int = key(64, "held-out blocks", least=1)
    eval_interval: int = key(100, "steps between evaluations and checkpoints", least=1)
    log_interval: int = key(10, "steps between log lines", least=1)

    # Machine
    seed: int = key(1337, "of data order and adapters", least=0, most=(1 << 32) - 1)
    device: str = key(
        "auto", "auto: the first available of cuda, mps, cpu", ("auto", "cpu", "cuda", "mps")
    )
    dtype: str = key(
        "auto",
        "of the computation and of frozen weights (auto: bfloat16 on CUDA)",
        ("auto", *DTYPES),
    )
    resume: str = key("auto", "auto: continue the run in out_dir; never", ("auto", "never"))
    estimate: bool = key(False, "print the memory estimate and stop")
    export: bool | None = key(
        None, "write hf/, a Hugging Face folder, at the end (auto: if the teacher was one)"
    )
    tracker: str = key("off", "log to an experiment tracker too", TRACKERS)
    tracker_project: str = key("nanonorm", "project in Weights & Biases or Trackio")

    def __post_init__(self) -> None:
        if not self.teacher:
            raise ConfigError("teacher: name the model to start from, --teacher=MODEL")
        check_ranges(self)
        if self.norm_plan and self.coupled_first is not None:
            raise ConfigError(
                f"norm_plan={self.norm_plan} and coupled_first={self.coupled_first} both name the "
                "plan: give one (--coupled_first=auto cancels a config file's)"
            )
        check_optimizer_keys(self)
        if not self.out_dir:
            raise ConfigError("out_dir is empty: name a run folder")


class Distiller:
    """One run: the constructor sets it up, `run` does it."""

    def __init__(self, config: DistillConfig):
        self.config = config
        self.out_dir = Path(config.out_dir)
        self.stop_signal = StopSignal()
        self.step = 0  # steps done; the first one is step 1
        self.calibrated_kl = 0.0  # held-out KL before training
        self.ranks = Ranks.start(config.device, config.gradient_accumulation_steps)
        self.precision = Precision(config.dtype, self.ranks.device)
        is_main = self.ranks.is_main  # it logs, and locks the folder, for all ranks
        self.ranks.together(lambda: check_tracker(vars(config), active=is_main))
        # No other process may be in the run folder when we look for a checkpoint there.
        self.lock = self.ranks.together(
            lambda: FolderLock(self.out_dir, lambda: self.stop_signal.name, active=is_main)
        )
        try:
            self._find_checkpoint()
            # A finished run needs no teacher: run() repeats its summary.
            self.summary = self.ranks.together(self._finished_summary)
            self.ranks.check_same(int(self.summary is None), different_checkpoints(self.out_dir))
            if self.summary is None:
                check_replaceable(self.out_dir / "config.json", RUN_CONFIG)
                self._load_teacher()
                self._read_first_blocks()
                # Before the plan is chosen, which takes long: another teacher or text is refused.
                self._find_provenance()
                self._fix_plan()
                self._build_student()
                self._make_optimizer()
                self._resume()
                self._replicate()
                # Last: if anything before fails, the log in out_dir is untouched.
                self._start_log()
                self.state = None  # its tensors have been copied
        except BaseException:
            self.lock.release()
            raise

    def _find_checkpoint(self) -> None:
        """Read the checkpoint to resume from, if there is one, the same on every rank."""
        self.state = self.ranks.together(self._read_checkpoint)
        step = self.state["step"] if self.state else -1
        self.ranks.check_same(step, different_checkpoints(self.out_dir))

    def _read_checkpoint(self) -> dict[str, Any] | None:
        """Read distill_last.pt; None without one. Raises CheckpointError if it cannot resume."""
        path = self.out_dir / DISTILLING
        if not path.exists():
            return None
        if self.config.resume == "never":
            raise CheckpointError(
                f"{self.out_dir} holds a run already: choose another out_dir, or --resume=auto"
            )
        state = read_checkpoint(path)
        _check_distilling(path, state)
        now = dataclasses.asdict(self.config)
        for name in sorted(now.keys() - FREE_KEYS):
            then = state["config"].get(name)
            if then != now[name]:
                raise CheckpointError(
                    f"{path} was made with {name}={then!r}, now it is {now[name]!r}: use its "
                    "settings, or another out_dir"
                )
        return state

    def _finished_summary(self) -> dict[str, Any] | None:
        """Read the summary of a finished run from its log; None if anything is left to do."""
        if self.state is None or self.state["step"] < self.config.max_iters:
            return None
        end = last_event(self.out_dir / "log.jsonl")
        summary = end.get("summary")
        if end.get("reason") != "done" or not isinstance(summary, dict):
            return None
        wants_export = end.get("exported") if self.config.export is None else self.config.export
        files = [BEST, "hf"] if wants_export else [BEST]
        return summary if all((self.out_dir / name).exists() for name in files) else None

    def _load_teacher(self) -> None:
        """Load the teacher, frozen and in the precision of the run."""
        config, device = self.config, self.ranks.device
        # Random weights are drawn on the device.
        is_random = config.teacher.startswith("random:")
        with device if is_random else contextlib.nullcontext():
            teacher = load_model(config.teacher)
        if device.type == "cpu":
            faster_float32_products(teacher.config.n_embd, teacher.config.head_channels)
        # Before its precision changes: the same teacher has one name in every precision.
        self.name_of_teacher = fingerprint("teacher", bytes_of(teacher))
        # Full fine-tuning starts from the teacher's weights, and must not lose their last bits.
        dtype = self.precision.weights
        if self.precision.is_low and config.method != "full":
            dtype = self.precision.dtype
        teacher = teacher.to(dtype).to(device).requires_grad_(False)
        self.length = min(config.block_size, teacher.config.block_size)
        self.teacher = own_statistics(teacher, f"teacher={config.teacher}")

    def _open_text(self, files: str) -> Iterator[Tensor]:
        """Open a text as blocks (T,). `files` as for the key `local`."""
        teacher = self.teacher
        return open_stream(self.config, teacher.meta, teacher.n_vocab, self.length, files)

    def _read_first_blocks(self) -> None:
        """Read the blocks for calibration, which train too, and the held-out blocks, which do not.

        Raises DataError if the text is too short.
        """
        config = self.config
        text = self._open_text(config.local)
        if config.val:
            val = list(islice(self._open_text(config.val), config.eval_blocks))
            self.n_held_out = 0  # blocks at the start of the training text
        else:
            val = list(islice(text, config.eval_blocks))
            self.n_held_out = len(val)
        first = list(islice(text, SPREAD * config.calibration_blocks))
        if not first or not val:
            raise DataError(
                f"{config.local or config.dataset}: too little text for {config.eval_blocks} "
                f"held-out blocks of {self.length} tokens, and others to train on: "
                "give more, or --val=FILE"
            )
        stride = math.ceil(len(first) / config.calibration_blocks)
        self.calibration_ids = torch.stack(first[::stride])  # (N, T)
        self.val = torch.stack(val)  # (N, T)

    def _find_provenance(self) -> None:
        """Describe teacher, text, machine and code, and what has changed since a checkpoint."""
        config = self.config
        blocks = [self.calibration_ids, self.val]
        text = text_fingerprint(blocks, [config.local, config.val])
        data = f"{self.name_of_teacher} {text}"
        differs = "ranks see different teachers or texts: copy the same to each machine"
        self.provenance = find_provenance(data, self.ranks, differs)
        self.changed: list[str] = []
        if self.state:
            self.changed = self.ranks.together(self._compare)

    def _compare(self) -> list[str]:
        """List what has changed since the checkpoint, as "max_iters 1 -> 2".

        Raises CheckpointError for another teacher or text.
        """
        path = self.out_dir / DISTILLING
        saved = saved_provenance(self.state, path)
        remedy = "give teacher, local, val and dataset what they were, or choose another out_dir"
        check_same_data(saved, self.provenance, path, remedy)
        settings = changed_keys(self.state["config"], dataclasses.asdict(self.config), saved)
        return settings + changes(saved, self.provenance)

    def _fix_plan(self) -> None:
        """Set the norm plan and alpha, the same on every rank."""
        chosen = [(self.state["plan"], self.state["alpha"]) if self.state else self._choose()]
        if dist.is_initialized():
            # Ranks may sum in different orders, and so choose different alphas.
            dist.broadcast_object_list(chosen)
        self.plan, self.alpha = chosen[0]

    def _choose(self) -> tuple[str, tuple[float, ...]]:
        """Choose norm plan and alpha.

        The plan is that of the config; by default the one with the fewest standard blocks whose KL
        is within the budget.
        """
        config = self.config
        calibration = Calibration(self.teacher, self.calibration_ids)
        plan = config.norm_plan
        if not plan:
            first = config.coupled_first
            if first is None:
                first, _ = suggest_first(calibration, config.budget, per_layer=True)
            blocks = self.teacher.config.n_layer
            if first > blocks:
                raise ConfigError(f"coupled_first={first}: the teacher has {blocks} blocks")
            plan = first_plan(blocks, first)
        view(self.teacher, plan)  # raises for a plan that does not fit
        return spell(plan.replace(" ", "")), calibration.alpha(plan)

    def _build_student(self) -> None:
        """Build the student, and list its parameters that are trained."""
        student = make_student(self.teacher, self.plan, self.alpha, self.config)
        self.pair = Pair(self.teacher, student)
        self.trained = {name: p for name, p in student.named_parameters() if p.requires_grad}

    def _make_optimizer(self) -> None:
        config = self.config
        self.optimizer = make_optimizer(
            nn.ParameterList(self.trained.values()),
            config.learning_rate,
            (config.beta1, config.beta2),
            1e-8,
            config.weight_decay,
        )

    def _resume(self) -> None:
        """Restore what is trained from the checkpoint."""
        state = self.state
        if not state:
            return
        self.step = state["step"]
        self.calibrated_kl = state["calibrated_kl"]
        path = self.out_dir / DISTILLING
        shapes = {name: tensor.shape for name, tensor in state["model"].items()}
        if shapes != {name: parameter.shape for name, parameter in self.trained.items()}:
            raise CheckpointError(
                f"{path}: its weights are not those of this student: choose another out_dir"
            )
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(state["model"][name])
        load_moments(path, state, self.trained, self.optimizer)
        load_scaler(path, self.precision.scaler, state["scaler"])

    def _replicate(self) -> None:
        """Put DDP around the pair, if there are several ranks."""
        self.forward = self.pair
        if dist.is_initialized():
            self.forward = replicate(self.pair)

    def _start_log(self) -> None:
        """Open the log, and say what is trained."""
        config = dataclasses.asdict(self.config)
        self.log = RunLog(self.out_dir, config, self.config.max_iters, self.ranks.is_main)
        trained = sum(parameter.numel() for parameter in self.trained.values())
        start = {
            "norm_plan": self.plan,
            "alpha": list(self.alpha),
            "trained_parameters": trained,
            **self.provenance,
        }
        resume_step = self.step if self.state else None
        self.ranks.together(lambda: self.log.open(resume_step, start, self.changed))
        resuming = f"; resuming after step {self.step}" if self.state else ""
        self.log.say(
            f"norm plan {self.plan}, {self.plan.count('s')} statistics saved, "
            f"{trained:,} parameters train{resuming}"
        )
        if self.changed:
            self.log.say(f"changed since then: {', '.join(self.changed)}")

    # ------------------------------------------------------------------------------------- the loop

    def run(self) -> None:
        """Train until max_iters or a signal; then write the student."""
        if self.summary is not None:
            self._repeat_summary()
            self.lock.release()
            return
        config = self.config
        blocks_per_step = config.batch_size * config.gradient_accumulation_steps
        self.clock = Throughput(blocks_per_step * self.length)
        if self.step == 0:
            self.calibrated_kl = self._evaluate(self.pair)["kl"]
        if self.ranks.on_cuda:
            torch.cuda.reset_peak_memory_stats()
        reason = self._loop()
        if reason:
            self.log.say(f"{reason}: the same command continues")
            self.log.close(reason, step=self.step)
        else:
            self._finish()
        self.lock.release()

    def _repeat_summary(self) -> None:
        """Print what a finished run has printed at its end; nothing in its folder is touched."""
        if self.ranks.is_main:
            step = self.state["step"]
            print(f"finished already: step {step} of max_iters={self.config.max_iters}")
            print(json.dumps(self.summary), flush=True)

    def _loop(self) -> str:
        """Take all steps that are left. Returns why it stopped before max_iters, or ""."""
        config = self.config
        batches = self._batches(self.step + 1)
        self.clock.restart()
        while self.step < config.max_iters:
            self.step += 1
            stops = self._train_step(batches)
            if self.step % config.eval_interval == 0 or self.step == config.max_iters:
                self._evaluate(self.pair)
                self._save()
                self.clock.restart()
            elif stops:
                self._save()
            if stops and self.step < config.max_iters:
                return f"stopped by {self.stop_signal.name or 'a signal'} after step {self.step}"
        return ""

    def _batches(self, first_step: int) -> Iterator[Tensor]:
        """Yield this rank's micro-batches (B, T) from `first_step` on, for ever."""
        config, ranks = self.config, self.ranks
        # Steps count from 1, so the first blocks of the first epoch train nothing.
        skipped = first_step * config.batch_size * config.gradient_accumulation_steps
        blocks = islice(self._epochs(), skipped, None)
        for number in range(1 << 60):
            batch = list(islice(blocks, config.batch_size))
            if number % ranks.world_size == ranks.rank:
                yield torch.stack(batch).to(ranks.device)

    def _epochs(self) -> Iterator[Tensor]:
        """Yield the blocks (T,) of the training text, epoch after epoch in different orders."""
        config = self.config
        for epoch in range(1 << 30):
            blocks = islice(self._open_text(config.local), self.n_held_out, None)
            yield from shuffled(blocks, config.shuffle, config.seed + epoch)

    def _train_step(self, batches: Iterator[Tensor]) -> bool:
        """Do one step and log it. Returns whether a rank has been asked to stop."""
        config, ranks = self.config, self.ranks
        lr = self._set_learning_rate()
        losses = self._backward(batches)  # (2,) KL, and 0 for the auxiliary loss
        losses = ranks.sum(losses) / ranks.world_size  # the mean over all micro-batches
        stops = torch.tensor(float(bool(self.stop_signal.name)), device=ranks.device)
        ranks.sum(stops)
        norms = guarded_update(
            self.optimizer,
            self.precision.scaler,
            list(self.trained.values()),
            config.grad_clip,
            (~losses.isfinite().all()).float(),
        )
        # Here the host waits for the device.
        kl = float(losses[0])
        if not math.isfinite(kl):
            raise UserError(f"step {self.step}: the KL is not finite: lower learning_rate")
        self.clock.tick()
        if self.step % config.log_interval == 0 or self.step in (1, config.max_iters):
            self.log.step(
                step=self.step,
                loss=kl,
                lr=lr,
                grad_norm=float(norms.total),
                tok_per_s=self.clock.window(),
                mfu=None,
            )
        return bool(stops)

    def _set_learning_rate(self) -> float:
        """Set the learning rate of this step, and return it."""
        config = self.config
        lr = learning_rate(
            self.step,
            "cosine",
            config.warmup_iters,
            config.max_iters,
            config.learning_rate,
            config.min_lr,
            0.0,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _backward(self, batches: Iterator[Tensor]) -> Tensor:
        """Add up gradients over this rank's micro-batches. Returns its mean losses (2,)."""
        micro_batches = self.config.gradient_accumulation_steps // self.ranks.world_size
        losses = 0.0
        for micro in range(micro_batches):
            with accumulate(self.forward, last=micro == micro_batches - 1):
                x = next(batches)  # (B, T)
                losses = losses + micro_step(self.forward, x, x, self.precision, micro_batches)
        return losses

    # ------------------------------------------------------------------ evaluation and checkpoints

    @torch.no_grad()
    def _evaluate(self, pair: Pair, event: str = "eval") -> dict[str, float]:
        """Measure a student on the held-out blocks, and log it.

        Returns:
            kl: KL(teacher || student), nats per token, without the first position of each block;
            kl_first: the same at first positions only; val_loss and teacher_val_loss: nats per
            token.
        """
        kl = kl_first = loss = teacher_loss = 0.0
        # Sums in float64, of tokens and not of batches: the last batch may be smaller.
        for ids in self.val.split(self.config.batch_size):
            ids = ids.to(self.ranks.device)  # (B, T)
            with self.precision.autocast():
                x, taught = pair.hidden(ids)  # (B, T, C) each
                token_kl = pair.token_kl(x, taught).double().cpu()  # (B, T)
                kl += float(token_kl[:, 1:].sum())
                kl_first += float(token_kl[:, 0].sum())
                loss += total_loss(pair.student, x, ids)
                teacher_loss += total_loss(self.teacher, taught, ids)
        blocks = len(self.val)
        tokens = blocks * (self.length - 1)
        found = {
            "kl": kl / tokens,
            "kl_first": kl_first / blocks,
            "val_loss": loss / tokens,
            "teacher_val_loss": teacher_loss / tokens,
        }
        self.log.event(event, step=self.step, **found)
        merged = ", merged as it will be saved" if event == "merged" else ""
        self.log.say(
            f"step {self.step}{merged}  held-out KL {found['kl']:.3e}  val loss "
            f"{found['val_loss']:.4f}, teacher {found['teacher_val_loss']:.4f}"
        )
        return found

    def _save(self) -> None:
        """Save everything that a resume needs."""
        state = {
            "step": self.step,
            "config": dataclasses.asdict(self.config),
            "plan": self.plan,
            "alpha": self.alpha,
            "calibrated_kl": self.calibrated_kl,
            "provenance": self.provenance,
            "model": {name: p.detach() for name, p in self.trained.items()},
            "optimizer": moments_of(self.trained, self.optimizer),
            "scaler": self.precision.scaler.state_dict(),
        }
        save_checkpoint(self.out_dir / DISTILLING, state, self.ranks)

    # ------------------------------------------------------------------------------------- the end

    def _finish(self) -> None:
        """Measure the student as it will be used, write it, and close the log."""
        speed = self.clock.steady()
        peak = torch.cuda.max_memory_allocated() if self.ranks.on_cuda else None
        if not self.ranks.is_main:
            return
        student = finished(self.pair.student)
        found = self._evaluate(Pair(self.teacher, student), "merged")
        found["calibrated_kl"] = self.calibrated_kl
        if found["kl"] > self.calibrated_kl:
            self.log.say(
                "warning: it is further from the teacher than before training (KL "
                f"{self.calibrated_kl:.3e}): train longer, or lower learning_rate"
            )
        student = student.cpu()
        self._write_student(student)
        is_wanted = self.config.export
        if is_wanted is None:
            is_wanted = student.meta.get("tokenizer") == "hf"
        if is_wanted:
            self._export(student)
        summary = {
            **found,
            "norm_plan": self.plan,
            "alpha": list(self.alpha),
            "step": self.step,
            "tok_per_s": speed,
            "peak_bytes": peak,
        }
        # This comes last: a run that is killed before it does all of _finish again.
        self.log.close(
            "done",
            step=self.step,
            tok_per_s=speed,
            peak_bytes=peak,
            exported=is_wanted,
            summary=summary,
        )
        print(json.dumps(summary))

    def _write_student(self, student: GPT) -> None:
        """Write config.json and ckpt_best.pt."""
        config = dataclasses.asdict(student.config)
        path = self.out_dir / "config.json"
        try:
            write_bytes_atomically(path, f"{json.dumps(config, indent=1)}\n".encode())
        except OSError as error:
            raise UserError(cannot_write(path, error, "the run is saved")) from None
        state = {
            "step": self.step,
            "config": config,
            "meta": student.meta,
            "model": student.state_dict(),
        }
        save_checkpoint(self.out_dir / BEST, state)

    def _export(self, student: GPT) -> None:
        """Write hf/. It is whole whenever it exists, and replaces that of an earlier end."""
        target, new, old = (self.out_dir / name for name in ("hf", "hf.new", "hf.old"))
        for left in (new, old):  # of a run that was killed below
            shutil.rmtree(left, ignore_errors=True)
        weights.export_hf(student, new)
        try:
            if target.exists():
                target.rename(old)
            new.rename(target)
        except OSError as error:
            if old.exists():
                old.rename(target)
            shutil.rmtree(new, ignore_errors=True)
            raise UserError(cannot_write(target, error, "the run is saved")) from None
        shutil.rmtree(old, ignore_errors=True)


def _check_distilling(path: Path, state: dict[str, Any]) -> None:
    """Raise CheckpointError if an entry that distill.py alone writes is missing or damaged."""
    alpha = state.get("alpha")
    is_sound = (
        isinstance(state.get("plan"), str)
        and isinstance(alpha, tuple | list)
        and all(type(value) is float and 0 < value < math.inf for value in alpha)
        and type(state.get("calibrated_kl")) is float
        and {"optimizer", "scaler", "model"} <= state.keys()
    )
    if not is_sound:
        raise CheckpointError(
            f"{path}: not a checkpoint of distill.py, or damaged: choose another out_dir"
        )


def total_loss(gpt: GPT, x: Tensor, ids: Tensor) -> float:
    """Add up the loss of `gpt` over all next tokens of ids (B, T), nats.

    Args:
        x: its final hidden states for ids, (B, T, C).
    """
    x = x[:, :-1].flatten(0, 1)  # (B (T - 1), C)
    loss = cross_entropy(x, gpt.head_weight(), ids[:, 1:].flatten(), gpt.n_vocab)
    return float(loss) * len(x)


def main(argv: list[str]) -> None:
    """Print the memory estimate; then, unless only that is wanted, distil."""
    config, _ = parse_args(DistillConfig, argv, __doc__)
    for text in (config.local, config.val):
        input_files(text)  # a wrong name is refused before the teacher is downloaded or loaded
    check_apart(config.teacher, Path(config.out_dir))
    shape = teacher_config(config.teacher)
    device = find_device(config.device)
    low = Precision(config.dtype, device).is_low
    tokens = config.batch_size * min(config.block_size, shape.block_size)
    parts = adapters.memory(
        shape, config.method, config.rank, tokens, low, config.checkpoint_activations
    )
    if int(os.environ.get("RANK", 0)) == 0:
        print(adapters.memory_line(parts), flush=True)
    if config.estimate:
        print(json.dumps({"teacher": config.teacher, "method": config.method, **parts}))
        return
    needed = parts["weights"] + parts["trained"]
    if device.type == "cpu" and needed > machine_memory():
        raise ConfigError(
            f"rank={config.rank}, method={config.method}: weights and optimizer take "
            f"{needed / 1e9:,.0f} GB, and this machine has {machine_memory() / 1e9:,.0f} GB of "
            "memory: lower rank, or take another method"
        )
    Distiller(config).run()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    run_program(main)
