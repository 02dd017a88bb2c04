"""The critic's warm-up: the policy and its optimizer stand still bit for bit, and start afterwards as at first.

In the same compiled program, for a head on the policy's trunk, a critic of its own, and adapters.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
import tiny
from examples import OBJECTIVE, POLICY, example
from learners import check_equal, exact, make

from agentr1_jax.errors import UserError
from agentr1_jax.learner.config import OptimizerConfig
from agentr1_jax.learner.optimizer import make_optimizer
from agentr1_jax.learner.update import init_state, make_update
from agentr1_jax.policy import params as parts
from agentr1_jax.policy.config import LoraConfig
from agentr1_jax.policy.sharding import shardings
from agentr1_jax.runtime.compile_cache import CompileCounter
from configs import base, quickstart
from experiments.setup import read_settings

LORA = dataclasses.replace(POLICY, lora=LoraConfig(rank=2, alpha=3.0, targets=("query", "value")))
CASES = [(POLICY, "shared_trunk"), (POLICY, "separate"), (LORA, "separate")]
WARMUP = 2


def settings_with(**changes):
    """Settings of the base config with some keys (`__` for the dots) changed."""
    with ml_collections.ConfigDict(base.get_config("hopworld")).unlocked() as c:
        c.policy.preset = "tiny"
        c.update_from_flattened_dict({key.replace("__", "."): x for key, x in changes.items()})
    return read_settings(c)


CRITIC = {"critic": "shared_trunk", "credit__name": "step_gae"}
RUN = settings_with(
    updates=6,
    optimizer__critic_warmup=WARMUP,
    optimizer__lr=1e-2,
    optimizer__value_lr=1e-1,
    **CRITIC,
)


@functools.cache
def made(policy, critic):
    """(update, () -> parameters in new buffers, their frozen part, optimizer)."""
    optimizer = make_optimizer(OptimizerConfig(max_grad_norm=0.1, weight_decay=0.1))
    params, frozen = parts.split(policy, parts.init_params(policy, jax.random.key(0), critic))
    layout = shardings(jax.eval_shape(lambda: init_state(params, optimizer)), tiny.mesh(2))
    return make_update(policy, OBJECTIVE, optimizer, layout), lambda: jax.tree.map(jnp.copy, params), frozen, optimizer


def learn(case, state, update, batch=None):
    """The state after an update of RUN."""
    program, _, frozen, _ = made(*case)
    batch = example("append").batch(rows=8) if batch is None else batch
    rates = {part: np.float32(x) for part, x in RUN.learning_rates(update, state.params).items()}
    state, metrics = program(state, frozen, jax.tree.map(jnp.asarray, batch), np.int32(1), rates)
    assert int(state.skipped) == 0
    return state, metrics


def fresh(case, params=None):
    _, start, _, optimizer = made(*case)
    state = init_state(start() if params is None else jax.tree.map(jnp.asarray, params), optimizer)
    return jax.device_put(state, shardings(state, tiny.mesh(2)))


@functools.cache
def warmed_up(case):
    """(start, after the warm-up, after one update of the policy too), on the host."""
    state = fresh(case)
    seen = [jax.device_get(state)]
    for update in range(WARMUP + 1):
        state, _ = learn(case, state, update)
        if update >= WARMUP - 1:
            seen.append(jax.device_get(state))
    return seen


@pytest.mark.parametrize("case", CASES)
def test_the_policy_and_its_moments_stand_still_while_the_critic_learns(case):
    start, warm, _ = warmed_up(case)
    for before, after in ((start.params, warm.params), (start.opt_state, warm.opt_state)):
        check_equal(after["decoder"], before["decoder"])
        for part in before.keys() - {"decoder"}:
            moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), after[part], before[part])
            assert max(jax.tree.leaves(moved)) > 0, part
    assert int(warm.updates) == WARMUP


@pytest.mark.parametrize("case", CASES)
def test_the_first_update_of_the_policy_is_that_of_a_run_started_there(case):
    _, warm, after = warmed_up(case)
    started, _ = learn(case, fresh(case, warm.params), WARMUP)
    check_equal(after.params["decoder"], started.params["decoder"])
    check_equal(after.opt_state["decoder"], started.opt_state["decoder"])
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), after.params["decoder"], warm.params["decoder"])
    # The first step of Adam is the rate, whichever way, beside the decay of the weight.
    assert max(jax.tree.leaves(moved)) == pytest.approx(RUN.learning_rates(WARMUP, ["decoder"])["decoder"], rel=0.2)
    assert made(*case)[0]._cache_size() == 1


def test_the_gradient_of_the_policy_counts_nowhere_in_the_warm_up():
    """Not in the norm that the critic's gradient is clipped by either."""
    case, loud = CASES[0], example("append")
    loud = dataclasses.replace(loud, advantages=1000 * loud.advantages).batch(rows=8)
    quiet, metrics = learn(case, fresh(case), 0)
    other, loud_metrics = learn(case, fresh(case), 0, loud)
    check_equal(quiet.params, other.params)
    assert metrics["grad_norm"] == loud_metrics["grad_norm"] > 0.1, "else nothing was clipped"
    assert metrics["policy_loss"] != loud_metrics["policy_loss"]
    moved, _ = learn(case, other, WARMUP, loud)
    assert np.abs(np.asarray(moved.params["decoder"]["embed"] - quiet.params["decoder"]["embed"])).max() > 0


def test_the_whole_learner_compiles_nothing_when_the_warm_up_ends():
    settings = {"critic": "shared_trunk", "credit.name": "step_gae", "optimizer.name": "adamw", "optimizer.eps": 1e-3}
    small = make(settings | {"optimizer.critic_warmup": 2, "updates": 4})
    state, counter = small.fresh(), CompileCounter()
    start, norms = jax.device_get(state.params), []
    for update in range(4):
        rates = small.setup.settings.learning_rates(update, state.params)
        state, _, _ = small.learn(exact(), state, rates=rates)
        if update < 2:
            check_equal(state.params["decoder"], start["decoder"])
        if update == 0:
            compiled = counter.count
        norms.append(float(np.abs(np.asarray(state.params["decoder"]["embed"]) - start["decoder"]["embed"]).max()))
    assert counter.count == compiled and norms[:2] == [0, 0] and 0 < norms[2] < norms[3]


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_rates_of_the_policy_begin_after_the_warm_up(schedule):
    shared = {"optimizer__schedule": schedule, "optimizer__warmup": 2, **CRITIC}
    late = settings_with(updates=10, optimizer__critic_warmup=3, **shared)
    started_there = settings_with(updates=7, **shared)
    made = [late.learning_rates(update, ("decoder", "critic", "value")) for update in range(10)]
    assert [r["decoder"] for r in made[:3]] == [0, 0, 0]
    assert [r["decoder"] for r in made[3:]] == [
        started_there.learning_rates(u, ["decoder"])["decoder"] for u in range(7)
    ]
    assert {r[part] for r in made for part in ("critic", "value")} == {late.optimizer.value_lr}
    assert made[3]["decoder"] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer.critic_warmup": -1}, r"optimizer.critic_warmup is -1; it must be greater than or equal to 0"),
        ({"credit.name": "grpo"}, r"no critic to learn \(credit scheme 'grpo' uses none\).*critic_warmup=0"),
        ({"credit.name": "state_baseline", "critic": "none"}, r"no critic to learn \(critic is none\)"),
        ({"updates": 4}, r"critic_warmup \(5\) leaves none of the updates \(4\): the policy would never learn"),
        ({"updates": 5}, r"critic_warmup \(5\) leaves none of the updates \(5\): the policy would never learn"),
    ],
)
def test_a_warm_up_without_critic_or_end_is_refused(changes, message):
    with ml_collections.ConfigDict(quickstart.get_config()).unlocked() as c:
        c.update_from_flattened_dict({"critic": "shared_trunk", "credit.name": "step_gae"})
        c.credit.args = base.get_config().credit.args
        c.optimizer.critic_warmup = 5
    read_settings(c)
    with ml_collections.ConfigDict(c).unlocked() as wrong:
        wrong.update_from_flattened_dict(changes)
    with pytest.raises(UserError, match=message):
        read_settings(wrong)
