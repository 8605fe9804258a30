"""Count the bytes that a block's norms and residual adds move in training, without a GPU.

    python -m bench.bytes --n_embd=768 --tokens=65536    # every norm type; the last line is JSON
    python -m bench.bytes --n_embd=2048 --n_head=16 --tokens=16384
    python -m bench.bytes --out=results/cpu/bytes        # README.md and ledger.jsonl too

Inductor generates the code that it would run on an H200 (study/cuda_codegen.py) from the Blocks of
model.py and from train.py's model, and study/traffic.py reads that code. Figures are forward +
backward, in bytes per token and block:

    one block        a bfloat16 block alone. The epilogue of its last product does the closing
                     residual add.
    bfloat16 stream  train.py's model with residual=autocast, three blocks less two: what one more
                     block costs
    copied           the same, if each addmm copies its residual operand before it adds the product,
                     which is two crossings more: BLAS could read it in an epilogue, but PyTorch's
                     CUDA addmm copies it (ATen)
    float32 stream   train.py's model by default: float32 stream and weights, bfloat16 products
    ..., whole       the same with the generated kernels of attention and MLP, weights' too: what a
                     norm moves into them

Counted: every tensor that a generated kernel loads or stores, once for each (a second load of it in
the same kernel comes from the cache), work spaces, and the residual that an addmm reads for its
epilogue. Not of norms: kernels that touch a tensor wider than the stream (queries, keys and values
together, the MLP's hidden layer: they are attention's and the MLP's) or none as wide (the loss);
pointwise kernels on weights, except where they touch a gain or its gradient (sums over weights are
a norm's: fold's gain gradient, cbwc's means); of one block alone, the read of the closing residual,
which all have. Not counted: what matrix products and attention's core move otherwise. Attention's
core is opaque, as on a GPU. Gains are float32. It is a count of bytes, not a time.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.environment import environment, installed
from common.errors import ConfigError, run_program
from common.output import made_with, markdown, read_json, write_results
from configurator import key, parse_args
from model import GPTConfig
from norm_plan import NormPlan
from norm_types import NORM_TYPES
from study.traffic import bytes_of_one_block, bytes_of_one_more_block

# Blocks of mixln are those of post and of rms; taper begins as rms and ends as none.
MIXTURES = ("mixln", "taper")
ARMS: dict[str, dict[str, Any]] = {
    **{name: {} for name in NORM_TYPES if name not in MIXTURES},
    "coupled, fold": {"coupled_impl": "fold"},
    "coupled, full gradient": {"coupled_grad": "full"},
    "rms, no gains": {"norm_gain": "none"},
    "coupled, no gains": {"norm_gain": "none"},
    "rms, gains 1 + weight": {"norm_gain": "one_plus"},
    "rms, QK-norms": {"qk_norm": "head"},
}


@dataclass(frozen=True)
class LedgerConfig(GPTConfig):
    """Keys of bench/bytes.py: a model's shape, and how many tokens it sees at once."""

    tokens: int = key(65536, "tokens of a micro-batch; a multiple of block_size", least=1)
    arms: str = key("", "count these, with semicolons between ('': all); OUT keeps its others")
    out: str = key("", "write README.md and ledger.jsonl into this folder")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens % self.block_size or self.tokens == self.block_size:
            raise ConfigError(
                f"tokens={self.tokens}: must be a multiple of block_size={self.block_size}, two "
                "sequences or more, so that rows can be told from channels"
            )
        if self.inner <= self.n_embd or self.dropout:
            raise ConfigError(
                "n_inner must be above n_embd, and dropout 0: "
                "otherwise norms cannot be told from the MLP"
            )


# For each precision of the residual stream: the figures of a stack, as bytes_of_one_more_block
# takes them.
STACKS = {
    "autocast": {"bfloat16 stream": (1, False), "copied": (3, False), "copied, whole": (3, True)},
    "float32": {"float32 stream": (1, False), "float32, whole": (1, True)},
}


def count(
    config: LedgerConfig, arm: str, stacks: Sequence[str] = tuple(STACKS)
) -> dict[str, float]:
    """Return the figures of one arm, in bytes per token and block.

    They are of one block, and of stacks with these residual streams. A norm plan whose first block
    is not like the others, or whose blocks are closed by a norm, has no figure of one block.
    """
    keys = {field.name: getattr(config, field.name) for field in dataclasses.fields(GPTConfig)}
    shape = GPTConfig(**keys | {"norm_type": arm.split(",")[0], **ARMS[arm]})
    row = {}
    if NormPlan(shape, shape.n_layer, shape.n_embd, shape.bias).adds_plainly:
        row["one block"] = bytes_of_one_block(shape, config.tokens)
    for stream in stacks:
        of_stream = dataclasses.replace(shape, residual=stream)
        figures = STACKS[stream]
        found = bytes_of_one_more_block(of_stream, config.tokens, figures.values())
        row |= zip(figures, found)
    return row


def table(rows: dict[str, dict[str, float]]) -> str:
    """Markdown, in kB (1000 bytes) per token and block; in brackets the difference from rms."""
    rms = rows["rms"]
    columns = list(rms)
    cells = []
    for arm, row in rows.items():
        kilo = {name: (value / 1000, (value - rms[name]) / 1000) for name, value in row.items()}
        shown = {name: f"{value:.1f} ({more:+.1f})" for name, (value, more) in kilo.items()}
        cells.append([arm, *(shown.get(name, "-") for name in columns)])
    return markdown(["norms", *columns], cells)


def main(argv: list[str]) -> None:
    config, _ = parse_args(LedgerConfig, argv, __doc__)
    arms = list(ARMS)
    if config.arms:
        arms = [arm.strip() for arm in config.arms.split(";")]
    rows = {}
    for arm in arms:
        if arm not in ARMS:
            raise ConfigError(f"arms: there is no {arm!r}: take of {'; '.join(ARMS)}")
        rows[arm] = count(config, arm)
        figures = ", ".join(f"{name} {value:,.0f}" for name, value in rows[arm].items())
        print(f"{arm}: {figures}", flush=True)
    if config.out:
        write(Path(config.out), config, rows)
    print(json.dumps(rows))


def stamps(records: dict[str, dict[str, Any]]) -> str:
    """Return versions and commit of the rows; where they differ, of whom each is."""
    arms: dict[str, list[str]] = {}
    for arm, record in records.items():
        versions = record["versions"]  # older records do not say which triton
        parts = [f"{name} {versions[name]}" for name in ("torch", "triton") if name in versions]
        arms.setdefault(", ".join([*parts, f"commit {record['git']}"]), []).append(arm)
    if len(arms) == 1:
        return next(iter(arms))
    return "; ".join(f"{stamp} ({', '.join(its)})" for stamp, its in arms.items())


def write(folder: Path, config: LedgerConfig, rows: dict[str, dict[str, float]]) -> None:
    """Write README.md and ledger.jsonl, one line per arm, with what is there of other arms."""
    place = environment(torch.device("cpu"))
    place["versions"] |= installed("triton")
    names = ("n_embd", "n_head", "inner", "block_size", "tokens")
    shape = {name: getattr(config, name) for name in names}
    old = read_json(folder / "ledger.jsonl") if config.arms else []
    records = {record["norms"]: record for record in old}
    for arm, row in rows.items():
        records[arm] = {"norms": arm, "bytes_per_token": row, **shape, **place}
    all_rows = {arm: record["bytes_per_token"] for arm, record in records.items()}
    keys = made_with(dataclasses.replace(config, arms=""))
    text = f"""# Bytes that the norms of a block move in training

kB per token and block, forward + backward; in brackets the difference from `rms`.
d = {config.n_embd}, {config.tokens:,} tokens. Counted in the code that inductor generates for an
H200, without one; {stamps(records)}. Made by
`python -m bench.bytes {keys}`; what is counted stands at the head of that program.

{table(all_rows)}

- one block: a bfloat16 block alone, closed by a product that adds the residual itself. With output
  norms, or norms that replace the stream, no product closes a block, so it has no such figure
- olmo2, hybrid and QK-norms (of each head): norms within attention count, where no kernel of
  attention computes them
- bfloat16 stream: what one more block costs train.py's model with residual=autocast. Every residual
  read counts here, the closing add's too, which one block leaves out as all have it:
  {2 * config.n_embd / 1000:.1f} kB in each row
- copied: the same, with an addmm that copies its residual operand first, as PyTorch's does
- float32 stream: what one more block costs train.py's model by default; whole: with attention's and
  the MLP's kernels
- what the two products of a gate of gatednorm move is not counted, as of any product
"""
    write_results(folder, "ledger", list(records.values()), "README.md", text)


if __name__ == "__main__":
    run_program(main)
