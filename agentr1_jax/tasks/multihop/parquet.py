"""Parquet files of rows as verl, Search-R1 and Agent-R1 use them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentr1_jax.tasks.multihop.rows import Question, dataset_name, make_row

COLUMNS = ("data_source", "prompt", "reward_model", "extra_info", "id", "question")
_BATCH = 1024
_ASKED = re.compile(r"Question:[ \t]*(\S.*)")


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
        answers=[*_answers(record["reward_model"]["ground_truth"]), *_as_list(extra.get("answers"))],
        gold_ids=_as_list(extra.get("gold_ids")),
    )
    return Question(row, split=split, notes=[] if row["gold_ids"] else ["gold_unknown"])


def _find_question(prompt: Sequence[Mapping[str, str]]) -> str:
    said = [message["content"] for message in prompt if message["role"] == "user"]
    if not said:
        raise ValueError("its prompt has no message of a user")
    found = _ASKED.findall(said[-1])
    return (found[-1] if found else said[-1]).strip()


def _answers(truth: Any) -> list[str]:
    target = truth["target"] if isinstance(truth, Mapping) else truth
    return _as_list(target)


def _as_list(value: Any) -> list[str]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)
