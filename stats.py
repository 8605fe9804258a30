"""Paired statistics, one copy for every bench and report."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class Ratio:
    """Geometric mean of paired ratios with its 95 % t interval (on logarithms)."""

    mean: float
    low: float
    high: float
    n: int


def paired_ratio(numerator: list[float], denominator: list[float]) -> Ratio:
    """Ratio of paired positive measurements. Raises ValueError below two pairs."""
    if len(numerator) != len(denominator) or len(numerator) < 2:
        raise ValueError("a paired ratio wants two pairs or more")
    logs = np.log(np.array(numerator) / np.array(denominator))
    half = stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / np.sqrt(len(logs))
    return Ratio(*(float(np.exp(value)) for value in (logs.mean(), logs.mean() - half, logs.mean() + half)), len(logs))


def seconds(arm: Callable[[], None]) -> float:
    """Wall-clock seconds of one call."""
    start = perf_counter()
    arm()
    return perf_counter() - start


def paired_times(
    arms: dict[str, Callable[[], None]], rounds: int, seed: int = 0, after_round: Callable[[], None] | None = None,
    measure: Callable[[Callable[[], None]], float] = seconds,
) -> dict[str, list[float]]:  # fmt: skip
    """Seconds of each arm in each round, as `measure` tells them; in every round all arms run once, in a new random
    order, so that a drift of the machine hits all alike."""
    order, times = np.random.RandomState(seed), {name: [] for name in arms}
    for _ in range(rounds):
        for index in order.permutation(len(arms)):
            name = list(arms)[index]
            times[name].append(measure(arms[name]))
        if after_round is not None:
            after_round()
    return times
