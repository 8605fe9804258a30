"""The study's tests and their power, simulated with the protocol's own functions.

python -m pytest tests/evidence/test_families.py
"""

import numpy as np
import pytest
from scipy import stats

from common.stats import paired
from evidence.families import judge, one_sided, power

SETS = 2000
SEEDS = 16
ARMS = 4
LEVEL = 0.05
MARGIN = 0.01
SD = {"W": 0.006, "D": 0.009}


def shares(means: dict[str, float], arms: int = ARMS) -> dict[str, float]:
    """Share of simulated sets with any arm that is called so, all arms with these true means.

    Differences from one baseline are correlated, by one half, as those of a study are.
    """
    random = np.random.RandomState(0)
    counts = {"better": 0, "within": 0, "worse": 0, "beyond": 0}
    for _ in range(SETS):
        sets: dict[str, dict[str, np.ndarray]] = {}
        for shape, sd in SD.items():
            # each loss has the SD of a difference / sqrt 2
            losses = sd / 2**0.5 * random.standard_normal((arms + 1, SEEDS))
            for arm in range(arms):
                difference = losses[arm] - losses[-1] + means[shape]
                sets.setdefault(f"arm {arm}", {})[shape] = difference
        claims = judge(sets, MARGIN).values()
        words = {claim.direction(LEVEL) for claim in claims}
        words |= {claim.against_margin(LEVEL) for claim in claims}
        for word in counts:
            counts[word] += word in words
    return {word: count / SETS for word, count in counts.items()}


# 5 % over the family, and two standard errors of 2,000 sets
LIMIT = LEVEL + 2 * (LEVEL * (1 - LEVEL) / SETS) ** 0.5


@pytest.mark.parametrize("means", [(MARGIN, MARGIN), (MARGIN, -0.05), (-0.05, MARGIN)])
def test_at_the_margin_few_families_have_a_false_non_inferior(means):
    found = shares(dict(zip(SD, means, strict=True)))
    assert found["within"] <= LIMIT and found["beyond"] <= LIMIT


@pytest.mark.parametrize("means", [(0.0, 0.0), (0.0, -0.05), (-0.05, 0.0)])
def test_at_zero_few_families_have_a_false_better(means):
    found = shares(dict(zip(SD, means, strict=True)))
    assert found["better"] <= LIMIT
    turned = shares(dict(zip(SD, (-mean for mean in means), strict=True)))
    assert turned["worse"] <= LIMIT


def test_power_is_that_of_simulated_studies():
    for n, margin, level in ((16, 0.006, 0.0125), (8, 0.01, 0.05)):
        random = np.random.RandomState(1)
        shown = np.ones(20_000, bool)
        for sd in SD.values():
            sets = sd * random.standard_normal((20_000, n))
            p = stats.ttest_1samp(sets, margin, axis=1, alternative="less").pvalue
            shown &= p < level
        assert power(margin, [*SD.values()], n, level) == pytest.approx(shown.mean(), abs=0.01)


def test_one_arm_has_the_power_that_the_plan_prints():
    """With the whole protocol: one arm, at a true difference of zero."""
    found = shares({"W": 0.0, "D": 0.0}, arms=1)["within"]
    assert found == pytest.approx(power(MARGIN, [*SD.values()], SEEDS, LEVEL), abs=0.03)


def test_a_claim_is_about_every_shape():
    random = np.random.RandomState(2)
    good = -0.02 + 0.005 * random.standard_normal(16)
    bad = 0.02 + 0.005 * random.standard_normal(16)
    claims = judge({"both": {"W": good, "D": good}, "one": {"W": good, "D": bad}}, MARGIN)
    assert claims["both"].direction(LEVEL) == "better"
    assert claims["both"].against_margin(LEVEL) == "within"
    assert claims["one"].direction(LEVEL) == "no difference shown"
    assert claims["one"].against_margin(LEVEL) == "open"
    turned = judge({"a": {"W": bad, "D": bad}}, MARGIN)["a"]
    assert (turned.direction(LEVEL), turned.against_margin(LEVEL)) == ("worse", "beyond")


def test_one_sided_is_scipys():
    sample = np.array([0.3, -0.1, 0.5, 0.2, 0.9])
    expected = stats.ttest_1samp(sample, 0.4, alternative="less").pvalue
    assert one_sided(paired(sample), 0.4) == pytest.approx(expected, rel=1e-12)
    assert one_sided(paired(np.zeros(3)), 0.1) == 0.0
    assert one_sided(paired(np.ones(3)), 0.1) == 1.0
