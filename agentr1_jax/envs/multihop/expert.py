"""The expert of real multi-hop questions: it searches what it has read of, then answers."""

from __future__ import annotations

import re
from collections.abc import Mapping

from agentr1_jax.envs.base import Expert, Row
from agentr1_jax.text.tool_calls import render_answer, render_call
from agentr1_jax.tools.search import Passage

MOST_SEARCHES = 4
_IN_PARENTHESES = re.compile(r"\s*\([^()]*\)$")
_WORD = re.compile(r"\w+")


def expert(row: Row, passages: Mapping[str, Passage]) -> Expert:
    """An expert that knows the gold passages, and searches for one only when it has read its title.

    Each step searches for the first gold passage that no result has shown and whose title stands in the question or in
    a result, by the title as it is written there. Where there is none, it searches for the question itself, once. Then
    it answers. So a policy is never shown a query that it could not have written.

    Args:
      row: of a multi-hop task, with gold passages and answers.
      passages: by id; at least the row's gold passages.
    """
    missing = [passages[i].title for i in row["gold_ids"]]
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
