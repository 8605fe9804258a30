"""Statistics of paired comparisons, for report.py and every bench.

A *difference* is one number for each pair: arm minus baseline at the same seed. Verdicts come from
the paired t interval, Holm-corrected over arms, and from TOST. The permutation test and the
bootstrap are reported as checks and decide nothing.
"""

import bisect
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from scipy import special, stats  # special's t distribution is 300 times faster
from scipy.optimize import brentq

ALPHA = 0.05  # of every test, after correction
POWER = 0.8  # for the minimal detectable effect and the number of seeds
QUANTILES = 1000  # of the observed SD, in the power of tests
TINY = 1e-300
LARGEST = 1e3  # SDs: a difference or a margin that is found with any two pairs

# What a verdict says about the direction of a difference, and about the margin.
BETTER = "better"
WORSE = "worse"
NO_DIFFERENCE = "no difference shown"
WITHIN = "within"
BEYOND = "beyond"
OPEN = "open"


# --------------------------------------------------------------------------- samples of differences


@dataclass(frozen=True)
class Estimate:
    """A mean difference and how well it is known."""

    mean: float
    se: float  # standard error of the mean, not the standard deviation of the sample
    df: float  # degrees of freedom

    def below(self, distance: float) -> float:
        """Return the chance that Student's t is below `distance`, in the unit of the mean."""
        # Differences may all be equal.
        return float(special.stdtr(self.df, distance / max(self.se, TINY)))

    def p_value(self) -> float:
        """Return the two-sided p of Student's t for a true difference of zero."""
        return 2 * self.below(-abs(self.mean))

    def interval(self, alpha: float = ALPHA) -> tuple[float, float]:
        """Return the t interval of confidence 1 - alpha."""
        half = -float(special.stdtrit(self.df, alpha / 2)) * self.se
        return self.mean - half, self.mean + half

    def tost(self, delta: float) -> float:
        """Return p of the test that the true difference lies within (-delta, delta).

        Two one-sided t tests; p is the larger of theirs (Schuirmann 1987).
        """
        return self.below(abs(self.mean) - delta)

    def beyond(self, delta: float) -> float:
        """Return p of the test that the true difference lies outside [-delta, delta].

        It is the chance of a mean as far from zero as this one if the true difference lies on the
        margin. For a wide margin that is the one-sided t test against the margin on the mean's
        side; for a margin of zero it is `p_value`, and it is never less.
        """
        distance = abs(self.mean)
        return self.below(delta - distance) + self.below(-distance - delta)


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


def holm(p_values: list[float], planned: int = 0) -> list[float]:
    """Return Holm's step-down adjusted p values, in the given order (Holm 1979).

    Args:
        planned: number of tests that the family was declared with. Those that could not be made
            count with p = 1.
    """
    count = max(planned, len(p_values))
    adjusted = [0.0] * len(p_values)
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


def detectable_effect(sd: float, n: int, alpha: float = ALPHA, error: float = 0.0) -> float:
    """Return the smallest true difference that n pairs with this SD find with 80 % power.

    Args:
        error: standard error that is added to that of the mean, in SDs of the pairs.
    """
    # Power depends on the effect in units of the SD alone.
    return sd * _detectable_in_sds(n, alpha, error)


@functools.cache
def _detectable_in_sds(n: int, alpha: float, error: float) -> float:
    def above(effect: float) -> float:
        if error:
            return power_with_error(effect, n, alpha, error) - POWER
        return power_of_t(effect, 1.0, n, alpha) - POWER

    return brentq(above, 0.0, LARGEST * (1 + error))


def power_with_error(effect: float, n: int, alpha: float, error: float) -> float:
    """Return the power of a t test whose standard error counts more than the pairs show.

    Args:
        effect: the true difference, in SDs of the pairs.
        n: number of pairs.
        alpha: two-sided level.
        error: standard error that is added to that of the mean, in SDs of the pairs.
    """
    critical = stats.t.isf(alpha / 2, n - 1)
    # In true standard errors of the mean: what must be passed, for each SD that the pairs may show
    needed = critical * np.hypot(_observed_sds(n), n**0.5 * error)  # (QUANTILES,)
    shift = effect * n**0.5
    return float((stats.norm.cdf(shift - needed) + stats.norm.cdf(-shift - needed)).mean())


def power_of_tost(mean: float, delta: float, sd: float, n: int, alpha: float) -> float:
    """Return the power of TOST at level alpha.

    It is the chance that both one-sided tests place a true difference `mean` within (-delta, delta)
    with n pairs of standard deviation `sd`: the observed mean is normal, and for each observed SD
    it must stay within what the tests leave of the margin.
    """
    root = n**0.5 / sd
    critical = stats.t.isf(alpha, n - 1)
    room = delta * root - critical * _observed_sds(n)  # (QUANTILES,), in standard errors
    room = np.maximum(room, 0.0)
    shift = mean * root
    return float((stats.norm.cdf(room - shift) - stats.norm.cdf(-room - shift)).mean())


@functools.cache
def _observed_sds(n: int) -> np.ndarray:
    """Return QUANTILES equally likely values of the SD that n pairs show; their true SD is 1."""
    chances = (np.arange(QUANTILES) + 0.5) / QUANTILES
    return np.sqrt(stats.chi2.ppf(chances, n - 1) / (n - 1))


def largest_sd(delta: float, n: int, alpha: float = ALPHA) -> float:
    """Return the largest SD of n pairs for which TOST has 80 % power at a true difference of 0."""

    def above(margin: float) -> float:
        return power_of_tost(0.0, margin, 1.0, n, alpha) - POWER

    return delta / brentq(above, 0.0, LARGEST)


def seeds_needed(mean: float, delta: float, sd: float, alpha: float = ALPHA) -> int | None:
    """Return the fewest pairs that give a verdict with 80 % power if `mean` is the true difference.

    A verdict is that the difference is not zero or, where delta > 0, that it lies within the
    margin. None if that takes more than 10,000 pairs.
    """

    def is_enough(n: int) -> bool:
        if abs(mean) < delta and power_of_tost(mean, delta, sd, n, alpha) >= POWER:
            return True
        return power_of_t(mean, sd, n, alpha) >= POWER

    counts = range(2, 10_001)
    if sd == 0:
        return counts[0]
    place = bisect.bisect_left(counts, True, key=is_enough)
    return counts[place] if place < len(counts) else None


# ----------------------------------------------------------------------------------------- verdicts


@dataclass(frozen=True)
class Verdict:
    """Decision about one arm: the direction of its difference, and whether that is large.

    `interval` is the t interval at the level at which Holm tested this arm: it leaves out 0 exactly
    if p_holm < ALPHA. It belongs to this one test; together, all arms' intervals cover less than
    95 %.
    """

    direction: str  # BETTER, WORSE or NO_DIFFERENCE
    margin: str  # WITHIN, BEYOND or OPEN; "" without a margin
    p: float
    p_holm: float
    interval: tuple[float, float]
    p_tost: float | None  # Holm-adjusted too; None without a margin
    p_beyond: float | None  # the same

    @property
    def word(self) -> str:
        """Both parts, such as "worse, within the margin"."""
        about = {"": "", OPEN: ", margin open"}
        return self.direction + about.get(self.margin, f", {self.margin} the margin")


def decide(
    estimates: list[Estimate], delta: float, lower_is_better: bool, planned: int = 0
) -> list[Verdict]:
    """Decide about the arms of one metric.

    A direction is shown if the difference is significant, however small it is. Beside it stands
    what is shown about the margin: the difference lies within it (TOST), beyond it, or neither is
    shown and it is open. What is beyond has a direction, because `Estimate.beyond` is never less
    than p. No p value above ALPHA means "the same".

    Args:
        estimates: one for each arm; Holm corrects each of the three tests for their number.
        delta: margin of equivalence, 0 if none was declared.
        lower_is_better: is a negative difference a gain?
        planned: number of arms that were declared, if some cannot be tested.
    """
    p_values = [estimate.p_value() for estimate in estimates]
    p_holms = holm(p_values, planned)
    p_tosts = p_beyonds = [None] * len(estimates)
    if delta:
        p_tosts = holm([estimate.tost(delta) for estimate in estimates], planned)
        p_beyonds = holm([estimate.beyond(delta) for estimate in estimates], planned)
    verdicts = []
    for estimate, p, p_holm, p_tost, p_beyond in zip(
        estimates, p_values, p_holms, p_tosts, p_beyonds, strict=True
    ):
        # Holm multiplied p by p_holm / p, so this arm was tested at ALPHA times p / p_holm.
        alpha = ALPHA * p / p_holm if p_holm else ALPHA
        is_gain = (estimate.mean < 0) == lower_is_better
        direction = NO_DIFFERENCE
        if p_holm < ALPHA:
            direction = BETTER if is_gain else WORSE
        margin = OPEN if delta else ""
        if delta and p_tost < ALPHA:
            margin = WITHIN
        elif delta and p_beyond < ALPHA:
            margin = BEYOND
        interval = estimate.interval(alpha)
        verdicts.append(Verdict(direction, margin, p, p_holm, interval, p_tost, p_beyond))
    return verdicts


# ------------------------------------------------------------------------------------------- timing


def paired_ratio(numerator: list[float], denominator: list[float]) -> dict[str, float]:
    """Return the geometric mean of n paired ratios with its 95 % t interval, on logarithms.

    {mean, low, high, n}. Raises ValueError below two pairs.
    """
    estimate = paired(np.log(np.array(numerator) / np.array(denominator)))
    mean, low, high = np.exp([estimate.mean, *estimate.interval()]).tolist()
    return {"mean": mean, "low": low, "high": high, "n": len(numerator)}


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


def seconds(arm: Callable[[], None], clock: Callable[[], float] = perf_counter) -> float:
    """Return the seconds of one call by a clock; by process_time those of this process alone."""
    start = clock()
    arm()
    return clock() - start


def paired_times(
    arms: Mapping[str, Callable[[], Any]],
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
