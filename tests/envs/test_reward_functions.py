"""Reward functions of the user: how they are found, paid and blamed."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from agentr1_jax.envs.base import Action
from agentr1_jax.envs.reward_functions import RewardError, load_functions
from agentr1_jax.envs.rewards import Turn
from agentr1_jax.envs.tool_env import ToolEnv
from agentr1_jax.tasks import qa

ROW = {"id": 1, "question": "?", "answers": ["Ada"]}
MODULE = """
def brevity(row, turns):
    return -len(turns[-1].text) / 10

def known(row, turns):
    return None if "gold_ids" not in row else 1.0

def by_numpy(row, turns):
    import numpy
    return numpy.float32(0.5)

def nan(row, turns): return float("nan")
def words(row, turns): return "much"
def broken(row, turns): return row["nothing"]
def one_argument(row): return 0.0
def three(row, turns, more): return 0.0
def optional(row, turns, more=1): return 0.0
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
    __import__("sys").modules.pop("my_rewards", None)


def transition(functions, text="<answer>Ada</answer>"):
    reward = qa.make_reward({"answer": 1.0}, functions=functions)
    env = ToolEnv([], qa.question_messages(""), reward, qa.metrics, qa.state_key)

    async def play():
        await env.reset(ROW, 0)
        return await env.step(Action(np.zeros(0, np.int32), text))

    return asyncio.run(play())


def test_functions_are_paid_by_weight_and_logged_raw(module):
    done = transition([f"{module}:brevity=0.5", f"{module}:by_numpy=2", f"{module}:known=1"])
    assert done.reward_parts == {"answer": 1.0, "brevity": -1.0, "by_numpy": 1.0}
    assert done.reward == 1.0
    assert done.raw_reward_parts["brevity"] == -2.0 and "known" not in done.raw_reward_parts
    reward = qa.make_reward({}, "agentr1_v1", [f"{module}:brevity=0.5"])
    assert list(reward.weights) == ["v1_start", "v1_format", "v1_answer", "brevity"]
    assert load_functions([f"{module}:optional=-1e-1"])[1] == {"optional": -0.1}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("my_rewards.brevity", "is not 'module:function=weight', e.g. 'my_rewards:brevity=0.2'"),
        ("my_rewards:brevity", "is not 'module:function=weight'"),
        ("my_rewards:brevity=much", "is not 'module:function=weight'"),
        ("my_rewards:brevity=inf", "is not 'module:function=weight'"),
        ("no_rewards:brevity=1", "cannot import 'no_rewards' .ModuleNotFoundError"),
        ("bad_rewards:brevity=1", "cannot import 'bad_rewards' .ModuleNotFoundError: No module named 'nothing_of"),
        ("my_rewards:nothing=1", "module 'my_rewards' has no 'nothing'"),
        ("my_rewards:number=1", "'number' is a int; it must be a function"),
        ("my_rewards:late=1", "'late' is an async function"),
        ("my_rewards:one_argument=1", r"cannot be called as one_argument\(row, turns\): too many"),
        ("my_rewards:three=1", r"cannot be called as three\(row, turns\): missing"),
        ("my_rewards:answer=1", "there is a reward part 'answer' already; rename"),
    ],
)
def test_what_cannot_be_used_is_refused_at_the_start(module, spec, message):
    with pytest.raises(ValueError, match=message):
        qa.make_reward({}, functions=[spec])


def test_the_same_function_twice_is_refused(module):
    with pytest.raises(ValueError, match="there is a reward part 'brevity' already"):
        load_functions([f"{module}:brevity=1", f"{module}:brevity=2"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nan", "my_rewards:nan returned nan, which is no finite number"),
        ("words", "my_rewards:words returned 'much', which is no finite number"),
        ("broken", "my_rewards:broken raised KeyError: 'nothing'"),
    ],
)
def test_a_function_that_fails_is_named(module, name, message):
    with pytest.raises(RewardError, match=message):
        transition([f"{module}:{name}=0.1"])


def test_a_turn_without_gold_is_paid_nothing_for_it():
    reward = qa.make_reward({"gold_passage": 1.0, "answer": 1.0})
    turn = Turn("", [], [], "Ada")
    assert reward.contributions(reward.raw(ROW, [turn])) == {"answer": 1.0}
    assert reward.contributions(reward.raw({**ROW, "gold_ids": ["g"]}, [turn])) == {"gold_passage": 0.0, "answer": 1.0}
