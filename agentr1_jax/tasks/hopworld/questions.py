"""Questions about a world: chains of relations, comparisons and yes/no, each with the plan that answers it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentr1_jax.tasks.hopworld.world import BIRTH_YEARS, POOLS, RELATIONS_OF, World, name_split

MIN_YEARS_APART = 4
CLAIMED_YEARS = range(1936, 1945)
RECITED = 24


@dataclasses.dataclass(frozen=True)
class Relation:
    """How a relation is searched for and asked about. `{}` stands for the subject, always after a space.

    Attributes:
      query: words for the search tool; the relation comes first.
      question: asks for the value.
      phrase: names the value within a longer question, where it is a member of the world.
    """

    query: str
    question: str
    phrase: str = ""


# Questions avoid the words of passages and queries where they can: one search with the question should not do.
RELATIONS: Mapping[str, Relation] = {
    "director": Relation("director of {}", "Who directed {}?", "the director of {}"),
    "composer": Relation("composer of {}", "Who composed {}?", "the composer of {}"),
    "studio": Relation("studio of {}", "Who produced {}?", "the producer of {}"),
    "year": Relation("year of {}", "When was {} released?"),
    "birth_year": Relation("birthyear of {}", "When was {} born?"),
    "birth_city": Relation("birthplace of {}", "Where was {} born?", "the birthplace of {}"),
    "spouse": Relation("spouse of {}", "Who married {}?", "the partner of {}"),
    "mayor": Relation("mayor of {}", "Who governs {}?", "the head of {}"),
    "country": Relation("country of {}", "In which nation is {}?"),
    "founder": Relation("founder of {}", "Who founded {}?", "the creator of {}"),
    "seat": Relation("seat of {}", "Where is {} based?", "the home of {}"),
    "capital": Relation("capital of {}", "From where is {} ruled?"),
}

CREW = ("director", "composer")
BRIDGE2 = (
    *(("film", role, last) for role in CREW for last in ("birth_city", "birth_year", "spouse")),
    *(("film", "studio", last) for last in ("founder", "seat")),
    *(("person", "birth_city", last) for last in ("mayor", "country")),
    *(("studio", "founder", last) for last in ("birth_city", "birth_year", "spouse")),
)
BRIDGE3 = (
    *(("film", role, "birth_city", last) for role in CREW for last in ("mayor", "country")),
    *(("film", role, "spouse", last) for role in CREW for last in ("birth_city", "birth_year")),
    *(("film", "studio", "founder", last) for last in ("birth_city", "birth_year", "spouse")),
    *(("film", "studio", "seat", last) for last in ("mayor", "country")),
)

Draft = dict[str, Any]
"""A row without id and world; `{}` where a draw led to a question that would not be fair."""


def questions(world: World, rng: random.Random, count: int, shares: Mapping[str, float]) -> list[Draft]:
    """Return `count` different questions about a world; the first n do not depend on `count`.

    `shares` maps names of `KINDS` to their probabilities.
    """
    drafts: dict[str, Draft] = {}
    while len(drafts) < count:
        kind = rng.choices(list(shares), list(shares.values()))[0]
        draft: Draft = {}
        while not draft or draft["question"] in drafts:
            draft = KINDS[kind](world, rng)
        drafts[draft["question"]] = {"kind": kind, **draft}
    return list(drafts.values())


def _hop(world: World, subject: str, relation: str, hasty: str | None = None) -> dict[str, Any]:
    """One lookup of a plan; `hasty` is what one who does not care for this lookup would answer instead."""
    return {
        "subject": subject,
        "relation": relation,
        "value": world.facts[subject, relation],
        "gold_id": world.pages[subject].id,
        "hasty": hasty,
    }


def _draft(question: str, answer: str, plan: Sequence[Mapping[str, Any]], thought: str = "") -> Draft:
    """A row; `thought` is what the expert says before the answer, where that takes more than reading it off."""
    return {
        "hops": len(plan),
        "question": question,
        "answers": [answer],
        "gold_ids": [hop["gold_id"] for hop in plan],
        "plan": list(plan),
        "thought": thought,
    }


def _chain(world: World, rng: random.Random, path: Sequence[str]) -> Draft:
    """Follows a path (kind of the start, relation, relation, ...) from a random start."""
    kind, *relations = path
    visited = [rng.choice(world.members[kind])]
    plan: list[dict[str, Any]] = []
    noun_phrase = visited[0]
    for relation in relations:
        plan.append(_hop(world, visited[-1], relation, hasty=visited[-1] if plan else None))
        visited.append(plan[-1]["value"])
        question = RELATIONS[relation].question.format(noun_phrase)
        noun_phrase = RELATIONS[relation].phrase.format(noun_phrase)
    # A chain that comes back to a name would reward whoever stops early.
    return _draft(question, visited[-1], plan) if len(set(visited)) == len(visited) else {}


def _compare(world: World, one: str, other: str) -> str | None:
    """Who of two people was born earlier; None where the years are not clearly apart."""
    years = [_birth_year(world, person) for person in (one, other)]
    if abs(years[0] - years[1]) < MIN_YEARS_APART:
        return None
    return one if years[0] < years[1] else other


def _birth_year(world: World, person: str) -> int:
    return int(world.facts[person, "birth_year"])


def _years(world: World, one: str, other: str) -> str:
    return _order(one, _birth_year(world, one), other, _birth_year(world, other))


def _order(one: str, year: int, other: str, other_year: int) -> str:
    """What the expert says before it names the elder of two: their years, then which of them is earlier.

    That is decided by one word, to which both words of the name are tied. Without it a decoder often gives the first
    name of the one and the surname of the other.
    """
    return f" {one} {year}, {other} {other_year}: {'first' if year < other_year else 'second'}."


def _comparison(world: World, rng: random.Random) -> Draft:
    """A person against the director or composer of a film, in either order."""
    person, film, role = rng.choice(world.members["person"]), rng.choice(world.members["film"]), rng.choice(CREW)
    other = world.facts[film, role]
    older = _compare(world, person, other)
    if older is None:
        return {}
    by_name = person, [_hop(world, person, "birth_year")]
    by_role = RELATIONS[role].phrase.format(film), [_hop(world, film, role), _hop(world, other, "birth_year")]
    (first, plan), (second, rest) = (by_name, by_role) if rng.random() < 0.5 else (by_role, by_name)
    plan[-1]["hasty"] = plan[-1]["subject"]
    thought = _years(world, plan[-1]["subject"], rest[-1]["subject"])
    return _draft(f"Who was born earlier, {first} or {second}?", older, [*plan, *rest], thought)


def _direct_comparison(world: World, rng: random.Random) -> Draft:
    one, other = rng.sample(world.members["person"], 2)
    older = _compare(world, one, other)
    if older is None:
        return {}
    plan = [_hop(world, one, "birth_year"), _hop(world, other, "birth_year")]
    return _draft(f"Who was born earlier, {one} or {other}?", older, plan, _years(world, one, other))


def _claim(rng: random.Random, born: Mapping[Any, int]) -> tuple[Any, int, str]:
    """Somebody, a year, and whether the birth (`born`, by who) was before it: yes and no are alike for every year."""
    year, answer = rng.choice(CLAIMED_YEARS), rng.choice(("yes", "no"))
    sign = 1 if answer == "yes" else -1
    return rng.choice([who for who, y in born.items() if sign * (year - y) >= MIN_YEARS_APART]), year, answer


def _yes_no(world: World, rng: random.Random) -> Draft:
    crew = {
        (film, role): _birth_year(world, world.facts[film, role]) for film in world.members["film"] for role in CREW
    }
    (film, role), year, answer = _claim(rng, crew)
    person = world.facts[film, role]
    plan = [_hop(world, film, role, hasty="no"), _hop(world, person, "birth_year")]
    question = f"Was {RELATIONS[role].phrase.format(film)} born before {year}?"
    return _draft(question, answer, plan, f" {crew[film, role]}, {year}.")


def _direct_yes_no(world: World, rng: random.Random) -> Draft:
    born = {person: _birth_year(world, person) for person in world.members["person"]}
    person, year, answer = _claim(rng, born)
    plan = [_hop(world, person, "birth_year")]
    return _draft(f"Was {person} born before {year}?", answer, plan, f" {born[person]}, {year}.")


def _lookup(world: World, rng: random.Random) -> Draft:
    kind = rng.choices(list(RELATIONS_OF), [len(relations) for relations in RELATIONS_OF.values()])[0]
    return _chain(world, rng, (kind, rng.choice(RELATIONS_OF[kind])))


def _mixed_words(rng: random.Random, count: int) -> list[str]:
    """Words of names in any order: which words follow each other in names does not help to copy them.

    None follow each other as in a name of evaluation.
    """
    words: list[str] = []
    while len(words) < count:
        word = rng.choice(rng.choice(POOLS))
        if not words or name_split(f"{words[-1]} {word}") == "train":
            words.append(word)
    return words


def _recital(world: World, rng: random.Random) -> Draft:
    """Words to repeat, without a lookup: nothing but copying, which a decoder from scratch has to learn first."""
    words = " ".join(_mixed_words(rng, RECITED))
    return _draft(f"Repeat {words}.", words, [])


def _older_of(world: World, rng: random.Random) -> Draft:
    """Who is older, with the years told: nothing but the order of years, and copying of the one name out of two."""
    one, other = (" ".join(_mixed_words(rng, 2)) for _ in range(2))
    years = rng.sample(BIRTH_YEARS, 2)
    if one == other or abs(years[0] - years[1]) < MIN_YEARS_APART:
        return {}
    question = f"Who is older, {one} {years[0]} or {other} {years[1]}?"
    return _draft(question, one if years[0] < years[1] else other, [], _order(one, years[0], other, years[1]))


def _before(world: World, rng: random.Random) -> Draft:
    """Whether one year is before another: nothing but their order, again."""
    one, other, answer = _claim(rng, {year: year for year in BIRTH_YEARS})
    return _draft(f"Is {one} before {other}?", answer, [], f" {one}, {other}.")


KINDS: Mapping[str, Callable[[World, random.Random], Draft]] = {
    "bridge2": lambda world, rng: _chain(world, rng, rng.choice(BRIDGE2)),
    "bridge3": lambda world, rng: _chain(world, rng, rng.choice(BRIDGE3)),
    "comparison": _comparison,
    "yes_no": _yes_no,
    "lookup": _lookup,
    "direct_comparison": _direct_comparison,
    "direct_yes_no": _direct_yes_no,
    "recital": _recital,
    "older_of": _older_of,
    "before": _before,
}
SHARES = {"bridge2": 0.40, "bridge3": 0.34, "comparison": 0.14, "yes_no": 0.12}
PRACTICE_SHARES = {
    "lookup": 0.22,
    "direct_comparison": 0.16,
    "direct_yes_no": 0.1,
    "recital": 0.22,
    "older_of": 0.18,
    "before": 0.12,
}
