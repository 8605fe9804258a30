"""What a decoding step costs, counted without a GPU: launches, bytes, and the time they predict.

A step calls one function per launch (kernels/decode/reference.py). Here it runs once, if need be on
tensors without memory, under a TorchDispatchMode, which sees every operation of PyTorch:

- The operations inside one launch function are one launch; none, if nothing is computed there, as
  in a norm position without a norm.
- A norm with matrix products (GatedNorm) is a launch for each of them, and one for what it computes
  before, between and after them.
- Any other operation that computes is a launch of its own.

Blocks may differ (coupled_first, coupled_span), so each is counted by itself, and launches per
block are a mean over all of them.

    predicted time of a step = bytes that must be read / bandwidth + launches * time of a launch

The bytes are the same for all arms and norms but GatedNorm, which has matrices of its own: every
matrix once, and the keys and values up to the context. This is a model, not a measurement: its
first term is a lower bound, and it has neither the ramp-up of each kernel's loads nor the drain at
its end. So figures that others have measured stand beside it (MEASURED), where there are any.

A norm counts as one launch, because it works on rows: in a compiled step it is one, and our kernels
for RMSNorm and LayerNorm are. Where the norms of a fused step are called directly, on a GPU,
PyTorch runs several kernels for those of other letters than R, L and s, and P or B with a residual
weight or a reader; `bench_decode.py --trace` shows them.
"""

import functools
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from decode.arms import arms_of, packed_arm
from decode.pack import PackedGPT
from decode.step import Decoder, decode_block, decode_logits
from kernels.decode import reference as decode_reference
from model import GPT

LAUNCHES = (
    *("embed", "norm", "heads", "attend", "heads_attend", "combine", "best", "take"),
    *("matmul", "matmul_add", "activation", "project"),
)
PRODUCTS = {"mm", "addmm", "bmm"}  # operations of ATen
# (model, batch) -> ms/token that others have published of a step in bfloat16
MEASURED = {
    ("random:llama3.2-1b", 1): {
        "H200, CUDA graph and dependent launches": 0.795,
        "H200, Hazy's megakernel": 0.760,
        "H100, CUDA graph and dependent launches": 0.980,
        "H100, Hazy's megakernel": 0.973,
    }
}
FREE = {"empty", "empty_like", "detach", "_unsafe_view", "lift_fresh"}  # of ATen: no kernel runs


class LaunchLedger(TorchDispatchMode):
    """Count the launches of a step that runs inside `with ledger:` and calls `ledger.ops`."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[str] = []  # names, in order
        self.inside = ""  # name of the launch function that runs
        self.computed = False  # has it computed anything so far?
        self.ops = SimpleNamespace(**{name: self.counted(name) for name in LAUNCHES})

    def counted(self, name: str) -> Callable:
        """Return the launch function `name`, which counts itself."""
        function = getattr(decode_reference, name)

        @functools.wraps(function)
        def launch(*args, **kwargs):
            self.inside = name
            self.computed = False
            result = function(*args, **kwargs)
            self.inside = ""
            if self.computed:
                self.launches.append(name)
            return result

        return launch

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation._schema.name.split("::")[1]
        computes = not operation.is_view and name not in FREE
        if computes and not self.inside:
            self.launches.append(name)
        if name in PRODUCTS and self.inside == "norm":
            if self.computed:
                self.launches.append("norm")
            self.launches.append(name)
            self.computed = False
        else:
            self.computed = self.computed or computes
        return operation(*args, **(kwargs or {}))


@torch.no_grad()
def launches(packed: PackedGPT, batch: int, length: int) -> list[Counter]:
    """Count the launches of a step for `batch` sequences and a cache of `length` tokens.

    Returns:
        Counts by name: [those at the ends of the step, those of block 0, those of block 1, ...].
    """
    decoder = Decoder(packed, batch, length)
    ledger = LaunchLedger()
    blocks: list[Counter] = []

    def counted(*args):
        before = len(ledger.launches)
        stream = decode_block(*args)
        blocks.append(Counter(ledger.launches[before:]))
        return stream

    with ledger:
        logits = decode_logits(
            ledger.ops, packed, decoder.caches, decoder.token, decoder.pos, run_block=counted
        )
        values, tokens = ledger.ops.best(logits)
        ledger.ops.take(values, tokens, decoder.token, decoder.pos, decoder.out)
    ends = Counter(ledger.launches) - total(blocks)
    return [ends, *blocks]


def total(counters: list[Counter]) -> Counter:
    return sum(counters, Counter())


def per_block(blocks: list[Counter]) -> dict[str, Any]:
    """Return the means over blocks, launches_per_block and norm_launches_per_block."""
    every = total(blocks)
    return {
        "launches_per_block": mean(every.total(), len(blocks)),
        "norm_launches_per_block": mean(every["norm"], len(blocks)),
    }


def mean(count: int, blocks: int) -> float | int:
    """Return count / blocks: an int if it is a whole number, else rounded to two places."""
    if count % blocks:
        return round(count / blocks, 2)
    return count // blocks


def floor_bytes(packed: PackedGPT, batch: int, context: int) -> int:
    """Return the bytes that a step must read: all matrices, and keys and values of the context.

    Of those a local block reads its window at most.
    """
    config = packed.config
    parts: list[Any] = [*packed.entries, *packed.exits]
    matrices = [part.weight for part in parts]
    for entry in packed.entries:
        if entry.norm is not None:  # GatedNorm has matrices
            matrices += [weight for weight in entry.norm.parameters() if weight.dim() == 2]
    matrix_bytes = sum(matrix.numel() * matrix.element_size() for matrix in matrices)
    seen = sum(min(block.window or context, context) for block in packed.blocks)  # tokens
    elements_per_token = 2 * config.kv_heads * config.head_channels  # of a block
    cache_bytes = elements_per_token * batch * seen * packed.dtype.itemsize
    return matrix_bytes + cache_bytes


def make_ledger(config: Any, spec: str, model: GPT, batch: int) -> dict[str, Any]:
    """Return the ledger of the arms of a config, as a dict for JSON.

    A step gives each of `batch` sequences one token.

    Args:
        config: a DecodeBenchConfig.
        spec: the model's name.
        model: the model, perhaps without memory.
        batch: sequences.
    """
    idx = torch.zeros(1, 8, dtype=torch.int64, device=model.wte.weight.device)
    bandwidth = config.bandwidth or 4.3e12
    rows = {}
    for arm in arms_of(config.arms, model):
        _, packed = packed_arm(config, model, arm, batch, idx)
        counts = launches(packed, batch, config.context)
        of_step = total(counts).total()
        floor_ms = 1e3 * floor_bytes(packed, batch, config.context) / bandwidth
        rows[arm.name] = per_block(counts[1:]) | {
            "launches_per_step": of_step,
            "predicted_ms_per_token": floor_ms + 1e-3 * config.launch_us * of_step,
        }
    return {
        "model": spec,
        "batch": batch,
        "context": config.context,
        "bandwidth": bandwidth,
        "launch_us": config.launch_us,
        "arms": rows,
        "floor_ms_per_token": floor_ms,
    }
