"""HopWorld as a Task: rows, environments, texts, and an expert with flaws.

The expert searches hop by hop. Its flaws are bad decisions that can be learned away, never random answers.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

from pydantic.dataclasses import dataclass

from agentr1_jax.envs.base import Expert, Row
from agentr1_jax.envs.datasets import ProceduralTask
from agentr1_jax.envs.registry import TaskContext, register
from agentr1_jax.envs.tool_env import NO_ACTION
from agentr1_jax.tasks import qa
from agentr1_jax.tasks.hopworld.questions import PRACTICE_SHARES, RELATIONS, SHARES, questions
from agentr1_jax.tasks.hopworld.world import retriever, world
from agentr1_jax.text.tool_calls import PARSE_MESSAGES, render_answer, render_call
from agentr1_jax.tools.base import Tool
from agentr1_jax.tools.search import EMPTY_RESULT, SearchTool
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
def make_hopworld(config: HopWorldConfig, run: TaskContext) -> ProceduralTask:
    """Make HopWorld: nothing can be memorised, every answer must be looked up.

    Splits: `train`; `eval` (other worlds, and combinations of words that no training world uses); `dev` (the like, for
    choosing a config: its worlds are not those of `eval`); `practice` (one lookup, a comparison of what the question
    names, words to repeat, years to compare; in training worlds, by an expert that never errs).
    """
    weights = dataclasses.asdict(config.rewards)
    return ProceduralTask(
        name="hopworld",
        splits=list(SPLITS),
        make_row=functools.partial(_make_row, config),
        make_env=lambda: qa.search_env(lambda row: [_tool(row["world"], config.top_k, run.wrap)], weights, SYSTEM),
        reward_parts=list(weights),
        make_expert=functools.partial(_make_expert, config),
        make_texts=functools.partial(_make_texts, config),
    )


def _make_row(config: HopWorldConfig, split: str, index: int) -> Row:
    number, slot = divmod(index, config.questions_per_world)
    key = f"{split}/{number}"
    draft = _questions(key, split, config.questions_per_world)[slot]
    return {"id": f"hopworld/{split}/{index}", "world": key, **draft}


def _make_texts(config: HopWorldConfig) -> Iterator[str]:
    """Questions, calls, results and answers of training worlds, one a text, as episodes show them."""
    yield from [SYSTEM, NO_ACTION, EMPTY_RESULT, *PARSE_MESSAGES.values()]
    for index in itertools.count():
        number, split = index // 2, ("train", "practice")[index % 2]
        lines = [passage.line for passage in world(f"{split}/{number}").passages[:_PASSAGES_OF_A_WORLD]]
        # Searches alone would show some names too rarely for a piece of their own.
        yield from ("\n".join(lines[i : i + config.top_k]) for i in range(0, len(lines), config.top_k))
        for slot in range(min(_ROWS_OF_A_WORLD, config.questions_per_world)):
            row = _make_row(config, split, number * config.questions_per_world + slot)
            search = retriever(row["world"])
            yield row["question"]
            for hop in row["plan"]:
                query, _ = _queries(hop)
                yield _call(query)
                (hits,) = search.search([query], config.top_k)
                yield SearchTool(search, config.top_k).result(hits).content
            yield f"{row['thought']}{render_answer(row['answers'][0])}"


# Wrappers hold state (a cap on calls, a batch being collected), so that episodes of one world must share them.
@functools.lru_cache(maxsize=64)
def _tool(key: str, top_k: int, wrap: Callable[[Tool], Tool]) -> Tool:
    return wrap(SearchTool(retriever(key), top_k))


@functools.lru_cache(maxsize=64)
def _questions(key: str, split: str, count: int) -> list[dict[str, Any]]:
    return questions(world(key), random.Random(f"hopworld/questions/{key}"), count, SPLITS[split])


def _make_expert(config: HopWorldConfig, row: Row, seed: int) -> Expert:
    """Make an expert that knows which lookups to make, but reads a value only from a passage that it was shown."""
    flaws = NO_FLAWS if row["world"].startswith("practice/") else config.flaws
    rng = random.Random(f"hopworld/expert/{row['id']}/{seed}")
    return _play(row, rng, flaws).send  # type: ignore[return-value]


def _call(query: str) -> str:
    return render_call("search", {"query": query})


def _queries(hop: Mapping[str, Any]) -> tuple[str, str]:
    """The best query for a lookup, and one for when its result lacks the passage."""
    return RELATIONS[hop["relation"]].query.format(hop["subject"]), f"page about {hop['subject']}"


def _play(row: Row, rng: random.Random, flaws: Flaws) -> Generator[str, str | None, None]:
    plan: Sequence[Mapping[str, Any]] = row["plan"]
    pages = world(row["world"]).pages
    rates = (flaws.bridge_answer, flaws.skip_hop, flaws.repeat_query, flaws.malformed_call)
    for hop, after in itertools.zip_longest(plan, plan[1:]):
        bridge_answer, skip_hop, repeat_query, malformed_call = (rng.random() < rate for rate in rates)
        if bridge_answer and hop["hasty"] is not None:
            yield from _insist(hop["hasty"])
        queries = _queries(hop)
        if skip_hop and after is not None and after["subject"] == hop["value"]:
            yield _call(RELATIONS[after["relation"]].query.format(hop["subject"]))
        if malformed_call:
            yield _call(queries[0]).replace("}</tool_call>", "</tool_call>")
        for query in queries:
            observation = yield _call(query)
            if pages[hop["subject"]].line in (observation or ""):
                break
        else:
            yield from _insist(GIVE_UP)
        if repeat_query:
            yield _call(query)
    yield from _insist(row["answers"][0], row["thought"])


def _insist(answer: str, thought: str = "") -> Generator[str, str | None, None]:
    """Gives the answer, and gives it again if asked again."""
    while True:
        yield f"{thought}{render_answer(answer)}"
