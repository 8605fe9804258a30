"""Statistics of paired comparisons, one copy for report.py and every bench.

A *difference* is one number a pair: arm minus baseline at the same seed. Verdicts come from the
paired t interval, Holm-corrected over arms, and from TOST; permutation test and bootstrap stand
beside and decide nothing.
"""

import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter, process_time

import numpy as np
from scipy import stats

ALPHA = 0.05  # of every test, after correction
POWER = 0.8  # for the minimal detectable effect and the number of seeds


# --------------------------------------------------------------------------- samples of differences


@dataclass(frozen=True)
class Estimate:
    """A mean difference with its standard error (not the standard deviation) and degrees of
    freedom.
    """

    mean: float
    se: float
    df: float

    def p_value(self) -> float:
        """Two-sided p of Student's t for a true difference of zero."""
        if self.se == 0:
            return 1.0 if self.mean == 0 else 0.0
        return float(2 * stats.t.sf(abs(self.mean) / self.se, self.df))

    def interval(self, alpha: float = ALPHA) -> tuple[float, float]:
        """The t interval of confidence 1 - alpha."""
        half = float(stats.t.isf(alpha / 2, self.df)) * self.se if self.se else 0.0
        return self.mean - half, self.mean + half

    def tost(self, delta: float) -> float:
        """p of the two one-sided tests that the true difference lies within (-delta, delta);
        Schuirmann 1987.
        """
        room = delta - abs(self.mean)
        if self.se == 0:
            return 0.0 if room > 0 else 1.0
        return float(stats.t.sf(room / self.se, self.df))


def paired(differences: np.ndarray) -> Estimate:
    """Mean of differences (n,), n >= 2, with SD / sqrt(n) and n - 1 degrees of freedom.

    Raises ValueError.
    """
    if len(differences) < 2:
        raise ValueError("a paired comparison wants two pairs or more")
    return Estimate(
        float(np.mean(differences)),
        float(np.std(differences, ddof=1)) / len(differences) ** 0.5,
        len(differences) - 1,
    )


def clustered(differences: np.ndarray, clusters: np.ndarray) -> Estimate:
    """Mean of differences (n,) that are alike within a cluster, e.g. windows of one document;
    clusters (n,) names it.

    Standard error robust to any dependence within clusters, by the sums of their residuals, times G
    / (G - 1) for G clusters (Liang & Zeger 1986). Degrees of freedom: the effective number of
    clusters, (sum of sizes)^2 / sum of squared sizes, less 1; G of unlike sizes are worth fewer.
    Raises ValueError below two clusters.
    """
    mean = float(np.mean(differences))
    index = np.unique(clusters, return_inverse=True)[1]
    sums, sizes = np.bincount(index, differences - mean), np.bincount(index)  # (G,) each
    count = len(sums)
    if count < 2:
        raise ValueError("a clustered comparison wants two clusters or more")
    se = float((sums**2).sum() * count / (count - 1)) ** 0.5 / len(differences)
    return Estimate(mean, se, float(sizes.sum() ** 2 / (sizes**2).sum() - 1))


def crossed(differences: np.ndarray) -> Estimate:
    """Mean of differences (n seeds, m items) where both the seeds and the items are samples.

    Variance of the mean under two crossed random effects: that of seed means, plus that of item
    means, less what both count of the rest. Never below either, and with n - 1 degrees of freedom,
    so on the safe side.
    """
    n, m = differences.shape
    over_seeds = paired(differences.mean(1))
    by_seed, by_item = (
        over_seeds.se**2,
        float(differences.mean(0).var(ddof=1)) / m if m > 1 else 0.0,
    )
    rest = (
        differences
        - differences.mean(1, keepdims=True)
        - differences.mean(0, keepdims=True)
        + differences.mean()
    )
    by_rest = float((rest**2).sum()) / max(1, (n - 1) * (m - 1)) / (n * m)
    return Estimate(
        over_seeds.mean, max(by_seed, by_item, by_seed + by_item - by_rest) ** 0.5, n - 1
    )


def welch(mean_a: float, sd_a: float, n_a: int, mean_b: float, sd_b: float, n_b: int) -> Estimate:
    """Difference b - a of two unpaired groups, from means and standard deviations; Welch 1947."""
    a, b = sd_a**2 / n_a, sd_b**2 / n_b
    return Estimate(
        mean_b - mean_a, (a + b) ** 0.5, (a + b) ** 2 / (a**2 / (n_a - 1) + b**2 / (n_b - 1))
    )


def sign_flip_p(differences: np.ndarray) -> float:
    """Two-sided p of the sign-flip permutation test on the mean: all 2^n signs up to n = 16, else
    random ones.
    """
    n = len(differences)
    if n <= 16:
        signs = np.array(list(itertools.product((1, -1), repeat=n)))
    else:
        signs = np.random.RandomState(0).choice((1, -1), (100_000, n))
    means, observed = np.abs(signs @ differences), abs(differences.sum())
    extreme = means >= observed * (1 - 1e-12)  # ties are equal up to rounding
    return float(extreme.mean() if n <= 16 else (extreme.sum() + 1) / (len(signs) + 1))


def bca_interval(differences: np.ndarray) -> tuple[float, float]:
    """Bias-corrected and accelerated bootstrap interval (95 %) of the mean; Efron 1987. nan where
    it is not defined.
    """
    # of fewer it would only repeat the extremes
    if len(differences) < 4 or np.ptp(differences) == 0:
        return float("nan"), float("nan")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # all resamples on one side: scipy warns and gives nan
        found = stats.bootstrap(
            (differences,),
            np.mean,
            n_resamples=9999,
            method="BCa",
            confidence_level=1 - ALPHA,
            rng=np.random.default_rng(0),
        ).confidence_interval
    return float(found.low), float(found.high)


def holm(p_values: list[float]) -> list[float]:
    """Holm's step-down adjusted p values, in the given order; Holm 1979."""
    order, adjusted, highest = np.argsort(p_values, kind="stable"), [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def power_of_t(effect: float, sd: float, n: int, alpha: float) -> float:
    """Chance that a two-sided paired t test at level alpha finds a true difference `effect`;
    noncentral t.
    """
    shift, critical = abs(effect) / sd * n**0.5, stats.t.isf(alpha / 2, n - 1)
    # Far in the lower tail scipy gives nan, where the chance is zero.
    return float(
        stats.nct.sf(critical, n - 1, shift) + np.nan_to_num(stats.nct.cdf(-critical, n - 1, shift))
    )


def detectable_effect(sd: float, n: int, alpha: float = ALPHA) -> float:
    """Smallest true difference that n pairs with this SD find with 80 % power (bisection)."""
    low, high = 0.0, sd * 1e4
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if power_of_t(middle, sd, n, alpha) >= POWER else (middle, high)
    return high


def power_of_tost(mean: float, delta: float, sd: float, n: int, alpha: float) -> float:
    """Chance that TOST places a true difference `mean` within (-delta, delta); at least this
    (Bonferroni's bound).
    """
    critical, root = stats.t.isf(alpha, n - 1), n**0.5 / sd
    sides = (
        np.nan_to_num(stats.nct.sf(critical, n - 1, (delta + sign * mean) * root))
        for sign in (1, -1)
    )
    return float(max(0.0, sum(sides) - 1))


def seeds_needed(mean: float, delta: float, sd: float, alpha: float = ALPHA) -> int | None:
    """Fewest pairs that come to a verdict with 80 % power if the true difference is `mean`: that it
    is not zero, or (delta > 0) that it lies within the margin. None if that takes more than 10,000.
    """
    if sd == 0:
        return 2

    def enough(n: int) -> bool:
        within = abs(mean) < delta and power_of_tost(mean, delta, sd, n, alpha) >= POWER
        return within or power_of_t(mean, sd, n, alpha) >= POWER

    high = 2
    while not enough(high):
        if (high := high * 2) > 10_000:
            return None
    low = high // 2 + 1 if high > 2 else 2
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return high


# ----------------------------------------------------------------------------------------- verdicts


@dataclass(frozen=True)
class Verdict:
    """Decision about one arm. `interval` is the t interval at the level of Holm's step: it leaves
    out 0 just if p_holm < ALPHA. It goes with this one test; all arms' intervals together cover
    less than 95 %.
    """

    word: str  # better, worse, equivalent, inconclusive
    p: float
    p_holm: float
    interval: tuple[float, float]
    p_tost: float | None  # Holm-adjusted too; None without a margin


def decide(estimates: list[Estimate], delta: float, lower_is_better: bool) -> list[Verdict]:
    """Verdicts on the arms of one metric. `delta` is the equivalence margin, 0 where none was
    declared.

    A difference that is significant is better or worse however small; what is not significant is
    equivalent only if TOST says so, and inconclusive otherwise: no p value above ALPHA means "the
    same".
    """
    p_values = [estimate.p_value() for estimate in estimates]
    tosts = (
        holm([estimate.tost(delta) for estimate in estimates]) if delta else [None] * len(estimates)
    )
    verdicts = []
    for estimate, p, p_holm, p_tost in zip(estimates, p_values, holm(p_values), tosts, strict=True):
        # The level that this arm was in effect tested at, so that interval and p agree
        interval = estimate.interval(ALPHA * p / p_holm if p_holm else ALPHA)
        if p_holm < ALPHA:
            word = "better" if (estimate.mean < 0) == lower_is_better else "worse"
        else:
            word = "equivalent" if p_tost is not None and p_tost < ALPHA else "inconclusive"
        verdicts.append(Verdict(word, p, p_holm, interval, p_tost))
    return verdicts


# ------------------------------------------------------------------------------------------- timing


@dataclass(frozen=True)
class Ratio:
    """Geometric mean of paired ratios with its 95 % t interval (on logarithms)."""

    mean: float
    low: float
    high: float
    n: int


def paired_ratio(numerator: list[float], denominator: list[float]) -> Ratio:
    """Ratio of paired positive measurements. Raises ValueError below two pairs."""
    if len(numerator) != len(denominator):
        raise ValueError("paired measurements are equally many")
    estimate = paired(np.log(np.array(numerator) / np.array(denominator)))
    return Ratio(
        *(float(np.exp(value)) for value in (estimate.mean, *estimate.interval())), len(numerator)
    )


def median_ratio(numerator: list[float], denominator: list[float]) -> dict[str, float]:
    """Median of the pairs' ratios, with a 95 % interval: {median, low, high}. One slow round in
    many moves neither.

    The interval is the sign test's: it ends at two of the sorted ratios and presumes nothing of
    their distribution. Raises ValueError below six pairs, which give none.
    """
    if len(numerator) != len(denominator) or len(numerator) < 6:
        raise ValueError("a median's interval wants paired measurements, six pairs or more")
    ratios = np.sort(np.array(numerator) / np.array(denominator))
    # from each end, one more would be too many
    left_out = int(stats.binom.ppf(0.025, len(ratios), 0.5))
    return {
        "median": float(np.median(ratios)),
        "low": float(ratios[left_out - 1]),
        "high": float(ratios[-left_out]),
    }


def seconds(arm: Callable[[], None]) -> float:
    """Wall-clock seconds of one call."""
    start = perf_counter()
    arm()
    return perf_counter() - start


def cpu_seconds(arm: Callable[[], None]) -> float:
    """Seconds that this process computed in one call, whatever else the machine did meanwhile."""
    start = process_time()
    arm()
    return process_time() - start


def paired_times(
    arms: dict[str, Callable[[], None]],
    rounds: int,
    seed: int = 0,
    after_round: Callable[[], None] | None = None,
    measure: Callable[[Callable[[], None]], float] = seconds,
    least: int = 0,
) -> dict[str, list[float]]:
    """Seconds of each arm in each round, as `measure` tells them; in every round all arms run once,
    in a new random order, so that a drift of the machine hits all alike. From `least` whole rounds
    on (0: never) Ctrl-C ends it, and they are kept.
    """
    order, times = np.random.RandomState(seed), {name: [] for name in arms}
    try:
        for _ in range(rounds):
            for index in order.permutation(len(arms)):
                name = list(arms)[index]
                times[name].append(measure(arms[name]))
            if after_round is not None:
                after_round()
    except KeyboardInterrupt:
        whole = min(map(len, times.values()))
        if not 0 < least <= whole:
            raise
        times = {name: values[:whole] for name, values in times.items()}
    return times
