"""How some schemes follow from others, and from what is known about returns and values."""

from __future__ import annotations

import dataclasses

import numpy as np
from builders import EIGHTHS, Token, rollouts
from credits import DISCOUNTS, check_same, credit_of
from hypothesis import given, settings
from hypothesis import strategies as st

quick = settings(max_examples=30, deadline=None)


def sampled(data):
    return np.array([t.is_action for r in data for step in r.tokens for t in step])


def change_tokens(data, change):
    return [dataclasses.replace(r, tokens=[[change(t) for t in step] for step in r.tokens]) for r in data]


def by_step(data, advantages):
    """The advantage of each step of each rollout, of its first sampled token."""
    advantages = iter(advantages)
    tokens = [[[(next(advantages), t.is_action) for t in step] for step in r.tokens] for r in data]
    return [[next(a for a, is_action in step if is_action) for step in own] for own in tokens]


def returns(r, gamma):
    out, g = [], r.bootstrap
    for reward, step in zip(r.rewards[::-1], r.tokens[::-1], strict=True):
        g = reward + sum(t.reward for t in step if t.is_action) + gamma * g
        out.append(g)
    return out[::-1]


@quick
@given(rollouts(observations=False), DISCOUNTS, DISCOUNTS)
def test_step_gae_of_one_token_steps_is_token_gae(data, gamma, lam):
    single = [dataclasses.replace(r, tokens=[step[:1] for step in r.tokens]) for r in data]
    hyper = {"gamma": gamma, "lam": lam, "whiten": "token"}
    token = credit_of("token_gae", single, **hyper)
    check_same(credit_of("step_gae", single, **hyper), token)
    check_same(credit_of("bilevel_gae", single, gamma_high=gamma, **hyper), token)


@quick
@given(rollouts())
def test_without_discount_and_values_credit_is_the_return_to_go(data):
    data = change_tokens(data, lambda t: dataclasses.replace(t, value=0.0))
    to_go = [g for r in data for g in returns(r, 1.0)]
    credit = credit_of("step_gae", data, gamma=1.0, lam=1.0, whiten="none")
    np.testing.assert_allclose([a for own in by_step(data, credit.advantages) for a in own], to_go, atol=1e-9)
    np.testing.assert_allclose(credit.value_targets[credit.value_mask], to_go, atol=1e-9)
    token = credit_of("token_gae", data, gamma=1.0, lam=1.0, whiten="none")
    np.testing.assert_allclose([a for own in by_step(data, token.advantages) for a in own], to_go, atol=1e-9)
    np.testing.assert_allclose(credit_of("reinforce_pp", data, gamma=1.0, whiten="none").advantages, token.advantages)
    # Between steps bilevel_gae sees the rewards of their last tokens alone.
    plain = change_tokens(data, lambda t: dataclasses.replace(t, reward=0.0))
    bilevel = credit_of("bilevel_gae", plain, gamma=1.0, lam=1.0, gamma_high=1.0, whiten="none")
    to_go = [g for r in plain for g in returns(r, 1.0)]
    np.testing.assert_allclose([a for own in by_step(plain, bilevel.advantages) for a in own], to_go, atol=1e-9)


@quick
@given(rollouts(), DISCOUNTS)
def test_reinforce_is_step_gae_without_values(data, gamma):
    data = change_tokens(data, lambda t: dataclasses.replace(t, value=0.0))
    for whiten in ("none", "token", "step", "trajectory"):
        gae = credit_of("step_gae", data, gamma=gamma, lam=1.0, whiten=whiten)
        reinforce = credit_of("reinforce", data, gamma=gamma, whiten=whiten)
        np.testing.assert_allclose(reinforce.advantages, gae.advantages, atol=1e-9)


@quick
@given(rollouts(), DISCOUNTS, DISCOUNTS)
def test_token_gae_is_gae_over_the_concatenated_stream(data, gamma, lam):
    """However the tokens are cut into steps; the stream by the textbook's loop over numpy arrays."""
    expected = []
    for r in data:
        tokens = [t for step in r.tokens for t in step if t.is_action]
        rewards, values = (np.array([getattr(t, field) for t in tokens]) for field in ("reward", "value"))
        np.add.at(rewards, np.cumsum([sum(t.is_action for t in step) for step in r.tokens]) - 1, r.rewards)
        delta = rewards + gamma * np.append(values[1:], r.bootstrap) - values
        for k in range(len(delta) - 2, -1, -1):
            delta[k] += gamma * lam * delta[k + 1]
        expected.append(delta)
    credit = credit_of("token_gae", data, gamma=gamma, lam=lam, whiten="none")
    np.testing.assert_allclose(credit.advantages[sampled(data)], np.concatenate(expected), atol=1e-9)


@quick
@given(rollouts(), DISCOUNTS, DISCOUNTS, st.randoms(use_true_random=False))
def test_potential_shaping_changes_no_advantage_where_the_critic_knows_it(data, gamma, lam, random):
    """Rewards rₜ + γΦₜ₊₁ − Φₜ with values V − Φ have the δ of rₜ with V, whatever λ is: for tokens and for steps."""
    for name in ("token_gae", "step_gae"):
        shaped = [_shaped(r, gamma, random, each_token=name == "token_gae") for r in data]
        one, other = (credit_of(name, x, gamma=gamma, lam=lam, whiten="none").advantages for x in (data, shaped))
        np.testing.assert_allclose(one, other, atol=1e-9, err_msg=name)


def _shaped(r, gamma, random, each_token):
    """Shaped by random potentials: of each sampled token, or of each step at its first one."""
    places = [(t, k) for t, step in enumerate(r.tokens) for k, token in enumerate(step) if token.is_action]
    if not each_token:
        places = list(dict(reversed([(t, (t, k)) for t, k in places])).values())[::-1]
    potential = {place: random.choice(EIGHTHS) for place in [*places, None]}
    rewards, tokens = list(r.rewards), [list(step) for step in r.tokens]
    for (t, k), after in zip(places, [*places[1:], None], strict=True):
        gain = gamma * potential[after] - potential[t, k]
        token = tokens[t][k]
        tokens[t][k] = Token(token.value - potential[t, k], token.reward + (gain if each_token else 0.0))
        rewards[t] += 0.0 if each_token else gain
    return dataclasses.replace(r, rewards=rewards, tokens=tokens, bootstrap=r.bootstrap - potential[None])


@quick
@given(rollouts())
def test_rloo_is_dr_grpo_over_n_minus_1_times_n(data):
    sizes = np.bincount([r.group for r in data])
    factor = [sizes[r.group] / max(sizes[r.group] - 1, 1) for r in data for step in r.tokens for _ in step]
    one, other = (credit_of(name, data).advantages for name in ("dr_grpo", "rloo"))
    np.testing.assert_allclose(one * np.array(factor), other, atol=1e-9)


@quick
@given(rollouts())
def test_gigpo_without_its_steps_is_grpo_or_dr_grpo(data):
    for unit in ("trajectory", "step", "token"):
        for norm, name in (("mean_std_norm", "grpo"), ("mean_norm", "dr_grpo")):
            gigpo = credit_of("gigpo", data, step_weight=0.0, norm=norm, unit=unit)
            check_same(gigpo, credit_of(name, data, unit=unit))


@quick
@given(rollouts(), DISCOUNTS)
def test_levels_of_hgpo_nest(data, gamma):
    def advantages(data, history, alpha=1.0):
        return credit_of("hgpo", data, gamma=gamma, history=history, alpha=alpha).advantages

    np.testing.assert_array_equal(advantages(data, 0), advantages(data, 0, alpha=2.0))
    # Where a state tells its whole path, every level has the same groups.
    told = [dataclasses.replace(r, keys=range(len(r.tokens))) for r in data]
    # Where all start apart, what they meet next has company at the first level alone.
    apart = [dataclasses.replace(r, keys=[10 * i, *range(1, len(r.tokens))]) for i, r in enumerate(data)]
    for history in (1, 2):
        np.testing.assert_allclose(advantages(told, history), advantages(told, 0), atol=1e-9)
        deep, flat = (by_step(data, advantages(apart, levels)) for levels in (history, 0))
        np.testing.assert_allclose([a for own in deep for a in own[:2]], [a for own in flat for a in own[:2]])
        assert not any(own[0] for own in deep)


@quick
@given(rollouts(), DISCOUNTS, st.integers(0, 5), st.sampled_from(EIGHTHS), st.booleans())
def test_state_baseline_ignores_own_revisits(data, gamma, who, reward, critic):
    """Whatever else a trajectory goes through, what its steps are compared with remains."""
    who %= len(data)
    changed = list(data)
    changed[who] = dataclasses.replace(data[who], rewards=[reward + x for x in data[who].rewards])

    def baseline(data):
        steps = by_step(data, credit_of("state_baseline", data, gamma=gamma, critic=critic).advantages)
        return np.array(returns(data[who], gamma)) - steps[who]

    np.testing.assert_allclose(baseline(data), baseline(changed), atol=1e-9)


@quick
@given(rollouts(), st.sampled_from((0.0, 0.5, 2.0)))
def test_turn_grpo_of_one_step_is_dr_grpo_twice(data, weight):
    single = [
        dataclasses.replace(r, rewards=r.rewards[:1], tokens=r.tokens[:1], keys=r.keys[:1], bootstrap=0.0) for r in data
    ]
    expected = (1 + weight) * credit_of("dr_grpo", single).advantages
    for of in ("reward", "return"):
        got = credit_of("turn_grpo", single, outcome_weight=weight, signal=of, gamma=0.5).advantages
        np.testing.assert_allclose(got, expected, atol=1e-9)
