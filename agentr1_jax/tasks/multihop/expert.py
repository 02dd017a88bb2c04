"""The expert of real multi-hop questions: it searches what it has read of, in the order of the hops, then answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from agentr1_jax.envs.base import Expert, Row
from agentr1_jax.envs.rewards import normalise
from agentr1_jax.text.tool_calls import render_answer, render_call
from agentr1_jax.tools.search import Passage

MOST_SEARCHES = 4
_IN_PARENTHESES = re.compile(r"\s*\([^()]*\)$")
_WORD = re.compile(r"\w+")


def expert(row: Row, passages: Mapping[str, Passage]) -> Expert:
    """An expert that knows the gold passages, and searches for one only when it has read its title.

    Each step searches for the first gold passage (see `in_order`) that no result has shown and whose title stands in
    the question or in a result, by the title as it is written there. Where there is none, it searches for the question
    itself, once. Then it answers. So its queries could be written from what was read, in the results as they came back:
    the policy reads them cut to `budget.observation_tokens`, and may not have seen a name that stood behind the cut.

    Args:
      row: of a multi-hop task, with gold passages and answers.
      passages: by id; at least the row's gold passages.
    """
    missing = in_order([passages[i].title for i in row["gold_ids"]], row.get("evidences", ()))
    read = row["question"]
    asked: list[str] = []

    def respond(observation: str | None) -> str:
        nonlocal read
        if observation:
            read = f"{read}\n{observation}"
            lines = observation.split("\n")
            missing[:] = [title for title in missing if not any(line.startswith(f"- {title}: ") for line in lines)]
        written = (mention(read, title) for title in missing)
        queries = [*(name for name in written if name), *([row["question"]] if missing else [])]
        query = next((query for query in queries if query not in asked), None)
        if query is None or len(asked) == MOST_SEARCHES:
            return render_answer(row["answers"][0])
        asked.append(query)
        # Behind a space, so that its first word is tokenised as where it was read.
        return render_call("search", {"query": f" {query}"})

    return respond


def in_order(titles: Sequence[str], evidences: Sequence[Sequence[str]]) -> list[str]:
    """Titles in the order of the hops: the object of a triple (subject, relation, object) behind its subject.

    All that this leaves open stays as it is.
    """
    triples = [(_name(subject), _name(object)) for subject, _, object in evidences]
    left, out = list(titles), []
    while left:
        names = {_name(title) for title in left}
        later = {object for subject, object in triples if subject in names and subject != object}
        out.append(next((title for title in left if _name(title) not in later), left[0]))
        left.remove(out[-1])
    return out


def _name(title: str) -> str:
    return normalise(_IN_PARENTHESES.sub("", title))


def mention(text: str, title: str) -> str | None:
    """The title as `text` writes it (any case and punctuation), without what it has in parentheses behind it.

    None where the text does not have it.
    """
    words = _WORD.findall(_IN_PARENTHESES.sub("", title))
    if not words:
        return None
    pattern = r"\W+".join(map(re.escape, words))
    found = re.search(rf"\b{pattern}\b", text, re.IGNORECASE)
    return found[0] if found else None
