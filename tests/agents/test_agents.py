"""Context rules, sessions, and the default loop: which ids are prompts, which were sampled, and how an episode ends."""

from __future__ import annotations

import asyncio
import dataclasses
import threading

import letters
import numpy as np
import pytest
from letters import BUDGET, ROW, TOKENIZER, ScriptedEnv, observed, play
from schedules import assert_exact, sampled

from agentr1_jax.agents.boundary import BoundaryError
from agentr1_jax.agents.loop import FINAL_REQUEST, LOOP_CHARACTERS
from agentr1_jax.agents.session import Completion, Identity, ScriptedSession, Session
from agentr1_jax.envs.base import Observation
from agentr1_jax.trajectory import Outcome

OPENING = TOKENIZER.encode_template("<|im_start|>user\nwho?<|im_end|>\n<|im_start|>assistant\n")
STOP = TOKENIZER.stop_id
WORDS = ["look", "and", "look", "again", "me"]
SEEN = ["a dog", "the cat", "a bird", "a fish"]


def check(trajectory, outcome, steps, final):
    """What holds of every episode, and how this one ended."""
    assert trajectory.outcome is outcome and len(trajectory.steps) == steps
    assert (None if trajectory.final_prompt_ids is None else trajectory.final_prompt_ids.tolist()) == final
    for t, step in enumerate(trajectory.steps):
        assert step.state_key == f"s{t}"
        assert len(step.response_ids) <= BUDGET["response_tokens"]
        assert step.response_ids.dtype == step.prompt_ids.dtype == np.int32
        assert step.logprobs.tolist() == [0.0] * len(step.response_ids)


def ids_after(trajectory, t=-1):
    """Prompt + response of a step, as a list."""
    step = trajectory.steps[t]
    return [*step.prompt_ids.tolist(), *step.response_ids.tolist()]


def test_an_answered_question_is_recorded_as_it_happened():
    env = ScriptedEnv(SEEN, end=3, outcome=Outcome.ANSWERED)
    t = play(WORDS, env)
    check(t, Outcome.ANSWERED, 3, None)
    assert [s.reward for s in t.steps] == [1.0, 2.0, 3.0]
    assert [s.reward_parts for s in t.steps] == [{"part": 1.0}, {"part": 2.0}, {"part": 3.0}]
    assert [s.observation for s in t.steps] == [*SEEN[:2], ""]
    assert [s.info for s in t.steps] == [{"n": n, "finish_reason": "stop"} for n in (1, 2, 3)]
    assert [s.action_key for s in t.steps] == WORDS[:3]  # This environment leaves it to the loop.
    assert t.steps[1].tool_calls == ({"name": "look", "arguments": {"n": 2}},)
    assert {s.context_rule for s in t.steps} == {"append"}
    assert [a.text for a in env.actions] == WORDS[:3]
    assert [(a.truncated, a.final) for a in env.actions] == [(False, False)] * 3
    assert t.metrics == {"em": 1.0}
    assert t.row == {"id": "letters/0", "question": "who?", "answers": ["me"], "kind": "short"}
    assert (t.uid, t.group, t.sample, t.task, t.seed) == ("u", 0, 0, "letters", 7)


def test_fault_11_only_sampled_ids_are_response_ids():
    t = play(WORDS, ScriptedEnv(SEEN, end=4))
    prompt = OPENING
    for i, step in enumerate(t.steps):
        assert step.prompt_ids.tolist() == prompt
        assert step.response_ids.tolist() == [*TOKENIZER.encode_data(WORDS[i]), STOP]
        prompt = ids_after(t, i) + observed(SEEN[i])
    check(t, Outcome.ENV_DONE, 4, None)


def test_a_window_keeps_the_opening_and_the_last_turns():
    t = play(WORDS, ScriptedEnv(SEEN), rule="window(2)")
    turns = [s.response_ids.tolist() + observed(seen) for s, seen in zip(t.steps, SEEN, strict=True)]
    prompts = [OPENING + sum(turns[max(0, i - 2) : i], []) for i in range(5)]
    assert [s.prompt_ids.tolist() for s in t.steps] == prompts[:4]
    check(t, Outcome.MAX_STEPS, 4, prompts[4])
    assert {s.context_rule for s in t.steps} == {"window(2)"}


def test_out_of_steps_and_of_context_the_last_state_that_fits_stands_for_the_future():
    env = ScriptedEnv(SEEN)
    whole = play(WORDS, env, max_steps=2)
    check(whole, Outcome.MAX_STEPS, 2, ids_after(whole) + observed(SEEN[1]))
    assert whole.metrics == {"em": 0.0} and [a.final for a in env.actions] == [False, True]
    room = len(whole.final_prompt_ids)
    fitting = play(WORDS, ScriptedEnv(SEEN), max_steps=2, context_tokens=room)
    check(fitting, Outcome.MAX_STEPS, 2, whole.final_prompt_ids.tolist())
    tight = play(WORDS, ScriptedEnv(SEEN), max_steps=2, context_tokens=room - 1)
    check(tight, Outcome.MAX_STEPS, 2, ids_after(whole))


def test_a_prompt_without_room_for_a_response_is_a_context_overflow():
    whole = play(WORDS, ScriptedEnv(SEEN))
    third = len(whole.steps[2].prompt_ids)
    t = play(WORDS, ScriptedEnv(SEEN), context_tokens=third)
    check(t, Outcome.CONTEXT_OVERFLOW, 2, ids_after(whole, 1))
    assert t.metrics == {"em": 0.0} and t.row["question"] == "who?"
    one_more = play(WORDS, ScriptedEnv(SEEN), context_tokens=third + 1)
    check(one_more, Outcome.RESPONSE_TRUNCATED, 3, ids_after(one_more))
    assert len(one_more.steps[2].response_ids) == 1
    assert all(len(ids_after(one_more, i)) <= third + 1 for i in range(3))
    check(play(WORDS, ScriptedEnv(SEEN), context_tokens=len(OPENING)), Outcome.CONTEXT_OVERFLOW, 0, None)


def test_sampled_and_observed_tokens_of_a_trajectory_are_limited():
    whole = play(WORDS, ScriptedEnv(SEEN))
    spent = len(whole.steps[2].prompt_ids) - len(OPENING)
    t = play(WORDS, ScriptedEnv(SEEN), trajectory_tokens=spent)
    check(t, Outcome.CONTEXT_OVERFLOW, 2, ids_after(whole, 1))
    one_more = play(WORDS, ScriptedEnv(SEEN), trajectory_tokens=spent + 1)
    assert len(one_more.steps) == 3 and len(one_more.steps[2].response_ids) == 1
    # A window forgets, the budget does not.
    assert len(play(WORDS, ScriptedEnv(SEEN), rule="window(1)", trajectory_tokens=spent).steps) == 2


LONG = "a long way to say nothing"


def test_a_cut_response_ends_the_trajectory_at_its_last_token():
    env = ScriptedEnv(SEEN)
    t = play(["look", LONG], env)
    check(t, Outcome.RESPONSE_TRUNCATED, 2, ids_after(t))
    assert t.steps[1].response_ids.tolist() == TOKENIZER.encode_data(LONG)[:12]
    assert [s.info["finish_reason"] for s in t.steps] == ["stop", "length"]
    assert env.actions[1].truncated and env.actions[1].text == TOKENIZER.decode(t.steps[1].response_ids)
    assert t.metrics == {"em": 0.0}


def test_a_response_that_stops_with_its_last_token_is_not_cut():
    word = "xyzxyzxyzxy"
    t = play([word], ScriptedEnv(SEEN, end=1))
    assert t.steps[0].response_ids.tolist() == [*TOKENIZER.encode_data(word), STOP]
    check(t, Outcome.ENV_DONE, 1, None)
    # An answer in a truncated response counts.
    check(play([LONG], ScriptedEnv(SEEN, end=1, outcome=Outcome.ANSWERED)), Outcome.ANSWERED, 1, None)


def test_fault_2_the_end_of_turn_of_a_cut_response_is_glue_and_not_sampled():
    env = ScriptedEnv(SEEN, end=3, outcome=Outcome.ANSWERED)
    t = play(["look", LONG, "me"], env, on_truncated_response="continue")
    check(t, Outcome.ANSWERED, 3, None)
    assert STOP not in t.steps[1].response_ids and len(t.steps[1].response_ids) == len(t.steps[1].logprobs) == 12
    assert t.steps[2].prompt_ids.tolist() == [*ids_after(t, 1), STOP, *observed(SEEN[1])]
    assert observed(SEEN[1], stopped=False) == [STOP, *observed(SEEN[1])]
    assert [a.truncated for a in env.actions] == [False, True, False]


def test_an_environment_may_cut_an_episode():
    env = ScriptedEnv(SEEN, end=2, terminated=False, truncated=True, outcome=Outcome.TIME_LIMIT)
    t = play(WORDS, env)
    check(t, Outcome.TIME_LIMIT, 2, ids_after(t))


def test_a_long_observation_is_cut_with_a_visible_marker_and_ids_are_appended_as_they_are():
    long = " ".join(["birds"] * 30)
    t = play(WORDS, ScriptedEnv([long]), max_steps=2)
    assert t.steps[0].observation == long
    new = t.steps[1].prompt_ids[len(ids_after(t, 0)) :].tolist()
    assert new == observed(long)
    glue = len(observed(""))
    assert len(new) - glue <= BUDGET["observation_tokens"] < len(TOKENIZER.encode_data(long))
    assert TOKENIZER.decode(new).endswith(" [cut]<|im_end|>\n<|im_start|>assistant\n")
    ids = np.asarray([5, 9, 60, 0, 1], np.int32)
    t = play(WORDS, ScriptedEnv([ids]), max_steps=2)
    assert t.steps[1].prompt_ids.tolist() == [*ids_after(t, 0), *ids.tolist()]


def test_several_results_are_cut_one_by_one_and_recorded_together():
    class Two(ScriptedEnv):
        async def step(self, action):
            later = Observation(texts=["a dog", " ".join(["birds"] * 30), "the cat"], state_key="s1")
            return dataclasses.replace(await super().step(action), observation=later)

    t = play(WORDS, Two(SEEN), max_steps=2, final_answer_step=True, observation_tokens=60, context_tokens=900)
    new = t.steps[1].prompt_ids[len(ids_after(t, 0)) :].tolist()
    assert new == letters.CHAT.render_observation(["a dog", "birds " * 29 + "birds", "the cat"], max_tokens=60).tolist()
    assert TOKENIZER.decode(new).count(" [cut]") == 1 and "the cat" in TOKENIZER.decode(new)
    assert t.steps[0].observation.startswith("a dog\nbirds") and t.steps[0].observation.endswith("\nthe cat")
    asked = TOKENIZER.decode(t.steps[2].prompt_ids[len(ids_after(t, 1)) :])
    assert asked.count(TOKENIZER.decode(TOKENIZER.encode_data(FINAL_REQUEST))) == 1


class Long(ScriptedEnv):
    """Its opening, its tools and its observations, one or several texts, are long, and so is the evidence."""

    def __init__(self, part, **changes):
        super().__init__(SEEN)
        self.part, self.changes = part, changes

    async def reset(self, row, seed):
        opening = await super().reset(row, seed)
        return dataclasses.replace(opening, **self.changes) if self.part == "opening" else opening

    async def step(self, action):
        transition = await super().step(action)
        changes = {} if self.part == "opening" else self.changes
        return dataclasses.replace(transition, observation=dataclasses.replace(transition.observation, **changes))


LONG = "a dog " * LOOP_CHARACTERS


@pytest.mark.parametrize(
    ("part", "changes", "rule"),
    [
        ("opening", {"messages": [{"role": "user", "content": LONG}]}, "append"),
        ("opening", {"tools": [{"type": "function", "function": {"name": LONG}}]}, "append"),
        ("text", {"text": LONG}, "append"),
        ("texts", {"text": None, "texts": ["a"] * LOOP_CHARACTERS}, "append"),
        ("evidence", {"evidence": LONG}, "evidence"),
    ],
)
def test_long_texts_are_tokenised_in_a_thread(monkeypatch, part, changes, rule):
    """The event loop is that of all trajectories."""
    encoded = {True: 0, False: 0}

    def encode(text):
        encoded[threading.current_thread() is threading.main_thread()] += len(text)
        return letters.Letters.encode_data(TOKENIZER, text)

    monkeypatch.setattr(TOKENIZER, "encode_data", encode, raising=False)
    wide = {"context_tokens": 100_000, "trajectory_tokens": 200_000}
    play(WORDS, Long("text", evidence="a dog"), rule, max_steps=2, **wide)
    assert encoded[False] == 0
    encoded[True] = 0
    play(WORDS, Long(part, **{"evidence": "a dog"} | changes), rule, max_steps=2, **wide)
    assert encoded[True] < LOOP_CHARACTERS < encoded[False]


def test_of_a_prompt_no_more_is_tokenised_than_could_fit(monkeypatch):
    encoded = []
    encode = lambda text: encoded.append(text) or letters.Letters.encode_data(TOKENIZER, text)  # noqa: E731
    monkeypatch.setattr(TOKENIZER, "encode_data", encode, raising=False)
    many = [{"role": "user", "content": LONG}] * 100
    assert play(WORDS, Long("opening", messages=many)).outcome is Outcome.CONTEXT_OVERFLOW
    assert play(WORDS, Long("text", text=None, texts=["a dog"] * 10_000)).outcome is Outcome.CONTEXT_OVERFLOW
    assert sum(map(len, encoded)) < 10 * 64 * BUDGET["context_tokens"]
    tool = {"type": "function", "function": {"name": LONG}}
    with pytest.raises(ValueError, match=r"tools .* do not fit budget\.context_tokens"):
        play(WORDS, Long("opening", tools=[tool]))


def test_an_observation_holds_one_thing():
    for content in ({}, {"text": "a", "texts": ["b"]}, {"texts": []}, {"texts": "ab"}):
        with pytest.raises(ValueError, match="Observation"):
            Observation(**content)


def test_the_first_observation_must_be_a_prompt():
    class Mute(ScriptedEnv):
        async def reset(self, row, seed):
            return Observation(text="hello")

    with pytest.raises(ValueError, match="must hold messages or token ids"):
        play(WORDS, Mute(SEEN))

    class Numbers(ScriptedEnv):
        async def reset(self, row, seed):
            return Observation(token_ids=np.asarray([7, 8]), state_key="s0")

    assert play(WORDS, Numbers(SEEN)).steps[0].prompt_ids.tolist() == [7, 8]


def test_the_final_answer_is_asked_for_in_one_step_more():
    limit = 60
    env = ScriptedEnv(SEEN)
    t = play(WORDS, env, max_steps=2, final_answer_step=True, observation_tokens=limit)
    request = TOKENIZER.encode_data(FINAL_REQUEST)

    def asks(step):
        ids = step.prompt_ids.tolist()
        return any(ids[i : i + len(request)] == request for i in range(len(ids)))

    assert [asks(step) for step in t.steps] == [False, False, True]
    assert t.steps[1].observation == SEEN[1]
    assert [a.final for a in env.actions] == [False, False, True]
    check(t, Outcome.MAX_STEPS, 3, ids_after(t) + observed(SEEN[2], limit=limit))
    only = play(WORDS, ScriptedEnv(SEEN), max_steps=1, final_answer_step=True, observation_tokens=limit)
    assert [asks(step) for step in only.steps] == [False, True]
    crowded = play(WORDS, ScriptedEnv(["birds " * 30]), max_steps=1, final_answer_step=True, observation_tokens=limit)
    assert asks(crowded.steps[1])
    assert len(crowded.steps[1].prompt_ids) - len(ids_after(crowded, 0)) <= limit + len(observed(""))


class Echo(Session):
    """A session that answers at once."""

    async def respond(self, prompt_ids, max_tokens, stop):
        await asyncio.sleep(0)
        return Completion(np.asarray([4], np.int32), np.asarray([-1.0], np.float32), "stop", policy_version=4)


def session():
    return Echo(Identity("train/0/1", 0, 1, "t", 3))


def open_session():
    s = session()
    asyncio.run(s.generate(np.asarray([1, 2]), 3))
    return s


def test_a_session_keeps_steps_in_order_with_their_policy_version():
    s = session()
    prompt = np.asarray([1, 2])
    asyncio.run(s.generate(prompt, 3))
    prompt[:] = 9
    facts = {"reward_parts": {"a": 0.5}, "observation": "seen", "tool_calls": [{"name": "x"}], "info": {"i": 1}}
    s.record(0.5, **facts, state_key="key", context_rule="window(2)")
    asyncio.run(s.generate([3], 3))
    s.record(None)
    s.finish(Outcome.STALE, [3, 4], {"em": 0.0}, {"q": 1})
    t = s.trajectory()
    assert [step.prompt_ids.tolist() for step in t.steps] == [[1, 2], [3]]
    assert [step.reward for step in t.steps] == [0.5, None]
    assert {step.policy_version for step in t.steps} == {4}
    assert (t.final_prompt_ids.tolist(), t.metrics, t.info) == ([3, 4], {"em": 0.0}, {"q": 1})
    assert s.seed == t.seed == 3


def test_calls_out_of_order_are_errors():
    with pytest.raises(RuntimeError, match=r"train/0/1: record\(\) without generate"):
        session().record(1.0)
    with pytest.raises(TypeError, match="a step has no 'rewards'; it has reward, "):
        open_session().record(1.0, rewards=[])
    with pytest.raises(RuntimeError, match=r"train/0/1: generate\(\) before record"):
        asyncio.run(open_session().generate(np.asarray([1]), 3))
    with pytest.raises(RuntimeError, match=r"train/0/1: finish\(\) before record\(\), which would lose a step"):
        open_session().finish(Outcome.ANSWERED)
    with pytest.raises(RuntimeError, match=r"train/0/1: the agent returned without finish"):
        session().trajectory()
    done = session()
    done.finish(Outcome.ANSWERED)
    with pytest.raises(RuntimeError, match=r"train/0/1: finish\(\) was called twice"):
        done.finish(Outcome.ANSWERED)
    with pytest.raises(RuntimeError, match=r"after finish"):
        asyncio.run(done.generate(np.asarray([1]), 3))

    async def two(s):
        return await asyncio.gather(s.generate([1], 3), s.generate([1], 3), return_exceptions=True)

    assert [type(r) for r in asyncio.run(two(session()))] == [Completion, RuntimeError]


@pytest.mark.parametrize("ids", [[2**40 + 5], np.asarray([2**40 + 5]), [[1]], ["a"], [0.5], 1])
def test_prompts_that_are_no_token_ids_are_refused(ids):
    with pytest.raises(BoundaryError, match="prompt_ids"):
        asyncio.run(session().generate(ids, 3))
    with pytest.raises(BoundaryError, match="final_prompt_ids"):
        session().finish(Outcome.STALE, ids)


def test_fault_9_a_broken_off_trajectory_keeps_its_steps_and_its_error():
    s = open_session()
    s.record(1.0)
    asyncio.run(s.generate([5], 1))
    t = s.fail(Outcome.ENV_FAILURE, OSError("disk full"))
    assert t.outcome is Outcome.ENV_FAILURE and [step.reward for step in t.steps] == [1.0, None]
    assert t.steps[1].prompt_ids.tolist() == [5] and len(t.steps[1].response_ids)
    assert t.info == {"error": "OSError: disk full"}


def test_an_expert_sees_each_observation_and_its_texts_are_template_text():
    seen = []

    def expert(observation):
        seen.append(observation)
        return "<|im_start|> is an id"

    s = ScriptedSession(Identity("u", 0, 0, "letters", 7), expert, TOKENIZER)
    asyncio.run(letters.loop(lambda: ScriptedEnv(SEEN, end=3), response_tokens=30).run(s, ROW))
    assert seen == [None, *SEEN[:2]]
    expected = [0, *TOKENIZER.encode_data(" is an id"), STOP]
    assert all(step.response_ids.tolist() == expected for step in s.trajectory().steps)


def test_fault_1_and_fault_2_prompts_go_on_from_the_sampled_ids():
    """Each prompt is the one before, the very ids sampled, and the rendered observation."""
    agent = letters.loop(
        lambda: ScriptedEnv(["the cab", "abc"]),
        max_steps=3,
        response_tokens=9,
        context_tokens=128,
        on_truncated_response="continue",
    )
    out = sampled([ROW] * 12, agent=agent)
    assert_exact(out)
    respelled = stopped = 0
    for t in out:
        prompts = [*(s.prompt_ids for s in t.steps), t.final_prompt_ids]
        for i, (step, following) in enumerate(zip(t.steps, prompts[1:], strict=True)):
            response = step.response_ids.tolist()
            stops = response[-1] == STOP
            assert following.tolist() == [*ids_after(t, i), *observed(step.observation, stops)]
            respelled += TOKENIZER.encode_template(TOKENIZER.decode(response)) != response
            stopped += stops
    assert respelled > 0 and 0 < stopped < sum(len(t.steps) for t in out)
