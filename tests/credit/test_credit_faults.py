"""The credit faults of published systems, for the schemes that could have them, each by its number in the list."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
from builders import Rollout, Token, credit_batch
from credits import credit_of, exact

from agentr1_jax.credit import get_scheme

SAID, TOOL = Token(0.0), Token(9.0, is_action=False)
HALF = {"gamma": 0.5, "whiten": "none"}
GAE = {**HALF, "lam": 1.0}
BILEVEL = {**GAE, "gamma_high": 0.5}


def advantages_of(name, data, **hyper):
    """Advantages of the sampled tokens."""
    mask = [t.is_action for r in data for step in r.tokens for t in step]
    return credit_of(name, data, **hyper).advantages[mask]


@pytest.mark.parametrize(
    ("name", "hyper", "expected"),
    [
        ("token_gae", GAE, [0.25, 0.5, 1]),
        ("reinforce_pp", HALF, [0.25, 0.5, 1]),
        ("bilevel_gae", BILEVEL, [0.5, 0.5, 1]),
        ("step_gae", GAE, [0.5, 1, 1]),
        ("reinforce", HALF, [0.5, 1, 1]),
        ("state_baseline", HALF, [0.5, 1, 1]),
        ("remax", {}, [1, 1, 1]),
    ],
)
def test_fault_3_a_reward_falls_once_on_the_last_sampled_token_of_its_step(name, hyper, expected):
    """Tool text after the response must not swallow it, nor may every token or step get it again."""
    data = [Rollout(0, [0.0, 1.0], [[SAID, TOOL], [SAID, SAID, TOOL, TOOL]])]
    np.testing.assert_allclose(advantages_of(name, data, **hyper), expected, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "hyper", "expected"),
    [
        ("grpo", {}, [np.sqrt(0.5), -np.sqrt(0.5)]),
        ("dr_grpo", {}, [0.5, -0.5]),
        ("reinforce_pp_baseline", {"whiten": "none"}, [0.5, -0.5]),
        ("rloo", {}, [1, -1]),
        ("opo", {}, [0.25, -0.75]),
        ("turn_grpo", {"outcome_weight": 1.0}, [0.5, -0.5]),
        ("gigpo", {}, [0.5, -0.5]),
    ],
)
def test_fault_3_an_outcome_counts_once_whatever_the_number_of_steps(name, hyper, expected):
    data = [Rollout(0, [0.0, 1.0], [[SAID, TOOL], [SAID, SAID, TOOL]]), Rollout(0, [0.0], [[SAID, TOOL]])]
    np.testing.assert_allclose(advantages_of(name, data, **hyper), np.repeat(expected, [3, 1]), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "hyper", "expected"),
    [
        ("step_gae", GAE, [1.5, 1, 2, 0]),
        ("bilevel_gae", BILEVEL | {"gamma": 1.0}, [1.5, 1, 2, 0]),
        ("reinforce", HALF, [1.5, 1, 2, 0]),
        ("state_baseline", HALF, [1.5, 1, 2, 0]),
        ("turn_grpo", {"outcome_weight": 0.0, "signal": "reward"}, [0.5, 0, 1, 0]),
        ("turn_grpo", {"outcome_weight": 0.0, "signal": "return", "gamma": 0.5}, [0.75, 0.5, 1, 0]),
        ("gigpo", {"step_weight": 1.0, "gamma": 0.5}, [2.25, 2, 2.5, 1.5]),
        ("hgpo", {"gamma": 0.5}, [1, 1, 1, 0]),
    ],
)
def test_fault_4_a_turn_without_reward_remains_a_turn(name, hyper, expected):
    """Also the last one. The other member of the group, which gets nothing, has the same number of turns."""
    keys = (0, 1, 2, 3)
    data = [Rollout(0, rewards, [[SAID] * 2] * 4, keys=keys) for rewards in ([1.0, 0.0, 2.0, 0.0], [0.0] * 4)]
    np.testing.assert_allclose(advantages_of(name, data, **hyper)[:8:2], expected, atol=1e-5)


@pytest.mark.parametrize(("name", "hyper"), [("token_gae", GAE), ("reinforce_pp", HALF), ("bilevel_gae", BILEVEL)])
def test_fault_7_credit_passes_through_observations(name, hyper):
    steps = [[TOOL, SAID, TOOL, TOOL], [SAID, TOOL], [SAID, TOOL, SAID]]
    data = [Rollout(0, [0.0, 0.0, 1.0], steps)]
    of_tokens = name != "bilevel_gae"  # There, a token inside a step costs the steps before it nothing.
    expected = [0.125, 0.25, 0.5, 1] if of_tokens else [0.25, 0.5, 0.5, 1]
    np.testing.assert_allclose(advantages_of(name, data, **hyper), expected, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "hyper", "expected"),
    [
        ("token_gae", GAE, [0.5, 1, 1.5, 3]),
        ("step_gae", GAE, [0.5, 1, 1.5, 3]),
        ("bilevel_gae", BILEVEL, [0.5, 1, 1.5, 3]),
        ("reinforce", HALF, [0.5, 1, 1.5, 3]),
        ("reinforce_pp", HALF, [0.5, 1, 1.5, 3]),
        ("state_baseline", HALF, [-1, -2, 1, 2]),
        ("turn_grpo", {"signal": "return", "gamma": 0.5}, [-0.5, -1, 0.5, 1]),
        ("gigpo", {"gamma": 0.5, "step_weight": 1.0}, [-0.5, -1, 0.5, 1]),
        ("hgpo", {"gamma": 0.5}, [-1, -1, 1, 1]),
    ],
)
def test_fault_10_a_cut_trajectory_is_worth_its_future(name, hyper, expected):
    ended = Rollout(0, [0.0, 1.0], [[SAID], [SAID]], keys=[0, 1])
    data = [ended, dataclasses.replace(ended, bootstrap=4.0)]
    np.testing.assert_allclose(advantages_of(name, data, **hyper), expected, atol=1e-5)


PATHS = ((("stop",), 0.5), (("go", "left"), 1.0), (("go", "right"), -0.5))
"""Whether to go on is the policy's choice: stop for 0.5, or go on to another choice, between 1 and -0.5."""


def ending(go, left):
    """Probability of each path, and the slope of each of its log-probabilities by the two logits."""
    p = {"stop": 1 - go, "go": go, "left": left, "right": 1 - left}
    slope = {"stop": (-go, 0), "go": (1 - go, 0), "left": (0, 1 - left), "right": (0, -left)}
    probabilities = [np.prod([p[action] for action in path]) for path, _ in PATHS]
    return probabilities, [np.array([slope[action] for action in path]) for path, _ in PATHS]


PAIRS = list(itertools.product(range(len(PATHS)), repeat=2))
"""A group of two samples each, all in one batch."""


def pair_advantages(name, **hyper):
    """Advantages of a scheme for the steps of `PAIRS`."""
    data = [
        Rollout(
            group,
            rewards=[0.0] * (len(path) - 1) + [reward],
            tokens=[[SAID]] * len(path),
            keys=range(len(path)),
            state_values=[0.25, -0.75][: len(path)],
        )
        for group, pair in enumerate(PAIRS)
        for path, reward in (PATHS[i] for i in pair)
    ]
    with jax.enable_x64(True):
        batch = credit_batch(data, **exact(data), dtype=np.float64).replace(values=None)
        return np.asarray(jax.jit(get_scheme(name, **hyper).assign)(batch).advantages)


def expected_gradient(probabilities, slopes, advantages):
    """By the sum over all pairs of paths."""
    advantages, total = iter(advantages), np.zeros(2)
    for pair in PAIRS:
        probability = np.prod([probabilities[i] for i in pair])
        total += sum(probability * next(advantages) * slope / 2 for i in pair for slope in slopes[i])
    return total


def test_fault_12_the_baseline_by_step_index_is_biased_and_the_one_by_state_is_not():
    unbiased = [pair_advantages(name) for name in ("state_baseline", "rloo")]
    unbiased.append(pair_advantages("reinforce", whiten="none"))
    dr_grpo = pair_advantages("dr_grpo")
    by_index = pair_advantages("turn_grpo", signal="return", outcome_weight=0.0)
    for go, left in ((0.5, 0.5), (0.2, 0.7), (0.9, 0.3)):
        probabilities, slopes = ending(go, left)
        true = sum(p * reward * s.sum(0) for p, s, (_, reward) in zip(probabilities, slopes, PATHS, strict=True))
        estimate = functools.partial(expected_gradient, probabilities, slopes)
        for advantages in unbiased:
            np.testing.assert_allclose(estimate(advantages), true, atol=1e-12)
        np.testing.assert_allclose(estimate(dr_grpo), true / 2, atol=1e-12)
        # The second choice shrinks with the chance that the other sample is alive too: no one factor mends both.
        np.testing.assert_allclose(estimate(by_index), true * [0.5, 0.5 * go], atol=1e-12)


def test_fault_12_a_gain_that_is_alone_at_its_index_counts_as_nothing():
    """A gain that each step of the same index makes says nothing of the step, yet only in its cell it counts as 0.

    Two samples stop after two steps, one goes on: its second step is alone at its index, whatever it found.
    """
    short = Rollout(0, [0.0, 1.0], [[SAID]] * 2, beliefs=[-3.0, -1.0])
    long = Rollout(0, [0.0, 0.0, 1.0], [[SAID]] * 3, beliefs=[-3.0, -1.0, -0.1])
    by_index = advantages_of("a2tgpo", [short, short, long])
    np.testing.assert_array_equal(by_index, 0)
    by_group = advantages_of("igpo", [short, short, long], gamma=0.0, normalise="separate")
    assert by_group[5] > 1 > 0 > by_group[4] == by_group[0] == by_group[2] and by_group[1] == by_group[6] == 0
