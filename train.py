"""Train a GPT with the normalisation of your choice.

    # one process, on a GPU or a CPU; any key can be changed
    python train.py config/demo.py
    python train.py config/demo.py --norm_type=peri --out_dir=out/peri

    # a norm of your own, a class in a file (docs/norms.md)
    python train.py config/demo.py --norm_file=my_norm.py --norm_type=MeanAbs --out_dir=out/mine

    # 8 GPUs of one machine: each holds the whole model (DDP), or a share of a larger one (FSDP)
    torchrun --standalone --nproc_per_node=8 train.py config/coupled.py
    torchrun --standalone --nproc_per_node=8 train.py config/coupled.py --parallel=fsdp

    # two machines
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 \\
      train.py config/coupled.py

A run writes config.json, log.jsonl, ckpt_last.pt (at each evaluation and checkpoint_interval),
ckpt_best.pt and samples.txt into out_dir. The same command resumes it. SIGTERM, Ctrl-C and a closed
terminal finish the step, save a checkpoint, and exit with 0.

The keys are those of training/config.py. `train` sets up a run, in order; training/loop.py has its
steps, which train NextToken.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.distributed import Ranks, replicate, shard
from common.environment import Precision, faster_float32_products
from common.errors import ConfigError, UserError, cannot_write, run_program
from common.norm_file import COPY as NORM_FILE_COPY
from common.output import check_replaceable, write_bytes_atomically
from configurator import parse_args
from evals.hellaswag import ITEMS_FILE, HellaSwag
from load import init_from, take_shape
from model import GPT, check_memory
from norm_files import take_norm_file
from norm_plan import foreign_keys, keys_of
from norm_types import added_types
from taper import TaperSchedule, is_tapered, tapers
from training.checkpoint import BEST, LAST, restore
from training.choices import native_bfloat16, resolve
from training.config import TrainConfig
from training.dataloader import TrainLoader, open_data
from training.evaluation import Evaluator
from training.loop import Loop, Objective
from training.optim import carry_state, optimizer_of
from training.run import RunFolder
from training.stream import calibrate


class NextToken(Objective):
    """Train a GPT to predict the next token: the objective of a Loop.

    One model in three forms: `model` is the plain GPT (weights, norms), `compiled` is model under
    torch.compile (evaluation), `forward` is compiled under DDP (training).

    Args:
        config: every key of the run, nothing left to `auto`.
        loader: the training batches.
        model: on the device; under FSDP a share of it.
        evaluator: measures it.
        ranks: this process and the others.
        score: GPT -> scores of HellaSwag; None: not wanted.
    """

    checkpoint = LAST

    def __init__(
        self,
        config: TrainConfig,
        loader: TrainLoader,
        model: GPT,
        evaluator: Evaluator,
        ranks: Ranks,
        score: HellaSwag | None,
    ):
        super().__init__(config, ranks, model, config.block_size)
        self.loader = loader
        self.model = model
        self.evaluator = evaluator
        self.score = score
        self.best = math.inf  # lowest val loss so far
        self.flops_per_token = model.flops_per_token()
        # The largest number of micro-batches at once that divides them
        self.at_once = math.gcd(self.passes, config.merge_micro_batches)
        self.passes //= self.at_once
        self.compiled = model
        if config.compile:
            # Training and evaluation are compiled apart, and again in each phase of a taper.
            # Beyond PyTorch's limit of 8, which a taper reached, the rest would run in eager mode
            # without a message.
            torch._dynamo.config.recompile_limit = 32
            # The whole model, under FSDP too: graphs break at the blocks' hooks, and all blocks
            # share one graph. Compiled block by block, head and loss would stay eager, and
            # HellaSwag's changing shapes would reach the compiled blocks.
            self.compiled = torch.compile(model, dynamic=False)
        self.forward = self.compiled

    def batches(self, first_step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's batches x, y (at_once B, T) from `first_step` on, for ever."""
        ranks = self.ranks
        return self.loader.batches(
            first_step, ranks.rank, ranks.world_size, pin=ranks.on_cuda, at_once=self.at_once
        )

    def state(self) -> dict[str, Any]:
        """Return its entries of a checkpoint."""
        return {
            "meta": self.evaluator.meta,
            "model": self.model.state_dict(),
            "best_val_loss": self.best,
        }

    def restore(self, state: dict[str, Any], path: Path) -> None:
        """Take weights and the best val loss from a checkpoint. Raises CheckpointError."""
        restore(path, state, self.config, self.model)
        self.best = state.get("best_val_loss", math.inf)

    def start(self, loop: Loop) -> None:
        """Prepare the first step, and DDP. Raises ConfigError if a taper cannot go on from here.

        After `restore`, because DDP copies the weights of rank 0.
        """
        if self.config.parallel == "ddp":
            self.forward = replicate(self.compiled)
        self._move_schedules(loop)
        if loop.step == 0:
            self._calibrate(0)

    def prepare(self, loop: Loop) -> None:
        """Move the norms on to the step after loop.step."""
        self._move_schedules(loop)
        self._calibrate(loop.step)

    def _move_schedules(self, loop: Loop) -> None:
        """Set the schedules of the norms to the next step.

        A parameter that takes over the role of another gets its optimiser state.
        """
        was_tapered = is_tapered(self.model)
        # max_iters, because a taper's schedule may be in shares of it.
        for source, target in self.model.set_step(loop.step + 1, self.config.max_iters):
            carry_state(loop.optimizer, source, target)
        if is_tapered(self.model) and not was_tapered:
            # The best checkpoint is the best of those without norms: only they can be folded. If
            # losing its norms costs loss, no later checkpoint would ever be better.
            self.best = math.inf

    def _calibrate(self, step: int) -> None:
        """Set alpha from a training batch, every coupled_calibrate steps.

        The batch is the same on any number of ranks.
        """
        interval = self.config.coupled_calibrate
        if interval and step % interval == 0:
            # Micro-batch 0 of the next step, (B, T), on every rank.
            x, _ = self.loader.blocks.batch(self.loader.sample_ids(step + 1, 0))
            with self.evaluator.autocast():
                calibrate(self.model, x.to(self.ranks.device))

    def evaluate(self, loop: Loop) -> None:
        """Measure the model and log it; save it if it is the best so far."""
        log, step = loop.log, loop.step
        val_loss = self.evaluator.log_val_loss(self.compiled, self.model, log, step)
        self.evaluator.log_stability(self.model, log, step, loop.stability)
        # Before any checkpoint of this step: a run that is killed here scores again when it
        # resumes.
        if step == self.config.max_iters:
            self._evaluate_at_the_end(loop)
        # Step 0 is not saved: nothing has been trained.
        if step and val_loss < self.best:
            self.best = val_loss
            loop.save(BEST)

    def _evaluate_at_the_end(self, loop: Loop) -> None:
        """Score HellaSwag and measure the whole val split, if the run wants them."""
        if self.score is not None:
            scores = self.score(self.model)
            if self.ranks.is_main:
                loop.log.event("hellaswag", step=loop.step, **scores.summary())
                loop.log.say(f"step {loop.step}  HellaSwag {scores}")
                scores.write(loop.folder.path / ITEMS_FILE)
        if self.config.full_val:
            self.evaluator.log_split_loss(self.model, loop.log, loop.step)

    def finish(self, loop: Loop) -> dict[str, Any]:
        """Write a sample of the model's text."""
        if self.config.sample_tokens:
            path = loop.folder.path / "samples.txt"
            loop.log.say(self.evaluator.write_sample(self.model, path))
        speed = loop.clock.steady()  # tokens/s
        done = f"done: best val loss {self.best:.4f}"
        if speed:
            done += f", {speed / 1000:.1f} k tokens/s"
        loop.log.say(done)
        return super().finish(loop)


# ------------------------------------------------------------------------------------ setting it up


def train(config: TrainConfig, ranks: Ranks) -> None:
    """Train, or go on with, the run that `config` describes."""
    config, data = open_data(config)
    # To save an FSDP run, rank 0 gathers weights and both moments, 4 bytes each.
    ranks.together(lambda: check_memory(config, 12 if config.parallel == "fsdp" else 4))
    with RunFolder(config, ranks) as run:
        found = run.find(config.resume, (LAST, BEST))
        config, choice = resolve(config, found, ranks)
        if run.end_of(config.max_iters) is not None:
            run.repeat(config)
            return
        if data.note:
            run.notes.append(data.note)
        precision = Precision(config.dtype, ranks.device)
        evaluator = Evaluator(config, data.val, data.meta, ranks, precision.autocast)
        if evaluator.no_tokenizer:
            missing = "bits per byte" if evaluator.tokenizer else "text sample and no bits per byte"
            run.notes.append(f"no {missing}: {evaluator.no_tokenizer}")
        score = make_scorer(config, evaluator, ranks)
        remedy = (
            f"give data_dir={config.data_dir} the data that it had, or choose another out_dir and "
            "--init_from=CHECKPOINT, which trains its weights on any data"
        )
        run.compare(config, data.fingerprint(), remedy)
        model = build_model(config, data.meta, precision, ranks, run, is_new=found is None)
        micro_batches = config.gradient_accumulation_steps
        loader = TrainLoader(data.train, config.batch_size, micro_batches, config.seed)
        objective = NextToken(config, loader, model, evaluator, ranks, score)
        # FSDP has replaced the parameters, so the optimiser is made after it.
        loop = Loop(objective, config, run, optimizer_of(config, model), precision)
        objective.start(loop)
        start = describe(config, model, objective.tokens_per_step)
        run.notes = [*notes(config, model, start, run), *run.notes]
        if choice:
            run.notes.insert(0, choice)
        # Last: if anything before fails, the log in out_dir is untouched.
        run.open_log(config, start, "config.json")
        ranks.together(lambda: keep_norm_file(config, run))
        loop.run()


def make_scorer(config: TrainConfig, evaluator: Evaluator, ranks: Ranks) -> HellaSwag | None:
    """Make what scores HellaSwag, if the run wants it; downloads or reads the items.

    Raises ConfigError now, not at the end, if it cannot be scored.
    """
    if config.hellaswag == "off":
        return None
    if evaluator.tokenizer is None:
        raise ConfigError(f"HellaSwag needs the data's tokenizer: {evaluator.no_tokenizer}")
    file = "" if config.hellaswag == "auto" else config.hellaswag
    return HellaSwag(file, config.hellaswag_items, evaluator.tokenizer, ranks, evaluator.autocast)


def build_model(
    config: TrainConfig,
    meta: dict,
    precision: Precision,
    ranks: Ranks,
    run: RunFolder,
    is_new: bool,
) -> GPT:
    """Build the model, and move it to the device: under FSDP a share of it, else the whole.

    Its weights are drawn from the seed, or those of `init_from`. `meta` is that of the data.
    """
    # On the CPU, so that the seed gives the same weights on every device.
    model = GPT(config, config.seed)
    # A run that is resumed has left those weights behind.
    if config.init_from and is_new:
        run.notes.append(init_from(model, config.init_from, meta))
    # float32 also where products are bfloat16: an update of AdamW is often smaller than a step
    # between two bfloat16 numbers.
    model.to(precision.weights).train()
    if config.parallel == "fsdp":
        shard(model, ranks.device)
        return model
    return model.to(ranks.device)


def keep_norm_file(config: TrainConfig, run: RunFolder) -> None:
    """Leave the text of the norm file in the run folder, where nothing runs it.

    Raises UserError if it cannot be written.
    """
    source = config.type.source
    if source is None or not run.ranks.is_main:
        return
    path = run.path / NORM_FILE_COPY
    check_replaceable(path)
    try:
        write_bytes_atomically(path, source.content)
    except OSError as error:
        raise UserError(cannot_write(path, error)) from None


def describe(config: TrainConfig, model: GPT, tokens_per_step: int) -> dict[str, Any]:
    """Return the values of the log's `start` event."""
    source = config.type.source
    code = {} if source is None else {"norm_file": {"name": source.name, "sha256": source.sha256}}
    return {
        **code,
        "n_params": model.num_params(),
        "norm_plan": str(model.plan),
        "norm_notes": model.plan.notes(at_start=not config.init_from),
        # report.py names an arm by the keys that are not at their defaults. It learns here
        # which keys are about norms.
        "norm_keys": keys_of(config.norm_type) | ({"norm_sha256": source.sha256} if source else {}),
        "other_norm_keys": sorted(foreign_keys(config.norm_type)),
        "tokens_per_step": tokens_per_step,
        # as it follows from weight_decay or decay_per_step
        "weight_decay": config.decay,
    }


def takes_initial_gain(model: GPT) -> bool:
    """Has any norm that `initial_gain` is for a gain? One of a norm file need not have one."""
    norms = [place.norm for place in model.places()]
    if isinstance(model.config.initial_gain, tuple):
        norms += [place.output for place in model.places() if place.output is not None]
    return any(norm.core.weight is not None for norm in norms)


def notes(config: TrainConfig, model: GPT, start: dict[str, Any], run: RunFolder) -> list[str]:
    """Describe a run in lines for people."""
    found = [
        f"{start['n_params']:,} parameters, norm plan {start['norm_plan']}, "
        f"{run.provenance['device']}, {start['tokens_per_step']:,} tokens a step"
    ]
    of_file = added_types()
    if of_file and config.type.source is None:
        found.append(
            f"norm_type={config.norm_type} is not of the norm file, which adds {', '.join(of_file)}"
        )
    if start["norm_notes"]:
        found.append(f"norm_type={config.norm_type}: {'; '.join(start['norm_notes'])}")
    # norm_gain=none has a note of its own.
    if config.initial_gain != 1 and config.has_gain and not takes_initial_gain(model):
        found.append(
            f"warning: initial_gain={config.initial_gain} changes nothing: the norms of "
            f"norm_type={config.norm_type} have no gain"
        )
    if config.optimizer == "muon":
        matrices = sum(len(rows) for rows in model.hidden_matrices().values())
        found.append(f"muon for {matrices} matrices, adamw for the rest")
    if config.decay_per_step:
        found.append(
            f"weight decay {config.decay:.6g}: decay_per_step={config.decay_per_step} / "
            f"learning_rate={config.learning_rate}"
        )
    end = TaperSchedule.of(config).steps(config.max_iters)[1]
    if tapers(model) and end > config.max_iters:
        found.append(
            f"warning: the taper ends at step {end}, after max_iters={config.max_iters}: "
            "norms remain"
        )
    uses_bfloat16 = config.dtype == "bfloat16" or config.optimizer == "muon"
    if uses_bfloat16 and run.ranks.device.type == "cpu" and not native_bfloat16():
        found.append(
            "warning: no fast bfloat16 products are known of this processor: a step can take many "
            "times as long as with dtype=float32 and optimizer=adamw"
        )
    return found


def main(argv: list[str]) -> None:
    config, _ = parse_args(TrainConfig, take_norm_file(argv), __doc__, complete=take_shape)
    # Raises if the ranks do not divide the micro-batches of a step.
    with Ranks.start(config.device, config.gradient_accumulation_steps) as ranks:
        ranks.check_same(
            config.norm_sha256, "ranks have different norm files: copy the same to each machine"
        )
        if config.parallel == "fsdp" and not ranks.are_joined:
            raise ConfigError("parallel=fsdp divides the model among ranks: start it with torchrun")
        if ranks.device.type == "cpu":
            # A global setting of torch, so it comes before anything is computed.
            faster_float32_products(config.n_embd, config.head_channels)
        train(config, ranks)


if __name__ == "__main__":
    run_program(main)
