"""Faults of published systems, from trajectories to the update that is made of them.

The other tests of these faults, each named `test_fault_...`, are: 1 in test_packing and test_rollout; 2 and 11 in
test_agents, 11 in test_gradients; 3, 4, 7, 10 and 12 in test_credit_faults; 8 in test_packing and test_gradients; 9 in
test_fault_run, test_rollout, test_agents and test_trajectory; 13 in test_resume, test_train and test_kill.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import trajectory, with_logprobs
from examples import check_close
from learners import CENTRED, EVERYTHING, RATES, check_equal, exact, make, sampled, stream

from agentr1_jax.learner.update import TokenOutputs
from agentr1_jax.runtime.mesh import global_batch
from agentr1_jax.trajectory import Outcome

STEP_GAE = {"critic": "shared_trunk", "credit.name": "step_gae", "credit.args.gamma": 1.0, "credit.args.lam": 1.0}
TOKEN_GAE = STEP_GAE | {"credit.name": "token_gae", "credit.args.gamma": 0.5}
MODES = ("per_step_padded", "prefix_tree")
WORTH = 4.0
"""What the critic of these tests says of every future."""


def with_rewards(tokens, rewards, **place):
    """A trajectory with observations between its steps, and these rewards."""
    made = trajectory(np.random.default_rng(0), tokens, **place)
    steps = [dataclasses.replace(s, reward=float(r)) for s, r in zip(made.steps, rewards, strict=True)]
    return dataclasses.replace(made, steps=tuple(steps))


def loss_tokens_of(trajectories, changes, mode="trajectory", value=0.0):
    """The loss tokens of the one update on a batch, as numpy; only credit is computed. The critic says `value`."""
    made, seen = make(changes).under({"learner.packing": mode}), []

    def token_outputs(params, frozen, other, batch, count):
        zeros = jnp.zeros(batch.loss_tokens.logit_index.shape)
        return TokenOutputs(zeros, zeros, zeros + value, None)

    def update(state, frozen, batch, count, rates):
        seen.append(jax.device_get(batch.loss_tokens))
        return state, {"loss": jnp.zeros(())}

    _, _, out = made.learn(trajectories, update=update, token_outputs=token_outputs if made.phase.critic else None)
    (loss_tokens,) = seen
    return loss_tokens, out


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("context", ["append", "branch"])
def test_fault_1_the_learner_finds_the_log_probs_that_were_sampled_with(mode, context):
    """Ids that were decoded and encoded again, or moved by a place, would have others."""
    _, metrics, _ = make(EVERYTHING, wide=True).under({"learner.packing": mode}).learn(exact(3, context))
    assert metrics["gap/max"] < 1e-5 and abs(metrics["gap/perplexity_ratio"] - 1) < 1e-5


def test_fault_1_ratios_stay_ratios_over_tens_of_updates():
    made, state = make(CENTRED, wide=True), None
    for update in range(30):
        state, metrics, _ = made.learn(exact(update % 4), state)
        assert np.isfinite(list(metrics.values())).all() and metrics["learner/skipped"] == 0


GLUE, TOOL = 31, 30
"""Ids of an end of turn that was appended by hand, and of what a tool said."""


def glue_batch():
    """Trajectories of cut responses: the glue that closes them, and then a tool's text, stand in the next prompt."""
    rng, out = np.random.default_rng(0), []
    for sample in range(2):
        made, prompt, steps = trajectory(rng, [4, 3, 4], sample=sample), np.array([1, 2, sample], np.int32), []
        for s in made.steps:
            steps.append(dataclasses.replace(s, prompt_ids=prompt, response_ids=s.response_ids % TOOL))
            prompt = np.concatenate([prompt, steps[-1].response_ids, np.array([GLUE, TOOL, TOOL, GLUE], np.int32)])
        out.append(dataclasses.replace(made, steps=tuple(steps), outcome=Outcome.MAX_STEPS, final_prompt_ids=prompt))
    return out


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("changes", [STEP_GAE, TOKEN_GAE], ids=["step", "token"])
def test_fault_2_and_fault_11_neither_glue_nor_tool_text_is_trained(mode, changes):
    loss_tokens, _ = loss_tokens_of(glue_batch(), changes, mode)
    for weight in (loss_tokens.weight, loss_tokens.value_weight):
        on = weight > 0
        assert on.any() and loss_tokens.is_action[on].all()
        assert not np.isin(loss_tokens.target[on], (GLUE, TOOL)).any()
    assert (loss_tokens.weight > 0).sum() == len(sampled(glue_batch())[0]) == loss_tokens.is_action.sum()


@pytest.mark.parametrize("mode", MODES)
def test_fault_3_an_outcome_is_counted_once_and_at_its_own_step(mode):
    """With tool text behind every response, and whatever the number of steps; no step may get it a second time."""
    data = [
        with_rewards([2, 3, 1, 2], [0, 0, 0, 1]),
        with_rewards([2], [1], sample=1),
        with_rewards([1, 1], [1, 0], sample=2),
    ]
    loss_tokens, _ = loss_tokens_of(data, STEP_GAE, mode)
    on = stream(loss_tokens, "value_weight") > 0
    np.testing.assert_allclose(stream(loss_tokens, "value_target")[on], [1, 1, 1, 1, 1, 1, 0], atol=1e-6)
    _, (long, short, _) = loss_tokens_of([data[0], data[1], with_rewards([1], [0], sample=2)], {}, mode)
    assert long.steps[0].advantages[0] == short.steps[0].advantages[0] > 0


def test_fault_4_turns_without_reward_are_turns():
    data = [with_rewards([1, 2, 1, 1], [1, 0, 2, 0]), with_rewards([2, 1], [0, 0], group=1)]
    loss_tokens, _ = loss_tokens_of(data, STEP_GAE | {"credit.args.gamma": 0.5})
    on = stream(loss_tokens, "value_weight") > 0
    np.testing.assert_allclose(stream(loss_tokens, "value_target")[on], [1.5, 1, 2, 0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(stream(loss_tokens, "value_weight")[on], 1 / 6, rtol=1e-6)
    loss_tokens, _ = loss_tokens_of([with_rewards([2, 1], [0, 0], sample=i) for i in range(2)], STEP_GAE)
    assert (
        np.isfinite(loss_tokens.advantage).all()
        and not loss_tokens.advantage.any()
        and not loss_tokens.value_target.any()
    )


@pytest.mark.parametrize("mode", MODES)
def test_fault_5_statistics_are_over_trajectories_and_not_over_their_rows(mode):
    """Over step rows the mean of 1 (three rows) and 0 (two rows) would be 0.6; over trajectories it is one half."""
    data = [with_rewards([2, 1, 2], [0, 0, 1]), with_rewards([1, 2], [0, 0], sample=1)]
    loss_tokens, _ = loss_tokens_of(data, {"loss.aggregate": "trajectory"}, mode)
    half = np.float32(np.sqrt(0.5))
    np.testing.assert_allclose(stream(loss_tokens, "advantage"), [half] * 5 + [-half] * 3, rtol=1e-5)
    owner = sampled(data)[2]
    np.testing.assert_allclose(np.bincount(owner, stream(loss_tokens, "weight")), [0.5, 0.5], rtol=1e-6)


def test_fault_6_a_lone_member_of_a_group_moves_nothing():
    """Its raw reward would be an advantage; a lone row that is whitened would be NaN."""
    lone = [dataclasses.replace(t, group=i) for i, t in enumerate(exact()[:4])]
    made = make(CENTRED, wide=True)
    state, metrics, out = made.learn(lone)
    with jax.enable_x64(True):
        check_equal(state.params, made.fresh().params)
    assert metrics["batch/advantage_std"] == 0 and metrics["learner/tokens"] == len(sampled(lone)[0])
    for changes in (STEP_GAE, TOKEN_GAE):
        loss_tokens, _ = loss_tokens_of([with_rewards([1], [5])], changes, value=1.0)
        assert stream(loss_tokens, "advantage").tolist() == [0] and stream(loss_tokens, "value_target").tolist() == [5]


def test_fault_7_credit_passes_over_tool_text_to_earlier_steps():
    loss_tokens, _ = loss_tokens_of([with_rewards([2, 1, 2], [0, 0, 1])], TOKEN_GAE | {"credit.args.lam": 1.0})
    np.testing.assert_allclose(stream(loss_tokens, "value_target"), [1 / 16, 1 / 8, 1 / 4, 1 / 2, 1], rtol=1e-6)


def test_fault_8_neither_the_split_nor_copies_of_rows_as_padding_change_an_update():
    """Means over microbatches that are averaged, or padding that counts, would."""
    made, seen = make(CENTRED, wide=True).under({"learner.packing": "per_step_padded"}), []

    def update(state, frozen, batch, count, rates):
        seen.append(jax.device_get(batch))
        return made.phase.update(state, frozen, batch, count, rates)

    data = [with_rewards([2, 4, 1], [0, 0, 1]), with_rewards([3, 1], [0, 0], sample=1)]
    expected, metrics, _ = made.learn(with_logprobs(data, sampled(data)[0] - 1), update=update)
    (whole,) = seen
    shape = whole.loss_tokens.weight.shape
    spread = np.arange(shape[0] * shape[1]).reshape(shape[1], shape[0]).T.ravel()
    apart = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[spread].reshape(x.shape), whole)
    real = (whole.loss_tokens.weight.reshape(-1, shape[2]) > 0).any(axis=1)
    assert real.sum() == 5, "a microbatch of four rows and one of a single row"
    copies = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[np.arange(len(real)) % 5].reshape(x.shape), whole)
    weight = np.where(real.reshape(*shape[:2], 1), copies.loss_tokens.weight, 0)
    copies = copies.replace(loss_tokens=copies.loss_tokens.replace(weight=weight))
    for other in (apart, copies):
        with jax.enable_x64(True):
            other = global_batch(other, made.setup.learner_mesh)
            state = made.fresh()
            log_ratio = made.phase.log_ratio(state.params, {}, other, np.int32(shape[0]))
            other = other.replace(loss_tokens=other.loss_tokens.replace(log_ratio=log_ratio))
            rates = {"decoder": np.float32(RATES["decoder"])}
            got, other_metrics = made.phase.update(state, {}, other, np.int32(shape[0]), rates)
            check_close(got.params, expected.params, 1e-9)
        np.testing.assert_allclose(other_metrics["loss"], metrics["learner/loss"], rtol=1e-9)


@pytest.mark.parametrize(("outcome", "future"), [(Outcome.MAX_STEPS, WORTH), (Outcome.ENV_DONE, 0.0)])
def test_fault_10_what_was_cut_is_worth_what_the_critic_says_of_its_future(outcome, future):
    """An end is worth 0, even where the prompt after it is known."""
    made = with_rewards([2, 1], [0, 1], cut="steps")
    data = [dataclasses.replace(made, outcome=outcome)]
    loss_tokens, _ = loss_tokens_of(data, STEP_GAE | {"credit.args.gamma": 0.5}, value=WORTH)
    on = stream(loss_tokens, "value_weight") > 0
    np.testing.assert_allclose(
        stream(loss_tokens, "value_target")[on], [(1 + future / 2) / 2, 1 + future / 2], rtol=1e-6
    )
