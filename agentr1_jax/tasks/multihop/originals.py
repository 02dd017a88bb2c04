"""The three data sets as their authors publish them, record by record."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from agentr1_jax.tasks.multihop.rows import Question, make_row
from agentr1_jax.tools.records import DAMAGE, damage_error, read_records
from agentr1_jax.tools.search import Passage

Aliases = Mapping[str, Sequence[str]]
ALIAS_FILE = "id_aliases.json"
UNANSWERABLE = "unanswerable"
GOLD_UNKNOWN = "gold_unknown"
EMPTY_PASSAGES = "empty_passages"


def context_passage(title: Any, text: Any) -> Passage:
    """A passage of a question's context; its id depends on title and text alone, whatever file it is in.

    Raises:
      TypeError: title or text is no string.
    """
    if not isinstance(title, str) or not isinstance(text, str):
        raise TypeError("titles and texts of a context must be strings")
    title, text = title.strip(), " ".join(text.split())
    return Passage("p" + hashlib.sha256(f"{title}\n{text}".encode()).hexdigest()[:16], title, text)


def hotpot(record: Mapping[str, Any], aliases: Aliases) -> Question:
    """A question of HotpotQA, or of 2WikiMultihopQA, which adds `evidences` (subject, relation, object).

    Args:
      record: `{_id, question, answer, type, supporting_facts: [[title, sentence]], context: [[title, [sentences]]]}`.
      aliases: of 2WikiMultihopQA's `answer_id`.

    Raises:
      ValueError, KeyError, TypeError: it is not such a record, or has no answer (test files).
    """
    context = [context_passage(title, " ".join(sentences)) for title, sentences in record["context"]]
    by_title: dict[str, str] = {}
    for passage in context:
        by_title.setdefault(passage.title, passage.id)
    filled = {passage.id: passage for passage in context if passage.text}
    titles = [fact[0].strip() for fact in record.get("supporting_facts", ())]
    gold = [by_title.get(title, "") for title in dict.fromkeys(titles)]
    found = bool(gold) and all(i in filled for i in gold)
    evidences = record.get("evidences")
    row = make_row(
        id=record["_id"],
        dataset="hotpotqa" if evidences is None else "2wikimultihopqa",
        kind=record.get("type"),
        hops=len(gold),
        question=record["question"],
        answers=_answers(record, aliases.get(record.get("answer_id") or "", ())),
        gold_ids=gold if found else (),
        evidences=evidences,
    )
    empty = len({p.id for p in context}) - len(filled)
    notes = [GOLD_UNKNOWN] * (not found) + [EMPTY_PASSAGES] * empty
    return Question(row, passages=list(filled.values()), notes=notes)


def musique(record: Mapping[str, Any]) -> Question | str:
    """A question of MuSiQue; why it is left out, where its paragraphs do not answer it (the version `full`).

    Args:
      record: `{id, question, answer, answer_aliases, answerable, question_decomposition, paragraphs: [{idx, title,
        paragraph_text, is_supporting}]}`.

    Raises:
      ValueError, KeyError, TypeError: it is not such a record, or has no answer (test files).
    """
    if record.get("answerable") is False:
        return UNANSWERABLE
    paragraphs = {p["idx"]: context_passage(p["title"], p["paragraph_text"]) for p in record["paragraphs"]}
    supporting = [p["idx"] for p in record["paragraphs"] if p.get("is_supporting")]
    hops = record.get("question_decomposition") or ()
    # In the order of the reasoning, as far as the decomposition tells.
    order = [hop.get("paragraph_support_idx") for hop in hops]
    gold = sorted(supporting, key=lambda idx: order.index(idx) if idx in order else len(order))
    row = make_row(
        id=record["id"],
        dataset="musique",
        kind=str(record["id"]).split("__")[0],
        hops=len(hops),
        question=record["question"],
        answers=_answers(record, record.get("answer_aliases") or ()),
        gold_ids=[paragraphs[idx].id for idx in gold],
    )
    return Question(row, passages=list(paragraphs.values()), notes=[GOLD_UNKNOWN] * (not gold))


def read_aliases(path: str | os.PathLike[str]) -> Aliases:
    """Aliases of answers by id, from the `id_aliases.json` that comes with 2WikiMultihopQA.

    Raises:
      ValueError: a record is not `{"Q_id": ..., "aliases": [...]}`; the message names file and line.
    """
    what = "not aliases with Q_id and aliases"
    aliases: dict[str, Sequence[str]] = {}
    for where, record in read_records(path, what):
        try:
            aliases[record["Q_id"]] = [str(alias) for alias in record["aliases"]]
        except DAMAGE as error:
            raise damage_error(where, what, error) from error
    return aliases


def _answers(record: Mapping[str, Any], aliases: Sequence[str]) -> list[str]:
    if not record.get("answer"):
        raise ValueError("it has no answer (a test file without answers cannot be used)")
    return [record["answer"], *(alias for alias in aliases if alias.strip())]
