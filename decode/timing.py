"""The timer of every bench: arms take turns in one process.

In every round each arm runs once, in a new random order (common/stats.py). On a GPU the time is
that between two events around the call. On a CPU with one thread it is the process's own, which
other programs disturb less; with more threads a clock's.
"""

import contextlib
import functools
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tqdm import tqdm

from common.stats import paired_times, seconds

QUEUEING = 1_000_000  # cycles: half a millisecond, to queue two events and a graph in


def captured(
    make_work: Callable[[], Callable[[], Any]],
    pool: Any = None,
    undo: Callable[[], None] | None = None,
) -> Callable[[], None]:
    """Capture work as a CUDA graph and return its replay.

    What the work allocates belongs to the graph and is written by every replay. Nobody reads it, so
    graphs of one pool share their memory.

    Args:
        make_work: makes the work on the stream that is captured: a backward kernel runs on the
            stream of its forward. What it holds, such as forward's saved tensors, stays.
        pool: of torch.cuda.graph_pool_handle, shared with other graphs; None for one of its own.
        undo: called after each call before the capture, for work that changes what it reads.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work = make_work()
        for _ in range(2):  # compilation, tuning, first allocations
            work()
            if undo is not None:
                undo()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        work()
    graph.kept = work
    return graph.replay


def gpu_seconds(call: Callable[[], Any], cycles: int = 0) -> float:
    """Return the seconds between two events on the GPU, before and after a call.

    Args:
        cycles: how long the GPU is kept busy before, so that a call that takes the host less than
            that does not wait for it.
    """
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    if cycles:
        torch.cuda._sleep(cycles)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


@contextlib.contextmanager
def signals_interrupt() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt, as Ctrl-C does.

    SIGINT is set as well: a shell's background job is started without it.
    """
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)


def time_arms(
    arms: dict[str, Callable[[], Any]],
    rounds: int,
    device: torch.device,
    steps: int = 1,
    cycles: int = 0,
    least: int = 2,
) -> dict[str, list[float]]:
    """Return arm -> seconds of one call in each round.

    Ctrl-C or SIGTERM ends it; an unfinished round is left out.

    Args:
        steps: calls of an arm's turn, timed together.
        cycles: as gpu_seconds takes them.
        least: rounds without which an interrupted measurement is none (KeyboardInterrupt).
    """

    def turn(call: Callable[[], Any]) -> None:
        for _ in range(steps):
            call()

    turns = {name: functools.partial(turn, call) for name, call in arms.items()}
    is_one_thread = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if is_one_thread else time.perf_counter
    measure = functools.partial(seconds, clock=clock)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        measure = functools.partial(gpu_seconds, cycles=cycles)
    with (
        signals_interrupt(),
        tqdm(total=rounds, unit="round", disable=not sys.stderr.isatty()) as bar,
    ):
        times = paired_times(turns, rounds, after_round=bar.update, measure=measure, least=least)
    return {name: [value / steps for value in values] for name, values in times.items()}
