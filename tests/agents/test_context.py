"""Context rules beyond append and window: what each prompt holds, and the step in which a policy sums up."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from letters import BUDGET, CHAT, ROW, TOKENIZER, Letters, ScriptedEnv, loop, observed, play, run

from agentr1_jax.agents.context import RULES, History, Turn, context_rule, register
from agentr1_jax.agents.loop import FINAL_REQUEST
from agentr1_jax.credit.batch import flatten
from agentr1_jax.envs.base import SUMMARY_REQUEST
from agentr1_jax.trajectory import Outcome, common_prefix, observation_tokens

STOP = TOKENIZER.stop_id
OPENING = TOKENIZER.encode_template("<|im_start|>user\nwho?<|im_end|>\n<|im_start|>assistant\n")
SEEN = ["a dog", "the cat", "a bird", "a fish"]
WIDE = {"response_tokens": 80, "observation_tokens": 80, "context_tokens": 2000, "trajectory_tokens": 4000}
id_lists = st.lists(st.integers(0, 63), max_size=5)
turns_of_ids = st.lists(st.tuples(id_lists, id_lists, st.integers(0, 5)), max_size=6)
"""Responses, observations, and how much of the response is thinking."""


def ids(values):
    return np.asarray(values, np.int32)


def response_of(text):
    return [*TOKENIZER.encode_template(text), STOP]


@given(id_lists, turns_of_ids, st.integers(1, 6), st.integers(1, 60))
def test_rules_select_ids_and_join_them_in_order(opening, turns, k, tokens):
    history = History(ids(opening), [Turn(ids(r), ids(o), min(n, len(r))) for r, o, n in turns])

    def prompt(rule):
        found = context_rule(rule).next_prompt(history)
        assert found.dtype == np.int32
        return found.tolist()

    # Prompts with the last turns, the longest first.
    endings = [[*opening, *(i for r, o, _ in turns[first:] for i in r + o)] for first in range(len(turns) + 1)]
    assert prompt("append") == endings[0]
    assert prompt(f"window({k})") == endings[max(0, len(turns) - k)]
    fitting = [ending for ending in endings[: max(len(turns), 1)] if len(ending) <= tokens]
    assert prompt(f"token_budget({tokens})") == (fitting[0] if fitting else endings[max(len(turns) - 1, 0)])
    for rule, keep in (("strip_thinking", 0), (f"strip_thinking({k})", k)):
        slow = list(opening)
        for i, (response, observation, n) in enumerate(turns):
            slow += (response[n:] if len(turns) - i > keep else response) + observation
        assert prompt(rule) == slow


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("windows(2)", "unknown context rule 'windows'; choose one of append, evidence, .*, window"),
        ("window", r"write window\(k\), with whole numbers"),
        ("window(0)", "a window of 0 turns"),
        ("window(-1)", "'-1' is no whole number"),
        ("window(k=1, l=2)", r"write window\(k\)"),
        ("window(1, k=1)", r"write window\(k\)"),
        ("append(2)", "write append, with"),
        ("summary", r"needs a time: summary\(turns=3\)"),
    ],
)
def test_an_unknown_rule_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        context_rule(spec)


class Thinking(Letters):
    """Letters with a closing tag of thoughts that is one of several pieces of its text."""

    def decode(self, ids):
        return super().decode(ids).replace("q", "</think>")


def test_the_loop_finds_where_thinking_ends():
    agent = loop(lambda: ScriptedEnv(SEEN, end=3), "strip_thinking", **WIDE)
    first, second, third = run(dataclasses.replace(agent, tokenizer=Thinking()), ["abzqcd", "qme", "ing"]).steps
    assert first.response_ids.tolist() == response_of("abzqcd")
    assert second.prompt_ids.tolist() == [*OPENING, *response_of("cd"), *observed("a dog")]
    assert third.prompt_ids.tolist() == [*second.prompt_ids, *response_of("me"), *observed("the cat")]


class Showing(ScriptedEnv):
    """Says what it has shown; counts what it was asked to judge."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.judged = []

    async def step(self, action):
        transition = await super().step(action)
        if transition.observation is None:
            return transition
        shown = ". ".join(self.observations[: len(self.actions)])
        return dataclasses.replace(transition, observation=dataclasses.replace(transition.observation, evidence=shown))

    def judge_summary(self, text):
        self.judged.append(text)
        return {"summary": 0.5, "length": -0.25}


def test_evidence_is_data_in_an_opening_made_anew():
    t = play(["ab", "cd", "ing"], Showing(SEEN, end=3), "evidence", **WIDE)
    openings = [CHAT.render_opening([{"role": "user", "content": c}]).tolist() for c in ("who?", "who?\n\na dog")]
    assert [s.prompt_ids.tolist() for s in t.steps[:2]] == openings
    assert TOKENIZER.decode(t.steps[2].prompt_ids).startswith("<|im_start|>user\nwho?\n\na dog. the cat<|im_end|>")
    t = play(["ab", "cd"], Showing(["<|im_end|>", "so?"], end=2), "evidence", **WIDE)
    assert t.steps[1].prompt_ids.tolist().count(STOP) == t.steps[0].prompt_ids.tolist().count(STOP)
    t = play(["ab", "cd", "ing"], Showing(SEEN), "evidence", **WIDE | {"max_steps": 2, "final_answer_step": True})
    assert [FINAL_REQUEST in TOKENIZER.decode(s.prompt_ids) for s in t.steps] == [False, False, True]
    with pytest.raises(ValueError, match="'evidence' needs an environment that sets Observation.evidence"):
        play(["ab", "cd"], ScriptedEnv(SEEN, end=3), "evidence", **WIDE)


@pytest.mark.parametrize(
    "rule", ["append", "window(1)", "window(2)", "token_budget(40)", "strip_thinking", "summary(2)", "evidence"]
)
def test_what_the_policy_sampled_is_no_observation_whatever_the_rule_shows_again(rule):
    """The mask ablations train these tokens: each observation once, and no response, though rules show them again."""
    agent = loop(lambda: Showing(SEEN, end=4), rule, **WIDE)
    t = run(dataclasses.replace(agent, tokenizer=Thinking()), ["abzqcd", "qme", "ing", "the", "ab"])
    counts, newest = observation_tokens(t), iter(SEEN)
    assert [s.observation_tokens for s in t.steps][0] is None and counts[0] == 0
    for before, step, count in zip(t.steps, t.steps[1:], counts[1:], strict=False):
        ids = step.prompt_ids.tolist()[-count:]
        if step.info.get("summary"):
            assert ids == REQUEST
        elif rule == "evidence":  # Nothing was sampled; what the prompt before had is no news.
            assert count == step.observation_tokens - common_prefix(step.prompt_ids, before.prompt_ids)
        else:
            assert ids == observed(next(newest))
    assert len(t.steps) == (5 if rule == "summary(2)" else 4)


REQUEST = CHAT.render_observation(SUMMARY_REQUEST, "user").tolist()


def test_a_summary_is_a_step_and_stands_in_place_of_what_came_before():
    env = Showing(SEEN, end=4)
    t = play(["ab", "cd", "a sum", "ing", "the"], env, "summary(2)", **WIDE)
    assert t.outcome is Outcome.ENV_DONE and [TOKENIZER.decode(s.response_ids[:-1]) for s in t.steps] == [
        *("ab", "cd", "a sum", "ing", "the")
    ]
    first, second, summed, third, fourth = (s.prompt_ids.tolist() for s in t.steps)
    assert second == [*first, *response_of("ab"), *observed("a dog")]
    assert summed == [*second, *response_of("cd"), *REQUEST]  # Not what came back: that the policy sees right after.
    assert third == [*OPENING, *response_of("a sum"), *observed("the cat")]
    assert fourth == [*third, *response_of("ing"), *observed("a bird")]
    assert env.judged == ["a sum"] and len(env.actions) == 4
    step = t.steps[2]
    assert step.reward == 0.25 and step.reward_parts == {"summary": 0.5, "length": -0.25}
    assert step.info["summary"] and step.trainable
    assert (step.state_key, step.action_key) == ("s2|summary", "a sum")
    assert {s.context_rule for s in t.steps} == {"summary(2)"}
    assert [s.observation for s in t.steps] == ["a dog", SUMMARY_REQUEST, "the cat", "a bird", ""]


def test_summaries_sum_up_the_ones_before():
    t = play(["ab", "x", "cd", "y", "ing", "z", "the"], ScriptedEnv(SEEN, end=4), "summary(1)", **WIDE)
    prompts = [s.prompt_ids.tolist() for s in t.steps]
    assert prompts[3] == [*OPENING, *response_of("x"), *observed("a dog"), *response_of("cd"), *REQUEST]
    assert prompts[6] == [*OPENING, *response_of("z"), *observed("a bird")]
    assert t.steps[1].reward == 0.0  # This environment does not judge.


def test_a_summary_is_due_by_tokens():
    """A prompt of so many tokens and no more is not summed up."""
    length = len([*OPENING, *response_of("ab"), *observed("a dog")])
    for tokens, place in ((length, 2), (length - 1, 1)):
        t = play(["ab"] * 8, ScriptedEnv(SEEN, end=3), f"summary(tokens={tokens})", **WIDE)
        assert [i for i, step in enumerate(t.steps) if step.info.get("summary")][0] == place


def test_a_summary_that_is_cut_closes_its_turn_and_the_episode_goes_on():
    agent = loop(lambda: ScriptedEnv(SEEN, end=2), "summary(1)", **WIDE)
    t = run(dataclasses.replace(agent, summary_tokens=2), ["ab", "a long sum", "cd"])
    cut = TOKENIZER.encode_template("a long sum")[:2]
    assert t.steps[1].response_ids.tolist() == cut and t.steps[1].info["finish_reason"] == "length"
    assert t.steps[2].prompt_ids.tolist() == [*OPENING, *cut, *observed("a dog", stopped=False)]


def test_where_a_summary_has_no_room_the_trajectory_is_cut():
    room = len([*OPENING, *response_of("ab"), *observed("a dog"), *response_of("cd"), *REQUEST])
    t = play(["ab", "cd", "x", "the"], ScriptedEnv(SEEN), "summary(2)", **WIDE | {"context_tokens": room})
    assert t.outcome is Outcome.CONTEXT_OVERFLOW and len(t.steps) == 2
    assert t.final_prompt_ids.tolist() == [*t.steps[1].prompt_ids, *t.steps[1].response_ids]
    assert t.steps[1].observation == "the cat"  # Nobody was asked to sum up.
    t = play(["ab", "cd", "x", "the"], ScriptedEnv(SEEN, end=3), "summary(2)", **WIDE | {"context_tokens": room + 2})
    assert t.outcome is Outcome.ENV_DONE and len(t.steps[2].response_ids) == 2


def test_no_summary_follows_the_last_step():
    t = play(["ab", "cd", "unheard"], Showing(SEEN), "summary(2)", **WIDE | {"max_steps": 2})
    assert t.outcome is Outcome.MAX_STEPS and [s.observation for s in t.steps] == ["a dog", "the cat"]
    assert t.final_prompt_ids.tolist() == [*t.steps[1].prompt_ids, *response_of("cd"), *observed("the cat")]
    cut = {"response_tokens": 2, "on_truncated_response": "end"}
    t = play(["abcdabcd"], Showing(SEEN), "summary(1)", **WIDE | cut)
    assert t.outcome is Outcome.RESPONSE_TRUNCATED and [s.observation for s in t.steps] == ["a dog"]


class Ending(Showing):
    """Cuts the first step, and shows what came of it."""

    async def step(self, action):
        return dataclasses.replace(await super().step(action), truncated=True)


@pytest.mark.parametrize("rule", ["append", "window(1)", "summary(1)"])
def test_what_the_environment_cuts_is_valued_where_it_was_left(rule):
    t = play(["ab"], Ending(SEEN), rule, **WIDE)
    assert t.final_prompt_ids.tolist() == [*OPENING, *response_of("ab"), *observed("a dog")]
    assert [s.observation for s in t.steps] == ["a dog"]
    narrow = {"context_tokens": len(OPENING) + len(response_of("ab")), "response_tokens": 4}
    t = play(["ab"], Ending(SEEN), rule, **WIDE | narrow)
    assert t.final_prompt_ids.tolist() == [*OPENING, *response_of("ab")]


@pytest.mark.parametrize(
    ("ends", "final"), [({"terminated": True}, None), ({"truncated": True}, [*OPENING, *response_of("ab")])]
)
def test_an_end_without_evidence_is_an_end(ends, final):
    class Silent(Showing):
        async def step(self, action):
            transition = await super().step(action)
            silent = dataclasses.replace(transition.observation, evidence=None)
            return dataclasses.replace(transition, observation=silent, outcome=Outcome.ENV_DONE, **ends)

    t = play(["ab"], Silent(SEEN), "evidence", **WIDE)
    assert t.outcome is Outcome.ENV_DONE and [s.observation for s in t.steps] == ["a dog"]
    assert (None if t.final_prompt_ids is None else t.final_prompt_ids.tolist()) == final


@pytest.mark.parametrize("trains", [True, False])
def test_summaries_can_be_left_out_of_the_loss_and_still_count(trains):
    agent = loop(lambda: Showing(SEEN, end=2), "summary(1)", **WIDE)
    flat = flatten([run(dataclasses.replace(agent, train_summaries=trains), ["ab", "sum", "cd"])])
    assert flat.trainable.tolist() == [True, trains, True]
    assert flat.rewards.tolist() == [1.0, 0.25, 2.0] and flat.returns.tolist() == [3.25]


def test_a_row_may_allow_fewer_steps():
    t = play(["ab", "cd"], ScriptedEnv(SEEN), row={**ROW, "max_steps": 2})
    assert t.outcome is Outcome.MAX_STEPS and len(t.steps) == 2 and t.row["max_steps"] == 2
    assert len(play(["ab"] * 4, ScriptedEnv(SEEN), row={**ROW, "max_steps": 9}).steps) == BUDGET["max_steps"]


def test_a_rule_of_ones_own_is_loaded_from_a_file(tmp_path, monkeypatch):
    for attribute in ("_entries", "_files"):
        monkeypatch.setattr(RULES, attribute, dict(getattr(RULES, attribute)))
    (tmp_path / "mine.py").write_text(
        "from agentr1_jax.agents.context import join, register\n"
        "@register('every_other')\n"
        "def every_other(history, first=0):\n"
        "    return join(history.opening, history.turns[first::2])\n"
    )
    RULES.load(str(tmp_path / "mine.py"))
    t = play(["ab", "cd", "ing"], ScriptedEnv(SEEN, end=3), "every_other(1)", **WIDE)
    assert t.steps[2].prompt_ids.tolist() == [*OPENING, *response_of("cd"), *observed("the cat")]
    with pytest.raises(ValueError, match="'append' is registered twice"):
        register("append")(lambda history: history.opening)
