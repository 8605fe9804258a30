"""Train a GPT under any of five normalisations.

    python train.py config/demo.py                                       one process, CPU or GPU
    python train.py config/demo.py --norm_type=rms --out_dir=out/rms     change any key
    torchrun --standalone --nproc_per_node=8 train.py config/coupled.py  8 GPUs of one machine, DDP
    torchrun --standalone --nproc_per_node=8 train.py config/coupled.py --parallel=fsdp
        for larger models
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 \\
      train.py config/coupled.py

A run writes config.json, log.jsonl, ckpt_last.pt, ckpt_best.pt and samples.txt into out_dir. The
same command resumes it. SIGTERM and Ctrl-C finish the step, save, and exit 0.

What runs, in order: configurator.py makes a TrainConfig of config files and keys; Trainer joins the
other ranks (common/distributed.py), reads data (training/dataloader.py), builds the model
(model.py, its norms by norm_plan.py) and its optimiser (training/optim.py), resumes
(training/checkpoint.py), and loops.
"""

import dataclasses
import json
import math
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed import Ranks, StopSignal, accumulate, is_sharded, replicate, shard
from common.environment import DTYPES, Precision, faster_float32_products, peak_flops
from common.errors import ConfigError, DataError, UserError, run_program
from configurator import key, parse_args
from data.shards import read_meta
from evals.hellaswag import ITEMS_FILE, HellaSwag
from load import init_from
from model import GPT, GPTConfig
from norm_plan import foreign_keys, keys_of
from taper import TaperSchedule, is_tapered, taper_gate
from training.checkpoint import (
    BEST,
    LAST,
    different_checkpoints,
    find_checkpoint,
    restore,
    save_checkpoint,
)
from training.dataloader import Blocks, TrainLoader
from training.evaluation import Evaluator
from training.lock import FolderLock
from training.log import RunLog, StepReport, Throughput
from training.optim import carry_state, guarded_update, learning_rate, make_optimizer, micro_step
from training.place import changes, check_same_data, find_place, saved_place
from training.stream import calibrate

# float16: so many steps in a row with infinite gradients are no matter of the loss scale any more
MAX_SKIPPED = 20


@dataclass(frozen=True)
class TrainConfig(GPTConfig):
    """Every key of a training run; the defaults are nanoGPT's for GPT-2 124M."""

    vocab_size: int = key(
        0, "rows of the embedding (0: the data's vocabulary, up to a multiple of 64)", least=0
    )
    out_dir: str = key("out/run", "run folder")
    data_dir: str = key("data/fineweb_edu", "folder with token shards")
    init_from: str = key(
        "", "start from the weights of this model: run, checkpoint, Hugging Face name ('': scratch)"
    )
    resume: str = key(
        "auto", "auto: continue the run in out_dir if there is one; never; or a checkpoint's path"
    )
    max_iters: int = key(600000, "optimiser steps", least=1)
    batch_size: int = key(12, "sequences in a micro-batch", least=1)
    gradient_accumulation_steps: int = key(40, "micro-batches in a step, over all ranks", least=1)
    learning_rate: float = key(6e-4, "highest learning rate")
    min_lr: float = key(6e-5, "lowest learning rate, at the end of the schedule")
    warmup_iters: int = key(2000, "steps of linear warm-up; the first is not zero", least=0)
    lr_schedule: str = key(
        "cosine", "wsd: constant, then linear decay", ("cosine", "wsd", "constant")
    )
    wsd_decay: float = key(0.2, "wsd: share of max_iters that the decay takes")
    weight_decay: float = key(0.1, "AdamW's, on tensors of two dimensions or more", least=0)
    beta1: float = key(0.9, "AdamW's")
    beta2: float = key(0.95, "AdamW's")
    adam_eps: float = key(1e-8, "AdamW's")
    grad_clip: float = key(1.0, "largest global gradient norm (0: no clipping)", least=0)
    eval_interval: int = key(2000, "steps between evaluations", least=1)
    eval_tokens: int = key(
        2_097_152, "tokens of the val shards that val_loss is over, always the same", least=1
    )
    log_interval: int = key(10, "steps between log lines", least=1)
    checkpoint_interval: int = key(0, "steps between checkpoints (0: at every evaluation)", least=0)
    sample_tokens: int = key(300, "length of the text sample at the end (0: none)", least=0)
    seed: int = key(1337, "of initial weights, data order and dropout", least=0)
    device: str = key(
        "auto", "auto: the first of cuda, mps, cpu that is there", ("auto", "cpu", "cuda", "mps")
    )
    dtype: str = key(
        "auto",
        "of the computation; weights are float32 (auto: bfloat16 on CUDA)",
        ("auto", *DTYPES),
    )
    parallel: str = key(
        "ddp", "on several ranks: each holds the whole model, or fsdp: a share", ("ddp", "fsdp")
    )
    compile: bool | None = key(None, "torch.compile (auto: on CUDA)")
    compile_mode: str = key(
        "default",
        "of torch.compile; max-autotune tries products that add as well",
        ("default", "max-autotune-no-cudagraphs"),
    )
    hellaswag: str = key(
        "off", "score HellaSwag at the end: off, auto (downloads the items), or a file of items"
    )
    hellaswag_interval: int = key(
        0, "steps between further HellaSwag scores (0: at the end alone)", least=0
    )
    hellaswag_items: int = key(
        0, "score this many items, spread evenly over the file (0: all)", least=0
    )
    delta_train_loss: float = key(
        0.0, "equivalence margin for report.py, nats per token, declared now (0: none)", least=0
    )
    delta_val_loss: float = key(0.0, "equivalence margin, nats per token (0: none)", least=0)
    delta_hellaswag_acc: float = key(0.0, "equivalence margin, share of items (0: none)", least=0)
    delta_hellaswag_acc_norm: float = key(
        0.0, "equivalence margin, share of items (0: none)", least=0
    )
    delta_tok_per_s: float = key(
        0.0, "equivalence margin, share of the baseline's throughput (0: none)", least=0
    )
    wandb: str = key("off", "log to Weights & Biases too", ("off", "online", "offline"))
    wandb_project: str = key("nanonorm", "Weights & Biases project")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hellaswag_interval % self.eval_interval:
            raise ConfigError(
                f"hellaswag_interval={self.hellaswag_interval}: wants a multiple of eval_interval"
            )
        for name in ("beta1", "beta2", "wsd_decay"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 0 and below 1")
        if self.adam_eps <= 0:
            raise ConfigError(f"adam_eps={self.adam_eps}: must be above 0")
        if self.coupled_impl != "scale" and self.dtype == "float16":
            raise ConfigError(
                f"coupled_impl={self.coupled_impl} multiplies the stream as it is, which can be "
                "beyond float16: use coupled_impl=scale, or dtype=bfloat16"
            )
        if self.norm_type == "taper":
            TaperSchedule(self.taper_warmup, self.taper_end).steps(
                self.max_iters
            )  # raises if its order is wrong
        if self.seed >= 1 << 32:
            raise ConfigError(f"seed={self.seed}: must be below 2**32")
        if not (self.learning_rate > 0 and 0 <= self.min_lr <= self.learning_rate):
            raise ConfigError(
                f"want 0 <= min_lr ({self.min_lr}) <= learning_rate ({self.learning_rate}), above 0"
            )


class NonFiniteError(UserError):
    """A loss or a gradient became NaN or infinite."""

    on_every_rank = True


class Trainer:
    """One training run: set up by the constructor, done by `run`."""

    def __init__(self, config: TrainConfig):
        self.stop_signal = StopSignal()
        self.ranks = ranks = Ranks.start(config.device, config.gradient_accumulation_steps)
        if ranks.device.type == "cpu":
            faster_float32_products(config.n_embd, config.head_channels)
        if config.parallel == "fsdp" and not dist.is_initialized():
            raise ConfigError(
                "parallel=fsdp shares the model out over ranks: start it with torchrun"
            )
        self.out_dir = Path(config.out_dir)
        self.place: dict[str, Any] = {}  # training/place.py; empty in a finished run

        # Data
        self.meta = read_meta(config.data_dir)
        n_vocab = self.meta.get("vocab_size", 0)
        rows = (
            config.vocab_size or -(-n_vocab // 64) * 64 or 50304
        )  # without meta.json: nanoGPT's GPT-2 shards
        if 0 < config.n_vocab < n_vocab:
            raise ConfigError(
                f"n_vocab={config.n_vocab}: the data's vocabulary has {n_vocab} tokens: "
                "leave it at 0"
            )
        n_vocab = config.n_vocab or n_vocab
        self.config = config = dataclasses.replace(config, vocab_size=rows, n_vocab=n_vocab)
        train, val = (
            Blocks(config.data_dir, split, config.block_size, n_vocab or rows)
            for split in ("train", "val")
        )
        self.loader = TrainLoader(
            train, config.batch_size, config.gradient_accumulation_steps, config.seed
        )
        self.tokens_per_step = (
            config.batch_size * config.gradient_accumulation_steps * config.block_size
        )

        self.precision = Precision(config.dtype, ranks.device)
        self.scaler = self.precision.scaler
        self.peak_flops = peak_flops(ranks.device) if self.precision.is_low else None
        make_scorer = self._hellaswag if config.hellaswag != "off" else None
        self.evaluator = Evaluator(
            config, val, self.meta, ranks, self.precision.autocast, make_scorer
        )

        # The run folder is for this run alone before anybody looks for a checkpoint there
        self.lock = ranks.together(self._lock)
        try:
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
        """Set up model, optimiser and log, as the checkpoint in the run folder left them."""
        config, ranks = self.config, self.ranks
        self.step, self.best, self.skipped, self.changed = 0, math.inf, 0, []
        resumed, notes = ranks.together(lambda: find_checkpoint(self.out_dir, config.resume)), []
        ranks.check_same(resumed[0]["step"] if resumed else -1, different_checkpoints(self.out_dir))
        if (
            resumed is None or resumed[0]["step"] < config.max_iters
        ):  # a finished run is not compared with anything
            self.place = self._find_place()
        self.model = GPT(config, config.seed)
        if config.init_from and resumed is None:
            notes = [init_from(self.model, config.init_from)]
        self.model.to(self.precision.weights).train()
        if config.parallel == "fsdp":
            shard(self.model, ranks.device)
        else:
            self.model.to(ranks.device)
        self.optimizer = make_optimizer(
            self.model,
            config.learning_rate,
            (config.beta1, config.beta2),
            config.adam_eps,
            config.weight_decay,
        )
        if resumed is not None:
            notes = self._resume(*resumed)
        self.compiled = self.model
        if config.compile or (config.compile is None and ranks.on_cuda):
            torch._dynamo.config.recompile_limit = (
                32  # training and evaluation, in each of a taper's three phases
            )
            self.compiled = torch.compile(self.model, dynamic=False, mode=config.compile_mode)
        replicated = dist.is_initialized() and not is_sharded(self.model)
        self.parallel = replicate(self.compiled) if replicated else self.compiled
        self.names = [name for name, _ in self.model.named_parameters()]
        self.parameters = list(self.model.parameters())
        self.log = RunLog(self.out_dir, dataclasses.asdict(config), config.max_iters, ranks.is_main)
        if self.step < config.max_iters:
            # a schedule that cannot go on raises, and the run in out_dir stays as it is
            self._next_step()
            ranks.together(lambda: self._open_log(resumed is not None))
        end = TaperSchedule(config.taper_warmup, config.taper_end).steps(config.max_iters)[1]
        if config.norm_type == "taper" and end > config.max_iters:
            notes.append(
                f"warning: the taper ends at step {end}, after max_iters={config.max_iters}: "
                "norms remain"
            )
        for note in notes:
            self.log.say(note)

    def _hellaswag(self, tokenizer: Any) -> HellaSwag:
        file = "" if self.config.hellaswag == "auto" else self.config.hellaswag
        return HellaSwag(
            file, self.config.hellaswag_items, tokenizer, self.ranks, self.precision.autocast
        )

    def _find_place(self) -> dict[str, Any]:
        """What the log and checkpoints tell of data, machine and code. Raises DataError where ranks
        differ in data.
        """
        data = " ".join(
            blocks.fingerprint() for blocks in (self.loader.blocks, self.evaluator.blocks)
        )
        differs = (
            f"data_dir={self.config.data_dir}: ranks see different data: "
            "copy the same to each machine"
        )
        self.ranks.check_same(zlib.crc32(data.encode()), DataError(differs))
        return find_place(data, self.ranks)

    def _resume(self, state: dict, path: Path, note: str) -> list[str]:
        """Restore everything; what to tell about it."""
        place = self.ranks.together(lambda: saved_place(state, path))
        if self.place:
            remedy = (
                f"give data_dir={self.config.data_dir} the data that it had, or choose another "
                f"out_dir and --init_from={path}, which trains its weights on any data"
            )
            self.ranks.together(lambda: check_same_data(place, self.place, path, remedy))
        restore(path, state, self.config, self.model, self.optimizer, self.scaler)
        self.step, self.best = state["step"], state["best_val_loss"]
        then, now = (
            json.loads(json.dumps(part))
            for part in (state["config"], dataclasses.asdict(self.config))
        )
        both = sorted(now.keys() & then.keys())
        self.changed = [
            f"{name} {then[name]} -> {now[name]}" for name in both if now[name] != then[name]
        ]
        self.changed += changes(place, self.place)
        notes = [f"not usable: {note}"] if note else []
        notes += [f"resuming from {path}, after step {self.step}"]
        return notes + ([f"changed since then: {', '.join(self.changed)}"] if self.changed else [])

    def _open_log(self, resumed: bool) -> None:
        if not self.ranks.is_main:  # the others log nothing
            return
        config = dataclasses.asdict(self.config)
        try:
            (self.out_dir / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        except OSError as error:
            raise UserError(
                f"out_dir={self.out_dir}: cannot be written ({error.strerror})"
            ) from None
        start = {"n_params": self.model.num_params(), "norm_plan": str(self.model.plan)}
        # report.py names the arm by the keys that are not at their defaults, and knows all norm
        # keys from here
        start["norm_keys"] = keys_of(config["norm_type"])
        start["other_norm_keys"] = sorted(foreign_keys(config["norm_type"]))
        start |= {"tokens_per_step": self.tokens_per_step, **self.place}
        self.log.open(self.step if resumed else None, start, self.changed)
        self.log.say(
            f"{start['n_params']:,} parameters, norm plan {start['norm_plan']}, {start['device']}, "
            f"{self.tokens_per_step:,} tokens a step"
        )

    # ------------------------------------------------------------------------------------- the loop

    def run(self) -> None:
        config, ranks = self.config, self.ranks
        if self.step >= config.max_iters:  # and nothing of the run is touched
            self.log.say(f"finished already: step {self.step} of max_iters={config.max_iters}")
            return self._unlock()
        self.clock = Throughput(self.tokens_per_step)
        if self.step == 0:
            self._calibrate()
            self._evaluate()
        batches = self.loader.batches(
            self.step + 1, ranks.rank, ranks.world_size, pin=ranks.on_cuda
        )
        reports: deque[StepReport] = deque()
        reason = ""
        self.clock.restart()
        while not reason and self.step < config.max_iters:
            self.step += 1
            reports.append(self._train_step(batches))
            self._next_step()
            self._calibrate()
            due_eval = self.step % config.eval_interval == 0 or self.step == config.max_iters
            due_save = due_eval or (
                config.checkpoint_interval and self.step % config.checkpoint_interval == 0
            )
            # On a GPU a report is read when the next step is queued, so that the GPU never waits
            # for the host.
            in_flight = 1 if ranks.on_cuda and not due_save else 0
            while len(reports) > in_flight or (reason and reports):
                reason = self._handle(reports.popleft()) or reason
            if due_eval:
                self._evaluate()
            if due_save or reason:
                self._save(LAST)
                self.clock.restart()
        if not reason and config.sample_tokens:
            self.log.say(self.evaluator.write_sample(self.model, self.out_dir / "samples.txt"))
        speed = self.clock.steady()
        done = f"done: best val loss {self.best:.4f}" + (
            f", {speed / 1000:.1f} k tokens/s" if speed else ""
        )
        self.log.say(reason or done)
        self.log.close(reason or "done", step=self.step, tok_per_s=speed)
        self._unlock()

    def _next_step(self) -> None:
        """The schedules of the norms move on; optimiser state follows a parameter's role."""
        before = is_tapered(self.model)
        for source, target in self.model.set_step(self.step + 1, self.config.max_iters):
            carry_state(self.optimizer, source, target)
        if is_tapered(self.model) and not before:
            self.best = math.inf  # a model that still had its norms was another one

    def _calibrate(self) -> None:
        """Where coupled_calibrate says so, set alpha by a training batch, the same on any number of
        ranks.
        """
        if self.config.coupled_calibrate and self.step % self.config.coupled_calibrate == 0:
            x, _ = self.loader.blocks.batch(self.loader.sample_ids(self.step + 1, 0))
            with self.precision.autocast():
                calibrate(self.model, x.to(self.ranks.device))

    def _train_step(self, batches: Iterator[tuple[Tensor, Tensor]]) -> StepReport:
        """Forward and backward of this rank's micro-batches, then the update.

        Nothing here waits for the device.
        """
        config, ranks = self.config, self.ranks
        lr = learning_rate(
            self.step,
            config.lr_schedule,
            config.warmup_iters,
            config.max_iters,
            config.learning_rate,
            config.min_lr,
            config.wsd_decay,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        # Dropout's random stream is a function of (seed, step, rank): nothing can disturb it, no
        # resume lose it.
        torch.manual_seed(zlib.crc32(f"{config.seed} {self.step} {ranks.rank}".encode()))
        micro_batches = config.gradient_accumulation_steps // ranks.world_size
        losses = 0.0
        for micro in range(micro_batches):
            x, y = (part.to(ranks.device, non_blocking=True) for part in next(batches))
            with accumulate(self.parallel, last=micro == micro_batches - 1):
                losses = losses + micro_step(self.parallel, x, y, self.precision, micro_batches)
        # One small reduction a step: both losses, a wish to stop, and whose loss is not finite
        shared = torch.zeros(3 + ranks.world_size, dtype=losses.dtype, device=ranks.device)
        shared[:2] = losses / ranks.world_size
        shared[2] = float(bool(self.stop_signal.name))
        shared[3 + ranks.rank] = ~torch.isfinite(losses.sum())
        ranks.sum(shared)
        norms = guarded_update(
            self.optimizer, self.scaler, self.parameters, config.grad_clip, shared[3:].sum()
        )
        return StepReport(self.step, lr, torch.cat([shared, norms]))

    def _handle(self, report: StepReport) -> str:
        """Log a step; why to stop after it, or "". Raises NonFiniteError."""
        loss, aux, stops, *values = report.read()
        bad_ranks, (grad_norm, *norms) = (
            values[: self.ranks.world_size],
            values[self.ranks.world_size :],
        )
        self.clock.tick()
        self.skipped = 0 if math.isfinite(grad_norm) else self.skipped + 1
        culprit = ""
        if any(bad_ranks):
            culprit = f"the loss on rank {next(rank for rank, bad in enumerate(bad_ranks) if bad)}"
        elif self.skipped >= (MAX_SKIPPED if self.scaler.is_enabled() else 1):
            names = [
                name
                for name, norm in zip(self.names, norms, strict=True)
                if not math.isfinite(norm)
            ]
            culprit = f"the gradient of {names[0]}" if names else "the global gradient norm"
        if culprit:
            reason = f"step {report.step}: {culprit} is not finite"
            self.log.close(reason, step=report.step)
            saved = (self.out_dir / LAST).exists()
            kept = (
                f"the last checkpoint in {self.out_dir} is good"
                if saved
                else "and there is no checkpoint yet"
            )
            raise NonFiniteError(
                f"{reason}; it was not applied, {kept}: lower learning_rate, or look at the data"
            )
        if report.step % self.config.log_interval == 0 or report.step in (1, self.config.max_iters):
            speed, mfu = self.clock.window(), None
            if speed and self.peak_flops:
                mfu = (
                    speed * self.model.flops_per_token() / (self.peak_flops * self.ranks.world_size)
                )
            more = {"aux_loss": aux} if aux else {}
            self.log.step(
                step=report.step,
                loss=loss,
                lr=report.lr,
                grad_norm=grad_norm,
                tok_per_s=speed,
                mfu=mfu,
                tokens=report.step * self.tokens_per_step,
                **more,
            )
        return (
            f"stopped by {self.stop_signal.name or 'a signal'} after step {self.step}"
            if stops
            else ""
        )

    def _evaluate(self) -> None:
        last = self.step == self.config.max_iters
        val_loss = self.evaluator.val_loss(self.compiled)
        bits = self.evaluator.bits_per_byte(val_loss)
        gate = taper_gate(self.model)
        more = ({"bits_per_byte": bits} if bits else {}) | ({} if gate is None else {"gate": gate})
        self.log.event("eval", step=self.step, val_loss=val_loss, **more)
        shown = f" nats per token, {bits:.4f} bits per byte" if bits else ""
        shown += f", taper gate {gate:.3g}" if gate is not None else ""
        self.log.say(f"step {self.step}  val loss {val_loss:.4f}{shown}")
        self.log.event("rms", step=self.step, **self.evaluator.rms_stats(self.model).record())
        # Before any checkpoint of this step, so that a run which is killed here scores again when
        # it resumes.
        scores = self.evaluator.hellaswag(self.model, self.step, last)
        if scores is not None and self.ranks.is_main:
            self.log.event("hellaswag", step=self.step, **scores.summary())
            self.log.say(f"step {self.step}  HellaSwag {scores}")
            scores.write(self.out_dir / ITEMS_FILE)
        if self.step and val_loss < self.best:
            self.best = val_loss
            self._save(BEST)

    def _save(self, name: str) -> None:
        save_checkpoint(
            self.out_dir / name,
            {
                "step": self.step,
                "config": dataclasses.asdict(self.config),
                "meta": self.meta,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
                "best_val_loss": self.best,
                "place": self.place,
            },
            self.ranks,
        )


def main(argv: list[str]) -> None:
    config, _ = parse_args(TrainConfig, argv, __doc__)
    Trainer(config).run()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    run_program(main)
