"""Rows of BFCL's multi-turn tasks: read, checked, their ground truth replayed."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema

from agentr1_jax.contrib.bfcl.base import CallFailed, check, functions_of
from agentr1_jax.contrib.bfcl.documents import Function, read_documents
from agentr1_jax.contrib.bfcl.state import FUNCTION_SETS, World
from agentr1_jax.envs.base import Row
from agentr1_jax.tools.records import DAMAGE, damaged, read_records

WHAT, NO_ANSWER = "not a multi-turn task", "not the ground truth of a task"
TASKS = "BFCL_v4_multi_turn_base.jsonl.gz"
ANSWERS = f"possible_answer/{TASKS}"
DOCUMENTS = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TicketAPI": "ticket_api",
    "TwitterAPI": "posting_api",
}
ELSEWHERE = ("TradingBot", "TravelAPI", "VehicleControlAPI")
"""Classes of the data that are not implemented; their tasks are left out."""
READ_ONLY = "read_only"
"""The kind of rows whose ground truth changes nothing that is compared."""

SHAPE: Mapping[str, Any] = {
    "type": "object",
    "required": ["id", "question", "initial_config", "involved_classes"],
    "properties": {
        "id": {"type": "string", "minLength": 1},
        "question": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["role", "content"],
                    "properties": {"role": {"const": "user"}, "content": {"type": "string"}},
                    "additionalProperties": False,
                },
            },
        },
        "initial_config": {"type": "object"},
        "involved_classes": {
            "type": "array",
            "minItems": 1,
            "uniqueItems": True,
            "items": {"enum": [*FUNCTION_SETS, *ELSEWHERE]},
        },
        "path": {"type": "array"},
        "excluded_function": {"type": "array", "items": {"type": "string"}},
    },
    "additionalProperties": False,
}
ANSWER_SHAPE: Mapping[str, Any] = {
    "type": "object",
    "required": ["id", "ground_truth"],
    "properties": {
        "id": {"type": "string"},
        "ground_truth": {"type": "array", "items": {"type": "array", "items": {"type": "string"}}},
    },
    "additionalProperties": False,
}

Documents = Mapping[str, Mapping[str, Function]]
"""Functions by name, by class."""


@dataclasses.dataclass(frozen=True)
class Tasks:
    """What the data folder holds.

    Attributes:
      rows: see `make_row`; in the file's order.
      documents: of the five classes.
      counts: `other_classes`, tasks left out because they involve a class that is not implemented.
    """

    rows: Sequence[Row]
    documents: Documents
    counts: Mapping[str, int]


def read_tasks(folder: str | os.PathLike[str]) -> Tasks:
    """Reads `bfcl_v4/`.

    Raises:
      FileNotFoundError: a file is not there.
      ValueError: a line is not what it should be, an id occurs twice, or a task and its ground truth do not fit; the
        message names file and line.
    """
    folder = Path(folder)
    documents = {name: _documents(folder, name) for name in FUNCTION_SETS}
    answers = _records(folder / ANSWERS, NO_ANSWER, ANSWER_SHAPE)
    records = _records(folder / TASKS, WHAT, SHAPE)
    if unasked := sorted(set(answers) - set(records)):
        raise ValueError(f"{answers[unasked[0]][0]}: the ground truth of {unasked[0]!r}, which {TASKS} does not have")
    rows, others = [], 0
    for name, (where, record) in records.items():
        if name not in answers:
            raise ValueError(f"{where}: the task {name!r} has no ground truth in {ANSWERS}; download both files again")
        if set(record["involved_classes"]) & set(ELSEWHERE):
            others += 1
            continue
        place, answer = answers[name]
        try:
            rows.append(make_row(record, answer["ground_truth"], documents))
        except DAMAGE as error:
            raise damaged(f"{where} (ground truth: {place})", WHAT, error) from error
    return Tasks(rows, documents, {"other_classes": others})


def make_row(record: Mapping[str, Any], ground_truth: Sequence[Sequence[str]], documents: Documents) -> Row:
    """A row, plain JSON, from a task whose shape is checked.

    Its fields are `id`, `kind` (`READ_ONLY`, else the classes), `question` (the first turn), `turns` (what the user
    says), `classes`, `excluded` (functions not on offer), `initial_config`, `ground_truth` (calls as `{"name",
    "arguments"}`, by turn), `start` (digests of the initial state) and `outcomes` (digests after each turn).

    A turn without messages belongs to the one before it, several messages are one text.

    Raises:
      ValueError: something does not fit; the message names it.
    """
    if len(ground_truth) != len(record["question"]):
        raise ValueError(f"{len(record['question'])} turns, but the ground truth has {len(ground_truth)}")
    if extra := set(record["initial_config"]) - set(record["involved_classes"]):
        raise ValueError(f"initial_config has {', '.join(sorted(extra))}, which involved_classes has not")
    offered = offer(record["involved_classes"], record.get("excluded_function", ()), documents)
    turns: list[str] = []
    calls: list[list[dict[str, Any]]] = []
    for messages, of_turn in zip(record["question"], ground_truth, strict=True):
        if messages:
            turns.append("\n\n".join(message["content"] for message in messages))
            calls.append([])
        elif not turns:
            raise ValueError("the first turn has no message")
        calls[-1] += [parse_call(text, offered) for text in of_turn]
    row = {
        "id": record["id"],
        "kind": "+".join(sorted(record["involved_classes"])),
        "question": turns[0],
        "turns": turns,
        "classes": list(record["involved_classes"]),
        "excluded": list(record.get("excluded_function", ())),
        "initial_config": record["initial_config"],
        "ground_truth": calls,
    }
    start, outcomes = _replayed(row, offered)
    kind = READ_ONLY if set(outcomes) == {start["outcome"]} else row["kind"]
    return {**row, "kind": kind, "start": start, "outcomes": outcomes}


def offer(classes: Sequence[str], excluded: Sequence[str], documents: Documents) -> dict[str, tuple[str, Function]]:
    """Functions on offer with their class, by name. Raises ValueError where one is excluded that no class has."""
    found = {name: (of, function) for of in classes for name, function in documents[of].items()}
    for name in excluded:
        if name not in found:
            raise ValueError(f"excluded_function has {name!r}, which no involved class has")
    return {name: x for name, x in found.items() if name not in excluded}


def parse_call(text: str, offered: Mapping[str, tuple[str, Function]]) -> dict[str, Any]:
    """A call as the data write it, `cd(folder='x')`; what has no name takes the parameters in their order.

    Nothing is evaluated but literals.

    Raises:
      ValueError: it is no such call, or breaks the function's document.
    """
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"the call {text!r:.200} cannot be read: {error}") from error
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError(f"{text!r:.200} is not a call of a function")
    if call.func.id not in offered:
        raise ValueError(f"the call {text!r:.200} is of a function that is not on offer")
    _, function = offered[call.func.id]
    order = list(function.parameters["properties"])
    names = [*order[: len(call.args)], *(keyword.arg for keyword in call.keywords)]
    if len(call.args) > len(order) or None in names or len(set(names)) < len(names):
        raise ValueError(f"the call {text!r:.200} does not fit the parameters {', '.join(order) or '(none)'}")
    try:
        values = [ast.literal_eval(value) for value in [*call.args, *(keyword.value for keyword in call.keywords)]]
    except ValueError as error:
        raise ValueError(f"an argument of {text!r:.200} is no literal") from error
    arguments = dict(zip(names, values, strict=True))
    try:
        jsonschema.Draft202012Validator(dict(function.parameters)).validate(arguments)
    except jsonschema.ValidationError as error:
        raise ValueError(f"the call {text!r:.200} breaks the function's document: {error.message:.200}") from error
    return {"name": function.name, "arguments": function.given(arguments)}


def _replayed(row: Row, offered: Mapping[str, tuple[str, Function]]) -> tuple[dict[str, str], list[str]]:
    """Digests of the initial state, and of the outcome after each turn of the ground truth."""
    world = World(row["classes"], row["initial_config"])
    start, outcomes = world.digests(), []
    for number, calls in enumerate(row["ground_truth"], 1):
        for call in calls:
            try:
                world.call(offered[call["name"]][0], call["name"], call["arguments"])
            except CallFailed as error:
                raise ValueError(f"the ground truth of turn {number} has a call that fails, {call}: {error}") from error
        outcomes.append(world.digests()["outcome"])
    return start, outcomes


def _documents(folder: Path, name: str) -> dict[str, Function]:
    """Documents of a class. Raises ValueError where one describes a function that is not implemented like that."""
    path = folder / "multi_turn_func_doc" / f"{DOCUMENTS[name]}.json.gz"
    functions = read_documents(path)
    implemented = functions_of(FUNCTION_SETS[name])
    for function in functions.values():
        code = implemented.get(function.name)
        if code is None or list(inspect.signature(code).parameters)[1:] != list(function.parameters["properties"]):
            raise ValueError(f"{path}: {function.name!r} is not a function of {name} as it is implemented here")
    return functions


def _records(path: Path, what: str, shape: Mapping[str, Any]) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Records of a file with their places, by id."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; set AGENTR1_DATA to the folder that holds bfcl_v4/")
    found: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for where, record in read_records(path, what):
        try:
            check(record, shape, "it")
            if record["id"] in found:
                raise ValueError(f"the id {record['id']!r} occurs twice, first in {found[record['id']][0]}")
        except DAMAGE as error:
            raise damaged(where, what, error) from error
        found[record["id"]] = (where, record)
    return found
