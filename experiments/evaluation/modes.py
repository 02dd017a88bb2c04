"""Modes of an evaluation, i.e. ways of answering that are compared: the agent of each, and whose parameters it uses."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from agentr1_jax.agents.loop import EnvLoop
from agentr1_jax.agents.session import Completion, Session
from agentr1_jax.envs.base import Action, Env, Observation, Row, Task, Transition, summary_rewards
from agentr1_jax.errors import UserError
from agentr1_jax.tasks.rag import RagEnv, searches
from agentr1_jax.text.call_formats import hermes
from agentr1_jax.text.chat import chat_format
from agentr1_jax.text.tokenizer import Tokenizer
from agentr1_jax.text.tool_calls import extract_answer, parse_tool_calls, render_call
from agentr1_jax.train import build
from agentr1_jax.train.settings import Settings

TRAINED, START = "checkpoint", "start"
"""Whose parameters a mode uses: the trained ones, or those that training began with."""

COMMON_MODES = ("agent", "base", "rag", "react")
"""Those that are compared where nobody names any."""
MODES = (*COMMON_MODES, "search_more")
QUERY = "QUERY"
REACT_INSTRUCTION = (
    "Answer the question with the help of the tools. Take one action at a time, then wait for its observation. Give "
    "the final answer in its own field, as short as possible, for example Paris."
)


def parse_modes(names: Sequence[str]) -> list[str]:
    """Return the modes, each once. Raise UserError on an unknown one, or none."""
    for name in names:
        if name not in MODES:
            raise UserError(f"--modes: unknown mode {name!r}; choose among {', '.join(MODES)}")
    if not names:
        raise UserError(f"--modes names nothing; choose among {', '.join(MODES)}")
    return list(dict.fromkeys(names))


def role_of(mode: str, baselines: str) -> str:
    """Return whose parameters a mode uses.

    Args:
      mode: `agent` and `search_more` use the trained ones, `base` those of the start.
      baselines: whose parameters the other modes use, `TRAINED` or `START`.
    """
    return {"agent": TRAINED, "search_more": TRAINED, "base": START}.get(mode, baselines)


def make_agent(mode: str, settings: Settings, task: Task, tokenizer: Tokenizer) -> EnvLoop:
    """Make the agent of a mode. Raise ValueError or UserError if the tokenizer or the settings do not allow it."""
    if mode == "react":
        return _make_react(settings, task, tokenizer)
    agent = build.make_agent(settings, task, tokenizer)
    if mode == "search_more":
        before, _ = agent.call_format.render(render_call("search", {"query": f" {QUERY}"})).split(f" {QUERY}")
        parts = {field.name: getattr(agent, field.name) for field in dataclasses.fields(agent)}
        return SearchMore(**parts, opening=tuple(tokenizer.encode_template(before)))
    if mode != "rag":
        return agent
    # Answers are in the common format, whatever call format the config has: there are no calls.
    call_format = hermes.call_format()
    chat = chat_format(tokenizer, call_format)
    as_data = functools.partial(chat.data, max_tokens=settings.budget.observation_tokens)
    budget = dataclasses.replace(agent.budget, max_steps=1, final_answer_step=False)
    return dataclasses.replace(
        agent, make_env=lambda: RagEnv(task.env(), as_data), chat=chat, budget=budget, call_format=call_format
    )


def check_mode(mode: str, task: Task, row: Row) -> None:
    """Refuse a task without answers to compare with, and modes that search where there is no search tool.

    Raises:
      UserError: says which tasks can be evaluated.
    """
    if "answers" not in row:
        raise UserError(f"task {task.name!r} asks no questions, so there is no EM; evaluate hopworld or multihop")
    if mode in ("rag", "react", "search_more") and not searches(asyncio.run(task.env().reset(row, 0))):
        raise UserError(f"task {task.name!r} has no tool search(query); leave out the mode {mode}")


class InstructedEnv:
    """An Env of questions that opens with another instruction: its own names tags that ReAct lacks."""

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
        """Return the metrics of the episode so far."""
        return self._env.truncate()


@dataclasses.dataclass(frozen=True)
class SearchMore(EnvLoop):
    """An agent that is made to search once more where it first answers, if its budget has room for that.

    The answer is dropped, and the response begins with the opening of a call instead; the policy writes the query. A
    control for what more searches alone bring. The opening is recorded at the end of the step's prompt. Not forced are
    an answer in the last step, and one whose prompt leaves no room for a query, its results and an answer.

    Attributes:
      opening: ids of a call of `search` up to its query.
    """

    opening: tuple[int, ...] = ()

    async def respond(self, session: Session, prompt: np.ndarray, max_tokens: int, last: bool) -> Completion:
        """Sample the response of a step, or the query of the search that stands in its place."""
        completion = await super().respond(session, prompt, max_tokens, last)
        opening, b = np.asarray(self.opening, np.int32), self.budget
        done = any(np.array_equal(step.prompt_ids[-len(opening) :], opening) for step in session.steps)
        fits = len(prompt) + 2 * b.response_tokens + b.observation_tokens <= b.context_tokens
        if done or last or not fits or len(opening) >= max_tokens or not self._answers(completion):
            return completion
        session.retract()
        query = await super().respond(session, np.concatenate([prompt, opening]), max_tokens - len(opening), last)
        # The loop reads the ids alone; what was sampled is in the session.
        logprobs = np.concatenate([np.zeros(len(opening), np.float32), query.logprobs])
        return dataclasses.replace(query, ids=np.concatenate([opening, query.ids]), logprobs=logprobs)

    def _answers(self, completion: Completion) -> bool:
        text = self._parse(completion, ())
        return extract_answer(text) is not None and not parse_tool_calls(text)


def _make_react(settings: Settings, task: Task, tokenizer: Tokenizer) -> EnvLoop:
    """Make an agent that calls the same tools in the text form of ReAct (Yao et al. 2023), as its prompt says."""
    style = dataclasses.replace(settings.agent, call_format="react", tell_tools=True)
    agent = build.make_agent(dataclasses.replace(settings, agent=style), task, tokenizer)
    return dataclasses.replace(agent, make_env=lambda: InstructedEnv(task.env(), REACT_INSTRUCTION))
