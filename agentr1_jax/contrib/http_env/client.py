"""Task `http`: a task served over HTTP, by the protocol of docs/contrib/http_env.md.

Bodies are JSON, and every request can be repeated safely.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import queue
import threading
import time
import urllib.parse
import weakref
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from annotated_types import Ge, Le
from pydantic import AfterValidator
from pydantic.dataclasses import dataclass

from agentr1_jax.envs.base import Action, Expert, Observation, Row, Transition
from agentr1_jax.envs.registry import TaskContext, register
from agentr1_jax.errors import RetryableError, hide_credentials
from agentr1_jax.http import TRANSIENT_KINDS, HttpError, is_http_url, quote, request, retry_pause
from agentr1_jax.tools.base import run_in_thread
from agentr1_jax.trajectory import Outcome
from agentr1_jax.validation import STRICT, Count, NonNegative

PROTOCOL = 1
OBSERVATION_FIELDS = ("messages", "text", "texts", "role", "tools", "state_key", "potential", "evidence")
"""Fields of an Observation that the protocol transmits."""


class HttpEnvError(Exception):
    """A server gave an answer that is not of the protocol."""


def _check_url(url: str) -> str:
    if not is_http_url(url):
        raise ValueError(f"{hide_credentials(url)!r} is not the address of a server, like http://localhost:8100")
    return url


@dataclass(frozen=True, config=STRICT)
class HttpConfig:
    """Keys of `task.http`."""

    url: Annotated[str, AfterValidator(_check_url)] = ""
    """address of the environment server, e.g. http://localhost:8100; the protocol's paths are appended"""
    seconds: Annotated[float, Ge(1e-3), Le(86_400)] = 30.0
    """time limit of a request"""
    attempts: Count = 3
    """most requests for one call that gets no answer, or status 429, 502, 503 or 504"""
    backoff: NonNegative = 0.5
    """seconds before the second request; doubles with every request"""


def ask(config: HttpConfig, path: str, body: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """Send a GET request, or a POST request with a body; return the answer.

    Status 500 is a failure of the environment, and its request is not repeated.

    Raises:
      HttpError: there is no good answer.
      HttpEnvError: it is no JSON object.
    """
    url = config.url.rstrip("/") + path
    method, content = ("GET", None) if body is None else ("POST", json.dumps(body).encode())
    for retry in range(1, config.attempts + 1):
        try:
            answer = request(method, url, content, config.seconds)
            break
        except HttpError as error:
            if error.kind not in TRANSIENT_KINDS or error.status == 500 or retry == config.attempts:
                raise
        time.sleep(retry_pause(config.backoff, retry))
    url = hide_credentials(url)
    try:
        fields = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise HttpEnvError(f"{url} answered no JSON ({error}): {quote(answer)}") from error
    if not isinstance(fields, dict):
        raise HttpEnvError(f"{url} answered no JSON object: {quote(answer)}")
    return fields


@register("http", HttpConfig)
def make_http(config: HttpConfig, run: TaskContext) -> HttpTask:
    """Return the Task; see `HttpTask`."""
    return HttpTask(config)


class HttpTask:
    """Task of an environment server, which weights its rewards itself; it has no expert and no texts.

    Raises:
      ValueError: the server cannot be reached or does not speak the protocol; the message names the URL.
    """

    has_expert = False
    has_texts = False

    def __init__(self, config: HttpConfig) -> None:
        self._config = config
        try:
            info = ask(config, "/info")
            if info.get("protocol") != PROTOCOL:
                raise TypeError(f"its protocol is {info.get('protocol')!r}, and this is {PROTOCOL}")
            self.name = _of(info, "name", str)
            self.reward_parts: Sequence[str] = [str(part) for part in _of(info, "reward_parts", list)]
            self._sizes = {str(split): size for split, size in _of(info, "splits", dict).items()}
        except (HttpError, HttpEnvError, TypeError) as error:
            raise ValueError(
                f"task.http.url {hide_credentials(config.url)}: no environment answers there ({error}); start one, "
                "e.g. by python -m experiments.serve_env --config=..., and see docs/contrib/http_env.md for what it "
                "must answer"
            ) from error

    def row(self, split: str, index: int) -> Row:
        """Return row `index` of a split.

        Raises:
          ValueError: there is no such row.
          RetryableError: the server cannot be reached any more; the run can be resumed once it can.
        """
        try:
            query = urllib.parse.urlencode({"split": split, "index": index})
            row = _of(ask(self._config, f"/rows?{query}"), "row", dict)
            _of(row, "id", str)
        except HttpError as error:
            if error.status == 404:
                raise ValueError(
                    f"{self.name} at {hide_credentials(self._config.url)} has no row {split!r} {index}; splits are "
                    f"{', '.join(self._sizes)} ({quote(error.answer)})"
                ) from error
            raise RetryableError(f"task.http: {error}; the same command goes on once the server is back") from error
        except (HttpEnvError, TypeError) as error:
            raise ValueError(f"{hide_credentials(self._config.url)}/rows: not a row ({error})") from error
        return row

    def size(self, split: str) -> int | None:
        """Return the number of rows of a split, as the server states it."""
        return self._sizes.get(split)

    def env(self) -> HttpEnv:
        """Return a new environment; each of its episodes is a session of the server."""
        return HttpEnv(self._config)

    def expert(self, row: Row, seed: int) -> Expert:
        """Raise ValueError: the protocol has none."""
        raise ValueError("task http has no expert; set warm_start.updates=0, or warm_start.init_from")

    def texts(self, count: int) -> Sequence[str]:
        """Raise ValueError: the protocol has none."""
        raise ValueError("task http has no texts to train a tokenizer or to pretrain on; set tokenizer.path")


class HttpEnv:
    """Env whose episodes are sessions of a server; requests run in threads.

    A failed request or an answer of another shape raises; the runner counts it as `env_failure` and retries the
    trajectory.
    """

    def __init__(self, config: HttpConfig) -> None:
        self._config = config
        self._session, self._steps = "", 0
        self._metrics: Mapping[str, float] = {}

    async def reset(self, row: Row, seed: int) -> Observation:
        """Start an episode in a new session."""
        answer = await run_in_thread(ask, self._config, "/reset", {"row": row, "seed": seed})
        try:
            self._session, self._steps = _of(answer, "session", str), 0
            self._metrics = _numbers(answer, "metrics")
            observation = _observation(_of(answer, "observation", dict))
        except (TypeError, ValueError) as error:
            raise HttpEnvError(
                f"{hide_credentials(self._config.url)}/reset: not a first observation ({error})"
            ) from error
        # However the episode ends, the server can drop the session without waiting until it is idle for long.
        weakref.finalize(self, _closing_queue().put, (self._config, self._session)).atexit = False
        return observation

    async def step(self, action: Action) -> Transition:
        """Apply one response. Its step number lets the server recognise a repeated request."""
        fields = {key: getattr(action, key) for key in ("text", "truncated", "final", "lenient")}
        body = {"session": self._session, "step": self._steps, "action": fields}
        answer = await run_in_thread(ask, self._config, "/step", body)
        try:
            transition = _transition(answer)
            self._metrics = _numbers(answer, "metrics")
        except (TypeError, ValueError) as error:
            raise HttpEnvError(f"{hide_credentials(self._config.url)}/step: not a transition ({error})") from error
        self._steps += 1
        return transition

    def truncate(self) -> Mapping[str, float]:
        """Return the metrics of the episode so far, from the last answer."""
        return self._metrics


@functools.cache
def _closing_queue() -> queue.SimpleQueue[tuple[HttpConfig, str]]:
    """Return the queue of sessions to close, served by a thread.

    Finalizers fill it: the garbage collector can interrupt a thread that holds any lock, and `SimpleQueue.put` is
    reentrant.
    """
    sessions: queue.SimpleQueue[tuple[HttpConfig, str]] = queue.SimpleQueue()
    threading.Thread(target=_close_sessions, args=(sessions,), daemon=True, name="http_env:close").start()
    return sessions


def _close_sessions(sessions: queue.SimpleQueue[tuple[HttpConfig, str]]) -> None:
    while True:
        config, session = sessions.get()
        with contextlib.suppress(Exception):  # Best effort: the server drops idle sessions by itself.
            ask(dataclasses.replace(config, attempts=1), "/close", {"session": session})


def _observation(fields: Mapping[str, Any]) -> Observation:
    """Raise TypeError or ValueError where the fields are not those of an Observation."""
    unknown = [key for key in fields if key not in OBSERVATION_FIELDS]
    if unknown:
        raise ValueError(f"an observation has no {unknown[0]!r}; it has {', '.join(OBSERVATION_FIELDS)}")
    for key, kind in (("text", str), ("texts", list), ("messages", list), ("state_key", str), ("evidence", str)):
        if fields.get(key) is not None:
            _of(fields, key, kind)
    for message in fields.get("messages") or ():
        for key in ("role", "content"):
            _of(message, key, str)
    if not all(isinstance(text, str) for text in fields.get("texts") or ()):
        raise TypeError("its 'texts' are not all text")
    potential = fields.get("potential")
    return Observation(**{**fields, "potential": None if potential is None else _number(potential, "potential")})


def _transition(answer: Mapping[str, Any]) -> Transition:
    """Raise TypeError or ValueError where the answer is not a Transition."""
    terminated, truncated = (_of(answer, key, bool) for key in ("terminated", "truncated"))
    ended = Outcome.ENV_DONE if terminated else Outcome.MAX_STEPS if truncated else None
    outcome = Outcome(answer["outcome"]) if answer.get("outcome") is not None else ended
    if (ended is None) != (outcome is None):
        raise ValueError(f"its outcome is {outcome}, and the episode goes on")
    has_observation = answer.get("observation") is not None
    if not has_observation and ended is None:
        raise ValueError("it has no observation, and the episode goes on")
    return Transition(
        observation=_observation(_of(answer, "observation", dict)) if has_observation else None,
        reward=_number(answer.get("reward"), "reward"),
        reward_parts=_numbers(answer, "reward_parts"),
        raw_reward_parts=_numbers(answer, "raw_reward_parts"),
        terminated=terminated,
        truncated=truncated and not terminated,
        outcome=outcome,
        tool_calls=answer.get("tool_calls") or (),
        metrics=_numbers(answer, "metrics") if ended else {},
        action_key=None if answer.get("action_key") is None else _of(answer, "action_key", str),
        info=answer.get("info") or {},
    )


def _of(fields: Any, key: str, kind: type) -> Any:
    """Return `fields[key]`. Raises TypeError where it is not of that type."""
    if not isinstance(fields, Mapping) or not isinstance(fields.get(key), kind):
        found = fields.get(key) if isinstance(fields, Mapping) else fields
        raise TypeError(f"its {key!r} is no {kind.__name__}: {found!r:.80}")
    return fields[key]


def _numbers(answer: Mapping[str, Any], key: str) -> dict[str, float]:
    return {str(name): _number(x, f"{key}.{name}") for name, x in (answer.get(key) or {}).items()}


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"its {name!r} is no finite number: {value!r:.80}")
    return float(value)
