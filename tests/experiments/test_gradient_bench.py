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
from experiments.credit import bias as bench
from experiments.credit import estimates, mdps

PAIRS = 7300
"""Batches in every test that credits or differentiates, so that they share compiled programs."""
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


@functools.cache
def every_pair(name, shift=0.0):
    """All groups of two samples of one row, laid out, and the probability of each; padded to PAIRS."""
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


def expectation(name, variant):
    """E ĝ of one group of two samples, without chance."""
    batch, loss_tokens, likelihood = every_pair(name)
    return likelihood @ estimate(name, variant, batch, loss_tokens).astype(np.float64)


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


@pytest.mark.parametrize("name", ["stop_or_go", "key_door"])
@pytest.mark.parametrize("variant", UNBIASED, ids=lambda v: v.label)
def test_unbiased_exactly(name, variant):
    np.testing.assert_allclose(expectation(name, variant), look_up(name)[2], atol=2e-6)


@pytest.mark.parametrize("name", ["stop_or_go", "key_door"])
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
