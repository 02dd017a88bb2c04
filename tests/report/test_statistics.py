"""Statistics over seeds against scipy, published numbers, definitions in plain Python, and simulated coverage."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

from agentr1_jax.report.statistics import (
    area_under,
    holm,
    interquartile_mean,
    paired_difference,
    paired_t,
    probability_of_improvement,
    stratified_bootstrap,
    t_interval,
    t_quantile,
    two_stage_interval,
)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_t_interval_is_that_of_scipy(rng):
    x = rng.normal(2, 3, size=(4, 7))
    mean, low, high = t_interval(x)
    for i, row in enumerate(x):
        expected = scipy.stats.ttest_1samp(row, 0).confidence_interval(0.95)
        assert (mean[i], low[i], high[i]) == pytest.approx((row.mean(), expected.low, expected.high), rel=1e-12)
    assert np.array_equal(t_interval(x.T, axis=0), t_interval(x))
    assert t_interval(x, level=0.5)[1][0] > low[0]
    # Quantiles of Student's table (1908), as every textbook has them.
    assert [round(t_quantile(n), 3) for n in (2, 3, 5, 11)] == [12.706, 4.303, 2.776, 2.228]


def test_one_value_has_no_interval_and_equal_values_one_of_no_width(rng):
    assert np.array_equal(t_interval(np.array([0.3])), (0.3, np.nan, np.nan), equal_nan=True)
    assert t_interval(np.full(3, 0.1)) == pytest.approx((0.1, 0.1, 0.1), abs=1e-15)
    assert np.isnan(t_quantile(1))
    assert np.array_equal(paired_t(np.array([0.3]), np.array([0.1]))[1:], (np.nan,) * 3, equal_nan=True)
    x = np.round(rng.normal(size=6), 1)
    assert paired_t(x, x) == (0, 0, 0, 1)
    for shift in (0.2, 2e-7):  # Differences differ by rounding alone.
        difference, low, high, p = paired_t(x + shift, x)
        assert (difference, low, high) == pytest.approx((shift,) * 3) and np.isnan(p)
    assert paired_t(np.array([0.1 + 0.2, 0.5]), np.array([0.3, 0.5]))[3] == 1


def test_paired_t_is_that_of_scipy(rng):
    shared = rng.normal(size=(3, 9))
    x, y = shared + 0.3 + 0.2 * rng.normal(size=(3, 9)), shared
    found = np.stack(paired_t(x, y), axis=-1)
    for (difference, low, high, p), a, b in zip(found, x, y, strict=True):
        expected = scipy.stats.ttest_rel(a, b)
        interval = expected.confidence_interval(0.95)
        assert (low, high, p) == pytest.approx((interval.low, interval.high, expected.pvalue), rel=1e-9)
        assert difference == pytest.approx((a - b).mean()) and (p <= 0.05) == (low > 0)
    back = paired_t(y, x)
    assert back[0] == pytest.approx(-found[:, 0]) and back[3] == pytest.approx(found[:, 3])


@pytest.mark.parametrize("n", [2, 3, 10])
def test_intervals_hold_the_truth_as_often_as_is_said(rng, n):
    _, low, high = t_interval(rng.normal(1, 2, size=(4000, n)))
    assert np.mean((low <= 1) & (1 <= high)) == pytest.approx(0.95, abs=0.012)
    shared = rng.normal(size=(4000, n))
    *_, p = paired_t(shared + rng.normal(size=(4000, n)), shared + rng.normal(size=(4000, n)))
    assert np.mean(p <= 0.05) == pytest.approx(0.05, abs=0.012)


def test_holm_by_a_published_example_and_by_its_definition(rng):
    # The example in Wikipedia's "Holm–Bonferroni method": at .05 the fourth and the first are rejected.
    assert holm(np.array([0.01, 0.04, 0.03, 0.005])) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    for p in rng.uniform(0, 0.2, size=(20, 6)):
        adjusted = holm(p)
        for alpha in (0.01, 0.05, 0.2, 0.5):
            # Step down: stop at the first of the ascending p that is above alpha / (tests left).
            rejected = []
            for left, i in zip(range(6, 0, -1), np.argsort(p), strict=True):
                if p[i] > alpha / left:
                    break
                rejected.append(i)
            assert set(np.flatnonzero(adjusted <= alpha)) == set(rejected)
    assert holm(np.array([0.9, 0.8])) == pytest.approx([1, 1]) and len(holm(np.zeros(0))) == 0
    assert np.array_equal(holm(np.array([np.nan, 0.02, 0.5])), [np.nan, 0.04, 0.5], equal_nan=True)


def test_holm_keeps_the_error_of_the_family(rng):
    """Ten hypotheses, all true: each alone is rejected in 5 %, any of them in at most 5 % of all families."""
    x = rng.normal(size=(2000, 10, 6))
    p = paired_t(x, np.zeros_like(x))[3]
    assert np.mean(p.min(axis=1) <= 0.05) > 0.3
    assert np.mean([holm(row).min() <= 0.05 for row in p]) <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 2000)


def test_interquartile_means_are_trimmed_means(rng):
    for n in (1, 3, 4, 7, 8, 41):
        x = rng.normal(size=(2, 3, n))
        # rliable's definition: scipy's trimmed mean, a quarter of all scores at each end.
        assert interquartile_mean(x, (-2, -1)) == pytest.approx(
            [scipy.stats.trim_mean(task, 0.25, axis=None) for task in x]
        )
        assert interquartile_mean(x) == pytest.approx(scipy.stats.trim_mean(x, 0.25, axis=-1))
        assert interquartile_mean(np.moveaxis(x, -1, 0), 0) == pytest.approx(interquartile_mean(x))
    assert interquartile_mean(np.array([1.0, 2, 3, 4, 5, 6, 7, 1000])) == 4.5


def test_stratified_bootstrap_draws_seeds_of_each_task_by_itself(rng):
    """Tasks on other levels widen nothing, and the width of a mean's interval is that of theory."""
    x = np.array([[0.0], [10.0], [50.0]]) + rng.normal(size=(3, 40))
    low, high = stratified_bootstrap(x, lambda x: x.mean((-2, -1)), draws=4000, seed=1)
    error = np.sqrt(x.var(axis=1).sum() / 40) / 3
    assert low < x.mean() < high and high - low == pytest.approx(2 * 1.96 * error, rel=0.05)
    assert stratified_bootstrap(x, lambda x: x.mean((-2, -1)), draws=4000, seed=1) == (low, high)
    each = stratified_bootstrap(x, lambda x: x.mean(-1), draws=500, seed=2)
    assert np.shape(each) == (2, 3) and np.all(each[0] < x.mean(-1)) and np.all(x.mean(-1) < each[1])
    iqm = stratified_bootstrap(x[:1], interquartile_mean_of_all, draws=500, level=0.5)
    assert iqm[0] < interquartile_mean(x[0]) < iqm[1]


def interquartile_mean_of_all(x):
    return interquartile_mean(x, (-2, -1))


def test_stratified_bootstrap_covers(rng):
    hits = [
        low <= 0 <= high
        for low, high in (
            stratified_bootstrap(rng.normal(size=(3, 10)), interquartile_mean_of_all, draws=300, seed=i)
            for i in range(200)
        )
    ]
    assert np.mean(hits) == pytest.approx(0.93, abs=0.05)


def test_probability_of_improvement_counts_pairs(rng):
    x, y = rng.integers(4, size=(5, 6)), rng.integers(4, size=(5, 8))
    found = probability_of_improvement(x, y)
    for one, a, b in zip(found, x.tolist(), y.tolist(), strict=True):
        wins = sum((i > j) + (i == j) / 2 for i in a for j in b)
        assert one == pytest.approx(wins / 48) and wins == scipy.stats.mannwhitneyu(a, b).statistic
    assert found + probability_of_improvement(y, x) == pytest.approx(np.ones(5))
    assert probability_of_improvement(np.array([1.0]), np.array([1.0])) == 0.5


def test_the_area_is_the_mean_height_of_the_curve():
    x, curve = np.array([0.0, 10.0, 40.0]), np.array([0.0, 1.0, 1.0])
    assert area_under(x, curve) == pytest.approx((5 + 30) / 40)
    assert area_under(x + 7, np.stack([curve, 2 * curve])) == pytest.approx([0.875, 1.75])
    assert area_under(np.array([7.0]), np.array([0.5])) == 0.5


def over_seeds(values, **options):
    return two_stage_interval([np.asarray([value]) for value in values], **options)


def test_degenerate_two_stage_intervals_are_exact():
    assert over_seeds(np.full(5, 0.25)) == (0.25, 0.25, 0.25)
    assert two_stage_interval([np.full(4, 1.0), np.full(4, 1.0)], same_questions=True) == (1, 1, 1)
    two = over_seeds(np.array([0.2, 0.6]))
    assert two == pytest.approx((0.4, 0.2, 0.6))


def test_two_stage_intervals_cover_as_often_as_is_said():
    """The table in the docstring, and 95 % where there are many seeds or only questions."""
    rng = np.random.default_rng(0)
    for count, covers in ((2, 0.50), (3, 0.75), (5, 0.86), (20, 0.92)):
        found = [over_seeds(rng.normal(size=count), seed=i, draws=200) for i in range(200)]
        assert np.mean([low <= 0 <= high for _, low, high in found]) == pytest.approx(covers, abs=0.08)
    one_seed = [two_stage_interval([rng.normal(size=50)], same_questions=True, seed=i, draws=200) for i in range(150)]
    assert np.mean([low <= 0 <= high for _, low, high in one_seed]) == pytest.approx(0.94, abs=0.04)
    width = np.mean([high - low for _, low, high in one_seed])
    assert width == pytest.approx(2 * 1.96 / np.sqrt(50), rel=0.05)


@pytest.mark.parametrize("same", [True, False])
def test_both_stages_enter_an_interval(same):
    """Seeds, and questions which all seeds share: neither averages out in the other."""
    rng = np.random.default_rng(1)
    seeds, questions = rng.normal(size=(30, 1)), rng.normal(size=(1, 40))

    def half_width(values):
        found = two_stage_interval(list(values), same_questions=same)
        return (found.high - found.low) / 2 / 1.96

    over_seeds = half_width(seeds + 0 * questions)
    over_questions = half_width(0 * seeds + questions)
    assert over_seeds == pytest.approx(seeds.std(ddof=1) / np.sqrt(30), rel=0.1)
    expected = questions.std(ddof=1) / np.sqrt(40 if same else 40 * 29)  # 29 of 30 seeds are drawn.
    assert over_questions == pytest.approx(expected, rel=0.1)
    assert half_width(seeds + questions) == pytest.approx(np.hypot(over_seeds, over_questions), rel=0.1)


def test_pairing_takes_away_what_both_arms_share():
    rng = np.random.default_rng(2)
    hard = rng.normal(size=60) + 5 * rng.normal(size=(8, 1))
    ours, theirs = hard + 0.1 * rng.normal(size=(8, 60)), hard + 0.1 * rng.normal(size=(8, 60))
    equal = paired_difference(list(ours), list(theirs), same_questions=True)
    assert equal.low < 0 < equal.high and equal.high - equal.low < 0.05
    better = paired_difference(list(ours + 0.2), list(theirs), same_questions=True)
    assert better == pytest.approx(tuple(x + 0.2 for x in equal)) and better.low > 0.1
    assert paired_difference(list(ours), list(ours)) == (0, 0, 0)
