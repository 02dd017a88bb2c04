"""Rows of multi-hop questions: what one holds, and what is refused."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentr1_jax.envs.base import Row
from agentr1_jax.tools.search import Passage

DATASETS = ("hotpotqa", "2wikimultihopqa", "musique")
_MARKS = {"hotpot": "hotpotqa", "2wiki": "2wikimultihopqa", "musique": "musique"}
_TEST_SPLIT = re.compile(r"(?<![a-z])(dev|valid|validation|test)(?![a-z])")


@dataclasses.dataclass(frozen=True)
class Question:
    """A row as a file gave it.

    Attributes:
      row: see `make_row`.
      where: file and line (or record), for messages.
      split: the split it is from (`train`, `dev`, `validation`, `test`) as the record says, else the file's name.
      passages: of its context, where the file has one.
      notes: what was missing in it; counted.
    """

    row: Row
    where: str = ""
    split: str = ""
    passages: Sequence[Passage] = ()
    notes: Sequence[str] = ()

    @property
    def is_test(self) -> bool:
        """True if it is from a dev, validation or test split."""
        return _TEST_SPLIT.search(self.split.lower()) is not None


def make_row(
    *,
    id: Any,
    dataset: str,
    question: str,
    answers: Sequence[str],
    kind: str | None = None,
    hops: int | None = None,
    gold_ids: Sequence[str] = (),
    evidences: Sequence[Sequence[str]] | None = None,
) -> Row:
    """A checked row: `id, dataset, kind, hops, question, answers, gold_ids`, and `evidences` where there are some.

    Args:
      id: made a string.
      dataset: whose question it is.
      question: its text.
      answers: the answer, then its aliases; equal ones are kept once.
      kind: of question; None becomes `unknown`.
      hops: passages that the answer takes; None becomes the number of gold ids, which is 0 where they are not known.
      gold_ids: ids of the passages that prove the answer, in the order of the reasoning where it is known; empty where
        they are not.
      evidences: of 2WikiMultihopQA, triples (subject, relation, object) that lead to the answer; the expert's.

    Raises:
      ValueError, TypeError: something is missing or of a wrong type; the message names it.
    """
    if id is None or str(id) == "":
        raise ValueError("it has no id")
    texts = {"dataset": dataset, "question": question, **{f"answer {i}": text for i, text in enumerate(answers)}}
    for name, text in texts.items():
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"question and answers must be non-empty strings, and {name} is {text!r}")
        text.encode()  # Lone surrogates, which no tokenizer takes, raise here.
    if not answers:
        raise ValueError("it has no answer (a test file without answers cannot be used)")
    if not isinstance(gold_ids, Sequence) or isinstance(gold_ids, str) or not all(isinstance(i, str) for i in gold_ids):
        raise TypeError(f"gold_ids must be a list of strings, and is {gold_ids!r:.80}")
    for triple in evidences or ():
        if not isinstance(triple, Sequence) or len(triple) != 3 or not all(isinstance(part, str) for part in triple):
            raise TypeError(f"evidences must be triples of strings, and one is {triple!r:.80}")
    return {
        "id": str(id),
        "dataset": dataset,
        "kind": str(kind or "unknown"),
        "hops": int(hops or len(gold_ids)),
        "question": question,
        "answers": list(dict.fromkeys(answers)),
        "gold_ids": list(dict.fromkeys(gold_ids)),
        **({"evidences": evidences} if evidences else {}),
    }


def dataset_name(source: Any) -> str:
    """The house's name of a data set, from what a file calls it: `hotpotqa/hotpot_qa` is `hotpotqa`.

    Raises:
      ValueError: it is no name.
    """
    if not isinstance(source, str) or not source:
        raise ValueError(f"data_source must be a name, and is {source!r}")
    return next((name for mark, name in _MARKS.items() if mark in source.lower()), source)


def check_name(name: str, among: Sequence[str] | Mapping[str, Any], what: str) -> str:
    """`name` if it is one of them. Raises ValueError that names the nearest and lists them."""
    if name in among:
        return name
    near = difflib.get_close_matches(name, among, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"unknown {what} {name!r}{hint or '.'} Known are {', '.join(among) or 'none'}")
