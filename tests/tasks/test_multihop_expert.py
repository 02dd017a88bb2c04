"""The expert of real questions searches only what it has read of."""

from __future__ import annotations

import asyncio
import re

import pytest
from plays import multihop_task

from agentr1_jax.tasks.multihop.expert import MOST_SEARCHES, expert, in_order, mention
from agentr1_jax.text.tool_calls import extract_answer, parse_tool_calls
from agentr1_jax.tools.search import Passage

PASSAGES = {
    "f": Passage("f", "Madame la Presidente (film)", "It was directed by Frank Lloyd."),
    "d": Passage("d", "Frank Lloyd", "Frank Lloyd died on 10 August 1960."),
    "x": Passage("x", "Secret: Part 2", "Nobody mentions it."),
}


def row(*gold, question="When did the director of film Madame La Presidente die?"):
    return {"question": question, "answers": ["10 August 1960"], "gold_ids": list(gold)}


def query(text):
    (call,) = parse_tool_calls(text)
    return call.arguments["query"]


def test_it_follows_names_as_they_are_written() -> None:
    respond = expert(row("d", "f"), PASSAGES)
    assert query(respond(None)) == " Madame La Presidente"
    assert query(respond("- Madame la Presidente (film): It was directed by Frank Lloyd.")) == " Frank Lloyd"
    assert extract_answer(respond("- Frank Lloyd: He died on 10 August 1960.")) == "10 August 1960"


def test_what_a_search_has_shown_is_not_searched() -> None:
    respond = expert(row("d", "f"), PASSAGES)
    respond(None)
    both = "- Madame la Presidente (film): It was directed by Frank Lloyd.\n- Frank Lloyd: He died."
    assert extract_answer(respond(both)) == "10 August 1960"


def test_it_asks_the_question_once_where_no_name_is_known() -> None:
    asked = row("x", question="What is it that nobody mentions?")
    respond = expert(asked, PASSAGES)
    assert query(respond(None)) == " What is it that nobody mentions?"
    assert extract_answer(respond("No results.")) == "10 August 1960"
    respond = expert(asked, PASSAGES)
    respond(None)
    assert extract_answer(respond("- Secret: Part 2: Nobody mentions it.")) == "10 August 1960"


def test_evidences_tell_the_order_of_the_hops() -> None:
    """Both names stand in the question: the film is searched first, whose director the other one is."""
    asked = {**row("d", "f", question="Did Frank Lloyd, who directed Madame la Presidente, die?")}
    assert query(expert(asked, PASSAGES)(None)) == " Frank Lloyd"
    told = {
        **asked,
        "evidences": [["Madame la Presidente", "director", "Frank Lloyd"], ["Frank Lloyd", "died", "1960"]],
    }
    assert query(expert(told, PASSAGES)(None)) == " Madame la Presidente"


@pytest.mark.parametrize(
    ("titles", "evidences", "ordered"),
    [
        ("c b a", [], "c b a"),
        ("c b a", ["ab", "bc"], "a b c"),
        ("c b a", ["bc", "ab"], "a b c"),
        ("a c b d", ["ac", "bd"], "a c b d"),
        ("c a d b", ["ac", "bd"], "a c b d"),
        ("b a", ["xb"], "b a"),
        ("b a", ["ab", "ba", "aa"], "b a"),
    ],
)
def test_objects_come_behind_their_subjects_and_all_else_stays(titles, evidences, ordered) -> None:
    names = {letter: f"Title {letter}" for letter in "abcdx"}
    triples = [[names[subject], "leads to", names[object].upper()] for subject, object in evidences]
    assert in_order([names[c] for c in titles.split()], triples) == [names[c] for c in ordered.split()]


@pytest.mark.parametrize(
    ("text", "title", "written"),
    [
        ("Karl, Prince Of Leiningen's father", "Karl, Prince of Leiningen", "Karl, Prince Of Leiningen"),
        ("who made Escape From L.A.?", "Escape from L.A.", "Escape From L.A"),
        ("the Unbreakables", "Unbreakable (film)", None),
        ("anything", "(film)", None),
        ("about a(b)", "a(b (film)", "a(b"),
    ],
)
def test_mentions(text: str, title: str, written: str | None) -> None:
    assert mention(text, title) == written


def test_on_real_questions_every_query_was_read_before(data_dir) -> None:
    task = multihop_task(data_dir, corpus="mini", top_k=2)
    for index in range(task.size("train")):
        row = task.row("train", index)
        respond, read, observation, queries = task.expert(row, 0), row["question"], None, []
        while (answer := extract_answer(text := respond(observation))) is None:
            queries.append(query(text).strip())
            assert queries[-1] in read
            observation = asyncio.run(task.search.execute({"query": queries[-1]})).content
            read += f"\n{observation}"
        assert answer == row["answers"][0]
        assert 0 < len(queries) == len(set(queries)) <= MOST_SEARCHES
        assert not re.search(r"\([^)]*\)$", queries[0]) or queries[0] == row["question"]
