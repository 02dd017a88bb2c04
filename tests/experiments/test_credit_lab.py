"""The credit lab: its processes, exact values, rollouts and updates against slow references, and its page."""

import csv
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from agentr1_jax.credit import SCHEMES, get_scheme
from agentr1_jax.credit.batch import flatten, to_token_batch
from agentr1_jax.envs.tabular import action_values as infinite_values
from agentr1_jax.errors import UserError
from agentr1_jax.learner.loss_weights import TokenUnits, loss_weights
from agentr1_jax.trajectory import Outcome, Step, Trajectory
from experiments.lab import processes, study, training
from experiments.lab.processes import PROCESSES, capacity, make_process, tabulate
from experiments.lab.study import Plan, candidates
from experiments.lab.training import Setting
from tests.programs import program

credit_lab = program("credit_lab")
SMALL = Plan(seeds=6, tuning_seeds=3, budget=2, updates=3, groups=2, samples=4)


def tables_of(name):
    return jax.tree.map(jnp.asarray, tabulate(make_process(name)))


@pytest.mark.parametrize("name", PROCESSES)
def test_tables_are_those_of_the_games(name):
    process, tables = make_process(name), tabulate(make_process(name))
    total = tables.probability.sum(-1)
    np.testing.assert_allclose(total[total > 0], 1, atol=1e-6)
    assert (tables.allowed.sum(1) >= (total > 0).sum(1)).all()
    games = np.resize(np.arange(len(process.games)), processes.ROWS)
    _, value = training.action_values(jax.tree.map(jnp.asarray, tables), capacity(process), None)
    for row, start in enumerate(tables.start):
        # With time enough the best return is that of the game without a limit.
        best = max(infinite_values(process.games[games[row]])[process.games[games[row]].start].values())
        assert float(value[0, start]) <= best + 1e-5
        if name not in ("frozenlake", "revisits", "corridor"):
            assert float(value[0, start]) == pytest.approx(best, abs=1e-5)


def test_what_is_not_there_or_too_large_is_refused():
    for text, message in {
        "corridr": "unknown process 'corridr'",
        "corridor(lenght=3)": "takes horizon",
        "corridor(horizon=65)": "65 steps; the lab has arrays for 64",
        "bifurcation(decoys=60)": "states; the lab has arrays for 64",
        "bifurcation(actions=8)": "8 actions; the lab has arrays for 6",
        "bifurcation(chance=7)": "chance: Input should be less than or equal to 1",
        "corridor(horizon=0)": "horizon: Input should be greater than or equal to 1",
        "late_reward(delay=-1)": "delay: Input should be greater than or equal to 0",
    }.items():
        with pytest.raises(UserError, match=message):
            tabulate(make_process(text))


def test_rollouts_have_the_expected_return_of_their_policy():
    tables = tables_of("frozenlake")
    logits = jax.random.normal(jax.random.PRNGKey(0), (processes.STATES, processes.ACTIONS))
    parts = training.make_parts("tabular")
    row = jnp.zeros(20_000, jnp.int32)
    sample = training.roll_out(parts.policy, logits, tables, row, jax.random.PRNGKey(1), steps=16)
    probability = jnp.exp(training.log_policy(tables, logits[tables.observation], jnp.arange(processes.STATES)))
    _, value = training.action_values(tables, 16, probability)
    returns = np.asarray(sample.reward.sum(1))
    error = returns.std() / len(returns) ** 0.5
    assert abs(returns.mean() - float(value[0, tables.start[0]])) < 4 * error
    assert not np.asarray(sample.reward)[~np.asarray(sample.real)].any()


def test_ranks_are_those_of_scipy():
    rng = np.random.default_rng(0)
    real = jnp.asarray(rng.random(40) < 0.7)
    x, y = (jnp.asarray(rng.integers(6, size=40) / 4, jnp.float32) for _ in range(2))
    one, other = (training.center_ranks(v, real) for v in (x, y))
    ours = float(jnp.sum(one * other) / jnp.sqrt(jnp.sum(one**2) * jnp.sum(other**2)))
    assert ours == pytest.approx(scipy.stats.spearmanr(x[real], y[real]).statistic, abs=1e-5)


def trajectories_of(sample, log_pi, groups):
    """The same trajectories as the library's records."""
    out = []
    for n, real in enumerate(np.asarray(sample.real)):
        steps = [
            Step(
                prompt_ids=np.array([int(sample.observation[n, t])], np.int32),
                response_ids=np.array([int(sample.action[n, t])], np.int32),
                logprobs=np.asarray(log_pi[n, t, sample.action[n, t]], np.float32)[None],
                reward=float(sample.reward[n, t]),
                state_key=str(int(sample.observation[n, t])),
                action_key=str(int(sample.action[n, t])),
            )
            for t in range(int(real.sum()))
        ]
        group = n * groups // len(sample.real)
        out.append(Trajectory(str(n), group, n, "lab", 0, steps, Outcome.ENV_DONE, greedy_return=0.25 * group))
    return out


@pytest.mark.parametrize("name", ["grpo", "step_gae", "remax", "rtmc", "state_baseline"])
def test_an_update_is_that_of_the_library(name):
    setting, tables = Setting(name, horizon=8, groups=3, samples=4), tables_of("revisits")
    parts = training.make_parts("tabular")
    keys = jax.random.split(jax.random.PRNGKey(3), 3)
    size = processes.STATES, processes.ACTIONS
    params = {"policy": jax.random.normal(keys[0], size), "critic": jax.random.normal(keys[1], (processes.STATES, 1))}
    row = jnp.repeat(jnp.array([0, 1, 0]), 4)
    sample = training.roll_out(parts.policy, params["policy"], tables, row, keys[2], steps=8)
    known, greedy = training.outputs(parts, tables, params, sample), jnp.repeat(0.25 * jnp.arange(3), 4)
    _, loss_tokens = training.assign_credit(setting, tables, sample, known, jnp.float32(0.3), greedy, {})
    gradient = jax.grad(training.batch_loss, argnums=2)(parts, tables, params, sample, loss_tokens)

    trajectories, scheme = trajectories_of(sample, known[0], 3), get_scheme(name)
    values = np.asarray(known[1])[np.asarray(sample.real)]
    flat = flatten(trajectories, values if scheme.uses_critic else None)
    sizes = {"trajectories": 14, "steps": 120, "tokens": 130}
    batch = to_token_batch(flat, **sizes, critic=scheme.uses_critic, baseline=0.3)
    credit = scheme.assign(batch)
    units = TokenUnits(flat.token_step, flat.token_trajectory, flat.group[flat.token_trajectory])
    weight = loss_weights("fixed", units, flat.is_action, fixed_denominator=12)
    expected = {part: np.zeros(x.shape) for part, x in params.items()}
    steps = [s for t in trajectories for s in t.steps]
    probability = np.exp(np.asarray(known[0], np.float64))[np.asarray(sample.real)]
    allowed = np.asarray(tables.allowed)[np.asarray(sample.state)][np.asarray(sample.real)]
    for k, step in enumerate(steps):
        # −w·A·∇log π of a softmax.
        score = np.eye(processes.ACTIONS)[step.response_ids[0]] - probability[k] * allowed[k]
        expected["policy"][step.prompt_ids[0]] -= weight[k] * float(credit.advantages[k]) * score
    if credit.value_targets is not None:
        mask = np.asarray(credit.value_mask)[: len(steps)]
        for k in np.flatnonzero(mask):
            error = float(values[k]) - float(credit.value_targets[k])
            expected["critic"][steps[k].prompt_ids[0]] += 0.5 * error / mask.sum()
    np.testing.assert_allclose(gradient["policy"], expected["policy"], atol=1e-6)
    np.testing.assert_allclose(gradient["critic"], expected["critic"], atol=1e-6)
    assert np.abs(expected["policy"]).max() > 1e-3


def test_every_scheme_has_as_many_candidates():
    for name in SCHEMES:
        tried = candidates(name, Plan(budget=8))
        assert len(tried) == 8 and len({c.label for c in tried}) == 8
        get_scheme(name).bind(**tried[0].arguments)
    assert set(study.OWN) <= set(SCHEMES)


def test_seeds_are_all_different():
    plan = Plan(seeds=40, tuning_seeds=30)
    keys = np.concatenate([study.keys_of(plan, purpose) for purpose in ("report", "tuning")])
    assert len({tuple(key) for key in keys.tolist()}) == 70


def test_a_study_is_the_same_whatever_it_is_cut_into():
    setting, tables = Setting("grpo", horizon=8, groups=2, samples=4, updates=3), tables_of("stop_or_go")
    keys = study.keys_of(Plan(seeds=30), "report")
    tried = candidates("grpo", Plan(budget=3))
    whole = study.run(setting, tables, [(c, keys) for c in tried]).expected
    assert whole.shape == (3, 30, 3)
    alone = study.run(setting, tables, [(tried[1], keys[26:])]).expected
    np.testing.assert_array_equal(whole[1, 26:], alone[0])


def test_policies_learn():
    tables = tables_of("stop_or_go")
    first, best = study.bounds(tables, 8)
    for policy, rate in (("tabular", 0.3), ("recurrent", 0.03)):
        setting = Setting("rloo", policy=policy, horizon=8, updates=60)
        keys = study.keys_of(Plan(seeds=4), "report")
        curves = study.run(setting, tables, [(study.Candidate(rate, {}), keys)]).expected[0]
        assert (curves[:, -10:].mean(-1) - first > 0.7 * (best - first)).all()


def test_pairs_are_corrected_for_their_number():
    rng = np.random.default_rng(0)
    share = {name: rng.normal(mean, 0.1, (50, 4)) for name, mean in (("a", 0.5), ("b", 0.5), ("c", 0.8))}
    results = [study.Result(n, "p", study.Candidate(0.1, {}), x, 0.0, 0.0) for n, x in share.items()]
    pairs = {(p.one, p.other): p for p in study.compare(results)}
    for (one, other), pair in pairs.items():
        p = scipy.stats.mannwhitneyu(share[one].mean(1), share[other].mean(1)).pvalue
        assert p <= pair.p <= min(3 * p, 1) + 1e-12
    assert pairs["a", "b"].p > 0.05 > pairs["a", "c"].p
    assert pairs["a", "c"].improvement < 0.05
    assert 0.02 < study.visible_difference(results) < 0.08


@pytest.mark.slow
def test_a_scheme_hardly_ever_differs_from_itself():
    plan = Plan(updates=20, groups=2, samples=4)
    rate = study.false_positives("grpo", make_process("stop_or_go"), plan, repetitions=200, seeds=12)
    assert rate <= scipy.stats.binom.ppf(0.999, 200, 0.05) / 200


def test_the_page_has_every_scheme_and_process(tmp_path):
    rng, names, places = (
        np.random.default_rng(0),
        ("grpo", "step_gae", "remax"),
        ("stop_or_go", "bifurcation(decoys=3)"),
    )
    plan = Plan(seeds=8, updates=5)
    results = [
        study.Result(name, place, study.Candidate(0.1, {"lam": 0.9}), rng.random((8, 5)), 0.3, float("nan"))
        for place in places
        for name in names
        if (name, place) != ("remax", "stop_or_go")
    ]
    pairs = study.compare(results)
    page = credit_lab.write(str(tmp_path), plan, results, pairs, ["a note <b>"], 60.0)
    with open(page) as file:
        text = file.read()
    assert all(name in text for name in (*names, *places, "2604.09459", "lam 0.9", "a note &lt;b&gt;"))
    with open(tmp_path / "lab.csv") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 5 * 8 and float(lines[0]["area"]) == pytest.approx(results[0].area[0])
    with open(tmp_path / "curves.csv") as file:
        assert len(list(csv.DictReader(file))) == 5 * 5
    with open(tmp_path / "pairs.csv") as file:
        assert [float(line["p"]) for line in csv.DictReader(file)] == pytest.approx([pair.p for pair in pairs])


@pytest.mark.slow
def test_the_lab_is_one_command(tmp_path):
    flags = ["--schemes=grpo,step_gae", "--processes=stop_or_go", "--null=2", f"--out={tmp_path}"]
    sizes = ["--seeds=5", "--tuning_seeds=2", "--budget=2", "--updates=3", "--groups=2", "--samples=3"]
    command = [sys.executable, "-m", "experiments.credit_lab", *flags, *sizes]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "| stop_or_go | the policy decides when to stop |" in done.stdout and (tmp_path / "lab.html").exists()
    wrong = subprocess.run([*command, "--schemes=gpro"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and "unknown name 'gpro'" in wrong.stderr
