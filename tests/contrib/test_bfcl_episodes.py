"""Episodes of BFCL's tasks: splits, the user's turns, mistakes, keys of states, wrapped tools."""

from __future__ import annotations

import asyncio
import copy
import json

import pytest
from bfcl_play import number_of, play, script
from hypothesis import given, settings
from hypothesis import strategies as st

from agentr1_jax.contrib.bfcl import BfclTask
from agentr1_jax.contrib.bfcl.documents import Function
from agentr1_jax.contrib.bfcl.rows import offered_functions, read_tasks
from agentr1_jax.contrib.bfcl.state import World
from agentr1_jax.contrib.bfcl.task import DONE, INSTRUCTION
from agentr1_jax.envs.base import Task
from agentr1_jax.text.tool_calls import PARSE_MESSAGES, render_call
from agentr1_jax.tools.wrappers import ToolMetrics, ToolsConfig, wrap_tool
from agentr1_jax.trajectory import Outcome


@pytest.fixture(scope="module")
def tasks(data_dir):
    return read_tasks(data_dir / "bfcl_v4")


@pytest.fixture(scope="module")
def task(data_dir) -> BfclTask:
    return BfclTask(data_dir)


@pytest.fixture(scope="module")
def rows(tasks):
    return {number_of(row): row for row in tasks.rows}


def test_it_is_a_task_with_disjoint_splits_in_passes(task, data_dir):
    checked: Task = task
    sizes = {split: checked.size(split) for split in ("train", "eval")}
    assert sizes == {"train": 30, "eval": 20}
    ids = {split: [task.row(split, i)["id"] for i in range(2 * size)] for split, size in sizes.items()}
    assert not set(ids["train"]) & set(ids["eval"]) and len({*ids["train"], *ids["eval"]}) == 50
    assert ids["eval"][:20] == ids["eval"][20:]
    first, second = ids["train"][:30], ids["train"][30:]
    assert first != second and sorted(first) == sorted(second)
    other = BfclTask(data_dir, seed=1)
    assert first != [other.row("train", i)["id"] for i in range(30)]
    for split, index in (("test", 0), ("train", -1)):
        with pytest.raises(ValueError, match=r"bfcl has no row .* splits are train, eval"):
            task.row(split, index)


def test_the_opening_tells_functions_by_their_documents_but_for_excluded_ones(task, rows):
    row = rows["24"]
    first = asyncio.run(task.env().reset(row, 0))
    system, user = first.messages
    assert system["role"] == "system" and system["content"].startswith(INSTRUCTION)
    assert system["content"].count("Gorilla file system") == 1 and "ticketing system" in system["content"]
    assert user == {"role": "user", "content": row["turns"][0]}
    offered = {tool["function"]["name"]: tool["function"] for tool in first.tools}
    assert row["excluded"] == ["cp"] and "cp" not in offered and len(offered) == 17 + 9
    assert offered["cat"]["description"].startswith("Display the contents of a file")
    assert offered["du"]["parameters"]["properties"]["human_readable"]["type"] == "boolean"
    assert first.state_key == f"multi_turn_base_24|0|{row['start']['state']}"


def test_calls_of_one_response_run_in_order_and_the_user_goes_on(task, rows):
    row = rows["0"]
    responses = ["".join(render_call(c["name"], c["arguments"]) for c in calls) for calls in row["ground_truth"]]
    done, metrics = play(task, row, [text for response in responses for text in (response, DONE)])
    assert [t.observation.role for t in done[:-1]] == ["tool", "user"] * 3 + ["tool"]
    assert [t.observation.text for t in done[1:-1:2]] == row["turns"][1:]
    assert len(done[0].observation.texts) == 3 and metrics["em"] == metrics["turns_reached"] == 1
    assert [t.raw_reward_parts["turn_state"] for t in done] == [0, 0.25] * 4
    assert done[-1].reward_parts == {"state": 1, "turn_state": 0, "format": 0} and done[-1].terminated


def test_what_comes_late_reaches_the_end_but_not_every_turn(task, rows):
    row = rows["39"]
    late = [[], sum(row["ground_truth"][:2], []), *row["ground_truth"][2:]]
    done, metrics = play(task, row, script(late))
    assert metrics["em"] == 1 and metrics["turns_reached"] == 0.75 and done[-1].reward == 1


def test_mistakes_are_told_and_cost_only_where_they_are_of_form(task, rows):
    unknown = render_call("cp", {"source": "a", "destination": "b"})
    told = [
        ("<tool_call>{</tool_call>", PARSE_MESSAGES["bad_json"], "bad_json", -0.1),
        (unknown, "Error: no such tool; tools are close_ticket, ", "unknown_tool", -0.1),
        (render_call("cat", {"file": "x"}), "Error: bad arguments for cat", "bad_arguments", -0.1),
        (render_call("cat", {"file_name": "x"}), "Error: cat: there is no 'x' in /project", "no_such_file", 0),
        (render_call("get_ticket", {"ticket_id": 1.0}), "Error: get_ticket: there is no ticket 1", "no_such_ticket", 0),
    ]
    done, metrics = play(task, rows["24"], [text for text, *_ in told])
    for transition, (_, said, kind, reward) in zip(done, told, strict=True):
        assert transition.observation.text.startswith(said) and transition.observation.role == "tool"
        assert transition.info["errors"] == {kind: 1} and transition.reward == reward and transition.outcome is None
    assert metrics == {"em": 0, "turns_reached": 0, "tool_calls": 5}


def test_an_episode_that_is_cut_has_not_reached_anything(task, rows):
    _, metrics = play(task, rows["38"], list(script(rows["38"]["ground_truth"]))[:-1])
    assert metrics == {"em": 0, "turns_reached": 0.5, "tool_calls": 5}


def test_equal_states_have_equal_keys_and_others_do_not(task, rows):
    key = lambda *texts: play(task, rows["10"], texts)[0][-1].observation.state_key  # noqa: E731
    cd, ls, mkdir = (
        render_call(*x) for x in (("cd", {"folder": "workspace"}), ("ls", {}), ("mkdir", {"dir_name": "x"}))
    )
    assert key(ls) == key(ls, ls) == key("<tool_call>")
    assert len({key(ls), key(cd), key(mkdir), key(cd, mkdir), key(DONE)}) == 5
    assert key(cd, mkdir) == key(ls, cd + mkdir)


def test_episodes_do_not_share_their_state(task, rows):
    row, before = rows["5"], copy.deepcopy(rows["5"])
    for _ in range(2):
        done, metrics = play(task, row, script(row["ground_truth"]))
        assert metrics["em"] == 1
    assert row == before


def test_a_state_does_not_share_what_it_was_given():
    config, post = {"TwitterAPI": {"authenticated": True, "tweets": {}}}, {"content": "", "mentions": ["@b"]}
    world = World(["TwitterAPI"], config)
    world.call("TwitterAPI", "post_tweet", post)
    world.call("TwitterAPI", "mention", {"tweet_id": 0, "mentioned_usernames": ["@a"]})
    assert world.call("TwitterAPI", "get_tweet", {"tweet_id": 0})["mentions"] == ["@b", "@a"]
    assert post == {"content": "", "mentions": ["@b"]} and config["TwitterAPI"]["tweets"] == {}


def test_limits_go_around_the_tools(data_dir, rows):
    metrics, limits = ToolMetrics(), ToolsConfig(max_characters=60)
    limited = BfclTask(data_dir, wrap=lambda tool: wrap_tool(tool, limits, metrics))
    played = [play(limited, rows[number], script(rows[number]["ground_truth"])) for number in ("0", "24", "27")]
    assert all(figures["em"] == 1 for _, figures in played)
    assert metrics.metrics()["tools/error/oversized"] > 0 and metrics.metrics()["tools/retries"] == 0


def test_texts_are_of_training_tasks_and_as_many_as_asked(task):
    texts = task.texts(10_000)
    assert texts[:40] == task.texts(40) and len(task.texts(40)) == 40
    said = {text for i in range(30) for text in task.row("train", i)["turns"]}
    assert said <= set(texts) and not {task.row("eval", i)["turns"][0] for i in range(20)} & set(texts)
    assert render_call("cd", {"folder": "workspace"}) in texts and DONE in texts
    assert not [text for text in texts if text.startswith("Error")]


def responses_of(functions: dict[str, tuple[str, Function]]):
    """Random responses, with calls whose arguments may break their schema and with none."""
    texts = st.text(max_size=4) | st.sampled_from(["USR001", "USR002", "analyst_pro"])
    values = st.one_of(texts, st.integers(-2, 4), st.booleans(), st.lists(texts, max_size=2), st.none())

    def call(name, drawn):
        return render_call(name, dict(zip(functions[name][1].parameters["properties"], drawn, strict=False)))

    made = st.builds(call, st.sampled_from(list(functions)), st.lists(values, min_size=3, max_size=3))
    return st.lists(st.lists(made, max_size=4).map("".join), max_size=8)


@settings(max_examples=100)
@given(st.data())
def test_no_response_breaks_an_episode(task, tasks, rows, data):
    row = rows[data.draw(st.sampled_from(["0", "17", "24", "31"]))]
    responses = data.draw(responses_of(offered_functions(row["classes"], row["excluded"], tasks.documents)))
    done, metrics = play(task, row, responses)
    assert json.dumps([[t.tool_calls, t.info, t.metrics] for t in done], allow_nan=False)
    assert not any(call["error"] == "exception" for t in done for call in t.tool_calls)
    assert all((t.observation is None) == (t.outcome is not None) for t in done)
    assert sum(t.outcome is Outcome.ANSWERED for t in done) == (sum(not r for r in responses) >= len(row["turns"]))
