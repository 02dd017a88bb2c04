"""The critic's warm-up: the policy and its optimizer stand still bit for bit, and start afterwards as at first.

In the same compiled program, for a head on the policy's trunk, and for a critic of its own with adapters.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from changes import changed
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
from configs import quickstart
from experiments.setup import read_settings

LORA = dataclasses.replace(POLICY, lora=LoraConfig(rank=2, alpha=3.0, targets=("query", "value")))
CASES = [(POLICY, "shared_trunk"), (LORA, "separate")]
WARMUP = 2


def settings_with(**changes):
    """Settings of the quickstart, which has a critic, with some keys (`__` for the dots) changed."""
    return read_settings(changed(quickstart, **changes))


RUN = settings_with(updates=6, optimizer__critic_warmup=WARMUP, optimizer__lr=1e-2, optimizer__value_lr=1e-1)


@functools.cache
def make_program(policy, critic):
    """(update, () -> parameters in new buffers, their frozen part, optimizer)."""
    optimizer = make_optimizer(OptimizerConfig(max_grad_norm=0.1, weight_decay=0.1))
    params, frozen = parts.split(policy, parts.init_params(policy, jax.random.key(0), critic))
    layout = shardings(jax.eval_shape(lambda: init_state(params, optimizer)), tiny.mesh(2))
    return make_update(policy, OBJECTIVE, optimizer, layout), lambda: jax.tree.map(jnp.copy, params), frozen, optimizer


def learn(case, state, update, batch=None):
    """The state after an update of RUN."""
    program, _, frozen, _ = make_program(*case)
    batch = example("append").batch(rows=8) if batch is None else batch
    rates = {part: np.float32(x) for part, x in RUN.learning_rates(update, state.params).items()}
    state, metrics = program(state, frozen, jax.tree.map(jnp.asarray, batch), np.int32(1), rates)
    assert int(state.skipped) == 0
    return state, metrics


def fresh(case, params=None):
    _, start, _, optimizer = make_program(*case)
    state = init_state(start() if params is None else jax.tree.map(jnp.asarray, params), optimizer)
    return jax.device_put(state, shardings(state, tiny.mesh(2)))


@pytest.mark.parametrize("case", CASES)
def test_the_policy_stands_still_while_the_critic_learns_and_then_starts_as_at_first(case):
    state = fresh(case)
    start = jax.device_get(state)
    for update in range(WARMUP):
        state, _ = learn(case, state, update)
    warm = jax.device_get(state)
    for before, after in ((start.params, warm.params), (start.opt_state, warm.opt_state)):
        check_equal(after["decoder"], before["decoder"])
        for part in before.keys() - {"decoder"}:
            moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), after[part], before[part])
            assert max(jax.tree.leaves(moved)) > 0, part
    assert int(warm.updates) == WARMUP

    after, _ = learn(case, state, WARMUP)
    after = jax.device_get(after)
    started, _ = learn(case, fresh(case, warm.params), WARMUP)
    check_equal(after.params["decoder"], started.params["decoder"])
    check_equal(after.opt_state["decoder"], started.opt_state["decoder"])
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), after.params["decoder"], warm.params["decoder"])
    # The first step of Adam is the rate, whichever way, beside the decay of the weight.
    assert max(jax.tree.leaves(moved)) == pytest.approx(RUN.learning_rates(WARMUP, ["decoder"])["decoder"], rel=0.2)
    assert make_program(*case)[0]._cache_size() == 1


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
    shared = {"optimizer__schedule": schedule, "optimizer__warmup": 2}
    late = settings_with(updates=10, optimizer__critic_warmup=3, **shared)
    started_there = settings_with(updates=7, **shared)
    rates = [late.learning_rates(update, ("decoder", "critic", "value")) for update in range(10)]
    of_policy = [r["decoder"] for r in rates]
    assert of_policy == [0, 0, 0, *(started_there.learning_rates(u, ["decoder"])["decoder"] for u in range(7))]
    assert {r[part] for r in rates for part in ("critic", "value")} == {late.optimizer.value_lr}
    assert of_policy[3] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"credit__name": "grpo", "credit__args__lam": None},
            r"no critic to learn \(credit scheme 'grpo' uses none\).*critic_warmup=0",
        ),
        (
            {"credit__name": "state_baseline", "credit__args__lam": None, "critic": "none"},
            r"no critic to learn \(critic is none\)",
        ),
        ({"updates": 5}, r"critic_warmup \(5\) leaves none of the updates \(5\): the policy would never learn"),
    ],
)
def test_a_warm_up_without_critic_or_end_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        settings_with(optimizer__critic_warmup=5, **changes)
