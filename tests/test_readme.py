"""The code in the guide and the README runs as it is printed there."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from changes import changed
from letters import TOKENIZER, ScriptedEnv, play

from agentr1_jax.agents.context import RULES
from agentr1_jax.credit.batch import flatten, to_token_batch
from agentr1_jax.envs.base import Action, Row
from agentr1_jax.envs.registry import TASKS
from agentr1_jax.runtime import config as configs
from agentr1_jax.tasks import qa
from agentr1_jax.text.tool_calls import render_answer, render_call
from agentr1_jax.tools.base import Tool, call
from agentr1_jax.tools.wrappers import ToolMetrics
from agentr1_jax.trajectory import Outcome, Step, Trajectory
from configs import base
from experiments import setup

ROOT = Path(__file__).parent.parent


def block(heading: str, page: str = "docs/*.md", most: int = 40) -> str:
    """The Python below a heading that one of the pages has, at most so many lines."""
    pattern = rf"^#+ {heading}\n.*?```python\n(.*?)```"
    texts = [path.read_text(encoding="utf-8") for path in ROOT.glob(page)]
    (found,) = filter(None, (re.search(pattern, text, re.DOTALL | re.MULTILINE) for text in texts))
    assert found[1].count("\n") < most
    return found[1]


def code(heading: str) -> dict:
    """Executes the Python below a heading; its names."""
    names: dict = {}
    exec(block(heading), names)
    return names


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], str]:
    """Pastes the Python below a heading into a file; what it registers is forgotten after the test."""
    for registry in (RULES, TASKS):
        for attribute in ("_entries", "_files"):
            monkeypatch.setattr(registry, attribute, dict(getattr(registry, attribute)))

    def paste(heading: str, page: str = "docs/*.md") -> str:
        path = tmp_path / f"{heading.split()[-1]}.py"
        path.write_text(block(heading, page), encoding="utf-8")
        return str(path)

    return paste


def test_tool() -> None:
    tool = code("Add a tool")["WordCount"]()
    assert isinstance(tool, Tool)
    assert asyncio.run(call(tool, {"text": "one two"})).content == "2"
    assert asyncio.run(call(tool, {"text": " "})).error.kind == "empty"
    assert asyncio.run(call(tool, {})).error.kind == "bad_arguments"


def episode(env: Any, row: Row, texts: Sequence[str]) -> list:
    """The transitions of these responses."""

    async def run() -> list:
        await env.reset(row, seed=0)
        return [await env.step(Action(np.zeros(1, np.int32), text)) for text in texts]

    return asyncio.run(run())


def test_environment(own: Callable[[str], str]) -> None:
    config = changed(base.get_config(), task__file=own("Add an environment"), task__name="guess", policy__preset="tiny")
    with config.unlocked():
        config.task.args.most = 7
    task = setup.make_task(setup.read_settings(config), ToolMetrics())
    assert task.size("train") == task.size("eval") == 4 and task.row("eval", 3)["answers"] == ["7"]
    wrong, right = episode(task.env(), task.row("eval", 3), ["5", "7"])
    assert wrong.observation.text == "Not that." and wrong.reward == -0.1
    assert right.outcome is Outcome.ANSWERED and right.reward == 1.0
    with pytest.raises(ValueError, match="guess has no expert to learn from; set warm_start.updates=0"):
        task.expert(task.row("train", 0), 0)


def test_task_of_the_readme(own: Callable[..., str]) -> None:
    file = own("A task of your own", "README.md")
    config = configs.load_config(f"{ROOT}/configs/blank.py:{file}:shop")
    task = setup.make_task(setup.read_settings(changed(config, policy__preset="tiny")), ToolMetrics())
    row = task.row("eval", 0)
    assert row["question"] == "What cost a pen and a cup?"
    calls = [render_call("price", {"item": item}) for item in ("pen", "boat")]
    priced, unknown, right = episode(task.env(), row, [*calls, render_answer("10")])
    assert priced.observation.text == "3" and unknown.observation.text == "Error: no such item." and right.reward == 1


def test_tool_in_an_environment() -> None:
    """Beside the search tool, as the page of the tool says."""
    tool = code("Add a tool")["WordCount"]()
    env = qa.search_env([tool], {"answer": 1.0}, "Count.")
    row = {"id": "r", "question": "How many words?", "answers": ["2"]}
    counted, answered = episode(env, row, [render_call("count", {"text": "one two"}), render_answer("2")])
    assert counted.observation.text == "2" and answered.reward == 1


def test_context_rule(own: Callable[[str], str]) -> None:
    RULES.load(own("Add a context rule"))
    t = play(["ab", "cd", "ing", "the"], ScriptedEnv(["a dog", "the cat", "a bird"], end=4), "ends(1)")
    seen = [TOKENIZER.decode(step.prompt_ids) for step in t.steps]
    assert seen[0] == TOKENIZER.render_chat([{"role": "user", "content": "who?"}])
    assert [["ab" in s, "cd" in s, "ing<" in s] for s in seen[1:]] == [
        *([True, False, False], [True, True, False], [True, False, True])
    ]


@pytest.mark.usefixtures("registry")
def test_credit_scheme() -> None:
    assert block("Credit", "README.md") == block("Add a credit scheme")
    scheme = code("Add a credit scheme")["batch_mean"]
    ids = np.arange(2, dtype=np.int32)
    rewards = (1.0, 0.0)
    trajectories = [
        Trajectory(f"t{i}", 0, i, "", 0, (Step(ids, ids, np.zeros(2, np.float32), reward=r),), Outcome.ANSWERED)
        for i, r in enumerate(rewards)
    ]
    batch = to_token_batch(flatten(trajectories), trajectories=3, steps=4, tokens=9, critic=False)
    advantages = jax.jit(scheme)(batch).advantages
    np.testing.assert_allclose(advantages, [0.5, 0.5, -0.5, -0.5, 0, 0, 0, 0, 0])
