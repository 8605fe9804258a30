"""Time every kernel in kernels/, forward and backward, and PyTorch's own and other libraries'.

    python -m bench.kernels --out=results/h100/kernels  # all operators, on the GPU that is here
    python -m bench.kernels --ops=rms_norm,add_rms_norm --channels=768,2048 --dtype=float16
    python -m bench.kernels --arms=triton  # ours and the copies alone
    python -m bench.kernels --host=True  # what a call costs the host, in place of the rest

Share of copy bandwidth: the time of a plain copy that moves the fewest bytes the operator needs,
over the arm's own; 100 % is as fast as memory allows. On a GPU the copy is the faster one of
cudaMemcpy and a Triton kernel. All arms and the copies take turns in a new random order each round,
and every figure is the median of the rounds' ratios (common/stats.py). Gains are float32, as in
training.

On a GPU, every call has its own inputs and outputs, at most 16 sets in turn. Where they are more
than twice the L2 cache, a call finds a cold cache; a table with smaller rows says so. Calls are
captured in CUDA graphs, so that no time of the host counts. Where a tensor would be larger than 512
MiB there are fewer rows, and graphs of a phase share their memory, so that all fits on a GPU of 80
GB. Other libraries (Liger-Kernel, quack, flash-attention, TransformerEngine) take part if they are
installed. An arm whose results are wrong is not timed. On a CPU the Triton kernels cannot run:
there the PyTorch references are timed against PyTorch's own functions. The last line is JSON.

The host's time is that of forward and backward on 8 float32 rows of 768 channels, on one thread of
the CPU, with launches of Triton kernels that do nothing: of ours, and over PyTorch's. It needs
Triton and no GPU. PyTorch's computes as well, which takes 8 rows little time; and its F.rms_norm,
one operator on a GPU, is several on a CPU, while its F.layer_norm is one on both.
"""

import contextlib
import functools
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch._functorch.config
from torch import Tensor
from tqdm import tqdm

from bench.kernel_arms import (
    ARMS,
    OPERATORS,
    UNSCALED,
    Function,
    arms_of,
    make_inputs,
    torch_runs_quack,
)
from common.environment import find_device, installed, timing_environment
from common.errors import ConfigError, UserError, failure_line, run_program
from common.output import card, made_with, markdown, span, write_results
from common.stats import median_ratio
from configurator import key, parse_args
from decode.timing import QUEUEING, captured, time_arms

TRAFFIC = 1 << 30  # bytes that one timing moves at least, by using several sets of inputs in turn
MAX_SETS = 16
LARGEST = 1 << 29  # bytes of one tensor (rows, C): with more of them rivals run out of memory
MAX_ERROR = 0.03  # relative L2 error beyond which an arm computes something else
PHASES = ("forward", "backward")
COPY = "copy: "  # begins the names of copies among what is timed


@dataclass(frozen=True)
class KernelBenchConfig:
    """Keys of bench/kernels.py."""

    ops: tuple[str, ...] = key(tuple(OPERATORS), "operators, separated by commas")
    channels: tuple[int, ...] = key((768, 1024, 2048, 4096, 8192), "sizes C", least=1)
    rows: tuple[int, ...] = key((65536, 12288), "rows (tokens), the most of them", least=1)
    arms: tuple[str, ...] = key(
        (), "arms beside ours, separated by commas ('': all that there are; triton: none)"
    )
    dtype: str = key(
        "bfloat16",
        "of activations; gains, statistics and maths are in float32",
        ("float16", "bfloat16", "float32"),
    )
    rounds: int = key(50, "rounds; in each, every arm is timed once", least=6)
    host: bool = key(False, "time the host alone, without launches")
    device: str = key("auto", "where to run", ("auto", "cpu", "cuda"))
    out: str = key("", "write README.md and kernels.jsonl into this folder")

    def __post_init__(self) -> None:
        if unknown := {*self.ops} - {*OPERATORS}:
            raise ConfigError(f"ops: {min(unknown)!r} is none of {', '.join(OPERATORS)}")
        if unknown := {*self.arms} - {*ARMS}:
            raise ConfigError(f"arms: {min(unknown)!r} is none of {', '.join(ARMS)}")


class Case:
    """One operator at one size: `sets` of inputs and gradients that all arms share."""

    def __init__(
        self, name: str, rows: int, channels: int, dtype: torch.dtype, device: torch.device
    ):
        operator = OPERATORS[name]
        self.name = name
        self.channels = channels
        self.device = device
        self.rows = min(rows, LARGEST // (channels * dtype.itemsize))
        stream = self.rows * channels * dtype.itemsize  # bytes of one tensor (rows, channels)
        statistics = 4 * operator.statistics * self.rows
        # The fewest bytes of each phase.
        self.bytes = [streams * stream + statistics for streams in operator.streams]
        count = sets_of(min(self.bytes)) if device.type == "cuda" else 1
        self.sets = [
            make_inputs(operator.inputs, self.rows, channels, dtype, device) for _ in range(count)
        ]
        outputs = _several(operator.plain(*self.sets[0]))
        self.gradients = [[torch.randn_like(output) for output in outputs] for _ in range(count)]
        self.copies = [
            torch.zeros(2, max(self.bytes) // 2, dtype=torch.uint8, device=device)
            for _ in range(count)
        ]
        self.plain = operator.plain

    def forward(self, arm: Function) -> list[tuple[Tensor, ...]]:
        """Return the outputs for every set."""
        return [_several(arm(*inputs)) for inputs in self.sets]

    def backward(self, outputs: list[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
        """Return the gradients of all inputs that need one, for outputs of `forward`."""
        found = []
        for inputs, output, gradients in zip(self.sets, outputs, self.gradients):
            needed = [value for value in inputs if value.requires_grad]
            found.append(torch.autograd.grad(output, needed, gradients, retain_graph=True))
        return found

    def work(self, arm: Function, phase: str) -> Callable[[], list]:
        """Return a call that does `phase` for all sets, after the forward that it needs."""
        if phase == "forward":
            return functools.partial(self.forward, arm)
        return functools.partial(self.backward, self.forward(arm))

    def moving(self, copy: Callable[[Tensor, Tensor], Any], phase: str) -> Callable[[], None]:
        """Return a call that moves, for every set, the fewest bytes that the operator needs.

        Half of them are read, half written. There are as many copies as sets, so that launches cost
        a copy the same share of its time as they cost the arms.

        Args:
            copy: called with target and source.
            phase: of the operator.
        """
        half = self.bytes[PHASES.index(phase)] // 2

        def move() -> None:
            for source, target in self.copies:
                copy(target[:half], source[:half])

        return move

    def error(self, arm: Function) -> float:
        """Return the largest relative L2 error of an output or gradient of the first set.

        The reference is the plain formula.
        """
        found = []
        for function in (arm, self.plain):
            output = _several(function(*self.sets[0]))
            needed = [value for value in self.sets[0] if value.requires_grad]
            found.append([*output, *torch.autograd.grad(output, needed, self.gradients[0])])
        pairs = [(ours.detach().float(), plain.detach().float()) for ours, plain in zip(*found)]
        return max(
            ((ours - plain).norm() / plain.norm()).nan_to_num(math.inf).item()
            for ours, plain in pairs
        )


def sets_of(fewest: int) -> int:
    """Return how many sets of inputs a GPU gets, for an operator that moves `fewest` bytes."""
    return min(MAX_SETS, max(2, math.ceil(TRAFFIC / fewest)))


def _several(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return an operator's output or outputs as a tuple."""
    return (value,) if isinstance(value, Tensor) else tuple(value)


# --------------------------------------------------------------------------------------- measuring


@contextlib.contextmanager
def others_may_fail(arm: str, arms: dict[str, Function], missing: list[str]) -> Iterator[None]:
    """Remove an arm that fails within the block, and note the reason.

    The first arm is ours; its failure is raised.
    """
    try:
        yield
    except Exception as failure:
        # What another library cannot do is no failure of this program.
        if arm == next(iter(arms)):
            raise
        missing.append(f"{arm}: {failure_line(failure)}")
        del arms[arm]


def measure(
    config: KernelBenchConfig, name: str, rows: int, channels: int, device: torch.device
) -> list[dict[str, Any]]:
    """Return records of one operator at one size, forward and backward.

    Raises UserError if our own kernel is wrong.
    """
    torch._dynamo.reset()
    case = Case(name, rows, channels, getattr(torch, config.dtype), device)
    arms, missing = arms_of(name, device, config.arms)
    for arm in [arm for arm in arms if arm != UNSCALED]:
        with others_may_fail(arm, arms, missing):
            error = case.error(arms[arm])
            if error > MAX_ERROR:
                raise UserError(
                    f"{arm} of {name} at C = {channels} is wrong, relative error {error:.2g}"
                )
    found = []
    for phase in PHASES:
        found.append(record(config, case, phase, arms, missing))
        if found[-1]["rounds"] < config.rounds:
            break  # interrupted
    return found


def calls_of(
    case: Case, phase: str, arms: dict[str, Function], missing: list[str]
) -> dict[str, Callable[[], Any]]:
    """Return what is timed for a phase, by name: arms, and copies (COPY)."""
    copies = {"cudaMemcpy": Tensor.copy_}
    on_gpu = case.device.type == "cuda"
    pool = None
    if on_gpu:
        from bench.copy_kernel import copy

        torch.cuda.empty_cache()  # of the phase before
        copies["triton"] = copy
        pool = torch.cuda.graph_pool_handle()

    def prepared(make_work: Callable[[], Callable[[], Any]]) -> Callable[[], Any]:
        return captured(make_work, pool) if on_gpu else make_work()

    calls = {}
    for arm in list(arms):
        with others_may_fail(arm, arms, missing):
            call = prepared(functools.partial(case.work, arms[arm], phase))
            call()
            calls[arm] = call
    for name, copy in copies.items():
        calls[COPY + name] = prepared(functools.partial(case.moving, copy, phase))
    return calls


def l2_bytes(device: torch.device) -> int:
    """Return the size of a GPU's L2 cache; 0 of a CPU."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0


def is_cold(moved: int, cache: int) -> bool:
    """Say whether a call finds nothing of its own in a cache, after all sets moved so many bytes.

    Twice the cache is asked, since a cache need not throw away what is oldest.
    """
    return moved >= 2 * cache


def record(
    config: KernelBenchConfig, case: Case, phase: str, arms: dict[str, Function], missing: list[str]
) -> dict[str, Any]:
    """Measure one operator, size and phase: shares of copy bandwidth, and arms' times over ours."""
    calls = calls_of(case, phase, arms, missing)
    times = time_arms(calls, config.rounds, case.device, cycles=QUEUEING, least=6)
    middle = {name: median(values) / len(case.sets) for name, values in times.items()}
    fewest = case.bytes[PHASES.index(phase)]
    moves = [name for name in calls if name.startswith(COPY)]
    ours = next(iter(arms))
    copy = min(moves, key=middle.get)
    shares = {arm: median_ratio(times[copy], times[arm]) for arm in arms}
    return {
        "operator": case.name,
        "phase": phase,
        "channels": case.channels,
        "rows": case.rows,
        "dtype": config.dtype,
        "rounds": len(times[ours]),
        "fewest_bytes": fewest,
        "is_cold": is_cold(fewest * len(case.sets), l2_bytes(case.device)),
        "copy": copy,
        "copy_bytes_per_s": {name: fewest / middle[name] for name in moves},
        "seconds": {arm: middle[arm] for arm in arms},
        "ours": ours,
        "share": {arm: share["median"] for arm, share in shares.items()},
        "share_interval": {arm: [share["low"], share["high"]] for arm, share in shares.items()},
        "time_over_ours": {
            arm: median_ratio(times[arm], times[ours]) for arm in arms if arm != ours
        },
        "missing": list(missing),
    }


def host_times(name: str, rounds: int) -> dict[str, Any]:
    """Return the host's microseconds for both passes of our operator, and the ratio to PyTorch's.

    Without TRITON_INTERPRET: in the interpreter launches cannot be left out.
    """
    import triton

    from kernels import binding

    torch.set_num_threads(1)
    case = Case(name, 8, 768, torch.float32, torch.device("cpu"))
    ours = OPERATORS[name].ours("triton")
    calls = {
        "ours": lambda: case.backward(case.forward(ours)),
        "torch": lambda: case.backward(case.forward(case.plain)),
    }
    with (
        mock.patch.object(triton.JITFunction, "run", lambda *_, **__: None),
        mock.patch.object(binding, "INTERPRETED", True),  # so that it takes tensors of a CPU
    ):
        time_arms(calls, 2, case.device)  # warms up
        times = time_arms(calls, rounds, case.device, steps=50)
    return {
        "operator": name,
        "ours, us": round(1e6 * median(times["ours"])),
        "over torch": median_ratio(times["ours"], times["torch"]),
    }


# ------------------------------------------------------------------------------------------ results


def table(records: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the shares of copy bandwidth.

    Its last column compares our arm with the best of the others.
    """
    arms = list(dict.fromkeys(arm for row in records for arm in row["share"]))
    lines = []
    for row in records:
        rivals = {arm: ratio for arm, ratio in row["time_over_ours"].items() if arm != UNSCALED}
        best = min(rivals, key=lambda arm: rivals[arm]["median"], default="")
        ratio = f"{best}: " + span(rivals[best], "{:.3f}") if best else ""
        shares = (f"{row['share'][arm]:.0%}" if arm in row["share"] else "" for arm in arms)
        size = (f"{row['rows']:,}", row["channels"], row["phase"])
        lines.append([row["operator"], *size, *shares, ratio])
    return markdown(["operator", "rows", "C", "phase", *arms, "best other / ours"], lines)


def report(config: KernelBenchConfig, records: list[dict[str, Any]]) -> str:
    """Return README.md of the results folder."""
    row = records[0]
    missing = sorted({reason for row in records for reason in row["missing"]})
    speeds = []
    for name in row["copy_bytes_per_s"]:
        speed = median(row["copy_bytes_per_s"][name] for row in records) / 1e9
        speeds.append(f"{name.removeprefix(COPY)} {speed:,.0f} GB/s")
    on_gpu = row["ours"] == "triton"
    warm = sum(not row.get("is_cold", True) for row in records)  # older records have no such key
    cache = f"L2 cache not cold in {warm} of {len(records)} rows" if warm else "cold L2 cache"
    where = f"CUDA graphs, {cache}" if on_gpu else "no Triton kernels here: `reference` is ours"
    quack = "quack's kernels" if row["torch_runs_quack"] else "its own kernels"
    lines = [
        "# Kernels beside PyTorch's own and other people's",
        "",
        f"{card(row)}. {row['dtype']}; {where}. PyTorch's RMSNorm runs {quack}.",
        "",
        "Shares: time of a copy that moves the fewest bytes the operator can do with, over the "
        f"arm's; the faster copy of {', '.join(speeds)}. Last column: the fastest of the others, "
        f"its time over ours, with a 95 % interval (above 1: ours is faster); `{UNSCALED}` "
        f"computes less and is left out of it. Both are medians of {config.rounds} rounds' ratios.",
        "",
        f"Made by `python -m bench.kernels {made_with(config)}`.",
        "",
        table(records),
        "",
    ]
    return "\n".join([*lines, *(f"- not timed: {reason}" for reason in missing)]) + "\n"


def main(argv: list[str]) -> None:
    """Measure all cases, and write the results after each: time may be over before the last."""
    config, _ = parse_args(KernelBenchConfig, argv, __doc__)
    if config.host:
        for name in config.ops:
            print(json.dumps(host_times(name, config.rounds)), flush=True)
        return
    device = find_device(config.device)
    torch.manual_seed(0)
    place = timing_environment(device)
    place["versions"] |= installed(
        "triton", "liger-kernel", "quack-kernels", "flash-attn", "transformer-engine"
    )
    place["torch_runs_quack"] = torch_runs_quack()
    cases = [
        (name, rows, channels)
        for name in config.ops
        for rows in config.rows
        for channels in config.channels
    ]
    records = []
    # With donated buffers a compiled backward could run only once.
    with torch._functorch.config.patch(donated_buffer=False):
        for name, rows, channels in tqdm(cases, unit="case", disable=not sys.stderr.isatty()):
            found = measure(config, name, rows, channels, device)
            records += [row | place for row in found]
            if config.out:
                write_results(
                    Path(config.out), "kernels", records, "README.md", report(config, records)
                )
            if found[-1]["rounds"] < config.rounds:
                break  # interrupted
    print(report(config, records))
    names = ("operator", "phase", "rows", "channels", "share")
    print(json.dumps([{name: row[name] for name in names} for row in records]))


if __name__ == "__main__":
    run_program(main)
