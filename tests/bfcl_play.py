"""Episodes of BFCL's tasks, played by prepared responses."""

from __future__ import annotations

import asyncio

import numpy as np

from agentr1_jax.contrib.bfcl.task import DONE
from agentr1_jax.envs.base import Action
from agentr1_jax.text.tool_calls import render_call

FS = "GorillaFileSystem"


def number_of(row) -> str:
    return row["id"].removeprefix("multi_turn_base_")


def play(task, row, responses):
    """The transitions of an episode, up to its end, and its metrics."""

    async def run():
        env = task.env()
        await env.reset(row, 0)
        done = []
        for text in responses:
            done.append(await env.step(Action(np.zeros(0, np.int32), text)))
            if done[-1].outcome:
                break
        return done, env.truncate()

    return asyncio.run(run())


def script(calls_of_turns):
    """Responses that make these calls, one each, and end each turn."""
    for calls in calls_of_turns:
        yield from (render_call(call["name"], call["arguments"]) for call in calls)
        yield DONE
