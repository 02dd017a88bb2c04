"""The registry of credit schemes, batches that say little, and groups of equal keys."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import CAPACITIES, Rollout, Token, credit_batch, rollouts
from credits import NAMES, TYPICAL, every_option, exact, own_numbers, program
from hypothesis import given, settings
from hypothesis import strategies as st

from agentr1_jax.credit import SCHEMES, get_scheme, register
from agentr1_jax.credit.group import grpo
from agentr1_jax.credit.primitives import group_ids
from agentr1_jax.credit.scheme import CreditConfig
from agentr1_jax.errors import UserError
from configs import base

GROUP_IDS = jax.jit(group_ids)
EXTREME = (0.0, 0.1, 1 / 3, 1e-6, -1e-6, 1e6, -1e6, 999_999.9, 1000.1)
DEFAULTS = {
    "token_gae": {"gamma": 1.0, "lam": 1.0, "lam_length": 0.0, "whiten": "token"},
    "step_gae": {"gamma": 1.0, "lam": 1.0, "lam_length": 0.0, "anchor": "prompt", "whiten": "step"},
    "bilevel_gae": {"gamma": 1.0, "lam": 1.0, "lam_length": 0.0, "gamma_high": 0.95, "whiten": "token"},
    "grpo": {"unit": "trajectory"},
    "dr_grpo": {"unit": "trajectory"},
    "rloo": {},
    "reinforce": {"gamma": 1.0, "whiten": "step"},
    "reinforce_pp": {"gamma": 1.0, "whiten": "token"},
    "reinforce_pp_baseline": {"unit": "trajectory", "whiten": "token"},
    "remax": {},
    "opo": {},
    "gigpo": {"gamma": 0.95, "step_weight": 1.0, "norm": "mean_norm", "unit": "trajectory"},
    "hgpo": {"gamma": 0.95, "history": 2, "alpha": 1.0, "norm": "mean_std_norm"},
    "turn_grpo": {"outcome_weight": 1.0, "norm": "mean_norm", "signal": "reward", "gamma": 1.0},
    "state_baseline": {"gamma": 1.0, "whiten": "none"},
    "rtmc": {"gamma": 0.99, "prior": 0.0},
    "ecpo": {
        **{"gamma": 0.95, "step_weight": 1.0, "kappa": 2.0, "tau": 4.0},
        **{"norm": "mean_std_norm", "unit": "trajectory"},
    },
    "salt": {"history": 0, "norm": "mean_std_norm", "unit": "trajectory"},
    "graph_gpo": {
        **{"omega": 0.1, "relative": False, "threshold": 0.0, "step_weight": 1.0},
        **{"norm": "mean_std_norm", "unit": "trajectory"},
    },
    "igpo": {"gamma": 1.0, "belief": "probability", "normalise": "joint"},
    "a2tgpo": {"gamma": 1.0, "belief": "probability", "step_weight": 0.3},
    "trace": {
        "gap": 0.1,
        "horizon": 3,
        "decay": 0.8,
        "step_weight": 0.2,
        "terminal_weight": 2.0,
        "frozen": True,
    },
}
quick = settings(max_examples=40, deadline=None)


def test_the_schemes_and_what_they_need():
    needs = {
        "needs_critic": {"token_gae", "step_gae", "bilevel_gae"},
        "uses_critic": {"token_gae", "step_gae", "bilevel_gae", "state_baseline"},
        "needs_state_key": {"gigpo", "hgpo", "state_baseline", "rtmc", "ecpo", "salt", "graph_gpo"},
        "needs_action_key": {"rtmc", "ecpo", "salt"},
        "needs_greedy": {"remax"},
        "needs_belief": {"igpo", "a2tgpo", "trace"},
        "needs_samples": {
            *("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "opo", "gigpo", "hgpo", "turn_grpo"),
            *("rtmc", "ecpo", "salt", "graph_gpo", "a2tgpo"),
        },
    }
    for flag, names in needs.items():
        assert {name for name in NAMES if getattr(SCHEMES[name], flag)} == names, flag


def test_the_schemes_have_the_documented_defaults_which_the_config_can_set():
    assert {name: SCHEMES[name].defaults for name in NAMES} == DEFAULTS
    arguments = base.get_config().credit.args
    assert {*arguments} == set().union(*DEFAULTS.values()) and not any(arguments.values())


def test_the_registry_binds_hyperparameters():
    bound = get_scheme("step_gae", gamma=0.5, lam=0.0).assign
    data = [Rollout(0, [0.0, 1.0], [[Token(0.5)], [Token(0.25)]])]
    np.testing.assert_allclose(jax.jit(bound)(credit_batch(data, **exact(data))).value_targets, [0.125, 1.0], atol=1e-6)


@pytest.mark.parametrize(
    ("name", "hyper", "message"),
    [
        ("step_gae", {"gama": 1.0}, "has no argument 'gama'; it has .*gamma.*lam"),
        ("rloo", {"gamma": 1.0}, "has no argument 'gamma'; it has none"),
        ("step_gae", {"gamma": 1.01}, r"credit.args.gamma is 1.01; it must be less than or equal to 1"),
        ("token_gae", {"gamma": float("nan")}, "credit.args.gamma is nan"),
        ("grpo", {"unit": "none"}, "credit.args.unit is 'none'; it must be 'token', 'step' or 'trajectory'"),
        (
            "step_gae",
            {"lam": 1.0, "lam_length": 1.5},
            "step_gae': set one of lam and lam_length, and the other to None",
        ),
        ("hgpo", {"history": 1.5}, "credit.args.history is 1.5; it must be a valid integer"),
    ],
)
def test_a_wrong_hyperparameter_is_an_error(name, hyper, message):
    with pytest.raises(UserError, match=message):
        get_scheme(name, **hyper)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CreditConfig("gpro"), "credit.name: unknown credit scheme 'gpro'; choose one of .*grpo, "),
        (CreditConfig(file="nowhere.py"), "credit.file: .*nowhere.py: no such file"),
        (CreditConfig(args={"gamma": 1.0}), "'grpo' has no argument 'gamma'"),
    ],
)
def test_fault_10_an_unknown_scheme_is_an_error_of_the_user(config, message):
    with pytest.raises(UserError, match=message):
        config.bind()


def test_a_name_is_taken_once(registry):
    with pytest.raises(ValueError, match=r"'grpo' is registered twice, in .*group\.py and in .*group\.py"):
        register("grpo")(grpo)


MINE = """
import jax.numpy as jnp
from agentr1_jax.credit import Credit, register
from agentr1_jax.validation import Fraction

@register("mine", needs_state_key=True)
def mine(batch, *, gamma: Fraction = 0.5, bonus=0.0):
    return Credit(jnp.where(batch.real_token, gamma + bonus, 0.0))
"""


def test_a_scheme_of_ones_own_is_loaded_from_a_file(registry, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    SCHEMES.load(str(tmp_path / "mine.py"))
    monkeypatch.chdir(tmp_path)
    SCHEMES.load("mine.py")  # The same file again is no second registration.
    scheme = get_scheme("mine", bonus=2)
    batch = credit_batch([Rollout(0, [1.0], [[Token(0.0), Token(0.0, is_action=False)]])], **CAPACITIES)
    assert scheme.needs_state_key and not scheme.needs_critic
    np.testing.assert_allclose(jax.jit(scheme.assign)(batch).advantages[:3], [2.5, 0, 0])
    with pytest.raises(UserError, match="gamma is 7"):
        get_scheme("mine", gamma=7)
    with pytest.raises(UserError, match="bonus is 'much'; it must be a valid number"):
        get_scheme("mine", bonus="much")
    with pytest.raises(UserError, match="has no argument 'lam'"):
        get_scheme("mine", lam=1.0)
    (tmp_path / "mine.py").write_text(MINE.replace('"mine"', '"renamed"'))
    SCHEMES.load("mine.py")
    assert "renamed" in registry and "mine" not in registry


def test_a_scheme_of_ones_own_may_carry_other_decorators(registry, tmp_path):
    (tmp_path / "mine.py").write_text("import jax\n" + MINE.replace("\ndef mine", "\n@jax.jit\ndef mine"))
    SCHEMES.load(str(tmp_path / "mine.py"))
    SCHEMES.load(str(tmp_path / "mine.py"))  # It is known whose it is.
    assert get_scheme("mine", gamma=0.25).needs_state_key


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, r"mine\.py: no such file"),
        ("def mine(:", r"mine\.py: SyntaxError: .*line 1"),
        ("import nothing_of_this_name", r"mine\.py: ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("x = 1", r"mine\.py registers no credit scheme; decorate one with @register"),
        (MINE.replace('"mine"', '"grpo"'), r"mine\.py: ValueError: .*'grpo' is registered twice.*group\.py.*mine\.py"),
    ],
)
def test_a_file_that_does_not_load_says_why(registry, tmp_path, source, message):
    before = dict(registry)
    if source is not None:
        (tmp_path / "mine.py").write_text(source)
    with pytest.raises(ValueError, match=message):
        SCHEMES.load(str(tmp_path / "mine.py"))
    assert dict(registry) == before


@pytest.mark.parametrize("name", NAMES)
def test_batches_that_say_nothing_give_exactly_zero(name):
    """An empty batch; equal rewards, whose mean is rounded; one step, which whitening centres at 0."""
    with jax.enable_x64(True):
        credits = program(name, np.float64)(
            credit_batch([], **CAPACITIES, dtype=np.float64), own_numbers(name, TYPICAL)
        )
    assert not any(np.any(x) for x in jax.tree.leaves([credit.replace(terms={}) for credit in credits]))
    raw = {"token_gae", "step_gae", "bilevel_gae", "reinforce", "reinforce_pp", "state_baseline"}
    for reward in (0.1, 1 / 3, 1000.1):
        alike = [Rollout(g, [reward], [[Token(reward)]], 0.0, [0], [reward], greedy=reward) for g in (0, 0, 0, 1, 1, 2)]
        for option, credit in every_option(name, alike):
            if not (name in raw and option["whiten"] == "none"):
                assert not credit.advantages.any(), option
    data = [Rollout(0, [1000.1], [[Token(0.25, -0.5), Token(1e4, 0.1), Token(3.0)]], 0.1, [0], [7.0])]
    for option, credit in every_option(name, data):
        if option.get("whiten", "none") != "none":
            assert abs(credit.advantages.mean()) < 1e-5, option


@pytest.mark.parametrize("name", ["gigpo", "grpo", "state_baseline"])
def test_equal_trajectories_give_exactly_zero_wherever_they_stand(name):
    """A scan rounds by place in the stream, and over a std near 0 the least difference would be an advantage of 1."""
    for rewards, gamma in itertools.product([(0.0, 0.0, 1.0), (-0.1, -0.1, 1.0), (0.1, 1 / 3, 1000.1)], (0.95, 0.99)):
        alike = [Rollout(0, list(rewards), [[Token(0.7)]] * 3, keys=[0, 1, 2])] * 6
        for option, credit in every_option(name, alike, dtype=np.float32, gamma=gamma):
            assert not credit.advantages.any(), (rewards, gamma, option)


@pytest.mark.parametrize("name", ["gigpo", "grpo", "state_baseline", "step_gae", "ecpo", "graph_gpo"])
@quick
@given(rollouts(EXTREME))
def test_whatever_the_numbers_credit_is_finite(name, data):
    for option, credit in every_option(name, data, dtype=np.float32):
        assert np.isfinite(credit.advantages).all() and np.isfinite(credit.value_targets).all(), option


def test_a_trajectory_that_is_not_trained_still_counts_in_its_group():
    """As those whose outcome says `mask`: no credit, and the others' is what it was."""
    rng = np.random.default_rng(0)
    data = [
        Rollout(0, list(rng.normal(size=2)), [[Token(*rng.normal(size=2))] * 2] * 2, 0.5, [0, i % 2]) for i in range(4)
    ]
    masked = [[dataclasses.replace(t, is_action=False, reward=0.0) for t in step] for step in data[0].tokens]
    summed = [x + sum(t.reward for t in step) for x, step in zip(data[0].rewards, data[0].tokens, strict=True)]
    one = [dataclasses.replace(data[0], tokens=masked, rewards=summed), *data[1:]]
    known = ("grpo", "dr_grpo", "rloo", "turn_grpo", "gigpo", "hgpo", "state_baseline")
    for name in (*known, "rtmc", "ecpo", "salt", "graph_gpo"):
        # Rewards of tokens make no success of graph_gpo; with this threshold all are one, wherever rewards stand.
        both = (every_option(name, x, threshold=-99.0) for x in (data, one))
        for (option, trained), (_, credit) in zip(*both, strict=True):
            if option.get("unit", "trajectory") != "token" and option.get("whiten", "none") == "none":
                np.testing.assert_allclose(credit.advantages[4:], trained.advantages[4:], atol=1e-9, err_msg=name)


def test_without_state_values_the_fallback_is_zero():
    batch = credit_batch([Rollout(0, [2.0], [[Token(9.0)]])], **CAPACITIES).replace(values=None, state_value=None)
    credit = jax.jit(get_scheme("state_baseline").assign)(batch)
    assert credit.advantages[0] == 2.0 and credit.value_mask is None


@quick
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from((-1, 0, 2**31 - 1))), min_size=8, max_size=8))
def test_groups_are_numbered_by_what_agrees(pairs):
    columns = [jnp.array(column, jnp.int32) for column in zip(*pairs, strict=True)]
    for leading, number in enumerate(map(np.asarray, GROUP_IDS(*columns)), start=1):
        keys = [pair[:leading] for pair in pairs]
        np.testing.assert_array_equal(number[:, None] == number, [[one == other for other in keys] for one in keys])
        assert set(number) == set(range(len(set(keys))))
