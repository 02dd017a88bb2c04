"""A tokenizer of 64 ids whose text splits in several ways, a scripted environment, episodes of a scripted policy."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

import numpy as np

from agentr1_jax.agents.context import context_rule
from agentr1_jax.agents.loop import EnvLoop
from agentr1_jax.agents.session import Identity, ScriptedSession
from agentr1_jax.envs.base import Action, Observation, Transition
from agentr1_jax.rollout import runner
from agentr1_jax.text.chat import chat_format
from agentr1_jax.text.tokenizer import encode_parts, split_at_tokens
from agentr1_jax.trajectory import Budget

PIECES = ["the", "ab", "cd", "ing", *"abcdefghijklmnopqrstuvwxyz0123456789 \n.,?[]\\NG"]


class Letters:
    """Letters and some longer pieces, which `encode_data` prefers; a policy may well spell `a`, `b` instead of `ab`."""

    name = "letters"
    added = {"<|im_start|>": 0, "<|im_end|>": 1}
    stop_id, stop_ids, pad_id, vocab_size = 1, (1,), 2, 64

    def encode_data(self, text: str) -> list[int]:
        found = re.findall("|".join(map(re.escape, PIECES)), text)
        return [3 + PIECES.index(piece) for piece in found]

    def encode_template(self, text: str) -> list[int]:
        return encode_parts(self, split_at_tokens(text, self.added))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        strings = {3 + i: piece for i, piece in enumerate(PIECES)} | {i: s for s, i in self.added.items()}
        return "".join(strings.get(int(i), "") for i in ids)

    def render_chat(self, messages, tools=()) -> str:
        turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        offered = " ".join(tool["function"]["name"] for tool in tools)
        return f"{offered}{turns}<|im_start|>assistant\n"


TOKENIZER = Letters()
CHAT = chat_format(TOKENIZER)
ROW = {"id": "letters/0", "question": "who?", "answers": ["me"], "kind": "short", "plan": "kept out of the record"}
BUDGET = {
    "max_steps": 4,
    "response_tokens": 12,
    "observation_tokens": 20,
    "context_tokens": 200,
    "trajectory_tokens": 400,
}


class ScriptedEnv:
    """Gives prepared observations in order; the step number is the reward; ends at step `end` by `ending`.

    Keeps the actions it saw.
    """

    def __init__(self, observations: Sequence[str | np.ndarray], end: int | None = None, **ending):
        self.observations = observations
        self.end = end
        self.ending = {"terminated": True, "metrics": {"em": 1.0}} | ending
        self.actions: list[Action] = []

    async def reset(self, row, seed):
        self.actions = []
        return Observation(messages=[{"role": "user", "content": row["question"]}], state_key="s0")

    async def step(self, action):
        self.actions.append(action)
        n = len(self.actions)
        ending = self.ending if n == self.end else {}
        given = self.observations[n - 1] if n <= len(self.observations) else "so?"
        content = {"text": given} if isinstance(given, str) else {"token_ids": given}
        observation = None if ending else Observation(**content, state_key=f"s{n}")
        calls = [{"name": "look", "arguments": {"n": n}}]
        return Transition(observation, float(n), {"part": float(n)}, tool_calls=calls, info={"n": n}, **ending)

    def truncate(self):
        return {"em": 0.0}


def loop(make_env, rule: str = "append", **budget) -> EnvLoop:
    """The default agent on environments like this one."""
    return EnvLoop(make_env, TOKENIZER, CHAT, context_rule(rule), Budget(**BUDGET | budget))


def play(texts: Sequence[str], env, rule: str = "append", row=ROW, **budget):
    """The trajectory of a policy that says `texts`, one a step."""
    return run(loop(lambda: env, rule, **budget), texts, row)


def run(agent, texts: Sequence[str], row=ROW):
    """The trajectory of an agent whose policy says `texts`, one a step."""
    script = iter(texts)
    session = ScriptedSession(Identity("u", 0, 0, "letters", 7), lambda observation: next(script), TOKENIZER)
    session.begin(row)
    asyncio.run(agent.run(session, row))
    return session.trajectory()


def attempt(task, row, text: str):
    """The trajectory that the runner makes of an episode whose policy always says `text`."""
    session = ScriptedSession(Identity("u", 0, 0, "letters", 7), lambda observation: text, TOKENIZER)
    return asyncio.run(runner.attempt_episode(loop(task.env), session, row))


def observed(text: str, stopped: bool = True, limit: int = BUDGET["observation_tokens"]) -> list[int]:
    """Ids between a response and the next one."""
    return CHAT.render_observation(text, "tool", stopped, max_tokens=limit).tolist()
