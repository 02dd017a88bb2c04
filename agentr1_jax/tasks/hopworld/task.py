"""HopWorld as a Task: rows, environments, texts, and an expert with flaws.

The expert searches hop by hop. Its flaws are bad decisions that can be learned away, never random answers.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from pydantic.dataclasses import dataclass

from agentr1_jax.envs.base import Expert, Row
from agentr1_jax.envs.registry import TaskContext, register
from agentr1_jax.envs.tool_env import NO_ACTION, ToolEnv
from agentr1_jax.tasks import qa
from agentr1_jax.tasks.hopworld.questions import PRACTICE_SHARES, RELATIONS, SHARES, questions
from agentr1_jax.tasks.hopworld.world import retriever, search_tool, world, world_key
from agentr1_jax.text.tool_calls import PARSE_MESSAGES, render_answer, render_call
from agentr1_jax.tools.base import Tool
from agentr1_jax.tools.search import EMPTY_RESULT
from agentr1_jax.validation import STRICT, Count, Fraction

SPLITS = {"train": SHARES, "eval": SHARES, "dev": SHARES, "practice": PRACTICE_SHARES}
SYSTEM = "Search, then answer."
# Little of many worlds, so that sample texts hold every name often.
_PASSAGES_OF_A_WORLD, _ROWS_OF_A_WORLD = 120, 4
GIVE_UP = "unknown"


@dataclass(frozen=True, config=STRICT)
class Flaws:
    """Rates of the expert's flawed decisions: probabilities, for each lookup of a question."""

    bridge_answer: Fraction = 0.52
    """answers with what is at hand instead of one more lookup: the entity just found, the first one named, or `no`"""
    skip_hop: Fraction = 0.06
    """asks the present subject for what only the next one can tell"""
    repeat_query: Fraction = 0.06
    """sends a query again whose result is already there"""
    malformed_call: Fraction = 0.06
    """forgets a brace of the call"""


NO_FLAWS = Flaws(bridge_answer=0.0, skip_hop=0.0, repeat_query=0.0, malformed_call=0.0)


@dataclass(frozen=True, config=STRICT)
class HopWorldConfig:
    """Keys of `task.hopworld`."""

    top_k: Count = 3
    """passages that a search returns"""
    questions_per_world: Count = 16
    """questions asked of one world, one after another"""
    flaws: Flaws = Flaws()
    """rates of the expert's flawed decisions"""
    rewards: qa.QaRewards = qa.QaRewards()
    """weights of the reward parts"""


@register("hopworld", HopWorldConfig)
def make_hopworld(config: HopWorldConfig, run: TaskContext) -> HopWorldTask:
    """Make HopWorld."""
    return HopWorldTask(config, run.wrap)


@dataclasses.dataclass(frozen=True)
class HopWorldTask:
    """Multi-hop questions about procedural worlds; nothing can be memorised, every answer must be looked up.

    Splits: `train`; `eval` (other worlds, and combinations of words that no training world uses); `dev` (the like, for
    choosing a config: its worlds are not those of `eval`); `practice` (one lookup, a comparison of what the question
    names, words to repeat, years to compare; in training worlds, by an expert that never errs).

    Attributes:
      config: its keys.
      wrap: puts the run's limits around every tool of an environment, once per tool.
    """

    config: HopWorldConfig
    wrap: Callable[[Tool], Tool] = lambda tool: tool
    name: ClassVar[str] = "hopworld"

    @property
    def reward_parts(self) -> Sequence[str]:
        """The parts that have a weight."""
        return list(self._weights)

    def row(self, split: str, index: int) -> Row:
        """Row `index` of a split. Raises ValueError on another split or a negative index."""
        if split not in SPLITS or index < 0:
            raise ValueError(f"hopworld has no row {split!r} {index}; splits are {list(SPLITS)}, rows start at 0")
        number, slot = divmod(index, self.config.questions_per_world)
        key = world_key(split, number)
        draft = _questions(key, split, self.config.questions_per_world)[slot]
        return {"id": f"hopworld/{split}/{index}", "world": key, **draft}

    def size(self, split: str) -> int | None:
        """None: worlds do not run out."""
        return None

    def env(self) -> ToolEnv:
        """A fresh environment with one search tool over the row's world."""
        return qa.search_env(
            tools=lambda row: [_tool(row["world"], self.config.top_k, self.wrap)],
            weights=self._weights,
            system=SYSTEM,
        )

    def expert(self, row: Row, seed: int) -> Expert:
        """A flawed expert, flawless on practice rows; equal seeds give equal decisions."""
        practice = row["world"].startswith("practice/")
        flaws = NO_FLAWS if practice else self.config.flaws
        return make_expert(row, random.Random(f"hopworld/expert/{row['id']}/{seed}"), flaws)

    def texts(self, count: int) -> Sequence[str]:
        """Questions, calls, results and answers of training worlds, one a text, as episodes show them."""
        return list(itertools.islice(self._texts(), count))

    @functools.cached_property
    def _weights(self) -> dict[str, float]:
        return dataclasses.asdict(self.config.rewards)

    def _texts(self) -> Iterator[str]:
        yield from [SYSTEM, NO_ACTION, EMPTY_RESULT, *PARSE_MESSAGES.values()]
        for index in itertools.count():
            number, split = index // 2, ("train", "practice")[index % 2]
            key = world_key(split, number)
            lines = [passage.line for passage in world(key).passages[:_PASSAGES_OF_A_WORLD]]
            # Searches alone would show some names too rarely for a piece of their own.
            yield from ("\n".join(lines[i : i + self.config.top_k]) for i in range(0, len(lines), self.config.top_k))
            for slot in range(min(_ROWS_OF_A_WORLD, self.config.questions_per_world)):
                yield from self._episode(self.row(split, number * self.config.questions_per_world + slot))

    def _episode(self, row: Row) -> Iterator[str]:
        yield row["question"]
        for hop in row["plan"]:
            query = query_variants(hop)[0]
            yield call_text(query)
            (hits,) = retriever(row["world"]).search([query], self.config.top_k)
            yield search_tool(row["world"], self.config.top_k).result(hits).content
        yield f"{row['thought']}{render_answer(row['answers'][0])}"


# Wrappers hold state (a cap on calls, a batch being collected), so that episodes of one world must share them.
@functools.lru_cache(maxsize=64)
def _tool(key: str, top_k: int, wrap: Callable[[Tool], Tool]) -> Tool:
    return wrap(search_tool(key, top_k))


@functools.lru_cache(maxsize=64)
def _questions(key: str, split: str, count: int) -> list[dict[str, Any]]:
    return questions(world(key), random.Random(f"hopworld/questions/{key}"), count, SPLITS[split])


def make_expert(row: Row, rng: random.Random, flaws: Flaws) -> Expert:
    """An expert for one episode on `row`; each rate of `flaws` is a probability for each lookup of the plan.

    It knows which lookups to make, but reads a value only from a passage that it was really shown.
    """
    return _play(row, rng, flaws).send  # type: ignore[return-value]


def call_text(query: str) -> str:
    """A search call as the expert writes it."""
    return render_call("search", {"query": query})


def drop_brace(call: str) -> str:
    """The same call without its last brace."""
    return call.replace("}</tool_call>", "</tool_call>")


def query_variants(hop: Mapping[str, Any]) -> list[str]:
    """Queries for one lookup, the best first; the other is for when its result lacks the passage."""
    return [RELATIONS[hop["relation"]].query.format(hop["subject"]), f"page about {hop['subject']}"]


def _play(row: Row, rng: random.Random, flaws: Flaws) -> Generator[str, str | None, None]:
    plan: Sequence[Mapping[str, Any]] = row["plan"]
    passages = {passage.id: passage for passage in world(row["world"]).passages}
    rates = (flaws.bridge_answer, flaws.skip_hop, flaws.repeat_query, flaws.malformed_call)
    for hop, after in itertools.zip_longest(plan, plan[1:]):
        bridge_answer, skip_hop, repeat_query, malformed_call = (rng.random() < rate for rate in rates)
        if bridge_answer and hop["hasty"] is not None:
            yield from _insist(hop["hasty"])
        queries = query_variants(hop)
        if skip_hop and after is not None and after["subject"] == hop["value"]:
            yield call_text(RELATIONS[after["relation"]].query.format(hop["subject"]))
        if malformed_call:
            yield drop_brace(call_text(queries[0]))
        for query in queries:
            observation = yield call_text(query)
            if passages[hop["gold_id"]].line in (observation or ""):
                break
        else:
            yield from _insist(GIVE_UP)
        if repeat_query:
            yield call_text(query)
    yield from _insist(row["answers"][0], row["thought"])


def _insist(answer: str, thought: str = "") -> Generator[str, str | None, None]:
    """Gives the answer, and gives it again if asked again."""
    while True:
        yield f"{thought}{render_answer(answer)}"
