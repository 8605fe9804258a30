"""CoupledNorm in a model that is trained already, by distillation from itself (Loretz & Hochreiter
2026, section 5.3).

    python distill.py config/distill_qwen3_0.6b.py
        the paper's setting, one GPU
    python distill.py config/distill_qwen3_0.6b.py --estimate
        memory it will need, and nothing else
    python distill.py --teacher=out/rms --local=more.jsonl --method=full
        any of our runs, any text
    torchrun --standalone --nproc_per_node=8 -- distill.py ...
        (-- or torchrun takes --local for its own)

The student is the teacher under a coupled norm plan, with calibrated alpha (posthoc/coupling.py);
it learns from KL(teacher || student) alone and sees no labels. With adapters both are views of one
copy of the weights, which never change; only full fine-tuning moves weights of its own. out_dir
gets log.jsonl, distill_last.pt (from which the same command goes on), and at the end the student
with adapters merged and alpha absorbed: ckpt_best.pt, and hf/ for a teacher from Hugging Face. The
last line of output is JSON.
"""

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
from common.environment import DTYPES, Precision, faster_float32_products, find_device
from common.errors import CheckpointError, ConfigError, DataError, UserError, run_program
from common.fingerprint import fingerprint
from configurator import check_least, key, parse_args
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
    read_checkpoint,
    save_checkpoint,
)
from training.lock import FolderLock
from training.log import RunLog, Throughput, last_event
from training.optim import guarded_update, learning_rate, make_optimizer, micro_step
from training.place import changes, check_same_data, find_place, saved_place

SPREAD = 16  # calibration blocks are every 16th of the first ones, where there are so many
FREE = (
    "max_iters",
    "eval_interval",
    "log_interval",
    "device",
    "out_dir",
    "export",
)  # may differ when a run goes on


@dataclass(frozen=True)
class DistillConfig:
    """Every key of distill.py; the defaults are the paper's where it says something."""

    teacher: str = key(
        "",
        "the model: run folder, checkpoint, Hugging Face folder or hub name, random:qwen3-0.6b, "
        "...",
    )
    out_dir: str = key("out/distill", "run folder")
    local: str = key(
        "", "files of text or chats, with commas between ('': the data set below, from the hub)"
    )
    val: str = key(
        "", "files of held-out text ('': the first blocks of the training text are held out)"
    )
    dataset: str = key(
        "nvidia/Nemotron-Post-Training-Dataset-v2", "of the hub, streamed; random: no text at all"
    )
    split: str = key("stem", "split of it")
    shuffle: int = key(1024, "blocks in the buffer that the order is drawn from")
    norm_plan: str = key("", "the student's plan, e.g. 'RR Rs Rs R' ('': coupled_first)")
    coupled_first: int | None = key(
        None, "standard blocks at the start (auto: fewest whose KL is within the budget)"
    )
    budget: float = key(0.01, "largest KL before training, nats a token, for coupled_first=auto")
    method: str = key(
        "dora", "what is trained: adapters, or a copy of all weights", ("dora", "lora", "full")
    )
    rank: int = key(1024, "of the adapters", least=1)
    adapter_alpha: float = key(2048.0, "of the adapters: they are scaled by adapter_alpha / rank")
    block_size: int = key(
        1024, "tokens of a block, at most the teacher's context", least=2
    )  # of one, none is judged
    batch_size: int = key(8, "blocks in a micro-batch", least=1)
    gradient_accumulation_steps: int = key(8, "micro-batches in a step, over all ranks", least=1)
    checkpoint_activations: bool = key(True, "compute each block's activations again in backward")
    max_iters: int = key(1000, "optimiser steps", least=1)
    learning_rate: float = key(1e-4, "highest learning rate")
    min_lr: float = key(0.0, "lowest learning rate, at the end of the cosine")
    warmup_iters: int = key(20, "steps of linear warm-up")
    weight_decay: float = key(0.0, "AdamW's")
    beta1: float = key(0.9, "AdamW's")
    beta2: float = key(0.95, "AdamW's")
    grad_clip: float = key(1.0, "largest global gradient norm (0: no clipping)")
    calibration_blocks: int = key(
        32, "blocks of the training text that alpha and coupled_first are chosen on", least=1
    )
    eval_blocks: int = key(64, "held-out blocks", least=1)
    eval_interval: int = key(100, "steps between evaluations and checkpoints", least=1)
    log_interval: int = key(10, "steps between log lines", least=1)
    seed: int = key(1337, "of data order and adapters")
    device: str = key(
        "auto", "auto: the first of cuda, mps, cpu that is there", ("auto", "cpu", "cuda", "mps")
    )
    dtype: str = key(
        "auto",
        "of the computation and of frozen weights (auto: bfloat16 on CUDA)",
        ("auto", *DTYPES),
    )
    resume: str = key("auto", "auto: go on where out_dir stopped; never", ("auto", "never"))
    estimate: bool = key(False, "print the memory estimate and stop")
    export: bool | None = key(
        None, "write hf/, a Hugging Face folder, at the end (auto: if the teacher was one)"
    )

    def __post_init__(self) -> None:
        if not self.teacher:
            raise ConfigError("teacher: name the model to start from, --teacher=MODEL")
        check_least(self)
        if self.norm_plan and self.coupled_first is not None:
            raise ConfigError(
                f"norm_plan={self.norm_plan} and coupled_first={self.coupled_first} both name the "
                "plan: give one (--coupled_first=auto undoes a config file's)"
            )
        if not 0 <= self.min_lr <= self.learning_rate or not self.learning_rate > 0:
            raise ConfigError(
                f"want 0 <= min_lr ({self.min_lr}) <= learning_rate ({self.learning_rate}), above 0"
            )


class Distiller:
    """One run: set up by the constructor, done by `run`."""

    def __init__(self, config: DistillConfig):
        self.config, self.out_dir, self.stop_signal = config, Path(config.out_dir), StopSignal()
        self.ranks = ranks = Ranks.start(config.device, config.gradient_accumulation_steps)
        self.precision = Precision(config.dtype, ranks.device)
        self.lock = ranks.together(self._lock)  # before anybody looks for a checkpoint there
        try:
            self.state = ranks.together(self._find_state)
            ranks.check_same(
                self.state["step"] if self.state else -1, different_checkpoints(self.out_dir)
            )
            self.summary = self._summary()
            if self.summary is None:
                self._prepare()
        except BaseException:
            self._unlock()
            raise

    def _lock(self) -> FolderLock | None:
        return (
            FolderLock(self.out_dir, lambda: self.stop_signal.name) if self.ranks.is_main else None
        )

    def _unlock(self) -> None:
        if self.lock is not None:
            self.lock.release()

    def _prepare(self) -> None:
        """Teacher, text, student, optimiser and log, as the checkpoint in the run folder left them
        if there is one.
        """
        config, ranks, state = self.config, self.ranks, self.state
        with (
            ranks.device if config.teacher.startswith("random:") else contextlib.nullcontext()
        ):  # drawn there
            teacher = load_model(config.teacher)
        if ranks.device.type == "cpu":
            faster_float32_products(teacher.config.n_embd, teacher.config.head_channels)
        name_of_teacher = fingerprint("teacher", bytes_of(teacher))
        low = (
            self.precision.dtype
            if self.precision.is_low and config.method != "full"
            else self.precision.weights
        )
        teacher = teacher.to(low).to(ranks.device).requires_grad_(False)
        self.length = min(config.block_size, teacher.config.block_size)
        self.teacher = own_statistics(teacher, f"teacher={config.teacher}")
        self.calibration_ids, self.val = self._first_blocks(teacher)
        name_of_text = text_fingerprint(
            [self.calibration_ids, self.val], [config.local, config.val]
        )
        self.place = find_place(f"{name_of_teacher} {name_of_text}", ranks)
        changed = ranks.together(lambda: self._compare(state)) if state else []
        chosen = [(state["plan"], state["alpha"]) if state else self._choose()]
        if dist.is_initialized():  # sums in another order may choose another alpha on another rank
            dist.broadcast_object_list(chosen)
        self.plan, self.alpha = chosen[0]
        self.pair = Pair(self.teacher, make_student(self.teacher, self.plan, self.alpha, config))
        self.trained = {
            name: p for name, p in self.pair.student.named_parameters() if p.requires_grad
        }
        parameters = nn.ParameterList(self.trained.values())
        self.optimizer = make_optimizer(
            parameters,
            config.learning_rate,
            (config.beta1, config.beta2),
            1e-8,
            config.weight_decay,
        )
        self.step, self.calibrated_kl = 0, 0.0
        if state:
            self.step, self.calibrated_kl = state["step"], state["calibrated_kl"]
            with torch.no_grad():
                for name, parameter in self.trained.items():
                    parameter.copy_(state["model"][name])
            self.optimizer.load_state_dict(state["optimizer"])
            self.precision.scaler.load_state_dict(state["scaler"])
        self.log = RunLog(
            self.out_dir,
            {**dataclasses.asdict(config), "wandb": "off"},
            config.max_iters,
            ranks.is_main,
        )
        self.forward = replicate(self.pair) if dist.is_initialized() else self.pair
        trained = sum(parameter.numel() for parameter in parameters)
        start = {
            "norm_plan": self.plan,
            "alpha": list(self.alpha),
            "trained_parameters": trained,
            **self.place,
        }
        ranks.together(lambda: self.log.open(self.step if state else None, start, changed))
        self.log.say(
            f"norm plan {self.plan}, {self.plan.count('s')} statistics saved, "
            f"{trained:,} parameters train"
            + (f"; resuming after step {self.step}" if state else "")
        )
        if changed:
            self.log.say(f"changed since then: {', '.join(changed)}")

    def _first_blocks(self, teacher: GPT) -> tuple[Tensor, Tensor]:
        """Blocks (N, T) for calibration, which train too, and held-out ones, that are skipped in
        training.
        """
        config, held = self.config, self.config.eval_blocks
        stream = open_stream(config, teacher.meta, teacher.n_vocab, self.length, config.local)
        if config.val:
            val = list(
                islice(
                    open_stream(config, teacher.meta, teacher.n_vocab, self.length, config.val),
                    held,
                )
            )
        else:
            val = list(islice(stream, held))
        self.skipped = 0 if config.val else len(val)
        first = list(islice(stream, SPREAD * config.calibration_blocks))
        first = first[
            :: -(-len(first) // config.calibration_blocks) or 1
        ]  # of as many documents as may be
        if not first or not val:
            raise DataError(
                f"{config.local or config.dataset}: too little text for {held} blocks of "
                f"{self.length} tokens to judge by, and others to train on: "
                "give more, or --val=FILE"
            )
        return torch.stack(first), torch.stack(val)

    def _choose(self) -> tuple[str, tuple[float, ...]]:
        """Norm plan and alpha: as told, or the fewest standard blocks whose KL is within the
        budget.
        """
        config, calibration = self.config, Calibration(self.teacher, self.calibration_ids)
        first = config.coupled_first
        if first is None and not config.norm_plan:
            first, _ = suggest_first(calibration, config.budget, per_layer=True)
        plan = config.norm_plan or first_plan(self.teacher.config.n_layer, first)
        view(self.teacher, plan)  # raises for a plan that does not fit
        return spell(plan.replace(" ", "")), calibration.alpha(plan)

    def _find_state(self) -> dict[str, Any] | None:
        path = self.out_dir / DISTILLING
        if not path.exists():
            return None
        if self.config.resume == "never":
            raise CheckpointError(
                f"{self.out_dir} holds a run already: choose another out_dir, or --resume=auto"
            )
        state, now = read_checkpoint(path), dataclasses.asdict(self.config)
        for name in now.keys() - set(FREE):
            if state["config"].get(name) != now[name]:
                raise CheckpointError(
                    f"{path} was made with {name}={state['config'].get(name)!r}, now it is "
                    f"{now[name]!r}: use its settings, or another out_dir"
                )
        return state

    def _summary(self) -> dict[str, Any] | None:
        """What the end of a finished run has told; None where anything is left to do."""
        wants_export = self.config.export and not (self.out_dir / "hf").exists()
        if self.state is None or self.state["step"] < self.config.max_iters or wants_export:
            return None
        end = last_event(self.out_dir / "log.jsonl")
        return end["summary"] if end.get("reason") == "done" and "summary" in end else None

    def _compare(self, state: dict[str, Any]) -> list[str]:
        """What has changed since `state` was saved. Raises CheckpointError for another teacher or
        text.
        """
        path, config = self.out_dir / DISTILLING, self.config
        place, now = saved_place(state, path), dataclasses.asdict(config)
        remedy = "give teacher, local, val and dataset what they were, or choose another out_dir"
        check_same_data(place, self.place, path, remedy)
        settings = [
            name
            for name in sorted(now.keys() & state["config"].keys())
            if state["config"][name] != now[name]
        ]
        return [f"{name} {state['config'][name]} -> {now[name]}" for name in settings] + changes(
            place, self.place
        )

    def _batches(self) -> Iterator[Tensor]:
        """This rank's micro-batches (B, T) from the step on that comes next; the text begins anew
        when it ends.
        """
        config, ranks = self.config, self.ranks

        def epochs() -> Iterator[Tensor]:
            for epoch in range(1 << 30):
                stream = open_stream(
                    config, self.teacher.meta, self.teacher.n_vocab, self.length, config.local
                )
                yield from shuffled(
                    islice(stream, self.skipped, None), config.shuffle, config.seed + epoch
                )

        per_step = config.batch_size * config.gradient_accumulation_steps
        stream = islice(epochs(), self.step * per_step, None)
        for number in range(1 << 60):
            batch = list(islice(stream, config.batch_size))
            if number % ranks.world_size == ranks.rank:
                yield torch.stack(batch).to(ranks.device)

    def run(self) -> None:
        config, ranks = self.config, self.ranks
        if self.summary is not None:  # and nothing of the run is touched
            if ranks.is_main:
                print(
                    f"finished already: step {self.state['step']} of max_iters={config.max_iters}"
                )
                print(json.dumps(self.summary), flush=True)
            return self._unlock()
        micro_batches = config.gradient_accumulation_steps // ranks.world_size
        batches, parameters = self._batches(), list(self.trained.values())
        clock = Throughput(config.batch_size * config.gradient_accumulation_steps * self.length)
        if self.step == 0:
            self.calibrated_kl = self._evaluate(self.pair)["kl"]
        if ranks.on_cuda:
            torch.cuda.reset_peak_memory_stats()
        clock.restart()
        while self.step < config.max_iters:
            self.step += 1
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
            total = 0.0
            for micro in range(micro_batches):
                with accumulate(self.forward, last=micro == micro_batches - 1):
                    x = next(batches)
                    total = total + micro_step(self.forward, x, x, self.precision, micro_batches)
            kl = ranks.sum(total) / ranks.world_size
            stops = ranks.sum(torch.tensor(float(bool(self.stop_signal.name)), device=ranks.device))
            norms = guarded_update(
                self.optimizer,
                self.precision.scaler,
                parameters,
                config.grad_clip,
                (~kl.isfinite().all()).float(),
            )
            value = float(kl[0])
            if not math.isfinite(value):
                raise UserError(f"step {self.step}: the KL is not finite: lower learning_rate")
            clock.tick()
            if self.step % config.log_interval == 0 or self.step in (1, config.max_iters):
                self.log.step(
                    step=self.step,
                    loss=value,
                    lr=lr,
                    grad_norm=float(norms[0]),
                    tok_per_s=clock.window(),
                    mfu=None,
                )
            if self.step % config.eval_interval == 0 or self.step == config.max_iters:
                self._evaluate(self.pair)
                self._save()
                clock.restart()
            elif stops:
                self._save()
            if stops and self.step < config.max_iters:
                reason = f"stopped by {self.stop_signal.name or 'a signal'} after step {self.step}"
                self.log.say(f"{reason}: the same command goes on")
                self.log.close(reason, step=self.step)
                return self._unlock()
        self._finish(clock.steady())
        self._unlock()

    @torch.no_grad()
    def _evaluate(self, pair: Pair, event: str = "eval") -> dict[str, float]:
        """KL of held-out text, its first positions apart, and both models' loss on it, nats a
        token.
        """
        sums = torch.zeros(4, dtype=torch.float64)
        for part in self.val.split(self.config.batch_size):
            idx = part.to(self.ranks.device)
            with self.precision.autocast():
                kl = pair.token_kl(idx).double().cpu()
                sums[0] += kl[:, 1:].sum()
                sums[1] += kl[:, 0].sum()
                for row, gpt in ((2, pair.student), (3, self.teacher)):
                    x = gpt.hidden(idx)[:, :-1].flatten(0, 1)
                    loss = cross_entropy(x, gpt.head_weight(), idx[:, 1:].flatten(), gpt.n_vocab)
                    sums[row] += float(loss) * len(x)
        blocks = len(self.val)
        tokens = blocks * (self.length - 1)
        found = {
            "kl": float(sums[0]) / tokens,
            "kl_first": float(sums[1]) / blocks,
            "val_loss": float(sums[2]) / tokens,
            "teacher_val_loss": float(sums[3]) / tokens,
        }
        self.log.event(event, step=self.step, **found)
        merged = ", as it is saved" if event == "merged" else ""
        self.log.say(
            f"step {self.step}{merged}  held-out KL {found['kl']:.3e}  val loss "
            f"{found['val_loss']:.4f}, teacher {found['teacher_val_loss']:.4f}"
        )
        return found

    def _save(self) -> None:
        save_checkpoint(
            self.out_dir / DISTILLING,
            {
                "step": self.step,
                "config": dataclasses.asdict(self.config),
                "plan": self.plan,
                "alpha": self.alpha,
                "calibrated_kl": self.calibrated_kl,
                "place": self.place,
                "model": {name: p.detach() for name, p in self.trained.items()},
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.precision.scaler.state_dict(),
            },
            self.ranks,
        )

    def _finish(self, speed: float | None) -> None:
        """The plain student, judged as it will be used; its checkpoint and its export; the last
        line.
        """
        peak = torch.cuda.max_memory_allocated() if self.ranks.on_cuda else None
        if not self.ranks.is_main:
            return
        student = finished(self.pair.student)
        found = self._evaluate(Pair(self.teacher, student), "merged") | {
            "calibrated_kl": self.calibrated_kl
        }
        if found["kl"] > self.calibrated_kl:
            self.log.say(
                "warning: it is further from the teacher than before training (KL "
                f"{self.calibrated_kl:.3e}): train longer, or lower learning_rate"
            )
        student = student.cpu()
        config = dataclasses.asdict(student.config)
        (self.out_dir / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        save_checkpoint(
            self.out_dir / BEST,
            {
                "step": self.step,
                "config": config,
                "meta": student.meta,
                "model": student.state_dict(),
            },
        )
        wanted = self.config.export
        if wanted or (wanted is None and student.meta.get("tokenizer") == "hf"):
            self._export(student)
        summary = {
            **found,
            "norm_plan": self.plan,
            "alpha": list(self.alpha),
            "step": self.step,
            "tok_per_s": speed,
            "peak_bytes": peak,
        }
        # The last thing: a run that is killed before it does all of this again.
        self.log.close("done", step=self.step, tok_per_s=speed, peak_bytes=peak, summary=summary)
        print(json.dumps(summary))

    def _export(self, student: GPT) -> None:
        """hf/, in place of one that an earlier end of this run has left; it is whole whenever it is
        there.
        """
        target, fresh = self.out_dir / "hf", self.out_dir / "hf.tmp"
        shutil.rmtree(fresh, ignore_errors=True)  # of a run that was stopped here
        weights.export_hf(student, fresh)
        shutil.rmtree(target, ignore_errors=True)
        fresh.rename(target)


def main(argv: list[str]) -> None:
    config, _ = parse_args(DistillConfig, argv, __doc__)
    shape = teacher_config(config.teacher)
    low = Precision(config.dtype, find_device(config.device)).is_low
    tokens = config.batch_size * min(config.block_size, shape.block_size)
    parts = adapters.memory(
        shape, config.method, config.rank, tokens, low, config.checkpoint_activations
    )
    if int(os.environ.get("RANK", 0)) == 0:
        print(adapters.memory_line(parts), flush=True)
    if config.estimate:
        return print(json.dumps({"teacher": config.teacher, "method": config.method, **parts}))
    Distiller(config).run()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    run_program(main)
