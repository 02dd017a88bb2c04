"""Batches that are sampled ahead of the learner: how old they are, that each group comes once, what is kept of them."""

from __future__ import annotations

import asyncio
import dataclasses
import types

import jax
import ml_collections
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from programs import program
from schedules import POLICY, Planned, all_ids, assert_exact, engine_of, planned

from agentr1_jax.errors import UserError
from agentr1_jax.runtime.run_folder import RunFolder
from agentr1_jax.tools.wrappers import ToolMetrics
from configs import quickstart
from experiments import checks
from experiments.batches import Ahead, InTurn, ages
from experiments.journal import Position, Stopped

train_script = program("train")

GROUPS, SAMPLES, UPDATES = 3, 2, 5
NEVER = bool


class Rows:
    """A task whose rows are planned: row by row other tools are slow."""

    name = "planned"

    def __init__(self, delays=(None,)):
        self.delays = delays

    def row(self, split, visit):
        return planned([visit % 60, 7], {"max_tokens": 6, "delay": self.delays[visit % len(self.delays)]}, {})


def run_of(staleness, delays=(None,)):
    """The parts of a run that batches need; the parameters of an update are those of the seed of its number."""
    engine, _ = engine_of(3)
    c = {"groups": GROUPS, "samples": SAMPLES, "staleness": staleness, "dynamic_sampling_groups": 0, "attempts": 1}
    sampling = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    config = types.SimpleNamespace(
        rollout=ml_collections.ConfigDict(c | sampling),
        budget=types.SimpleNamespace(trajectory_seconds=None, max_steps=4),
        task=types.SimpleNamespace(curriculum=()),
        mesh=types.SimpleNamespace(rollout_devices=0),
        updates=UPDATES,
        seed=0,
    )
    # Laid out as the engine was compiled for, which other tests share; else it compiles its programs again.
    layout = NamedSharding(tiny.mesh(1), P())
    view = lambda params, frozen: jax.device_put(jax.tree.map(jax.numpy.copy, params), layout)  # noqa: E731
    parts = {
        "engine": engine,
        "agent": Planned(),
        "task": Rows(delays),
        "tools": ToolMetrics(),
        "view": view,
        "frozen": {},
    }
    return types.SimpleNamespace(config=config, **parts)


def params_of(update):
    return tiny.decoder_params(POLICY, update)


def visits(update):
    return range(update * GROUPS, (update + 1) * GROUPS)


def train(made, start=0, stop_at=UPDATES):
    """The batches of all updates, as the circle asks for them."""
    out = []
    for update in range(start, stop_at):
        trajectories, dull = made.take(params_of(update), update, visits(update), NEVER)
        assert not dull
        out.append(trajectories)
        made.learnt(params_of(update + 1), update + 1)
    return out


def names(trajectories):
    return [t.uid for t in trajectories]


def expected(update):
    return [f"rl/{visit:06d}/{sample}" for visit in visits(update) for sample in range(SAMPLES)]


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 3), st.lists(st.sampled_from([None, 0.0, 0.003, 0.03]), min_size=1, max_size=4))
def test_each_group_comes_once_in_its_batch_and_no_step_is_older_than_allowed(staleness, delays):
    run = run_of(staleness, delays)
    made = Ahead(run, params_of(0), 0)
    try:
        out = train(made)
        assert made.unused() == []
    finally:
        made.close()
    for update, batch in enumerate(out):
        assert names(batch) == expected(update)
        versions = {s.policy_version for t in batch for s in t.steps}
        assert all(update - staleness <= version <= update for version in versions)
        for version in versions:
            assert_exact(batch, version=version, seed=version)
        shares = ages(batch, update, staleness)
        assert set(shares) == {f"rollout/age_{age}" for age in range(staleness + 1)}
        assert sum(shares.values()) == pytest.approx(1)


def test_the_first_batch_is_what_is_sampled_in_turn():
    run = run_of(1)
    made = Ahead(run, params_of(0), 0)
    try:
        ahead, _ = made.take(params_of(0), 0, visits(0), NEVER)
    finally:
        made.close()
    in_turn, _ = InTurn(run).take(params_of(0), 0, visits(0), NEVER)
    assert names(ahead) == names(in_turn) == expected(0)
    assert all_ids(ahead) == all_ids(in_turn)
    assert ages(in_turn, 0, 0) == {}


def test_what_is_sampled_and_not_trained_is_kept_and_not_sampled_again(tmp_path):
    run = run_of(2)
    made = Ahead(run, params_of(0), 0)
    train(made, stop_at=2)
    for _, future in made._batches.values():
        future.result(60)
    kept = made.unused()
    made.close()
    assert names(kept) == [*expected(2), *expected(3), *expected(4)]
    folder = RunFolder(str(tmp_path))
    folder.write_pending(7, kept[:-3])  # One group of two, and half of another, are lost.
    again = Ahead(run, params_of(2), 2, folder.read_pending(7))
    try:
        out = train(again, start=2)
    finally:
        again.close()
    assert [names(batch) for batch in out] == [expected(2), expected(3), expected(4)]
    assert all_ids(out[0]) == all_ids(kept[:6]) and all_ids(out[1]) == all_ids(kept[6:12])
    assert all_ids(out[2][:2]) == all_ids(kept[12:14])
    assert {s.policy_version for t in out[2][2:] for s in t.steps} <= {2, 3, 4}


def test_a_stop_breaks_off_at_once_and_keeps_complete_groups():
    run = run_of(1, delays=(None, None, 60.0))
    made = Ahead(run, params_of(0), 0)
    polls = iter(range(100))
    assert made.take(params_of(0), 0, visits(0), lambda: next(polls) > 5) is None
    assert {t.group for t in made.unused()} <= {0, 1}
    made.close()
    assert_exact(InTurn(run_of(0)).take(params_of(0), 0, visits(0), NEVER)[0])


def test_a_stop_of_one_batch_after_the_other_keeps_complete_groups_for_the_next_start():
    run = run_of(0, delays=(None, None, 60.0))
    made, done = InTurn(run), []
    polls = iter(range(1000))
    assert made.take(params_of(0), 0, visits(0), lambda: next(polls) > 10 or len(made.unused()) == 2 * SAMPLES) is None
    kept = made.unused()
    assert names(kept) == expected(0)[: 2 * SAMPLES]

    class Counting(Planned):
        async def run(self, session, row):
            done.append(session.identity.uid)
            await super().run(session, row)

    quick = run_of(0)
    quick.agent = Counting()
    again = InTurn(quick, kept)
    batch, _ = again.take(params_of(0), 0, visits(0), NEVER)
    assert names(batch) == expected(0) and again.unused() == []
    assert sorted(done) == expected(0)[2 * SAMPLES :]
    assert [t for t in batch if t.uid not in done] == kept
    # A group of which one was lost is sampled whole again.
    done.clear()
    InTurn(quick, kept[1:]).take(params_of(0), 0, visits(0), NEVER)
    assert sorted(done) == expected(0)[:SAMPLES] + expected(0)[2 * SAMPLES :]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout.staleness": -1}, r"rollout\.staleness is -1; it must be"),
        ({"rollout.staleness": 1, "rollout.deterministic": True}, "set one of them only"),
        ({"rollout.staleness": 1, "rollout.dynamic_sampling_groups": 4}, "settled before those of the batch before"),
        ({"rollout.staleness": 1, "credit.name": "remax", "credit.args.lam": None}, r"set rollout\.staleness=0"),
    ],
)
def test_what_cannot_run_ahead_is_refused(changes, message):
    config = quickstart.get_config()
    with config.unlocked():
        config.update_from_flattened_dict(changes)
    with pytest.raises(UserError, match=message):
        checks.check(config)


class Patient(Planned):
    """The first trajectory of all waits until the batch behind its own is whole."""

    def __init__(self):
        self.made = None

    async def run(self, session, row):
        if session.identity.uid == "rl/000000/0":
            while self.made is None or not self.made._batches[1][1].done():
                await asyncio.sleep(0.001)
        await super().run(session, row)


def test_a_slow_group_does_not_hold_up_the_batches_behind_its_own():
    run = run_of(1)
    run.agent = Patient()
    run.agent.made = made = Ahead(run, params_of(0), 0)
    try:
        assert names(made.take(params_of(0), 0, visits(0), NEVER)[0]) == expected(0)
        assert names(made.unused()) == expected(1)
    finally:
        made.close()


def test_all_processes_ask_whether_to_stop_also_who_was_told_to():
    """One that did not would leave the others waiting for its answer."""
    asked = []
    stop = types.SimpleNamespace(requested=True, requested_anywhere=lambda: asked.append(True) or True)
    journal = types.SimpleNamespace(stop=stop, position=types.SimpleNamespace(update=0))
    run = run_of(0)
    run.config.eval = types.SimpleNamespace(questions=2, split="eval")
    with pytest.raises(Stopped):
        train_script.evaluate(run, journal, types.SimpleNamespace(params=params_of(0)), "eval_before", 0.0)
    assert asked == [True]


@pytest.mark.parametrize("broken_off", [False, True])
def test_an_evaluation_on_the_way_is_made_once_and_again_where_it_was_broken_off(monkeypatch, broken_off):
    made, saved = [], []

    def evaluate(run, journal, state, name, temperature, questions, within):
        made.append((name, questions))
        if broken_off:
            raise Stopped

    monkeypatch.setattr(train_script, "evaluate", evaluate)
    run = types.SimpleNamespace(config=types.SimpleNamespace(eval=types.SimpleNamespace(every=2, quick_questions=7)))
    position = Position(update=4)
    journal = types.SimpleNamespace(position=position, save=lambda state, unused: saved.append(unused))
    batches = types.SimpleNamespace(background=None, unused=lambda: ["kept"])
    if broken_off:
        with pytest.raises(Stopped):
            train_script.evaluate_if_due(run, journal, None, batches)
        assert saved == [["kept"]] and position.evaluated == 0
        return
    for position.update in (0, 4, 4, 5):
        train_script.evaluate_if_due(run, journal, None, batches)
    assert made == [("eval_000004", 7)] and not saved and position.evaluated == 4


def test_a_checkpoint_of_a_newer_version_is_refused():
    record = dataclasses.asdict(Position(update=3))
    assert Position.of(record, "runs/x").update == 3
    for old in ({}, {"format": 1}):  # They were saved after the evaluation of their update.
        first = {k: v for k, v in record.items() if k not in ("format", "evaluated")}
        assert Position.of(first | old, "runs/x") == Position(update=3, evaluated=3)
    with pytest.raises(UserError, match=r"runs/x: its checkpoints have format 9, this version knows 2"):
        Position.of(record | {"format": 9, "what": "is this"}, "runs/x")
