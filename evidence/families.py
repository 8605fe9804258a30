"""The tests of a study in several shapes: one family of claims, each about all shapes.

A claim about an arm says that its mean difference from the baseline lies below a bound in every
shape. Its p is the largest of the shapes' one-sided p (intersection-union test, Berger 1982), which
needs no correction for the number of shapes. Holm corrects for the number of arms.
"""

from dataclasses import dataclass

import numpy as np
from scipy import special, stats

from common.stats import Estimate, holm, paired

Differences = dict[str, dict[str, np.ndarray]]  # arm -> shape -> (n,) arm less baseline, by seed


@dataclass(frozen=True)
class Claim:
    """What the tests say about one arm.

    Attributes:
        estimates: shape -> mean difference and its error.
        p_below: p of "below the margin in every shape" (non-inferior), Holm-adjusted.
        p_better: p of "below zero in every shape", Holm-adjusted.
        p_worse: p of "above zero in every shape", Holm-adjusted.
        p_beyond: p of "above the margin in every shape", Holm-adjusted.
    """

    estimates: dict[str, Estimate]
    p_below: float
    p_better: float
    p_worse: float
    p_beyond: float

    def direction(self, level: float) -> str:
        """Return better, worse or "no difference shown"."""
        if self.p_better < level:
            return "better"
        return "worse" if self.p_worse < level else "no difference shown"

    def against_margin(self, level: float) -> str:
        """Return within (it loses less than the margin), beyond (it loses more) or open."""
        if self.p_below < level:
            return "within"
        return "beyond" if self.p_beyond < level else "open"


def one_sided(estimate: Estimate, bound: float) -> float:
    """Return p of the t test that the true difference lies below `bound`."""
    if estimate.se == 0:
        return 0.0 if estimate.mean < bound else 1.0
    return float(special.stdtr(estimate.df, (estimate.mean - bound) / estimate.se))


def judge(differences: Differences, margin: float, planned: int = 0) -> dict[str, Claim]:
    """Test all arms: arm -> what the tests say.

    Args:
        differences: each with two values or more.
        margin: of non-inferiority, in the unit of the differences.
        planned: number of arms that the family was declared with, if some cannot be tested.
    """
    estimates = {
        arm: {shape: paired(values) for shape, values in shapes.items()}
        for arm, shapes in differences.items()
    }
    below = family(estimates, margin, planned)
    better = family(estimates, 0.0, planned)
    worse = family(turned(estimates), 0.0, planned)
    beyond = family(turned(estimates), -margin, planned)
    return {
        arm: Claim(found, below[arm], better[arm], worse[arm], beyond[arm])
        for arm, found in estimates.items()
    }


def family(
    estimates: dict[str, dict[str, Estimate]], bound: float, planned: int
) -> dict[str, float]:
    """Return Holm-adjusted p of "below `bound` in every shape" for each arm.

    Arms that were planned and could not be tested count with p = 1.
    """
    p_values = [
        max(one_sided(estimate, bound) for estimate in shapes.values())
        for shapes in estimates.values()
    ]
    untested = [1.0] * max(0, planned - len(p_values))
    return dict(zip(estimates, holm(p_values + untested), strict=False))


def turned(estimates: dict[str, dict[str, Estimate]]) -> dict[str, dict[str, Estimate]]:
    """Return the estimates of baseline less arm."""
    return {
        arm: {shape: Estimate(-found.mean, found.se, found.df) for shape, found in shapes.items()}
        for arm, shapes in estimates.items()
    }


def power(margin: float, deviations: list[float], n: int, level: float) -> float:
    """Return the chance that an arm like the baseline is shown to be non-inferior in every shape.

    By the noncentral t distribution, the shapes independent.

    Args:
        margin: of non-inferiority.
        deviations: SD of a paired difference in each shape.
        n: pairs.
        level: of the test, as corrected for the number of arms.
    """
    critical = stats.t.isf(level, n - 1)
    chances = [
        stats.nct.sf(critical, n - 1, margin / deviation * n**0.5) if deviation else 1.0
        for deviation in deviations
    ]
    return float(np.prod(chances))


def largest_deviation(chance: float, shapes: int, n: int, level: float) -> float:
    """Return the largest SD of a paired difference, in margins, for which `power` is `chance`.

    The same SD in every shape. Found by bisection, to 1e-6.
    """
    low, high = 1e-3, 1e3
    while high / low > 1 + 1e-6:
        middle = (low * high) ** 0.5
        if power(1.0, [middle] * shapes, n, level) >= chance:
            low = middle
        else:
            high = middle
    return low
