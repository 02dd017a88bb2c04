"""Question files of every known format, told apart by what they hold, as checked rows.

Formats: the data sets as their authors publish them, the files of the data folder, and rows as verl, Search-R1 and
Agent-R1 use them, in JSON or Parquet.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from agentr1_jax.envs.base import Row
from agentr1_jax.errors import GET_DATA
from agentr1_jax.tools.records import DAMAGE, damage_error, read_records
from agentr1_jax.tools.search import Passage

DATASETS = ("hotpotqa", "2wikimultihopqa", "musique")
_MARKS = {"hotpot": "hotpotqa", "2wiki": "2wikimultihopqa", "musique": "musique"}
GOLD_UNKNOWN = "gold_unknown"
_WHAT = "not a question"
_VERL_COLUMNS = ("data_source", "prompt", "reward_model", "extra_info", "id", "question")
_ASKED = re.compile(r"Question:[ \t]*(\S.*)")
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


class Source(NamedTuple):
    """Questions of a file, and how often one was left out or something was missing; docs/questions.md has the names."""

    questions: Sequence[Question]
    counts: Mapping[str, int]


def read_source(path: str | os.PathLike[str]) -> Source:
    """Read all questions of a file; see `read_questions`.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a record is not a question, an id occurs twice, or there is none; the message names file and line.
    """
    counts: collections.Counter[str] = collections.Counter()
    questions = list(read_questions(path, counts))
    if not questions:
        left_out = f" ({', '.join(f'{name}: {n}' for name, n in counts.items())})" if counts else ""
        raise ValueError(f"{path}: no question in it{left_out}; choose another file")
    return Source(questions, counts)


def read_questions(path: str | os.PathLike[str], counts: collections.Counter[str]) -> Iterator[Question]:
    """Yield questions of any format, one at a time: JSON or JSON lines, plain or gzipped; `*.parquet` by pyarrow.

    Aliases of 2WikiMultihopQA are taken from the `id_aliases.json` in the same folder, where there is one.

    Args:
      path: path of the file.
      counts: gets what was left out or missing, and how often; see `Source`.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a record is not a question, or an id occurs twice; the message names file and line.
    """
    path = os.fspath(path)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path}: no such question file; {GET_DATA}")
    beside = Path(path).with_name("id_aliases.json")
    aliases = read_aliases(beside) if beside.is_file() else {}
    names: set[str] = set()
    for where, record in _parquet_records(path) if path.endswith(".parquet") else read_records(path, _WHAT):
        try:
            question = _question(record, aliases)
            if question is None:
                counts["unanswerable"] += 1
                continue
            name = question.row["id"]
            if name in names:
                raise ValueError(f"the id {name!r} occurs twice")
        except DAMAGE as error:
            raise damage_error(where, _WHAT, error) from error
        names.add(name)
        counts.update(question.notes)
        yield dataclasses.replace(question, where=where, split=question.split or Path(path).name)


def read_aliases(path: str | os.PathLike[str]) -> dict[str, list[str]]:
    """Read aliases of answers by id, from the `id_aliases.json` that comes with 2WikiMultihopQA.

    Raises:
      ValueError: a record is not `{"Q_id": ..., "aliases": [...]}`; the message names file and line.
    """
    what = "not aliases with Q_id and aliases"
    aliases: dict[str, list[str]] = {}
    for where, record in read_records(path, what):
        try:
            aliases[record["Q_id"]] = [str(alias) for alias in record["aliases"]]
        except DAMAGE as error:
            raise damage_error(where, what, error) from error
    return aliases


def _parquet_records(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a Parquet file, each behind its place: `file, row 1`."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(f"{path}: reading Parquet needs pyarrow; pip install 'agentr1_jax[parquet]'") from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if not {"data_source", "reward_model"} <= set(names) or not {"prompt", "question"} & set(names):
                needed = ", ".join(_VERL_COLUMNS[:4])
                raise ValueError(f"it has the columns {', '.join(names)}, not those of verl: {needed}")
            for batch in file.iter_batches(1024, columns=[name for name in _VERL_COLUMNS if name in names]):
                for record in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", record
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{path}, row {number + 1}: not readable ({type(error).__name__}: {error}); "
            "repair or download the file again"
        ) from error


def _question(record: Any, aliases: Mapping[str, Sequence[str]]) -> Question | None:
    """A record by the reader whose fields it has; None where it cannot be answered."""
    if not isinstance(record, Mapping):
        raise TypeError(f"a {type(record).__name__}, not an object")
    if "reward_model" in record:
        return _verl(record)
    if "paragraphs" in record:
        return _musique(record)
    if "_id" in record or "context" in record:
        return _hotpot(record, aliases)
    return _data_folder(record)


def _data_folder(record: Mapping[str, Any]) -> Question:
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
    return Question(row, split=record.get("orig_split") or "", notes=[] if row["gold_ids"] else [GOLD_UNKNOWN])


def _hotpot(record: Mapping[str, Any], aliases: Mapping[str, Sequence[str]]) -> Question:
    """A question of HotpotQA, or of 2WikiMultihopQA, which adds `evidences` and `answer_id`.

    `{_id, question, answer, type, supporting_facts: [[title, sentence]], context: [[title, [sentences]]]}`
    """
    context = [context_passage(title, " ".join(sentences)) for title, sentences in record["context"]]
    filled = {passage.id: passage for passage in context if passage.text}
    by_title = {passage.title: passage.id for passage in reversed(context)}
    titles = dict.fromkeys(fact[0].strip() for fact in record.get("supporting_facts", ()))
    gold = [by_title.get(title, "") for title in titles]
    found = bool(gold) and set(gold) <= filled.keys()
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
    notes = [GOLD_UNKNOWN] * (not found) + ["empty_passages"] * empty
    return Question(row, passages=list(filled.values()), notes=notes)


def _musique(record: Mapping[str, Any]) -> Question | None:
    """A question of MuSiQue; None where its paragraphs do not answer it (the version `full`).

    `{id, question, answer, answer_aliases, answerable, question_decomposition: [{paragraph_support_idx}], paragraphs:
    [{idx, title, paragraph_text, is_supporting}]}`
    """
    if record.get("answerable") is False:
        return None
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


def _answers(record: Mapping[str, Any], aliases: Sequence[str]) -> list[str]:
    """The answer and its aliases; none at all without an answer, as in the published test files."""
    return [record["answer"], *(alias for alias in aliases if alias.strip())] if record.get("answer") else []


def _verl(record: Mapping[str, Any]) -> Question:
    """A question of a verl-style row.

    `{data_source, prompt: [{role, content}], reward_model: {ground_truth: answer | [answers] | {target: answer |
    [answers]}}, extra_info}`. Its text is `extra_info.question`, else `question`, else what follows the last
    `Question:` of the prompt's last user message, up to the end of the line, else the whole of that message. Gold
    passages are known only where `extra_info.gold_ids` names them.
    """
    source, extra = record["data_source"], record.get("extra_info") or {}
    if not isinstance(source, str) or not source:
        raise ValueError(f"data_source must be a name, and is {source!r}")
    if isinstance(extra, str):
        extra = json.loads(extra)
    split = str(extra.get("split") or "")
    name = extra.get("question_id") or extra.get("id") or record.get("id")
    if name is None:
        if extra.get("index") is None:
            raise ValueError("it has no id: neither extra_info.question_id, .id and .index nor id")
        name = f"{split}/{extra['index']}"
    truth = record["reward_model"]["ground_truth"]
    target = truth["target"] if isinstance(truth, Mapping) else truth
    row = make_row(
        id=f"{source}/{name}",
        dataset=next((known for mark, known in _MARKS.items() if mark in source.lower()), source),
        kind=extra.get("type"),
        hops=extra.get("hops"),
        question=extra.get("question") or record.get("question") or _find_question(record["prompt"]),
        answers=[*_as_list(target), *_as_list(extra.get("answers"))],
        gold_ids=_as_list(extra.get("gold_ids")),
    )
    return Question(row, split=split, notes=[] if row["gold_ids"] else [GOLD_UNKNOWN])


def _find_question(prompt: Sequence[Mapping[str, str]]) -> str:
    said = [message["content"] for message in prompt if message["role"] == "user"]
    if not said:
        raise ValueError("its prompt has no message of a user")
    found = _ASKED.findall(said[-1])
    return (found[-1] if found else said[-1]).strip()


def _as_list(value: Any) -> list[str]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)


def context_passage(title: Any, text: Any) -> Passage:
    """Return a passage of a question's context; its id depends on title and text alone, whatever file it is in."""
    if not isinstance(title, str) or not isinstance(text, str):
        raise TypeError("titles and texts of a context must be strings")
    title, text = title.strip(), " ".join(text.split())
    return Passage("p" + hashlib.sha256(f"{title}\n{text}".encode()).hexdigest()[:16], title, text)


def make_row(
    *,
    id: Any,
    dataset: str,
    question: str,
    answers: Sequence[str],
    kind: str | None,
    hops: int | None,
    gold_ids: Sequence[str],
    evidences: Sequence[Sequence[str]] | None = None,
) -> Row:
    """Return a checked row: `id, dataset, kind, hops, question, answers, gold_ids`, and `evidences` where it has some.

    Args:
      id: made a string.
      dataset: whose question it is.
      question: its text.
      answers: the answer, then its aliases.
      kind: kind of question; None becomes `unknown`.
      hops: passages that the answer takes; None becomes the number of gold ids.
      gold_ids: ids of the passages that prove the answer, in the order of the reasoning where it is known; empty where
        they are not.
      evidences: of 2WikiMultihopQA, triples (subject, relation, object) that lead to the answer; the expert's.

    Raises:
      ValueError, TypeError: something is missing or of a wrong type; the message names it.
    """
    if id is None or str(id) == "":
        raise ValueError("it has no id")
    if not answers:
        raise ValueError("it has no answer (a test file without answers cannot be used)")
    texts = {"dataset": dataset, "question": question, **{f"answer {i}": text for i, text in enumerate(answers)}}
    for name, text in texts.items():
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"question and answers must be non-empty strings, and {name} is {text!r}")
        text.encode()  # Lone surrogates, which no tokenizer takes, raise here.
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


def check_name(name: str, among: Sequence[str] | Mapping[str, Any], what: str) -> None:
    """Raise ValueError, which names the nearest and lists them, unless `name` is one of them."""
    if name not in among:
        near = difflib.get_close_matches(name, among, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"unknown {what} {name!r}{hint} Known are {', '.join(among) or 'none'}")
