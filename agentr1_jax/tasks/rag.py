"""Naive RAG: one retrieval with the question itself, then the answer in one step, without tools."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from agentr1_jax.envs.base import Action, Env, Observation, Row, Transition
from agentr1_jax.text.tool_calls import extract_answer, parse_tool_calls, render_call
from agentr1_jax.trajectory import Outcome

INSTRUCTION = (
    "Answer the question from these passages. Reason inside <think> and </think>. Then give the answer inside <answer> "
    "and </answer>, as short as possible, for example <answer> Paris </answer>."
)
NO_ANSWER = "Error: no answer."


class RagEnv:
    """An Env of one step around an environment with a search tool: what that measures is measured here too.

    The retrieval is a call of the inner environment's own tool, made in the policy's stead, so that passages, gold
    recall and the count of tool calls are those of an agent that searched once. The response is its second turn.
    Anything but a plain answer ends the episode with `parse_failure`; a truncated response is left to the loop.

    Args:
      env: a fresh environment of a question answering task; see `searches`.
      told: the passages as a tool result tells them: without marks that would be taken for the policy's, and cut.

    Raises:
      RuntimeError: from `reset`, where the infrastructure failed the retrieval; the runner tries again.
    """

    def __init__(self, env: Env, told: Callable[[str], str] = lambda text: text) -> None:
        self._env = env
        self._told = told

    async def reset(self, row: Row, seed: int) -> Observation:
        """Retrieve; the opening holds the passages and the question."""
        await self._env.reset(row, seed)
        call = render_call("search", {"query": row["question"]})
        found = await self._env.step(Action(np.zeros(0, np.int32), call))
        self._retrieval = found.tool_calls
        passages = "\n".join(record["result"] for record in found.tool_calls)
        if found.observation is None:
            raise RuntimeError(f"the retrieval failed ({found.outcome}): {passages}")
        text = f"{self._told(passages)}\n\nQuestion: {row['question']}\n\n{INSTRUCTION}"
        return Observation(messages=[{"role": "user", "content": text}], state_key=found.observation.state_key)

    async def step(self, action: Action) -> Transition:
        """Take the answer; the record of the retrieval goes with it."""
        if extract_answer(action.text) is not None and not parse_tool_calls(action.text):
            return dataclasses.replace(await self._env.step(action), tool_calls=self._retrieval)
        if action.truncated:
            observation = Observation(text=NO_ANSWER, role="user")
            return Transition(observation, 0.0, tool_calls=self._retrieval, action_key=NO_ANSWER)
        return Transition(
            observation=None,
            reward=0.0,
            terminated=True,
            outcome=Outcome.PARSE_FAILURE,
            tool_calls=self._retrieval,
            metrics=self.truncate(),
            action_key=NO_ANSWER,
        )

    def truncate(self) -> Mapping[str, float]:
        """Return the metrics of an episode without an answer: that of the retrieval alone."""
        return self._env.truncate()


def searches(opening: Observation) -> bool:
    """Return True if an opening offers what Naive RAG needs: a tool `search` that takes a `query`."""
    functions = [schema["function"] for schema in opening.tools]
    return any(f["name"] == "search" and "query" in f["parameters"].get("properties", {}) for f in functions)
