"""Rows and documents of BFCL that are not what they should be, and those of unusual shape."""

from __future__ import annotations

import copy
import gzip
import json

import pytest
from bfcl_play import FS

from agentr1_jax.contrib.bfcl.documents import to_schema
from agentr1_jax.contrib.bfcl.rows import ANSWERS, DOCUMENTS, TASKS, offered_functions, parse_call, read_tasks
from agentr1_jax.contrib.bfcl.state import World


@pytest.fixture
def damage(data_dir, tmp_path):
    """Writes the first three tasks with a changed line, in a data folder of their own, and reads them."""
    folder = data_dir / "bfcl_v4"
    for name in DOCUMENTS.values():
        target = tmp_path / "multi_turn_func_doc" / f"{name}.json.gz"
        target.parent.mkdir(exist_ok=True)
        target.write_bytes((folder / "multi_turn_func_doc" / f"{name}.json.gz").read_bytes())
    (tmp_path / "possible_answer").mkdir()
    parts = {}
    for name in (TASKS, ANSWERS):
        with gzip.open(folder / name, "rt") as file:
            parts[name] = [json.loads(line) for line in file][:3]

    def read(name=TASKS, line=2, change=None, **fields):
        for part, records in parts.items():
            records = copy.deepcopy(records)
            if part == name:
                records[line - 1].update(fields)
                if change:
                    change(records)
            with gzip.open(tmp_path / part, "wt") as file:
                file.writelines(record if isinstance(record, str) else json.dumps(record) + "\n" for record in records)
        return read_tasks(tmp_path)[0]

    return read


def test_the_three_tasks_are_read_where_nothing_is_damaged(damage):
    assert [len(row["turns"]) for row in damage()] == [4, 4, 5]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"question": "What"}, "it.question: 'What' is not of type 'array'"),
        ({"question": [[{"role": "user"}]]}, r"it.question\[0\]\[0\]: 'content' is a required property"),
        ({"question": [[]] * 4}, "the first turn has no message"),
        ({"question": [[{"role": "user", "content": ""}]]}, "1 turns, but the ground truth has 4"),
        ({"involved_classes": ["FaxAPI"]}, r"it.involved_classes\[0\]: 'FaxAPI' is not one of"),
        ({"involved_classes": ["MathAPI"]}, "initial_config has GorillaFileSystem, which involved_classes has not"),
        ({"initial_config": {}}, "GorillaFileSystem: 'root' is a required property"),
        ({"initial_config": {FS: {"root": {"a": {"type": "link"}}}}}, "GorillaFileSystem.root.a"),
        ({"initial_config": {FS: {"root": {"..": {"type": "directory", "contents": {}}}}}}, "does not match"),
        ({"excluded_function": ["fly"]}, "excluded_function has 'fly', which no involved class has"),
        ({"excluded_function": ["mv"]}, r"mv\(source='log.txt',destination='archive'\).* not on offer"),
        ({"id": "multi_turn_base_0"}, "'multi_turn_base_0' occurs twice, first in .*line 1"),
    ],
)
def test_a_task_of_the_wrong_shape_is_told_with_file_and_line(damage, fields, told):
    with pytest.raises(ValueError, match=rf"{TASKS}, line 2.*: not a multi-turn task .*{told}"):
        damage(**fields)


TWEET = {"id": 1, "username": "a", "content": "", "tags": [], "mentions": []}


@pytest.mark.parametrize(
    ("name", "config", "told"),
    [
        ("MessageAPI", {"current_user": "USR009"}, "MessageAPI.current_user: 'USR009' is no user"),
        ("TicketAPI", {"ticket_queue": [{"title": "x"}]}, r"TicketAPI.ticket_queue\[0\]: 'id' is a required"),
        ("TicketAPI", {"ticket_queue": [{"id": 1}, {"id": 1}]}, "an id occurs twice"),
        ("TwitterAPI", {"followers": []}, "'followers' was unexpected"),
        ("TwitterAPI", {"tweets": {"0": TWEET}}, "the tweet '0' has the id 1"),
    ],
)
def test_a_config_of_the_wrong_shape_is_told(name, config, told):
    with pytest.raises(ValueError, match=told):
        World([name], {name: config})


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("cd(folder='x'", "cannot be read"),
        ("os.remove('x')", "is not a call of a function"),
        ("fly(to='x')", "is of a function that is not on offer"),
        ("cd(folder=open('x'))", "is no literal"),
        ("cd('x', folder='y')", "does not fit the parameters folder"),
        ("cd(**{'folder': 'x'})", "does not fit the parameters folder"),
        ("cd(folder=3)", "breaks the function's document: 3 is not of type 'string'"),
        ("cd(folder='nowhere')", "the ground truth of turn 1 has a call that fails"),
    ],
)
def test_ground_truth_that_cannot_be_made_is_told_with_both_places(damage, call, told):
    with pytest.raises(ValueError, match=rf"{TASKS}, line 2 \(ground truth: .*{TASKS}, line 2\).*{told}"):
        damage(ANSWERS, ground_truth=[[call], [], [], []])


def test_files_that_do_not_fit_are_told(damage, tmp_path):
    with pytest.raises(ValueError, match="line 3: the task 'multi_turn_base_2' has no ground truth"):
        damage(ANSWERS, change=lambda records: records.pop())
    with pytest.raises(ValueError, match="line 3: the ground truth of 'multi_turn_base_2', which .* does not have"):
        damage(TASKS, change=lambda records: records.pop())
    with pytest.raises(ValueError, match=rf"{ANSWERS}, line 2: not the ground truth of a task .*ground_truth"):
        damage(ANSWERS, ground_truth="cd()")
    with pytest.raises(ValueError, match=rf"{TASKS}, line 3: not a multi-turn task \(JSONDecodeError"):
        damage(change=lambda records: records.__setitem__(2, "{"))
    (tmp_path / TASKS).unlink()
    with pytest.raises(FileNotFoundError, match=f"{TASKS}: no such file; .*prepare_data"):
        read_tasks(tmp_path)
    (tmp_path / "multi_turn_func_doc" / "math_api.json.gz").unlink()
    with pytest.raises(FileNotFoundError, match="math_api.json.gz: no such file; .*prepare_data"):
        read_tasks(tmp_path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"name": "fly"}, "'fly' is not a function of MathAPI as it is implemented here"),
        ({"name": "add", "parameters": {"type": "dict", "properties": {}}}, "'add' is not a function of MathAPI as"),
        ({"response": None}, "line 1: not a function document .*it.response"),
        ({"parameters": {"type": "dict", "properties": {"a": {"type": "bytes"}}}}, "line 1: .*unknown type 'bytes'"),
    ],
)
def test_documents_that_are_not_implemented_are_told(damage, tmp_path, change, told):
    document = {"name": "mean", "description": "", "parameters": {"type": "dict"}, "response": {"type": "dict"}}
    (tmp_path / "multi_turn_func_doc" / "math_api.json.gz").write_text(json.dumps(document | change))
    with pytest.raises(ValueError, match=f"math_api.json.gz.*{told}"):
        damage()


def test_a_turn_without_messages_belongs_to_the_one_before_and_several_messages_are_one_text(damage):
    def change(records):
        first, second, *_ = records[1]["question"]
        records[1]["question"] = [first + second, [], *records[1]["question"][2:]]

    row, plain = damage(change=change)[1], damage()[1]
    assert row["turns"] == ["\n\n".join(plain["turns"][:2]), *plain["turns"][2:]]
    assert row["ground_truth"] == [sum(plain["ground_truth"][:2], []), *plain["ground_truth"][2:]]
    assert row["expected"] == plain["expected"][1:]


def test_types_of_documents_become_json_schema():
    spec = {
        "type": "dict",
        "properties": {
            "a": {"type": "float", "description": " A. "},
            "b": {"type": "tuple", "items": {"type": "integer"}, "default": [1]},
            "c": {"type": "any", "default": "None"},
        },
        "required": ["a"],
    }
    assert to_schema(spec) == {
        "type": "object",
        "properties": {
            "a": {"type": "number", "description": "A."},
            "b": {"type": "array", "items": {"type": "integer"}, "default": [1]},
            "c": {},
        },
        "required": ["a"],
        "additionalProperties": False,
    }


def test_ground_truth_may_leave_out_names_and_whole_numbers_become_int(data_dir):
    offered = offered_functions(list(DOCUMENTS), [], read_tasks(data_dir / "bfcl_v4")[1])
    assert parse_call("cd('x')", offered) == {"name": "cd", "arguments": {"folder": "x"}}
    call = parse_call("edit_ticket(3.0, updates={'priority': 2.0})", offered)
    assert json.dumps(call["arguments"]) == '{"ticket_id": 3, "updates": {"priority": 2}}'
    assert parse_call("echo('x', 'None')", offered)["arguments"] == {"content": "x"}
    assert parse_call("cat('None')", offered)["arguments"] == {"file_name": "None"}
