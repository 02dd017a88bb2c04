"""The ways of answering that are compared: which agent, and whose parameters."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Mapping, Sequence

import ml_collections

from agentr1_jax.agents.loop import EnvLoop
from agentr1_jax.envs.base import Action, Env, Observation, Row, Task, Transition, summary_rewards
from agentr1_jax.errors import UserError
from agentr1_jax.tasks.rag import RagEnv, searches
from agentr1_jax.text.call_formats import hermes
from agentr1_jax.text.chat import chat_format
from agentr1_jax.text.tokenizer import Tokenizer
from experiments import build

TRAINED, START = "checkpoint", "start"
"""Whose parameters: the trained ones, or those that training began with."""

MODES = ("agent", "base", "rag", "react")
REACT_INSTRUCTION = (
    "Answer the question with the help of the tools. Take one action at a time, then wait for its observation. Give "
    "the final answer in its own field, as short as possible, for example Paris."
)


def parse_modes(names: Sequence[str]) -> list[str]:
    """The modes named, each once. Raise UserError on an unknown one, or none."""
    for name in names:
        if name not in MODES:
            raise UserError(f"--modes: unknown mode {name!r}; choose among {', '.join(MODES)}")
    if not names:
        raise UserError(f"--modes names nothing; choose among {', '.join(MODES)}")
    return list(dict.fromkeys(names))


def parameters_of(mode: str, baselines: str) -> str:
    """Whose parameters a mode uses: `agent` the trained ones, `base` those of the start, the others `baselines`."""
    return {"agent": TRAINED, "base": START}.get(mode, baselines)


def make_agent(mode: str, config: ml_collections.ConfigDict, task: Task, tokenizer: Tokenizer) -> EnvLoop:
    """The agent of a mode. Raise UserError if the tokenizer or the config does not allow it."""
    if mode == "react":
        return _react(config, task, tokenizer)
    agent = build.agent(config, task, tokenizer)
    if mode != "rag":
        return agent
    # Answers are in the common format, whatever call format the config has: there are no calls.
    call_format = hermes.call_format()
    chat = chat_format(tokenizer, call_format)
    told = functools.partial(chat.data, max_tokens=config.budget.observation_tokens)
    budget = dataclasses.replace(agent.budget, max_steps=1, final_answer_step=False)
    return dataclasses.replace(
        agent, make_env=lambda: RagEnv(task.env(), told), chat=chat, budget=budget, call_format=call_format
    )


def check_task(task: Task, row: Row, modes: Sequence[str]) -> None:
    """Refuse a task without answers to compare with, and `rag` and `react` where there is no search tool.

    Raises:
      UserError: says which tasks do.
    """
    if "answers" not in row:
        raise UserError(f"task {task.name!r} asks no questions, so there is no EM; evaluate hopworld or multihop")
    if {"rag", "react"} & set(modes):
        opening = asyncio.run(task.env().reset(row, 0))
        if not searches(opening):
            raise UserError(f"task {task.name!r} has no tool search(query); leave out the modes rag and react")


class InstructedEnv:
    """An Env of questions that opens with another instruction than its own, which names tags that ReAct has not."""

    def __init__(self, env: Env, instruction: str) -> None:
        self._env = env
        self._instruction = instruction

    async def reset(self, row: Row, seed: int) -> Observation:
        """Start an episode; the instruction follows the question."""
        opening = await self._env.reset(row, seed)
        text = f"Question: {row['question']}\n\n{self._instruction}"
        return dataclasses.replace(opening, messages=[{"role": "user", "content": text}])

    async def step(self, action: Action) -> Transition:
        """Apply one response of the policy."""
        return await self._env.step(action)

    def judge_summary(self, text: str) -> Mapping[str, float]:
        """Return the reward parts of a summary."""
        return summary_rewards(self._env, text)

    def truncate(self) -> Mapping[str, float]:
        """Metrics of the episode so far."""
        return self._env.truncate()


def _react(config: ml_collections.ConfigDict, task: Task, tokenizer: Tokenizer) -> EnvLoop:
    """The same tools, called in the text form of ReAct (Yao et al. 2023), as the prompt says."""
    config = config.copy_and_resolve_references()
    config.agent.call_format, config.agent.tell_tools = "react", True
    agent = build.agent(config, task, tokenizer)
    return dataclasses.replace(agent, make_env=lambda: InstructedEnv(task.env(), REACT_INSTRUCTION))
