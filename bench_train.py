"""Time of our training step beside upstream nanoGPT's, in one process, in randomised paired rounds.

    git clone https://github.com/karpathy/nanoGPT ../nanoGPT
    python bench_train.py --nanogpt=../nanoGPT --rounds=20 --out=results/cpu/nanogpt/steps.jsonl

Arms: our `layer` model and nanoGPT's, eager and compiled, and a second copy of our eager arm (A/A). A step is what each
project's training loop does with a batch: forward, backward, clipping, its own AdamW. All arms see the same batches and
the memory allocator's settings of our train.py (they help nanoGPT as much as us).
The last line of output is JSON: ratio > 1 means that ours is faster.
"""

import dataclasses
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from configurator import key, parse_args
from errors import ConfigError, UserError, run_program
from model import GPT, GPTConfig
from optim import guarded_update, make_optimizer
from ranks import keep_freed_memory
from runlog import environment
from stats import paired_ratio, paired_times


@dataclass(frozen=True)
class BenchConfig(GPTConfig):
    """Keys of bench_train.py; the model's defaults are nanoGPT's Shakespeare shape."""

    vocab_size: int = key(65, "rows of the embedding")
    n_layer: int = key(6, "number of blocks")
    n_head: int = key(6, "query heads")
    n_embd: int = key(384, "channels of the residual stream")
    block_size: int = key(256, "longest context, tokens")
    nanogpt: str = key("", "folder with upstream nanoGPT")
    batch_size: int = key(12, "sequences in a step")
    rounds: int = key(10, "rounds; in each, every arm does one step")
    compiled: bool = key(True, "time compiled arms too")
    out: str = key("", "append the measurement to this JSONL file")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (Path(self.nanogpt) / "model.py").is_file():
            raise ConfigError("nanogpt: give the folder of a clone of karpathy/nanoGPT")
        if self.norm_type != "layer" or self.rounds < 2:
            raise ConfigError("nanoGPT has LayerNorm only, so norm_type=layer; rounds=2 or more")


Batch = tuple[torch.Tensor, torch.Tensor]


def our_step(config: BenchConfig, batch: Batch, compiled: bool) -> Callable[[], None]:
    """One optimiser step as train.py does it."""
    model = GPT(config)
    parameters = list(model.parameters())
    optimizer = make_optimizer(model, 1e-4, (0.9, 0.95), 1e-8, 0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    forward = torch.compile(model) if compiled else model

    def step() -> None:
        loss, aux = forward(*batch)
        (loss + aux).backward()
        guarded_update(optimizer, scaler, parameters, 1.0, (~torch.isfinite(loss.detach())).float())

    return step


def nanogpt_step(config: BenchConfig, batch: Batch, compiled: bool) -> Callable[[], None]:
    """One optimiser step as nanoGPT's train.py does it, with nanoGPT's own model and optimiser."""
    upstream = import_nanogpt(Path(config.nanogpt))
    keys = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias")
    shape = {name: getattr(config, name) for name in keys}
    model = upstream.GPT(upstream.GPTConfig(dropout=0.0, **shape))
    optimizer = model.configure_optimizers(0.1, 1e-4, (0.9, 0.95), "cpu")
    forward = torch.compile(model) if compiled else model

    def step() -> None:
        _, loss = forward(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def import_nanogpt(folder: Path):
    """nanoGPT's model.py as a module of another name than ours."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("nanogpt_model", folder / "model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = module
    spec.loader.exec_module(module)
    return module


def main(argv: list[str]) -> None:
    config, _ = parse_args(BenchConfig, argv, __doc__)
    keep_freed_memory()
    torch.manual_seed(0)
    tokens = torch.randint(config.vocab_size, (config.batch_size, config.block_size + 1))
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    arms = {"ours, eager": our_step(config, batch, False), "nanoGPT, eager": nanogpt_step(config, batch, False),
            "ours again, eager": our_step(config, batch, False)}  # fmt: skip
    pairs = [("ours again, eager", "ours, eager"), ("nanoGPT, eager", "ours, eager")]
    if config.compiled:
        arms["ours, compiled"] = our_step(config, batch, True)
        arms["nanoGPT, compiled"] = nanogpt_step(config, batch, True)
        pairs += [("nanoGPT, compiled", "ours, compiled"), ("ours, eager", "ours, compiled")]
    for _ in range(2):  # compilation and first allocations
        for step in arms.values():
            step()
    bar = tqdm(total=config.rounds, unit="round", disable=not sys.stderr.isatty())
    times = paired_times(arms, config.rounds, after_round=bar.update)
    bar.close()
    per_step = config.batch_size * config.block_size
    for name, seconds in times.items():
        print(f"{name:20s} {per_step / sorted(seconds)[len(seconds) // 2]:9.0f} tokens/s (median)")
    ratios = {f"{slow} / {fast}": dataclasses.asdict(paired_ratio(times[slow], times[fast])) for slow, fast in pairs}
    for name, ratio in ratios.items():
        print(f"time of {name}: {ratio['mean']:.4f}  (95 % CI {ratio['low']:.4f} .. {ratio['high']:.4f})")
    settings = {name: value for name, value in dataclasses.asdict(config).items() if name not in ("nanogpt", "out")}
    record = {"ratios": ratios, "seconds": times, "threads": torch.get_num_threads(), "config": settings}
    record |= environment(torch.device("cpu"))
    if config.out:
        try:
            Path(config.out).parent.mkdir(parents=True, exist_ok=True)
            with open(config.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise UserError(f"out={config.out}: cannot be written ({error.strerror})") from None
    print(json.dumps(ratios))


if __name__ == "__main__":
    run_program(main)
