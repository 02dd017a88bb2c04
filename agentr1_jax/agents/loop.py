"""The default agent: a loop over an environment under a context rule and a budget."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import pydantic.dataclasses

from agentr1_jax.agents import boundary
from agentr1_jax.agents.context import ContextRule, History, Turn, append
from agentr1_jax.agents.session import Completion, Session
from agentr1_jax.envs.base import SUMMARY_REQUEST, Action, Env, Observation, Row, summary_rewards
from agentr1_jax.text.call_formats import CallFormat, hermes
from agentr1_jax.text.chat import MOST_CHARACTERS_PER_TOKEN, ChatFormat
from agentr1_jax.text.tokenizer import Tokenizer
from agentr1_jax.text.tool_calls import action_key, extract_answer, parse_tool_calls
from agentr1_jax.tools.base import run_in_thread
from agentr1_jax.trajectory import Budget, Outcome
from agentr1_jax.validation import STRICT

T = TypeVar("T")

FINAL_REQUEST = "No more calls. Give the final answer now."
END_OF_THINKING = "</think>"
LOOP_CHARACTERS = 4096
"""Characters of an observation that are rendered on the event loop, in about 10 ms; longer ones in a thread."""


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class AgentConfig:
    """Settings of the section `agent`.

    Attributes:
      call_format: how the policy writes tool calls; `auto`: as the tokenizer's chat template writes them.
      tell_tools: describe the tools in the first prompt; a policy taught by demonstrations knows them.
    """

    call_format: Literal["auto", "hermes", "llama3", "code", "react"] = "auto"
    tell_tools: bool = True


class TimeLimitReached(Exception):
    """A limit of the budget in seconds was reached."""


@contextlib.asynccontextmanager
async def time_limit(seconds: float | None, key: str) -> AsyncIterator[None]:
    """Stop the body with `TimeLimitReached` after some seconds; None for no limit."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise  # Raised by the body itself.
        raise TimeLimitReached(f"{key} ({seconds} s) was reached") from error


@dataclasses.dataclass(frozen=True)
class EnvLoop:
    """Prompt, response, action, observation, and again, until the environment or the budget ends the episode.

    Attributes:
      make_env: makes a fresh environment for each episode.
      chat: renders observations as ids, for the same call format.
      budget: every length limit. Summaries do not count as steps of `max_steps`; all other limits include them.
      call_format: how the policy writes calls and answers; environments read the common format.
      lenient: allow environments to repair calls that cannot be read.
      tell_tools: describe the tools in the first prompt.
      summary_tokens: most tokens of a summary.
      train_summaries: False leaves summaries out of the loss.
    """

    make_env: Callable[[], Env]
    tokenizer: Tokenizer
    chat: ChatFormat
    rule: ContextRule
    budget: Budget
    call_format: CallFormat = hermes.call_format()
    lenient: bool = False
    tell_tools: bool = True
    summary_tokens: int = 64
    train_summaries: bool = True

    async def run(self, session: Session, row: Row) -> None:
        """See `Agent.run`."""
        env = self.make_env()
        try:
            async with time_limit(self.budget.trajectory_seconds, "budget.trajectory_seconds"):
                await self._run_episode(session, env, row)
        except TimeLimitReached as error:
            if not session.steps:
                raise  # The policy has done nothing yet that could be judged.
            session.abort(Outcome.TIME_LIMIT, str(error), env.truncate())

    async def _run_episode(self, session: Session, env: Env, row: Row) -> None:
        budget = self.budget
        at = boundary.check_observation(await env.reset(row, session.seed))
        render_evidence = functools.lru_cache(maxsize=1)(functools.partial(self._render_evidence, at))
        history = History(await self._opening(at), render_evidence=render_evidence)
        spent = 0
        last_sequence: np.ndarray | None = None  # Prompt + response of the newest step.
        steps = min(budget.max_steps, row.get("max_steps", budget.max_steps)) + budget.final_answer_step
        for index in range(steps):
            prompt = await self._next_prompt(history)
            room = self._room(prompt, spent)
            if room < 1:
                session.finish(Outcome.CONTEXT_OVERFLOW, last_sequence, env.truncate())
                return
            last = index + 1 == steps
            async with time_limit(budget.step_seconds, "budget.step_seconds"):
                completion = await self.respond(session, prompt, min(budget.response_tokens, room), last)
                truncated = completion.finish_reason == "length"
                text = self._parse(completion, at.tools)
                action = Action(completion.ids, text, truncated=truncated, final=last, lenient=self.lenient)
                transition = boundary.check_transition(await env.step(action))
            after = transition.observation
            ask_now = budget.final_answer_step and index + 2 == steps
            turn = None if after is None else await self._turn(completion, after, ask_now)
            spent += 0 if turn is None else len(turn.response_ids) + len(turn.observation_ids)
            over = transition.terminated or transition.truncated
            response_limit = truncated and budget.on_truncated_response == "end"
            ends = over or response_limit or last
            request = None if ends or turn is None else self._summary_prompt(history, turn, completion)
            room = 0 if request is None else self._room(request, spent)
            session.record(
                reward=transition.reward,
                reward_parts=transition.reward_parts,
                raw_reward_parts=transition.raw_reward_parts,
                observation=SUMMARY_REQUEST if room > 0 else self._content(after),
                tool_calls=transition.tool_calls,
                state_key=at.state_key,
                action_key=_action_key(text) if transition.action_key is None else transition.action_key,
                potential=at.potential,
                next_potential=None if after is None else after.potential,
                context_rule=self.rule.name,
                observation_tokens=self._count_observation_tokens(history, prompt),
                info={**transition.info, "finish_reason": completion.finish_reason},
            )
            last_sequence = np.concatenate([prompt, completion.ids])
            if over:
                assert transition.outcome is not None, "checked: an end has an outcome"
                final = None
                if transition.truncated:
                    final = last_sequence if turn is None else await self._next(history.with_turn(turn), last_sequence)
                session.finish(transition.outcome, final, transition.metrics)
                return
            if response_limit:
                session.finish(Outcome.RESPONSE_TRUNCATED, last_sequence, env.truncate())
                return
            assert after is not None and turn is not None, "checked: an episode that goes on has an observation"
            if request is not None:
                if room < 1:
                    session.finish(Outcome.CONTEXT_OVERFLOW, last_sequence, env.truncate())
                    return
                completion = await self._summarise(session, env, request, room, after)
                last_sequence = np.concatenate([request, completion.ids])
                spent += len(completion.ids)
                summary = await self._turn(completion, after, ask_now)
                history = dataclasses.replace(history, turns=[summary], starts_with_summary=True)
            else:
                history = history.with_turn(turn)
            at = after
        session.finish(Outcome.MAX_STEPS, await self._next(history, last_sequence), env.truncate())

    async def respond(self, session: Session, prompt: np.ndarray, max_tokens: int, last: bool) -> Completion:
        """Sample the response of a step, `last` or not; what a subclass returns otherwise stands in later prompts."""
        return await session.generate(prompt, max_tokens, stop=self._stops)

    def _count_observation_tokens(self, history: History, prompt: np.ndarray) -> int | None:
        """Return `Step.observation_tokens` of a prompt: it ends with the newest observation, unless its rule differs.

        Rules join ids, or show the evidence in an opening made anew, so that what ends the prompt is known, not sought.
        """
        if not history.turns:
            return None
        newest = history.turns[-1]
        shown = newest.observation_ids
        if self.rule.needs_evidence and newest.evidence is not None and history.render_evidence is not None:
            shown = history.render_evidence(newest.evidence)
        ends = len(shown) > 0 and np.array_equal(prompt[-len(shown) :], shown)
        return len(shown) if ends else 0

    def _room(self, prompt: np.ndarray, spent: int) -> int:
        return min(self.budget.context_tokens - len(prompt), self.budget.trajectory_tokens - spent)

    async def _summarise(
        self, session: Session, env: Env, prompt: np.ndarray, room: int, after: Observation
    ) -> Completion:
        """Run a step in which the policy sums up everything but the newest observation."""
        async with time_limit(self.budget.step_seconds, "budget.step_seconds"):
            completion = await session.generate(prompt, min(self.summary_tokens, room), stop=self._stops)
        text = self._parse(completion, ())
        parts = boundary.check_numbers(summary_rewards(env, text), "parts of a summary's reward")
        session.record(
            reward=float(sum(parts.values())),
            reward_parts=parts,
            observation=self._content(after),
            state_key=None if after.state_key is None else f"{after.state_key}|summary",
            action_key=text.strip(),
            potential=after.potential,
            next_potential=after.potential,
            trainable=self.train_summaries,
            context_rule=self.rule.name,
            info={"summary": True, "finish_reason": completion.finish_reason},
        )
        return completion

    def render_opening(self, observation: Observation) -> np.ndarray:
        """Return the ids of the first prompt. Raises ValueError if the observation holds neither messages nor ids."""
        if observation.messages is not None:
            return self._render_messages(observation.messages, observation.tools)
        if observation.token_ids is not None:
            return np.asarray(observation.token_ids, np.int32)
        raise ValueError("the first observation of an environment must hold messages or token ids")

    async def _opening(self, observation: Observation) -> np.ndarray:
        size = _count_characters([message["content"] for message in observation.messages or ()])
        return await _render(size + len(repr(observation.tools)), self.render_opening, observation)

    async def _next_prompt(self, history: History) -> np.ndarray:
        evidence = history.turns[-1].evidence if self.rule.needs_evidence and history.turns else None
        return await _render(_count_characters([evidence or ""]), self.rule.next_prompt, history)

    @functools.cached_property
    def _stops(self) -> list[tuple[int, ...]]:
        return [(i,) for i in self.tokenizer.stop_ids]

    @property
    def _most_characters(self) -> int:
        """Characters of a prompt that are tokenised: more fit no prompt."""
        return MOST_CHARACTERS_PER_TOKEN * self.budget.context_tokens

    def _render_messages(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> np.ndarray:
        limit = self._most_characters
        told = tools if self.tell_tools else ()
        if len(repr(told)) > limit:
            raise ValueError(f"the tools of an observation do not fit budget.context_tokens; they begin {told!r:.200}")
        bounded = []
        for message in messages[: self.budget.context_tokens]:
            bounded.append({**message, "content": message["content"][:limit]})
            limit -= len(bounded[-1]["content"])
        return self.chat.render_opening(bounded, told)

    def _render_evidence(self, first: Observation, evidence: str) -> np.ndarray:
        if not first.messages:
            raise ValueError("the context rule 'evidence' needs an environment that opens with messages")
        *before, last = first.messages
        data = self.chat.data(evidence[: self._most_characters])
        return self._render_messages([*before, {**last, "content": f"{last['content']}\n\n{data}"}], first.tools)

    async def _turn(self, completion: Completion, after: Observation, ask_now: bool) -> Turn:
        evidence = after.evidence
        if ask_now and evidence is not None:
            evidence = f"{evidence}\n{FINAL_REQUEST}".lstrip()
        size = _count_characters(after.texts or [after.text or ""])
        observation_ids = await _render(size, self._render_observation, after, completion, ask_now)
        return Turn(completion.ids, observation_ids, self._thinking_tokens(completion), evidence)

    async def _next(self, history: History, otherwise: np.ndarray | None) -> np.ndarray | None:
        """Next prompt, or `otherwise` where it is too long or cannot be built."""
        if self.rule.needs_evidence and history.turns[-1].evidence is None:
            return otherwise
        prompt = await self._next_prompt(history)
        return prompt if len(prompt) <= self.budget.context_tokens else otherwise

    def _summary_prompt(self, history: History, turn: Turn, completion: Completion) -> np.ndarray | None:
        """Prompt that asks for a summary in place of the newest observation; None where none is due."""
        if self.rule.summary_due is None or not self.rule.summary_due(history.with_turn(turn)):
            return None
        stopped = completion.finish_reason == "stop"
        request = self.chat.render_observation(SUMMARY_REQUEST, "user", stopped)
        return append(history.with_turn(dataclasses.replace(turn, observation_ids=request)))

    def _thinking_tokens(self, completion: Completion) -> int:
        """Number of the first ids of a response that decode to all up to `</think>`; 0 without one."""
        ids = completion.ids.tolist()
        if END_OF_THINKING not in self.tokenizer.decode(ids):
            return 0
        return bisect.bisect_left(
            range(len(ids) + 1), True, key=lambda n: END_OF_THINKING in self.tokenizer.decode(ids[:n])
        )

    def _render_observation(self, observation: Observation, completion: Completion, ask_now: bool) -> np.ndarray:
        """Ids between a response and the next one: glue, the observation within its budget, glue."""
        if observation.token_ids is not None:
            return np.asarray(observation.token_ids, np.int32)
        texts = [observation.text] if observation.text is not None else observation.texts
        if texts is None:
            raise ValueError("a later observation of an environment must hold text or token ids, not messages")
        if ask_now:  # The request stands first, where truncation cannot take it away.
            texts = [f"{FINAL_REQUEST}\n{texts[0]}", *texts[1:]]
        stopped = completion.finish_reason == "stop"
        limit = self.budget.observation_tokens
        return self.chat.render_observation(
            texts[: self.budget.context_tokens], observation.role, stopped, max_tokens=limit
        )

    def _parse(self, completion: Completion, tools: Sequence[Mapping[str, Any]]) -> str:
        """Text of a response in the common format of calls and answers."""
        ids = completion.ids[:-1] if completion.finish_reason == "stop" else completion.ids
        return self.call_format.parse(self.tokenizer.decode(ids.tolist()), tools)

    def _content(self, observation: Observation | None) -> str:
        return "" if observation is None else (observation.content or "")[: self._most_characters]


async def _render(characters: int, function: Callable[..., T], *args: Any) -> T:
    """Return `function(*args)`, which tokenises so many characters, without blocking the event loop for long."""
    return function(*args) if characters <= LOOP_CHARACTERS else await run_in_thread(function, *args)


def _count_characters(texts: Sequence[str]) -> int:
    """Return the length of texts with escapes, as some chat templates write them; of a long one, of its beginning."""
    if len(texts) > LOOP_CHARACTERS:
        return len(texts)
    return sum(len(repr(text[:LOOP_CHARACTERS])) for text in texts)


def _action_key(text: str) -> str:
    """Return the action key of a response, in the common format, to an environment that does not say it."""
    return action_key(parse_tool_calls(text), extract_answer(text), text.strip())
