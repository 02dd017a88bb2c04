"""Comparing credit schemes: its statistics, what is refused, gradients and resamples against slow ones, the page."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import json
import pathlib
import re
import subprocess
import sys
import tempfile

import jax
import learners
import numpy as np
import pages
import pytest
import reference
import tiny
from builders import LONGEST, trajectory
from examples import POLICY, parameters
from programs import program
from small_runs import ROOT, train

from agentr1_jax.credit import SCHEMES as REGISTRY
from agentr1_jax.credit import get_scheme
from agentr1_jax.credit.batch import flatten
from agentr1_jax.credit.shaping import RunningMeanStd
from agentr1_jax.errors import UserError
from agentr1_jax.learner.batch import to_microbatches
from agentr1_jax.learner.config import AGGREGATES, PackingConfig
from agentr1_jax.learner.packing import pack, scatter_fields
from agentr1_jax.learner.update import batch_gradient
from agentr1_jax.report import credit as stats
from agentr1_jax.report.page import write_page
from agentr1_jax.runtime.checkpoint import Checkpoints
from agentr1_jax.train import build, phases, train_step
from agentr1_jax.train.build import Setup
from agentr1_jax.train.progress import Progress
from agentr1_jax.train.restore import checkpoint_before
from agentr1_jax.trajectory_io import write_jsonl
from configs import base, quickstart
from experiments.credit import choice, effects, recording
from experiments.credit.recording import Scale, score_groups
from experiments.setup import change_config, read_settings

credit_compare = program("credit_compare")
HOSTILE = "</pre><script>alert(1)</script><img src=x onerror='alert(1)'>\"&amp;"
MOST_ROWS = 4 * 8
"""Steps of four times the largest group."""
SCHEMES = {
    "grpo": ("grpo", {}),
    "token_gae": ("token_gae", {"whiten": "trajectory", "lam": 0.5}),
    "gigpo": ("gigpo", {}),
}


def schemes():
    return {label: get_scheme(name, **args) for label, (name, args) in SCHEMES.items()}


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_steps_that_are_not_trained_have_no_weight(aggregate):
    """Summaries that are left out of the loss: the flag is the step's, and the weights are those of a plain loop."""
    rng = np.random.default_rng(0)
    made = [trajectory(rng, tokens, group=group) for tokens, group in (([2, 3, 1], 0), ([1, 4], 0), ([2], 1))]
    made[0] = learners.with_step(made[0], 1, trainable=False)
    made[1] = learners.with_step(made[1], 0, trainable=False)
    flat = flatten(made)
    setup = learners.make({"loss.fixed_denominator": 3.0}).setup
    found = effects.token_weights(setup, flat, aggregate)
    trained = [s.trainable for t in made for s in t.steps for _ in s.response_ids]
    units = (flat.token_step.tolist(), flat.token_trajectory.tolist(), flat.group[flat.token_trajectory].tolist())
    one_hot = np.eye(len(trained))
    expected = [reference.aggregate(aggregate, row.tolist(), *units, trained, 3.0) for row in one_hot]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_correlations_by_hand():
    x = np.array([[1, 2, 3, 4], [2, 4, 6, 9], [4, 3, 2, 1], [5, 5, 5, 5], [1, 1, 2, 9]], float)
    linear, rank = stats.pearson(x), stats.spearman(x)
    np.testing.assert_allclose(linear[:3, :3], np.corrcoef(x[:3]), atol=1e-12)
    np.testing.assert_allclose(rank[:3, :3], [[1, 1, -1], [1, 1, -1], [-1, -1, 1]], atol=1e-12)
    # Ranks of the last are 1.5, 1.5, 3, 4.
    np.testing.assert_allclose(rank[0, 4], np.corrcoef([1, 2, 3, 4], [1.5, 1.5, 3, 4])[0, 1], atol=1e-12)
    assert np.isnan(linear[3]).all() and np.isnan(rank[:, 3]).all(), "a constant has no correlation"


def test_signs_oppose_only_where_both_are_set():
    opposed = stats.opposition(np.array([[1.0, -1, 0, 2], [-1.0, -1, 5, 0]]))
    np.testing.assert_array_equal(opposed, [[0, 0.25], [0.25, 0]])


def test_scaled_advantages_keep_their_signs():
    x = np.array([[1.0, -1, 1, 1], [10.0, -10, 10, -10], [0, 0, 0, 0]])
    scaled = stats.scale_by_rms(x)
    np.testing.assert_allclose((scaled**2).mean(1), [1, 1, 0])
    np.testing.assert_array_equal(np.sign(scaled), np.sign(x))


def test_a_zero_gradient_has_no_direction_and_neighbours_are_alike():
    gram = np.array([[4.0, 2, 0], [2, 4, 0], [0, 0, 0]])
    cosine = stats.cosines(gram)
    np.testing.assert_allclose(cosine[:2, :2], [[1, 0.5], [0.5, 1]])
    assert np.isnan(cosine[2]).all()
    assert stats.similarity_order(np.array([[1, 0.1, 0.9], [0.1, 1, 0.5], [0.9, 0.5, 1]])) == [0, 2, 1]
    assert stats.similarity_order(cosine) == [0, 1, 2]


def test_signal_to_noise_of_parts_with_a_known_one():
    """n parts mean + noise of unit variance in each of d directions: the sum has signal n·|mean| and noise √(n·d)."""
    rng, n, d = np.random.default_rng(0), 64, 4000
    counts = rng.multinomial(n, np.full(n, 1 / n), 400).astype(float)

    def noise(mean):
        parts = rng.standard_normal((n, d))
        parts[:, 0] += mean
        return stats.gradient_noise(parts @ parts.T, np.ones(n), counts, n)

    assert noise(24.0).snr == pytest.approx(24 * n / np.sqrt(n * d), rel=0.1)
    assert noise(0.0).snr < 0.25, "noise alone has the length of a signal, and is none"
    same = stats.gradient_noise(np.ones((n, n)), np.ones(n), np.ones((5, n)), n)
    assert same == (n, np.inf, pytest.approx(1))
    assert np.isnan(stats.gradient_noise(np.ones((1, 1)), np.ones(1), np.ones((5, 1)), 1).snr)
    assert stats.gradient_noise(np.zeros((2, 2)), np.ones(2), np.ones((5, 2)), 2).norm == 0


def test_scale_and_shift_are_found_and_what_is_neither_is_told():
    x = np.random.default_rng(0).standard_normal(50)
    assert stats.affine(x, 3 * x - 2) == pytest.approx((3, -2, 0), abs=1e-9)
    assert stats.affine(np.zeros(4), np.full(4, 2.0)) == pytest.approx((1, 2, 0))
    assert stats.affine(x, x**2)[2] > 0.3


@pytest.fixture
def config():
    return quickstart.get_config().unlock()


def keyed(trajectories):
    """Each step in a state of its own number."""
    return [
        dataclasses.replace(t, steps=tuple(dataclasses.replace(s, state_key=str(i)) for i, s in enumerate(t.steps)))
        for t in trajectories
    ]


WITHOUT_CRITIC = {"critic": "none", "credit.name": "grpo", "credit.args.lam": None}


def without_critic(config):
    return read_settings(change_config(config, WITHOUT_CRITIC))


def test_all_is_what_the_recording_has_the_data_for(config):
    chosen = choice.choose("all", read_settings(config), keyed(learners.batch()))
    assert next(iter(chosen.schemes)) == chosen.own == "step_gae(lam=0.95)"
    assert {"grpo", "gigpo", "token_gae"} <= set(chosen.schemes) and "step_gae" not in chosen.schemes
    assert [note for note in chosen.notes if note.startswith("remax is left out: it needs the reward of a greedy")]
    settings = without_critic(config)
    chosen = choice.choose("all", settings, learners.batch())
    assert chosen.own == "grpo" and not {"gigpo", "token_gae", "step_gae"} & set(chosen.schemes)
    assert any("steps have no state key" in note for note in chosen.notes)
    assert any("steps have no action key" in note for note in chosen.notes)
    assert "graph_gpo" in choice.choose("all", settings, keyed(learners.batch())).schemes
    greedy = [dataclasses.replace(t, greedy_return=0.5) for t in learners.batch()]
    assert "remax" in choice.choose("all", settings, greedy).schemes
    assert choice.choose("rloo", settings, greedy).own is None
    with pytest.raises(UserError, match="grpo compares the samples of a task row, and each row was sampled once"):
        choice.choose("grpo", settings, learners.batch()[::2])


@pytest.mark.parametrize(
    ("schemes", "message"),
    [
        ("step_gae(lam)", "cannot read"),
        ("grpo,", "cannot read"),
        ("step_gae", "step_gae needs a critic, and the run has none"),
        ("gigpo", "gigpo needs state keys"),
        ("rtmc", "rtmc needs state keys"),
        ("igpo", "igpo needs beliefs in the gold answer, which not all recorded steps have (credit.probe of the run)"),
        ("remax", "remax needs the reward of a greedy rollout of each row, which 8 of 8 trajectories lack"),
        ("nonsense", "unknown credit scheme 'nonsense'; choose one of"),
        ("grpo(unity=token)", "credit scheme 'grpo' has no argument 'unity'"),
        ("reinforce(gamma=1.5)", "gamma is 1.5; it must be less than or equal to 1"),
        ("grpo,grpo", "grpo is there twice"),
    ],
)
def test_a_named_scheme_that_cannot_be_is_refused(config, schemes, message):
    with pytest.raises(UserError, match=re.escape(message)):
        choice.choose(schemes, without_critic(config), learners.batch())


def test_a_recording_without_action_keys_is_refused_or_left_out(config):
    """Runs recorded them later than state keys."""
    settings, batch = without_critic(config), keyed(learners.batch())
    with pytest.raises(UserError, match="--schemes: salt needs action keys, and the recorded steps have none"):
        choice.choose("salt", settings, batch)
    assert any(note.startswith("salt is left out: it needs") for note in choice.choose("all", settings, batch).notes)
    named = [
        dataclasses.replace(t, steps=tuple(dataclasses.replace(s, action_key="a") for s in t.steps)) for t in batch
    ]
    assert {"rtmc", "ecpo", "salt"} <= set(choice.choose("all", settings, named).schemes)


def test_beliefs_of_the_policy_are_not_those_of_the_reference(config):
    probed = change_config(config, {**WITHOUT_CRITIC, "credit.name": "igpo", "credit.probe": "policy"})
    chosen = choice.choose("all", read_settings(probed), reshaped())
    assert chosen.own == "igpo" and "a2tgpo" in chosen.schemes
    assert any(note.startswith("trace is left out: it needs the reference's beliefs") for note in chosen.notes)
    assert "trace(frozen=False)" in choice.choose("trace(frozen=False)", read_settings(probed), reshaped()).schemes
    reference = change_config(probed, {"credit.probe": "reference"})
    assert "trace" in choice.choose("all", read_settings(reference), reshaped()).schemes


def leave_batch(folder, update, batch, suffix=""):
    write_jsonl(folder / "trajectories" / f"rl_{update:06d}{suffix}.jsonl.gz", batch)


def one_step(groups=2):
    rng = np.random.default_rng(0)
    return [trajectory(rng, [2], group=g, sample=i) for g in range(groups) for i in range(2)]


def test_which_batch_is_read(config, tmp_path):
    settings = read_settings(config)
    with pytest.raises(UserError, match="has recorded no RL batch yet"):
        recording.read_batch(str(tmp_path), settings, "last")
    leave_batch(tmp_path, 0, [t for t in one_step() if t.group == 1], suffix=".p0")
    leave_batch(tmp_path, 0, [t for t in one_step() if t.group == 0], suffix=".p1")
    leave_batch(tmp_path, 3, one_step(groups=3))
    number, batch = recording.read_batch(str(tmp_path), settings, "last")
    assert number == 3 and len(batch) == 6
    _, batch = recording.read_batch(str(tmp_path), settings, "0")
    assert [(t.group, t.sample) for t in batch] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for update, message in (("2", "no RL batch 2; those from 0 to 3 are recorded"), ("first", "write `last`, or the")):
        with pytest.raises(UserError, match=message):
            recording.read_batch(str(tmp_path), settings, update)
    (tmp_path / "trajectories" / "rl_000003.jsonl.gz").write_bytes(b"junk")
    with pytest.raises(UserError, match=r"rl_000003\.jsonl\.gz, line 1: not a trajectory"):
        recording.read_batch(str(tmp_path), settings, "last")


def test_groups_that_were_replaced_are_left_out(config, tmp_path):
    alike = [
        dataclasses.replace(t, steps=(dataclasses.replace(t.steps[0], reward=1.0),)) if t.group == 1 else t
        for t in one_step(groups=3)
    ]
    config.rollout.dynamic_sampling_groups = 4
    leave_batch(tmp_path, 1, alike)
    _, batch = recording.read_batch(str(tmp_path), read_settings(config), "1")
    assert [t.group for t in batch] == [0, 0, 2, 2]


def make(changes):
    """The parts of a run without a rollout half, and its phase of RL."""
    small = {"policy.preset": "tiny", "budget.context_tokens": LONGEST, **learners.SMALL}
    settings = read_settings(change_config(base.get_config("hopworld"), {**small, **changes}))
    mesh, none = tiny.mesh(), None
    setup = Setup(settings, none, none, none, POLICY, {}, mesh, none, none, none)
    builder = build.make_state_builder(settings, POLICY, mesh)
    return setup, phases.reinforcement(setup, builder.optimizer, builder.layout, None)


@functools.cache
def case():
    """A run with a critic, its parts, and the comparison of some schemes on them."""
    setup, _ = make({"critic": "shared_trunk", "credit.name": "step_gae"})
    params = parameters(True)
    trajectories = keyed(learners.batch())
    parts, gap = score_groups(setup, params, trajectories, Scale())
    result = effects.effects(setup, params, parts, schemes(), aggregate="step", resamples=20)
    return setup, params, trajectories, parts, gap, result


@functools.cache
def whole_gradient():
    setup = case()[0]
    return jax.jit(batch_gradient(setup.policy, setup.settings.objective.imitation(), setup.learner_mesh))


def slow_gradient(setup, params, trajectories, advantages):
    """The gradient of Σ w·A·log π of the policy over a whole batch at once, a row for each step; [parameters]."""
    c = setup.settings.learner
    rows = PackingConfig("per_step_padded", c.row_tokens, c.row_loss_tokens, c.rows)
    layout = pack(trajectories, rows, final_values=False)
    step_tokens = np.array([len(s.response_ids) for t in trajectories for s in t.steps])
    weights = np.repeat(1 / step_tokens / len(step_tokens), step_tokens).astype(np.float32)
    loss_tokens = scatter_fields(layout, {"advantage": advantages, "weight": weights})
    batch = to_microbatches(layout.packed_tokens, loss_tokens, microbatches=1, rows=MOST_ROWS)
    grads, _ = whole_gradient()({"decoder": params["decoder"]}, {}, batch, np.int32(1))
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(grads)])


def test_gradients_are_those_of_the_whole_batch():
    setup, params, trajectories, _, gap, result = case()
    slow = np.stack([slow_gradient(setup, params, trajectories, a) for a in result.advantages])
    np.testing.assert_allclose(result.gram, slow @ slow.T, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose([n.norm for n in result.noise], np.linalg.norm(slow, axis=1), rtol=1e-4)
    recorded_logprobs = np.concatenate([s.logprobs for t in trajectories for s in t.steps])
    exact = learners.slow_logprobs(params, trajectories)
    np.testing.assert_allclose(gap, np.abs(recorded_logprobs - exact).mean(), rtol=1e-4)


def test_resampled_gradients_are_those_of_resampled_batches():
    """A group drawn twice is two groups; whitening and the loss's mean are those of the resampled batch."""
    setup, params, trajectories, parts, _, result = case()
    streams = effects.concatenate([part.streams for part in parts])
    judge = effects.make_assign(schemes(), parts, baselines=(0.0, 0.0))
    edges = effects.token_edges(parts)
    factors, _, misfit = effects.resample(judge, parts, result.advantages, 3)
    np.testing.assert_allclose(misfit, 0, atol=1e-4)
    weights = effects.token_weights(setup, streams, "step")
    size = np.array([weights[a:b].sum() for a, b in zip(edges[:-1], edges[1:], strict=True)])
    vectors = effects.group_gradients(setup, params, parts, weights)
    shift = vectors(np.ones_like(weights))
    assert (factors[0, :, 2].max(1) > 1).all(), "no group was drawn twice"
    for i, of_scheme in enumerate(result.advantages):
        own = vectors(of_scheme)
        scale, moved, count = factors[i, 2]
        drawn = [int(g) for g in np.repeat(np.arange(len(parts)), count.astype(int))]
        again = [dataclasses.replace(t, group=k) for k, g in enumerate(drawn) for t in parts[g].trajectories]
        fresh, _ = score_groups(setup, params, again, Scale())
        advantages = judge(fresh)[i]
        slow = slow_gradient(setup, params, again, advantages)
        np.testing.assert_allclose((scale @ own + moved @ shift) / (count @ size), slow, rtol=1e-3, atol=2e-5)


def test_the_effect_of_other_groups_is_that_of_whitening():
    _, _, trajectories, _, _, result = case()
    effect = dict(zip(result.schemes, result.batch_effect, strict=True))
    assert effect["grpo"] == 0 and effect["gigpo"] < 1e-5
    assert effect["token_gae"] > 0.01
    assert result.steps.shape == (len(SCHEMES), sum(len(t.steps) for t in trajectories))


def test_rewards_are_shaped_as_in_the_run():
    setup, params, trajectories, _, _, _ = case()
    shaping = dataclasses.replace(setup.settings.shaping, terminal_only=True)
    terminal = dataclasses.replace(setup, settings=dataclasses.replace(setup.settings, shaping=shaping))
    parts, _ = score_groups(terminal, params, trajectories, Scale())
    for part in parts:
        np.testing.assert_allclose(part.streams.returns, [t.total_reward for t in part.trajectories], atol=1e-6)
        ends = np.cumsum(part.streams.trajectory_steps) - 1
        np.testing.assert_allclose(part.streams.rewards[ends], part.streams.returns, atol=1e-6)
        assert not np.delete(part.streams.rewards, ends).any()


def reshaped():
    """A batch with state keys, of which some are shared and some unknown, potentials, beliefs, and greedy rewards."""
    out = []
    for t in learners.batch(3):
        steps = tuple(
            dataclasses.replace(
                s,
                state_key=None if i == 2 else f"{t.group}/{i}/{t.sample if i else ''}",
                potential=0.25 * i + t.sample,
                next_potential=0.25 * (i + 1) + t.sample,
                belief=-0.5 * (i + 1) / (t.sample + 1),
                policy_version=1,
            )
            for i, s in enumerate(t.steps)
        )
        out.append(dataclasses.replace(t, steps=steps, greedy_return=0.125 * t.group))
    return out


BEFORE = RunningMeanStd().update(np.array([1.0, 3.0, 8.0]))
SHAPED = {"shaping.scale_returns": True, "shaping.potential": 0.5}
ARGUMENTS = {"gigpo": {"gamma": 1.0}}
JUDGED = ("grpo", "reinforce", "gigpo", "remax", "state_baseline", "step_gae", "igpo")


@functools.cache
def half_step(name, critic):
    """Setup, phase, batch and token outputs of a run with this scheme."""
    args = {f"credit.args.{key}": value for key, value in ARGUMENTS.get(name, {}).items()}
    setup, phase = make(SHAPED | {"critic": critic, "credit.name": name} | args)
    batch = train_step.pack(setup, phase, reshaped())
    return setup, phase, batch, train_step.token_outputs(setup, phase, parameters(critic != "none"), batch)


def assign(name, critic):
    """Setup, phase, trajectories with the advantages of training, their credit; nothing is updated.

    Schemes that use the critic share the programs of one run, all others those of another one.
    """
    scheme = get_scheme(name, **ARGUMENTS.get(name, {}))
    of_run = "step_gae" if scheme.uses_critic and critic != "none" else "gigpo"
    setup, phase, batch, outputs = half_step(of_run, critic)
    phase = dataclasses.replace(phase, scheme=scheme, assign=scheme.assign)
    progress = Progress(phase="rl", update=1, return_statistics=BEFORE)
    credit = train_step.assign_credit(setup, phase, batch, outputs, progress)
    return setup, phase, train_step.with_credit(batch, outputs, credit), credit


@pytest.mark.parametrize(
    ("critic", "own"), [("shared_trunk", "gigpo"), ("shared_trunk", "step_gae"), ("none", "gigpo")]
)
def test_schemes_judge_as_they_do_in_training(critic, own):
    """Whatever the run's own scheme is."""
    names = [name for name in JUDGED if critic != "none" or not REGISTRY[name].needs_critic]
    setup, _, out, credit = assign(own, critic)
    scale = recorded_scale(setup, out, credit)
    parts, _ = score_groups(setup, parameters(critic != "none"), out, scale)
    chosen = {name: get_scheme(name, **ARGUMENTS.get(name, {})) for name in names}
    judged = effects.make_assign(chosen, parts, baselines=scale.baselines)(parts)
    for name, advantages in zip(names, judged, strict=True):
        in_training = np.concatenate([s.advantages for t in assign(name, critic)[2] for s in t.steps])
        atol = 2e-3 if own == "step_gae" else 6e-5  # Values are recorded in float16.
        np.testing.assert_allclose(advantages, in_training, atol=atol, err_msg=name)
    assert np.abs(judged).max(1).min() > 0.1


def recorded_scale(setup, out, credit):
    """What is read from the metrics that training writes."""
    estimate = recording.estimate_scale(setup, BEFORE, out)
    with tempfile.TemporaryDirectory() as folder:
        record = {"index": 0, "phase": "rl", "update": 1}
        record |= {"credit/baseline": credit.baseline, "credit/reward_std": credit.reward_std}
        pathlib.Path(folder, "metrics.jsonl").write_text(json.dumps(record) + "\n")
        return recording.read_scale(folder, 0, estimate, critic=setup.settings.learns_values)


def test_a_batch_is_judged_by_what_was_recorded_with_it(tmp_path):
    """The critic goes on learning; its values then are not those that the batch was judged by."""
    setup, _, out, credit = assign("step_gae", "shared_trunk")
    leave_batch(tmp_path, 0, out)
    leave_batch(tmp_path, 1, out)
    _, batch = recording.read_batch(str(tmp_path), setup.settings, "0")
    scale, newest = recorded_scale(setup, out, credit), jax.tree.map(lambda x: x + 0.25, parameters(True))
    assert any(t.final_value for t in batch) and scale.reward_std[True] != 1 and scale.mean

    def distance(trajectories, scale=scale):
        parts, _ = score_groups(setup, newest, trajectories, scale)
        return effects.replay_error(setup.settings.scheme, parts, baselines=scale.baselines)

    assert distance(batch) < 1e-3
    assert credit_compare.lacking(batch, scale, valued=True, version=7) == []
    assert "gives the recorded advantages to 0.001 of" in credit_compare.own_note(
        setup.settings, batch, distance(batch)
    )
    paid = dataclasses.replace(batch[0].steps[0], shaped_reward=9.0)  # E.g. by a KL in the reward.
    spoilt = [dataclasses.replace(batch[0], steps=(paid, *batch[0].steps[1:])), *batch[1:]]
    assert distance(spoilt) > 0.1 > 1e-3 > distance(spoilt, scale._replace(recorded=False))

    old = [dataclasses.replace(t, final_value=None) for t in batch]
    assert distance(old) > 0.01
    assert "does not give the recorded" in credit_compare.own_note(setup.settings, old, distance(old))
    values, rewards = credit_compare.lacking(old, Scale(), valued=True, version=7)
    assert values.startswith("No values of a critic are recorded") and "after 7 RL updates" in rewards
    bare = [dataclasses.replace(t, steps=[dataclasses.replace(s, advantages=None) for s in t.steps]) for t in batch]
    assert distance(bare) is None and "cannot be checked" in credit_compare.own_note(setup.settings, bare, None)


def test_what_earlier_batches_decide_is_read_from_the_metrics(tmp_path):
    setup, _, out, credit = assign("grpo", "none")
    estimate = Scale(3.0, (1.0, 1.5))

    def read(update, critic):
        return recording.read_scale(str(tmp_path), update, estimate, critic=critic)

    assert read(1, False) == estimate
    records = [{"index": i, "phase": "rl", "update": i} for i in range(4)]
    records[2] |= {"credit/baseline": 0.5, "credit/reward_std": 2.0}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert read(1, False) == Scale(1.0, (2.0, 3.0), recorded=True)
    assert read(1, True) == Scale(1.0, (2.0 / 1.5, 2.0), recorded=True)
    assert read(2, False) == estimate
    made = recording.estimate_scale(setup, BEFORE, out)
    assert made.baselines[False] == pytest.approx(credit.baseline)
    assert made.reward_std[False] == pytest.approx(credit.reward_std) and credit.reward_std != 1


def test_gradients_are_those_at_the_checkpoint_before_the_batch(tmp_path):
    records = [{"phase": "warm_start", "update": 7}, *({"phase": "rl", "update": n} for n in (2, 4)), {"phase": "done"}]
    with contextlib.closing(Checkpoints(tmp_path, keep=9)) as checkpoints:
        for number, record in enumerate(records):
            checkpoints.save(number, {"x": np.zeros(1)}, record)
    found = {update: int(checkpoint_before(str(tmp_path), update)[-1]) for update in (1, 2, 3, 4, 9)}
    assert found == {1: 3, 2: 1, 3: 1, 4: 2, 9: 2}
    for version, words in ((3, "which then learnt"), (2, "1 updates later"), (9, "6 more than before")):
        assert words in credit_compare.gradient_note(3, version)


def test_the_page_runs_nothing_and_shows_everything(tmp_path):
    names = ["grpo", "step_gae(lam=0.9)"]
    x = np.random.default_rng(0).standard_normal((2, 40))
    pictures = {name: tmp_path / f"{name}.png" for name in ("heatmaps", "noise", "strips")}
    stats.plot_heatmaps(pictures["heatmaps"], names, [("a", stats.pearson(x)), ("b", np.full((2, 2), np.nan))])
    stats.plot_noise(pictures["noise"], names, [("a", np.array([0.5, np.nan])), ("b", np.zeros(2))])
    stats.plot_strips(pictures["strips"], names, stats.scale_by_rms(x), np.arange(40) % 3, x[0])
    shown = dict.fromkeys(("uid", "question", "prompt", "response", "observation"), HOSTILE)
    shown |= {"title": "Step 2 of 3", "facts": [HOSTILE], "account": credit_compare.account_link("b.html", HOSTILE, 1)}
    shown["advantages"] = {"grpo": (-0.5, -9.0), names[1]: (0.0, 0.0), HOSTILE: (1.0, 1.5)}
    write_page(
        tmp_path / "report.html",
        "credit.html",
        title=HOSTILE,
        facts={"steps": 1234, HOSTILE: HOSTILE},
        notes=[HOSTILE],
        schemes=[{"scheme": "grpo", "snr": 0.25}, {"scheme": HOSTILE, "snr": None}],
        pairs=[{"scheme": "grpo", "other": HOSTILE, "cosine": 0.5}],
        pictures=pictures,
        steps=[shown, shown],
        own="grpo",
    )
    page = (tmp_path / "report.html").read_text()
    assert not re.search(r"<script|<img src=x|onerror='|</pre><s|\"&amp;\"", page), "text has become markup"
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 14
    assert "default-src 'none'" in page and not re.search(r"<[^>]+(src|href)=\"(?!data:|b\.html#)", page)
    assert page.count('href="b.html#%3C/pre%3E') == 2
    assert page.count('src="data:image/png;base64,') == 3 and "1,234" in page and "<td>0.250</td>" in page
    assert "left:0.0%;width:50.0%" in page and "left:50.0%;width:25.0%" in page and "-0.500" in page
    assert "<tr class='own'" in page and page.count("<tr class='own'") == 1


def compare_runs(*arguments):
    command = [sys.executable, "-m", "experiments.credit_compare", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_a_run_is_compared_and_what_it_lacks_is_refused(tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    assert train("quickstart", run, eval__every=0, updates=2).returncode == 0
    done = compare_runs(run, f"--out={out}", "--update=1", "--schemes=grpo,step_gae(lam=0.9)", "--resamples=5")
    assert done.returncode == 0, done.stderr[-3000:]
    said = " ".join(done.stdout.split())
    assert "own scheme, step_gae(lam=0.95), gives the recorded advantages" in said
    assert "Gradients are those at the parameters after" in said and "Steps they disagree on most" in said
    assert "](rl_000001.html#rl/" in (out / "summary.md").read_text()
    with open(out / "advantages.csv", newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert list(rows[0]) == ["uid", "step", "reward", "state_key", "account", "grpo", "step_gae(lam=0.9)"]
    shown = {x["uid"] for x in pages.island((out / "rl_000001.html").read_text())["trajectories"]}
    links = re.findall(r'href="rl_000001\.html#([^"]+)/\d+"', (out / "report.html").read_text())
    assert links and set(links) <= shown and {row["uid"] for row in rows} <= shown
    with open(out / "schemes.csv", newline="") as lines:
        assert [row["scheme"] for row in csv.DictReader(lines)] == ["grpo", "step_gae(lam=0.9)"]
    assert "| grpo |" in (out / "summary.md").read_text() and (out / "report.html").stat().st_size > 10_000
    for arguments, message in (((run, "--schemes=remax"), "greedy rollout"), (("nowhere",), "nowhere: no run")):
        refused = compare_runs(*arguments)
        assert refused.returncode == 2 and message in refused.stderr and "Traceback" not in refused.stderr
