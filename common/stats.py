"""Statistics of paired comparisons, for report.py and every bench.

A *difference* is one number for each pair: arm minus baseline at the same seed. Verdicts come from
the paired t interval, Holm-corrected over arms, and from TOST. The permutation test and the
bootstrap are reported as checks and decide nothing.
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
    """A mean difference and how well it is known."""

    mean: float
    se: float  # standard error of the mean, not the standard deviation of the sample
    df: float  # degrees of freedom

    def p_value(self) -> float:
        """Return the two-sided p of Student's t for a true difference of zero."""
        if self.se == 0:
            return 1.0 if self.mean == 0 else 0.0
        return float(2 * stats.t.sf(abs(self.mean) / self.se, self.df))

    def interval(self, alpha: float = ALPHA) -> tuple[float, float]:
        """Return the t interval of confidence 1 - alpha."""
        if self.se == 0:
            return self.mean, self.mean
        half = float(stats.t.isf(alpha / 2, self.df)) * self.se
        return self.mean - half, self.mean + half

    def tost(self, delta: float) -> float:
        """Return p of the test that the true difference lies within (-delta, delta).

        Two one-sided t tests; p is the larger of theirs (Schuirmann 1987).
        """
        room = delta - abs(self.mean)
        if self.se == 0:
            return 0.0 if room > 0 else 1.0
        return float(stats.t.sf(room / self.se, self.df))


def paired(differences: np.ndarray) -> Estimate:
    """Estimate the mean of differences (n,) of independent pairs.

    The standard error is SD / sqrt(n), with n - 1 degrees of freedom. Raises ValueError for n < 2.
    """
    n = len(differences)
    if n < 2:
        raise ValueError("a paired comparison needs two pairs or more")
    mean = float(np.mean(differences))
    sd = float(np.std(differences, ddof=1))
    return Estimate(mean, se=sd / n**0.5, df=n - 1)


def clustered(differences: np.ndarray, clusters: np.ndarray) -> Estimate:
    """Estimate the mean of differences (n,) that are alike within a cluster.

    Windows of one document are such a cluster. The standard error holds for any dependence within
    clusters: it comes from the sums of their residuals, times G / (G - 1) for G clusters (Liang &
    Zeger 1986). The degrees of freedom are the effective number of clusters, (sum of sizes)^2 / sum
    of squared sizes, less 1: G clusters of different sizes are worth fewer than G.

    Args:
        differences: (n,).
        clusters: (n,), the cluster of each.

    Raises:
        ValueError: there are fewer than two clusters.
    """
    mean = float(np.mean(differences))
    index = np.unique(clusters, return_inverse=True)[1]  # (n,), numbers from 0 to G - 1
    sums = np.bincount(index, differences - mean)  # (G,)
    sizes = np.bincount(index)  # (G,)
    count = len(sums)
    if count < 2:
        raise ValueError("a clustered comparison needs two clusters or more")
    se = float((sums**2).sum() * count / (count - 1)) ** 0.5 / len(differences)
    df = float(sizes.sum() ** 2 / (sizes**2).sum() - 1)
    return Estimate(mean, se, df)


def crossed(differences: np.ndarray) -> Estimate:
    """Estimate the mean of differences (n seeds, m items) where seeds and items are both samples.

    The variance of the mean under two crossed random effects is that of the seeds' means, plus that
    of the items' means, less the residual's, which both contain. It is taken as at least the larger
    of the first two, and with n - 1 degrees of freedom, so it is rather too large than too small.
    """
    n, m = differences.shape
    over_seeds = paired(differences.mean(1))
    by_seed = over_seeds.se**2
    by_item = float(differences.mean(0).var(ddof=1)) / m if m > 1 else 0.0
    residual = (
        differences
        - differences.mean(1, keepdims=True)
        - differences.mean(0, keepdims=True)
        + differences.mean()
    )
    by_rest = float((residual**2).sum()) / max(1, (n - 1) * (m - 1)) / (n * m)
    variance = max(by_seed, by_item, by_seed + by_item - by_rest)
    return Estimate(over_seeds.mean, se=variance**0.5, df=n - 1)


def welch(mean_a: float, sd_a: float, n_a: int, mean_b: float, sd_b: float, n_b: int) -> Estimate:
    """Estimate the difference b - a of two unpaired groups (Welch 1947)."""
    # Squared standard errors of the two means.
    a = sd_a**2 / n_a
    b = sd_b**2 / n_b
    df = (a + b) ** 2 / (a**2 / (n_a - 1) + b**2 / (n_b - 1))
    return Estimate(mean_b - mean_a, se=(a + b) ** 0.5, df=df)


def sign_flip_p(differences: np.ndarray) -> float:
    """Return the two-sided p of the sign-flip permutation test on the mean of differences (n,).

    All 2^n combinations of signs are tried up to n = 16, else 100,000 random ones.
    """
    n = len(differences)
    is_exact = n <= 16
    if is_exact:
        signs = np.array(list(itertools.product((1, -1), repeat=n)))
    else:
        signs = np.random.RandomState(0).choice((1, -1), (100_000, n))
    sums = np.abs(signs @ differences)  # (combinations,)
    observed = abs(differences.sum())
    extreme = sums >= observed * (1 - 1e-12)  # ties are equal up to rounding
    if is_exact:
        return float(extreme.mean())
    # The observed signs count as one more combination, so that p is never 0.
    return float((extreme.sum() + 1) / (len(signs) + 1))


def bca_interval(differences: np.ndarray) -> tuple[float, float]:
    """Return the bias-corrected and accelerated bootstrap interval (95 %) of the mean (Efron 1987).

    (nan, nan) where it is not defined: all differences equal, or fewer than four of them, of which
    it would only repeat the extremes.
    """
    if len(differences) < 4 or np.ptp(differences) == 0:
        return float("nan"), float("nan")
    with warnings.catch_warnings():
        # Where all resamples lie on one side, scipy warns and gives nan.
        warnings.simplefilter("ignore")
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
    """Return Holm's step-down adjusted p values, in the given order (Holm 1979)."""
    count = len(p_values)
    adjusted = [0.0] * count
    highest = 0.0  # adjusted values do not fall from one step to the next
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        corrected = min(1.0, (count - rank) * p_values[index])
        highest = max(highest, corrected)
        adjusted[index] = highest
    return adjusted


def power_of_t(effect: float, sd: float, n: int, alpha: float) -> float:
    """Return the power of a two-sided paired t test at level alpha.

    It is the chance to find a true difference `effect` with n pairs of standard deviation `sd`,
    by the noncentral t distribution.
    """
    shift = abs(effect) / sd * n**0.5  # noncentrality
    critical = stats.t.isf(alpha / 2, n - 1)
    upper = stats.nct.sf(critical, n - 1, shift)
    # Far in the lower tail scipy gives nan, where the chance is zero.
    lower = np.nan_to_num(stats.nct.cdf(-critical, n - 1, shift))
    return float(upper + lower)


def detectable_effect(sd: float, n: int, alpha: float = ALPHA) -> float:
    """Return the smallest true difference that n pairs with this SD find with 80 % power."""
    low = 0.0
    high = sd * 1e4
    for _ in range(200):  # bisection
        middle = (low + high) / 2
        if power_of_t(middle, sd, n, alpha) >= POWER:
            high = middle
        else:
            low = middle
    return high


def power_of_tost(mean: float, delta: float, sd: float, n: int, alpha: float) -> float:
    """Return a lower bound of the power of TOST.

    Its power is the chance that both one-sided tests place a true difference `mean` within
    (-delta, delta); the bound is Bonferroni's.
    """
    critical = stats.t.isf(alpha, n - 1)
    root = n**0.5 / sd
    above = np.nan_to_num(stats.nct.sf(critical, n - 1, (delta + mean) * root))
    below = np.nan_to_num(stats.nct.sf(critical, n - 1, (delta - mean) * root))
    return float(max(0.0, above + below - 1))


def seeds_needed(mean: float, delta: float, sd: float, alpha: float = ALPHA) -> int | None:
    """Return the fewest pairs that give a verdict with 80 % power if `mean` is the true difference.

    A verdict is that the difference is not zero or, where delta > 0, that it lies within the
    margin. None if that takes more than 10,000 pairs.
    """
    if sd == 0:
        return 2

    def is_enough(n: int) -> bool:
        if abs(mean) < delta and power_of_tost(mean, delta, sd, n, alpha) >= POWER:
            return True
        return power_of_t(mean, sd, n, alpha) >= POWER

    # Double until it is enough, then bisect between the last two.
    high = 2
    while not is_enough(high):
        high *= 2
        if high > 10_000:
            return None
    low = high // 2 + 1 if high > 2 else 2
    while low < high:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle + 1
    return high


# ----------------------------------------------------------------------------------------- verdicts


@dataclass(frozen=True)
class Verdict:
    """Decision about one arm.

    `interval` is the t interval at the level at which Holm tested this arm: it leaves out 0 exactly
    if p_holm < ALPHA. It belongs to this one test; together, all arms' intervals cover less than
    95 %.
    """

    word: str  # better, worse, equivalent, inconclusive
    p: float
    p_holm: float
    interval: tuple[float, float]
    p_tost: float | None  # Holm-adjusted too; None without a margin


def decide(estimates: list[Estimate], delta: float, lower_is_better: bool) -> list[Verdict]:
    """Decide about the arms of one metric.

    A significant difference is better or worse, however small it is. What is not significant is
    equivalent only if TOST says so, and inconclusive otherwise: no p value above ALPHA means "the
    same".

    Args:
        estimates: one for each arm; Holm corrects for their number.
        delta: margin of equivalence, 0 if none was declared.
    """
    p_values = [estimate.p_value() for estimate in estimates]
    p_holms = holm(p_values)
    p_tosts: list[float | None] = [None] * len(estimates)
    if delta:
        p_tosts = list(holm([estimate.tost(delta) for estimate in estimates]))
    verdicts = []
    for estimate, p, p_holm, p_tost in zip(estimates, p_values, p_holms, p_tosts, strict=True):
        # Holm multiplied p by p_holm / p, so this arm was tested at ALPHA times p / p_holm.
        alpha = ALPHA * p / p_holm if p_holm else ALPHA
        if p_holm < ALPHA:
            is_lower = estimate.mean < 0
            word = "better" if is_lower == lower_is_better else "worse"
        elif p_tost is not None and p_tost < ALPHA:
            word = "equivalent"
        else:
            word = "inconclusive"
        verdicts.append(Verdict(word, p, p_holm, estimate.interval(alpha), p_tost))
    return verdicts


# ------------------------------------------------------------------------------------------- timing


@dataclass(frozen=True)
class Ratio:
    """Geometric mean of n paired ratios with its 95 % t interval (on logarithms)."""

    mean: float
    low: float
    high: float
    n: int


def paired_ratio(numerator: list[float], denominator: list[float]) -> Ratio:
    """Estimate the ratio of paired positive measurements. Raises ValueError below two pairs."""
    if len(numerator) != len(denominator):
        raise ValueError("paired measurements must be equal in number")
    estimate = paired(np.log(np.array(numerator) / np.array(denominator)))
    low, high = estimate.interval()
    return Ratio(
        mean=float(np.exp(estimate.mean)),
        low=float(np.exp(low)),
        high=float(np.exp(high)),
        n=len(numerator),
    )


def median_ratio(numerator: list[float], denominator: list[float]) -> dict[str, float]:
    """Return the median of the pairs' ratios with a 95 % interval: {median, low, high}.

    One slow round among many moves neither. The interval is the sign test's: it ends at two of the
    sorted ratios and assumes nothing about their distribution. Raises ValueError below six pairs,
    for which there is no such interval.
    """
    if len(numerator) != len(denominator) or len(numerator) < 6:
        raise ValueError("a median's interval needs paired measurements, six pairs or more")
    ratios = np.sort(np.array(numerator) / np.array(denominator))
    # The interval ends at the k-th ratio from either end. k is the largest number for which the
    # interval still holds the median with a probability of 95 %.
    k = int(stats.binom.ppf(0.025, len(ratios), 0.5))
    return {
        "median": float(np.median(ratios)),
        "low": float(ratios[k - 1]),
        "high": float(ratios[-k]),
    }


def seconds(arm: Callable[[], None]) -> float:
    """Return the wall-clock seconds of one call."""
    start = perf_counter()
    arm()
    return perf_counter() - start


def cpu_seconds(arm: Callable[[], None]) -> float:
    """Return the CPU seconds of this process in one call, whatever else the machine does."""
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
    """Time the arms alternately: arm -> seconds in each round.

    In every round each arm runs once, in a new random order, so that a drift of the machine's speed
    affects all alike.

    Args:
        rounds: number of rounds.
        after_round: called after each round, outside of the timing.
        measure: returns the seconds of one call of an arm.
        least: number of whole rounds from which on Ctrl-C ends the measurement and keeps them; 0
            for never.
    """
    order = np.random.RandomState(seed)
    names = list(arms)
    times: dict[str, list[float]] = {name: [] for name in names}
    try:
        for _ in range(rounds):
            for index in order.permutation(len(names)):
                name = names[index]
                times[name].append(measure(arms[name]))
            if after_round is not None:
                after_round()
    except KeyboardInterrupt:
        whole = min(map(len, times.values()))
        if not 0 < least <= whole:
            raise
        times = {name: values[:whole] for name, values in times.items()}
    return times
