"""Every key of a training run: train.py's, and those of the programs that start it."""

from dataclasses import dataclass

from common.errors import ConfigError
from configurator import key
from model import GPTConfig
from taper import TaperSchedule

from .dataloader import DataKeys
from .evaluation import EvalKeys
from .optim import OptimKeys, check_optimizer_keys
from .run import ComparisonKeys, LoopKeys


@dataclass(frozen=True)
class StartKeys:
    """Start, ranks and speed"""

    init_from: str = key(
        "",
        "start from the weights of this model, of its shape where no key gives another: run, "
        "checkpoint, Hugging Face name ('': scratch)",
    )
    parallel: str = key(
        "ddp",
        "on several ranks: each holds the whole model (ddp), or a share of it (fsdp)",
        ("ddp", "fsdp"),
    )
    compile: bool | None = key(None, "torch.compile (auto: on CUDA, and in long runs on a CPU)")


@dataclass(frozen=True)
class TrainConfig(ComparisonKeys, EvalKeys, StartKeys, OptimKeys, LoopKeys, DataKeys, GPTConfig):
    """Every key of a training run. The defaults are nanoGPT's for GPT-2 124M, but their length."""

    FIRST = (
        "norm_type",
        "data_dir",
        "out_dir",
        "n_layer",
        "n_head",
        "n_embd",
        "block_size",
        "batch_size",
        "learning_rate",
        "max_iters",
    )

    vocab_size: int = key(
        0,
        "rows of the embedding (0: the data's vocabulary, up to a multiple of 64)",
        least=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_optimizer_keys(self)
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
        # Raises if a taper would end before its warm-up does. Other norm types have its defaults.
        TaperSchedule.of(self).steps(self.max_iters)
