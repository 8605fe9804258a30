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
Hugging Face. The last event of log.jsonl has a summary.
"""

import contextlib
import dataclasses
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from common.distributed import Ranks, replicate
from common.environment import (
    DTYPES,
    Precision,
    faster_float32_products,
    find_device,
    find_dtype,
)
from common.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    run_program,
)
from common.fingerprint import fingerprint
from common.output import RUN_CONFIG, check_apart, check_replaceable
from configurator import key, parse_args
from data.documents import input_files, newest_commit
from hf import weights
from load import load_config, load_model
from model import GPT, cross_entropy
from norm_types import SHARED
from posthoc import adapters
from posthoc.coupling import Calibration, first_plan, own_statistics, spell, suggest_first, view
from posthoc.student import Pair, bytes_of, finished, make_student
from posthoc.text import open_stream, shuffled, text_fingerprint
from training.checkpoint import BEST, DISTILLING
from training.loop import Loop, Objective
from training.optim import check_optimizer_keys, make_optimizer
from training.run import FREE_AT_THE_END, LoopKeys, RunFolder, write_model

# Calibration takes every 16th of the first blocks of the text, if there are that many, so that its
# blocks are of many documents.
SPREAD = 16
# Keys that may differ when a run is resumed.
FREE_KEYS = FREE_AT_THE_END | {"max_iters", "eval_interval", "checkpoint_interval", "device"}


@dataclass(frozen=True)
class TextKeys:
    """Text"""

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
    # Two tokens at least: in a block of one there is no next token to predict.
    block_size: int = key(1024, "tokens of a block, at most the teacher's context", least=2)
    batch_size: int = key(8, "blocks in a micro-batch", least=1)
    gradient_accumulation_steps: int = key(8, "micro-batches in a step, over all ranks", least=1)
    calibration_blocks: int = key(
        32,
        "blocks of the training text that alpha and coupled_first are chosen on",
        least=1,
    )
    eval_blocks: int = key(64, "held-out blocks", least=1)


@dataclass(frozen=True)
class StudentKeys:
    """Teacher and student"""

    teacher: str = key(
        "",
        "the model: run folder, checkpoint, Hugging Face folder or hub name, random:qwen3-0.6b, "
        "...",
    )
    norm_plan: str = key("", "the student's plan, e.g. 'RR Rs Rs R' ('': coupled_first)")
    coupled_first: int | None = key(
        None,
        "standard blocks at the start (auto: fewest whose KL is within the budget)",
        least=0,
    )
    alpha: float | None = key(
        None,
        "divides every shared statistic (auto: by least squares, a number for each)",
        least=1e-6,
        most=1e6,
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
    checkpoint_activations: bool = key(True, "recompute each block's activations in backward")
    estimate: bool = key(False, "print the memory estimate and stop")
    export: bool | None = key(
        None, "write hf/, a Hugging Face folder, at the end (auto: if the teacher was one)"
    )


@dataclass(frozen=True)
class DistillConfig(LoopKeys, TextKeys, StudentKeys):
    """Every key of distill.py. The defaults are the paper's where it gives a value."""

    out_dir: str = key("out/distill", "run folder")
    max_iters: int = key(1000, "optimiser steps", least=1)
    # AdamW's steps are of this size, however small the gradient is. Near the teacher it is small,
    # and a higher rate leaves noise (docs/log.md).
    learning_rate: float = key(1e-4, "highest learning rate", least=1e-30, most=1000.0)
    min_lr: float = key(
        0.0, "lowest learning rate, at the end of the schedule", least=0, most=1000.0
    )
    warmup_iters: int = key(20, "steps of linear warm-up", least=0)
    weight_decay: float = key(0.0, "of AdamW", least=0, most=1000.0)
    eval_interval: int = key(100, "steps between evaluations and checkpoints", least=1)
    dtype: str = key(
        "auto",
        "of the computation and of frozen weights (auto: bfloat16 on CUDA)",
        ("auto", *DTYPES),
    )

    def __post_init__(self) -> None:
        if not self.teacher:
            raise ConfigError("teacher: name the model to start from, --teacher=MODEL")
        check_optimizer_keys(self)
        if self.norm_plan and self.coupled_first is not None:
            raise ConfigError(
                f"norm_plan={self.norm_plan} and coupled_first={self.coupled_first} both name the "
                "plan: give one (--coupled_first=auto cancels a config file's)"
            )


class Distillation(Objective):
    """Train a student to predict what its teacher predicts: the objective of a Loop.

    Args:
        config: every key of the run.
        text: its blocks.
        pair: teacher and student.
        plan, alpha: the student's norm plan, and alpha at each of its positions.
        ranks: this process and the others.
        precision: autocast.
    """

    checkpoint = DISTILLING

    def __init__(
        self,
        config: DistillConfig,
        text: "Text",
        pair: Pair,
        plan: str,
        alpha: tuple[float, ...],
        ranks: Ranks,
        precision: Precision,
    ):
        super().__init__(config, ranks, pair.student, text.length)
        self.text = text
        self.pair = pair
        self.plan = plan
        self.alpha = alpha
        self.precision = precision
        self.calibrated_kl = 0.0  # held-out KL before training
        self.forward = pair

    def batches(self, first_step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's micro-batches (B, T) from `first_step` on, for ever, twice each."""
        config, ranks = self.config, self.ranks
        # Steps count from 1, so the first blocks of the first epoch train nothing.
        skipped = first_step * config.batch_size * config.gradient_accumulation_steps
        blocks = islice(self.text.epochs(), skipped, None)
        for number in count():
            batch = list(islice(blocks, config.batch_size))
            if number % ranks.world_size == ranks.rank:
                x = torch.stack(batch)
                yield x, x

    def state(self) -> dict[str, Any]:
        """Return its entries of a checkpoint."""
        return {
            "plan": self.plan,
            "alpha": self.alpha,
            "commit": self.text.commit,
            "calibrated_kl": self.calibrated_kl,
            "model": {name: p.detach() for name, p in self.parameters.items()},
        }

    def restore(self, state: dict[str, Any], path: Path) -> None:
        """Take what is trained from a checkpoint. Raises CheckpointError."""
        shapes = {name: tensor.shape for name, tensor in state["model"].items()}
        if shapes != {name: parameter.shape for name, parameter in self.parameters.items()}:
            raise CheckpointError(
                f"{path}: its weights are not those of this student: choose another out_dir"
            )
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(state["model"][name])
        self.calibrated_kl = state["calibrated_kl"]

    def evaluate(self, loop: Loop) -> None:
        """Measure the student on the held-out blocks, and log it."""
        kl = self.measure(loop, self.pair, "eval")["kl"]
        if loop.step == 0:
            self.calibrated_kl = kl

    @torch.no_grad()
    def measure(self, loop: Loop, pair: Pair, event: str) -> dict[str, float]:
        """Measure a student on the held-out blocks, and log it as `event`.

        Returns:
            kl: KL(teacher || student), nats per token, without the first position of each block;
            kl_first: the same at first positions only; val_loss and teacher_val_loss: nats per
            token.
        """
        teacher = pair.frozen[0]
        sums = np.zeros(4)  # of tokens and not of batches: the last batch may be smaller
        for ids in self.text.val.split(self.config.batch_size):
            ids = ids.to(self.ranks.device)  # (B, T)
            with self.precision.autocast():
                x, taught = pair.hidden(ids)  # (B, T, C) each
                token_kl = pair.token_kl(x, taught).double().cpu()  # (B, T)
                student_loss = total_loss(pair.student, x, ids)
                teacher_loss = total_loss(teacher, taught, ids)
            later = float(token_kl[:, 1:].sum())
            first = float(token_kl[:, 0].sum())
            sums += later, first, student_loss, teacher_loss
        blocks = len(self.text.val)
        tokens = blocks * (self.text.length - 1)
        means = (sums / (tokens, blocks, tokens, tokens)).tolist()
        found = dict(zip(("kl", "kl_first", "val_loss", "teacher_val_loss"), means, strict=True))
        loop.log.event(event, step=loop.step, **found)
        merged = ", merged as it will be saved" if event == "merged" else ""
        loop.log.say(
            f"step {loop.step}{merged}  held-out KL {found['kl']:.3e}  val loss "
            f"{found['val_loss']:.4f}, teacher {found['teacher_val_loss']:.4f}"
        )
        return found

    def finish(self, loop: Loop) -> dict[str, Any]:
        """Measure the student as it will be used, write it, and return values for the log."""
        if not self.ranks.is_main:
            return {}
        peak = torch.cuda.max_memory_allocated() if self.ranks.on_cuda else None
        student = finished(self.pair.student)
        found = self.measure(loop, Pair(self.pair.frozen[0], student), "merged")
        found["calibrated_kl"] = self.calibrated_kl
        if found["kl"] > self.calibrated_kl:
            loop.log.say(
                "warning: it is further from the teacher than before training (KL "
                f"{self.calibrated_kl:.3e}): train longer, or lower learning_rate"
            )
        student = student.cpu()
        folder = loop.folder.path
        write_model(student, folder, loop.step, "the run is saved")
        is_of_hf = student.meta.get("tokenizer") == "hf"
        is_wanted = is_of_hf if self.config.export is None else self.config.export
        if is_wanted:
            new = folder / "hf.new"
            shutil.rmtree(new, ignore_errors=True)  # of a run that was killed below
            weights.export_hf(student, new)
            shutil.rmtree(folder / "hf", ignore_errors=True)
            new.rename(folder / "hf")
        loop.log.say(
            f"wrote {folder}"
            + (f", and {folder / 'hf'} for transformers" if is_wanted else "")
            + f"; its gains hold alpha, of each norm {', '.join(f'{a:.4g}' for a in self.alpha)}"
        )
        summary = {
            **found,
            "norm_plan": self.plan,
            "alpha": list(self.alpha),
            "step": loop.step,
            "tok_per_s": loop.clock.steady(),
            "peak_bytes": peak,
        }
        return {"peak_bytes": peak, "exported": is_wanted, "summary": summary}


class Text:
    """The text of a run as blocks of token ids (T,): those held out, and those to train on.

    Args:
        config: every key of the run.
        teacher: its tokenizer and context count.
        ranks: all read the same commit.
        commit: of a data set of the hub, which every epoch reads; None for its newest.

    Raises:
        DataError: the text is too short.
    """

    def __init__(
        self, config: DistillConfig, teacher: GPT, ranks: Ranks, commit: str | None = None
    ):
        if not commit and not config.local and config.dataset != "random":
            asked = ranks.together(lambda: newest_commit(config.dataset) if ranks.is_main else None)
            commit = ranks.of_main(asked)
        self.commit = commit
        self.config = config
        self.meta = teacher.meta
        self.n_vocab = teacher.n_vocab
        self.length = min(config.block_size, teacher.config.block_size)
        text = self._open(config.local)
        if config.val:
            val = list(islice(self._open(config.val), config.eval_blocks))
            self.n_held_out = 0  # blocks at the start of the training text
        else:
            val = list(islice(text, config.eval_blocks))
            self.n_held_out = len(val)
        # They train too.
        first = list(islice(text, SPREAD * config.calibration_blocks))
        if not first or not val:
            raise DataError(
                f"{config.local or config.dataset}: too little text for {config.eval_blocks} "
                f"held-out blocks of {self.length} tokens, and others to train on: "
                "give more, or --val=FILE"
            )
        stride = math.ceil(len(first) / config.calibration_blocks)
        self.calibration = torch.stack(first[::stride])  # (N, T)
        self.val = torch.stack(val)  # (N, T)

    def _open(self, files: str) -> Iterator[Tensor]:
        """Open a text as blocks (T,). `files` as for the key `local`."""
        return open_stream(self.config, self.meta, self.n_vocab, self.length, files, self.commit)

    def epochs(self) -> Iterator[Tensor]:
        """Yield the blocks (T,) of the training text, epoch after epoch in different orders."""
        config = self.config
        for epoch in count():
            blocks = islice(self._open(config.local), self.n_held_out, None)
            yield from shuffled(blocks, config.shuffle, config.seed + epoch)

    def fingerprint(self) -> str:
        """Name the text, so that runs on different texts can be told apart."""
        return text_fingerprint([self.calibration, self.val], [self.config.local, self.config.val])


# ------------------------------------------------------------------------------------ setting it up


def distil(config: DistillConfig, ranks: Ranks) -> None:
    """Distil, or go on with, the run that `config` describes."""
    dtype = find_dtype(config.dtype, ranks.device)
    config = dataclasses.replace(config, dtype=str(dtype).removeprefix("torch."))
    with RunFolder(config, ranks) as run:
        found = run.find(config.resume, (DISTILLING,))
        end = run.end_of(config.max_iters)
        if end and ranks.of_main(is_complete(run.path, end, config.export)):
            run.repeat(config)
            return
        if found is not None:
            check_resumable(run, config)
        set_up(config, run).run()


def set_up(config: DistillConfig, run: RunFolder) -> Loop:
    """Load the teacher, make the student, and open the log."""
    ranks, found = run.ranks, run.found
    precision = Precision(config.dtype, ranks.device)
    check_replaceable(run.path / "config.json", RUN_CONFIG)
    name_of_teacher, teacher = load_teacher(config, ranks, precision)
    # A run that goes on keeps to the commit of the data set that it began with.
    commit = None if found is None else found.state.get("commit")
    text = Text(config, teacher, ranks, commit)
    # Before the plan is chosen, which takes long: another teacher or text is refused.
    remedy = "give teacher, local, val and dataset what they were, or choose another out_dir"
    run.compare(config, f"{name_of_teacher} {text.fingerprint()}", remedy)
    if found is not None:
        plan, alpha = found.state["plan"], found.state["alpha"]
    else:
        # Ranks may sum in different orders, and so choose different alphas.
        plan, alpha = ranks.of_main(choose(config, teacher, text))
    pair = Pair(teacher, make_student(teacher, plan, alpha, config))
    objective = Distillation(config, text, pair, plan, alpha, ranks, precision)
    optimizer = make_optimizer(
        nn.ParameterList(objective.parameters.values()),
        config.learning_rate,
        (config.beta1, config.beta2),
        config.adam_eps,
        config.weight_decay,
    )
    loop = Loop(objective, config, run, optimizer, precision)
    # Now, because DDP copies the weights of rank 0, which may be those of a checkpoint.
    objective.forward = replicate(pair)
    trained = sum(parameter.numel() for parameter in objective.parameters.values())
    saved = plan.count("s")
    line = f"norm plan {plan}, {saved} statistics saved, {trained:,} parameters train"
    run.notes.insert(0, line)
    start = {"norm_plan": plan, "alpha": list(alpha), "trained_parameters": trained}
    # Last: if anything before fails, the log in out_dir is untouched.
    run.open_log(config, start)
    if ranks.on_cuda:
        torch.cuda.reset_peak_memory_stats()
    return loop


def check_resumable(run: RunFolder, config: DistillConfig) -> None:
    """Check that the run goes on with a checkpoint of distill.py, and with its settings.

    Raises CheckpointError.
    """
    state, path = run.found.state, run.found.path
    if not {"plan", "alpha", "calibrated_kl"} <= state.keys():
        raise CheckpointError(f"{path}: not a checkpoint of distill.py: choose another out_dir")
    if changed := run.changed_keys(config, FREE_KEYS):
        raise CheckpointError(
            f"{path} was made with other settings ({', '.join(changed)}): use its settings, or "
            "another out_dir"
        )


def is_complete(folder: Path, end: dict[str, Any], export: bool | None) -> bool:
    """Are all files of a finished run there? `export` is the key."""
    wants_export = end.get("exported") if export is None else export
    files = [BEST, "hf"] if wants_export else [BEST]
    return all((folder / name).exists() for name in files)


def load_teacher(config: DistillConfig, ranks: Ranks, precision: Precision) -> tuple[str, GPT]:
    """Load the teacher, frozen and in the precision of the run.

    Returns:
        Its fingerprint, and the model.
    """
    device = ranks.device
    # Random weights are drawn on the device.
    is_random = config.teacher.startswith("random:")
    with device if is_random else contextlib.nullcontext():
        teacher = load_model(config.teacher)
    if device.type == "cpu":
        faster_float32_products(teacher.config.n_embd, teacher.config.head_channels)
    # Before its precision changes: the same teacher has one name in every precision.
    name = fingerprint("teacher", bytes_of(teacher))
    # Full fine-tuning starts from the teacher's weights, and must not lose their last bits.
    dtype = precision.weights
    if precision.is_low and config.method != "full":
        dtype = precision.dtype
    teacher = teacher.to(dtype).to(device).requires_grad_(False)
    return name, own_statistics(teacher, f"teacher={config.teacher}")


def choose(config: DistillConfig, teacher: GPT, text: Text) -> tuple[str, tuple[float, ...]]:
    """Choose norm plan and alpha.

    The plan is that of the config; by default the one with the fewest standard blocks whose KL is
    within the budget.
    """
    calibration = Calibration(teacher, text.calibration)
    plan = config.norm_plan
    if not plan:
        first = config.coupled_first
        if first is None:
            first, _ = suggest_first(calibration, config.budget, per_layer=True)
        blocks = teacher.config.n_layer
        if first > blocks:
            raise ConfigError(f"coupled_first={first}: the teacher has {blocks} blocks")
        plan = first_plan(blocks, first)
    view(teacher, plan)  # raises for a plan that does not fit
    letters = plan.replace(" ", "")
    alpha = calibration.alpha(plan)
    if config.alpha is not None:
        alpha = tuple(config.alpha if letter == SHARED else 1.0 for letter in letters)
    return spell(letters), alpha


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
    shape = load_config(config.teacher)
    low = Precision(config.dtype, find_device(config.device)).is_low
    tokens = config.batch_size * min(config.block_size, shape.block_size)
    parts = adapters.memory(
        shape, config.method, config.rank, tokens, low, config.checkpoint_activations
    )
    if int(os.environ.get("RANK", 0)) == 0:
        if config.block_size > shape.block_size:
            print(f"block_size: {shape.block_size}, the teacher's context")
        print(adapters.memory_line(parts), flush=True)
    if config.estimate:
        return
    with Ranks.start(config.device, config.gradient_accumulation_steps) as ranks:
        distil(config, ranks)


if __name__ == "__main__":
    run_program(main)
