"""The code in the README runs as it is printed there."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from agentr1_jax.credit import streams
from agentr1_jax.envs.base import Action
from agentr1_jax.tools import base
from agentr1_jax.trajectory import Outcome, Step, Trajectory

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def code(heading: str) -> dict:
    """Executes the Python block below a heading; its names."""
    block = re.search(rf"## {heading}\n.*?```python\n(.*?)```", README, re.DOTALL)
    assert block and block[1].count("\n") < 30
    names: dict = {}
    exec(block[1], names)
    return names


def test_tool() -> None:
    tool = code("Add a tool")["WordCount"]()
    assert isinstance(tool, base.Tool)
    assert asyncio.run(base.call(tool, {"text": "one two"})).content == "2"
    assert asyncio.run(base.call(tool, {"text": " "})).error.kind == "empty"
    assert asyncio.run(base.call(tool, {})).error.kind == "bad_arguments"


def test_environment() -> None:
    env = code("Add an environment")["GuessEnv"]()

    async def episode() -> list:
        await env.reset({"question": "?", "answers": ["7"]}, seed=0)
        return [await env.step(Action(np.zeros(1, np.int32), text)) for text in ("5", "7")]

    wrong, right = asyncio.run(episode())
    assert wrong.observation.text == "Not that." and wrong.reward == -0.1
    assert right.outcome is Outcome.ANSWERED and right.reward == 1.0


@pytest.mark.usefixtures("registry")
def test_credit_scheme() -> None:
    scheme = code("Add a credit scheme")["batch_mean"]
    ids = np.arange(2, dtype=np.int32)
    rewards = (1.0, 0.0)
    trajectories = [
        Trajectory(f"t{i}", 0, i, "", 0, (Step(ids, ids, np.zeros(2, np.float32), reward=r),), Outcome.ANSWERED)
        for i, r in enumerate(rewards)
    ]
    batch = streams.to_batch(streams.flatten(trajectories), trajectories=3, steps=4, tokens=9, critic=False)
    advantages = jax.jit(scheme)(batch).advantages
    np.testing.assert_allclose(advantages, [0.5, 0.5, -0.5, -0.5, 0, 0, 0, 0, 0])
