"""What must not change the results of any scheme."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from builders import EIGHTHS, Rollout, Token, rollouts
from credits import NAMES, check_same, every_option, exact, options
from hypothesis import given, settings
from hypothesis import strategies as st

few = settings(max_examples=12, deadline=None)
BY_OUTCOME = ("grpo", "dr_grpo", "rloo", "opo", "reinforce_pp_baseline")


def token_order(data, order):
    """For each token of the reordered rollouts its place before."""
    edges = np.cumsum([0, *(sum(map(len, r.tokens)) for r in data)])
    return np.concatenate([np.arange(edges[i], edges[i + 1]) for i in order])


def sampled(data):
    return np.array([t.is_action for r in data for step in r.tokens for t in step])


@few
@given(rollouts(), st.randoms(use_true_random=False))
def test_order_of_trajectories_names_of_groups_and_of_states_do_not_matter(data, random):
    order = random.sample(range(len(data)), len(data))
    groups = random.sample(range(6), 3)
    keys = dict(zip((None, 0, 1, 2), (None, *random.sample((0, 1, 2, 7, 65_537, 2**31 - 1), 3)), strict=True))
    moved = [
        dataclasses.replace(data[i], group=groups[data[i].group], keys=[keys[key] for key in data[i].keys])
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
            check_same(one, other, sampled(data), err_msg=f"{name} {option}")


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
@given(rollouts(), st.lists(st.sampled_from(EIGHTHS), min_size=3, max_size=3))
def test_a_constant_on_all_outcomes_of_a_group_changes_nothing(data, shifts):
    shifted = [dataclasses.replace(r, rewards=[*r.rewards[:-1], r.rewards[-1] + shifts[r.group]]) for r in data]
    for name in BY_OUTCOME:
        for (option, one), (_, other) in zip(every_option(name, data), every_option(name, shifted), strict=True):
            check_same(one, other, err_msg=f"{name} {option}")


@few
@given(rollouts(), st.sampled_from((-2.0, 0.25, 8.0)))
def test_advantages_without_std_scale_with_the_rewards(data, scale):
    scaled = [
        dataclasses.replace(
            r,
            rewards=[scale * x for x in r.rewards],
            tokens=[[Token(scale * t.value, scale * t.reward, t.is_action) for t in step] for step in r.tokens],
            bootstrap=scale * r.bootstrap,
            state_values=[scale * x for x in r.state_values],
            greedy=scale * r.greedy,
        )
        for r in data
    ]
    for name in sorted({*NAMES} - {"grpo", "hgpo"}):
        for (option, one), (_, other) in zip(every_option(name, data), every_option(name, scaled), strict=True):
            if option.get("whiten", "none") == "none" and option.get("norm", "mean_norm") == "mean_norm":
                np.testing.assert_allclose(scale * one.advantages, other.advantages, atol=1e-9, err_msg=f"{name}")


@few
@given(rollouts())
def test_whitened_advantages_have_mean_0_and_std_1_in_their_unit(data):
    flat = [(i, (i, t)) for i, r in enumerate(data) for t, step in enumerate(r.tokens) for x in step if x.is_action]
    trajectory, step = (np.unique(x, return_inverse=True, axis=0)[1].ravel() for x in zip(*flat, strict=True))
    starts = np.flatnonzero(np.diff(step, prepend=-1))
    for name in (n for n in NAMES if "whiten" in options(n)[0]):
        credits = {tuple(o.items()): credit.advantages[sampled(data)] for o, credit in every_option(name, data)}
        for option, x in credits.items():
            raw = credits[tuple((dict(option) | {"whiten": "none"}).items())]
            # A scheme of steps takes the mean of a trajectory over its steps, one of tokens over its tokens.
            of_steps = name in ("step_gae", "reinforce", "state_baseline")
            rows = starts if of_steps and dict(option)["whiten"] != "token" else np.arange(len(x))
            unit = {"token": np.arange(len(x)), "step": step, "trajectory": trajectory}.get(dict(option)["whiten"])
            if unit is None or len(set(unit)) < 2 or raw.std() < 0.05:
                continue
            weight = 1 / np.bincount(unit[rows], minlength=unit.max() + 1)[unit[rows]]
            count, x = weight.sum(), x[rows]
            mean = (weight * x).sum() / count
            np.testing.assert_allclose(mean, 0, atol=1e-9, err_msg=f"{name} {option}")
            std = np.sqrt((weight * (x - mean) ** 2).sum() / (count - 1))
            np.testing.assert_allclose(std, 1, atol=1e-4, err_msg=f"{name} {option}")
