"""Train a GPT with the normalisation of your choice.

    # one process, on a GPU or a CPU; any key can be changed
    python train.py config/demo.py
    python train.py config/demo.py --norm_type=rms --out_dir=out/rms

    # 8 GPUs of one machine: each holds the whole model (DDP), or a share of a larger one (FSDP)
    torchrun --standalone --nproc_per_node=8 train.py config/coupled.py
    torchrun --standalone --nproc_per_node=8 train.py config/coupled.py --parallel=fsdp

    # two machines
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 \\
      train.py config/coupled.py

A run writes config.json, log.jsonl, ckpt_last.pt, ckpt_best.pt and samples.txt into out_dir. The
same command resumes it. SIGTERM, Ctrl-C and a closed terminal finish the step, save a checkpoint,
and exit with 0.

The keys are those of TrainConfig. Trainer is the run: its constructor lists what is set up, in
order, and `run` is the loop.
"""

import common.interrupt  # noqa: F401

import contextlib
import dataclasses
import itertools
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
from common.environment import (
    DTYPES,
    Precision,
    faster_float32_products,
    machine_memory,
    peak_flops,
)
from common.errors import CheckpointError, ConfigError, UserError, cannot_write, run_program
from common.lock import FolderLock
from common.old_keys import chosen_then, device_kind
from common.output import RUN_CONFIG, check_apart, check_replaceable
from configurator import key, parse_args
from data.shards import read_meta
from evals.hellaswag import ITEMS_FILE, HellaSwag
from load import init_from
from model import GPT, GPTConfig, check_memory
from norm_plan import foreign_keys, keys_of
from taper import TaperSchedule, is_tapered, taper_gate, tapers
from training.checkpoint import (
    BEST,
    LAST,
    FoundCheckpoint,
    different_checkpoints,
    find_checkpoint,
    first_not_finite,
    moments_of,
    restore,
    save_checkpoint,
)
from training.choices import choose, keep, slow_bfloat16
from training.dataloader import Blocks, TrainLoader, merge
from training.evaluation import Evaluator
from training.log import RunLog, Throughput, last_event
from training.optim import (
    Optimizer,
    carry_state,
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
from training.stability import Stability
from training.step_report import PendingReport, StepReport, count_bad, pack
from training.stream import calibrate
from training.tracker import TRACKERS, check_tracker

# float16: after a step with infinite gradients, GradScaler skips the update and lowers the loss
# scale. If this many steps in a row are skipped, the cause is something else, and the run stops.
MAX_SKIPPED = 20


@dataclass(frozen=True)
class TrainConfig(GPTConfig):
    """Every key of a training run. The defaults are nanoGPT's for GPT-2 124M."""

    vocab_size: int = key(
        0,
        "rows of the embedding (0: the data's vocabulary, up to a multiple of 64)",
        least=0,
    )

    # Files
    out_dir: str = key("out/run", "run folder")
    data_dir: str = key("data/fineweb_edu", "folder with token shards")
    init_from: str = key(
        "", "start from the weights of this model: run, checkpoint, Hugging Face name ('': scratch)"
    )
    resume: str = key(
        "auto", "auto: continue the run in out_dir if there is one; never; or a checkpoint's path"
    )

    # Length and batch
    max_iters: int = key(600000, "optimiser steps", least=1)
    batch_size: int = key(12, "sequences in a micro-batch", least=1)
    gradient_accumulation_steps: int = key(40, "micro-batches in a step, over all ranks", least=1)

    # Learning rate
    learning_rate: float = key(6e-4, "highest learning rate", most=1000.0)
    min_lr: float = key(
        6e-5, "lowest learning rate, at the end of the schedule", least=0, most=1000.0
    )
    warmup_iters: int = key(2000, "steps of linear warm-up; the first is not zero", least=0)
    lr_schedule: str = key(
        "cosine", "wsd: constant, then linear decay", ("cosine", "wsd", "constant")
    )
    wsd_decay: float = key(0.2, "wsd: share of max_iters that the decay takes", least=0)

    # Optimiser
    optimizer: str = key(
        "adamw",
        "muon updates the blocks' matrices (q, k, v, gate and up apart), AdamW all the rest",
        ("adamw", "muon"),
    )
    weight_decay: float = key(
        0.1,
        "on tensors of two dimensions or more; each step multiplies it by its lr",
        least=0,
        most=1000.0,
    )
    decay_per_step: float = key(
        0.0,
        "sets weight_decay to decay_per_step / learning_rate: a sweep of learning_rate then keeps "
        "lr weight_decay, which follows the schedule (0: off)",
        least=0,
        most=1.0,
    )
    beta1: float = key(0.9, "of AdamW", least=0)
    beta2: float = key(0.95, "of AdamW", least=0)
    adam_eps: float = key(1e-8, "of AdamW", least=1e-30, most=1.0)
    grad_clip: float = key(
        1.0, "largest global gradient norm (0: no clipping)", least=1e-6, zero=True
    )

    # Evaluation, log and checkpoints
    eval_interval: int = key(2000, "steps between evaluations", least=1)
    eval_tokens: int = key(
        2_097_152, "val_loss is over this many tokens of the val shards, always the same", least=1
    )
    full_val: bool = key(
        False, "at the end measure val_loss_full: the whole val split, every document"
    )
    log_interval: int = key(10, "steps between log lines", least=1)
    checkpoint_interval: int = key(0, "steps between checkpoints (0: at every evaluation)", least=0)
    sample_tokens: int = key(300, "length of the text sample at the end (0: none)", least=0)

    # Machine
    seed: int = key(1337, "of initial weights, data order and dropout", least=0, most=(1 << 32) - 1)
    device: str = key(
        "auto", "auto: the first available of cuda, mps, cpu", ("auto", "cpu", "cuda", "mps")
    )
    dtype: str = key(
        "auto",
        "of the computation; weights are float32 (auto: bfloat16 on CUDA and where a CPU gains)",
        ("auto", *DTYPES),
    )
    parallel: str = key(
        "ddp",
        "on several ranks: each holds the whole model (ddp), or a share of it (fsdp)",
        ("ddp", "fsdp"),
    )
    compile: bool | None = key(None, "torch.compile (auto: on CUDA, and in long runs on a CPU)")
    merge_micro_batches: int = key(
        0,
        "micro-batches of a rank computed at once (0: on a CPU up to 8,192 tokens, else 1)",
        least=0,
    )
    jobs: int = key(
        1,
        "runs side by side on this machine, as sweep.sh says: above 1 no speed is judged",
        least=1,
    )

    # HellaSwag
    hellaswag: str = key(
        "off", "score HellaSwag at the end: off, auto (downloads the items), or a file of items"
    )
    hellaswag_items: int = key(
        0, "score this many items, spread evenly over the file (0: all)", least=0
    )

    # For report.py: what must be declared before the results are known
    study: str = key("", "the study and the hash of its plan; runs of others are not compared")
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

    # Experiment trackers
    tracker: str = key("off", "log to an experiment tracker too", TRACKERS)
    tracker_project: str = key("nanonorm", "project in Weights & Biases or Trackio")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_optimizer_keys(self)
        if not self.out_dir:
            raise ConfigError("out_dir is empty: name a run folder")
        if not 0 <= self.wsd_decay < 1:
            raise ConfigError(f"wsd_decay={self.wsd_decay}: must be at least 0 and below 1")
        if self.decay_per_step and self.weight_decay != TrainConfig.weight_decay:
            raise ConfigError(
                f"weight_decay={self.weight_decay} and decay_per_step={self.decay_per_step} both "
                f"set the weight decay: leave weight_decay at {TrainConfig.weight_decay}"
            )
        if self.optimizer == "muon" and self.parallel == "fsdp":
            raise ConfigError(
                "optimizer=muon needs whole matrices, which parallel=fsdp divides among ranks: use "
                "parallel=ddp or optimizer=adamw"
            )
        at_once = self.merge_micro_batches
        if at_once and self.gradient_accumulation_steps % at_once:
            raise ConfigError(
                f"merge_micro_batches={at_once} does not divide "
                f"gradient_accumulation_steps={self.gradient_accumulation_steps}: change one of "
                "them, or leave it at 0"
            )
        if self.coupled_impl != "scale" and self.dtype == "float16":
            raise ConfigError(
                f"coupled_impl={self.coupled_impl} multiplies the stream before it is normalised, "
                "which can overflow float16: use coupled_impl=scale, or dtype=bfloat16"
            )
        # Raises if a taper would end before its warm-up does. Other norm types have its defaults.
        TaperSchedule(self.taper_warmup, self.taper_end).steps(self.max_iters)

    @property
    def decay(self) -> float:
        """The weight decay that the optimiser gets."""
        if self.decay_per_step:
            return self.decay_per_step / self.learning_rate
        return self.weight_decay


class NonFiniteError(UserError):
    """A loss or a gradient became NaN or infinite."""

    on_every_rank = True


class Trainer:
    """One training run: the constructor sets it up, `run` does it."""

    def __init__(self, config: TrainConfig):
        self.config = config
        self.out_dir = Path(config.out_dir)
        self.step = 0  # steps done; the first one is step 1
        self.best = math.inf  # lowest val loss so far
        self.logged_until = 0  # the last step that the log of a resumed run must have
        self.skipped = 0  # steps in a row whose gradients were not finite
        self.stability = Stability(config.grad_clip)
        self.provenance: dict[str, Any] = {}  # data, machine and code: training/provenance.py
        self.lacks_end = False  # all steps were done before, but the process was killed then
        self.then: dict[str, Any] = {}  # the provenance of the run that is resumed
        self.changed: list[str] = []  # what differs from the run that is resumed
        self.notes: list[str] = []  # lines for people, shown once the log is open
        self.choice = ""  # what stands for `auto`, and why: the first line for people

        self.stop_signal = StopSignal()
        self._join_ranks()
        is_main = self.ranks.is_main  # it logs, and locks the folder, for all ranks
        self.ranks.together(lambda: check_tracker(vars(config), active=is_main))
        self._open_data()
        # No other process may be in the run folder when we look for a checkpoint there.
        self.lock = self.ranks.together(
            lambda: FolderLock(self.out_dir, lambda: self.stop_signal.name, active=is_main)
        )
        try:
            found = self._find_checkpoint()
            self.lacks_end = self._lacks_end(found)
            self._choose(found)
            self._make_evaluator()
            self._find_provenance(found)
            self._build_model(found)
            # FSDP replaces the parameters, so the optimiser is made after it.
            self._shard()
            self._make_optimizer()
            self._resume(found)
            # DDP goes around the compiled model.
            self._compile()
            self._replicate()
            self._prepare_norms()
            # Last: if anything before fails, the log in out_dir is untouched.
            self._start_log(found)
        except BaseException:
            self.lock.release()
            raise

    def _join_ranks(self) -> None:
        """Join the other processes of this run, and find the device."""
        config = self.config
        # Raises if the ranks do not divide the micro-batches of a step.
        self.ranks = Ranks.start(config.device, config.gradient_accumulation_steps)
        if self.ranks.device.type == "cpu":
            # A global setting of torch, so it comes before anything is computed.
            faster_float32_products(config.n_embd, config.head_channels)
        if config.parallel == "fsdp" and not dist.is_initialized():
            raise ConfigError("parallel=fsdp divides the model among ranks: start it with torchrun")

    def _open_data(self) -> None:
        """Open the token shards, and complete the config with the vocabulary of the data."""
        self.meta = read_meta(self.config.data_dir)
        if not self.meta and not self.config.vocab_size:
            self.notes.append(
                f"{self.config.data_dir} has no meta.json and no meta.pkl: its tokens are taken "
                "for GPT-2's"
            )
        self.config = with_vocabulary(self.config, self.meta.get("vocab_size", 0))
        config = self.config
        # The embedding may have more rows than there are tokens. An id beyond n_vocab is an error.
        n_vocab = config.n_vocab or config.vocab_size
        train = Blocks(config.data_dir, "train", config.block_size, n_vocab)
        self.val_blocks = Blocks(config.data_dir, "val", config.block_size, n_vocab)
        micro_batches = config.gradient_accumulation_steps
        self.loader = TrainLoader(train, config.batch_size, micro_batches, config.seed)
        # micro_batches counts over all ranks, so this does too.
        self.tokens_per_step = config.batch_size * micro_batches * config.block_size
        # To save an FSDP run, rank 0 gathers weights and both moments, 4 bytes each.
        of_weight = 12 if config.parallel == "fsdp" else 4
        self.ranks.together(lambda: check_memory(config, of_weight))
        check_batch_fits(config, self.ranks.device)

    def _make_evaluator(self) -> None:
        """Prepare the measurements. Raises now, not at the end, if HellaSwag cannot be scored."""
        # The evaluator gets what makes the scorer: training/ does not import evals/.
        make_scorer = None
        if self.config.hellaswag != "off":
            make_scorer = self._hellaswag_scorer
        self.evaluator = Evaluator(
            self.config,
            self.val_blocks,
            self.meta,
            self.ranks,
            self.precision.autocast,
            make_scorer,
        )
        if self.evaluator.no_tokenizer:
            self.notes.append(f"no text sample and no bits per byte: {self.evaluator.no_tokenizer}")

    def _hellaswag_scorer(self, tokenizer: Any) -> HellaSwag:
        """Make what scores HellaSwag; downloads or reads the items."""
        config = self.config
        file = "" if config.hellaswag == "auto" else config.hellaswag
        return HellaSwag(
            file, config.hellaswag_items, tokenizer, self.ranks, self.precision.autocast
        )

    def _find_checkpoint(self) -> FoundCheckpoint | None:
        """Find the checkpoint to resume from, the same on every rank."""
        resume = self.config.resume
        found = self.ranks.together(lambda: find_checkpoint(self.out_dir, resume))
        # -1 for no checkpoint: on that, too, the ranks must agree.
        step = -1 if found is None else found.state["step"]
        self.ranks.check_same(step, different_checkpoints(self.out_dir))
        return found

    def _lacks_end(self, found: FoundCheckpoint | None) -> bool:
        """Was the run killed between its last checkpoint, `found`, and its `end` event?"""
        log = self.out_dir / "log.jsonl"
        lacks = False
        if found is not None and found.path.parent == self.out_dir and log.exists():
            is_last = found.state["step"] == self.config.max_iters
            lacks = is_last and last_event(log).get("reason") != "done"
        # As the main rank sees it: others may not have the folder.
        flag = torch.tensor(float(lacks and self.ranks.is_main), device=self.ranks.device)
        return bool(self.ranks.sum(flag))

    def _choose(self, found: FoundCheckpoint | None) -> None:
        """Replace what the config leaves to `auto`: by a rule, or by what the run chose before.

        A run that moves to another kind of device chooses anew.
        """
        device = self.ranks.device
        place = ""
        if found is not None:
            self.then = self.ranks.together(lambda: saved_provenance(found.state, found.path))
            place = self.then.get("device", device.type)
        if found is not None and device_kind(place) == device.type:
            chosen, line = keep(self.config, found.state["config"], place, found.path)
        else:
            chosen, line = choose(self.config, device, self.ranks.world_size)
        # Other ranks may run on other processors.
        chosen, self.choice = self.ranks.of_main((chosen, line))
        self.config = dataclasses.replace(self.config, **chosen)
        self.precision = Precision(self.config.dtype, device)
        self.scaler = self.precision.scaler
        # MFU is a share of the peak in low precision.
        self.peak_flops = peak_flops(device) if self.precision.is_low else None

    def _find_provenance(self, found: FoundCheckpoint | None) -> None:
        """Describe data, machine and code. Raises DataError if ranks see different data."""
        is_finished = found is not None and found.state["step"] >= self.config.max_iters
        if is_finished and not self.lacks_end:
            return  # a finished run trains nothing, so there is nothing to compare
        train = self.loader.blocks.fingerprint()
        val = self.val_blocks.fingerprint()
        data = f"{train} {val}"
        differs = (
            f"data_dir={self.config.data_dir}: ranks see different data: "
            "copy the same to each machine"
        )
        self.provenance = find_provenance(data, self.ranks, differs)

    def _build_model(self, found: FoundCheckpoint | None) -> None:
        """Build the model on the CPU, its weights from the seed or from `init_from`."""
        config = self.config
        # On the CPU, so that the seed gives the same weights on every device.
        self.model = GPT(config, config.seed)
        # A run that is resumed has left those weights behind.
        if config.init_from and found is None:
            check_apart(config.init_from, self.out_dir)
            self.notes.append(init_from(self.model, config.init_from))
        # float32 also where products are bfloat16: an update of AdamW is often smaller than a step
        # between two bfloat16 numbers.
        self.model.to(self.precision.weights).train()

    def _shard(self) -> None:
        """Move the model to the device: under FSDP a share of it, else the whole."""
        if self.config.parallel == "fsdp":
            shard(self.model, self.ranks.device)
        else:
            self.model.to(self.ranks.device)

    def _make_optimizer(self) -> None:
        """Make the optimiser, after FSDP has replaced the parameters by its shares."""
        config = self.config
        self.optimizer = optimizer_of(config, self.model)
        if config.optimizer == "muon":
            self.notes.append(f"muon for {len(self.optimizer.parts)} matrices, adamw for the rest")
        if config.decay_per_step:
            self.notes.append(
                f"weight decay {config.decay:.6g}: decay_per_step={config.decay_per_step} / "
                f"learning_rate={config.learning_rate}"
            )
        self.parameters = dict(self.model.named_parameters())

    def _resume(self, found: FoundCheckpoint | None) -> None:
        """Restore everything from the checkpoint, and note what has changed since."""
        if found is None:
            return
        state, path, problem = found
        then = self.then
        # A finished run, whose provenance is empty, is not compared.
        if self.provenance:
            remedy = (
                f"give data_dir={self.config.data_dir} the data that it had, or choose another "
                f"out_dir and --init_from={path}, which trains its weights on any data"
            )
            self.ranks.together(lambda: check_same_data(then, self.provenance, path, remedy))
        self._check_same_optimizer(state, path)
        restore(path, state, self.config, self.model, self.optimizer, self.scaler)
        self.step = state["step"]
        if path.parent == self.out_dir:  # its log is there too
            interval = self.config.log_interval
            self.logged_until = max(min(1, self.step), self.step // interval * interval)
        self.best = state["best_val_loss"]
        self.stability.restore(state.get("stability", {}))
        before = chosen_then(state["config"], then.get("device", self.ranks.device.type))
        keys = changed_keys(before, dataclasses.asdict(self.config), then)
        self.changed = keys + changes(then, self.provenance)
        if problem:
            self.notes.append(f"not usable: {problem}")
        self.notes.append(f"resuming from {path}, after step {self.step}")
        if self.changed:
            self.notes.append(f"changed since then: {', '.join(self.changed)}")

    def _check_same_optimizer(self, state: dict[str, Any], path: Path) -> None:
        """Raise CheckpointError if the run of a checkpoint had the other optimiser."""
        # An older run does not say so: it had AdamW.
        then = state["config"].get("optimizer", "adamw")
        now = self.config.optimizer
        # One with weights only has no such state, which `restore` says.
        if "optimizer" in state and then != now:
            raise CheckpointError(
                f"{path} has the state of optimizer={then}, this run has {now}: add "
                f"--optimizer={then}, or choose another out_dir and --init_from={path}"
            )

    def _compile(self) -> None:
        """Compile the model, if the run has chosen to."""
        self.compiled = self.model
        if self.config.compile:
            # Training and evaluation are compiled apart, and again in each phase of a taper.
            # Beyond PyTorch's limit of 8, which a taper reached, the rest would run in eager mode
            # without a message.
            torch._dynamo.config.recompile_limit = 32
            # The whole model, under FSDP too: graphs break at the blocks' hooks, and all blocks
            # share one graph. Compiled block by block, head and loss would stay eager, and
            # HellaSwag's changing shapes would reach the compiled blocks.
            self.compiled = torch.compile(self.model, dynamic=False)

    def _replicate(self) -> None:
        """Put DDP around the model, if there are several ranks and each holds all of it."""
        # One model in three forms: `model` is the plain GPT (weights, norms), `compiled` is model
        # under torch.compile (evaluation), `ddp_model` is compiled under DDP (training).
        self.ddp_model = self.compiled
        if dist.is_initialized() and not is_sharded(self.model):
            self.ddp_model = replicate(self.compiled)

    def _prepare_norms(self) -> None:
        """Set the norms to the first step. Raises ConfigError if a taper cannot go on from here."""
        if not self.is_over:
            self._next_step()

    def _start_log(self, found: FoundCheckpoint | None) -> None:
        """Open the log, and show the notes of all steps before this one."""
        config = self.config
        self.log = RunLog(
            self.out_dir, dataclasses.asdict(config), config.max_iters, self.ranks.is_main
        )
        if self.choice:
            self.log.say(self.choice)
        if not self.is_over:
            self.ranks.together(lambda: self._open_log(is_resumed=found is not None))
        end = TaperSchedule(config.taper_warmup, config.taper_end).steps(config.max_iters)[1]
        if tapers(self.model) and end > config.max_iters:
            self.notes.append(
                f"warning: the taper ends at step {end}, after max_iters={config.max_iters}: "
                "norms remain"
            )
        if warning := slow_bfloat16(config, self.ranks.device):
            self.notes.append(warning)
        for note in self.notes:
            self.log.say(note)

    def _open_log(self, is_resumed: bool) -> None:
        """Open log.jsonl, and write config.json."""
        if not self.ranks.is_main:
            return
        config = dataclasses.asdict(self.config)
        norm_type = config["norm_type"]
        start = {
            "n_params": self.model.num_params(),
            "norm_plan": str(self.model.plan),
            "norm_notes": self.model.plan.notes(at_start=not self.config.init_from),
            # report.py names an arm by the keys that are not at their defaults. It learns here
            # which keys are about norms.
            "norm_keys": keys_of(norm_type),
            "other_norm_keys": sorted(foreign_keys(norm_type)),
            "tokens_per_step": self.tokens_per_step,
            # as it follows from weight_decay or decay_per_step
            "weight_decay": self.config.decay,
            **self.provenance,
        }
        path = self.out_dir / "config.json"
        check_replaceable(path, RUN_CONFIG)
        # It takes its name once the log is open: what fails first leaves both untouched.
        partial = path.with_name(path.name + ".tmp")
        try:
            partial.write_text(json.dumps(config, indent=1) + "\n")
            resume_step = self.step if is_resumed else None
            self.log.open(resume_step, start, self.changed, self.logged_until)
            partial.replace(path)
        except (OSError, UserError) as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            if isinstance(error, UserError):
                raise
            raise UserError(cannot_write(path, error)) from None
        self.log.say(
            f"{start['n_params']:,} parameters, norm plan {start['norm_plan']}, {start['device']}, "
            f"{self.tokens_per_step:,} tokens a step"
        )
        if start["norm_notes"]:
            self.log.say(f"norm_type={norm_type}: {'; '.join(start['norm_notes'])}")

    # ------------------------------------------------------------------------------------- the loop

    @property
    def is_over(self) -> bool:
        """Did the run end before this process started? Then nothing is left to do."""
        return self.step >= self.config.max_iters and not self.lacks_end

    def run(self) -> None:
        """Train until max_iters or a signal, and close the log."""
        if self.is_over:  # nothing in the run folder is touched
            self.log.say(f"finished already: step {self.step} of max_iters={self.config.max_iters}")
            self.lock.release()
            return
        self.clock = Throughput(self.tokens_per_step)
        # A new run is measured before its first step. One that is resumed has been.
        if self.step == 0:
            self._calibrate()
            self._evaluate()
        reason = self._loop()
        self._finish(reason)
        self.lock.release()

    def _loop(self) -> str:
        """Take all steps that are left. Returns why it stopped before max_iters, or ""."""
        config, ranks = self.config, self.ranks
        # Batches are a function of the step, so the loader itself has no state to restore.
        batches = self.loader.batches(
            self.step + 1, ranks.rank, ranks.world_size, pin=ranks.on_cuda
        )
        # reports of steps that the host has not read yet; on a GPU one is left from step to step
        pending: deque[PendingReport] = deque()
        reason = ""
        self.clock.restart()
        while not reason and self.step < config.max_iters:
            self.step += 1
            pending.append(self._train_step(batches))
            # Before evaluation and checkpoints: norms sum their statistics over ranks here, so the
            # checkpoint that rank 0 writes is complete.
            self._next_step()
            self._calibrate()
            due_eval = self.step % config.eval_interval == 0 or self.step == config.max_iters
            due_save = due_eval
            if config.checkpoint_interval and self.step % config.checkpoint_interval == 0:
                due_save = True
            # On a GPU a report is read when the next step is queued, so that the GPU never waits
            # for the host. A checkpoint is only made of steps whose reports were read.
            in_flight = 1 if ranks.on_cuda and not due_save else 0
            # Once the run must stop, all of them are read: the checkpoint below has their steps in
            # it.
            while len(pending) > in_flight or (reason and pending):
                report = pending.popleft().read()
                reason = self._end_step(report) or reason
            if due_eval:
                self._evaluate()
            if due_save or reason:
                self._save(LAST)
                # An evaluation always ends here, so its time and that of saving do not count.
                self.clock.restart()
        return reason

    def _finish(self, reason: str) -> None:
        """Write a sample of the model's text, if the run is complete, and close the log."""
        if not reason and self.config.sample_tokens:
            self.log.say(self.evaluator.write_sample(self.model, self.out_dir / "samples.txt"))
        speed = self.clock.steady()  # tokens/s
        done = f"done: best val loss {self.best:.4f}"
        if speed:
            done += f", {speed / 1000:.1f} k tokens/s"
        self.log.say(reason or done)
        self.log.close(reason or "done", step=self.step, tok_per_s=speed)

    def _next_step(self) -> None:
        """Move the schedules of the norms to the next step.

        A parameter that takes over the role of another gets its optimiser state.
        """
        was_tapered = is_tapered(self.model)
        # max_iters, because a taper's schedule may be in shares of it.
        for source, target in self.model.set_step(self.step + 1, self.config.max_iters):
            carry_state(self.optimizer, source, target)
        if is_tapered(self.model) and not was_tapered:
            # The best checkpoint is the best of those without norms: only they can be folded. If
            # losing its norms costs loss, no later checkpoint would ever be better.
            self.best = math.inf

    def _calibrate(self) -> None:
        """Set alpha from a training batch, every coupled_calibrate steps.

        The batch is the same on any number of ranks.
        """
        interval = self.config.coupled_calibrate
        if interval and self.step % interval == 0:
            # Micro-batch 0 of the next step, (B, T), on every rank.
            x, _ = self.loader.blocks.batch(self.loader.sample_ids(self.step + 1, 0))
            with self.precision.autocast():
                calibrate(self.model, x.to(self.ranks.device))

    # -------------------------------------------------------------------------------------- a step

    def _train_step(self, batches: Iterator[tuple[Tensor, Tensor]]) -> PendingReport:
        """Do forward and backward of this rank's micro-batches, then the update.

        Nothing here waits for the device.
        """
        config, ranks = self.config, self.ranks
        lr = self._set_learning_rate()
        # The random stream of dropout is a function of (seed, step, rank): no evaluation disturbs
        # it, and a resumed run has the same.
        torch.manual_seed(zlib.crc32(f"{config.seed} {self.step} {ranks.rank}".encode()))
        losses = self._backward(batches)  # (2,)
        report = pack(losses, bool(self.stop_signal.name), ranks)  # (3 + ranks,)
        # One small reduction a step: losses, requests to stop and bad losses together.
        ranks.sum(report)
        # The device itself skips the update if a loss or a gradient is not finite. The host learns
        # of it when it reads the report, and raises.
        grad_norms = guarded_update(
            self.optimizer,
            self.scaler,
            list(self.parameters.values()),
            config.grad_clip,
            count_bad(report),
        )
        return PendingReport(self.step, lr, report, grad_norms)

    def _set_learning_rate(self) -> float:
        """Set the learning rate of this step, and return it."""
        config = self.config
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
        return lr

    def _backward(self, batches: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
        """Add up gradients over this rank's micro-batches. Returns its mean losses (2,)."""
        device = self.ranks.device
        # of this rank
        micro_batches = self.config.gradient_accumulation_steps // self.ranks.world_size
        at_once = math.gcd(micro_batches, self.config.merge_micro_batches)
        passes = micro_batches // at_once
        losses = 0.0
        for number in range(passes):
            # From pinned memory to a GPU; the host goes on at once. (B, T) each
            parts = [
                (x.to(device, non_blocking=True), y.to(device, non_blocking=True))
                for x, y in itertools.islice(batches, at_once)
            ]
            x, y = merge(parts)  # (at_once B, T) each
            # Gradients add up; DDP reduces them over ranks in the last backward only.
            with accumulate(self.ddp_model, last=number == passes - 1):
                losses = losses + micro_step(self.ddp_model, x, y, self.precision, passes)
        return losses

    def _end_step(self, report: StepReport) -> str:
        """Check a step and log it. Returns why the run must stop after it, or ""."""
        self.clock.tick()
        # All ranks have the same report, so all of them raise, or stop, after the same step.
        self._check_finite(report)
        self.stability.add(report.loss, report.grad_norm)
        if report.step % self.config.log_interval == 0 or report.step in (1, self.config.max_iters):
            self._log_step(report)
        if report.stops:
            return f"stopped by {self.stop_signal.name or 'a signal'} after step {self.step}"
        return ""

    def _check_finite(self, report: StepReport) -> None:
        """Raise NonFiniteError, and say so in the log, if a step cannot be used."""
        self.skipped = 0 if math.isfinite(report.grad_norm) else self.skipped + 1
        # Only float16 has a loss scale, which it still looks for in the first steps.
        allowed = MAX_SKIPPED if self.scaler.is_enabled() else 1
        if report.bad_ranks:
            culprit = f"the loss on rank {report.bad_ranks[0]}"
        elif self.skipped >= allowed:
            culprit = self._bad_gradient(report)
        else:
            return
        self._stop(f"step {report.step}: {culprit} is not finite", "it was not applied")

    def _stop(self, reason: str, done: str) -> None:
        """End the log, and raise NonFiniteError. Checkpoints hold finite numbers only."""
        self.log.close(reason, step=self.step)
        kept = "and there is no checkpoint yet"
        if (self.out_dir / LAST).exists():
            kept = f"the last checkpoint in {self.out_dir} is good"
        raise NonFiniteError(f"{reason}; {done}, {kept}: lower learning_rate, or look at the data")

    def _bad_gradient(self, report: StepReport) -> str:
        """Name the first gradient that is not finite."""
        for name, norm in zip(self.parameters, report.gradient_norms, strict=True):
            if not math.isfinite(norm):
                return f"the gradient of {name}"
        return "the global gradient norm"

    def _log_step(self, report: StepReport) -> None:
        """Log losses and speed."""
        speed = self.clock.window()
        mfu = None  # model FLOPs utilisation
        if speed and self.peak_flops:
            # The share of the GPUs' peak that the model's own FLOPs take (Chowdhery et al. 2022).
            peak = self.peak_flops * self.ranks.world_size
            mfu = speed * self.model.flops_per_token() / peak
        auxiliary = {"aux_loss": report.aux_loss} if report.aux_loss else {}
        self.log.step(
            step=report.step,
            loss=report.loss,
            lr=report.lr,
            grad_norm=report.grad_norm,
            tok_per_s=speed,
            mfu=mfu,
            tokens=report.step * self.tokens_per_step,
            **auxiliary,
        )

    # ------------------------------------------------------------------ evaluation and checkpoints

    def _evaluate(self) -> None:
        """Measure the model and log it; save it if it is the best so far."""
        val_loss = self.evaluator.val_loss(self.compiled)
        self._log_val_loss(val_loss)
        # On the model itself: a compiled one ignores hooks that are registered later.
        stats = self.evaluator.rms_stats(self.model)
        self.log.event("rms", step=self.step, **stats.record())
        logit = self.evaluator.attention_logit(self.model)
        self.log.event(
            "stability", step=self.step, attention_logit=logit, **self.stability.record()
        )
        # Before any checkpoint of this step: a run that is killed here scores again when it
        # resumes.
        self._score_hellaswag()
        if self.config.full_val and self.step == self.config.max_iters:
            self._evaluate_whole_split()
        # Step 0 is not saved: nothing has been trained.
        if self.step and val_loss < self.best:
            self.best = val_loss
            self._save(BEST)

    def _log_val_loss(self, val_loss: float) -> None:
        """Log the val loss, with bits per byte and the taper's gate where they exist."""
        record = {"val_loss": val_loss}
        line = f"step {self.step}  val loss {val_loss:.4f}"
        bits = self.evaluator.bits_per_byte(val_loss)
        if bits:
            record["bits_per_byte"] = bits
            line += f" nats per token, {bits:.4f} bits per byte"
        gate = taper_gate(self.model)
        if gate is not None:
            record["gate"] = gate
            line += f", taper gate {gate:.3g}"
        self.log.event("eval", step=self.step, **record)
        self.log.say(line)

    def _evaluate_whole_split(self) -> None:
        """Measure the loss over the whole val split, and log it."""
        found = self.evaluator.split_loss(self.model)
        self.log.event("val_full", step=self.step, **found.record())
        self.log.say(
            f"step {self.step}  val loss over the whole split {found.mean:.4f} nats per token, "
            f"{found.tokens.sum():,} tokens, {len(found.tokens)} documents"
        )

    def _score_hellaswag(self) -> None:
        """Score HellaSwag, if this was the last step."""
        scorer = self.evaluator.scorer
        if scorer is None or self.step < self.config.max_iters:
            return
        scores = scorer(self.model)
        if self.ranks.is_main:
            self.log.event("hellaswag", step=self.step, **scores.summary())
            self.log.say(f"step {self.step}  HellaSwag {scores}")
            scores.write(self.out_dir / ITEMS_FILE)

    def _save(self, name: str) -> None:
        """Save everything that a resume needs. All ranks take part."""
        state = {
            "step": self.step,
            "config": dataclasses.asdict(self.config),
            "meta": self.meta,
            "model": self.model.state_dict(),
            "optimizer": moments_of(self.parameters, self.optimizer),
            "scaler": self.scaler.state_dict(),
            "best_val_loss": self.best,
            "stability": self.stability.state(),
            "provenance": self.provenance,
        }
        bad = first_not_finite(state)
        if bad:
            self._stop(f"step {self.step}: {bad} is not finite", "it was not saved")
        self.log.sync()
        save_checkpoint(self.out_dir / name, state, self.ranks)


def optimizer_of(config: TrainConfig, model: GPT) -> Optimizer:
    """Make the optimiser that `config` describes."""
    return make_optimizer(
        model,
        config.learning_rate,
        (config.beta1, config.beta2),
        config.adam_eps,
        config.decay,
        decay_gains=model.plan.decays_gains,
        kind=config.optimizer,
    )


def check_batch_fits(config: TrainConfig, device: torch.device) -> None:
    """Raise ConfigError for a micro-batch that the memory of this machine cannot hold.

    It counts less than a step needs: tokens and targets, and on a CPU in 16 bits what backward
    reads of each block's stream and MLP.
    """
    of_token = 16
    if device.type == "cpu":
        of_token += 2 * config.n_layer * (config.n_embd + config.inner)
    needed = of_token * config.batch_size * config.block_size
    if needed > machine_memory():
        raise ConfigError(
            f"batch_size={config.batch_size} and block_size={config.block_size}: a micro-batch "
            f"takes more than {needed / 1e9:,.0f} GB, and this machine has "
            f"{machine_memory() / 1e9:,.0f} GB of memory: lower batch_size, with as many times "
            "more gradient_accumulation_steps"
        )


def with_vocabulary(config: TrainConfig, n_tokens: int) -> TrainConfig:
    """Complete `config` with the vocabulary of its data: `n_tokens`, 0 if the data do not say."""
    if 0 < config.n_vocab < n_tokens:
        raise ConfigError(
            f"n_vocab={config.n_vocab}: the data's vocabulary has {n_tokens} tokens: leave it at 0"
        )
    # Up to a multiple of 64, where the head's product uses the GPU's matrix units best. Rows beyond
    # n_vocab take no part in the loss.
    rows = config.vocab_size or math.ceil(n_tokens / 64) * 64
    rows = rows or 50304  # shards without meta.json are nanoGPT's, of GPT-2 tokens
    return dataclasses.replace(config, vocab_size=rows, n_vocab=config.n_vocab or n_tokens)


def main(argv: list[str]) -> None:
    config, _ = parse_args(TrainConfig, argv, __doc__)
    Trainer(config).run()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    run_program(main)
