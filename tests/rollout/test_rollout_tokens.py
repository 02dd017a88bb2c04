"""Prompts go on from the very ids that were sampled."""

from __future__ import annotations

import dataclasses

import jax
import letters
import tiny
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from schedules import assert_exact, sampled

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
from agentr1_jax.trajectory import Budget, Outcome


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
