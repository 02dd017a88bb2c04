"""GSM8K: its rows and results, its expert, episodes with either tool, and damaged files."""

from __future__ import annotations

import asyncio
import gzip
import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plays import play_expert

from agentr1_jax.envs.base import Action
from agentr1_jax.envs.registry import TaskContext
from agentr1_jax.tasks import make_task
from agentr1_jax.tasks.gsm8k import number
from agentr1_jax.text.tool_calls import render_answer, render_call
from agentr1_jax.trajectory import Outcome

LINE = {"question": "Two apples at $3 each?", "answer": "It is 2*3 = $<<2*3=6>>6.\n#### 6"}


def write(folder, *lines):
    """A data folder with these lines as both splits."""
    (folder / "gsm8k").mkdir(exist_ok=True)
    for name in ("train", "test"):
        with gzip.open(folder / "gsm8k" / f"{name}.jsonl.gz", "wt") as out:
            out.writelines(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    return folder


@pytest.fixture(scope="module")
def task(data_dir):
    return make_task("gsm8k", TaskContext(data_dir=str(data_dir)))


def test_rows_are_the_published_problems(task):
    assert (task.size("train"), task.size("eval")) == (7473, 1319)
    first = task.row("eval", 0)
    assert first["id"] == "gsm8k/eval/0" and first["question"].startswith("Janet") and first["answers"] == ["18"]
    assert task.row("eval", 1319) == first
    passed = [task.row("train", i)["id"] for i in range(2 * 7473)]
    assert len(set(passed[:7473])) == 7473 and set(passed[7473:]) == set(passed[:7473])
    assert passed[7473:] != passed[:7473]


def test_the_expert_calculates_as_the_solution_does_and_is_right(task):
    told = np.zeros(3)
    for split in ("train", "eval"):
        for i in range(80):
            row = task.row(split, i)
            episode = play_expert(task, row, limit=40)
            assert episode[-1].metrics["em"] == 1 and episode[-1].outcome is Outcome.ANSWERED
            told += [1, len(row["calculations"]), sum(call["ok"] for t in episode for call in t.tool_calls)]
    # Some annotations are no expressions (`1/2cup`); they come back as errors that a policy can see.
    assert told[1] / told[0] > 2.5 and told[2] / told[1] > 0.99


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("18", 18), (" $1,234.50 ", Fraction(2469, 2)), ("-7.", -7), ("+.5", Fraction(1, 2)), ("60%", 60)),
        *(("$ 5", 5), ("-$5", -5), ("€1,000,000", 10**6), ("3.", 3)),
        *(("1,23", None), ("12 apples", None), ("1/2", None), ("", None), (None, None), ("nan", None), ("1e5", None)),
        *(("eighteen", None), ("5 6", None), ("--5", None), ("٣", None)),
    ],
)
def test_what_is_read_as_a_number(text, value):
    assert number(text) == value


@given(st.text())
def test_no_answer_raises_and_a_number_has_digits(text):
    assert number(text) is None or any(digit in text for digit in "0123456789")


def test_an_episode_with_the_calculator(tmp_path):
    task = make_task("gsm8k", TaskContext(data_dir=str(write(tmp_path, LINE))))
    row = task.row("train", 0)
    assert row["answers"] == ["6"] and row["calculations"] == ["2*3"] and row["solution"] == "It is 2*3 = $6."

    async def run(*texts):
        env = task.env()
        first = await env.reset(row, 0)
        assert [tool["function"]["name"] for tool in first.tools] == ["calculator"]
        assert first.messages[0]["content"].startswith("Two apples at $3 each?")
        return [await env.step(Action(np.zeros(0, np.int32), text)) for text in texts]

    called, answered = asyncio.run(run(render_call("calculator", {"expression": "2*3"}), render_answer("$6.00")))
    assert (
        called.observation.text == "6" and answered.reward == 1 and answered.metrics == {"em": 1.0, "tool_calls": 1.0}
    )
    (wrong,) = asyncio.run(run(render_answer("7")))
    assert wrong.reward == 0 and wrong.metrics["em"] == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"train\.jsonl\.gz, line 2: not a problem of GSM8K.*JSONDecodeError"),
        ({"question": "Why?"}, r"line 2: not a problem.*KeyError"),
        ({"question": "Why?", "answer": 5}, r"line 2: not a problem.*AttributeError"),
        ({"question": 5, "answer": "#### 5"}, "line 2: its answer must end with #### and a number, and its question"),
        ({"question": "Why?", "answer": "5"}, "line 2: its answer must end with ####"),
        ({"question": "Why?", "answer": "#### five"}, "line 2: its answer must end with ####"),
        ("[]", "line 2: not a problem.*TypeError"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, line, message):
    with pytest.raises(ValueError, match=message):
        make_task("gsm8k", TaskContext(data_dir=str(write(tmp_path, LINE, line))))


def test_a_damaged_file_is_named(tmp_path):
    path = write(tmp_path, *[LINE] * 99) / "gsm8k" / "train.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"train\.jsonl\.gz is damaged \(EOFError: .*\); restore it"):
        make_task("gsm8k", TaskContext(data_dir=str(tmp_path)))


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"train\.jsonl\.gz: no such file; .*prepare_data"):
        make_task("gsm8k", TaskContext(data_dir=str(tmp_path)))
