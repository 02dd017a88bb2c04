"""Checks of a task by playing it: its tools, rewards, state keys, and that equal actions have equal results."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from agentr1_jax.agents import boundary
from agentr1_jax.envs.base import Action, Env, Observation, Row, Task, Transition
from agentr1_jax.text.tool_calls import OPEN, render_call
from agentr1_jax.tools.base import Tool, ToolResult
from agentr1_jax.tools.schemas import check_schema, find_error
from agentr1_jax.tools.wrappers import ToolMetrics, ToolsConfig, Wrapper, wrap_tool

HANG_SECONDS = 20.0
"""Time in which an environment has to return from a tool that hangs and is stopped after `STOP_SECONDS`."""
STOP_SECONDS = 0.05
UNREADABLE = f"{OPEN}{{</tool_call>"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Result of one check: `ok` is None where there was nothing to judge."""

    name: str
    ok: bool | None
    detail: str


@dataclasses.dataclass
class Record:
    """One episode as its environment saw it; `error` is what the environment raised."""

    start: Observation | None = None
    actions: list[Action] = dataclasses.field(default_factory=list)
    transitions: list[Transition] = dataclasses.field(default_factory=list)
    error: BaseException | None = None


@dataclasses.dataclass(frozen=True)
class RecordingEnv:
    """An environment that keeps what goes in and what comes out."""

    env: Env
    record: Record

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    async def reset(self, row: Row, seed: int) -> Observation:
        """See `Env.reset`."""
        with _keep_error(self.record):
            self.record.start = await self.env.reset(row, seed)
        return self.record.start

    async def step(self, action: Action) -> Transition:
        """See `Env.step`."""
        self.record.actions.append(action)
        with _keep_error(self.record):
            self.record.transitions.append(await self.env.step(action))
        return self.record.transitions[-1]

    def truncate(self) -> Mapping[str, float]:
        """See `Env.truncate`."""
        with _keep_error(self.record):
            return boundary.check_numbers(self.env.truncate(), "metrics of truncate()")


@contextlib.contextmanager
def _keep_error(record: Record) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        record.error = error
        raise


def check_task(
    task: Task, row: Row, seed: int, played: Record, remake: Callable[[Callable[[Tool], Tool]], Task]
) -> Iterator[Verdict]:
    """Yield a verdict for each check of a task.

    Args:
      task: the task.
      row: the row that was played.
      seed: of the environment.
      played: the episode.
      remake: limits around a tool -> the task anew, with these around its tools.
    """
    yield check_row(row)
    if played.start is None:
        yield Verdict("reset", False, describe_error(played.error))
        return
    yield check_schemas(played.start.tools)
    yield check_bad_calls(task, row, seed, played.start.tools)
    yield check_time_limit(played, row, seed, remake)
    yield check_rewards(played, task.reward_parts)
    again = asyncio.run(replay(task.env(), row, seed, played.actions))
    yield check_state_keys(played, again)
    yield check_determinism(played, again)


def check_row(row: Row) -> Verdict:
    """Check that a row is plain JSON with an id."""
    try:
        boundary.check_json(dict(row), "the row")
        ok, detail = bool(row.get("id")), f"id {row.get('id')!r}, {', '.join(sorted(set(row) - {'id'}))}"
    except boundary.BoundaryError as error:
        ok, detail = False, str(error)
    return Verdict("row", ok, detail)


def check_schemas(tools: Sequence[Mapping[str, Any]]) -> Verdict:
    """Check that each tool has a name of its own, a description and a JSON Schema of an object."""
    faults, names = [], [tool["function"]["name"] for tool in tools]
    for name, function in zip(names, (tool["function"] for tool in tools), strict=True):
        schema = function["parameters"]
        if not re.fullmatch(r"[\w.-]{1,64}", name) or names.count(name) > 1:
            faults.append(f"{name!r} is no name of its own of letters, digits, _ and -")
        if not function["description"]:
            faults.append(f"{name} has no description, which is all that a policy knows of it")
        try:
            check_schema(schema)
        except ValueError as error:
            faults.append(f"{name}: parameters are no JSON Schema that can be used ({error})")
            continue
        missing = set(schema.get("required", ())) - set(schema.get("properties", ()))
        if schema.get("type") != "object" or missing:
            faults.append(f"{name}: parameters must be of type object and have the properties that they require")
    if not tools:
        return Verdict("tools", None, "the first observation offers none")
    return Verdict("tools", not faults, "; ".join(faults) or ", ".join(names))


def check_bad_calls(task: Task, row: Row, seed: int, tools: Sequence[Mapping[str, Any]]) -> Verdict:
    """Check that calls with bad arguments, of an unknown tool, or that cannot be read come back as observations."""
    calls = {"a call that cannot be read": UNREADABLE, "an unknown tool": render_call("no_such_tool", {})}
    for function in (tool["function"] for tool in tools):
        for arguments in _candidates(function["parameters"]):
            if not _is_valid(function["parameters"], arguments):
                calls[f"{function['name']} with {arguments}"] = render_call(function["name"], arguments)
                break
    if not tools:
        return Verdict("bad calls", None, "there are no tools")
    faults = []
    for what, text in calls.items():
        record = asyncio.run(replay(task.env(), row, seed, [Action(np.zeros(1, np.int32), text)]))
        if record.error is not None:
            faults.append(f"{what}: {describe_error(record.error)}")
        elif record.transitions[0].observation is None:
            faults.append(f"{what} ends the episode ({record.transitions[0].outcome}) instead of an observation")
        elif all(call.get("ok") for call in record.transitions[0].tool_calls):
            faults.append(f"{what} is recorded as a call that succeeded, or not at all")
    return Verdict("bad calls", not faults, "; ".join(faults) or f"{', '.join(calls)} come back as observations")


def check_time_limit(played: Record, row: Row, seed: int, remake: Callable[[Callable[[Tool], Tool]], Task]) -> Verdict:
    """Check that the episode goes on, or ends as the tool's failure, where a tool hangs."""
    name, tools = "time limit", [tool["function"] for tool in played.start.tools] if played.start else []
    good = [call for t in played.transitions for call in t.tool_calls if call.get("ok")]
    call = (good[0]["name"], good[0]["arguments"]) if good else _valid_call(tools)
    if call is None:
        return Verdict(name, None, "no valid call is known: play one")
    tool_metrics, limits = ToolMetrics(), ToolsConfig(timeout_seconds=STOP_SECONDS, max_attempts=1, max_batch=0)
    wrapped: list[str] = []

    def hang(tool: Tool) -> Tool:
        wrapped.append(tool.name)
        return wrap_tool(_Hanging(tool), limits, tool_metrics)

    async def play() -> Record:
        env = remake(hang).env()
        action = Action(np.zeros(1, np.int32), render_call(*call))
        return await asyncio.wait_for(replay(env, row, seed, [action]), HANG_SECONDS)

    try:
        record = asyncio.run(play())
    except TimeoutError:
        return Verdict(name, False, f"the environment still waits {HANG_SECONDS:g} s after its tool was stopped")
    if call[0] not in wrapped:
        return Verdict(name, None, f"{call[0]} is not put through run.wrap(tool): no time limit, retries or metrics")
    if record.error is not None:
        return Verdict(name, False, f"a tool that hangs raises {describe_error(record.error)}")
    calls = record.transitions[0].tool_calls
    ok = any(call.get("error") == "timeout" for call in calls)
    return Verdict(name, ok, f"a call that hangs is stopped: {record.transitions[0].outcome or 'an observation'}")


def check_rewards(played: Record, parts: Sequence[str]) -> Verdict:
    """Check that each step has a finite reward, the sum of its parts, whose names the task knows."""
    faults, told = [], set[str]()
    for number, transition in enumerate(played.transitions, start=1):
        try:
            boundary.check_transition(transition)
        except (boundary.BoundaryError, TypeError) as error:
            faults.append(f"step {number}: {error}")
            continue
        reward: float | None = transition.reward
        own = transition.reward_parts
        if reward is None:
            faults.append(f"step {number} has no reward")
        elif (own or parts) and abs(sum(own.values()) - reward) > 1e-6 * max(1.0, abs(reward)):
            faults.append(f"step {number}: its parts {dict(own)} do not sum to its reward {reward:g}")
        if unknown := sorted(set(own) - set(parts) - told):
            told |= set(unknown)
            faults.append(f"step {number}: reward_parts of the task leave out {', '.join(unknown)}")
    if not played.transitions:
        return Verdict("rewards", None, "no step was played")
    rewards = ", ".join(f"{transition.reward:g}" for transition in played.transitions if not faults)
    return Verdict("rewards", not faults, "; ".join(faults) or f"{rewards}; parts: {', '.join(parts) or 'none'}")


def check_state_keys(played: Record, again: Record) -> Verdict:
    """Check that all states have keys or none, that they are the same again, and that not all states share one."""
    states, others = _states(played), _states(again)
    keys = [state.state_key for state in states]
    for key, other in zip(keys, (state.state_key for state in others), strict=False):
        if key != other:
            return Verdict("state keys", False, f"equal actions lead to other keys: {key!r}, then {other!r}")
    if all(key is None for key in keys):
        return Verdict("state keys", None, "none: credit schemes that compare states (gigpo, hgpo) cannot be used")
    if None in keys:
        return Verdict("state keys", False, f"state {keys.index(None)} has none, and others do")
    if len({state.content for state in states}) > 1 and len(set(keys)) == 1:
        return Verdict("state keys", False, f"all {len(keys)} states share the key {keys[0]!r}")
    if len(keys) == 1:
        return Verdict("state keys", None, f"one state was seen, {keys[0]!r}")
    return Verdict("state keys", True, f"{len(set(keys))} of {len(keys)} states")


def check_determinism(played: Record, again: Record) -> Verdict:
    """Check that equal actions under one seed have equal results."""
    if again.error is not None and played.error is None:
        return Verdict("determinism", False, f"the same actions raise {describe_error(again.error)} the second time")
    if _content(played.start) != _content(again.start):
        return Verdict("determinism", False, "the first observations of one row and seed differ")
    for number, (one, two) in enumerate(zip(played.transitions, again.transitions, strict=False), start=1):
        for what in ("reward", "terminated", "truncated", "outcome"):
            if getattr(one, what) != getattr(two, what):
                values = f"{getattr(one, what)} and {getattr(two, what)}"
                return Verdict("determinism", False, f"step {number}: the same actions have the {what} {values}")
        if _content(one.observation) != _content(two.observation):
            return Verdict("determinism", False, f"step {number}: the same actions have other observations")
    return Verdict("determinism", True, f"{len(played.transitions)} steps are the same again")


async def replay(env: Env, row: Row, seed: int, actions: Sequence[Action]) -> Record:
    """Return the episode of these actions; it ends early where the environment ends it or raises."""
    record = Record()
    recording = RecordingEnv(env, record)
    with contextlib.suppress(Exception):
        await recording.reset(row, seed)
        for action in actions:
            transition = await recording.step(action)
            if transition.terminated or transition.truncated:
                break
    return record


def describe_error(error: BaseException | None) -> str:
    """Return type, message and the innermost line of an exception."""
    if error is None:
        return "nothing came back"
    lines = traceback.extract_tb(error.__traceback__)
    where = f" ({lines[-1].filename}, line {lines[-1].lineno})" if lines else ""
    return f"{boundary.describe_error(error)}{where}"


@dataclasses.dataclass(frozen=True)
class _Hanging(Wrapper):
    async def execute(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Wait without end."""
        await asyncio.Event().wait()
        raise AssertionError("nobody sets the event")


def _states(record: Record) -> list[Observation]:
    later = [t.observation for t in record.transitions]
    return [state for state in (record.start, *later) if state is not None]


def _content(observation: Observation | None) -> Any:
    if observation is None:
        return None
    ids = None if observation.token_ids is None else np.asarray(observation.token_ids).tolist()
    return [observation.messages, observation.content, ids, observation.role, list(observation.tools)]


def _candidates(schema: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield arguments that may break a schema."""
    yield {}
    yield {"no_such_argument": 1}
    for name in schema.get("properties", {}):
        values: tuple[Any, ...] = ([], 0, "x", None)
        yield from ({name: value} for value in values)


def _is_valid(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
    try:
        return find_error(schema, dict(arguments)) is None
    except Exception:  # The schema is none, which `check_schemas` tells.
        return False


def _valid_call(tools: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, Any]] | None:
    """Return a call that a tool's schema allows; None where none is found."""
    samples = {"string": "1", "integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
    for function in tools:
        schema = function["parameters"]
        properties = schema.get("properties", {})
        arguments = {
            name: properties[name].get("enum", [samples.get(properties[name].get("type"), "1")])[0]
            for name in schema.get("required", ())
            if name in properties
        }
        if _is_valid(schema, arguments):
            return function["name"], arguments
    return None
