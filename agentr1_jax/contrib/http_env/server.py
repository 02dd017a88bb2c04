"""Server of a task over HTTP, by the protocol of docs/contrib/http_env.md. A server to copy from."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from http.server import ThreadingHTTPServer
from typing import Any

import numpy as np

from agentr1_jax import http
from agentr1_jax.contrib.http_env.client import OBSERVATION_FIELDS, PROTOCOL
from agentr1_jax.envs.base import Action, Env, Observation, Task, Transition
from agentr1_jax.http import Refusal

SPLITS = ("train", "eval", "dev")
IDLE_SECONDS = 3600.0
"""Time after which a session that nobody uses is dropped, and its environment with it."""
SWEEP_SECONDS = 60.0


class Session:
    """An episode in progress."""

    def __init__(self, env: Env) -> None:
        self.env = env
        self.steps = 0
        self.last: Mapping[str, Any] = {}  # Answer to the last step, repeated where its request is repeated.
        self.used = time.monotonic()
        self.lock = threading.Lock()  # Held while a step is applied.


class Service:
    """The protocol's requests for one task, thread-safe; all environments run in one event loop."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._sessions: dict[str, Session] = {}
        self._loop = asyncio.new_event_loop()
        self._loop.call_soon(self._drop_idle)
        threading.Thread(target=self._run_loop, daemon=True).start()

    def info(self) -> Mapping[str, Any]:
        """Describe the task."""
        splits = {}
        for split in SPLITS:
            with contextlib.suppress(ValueError):
                self._task.row(split, 0)
                splits[split] = self._task.size(split)
        parts = list(self._task.reward_parts)
        return {"protocol": PROTOCOL, "name": self._task.name, "reward_parts": parts, "splits": splits}

    def rows(self, split: str, index: str) -> Mapping[str, Any]:
        """Return a row of the task."""
        if not index.isdecimal():
            raise Refusal(400, f"cannot be read: the index is {index!r}")
        try:
            return {"row": self._task.row(split, int(index))}
        except ValueError as error:
            raise Refusal(404, str(error)) from error

    def reset(self, row: Mapping[str, Any], seed: int) -> Mapping[str, Any]:
        """Start a session."""
        env, name = self._task.env(), uuid.uuid4().hex
        observation = self._run(env.reset(row, seed))
        self._sessions[name] = Session(env)
        return {"session": name, "observation": _observation_fields(observation), "metrics": dict(env.truncate())}

    def step(self, session: str, step: int, action: Mapping[str, Any]) -> Mapping[str, Any]:
        """Apply step number `step`; repeat the answer where it is the last one applied."""
        if not isinstance(session, str) or type(step) is not int or step < 0:
            raise Refusal(400, f"cannot be read: session is {session!r:.80}, step is {step!r:.80}")
        said = _action(action)
        gone = Refusal(410, f"no session {session!r}: it ended, failed, or was idle for {IDLE_SECONDS:g} s")
        found = self._sessions.get(session)
        if found is None:
            raise gone
        with found.lock:
            if session not in self._sessions:  # The step failed while this request for the same one waited.
                raise gone
            found.used = time.monotonic()
            if step == found.steps - 1:
                return found.last
            if step != found.steps:
                raise Refusal(409, f"the session is at step {found.steps}, not {step}")
            try:
                transition = self._run(found.env.step(said))
            except BaseException:
                self.close(session)  # The state of the environment is unknown.
                raise
            found.steps, found.last = step + 1, _answer(transition, found.env.truncate())
            found.used = time.monotonic()
            return found.last

    def close(self, session: str) -> Mapping[str, Any]:
        """End a session; do nothing where it has ended."""
        self._sessions.pop(session, None)
        return {}

    def _drop_idle(self) -> None:
        last = time.monotonic() - IDLE_SECONDS
        for key, session in list(self._sessions.items()):
            if session.used < last and not session.lock.locked():
                self.close(key)
        self._loop.call_later(min(SWEEP_SECONDS, IDLE_SECONDS), self._drop_idle)

    def _run_loop(self) -> None:
        while True:  # An environment may stop the loop, or end it by SystemExit; others go on.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        running = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return running.result(IDLE_SECONDS)
        except Exception:
            raise
        except BaseException as error:  # It would end the thread, without an answer.
            raise RuntimeError(f"the environment raised {type(error).__name__}") from error
        finally:
            running.cancel()


def make_server(task: Task, host: str, port: int) -> ThreadingHTTPServer:
    """Return a server of a task; see `http.make_server`."""
    service = Service(task)
    routes: dict[str, Callable[..., Mapping[str, Any]]] = {
        "GET /info": service.info,
        "GET /rows": service.rows,
        "POST /reset": service.reset,
        "POST /step": service.step,
        "POST /close": service.close,
    }
    return http.make_server(routes, host, port)


def _action(fields: Any) -> Action:
    """Return the action of a request. Raises Refusal where it is none."""
    try:
        if not isinstance(fields, Mapping):
            raise TypeError("it is no object")
        action = Action(np.zeros(0, np.int32), **fields)
        kinds = (str, bool, bool, bool)
        if tuple(map(type, (action.text, action.truncated, action.final, action.lenient))) != kinds:
            raise TypeError("text must be a text, and truncated, final and lenient true or false")
    except TypeError as error:
        raise Refusal(400, f"cannot be read: an action is {fields!r:.80} ({error})") from error
    return action


def _observation_fields(observation: Observation) -> dict[str, Any]:
    if observation.token_ids is not None:
        raise ValueError("observations of token ids cannot be served")
    fields = {key: getattr(observation, key) for key in OBSERVATION_FIELDS}
    return {key: value for key, value in fields.items() if value is not None and value != ()}


def _answer(transition: Transition, metrics: Mapping[str, float]) -> dict[str, Any]:
    return {
        "observation": None if transition.observation is None else _observation_fields(transition.observation),
        "reward": transition.reward,
        "reward_parts": dict(transition.reward_parts),
        "raw_reward_parts": dict(transition.raw_reward_parts),
        "terminated": transition.terminated,
        "truncated": transition.truncated,
        "outcome": transition.outcome,
        "tool_calls": list(transition.tool_calls),
        "metrics": dict(metrics),
        "action_key": transition.action_key,
        "info": dict(transition.info),
    }
