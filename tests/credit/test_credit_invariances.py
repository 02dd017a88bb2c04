"""What must not change the results of a scheme."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from builders import EIGHTHS, Rollout, Token, rollouts
from credits import DISCOUNTS, NAMES, check_same, credit_of, every_option, exact
from hypothesis import given, settings
from hypothesis import strategies as st

few = settings(max_examples=12, deadline=None)


def token_order(data, order):
    """For each token of the reordered rollouts its place before."""
    edges = np.cumsum([0, *(sum(map(len, r.tokens)) for r in data)])
    return np.concatenate([np.arange(edges[i], edges[i + 1]) for i in order])


def is_action(data):
    return np.array([t.is_action for r in data for step in r.tokens for t in step])


@few
@given(rollouts(), st.randoms(use_true_random=False))
def test_order_of_trajectories_names_of_groups_states_and_actions_do_not_matter(data, random):
    order = random.sample(range(len(data)), len(data))
    groups = random.sample(range(6), 3)
    keys = dict(zip((None, 0, 1, 2), (None, *random.sample((0, 1, 2, 7, 65_537, 2**31 - 1), 3)), strict=True))
    actions = {None: None, 0: 5, 1: 3}
    moved = [
        dataclasses.replace(
            data[i],
            group=groups[data[i].group],
            keys=[keys[key] for key in data[i].keys],
            actions=[actions[key] for key in data[i].actions],
        )
        for i in order
    ]
    for name in NAMES:
        for (option, one), (_, other) in zip(every_option(name, data), every_option(name, moved), strict=True):
            check_same(one, other, token_order(data, order), err_msg=f"{name} {option}")


@few
@given(rollouts())
def test_observation_tokens_change_nothing_for_the_others(data):
    actions = [dataclasses.replace(r, tokens=[[t for t in step if t.is_action] for step in r.tokens]) for r in data]
    for name in NAMES:
        for (option, one), (_, other) in zip(every_option(name, data), every_option(name, actions), strict=True):
            check_same(one, other, is_action(data), err_msg=f"{name} {option}")


@pytest.mark.parametrize("name", NAMES)
def test_padding_capacity_does_not_matter(name):
    rng = np.random.default_rng(0)

    def step():
        return [Token(*rng.normal(size=2)) for _ in range(4)]

    data = [
        Rollout(i // 2, list(rng.normal(size=3)), [step() for _ in range(3)], 0.3, [0, i % 2, 0], [0.1, 0.2, 0.3], 0.5)
        for i in range(4)
    ]
    for (option, one), (_, other) in zip(every_option(name, data, exact(data)), every_option(name, data), strict=True):
        check_same(one, other, err_msg=f"{name} {option}")


@few
@given(rollouts(), DISCOUNTS, DISCOUNTS, st.randoms(use_true_random=False))
def test_potential_shaping_changes_no_advantage_where_the_critic_knows_it(data, gamma, lam, random):
    """Rewards rₜ + γΦₜ₊₁ − Φₜ with values V − Φ have the δ of rₜ with V, whatever λ is: for tokens and for steps."""
    for name in ("token_gae", "step_gae"):
        shaped = [_shape(r, gamma, random, each_token=name == "token_gae") for r in data]
        one, other = (credit_of(name, x, gamma=gamma, lam=lam, whiten="none").advantages for x in (data, shaped))
        np.testing.assert_allclose(one, other, atol=1e-9, err_msg=name)


def _shape(r, gamma, random, each_token):
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


@few
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
