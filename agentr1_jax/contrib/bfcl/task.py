"""Task `bfcl`: stateful multi-turn tool use."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from absl import logging
from pydantic.dataclasses import dataclass

from agentr1_jax.contrib.bfcl import scoring
from agentr1_jax.contrib.bfcl.base import CallFailed
from agentr1_jax.contrib.bfcl.documents import Function
from agentr1_jax.contrib.bfcl.rows import offered_functions, read_tasks
from agentr1_jax.contrib.bfcl.state import World
from agentr1_jax.envs.base import Expert, Row
from agentr1_jax.envs.datasets import FiniteRows, data_folder
from agentr1_jax.envs.registry import TaskContext, register
from agentr1_jax.envs.rewards import Reward
from agentr1_jax.envs.tool_env import ToolEnv
from agentr1_jax.text.tool_calls import render_call
from agentr1_jax.tools import base
from agentr1_jax.tools.base import Tool, ToolResult
from agentr1_jax.validation import STRICT

INSTRUCTION = (
    "Do what the user asks by calling the tools. Calls of one response run one after another. When a request is done, "
    "answer without a call; the user may then ask for more."
)
DONE = "Done."
EVALUATION_ONE_IN = 3


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


class BfclTask:
    """Reach, over several requests of a user, the state that the ground truth leads to.

    Splits: `train`, and `eval` (about one task in three, by a hash of the id).

    Args:
      data_dir: folder that holds `bfcl_v4/`; see `data_folder`.
      rewards: weights of the reward parts.
      seed: seed of the order of training rows.
      wrap: applied to every tool of an episode (e.g. limits of time and size). Tools belong to one episode, and so does
        the state of a wrapper: a limit on concurrent calls holds for each episode.

    Attributes:
      counts: reason -> number of tasks left out.

    Raises:
      FileNotFoundError: the data are missing.
      ValueError: a file is damaged; the message names the line.
    """

    name = "bfcl"

    def __init__(
        self,
        data_dir: str | os.PathLike[str] = "",
        rewards: BfclRewards = BfclRewards(),  # noqa: B008
        seed: int = 0,
        wrap: Callable[[Tool], Tool] = lambda tool: tool,
    ) -> None:
        self._reward = Reward(scoring.PARTS, dataclasses.asdict(rewards))
        tasks = read_tasks(data_folder(data_dir) / "bfcl_v4")
        self._documents = tasks.documents
        self._wrap = wrap
        self.counts = tasks.counts
        splits: dict[str, list[Row]] = {"train": [], "eval": []}
        for row in sorted(tasks.rows, key=_hash):
            splits["train" if int(_hash(row), 16) % EVALUATION_ONE_IN else "eval"].append(row)
        self._rows = FiniteRows(self.name, splits, seed)
        logging.info("bfcl: %s; left out: %s", {s: len(rows) for s, rows in splits.items()}, dict(self.counts))

    @property
    def reward_parts(self) -> Sequence[str]:
        """Names of the weighted parts."""
        return list(self._reward.weights)

    def row(self, split: str, index: int) -> Row:
        """Return row `index` of a split; see `FiniteRows`."""
        return self._rows.row(split, index)

    def size(self, split: str) -> int:
        """Return the number of rows of a split."""
        return self._rows.size(split)

    def env(self) -> ToolEnv:
        """Return a new environment; each of its episodes has its own state and tools."""
        return ToolEnv(
            tools=lambda row: [self._wrap(tool) for tool in self._tools(row)],
            opening=self._opening,
            reward=self._reward,
            metrics=scoring.metrics,
            state_key=scoring.state_key,
            user=scoring.next_user_text,
            in_order=True,
        )

    def expert(self, row: Row, seed: int) -> Expert:
        """Return an expert that makes the calls of the ground truth, one per response; `seed` is not used."""
        return _play(row).send  # type: ignore[return-value]

    def texts(self, count: int) -> list[str]:
        """Return the requests of training rows, the expert's calls and their results, one per text."""
        return list(
            itertools.islice((text for row in self._rows.splits["train"] for text in self._episode(row)), count)
        )

    def _episode(self, row: Row) -> Iterator[str]:
        yield from (message["content"] for message in self._opening(row))
        tools = {tool.name: tool for tool in self._tools(row)}
        for request, calls in itertools.zip_longest(row["turns"][1:], row["ground_truth"]):
            for call in calls:
                yield render_call(call["name"], call["arguments"])
                yield tools[call["name"]].execute(call["arguments"]).content
            yield from [DONE, request] if request else [DONE]

    def _tools(self, row: Row) -> list[FunctionTool]:
        """Return the tools of an episode, on a new state."""
        world = World(row["classes"], row["initial_config"])
        offered = offered_functions(row["classes"], row["excluded"], self._documents).values()
        return [FunctionTool(world, owner, function) for owner, function in offered]

    def _opening(self, row: Row) -> list[dict[str, str]]:
        """Return the instruction with the descriptions of the classes, and the user's first request."""
        offered = offered_functions(row["classes"], row["excluded"], self._documents).values()
        classes = dict.fromkeys(function.class_description for _, function in offered if function.class_description)
        return [
            {"role": "system", "content": "\n".join([INSTRUCTION, *classes])},
            {"role": "user", "content": row["turns"][0]},
        ]


@register("bfcl", BfclConfig)
def make_bfcl(config: BfclConfig, run: TaskContext) -> BfclTask:
    """Return the Task; see `BfclTask`."""
    return BfclTask(run.data_dir, config.rewards, run.seed, run.wrap)


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionTool:
    """One function on one episode's state. Results are JSON; their data are the digests of the state after the call.

    A call runs at once on the event loop, where no time limit interrupts it, so that no call is applied twice.

    Attributes:
      world: state of the episode, shared by its tools.
      owner: name of the function set.
      function: document of the function.
    """

    world: World
    owner: str
    function: Function
    blocking: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """Name of the function."""
        return self.function.name

    @property
    def description(self) -> str:
        """Description in its document."""
        return self.function.description

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON Schema of its arguments."""
        return self.function.parameters

    def execute(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Apply a call to the state."""
        try:
            result = self.world.call(self.owner, self.name, self.function.convert(arguments))
        except CallFailed as error:
            answer = base.failure(error.kind, f"Error: {self.name}: {error}")
        else:
            answer = ToolResult(json.dumps(result, ensure_ascii=False))
        return dataclasses.replace(answer, data=self.world.digests())


def _play(row: Row) -> Generator[str, str | None, None]:
    for calls in row["ground_truth"]:
        for call in calls:
            yield render_call(call["name"], call["arguments"])
        yield DONE
    while True:
        yield DONE


def _hash(row: Row) -> str:
    """Return the hash of a row's id, which decides its split and its place."""
    return hashlib.sha256(row["id"].encode()).hexdigest()
