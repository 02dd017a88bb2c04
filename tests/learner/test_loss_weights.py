"""Loss weights: aggregates, and corrections for the gap between sampler and learner: published numbers and loops."""

from __future__ import annotations

import math
import statistics
from typing import get_args

import numpy as np
import pytest
import reference
from builders import golden
from hypothesis import given, settings
from hypothesis import strategies as st

from agentr1_jax.learner.config import AGGREGATES, Correction, CorrectionConfig
from agentr1_jax.learner.loss_weights import TokenUnits, correction_weights, gap_metrics, loss_weights

CORRECTIONS = get_args(Correction)

LIMITS = {"cap": 2.0, "low": 0.5, "high": 1.5}


def weigh(kind, log_ratio, sequence, **changes):
    log_ratio = np.asarray(log_ratio, np.float64)
    config = CorrectionConfig(kind, **LIMITS | changes)
    return correction_weights(config, log_ratio - 1, np.full_like(log_ratio, -1), np.asarray(sequence))


def test_capped_weights_give_the_published_numbers():
    """The published array has an observation, of weight 0, where here the stream holds sampled tokens alone."""
    entry = golden("verl.rollout_is.token.2.0")
    mask = entry["inputs"]["mask"] > 0
    got = weigh("tis_token", entry["inputs"]["log_ratio"][mask], np.arange(2).repeat(4)[mask.ravel()])
    np.testing.assert_allclose(got, entry["outputs"]["w"][mask], rtol=1e-6)
    assert not entry["outputs"]["w"][~mask].any()


def loop(kind, log_ratio, sequence, *, cap, low, high):
    """Weight of each token, one at a time."""
    out = []
    for k, own in enumerate(log_ratio):
        others = [x for x, unit in zip(log_ratio, sequence, strict=True) if unit == sequence[k]]
        value = {"mask_sequence": statistics.fmean(others)}.get(kind, math.fsum(others) if "_seq" in kind else own)
        w = math.exp(min(max(value, -20.0), 20.0))
        inside = low <= w <= high
        masked = {"none": 1.0, "icepop": w * inside, "icepop_sequence": w * inside, "mask_sequence": float(inside)}
        out.append(masked.get(kind, min(w, cap)))
    return out


@pytest.mark.parametrize("kind", CORRECTIONS)
@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.tuples(st.floats(-1.5, 1.5) | st.sampled_from((-30.0, 30.0)), st.integers(0, 3)), max_size=12),
    cap=st.sampled_from((0.5, 2.0, 1e300)),
)
def test_weights_equal_the_loops(kind, tokens, cap):
    log_ratio, sequence = [x for x, _ in tokens], [10 * unit for _, unit in tokens]
    limits = {"cap": cap, "low": 0.51, "high": 1.51}
    old = np.array([x / 2 for x in log_ratio])
    got = correction_weights(CorrectionConfig(kind, **limits), old, -old, np.array(sequence, np.int64))
    assert got.dtype == np.float32 and got.shape == (len(tokens),)
    np.testing.assert_allclose(got, loop(kind, log_ratio, sequence, **limits), rtol=1e-6)


@pytest.mark.parametrize(("bad", "where"), [(-np.inf, "old"), (np.nan, "behaviour"), (np.inf, "both")])
def test_what_is_not_finite_has_no_weight(bad, where):
    streams = {"old": np.zeros(4, np.float32), "behaviour": np.zeros(4, np.float32)}
    for name, x in streams.items():
        if where in (name, "both"):
            x[1] = bad
    for kind in CORRECTIONS:
        expected = {"none": [1, 1, 1, 1], "tis_token": [1, 0, 1, 1], "icepop": [1, 0, 1, 1]}.get(kind, [0, 0, 1, 1])
        got = correction_weights(CorrectionConfig(kind, **LIMITS), *streams.values(), np.array([0, 0, 1, 1]))
        np.testing.assert_array_equal(got, expected, err_msg=kind)
    got = gap_metrics(*streams.values(), np.array([0, 0, 1, 1]))
    assert got.pop("nonfinite") == 1
    assert all(np.isfinite(x) for x in got.values())


PUBLISHED = {
    "learner_perplexity": "training_ppl",
    "learner_log_perplexity": "training_log_ppl",
    "sampler_perplexity": "rollout_ppl",
    "sampler_log_perplexity": "rollout_log_ppl",
    "k1": "kl",
    "k3": "k3_kl",
    "log_perplexity_difference": "log_ppl_diff",
    "log_perplexity_difference_abs": "log_ppl_abs_diff",
    "log_perplexity_difference_max": "log_ppl_diff_max",
    "log_perplexity_difference_min": "log_ppl_diff_min",
    "perplexity_ratio": "ppl_ratio",
    "chi2_token": "chi2_token",
    "chi2_sequence": "chi2_seq",
}


def test_gap_metrics_give_the_published_numbers():
    entry = golden("verl.offpolicy_metrics")
    mask = entry["inputs"]["mask"] > 0
    learner, sampler = (entry["inputs"][name][mask].astype(np.float32) for name in ("old", "rollout"))
    got = gap_metrics(learner, sampler, np.array([5, 2]).repeat(4)[mask.ravel()])
    assert set(PUBLISHED.values()) == set(entry["outputs"])
    assert set(got) == {*PUBLISHED, "mean", "max", "nonfinite"}
    for name, theirs in PUBLISHED.items():
        np.testing.assert_allclose(got[name], entry["outputs"][theirs], rtol=1e-6, atol=1e-7, err_msg=name)
    gap = np.abs(learner - sampler)
    np.testing.assert_allclose([got["mean"], got["max"]], [gap.mean(), gap.max()], rtol=1e-6)
    assert got["nonfinite"] == 0


def test_without_a_gap_there_is_none_and_a_huge_one_is_finite():
    logprob, sequence = np.float32([-1.0, -2.0, -0.5]), np.array([0, 0, 1])
    got = gap_metrics(logprob, logprob, sequence)
    assert got["perplexity_ratio"] == 1
    for name, x in got.items():
        assert x == 0 or "perplexity" in name and "difference" not in name
    huge = gap_metrics(np.zeros(3, np.float32), np.full(3, -2000, np.float32), sequence)
    assert all(np.isfinite(x) for x in huge.values())
    assert huge["max"] == 2000
    bad = np.full(3, np.nan, np.float32)
    assert gap_metrics(bad, bad, sequence) == {"nonfinite": 3.0}


@pytest.mark.parametrize(
    ("name", "aggregate", "constant"),
    [("token-mean", "token", 1), ("seq-mean-token-sum", "fixed", 2), ("seq-mean-token-mean", "step", 1)],
)
def test_aggregates_give_the_published_numbers(name, aggregate, constant):
    entry = golden(f"agg_loss.{name}")
    mask, row = entry["inputs"]["mask"] > 0, np.arange(3).repeat(4)
    weights = loss_weights(aggregate, TokenUnits(row, row, row), mask.ravel(), fixed_denominator=constant)
    np.testing.assert_allclose((weights * entry["inputs"]["mat"].ravel()).sum(), entry["outputs"]["verl"], rtol=1e-6)


@st.composite
def units(draw):
    """Unit of each token (steps within trajectories within groups), which are trained, and a loss each."""
    step, trajectory, group, number = [], [], [], 0
    for i in range(draw(st.integers(1, 5))):
        of = draw(st.integers(0, 2))
        for length in draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)):
            step += [number] * length
            trajectory += [i] * length
            group += [of] * length
            number += 1
    size = len(step)
    trained = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    losses = draw(st.lists(st.floats(-4, 4), min_size=size, max_size=size))
    return step, trajectory, group, trained, losses


@pytest.mark.parametrize("aggregate", AGGREGATES)
@settings(max_examples=40, deadline=None)
@given(cells=units(), constant=st.sampled_from((1.0, 7.0)))
def test_weights_make_the_mean_that_they_are_named_after(aggregate, cells, constant):
    step, trajectory, group, trained, losses = cells
    columns = [np.array(x) for x in (step, trajectory, group, trained)]
    weights = loss_weights(aggregate, TokenUnits(*columns[:3]), columns[3], fixed_denominator=constant)
    expected = reference.aggregate(aggregate, losses, step, trajectory, group, trained, constant)
    np.testing.assert_allclose((weights * losses).sum(), expected, atol=1e-5)
    assert not weights[~columns[3]].any()
    if aggregate != "fixed" and any(trained):
        np.testing.assert_allclose(weights.sum(), 1, rtol=1e-6)
