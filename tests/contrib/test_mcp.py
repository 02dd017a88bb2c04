"""Tools of Model Context Protocol servers: a reference server, and servers that die, hang and answer garbage."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import gc
import http.server
import importlib.util
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time

import pytest
from byte_tokens import TOKENIZER
from configured import configured_task
from plays import play
from tool_doubles import run

from agentr1_jax.agents.context import context_rule
from agentr1_jax.agents.loop import EnvLoop
from agentr1_jax.agents.session import Identity, ScriptedSession
from agentr1_jax.contrib import mcp
from agentr1_jax.contrib.mcp import McpTools, session
from agentr1_jax.envs.registry import TASKS
from agentr1_jax.tasks import qa
from agentr1_jax.text.chat import chat_format
from agentr1_jax.text.tool_calls import render_answer, render_call
from agentr1_jax.tools import base
from agentr1_jax.tools.base import Tool, ToolError
from agentr1_jax.tools.wrappers import ToolMetrics, ToolsConfig, wrap_tool
from agentr1_jax.trajectory import Budget, Outcome
from configs import base as base_config

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mcp") is None, reason="the extra mcp is not installed")

FOLDER = pathlib.Path(__file__).parents[1]
SOON = 20.0


@pytest.fixture
def pids(tmp_path):
    """The file of the servers that were started; all have to be gone in the end."""
    file = tmp_path / "pids"
    yield file
    if file.exists():
        assert all(gone(int(pid)) for pid in file.read_text().split())


def gone(pid):
    end = time.monotonic() + SOON
    while pathlib.Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.02)
    return not pathlib.Path(f"/proc/{pid}").exists()


def command(pids, how="well"):
    return [sys.executable, str(FOLDER / "mcp_server.py"), str(pids), how]


def starts(pids):
    return len(pids.read_text().split())


def does(tool, do, text=""):
    return run(tool, {"do": do, "text": text})


def kind(result):
    return (result.error.kind, result.error.fault) if result.error else None


def test_a_reference_server_is_used_by_an_agent():
    if importlib.util.find_spec("mcp_server_time") is None:
        pytest.skip("mcp-server-time is not installed")
    with McpTools([sys.executable, "-m", "mcp_server_time", "--local-timezone", "UTC"]) as tools:
        assert [tool.name for tool in tools] == ["get_current_time", "convert_time"]
        assert all(isinstance(tool, Tool) and tool.description for tool in tools)
        arguments = {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}
        script = [
            render_call("convert_time", arguments),
            render_call("convert_time", arguments | {"target_timezone": "Nowhere/Else"}),
            render_call("convert_time", {"time": "12:00"}),
            render_answer("21:00"),
        ]
        says = iter(script)
        limited = [wrap_tool(tool, ToolsConfig(), ToolMetrics()) for tool in tools]
        budget = Budget(9, response_tokens=400, observation_tokens=900, context_tokens=9000, trajectory_tokens=9000)
        agent = EnvLoop(
            lambda: qa.search_env(limited, {"answer": 1.0}, "Use the tools."),
            TOKENIZER,
            chat_format(TOKENIZER),
            context_rule("append"),
            budget,
        )
        session = ScriptedSession(Identity("u", 0, 0, "t", 0), lambda observation: next(says), TOKENIZER)
        row = {"id": "r", "question": "Noon UTC in Tokyo?", "answers": ["21:00"], "gold_ids": []}
        asyncio.run(agent.run(session, row))
    done = session.trajectory()
    assert done.outcome is Outcome.ANSWERED and done.steps[-1].reward == 1.0
    good, wrong, bad = (step.tool_calls[0] for step in done.steps[:3])
    assert good["ok"] and "T21:00:00+09:00" in good["result"] and "T21:00:00+09:00" in done.steps[0].observation
    assert wrong["error"] == "tool_error" and "Nowhere/Else" in wrong["result"]
    assert bad["error"] == "bad_arguments" and "required" in bad["result"]


def test_a_task_of_ones_own_has_the_tools_of_a_server(tmp_path, monkeypatch):
    """As the page of the tools shows."""
    for attribute in ("_entries", "_files"):
        monkeypatch.setattr(TASKS, attribute, dict(getattr(TASKS, attribute)))
    if importlib.util.find_spec("mcp_server_time") is None:
        pytest.skip("mcp-server-time is not installed")
    page = (FOLDER.parent / "docs/contrib/mcp.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_tasks.py").write_text(code, encoding="utf-8")
    config = base_config.get_config()
    config.task.name, config.task.file = "clock", str(tmp_path / "my_tasks.py")
    with config.unlocked():
        config.task.args.python = sys.executable
        config.policy.preset, config.tokenizer.path, config.warm_start.updates = "tiny", "t", 0
    opened = []
    monkeypatch.setattr(mcp, "McpTools", lambda command: opened.append(McpTools(command)) or opened[0])
    task = configured_task(config)
    row = task.row("eval", 0)
    assert row["answers"] == ["20:00"]
    arguments = {"source_timezone": "UTC", "time": "11:00", "target_timezone": "Asia/Tokyo"}
    with opened[0]:
        _, shown, answered = play(task, row, [render_call("convert_time", arguments), render_answer("20:00")])
    assert "T20:00:00+09:00" in shown.observation.text and answered.reward == 1.0


def test_what_a_server_answers(pids):
    with McpTools(command(pids)) as tools:
        tool = tools[0]
        assert base.schema(tool)["function"]["parameters"]["required"] == ["do"] and tools[1].description == ""
        shown = "show it\n[image of type image/png, not shown]\n[resource file:///a, not shown]\n"
        assert does(tool, "show", "it").content == f"{shown}[resource file:///b, not shown]\nend"
        assert does(tool, "nothing").content == "No result."
        assert does(tool, "noise").content == "noise"
        for do, expected in [
            ("err", ("tool_error", "model")),
            ("refuse", ("bad_arguments", "model")),
            ("fail", ("server_error", "infrastructure")),
            ("wrong", ("bad_answer", "infrastructure")),
        ]:
            result = does(tool, do)
            assert kind(result) == expected and result.content
        assert run(tool, {"text": "x"}).error.kind == "bad_arguments"  # By its schema: the server is not asked.
        assert starts(pids) == 1


def test_structured_results_are_not_validated(pids):
    """By the pattern of their schema that took until the end of days, in which no thread ran."""
    with McpTools(command(pids, "output")) as tools:
        assert does(tools[0], "structured", "a" * 60 + "!").ok


def test_names_can_be_chosen_and_prefixed(pids):
    with McpTools(command(pids), only=["other"], prefix="my_") as tools:
        assert [tool.name for tool in tools] == ["my_other"]
        assert does(tools[0], "say", "it").content == "say it"
    with pytest.raises(ValueError, match="has no tool missing; it has does, other"):
        McpTools(command(pids), only=["missing"])


def test_a_server_that_dies_in_mid_call_is_a_typed_failure_and_is_started_again(pids, tmp_path):
    with McpTools(command(pids)) as tools:
        for start in (1, 2):
            result = does(tools[0], "die")
            assert kind(result) == ("connection_lost", "infrastructure") and starts(pids) == start
            assert "last words" in result.content
        assert does(tools[0], "say", "again").content == "say again" and starts(pids) == 3
        limited = wrap_tool(tools[0], ToolsConfig(backoff_seconds=0), ToolMetrics())
        assert does(limited, "once", str(tmp_path / "flag")).content.startswith("once") and starts(pids) == 4


def test_all_calls_that_wait_when_a_server_dies_fail_and_one_start_serves_those_that_follow(pids):
    async def main(tool, *dos):
        return await asyncio.gather(*(base.call(tool, {"do": do}) for do in dos))

    with McpTools(command(pids)) as tools:
        results = asyncio.run(main(tools[0], *["hang"] * 8, "die"))
        assert {kind(result) for result in results} == {("connection_lost", "infrastructure")}
        results = asyncio.run(main(tools[0], *["say"] * 8))
        assert [result.content for result in results] == ["say"] * 8 and starts(pids) == 2


def test_a_server_that_hangs_or_answers_garbage_is_a_timeout_and_is_started_again(pids):
    with McpTools(command(pids), seconds=0.5) as tools:
        for start, do in enumerate(["hang", "garbage", "stall"], 1):
            result = does(tools[0], do)
            assert kind(result) == ("timeout", "infrastructure") and "more than 0.5 s" in result.content
            assert ("no json at all" in result.content) == (do == "garbage")
            assert starts(pids) == start
            assert does(tools[0], "say").content == "say"


def test_a_server_that_hangs_is_started_again_by_whoever_has_less_patience(pids, monkeypatch):
    """The run's own limit of a call is the shorter one."""
    monkeypatch.setattr(session, "SILENT_SECONDS", 0.2)
    with McpTools(command(pids)) as tools:
        tool = wrap_tool(tools[0], ToolsConfig(timeout_seconds=0.5, max_attempts=1), ToolMetrics())
        assert kind(does(tool, "stall")) == ("timeout", "infrastructure") and starts(pids) == 1
        # A call that begins before the session knows of it goes down with the old server, and is made again.
        again = wrap_tool(tools[0], ToolsConfig(timeout_seconds=SOON, max_attempts=2), ToolMetrics())
        assert does(again, "say", "it").content == "say it" and starts(pids) == 2


def test_a_call_that_hangs_takes_no_other_with_it(pids):
    async def main(tool):
        hanging = asyncio.create_task(base.call(tool, {"do": "hang"}))
        while not hanging.done():
            assert (await base.call(tool, {"do": "say"})).ok
            await asyncio.sleep(0.01)
        return hanging.result()

    with McpTools(command(pids), seconds=0.5) as tools:
        assert kind(asyncio.run(main(tools[0]))) == ("timeout", "infrastructure")
        assert does(tools[0], "say").ok and starts(pids) == 1


def test_calls_come_from_many_loops_at_once_and_can_be_cancelled(pids):
    results = []

    async def rollout(tool, n):
        calls = [base.call(tool, {"do": "say", "text": f"{n} {i}"}) for i in range(20)]
        hanging = asyncio.create_task(base.call(tool, {"do": "hang"}))
        results.append([result.content for result in await asyncio.gather(*calls)])
        hanging.cancel()
        await asyncio.wait([hanging])
        assert hanging.cancelled()

    with McpTools(command(pids)) as tools:
        threads = [threading.Thread(target=asyncio.run, args=(rollout(tools[0], n),)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(results) == [[f"say {n} {i}" for i in range(20)] for n in range(4)]
        assert does(tools[0], "say").ok and starts(pids) == 1


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (["/no/such/program"], "no such program or folder"),
        ([sys.executable, "-c", "import sys; sys.exit('bad luck')"], "the connection ended in the start.*bad luck"),
        ([sys.executable, "-c", "print('garbage', flush=True); input(); input()"], "it wrote: 'garbage'"),
        ([sys.executable, "-c", "import time; time.sleep(60)"], "the start took more than 1 s"),
    ],
)
def test_a_server_that_is_missing_or_none_is_refused_at_start(program, says):
    with pytest.raises(ValueError, match=f"(?s)MCP server {program[0]}.*{says}"):
        McpTools(program, start_seconds=1)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("twice", "has 2 tools named 'does'"),
        ("schema", "the schema of tool 'bad' cannot be used: 7 is not valid"),
        ("remote", "the schema of tool 'away' cannot be used: 'file:///a.json' is no place within it"),
        ("empty", "it has none"),
        ("late", "listing its tools took more than 1 s"),
    ],
)
def test_a_server_with_unusable_tools_is_refused_at_start(pids, how, says):
    with pytest.raises(ValueError, match=says):
        McpTools(command(pids, how), start_seconds=1)
    if how == "schema":
        with McpTools(command(pids, how), only=["does"]) as tools:
            assert len(tools) == 1


def test_settings_that_make_no_sense_are_refused(monkeypatch):
    for settings, says in [
        ({"server": []}, "is a command"),
        ({"server": ""}, "is a command"),
        ({"server": "server --flag"}, "is no URL"),
        ({"server": "localhost:8000"}, "is no URL"),
        ({"server": ["server"], "seconds": 0}, "seconds is 0"),
        ({"server": ["server"], "start_seconds": float("nan")}, "start_seconds is nan"),
    ]:
        with pytest.raises(ValueError, match=says):
            McpTools(**settings)
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name == "mcp":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ValueError, match=r"pip install 'agentr1_jax\[mcp\]'"):
        McpTools(["server"])


def test_a_closed_session_fails_calls_and_leaves_no_thread(pids):
    tools = McpTools(command(pids))
    waiting = []

    async def main():
        call = asyncio.create_task(base.call(tools[0], {"do": "hang"}))
        await asyncio.sleep(0.05)
        closing = threading.Thread(target=tools.close)
        closing.start()
        with contextlib.suppress(asyncio.CancelledError):
            waiting.append(await call)
        closing.join()

    asyncio.run(main())
    assert not waiting or waiting[0].error.fault == "infrastructure"
    tools.close()
    assert kind(does(tools[0], "say")) == ("closed", "infrastructure")
    assert not [thread for thread in threading.enumerate() if thread.name == "mcp"]
    gc.collect()  # What is left open would warn.


def test_a_program_that_ends_takes_its_server_with_it(pids):
    """Also one that is killed, if the server heeds the end of its stdin."""
    for kill, how in [(False, "stays"), (True, "well")]:
        code = (
            "import sys\nfrom agentr1_jax.contrib.mcp import McpTools\n"
            f"tools = McpTools({command(pids, how)!r})\nprint(len(tools), flush=True)\nsys.stdin.read()\n"
        )
        host = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=FOLDER.parent
        )
        assert host.stdout.readline() == b"2\n"
        if kill:
            host.kill()
        host.communicate()
        assert host.returncode == (-9 if kill else 0)
        assert gone(int(pids.read_text().split()[-1]))


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def http_server(port):
    program = subprocess.Popen(
        [sys.executable, str(FOLDER / "mcp_http_server.py"), str(port)], stderr=subprocess.DEVNULL
    )
    try:
        end = time.monotonic() + 60
        while program.poll() is None and time.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        yield program
    finally:
        program.kill()
        program.wait()


def test_a_server_behind_http_is_reached_again_after_it_died():
    port = free_port()
    with contextlib.ExitStack() as stack:
        with http_server(port):
            tools = stack.enter_context(
                McpTools(f"http://127.0.0.1:{port}/mcp", seconds=5, headers={"Authorization": "Bearer x"})
            )
            offered = {tool.name: tool for tool in tools}
            assert run(offered["add"], {"a": 2, "b": 3}).content == "5"
            assert run(offered["add"], {"a": "x"}).error.kind == "bad_arguments"
            assert run(offered["die"]).error.fault == "infrastructure"
        assert run(offered["add"], {"a": 2, "b": 3}).error == ToolError("connection_lost", "infrastructure")
        with http_server(port):
            limited = wrap_tool(offered["add"], ToolsConfig(backoff_seconds=0.1), ToolMetrics())
            assert run(limited, {"a": 2, "b": 4}).content == "6"


class WebServer(http.server.BaseHTTPRequestHandler):
    """Answers, but nothing of the protocol."""

    def do_POST(self):
        self.send_error(501)

    def log_message(self, *args):
        pass


def test_a_url_without_a_server_is_refused_at_start():
    with pytest.raises(ValueError, match="the connection ended in the start"):
        McpTools(f"http://127.0.0.1:{free_port()}/mcp", start_seconds=5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(ValueError, match="the start took more than 0.5 s"):
            McpTools(f"http://127.0.0.1:{silent.getsockname()[1]}/mcp", start_seconds=0.5)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), WebServer) as web:
        threading.Thread(target=web.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{web.server_address[1]}/mcp"
        with pytest.raises(ValueError, match=f"MCP server {url}: "):
            McpTools(url, start_seconds=5)
        with pytest.raises(ValueError, match=r"MCP server http://\*\*\*@127.*\?token=\*\*\*: ") as caught:
            McpTools(f"{url.replace('//', '//user:secret@')}?token=secret", start_seconds=5)
        assert "secret" not in str(caught.value)
        web.shutdown()
