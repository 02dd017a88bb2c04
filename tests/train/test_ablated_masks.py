"""What the learner does with schemes and masks beyond the plain case: observation tokens that are trained or credited,
greedy rollouts, baselines that outlive a batch."""

from __future__ import annotations

import dataclasses

import learners
import numpy as np
import pytest
from builders import LONGEST

from agentr1_jax.credit import shaping
from agentr1_jax.credit.batch import flatten
from agentr1_jax.credit.shaping import RunningMeanStd
from agentr1_jax.train import train_step

ALL = {"learner.row_loss_tokens": LONGEST}
NO_LOSS_MASK = {**ALL, "learner.loss_mask": False}
NO_ADVANTAGE_MASK = {
    **ALL,
    "learner.advantage_mask": False,
    "critic": "shared_trunk",
    "credit.name": "token_gae",
    "credit.args.whiten": "none",
}


def learn(run, trajectories, **arguments):
    """The batch that the update saw, as flat arrays of its loss tokens; metrics; trajectories with advantages."""
    seen = []
    update = learners.recording(run.phase.update, seen)
    _, metrics, out = run.learn(trajectories, update=update, **arguments)
    (_, batch), *_ = seen
    return batch.loss_tokens, metrics, out


def in_order(loss_tokens, name):
    """A field of all real loss tokens, in (trajectory, step, place in the sequence) order."""
    real = loss_tokens.step >= 0
    return getattr(loss_tokens, name)[real][np.lexsort((loss_tokens.logit_index[real], loss_tokens.step[real]))]


@pytest.mark.parametrize("context", ["append", "rewrite"])
def test_without_the_loss_mask_an_answer_is_trained_with_the_advantage_of_what_it_answers(context):
    trajectories = learners.exact(context=context)
    loss_tokens, metrics, out = learn(learners.make(NO_LOSS_MASK), trajectories)
    flat = flatten(trajectories, observations=True)
    is_action, step = flat.is_action, flat.token_step
    np.testing.assert_array_equal(in_order(loss_tokens, "is_action"), is_action)
    weight, advantage = in_order(loss_tokens, "weight"), in_order(loss_tokens, "advantage")
    np.testing.assert_allclose(weight, 1 / len(weight), rtol=1e-5)
    of_step = {k: a for k, a, said in zip(step, advantage, is_action, strict=True) if said}
    assert [of_step[k] for k in step[~is_action]] == advantage[~is_action].tolist()
    assert len(advantage[~is_action]) and np.abs(advantage[~is_action]).max() > 0
    # Nobody sampled them: their ratio starts at 1, like that of the policy's own tokens.
    assert metrics["learner/ratio"] == pytest.approx(1, abs=1e-4)
    assert metrics["batch/tokens"] == is_action.sum()
    shown = [a for t in out for s in t.steps for a in s.advantages]
    np.testing.assert_allclose(shown, advantage[is_action], atol=1e-4)
    masked, _, _ = learn(learners.make(ALL), trajectories)
    np.testing.assert_array_equal(advantage[is_action], in_order(masked, "advantage"))
    assert in_order(masked, "is_action").all() and is_action.sum() == masked.is_action.sum()


def test_without_the_advantage_mask_credit_passes_through_every_token():
    """GAE over the whole stream by a loop, answers included, with the critic's value at each of them."""
    trajectories = learners.exact()
    run = learners.make(NO_ADVANTAGE_MASK)
    loss_tokens, _, _ = learn(run, trajectories)
    flat = flatten(trajectories, observations=True)
    is_action, step = flat.is_action, flat.token_step
    value, advantage = in_order(loss_tokens, "old_value"), in_order(loss_tokens, "advantage")
    packed = train_step.pack(run.setup, run.phase, trajectories)
    bootstrap = train_step.token_outputs(run.setup, run.phase, run.fresh().params, packed).final_values
    for i, t in enumerate(trajectories):
        at = np.flatnonzero(flat.token_trajectory == i)
        ends = {np.flatnonzero(step == s)[-1]: s for s in np.unique(step[at])}
        after, expected = (bootstrap[i] if flat.truncated[i] else 0.0), []
        for k in reversed(at):  # gamma and lambda 1: the return less the value
            after += flat.rewards[ends[k]] if k in ends else 0.0
            expected.append(after - value[k])
        np.testing.assert_allclose(advantage[at], expected[::-1], atol=1e-5, err_msg=t.uid)
    weight = in_order(loss_tokens, "weight")
    assert (weight[~is_action] == 0).all() and (weight[is_action] > 0).all()
    # The critic learns what credit asks it for: its value at every token of the timeline.
    assert (in_order(loss_tokens, "value_weight") > 0).all()


def test_remax_compares_with_the_greedy_rollout_and_drops_rows_that_have_none(caplog):
    trajectories = learners.exact()
    greedy = [dataclasses.replace(t, greedy_return=0.25 * t.group) if t.group else t for t in trajectories]
    loss_tokens, metrics, _ = learn(learners.make(ALL).under({"credit.name": "remax"}), greedy)
    usable = [t for t in greedy if t.group]
    expected = [t.total_reward - 0.25 * t.group for t in usable for s in t.steps for _ in s.response_ids]
    np.testing.assert_allclose(learners.stream(loss_tokens, "advantage"), expected, atol=1e-5)
    assert metrics["batch/malformed"] == len(greedy) - len(usable) == 2
    assert "the greedy rollout of its row failed" in caplog.text


def test_a_state_seen_by_no_other_is_compared_with_earlier_batches():
    """No step has a key here: every baseline is the mean return of the batches before."""
    run, trajectories = learners.make(ALL).under({"credit.name": "state_baseline"}), learners.exact()
    returns = shaping.discounted_returns(flatten(trajectories), 1.0)
    per_token = np.repeat(returns, [len(s.response_ids) for t in trajectories for s in t.steps])
    for statistics in (RunningMeanStd(), RunningMeanStd(10.0, 0.5, 3.0)):
        loss_tokens, _, _ = learn(run, trajectories, statistics=statistics)
        np.testing.assert_allclose(learners.stream(loss_tokens, "advantage"), per_token - statistics.mean, atol=1e-5)
    *_, credit = run.step(trajectories)
    assert credit.return_statistics == pytest.approx(RunningMeanStd().update(returns))


def test_scaled_rewards_scale_advantages():
    run, trajectories = learners.make(ALL).under({"credit.name": "dr_grpo"}), learners.exact()
    plain, _, _ = learn(run, trajectories)
    scaled, _, _ = learn(run.under({"shaping.scale_returns": True}), trajectories)
    std = shaping.discounted_returns(flatten(trajectories), 1.0).std(ddof=1)
    np.testing.assert_allclose(scaled.advantage * std, plain.advantage, atol=1e-5)


def test_groups_that_teach_nothing_are_counted():
    trajectories = learners.exact()
    same = [
        dataclasses.replace(t, steps=tuple(dataclasses.replace(s, reward=0.0) for s in t.steps)) if t.group == 0 else t
        for t in trajectories
    ]
    _, metrics, _ = learn(learners.make(ALL), same[:-1])
    assert metrics["batch/lone_members"] == 1 and metrics["batch/zero_variance_groups"] == 2
    assert metrics["batch/steps_without_key"] == metrics["batch/steps"]
