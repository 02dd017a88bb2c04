"""An expert that searches hop by hop, with flaws: bad decisions that can be learned away, never random answers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from pydantic.dataclasses import dataclass

from agentr1_jax.envs.base import Expert, Row
from agentr1_jax.tasks.hopworld.questions import RELATIONS
from agentr1_jax.tasks.hopworld.world import world
from agentr1_jax.text.tool_calls import render_answer, render_call
from agentr1_jax.validation import STRICT, Fraction


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
GIVE_UP = "unknown"


def expert(row: Row, rng: random.Random, flaws: Flaws) -> Expert:
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
