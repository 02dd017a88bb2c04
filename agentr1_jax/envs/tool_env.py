"""ToolEnv: the environment made of tools. It reads calls, runs them and tells the policy what came back."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentr1_jax.envs.base import Action, Observation, Row, Transition
from agentr1_jax.envs.rewards import Reward, Turn
from agentr1_jax.text.tool_calls import ParseError, ToolCall, action_key, extract_answer, parse_tool_calls
from agentr1_jax.tools import base
from agentr1_jax.tools.base import Tool, ToolResult
from agentr1_jax.trajectory import Outcome

Tools = Sequence[Tool] | Callable[[Row], Sequence[Tool]]
User = Callable[[Row, Sequence[Turn]], str | None]
"""From row and turns, the last of which has no call, to what the user says next; None where that was all."""
NO_ACTION = "Error: neither a tool call nor an answer."


@dataclasses.dataclass(eq=False)
class ToolEnv:
    """An Env whose actions are tool calls and a final answer.

    A response with calls runs all of them, and the next observation is their results (`text` for one, `texts` for
    several). A response with an answer and no call ends the episode. Where there is a user, any response without a call
    ends the policy's turn: the next observation is what the user says then, and the episode ends when that is nothing.

    Everything that is the policy's fault (an unreadable call, an unknown tool, arguments that break the schema, neither
    call nor answer) comes back to it as a short text; a fault of the infrastructure ends the episode with
    `tool_failure`. Where the action is lenient, broken JSON is mended if it can be; such calls are counted (`repaired`
    of info's errors, metric `repaired_calls`).

    Attributes:
      tools: the tools on offer, or a function from the row to them.
      opening: row -> opening chat messages.
      reward: what each turn earns.
      metrics: (row, turns) -> scalars of the finished or truncated episode.
      state_key: (row, turns) -> anchor of the state after these turns.
      user: who speaks after a response without calls; None where nobody does.
      in_order: True if the calls of one response run one after another, for tools that share a state; else they run
        concurrently.
    """

    tools: Tools
    opening: Callable[[Row], Sequence[Mapping[str, str]]]
    reward: Reward
    metrics: Callable[[Row, Sequence[Turn]], Mapping[str, float]]
    state_key: Callable[[Row, Sequence[Turn]], str]
    user: User | None = None
    in_order: bool = False

    async def reset(self, row: Row, seed: int) -> Observation:
        """Start an episode; the first observation carries the tools' schemas. `seed` is not used."""
        self._row, self._lenient = row, False
        self._turns: list[Turn] = []
        self._said: list[str | None] = []
        tools = self.tools(row) if callable(self.tools) else self.tools
        self._tools = {tool.name: tool for tool in tools}
        return Observation(
            messages=self.opening(row),
            tools=[base.schema(tool) for tool in self._tools.values()],
            evidence="",
            state_key=self.state_key(row, self._turns),
        )

    async def step(self, action: Action) -> Transition:
        """Apply one response; see the class for what follows from it."""
        self._lenient = action.lenient
        # The missing half of a truncated response must not be guessed.
        calls = parse_tool_calls(action.text, lenient=action.lenient and not action.truncated)
        results = await self._run_all(calls)
        turn = Turn(action.text, calls, results, extract_answer(action.text))
        self._turns.append(turn)

        said = self.user(self._row, self._turns) if self.user and not calls else None
        self._said.append(said)
        outcome = self._outcome(turn, said)
        failed = outcome is Outcome.TOOL_FAILURE
        raw = {} if failed else self.reward.raw(self._row, self._turns)
        contributions = {} if failed else self.reward.contributions(raw)
        return Transition(
            observation=None if outcome else self._observation(turn, said),
            reward=float(sum(contributions.values())),
            reward_parts=contributions,
            terminated=outcome is not None and not failed,
            truncated=failed,
            outcome=outcome,
            tool_calls=[_record(call, result) for call, result in zip(calls, results, strict=True)],
            metrics=self.truncate() if outcome and not failed else {},  # A failure says nothing of the answer.
            raw_reward_parts=raw,
            action_key=action_key(calls, turn.answer, NO_ACTION if self.user is None else action.text.strip()),
            info={"errors": self._errors(turn)},
        )

    def truncate(self) -> Mapping[str, float]:
        """Return the metrics of the episode so far; without a final answer it counts as wrong."""
        metrics = self.metrics(self._row, self._turns)
        if not self._lenient:
            return metrics
        return {**metrics, "repaired_calls": float(sum(_count_repairs(turn) for turn in self._turns))}

    async def _run_all(self, calls: Sequence[ToolCall | ParseError]) -> Sequence[ToolResult]:
        if self.in_order:
            return [await self._run(call) for call in calls]
        return await asyncio.gather(*(self._run(call) for call in calls))

    async def _run(self, call: ToolCall | ParseError) -> ToolResult:
        if isinstance(call, ParseError):
            return base.failure(call.kind, call.message)
        if call.name not in self._tools:
            return base.failure("unknown_tool", f"Error: no such tool; tools are {', '.join(self._tools)}.")
        return await base.call(self._tools[call.name], call.arguments)

    def _outcome(self, turn: Turn, said: str | None) -> Outcome | None:
        if any(result.error is not None and result.error.fault == "infrastructure" for result in turn.results):
            return Outcome.TOOL_FAILURE
        ends = turn.answers if self.user is None else not turn.calls and said is None
        return Outcome.ANSWERED if ends else None

    def _observation(self, turn: Turn, said: str | None) -> Observation:
        told = [result.content for result in turn.results] or [NO_ACTION if said is None else said]
        # What succeeded, each result once, and what the user said; what failed is of interest right after it alone.
        turns = zip(self._turns, self._said, strict=True)
        before = ([*(r.content for r in turn.results if r.ok), *([words] if words else [])] for turn, words in turns)
        shown = [text for texts in before for text in texts if text not in told]
        return Observation(
            text=told[0] if len(told) == 1 else None,
            texts=told if len(told) > 1 else None,
            role="tool" if said is None else "user",
            state_key=self.state_key(self._row, self._turns),
            evidence="\n".join(dict.fromkeys([*shown, *told])),
        )

    def _errors(self, turn: Turn) -> dict[str, int]:
        """How often each kind of error occurred in a turn, mended calls among them."""
        kinds = [result.error.kind for result in turn.results if result.error is not None]
        no_action = not turn.calls and turn.answer is None and self.user is None
        return dict(collections.Counter([*kinds, *["no_action"] * no_action, *["repaired"] * _count_repairs(turn)]))


def _record(call: ToolCall | ParseError, result: ToolResult) -> dict[str, Any]:
    record = {
        "name": call.name if isinstance(call, ToolCall) else None,
        "arguments": dict(call.arguments) if isinstance(call, ToolCall) else None,
        "ok": result.ok,
        "error": result.error.kind if result.error else None,
        "result": result.content,
    }
    return {**record, "repaired": True} if isinstance(call, ToolCall) and call.repaired else record


def _count_repairs(turn: Turn) -> int:
    return sum(isinstance(call, ToolCall) and call.repaired for call in turn.calls)
