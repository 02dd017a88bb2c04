"""BFCL's stateful multi-turn tool use as a Task."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

from absl import logging

from agentr1_jax.contrib.bfcl import scoring
from agentr1_jax.contrib.bfcl.rows import offer, read_tasks
from agentr1_jax.contrib.bfcl.state import World
from agentr1_jax.contrib.bfcl.tool import FunctionTool
from agentr1_jax.envs.base import Expert, Row
from agentr1_jax.envs.data_folder import data_folder
from agentr1_jax.envs.passes import FiniteRows
from agentr1_jax.envs.rewards import Reward
from agentr1_jax.envs.tool_env import ToolEnv
from agentr1_jax.text.tool_calls import render_call
from agentr1_jax.tools.base import Tool

INSTRUCTION = (
    "Do what the user asks by calling the tools. Calls of one response run one after another. When a request is done, "
    "answer without a call; the user may then ask for more."
)
DONE = "Done."
DEFAULT_WEIGHTS: Mapping[str, float] = {"state": 1.0, "format": 0.1}
EVALUATION_ONE_IN = 3


class BfclTask:
    """The Task of reaching, over several turns of a user, the state that the ground truth leads to.

    Splits: `train`, and `eval`: by a hash of the id, about one task in three.

    Args:
      data_dir: folder that holds `bfcl_v4/`; see `data_folder`.
      reward_weights: weights of `scoring.PARTS`; None for the defaults.
      seed: of the order of training rows.
      wrap: applied to every tool of an episode (e.g. limits of time and size). Tools belong to one episode, and so does
        what a wrapper holds: a cap on calls is each episode's own.

    Attributes:
      counts: what was left out, and how often.

    Raises:
      FileNotFoundError: the data are not there.
      ValueError: an unknown part, or a damaged file (the message names the line).
    """

    name = "bfcl"

    def __init__(
        self,
        data_dir: str | os.PathLike[str] = "",
        reward_weights: Mapping[str, float] | None = None,
        seed: int = 0,
        wrap: Callable[[Tool], Tool] = lambda tool: tool,
    ) -> None:
        self._reward = Reward(scoring.PARTS, DEFAULT_WEIGHTS if reward_weights is None else reward_weights)
        tasks = read_tasks(data_folder(data_dir) / "bfcl_v4")
        self._documents = tasks.documents
        self._wrap = wrap
        self.counts = tasks.counts
        splits: dict[str, list[Row]] = {"train": [], "eval": []}
        for row in sorted(tasks.rows, key=_place):
            splits["train" if int(_place(row), 16) % EVALUATION_ONE_IN else "eval"].append(row)
        self._rows = FiniteRows(self.name, splits, seed)
        logging.info("bfcl: %s; left out: %s", {s: len(rows) for s, rows in splits.items()}, dict(self.counts))

    @property
    def reward_parts(self) -> Sequence[str]:
        """The parts that have a weight."""
        return list(self._reward.weights)

    def row(self, split: str, index: int) -> Row:
        """Row `index` of a split; see `FiniteRows`."""
        return self._rows.row(split, index)

    def size(self, split: str) -> int:
        """Number of tasks of a split."""
        return self._rows.size(split)

    def env(self) -> ToolEnv:
        """A fresh environment; each of its episodes has a state and tools of its own."""
        return ToolEnv(
            tools=lambda row: [self._wrap(tool) for tool in self._tools(row)],
            opening=self._opening,
            reward=self._reward,
            metrics=scoring.metrics,
            state_key=scoring.state_key,
            user=scoring.user,
            in_order=True,
        )

    def expert(self, row: Row, seed: int) -> Expert:
        """Makes the calls of the ground truth, one a response, and says that it is done; `seed` is not used."""
        return _play(row).send  # type: ignore[return-value]

    def texts(self, count: int) -> list[str]:
        """What the user says in training tasks, the expert's calls and their results, one a text."""
        return list(
            itertools.islice((text for row in self._rows.splits["train"] for text in self._episode(row)), count)
        )

    def _episode(self, row: Row) -> Iterator[str]:
        yield from (message["content"] for message in self._opening(row))
        tools = {tool.name: tool for tool in self._tools(row)}
        for said, calls in itertools.zip_longest(row["turns"][1:], row["ground_truth"]):
            for call in calls:
                yield render_call(call["name"], call["arguments"])
                yield tools[call["name"]].execute(call["arguments"]).content
            yield from [DONE, said] if said else [DONE]

    def _tools(self, row: Row) -> list[FunctionTool]:
        """The functions on offer, on a new state."""
        world = World(row["classes"], row["initial_config"])
        offered = offer(row["classes"], row["excluded"], self._documents).values()
        return [FunctionTool(world, owner, function, scope=row["id"]) for owner, function in offered]

    def _opening(self, row: Row) -> list[dict[str, str]]:
        """Instruction and what the documents say of the classes, once; then the user's first turn."""
        offered = offer(row["classes"], row["excluded"], self._documents).values()
        about = dict.fromkeys(function.about for _, function in offered if function.about)
        return [
            {"role": "system", "content": "\n".join([INSTRUCTION, *about])},
            {"role": "user", "content": row["turns"][0]},
        ]


def _play(row: Row) -> Generator[str, str | None, None]:
    for calls in row["ground_truth"]:
        for call in calls:
            yield render_call(call["name"], call["arguments"])
        yield DONE
    while True:
        yield DONE


def _place(row: Row) -> str:
    """Where a row comes in an order that depends on nothing but the ids."""
    return hashlib.sha256(row["id"].encode()).hexdigest()
