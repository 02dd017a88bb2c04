"""Measures of answers against a slow reading of their definition, rewards as parts, functions of the user."""

from __future__ import annotations

import asyncio
import sys

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from agentr1_jax.envs.base import Action
from agentr1_jax.envs.rewards import Reward, Turn, exact_match, f1, normalise
from agentr1_jax.envs.tool_env import ToolEnv
from agentr1_jax.tasks import qa
from agentr1_jax.text.tool_calls import PARSE_MESSAGES, ParseError, ToolCall
from agentr1_jax.tools.base import ToolResult, failure

PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
WORDS = ["a", "an", "the", "The", "AN", "yes", "No", "noanswer", "Ada", "corvin", "1,000", "1000", "U.S.", "the-a"]
GLUE = [" ", "  ", "\t", "\n", "\u00a0", "\u2003", "-", ".", "'", "\u2019", "\u2013", "_", "\u0301", "", '"', "/"]
ODD = ["İstanbul", "STRASSE", "straße", "ﬁlm", "Śliwak", "a\u0301", "東京", "½", "٣", "ª", "\u200b", "Ǆ", "ά"]

texts = st.one_of(
    st.text(max_size=20),
    st.lists(st.sampled_from(WORDS + GLUE + ODD), max_size=9).map("".join),
    st.lists(st.sampled_from(WORDS), max_size=5).map(" ".join),
)


def slow_words(text):
    """Lower case, ASCII punctuation away, then words; an article goes wherever no letter or digit touches it."""
    letters = [c for c in text.lower() if c not in PUNCTUATION]
    pieces, word = [], ""
    for c in [*letters, ""]:
        if c and c.isalnum():
            word += c
            continue
        pieces += [" " if word in ("a", "an", "the") else word, c]
        word = ""
    return "".join(pieces).split()


def slow_f1(prediction, answers):
    best = 0.0
    for answer in answers:
        said, wanted = slow_words(prediction), slow_words(answer)
        closed = [" ".join(words) in ("yes", "no", "noanswer") for words in (said, wanted)]
        if any(closed) and said != wanted:
            continue
        left, common = list(wanted), 0
        for word in said:
            if word in left:
                left.remove(word)
                common += 1
        if common:
            precision, recall = common / len(said), common / len(wanted)
            best = max(best, 2 * precision * recall / (precision + recall))
    return best


@hypothesis.settings(max_examples=150)
@hypothesis.given(texts, st.lists(texts, max_size=3))
def test_em_and_f1_of_any_texts(prediction, answers):
    assert normalise(prediction).split() == slow_words(prediction)
    assert exact_match(prediction, answers) == any(slow_words(prediction) == slow_words(a) for a in answers)
    assert f1(prediction, answers) == pytest.approx(slow_f1(prediction, answers))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("The  Glass-Harbor, an\tisland!", "glassharbor island", True),
        ("theatre", "atre", False),
        ("1,000", "1000", True),
        ("1.5", "15", True),  # as the published scripts have it
        ("it's", "its", True),
        ("it\u2019s", "its", False),  # ASCII punctuation only
        ("1939\u20131945", "19391945", False),
        ("Śliwak", "Sliwak", False),
        ("ŚLIWAK", "śliwak", True),
        ("the", "", True),
        ("\u00a0Ada\u2003Corvin ", "Ada Corvin", True),
    ],
)
def test_equal_answers(one, other, same):
    assert exact_match(one, [other]) == exact_match(other, ["x", one]) == float(same)
    assert (f1(one, [other]) == 1.0) == (same and normalise(one) != "")


@pytest.mark.parametrize(
    ("prediction", "answers", "value"),
    [
        ("Ada Marsh", ["Ada Corvin"], 0.5),
        ("a b b", ["b b c"], 2 * 1 * (2 / 3) / (1 + 2 / 3)),
        ("Ada", ["Milo", "Ada Corvin"], 2 / 3),
        ("yes it is", ["yes"], 0.0),
        ("yes", ["yes he was"], 0.0),
        ("Yes.", ["no", "yes"], 1.0),
        ("noanswer", ["noanswer given"], 0.0),
        (None, ["x"], 0.0),
        ("x", [], 0.0),
    ],
)
def test_f1(prediction, answers, value):
    assert f1(prediction, answers) == pytest.approx(value)
    assert exact_match(prediction, answers) == float(value == 1)


ROW = {"id": 7, "question": "?", "answers": ["Ada"], "gold_ids": ["g1", "g2"]}


def searched(query: str, *ids: str) -> Turn:
    return Turn("", [ToolCall("search", {"query": query})], [ToolResult("text", data={"ids": ids})], None)


def answered(text: str) -> Turn:
    return Turn("", [], [], text)


def broken() -> Turn:
    error = ParseError("bad_json", PARSE_MESSAGES["bad_json"])
    return Turn("", [error], [failure("bad_json", error.message)], None)


BOTH = Turn("", searched("a").calls, searched("a").results, "Ada")


def test_a_gold_passage_pays_once():
    turns = [searched("a", "g1", "x"), searched("b", "g1", "g2"), searched("c", "g1", "g2"), answered("Ada")]
    assert [qa.gold_passage_part(ROW, turns[: i + 1]) for i in range(4)] == [1, 1, 0, 0]


def test_a_repeated_query_counts_within_and_across_turns():
    twice = Turn("", [ToolCall("search", {"query": "a"})] * 2, [ToolResult("")] * 2, None)
    assert qa.repeated_query_part(ROW, [twice]) == 1
    assert qa.repeated_query_part(ROW, [twice, twice]) == 2
    assert qa.repeated_query_part(ROW, [searched("a"), searched("b")]) == 0
    assert qa.repeated_query_part(ROW, [broken(), broken()]) == 0


def test_format_is_a_penalty():
    infrastructure = Turn("", searched("a").calls, [failure("timeout", "", "infrastructure")], None)
    assert [qa.format_part(ROW, [turn]) for turn in (Turn("", [], [], None), BOTH, broken())] == [-1, -1, -1]
    assert [qa.format_part(ROW, [turn]) for turn in (searched("a"), answered(""), infrastructure)] == [0, 0, 0]


def test_only_an_answer_that_ends_the_episode_counts():
    assert qa.answer_part(ROW, [answered(" ada ")]) == 1
    assert qa.answer_part(ROW, [BOTH]) == 0
    nothing = {"em": 0, "f1": 0, "tool_calls": 0, "gold_recall": 0}
    assert qa.metrics(ROW, []) == nothing and qa.metrics(ROW, [BOTH]) == {**nothing, "tool_calls": 1}
    found = qa.metrics(ROW, [searched("a", "g2"), answered("Ada")])
    assert found == {"em": 1, "f1": 1, "tool_calls": 1, "gold_recall": 0.5}


def test_equal_states_have_equal_keys_and_others_do_not():
    one = [searched("a", "g1", "x"), searched("b", "g2")]
    other = [searched("c", "g2", "y"), searched("d", "z", "g1")]
    assert qa.state_key(ROW, one) == qa.state_key(ROW, other)
    states = [[], one[:1], one, [*one, searched("c")], [*one, broken()], [*one, Turn("", [], [], None)]]
    keys = [qa.state_key(ROW, turns) for turns in states] + [qa.state_key({**ROW, "id": 8}, one)]
    assert len(set(keys)) == len(keys)


def test_contributions_are_weight_times_part():
    reward = Reward(qa.PARTS, {"answer": 2.0, "repeated_query": -0.5, "gold_passage": 0.1})
    raw = reward.raw(ROW, [searched("a", "g1"), searched("a")])
    assert raw == {"answer": 0, "f1": 0, "format": 0, "gold_passage": 0, "repeated_query": 1}
    assert reward.contributions(raw) == {"answer": 0, "repeated_query": -0.5, "gold_passage": 0}
    unknown = reward.raw({"id": 8, "answers": ["Ada"]}, [searched("a")])
    assert "gold_passage" not in unknown and "gold_passage" not in reward.contributions(unknown)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"anser": 1.0}, r"'anser'; did you mean 'answer'\? Parts are \['answer', 'f1', 'format'"),
        ({"answer": float("nan")}, "the weight of reward part 'answer' is nan; it must be a finite number"),
    ],
)
def test_wrong_weights_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        Reward(qa.PARTS, weights)


MODULE = """
import numpy
def brevity(row, turns): return -len(turns[-1].text) / 10
def known(row, turns): return None
def by_numpy(row, turns, more=1): return numpy.float32(0.5)
def nan(row, turns): return float("nan")
def words(row, turns): return "much"
def failing(row, turns): return row["nothing"]
def one_argument(row): return 0.0
async def late(row, turns): return 0.0
def answer(row, turns): return 0.0
number = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """An importable module of reward functions, gone after the test."""
    (tmp_path / "my_rewards.py").write_text(MODULE)
    (tmp_path / "bad_rewards.py").write_text("import nothing_of_that_name")
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_rewards"
    sys.modules.pop("my_rewards", None)


def transition(*functions):
    reward = qa.make_reward({"answer": 1.0}, functions=functions)
    env = ToolEnv([], qa.question_messages(""), reward, qa.metrics, qa.state_key)

    async def play():
        await env.reset(ROW, 0)
        return await env.step(Action(np.zeros(0, np.int32), "<answer>Ada</answer>"))

    return asyncio.run(play())


def test_functions_are_paid_by_weight_and_logged_raw(module):
    done = transition(f"{module}:brevity=5e-1", f"{module}:by_numpy=2", f"{module}:known=1")
    assert done.reward_parts == {"answer": 1.0, "brevity": -1.0, "by_numpy": 1.0}
    assert done.reward == 1.0
    assert done.raw_reward_parts["brevity"] == -2.0 and "known" not in done.raw_reward_parts


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("my_rewards:brevity", "is not 'module:function=weight', e.g. 'my_rewards:brevity=0.2'"),
        ("my_rewards:brevity=much", "is not 'module:function=weight'"),
        ("my_rewards:brevity=inf", "'brevity' is inf; it must be a finite number"),
        ("bad_rewards:brevity=1", "cannot import 'bad_rewards' .ModuleNotFoundError: No module named 'nothing_of"),
        ("my_rewards:nothing=1", "'my_rewards' has no such function"),
        ("my_rewards:number=1", "'my_rewards' has no such function"),
        ("my_rewards:late=1", r"it must be def late\(row, turns\), not async"),
        ("my_rewards:one_argument=1", r"cannot be called as one_argument\(row, turns\): too many"),
        ("my_rewards:answer=1", "there is a reward part 'answer' already; rename"),
    ],
)
def test_functions_that_cannot_be_used_are_refused_at_the_start(module, spec, message):
    with pytest.raises(ValueError, match=message):
        qa.make_reward({}, functions=[spec])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nan", "my_rewards:nan returned nan, which is no finite number"),
        ("words", "my_rewards:words returned 'much', which is no finite number"),
        ("failing", "my_rewards:failing raised KeyError: 'nothing'"),
    ],
)
def test_a_function_that_fails_is_named(module, name, message):
    with pytest.raises(RuntimeError, match=message):
        transition(f"{module}:{name}=0.1")
