"""The default agent: a loop over an environment under a context rule and a budget."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from agentr1_jax.agents.base import Completion, Session
from agentr1_jax.agents.context import History, Rule, Turn, append
from agentr1_jax.envs.base import SUMMARY_REQUEST, Action, Env, Observation, Row, judged
from agentr1_jax.text.chat import ChatFormat
from agentr1_jax.text.dialects import Dialect, hermes
from agentr1_jax.text.tokenizer import Tokenizer
from agentr1_jax.trajectory import Budget, Outcome

FINAL_REQUEST = "No more calls. Give the final answer now."
THOUGHT = "</think>"
ROW_FACTS = ("id", "task", "dataset", "question", "answers", "kind", "hops", "max_steps")


class TimeUp(Exception):
    """A limit of the budget in seconds was reached."""


@contextlib.asynccontextmanager
async def within(seconds: float | None, key: str) -> AsyncIterator[None]:
    """Breaks its body off with `TimeUp` after so many seconds; None for no limit."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise  # Of somebody else.
        raise TimeUp(f"{key} ({seconds} s) was reached") from error


@dataclasses.dataclass(frozen=True)
class EnvLoop:
    """Prompt, response, action, observation, and again, until the environment or the budget ends it.

    Attributes:
      make_env: a fresh environment for each episode.
      tokenizer: decodes responses.
      chat: renders observations as ids.
      rule: builds the next prompt.
      budget: every length limit. Summaries come beside `max_steps`, and within all others.
      dialect: how the policy writes calls and answers; environments read the house's format. `chat` is made for it.
      lenient: whether environments may mend calls that cannot be read.
      tell_tools: whether the first prompt describes the tools; a policy that knows them needs no such words.
      summary_tokens: most tokens of a summary.
      train_summaries: False leaves summaries out of the loss.
    """

    make_env: Callable[[], Env]
    tokenizer: Tokenizer
    chat: ChatFormat
    rule: Rule
    budget: Budget
    dialect: Dialect = hermes.dialect()
    lenient: bool = False
    tell_tools: bool = True
    summary_tokens: int = 64
    train_summaries: bool = True

    async def run(self, session: Session, row: Row) -> None:
        """Runs one episode on `row`."""
        env = self.make_env()
        facts = {key: row[key] for key in ROW_FACTS if key in row}
        try:
            async with within(self.budget.trajectory_seconds, "budget.trajectory_seconds"):
                await self._episode(session, env, row, facts)
        except TimeUp as error:
            if not session.steps:
                raise  # Whatever hung, the policy has done nothing yet that could be judged.
            session.cut_off(Outcome.TIME_LIMIT, str(error), env.cut(), facts)

    async def _episode(self, session: Session, env: Env, row: Row, facts: Mapping[str, Any]) -> None:
        budget = self.budget
        at = await env.reset(row, session.seed)
        history = History(self.opening(at), retold=functools.partial(self._retold, at))
        spent = 0
        fits: np.ndarray | None = None
        steps = min(budget.max_steps, row.get("max_steps", budget.max_steps)) + budget.final_answer_step
        for index in range(steps):
            prompt = self.rule.prompt(history)
            room = self._room(prompt, spent)
            if room < 1:
                session.finish(Outcome.CONTEXT_OVERFLOW, fits, env.cut(), facts)
                return
            async with within(budget.step_seconds, "budget.step_seconds"):
                completion = await session.generate(prompt, min(budget.response_tokens, room), stop=self._stops)
                cut = completion.finish_reason == "length"
                last = index + 1 == steps
                text = self._text(completion, at.tools)
                action = Action(completion.ids, text, truncated=cut, final=last, lenient=self.lenient)
                transition = await env.step(action)
            after = transition.observation
            ask_now = budget.final_answer_step and index + 2 == steps
            turn = None if after is None else self._turn(completion, after, ask_now)
            spent += 0 if turn is None else len(turn.response_ids) + len(turn.observation_ids)
            over = transition.terminated or transition.truncated
            cut_off = cut and budget.on_response_cut == "end"
            ends = over or cut_off or last
            request = None if ends or turn is None else self._summary_prompt(history, turn, completion)
            room = 0 if request is None else self._room(request, spent)
            session.record(
                reward=transition.reward,
                reward_parts=transition.reward_parts,
                observation=SUMMARY_REQUEST if room > 0 else _text_of(after),
                tool_calls=transition.tool_calls,
                state_key=at.state_key,
                context_rule=self.rule.name,
                info={**transition.info, **_potentials(at, after), "finish_reason": completion.finish_reason},
            )
            fits = np.concatenate([prompt, completion.ids])
            if over:
                outcome = transition.outcome or Outcome.ENV_DONE
                final = None
                if transition.truncated:
                    final = fits if turn is None else self._next(history.then(turn), fits)
                session.finish(outcome, final, transition.metrics, facts)
                return
            if cut_off:
                session.finish(Outcome.RESPONSE_TRUNCATED, fits, env.cut(), facts)
                return
            assert after is not None and turn is not None, "an environment that goes on must give an observation"
            if request is not None:
                if room < 1:
                    session.finish(Outcome.CONTEXT_OVERFLOW, fits, env.cut(), facts)
                    return
                completion = await self._summary(session, env, request, room, after)
                fits = np.concatenate([request, completion.ids])
                spent += len(completion.ids)
                history = dataclasses.replace(history, turns=[self._turn(completion, after, ask_now)], summarised=True)
            else:
                history = history.then(turn)
            at = after
        session.finish(Outcome.MAX_STEPS, self._next(history, fits), env.cut(), facts)

    def _room(self, prompt: np.ndarray, spent: int) -> int:
        """The most tokens of a response to a prompt."""
        return min(self.budget.context_tokens - len(prompt), self.budget.trajectory_tokens - spent)

    async def _summary(
        self, session: Session, env: Env, prompt: np.ndarray, room: int, after: Observation
    ) -> Completion:
        """One step in which the policy sums up all but the observation that it has yet to see."""
        async with within(self.budget.step_seconds, "budget.step_seconds"):
            completion = await session.generate(prompt, min(self.summary_tokens, room), stop=self._stops)
        parts = judged(env, self._text(completion, ()))
        session.record(
            reward=float(sum(parts.values())),
            reward_parts=parts,
            observation=_text_of(after),
            state_key=None if after.state_key is None else f"{after.state_key}|summary",
            context_rule=self.rule.name,
            info={
                "summary": True,
                "trained": self.train_summaries,
                **_potentials(after, after),
                "finish_reason": completion.finish_reason,
            },
        )
        return completion

    def opening(self, observation: Observation) -> np.ndarray:
        """Ids of the first prompt. Raises ValueError if the observation holds neither messages nor ids."""
        if observation.messages is not None:
            return self._rendered(observation.messages, observation.tools)
        if observation.token_ids is not None:
            return np.asarray(observation.token_ids, np.int32)
        raise ValueError("the first observation of an environment must hold messages or token ids")

    @functools.cached_property
    def _stops(self) -> list[tuple[int, ...]]:
        return [(i,) for i in self.tokenizer.stop_ids]

    def _rendered(self, messages: Sequence[Mapping[str, str]], tools: Sequence[Mapping[str, Any]]) -> np.ndarray:
        return np.asarray(self.chat.render_opening(messages, tools if self.tell_tools else ()), np.int32)

    def _retold(self, first: Observation, evidence: str) -> np.ndarray:
        """Ids of an opening that ends with evidence, which is data."""
        if not first.messages:
            raise ValueError("the context rule 'evidence' needs an environment that opens with messages")
        *before, last = first.messages
        told = {**last, "content": f"{last['content']}\n\n{self.chat.data(evidence)}"}
        return self._rendered([*before, told], first.tools)

    def _turn(self, completion: Completion, after: Observation, ask_now: bool) -> Turn:
        evidence = after.evidence
        if ask_now and evidence is not None:
            evidence = f"{evidence}\n{FINAL_REQUEST}".lstrip()
        return Turn(completion.ids, self._observed(after, completion, ask_now), self._thought(completion), evidence)

    def _next(self, history: History, fits: np.ndarray | None) -> np.ndarray | None:
        """The prompt had the episode gone on; what fitted last where it has no room, or cannot be told."""
        if self.rule.needs_evidence and history.turns[-1].evidence is None:
            return fits
        prompt = self.rule.prompt(history)
        return prompt if len(prompt) <= self.budget.context_tokens else fits

    def _summary_prompt(self, history: History, turn: Turn, completion: Completion) -> np.ndarray | None:
        """The prompt that asks for a summary, in place of the observation that came back; None where none is due."""
        if self.rule.due is None or not self.rule.due(history.then(turn)):
            return None
        stopped = completion.finish_reason == "stop"
        request = np.asarray(self.chat.render_observation(SUMMARY_REQUEST, "user", stopped), np.int32)
        return append(history.then(dataclasses.replace(turn, observation_ids=request)))

    def _thought(self, completion: Completion) -> int:
        """How many ids at the start of a response are thinking: as few as decode to all up to `</think>`."""
        ids = completion.ids.tolist()
        if THOUGHT not in self.tokenizer.decode(ids):
            return 0
        return bisect.bisect_left(range(len(ids) + 1), True, key=lambda n: THOUGHT in self.tokenizer.decode(ids[:n]))

    def _observed(self, observation: Observation, completion: Completion, ask_now: bool) -> np.ndarray:
        """Ids between a response and the next one: glue, the observation cut to its budget, glue."""
        if observation.token_ids is not None:
            return np.asarray(observation.token_ids, np.int32)
        texts = [observation.text] if observation.text is not None else observation.texts
        if texts is None:
            raise ValueError("a later observation of an environment must hold text or token ids, not messages")
        if ask_now:  # The request stands first, where no cut can take it away.
            texts = [f"{FINAL_REQUEST}\n{texts[0]}", *texts[1:]]
        stopped = completion.finish_reason == "stop"
        limit = self.budget.observation_tokens
        return np.asarray(self.chat.render_observation(texts, observation.role, stopped, max_tokens=limit), np.int32)

    def _text(self, completion: Completion, tools: Sequence[Mapping[str, Any]]) -> str:
        ids = completion.ids[:-1] if completion.finish_reason == "stop" else completion.ids
        return self.dialect.to_house(self.tokenizer.decode(ids.tolist()), tools)


def _text_of(observation: Observation | None) -> str:
    return "" if observation is None else observation.content or ""


def _potentials(before: Observation, after: Observation | None) -> dict[str, float]:
    """Φ of the states around a step, where the environment gives one; for potential-based shaping."""
    found = {"potential": before.potential, "next_potential": after.potential if after is not None else None}
    return {key: x for key, x in found.items() if x is not None}
