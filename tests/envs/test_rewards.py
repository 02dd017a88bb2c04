"""Measures of question answering, and rewards as weighted parts."""

from __future__ import annotations

import pytest

from agentr1_jax.envs.rewards import Reward, Turn, exact_match, f1, normalise
from agentr1_jax.tasks import qa
from agentr1_jax.text.tool_calls import PARSE_MESSAGES, ParseError, ToolCall
from agentr1_jax.tools.base import ToolResult, failure


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Glass-Harbor, an\tisland!", "glassharbor island"),
        ("Theatre of a thousand", "theatre of thousand"),
        ("U.S.A.", "usa"),
        ("the", ""),
    ],
)
def test_normalisation(text, normal):
    assert normalise(text) == normal


def test_exact_match_takes_the_best_alias():
    assert exact_match("the Ada corvin.", ["Milo Trent", "Ada Corvin"]) == 1.0
    assert exact_match("Ada", ["Ada Corvin"]) == 0.0
    assert exact_match(None, ["x"]) == 0.0
    assert exact_match("x", []) == 0.0


@pytest.mark.parametrize(
    ("prediction", "answers", "value"),
    [
        ("Ada Corvin", ["ada corvin"], 1.0),
        ("Ada Marsh", ["Ada Corvin"], 0.5),
        ("in the city of Port Vale", ["Port Vale"], 2 * (2 / 5) * 1 / (2 / 5 + 1)),
        ("a b b", ["b b c"], 2 * 1 * (2 / 3) / (1 + 2 / 3)),
        ("Ada", ["Milo", "Ada Corvin"], 2 / 3),
        ("yes it is", ["yes"], 0.0),
        ("yes", ["yes he was"], 0.0),
        ("Yes.", ["yes"], 1.0),
        ("no", ["yes"], 0.0),
        ("noanswer", ["noanswer given"], 0.0),
        (None, ["x"], 0.0),
        ("", ["x"], 0.0),
        ("x", [], 0.0),
    ],
)
def test_f1(prediction, answers, value):
    assert f1(prediction, answers) == pytest.approx(value)


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), float("-inf")])
def test_weights_are_finite(weight):
    with pytest.raises(ValueError, match=f"the weight of reward part 'answer' is {weight}; it must be a finite number"):
        Reward(qa.PARTS, {"answer": weight})


ROW = {"id": 7, "question": "?", "answers": ["Ada"], "gold_ids": ["g1", "g2"]}


def searched(query: str, *ids: str) -> Turn:
    return Turn("", [ToolCall("search", {"query": query})], [ToolResult("text", data={"ids": ids})], None)


def answered(text: str) -> Turn:
    return Turn("", [], [], text)


def broken() -> Turn:
    error = ParseError("bad_json", PARSE_MESSAGES["bad_json"])
    return Turn("", [error], [failure("bad_json", error.message)], None)


def test_a_gold_passage_pays_once():
    turns = [searched("a", "g1", "x"), searched("b", "g1", "g2"), searched("c", "g1", "g2"), answered("Ada")]
    assert [qa.gold_passage_part(ROW, turns[: i + 1]) for i in range(4)] == [1, 1, 0, 0]
    assert qa.gold_passage_part({"id": 0, "answers": []}, turns[:1]) is None


def test_a_repeated_query_counts_within_and_across_turns():
    twice = Turn("", [ToolCall("search", {"query": "a"})] * 2, [ToolResult("")] * 2, None)
    assert qa.repeated_query_part(ROW, [twice]) == 1
    assert qa.repeated_query_part(ROW, [twice, twice]) == 2
    assert qa.repeated_query_part(ROW, [searched("a"), searched("b")]) == 0
    assert qa.repeated_query_part(ROW, [broken(), broken()]) == 0


def test_format_is_a_penalty():
    both = Turn("", searched("a").calls, searched("a").results, "Ada")
    infrastructure = Turn("", searched("a").calls, [failure("timeout", "", "infrastructure")], None)
    bad = {"neither": Turn("", [], [], None), "both": both, "broken": broken()}
    for name, turn in bad.items():
        assert qa.format_part(ROW, [turn]) == -1, name
    for turn in (searched("a"), answered(""), infrastructure):
        assert qa.format_part(ROW, [turn]) == 0


def test_only_an_answer_that_ends_the_episode_counts():
    both = Turn("", searched("a").calls, searched("a").results, "Ada")
    assert qa.answer_part(ROW, [answered(" ada ")]) == 1
    assert qa.answer_part(ROW, [both]) == 0
    assert qa.metrics(ROW, [both]) == {"em": 0, "f1": 0, "tool_calls": 1, "gold_recall": 0}
    assert qa.metrics(ROW, []) == {"em": 0, "f1": 0, "tool_calls": 0, "gold_recall": 0}
    assert qa.metrics(ROW, [searched("a", "g2"), answered("Ada")]) == {
        "em": 1,
        "f1": 1,
        "tool_calls": 1,
        "gold_recall": 0.5,
    }


def test_equal_states_have_equal_keys_and_others_do_not():
    one = [searched("a", "g1", "x"), searched("b", "g2")]
    other = [searched("c", "g2", "y"), searched("d", "z", "g1")]
    assert qa.state_key(ROW, one) == qa.state_key(ROW, other)
    states = [[], one[:1], one, [*one, searched("c")], [*one, broken()], [*one, Turn("", [], [], None)]]
    keys = [qa.state_key(ROW, turns) for turns in states] + [qa.state_key({**ROW, "id": 8}, one)]
    assert len(set(keys)) == len(keys)


def test_an_unknown_part_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'anser'; did you mean 'answer'\? Parts are \['answer', 'f1', 'format'"):
        Reward(qa.PARTS, {"anser": 1.0})


def test_contributions_are_weight_times_part():
    reward = Reward(qa.PARTS, {"answer": 2.0, "repeated_query": -0.5, "format": 0.1})
    raw = reward.raw(ROW, [searched("a", "g1"), searched("a")])
    assert raw == {"answer": 0, "f1": 0, "format": 0, "gold_passage": 0, "repeated_query": 1}
    assert reward.contributions(raw) == {"answer": 0, "repeated_query": -0.5, "format": 0}
