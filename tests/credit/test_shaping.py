"""Reward tools: each against loops, what it must leave alone, and what it must refuse."""

from __future__ import annotations

import dataclasses
import statistics

import jax
import numpy as np
import pytest
from builders import MAX_STEPS, MAX_TOKENS, MAX_TRAJECTORIES, batches, trajectory
from hypothesis import given, settings
from hypothesis import strategies as st

from agentr1_jax.credit import get_scheme, shaping
from agentr1_jax.credit.batch import flatten, to_token_batch
from agentr1_jax.credit.shaping import RunningMeanStd, ShapingConfig
from agentr1_jax.errors import UserError
from agentr1_jax.trajectory import Outcome
from agentr1_jax.validation import from_section

quick = settings(max_examples=40, deadline=None)
STEPS = MAX_TRAJECTORIES * MAX_STEPS
ROOM = {"trajectories": MAX_TRAJECTORIES, "steps": STEPS, "tokens": STEPS * MAX_TOKENS}
STEP_GAE = jax.jit(get_scheme("step_gae", whiten="none").assign)
DISCOUNTED_GAE = jax.jit(get_scheme("step_gae", gamma=0.9, lam=0.8, whiten="none").assign)


def lists(streams, per_step):
    """A value per step as one list for each trajectory."""
    return [x.tolist() for x in np.split(per_step, np.cumsum(streams.trajectory_steps)[:-1])]


def with_potentials(trajectories, seed):
    """The trajectories in an environment that gives each state a potential."""
    rng = np.random.default_rng(seed)
    out = []
    for t in trajectories:
        phi = rng.integers(-8, 9, len(t.steps) + 1) / 8
        steps = [
            dataclasses.replace(s, potential=float(phi[i]), next_potential=float(phi[i + 1]))
            for i, s in enumerate(t.steps)
        ]
        out.append(dataclasses.replace(t, steps=tuple(steps)))
    return out


def check_outcome(streams):
    sums = [sum(own) for own in lists(streams, streams.rewards)]
    np.testing.assert_allclose(streams.returns, sums, atol=1e-6)


@quick
@given(batches())
def test_terminal_only_moves_all_reward_to_the_last_step(trajectories):
    before = flatten(trajectories)
    after = shaping.move_to_last_step(before)
    for own, total in zip(lists(after, after.rewards), before.returns, strict=True):
        assert own[:-1] == [0.0] * (len(own) - 1) and own[-1] == pytest.approx(total)
    np.testing.assert_allclose(after.returns, before.returns, atol=1e-6)


@quick
@given(batches())
def test_nothing_follows_where_truncation_is_terminal(trajectories):
    """A critic of value 5 everywhere: a cut trajectory's advantages are those of one that ended with its rewards."""
    tokens = sum(len(s.response_ids) for t in trajectories for s in t.steps)
    streams = flatten(trajectories, np.full(tokens, 5.0), np.full(len(trajectories), 5.0))
    settings = (ShapingConfig(truncation_is_terminal=x) for x in (False, True))
    shaped = (shaping.shape_rewards(streams, x, gamma=1.0, statistics=RunningMeanStd())[0] for x in settings)
    goes_on, ends = (to_token_batch(x, **ROOM, critic=True) for x in shaped)
    np.testing.assert_array_equal(goes_on.bootstrap[: len(trajectories)], 5.0 * streams.truncated)
    assert not np.any(ends.bootstrap)
    targets = STEP_GAE(ends).value_targets
    first = np.flatnonzero(np.diff(streams.token_trajectory, prepend=-1))
    np.testing.assert_allclose(np.asarray(targets)[first], streams.returns, atol=1e-5)


@quick
@given(batches(), st.sampled_from(("group", "batch")), st.integers(0, 99))
def test_process_rewards_are_normalised_over_steps(trajectories, over, seed):
    rng = np.random.default_rng(seed)
    trajectories = [
        dataclasses.replace(
            t,
            steps=tuple(
                dataclasses.replace(s, reward_parts={"found": float(x), "answer": s.reward - float(x)})
                for s, x in zip(t.steps, rng.integers(0, 4, len(t.steps)) / 4, strict=True)
            ),
        )
        for t in trajectories
    ]
    before = flatten(trajectories, process_parts=("found",))
    after = shaping.normalise_process_rewards(before, over)
    units = {}
    for i, t in enumerate(trajectories):
        units.setdefault(t.group if over == "group" else 0, []).extend(
            (i, s.reward_parts["found"], s.reward_parts["answer"]) for s in t.steps
        )
    expected = [[] for _ in trajectories]
    for members in units.values():
        process = [p for _, p, _ in members]
        mean, std = statistics.fmean(process), statistics.stdev(process) if len(process) > 1 else 0.0
        for i, p, rest in members:
            expected[i].append(rest + (p - mean) / (std + 1e-6))
    for got, want in zip(lists(after, after.rewards), expected, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    check_outcome(after)


@quick
@given(batches(), st.sampled_from((0.5, 0.9, 1.0)), st.integers(0, 99))
def test_a_potential_changes_a_return_by_the_potential_of_its_state_alone(trajectories, gamma, seed):
    """What is best stays best: Φ does not depend on the action, and how a trajectory ends is not paid for."""
    before = flatten(with_potentials(trajectories, seed))
    after = shaping.add_potential(before, weight=2.0, gamma=gamma, bootstraps=False)
    change = lists(before, shaping.discounted_returns(after, gamma) - shaping.discounted_returns(before, gamma))
    for own, phi in zip(change, lists(before, before.potential), strict=True):
        np.testing.assert_allclose(own, [-2 * x for x in phi], atol=1e-5)
    check_outcome(after)


@quick
@given(batches(), st.integers(0, 99))
def test_a_critic_that_knows_the_potential_sees_the_same_advantages(trajectories, seed):
    """Ng et al. 1999: step_gae with V − Φ on shaped rewards is step_gae with V on the rewards, cut or not."""
    before = flatten(with_potentials(trajectories, seed))
    rng = np.random.default_rng(seed)
    value, final = rng.normal(size=len(before.rewards)), rng.normal(size=len(before.returns))
    last = np.cumsum(before.trajectory_steps) - 1

    def advantages(streams, value, final):
        streams = dataclasses.replace(
            streams,
            values=value[streams.token_step].astype(np.float32),
            final_values=final.astype(np.float32),
        )
        return DISCOUNTED_GAE(to_token_batch(streams, **ROOM, critic=True)).advantages

    after = shaping.add_potential(before, weight=1.0, gamma=0.9, bootstraps=True)
    shifted = advantages(after, value - before.potential, final - before.next_potential[last])
    np.testing.assert_allclose(shifted, advantages(before, value, final), atol=1e-5)


def test_an_environment_without_potentials_cannot_be_shaped_by_them():
    with pytest.raises(ValueError, match="needs the potential of every state, .* shaping.potential=0"):
        shaping.add_potential(
            flatten([trajectory(np.random.default_rng(0), [2, 2])]), weight=1.0, gamma=1.0, bootstraps=False
        )


@pytest.mark.parametrize("unit", ["step", "trajectory"])
def test_the_penalty_for_length_rises_over_the_buffer(unit):
    lengths = [1, 6, 7, 8, 9, 10, 12]  # limit 10, buffer 4: nothing up to 6
    penalties = [0, 0, -0.5, -1, -1.5, -2, -2]
    rng = np.random.default_rng(0)
    if unit == "step":
        before = flatten([trajectory(rng, lengths)])
        expected = [penalties]
    else:
        before = flatten([trajectory(rng, [n - n // 2, n // 2] if n > 1 else [n]) for n in lengths])
        expected = [[0, p] if n > 1 else [p] for n, p in zip(lengths, penalties, strict=True)]
    config = ShapingConfig(overlong_limit=10, overlong_buffer=4, overlong_factor=2.0, overlong_unit=unit)
    after = shaping.penalise_overlong(before, config)
    for got, want in zip(lists(before, after.rewards - before.rewards), expected, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)
    check_outcome(after)


def test_observation_tokens_have_no_length_to_pay_for():
    t = trajectory(np.random.default_rng(0), [3, 3])
    config = ShapingConfig(overlong_limit=4, overlong_buffer=2)
    one, other = (shaping.penalise_overlong(flatten([t], observations=o), config) for o in (False, True))
    np.testing.assert_array_equal(one.rewards, other.rewards)


@quick
@given(batches(), st.sampled_from((0.0, 0.5, 1.0)))
def test_returns_equal_the_loops(trajectories, gamma):
    streams = flatten(trajectories)
    for got, rewards in zip(
        lists(streams, shaping.discounted_returns(streams, gamma)), lists(streams, streams.rewards), strict=True
    ):
        expected = [sum(gamma**k * r for k, r in enumerate(rewards[t:])) for t in range(len(rewards))]
        np.testing.assert_allclose(got, expected, atol=1e-9)


@quick
@given(st.lists(st.lists(st.floats(-5, 5), max_size=6), min_size=1, max_size=4))
def test_running_moments_are_those_of_all_values(parts):
    moments = RunningMeanStd()
    for part in parts:
        moments = moments.update(np.array(part))
    everything = np.array([x for part in parts for x in part])
    assert moments.n == len(everything)
    if len(everything) > 1 and everything.std() > 1e-3:
        assert moments.mean == pytest.approx(everything.mean(), abs=1e-9)
        assert moments.std == pytest.approx(everything.std(ddof=1), abs=1e-9)
    elif len(everything) < 2:
        assert moments.std == 1.0


def test_scaling_divides_rewards_by_the_std_of_all_returns_so_far():
    rng = np.random.default_rng(0)
    one, two = (flatten([trajectory(rng, [1, 2, 1], group=g) for g in range(3)]) for _ in range(2))
    first, moments = shaping.shape_rewards(
        one, ShapingConfig(scale_returns=True), gamma=0.9, statistics=RunningMeanStd()
    )
    second, moments = shaping.shape_rewards(two, ShapingConfig(scale_returns=True), gamma=0.9, statistics=moments)
    returns = [shaping.discounted_returns(s, 0.9) for s in (one, two)]
    np.testing.assert_allclose(first.rewards, one.rewards / returns[0].std(ddof=1), rtol=1e-5)
    np.testing.assert_allclose(second.rewards, two.rewards / np.concatenate(returns).std(ddof=1), rtol=1e-5)
    assert moments.mean == pytest.approx(np.concatenate(returns).mean())
    check_outcome(second)
    t = trajectory(rng, [1, 2])
    greedy = shaping.scale_rewards(flatten([dataclasses.replace(t, greedy_return=t.total_reward)]), 4.0)
    assert greedy.greedy_return.tolist() == pytest.approx(greedy.returns.tolist())


def test_tools_work_one_after_the_other():
    trajectories = with_potentials([trajectory(np.random.default_rng(0), [3, 4], group=g) for g in range(2)], 0)
    parts = {"process_parts": ("found",), "process_norm": "group", "potential": 0.5}
    config = ShapingConfig(**parts, overlong_buffer=2, overlong_limit=4)
    streams = flatten(trajectories, process_parts=("found",))
    got, _ = shaping.shape_rewards(streams, config, gamma=0.9, statistics=RunningMeanStd())
    expected = shaping.penalise_overlong(shaping.normalise_process_rewards(streams, "group"), config)
    expected = shaping.add_potential(expected, weight=0.5, gamma=0.9, bootstraps=False)
    np.testing.assert_array_equal(got.rewards, expected.rewards)
    assert np.abs(got.rewards - streams.rewards).min() > 0
    last, _ = shaping.shape_rewards(streams, ShapingConfig(terminal_only=True), gamma=0.9, statistics=RunningMeanStd())
    np.testing.assert_array_equal(last.rewards, shaping.move_to_last_step(streams).rewards)


def test_without_tools_nothing_changes():
    streams = flatten([trajectory(np.random.default_rng(0), [1, 2])])
    after, moments = shaping.shape_rewards(streams, ShapingConfig(), gamma=1.0, statistics=RunningMeanStd())
    assert after is streams and moments.n == 2


def test_a_trajectory_whose_reward_does_not_count_has_no_process_reward():
    t = trajectory(np.random.default_rng(0), [1])
    failed = dataclasses.replace(
        t,
        outcome=Outcome.ENV_FAILURE,
        steps=(dataclasses.replace(t.steps[0], reward=None, reward_parts={"found": 1.0}),),
    )
    assert flatten([failed], process_parts=("found",)).process_rewards.tolist() == [0.0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"process_norm": "group"}, "shaping: process_norm needs process_parts"),
        ({"process_parts": ("found",)}, "process_norm is none"),
        ({"terminal_only": True, "potential": 1.0}, "choose one"),
        ({"overlong_buffer": 8, "overlong_limit": 4}, r"overlong_limit \(4\) must be at least .*buffer \(8\)"),
    ],
)
def test_a_choice_that_cannot_work_is_refused(fields, message):
    with pytest.raises(UserError, match=message):
        from_section(ShapingConfig, "shaping", fields)
