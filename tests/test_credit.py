"""Credit schemes against published numbers, slow references, and what must not change their results."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from builders import CAPACITIES, Rollout, Token, credit_batch, golden, rollouts
from hypothesis import given, settings
from hypothesis import strategies as st

from agentr1_jax.credit import SCHEMES, Credit, get_scheme, register
from agentr1_jax.credit.group import grpo
from agentr1_jax.credit.primitives import backward_recurrence, segment_moments, whiten
from agentr1_jax.credit.temporal import step_gae, token_gae

# Discounts are arguments here, so that all tests of one capacity share one program.
STEP_GAE, TOKEN_GAE, GRPO = jax.jit(step_gae), jax.jit(token_gae), jax.jit(grpo)
WHITEN, RECURRENCE = jax.jit(whiten), jax.jit(backward_recurrence)
DISCOUNTS = st.sampled_from((0.0, 0.5, 0.95, 1.0))
quick = settings(max_examples=60, deadline=None)


def assign(scheme, data, capacities=None, **hyper):
    """The credit of rollouts as numpy arrays without padding; in double precision, for small tolerances."""
    count = sum(len(step) for r in data for step in r.tokens)
    with jax.enable_x64(True):
        credit = scheme(credit_batch(data, **(capacities or CAPACITIES), dtype=jnp.float64), **hyper)
        assert not np.any(np.asarray(credit.advantages)[count:]), "padding got an advantage"
        assert not np.any(np.asarray(credit.value_mask)[count:]), "padding got a value target"
        return jax.tree.map(lambda x: np.asarray(x)[:count], credit)


def exact(data):
    """The capacities that just hold the data."""
    steps = [step for r in data for step in r.tokens]
    return {"trajectories": len(data), "steps": len(steps), "tokens": sum(map(len, steps))}


def check_same(one, other, order=slice(None)):
    """Equal, with the tokens of `one` put in another order."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a[order], b, atol=1e-9)


def check_targets(credit, targets):
    np.testing.assert_array_equal(np.flatnonzero(credit.value_mask), sorted(targets))
    np.testing.assert_allclose(
        credit.value_targets[credit.value_mask], [targets[k] for k in sorted(targets)], atol=1e-9
    )
    assert not credit.value_targets[~credit.value_mask].any()


def golden_rollouts(inputs, place):
    """Padded rows as rollouts; a row is a step. Its rewards stay on their tokens or are summed to the step."""
    rows = len(inputs["rewards"])
    names = inputs.get("traj", np.arange(rows))
    groups = {name: i for i, name in enumerate(dict.fromkeys(inputs["group"]))}
    data = {}
    for row in range(rows):
        kept = inputs["mask"][row] > 0
        rewards = inputs["rewards"][row][kept]
        values = inputs["values"][row][kept] if "values" in inputs else np.zeros(kept.sum())
        one = data.setdefault(names[row], Rollout(groups[inputs["group"][row]], [], []))
        one.rewards.append(float(rewards.sum()) if place == "step" else 0.0)
        on_token = rewards if place == "token" else np.zeros(kept.sum())
        one.tokens.append([Token(float(v), float(r)) for v, r in zip(values, on_token, strict=True)])
    return list(data.values())


@pytest.mark.parametrize("place", ["step", "token"])
def test_step_gae_gives_the_published_numbers(place):
    entry = golden("agent_r1.step_gae.g1.0.l1.0")
    inputs, mask = entry["inputs"], entry["inputs"]["mask"] > 0
    credit = assign(STEP_GAE, golden_rollouts(inputs, place), gamma=inputs["gamma"], lam=inputs["lam"])
    np.testing.assert_allclose(credit.advantages, entry["outputs"]["adv"][mask], atol=1e-6)
    # The published code repeats the target over the row; here it stands at the first token alone.
    assert credit.value_mask.sum() == len(mask)
    np.testing.assert_allclose(credit.value_targets[credit.value_mask], entry["outputs"]["ret"][:, 0], atol=1e-6)


@pytest.mark.parametrize("place", ["step", "token"])
def test_token_gae_gives_the_published_numbers(place):
    entry = golden("agent_r1.token_gae.g0.95.l0.9")
    inputs, mask = entry["inputs"], entry["inputs"]["mask"] > 0
    credit = assign(TOKEN_GAE, golden_rollouts(inputs, place), gamma=inputs["gamma"], lam=inputs["lam"])
    np.testing.assert_allclose(credit.advantages, entry["outputs"]["adv"][mask], atol=1e-6)
    np.testing.assert_allclose(credit.value_targets, entry["outputs"]["ret"][mask], atol=1e-6)


@pytest.mark.parametrize("name", ["agent_r1.grpo", "verl.grpo"])
def test_grpo_gives_the_published_numbers(name):
    entry = golden(name)
    mask, group = entry["inputs"]["mask"] > 0, entry["inputs"]["group"]
    credit = assign(GRPO, golden_rollouts(entry["inputs"], "step"))
    names = entry["inputs"].get("traj", np.arange(len(group)))
    lone = [len(set(names[group == g])) == 1 for g in group]
    # Rows of a lone member deviate: there the published code leaks the raw reward.
    expected = np.where(np.array(lone)[:, None], 0, entry["outputs"]["adv"])
    np.testing.assert_allclose(credit.advantages, expected[mask], atol=2e-6)
    assert not credit.value_mask.any()


@quick
@given(rollouts(), DISCOUNTS, DISCOUNTS)
def test_step_gae_equals_the_loops(data, gamma, lam):
    credit = assign(STEP_GAE, data, gamma=gamma, lam=lam)
    advantages, targets = reference.step_gae(data, gamma, lam)
    np.testing.assert_allclose(credit.advantages, advantages, atol=1e-9)
    check_targets(credit, targets)


@quick
@given(rollouts(), DISCOUNTS, DISCOUNTS)
def test_token_gae_equals_the_loops(data, gamma, lam):
    credit = assign(TOKEN_GAE, data, gamma=gamma, lam=lam)
    advantages, targets = reference.token_gae(data, gamma, lam)
    np.testing.assert_allclose(credit.advantages, advantages, atol=1e-9)
    check_targets(credit, targets)


@quick
@given(rollouts())
def test_grpo_equals_the_loops(data):
    np.testing.assert_allclose(assign(GRPO, data).advantages, reference.grpo(data), atol=1e-9)


@quick
@given(rollouts(observations=False), DISCOUNTS, DISCOUNTS)
def test_step_gae_of_one_token_steps_is_token_gae(data, gamma, lam):
    single = [dataclasses.replace(r, tokens=[step[:1] for step in r.tokens]) for r in data]
    check_same(assign(STEP_GAE, single, gamma=gamma, lam=lam), assign(TOKEN_GAE, single, gamma=gamma, lam=lam))


@quick
@given(rollouts())
def test_without_discount_and_values_targets_are_returns_to_go(data):
    data = [
        dataclasses.replace(r, bootstrap=0.0, tokens=[[dataclasses.replace(t, value=0.0) for t in s] for s in r.tokens])
        for r in data
    ]
    credit = assign(STEP_GAE, data, gamma=1.0, lam=1.0)
    sums = [
        [x + sum(t.reward for t in s if t.is_action) for x, s in zip(r.rewards, r.tokens, strict=True)] for r in data
    ]
    to_go = [sum(own[t:]) for own in sums for t in range(len(own))]
    np.testing.assert_allclose(credit.value_targets[credit.value_mask], to_go, atol=1e-9)


@quick
@given(rollouts(), DISCOUNTS, DISCOUNTS)
def test_observation_tokens_change_nothing_for_the_others(data, gamma, lam):
    actions = [dataclasses.replace(r, tokens=[[t for t in s if t.is_action] for s in r.tokens]) for r in data]
    mask = np.array([t.is_action for r in data for s in r.tokens for t in s])
    for scheme in (STEP_GAE, TOKEN_GAE):
        with_them = assign(scheme, data, gamma=gamma, lam=lam)
        without = assign(scheme, actions, gamma=gamma, lam=lam)
        np.testing.assert_allclose(with_them.advantages[mask], without.advantages, atol=1e-9)
        np.testing.assert_allclose(with_them.value_targets[mask], without.value_targets, atol=1e-9)
        assert not with_them.advantages[~mask].any()


@quick
@given(rollouts(), st.randoms(use_true_random=False))
def test_order_of_trajectories_and_names_of_groups_do_not_matter(data, random):
    order = list(range(len(data)))
    random.shuffle(order)
    moved = [dataclasses.replace(data[i], group=(data[i].group + 1) % 3) for i in order]
    sizes = [sum(map(len, r.tokens)) for r in data]
    edges = np.cumsum([0, *sizes])
    back = np.concatenate([np.arange(edges[i], edges[i + 1]) for i in order])
    for scheme, hyper in ((STEP_GAE, {"gamma": 0.9, "lam": 0.9}), (TOKEN_GAE, {"gamma": 0.9, "lam": 0.9}), (GRPO, {})):
        check_same(assign(scheme, data, **hyper), assign(scheme, moved, **hyper), back)


@pytest.mark.parametrize("scheme", [STEP_GAE, TOKEN_GAE, GRPO])
def test_padding_capacity_does_not_matter(scheme):
    rng = np.random.default_rng(0)
    data = [
        Rollout(
            i // 2, list(rng.normal(size=3)), [[Token(*rng.normal(size=2)) for _ in range(4)] for _ in range(3)], 0.3
        )
        for i in range(4)
    ]
    check_same(assign(scheme, data, exact(data)), assign(scheme, data))


@pytest.mark.parametrize("scheme", [STEP_GAE, TOKEN_GAE, GRPO])
def test_an_empty_batch_is_all_zero(scheme):
    credit = scheme(credit_batch([], **CAPACITIES))
    assert not np.any(credit.advantages) and not np.any(credit.value_targets) and not np.any(credit.value_mask)


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1000.1])
@pytest.mark.parametrize("scheme", [STEP_GAE, TOKEN_GAE, GRPO])
def test_equal_rewards_give_exactly_zero(scheme, reward):
    data = [Rollout(i // 3, [reward], [[Token(0.7)]]) for i in range(6)]
    assert not np.any(scheme(credit_batch(data, **CAPACITIES)).advantages)


def test_whitening_of_equal_numbers_is_exactly_zero():
    x = jnp.full((11,), 1000.1, jnp.float32)
    assert not np.any(whiten(x, jnp.arange(11) < 7))


@quick
@given(st.lists(st.tuples(st.floats(-5, 5), st.booleans()), min_size=12, max_size=12))
def test_whitening_equals_the_loops(cells):
    x, mask = (np.array(column) for column in zip(*cells, strict=True))
    expected = np.zeros(len(x))
    expected[mask] = reference.whiten(x[mask].tolist())
    with jax.enable_x64(True):
        np.testing.assert_allclose(WHITEN(jnp.asarray(x), jnp.asarray(mask)), expected, atol=1e-7)


def test_moments_of_a_segment_of_one_or_none():
    count, mean, std = segment_moments(jnp.array([3.0, 1.0, 2.0]), jnp.array([1, 2, 2]), 3)
    np.testing.assert_allclose(count, [0, 1, 2, 0])
    np.testing.assert_allclose(mean, [0, 3, 1.5, 0])
    np.testing.assert_allclose(std, [0, 0, np.sqrt(0.5), 0], rtol=1e-6)


@quick
@given(st.lists(st.tuples(st.floats(-1, 1), st.sampled_from((0.0, 0.5, 1.0))), min_size=8, max_size=8))
def test_the_recurrence_equals_the_loop(cells):
    x, decay = (np.array(column) for column in zip(*cells, strict=True))
    y, expected = 0.0, []
    for a, d in reversed(cells):
        y = a + d * y
        expected.append(y)
    with jax.enable_x64(True):
        got = RECURRENCE(jnp.asarray(x), jnp.asarray(decay))
        np.testing.assert_allclose(got, expected[::-1], atol=1e-12)


def test_fault_3_a_step_reward_falls_on_its_last_sampled_token():
    """Tool text after the response must not swallow the reward, nor may every token or step get it again."""
    tool = Token(9.0, is_action=False)
    data = [Rollout(0, [0.0, 1.0], [[Token(0.0), tool], [Token(0.0), Token(0.0), tool, tool]])]
    credit = assign(TOKEN_GAE, data, gamma=0.5, lam=1.0)
    np.testing.assert_allclose(credit.value_targets, [0.25, 0, 0.5, 1, 0, 0], atol=1e-12)
    credit = assign(STEP_GAE, data, gamma=1.0, lam=1.0)
    np.testing.assert_allclose(credit.value_targets, [1, 0, 1, 0, 0, 0], atol=1e-12)


def test_fault_4_a_turn_without_reward_remains_a_turn():
    data = [Rollout(0, [1.0, 0.0, 2.0, 0.0], [[Token(0.0)] * 2] * 4)]
    credit = assign(STEP_GAE, data, gamma=0.5, lam=1.0)
    np.testing.assert_allclose(credit.value_targets[credit.value_mask], [1.5, 1.0, 2.0, 0.0], atol=1e-12)


def test_fault_5_a_long_trajectory_weighs_as_much_as_a_short_one():
    data = [Rollout(0, [0.5, 0.25, 0.25], [[Token(0.0)] * 3] * 3), Rollout(0, [0.0], [[Token(0.0)]])]
    credit = assign(GRPO, data)
    np.testing.assert_allclose(credit.advantages, [np.sqrt(0.5)] * 9 + [-np.sqrt(0.5)], atol=1e-5)


def test_fault_6_a_lone_member_of_a_group_gets_zero():
    data = [Rollout(0, [5.0], [[Token(0.0)]]), Rollout(1, [1.0], [[Token(0.0)]]), Rollout(1, [0.0], [[Token(0.0)]])]
    advantages = assign(GRPO, data).advantages
    assert advantages[0] == 0 and advantages[1] > 0 > advantages[2]


@pytest.mark.parametrize("scheme", [STEP_GAE, TOKEN_GAE])
def test_fault_6_one_row_is_whitened_to_zero(scheme):
    credit = assign(scheme, [Rollout(0, [5.0], [[Token(1.0)]])])
    assert credit.advantages.tolist() == [0.0] and credit.value_targets.tolist() == [5.0]


def test_fault_7_credit_passes_through_observations():
    tool = Token(-7.0, is_action=False)
    data = [Rollout(0, [0.0, 0.0, 1.0], [[Token(0.0), tool, tool], [Token(0.0), tool], [Token(0.0)]])]
    credit = assign(TOKEN_GAE, data, gamma=0.5, lam=1.0)
    np.testing.assert_allclose(credit.value_targets, [0.25, 0, 0, 0.5, 0, 1.0], atol=1e-12)


@pytest.mark.parametrize("scheme", [STEP_GAE, TOKEN_GAE])
def test_fault_10_a_cut_trajectory_is_worth_its_future(scheme):
    ended = Rollout(0, [0.0, 1.0], [[Token(0.0)], [Token(0.0)]])
    data = [ended, dataclasses.replace(ended, bootstrap=4.0)]
    credit = assign(scheme, data, gamma=0.5, lam=1.0)
    np.testing.assert_allclose(credit.value_targets, [0.5, 1.0, 1.5, 3.0], atol=1e-12)


def test_fault_10_an_unknown_scheme_is_an_error_that_lists_the_known():
    with pytest.raises(ValueError, match=r"unknown credit scheme 'gpro'.*grpo, step_gae, token_gae"):
        get_scheme("gpro", {})


@pytest.mark.parametrize(
    ("name", "hyper", "message"),
    [
        ("step_gae", {"gama": 1.0}, "has no hyper-parameter 'gama'; it has .*gamma.*lam"),
        ("grpo", {"gamma": 1.0}, "has no hyper-parameter 'gamma'; it has none"),
        ("step_gae", {"gamma": 1.01}, r"credit.gamma is 1.01; a discount lies in \[0, 1\]"),
        ("token_gae", {"lam": -0.1}, r"credit.lam is -0.1; a discount lies in \[0, 1\]"),
        ("token_gae", {"gamma": float("nan")}, "credit.gamma is nan"),
    ],
)
def test_a_wrong_hyperparameter_is_an_error(name, hyper, message):
    with pytest.raises(ValueError, match=message):
        get_scheme(name, hyper)


def test_the_registry_binds_hyperparameters_and_takes_a_name_once(monkeypatch):
    monkeypatch.setattr("agentr1_jax.credit.registry.SCHEMES", dict(SCHEMES))
    scheme, bound = get_scheme("step_gae", {"gamma": 0.5, "lam": 0.0})
    data = [Rollout(0, [0.0, 1.0], [[Token(0.5)], [Token(0.25)]])]
    credit = bound(credit_batch(data, **exact(data)))
    assert scheme.needs_critic and not SCHEMES["grpo"].needs_critic and isinstance(credit, Credit)
    np.testing.assert_allclose(credit.value_targets, [0.125, 1.0], atol=1e-6)
    with pytest.raises(ValueError, match="'grpo' is registered twice"):
        register("grpo")(grpo)
