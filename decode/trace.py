"""One decoding step in the profiler: a Chrome trace per arm, and kernels per block.

A trace is what Figure 4 of Loretz & Hochreiter 2026 shows. Kernels and device copies of a block are
the difference of a step with all blocks and a step with the first block alone. They are compared
with what the launch ledger counts for the same blocks.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from common.errors import UserError
from common.output import writing
from decode.arms import arms_of, packed_arm
from decode.ledger import launches, mean, total
from decode.step import Decoder
from model import GPT


def profiled(call: Callable[[], Any], cuda: bool) -> tuple[profile, list]:
    """Return (profiler, its events on the GPU, or on the CPU) of a call."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as profiler:
        call()
        if cuda:
            torch.cuda.synchronize()
    wanted = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    return profiler, [event for event in profiler.events() if event.device_type == wanted]


def traced(decoder: Decoder, idx: Tensor, path: Path | None) -> list[str]:
    """Trace one step after the prompts idx (B, T); write the trace to `path`, if there is one.

    Returns:
        The name of each kernel and device copy. Kernels of a CUDA graph appear one by one. On a CPU
        these are the operators that no other one called.

    Raises:
        UserError: the profiler saw no kernel.
    """
    for _ in range(3):
        decoder.prefill(idx)
        decoder.step()
    decoder.rewind(idx.shape[1])
    profiler, events = profiled(decoder.step, idx.is_cuda)
    if path is not None:
        profiler.export_chrome_trace(str(path))
    names = [event.name for event in events if event.cpu_parent is None]
    names = [name for name in names if not name.lower().startswith("torch-compiled")]
    if not names:
        raise UserError(
            "trace: the profiler saw no kernels: end other profilers; "
            "is torch built for this driver?"
        )
    return names


def compare(kernels: Counter, ledger: Counter, blocks: int) -> dict[str, Any]:
    """Compare the kernels of a trace with the launches of the ledger, for the same `blocks` blocks.

    Returns:
        kernels_per_block, ledger_per_block, equal, and both by name. A count below 0 is of a name
        that the shorter step alone has.
    """
    by_name = {name: mean(count, blocks) for name, count in kernels.items() if count}
    # A copy always differs: no launch of the ledger is one.
    has_copy = any(name.lower().startswith(("memcpy", "memset")) for name in by_name)
    return {
        "kernels_per_block": mean(kernels.total(), blocks),
        "ledger_per_block": mean(ledger.total(), blocks),
        "equal": kernels.total() == ledger.total() and not has_copy,
        "kernels": by_name,
        "ledger": {name: mean(count, blocks) for name, count in ledger.items()},
    }


def trace_arms(config: Any, spec: str, model: GPT, prompt: Tensor, batch: int) -> dict[str, Any]:
    """Trace every arm into config.out.

    Returns:
        {"arms": {name: what `compare` returns, kernels_per_step}}.

    Raises:
        UserError: the model has one block, or the folder cannot be written.
    """
    if model.config.n_layer < 2:
        raise UserError(
            "trace: kernels per block are a difference, so it takes a model of two blocks or more"
        )
    folder = Path(config.out)
    with writing(folder):
        pass  # a folder that cannot be written is refused now, not after the traces
    idx = prompt.expand(batch, -1).contiguous()
    filled = idx.shape[1]
    rows = {}
    for arm in arms_of(config.arms, model):
        _, packed = packed_arm(model, arm, batch, prompt, config.norm_keys, config.library_from)
        shorter = dataclasses.replace(packed, blocks=packed.blocks[:1])
        for name, compiled, tuned in config.variants(arm, packed.level, idx.device):
            names = []
            for part, path in ((packed, folder / f"{name}-{batch}.json"), (shorter, None)):
                decoder = Decoder(part, batch, filled + 8, compiled=compiled, tuned=tuned)
                names.append(traced(decoder, idx, path))
                torch._dynamo.reset()
            ledger = total(launches(packed, batch, filled + 8)[2:])
            rows[name] = compare(difference(*map(Counter, names)), ledger, len(packed.blocks) - 1)
            rows[name]["kernels_per_step"] = len(names[0])
            found = (
                f"{len(names[0])} kernels in a step, {rows[name]['kernels_per_block']} per block"
            )
            verdict = "equal" if rows[name]["equal"] else f"differs: {rows[name]}"
            print(f"{name}: {found}, the ledger's {rows[name]['ledger_per_block']}: {verdict}")
    return {"model": spec, "batch": batch, "arms": rows}


def difference(more: Counter, fewer: Counter) -> Counter:
    """Return the names of the kernels that more blocks add, without inductor's numbers.

    Two compilations number their kernels differently.
    """
    left = Counter(re.sub(r"_\d+$", "", name) for name in more.elements())
    left.subtract(re.sub(r"_\d+$", "", name) for name in fewer.elements())
    return left
