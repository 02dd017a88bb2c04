"""Task `bfcl`: reach, over several requests of a user, the state that the ground truth leads to.

Reward parts, metrics and state keys are functions of the row and the turns: every result carries digests of the state
after its call, and the row has those that the ground truth leads to (see `rows`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from pydantic.dataclasses import dataclass

from agentr1_jax.contrib.bfcl.base import CallFailed
from agentr1_jax.contrib.bfcl.documents import Function
from agentr1_jax.contrib.bfcl.rows import Documents, offered_functions, read_tasks
from agentr1_jax.contrib.bfcl.state import World
from agentr1_jax.envs.base import Row
from agentr1_jax.envs.datasets import RowsTask, data_folder
from agentr1_jax.envs.registry import TaskContext, register
from agentr1_jax.envs.rewards import Part, Reward, Turn
from agentr1_jax.envs.tool_env import ToolEnv
from agentr1_jax.text.tool_calls import ParseError, render_call
from agentr1_jax.tools import base
from agentr1_jax.tools.base import ToolResult
from agentr1_jax.validation import STRICT

INSTRUCTION = (
    "Do what the user asks by calling the tools. Calls of one response run one after another. When a request is done, "
    "answer without a call; the user may then ask for more."
)
DONE = "Done."
EVALUATION_ONE_IN = 3
ILL_FORMED = ("unknown_tool", "bad_arguments")
"""Errors of form, which are errors in every state; a missing file is not one of them."""


@dataclass(frozen=True, config=STRICT)
class BfclRewards:
    """Weights of the reward parts of BFCL."""

    state: float = 1.0
    """weight of reaching the end state of the ground truth"""
    turn_state: float = 0.0
    """weight of reaching the state of the ground truth after each request"""
    format: float = 0.1
    """weight of the format, whose raw value is -1 for an ill-formed step"""


@dataclass(frozen=True, config=STRICT)
class BfclConfig:
    """Keys of `task.bfcl`."""

    rewards: BfclRewards = BfclRewards()
    """weights of the reward parts"""


@register("bfcl", BfclConfig)
def make_bfcl(config: BfclConfig, run: TaskContext) -> RowsTask:
    """Return the Task. Its splits are `train`, and `eval` (about one task in three, by a hash of the id).

    Tools belong to one episode, and so does the state of a wrapper: a limit on concurrent calls holds for each episode.

    Raises:
      FileNotFoundError: the data are missing.
      ValueError: a file is damaged; the message names the line.
    """
    reward = Reward(PARTS, dataclasses.asdict(config.rewards))
    rows, documents = read_tasks(data_folder(run.data_dir) / "bfcl_v4")
    splits: dict[str, list[Row]] = {"train": [], "eval": []}
    for row in sorted(rows, key=_hash):
        splits["train" if int(_hash(row), 16) % EVALUATION_ONE_IN else "eval"].append(row)

    def env() -> ToolEnv:
        return ToolEnv(
            tools=lambda row: [run.wrap(tool) for tool in _tools(row, documents)],
            opening=lambda row: _opening(row, documents),
            reward=reward,
            metrics=metrics,
            state_key=state_key,
            user=next_user_text,
            in_order=True,
        )

    return RowsTask(
        "bfcl",
        splits,
        env,
        reward_parts=list(reward.weights),
        expert=lambda row, seed: _play(row).send,  # type: ignore[arg-type, return-value]
        texts=[text for row in splits["train"] for text in _texts(row, documents)],
        seed=run.seed,
    )


class FunctionTool:
    """One function on one episode's state. Results are JSON; their data are the digests of the state after the call.

    A call runs at once on the event loop, where no time limit interrupts it, so that no call is applied twice.

    Args:
      world: state of the episode, shared by its tools.
      owner: name of the function set.
      function: document of the function.
    """

    blocking = False

    def __init__(self, world: World, owner: str, function: Function) -> None:
        self.name, self.description, self.parameters = function.name, function.description, function.parameters
        self._world, self._owner, self._convert = world, owner, function.convert

    def execute(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Apply a call to the state."""
        try:
            result = self._world.call(self._owner, self.name, self._convert(arguments))
        except CallFailed as error:
            answer = base.failure(error.kind, f"Error: {self.name}: {error}")
        else:
            answer = ToolResult(json.dumps(result, ensure_ascii=False))
        return dataclasses.replace(answer, data=self._world.digests())


def _tools(row: Row, documents: Documents) -> list[FunctionTool]:
    """Return the tools of an episode, on a new state."""
    world = World(row["classes"], row["initial_config"])
    offered = offered_functions(row["classes"], row["excluded"], documents).values()
    return [FunctionTool(world, owner, function) for owner, function in offered]


def _opening(row: Row, documents: Documents) -> list[dict[str, str]]:
    """Return the instruction with the descriptions of the classes, and the user's first request."""
    offered = offered_functions(row["classes"], row["excluded"], documents).values()
    classes = dict.fromkeys(function.class_description for _, function in offered if function.class_description)
    return [
        {"role": "system", "content": "\n".join([INSTRUCTION, *classes])},
        {"role": "user", "content": row["turns"][0]},
    ]


def _play(row: Row) -> Generator[str, str | None, None]:
    """Yield the calls of the ground truth, one per response; each request ends with `DONE`."""
    for calls in row["ground_truth"]:
        for call in calls:
            yield render_call(call["name"], call["arguments"])
        yield DONE
    yield from itertools.repeat(DONE)


def _texts(row: Row, documents: Documents) -> Iterator[str]:
    """Yield what the user and the expert say and the calls return in the expert's episode."""
    yield from (message["content"] for message in _opening(row, documents))
    tools = {tool.name: tool for tool in _tools(row, documents)}
    for request, calls in itertools.zip_longest(row["turns"][1:], row["ground_truth"]):
        for call in calls:
            yield render_call(call["name"], call["arguments"])
            yield tools[call["name"]].execute(call["arguments"]).content
        yield from [DONE, request] if request else [DONE]


def _hash(row: Row) -> str:
    """Return the hash of a row's id, which decides its split and its place."""
    return hashlib.sha256(row["id"].encode()).hexdigest()


def next_user_text(row: Row, turns: Sequence[Turn]) -> str | None:
    """Return the user's next request after these turns, the last of which has no call; None after the last request."""
    return None if _is_over(row, turns) else row["turns"][_count_user_turns(turns)]


def state_part(row: Row, turns: Sequence[Turn]) -> float:
    """Return 1 where the turn ends the episode in the state that the whole ground truth leads to."""
    return float(_is_over(row, turns) and _digest(row, turns, "compared") == row["expected"][-1])


def turn_state_part(row: Row, turns: Sequence[Turn]) -> float:
    """Return 1 / (number of requests) where the turn ends a request in the state of the ground truth up to there."""
    return (_count_right_states(row, turns) - _count_right_states(row, turns[:-1])) / len(row["turns"])


def format_part(row: Row, turns: Sequence[Turn]) -> float:
    """Return −1 for a turn with a call that is unreadable, of an unknown function, or against its schema; else 0."""
    turn = turns[-1]
    unreadable = any(isinstance(call, ParseError) for call in turn.calls)
    return -float(unreadable or any(r.error is not None and r.error.kind in ILL_FORMED for r in turn.results))


PARTS: Mapping[str, Part] = {"state": state_part, "turn_state": turn_state_part, "format": format_part}


def metrics(row: Row, turns: Sequence[Turn]) -> dict[str, float]:
    """Return `em` (1 where the episode is over in the right state), `turns_reached` (a share) and `tool_calls`."""
    return {
        "em": state_part(row, turns),
        "turns_reached": _count_right_states(row, turns) / len(row["turns"]),
        "tool_calls": float(sum(len(turn.calls) for turn in turns)),
    }


def state_key(row: Row, turns: Sequence[Turn]) -> str:
    """Return a key of row, request and state: equal states of a group have equal keys."""
    return f"{row['id']}|{_count_user_turns(turns)}|{_digest(row, turns, 'state')}"


def _count_user_turns(turns: Sequence[Turn]) -> int:
    """Return how many requests of the user are done: each ends with a response without calls."""
    return sum(not turn.calls for turn in turns)


def _is_over(row: Row, turns: Sequence[Turn]) -> bool:
    return _count_user_turns(turns) >= len(row["turns"])


def _count_right_states(row: Row, turns: Sequence[Turn]) -> int:
    """Return at the ends of how many requests the state was that of the ground truth."""
    ends = [at for at, turn in enumerate(turns, 1) if not turn.calls]
    pairs = zip(ends, row["expected"], strict=False)
    return sum(_digest(row, turns[:at], "compared") == expected for at, expected in pairs)


def _digest(row: Row, turns: Sequence[Turn], what: str) -> str:
    """Return the digest `state` or `compared` after these turns."""
    results = (result for turn in reversed(turns) for result in reversed(turn.results))
    return next((result.data[what] for result in results if what in result.data), row["start"][what])
