"""Question files of every known format, told apart by what they hold.

Formats: the data sets as their authors publish them, the files of the data folder, and Parquet files of rows as verl,
Search-R1 and Agent-R1 use them.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentr1_jax.tasks.multihop.rows import Question, dataset_name, make_row
from agentr1_jax.tools.records import DAMAGE, damage_error, read_records
from agentr1_jax.tools.search import Passage

WHAT = "not a question"
Aliases = Mapping[str, Sequence[str]]
ALIAS_FILE = "id_aliases.json"
UNANSWERABLE = "unanswerable"
GOLD_UNKNOWN = "gold_unknown"
EMPTY_PASSAGES = "empty_passages"
COLUMNS = ("data_source", "prompt", "reward_model", "extra_info", "id", "question")
_BATCH = 1024
_ASKED = re.compile(r"Question:[ \t]*(\S.*)")


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
    beside = Path(path).parent / ALIAS_FILE
    aliases = read_aliases(beside) if beside.is_file() else {}
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
        raise ValueError(f"{path}: no question in it{_counts_text(counts)}; choose another file")
    return Source(list(questions.values()), counts)


def _question(record: Any, aliases: Aliases) -> Question | str:
    """A record by the reader whose fields it has. A string says why it is left out."""
    if not isinstance(record, Mapping):
        raise TypeError(f"a {type(record).__name__}, not an object")
    if "reward_model" in record:
        return verl(record)
    if "paragraphs" in record:
        return musique(record)
    if "_id" in record or "context" in record:
        return hotpot(record, aliases)
    return _data_folder_question(record)


def _data_folder_question(record: Mapping[str, Any]) -> Question:
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


def _counts_text(counts: Mapping[str, int]) -> str:
    return f" ({', '.join(f'{name}: {n}' for name, n in counts.items())})" if counts else ""


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


def parquet_records(path: str | os.PathLike[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a Parquet file, each behind its place: `file, row 1`.

    Raises:
      ValueError: pyarrow is not installed, the file is damaged, or it lacks the columns of such rows.
    """
    path = os.fspath(path)
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(f"{path}: reading Parquet needs pyarrow; pip install 'agentr1_jax[parquet]'") from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            missing = [name for name in ("data_source", "reward_model") if name not in names]
            if missing or not {"prompt", "question"} & set(names):
                raise ValueError(f"it has the columns {', '.join(names)}, not those of verl: {', '.join(COLUMNS[:4])}")
            for batch in file.iter_batches(_BATCH, columns=[name for name in COLUMNS if name in names]):
                for record in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", record
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{path}, row {number + 1}: not readable ({type(error).__name__}: {error}); "
            "repair or download the file again"
        ) from error


def verl(record: Mapping[str, Any]) -> Question:
    """A question of a verl-style row.

    Its text is `extra_info.question`, else `question`, else what follows the last `Question:` of the prompt's last
    user message, up to the end of the line, else the whole of that message. Gold passages are known only where
    `extra_info.gold_ids` names them.

    Args:
      record: `{data_source, prompt: [{role, content}], reward_model: {ground_truth: answer | [answers] | {target:
        answer | [answers]}}, extra_info}`.

    Raises:
      ValueError, KeyError, TypeError: it is not such a row.
    """
    source, extra = record["data_source"], record.get("extra_info") or {}
    if isinstance(extra, str):
        extra = json.loads(extra)
    split = str(extra.get("split") or "")
    name = extra.get("question_id") or extra.get("id") or record.get("id")
    if name is None:
        if extra.get("index") is None:
            raise ValueError("it has no id: neither extra_info.question_id, .id and .index nor id")
        name = f"{split}/{extra['index']}"
    row = make_row(
        id=f"{source}/{name}",
        dataset=dataset_name(source),
        kind=extra.get("type"),
        hops=extra.get("hops"),
        question=extra.get("question") or record.get("question") or _find_question(record["prompt"]),
        answers=[*_ground_truth(record["reward_model"]["ground_truth"]), *_as_list(extra.get("answers"))],
        gold_ids=_as_list(extra.get("gold_ids")),
    )
    return Question(row, split=split, notes=[] if row["gold_ids"] else ["gold_unknown"])


def _find_question(prompt: Sequence[Mapping[str, str]]) -> str:
    said = [message["content"] for message in prompt if message["role"] == "user"]
    if not said:
        raise ValueError("its prompt has no message of a user")
    found = _ASKED.findall(said[-1])
    return (found[-1] if found else said[-1]).strip()


def _ground_truth(truth: Any) -> list[str]:
    target = truth["target"] if isinstance(truth, Mapping) else truth
    return _as_list(target)


def _as_list(value: Any) -> list[str]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)
