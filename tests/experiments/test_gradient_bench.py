"""The gradient bench: exact gradients of small processes, schemes whose expectation is known, and its statistics."""

from __future__ import annotations

import csv
import dataclasses
import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest
import scipy.stats

from agentr1_jax.credit import SCHEMES
from agentr1_jax.errors import UserError
from agentr1_jax.learner.config import AGGREGATES
from agentr1_jax.learner.loss_weights import TokenUnits, loss_weights
from agentr1_jax.report import gradients as report
from agentr1_jax.runtime.config import load_config
from experiments.credit import bias as bench
from experiments.credit import estimates, mdps
from experiments.setup import read_settings

PAIRS = 7300
"""Batches in every test that credits or differentiates, so that they share compiled programs."""
LISTED = ("stop_or_go", "key_door", "short_or_long")
"""Processes with at most so many pairs of trajectories of a row, so that expectations are sums over all."""
PLAIN = {"whiten": "none"}
UNBIASED = (
    bench.Variant("reinforce", PLAIN, None),
    bench.Variant("rloo", {}, None),
    bench.Variant("state_baseline", {}, None),
    bench.REFERENCE,
    bench.Variant("step_gae", PLAIN, "const V"),
    bench.Variant("step_gae", PLAIN | {"lam": 0.9}, "exact V"),
    bench.Variant("token_gae", PLAIN, "exact V"),
    bench.Variant("token_gae", PLAIN, "const V"),
    bench.Variant("remax", {}, None),
)
DR_GRPO, INDEX = (
    bench.Variant("dr_grpo", {}, None),
    bench.Variant("turn_grpo", {"signal": "return", "outcome_weight": 0.0}, None),
)


@functools.cache
def look_up(name):
    """A process, its paths and its exact gradient."""
    process = mdps.PROCESSES[name]()
    paths = mdps.every_path(process)
    return process, paths, mdps.exact_gradient(paths, process.logits)[1]


def score_gradient(paths, logits):
    """Σ_m p_m·R_m·∇log p_m by the flat logits, with ∂log π(a)/∂zᵥ = 1[v = a] − π(v)."""
    log_pi = mdps.log_policy(logits)
    taken = np.stack([np.bincount(a[a >= 0], minlength=log_pi.size) for a in paths.action])
    counts = np.repeat(taken.reshape(len(taken), -1, mdps.VOCABULARY).sum(axis=-1), mdps.VOCABULARY, axis=1)
    score = taken - counts * np.exp(log_pi)
    return (mdps.probabilities(paths, log_pi) * paths.outcome / paths.rows) @ score


def fails(paths):
    """Paths of `stop_or_go` that go on twice and get nothing, as if by a failure of the infrastructure."""
    return (paths.action[:, 1, 0] % mdps.VOCABULARY == 1) & (paths.outcome == 0)


@functools.cache
def every_pair(name, shift=0.0, drops=False):
    """All groups of two samples of one row, laid out, and the probability of each; padded to PAIRS.

    With `drops`, paths that fail are dropped from their groups: padding is in their place.
    """
    process, paths, _ = look_up(name)
    old = mdps.old_logits(process, shift)
    p = mdps.probabilities(paths, mdps.log_policy(old))
    pairs = np.argwhere(paths.row[:, None] == paths.row[None, :])
    likelihood = p[pairs].prod(axis=1) / paths.rows
    assert len(pairs) <= PAIRS and likelihood.sum() == pytest.approx(1)
    rest = PAIRS - len(pairs)
    greedy = np.bincount(paths.row, mdps.greedy_probabilities(paths, old) * paths.outcome)
    pairs = np.pad(pairs, ((0, rest), (0, 0)))
    sample = estimates.gather(paths, old, pairs, greedy[paths.row[pairs]], samples=2)
    if drops:
        out = fails(paths)[pairs]
        sample = sample.replace(
            action=jnp.where(out[..., None, None], -1, sample.action),
            state=jnp.where(out[..., None], -1, sample.state),
            reward=jnp.where(out[..., None], 0, sample.reward),
            group=jnp.where(out, 2, sample.group),
        )
    return (*estimates.lay_out(sample), np.pad(likelihood, (0, rest)))


def measure_errors(estimates, exact):
    return report.measure_errors(report.summarize(estimates, exact), exact)


def row_of(name, case, shift=0.0, **more):
    """The row of a case, from draws of PAIRS groups of two samples."""
    sampling = bench.Sampling(PAIRS, groups=1, samples=2, **more)
    [row] = bench.measure(name, [case], shift, sampling, lambda estimated, text: None)
    return row


def estimate(name, variant, batch, loss_tokens, aggregate="fixed", config=bench.ON_POLICY):
    share = estimates.weights(aggregate, loss_tokens, trajectories=2)
    return bench.estimate(config, look_up(name)[0].logits, loss_tokens, bench.advantages(variant, batch), share)


def expectation(name, variant, drops=False, **loss):
    """E ĝ of one group of two samples, without chance; aggregate and config as in `estimate`."""
    batch, loss_tokens, likelihood = every_pair(name, drops=drops)
    return likelihood @ estimate(name, variant, batch, loss_tokens, **loss).astype(np.float64)


@pytest.mark.parametrize("name", mdps.PROCESSES)
def test_gradient_is_the_slope_of_the_return_and_the_score(name):
    process, paths, exact = look_up(name)
    p = mdps.probabilities(paths, mdps.log_policy(process.logits))
    np.testing.assert_allclose(np.bincount(paths.row, p), 1)
    np.testing.assert_allclose(np.bincount(paths.row, mdps.greedy_probabilities(paths, process.logits)), 1)
    np.testing.assert_allclose(exact, score_gradient(paths, process.logits), atol=1e-12)
    direction = np.random.default_rng(0).normal(size=process.logits.shape)
    above, below = (mdps.exact_gradient(paths, process.logits + e * direction)[0] for e in (1e-5, -1e-5))
    assert (above - below) / 2e-5 == pytest.approx(exact @ direction.ravel(), rel=1e-6)


@pytest.mark.parametrize("name", mdps.PROCESSES)
def test_values_are_those_of_the_policy(name):
    process, paths, _ = look_up(name)
    log_pi = mdps.log_policy(process.logits)
    p = mdps.probabilities(paths, log_pi)
    values, _ = mdps.exact_values(paths, process.logits)
    assert p @ values[:, 0, 0] == pytest.approx(p @ paths.outcome)
    # Given all that led to a node, what follows is worth V on average: test at the second step of the first row.
    second = (paths.state[:, 1] >= 0) & (paths.row == 0)
    for state in set(paths.state[second, 1]):
        here = second & (paths.state[:, 1] == state)
        future = paths.reward[here, 1:].sum(axis=1)
        np.testing.assert_allclose(values[here, 1, 0], p[here] @ future / p[here].sum())


@pytest.mark.parametrize("name", LISTED)
@pytest.mark.parametrize("variant", UNBIASED, ids=lambda v: v.label)
def test_unbiased_exactly(name, variant):
    np.testing.assert_allclose(expectation(name, variant), look_up(name)[2], atol=2e-6)


@pytest.mark.parametrize("preset", ["rloo", "remax"])
def test_presets_that_sum_over_tokens_are_unbiased_exactly(preset):
    """With the mean over the tokens of a trajectory they were not: the direction was off, too."""
    settings = read_settings(load_config(f"configs/presets/{preset}.py"))
    variant = bench.Variant(settings.scheme.name, settings.scheme.arguments, None)
    for name in ("stop_or_go", "key_door"):
        found = expectation(name, variant, aggregate=settings.loss.aggregate, config=settings.loss)
        np.testing.assert_allclose(found, look_up(name)[2], atol=2e-6)


def test_a_value_that_has_seen_the_response_is_a_biased_baseline_of_it():
    """`key_door` has responses of several tokens, and its keys are chosen by the first ones."""
    late, exact = bench.Variant("step_gae", PLAIN | {"anchor": "last_token"}, "exact V"), look_up("key_door")[2]
    errors = np.linalg.norm(expectation("key_door", late) - exact) / np.linalg.norm(exact)
    assert errors > 0.1


@pytest.mark.parametrize("name", LISTED)
def test_grpo_without_std_is_shrunk_by_the_share_of_the_others(name):
    np.testing.assert_allclose(expectation(name, DR_GRPO), look_up(name)[2] / 2, atol=2e-6)


def test_index_baseline_is_biased_where_the_policy_decides_when_to_stop():
    process, _, exact = look_up("stop_or_go")
    found = expectation("stop_or_go", INDEX).reshape(mdps.STATES, -1)
    # Both are alive at the first choice; at the second one the other sample is there only if it chose to go on.
    go = np.exp(mdps.log_policy(process.logits))[1]
    np.testing.assert_allclose(found[0], exact.reshape(mdps.STATES, -1)[0] / 2, atol=2e-6)
    np.testing.assert_allclose(found[1], exact.reshape(mdps.STATES, -1)[1] * go / 2, atol=2e-6)
    assert go < 0.5


@pytest.mark.parametrize("name", ["key_door", "stop_or_go"])
def test_the_mean_of_an_action_moves_the_policy_as_its_visits_do(name):
    """`rtmc` is the part of `gigpo` that compares states where no trajectory comes to a state twice."""
    batch, loss_tokens, _ = every_pair(name)
    of_scheme = {
        scheme: np.asarray(estimate(name, bench.Variant(scheme, hyper, None), batch, loss_tokens))
        for scheme, hyper in (("rtmc", {"gamma": 1.0}), ("gigpo", {"gamma": 1.0}), ("dr_grpo", {}))
    }
    np.testing.assert_allclose(of_scheme["rtmc"], of_scheme["gigpo"] - of_scheme["dr_grpo"], atol=1e-5)


def test_bilevel_gae_errs_with_the_exact_critic_where_actions_choose_the_length_of_a_response():
    """The bias is of λ < 1 alone, and none of it is seen where all responses of a state are equally long."""
    late = bench.Variant("bilevel_gae", PLAIN | {"gamma_high": 1.0, "lam": 0.9}, "exact V")
    assert late in bench.variants(["bilevel_gae"])
    for name in LISTED:
        exact = look_up(name)[2]
        np.testing.assert_allclose(
            expectation(name, late._replace(hyperparameters=late.hyperparameters | {"lam": 1.0})), exact, atol=2e-6
        )
        bias = np.linalg.norm(expectation(name, late) - exact) / np.linalg.norm(exact)
        assert bias < 1e-5 if name != "short_or_long" else bias == pytest.approx(0.084, abs=5e-4)
    case = bench.Case(late, "fixed", "on-policy")
    row = row_of("short_or_long", case, until=bias / 1.5, most_batches=50 * PAIRS)
    assert row["verdict"] == report.BIASED and row["bias_low"] <= bias <= row["bias_high"]


@pytest.mark.parametrize(
    ("variant", "bias"),
    [
        (bench.Variant("reinforce", PLAIN, None), 0.0),  # Nothing is subtracted, and nothing times 0 is missing.
        (bench.Variant("rloo", {}, None), 0.182),
        (bench.Variant("state_baseline", {}, None), 0.221),
        (bench.REFERENCE, 0.232),
        (bench.Variant("step_gae", PLAIN, "const V"), 0.244),
    ],
    ids=lambda x: getattr(x, "label", x),
)
def test_failures_that_are_dropped_bias_the_gradient_and_those_that_count_as_zero_do_not(variant, bias):
    """Where going on may fail, J pays 0 then; what is left without failures has the gradient of E[R | no failure]."""
    process, paths, exact = look_up("stop_or_go")
    np.testing.assert_allclose(expectation("stop_or_go", variant), exact, atol=2e-6)
    found = expectation("stop_or_go", variant, drops=True)
    assert np.linalg.norm(found - exact) / np.linalg.norm(exact) == pytest.approx(bias, abs=1e-3)
    if variant.scheme == "rloo":

        def given_success(logits):
            p = mdps.probabilities(paths, mdps.log_policy(logits)) * ~fails(paths)
            return p @ paths.outcome / p.sum()

        moves = 1e-5 * np.eye(exact.size).reshape(exact.size, *process.logits.shape)
        slope = np.array(
            [(given_success(process.logits + e) - given_success(process.logits - e)) / 2e-5 for e in moves]
        )
        cosine = found @ slope / np.linalg.norm(found) / np.linalg.norm(slope)
        assert cosine == pytest.approx(1, abs=1e-6) and found @ exact / np.linalg.norm(found) < 0.995 * np.linalg.norm(
            exact
        )


def test_verdicts_from_samples():
    process, paths, exact = look_up("revisits")
    sample = estimates.draw(paths, process.logits, 3, batches=PAIRS, groups=1, samples=2)
    batch, loss_tokens = estimates.lay_out(sample)
    for variant in UNBIASED:
        errors = measure_errors(estimate("revisits", variant, batch, loss_tokens), exact)
        assert errors.verdict == report.UNSEEN, (variant.label, errors)
        assert errors.bias_low < 0.01 and errors.bias_high < 0.1 and errors.visible < 0.1
        assert abs(errors.scale - 1) < 2 * errors.scale_half
    shrunk = measure_errors(estimate("revisits", DR_GRPO, batch, loss_tokens), exact)
    assert shrunk.verdict == "scaled" and abs(shrunk.scale - 0.5) < 2 * shrunk.scale_half
    by_trajectory = measure_errors(estimate("revisits", UNBIASED[0], batch, loss_tokens, "trajectory"), exact)
    assert by_trajectory.verdict == "biased"
    late = bench.Variant("step_gae", PLAIN | {"lam": 0.9}, "const V")
    assert measure_errors(estimate("revisits", late, batch, loss_tokens), exact).verdict == "biased"


def test_layout_is_that_of_the_paths():
    process, paths, _ = look_up("key_door")
    path = np.random.default_rng(0).integers(len(paths.noise), size=(PAIRS, 2))
    batch, loss_tokens = estimates.lay_out(
        estimates.gather(paths, process.logits, path, np.zeros(path.shape), samples=1)
    )
    for b in range(3):
        steps = [(i, m, t) for i, m in enumerate(path[b]) for t in np.flatnonzero(paths.state[m] >= 0)]
        tokens = [(s, a) for s, (_, m, t) in enumerate(steps) for a in paths.action[m, t] if a >= 0]
        pad_steps, pad_tokens = batch["rewards"].shape[1] - len(steps), loss_tokens.target.shape[1] - len(tokens)
        np.testing.assert_array_equal(batch["step_trajectory"][b], [i for i, _, _ in steps] + [2] * pad_steps)
        np.testing.assert_allclose(batch["rewards"][b], [paths.reward[m, t] for _, m, t in steps] + [0] * pad_steps)
        np.testing.assert_array_equal(
            batch["token_step"][b], [s for s, _ in tokens] + [batch["rewards"].shape[1]] * pad_tokens
        )
        said = [tuple(a % mdps.VOCABULARY for a in paths.action[m, t] if a >= 0) for _, m, t in steps]
        same = (
            np.asarray(batch["action_key"][b])[: len(steps), None] == np.asarray(batch["action_key"][b])[: len(steps)]
        )
        np.testing.assert_array_equal(same, [[one == other for other in said] for one in said])
        np.testing.assert_array_equal(batch["action_key"][b, len(steps) :], -1)
        np.testing.assert_array_equal(loss_tokens.target[b], [a for _, a in tokens] + [0] * pad_tokens)
        np.testing.assert_array_equal(loss_tokens.group[b], [steps[s][0] for s, _ in tokens] + [-1] * pad_tokens)


def test_old_log_probs_are_those_of_the_policy_that_sampled():
    _, loss_tokens, likelihood = every_pair("key_door", shift=1.0)
    log_pi = mdps.log_policy(look_up("key_door")[0].logits)
    log_ratio = np.where(
        loss_tokens.is_action, log_pi[np.asarray(loss_tokens.target)] - np.asarray(loss_tokens.old_logprob), 0
    )
    assert likelihood @ np.exp(log_ratio.sum(axis=1)) == pytest.approx(1, rel=1e-5)
    assert np.abs(log_ratio).max() > 0.5


def test_clipping_adds_bias_that_bounds_out_of_reach_do_not():
    exact = look_up("key_door")[2]
    batch, loss_tokens, likelihood = every_pair("key_door", shift=1.0)

    def bias(config):
        found = likelihood @ estimate("key_door", bench.REFERENCE, batch, loss_tokens, config=config).astype(np.float64)
        return np.linalg.norm(found - exact) / np.linalg.norm(exact)

    assert bias(bench.ON_POLICY) > 1.5 * bias(bench.UNCLIPPED)


@pytest.mark.parametrize("name", mdps.PROCESSES)
def test_older_policy_takes_some_tokens_out_of_the_bounds(name):
    process, paths, _ = look_up(name)
    new, old = mdps.log_policy(process.logits), mdps.log_policy(mdps.old_logits(process, process.shift))
    weight = (paths.action >= 0) * mdps.probabilities(paths, old)[:, None, None]
    rho = np.exp(new - old)[paths.action]
    outside = (weight * ((rho < 0.8) | (rho > 1.2))).sum() / weight.sum()
    assert 0.2 <= outside <= 0.5


def test_shift_is_that_of_the_process_unless_given():
    for given, shift, verdict in ((None, mdps.stop_or_go().shift, report.BIASED), (0.0, 0.0, report.UNSEEN)):
        row = row_of("stop_or_go", bench.Case(bench.REFERENCE, "fixed", "token, no bound"), given)
        assert (row["shift"], row["verdict"]) == (shift, verdict)


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_weights_are_those_of_each_batch_alone(aggregate):
    _, loss_tokens, _ = every_pair("key_door")
    some = jax.tree.map(lambda x: x[::999], loss_tokens)
    found = estimates.weights(aggregate, some, trajectories=2)
    for b, mask in enumerate(np.asarray(some.is_action)):
        units = (np.where(mask, np.asarray(x)[b], 30) for x in (some.step, some.trajectory, some.group))
        alone = loss_weights(aggregate, TokenUnits(*units), mask, fixed_denominator=2.0)
        np.testing.assert_allclose(found[b], alone, rtol=1e-5)


def test_interval_covers_and_test_rejects_at_its_level():
    rng = np.random.default_rng(0)
    exact = np.array([0.6, 0.0, 0.8, 0.0])
    for bias in (np.zeros(4), np.array([0.1, -0.1, 0.0, 0.0]), np.array([0.4, 0.0, 0.0, 0.0])):
        shapes = rng.normal(size=(4, 3)) * np.array([1.0, 0.5, 0.1])
        rejected, covered, variance = 0, np.zeros(4), (shapes**2).sum()
        for _ in range(150):
            samples = exact + (bias + rng.normal(size=(400, 3)) @ shapes.T)
            errors = measure_errors(samples, exact)
            rejected += errors.p < 0.05
            covered += [
                errors.bias_low <= np.linalg.norm(bias) <= errors.bias_high,
                abs(errors.scale - 1 - bias @ exact) <= errors.scale_half,
                abs(errors.variance - variance) <= errors.variance_half,
                abs(errors.mse - variance - bias @ bias) <= errors.mse_half,
            ]
        assert (covered > 0.9 * 150).all() and (covered[1:] < 150).all()
        assert rejected > 0.9 * 150 if bias.any() else rejected < 0.1 * 150


def test_judge_tells_length_from_direction():
    rng = np.random.default_rng(0)
    exact, noise = np.array([3.0, 4.0]), rng.normal(size=(2000, 2))
    noise -= noise.mean(axis=0)
    half, turned = (
        measure_errors(exact / 2 + noise, exact),
        measure_errors(exact + [0.8, -0.6] + noise, exact),
    )
    assert (half.verdict, turned.verdict) == ("scaled", "biased")
    assert half.scale == pytest.approx(0.5) and half.off == 0 and half.variance == pytest.approx(2 / 25, rel=0.1)
    assert half.noise == pytest.approx(4 * half.variance) and half.mse == pytest.approx(0.25 + half.variance, rel=1e-3)
    assert turned.scale == pytest.approx(1) and turned.off == pytest.approx(0.2, rel=1e-2)
    nothing = measure_errors(np.zeros((300, 2)), exact)
    assert (nothing.verdict, nothing.p, nothing.cosine) == (report.BIASED, 0, 0) and abs(nothing.scale) < 1e-9
    assert measure_errors(np.tile(exact, (300, 1)), exact).verdict == report.UNSEEN


def test_errors_are_those_of_all_estimates_however_they_are_split():
    rng = np.random.default_rng(0)
    exact = np.array([0.6, 0.0, 0.8])
    samples = 1.0 + rng.gamma(2.0, size=(500, 3)) @ rng.normal(size=(3, 3))
    parts = [report.summarize(part, exact) for part in np.split(samples, [200, 207])]
    errors = report.measure_errors(parts[0] + parts[1] + parts[2], exact)
    assert errors.batches == 500
    for name, value in dataclasses.asdict(measure_errors(samples, exact)).items():
        assert value == getattr(errors, name) if name == "verdict" else value == pytest.approx(getattr(errors, name))
    around, missed = (((samples - centre) ** 2).sum(axis=1) for centre in (samples.mean(axis=0), exact))
    for found, squares in ((errors.variance_half, around), (errors.mse_half, missed)):
        assert found == pytest.approx(report.Z * squares.std(ddof=1) / np.sqrt(500))
    assert errors.mse == pytest.approx(missed.mean()) and errors.variance == pytest.approx(around.sum() / 499)


def test_level_and_power_are_those_that_are_said():
    n, rng = 200, np.random.default_rng(0)
    shapes = np.linalg.qr(rng.normal(size=(4, 4)))[0] * np.array([1.0, 0.5, 0.2, 0.0])
    covariance = shapes @ shapes.T
    _, visible = report.mean_is_zero(np.zeros(4), covariance, n)

    def share(bias, count, level=report.LEVEL):
        # Mean and covariance of n normal samples, drawn as such: Wishart's distribution is that of the scatter.
        means = rng.normal(size=(count, 3)) / np.sqrt(n)
        scatters = scipy.stats.wishart(n - 1, np.eye(3)).rvs(count, random_state=rng)
        inner = shapes[:, :3]
        p = [
            report.mean_is_zero(bias + inner @ m, inner @ s @ inner.T / (n - 1), n)[0]
            for m, s in zip(means, scatters, strict=True)
        ]
        return np.mean(np.array(p) < level)

    widest, narrow = shapes[:, 0], shapes[:, 2] / 0.2
    assert share(np.zeros(4), 20_000) * 20_000 <= 6  # 2 are expected.
    assert share(np.zeros(4), 4_000, level=0.05) == pytest.approx(0.05, abs=0.01)
    assert share(visible * widest, 4_000) == pytest.approx(report.POWER, abs=0.02)
    assert share(visible / 2 * widest, 4_000) < 0.2
    assert share(visible * narrow, 500) == 1


def test_a_small_bias_is_seen_once_there_are_batches_enough():
    process, _, exact = look_up("stop_or_go")
    nearly = bench.Variant("step_gae", PLAIN | {"lam": 0.7}, "const V")
    bias = np.linalg.norm(expectation("stop_or_go", nearly) - exact) / np.linalg.norm(exact)
    case = bench.Case(nearly, "fixed", "on-policy")
    few = row_of("stop_or_go", case)
    assert (few["verdict"], few["batches"]) == (report.UNSEEN, PAIRS) and few["visible"] > bias
    many = row_of("stop_or_go", case, until=bias / 1.5, most_batches=50 * PAIRS)
    assert many["verdict"] == report.BIASED and many["visible"] <= bias / 1.5 and many["batches"] > PAIRS
    assert many["bias_low"] <= bias <= many["bias_high"]
    limited = row_of("stop_or_go", case, until=bias / 1.5, most_batches=3 * PAIRS - 1)
    assert limited["batches"] == 2 * PAIRS and limited["visible"] > bias / 1.5


def test_variants_cover_every_scheme_plain_and_by_default():
    names = bench.select_schemes(["all"])
    assert set(SCHEMES) - set(names) == {"igpo", "a2tgpo", "trace"}
    labels = [v.label for v in bench.variants(names)]
    assert len(set(labels)) == len(labels) and {label.split()[0].strip(",") for label in labels} == set(names)
    assert {"step_gae, const V", "token_gae whiten=none lam=0.9, exact V", bench.REFERENCE.label} <= set(labels)
    assert {"state_baseline", "reinforce", "reinforce whiten=none", "gigpo gamma=1", INDEX.label} <= set(labels)
    assert {"gigpo norm=mean_std_norm", "salt norm=mean_norm"} <= set(labels)
    plain = bench.plain(bench.variants(names))
    assert {v.scheme for v in plain} == set(names) and len(plain) == len(names)
    assert all(v.critic in (None, "exact V") and v.hyperparameters.get("whiten", "none") == "none" for v in plain)
    assert bench.plain([UNBIASED[1]]) == [bench.REFERENCE, UNBIASED[1]]


def test_a_scheme_that_reads_beliefs_is_refused():
    with pytest.raises(
        UserError, match="--schemes: igpo reads the belief in a gold answer, and these processes have none"
    ):
        bench.select_schemes(["rloo", "igpo"])


def test_discounts_reach_the_scheme():
    batch, _, _ = every_pair("key_door")
    one, other = (bench.advantages(bench.Variant("step_gae", PLAIN | {"lam": x}, "const V"), batch) for x in (1.0, 0.5))
    assert jnp.abs(one - other).max() > 0.1


@pytest.mark.slow
def test_command_writes_tables_figures_and_picture(tmp_path):
    """A process of its own: commands define their flags where they are imported, and some of the same name."""
    chosen = ["--process=stop_or_go", "--schemes=rloo,dr_grpo", "--batches=400", f"--out={tmp_path}"]
    chosen += ["--until=.07", "--most_batches=1000"]
    done = subprocess.run(
        [sys.executable, "-m", "experiments.gradient_bench", *chosen], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    with open(tmp_path / "gradients.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [r["scheme"] for r in rows if r["aggregate"] == "fixed" and r["loss"] == "on-policy"] == ["rloo", "dr_grpo"]
    off = [(r["scheme"], r["loss"]) for r in rows if r["loss"] != "on-policy"]
    assert off == [(scheme, loss) for scheme in (bench.REFERENCE.label, "rloo", "dr_grpo") for loss in bench.LOSSES]
    assert {float(r["shift"]) for r in rows} == {0, mdps.stop_or_go().shift}
    assert {r["aggregate"] for r in rows} == set(AGGREGATES)
    markdown = (tmp_path / "gradients.md").read_text("utf-8")
    assert "| rloo | no bias seen (≥ 0." in markdown and "| dr_grpo | scaled, no turn seen (≥ 0." in markdown
    coarse = [r for r in rows if float(r["visible"]) > 0.07]
    assert coarse and {r["batches"] for r in coarse} == {"800"} and len(coarse) < len(rows)
    assert f"{len(coarse)} of {len(rows)} rows did not get to a visible bias of 0.07" in markdown
    assert matplotlib.image.imread(tmp_path / "gradients.png").std() > 0.01


def test_unknown_names_are_refused_with_those_there_are():
    names = ["one", "two"]
    assert bench.select_names(["all"], names, "schemes") == names
    assert bench.select_names(["two"], names, "schemes") == ["two"]
    with pytest.raises(UserError, match="--schemes.*rlooo.*choose all or some of one, two"):
        bench.select_names(["rlooo"], names, "schemes")


def test_picture_leaves_out_what_points_nowhere(tmp_path):
    row = {"off": 0.1, "off_low": 0.05, "off_high": 0.2, "noise": 1.0, "verdict": "biased"}
    unseen = {**row, "scheme": "z", "verdict": report.UNSEEN, "off_visible": 0.15}
    rows = [{**row, "scheme": "x"}, {**row, "scheme": "y", "off": np.inf}, unseen]
    report.plot_gradients(tmp_path / "all.png", {"a": rows, "b": []})
    assert matplotlib.image.imread(tmp_path / "all.png").std() > 0.001
