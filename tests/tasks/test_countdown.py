"""Countdown: its rows, what counts as a solution, its expert, and what is refused."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plays import play, play_expert

from agentr1_jax.tasks import make_task
from agentr1_jax.tasks.countdown import solves
from agentr1_jax.text.tool_calls import render_answer, render_call
from agentr1_jax.trajectory import Outcome

TASK = make_task("countdown")
ROW = {"id": "c", "question": "11 from 3 5 9.", "numbers": [3, 5, 9], "target": 11, "operators": "+-"}


def call(expression):
    return render_call("calculator", {"expression": expression})


def test_rows_can_be_solved_and_share_no_pair_between_splits():
    rows = {split: [TASK.row(split, i) for i in range(150)] for split in ("train", "eval", "dev")}
    pairs = {split: {(*sorted(row["numbers"]), row["target"]) for row in rows[split]} for split in rows}
    assert not pairs["train"] & pairs["eval"] and not pairs["train"] & pairs["dev"] and not pairs["eval"] & pairs["dev"]
    for row in itertools.chain(*rows.values()):
        assert len(row["numbers"]) == 3 and max(row["numbers"]) <= 12 and row["target"] >= 1
        orders = itertools.product(itertools.permutations(row["numbers"]), "+-", "+-")
        assert any(solves(f"{a} {s} {b} {t} {c}", row) for (a, b, c), s, t in orders)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("9 + 5 - 3", True),
        ("5+9-3", True),
        ("(9 - 3) + 5", True),
        ("9 - (3 - 5)", True),
        ("9 + 5 - 3 = 11", False),
        ("9 + 5 - 3 + 3 - 3", False),
        ("11", False),
        ("3 + 5 + 9", False),
        ("9 + 5 - 3 * 1", False),
        ("95 - 3", False),
        ("9 + 5 -", False),
        ("", False),
        (None, False),
        ("__import__('os')", False),
    ],
)
def test_a_solution_uses_each_number_once_and_its_operators_alone(answer, right):
    assert solves(answer, ROW) is right


def test_operators_of_two_characters_are_others():
    row = {**ROW, "numbers": [2, 3, 5], "target": 13, "operators": "+-*/"}
    assert solves("2 * 5 + 3", row) and not solves("2**3 + 5", row)
    assert not solves("7 // 2", {**row, "numbers": [7, 2], "target": 3})


@given(st.text(alphabet="0123456789+-() .*e", max_size=20))
def test_no_answer_raises_and_what_solves_has_the_numbers(answer):
    assert not solves(answer, ROW) or sorted(map(int, re.findall(r"\d+", answer))) == ROW["numbers"]


def test_an_episode_pays_a_solution_and_asks_for_new_calls():
    _, missed, repeated, hit, answered = play(TASK, ROW, [call("3 + 5 + 9"), call("3 + 5 + 9"), call("9 + 5 - 3"),
                                                       render_answer("9 + 5 - 3")])  # fmt: skip
    assert [t.observation.text for t in (missed, repeated, hit)] == ["17", "17", "11"]
    assert missed.reward == hit.reward == 0 and repeated.reward == -0.2 and answered.reward == 1
    assert answered.outcome is Outcome.ANSWERED
    assert answered.metrics == {"em": 1.0, "seen": 1.0, "tool_calls": 3.0}
    keys = [t.observation.state_key for t in (missed, repeated, hit)]
    assert keys[0] == keys[1] != keys[2]
    _, wrong = play(TASK, ROW, [render_answer("3 + 5 + 9")])
    assert wrong.metrics == {"em": 0.0, "seen": 0.0, "tool_calls": 0.0} and wrong.reward == 0


@pytest.mark.parametrize(
    "calls",
    [
        [call("9 + 5 + 3")],  # comes to what is seen already
        [call("3 + 5")],
        [call("9 + 5 + 12")],
        [call("9 * 5 - 3")],
        [call("9 + (5 -")],
        [render_call("calculator", {"formula": "9 + 5 - 3"})],
        ["<tool_call>{</tool_call>"],
    ],
)
def test_a_call_that_brings_nothing_is_wasted(calls):
    *_, last = play(TASK, ROW, [call("3 + 5 + 9"), *calls])
    assert last.raw_reward_parts["wasted_call"] == 1


def test_what_is_no_expression_is_told():
    _, told = play(TASK, ROW, [call("3 +")])
    assert told.observation.text.startswith("Error: ") and told.reward == pytest.approx(-0.3)


def test_an_expert_without_flaws_sees_no_value_twice_and_answers_only_what_hits():
    task = make_task("countdown", hasty=0.0, stubborn=0.0)
    for i in range(60):
        episode = play_expert(task, task.row("train", i), limit=200)
        shown = [t.observation.text for t in episode if t.tool_calls]
        assert len(set(shown)) == len(shown) and episode[-1].metrics["em"] == 1


def test_the_expert_errs_at_the_rates_given():
    def played(**flaws):
        task = make_task("countdown", **flaws)
        return [play_expert(task, task.row("train", i)) for i in range(120)]

    hasty = played(hasty=1.0)
    assert all(len(episode) == 2 for episode in hasty)
    assert 0.1 < np.mean([episode[-1].metrics["em"] for episode in hasty]) < 0.4
    stubborn = played(hasty=0.0, stubborn=1.0)
    assert all(len({t.tool_calls[0]["arguments"]["expression"] for t in e if t.tool_calls}) == 1 for e in stubborn)


def test_other_operators_reach_whole_targets():
    task = make_task("countdown", numbers=4, largest=20, operators="+-*/")
    for i in range(50):
        row = task.row("train", i)
        assert isinstance(row["target"], int) and len(row["numbers"]) == 4


def test_texts_hold_every_number():
    words = set(" ".join(TASK.texts(4000)).split())
    assert {str(n) for n in range(1, 13)} <= words and {str(n) for n in range(1, 30)} <= words


def test_settings_that_leave_no_rows_are_refused():
    with pytest.raises(ValueError, match=r"too few layouts: of 10000, none is of '\w+'; raise numbers \(2\)"):
        make_task("countdown", numbers=2, largest=2, operators="-")
