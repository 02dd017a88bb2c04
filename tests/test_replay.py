"""Recorded tool calls and their replay."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from doing import DOWN, FINE, FOREVER, Does, results_in_turn, run

from agentr1_jax.tools import base
from agentr1_jax.tools.base import ToolError, ToolResult, failed
from agentr1_jax.tools.limits import ToolLimits, wrapped
from agentr1_jax.tools.meter import Meter
from agentr1_jax.tools.replay import Recorded, Recording, Replay, Replayed
from agentr1_jax.tools.search import BM25, Passage, SearchTool
from experiments import tasks
from experiments.tasks import UserError

ROOT = pathlib.Path(__file__).parents[1]
NEVER = Does(lambda arguments: pytest.fail("a replay calls no tool"))
RESULTS = [
    ToolResult("é\ud800\n", reward=0.1 + 0.2, data={"ids": ["a"], "scores": [1 / 3], "n": None}),
    failed("bad", "no"),
    DOWN,
    FINE,
]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "calls.jsonl"


def record(path, *results, arguments=None):
    tool = Recorded(Does(results_in_turn(*results)), Recording(path))
    return [run(tool, arguments) for _ in results]


def test_every_result_comes_back_as_it_was(path):
    assert record(path, *RESULTS) == RESULTS
    tool = Replayed(NEVER, Replay(path))
    assert [run(tool) for _ in RESULTS] == RESULTS


def test_a_run_in_step_is_repeated_exactly_though_its_tool_never_answers_twice_the_same(path):
    """Four episodes, each of whose queries follow from what the last one found, three of them equal at first."""
    rng = np.random.default_rng(0)

    async def execute(arguments):
        await asyncio.sleep(rng.uniform(0, 0.005))
        return ToolResult(str(rng.integers(2)), data={"of": arguments["query"]})

    async def run_of(tool):
        seen = [["start"], ["start"], ["start"], ["other"]]
        for _ in range(6):
            queries = [episode[-1] for episode in seen]
            results = await asyncio.gather(*(base.call(tool, {"query": query}) for query in queries))
            for episode, result in zip(seen, results, strict=True):
                assert result.data == {"of": episode[-1]}
                episode.append(result.content)
        return seen

    tool = Does(execute)
    first = asyncio.run(run_of(wrapped(tool, ToolLimits(), Meter(), Recording(path))))
    assert asyncio.run(run_of(wrapped(tool, ToolLimits(), Meter()))) != first
    assert asyncio.run(run_of(wrapped(NEVER, ToolLimits(), Meter(), Replay(path)))) == first


def test_equal_calls_get_their_results_in_turn_and_then_the_last(path):
    recording = Recording(path)
    for name, outcomes in (("x", ["1", "2"]), ("y", ["3"])):
        tool = Recorded(Does(results_in_turn(*map(ToolResult, outcomes))), recording)
        for _ in outcomes:
            run(tool, {"q": name, "n": 1})
    tool = Replayed(NEVER, Replay(path))
    assert [run(tool, {"n": 1, "q": "x"}).content for _ in range(4)] == ["1", "2", "2", "2"]
    assert run(tool, {"n": 1, "q": "y"}).content == "3"


def test_calls_are_numbered_as_they_begin_and_cut_ones_leave_a_gap(path):
    """Three equal calls: the first ends last, the second is cancelled."""

    async def execute(arguments):
        mine = len(started)
        started.append(mine)
        if mine == 1:
            await asyncio.sleep(FOREVER)
        await asyncio.sleep(0.01 if mine == 0 else 0)
        return ToolResult(str(mine))

    async def main():
        tool = Recorded(Does(execute), Recording(path))
        calls = [asyncio.create_task(base.call(tool, {})) for _ in range(3)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        calls[1].cancel()
        await asyncio.wait(calls)

    started = []
    asyncio.run(main())
    assert [json.loads(line)["n"] for line in path.read_text().splitlines()] == [2, 0]
    tool = Replayed(NEVER, Replay(path))
    assert [run(tool).content for _ in range(3)] == ["0", "0", "2"]


def test_what_was_not_recorded_is_told_and_typed(path):
    record(path, FINE, arguments={"query": "x"})
    meter = Meter()
    result = run(wrapped(NEVER, ToolLimits(), meter, Replay(path)), {"query": "y"})
    assert result.error == ToolError("not_recorded", "infrastructure")
    assert str(path) in result.content and '{"query": "y"}' in result.content
    assert meter.metrics()["tools/error/not_recorded"] == 1


def test_tools_of_one_name_are_told_apart_by_their_scope(path):
    worlds = [SearchTool(BM25([Passage(f"p{n}", "Harbor", f"of {n}")]), 1, scope=f"world/{n}") for n in range(2)]
    recording = Recording(path)
    seen = [run(wrapped(tool, ToolLimits(), Meter(), recording), {"query": "harbor"}) for tool in worlds]
    assert [result.data["ids"] for result in seen] == [["p0"], ["p1"]]
    replay = Replay(path)
    again = [run(wrapped(tool, ToolLimits(), Meter(), replay), {"query": "harbor"}) for tool in worlds[::-1]]
    assert again == seen[::-1]


def test_what_is_recorded_is_what_the_policy_saw(path):
    """After retries and the cut; invalid arguments never come so far."""
    limits = ToolLimits(backoff=0, characters=4)
    tool = wrapped(Does(results_in_turn(DOWN, ToolResult("too long"))), limits, Meter(), Recording(path))
    result = run(tool)
    assert result.error.kind == "oversized"
    assert run(wrapped(NEVER, limits, Meter(), Replay(path))) == result


def test_a_recording_goes_on_where_it_stopped(path):
    record(path, ToolResult("1"), ToolResult("2"))
    record(path, ToolResult("3"))
    tool = Replayed(NEVER, Replay(path))
    assert [run(tool).content for _ in range(3)] == ["1", "2", "3"]


def test_an_unfinished_last_line_is_left_out_with_a_warning(path, caplog):
    record(path, ToolResult("1"), ToolResult("2"))
    whole = path.read_bytes()
    for cut in (1, 2, 20):
        path.write_bytes(whole[:-cut])
        with caplog.at_level(logging.WARNING, "absl"):
            tool = Replayed(NEVER, Replay(path))
        assert f"{path}, line 2: unfinished" in caplog.text
        caplog.clear()
        assert [run(tool).content for _ in range(2)] == ["1", "1"]
        record(path, ToolResult("3"))  # The rest of the line is gone, not in the middle.
        tool = Replayed(NEVER, Replay(path))
        assert [run(tool).content for _ in range(2)] == ["1", "3"]


@pytest.mark.parametrize(
    "line", ["{", "", "[]", "{}", "[" * 100_000, '{"tool": "does", "scope": "", "arguments": {}, "n": 0}']
)
def test_a_damaged_line_is_named(path, line):
    record(path, ToolResult("1"), ToolResult("2"))
    first, second = path.read_text().splitlines()
    path.write_text(f"{first}\n{line}\n{second}\n")
    for read in (Replay, Recording):
        with pytest.raises(ValueError, match=r"calls\.jsonl, line 2: not a recorded call"):
            read(path)


GOOD = {"tool": "does", "scope": "", "arguments": {}, "n": 0, "result": {"content": "x", "error": None}}


@pytest.mark.parametrize(
    ("key", "value"),
    [("n", "3"), ("n", -1), ("n", 1.5), ("n", True), ("n", None), ("tool", 3), ("scope", None), ("arguments", "x")]
    + [
        ("result", {"content": "x", "error": None} | changes)
        for changes in (
            {"content": 3},
            {"ok": 1},
            {"ok": False},
            {"reward": "1"},
            {"reward": float("nan")},
            {"data": []},
            {"more": 1},
            {"error": {"kind": "bad", "fault": "model"}},
            {"ok": False, "error": {"kind": "bad", "fault": "nobody"}},
            {"ok": False, "error": {"kind": 3, "fault": "model"}},
            {"ok": False, "error": "bad"},
        )
    ],
)
def test_a_line_of_wrong_types_is_named(path, key, value):
    path.parent.mkdir()
    path.write_text(f"{json.dumps(GOOD)}\n{json.dumps(GOOD | {'n': 1, key: value})}\n")
    with pytest.raises(ValueError, match=r"calls\.jsonl, line 2: not a recorded call"):
        Replay(path)


def test_one_recording_at_a_time_writes_a_file(path):
    first = Recording(path)
    with pytest.raises(ValueError, match=r"calls\.jsonl: another run records its calls here; end it, or name another"):
        Recording(path)
    code = "import sys; from agentr1_jax.tools.replay import Recording; Recording(sys.argv[1])"
    other = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, cwd=ROOT)
    assert "another run records its calls here" in other.stderr and other.returncode == 1
    tool = Recorded(Does(results_in_turn(ToolResult("1"))), first)
    run(tool)
    del first, tool
    assert record(path, ToolResult("2")) and len(path.read_text().splitlines()) == 2


def test_without_locks_a_warning_says_so(path, monkeypatch, caplog):
    def unknown(*args):
        raise OSError(errno.ENOSYS, "no locks here")

    monkeypatch.setattr("fcntl.flock", unknown)
    with caplog.at_level(logging.WARNING, "absl"):
        record(path, ToolResult("1"))
    assert f"{path}: its file system has no locks" in caplog.text and len(path.read_text().splitlines()) == 1


def test_a_file_that_two_processes_wrote_is_refused(path):
    record(path, ToolResult("1"))
    path.write_text(path.read_text() * 2)
    with pytest.raises(ValueError, match=r"calls\.jsonl, line 2: recorded before"):
        Replay(path)


def test_a_result_that_json_cannot_hold_fails_and_is_not_recorded(path):
    for data in ({"a": np.zeros(2)}, {(1, 2): 3}):
        (result,) = record(path, ToolResult("x", data=data))
        assert result.error == ToolError("not_recordable", "infrastructure")
    assert not path.read_text()


def test_the_config_chooses(tmp_path):
    from configs import quickstart

    def search(config, query="x"):
        task = tasks.make_task(config)
        env = task.env()
        asyncio.run(env.reset(task.row("train", 0), 0))
        return run(env._tools["search"], {"query": query})

    config = quickstart.get_config()
    config.tools.record = str(tmp_path / "calls.jsonl")
    seen = search(config)
    assert len((tmp_path / "calls.jsonl").read_text().splitlines()) == 1
    config.tools.replay = config.tools.record
    with pytest.raises(UserError, match=r"tools\.record .* and tools\.replay .* exclude each other"):
        tasks.make_task(config)
    config.tools.record = ""
    assert search(config) == seen and search(config, "y").error.kind == "not_recorded"
    for path in (tmp_path / "none.jsonl", tmp_path):
        config.tools.replay = str(path)
        with pytest.raises(UserError, match=f"{path}: no recorded calls here"):
            tasks.make_task(config)
    config.tools.record, config.tools.replay = str(tmp_path), ""
    with pytest.raises(UserError, match=f"Is a directory: '{tmp_path}'"):
        tasks.make_task(config)


def test_each_process_has_its_own_file(tmp_path, monkeypatch):
    from configs import quickstart

    monkeypatch.setattr("agentr1_jax.runtime.processes.process_count", lambda: 2)
    monkeypatch.setattr("agentr1_jax.runtime.processes.process_index", lambda: 1)
    config = quickstart.get_config()
    config.tools.replay = str(tmp_path / "calls.jsonl")
    with pytest.raises(UserError, match=r"calls\.jsonl\.p1: no recorded calls"):
        tasks.make_task(config)
