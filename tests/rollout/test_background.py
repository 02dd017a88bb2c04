"""The engine in a thread of its own: work from other threads, a change of policy between responses, its end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from schedules import MANY, POLICY, Planned, all_ids, assert_exact, engine_of, episodes, planned, sampled

from agentr1_jax.agents.session import Identity
from agentr1_jax.policy.attention import grouped_attention
from agentr1_jax.policy.decoder import Decoder, output_logits
from agentr1_jax.rollout import runner
from agentr1_jax.rollout.config import SamplingConfig
from agentr1_jax.rollout.runner import BackgroundEngine, GroupBatch, TaskGroup, start_batch, wait
from agentr1_jax.trajectory import Outcome


def params_of(version: int):
    return jax.device_put(tiny.decoder_params(POLICY, version), NamedSharding(tiny.mesh(1), P()))


def begin(background, rows, agent=None):
    """Starts a group of one trajectory for each row, named and seeded as `schedules.sampled` does."""
    groups = [TaskGroup(row, [Identity(f"t/{i}", i, 0, "planned", 1000 + i)]) for i, row in enumerate(rows)]
    return start_batch(background, agent or Planned(), GroupBatch(len(groups), groups), sampling=SamplingConfig(1.0))


def trajectories(future):
    return sorted((t for group in future.result(60) for t in group), key=lambda t: t.group)


def versions_of(trajectories):
    return {s.policy_version for t in trajectories for s in t.steps}


def test_it_samples_what_the_foreground_samples_and_adopts_a_policy_also_while_nothing_is_asked_for():
    engine, params = engine_of(3)
    with BackgroundEngine(engine, params, version=4) as background:
        first, again = begin(background, MANY), begin(background, MANY[:2])
        out = trajectories(first)
        assert all_ids(trajectories(again)) == all_ids(out)[:2]
        background.adopt(params_of(5), 5)
        adopted = trajectories(begin(background, MANY[:2]))
        total, thread = engine.dispatcher.call(lambda a, b: (a + b, threading.current_thread().name), 1, 2)
    assert versions_of(out) == {4} and versions_of(adopted) == {5}
    assert all_ids(out) == all_ids(sampled(MANY))
    assert_exact(adopted, version=5, seed=5)
    assert total == 3 and thread.startswith("dispatch")
    assert not [thread for thread in threading.enumerate() if thread.name == "rollouts"]


@flax.struct.dataclass
class GrowingMemory:
    """Memory of one sequence that is fed token by token: all keys and values so far, [layers, length, heads, dim]."""

    at: jax.Array

    def attend(self, query, key, value, layer, state):
        keys, values = (x.at[layer, self.at].set(new[0, 0]) for x, new in zip(state, (key, value), strict=True))
        visible = (jnp.arange(keys.shape[1]) <= self.at)[None, None]
        return grouped_attention(query, keys[layer][None], values[layer][None], visible), (keys, values)


@jax.jit
def feed(params, token, at, state):
    hidden, state = Decoder(POLICY).apply(
        {"params": params}, token[None, None], at[None, None], GrowingMemory(at), state
    )
    return output_logits(params, hidden[0, 0]), state


def mixed_logprobs(steps):
    """Log-probs of the responses of steps whose contexts append, each token fed once, by the policy of its time."""
    empty = jnp.zeros((POLICY.layers, 128, POLICY.kv_heads, POLICY.head_dim))
    at, state, out = 0, (empty, empty), []
    for step in steps:
        versions = np.repeat(list(step.tokens_by_version()), list(step.tokens_by_version().values()))
        context = np.concatenate([step.prompt_ids, step.response_ids])
        out.append([])
        for i, version in enumerate(versions):
            while at < len(step.prompt_ids) + i:
                logits, state = feed(params_of(int(version)), context[at], jnp.int32(at), state)
                at += 1
            out[-1].append(float(jax.nn.log_softmax(logits)[step.response_ids[i]]))
    return out


class AdoptingLater(Planned):
    """The short one of two trajectories has the engine adopt a policy after its first step."""

    def __init__(self, background):
        self.background = background

    async def run(self, session, row):
        if row.get("adopts"):
            done = await session.generate(np.asarray(row["opening"], np.int32), 2, ())
            session.record(0.0, info={"reason": done.finish_reason})
            self.background.engine.adopt(params_of(1), 1)
            session.finish(Outcome.ENV_DONE)
        else:
            await super().run(session, row)


@pytest.mark.parametrize("cache", [{}, {"cache": "pages", "page_tokens": 8}, {"fetch_lag": 1}])
def test_in_flight_a_response_goes_on_with_new_weights_and_its_cache(cache):
    engine, params = engine_of(3, adopt="in_flight", **cache)
    long = planned(list(range(20)), {"max_tokens": 40, "observation": [1, 2]}, {"max_tokens": 5})
    rows = [long, {"opening": [5], "adopts": True}]
    with BackgroundEngine(engine, params, version=0) as background:
        undisturbed, _ = trajectories(begin(background, [long, planned([5], {"max_tokens": 2})]))
        engine.reset_counters()
        out, _ = trajectories(begin(background, rows, AdoptingLater(background)))
        computed = engine.counters.prefill_tokens
        later, _ = trajectories(begin(background, [long, planned([5], {})]))
    first, second = out.steps
    ((at, version),) = first.version_changes
    assert first.policy_version == 0 and version == 1 and 0 < at < 40 and second.policy_version == 1
    before = undisturbed.steps[0]
    assert first.response_ids[:at].tolist() == before.response_ids[:at].tolist()
    np.testing.assert_array_equal(first.logprobs[:at], before.logprobs[:at])
    assert first.response_ids.tolist() != before.response_ids.tolist()
    for step, expected in zip(out.steps, mixed_logprobs(out.steps), strict=True):
        np.testing.assert_allclose(step.logprobs, expected, atol=1e-4)
    # The prompt was in the cache from before. Of the second step only the observation and the token never fed are new.
    assert computed <= 8 + 3
    assert not later.steps[0].version_changes
    assert_exact([later], version=1, seed=1)


class Adopting(Planned):
    """Has the engine adopt the next policy in the middle of an episode whose row says so."""

    def __init__(self, background, versions):
        self.background, self.versions = background, iter(versions)

    async def run(self, session, row):
        if row.get("adopts"):
            version = next(self.versions, None)
            if version is not None:
                self.background.engine.adopt(params_of(version), version)
        await super().run(session, row)


FEW_PAGES = {"swap_slots": 6, "cache": "pages", "page_tokens": 8, "pages": 20, "fetch_lag": 1}


@pytest.mark.parametrize("cache", [{}, FEW_PAGES])
@settings(max_examples=12)
@given(rows=st.lists(st.tuples(episodes([None, 0.0, 0.002]), st.booleans()), min_size=1, max_size=8))
def test_each_response_has_one_policy_the_one_that_its_step_names(cache, rows):
    engine, params = engine_of(3, **cache)
    rows = [row | {"adopts": adopts} for row, adopts in rows]
    with BackgroundEngine(engine, params, version=0) as background:
        out = trajectories(begin(background, rows, Adopting(background, (1, 2, 3))))
    assert versions_of(out) <= {0, 1, 2, 3} and not any(s.version_changes for t in out for s in t.steps)
    for version in versions_of(out):
        assert_exact(out, version=version, seed=version)
    for t in out:
        seen = [s.policy_version for s in t.steps]
        assert seen == sorted(seen)


def test_who_waits_at_its_end_is_told_and_the_engine_is_free():
    engine, params = engine_of(3)
    background = BackgroundEngine(engine, params, version=0)
    slow = begin(background, [planned([1], {"delay": 60.0}, {})])
    background.close()
    with pytest.raises(concurrent.futures.CancelledError, match="the engine was closed"):
        slow.result(10)
    with pytest.raises(RuntimeError, match="the engine is closed"):
        begin(background, MANY)
    with pytest.raises(RuntimeError, match="the engine is closed"):
        background.adopt(params, 1)
    background.close()
    assert_exact(sampled(MANY[:3]))


class Blocking(Planned):
    """Blocks the thread of the event loop, if its row says so, until `hold` is set."""

    def __init__(self):
        self.hold, self.blocks = threading.Event(), threading.Event()

    async def run(self, session, row):
        if row.get("blocks"):
            self.blocks.set()
            self.hold.wait()
        await super().run(session, row)


def test_user_code_that_blocks_the_event_loop_is_left_behind_and_named(monkeypatch, caplog):
    monkeypatch.setattr(runner, "CLOSE_SECONDS", 0.2)
    engine, params = engine_of(3)
    agent = Blocking()
    background = BackgroundEngine(engine, params, version=0)
    work = begin(background, [planned([1], {}) | {"blocks": True}], agent)
    assert agent.blocks.wait(60)
    background.close()
    assert f'{__file__}", line' in caplog.text and "in run\n    self.hold.wait()" in caplog.text
    agent.hold.set()  # It was slow only.
    with pytest.raises(concurrent.futures.CancelledError):
        work.result(60)
    background.close()
    assert_exact(sampled(MANY[:3]))


class Cancelling(Planned):
    """Cancels tasks of the event loop that are not its own: all of them, or one kind."""

    async def run(self, session, row):
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            if row["cancels"] in ("all", task.get_coro().__qualname__.rpartition(".")[2]):
                task.cancel()
        await asyncio.sleep(60)


@pytest.mark.parametrize("cancels", ["all", "run", "sample_group", "_episode", "run_cycles"])
def test_who_cancels_tasks_of_others_ends_the_work_and_is_told(cancels):
    engine, params = engine_of(3)
    with BackgroundEngine(engine, params, version=0) as background:
        work = begin(background, [planned([1], {}) | {"cancels": cancels}], Cancelling())
        with pytest.raises(RuntimeError, match="an environment, tool or agent has cancelled"):
            work.result(10)
    assert_exact(sampled(MANY[:3]))


def test_what_breaks_the_engine_is_raised_where_its_work_is_awaited(monkeypatch):
    engine, params = engine_of(3)

    def broken(*_):
        raise MemoryError("no device memory")

    with BackgroundEngine(engine, params, version=0) as background, monkeypatch.context() as patch:
        patch.setattr(engine.device, "decode", broken)
        with pytest.raises(MemoryError, match="no device memory"):
            begin(background, MANY).result(60)
    with monkeypatch.context() as patch:
        patch.setattr(engine.device, "open", broken)
        with pytest.raises(MemoryError, match="no device memory"):
            BackgroundEngine(engine, params, version=0)
    assert_exact(sampled(MANY[:3]))


def test_what_ends_between_two_polls_is_no_error():
    """It must not be taken for work that ran out of time."""
    future, asked = concurrent.futures.Future(), []

    def stop():
        asked.append(True)
        if len(asked) == 2:
            future.set_result(5)
        return False

    assert wait(future, stop) == 5
    failed = concurrent.futures.Future()
    failed.set_exception(TimeoutError("of the work itself"))
    with pytest.raises(TimeoutError, match="itself"):
        wait(failed, bool)
