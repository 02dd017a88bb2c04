"""Credit schemes against plain loops, and against numbers that published implementations computed.

Where an entry of golden.json says that it deviates, so do we: targets of `step_gae` stand at the first token of a step
alone; positions that were not sampled are not compared; a lone member of a group gets 0.
"""

from __future__ import annotations

import json
import pathlib

import credit_reference
import numpy as np
import pytest
from builders import Rollout, Token, golden, rollouts
from credits import NAMES, NUMBERS, credit_of, every_option, own_numbers, quick
from hypothesis import given

ENTRIES = {
    "agent_r1.step_gae.g1.0.l1.0": ("step_gae", {"gamma": "gamma", "lam": "lam"}),
    "agent_r1.token_gae.g0.95.l0.9": ("token_gae", {"gamma": "gamma", "lam": "lam"}),
    "agent_r1.grpo": ("grpo", {}),
    "agent_r1.drgrpo": ("dr_grpo", {}),
    "steppo.gigpo.mean_norm": ("gigpo", {"gamma": "gamma", "step_weight": "step_advantage_w"}),
    "ragen.bi_level_gae.hg0.95": ("bilevel_gae", {"gamma": "gamma", "lam": "lam", "gamma_high": "high_level_gamma"}),
    "verl.grpo": ("grpo", {}),
    "verl.rloo": ("rloo", {}),
    "verl.rf++.g0.9": ("reinforce_pp", {"gamma": 0.9}),
    "verl.opo": ("opo", {}),
}
"""The scheme of each entry, and its hyper-parameters: names of inputs, or numbers that only the entry's name has."""
BELIEFS = {"igpo.joint.g1.0": "joint", "igpo.separate.g0.5": "separate"}
"""How rewards are normalised in each entry of beliefs, whose rows are trajectories."""


def of_rows(inputs, place):
    """Padded rows as rollouts; a row is a step. Its rewards stay on their tokens or are summed to the step."""
    rows = len(inputs["rewards"])
    names = inputs.get("traj", np.arange(rows))
    groups = {name: i for i, name in enumerate(dict.fromkeys(inputs.get("group", names)))}
    keys = {name: i for i, name in enumerate(dict.fromkeys(inputs.get("state_key", ())))}
    data = {}
    for row in range(rows):
        kept = inputs["mask"][row] > 0
        rewards = inputs["rewards"][row][kept]
        values = inputs["values"][row][kept] if "values" in inputs else np.zeros(kept.sum())
        group = groups[inputs["group"][row]] if "group" in inputs else 0
        one = data.setdefault(names[row], Rollout(group, [], [], keys=[]))
        one.rewards.append(float(rewards.sum()) if place == "step" else 0.0)
        on_token = rewards if place == "token" else np.zeros(kept.sum())
        one.tokens.append([Token(float(v), float(r)) for v, r in zip(values, on_token, strict=True)])
        one.keys.append(keys[inputs["state_key"][row]] if keys else None)
    return list(data.values())


def of_one_row(inputs, place):
    """One padded row as one rollout, whose steps are the runs of sampled tokens, each with what was observed after."""
    columns = list(zip(inputs["values"][0], inputs["rewards"][0], inputs["mask"][0] > 0, strict=True))
    steps, was_sampled = [], False
    for value, reward, is_action in columns:
        if is_action and not was_sampled:
            steps.append([])
        steps[-1].append((float(value), float(reward), bool(is_action)))
        was_sampled = is_action
    on_token = place == "token"
    return [
        Rollout(
            0,
            [0.0 if on_token else sum(r for _, r, _ in step) for step in steps],
            [[Token(v, r if on_token else 0.0, is_action) for v, r, is_action in step] for step in steps],
        )
    ]


def lone(inputs):
    """True for the rows whose group has one trajectory."""
    group = inputs.get("group", np.zeros(len(inputs["mask"]), int))
    names = inputs.get("traj", np.arange(len(group)))
    return np.array([len(set(names[group == g])) == 1 for g in group])


def entries():
    return json.loads((pathlib.Path(__file__).parent.parent / "golden.json").read_text())


def test_every_published_advantage_is_compared():
    assert {name for name, x in entries().items() if {"adv", "adv_whitened"} & set(x["outputs"])} == {
        *ENTRIES,
        *BELIEFS,
    }


def test_the_shared_numbers_are_among_them(data_dir):
    shared = data_dir.parent / "golden" / "golden.json"
    if not shared.is_file():
        pytest.skip("no golden numbers beside the data")
    assert json.loads(shared.read_text()).items() <= entries().items()


@pytest.mark.parametrize("place", ["step", "token"])
@pytest.mark.parametrize("name", ENTRIES)
def test_a_scheme_gives_the_published_numbers(name, place):
    entry = golden(name)
    inputs, outputs, mask = entry["inputs"], entry["outputs"], entry["inputs"]["mask"] > 0
    scheme, hyper = ENTRIES[name]
    hyper = {key: inputs[x] if isinstance(x, str) else x for key, x in hyper.items()}
    one_row = name.startswith("ragen")
    credit = credit_of(scheme, (of_one_row if one_row else of_rows)(inputs, place), **hyper)
    expected = outputs["adv_whitened" if one_row else "adv"]
    if scheme in ("grpo", "dr_grpo", "gigpo", "rloo", "opo"):
        expected = np.where(lone(inputs)[:, None], 0, expected)
    advantages = credit.advantages[mask[0]] if one_row else credit.advantages
    np.testing.assert_allclose(advantages, expected[mask], atol=1e-5)
    if scheme == "step_gae":
        assert credit.value_mask.sum() == len(mask)
        np.testing.assert_allclose(credit.value_targets[credit.value_mask], outputs["ret"][:, 0], atol=1e-5)
    elif scheme in ("token_gae", "bilevel_gae"):
        np.testing.assert_allclose(credit.value_targets[credit.value_mask], outputs["ret"][mask], atol=1e-5)
    else:
        assert not credit.value_mask.any()


@pytest.mark.parametrize("name", BELIEFS)
def test_igpo_gives_the_numbers_of_its_published_code(name):
    entry = entries()[name]
    inputs, expected = entry["inputs"], np.array(entry["outputs"]["adv"])
    rows = zip(inputs["group"], inputs["beliefs"], inputs["turn_tokens"], inputs["outcome"], strict=True)
    data = [
        Rollout(
            group=int(group[1:]),
            rewards=[0.0] * (len(tokens) - 1) + [outcome],
            tokens=[[Token(0.0)] * count for count in tokens],
            beliefs=np.log(belief).tolist(),
        )
        for group, belief, tokens, outcome in rows
    ]
    credit = credit_of("igpo", data, gamma=inputs["gamma"], normalise=BELIEFS[name])
    np.testing.assert_allclose(
        credit.advantages[: sum(map(sum, inputs["turn_tokens"]))], expected[np.array(inputs["mask"]) > 0], atol=1e-5
    )


def test_a_published_return_is_the_discounted_sum_over_tokens():
    """`ret` of verl.rf++, before whitening."""
    entry = golden("verl.rf++.g0.9")
    credit = credit_of("reinforce_pp", of_rows(entry["inputs"], "token"), gamma=0.9, whiten="none")
    np.testing.assert_allclose(credit.advantages, entry["outputs"]["ret"][entry["inputs"]["mask"] > 0], atol=1e-6)


def test_lambda_by_length_gives_the_published_number():
    """Ten tokens, V = 0, reward 1 at the end, α 1.5: a published test of SAO expects 0.53744124 at the first."""
    data = [Rollout(0, [1.0], [[Token(0.0, 0.0)] * 10])]
    credit = credit_of("token_gae", data, gamma=1.0, lam_length=1.5, whiten="none")
    np.testing.assert_allclose(credit.advantages[0], 0.53744124, atol=1e-8)
    # VAPO's α .05 on ten tokens would be a negative λ: only the last token is credited.
    short = credit_of("token_gae", data, gamma=1.0, lam_length=0.05, whiten="none")
    np.testing.assert_array_equal(short.advantages, [0.0] * 9 + [1.0])


@pytest.mark.parametrize("name", NAMES)
@quick
@given(rollouts(), NUMBERS)
def test_a_scheme_equals_the_loops(name, data, numbers):
    own = own_numbers(name, numbers)
    for option, credit in every_option(name, data, **numbers):
        advantages, targets = getattr(credit_reference, name)(data, **own, **option)
        np.testing.assert_allclose(credit.advantages, advantages, atol=1e-9, rtol=1e-9, err_msg=f"{option}")
        np.testing.assert_array_equal(np.flatnonzero(credit.value_mask), sorted(targets))
        expected = [targets[k] for k in sorted(targets)]
        np.testing.assert_allclose(credit.value_targets[credit.value_mask], expected, atol=1e-9)
        assert not credit.value_targets[~credit.value_mask].any()
