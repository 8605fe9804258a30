"""What a decoding step costs, counted without a GPU: its launches, the bytes it must read, the time
they predict.

A step is written as one function per launch (kernels/decode/reference.py). Here the step runs once,
on tensors without memory if need be, under a TorchDispatchMode which sees every operation of
PyTorch: those inside a launch function are one launch, and a launch that held two matrix products
would be none, so that is refused; any operation outside that computes is a launch of its own.
Blocks need not be alike (coupled_first, coupled_span), so each is counted by itself, and a launch
per block is a mean over all of them.

    predicted time of a step = bytes that must be read / bandwidth + launches * time of a launch

The bytes are the same for all arms: every weight once, and the keys and values up to the context.
It is a bound and a model, not a measurement.
"""

import functools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.output import markdown
from decode.arms import DecodeArm, packed_arm
from decode.pack import PackedGPT
from decode.step import Decoder, decode_block, decode_logits
from hf.config import shape_config
from kernels.decode import reference as decode_reference
from model import GPT

LAUNCHES = (
    "embed",
    "norm",
    "heads",
    "attend",
    "attend_parts",
    "heads_attend",
    "heads_attend_parts",
    "combine",
    "best",
    "take",
    "matmul",
    "matmul_add",
    "activation",
    "scale",
    "norm_activation",
    "project",
    "norm_project",
    "shared_project",
)
PRODUCTS = {"mm", "addmm", "bmm"}
FREE = {"empty", "empty_like", "detach", "_unsafe_view", "lift_fresh"}


class LaunchLedger(TorchDispatchMode):
    """Counts launches.

    `ops` are the launch functions, to be given to a step that runs inside `with ledger:`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[str] = []
        self.inside, self.products = "", 0
        self.ops = SimpleNamespace(**{name: self.counted(name) for name in LAUNCHES})

    def counted(self, name: str):
        function = getattr(decode_reference, name)

        @functools.wraps(function)
        def launch(*words, **keywords):
            self.launches.append(name)
            self.inside, self.products = name, 0
            result = function(*words, **keywords)
            self.inside = ""
            return result

        return launch

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation._schema.name.split("::")[1]
        if not self.inside and not operation.is_view and name not in FREE:
            self.launches.append(name)
        self.products += name in PRODUCTS
        if self.inside and self.products > 1 and "attend" not in self.inside:
            raise RuntimeError(
                f"{self.inside} holds {self.products} matrix products: no launch does that"
            )
        return operation(*args, **(kwargs or {}))


@torch.no_grad()
def launches(packed: PackedGPT, batch: int, length: int) -> list[Counter]:
    """Launches by name of one decoding step, for `batch` sequences and a cache of `length` tokens:
    [those of the ends, those of block 0, those of block 1, ...].
    """
    decoder, ledger = Decoder(packed, batch, length), LaunchLedger()
    blocks: list[Counter] = []

    def counted(*words):
        before = len(ledger.launches)
        result = decode_block(*words)
        blocks.append(Counter(ledger.launches[before:]))
        return result

    given = decoder.packed, decoder.caches, decoder.token, decoder.pos
    with ledger:
        logits = decode_logits(ledger.ops, *given, run_block=counted)
        ledger.ops.take(*ledger.ops.best(logits), decoder.token, decoder.pos, decoder.out)
    return [Counter(ledger.launches) - total(blocks), *blocks]


def total(counters: list[Counter]) -> Counter:
    return sum(counters, Counter())


def per_block(blocks: list[Counter]) -> dict[str, Any]:
    """{launches_per_block, norm_launches_per_block}, means; {blocks}: how many are of each kind,
    where they differ.
    """
    kinds = Counter(tuple(sorted(block.items())) for block in blocks)
    every = total(blocks)
    return {
        "launches_per_block": mean(every.total(), len(blocks)),
        "norm_launches_per_block": mean(every["norm"], len(blocks)),
        "blocks": [{"count": count, "launches": dict(kind)} for kind, count in kinds.items()],
    }


def mean(count: int, blocks: int) -> float | int:
    """A whole number where it is one."""
    return round(count / blocks, 2) if count % blocks else count // blocks


def floor_bytes(packed: PackedGPT, batch: int, context: int) -> int:
    """Bytes that one step must read: every matrix once, and `context` keys and values of every
    sequence.
    """
    config = packed.config
    matrices = [part.weight for part in (*packed.entries, *packed.exits)]
    keys = 2 * config.n_layer * config.kv_heads * config.head_channels * batch * context
    return (
        sum(matrix.numel() * matrix.element_size() for matrix in matrices)
        + keys * packed.dtype.itemsize
    )


def shape_on_meta(spec: str, dtype: torch.dtype) -> GPT | None:
    """The model of a `random:` spec without memory, since a count needs no weights; None for any
    other spec.
    """
    if not spec.startswith("random:"):
        return None
    with torch.device("meta"):
        return GPT(shape_config(spec.removeprefix("random:"))).to(dtype).eval()


def make_ledger(
    model: GPT,
    name: str,
    arms: list[DecodeArm],
    batch: int,
    context: int,
    bandwidth: float,
    launch_us: float,
    keys: dict[str, Any],
    library_from: int,
) -> dict[str, Any]:
    """The ledger of `arms` as a dict for JSON. bandwidth in bytes/s; a step gives each sequence one
    token.
    """
    device, rows, floor = model.wte.weight.device, {}, 0.0
    idx = torch.zeros(1, 8, dtype=torch.int64, device=device)
    for arm in arms:
        packed = packed_arm(model, arm, batch, idx, keys, library_from)[1]
        parts = launches(packed, batch, context)
        of_step = total(parts).total()
        floor = 1e3 * floor_bytes(packed, batch, context) / bandwidth
        rows[arm.name] = per_block(parts[1:]) | {
            "launches_per_step": of_step,
            "predicted_ms_per_token": floor + 1e-3 * launch_us * of_step,
        }
    return {
        "model": name,
        "batch": batch,
        "context": context,
        "bandwidth": bandwidth,
        "launch_us": launch_us,
        "arms": rows,
        "floor_ms_per_token": floor,
    }


def ledger_table(ledger: dict[str, Any]) -> str:
    """Markdown."""
    heads = [
        "arm",
        "launches per block",
        "of norms",
        "launches per step",
        "predicted ms/token",
        "share of floor",
    ]
    floor = ledger["floor_ms_per_token"]
    return markdown(
        heads,
        (
            [
                name,
                row["launches_per_block"],
                row["norm_launches_per_block"],
                row["launches_per_step"],
                f"{row['predicted_ms_per_token']:.3f}",
                f"{floor / row['predicted_ms_per_token']:.0%}",
            ]
            for name, row in ledger["arms"].items()
        ),
    )
