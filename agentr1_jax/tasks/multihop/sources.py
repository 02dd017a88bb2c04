"""Question files of every known format, told apart by what they hold."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentr1_jax.tasks.multihop import originals
from agentr1_jax.tasks.multihop.parquet import parquet_records, verl
from agentr1_jax.tasks.multihop.rows import Question, make_row
from agentr1_jax.tools.records import DAMAGE, damage_error, read_records

WHAT = "not a question"


@dataclasses.dataclass(frozen=True)
class Source:
    """What one file holds.

    Attributes:
      questions: in the file's order, each with the passages of its context.
      counts: what was left out (`unanswerable`) or missing (`gold_unknown`, `empty_passages`), and how often.
    """

    questions: Sequence[Question]
    counts: Mapping[str, int]


def read_source(path: str | os.PathLike[str]) -> Source:
    """Reads questions of any format: the files of the data folder, HotpotQA, 2WikiMultihopQA, MuSiQue, verl's rows.

    JSON and JSON lines may be gzipped. A file that is `*.parquet` is read with pyarrow. Aliases of 2WikiMultihopQA are
    taken from the `id_aliases.json` in the same folder, where there is one.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a record is not a question, an id occurs twice, or there is none; the message names file and line.
    """
    path = os.fspath(path)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path}: no such question file; set AGENTR1_DATA to the folder that holds the data")
    beside = Path(path).parent / originals.ALIAS_FILE
    aliases = originals.read_aliases(beside) if beside.is_file() else {}
    questions: dict[str, Question] = {}
    counts: collections.Counter[str] = collections.Counter()
    for where, record in parquet_records(path) if path.endswith(".parquet") else read_records(path, WHAT):
        try:
            question = _question(record, aliases)
            if isinstance(question, str):
                counts[question] += 1
                continue
            name = question.row["id"]
            if name in questions:
                raise ValueError(f"the id {name!r} occurs twice")
        except DAMAGE as error:
            raise damage_error(where, WHAT, error) from error
        counts.update(question.notes)
        split = question.split or Path(path).name
        questions[name] = dataclasses.replace(question, where=where, split=split)
    if not questions:
        raise ValueError(f"{path}: no question in it{_said(counts)}; choose another file")
    return Source(list(questions.values()), counts)


def _question(record: Any, aliases: originals.Aliases) -> Question | str:
    """A record by the reader whose fields it has. A string says why it is left out."""
    if not isinstance(record, Mapping):
        raise TypeError(f"a {type(record).__name__}, not an object")
    if "reward_model" in record:
        return verl(record)
    if "paragraphs" in record:
        return originals.musique(record)
    if "_id" in record or "context" in record:
        return originals.hotpot(record, aliases)
    return _house(record)


def _house(record: Mapping[str, Any]) -> Question:
    row = make_row(
        id=record["id"],
        dataset=record["dataset"],
        kind=record["type"],
        hops=record.get("hops"),
        question=record["question"],
        answers=[record["answer"], *record["answer_aliases"]],
        gold_ids=record["gold_ids"],
        evidences=record.get("evidences"),
    )
    return Question(row, split=record.get("orig_split") or "", notes=[] if row["gold_ids"] else ["gold_unknown"])


def _said(counts: Mapping[str, int]) -> str:
    return f" ({', '.join(f'{name}: {n}' for name, n in counts.items())})" if counts else ""
