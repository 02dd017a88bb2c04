"""Trajectories as flat streams: what is kept, what each outcome means, and how streams are joined and padded."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from builders import batches, fixed_batch, trajectory
from hypothesis import given, settings

from agentr1_jax.credit.batch import FlatTrajectories, concatenate, flatten, to_token_batch
from agentr1_jax.trajectory import POLICIES, Outcome, OutcomePolicy

ROOM = {"trajectories": 8, "steps": 30, "tokens": 110}
quick = settings(max_examples=40, deadline=None)


def one(outcome=Outcome.ANSWERED, rewards=(0.0, 1.0), **changes):
    t = trajectory(np.random.default_rng(0), [2, 3])
    steps = tuple(dataclasses.replace(s, reward=r) for s, r in zip(t.steps, rewards, strict=True))
    return dataclasses.replace(t, outcome=outcome, steps=steps, **changes)


@quick
@given(batches())
def test_streams_are_in_trajectory_step_token_order(trajectories):
    streams = flatten(trajectories)
    cells = [(i, s, k) for i, t in enumerate(trajectories) for s in t.steps for k in range(len(s.response_ids))]
    np.testing.assert_array_equal(streams.token_trajectory, [i for i, _, _ in cells])
    np.testing.assert_array_equal(streams.logprobs, [s.logprobs[k] for _, s, k in cells])
    np.testing.assert_array_equal(streams.rewards[streams.token_step], [s.reward for _, s, _ in cells])
    np.testing.assert_array_equal(streams.group[streams.token_trajectory], [trajectories[i].group for i, _, _ in cells])
    np.testing.assert_array_equal(streams.returns, [t.total_reward for t in trajectories])
    np.testing.assert_array_equal(streams.truncated, [t.final_prompt_ids is not None for t in trajectories])
    assert streams.trainable.all() and not streams.values.any() and not streams.final_values.any()


@quick
@given(batches(), batches())
def test_joined_streams_are_the_streams_of_all(first, second):
    second = [dataclasses.replace(t, group=t.group + 10) for t in second]
    joined, whole = concatenate([flatten(first), flatten([]), flatten(second)]), flatten([*first, *second])
    for field in dataclasses.fields(FlatTrajectories):
        np.testing.assert_array_equal(getattr(joined, field.name), getattr(whole, field.name), err_msg=field.name)
    np.testing.assert_array_equal(joined.token_trajectory, whole.token_trajectory)


@quick
@given(batches())
def test_a_batch_is_the_streams_and_padding_to_one_extra_segment(trajectories):
    count = len(flatten(trajectories).logprobs)
    rng = np.random.default_rng(count)
    values, final_values = rng.normal(size=count).astype(np.float32), rng.normal(size=len(trajectories))
    streams = flatten(trajectories, values, final_values.astype(np.float32))
    batch = to_token_batch(streams, **ROOM, critic=True)
    n, s = len(trajectories), len(streams.rewards)
    x = {f.name: np.asarray(getattr(batch, f.name)) for f in dataclasses.fields(batch)}
    np.testing.assert_array_equal(x["values"], np.pad(values, (0, ROOM["tokens"] - count)))
    np.testing.assert_array_equal(x["token_step"][:count], streams.token_step)
    assert (x["token_step"][count:] == ROOM["steps"]).all() and not x["is_action"][count:].any()
    np.testing.assert_array_equal(x["step_trajectory"][:s], streams.step_trajectory)
    assert (x["step_trajectory"][s:] == ROOM["trajectories"]).all()
    same = streams.group[:, None] == streams.group
    np.testing.assert_array_equal(x["group"][:n, None] == x["group"][:n], same)
    assert (x["group"][:n] < n).all() and (x["group"][n:] == ROOM["trajectories"]).all()
    cut = np.array([POLICIES[t.outcome].bootstrap for t in trajectories])
    np.testing.assert_allclose(x["bootstrap"][:n], np.where(cut, final_values, 0), rtol=1e-6)
    np.testing.assert_array_equal(batch.real_token, np.arange(ROOM["tokens"]) < count)
    edges = np.diff(streams.token_step, prepend=-1) > 0, np.diff(streams.token_step, append=s) > 0
    np.testing.assert_array_equal(np.asarray(batch.first_token)[:count], edges[0])
    np.testing.assert_array_equal(np.asarray(batch.last_token)[:count], edges[1])
    assert to_token_batch(streams, **ROOM, critic=False).values is None


def test_an_empty_batch_has_streams():
    streams = flatten([])
    assert len(streams.token_trajectory) == 0
    assert not to_token_batch(streams, **ROOM, critic=True).real_trajectory.any()


def test_a_missing_reward_is_never_zero():
    with pytest.raises(ValueError, match=r"test/0/0 \(answered\): steps \[1\] have no reward"):
        flatten([one(rewards=(0.5, None))])


def test_the_outcome_table_decides_on_reward_and_training(monkeypatch):
    changed = {Outcome.TIME_LIMIT: OutcomePolicy("zero", True, "mask")}
    monkeypatch.setattr("agentr1_jax.trajectory.POLICIES", {**POLICIES, **changed})
    monkeypatch.setattr("agentr1_jax.credit.batch.POLICIES", {**POLICIES, **changed})
    trajectories = [one(Outcome.TIME_LIMIT, rewards=(3.0, None)), one()]
    streams = flatten(trajectories)
    np.testing.assert_array_equal(streams.rewards, [0, 0, 0, 1])
    np.testing.assert_array_equal(streams.returns, [0, 1])
    np.testing.assert_array_equal(streams.trainable, [False, False, True, True])
    np.testing.assert_array_equal(streams.truncated, [True, False])


def test_a_failure_as_zero_is_an_end_with_a_return_of_zero():
    failed = one(Outcome.FAILURE_AS_ZERO, rewards=(0.5, None))
    ended = one(Outcome.ANSWERED, rewards=(0.0, 0.0))
    for field in dataclasses.fields(FlatTrajectories):
        np.testing.assert_array_equal(getattr(flatten([failed]), field.name), getattr(flatten([ended]), field.name))


def test_rewards_of_tokens_count_in_what_a_trajectory_is_worth():
    trajectories = fixed_batch("append")
    rewards = np.arange(len(flatten(trajectories).logprobs), dtype=np.float32) / 8
    streams = dataclasses.replace(flatten(trajectories), token_rewards=rewards)
    batch = to_token_batch(streams, **ROOM, critic=False)
    np.testing.assert_array_equal(np.asarray(batch.token_rewards)[: len(rewards)], rewards)
    own = [rewards[streams.token_trajectory == i].sum() for i in range(len(trajectories))]
    np.testing.assert_allclose(batch.returns[: len(own)], streams.returns + own, rtol=1e-6)


@pytest.mark.parametrize("field", ["state_key", "action_key"])
def test_equal_anchors_have_equal_keys_and_none_is_negative(field):
    keys = ("room 1", None, "room \ud800", "room 1", "", None)
    made = trajectory(np.random.default_rng(0), [1] * len(keys))
    steps = tuple(dataclasses.replace(s, **{field: key}) for s, key in zip(made.steps, keys, strict=True))
    batch = to_token_batch(flatten([dataclasses.replace(made, steps=steps)]), **ROOM, critic=False)
    key = np.asarray(getattr(batch, field))
    assert key[0] == key[3] and len({key[0], key[2], key[4]}) == 3 and key[[0, 2, 4]].min() >= 0
    assert key[1] == key[5] == -1 and (key[len(keys) :] == -1).all()


@pytest.mark.parametrize("name", list(ROOM))
def test_data_beyond_a_capacity_is_an_error(name):
    with pytest.raises(ValueError, match=rf"a batch of \d+ {name} exceeds the capacity of 2"):
        to_token_batch(flatten(fixed_batch("append")), **{**ROOM, name: 2}, critic=False)
