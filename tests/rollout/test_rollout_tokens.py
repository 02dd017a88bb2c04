"""Running many trajectories: whose tokens are whose, and what an error ends."""

from __future__ import annotations

import asyncio
import dataclasses

import jax
import letters
import numpy as np
import pytest
import tiny
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from schedules import MANY, Planned, all_ids, assert_exact, engine_of, planned, run_work, sampled

from agentr1_jax.agents.context import context_rule
from agentr1_jax.agents.loop import EnvLoop
from agentr1_jax.agents.session import Identity
from agentr1_jax.rollout.config import EngineConfig, SamplingConfig
from agentr1_jax.rollout.engine import Engine
from agentr1_jax.rollout.runner import TaskGroup, run_groups
from agentr1_jax.tasks import make_task
from agentr1_jax.text.chat import chat_format
from agentr1_jax.text.sentencepiece import train_sentencepiece
from agentr1_jax.text.tokenizer import load_tokenizer
from agentr1_jax.trajectory import POLICIES, Budget, Outcome


class Unreliable(Planned):
    """Fails as its row says, anywhere in an episode; else does what is planned."""

    async def run(self, session, row):
        fault = row.get("fault")
        if fault == "at once":
            raise OSError("no environment")
        if fault == "bad prompt":
            await session.generate(np.asarray([1, 99], np.int32), 4)
        if fault == "after a step":
            await session.generate(np.asarray(row["opening"], np.int32), 4)
            session.record(1.0)
            await asyncio.sleep(0.001)
            await session.generate(np.asarray(row["opening"], np.int32), 4)
            raise KeyError("tool")
        if fault == "impatient":
            async with asyncio.timeout(0):
                await session.generate(np.asarray([60, 61, 62], np.int32), 12)
        if fault == "impatient, then again":
            try:
                async with asyncio.timeout(0.002):
                    await session.generate(np.asarray(row["opening"] * 9, np.int32), 12)
            except TimeoutError:
                pass
            else:
                session.record(0.0)
        if fault != "unfinished":
            await super().run(session, row)


FAULTS = {
    "at once": "OSError: no environment",
    "bad prompt": "RequestError: prompt ids must lie in",
    "after a step": "KeyError: 'tool'",
    "impatient": "TimeoutError",
    "unfinished": "RuntimeError: t/4: the agent returned without finish",
}


@pytest.mark.parametrize("slots", [1, 3])
def test_fault_9_an_exception_ends_its_own_trajectory_only(slots, caplog):
    rows = list(MANY)
    for i, fault in enumerate(FAULTS):
        rows[i] = {**rows[i], "fault": fault}
    out = sampled(rows, slots, agent=Unreliable())
    healthy = sampled(MANY, slots)
    for t, fault in zip(out, FAULTS, strict=False):
        blamed = Outcome.ENGINE_FAILURE if fault == "bad prompt" else Outcome.ENV_FAILURE
        assert t.outcome is blamed and POLICIES[t.outcome].training == "drop"
        assert t.info["error"].startswith(FAULTS[fault]) and t.uid in caplog.text
        assert len(t.steps) == (fault == "after a step")
    assert all_ids(out[5:]) == all_ids(healthy[5:])
    assert_exact([t for t in out if t.steps])


@pytest.mark.parametrize("slots", [1, 3])
def test_a_request_nobody_waits_for_leaves_no_trace(slots):
    rows = [{**row, "fault": "impatient, then again"} if i % 2 else row for i, row in enumerate(MANY)]
    out = sampled(rows, slots, agent=Unreliable())
    assert all(t.outcome is Outcome.ENV_DONE for t in out)
    assert_exact(out)


def test_a_slot_given_back_with_its_request_serves_the_next_trajectory():
    # The forgotten prompt is the shorter one, so that it would be written over the other.
    rows = [planned(list(range(12)), {}, {}) | ({"fault": "impatient"} if i % 2 == 0 else {}) for i in range(6)]
    out = sampled(rows, slots=1, agent=Unreliable())
    assert [t.outcome for t in out] == [Outcome.ENV_FAILURE, Outcome.ENV_DONE] * 3
    assert_exact(out[1::2])


def test_what_is_no_agents_fault_is_raised_and_the_engine_stays_usable():
    engine, params = engine_of(3)

    async def broken():
        await engine.acquire()
        raise SystemError("of the caller")

    async def waiting():
        await asyncio.sleep(60)

    with pytest.raises(SystemError, match="of the caller"):
        run_work(engine, params, [broken(), waiting()])
    assert_exact(sampled(MANY[:4]))


def test_each_finished_trajectory_is_reported_once():
    engine, params = engine_of(3)
    seen = []
    groups = [
        TaskGroup(MANY[i], [Identity(f"t/{i}/{k}", i, k, "planned", 10 * i + k) for k in range(2)]) for i in range(3)
    ]
    out = run_groups(
        engine, params, Planned(), groups, sampling=SamplingConfig(), policy_version=6, on_finish=seen.append
    )
    out = [t for group in sorted(out, key=lambda group: group[0].group) for t in group]
    assert [(t.group, t.sample) for t in out] == [(g, k) for g in range(3) for k in range(2)]
    assert sorted(t.uid for t in seen) == [t.uid for t in out]
    assert {s.policy_version for t in out for s in t.steps} == {6}
    assert all_ids(out)[0] != all_ids(out)[1]


def test_a_process_without_groups_returns_at_once():
    assert sampled([]) == []


def assert_ids_only_grow(trajectories, tokenizer, chat, limit):
    """Each prompt is the one before, the very ids sampled, and the rendered observation.

    Returns:
      how many responses would be other ids if their text were encoded again, and how many stopped.
    """
    respelled = stopped = 0
    for t in trajectories:
        prompts = [s.prompt_ids.tolist() for s in t.steps]
        if t.outcome is Outcome.MAX_STEPS:
            prompts.append(t.final_prompt_ids.tolist())
        for step, following in zip(t.steps, prompts[1:], strict=False):
            response = step.response_ids.tolist()
            stops = response[-1] == tokenizer.stop_id
            observation = chat.render_observation(step.observation, "tool", stops, max_tokens=limit).tolist()
            assert following == [*step.prompt_ids.tolist(), *response, *observation]
            respelled += tokenizer.encode_template(tokenizer.decode(response)) != response
            stopped += stops
    return respelled, stopped


def test_fault_1_and_fault_2_prompts_go_on_from_the_sampled_ids():
    limit = letters.BUDGET["observation_tokens"]
    agent = letters.loop(
        lambda: letters.ScriptedEnv(["the cab", "abc"]),
        max_steps=3,
        response_tokens=9,
        context_tokens=128,
        on_truncated_response="continue",
    )
    out = sampled([letters.ROW] * 12, agent=agent)
    respelled, stopped = assert_ids_only_grow(out, letters.TOKENIZER, letters.CHAT, limit)
    assert respelled > 0 and 0 < stopped < sum(len(t.steps) for t in out)
    assert_exact(out)


def test_a_window_keeps_the_sampled_ids_too():
    agent = letters.loop(
        lambda: letters.ScriptedEnv(["the cab", "abc"]), rule="window(1)", max_steps=3, on_truncated_response="continue"
    )
    out = sampled([letters.ROW] * 6, agent=agent)
    for t in out:
        opening = t.steps[0].prompt_ids.tolist()
        for step, following in zip(t.steps, t.steps[1:], strict=False):
            response = step.response_ids.tolist()
            observation = letters.observed(step.observation, stopped=response[-1] == letters.TOKENIZER.stop_id)
            assert following.prompt_ids.tolist() == [*opening, *response, *observation]
    assert_exact(out)


def test_fault_1_in_hopworld_trained_ids_are_the_sampled_ids(tmp_path):
    task = make_task("hopworld")
    train_sentencepiece(task.texts(60), tmp_path / "hopworld.model", vocab_size=700)
    tokenizer = load_tokenizer(str(tmp_path / "hopworld.model"))
    chat = chat_format(tokenizer)
    policy = dataclasses.replace(tiny.POLICY, vocab_size=704)
    config = EngineConfig(
        slots=4,
        slot_tokens=256,
        decode_chunk=8,
        prefill_width=64,
        prefill_rows=(4,),
        attention_block=64,
        attention_group=1,
    )
    engine = Engine(policy, config, tiny.mesh())
    budget = Budget(
        max_steps=3,
        response_tokens=10,
        observation_tokens=24,
        context_tokens=256,
        trajectory_tokens=256,
        on_truncated_response="continue",
    )
    agent = EnvLoop(task.env, tokenizer, chat, context_rule("append"), budget)
    params = jax.device_put(tiny.decoder_params(policy), NamedSharding(tiny.mesh(), P()))
    groups = [
        TaskGroup(task.row("train", i), [Identity(f"t/{i}/{k}", i, k, "hopworld", 50 + 2 * i + k) for k in range(2)])
        for i in range(3)
    ]
    complete = run_groups(engine, params, agent, groups, sampling=SamplingConfig(), policy_version=0)
    out = [t for group in sorted(complete, key=lambda group: group[0].group) for t in group]
    assert {t.outcome for t in out} == {Outcome.MAX_STEPS}
    respelled, _ = assert_ids_only_grow(out, tokenizer, chat, limit=24)
    assert respelled > 0
    assert all(
        a.steps[0].prompt_ids.tolist() == b.steps[0].prompt_ids.tolist()
        for a, b in zip(out[::2], out[1::2], strict=True)
    )
    assert_exact(out, policy=policy, length=256)
