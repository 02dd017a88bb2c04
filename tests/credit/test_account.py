"""The account of an advantage: terms that sum to it, whose quantities are what their names say; and its record."""

from __future__ import annotations

import dataclasses
import itertools

import credit_reference as reference
import jax
import jax.numpy as jnp
import learners
import numpy as np
import pytest
from builders import CAPACITIES, Rollout, Token, credit_batch, rollouts
from credits import NAMES, NUMBERS, TYPICAL, every_account
from hypothesis import example, given, settings

from agentr1_jax.credit import Credit, Scheme, Term, broadcast_to_steps, broadcast_to_tokens, get_scheme
from agentr1_jax.credit.batch import account_of_step
from agentr1_jax.errors import UserError
from agentr1_jax.train import train_step
from agentr1_jax.train.progress import Progress
from agentr1_jax.trajectory import POLICIES, Outcome, Trajectory
from agentr1_jax.trajectory_io import read_jsonl, write_jsonl

ALIKE = [Rollout(g, [0.1], [[Token(1 / 3, 0.1)]], 0.0, [0], [0.1], greedy=0.2) for g in (0, 0, 0, 1, 1, 2)]
"""Groups of equal returns, whose mean is rounded, and a lone member; single steps."""


def contributions(terms):
    """Largest magnitude of what one quantity adds to an advantage, by step."""
    return np.max(
        [np.abs(t.weight * x / t.std) for t in terms.values() for x in (*t.plus.values(), *t.minus.values())], axis=0
    )


def check_sum(terms, means, tolerance, message):
    error = np.abs(sum(t.total for t in terms.values()) - means)
    np.testing.assert_array_less(error, tolerance * np.maximum(contributions(terms), 1e-3), err_msg=message)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None)
@given(rollouts(), NUMBERS)
@example(ALIKE, TYPICAL)
@example([Rollout(0, [1000.1], [[Token(0.25, -0.5), Token(1e4, 0.1)]], 0.1, [0], [7.0])], TYPICAL)
def test_the_terms_of_every_scheme_sum_to_the_advantage(name, data, numbers):
    for option, means, terms in every_account(name, data, **numbers):
        assert terms, option
        check_sum(terms, means, 1e-9, f"{option}")


@pytest.mark.parametrize("name", NAMES)
def test_the_terms_sum_to_the_advantage_in_single_precision_and_as_recorded(name):
    rng = np.random.default_rng(0)
    data = [
        Rollout(
            group=i // 2,
            rewards=list(rng.normal(size=3)),
            tokens=[[Token(*rng.normal(size=2), bool(k != 1)) for k in range(4)] for _ in range(3)],
            bootstrap=0.3 * (i % 2),
            keys=[0, i % 2, None],
            state_values=[0.1, 0.2, 0.3],
            greedy=0.5,
        )
        for i in range(5)
    ]
    batch = credit_batch(data, **CAPACITIES)
    credit = jax.device_get(jax.jit(get_scheme(name).assign, compiler_options=QUICK_COMPILE)(batch))
    steps = [[t.is_action for t in step] for r in data for step in r.tokens]
    edges = np.cumsum([0, *map(len, steps)])
    means = [credit.advantages[a:b][on].mean() for (a, b), on in zip(itertools.pairwise(edges), steps, strict=True)]
    terms = jax.tree.map(lambda x: np.broadcast_to(x, CAPACITIES["steps"])[: len(steps)], credit.terms)
    check_sum(terms, means, 1e-5, name)
    for step, mean in enumerate(means):
        account = account_of_step(terms, step)
        assert account
        largest = max(
            abs(t.weight * x / t.std) for t in account.values() for x in (*t.plus.values(), *t.minus.values())
        )
        assert sum(t.total for t in account.values()) == pytest.approx(mean, abs=1e-5 * max(largest, 1e-3))


QUICK_COMPILE = {"xla_backend_optimization_level": 0}


def outcomes(data):
    return [r.outcome for r in data for _ in r.tokens]


def others(data):
    """Mean return of the other members of each step's group; the own one where there is none."""
    out = []
    for i, r in enumerate(data):
        own = [x.outcome for k, x in enumerate(data) if x.group == r.group and k != i] or [r.outcome]
        out += [float(np.mean(own))] * len(r.tokens)
    return out


def members(data):
    return [[x.outcome for x in data if x.group == r.group] for r in data for _ in r.tokens]


@settings(max_examples=15, deadline=None)
@given(rollouts())
def test_outcomes_are_compared_with_what_the_terms_say(data):
    outcome = outcomes(data)

    def quantities(name):
        _, _, terms = next(one for one in every_account(name, data) if one[0].get("unit", "trajectory") == "trajectory")
        (term,) = terms.values()
        np.testing.assert_allclose(term.plus["return"], outcome, atol=1e-9)
        return term

    term = quantities("grpo")
    np.testing.assert_allclose(term.minus["group mean"], [np.mean(x) for x in members(data)], atol=1e-9)
    deviations = [np.std(x, ddof=1) if len(x) > 1 else 0.0 for x in members(data)]
    np.testing.assert_allclose(term.std, np.array(deviations) + 1e-6, atol=1e-9)
    np.testing.assert_allclose(quantities("rloo").minus["mean of the others"], others(data), atol=1e-9)
    greedy = [r.greedy for r in data for _ in r.tokens]
    np.testing.assert_allclose(quantities("remax").minus["greedy return"], greedy, atol=1e-9)


@settings(max_examples=15, deadline=None)
@given(rollouts(), NUMBERS)
def test_what_follows_a_step_is_what_the_terms_say(data, numbers):
    gamma, lam = numbers["gamma"], numbers["lam"]
    rewards = [x for r in data for x in reference.step_rewards(r)]
    first = reference.first_sampled(data)
    values = [[first[i, t][1].value for t in range(len(r.tokens))] for i, r in enumerate(data)]
    after = [x for r, own in zip(data, values, strict=True) for x in (*own[1:], r.bootstrap)]
    later = [
        x
        for r, own in zip(data, values, strict=True)
        for x in (*reference.gae(reference.step_rewards(r), own, r.bootstrap, gamma, lam)[1:], 0.0)
    ]
    expected = {
        "reward": rewards,
        "discounted next value": gamma * np.array(after),
        "discounted later advantages": gamma * lam * np.array(later),
        "value": [x for own in values for x in own],
    }
    numbers |= {"lam_length": 0.0}
    plain = {"whiten": "none", "anchor": "prompt"}
    _, _, terms = next(one for one in every_account("step_gae", data, **numbers) if one[0] == plain)
    (term,) = terms.values()
    for name, x in {**term.plus, **term.minus}.items():
        np.testing.assert_allclose(x, expected[name], atol=1e-9, err_msg=name)
    returns = [x for r in data for x in reference.returns(r, gamma)]
    for scheme in ("reinforce", "gigpo", "hgpo", "state_baseline"):
        for option, _, terms in every_account(scheme, data, **numbers):
            (known, *_) = [term.plus["return to go"] for term in terms.values() if "return to go" in term.plus]
            np.testing.assert_allclose(known, returns, atol=1e-9, err_msg=f"{scheme} {option}")


def test_token_terms_are_means_over_the_sampled_tokens_of_a_step():
    tokens = [Token(1.0, 0.25), Token(9.0, 9.0, is_action=False), Token(3.0, 0.5)]
    data = [Rollout(0, [2.0], [tokens], bootstrap=4.0)]
    _, _, terms = next(
        one for one in every_account("token_gae", data, gamma=0.5, lam=0.0) if one[0]["whiten"] == "none"
    )
    (term,) = terms.values()
    assert {**term.plus, **term.minus} == {
        "reward": [(0.25 + 2.5) / 2],
        "discounted next value": [0.5 * (3.0 + 4.0) / 2],
        "discounted later advantages": [0.0],
        "value": [2.0],
    }


def explain(batch, term):
    per_step = broadcast_to_steps(batch, batch.returns)
    return Credit(
        broadcast_to_tokens(batch, per_step), terms={"z": term, "a": Term({"zero": jnp.zeros_like(per_step)})}
    )


def test_a_scheme_of_ones_own_names_its_terms_in_its_own_order():
    def mine(batch):
        per_step = broadcast_to_steps(batch, batch.returns)
        return explain(batch, Term({"return": per_step, "nothing": 0.0}, {"b": 0.0, "a": 0.0}))

    credit = jax.jit(Scheme("mine", mine).assign)(credit_batch(ALIKE, **CAPACITIES))
    assert list(credit.terms) == ["z", "a"]
    assert (list(credit.terms["z"].plus), list(credit.terms["z"].minus)) == (["return", "nothing"], ["b", "a"])
    terms = jax.tree.map(lambda x: np.broadcast_to(x, CAPACITIES["steps"]), jax.device_get(credit.terms))
    np.testing.assert_array_equal(terms["z"].total[:6], credit.advantages[:6])


def test_terms_of_tokens_or_trajectories_are_refused():
    batch = credit_batch(ALIKE, trajectories=6, steps=7, tokens=8)
    for x in (batch.returns, batch.values):
        scheme = Scheme("mine", lambda batch, x=x: explain(batch, Term({"return": x})))
        with pytest.raises(UserError, match=r"'mine': 'return' of the term 'z' has shape \([68],\), .* the 7 steps"):
            scheme.assign(batch)


def credit_of(trajectories, **changes):
    """The trajectories as recorded, and their credit."""
    half = learners.make(learners.EVERYTHING).under(changes)
    setup, phase, params = half.setup, half.phase, half.fresh().params
    batch = train_step.pack(setup, phase, trajectories)
    outputs = train_step.token_outputs(setup, phase, params, batch)
    credit = train_step.assign_credit(setup, phase, batch, outputs, Progress())
    return train_step.with_credit(batch, outputs, credit), credit, outputs


@pytest.mark.parametrize("name", ["step_gae", "token_gae"])
def test_a_record_explains_the_advantages_that_were_trained(name, tmp_path):
    made = learners.batch()
    made[2] = dataclasses.replace(made[2], outcome=Outcome.TOOL_FAILURE, final_prompt_ids=None)
    recorded, credit, outputs = credit_of(made, **{"credit.name": name, "shaping.terminal_only": True})
    write_jsonl(tmp_path / "rl.jsonl.gz", recorded)
    read = {t.uid: t for t in read_jsonl(tmp_path / "rl.jsonl.gz")}
    dropped = read.pop(made[2].uid)
    assert all(s.account == {} and s.advantages is s.values is None for s in dropped.steps)
    kept = [read[t.uid] for t in made if t.uid in read]
    steps = [s for t in kept for s in t.steps]
    for step in steps:
        (term,) = step.account.values()
        largest = max(abs(x / term.std) for x in (*term.plus.values(), *term.minus.values()))
        assert term.total == pytest.approx(float(step.advantages.mean()), abs=1e-3 * largest)
        assert step.values.dtype == step.value_targets.dtype == np.float16
        has_target = np.isfinite(step.value_targets)
        assert (
            has_target.all() if name == "token_gae" else has_target.tolist() == [True] + [False] * (len(has_target) - 1)
        )
        first = term.minus["value"] if name == "step_gae" else float(step.values[0])
        assert float(step.values[0]) == pytest.approx(first, rel=1e-3)
    np.testing.assert_allclose(np.concatenate([s.values for s in steps]), outputs.values, rtol=1e-3, atol=1e-6)
    np.testing.assert_array_equal(np.concatenate([s.advantages for s in steps]), credit.advantages)
    cut = [POLICIES[t.outcome].bootstrap for t in kept]
    assert any(cut) and [t.final_value is not None for t in kept] == cut and dropped.final_value is None
    assert [t.final_value for t in kept if t.final_value is not None] == outputs.final_values[cut].tolist()
    for t in kept:  # `terminal_only` moved all reward to the end.
        *early, last = [s.reward if s.shaped_reward is None else s.shaped_reward for s in t.steps]
        assert early == [0.0] * len(early) and last == pytest.approx(t.total_reward)
    mean, std = (term.minus["batch mean"], term.std)
    metrics = train_step.whitening_metrics(credit)
    assert metrics == pytest.approx({"credit/whitening_mean": mean, "credit/whitening_std": std}, rel=1e-6)


def test_each_process_records_its_own_part_of_a_global_batch(monkeypatch):
    made, gathered = learners.batch(), []
    whole, _, _ = credit_of(made)

    def gather(own):
        gathered.append(own)
        return list(gathered)

    monkeypatch.setattr(train_step.processes, "all_gather_arrays", gather)
    credit_of(made[:4])
    monkeypatch.setattr(train_step.processes, "process_index", lambda: 1)
    with monkeypatch.context() as patch:  # The packed rows are those of one process.
        patch.setattr(train_step, "with_process_indices", lambda loss_tokens, index, count: loss_tokens)
        second, _, _ = credit_of(made[4:])
    assert [t.uid for t in second] == [t.uid for t in made[4:]]
    values = [[np.nan if t.final_value is None else t.final_value for t in half] for half in (second, whole[4:])]
    np.testing.assert_allclose(*values, rtol=1e-4)
    for step, expected in zip(
        (s for t in second for s in t.steps), (s for t in whole[4:] for s in t.steps), strict=True
    ):
        np.testing.assert_allclose(step.advantages, expected.advantages, rtol=1e-4, atol=1e-5)
        for name, term in step.account.items():
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), term, expected.account[name]
            )


def test_a_reward_is_recorded_twice_only_where_shaping_changed_it():
    recorded, _, _ = credit_of(learners.batch())
    assert all(s.shaped_reward is None for t in recorded for s in t.steps)


def test_a_truncation_that_counts_as_an_end_is_worth_nothing():
    recorded, _, _ = credit_of(learners.batch(), **{"shaping.truncation_is_terminal": True})
    assert {t.final_value for t in recorded} == {None, 0.0}


def test_values_beyond_float16_keep_their_size():
    half, single, none = (train_step.to_half(x) for x in (np.float32([1, np.nan]), np.float32([1e5]), None))
    assert half.dtype == np.float16 and single.dtype == np.float32 and none is None


def test_a_batch_in_which_nothing_is_usable_has_a_record():
    failed = [dataclasses.replace(t, outcome=Outcome.ENV_FAILURE) for t in learners.batch()]
    recorded, _, _ = credit_of(failed)
    assert [t.uid for t in recorded] == [t.uid for t in failed] and isinstance(recorded[0], Trajectory)
