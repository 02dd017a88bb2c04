"""BFCL's functions as they are implemented here, one set after another, and random calls of the file system."""

from __future__ import annotations

import json

import jsonschema
import pytest
from bfcl_play import FS
from hypothesis import given, settings
from hypothesis import strategies as st

from agentr1_jax.contrib.bfcl import file_system
from agentr1_jax.contrib.bfcl.base import CallFailed
from agentr1_jax.contrib.bfcl.file_system import ENTRY, MOST_DEPTH, FileSystem
from agentr1_jax.contrib.bfcl.rows import read_tasks
from agentr1_jax.contrib.bfcl.state import FUNCTION_SETS, World


@pytest.fixture(scope="module")
def functions(data_dir):
    """The documented functions of the file system."""
    return read_tasks(data_dir / "bfcl_v4")[1][FS]


def run(name, *calls, config=None):
    """Results of calls on one set, `(function, *arguments)` each; of one that fails, its kind."""
    made = FUNCTION_SETS[name].from_config(config or {})
    results = []
    for function, *arguments in calls:
        try:
            results.append(json.loads(json.dumps(getattr(made, function)(*arguments))))
        except CallFailed as error:
            results.append(error.kind)
    return results


def values(results):
    """Of results with one key, its value."""
    return [next(iter(x.values())) if isinstance(x, dict) and len(x) == 1 else x for x in results]


TREE = {
    "root": {
        "a": {
            "type": "directory",
            "contents": {
                "b": {"type": "directory", "contents": {}},
                "t.txt": {"type": "file", "content": "one two\nzwei\n\nä"},
                ".h": {"type": "file", "content": "one"},
            },
        }
    }
}


def files(*calls):
    return values(run(FS, *calls, config=TREE))


def test_files_are_read():
    assert files(("pwd",), ("ls",), ("ls", True)) == ["/a", ["b", "t.txt"], ["b", "t.txt", ".h"]]
    assert files(("cat", "t.txt"), ("tail", "t.txt", 2), ("tail", "t.txt", 0), ("tail", "t.txt", 9)) == [
        "one two\nzwei\n\nä",
        "\nä",
        "",
        "one two\nzwei\n\nä",
    ]
    assert [r["count"] for r in files(("wc", "t.txt"), ("wc", "t.txt", "w"), ("wc", "t.txt", "c"))] == [4, 4, 15]
    assert files(("sort", "t.txt"), ("cat", "t.txt"))[0] == "\none two\nzwei\nä"
    assert files(("grep", "t.txt", "w"), ("diff", ".h", "t.txt")) == [
        ["one two", "zwei"],
        "- one\n+ one two\n+ zwei\n+ \n+ ä",
    ]
    assert files(("du",), ("echo", "x" * 2000, "t.txt"), ("du", True), ("du",)) == [
        "19 bytes",
        None,
        "2.0 KB",
        "2003 bytes",
    ]
    assert files(("find",), ("find", "/", "t"), ("find", "b/..", ".h"), ("find", "b")) == [
        ["b", "t.txt", ".h"],
        ["a/t.txt"],
        [".h"],
        [],
    ]


def test_files_are_changed():
    assert files(("mkdir", "c"), ("mv", "t.txt", "b"), ("cp", "b", "c"), ("rm", "b"), ("find",)) == [
        {},
        "t.txt is now b/t.txt",
        "b is copied to c/b",
        "b is removed",
        [".h", "c", "c/b", "c/b/t.txt"],
    ]
    assert files(("cp", "t.txt", "u"), ("echo", "x", "u"), ("cat", "t.txt"))[2] == "one two\nzwei\n\nä"
    assert files(("cp", "b", "c"), ("cd", "c"), ("touch", "x"), ("cd", ".."), ("find", "b"))[-1] == []
    assert files(("rmdir", "b"), ("cd", ".."), ("ls",), ("cd", ".."), ("cd", "a")) == [
        "b is removed",
        "/",
        ["a"],
        "no_such_file",
        "/a",
    ]
    assert files(("echo", "x"), ("echo", "x", None)) == ["x", "x"]


def test_what_cannot_be_done_to_files_fails_and_changes_nothing():
    wrong = [
        *((name, "nowhere") for name in ("cat", "cd", "rm", "rmdir", "sort", "tail", "wc", "find")),
        *(("cat", name) for name in ("b/x", "", ".", "..")),
        *(("mkdir", name) for name in ("x/y", "", ".", "..")),
        *((name, "nowhere", "x") for name in ("mv", "cp", "diff", "grep")),
        ("echo", "x", "nowhere"),
        ("cat", "b"),
        ("cd", "t.txt"),
        ("rmdir", "t.txt"),
        ("mkdir", "b"),
        ("touch", "t.txt"),
        ("wc", "t.txt", "x"),
        ("tail", "t.txt", -1),
        ("mv", "b", "b"),
        ("mv", "t.txt", ".h"),
        ("cp", "t.txt", "../x"),
    ]
    kinds = files(*wrong, ("find", "/"))
    assert kinds[:-1] == ["no_such_file"] * 8 + ["bad_name"] * 8 + ["no_such_file"] * 5 + [
        "is_a_directory",
        "not_a_directory",
        "not_a_directory",
        "file_exists",
        "file_exists",
        "bad_value",
        "bad_value",
        "same_file",
        "file_exists",
        "bad_name",
    ]
    assert kinds[-1] == ["a", "a/b", "a/t.txt", "a/.h"]
    assert files(("mv", "t.txt", "b"), ("touch", "t.txt"), ("mv", "t.txt", "b"), ("rmdir", "b"))[2:] == [
        "file_exists",
        "not_empty",
    ]


def test_no_tree_grows_without_bound(monkeypatch):
    monkeypatch.setattr(file_system, "DISK", 40_000)
    doubled = [call for i in range(20) for call in (("cp", "b", f"c{i}"), ("mv", f"c{i}", "b"))]
    copies = files(*doubled, ("find",))
    assert "no_space" in copies and len(copies[-1]) * ENTRY < 40_000
    deep = files(*[("mkdir", "d"), ("cd", "d")] * (MOST_DEPTH + 5))
    assert deep[-1] == "no_such_file" and deep.count("no_space") == 6


def test_messages():
    said = run(
        "MessageAPI",
        ("message_get_login_status",),
        ("send_message", "USR002", "x"),
        ("message_login", "USR009"),
        ("message_login", "USR001"),
        ("message_get_login_status",),
        ("get_user_id", "Bob"),
        ("get_user_id", "Eve"),
        ("add_contact", "Bob"),
        ("add_contact", "Eve"),
        ("list_users",),
        ("send_message", "USR005", "Hello"),
        ("send_message", "USR001", "to me"),
        ("send_message", "USR009", "x"),
        ("view_messages_sent",),
        ("search_messages", "HELL"),
        ("get_message_stats",),
        ("delete_message", "USR005"),
        ("delete_message", "USR005"),
        ("view_messages_sent",),
    )
    assert said[:2] == [{"login_status": False}, "not_logged_in"]
    assert [said[2]["login_status"], said[3]["login_status"], said[4]["login_status"]] == [False, True, True]
    assert said[5:7] == [{"user_id": "USR002"}, "no_such_user"]
    assert (said[7]["added_status"], said[7]["user_id"]) == (False, "USR002")
    assert (said[8]["added_status"], said[8]["user_id"]) == (True, "USR005")
    assert said[9] == {"user_list": ["Alice", "Bob", "Catherine", "Daniel", "Eve"]}
    assert [said[10]["message_id"], said[11]["message_id"], said[12]] == [1, 2, "no_such_user"]
    assert said[13] == {"messages": {"USR005": ["Hello"], "USR001": ["to me"]}}
    assert said[14] == {"results": [{"receiver_id": "USR005", "message": "Hello"}]}
    assert said[15] == {"stats": {"received_count": 1, "total_contacts": 1}}
    assert [said[16]["deleted_status"], said[17]["deleted_status"]] == [True, False]
    assert said[18] == {"messages": {"USR001": ["to me"]}}
    config = {"user_count": 5, "current_user": "USR002", "inbox": [{"USR003": ["a", "b"]}, {"USR001": "c"}]}
    seen = run(
        "MessageAPI",
        ("view_messages_sent",),
        ("add_contact", "Eve"),
        ("add_contact", "Ada"),
        ("send_message", "USR006", ""),
        ("delete_message", "USR003"),
        ("view_messages_sent",),
        config=config,
    )
    assert seen[0] == {"messages": {"USR003": ["a", "b"], "USR001": ["c"]}}
    assert [seen[1]["user_id"], seen[2]["user_id"], seen[3]["message_id"]] == ["USR006", "USR007", 4]
    assert seen[5] == {"messages": {"USR003": ["a"], "USR001": ["c"], "USR006": [""]}}


def test_tickets():
    config = {"ticket_queue": [{"id": 2, "status": "Open"}]}
    said = run(
        "TicketAPI",
        ("ticket_get_login_status",),
        ("create_ticket", "t"),
        ("get_user_tickets",),
        ("ticket_login", "ada", ""),
        ("ticket_login", "ada", "x"),
        ("create_ticket", "t"),
        ("create_ticket", "u", "d", 5),
        ("create_ticket", "v", "", 6),
        ("resolve_ticket", 3, "mended"),
        ("resolve_ticket", 3, "again"),
        ("close_ticket", 1),
        ("close_ticket", 1),
        ("edit_ticket", 2, {"priority": 4, "title": "w"}),
        ("edit_ticket", 2, {"priority": 0}),
        ("get_ticket", 2),
        ("get_user_tickets", "closed"),
        ("get_user_tickets",),
        ("get_ticket", 7),
        ("logout",),
        ("logout",),
        ("ticket_get_login_status",),
        config=config,
    )
    assert said[:5] == [
        {"login_status": False},
        "not_logged_in",
        "not_logged_in",
        {"success": False},
        {"success": True},
    ]
    first = {"id": 1, "title": "t", "description": "", "status": "Open", "priority": 1}
    assert said[5] == first and (said[6]["id"], said[6]["priority"], said[7]) == (3, 5, "bad_value")
    assert said[9] == said[11] == "no_change" and said[13] == "bad_value"
    assert said[14] == {"id": 2, "status": "Open", "priority": 4, "title": "w"}
    closed = {**first, "status": "Closed", "created_by": "ada"}
    assert said[15] == [closed] and said[16][1]["resolution"] == "mended" and len(said[16]) == 2
    assert said[17:] == ["no_such_ticket", {"success": True}, {"success": False}, {"login_status": False}]


def test_posting():
    config = {
        "username": "ada",
        "password": "x",
        "tweets": {"1": {"id": 1, "username": "bob", "content": "Hello", "tags": [], "mentions": []}},
        "comments": {"1": [{"username": "eve", "comment": "hm"}]},
        "following_list": ["bob"],
        "tweet_counter": 1,
    }
    said = values(
        run(
            "TwitterAPI",
            ("post_tweet", "x"),
            ("authenticate_twitter", "ada", "y"),
            ("authenticate_twitter", "ada", "x"),
            ("posting_get_login_status",),
            ("post_tweet", "hello too", ["#t"]),
            ("comment", 1, "well"),
            ("comment", 7, "well"),
            ("get_tweet_comments", 1),
            ("get_tweet_comments", 2),
            ("mention", 2, ["@bob"]),
            ("get_tweet", 2),
            ("search_tweets", "HELLO"),
            ("get_user_tweets", "bob"),
            ("retweet", 1),
            ("retweet", 1),
            ("follow_user", "eve"),
            ("follow_user", "eve"),
            ("unfollow_user", "bob"),
            ("unfollow_user", "bob"),
            ("list_all_following",),
            ("get_user_stats", "ada"),
            ("get_user_stats", "bob"),
            config=config,
        )
    )
    own = {"id": 2, "username": "ada", "content": "hello too", "tags": ["#t"], "mentions": []}
    assert said[:5] == ["not_logged_in", False, True, True, own] and said[6] == "no_such_tweet"
    assert said[7] == [{"username": "eve", "content": "hm"}, {"username": "ada", "content": "well"}] and said[8] == []
    assert said[10] == {**own, "mentions": ["@bob"]}
    assert [[t["id"] for t in found] for found in said[11:13]] == [[1, 2], [1]]
    assert said[15:20] == [True, False, True, False, ["eve"]]
    assert said[20] == {"tweet_count": 1, "following_count": 1, "retweet_count": 1}
    assert said[21] == {"tweet_count": 1, "following_count": 0, "retweet_count": 0}
    assert run("TwitterAPI", ("authenticate_twitter", "", "")) == [{"authentication_status": False}]


def test_math():
    cases = [
        (("absolute_value", -2), 2),
        (("add", 0.5, 1), 1.5),
        (("subtract", 1, 3), -2),
        (("multiply", 2.5, 4), 10),
        (("divide", 1, 4), 0.25),
        (("divide", 1, 0), "undefined"),
        (("power", 2, 10), 1024),
        (("power", -8, 1 / 3), "undefined"),
        (("power", 10**6, 10**9), "undefined"),
        (("multiply", 10**300, 10**300), "undefined"),
        (("percentage", 1, 8), 12.5),
        (("square_root", 2, 4), 1.414),
        (("square_root", -1, 4), "undefined"),
        (("square_root", 2, 0), "undefined"),
        (("logarithm", 36.0, 6.0, 4), 2.0),
        (("logarithm", 20, 10, 2), 1.3),
        (("logarithm", 20, 1, 2), "undefined"),
        (("round_number", 2.567, 1), 2.6),
        (("round_number", 2.567), 3),
        (("round_number", 10**400), "undefined"),
        (("max_value", [1, 3, 2]), 3),
        (("min_value", [1, 3, 2]), 1),
        (("sum_values", []), 0),
        (("max_value", []), "undefined"),
        (("mean", [5000, 7000, 6000, 8000]), 6500),
        (("mean", []), "undefined"),
        (("standard_deviation", [2, 4, 4, 4, 5, 5, 7, 9]), 2),
        (("si_unit_conversion", 1.5, "km", "m"), 1500),
        (("si_unit_conversion", 250, "mg", "g"), 0.25),
        (("si_unit_conversion", 1, "km", "g"), "undefined"),
        (("imperial_si_conversion", 1, "mile", "km"), 1.609344),
        (("imperial_si_conversion", 2, "lb", "kg"), 0.90718474),
        (("imperial_si_conversion", 212, "Fahrenheit", "celsius"), 100),
        (("imperial_si_conversion", 1, "parsec", "m"), "undefined"),
    ]
    for (call, result), found in zip(cases, values(run("MathAPI", *(call for call, _ in cases))), strict=True):
        assert found == result if isinstance(result, str) else found == pytest.approx(result), call


NAMES = st.sampled_from(["a", "b", "t.txt", ".h", "c", "..", ".", "", "a/b", "/", "ä\n", "None"])
ANY = st.one_of(NAMES, st.text(max_size=5))


def calls_of(functions):
    """Random valid calls, `(name, arguments)`, of documented functions."""

    def arguments(function):
        drawn = {
            name: {"string": ANY, "integer": st.integers(-3, 30), "boolean": st.booleans()}[schema["type"]]
            for name, schema in function.parameters["properties"].items()
        }
        required = {name: drawn.pop(name) for name in function.parameters["required"]}
        return st.tuples(st.just(function.name), st.fixed_dictionaries(required, optional=drawn))

    return st.lists(st.one_of([arguments(function) for function in functions.values()]), max_size=25)


@settings(max_examples=60)
@given(st.data())
def test_no_calls_break_the_file_system(functions, data):
    """Only CallFailed is raised, and changes nothing; the working directory exists; equal calls, equal states."""
    worlds = [World([FS], {FS: TREE}) for _ in range(2)]
    for name, arguments in data.draw(calls_of(functions)):
        jsonschema.validate(arguments, dict(functions[name].parameters))
        told = []
        for world in worlds:
            before = world.state()
            try:
                told.append(json.dumps(world.call(FS, name, functions[name].convert(arguments))))
            except CallFailed as error:
                told.append((error.kind, str(error)))
                assert world.state() == before
        assert told[0] == told[1]
        state = worlds[0].state()
        assert json.loads(json.dumps(state)) == state and worlds[0].digests() == worlds[1].digests()
        check_tree(FileSystem(**state[FS]))


def check_tree(system):
    """Names are names, leaves are texts, and the working directory is a folder of the tree."""

    def check(folder):
        assert isinstance(folder, dict)
        for name, node in folder.items():
            assert name not in ("", ".", "..") and "/" not in name
            if not isinstance(node, str):
                check(node)

    check(system.tree)
    folder = system.tree
    for name in system.cwd:
        folder = folder[name]
    assert isinstance(folder, dict)
