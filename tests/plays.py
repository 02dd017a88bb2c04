"""Episodes of an environment with given responses, and with those of its task's expert."""

from __future__ import annotations

import asyncio

import numpy as np

from agentr1_jax.envs.base import Action
from agentr1_jax.envs.registry import TaskContext
from agentr1_jax.tasks import make_task


def play(task, row, texts, seed=0):
    """The first observation, then a transition for each text."""

    async def run():
        env = task.env()
        return [await env.reset(row, seed), *[await env.step(Action(np.zeros(0, np.int32), text)) for text in texts]]

    return asyncio.run(run())


def play_expert(task, row, limit=6, seed=0):
    """The transitions of the expert's episode, at most so many."""

    async def run():
        env, expert, observation, transitions = task.env(), task.expert(row, seed), None, []
        await env.reset(row, seed)
        for _ in range(limit):
            transitions.append(await env.step(Action(np.zeros(0, np.int32), expert(observation))))
            if transitions[-1].terminated:
                break
            observation = transitions[-1].observation.content
        return transitions

    return asyncio.run(run())


def multihop_task(data_dir, seed=0, wrap=lambda tool: tool, make_retriever=None, **keys):
    """The task of real questions over a data folder, with some keys changed."""
    context = TaskContext(data_dir=str(data_dir), seed=seed, wrap=wrap, make_retriever=make_retriever)
    return make_task("multihop", context, **keys)
