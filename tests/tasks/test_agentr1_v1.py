"""Agent-R1's reward of version 1, against its definition over the whole text of an episode."""

from __future__ import annotations

import re

import hypothesis
import hypothesis.strategies as st
import pytest

from agentr1_jax.envs.rewards import Turn, normalise, totals
from agentr1_jax.tasks import qa
from agentr1_jax.text.tool_calls import extract_answer, parse_tool_calls
from agentr1_jax.tools.base import ToolResult

ROW = {"id": 1, "question": "?", "answers": ["Ada Corvin", "A. Corvin"], "gold_ids": ["g"]}
CALL = '<think>I search.</think>\n<tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call>'
RIGHT = "<think>Now I know.</think> <answer> Ada Corvin </answer>"
WRONG = "<think>Now I know.</think><answer>Milo</answer>"
LONG = "<think>Hm.</think><answer>It is Ada Corvin, I guess.</answer>"
TEXTS = [
    *(CALL, RIGHT, WRONG, LONG, f"{CALL} and so on", f"{CALL}\n", f"so: {CALL}", f"{CALL}{CALL}", f"{RIGHT}.", ""),
    CALL.replace("<think>", ""),
    CALL.replace("I search.", "I search <think> more."),
    CALL.replace("I search.", "Is it Ada Corvin?"),
    "<answer>Ada Corvin</answer>",
    "<think>Ada Corvin</think><answer>Milo</answer>",
    "<think>x</think><answer></answer>",
    f"{CALL}<answer>Ada Corvin</answer>",
]


def turn(text):
    calls = parse_tool_calls(text)
    return Turn(text, calls, [ToolResult("text")] * len(calls), extract_answer(text))


def score_by_definition(texts):
    """The score of the definition, on the turns of an assistant."""
    if not texts:
        return 0.0
    points = 0.0
    for text in texts[:-1]:
        once = all(text.count(tag) == 1 for tag in ("<think>", "</think>", "<tool_call>", "</tool_call>"))
        if once and re.search(r"^<think>(.*?)</think>(.*?)<tool_call>(.*?)</tool_call>$", text.strip(), re.DOTALL):
            points += 0.5
    last = texts[-1]
    if re.search(r"^<think>(.*?)</think>(.*?)<answer>(.*?)</answer>$", last.strip(), re.DOTALL):
        points += 0.5
    points = min(points, 1.0)
    if points < 0.5:
        return points - 1
    said = re.findall(r"<answer>(.*?)</answer>", last, re.DOTALL)
    gold = [normalise(answer) for answer in ROW["answers"]]
    if said and any(g in normalise(said[-1]) for g in gold):
        return points - 1 + 1
    return points - 1 + (0.2 if any(g in normalise(last) for g in gold) else 0.0)


def rewards_of(texts):
    reward = qa.make_reward({}, "agentr1_v1")
    turns = [turn(text) for text in texts]
    return [reward.contributions(reward.raw(ROW, turns[: i + 1])) for i in range(len(turns))]


@hypothesis.settings(max_examples=100)
@hypothesis.given(st.lists(st.sampled_from(TEXTS), max_size=6))
def test_the_rewards_of_an_episode_sum_to_its_score_wherever_it_is_cut(texts):
    paid = rewards_of(texts)
    for length in range(len(texts) + 1):
        total = sum(sum(parts.values()) for parts in paid[:length])
        assert total == pytest.approx(score_by_definition(texts[:length]))


@pytest.mark.parametrize(
    ("texts", "score"),
    [
        ([CALL, CALL, RIGHT], 1.0),
        ([CALL, RIGHT], 1.0),
        ([RIGHT], 0.5),  # -1 + 1/2 + 1
        ([CALL, LONG], 1.0),  # a substring counts
        ([CALL, WRONG], 0.0),
        (["<answer>Ada Corvin</answer>"], -1.0),  # no answer without format
        ([CALL, "<answer>Ada Corvin</answer>"], 0.5),
        ([CALL, "<think>Ada Corvin</think><answer>Milo</answer>"], 0.2),
        ([CALL] * 5, 0.0),  # cut: the last call earns nothing
        ([CALL], -1.0),
        (["rubbish"], -1.0),
    ],
)
def test_scores(texts, score):
    assert sum(sum(parts.values()) for parts in rewards_of(texts)) == pytest.approx(score)


def test_parts_are_logged_apart_and_beside_the_plain_ones():
    reward = qa.make_reward({}, "agentr1_v1")
    turns = [turn(text) for text in (CALL, CALL, RIGHT)]
    raw = totals(reward.raw(ROW, turns[: i + 1]) for i in range(3))
    assert raw == {
        **{"answer": 1, "f1": 1, "format": 0, "gold_passage": 0, "repeated_query": 1},
        **{"v1_start": -1, "v1_format": 1, "v1_answer": 1},
    }
    assert list(reward.weights) == ["v1_start", "v1_format", "v1_answer"]


def test_an_answer_of_articles_alone_is_not_in_every_text():
    row = {**ROW, "answers": ["The The"]}
    reward = qa.make_reward({}, "agentr1_v1")
    assert reward.raw(row, [turn(WRONG)])["v1_answer"] == 0
    assert reward.raw(row, [turn(WRONG.replace("Milo", "the the"))])["v1_answer"] == 1
