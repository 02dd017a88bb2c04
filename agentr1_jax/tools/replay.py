"""Record and replay of tool calls: a run that is made again gets the very results that it got before.

A file holds a JSON line per finished call: `{"tool", "scope", "arguments", "n", "result"}`. Equal calls (of one tool,
scope and arguments) are numbered by `n` in the order in which they begin, so that replaying is exact even where a tool
answers them differently, as long as the run makes them in the same order: `rollout.deterministic=True`, not resumed.
In any other order, and after a resumption, it is exact for tools that answer equal calls equally.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import errno
import fcntl
import json
import os
import threading
import weakref
from collections.abc import Mapping
from typing import Any, get_args

from absl import logging

from agentr1_jax.tools import base
from agentr1_jax.tools.base import Fault, Tool, ToolError, ToolResult
from agentr1_jax.tools.keyed import canonical
from agentr1_jax.tools.wrappers import Wrapper

Key = tuple[str, str, str]
"""Tool, scope and canonical arguments."""


@dataclasses.dataclass(frozen=True)
class _Call:
    key: Key
    number: int
    result: ToolResult


class Recording:
    """A file to which finished calls are appended; what it holds already is kept, and numbers go on from there.

    May be used from several threads. The file is made, and locked for as long as the recording lives, so that no other
    one, of this process or another, writes to it. An unfinished last line is cut off with a warning.

    Raises:
      ValueError: the file holds a line that is no recorded call (the message names it), or another recording writes it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._lock = threading.Lock()
        self._next: collections.Counter[Key] = collections.Counter()
        os.makedirs(os.path.dirname(self._path) or ".", exist_ok=True)
        self._lock_file()
        calls, end = _read(self._path)
        for call in calls:
            self._next[call.key] = max(self._next[call.key], call.number + 1)
        if end < os.path.getsize(self._path):
            os.truncate(self._path, end)

    def _lock_file(self) -> None:
        held = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        weakref.finalize(self, os.close, held)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"{self._path}: another run records its calls here; end it, or name another file in tools.record"
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            logging.warning("%s: its file system has no locks; let no other run record its tool calls here", self._path)

    def begin(self, key: Key) -> int:
        """The number of a call that begins now."""
        with self._lock:
            self._next[key] += 1
            return self._next[key] - 1

    def write(self, key: Key, number: int, result: ToolResult) -> None:
        """Appends a finished call. Raises TypeError or ValueError where `result.data` is no JSON."""
        tool, scope, arguments = key
        kept = {
            "content": result.content,
            "ok": result.ok,
            "error": result.error and dataclasses.asdict(result.error),
            "reward": None if result.reward is None else float(result.reward),
            "data": dict(result.data),
        }
        call = {"tool": tool, "scope": scope, "arguments": json.loads(arguments), "n": number, "result": kept}
        line = json.dumps(call).encode() + b"\n"
        with self._lock, open(self._path, "ab") as file:
            file.write(line)


class Replay:
    """Recorded results by call.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a line is no recorded call, or one is recorded twice; the message names file and line. An unfinished
        last line is left out with a warning.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        if not os.path.isfile(self.path):
            raise FileNotFoundError(f"{self.path}: no recorded calls here; record a run with tools.record={self.path}")
        self._lock = threading.Lock()
        self._asked: collections.Counter[Key] = collections.Counter()
        self._results: dict[Key, tuple[list[int], list[ToolResult]]] = {}
        for call in sorted(_read(self.path)[0], key=lambda call: call.number):
            numbers, results = self._results.setdefault(call.key, ([], []))
            numbers.append(call.number)
            results.append(call.result)

    def next(self, key: Key) -> ToolResult | None:
        """The result of the next call of this key; None where it was never recorded.

        Beyond the calls recorded it is the last one's; for one that was cut off and left no result, the one's before.
        """
        with self._lock:
            number = self._asked[key]
            self._asked[key] += 1
        if key not in self._results:
            return None
        numbers, results = self._results[key]
        return results[max(bisect.bisect_right(numbers, number) - 1, 0)]


@dataclasses.dataclass(frozen=True)
class Recorded(Wrapper):
    """Writes down how each call ended, failures too; a call whose waiter was cancelled leaves a gap in the numbers.

    A result whose data are no JSON fails with `not_recordable`: a recording with holes would mislead.
    """

    recording: Recording

    async def execute(self, arguments: Mapping[str, Any]) -> ToolResult:
        key = _key(self.tool, arguments)
        number = self.recording.begin(key)
        result = await base.execute(self.tool, arguments)
        try:
            self.recording.write(key, number, result)
        except (TypeError, ValueError) as error:
            message = f"Error: the result of {self.name} cannot be recorded, its data are no JSON: {error}"
            return base.failed("not_recordable", message, "infrastructure")
        return result


@dataclasses.dataclass(frozen=True)
class Replayed(Wrapper):
    """Answers from what was recorded, and never calls the tool; what was not recorded fails with `not_recorded`.

    Data come back as JSON keeps them: tuples as lists, keys as strings.
    """

    replay: Replay

    async def execute(self, arguments: Mapping[str, Any]) -> ToolResult:
        result = self.replay.next(_key(self.tool, arguments))
        if result is not None:
            return result
        message = f"Error: {self.replay.path} holds no call of {self.name} with {canonical(arguments)}; it is of "
        message += "another run. Record this one with tools.record, or leave tools.replay empty."
        return base.failed("not_recorded", message, "infrastructure")


def _key(tool: Tool, arguments: Mapping[str, Any]) -> Key:
    return tool.name, getattr(tool, "scope", ""), canonical(arguments)


def _read(path: str) -> tuple[list[_Call], int]:
    """The calls of a file, and how many of its bytes they take."""
    calls: list[_Call] = []
    known: set[tuple[Key, int]] = set()
    end = 0
    with open(path, "rb") as lines:
        for line in lines:
            where = f"{path}, line {len(calls) + 1}"
            if not line.endswith(b"\n"):
                logging.warning("%s: unfinished, as a killed process leaves it; it is left out", where)
                break
            call = _parsed(line, where)
            if (call.key, call.number) in known:
                raise ValueError(f"{where}: recorded before; two processes have written this file, use it no more")
            known.add((call.key, call.number))
            calls.append(call)
            end += len(line)
    return calls, end


def _parsed(line: bytes, where: str) -> _Call:
    try:
        record = json.loads(line)
        tool, scope, arguments, number = (record[name] for name in ("tool", "scope", "arguments", "n"))
        if not isinstance(tool, str) or not isinstance(scope, str) or not isinstance(arguments, dict):
            raise TypeError("tool and scope must be strings, arguments an object")
        if type(number) is not int or number < 0:
            raise ValueError(f"n is {number!r}; it must be an integer of 0 or more")
        kept = dict(record["result"])
        error = kept.pop("error")
        result = ToolResult(**kept, error=None if error is None else ToolError(**error))
        if result.error and not (isinstance(result.error.kind, str) and result.error.fault in get_args(Fault)):
            raise ValueError(f"its error is {error!r:.80}, not a kind and a fault, {' or '.join(get_args(Fault))}")
        if wrong := base.result_problem(result):
            raise TypeError(f"its tool {wrong}")
        return _Call((tool, scope, canonical(arguments)), number, result)
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        raise ValueError(
            f"{where}: not a recorded call ({type(problem).__name__}: {problem}); repair or delete the file"
        ) from problem
