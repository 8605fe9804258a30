"""Time every kernel in kernels/, forward and backward, and PyTorch's own and other libraries'.

    python -m bench.kernels --out=results/h100/kernels  # all operators, on the GPU that is here
    python -m bench.kernels --ops=rms_norm,add_rms_norm --channels=768,2048 --dtype=float16

Share of copy bandwidth: the time of a plain copy that moves the fewest bytes the operator needs,
over the arm's own; 100 % is as fast as memory allows. All arms and the copy take turns in a new
random order each round, and every figure is the median of the rounds' ratios (common/stats.py).
Gains are float32, as in training. `unfused` are our own kernels one after the other, where one
operator does it all.

On a GPU, every call has its own inputs and outputs, more than the L2 cache holds, so that it finds
a cold cache. Calls are captured in CUDA graphs, so that no time of the host counts. Other libraries
(Liger-Kernel, quack, flash-attention) take part if they are installed. An arm whose results are
wrong is not timed. On a CPU the Triton kernels cannot run: there the PyTorch references are timed
against PyTorch's own functions. The last line is JSON.
"""

import common.interrupt  # noqa: F401

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

import torch
import torch._functorch.config
from torch import Tensor
from tqdm import tqdm

from bench.kernel_arms import (
    OPERATORS,
    UNFUSED,
    UNSCALED,
    Function,
    Operator,
    arms_of,
    make_inputs,
)
from common.environment import installed, timing_environment
from common.errors import ConfigError, UserError, run_program
from common.output import card, made_with, markdown, span, write_results
from common.stats import median_ratio, paired_times, seconds
from configurator import check_ranges, key, parse_args

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
TRAFFIC = 1 << 30  # bytes that one timing moves at least, by using several sets of inputs in turn
MAX_SETS = 16
QUEUEING = 1_000_000  # cycles: half a millisecond, to queue two events and a graph in
MAX_ERROR = 0.03  # relative L2 error beyond which an arm computes something else

# ------------------------------------------------------------------------------------------- timing


class Case:
    """One operator at one size: `sets` of inputs and gradients that all arms share."""

    def __init__(
        self, operator: Operator, rows: int, channels: int, dtype: torch.dtype, device: torch.device
    ):
        stream = rows * channels * dtype.itemsize  # bytes of one tensor (rows, channels)
        statistics = 4 * operator.statistics * rows
        # The fewest bytes of forward and of backward.
        self.bytes = [streams * stream + statistics for streams in operator.streams]
        count = 1
        if device.type == "cuda":
            count = min(MAX_SETS, max(2, math.ceil(TRAFFIC / min(self.bytes))))
        self.sets = [
            make_inputs(operator.inputs, rows, channels, dtype, device) for _ in range(count)
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

    def copy(self, phase: str) -> None:
        """Move, for every set, the fewest bytes of the operator: half of them read, half written.

        There are as many copies as sets, so that launches cost a copy the same share of its time as
        they cost the arms.
        """
        half = self.bytes[phase == "backward"] // 2
        for source, target in self.copies:
            target[:half].copy_(source[:half])

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


def _several(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return an operator's output or outputs as a tuple."""
    return (value,) if isinstance(value, Tensor) else tuple(value)


def runner(case: Case, arm: Function, phase: str, device: torch.device) -> Callable[[], None]:
    """Return a call that does `phase` for all sets of a case; on a GPU it replays a CUDA graph."""

    def make_work() -> Callable[[], list]:
        if phase == "forward":
            return lambda: case.forward(arm)
        outputs = case.forward(arm)
        return lambda: case.backward(outputs)

    if device.type != "cuda":
        return make_work()
    # Backward kernels run on the stream of their forward, so all of it happens on the stream that
    # is captured.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work = make_work()
        for _ in range(2):  # compilation and tuning
            work()
    return captured(work, stream)


def captured(work: Callable[[], Any], stream: torch.cuda.Stream) -> Callable[[], None]:
    """Capture `work` as a CUDA graph and return its replay.

    A replay reads and writes the memory of the capture, even if other tensors are there by then. So
    the graph keeps what `work` reads (forward's saved tensors, for a backward) and what it wrote.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        graph.outputs = work()
    graph.kept = work
    return graph.replay


def gpu_seconds(call: Callable[[], None]) -> float:
    """Return the seconds between two events on the GPU.

    The GPU is kept busy until everything is queued, so that it does not wait for the host.
    """
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(QUEUEING)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def measure(
    config: "KernelBenchConfig", name: str, channels: int, device: torch.device
) -> list[dict[str, Any]]:
    """Return records of one operator at one size, forward and backward.

    Raises UserError if our own kernel is wrong.
    """
    torch._dynamo.reset()
    case = Case(OPERATORS[name], config.rows, channels, DTYPES[config.dtype], device)
    with_compiled = config.compiled
    if with_compiled is None:
        with_compiled = device.type == "cuda"
    arms, missing = arms_of(name, device, with_compiled)
    ours = next(iter(arms))
    for arm in [arm for arm in arms if arm != UNSCALED]:
        with others_may_fail(arm, arms, missing):
            error = case.error(arms[arm])
            if error > MAX_ERROR and arm == ours:
                raise UserError(
                    f"{name} at C = {channels}: our own {arm} is wrong (error {error:.2g}): "
                    "correct it first"
                )
            if error > MAX_ERROR:
                raise ValueError(f"wrong, relative error {error:.2g}")
    return [
        record(config, name, channels, phase, case, arms, missing, device)
        for phase in ("forward", "backward")
    ]


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
        lines = str(failure).splitlines() or [""]
        missing.append(f"{arm}: {type(failure).__name__}: {lines[0]}")
        del arms[arm]


def record(
    config: "KernelBenchConfig",
    name: str,
    channels: int,
    phase: str,
    case: Case,
    arms: dict[str, Function],
    missing: list[str],
    device: torch.device,
) -> dict[str, Any]:
    """Measure one operator, size and phase: shares of copy bandwidth, and arms' times over ours."""
    on_gpu = device.type == "cuda"
    calls = {}
    for arm in list(arms):
        with others_may_fail(arm, arms, missing):
            call = runner(case, arms[arm], phase, device)
            call()
            calls[arm] = call
    copy = functools.partial(case.copy, phase)
    calls["copy"] = captured(copy, torch.cuda.Stream()) if on_gpu else copy
    times = paired_times(calls, config.rounds, measure=gpu_seconds if on_gpu else seconds)
    middle = {arm: median(values) / len(case.sets) for arm, values in times.items()}
    fewest = case.bytes[phase == "backward"]
    ours = next(iter(arms))
    bandwidth = fewest / middle.pop("copy")
    shares = {arm: median_ratio(times["copy"], times[arm]) for arm in middle}
    return {
        "operator": name,
        "phase": phase,
        "channels": channels,
        "rows": config.rows,
        "dtype": config.dtype,
        "fewest_bytes": fewest,
        "copy_bytes_per_s": bandwidth,
        "seconds": middle,
        "ours": ours,
        "share": {arm: share["median"] for arm, share in shares.items()},
        "share_interval": {arm: [share["low"], share["high"]] for arm, share in shares.items()},
        "time_over_ours": {
            arm: median_ratio(times[arm], times[ours]) for arm in middle if arm != ours
        },
        "missing": list(missing),
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
        lines.append([row["operator"], row["channels"], row["phase"], *shares, ratio])
    return markdown(["operator", "C", "phase", *arms, "best other / ours"], lines)


# Okabe and Ito's colours can be told apart by colour-blind readers; the markers serve in print.
LOOKS = {
    "triton": ("#D55E00", "o"),
    "reference": ("#0072B2", "s"),
    "torch": ("#009E73", "^"),
    "compiled": ("#CC79A7", "D"),
    "Liger": ("#E69F00", "v"),
    "quack": ("#56B4E9", "P"),
    "flash-attn": ("#000000", "X"),
    UNFUSED: ("#F0E442", "<"),
    UNSCALED: ("#999999", "*"),
}


def plot(records: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draw the share of copy bandwidth over C.

    A row for each operator, forward on the left, backward on the right.
    """
    from common.plotting import plt, save  # matplotlib takes a second to import

    names = list(dict.fromkeys(row["operator"] for row in records))
    figure, axes = plt.subplots(
        len(names),
        2,
        figsize=(9, 1 + 2.2 * len(names)),
        layout="constrained",
        squeeze=False,
        sharex=True,
    )
    for name, line in zip(names, axes):
        for phase, axis in zip(("forward", "backward"), line):
            rows = [row for row in records if (row["operator"], row["phase"]) == (name, phase)]
            for arm in dict.fromkeys(arm for row in rows for arm in row["share"]):
                points = [
                    (row["channels"], 100 * row["share"][arm])
                    for row in rows
                    if arm in row["share"]
                ]
                color, marker = LOOKS[arm]
                axis.plot(*zip(*points), color=color, marker=marker, label=arm)
            axis.set_xscale("log", base=2)
            sizes = sorted({row["channels"] for row in rows})
            axis.set_xticks(sizes, sizes)  # positions, labels
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
            axis.set_title(f"{name}, {phase}", fontsize=10)
        line[0].set_ylabel("% of copy")
    for axis in axes[-1]:
        axis.set_xlabel("channels")
    handles = {
        label: handle
        for axis in axes.flat
        for handle, label in zip(*axis.get_legend_handles_labels())
    }
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=len(handles), fontsize=9
    )
    figure.suptitle(title, fontsize=10)
    save(figure, path)


# -------------------------------------------------------------------------------------- the program


@dataclass(frozen=True)
class KernelBenchConfig:
    """Keys of bench/kernels.py."""

    ops: str = key("all", f"operators, separated by commas: {', '.join(OPERATORS)}")
    channels: tuple[int, ...] = key((768, 1024, 2048, 4096, 8192), "sizes C, separated by commas")
    rows: int = key(65536, "rows (tokens)", least=1)
    dtype: str = key(
        "bfloat16", "of activations; gains, statistics and maths are in float32", tuple(DTYPES)
    )
    rounds: int = key(50, "rounds; in each, every arm is timed once", least=6)
    compiled: bool | None = key(None, "time torch.compile of the references too (auto: on a GPU)")
    device: str = key("auto", "where to run", ("auto", "cpu", "cuda"))
    out: str = key("", "write README.md, kernels.jsonl and kernels.png into this folder")

    def __post_init__(self) -> None:
        check_ranges(self)
        unknown = [name for name in self.names if name not in OPERATORS]
        if unknown:
            raise ConfigError(f"ops: {unknown[0]!r} is none of {', '.join(OPERATORS)}")
        if min(self.channels, default=0) < 1:
            raise ConfigError(
                f"channels={','.join(map(str, self.channels))}: needs whole numbers from 1 on"
            )
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "device=cuda, but torch sees no GPU here: leave it out to time the references"
            )

    @property
    def names(self) -> list[str]:
        return list(OPERATORS) if self.ops == "all" else self.ops.split(",")


def main(argv: list[str]) -> None:
    config, _ = parse_args(KernelBenchConfig, argv, __doc__)
    kind = config.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind)
    if kind == "cpu":
        print(
            "no GPU: PyTorch references of the kernels against PyTorch's own functions, "
            "cache not flushed"
        )
    torch.manual_seed(0)
    place = timing_environment(device)
    place["versions"] |= installed("triton", "liger-kernel", "quack-kernels", "flash-attn")
    records = []
    cases = len(config.names) * len(config.channels)
    bar = tqdm(total=cases, unit="case", disable=not sys.stderr.isatty())
    # With donated buffers a compiled backward could run only once.
    with torch._functorch.config.patch(donated_buffer=False):
        for name in config.names:
            for channels in config.channels:
                records += [row | place for row in measure(config, name, channels, device)]
                # Written after each case: a time limit may come before the last one.
                if config.out:
                    text = report(config, records) + "\n![Share of copy bandwidth](kernels.png)\n"
                    write_results(Path(config.out), "kernels", records, "README.md", text)
                bar.update()
    bar.close()
    if config.out:
        title = f"{records[0]['device']}, {records[0]['rows']:,} rows"
        plot(records, Path(config.out) / "kernels.png", title)
    print(report(config, records))
    names = ("operator", "phase", "channels", "share")
    summary = [{name: row[name] for name in names} for row in records]
    print(json.dumps(summary))


def report(config: KernelBenchConfig, records: list[dict[str, Any]]) -> str:
    """Return README.md of the results folder."""
    row = records[0]
    missing = sorted({reason for row in records for reason in row["missing"]})
    copy = median(row["copy_bytes_per_s"] for row in records) / 1e9  # GB/s
    if row["ours"] == "triton":
        where = "CUDA graphs, cold L2 cache"
    else:
        where = "Triton kernels cannot run here: `reference` is ours"
    lines = [
        "# Kernels beside PyTorch's own and other people's",
        "",
        f"{card(row)}. {row['rows']:,} rows, {row['dtype']}; {where}.",
        "",
        f"Shares: time of a copy that moves the fewest bytes the operator can do with ({copy:,.0f} "
        "GB/s), over the arm's. Last column: the fastest of the others, its time over ours, with "
        f"a 95 % interval (above 1: ours is faster); `{UNSCALED}` computes less and is left out of "
        f"it. Both are medians of {config.rounds} rounds' ratios.",
        "",
        f"Made by `python -m bench.kernels {made_with(config)}`.",
        "",
        table(records),
        "",
    ]
    return "\n".join([*lines, *(f"- not timed: {reason}" for reason in missing)]) + "\n"


if __name__ == "__main__":
    run_program(main)
