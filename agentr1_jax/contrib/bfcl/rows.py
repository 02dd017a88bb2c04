"""Rows of BFCL's multi-turn tasks: reads and checks the data, and replays the ground truth."""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
from absl import logging

from agentr1_jax.contrib.bfcl.base import TEXT, CallFailed, Schema, array, check, record
from agentr1_jax.contrib.bfcl.documents import DOCUMENT, Function, read_document
from agentr1_jax.contrib.bfcl.state import FUNCTION_SETS, World
from agentr1_jax.envs.base import Row
from agentr1_jax.errors import GET_DATA
from agentr1_jax.tools.records import DAMAGE, damage_error, read_records

NO_TASK, NO_ANSWER = "not a multi-turn task", "not the ground truth of a task"
NO_DOCUMENT = "not a function document"
TASKS = "BFCL_v4_multi_turn_base.jsonl.gz"
ANSWERS = f"possible_answer/{TASKS}"
DOCUMENTS = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TicketAPI": "ticket_api",
    "TwitterAPI": "posting_api",
}
NOT_IMPLEMENTED = ("TradingBot", "TravelAPI", "VehicleControlAPI")
"""Classes of the data whose tasks are left out."""
READ_ONLY = "read_only"
"""Kind of the rows whose ground truth changes nothing that is compared."""

_MESSAGE = record(["role", "content"], role={"const": "user"}, content=TEXT)
TASK: Schema = record(
    ["id", "question", "initial_config", "involved_classes"],
    id={"type": "string", "minLength": 1},
    question=array(array(_MESSAGE), minItems=1),
    initial_config={"type": "object"},
    involved_classes=array({"enum": [*FUNCTION_SETS, *NOT_IMPLEMENTED]}, minItems=1, uniqueItems=True),
    path={"type": "array"},
    excluded_function=array(TEXT),
)
ANSWER: Schema = record(["id", "ground_truth"], id=TEXT, ground_truth=array(array(TEXT)))

Documents = Mapping[str, Mapping[str, Function]]
"""Class -> name -> function."""
Offer = Mapping[str, tuple[str, Function]]
"""Name -> (class, function)."""


def read_tasks(folder: str | os.PathLike[str]) -> tuple[list[Row], Documents]:
    """Return the rows of the folder `bfcl_v4/` in the file's order (see `make_row`), and its function documents.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a line is malformed, an id occurs twice, or a task and its ground truth do not fit; the message names
        file and line.
    """
    folder = Path(folder)
    documents = {name: _read_functions(folder, name) for name in FUNCTION_SETS}
    answers = _read(folder / ANSWERS, NO_ANSWER, ANSWER, "id")
    records = _read(folder / TASKS, NO_TASK, TASK, "id")
    if unasked := sorted(set(answers) - set(records)):
        raise ValueError(f"{answers[unasked[0]][0]}: the ground truth of {unasked[0]!r}, which {TASKS} does not have")
    rows = []
    for name, (where, task) in records.items():
        if name not in answers:
            raise ValueError(f"{where}: the task {name!r} has no ground truth in {ANSWERS}; download both files again")
        if set(task["involved_classes"]) & set(NOT_IMPLEMENTED):
            continue
        place, answer = answers[name]
        try:
            rows.append(make_row(task, answer["ground_truth"], documents))
        except DAMAGE as error:
            raise damage_error(f"{where} (ground truth: {place})", NO_TASK, error) from error
    logging.info("bfcl: %d tasks; %d of other classes are left out", len(rows), len(records) - len(rows))
    return rows, documents


def make_row(task: Mapping[str, Any], ground_truth: Sequence[Sequence[str]], documents: Documents) -> Row:
    """Return a row, plain JSON, for a task whose shape is checked.

    Its fields are `id`, `kind` (`READ_ONLY`, else the classes), `question` (the first request), `turns` (all requests
    of the user), `classes`, `excluded` (functions not on offer), `initial_config`, `ground_truth` (calls
    `{"name", "arguments"}` per turn), `start` (digests of the initial state) and `expected` (digest `compared` after
    each turn).

    A turn without messages is joined to the one before it; the messages of a turn are joined to one text.

    Raises:
      ValueError: parts of the task do not fit; the message names them.
    """
    if len(ground_truth) != len(task["question"]):
        raise ValueError(f"{len(task['question'])} turns, but the ground truth has {len(ground_truth)}")
    if extra := set(task["initial_config"]) - set(task["involved_classes"]):
        raise ValueError(f"initial_config has {', '.join(sorted(extra))}, which involved_classes has not")
    excluded = list(task.get("excluded_function", ()))
    offered = offered_functions(task["involved_classes"], excluded, documents)
    turns: list[str] = []
    calls: list[list[dict[str, Any]]] = []
    for messages, turn_calls in zip(task["question"], ground_truth, strict=True):
        if messages:
            turns.append("\n\n".join(message["content"] for message in messages))
            calls.append([])
        elif not turns:
            raise ValueError("the first turn has no message")
        calls[-1] += [parse_call(text, offered) for text in turn_calls]
    row = {
        "id": task["id"],
        "question": turns[0],
        "turns": turns,
        "classes": list(task["involved_classes"]),
        "excluded": excluded,
        "initial_config": task["initial_config"],
        "ground_truth": calls,
    }
    start, expected = _replay(row, offered)
    kind = READ_ONLY if set(expected) == {start["compared"]} else "+".join(sorted(row["classes"]))
    return {**row, "kind": kind, "start": start, "expected": expected}


def offered_functions(classes: Sequence[str], excluded: Sequence[str], documents: Documents) -> Offer:
    """Return the functions on offer. Raises ValueError where one is excluded that no class has."""
    functions = {name: (owner, function) for owner in classes for name, function in documents[owner].items()}
    for name in excluded:
        if name not in functions:
            raise ValueError(f"excluded_function has {name!r}, which no involved class has")
    return {name: pair for name, pair in functions.items() if name not in excluded}


def parse_call(text: str, offered: Offer) -> dict[str, Any]:
    """Parse a call such as `cd(folder='x')`; only literals are evaluated, arguments may be positional.

    Raises:
      ValueError: the text is no such call, or breaks the function's document.
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
    return {"name": function.name, "arguments": function.convert(arguments)}


def _replay(row: Row, offered: Offer) -> tuple[dict[str, str], list[str]]:
    """Return the digests of the initial state, and the digest `compared` after each turn of the ground truth."""
    world = World(row["classes"], row["initial_config"])
    start, expected = world.digests(), []
    for number, calls in enumerate(row["ground_truth"], 1):
        for call in calls:
            try:
                world.call(offered[call["name"]][0], call["name"], call["arguments"])
            except CallFailed as error:
                raise ValueError(f"the ground truth of turn {number} has a call that fails, {call}: {error}") from error
        expected.append(world.digests()["compared"])
    return start, expected


def _read_functions(folder: Path, owner: str) -> dict[str, Function]:
    """Return the functions of a class by name. Raises ValueError where one is not implemented as documented."""
    functions = {}
    path = folder / "multi_turn_func_doc" / f"{DOCUMENTS[owner]}.json.gz"
    for name, (where, document) in _read(path, NO_DOCUMENT, DOCUMENT, "name").items():
        try:
            function = read_document(document)
            code = vars(FUNCTION_SETS[owner]).get(name)
            parameters = list(inspect.signature(code).parameters)[1:] if inspect.isfunction(code) else None
            if parameters != list(function.parameters["properties"]):
                raise ValueError(f"{name!r} is not a function of {owner} as it is implemented here")
        except DAMAGE as error:
            raise damage_error(where, NO_DOCUMENT, error) from error
        functions[name] = function
    return functions


def _read(path: Path, what: str, shape: Schema, key: str) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Return (place, record) of each record of a file, by the record's `key`."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; {GET_DATA}")
    records: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for where, entry in read_records(path, what):
        try:
            check(entry, shape, "it")
            if entry[key] in records:
                raise ValueError(f"the {key} {entry[key]!r} occurs twice, first in {records[entry[key]][0]}")
        except DAMAGE as error:
            raise damage_error(where, what, error) from error
        records[entry[key]] = (where, entry)
    return records
