"""Statistics against scipy and against cases with known answers.

python -m pytest tests/common/test_stats.py
"""

from dataclasses import astuple

import numpy as np
import pytest
from scipy import stats as scipy_stats

from common.stats import (
    ALPHA,
    BEYOND,
    NO_DIFFERENCE,
    WITHIN,
    Estimate,
    clustered,
    crossed,
    decide,
    detectable_effect,
    holm,
    largest_sd,
    median_ratio,
    paired,
    paired_ratio,
    paired_times,
    power_of_t,
    power_of_tost,
    power_with_error,
    seeds_needed,
    welch,
)

SAMPLE = np.array([0.3, -0.1, 0.5, 0.2, 0.9, -0.4, 0.35, 0.05])
NOTHING = Estimate(0.0, 0.0, 7)  # of identical pairs


def draws(seed: int, *shape: int) -> np.ndarray:
    return np.random.RandomState(seed).randn(*shape)


def test_paired_is_scipys_t_test():
    reference = scipy_stats.ttest_1samp(SAMPLE, 0.0)
    estimate = paired(SAMPLE)
    assert estimate.p_value() == pytest.approx(reference.pvalue, rel=1e-12)
    for alpha in (0.05, 0.0125):
        expected = reference.confidence_interval(1 - alpha)
        assert estimate.interval(alpha) == pytest.approx((expected.low, expected.high), rel=1e-12)
    assert NOTHING.p_value() == 1.0 and NOTHING.interval() == (0.0, 0.0)


def test_tost_is_the_larger_of_two_one_sided_tests():
    for delta in (0.1, 0.5, 1.0):
        below = scipy_stats.ttest_1samp(SAMPLE, -delta, alternative="greater").pvalue
        above = scipy_stats.ttest_1samp(SAMPLE, delta, alternative="less").pvalue
        assert paired(SAMPLE).tost(delta) == pytest.approx(max(below, above), rel=1e-12)


def test_welch_is_scipys_test_on_samples():
    a, b = draws(0, 9), 0.4 + 2 * draws(1, 7)
    reference = scipy_stats.ttest_ind(b, a, equal_var=False)
    estimate = welch(a.mean(), a.std(ddof=1), 9, b.mean(), b.std(ddof=1), 7)
    assert (estimate.p_value(), estimate.df) == pytest.approx(
        (reference.pvalue, reference.df), rel=1e-12
    )
    assert estimate.mean / estimate.se == pytest.approx(reference.statistic, rel=1e-12)


def test_holm():
    """The worked example of Holm's method, ties and order; scipy has no Holm to compare with."""
    for given, planned, expected in (
        ([0.01, 0.04, 0.03, 0.005], (), [0.03, 0.06, 0.06, 0.02]),
        ([0.5, 0.9], (), [1.0, 1.0]),
        ([0.02], (), [0.02]),
        ([0.01, 0.04], (4,), [0.04, 0.12]),  # two of them could not be made
    ):
        assert holm(given, *planned) == pytest.approx(expected)
    verdict = decide([Estimate(-2.5, 1.0, 15)], 1.0, True, planned=4)[0]
    assert verdict.p_holm == pytest.approx(4 * verdict.p) and verdict.direction == NO_DIFFERENCE


def test_detectable_effect_and_seeds_agree():
    for n in (3, 8, 30):
        effect = detectable_effect(2.0, n, 0.01)
        samples = effect + 2 * draws(3, 20000, n)
        found = (scipy_stats.ttest_1samp(samples, 0, axis=1).pvalue < 0.01).mean()
        assert power_of_t(effect, 2.0, n, 0.01) == pytest.approx(0.8, abs=1e-6)
        assert found == pytest.approx(0.8, abs=0.012)
        sd = largest_sd(0.01, n, 0.05)
        assert power_of_tost(0.0, 0.01, sd, n, 0.05) == pytest.approx(0.8, abs=1e-6)
        assert (
            seeds_needed(0.0, 0.01, 0.9999 * sd, 0.05),
            seeds_needed(effect * 1.0001, 0.0, 2.0, 0.01),
        ) == (n, n)
    assert seeds_needed(0.001, 0.0, 1.0) is None and seeds_needed(0.0, 0.0, 1.0) is None
    assert seeds_needed(0.1, 0.0, 0.0) == 2


def test_the_power_with_an_error_more_is_that_of_simulated_tests():
    """The noise is that of the pairs, and the standard error of the test is larger."""
    draw = np.random.default_rng(0)
    for n, effect, error, alpha in (
        (4, 2.0, 0.27, 0.0125),
        (4, 2.0, 0.27, 0.05),
        (16, 0.6, 0.1, 0.05),
    ):
        pairs = effect + draw.normal(0, 1, (40_000, n))
        needed = scipy_stats.t.isf(alpha / 2, n - 1)
        own = pairs.std(1, ddof=1) / n**0.5
        found = abs(pairs.mean(1)) > needed * np.hypot(own, error)
        assert power_with_error(effect, n, alpha, error) == pytest.approx(found.mean(), abs=0.01)
        expected = power_of_t(effect, 1.0, n, alpha)
        assert power_with_error(effect, n, alpha, 0.0) == pytest.approx(expected, abs=1e-4)
    assert detectable_effect(1.0, 4, error=0.2) > detectable_effect(1.0, 4)


def test_power_of_tost_is_that_of_simulated_tests():
    for mean, delta, n, alpha in (
        (0.0, 1.0, 8, 0.05),
        (0.0, 1.0, 8, 0.0125),
        (0.0, 2.0, 3, 0.05),
        (0.5, 1.5, 6, 0.05),
        (0.0, 0.9, 16, 0.0125),
    ):
        samples = mean + draws(7, 20000, n)
        room = delta - np.abs(samples.mean(1))
        p = scipy_stats.t.sf(room / (samples.std(1, ddof=1) / n**0.5), n - 1)
        expected = power_of_tost(mean, delta, 1.0, n, alpha)
        assert expected == pytest.approx((p < alpha).mean(), abs=0.012), (mean, delta, n)
    assert power_of_tost(0.0, 0.1, 1.0, 8, 0.05) < 0.001 < 0.999 < power_of_tost(0, 9, 1, 8, 0.05)


def test_paired_times_take_turns_in_random_order():
    """Every arm once a round; both orders of two arms occur; what `measure` says is what comes
    back.
    """
    ran: list[str] = []
    times = paired_times(
        {name: (lambda name=name: ran.append(name)) for name in "ab"},
        40,
        measure=lambda arm: arm() or float(len(ran)),
    )
    rounds = ["".join(ran[i : i + 2]) for i in range(0, 80, 2)]
    assert {*rounds} == {"ab", "ba"} and 8 < rounds.count("ab") < 32
    assert sorted(times["a"] + times["b"]) == [float(i) for i in range(1, 81)]


@pytest.mark.parametrize(("least", "kept"), [(2, 2), (3, 0), (0, 0)])
def test_an_interrupt_keeps_whole_rounds(least, kept):
    def measure(arm):
        ran.append(arm)
        if len(ran) == 6:  # the second arm of the third round
            raise KeyboardInterrupt
        return float(len(ran))

    ran, arms = [], {name: lambda: None for name in "ab"}
    if not kept:
        with pytest.raises(KeyboardInterrupt):
            paired_times(arms, 40, measure=measure, least=least)
        return
    times = paired_times(arms, 40, measure=measure, least=least)
    assert [len(values) for values in times.values()] == [kept, kept]
    assert sorted(times["a"] + times["b"]) == [1, 2, 3, 4]


def test_clustered_error_counts_clusters():
    # 12 clusters of 5
    rows = draws(0, 12, 5) + draws(1, 12, 1)
    names = np.repeat(np.arange(12) * 7, 5)
    even = clustered(rows.flatten(), names)
    # of one size: means are the sample
    assert astuple(even) == pytest.approx(astuple(paired(rows.mean(1))))
    # each alone
    assert astuple(clustered(rows[:, 0], np.arange(12))) == pytest.approx(
        astuple(paired(rows[:, 0]))
    )
    assert even.se > 1.5 * paired(rows.flatten()).se
    order = np.random.RandomState(2).permutation(60)
    assert astuple(clustered(rows.flatten()[order], names[order])) == pytest.approx(astuple(even))
    # Clusters of unlike sizes are worth fewer: here 2.8 of 3.
    assert clustered(draws(3, 7), np.array([0, 0, 1, 1, 1, 2, 2])).df == pytest.approx(49 / 17 - 1)


def test_crossed_error_covers_seeds_and_items():
    """The error of the mean of a seeds x items table, against simulation; each source alone; no
    item effect at all.
    """

    def table(seed: int, by_seed: float, by_item: float, rest: float) -> np.ndarray:
        random = np.random.RandomState(seed)
        return (
            by_seed * random.randn(8, 1)
            + by_item * random.randn(1, 200)
            + rest * random.randn(8, 200)
        )

    for sources in ((0.05, 0.3, 1.0), (0.1, 0.0, 1.0), (0.0, 1.0, 0.2)):
        estimates = [crossed(table(seed, *sources)) for seed in range(400)]
        truth = np.std([estimate.mean for estimate in estimates])
        assert np.mean([estimate.se for estimate in estimates]) == pytest.approx(truth, rel=0.12)
    same = np.tile(SAMPLE[:, None], (1, 5))
    assert crossed(same).se == pytest.approx(paired(SAMPLE).se)


@pytest.mark.parametrize(
    ("estimate", "delta", "lower_is_better", "word"),
    [
        (paired(0.005 + 0.001 * SAMPLE), 0.01, True, "worse, within the margin"),
        (paired(0.05 + 0.001 * SAMPLE), 0.01, True, "worse, beyond the margin"),
        (paired(0.05 + 0.001 * SAMPLE), 0.01, False, "better, beyond the margin"),
        (paired(0.009 + 0.005 * SAMPLE), 0.01, True, "worse, margin open"),
        (paired(-0.05 + 0.001 * SAMPLE), 0.01, True, "better, beyond the margin"),
        (paired(0.001 * SAMPLE), 0.01, True, "no difference shown, within the margin"),
        (paired(0.05 * SAMPLE), 0.01, True, "no difference shown, margin open"),
        (NOTHING, 0.01, True, "no difference shown, within the margin"),
        (NOTHING, 0.0, True, "no difference shown"),
        (Estimate(-0.1, 0.0, 7), 0.01, True, "better, beyond the margin"),
        (Estimate(-0.01, 0.0, 7), 0.01, True, "better, margin open"),
    ],
)
def test_both_parts_of_a_verdict(estimate, delta, lower_is_better, word):
    """A difference can be certain and small, certain and large, or certain and of open size."""
    assert decide([estimate], delta, lower_is_better)[0].word == word


def test_beyond_is_the_one_sided_test_against_the_margin():
    """For a margin of some standard errors; for one of zero it is the test of a difference, and in
    between it is never less, so that what is beyond has a direction.
    """
    for sample in (SAMPLE + 1, SAMPLE - 2):
        above = scipy_stats.ttest_1samp(np.abs(np.mean(sample)) + SAMPLE, 1.0).pvalue / 2
        shifted = paired(np.sign(np.mean(sample)) * (np.abs(np.mean(sample)) + SAMPLE))
        assert shifted.beyond(1.0) == pytest.approx(above, rel=1e-3)
    assert paired(SAMPLE).beyond(0.0) == pytest.approx(paired(SAMPLE).p_value(), rel=1e-12)
    for row in draws(5, 100, 6):
        values = [paired(row).beyond(delta) for delta in (0.0, 0.01, 0.1, 0.5, 2.0)]
        assert values == sorted(values)


def test_the_parts_of_a_verdict_agree():
    """Within and beyond exclude each other, what is beyond has a direction, and the interval leaves
    out zero exactly where the adjusted p is below ALPHA.
    """
    for seed in range(200):
        shifts = np.array([[0.0], [0.3], [1.0], [4.0]])
        for verdict in decide([paired(row) for row in draws(seed, 4, 8) + shifts], 1.0, True):
            is_within, is_beyond = verdict.p_tost < ALPHA, verdict.p_beyond < ALPHA
            assert not (is_within and is_beyond)
            assert (is_within, is_beyond) == (verdict.margin == WITHIN, verdict.margin == BEYOND)
            has_direction = verdict.direction != NO_DIFFERENCE
            assert has_direction or not is_beyond
            low, high = verdict.interval
            assert has_direction == (verdict.p_holm < ALPHA) == (low > 0 or high < 0)


def test_paired_ratio():
    ratio = paired_ratio([2.0, 4.2, 8.8], [1.0, 2.0, 4.0])
    logs = np.log([2.0, 2.1, 2.2])
    reference = scipy_stats.ttest_1samp(logs, 0).confidence_interval()
    assert (ratio["mean"], ratio["low"], ratio["high"]) == pytest.approx(
        tuple(np.exp([logs.mean(), *reference]))
    )


def test_median_ratio_covers_the_median_and_shrugs_off_slow_rounds():
    covered = 0
    for sample in draws(3, 400, 15):
        ratio = median_ratio(list(np.exp(sample)), [1.0] * 15)
        assert ratio["low"] <= ratio["median"] <= ratio["high"]
        covered += ratio["low"] <= 1 <= ratio["high"]
    # 0.965: the third from each end, and beyond, are left out
    exact = 1 - 2 * scipy_stats.binom.cdf(3, 15, 0.5)
    assert exact >= 0.95 and abs(covered / 400 - exact) < 0.03
    steady, upset = [2.0] * 20, [2.0] * 17 + [900.0] * 3
    assert (
        median_ratio(upset, [1.0] * 20)
        == median_ratio(steady, [1.0] * 20)
        == dict(median=2.0, low=2.0, high=2.0)
    )
