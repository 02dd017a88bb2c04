"""Batches of every phase: documents, examples over epochs, rollouts ahead of the learner; the progress they follow."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import types

import jax
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from schedules import POLICY, Planned, all_ids, assert_exact, engine_of, planned

from agentr1_jax.credit import SCHEMES
from agentr1_jax.credit.shaping import RunningMeanStd
from agentr1_jax.errors import UserError
from agentr1_jax.rollout.config import SamplingConfig
from agentr1_jax.runtime.run_folder import RunFolder
from agentr1_jax.tools.wrappers import ToolMetrics
from agentr1_jax.train.build import Setup
from agentr1_jax.train.collect import AsynchronousRollouts, Request, SynchronousRollouts, policy_ages, roll_out
from agentr1_jax.train.phases import Examples, make_documents
from agentr1_jax.train.progress import Progress, read_progress
from agentr1_jax.train.summary import trajectory_means
from agentr1_jax.trajectory import Outcome, Trajectory
from configs import base
from experiments.setup import read_settings

GROUPS, SAMPLES, UPDATES = 3, 2, 5


class Rows:
    """A task whose rows are planned: row by row other tools are slow."""

    name = "planned"

    def __init__(self, delays=(None,)):
        self.delays = delays

    def row(self, split, visit):
        return planned([visit % 60, 7], {"max_tokens": 6, "delay": self.delays[visit % len(self.delays)]}, {})


def setup_of(staleness, delays=(None,), agent=None, **rollout):
    """The parts of a run that batches need; the parameters of an update are those of the seed of its number."""
    engine, _ = engine_of(3)
    config = base.get_config("hopworld")
    changes = {"groups": GROUPS, "samples": SAMPLES, "staleness": staleness, "attempts": 1}
    config.rollout.update(changes | rollout)
    config.policy.preset, config.updates, config.seed = "tiny", UPDATES, 0
    # Laid out as the engine was compiled for, which other tests share; else it compiles its programs again.
    layout = NamedSharding(tiny.mesh(1), P())
    rollout_params = lambda params, frozen: jax.device_put(jax.tree.map(jax.numpy.copy, params), layout)  # noqa: E731
    return Setup(
        settings=read_settings(config),
        task=Rows(delays),
        tokenizer=None,
        agent=agent or Planned(),
        policy=POLICY,
        frozen={},
        learner_mesh=tiny.mesh(1),
        engine=engine,
        rollout_params=rollout_params,
        tool_metrics=ToolMetrics(),
    )


class Breaking(Planned):
    """An environment breaks on the response of every second sample."""

    async def run(self, session, row):
        if session.identity.sample % 2:
            await session.generate(np.int32(row["opening"]), 4)
            raise OSError("gone")
        await super().run(session, row)


class Stop:
    """A request to stop that comes when `when` says so."""

    def __init__(self, when=bool):
        self._when = when

    @property
    def requested(self):
        return self._when()

    def requested_anywhere(self):
        return self._when()


NEVER = Stop()


def params_of(update):
    return tiny.decoder_params(POLICY, update)


def prompts(update):
    return range(update * GROUPS, (update + 1) * GROUPS)


def take(source, update, stop=NEVER):
    """The trajectories of the batch of an update; None where it is aborted."""
    rollouts = source.next(params_of(update), Progress(update=update, prompt_index=update * GROUPS), stop)
    if rollouts is None:
        return None
    assert not rollouts.zero_variance and rollouts.prompts_used == GROUPS
    return rollouts.trajectories


def train(source, start=0, stop_at=UPDATES):
    """The batches of all updates, as the training loop asks for them."""
    out = []
    for update in range(start, stop_at):
        out.append(take(source, update))
        source.publish(params_of(update + 1), update + 1)
    return out


def names(trajectories):
    return [t.uid for t in trajectories]


def expected(update):
    return [f"rl/{visit:06d}/{sample}" for visit in prompts(update) for sample in range(SAMPLES)]


@settings(max_examples=5, deadline=None)
@given(st.integers(1, 3), st.lists(st.sampled_from([None, 0.0, 0.003, 0.03]), min_size=1, max_size=4))
def test_each_group_comes_once_in_its_batch_and_no_step_is_older_than_allowed(staleness, delays):
    setup = setup_of(staleness, delays)
    rollouts = AsynchronousRollouts(setup, params_of(0), 0)
    try:
        out = train(rollouts)
        assert rollouts.pending() == []
    finally:
        rollouts.close()
    for update, batch in enumerate(out):
        assert names(batch) == expected(update)
        versions = {s.policy_version for t in batch for s in t.steps}
        assert all(update - staleness <= version <= update for version in versions)
        for version in versions:
            assert_exact(batch, version=version, seed=version)
        shares = policy_ages(batch, update, staleness)
        assert set(shares) == {f"rollout/age_{age}" for age in range(staleness + 1)}
        assert sum(shares.values()) == pytest.approx(1)


def test_the_first_batch_is_what_is_sampled_in_turn():
    setup = setup_of(1)
    rollouts = AsynchronousRollouts(setup, params_of(0), 0)
    try:
        ahead = take(rollouts, 0)
    finally:
        rollouts.close()
    in_turn = take(SynchronousRollouts(setup), 0)
    assert names(ahead) == names(in_turn) == expected(0)
    assert all_ids(ahead) == all_ids(in_turn)


def test_what_is_sampled_and_not_trained_is_kept_and_not_sampled_again(tmp_path):
    setup = setup_of(2)
    rollouts = AsynchronousRollouts(setup, params_of(0), 0)
    train(rollouts, stop_at=2)
    for _, future in rollouts._batches.values():
        future.result(60)
    pending = rollouts.pending()
    rollouts.close()
    assert names(pending) == [*expected(2), *expected(3), *expected(4)]
    folder = RunFolder(str(tmp_path))
    folder.write_pending(7, pending[:-3])  # One group of two, and half of another, are lost.
    again = AsynchronousRollouts(setup, params_of(2), 2, folder.read_pending(7))
    try:
        out = train(again, start=2)
    finally:
        again.close()
    assert [names(batch) for batch in out] == [expected(2), expected(3), expected(4)]
    assert all_ids(out[0]) == all_ids(pending[:6]) and all_ids(out[1]) == all_ids(pending[6:12])
    assert all_ids(out[2][:2]) == all_ids(pending[12:14])
    assert {s.policy_version for t in out[2][2:] for s in t.steps} <= {2, 3, 4}


def test_a_stop_breaks_off_at_once_and_keeps_complete_groups():
    setup = setup_of(1, delays=(None, None, 60.0))
    rollouts = AsynchronousRollouts(setup, params_of(0), 0)
    polls = iter(range(100))
    assert take(rollouts, 0, Stop(lambda: next(polls) > 5)) is None
    assert {t.group for t in rollouts.pending()} <= {0, 1}
    rollouts.close()
    assert_exact(take(SynchronousRollouts(setup_of(0)), 0))


def test_a_stop_of_one_batch_after_the_other_keeps_complete_groups_for_the_next_start():
    setup = setup_of(0, delays=(None, None, 60.0))
    rollouts, done = SynchronousRollouts(setup), []
    polls = iter(range(1000))
    assert take(rollouts, 0, Stop(lambda: next(polls) > 10 or len(rollouts.pending()) == 2 * SAMPLES)) is None
    pending = rollouts.pending()
    assert names(pending) == expected(0)[: 2 * SAMPLES]

    class Counting(Planned):
        async def run(self, session, row):
            done.append(session.identity.uid)
            await super().run(session, row)

    quick = setup_of(0, agent=Counting())
    again = SynchronousRollouts(quick, pending)
    batch = take(again, 0)
    assert names(batch) == names(again.pending()) == expected(0)
    again.publish(params_of(1), 1)
    assert again.pending() == []
    assert sorted(done) == expected(0)[2 * SAMPLES :]
    assert [t for t in batch if t.uid not in done] == pending
    # A group of which one was lost is sampled whole again.
    done.clear()
    take(SynchronousRollouts(quick, pending[1:]), 0)
    assert sorted(done) == expected(0)[:SAMPLES] + expected(0)[2 * SAMPLES :]


class Slow(Planned):
    """Its greedy rollouts take for ever."""

    greedy = False

    async def run(self, session, row):
        if session.identity.uid.startswith("greedy"):
            self.greedy = True
            await asyncio.sleep(600)
        await super().run(session, row)


def test_a_stop_breaks_off_greedy_rollouts_and_keeps_what_they_are_compared_with():
    agent = Slow()
    setup = setup_of(0, agent=agent)
    setup = dataclasses.replace(setup, settings=dataclasses.replace(setup.settings, scheme=SCHEMES["remax"]))
    rollouts = SynchronousRollouts(setup)
    assert take(rollouts, 0, Stop(lambda: agent.greedy)) is None
    assert names(rollouts.pending()) == expected(0)


class Patient(Planned):
    """The first trajectory of all waits until the batch behind its own is whole."""

    def __init__(self):
        self.rollouts = None

    async def run(self, session, row):
        if session.identity.uid == "rl/000000/0":
            while self.rollouts is None or not self.rollouts._batches[1][1].done():
                await asyncio.sleep(0.001)
        await super().run(session, row)


def test_a_slow_group_does_not_hold_up_the_batches_behind_its_own():
    agent = Patient()
    setup = setup_of(1, agent=agent)
    agent.rollouts = rollouts = AsynchronousRollouts(setup, params_of(0), 0)
    try:
        assert names(take(rollouts, 0)) == expected(0)
        assert sorted(names(rollouts.pending())) == [*expected(0), *expected(1)]
    finally:
        rollouts.close()


def restore(progress: Progress) -> Progress:
    """The progress by way of a checkpoint's JSON."""
    return read_progress(json.loads(json.dumps(dataclasses.asdict(progress))), "the run")


def test_a_checkpoint_keeps_the_progress():
    progress = Progress("rl", kl_coef=0.5).after(5, RunningMeanStd(10.0, 0.5, 3.0)).add_results(em_before=0.25)
    progress = progress.add_totals({"time/learn": 2.0}, recompiles=1)
    again = restore(progress)
    assert again.replace(return_statistics=RunningMeanStd(*again.return_statistics)) == progress
    assert (again.update, again.prompt_index, again.checkpoint) == (1, 5, 1)
    assert again.enter("done").checkpoint == 2
    with pytest.raises(UserError, match="runs/x: its checkpoints have format 9, this version reads 3"):
        read_progress(dataclasses.asdict(progress) | {"format": 9, "what": "is this"}, "runs/x")


def test_imitation_goes_on_with_the_next_examples_also_between_epochs():
    size, updates = 3, 8  # Of 10 examples: epochs of 3 updates, of which one ends at 3, and one at 6.
    examples = [Trajectory(str(i), i, 0, "t", seed=0, steps=(), outcome=Outcome.ENV_DONE) for i in range(10)]

    def batches(updates):
        progress, out = Progress("warm_start"), []
        for update in updates:
            source = Examples(examples, size, seed=3)  # As after a restart.
            progress = restore(progress.replace(update=update))
            out.append([t.uid for t in source.next({}, progress, stop=None).trajectories])
        return out

    straight = batches(range(updates))
    for epoch in range(0, updates, 3):
        drawn = [uid for batch in straight[epoch : epoch + 3] for uid in batch]
        assert len(set(drawn)) == len(drawn) == size * len(straight[epoch : epoch + 3])
    assert len({tuple(sorted(x)) for x in straight}) > 3, "each epoch has an order of its own"
    assert batches([4]) == [straight[4]]


def test_documents_hold_every_token_once_and_none_is_too_long():
    texts, stop = ["abcdefghij", "", "xyz", "12345678"], 1
    config = base.get_config("hopworld")
    config.policy.preset, config.pretrain.tokens = "tiny", 6
    tokenizer = types.SimpleNamespace(stop_id=stop, encode_data=lambda text: [ord(letter) for letter in text])
    task = types.SimpleNamespace(name="t", texts=lambda count: texts[:count])
    settings = read_settings(config)
    documents = make_documents(types.SimpleNamespace(settings=settings, tokenizer=tokenizer, task=task))
    said = [(t.steps[0].prompt_ids.tolist(), t.steps[0].response_ids.tolist()) for t in documents]
    assert all(prompt == [stop] and response[-1] == stop and 1 + len(response) <= 6 for prompt, response in said)
    assert bytes(itertools.chain(*(response[:-1] for _, response in said))).decode() == "".join(texts)
    assert len(documents) == 6 == len({t.uid for t in documents}) == len({t.group for t in documents})
    assert all(t.outcome is Outcome.ENV_DONE and t.total_reward == 0 for t in documents)


@pytest.mark.parametrize("staleness", [0, 1])
def test_failures_count_as_zero_in_batches_of_rl_alone(staleness):
    setup = setup_of(staleness, agent=Breaking(), failures="zero")
    if staleness:
        with contextlib.closing(AsynchronousRollouts(setup, params_of(0), 0)) as source:
            batch = take(source, 0)
    else:
        batch = take(SynchronousRollouts(setup), 0)
    assert [t.outcome for t in batch] == [Outcome.ENV_DONE, Outcome.FAILURE_AS_ZERO] * GROUPS
    assert_exact(batch)
    means = trajectory_means(batch)
    assert means["reward"] == sum(t.total_reward for t in batch[::2]) / len(batch) > 0
    request = Request("eval_0", "train", range(1), 2, SamplingConfig(), 0)
    ((_, failed),) = roll_out(setup, params_of(0), request).complete
    assert failed.outcome is Outcome.ENV_FAILURE
