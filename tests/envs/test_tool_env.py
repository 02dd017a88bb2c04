"""The environment made of tools: what each kind of response leads to."""

from __future__ import annotations

import asyncio
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentr1_jax.envs.base import Action
from agentr1_jax.envs.rewards import Reward
from agentr1_jax.envs.tool_env import NO_ACTION, ToolEnv
from agentr1_jax.tasks import qa
from agentr1_jax.text.tool_calls import PARSE_MESSAGES, render_answer, render_call
from agentr1_jax.tools.base import ToolResult, failure
from agentr1_jax.tools.search import BM25, Passage, SearchTool
from agentr1_jax.tools.wrappers import ToolMetrics, ToolsConfig, wrap_tool
from agentr1_jax.trajectory import Outcome

ROW = {"id": "r", "question": "Who?", "answers": ["Ada"], "gold_ids": ["g"]}
WEIGHTS = {"answer": 1.0, "format": 0.1, "gold_passage": 0.2, "repeated_query": -0.05}
PASSAGES = [Passage("g", "Glass Harbor", "director Ada."), Passage("x", "Pale River", "song.")]
SEARCH = SearchTool(BM25(PASSAGES), top_k=1)


class Slow:
    """A tool that answers only when as many calls are open as it was told to wait for."""

    name, description = "slow", ""
    parameters = {"type": "object"}

    def __init__(self, together: int):
        self.barrier = asyncio.Barrier(together)

    async def execute(self, arguments):
        await asyncio.wait_for(self.barrier.wait(), timeout=2)
        return ToolResult(f"slow {arguments['n']}")


class Faulty:
    """A tool that fails as it is told."""

    name, description = "faulty", ""
    parameters = {"type": "object"}

    def execute(self, arguments):
        if "kind" in arguments:
            return failure(arguments["kind"], "Error: too large.")
        raise RuntimeError("no connection")


TOOLS = (SEARCH, Faulty())


def play(*texts, tools=TOOLS, weights=WEIGHTS, **how):
    """The transitions of an episode, all checked for what every transition must be."""

    async def run():
        env = qa.search_env(tools, weights, "Search.")
        await env.reset(ROW, 0)
        return [await env.step(Action(np.zeros(0, np.int32), text, **how)) for text in texts], env

    transitions, env = asyncio.run(run())
    for t in transitions:
        assert math.isclose(t.reward, sum(t.reward_parts.values()), abs_tol=1e-12)
        assert (t.observation is None) == (t.outcome is not None) == (t.terminated or t.truncated)
        assert bool(t.metrics) == (t.outcome not in (None, Outcome.TOOL_FAILURE))
        json.dumps([t.tool_calls, t.info, t.reward_parts, t.metrics], allow_nan=False)
    return transitions, env


def search(query):
    return render_call("search", {"query": query})


def test_search_then_answer():
    env = qa.search_env(lambda row: [SEARCH] if row["id"] == "r" else [], WEIGHTS, "Search.")
    opening = asyncio.run(env.reset(ROW, 0))
    assert opening.messages == [{"role": "system", "content": "Search."}, {"role": "user", "content": "Who?"}]
    assert [tool["function"]["name"] for tool in opening.tools] == ["search"]
    assert opening.state_key == qa.state_key(ROW, [])

    (first, both, last), _ = play(search("Glass Harbor"), search("x") + render_answer("Ada"), render_answer("Ada"))
    assert first.observation.text == "- Glass Harbor: director Ada." and first.observation.role == "tool"
    assert first.reward_parts == {"answer": 0, "format": 0, "gold_passage": 0.2, "repeated_query": 0}
    assert first.raw_reward_parts["gold_passage"] == 1 and first.raw_reward_parts["f1"] == 0
    arguments = {"query": "Glass Harbor"}
    record = {"name": "search", "arguments": arguments, "ok": True, "error": None, "result": first.observation.text}
    assert first.tool_calls == [record]
    assert first.observation.state_key == "r|g|new_gold"
    assert both.outcome is None and both.reward_parts["answer"] == 0 and both.reward_parts["format"] == -0.1
    assert last.outcome is Outcome.ANSWERED and last.terminated and last.reward == 1.0
    assert last.metrics == {"em": 1, "f1": 1, "tool_calls": 2, "gold_recall": 1}


def test_a_tool_that_is_down_ends_the_episode_beside_calls_that_are_not():
    tools = [wrap_tool(tool, ToolsConfig(max_attempts=2, backoff_seconds=0.001), ToolMetrics()) for tool in TOOLS]
    calls = search("Glass Harbor") + render_call("faulty", {}) + "<tool_call>{</tool_call>"
    (only,), env = play(calls, tools=tools)
    assert only.outcome is Outcome.TOOL_FAILURE and only.truncated and not only.terminated
    assert only.reward_parts == only.metrics == {}
    assert only.info["errors"] == {"exception": 1, "bad_json": 1}
    assert [call["ok"] for call in only.tool_calls] == [True, False, False]
    assert env.truncate() == {"em": 0, "f1": 0, "tool_calls": 3, "gold_recall": 1}
    asyncio.run(env.reset(ROW, 0))
    assert env.truncate()["tool_calls"] == 0


def test_responses_that_do_the_same_have_one_action_key():
    first, second = (json.dumps({"name": "find", "arguments": x}) for x in ({"a": 1, "b": [2]}, {"b": [2], "a": 1}))
    calls = [f"So. <tool_call>{first}</tool_call>", f"<tool_call> {second} </tool_call> There."]
    texts = [*calls, search("x"), search("x") + search("y"), "<tool_call>{</tool_call>", "I wonder.", "Hm."]
    transitions, _ = play(*texts, f"It is {render_answer(' Ada')}")
    keys = [t.action_key for t in transitions]
    assert keys[0] == keys[1] == '[["find", {"a": 1, "b": [2]}]]'
    assert keys[2:5] == ['[["search", {"query": "x"}]]', keys[2][:-1] + ', ["search", {"query": "y"}]]', '["bad_json"]']
    assert keys[5:] == [NO_ACTION, NO_ACTION, "answer: Ada"]


def test_calls_of_one_response_run_concurrently_and_keep_their_order():
    calls = "".join(render_call("slow", {"n": n}) for n in range(3))
    (only,), _ = play(calls, tools=[Slow(together=3)])
    assert only.observation.texts == ["slow 0", "slow 1", "slow 2"]


@pytest.mark.parametrize(
    ("text", "kind", "told"),
    [
        ("<tool_call>{</tool_call>", "bad_json", PARSE_MESSAGES["bad_json"]),
        ("<tool_call>{}", "unclosed_tag", PARSE_MESSAGES["unclosed_tag"]),
        (render_call("find", {}), "unknown_tool", "tools are search, faulty."),
        (render_call("search", {"q": "x"}), "bad_arguments", "bad arguments for search"),
        (render_call("faulty", {"kind": "oversized"}), "oversized", "too large"),
        ("I wonder.", "no_action", NO_ACTION),
    ],
)
def test_what_is_the_policys_fault_comes_back_to_it(text, kind, told):
    (first, last), _ = play(text, render_answer("Ada"))
    assert told in first.observation.text
    assert first.info["errors"] == {kind: 1}
    assert first.reward_parts["format"] == -0.1
    assert kind in first.observation.state_key
    assert [call["error"] for call in first.tool_calls] == ([] if kind == "no_action" else [kind])
    assert last.outcome is Outcome.ANSWERED and last.metrics["em"] == 1


def test_every_kind_of_fault_of_the_policy_is_counted_in_one_response():
    calls = ["<tool_call>{</tool_call>", "<tool_call>[]</tool_call>", render_call("find", {}), render_call("slow", {})]
    calls += [render_call("search", {"q": "x"})] * 2 + [search("Glass Harbor")]
    tools = [wrap_tool(tool, ToolsConfig(max_characters=10), ToolMetrics()) for tool in TOOLS]
    (only,), _ = play("".join(calls), tools=tools)
    counts = {"bad_json": 1, "not_an_object": 1, "unknown_tool": 2, "bad_arguments": 2, "oversized": 1}
    assert only.outcome is None and only.info["errors"] == counts
    assert only.observation.texts[-1].endswith("- Glass Ha\n[Error: result too long, 19 of 29 characters cut.]")
    assert only.observation.content.count("Error") == 7 == len(only.tool_calls)
    assert only.reward_parts["gold_passage"] == 0.2  # the data of a cut result count


BROKEN = search("Glass Harbor").replace("}}", "}")


def test_a_mended_call_runs_and_is_counted():
    (first, second, last), _ = play(BROKEN + search("Pale River"), BROKEN, render_answer("Ada"), lenient=True)
    assert first.observation.texts == ["- Glass Harbor: director Ada.", "- Pale River: song."]
    assert [call.get("repaired") for call in first.tool_calls] == [True, None]
    assert first.info["errors"] == {"repaired": 1} and first.tool_calls[0]["ok"]
    assert second.raw_reward_parts["repeated_query"] == 1
    assert last.metrics["repaired_calls"] == 2 and last.info["errors"] == {}


def test_nothing_is_mended_unless_asked_for_nor_in_a_response_that_was_cut():
    for how in ({}, {"lenient": True, "truncated": True}):
        (only,), env = play(BROKEN, **how)
        assert only.info["errors"] == {"bad_json": 1} and only.observation.text == PARSE_MESSAGES["bad_json"]
        assert env.truncate().get("repaired_calls") == (0 if how else None)


class Counting:
    """A tool that tells what it counted before and after it let others go first."""

    name, description = "count", ""
    parameters = {"type": "object"}

    def __init__(self):
        self.count = 0

    async def execute(self, arguments):
        before = self.count
        await asyncio.sleep(0)
        self.count += 1
        return ToolResult(f"{before} {self.count}")


def test_a_user_speaks_after_each_response_without_calls_until_all_is_said():
    """The calls of one response share a state here, and run one after another."""

    def user(row, turns):
        return dict(enumerate(["And then?", "And now?"])).get(sum(not turn.calls for turn in turns) - 1)

    texts = ["Well.", render_call("count", {}) * 3, "<tool_call>{</tool_call>", render_answer("Ada"), ""]

    async def run():
        reward = Reward(qa.PARTS, {"format": 1.0})
        opening = qa.question_messages("")
        env = ToolEnv([Counting()], opening, reward, qa.metrics, qa.state_key, user=user, in_order=True)
        await env.reset(ROW, 0)
        return [await env.step(Action(np.zeros(0, np.int32), text)) for text in texts]

    first, counted, broken, second, last = asyncio.run(run())
    told = [t.observation.content for t in (first, counted, broken, second)]
    assert told == ["And then?", "0 1\n1 2\n2 3", PARSE_MESSAGES["bad_json"], "And now?"]
    assert [t.observation.role for t in (first, counted, broken, second)] == ["user", "tool", "tool", "user"]
    assert first.observation.state_key == "r||no_action" and first.info["errors"] == {}
    assert counted.observation.evidence == f"And then?\n{told[1]}"
    assert second.observation.evidence == f"And then?\n{told[1]}\nAnd now?"
    assert last.outcome is Outcome.ANSWERED and last.terminated and last.observation is None


PIECES = st.sampled_from([search("harbor"), render_answer("Ada"), "<tool_call>{", "</tool_call>", "<answer>", "x"])


@given(st.lists(st.lists(PIECES, max_size=3).map("".join), max_size=4))
def test_no_response_breaks_an_episode(texts):
    transitions, _ = play(*texts)
    for transition in transitions:
        assert transition.terminated == (transition.outcome is Outcome.ANSWERED) == (transition.observation is None)
        assert transition.reward == pytest.approx(sum(transition.reward_parts.values()))


def test_evidence_is_what_succeeded_and_what_came_back_last():
    """Of failures only the newest: the policy must see what went wrong, and need not see it for ever."""
    texts = (search("glass"), "hm", search("glass"), search("pale") + search("glass"))
    first, wrong, again, two = play(*texts)[0]
    glass, pale = first.observation.content, two.observation.texts[0]
    assert first.observation.evidence == again.observation.evidence == glass
    assert wrong.observation.evidence == f"{glass}\n{NO_ACTION}"
    assert two.observation.evidence == f"{pale}\n{glass}"
