"""Schemes by state and action: numbers of published code, small cases by hand, and batches that say nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from builders import Rollout, Token
from credits import credit_of, every_account

WALKS = ([0, 1, 3], [0, 0, 0], [0, 0, 2], [0, 2, 4], [0, 0, 2, 1, 3])
"""States of five trajectories, the fourth of which succeeds; nothing leads from 1 and 3 to success."""
PAY = {
    False: [[4, 4, 4], [3, 3, 4], [3, 2, 4], [2, 1, 0], [3, 2, 4, 4, 4]],
    True: [[2, 1, 1], [1, 1, 2], [1, 0, 3], [0, 0, 0], [1, 0, 3, 1, 1]],
}
"""x of the pay 10·0.1^x for these walks, by `normalize_distance`, as a transcription of the functions of GraphGPO's
recipe that find distances and pay steps computed it once (verl-agent, `recipe/GraphGPO/core_graph.py`)."""


def rollout(states, reward=0.0, *, actions=None, group=0):
    """One token a step, action 0 unless told, and the reward at the end."""
    rewards = [0.0] * (len(states) - 1) + [reward]
    return Rollout(group, rewards, [[Token(0.0)]] * len(states), keys=states, actions=actions or [0] * len(states))


def assigned(name, data, **hyper):
    """Advantages by rollout and step."""
    left = credit_of(name, data, **hyper).advantages.tolist()
    return [[left.pop(0) for _ in r.tokens] for r in data]


@pytest.mark.parametrize("relative", [False, True])
def test_graph_gpo_pays_as_its_published_code(relative):
    data = [rollout(states, float(i == 3)) for i, states in enumerate(WALKS)]
    for option, _, terms in every_account("graph_gpo", data, omega=0.1):
        if option["relative"] == relative:
            paid = terms["among equal states"].plus["value of the next state"]
            np.testing.assert_allclose(paid, [10 * 0.1**x for own in PAY[relative] for x in own], rtol=1e-9)


def test_graph_gpo_gives_the_numbers_of_a_program_that_follows_it():
    """Of the tests of Relax, examples/graphgpo; in state B their third trajectory goes on to a known state."""
    a, b, c = range(3)
    data = [rollout([a, b], 10.0), rollout([a, c]), rollout([a, c, b])]
    won, lost, pair = 1.1547003383792862, -0.5773501691896431, 0.7071057710869802
    first, second, third = assigned("graph_gpo", data, omega=0.1, norm="mean_std_norm", step_weight=1.0)
    assert first[0] == pytest.approx(won + 1.154698316161306, abs=1e-9)
    assert second == pytest.approx([lost - 0.577349158080653, lost - pair], abs=1e-9)
    assert third[:2] == pytest.approx([lost - 0.577349158080653, lost + pair], abs=1e-9)


def test_graph_gpo_without_success_is_the_outcome_alone_and_its_threshold_says_what_success_is():
    data = [rollout([0, 1], 0.5), rollout([0, 0, 1], 0.25)]
    for norm in ("mean_norm", "mean_std_norm"):
        outcome = assigned("dr_grpo" if norm == "mean_norm" else "grpo", data)
        assert assigned("graph_gpo", data, threshold=0.5, norm=norm) == outcome
        assert assigned("graph_gpo", data, threshold=0.0, norm=norm) != outcome
    raised = [Rollout(0, r.rewards, [[Token(0.0, 1.0)], *r.tokens[1:]], keys=r.keys) for r in data]
    assert assigned("graph_gpo", raised, threshold=0.5) == assigned("grpo", raised)  # The KL makes no success.


def test_rtmc_counts_the_first_visit_of_a_trajectory():
    left, right = rollout([0], 1.0, actions=[0]), rollout([0], 0.0, actions=[1])
    assert assigned("rtmc", [left, left, right], prior=0.0) == [[pytest.approx(1 / 3)]] * 2 + [[pytest.approx(-2 / 3)]]
    again = rollout([0, 0], 2.0, actions=[0, 0])  # G is 1 at the first visit and 2 at the second.
    expected = [[pytest.approx(0.5)] * 2, [pytest.approx(-0.5)]]
    assert assigned("rtmc", [again, right], gamma=0.5, prior=0.0) == expected
    shrunk = assigned("rtmc", [again, right], gamma=0.5, prior=2.0)  # V' = (1 + 0 + 2·1) / 4
    assert shrunk == [[pytest.approx(0.25)] * 2, [pytest.approx(-0.75)]]


def test_ecpo_trusts_a_lucky_action_less_than_one_that_often_won():
    often = [rollout([0], 1.0, actions=[0])] * 3 + [rollout([0], 0.0, actions=[1])] * 3
    lucky = [rollout([0], 1.0, actions=[0])] + [rollout([0], 0.0, actions=[1])] * 5
    steps = [assigned("ecpo", data)[0][0] - assigned("grpo", data)[0][0] for data in (often, lucky)]
    mean, std = 0.5, math.sqrt(0.3)
    calibrated = (3 * 1.0 + 2 * mean) / (3 + 2) - mean  # 0.8 and 0.2 of three visits each
    spread = math.sqrt(6 * calibrated**2 / 5)
    assert steps[0] == pytest.approx(2 * math.tanh(6 / 4) * calibrated / (spread + 1e-6), rel=1e-6)
    assert assigned("grpo", often)[0][0] == pytest.approx(0.5 / (std + 1e-6))
    noisy = [rollout([0], float(i % 2), actions=[i % 2 if i < 2 else i // 2 % 2]) for i in range(6)]
    step = assigned("ecpo", noisy)[1][0] - assigned("grpo", noisy)[1][0]
    assert 0 < step < steps[0] / 4  # Most of the variance lies within the actions.


def test_salt_averages_an_edge_that_trajectories_share():
    won, lost = rollout([0, 1, 2], 1.0, actions=[0, 0, 0]), rollout([0, 1, 3], 0.0, actions=[0, 0, 0])
    other = rollout([0, 2], 0.0, actions=[1, 0])
    a, b = (assigned("grpo", [won, lost, other])[i][0] for i in (0, 1))
    half = pytest.approx((a + b) / 2)
    assert assigned("salt", [won, lost, other]) == [[half, a, half], [half, b, b], [b, half]]
    # The last step of the first and of the third is an edge from 2 to the end, unless what came before must agree.
    assert assigned("salt", [won, lost, other], history=1) == [[half, a, a], [half, b, b], [b, b]]


@pytest.mark.parametrize("name", ["rtmc", "ecpo", "salt", "graph_gpo"])
def test_a_lone_visit_and_unknown_keys_say_nothing_of_a_step(name):
    """What is left is the outcome of the trajectory, which `rtmc` does not use."""
    outcome = {"rtmc": [[0.0], [0.0]]}.get(name, assigned("grpo", [rollout([0], 1.0), rollout([0], 0.0)]))
    hyper = {"prior": 0.0} if name == "rtmc" else {"norm": "mean_std_norm"}
    for first, second in (
        (rollout([0], 1.0), rollout([1], 0.0)),
        (rollout([None], 1.0), rollout([None], 0.0)),
        (rollout([None], 1.0, actions=[None]), rollout([0], 0.0)),
    ):
        assert assigned(name, [first, second], **hyper) == outcome
    elsewhere = [rollout([0], 1.0, group=0), rollout([0], 0.0, group=1)]
    assert assigned(name, elsewhere, **hyper) == [[0.0], [0.0]]  # Other groups are no company.


@pytest.mark.parametrize("name", ["rtmc", "ecpo"])
def test_one_action_in_a_state_gives_zero_and_an_unknown_one_is_an_action_of_its_own(name):
    one = [rollout([0, 1], x, actions=[0, i]) for i, x in enumerate((0.1, 1 / 3, 0.7))]
    base = [[0.0]] * 3 if name == "rtmc" else [own[:1] for own in assigned("grpo", one)]
    hyper = {"prior": 0.0} if name == "rtmc" else {"norm": "mean_std_norm"}
    assert [own[:1] for own in assigned(name, one, **hyper)] == base
    unknown = [Rollout(0, r.rewards, r.tokens, keys=r.keys, actions=[None, 0]) for r in one]
    named = [Rollout(0, r.rewards, r.tokens, keys=r.keys, actions=[i, 0]) for i, r in enumerate(one)]
    assert assigned(name, unknown, **hyper) == assigned(name, named, **hyper)
    assert [own[:1] for own in assigned(name, unknown, **hyper)] != base
