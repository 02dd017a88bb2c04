"""A Task behind HTTP: the same episodes as without, through losses, repeats and failures of the server."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.server
import json
import threading
import time
import types
import weakref

import letters
import numpy as np
import pytest
from configured import configured_task

from agentr1_jax.contrib.http_env import server
from agentr1_jax.contrib.http_env.client import HttpConfig, HttpEnvError, HttpTask
from agentr1_jax.contrib.http_env.server import Service, make_server
from agentr1_jax.envs.base import Action, Observation, Task, Transition
from agentr1_jax.errors import RetryableError, UserError
from agentr1_jax.http import HttpError, Refusal, request
from agentr1_jax.rollout.config import SamplingConfig
from agentr1_jax.tasks import make_task
from agentr1_jax.train import collect
from agentr1_jax.trajectory import Outcome
from configs import base, frozenlake
from experiments import setup

LAKE = make_task("frozenlake", slip=0.2)


@contextlib.contextmanager
def run_server(server):
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def serve(task):
    with run_server(make_server(task, "127.0.0.1", 0)) as url:
        yield url


@contextlib.contextmanager
def reply(answers):
    """A server that takes its next answer, (status, body) or None for a connection that breaks, from a path's list.

    The last one stands. Yields the URL and all bodies that were posted.
    """
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            path = self.path.partition("?")[0]
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            asked.append((path, json.loads(body) if body else None))
            left = answers[path]
            answer = left.pop(0) if len(left) > 1 else left[0]
            if answer is None:
                self.connection.close()
                return
            status, body = answer
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, *args):
            pass

    with run_server(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as url:
        yield url, asked


INFO = {"protocol": 1, "name": "mine", "reward_parts": ["a"], "splits": {"train": 2, "eval": None}}
BEGUN = {"session": "s", "observation": {"messages": [{"role": "user", "content": "go"}]}, "metrics": {"em": 0}}
STEPPED = {
    **{"observation": {"text": "on", "role": "user"}, "reward": 0.5, "reward_parts": {"a": 0.5}},
    **{"terminated": False, "truncated": False, "metrics": {"em": 0.25}},
}


def client(url, **settings):
    return HttpConfig(url=url, **{"seconds": 5.0, "backoff": 0.001} | settings)


def episode(env, row, texts, seed=0):
    async def run():
        out = [await env.reset(row, seed)]
        for text in texts:
            out.append(await env.step(Action(np.zeros(0, np.int32), text)))
            if out[-1].terminated or out[-1].truncated:
                break
        return [*out, env.truncate()]

    return asyncio.run(run())


def test_episodes_over_http_are_those_of_the_task_itself():
    texts = ["go east", "fly", "go south", "go south", "go east", "go south", "go east", "go east"]
    with serve(LAKE) as url:
        task: Task = HttpTask(client(url))
        assert (task.name, list(task.reward_parts), task.size("train")) == ("frozenlake", ["goal", "side"], None)
        ends = set()
        for index in range(8):
            row = task.row("eval", index)
            assert row == LAKE.row("eval", index)
            there, here = (episode(t.env(), row, texts[: index + 1], seed=index) for t in (task, LAKE))
            assert there == here
            ends.add(there[-2].terminated)
    assert ends == {True, False}


def test_an_episode_with_tools_is_recorded_alike():
    world = make_task("hopworld", flaws={})

    def record(task):
        row = task.row("train", 0)
        return letters.play(
            ["the", "ab"],
            task.env(),
            row=row,
            max_steps=2,
            context_tokens=9000,
            trajectory_tokens=9000,
            observation_tokens=99,
        )

    with serve(world) as url:
        task = HttpTask(client(url))
        there, here = record(task), record(world)
    assert [s.prompt_ids.tolist() for s in there.steps] == [s.prompt_ids.tolist() for s in here.steps]
    assert [s.info for s in there.steps] == [s.info for s in here.steps] and there.outcome == here.outcome
    assert there.metrics == here.metrics and there.total_reward == here.total_reward


class Counting:
    """A task whose environment counts its steps."""

    name, reward_parts = "counting", ("n",)

    def __init__(self, slow=0.0, fails_at=None):
        self.slow, self.fails_at, self.applied = slow, fails_at, []

    def row(self, split, index):
        if split not in ("train", "eval"):
            raise ValueError("splits are train, eval")
        return {"id": f"{split}/{index}"}

    def size(self, split):
        return 7

    def env(self):
        return self

    async def reset(self, row, seed):
        return Observation(messages=[{"role": "user", "content": row["id"]}])

    async def step(self, action):
        if action.text == self.fails_at:
            raise ZeroDivisionError("of the environment")
        await asyncio.sleep(self.slow)
        self.applied.append(action.text)
        return Transition(Observation(text=f"step {len(self.applied)}"), reward=float(len(self.applied)))

    def truncate(self):
        return {"em": 0.0, "steps": float(len(self.applied))}


def test_a_step_that_is_asked_for_again_is_not_applied_again():
    task = Counting()
    service = Service(task)
    name = service.reset({"id": "x"}, 0)["session"]
    first = service.step(name, 0, {"text": "a"})
    assert service.step(name, 0, {"text": "a"}) == first and task.applied == ["a"]
    assert service.step(name, 1, {"text": "b"})["reward"] == 2 and task.applied == ["a", "b"]
    for step in (0, 3):
        with pytest.raises(Refusal, match="the session is at step 2") as refused:
            service.step(name, step, {"text": "c"})
        assert refused.value.status == 409
    service.close(name)
    with pytest.raises(Refusal, match="no session") as refused:
        service.step(name, 2, {"text": "c"})
    assert refused.value.status == 410 and task.applied == ["a", "b"]


@pytest.mark.parametrize(
    ("step", "action"),
    [
        *[(step, {"text": "a"}) for step in (-1, True, 0.0, "0", None)],
        *[
            (0, action)
            for action in ("a", {}, {"text": None}, {"text": "a", "final": 1}, {"text": "a", "token_ids": []})
        ],
    ],
)
def test_what_is_no_step_is_refused_and_leaves_the_session_as_it_was(step, action):
    task = Counting()
    service = Service(task)
    name = service.reset({"id": "x"}, 0)["session"]
    with pytest.raises(Refusal, match="cannot be read") as refused:
        service.step(name, step, action)
    assert refused.value.status == 400 and task.applied == []
    assert service.step(name, 0, {"text": "a"})["reward"] == 1


class Made(Counting):
    """Makes a new environment for each session; keeps weak references to them."""

    def __init__(self, **settings):
        super().__init__()
        self.settings, self.made = settings, []

    def env(self):
        env = Counting(**self.settings)
        self.made.append(weakref.ref(env))
        return env


def test_a_step_that_failed_is_not_applied_by_a_request_that_waited():
    class Failing(Counting):
        async def step(self, action):
            self.applied.append(action.text)
            await asyncio.sleep(0.1)
            raise ZeroDivisionError

    task = Failing()
    service = Service(task)
    name = service.reset({"id": "x"}, 0)["session"]
    raised = []

    def ask():
        try:
            service.step(name, 0, {"text": "a"})
        except (ZeroDivisionError, Refusal) as error:
            raised.append(type(error))

    requests = [threading.Thread(target=ask) for _ in range(3)]
    for asking in requests:
        asking.start()
    for asking in requests:
        asking.join()
    assert (raised.count(ZeroDivisionError), raised.count(Refusal)) == (1, 2) and task.applied == ["a"]


def test_an_environment_that_exits_or_stops_the_loop_leaves_the_others_alone():
    async def exits():
        raise SystemExit(3)

    class Exiting(Counting):
        async def step(self, action):
            if action.text == "stop":
                asyncio.get_running_loop().stop()
                await asyncio.sleep(0)
            elif action.text == "exit":
                await exits()
            elif action.text == "task":
                await asyncio.create_task(exits())
            return await super().step(action)

    service = Service(Exiting())
    for text in ("exit", "task", "stop"):
        name = service.reset({"id": "x"}, 0)["session"]
        if text == "stop":
            service.step(name, 0, {"text": text})
            continue
        with pytest.raises(RuntimeError, match="the environment raised SystemExit"):
            service.step(name, 0, {"text": text})


def test_an_idle_session_is_dropped_with_its_environment(monkeypatch):
    monkeypatch.setattr(server, "IDLE_SECONDS", 0.05)
    task = Made()
    service = Service(task)
    service.reset({"id": "x"}, 0)
    end = time.monotonic() + 20
    while task.made[0]() is not None and time.monotonic() < end:
        time.sleep(0.01)
    assert task.made[0]() is None and not service._sessions


def test_a_step_that_hangs_is_given_up(monkeypatch):
    service = Service(Made(slow=60.0))
    name = service.reset({"id": "x"}, 0)["session"]
    monkeypatch.setattr(server, "IDLE_SECONDS", 0.05)
    with pytest.raises(TimeoutError):
        service.step(name, 0, {"text": "a"})
    assert not service._sessions


def test_a_request_whose_answer_was_lost_comes_again_and_waits_for_it():
    """The client gives up before the server has answered, and asks again while the step is still being applied."""
    task = Counting(slow=0.4)
    with serve(task) as url:
        env = HttpTask(client(url, seconds=0.3, attempts=5)).env()
        _, first, second, metrics = episode(env, {"id": "x"}, ["a", "b"])
    assert task.applied == ["a", "b"] and (first.reward, second.reward) == (1, 2)
    assert metrics == {"em": 0.0, "steps": 2.0}


def test_what_does_not_come_through_is_tried_again():
    broken = [None, (503, b"busy"), (429, b"slow down"), (200, STEPPED)]
    with reply({"/info": [(200, INFO)], "/reset": [None, (200, BEGUN)], "/step": broken, "/close": [(200, {})]}) as (
        url,
        asked,
    ):
        env = HttpTask(client(url, attempts=4)).env()
        _, done, metrics = episode(env, {"id": "x"}, ["a"])
        assert done.reward == 0.5 and metrics == {"em": 0.25}
        steps = [body for path, body in asked if path == "/step"]
    said = {"text": "a", "truncated": False, "final": False, "lenient": False}
    assert steps == [{"session": "s", "step": 0, "action": said}] * 4


def test_a_failure_of_the_environment_is_not_tried_again_by_the_client():
    task = Counting(fails_at="b")
    with serve(task) as url:
        env = HttpTask(client(url)).env()

        async def run():
            await env.reset({"id": "x"}, 0)
            await env.step(Action(np.zeros(0, np.int32), "a"))
            for told in ("ZeroDivisionError: of the environment", "no session"):  # It is over then.
                with pytest.raises(HttpError, match=told):
                    await env.step(Action(np.zeros(0, np.int32), "b"))

        asyncio.run(run())
    assert task.applied == ["a"]


def test_a_server_that_is_gone_is_an_environments_failure():
    task = Counting()
    with serve(task) as url:
        remote = HttpTask(client(url, attempts=2))
        row = remote.row("train", 0)
        assert letters.attempt(remote, row, "a").outcome is Outcome.MAX_STEPS
    ended = letters.attempt(remote, row, "a")
    assert ended.outcome is Outcome.ENV_FAILURE and "unreachable" not in ended.info["error"]
    assert f"HttpError: {url}/reset: ConnectError" in ended.info["error"]
    with pytest.raises(RetryableError, match="goes on once the server is back"):
        remote.row("train", 1)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"nonsense", "answered no JSON"),
        ([], "answered no JSON object: '\\[\\]'"),
        ({}, "its 'terminated' is no bool: None"),
        (STEPPED | {"reward": True}, "its 'reward' is no finite number: True"),
        (json.dumps(STEPPED).replace("0.5", "NaN").encode(), "its 'reward' is no finite number: nan"),
        (STEPPED | {"reward_parts": {"a": "x"}}, r"its 'reward_parts\.a' is no finite number: 'x'"),
        (STEPPED | {"observation": None}, "no observation, and the episode goes on"),
        (STEPPED | {"observation": {"text": 3}}, "its 'text' is no str: 3"),
        (STEPPED | {"observation": {"text": "a", "reward": 1}}, "an observation has no 'reward'; it has messages"),
        (STEPPED | {"observation": {"texts": ["a", 1]}}, "its 'texts' are not all text"),
        (STEPPED | {"action_key": 3}, "its 'action_key' is no str: 3"),
        (STEPPED | {"outcome": "won"}, "'won' is not a valid Outcome"),
        (STEPPED | {"outcome": "answered"}, "its outcome is answered, and the episode goes on"),
    ],
)
def test_an_answer_of_another_shape_is_told(answer, told):
    answers = {"/info": [(200, INFO)], "/reset": [(200, BEGUN)], "/step": [(200, answer)], "/close": [(200, {})]}
    with reply(answers) as (url, _):
        task = HttpTask(client(url))
        with pytest.raises(HttpEnvError, match=rf"{url}/step.*{told}"):
            episode(task.env(), {"id": "x"}, ["a"])
        assert letters.attempt(task, {"id": "x"}, "a").outcome is Outcome.ENV_FAILURE


@pytest.mark.parametrize(
    ("info", "told"),
    [
        ((404, {}), "answered status 404"),
        ((200, {"protocol": 2}), "its protocol is 2, and this is 1"),
        ((200, INFO | {"splits": ["train"]}), "its 'splits' is no dict"),
        ((500, b"oops"), "answered status 500: 'oops'"),
    ],
)
def test_a_server_without_the_protocol_is_refused_at_start(info, told):
    with (
        reply({"/info": [info]}) as (url, _),
        pytest.raises(ValueError, match=rf"task\.http\.url {url}: .*{told}"),
    ):
        HttpTask(client(url))


def test_rows_that_are_not_there_and_rows_that_are_none():
    with serve(LAKE) as url:
        task = HttpTask(client(url))
        with pytest.raises(ValueError, match=r"has no row 'practice' 0; splits are train, eval, dev"):
            task.row("practice", 0)
    answers = {"/info": [(200, INFO)], "/rows": [(200, {"row": {"question": "?"}})]}
    with reply(answers) as (url, _), pytest.raises(ValueError, match="/rows: not a row .*its 'id' is no str"):
        HttpTask(client(url)).row("train", 0)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/rows?split=train&index=one", None),
        ("/rows?split=train&index=-1", None),
        ("/reset", b"{"),
        ("/step", b""),
    ],
)
def test_what_the_server_cannot_read_is_answered_so(path, body):
    with serve(LAKE) as url, pytest.raises(HttpError, match="answered status 400: .*cannot be read") as refused:
        request("POST" if body is not None else "GET", url + path, body, 5.0)
    assert refused.value.status == 400


def test_rows_are_asked_for_before_the_engine_waits(monkeypatch):
    """A slow server would stall everything in flight."""
    parts = types.SimpleNamespace(task=LAKE, settings=setup.read_settings(frozenlake.get_config()))
    asked = []
    monkeypatch.setattr(collect, "task_row", lambda setup, split, prompt: asked.append(prompt) or {"id": str(prompt)})
    request = collect.Request("rl", "train", [8, 9, 10], 2, SamplingConfig(), version=0)
    groups = collect.task_groups(parts, request, [0, 2])
    assert asked == [8, 10] and [group.row["id"] for group in groups] == ["8", "10"]


def test_a_session_is_closed_once_its_environment_is_let_go():
    task = Counting()
    server = make_server(task, "127.0.0.1", 0)
    with reply({"/info": [(200, INFO)], "/reset": [(200, BEGUN)], "/close": [(200, {})]}) as (url, asked):
        env = HttpTask(client(url)).env()
        episode(env, {"id": "x"}, [])
        del env
        gc.collect()
        for _ in range(500):
            if ("/close", {"session": "s"}) in asked:
                break
            time.sleep(0.01)
        assert ("/close", {"session": "s"}) in asked
    server.server_close()


def test_letting_an_environment_go_starts_no_thread(monkeypatch):
    """The garbage collector may come while this thread holds the locks that starting one takes."""
    started = []
    with reply({"/info": [(200, INFO)], "/reset": [(200, BEGUN)], "/close": [(200, {})]}) as (url, _):
        env = HttpTask(client(url)).env()
        episode(env, {"id": "x"}, [])
        monkeypatch.setattr(threading.Thread, "start", started.append)
        del env
        gc.collect()
    assert started == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"task.http.url": ""}, r"task\.http\.url: '' is not the address of a server"),
        ({"task.http.url": "http://127.0.0.1:9", "task.http.attempts": 0}, r"task\.http\.attempts is 0"),
        ({"task.http.url": "http://127.0.0.1:9"}, r"task\.http\.url http://127\.0\.0\.1:9: no environment answers"),
        ({"task.http.url": "http://user:secret@127.0.0.1:9"}, r"http://\*\*\*@127\.0\.0\.1:9/info"),
        ({"task.http.url": "http://user:secret@127.0.0.1:x"}, r"'http://\*\*\*@127\.0\.0\.1:x' is not the address"),
        ({"task.http.url": "http://user:$NOT_SET@127.0.0.1:9"}, "the environment variable NOT_SET is not set"),
    ],
)
def test_a_config_that_cannot_work_is_refused(changes, told):
    config = frozenlake.get_config()
    base.set_task(config, "http")
    defaults = {"warm_start.updates": 0, "tokenizer.path": "t"}
    config.update_from_flattened_dict(defaults | {"task.http.backoff": 0.001} | changes)
    with pytest.raises(UserError, match=told) as caught:
        configured_task(config)
    assert "secret" not in str(caught.value)


def test_a_config_makes_it():
    config = frozenlake.get_config()
    with serve(LAKE) as url:
        base.set_task(config, "http")
        changes = {"warm_start.updates": 0, "tokenizer.path": "t"}
        config.update_from_flattened_dict(changes | {"task.http.url": url})
        assert configured_task(config).row("train", 3) == LAKE.row("train", 3)
        config.tokenizer.path = ""
        with pytest.raises(UserError, match="task 'frozenlake' has no texts"):
            configured_task(config)
        config.warm_start.updates = 3
        with pytest.raises(UserError, match="task 'frozenlake' has no expert to imitate, and warm_start.updates is 3"):
            configured_task(config)
