"""Where a stopped run goes on, at every update and between epochs: whole runs are in test_train and test_kill."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import types

import pytest
from programs import program

from agentr1_jax.trajectory import Outcome, Trajectory
from experiments import circle
from experiments.journal import Position, Stopped
from experiments.learning import Pending

train_script = program("train")

EXAMPLES, SIZE, SUPERVISED = 10, 3, 8  # Epochs of 3 updates: one ends at 3, and one at 6.
GROUPS, SAMPLES, RL = 2, 3, 5
REFILLED = 1
"""Update in which a group was replaced."""


class Journal:
    """Saves as a checkpoint does, by way of JSON, and stops where it is told to."""

    seconds = 0.0

    def __init__(self, position, stop_after):
        self.position, self.stop_after = position, stop_after
        self.save(None)
        self.metrics = types.SimpleNamespace(write=lambda record: None)
        self.compiles = types.SimpleNamespace(count=0)
        self.stop = types.SimpleNamespace(requested=False, requested_anywhere=lambda: False)

    def save(self, state, unused=()):
        self.saved = json.dumps(dataclasses.asdict(self.position))

    def save_if_due(self, state, every, **others):
        self.save(state)
        if self.position.update == self.stop_after:
            raise Stopped


def trajectory(group, uid="t"):
    return Trajectory(uid=uid, group=group, sample=0, task="t", seed=0, steps=(), outcome=Outcome.ENV_DONE)


@pytest.fixture
def learned(monkeypatch):
    """The names of what each update learned from; nothing is computed."""
    out = []

    def learn(run, learner, state, batch, rates, kl_coef=0.0, moments=None):
        out.append([t.uid for t in batch])
        return state, Pending({}, []), list(batch)

    monkeypatch.setattr("experiments.learning.learn", learn)
    return out


def stopped_and_resumed(go, phase, stop_after):
    """What a run has saved in the end that was stopped so, and went on from what was saved; never stopped with None."""
    journal = Journal(Position(phase=phase), stop_after)
    if stop_after is not None:
        with pytest.raises(Stopped):
            go(journal)
        journal = Journal(Position.of(json.loads(journal.saved), "the run"), None)
    go(journal)
    return {key: x for key, x in json.loads(journal.saved).items() if key != "totals"}  # Of times.


@pytest.mark.parametrize("stop_after", range(1, SUPERVISED + 1))
def test_fault_13_supervised_updates_go_on_with_the_next_examples_also_between_epochs(learned, stop_after):
    rows = types.SimpleNamespace(batch=SIZE, lr=0.1)
    config = types.SimpleNamespace(
        control=False,
        seed=3,
        checkpoint=types.SimpleNamespace(every=1),
        warm_start=types.SimpleNamespace(updates=SUPERVISED),
    )
    run, examples = types.SimpleNamespace(config=config), [trajectory(i, str(i)) for i in range(EXAMPLES)]
    state = types.SimpleNamespace(params={})

    def go(journal):
        train_script.supervise(run, journal, None, state, examples, rows)

    position = stopped_and_resumed(go, "warm_start", None)
    straight = learned[:]
    learned.clear()
    assert stopped_and_resumed(go, "warm_start", stop_after) == position and position["update"] == SUPERVISED
    assert learned == straight and len(straight) == SUPERVISED
    for epoch in range(0, SUPERVISED, 3):
        drawn = [uid for batch in straight[epoch : epoch + 3] for uid in batch]
        assert len(set(drawn)) == len(drawn) == SIZE * len(straight[epoch : epoch + 3])
    assert len({tuple(sorted(x)) for x in straight}) > 3, "each epoch has an order of its own"


@pytest.mark.parametrize("stop_after", range(1, RL))
def test_fault_13_rl_goes_on_with_the_next_rows_and_seeds(learned, monkeypatch, stop_after):
    """Also behind rows that took the place of others: the cursor is data, and no multiple of the update."""
    sampled = []

    def row(split, visit):
        return {"id": visit}

    def take(params, update, visits, stop):
        groups = list(circle.groups_of(run, "rl", "train", range(GROUPS), visits, SAMPLES))
        sampled.append([(g.row["id"], n.uid, n.seed) for g in groups for n in g.identities])
        refills = [trajectory(GROUPS)] if update == REFILLED else []
        return [trajectory(0, f"{update}")], refills

    batches = types.SimpleNamespace(take=take, learnt=lambda *_: None, background=None, unused=lambda: ())
    monkeypatch.setattr(train_script, "sampler", lambda *_: contextlib.nullcontext(batches))
    monkeypatch.setattr("agentr1_jax.runtime.run_folder.RunFolder.write_trajectories", lambda *_: None)
    monkeypatch.setattr(circle, "rollout_metrics", lambda run: {})
    monkeypatch.setattr("experiments.build.rates", lambda *_: {"decoder": 0.0})
    rollout = types.SimpleNamespace(groups=GROUPS, samples=SAMPLES, staleness=0)
    config = types.SimpleNamespace(
        seed=3,
        run_dir="unused",
        rollout=rollout,
        updates=RL,
        profile_updates="",
        checkpoint=types.SimpleNamespace(every=1),
        kl=types.SimpleNamespace(coef=0.0, target=None),
        eval=types.SimpleNamespace(every=0),
        task=types.SimpleNamespace(curriculum=()),
        budget=types.SimpleNamespace(max_steps=1),
    )
    run = types.SimpleNamespace(
        config=config,
        task=types.SimpleNamespace(name="t", row=row),
        engine=types.SimpleNamespace(timeline=None),
    )

    def go(journal):
        learner = types.SimpleNamespace(greedy=False)
        train_script.reinforce(run, journal, learner, types.SimpleNamespace(params={}))

    position = stopped_and_resumed(go, "rl", None)
    straight = sampled[:]
    sampled.clear()
    resumed = stopped_and_resumed(go, "rl", stop_after)
    assert resumed == position and position["visits"] == RL * GROUPS + 1 and position["update"] == RL
    assert sampled == straight and len(straight) == RL
    everything = [one for batch in straight for one in batch]
    for part in (1, 2):
        assert len({one[part] for one in everything}) == RL * GROUPS * SAMPLES
    visited = [visit for visit, *_ in everything[::SAMPLES]]
    assert visited == [v for v in range(RL * GROUPS + 1) if v != (REFILLED + 1) * GROUPS]
