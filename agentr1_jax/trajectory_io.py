"""Trajectories as JSON records and as gzipped JSONL files.

Advantages, values and value targets of a step's tokens are one number where all are equal, else their bytes as base64,
little-endian, under the name of their type: `{"float16": "ADxmLg=="}`.
"""

from __future__ import annotations

import base64
import dataclasses
import gzip
import itertools
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

from agentr1_jax import files
from agentr1_jax.trajectory import POLICIES, Outcome, Step, Term, Trajectory, common_prefix

PACKED = ("advantages", "values", "value_targets")
"""Fields of a step that are packed."""
CORRUPT = (
    *(ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError),  # of JSON and its shape
    *(EOFError, zlib.error, gzip.BadGzipFile),  # of gzip
)
"""Exceptions that a corrupt line raises."""
_UID = re.compile(rb'\{"uid": ("(?:[^"\\]|\\.)*")')

T = TypeVar("T")


def _delta(prompt: np.ndarray, previous: np.ndarray) -> dict[str, Any]:
    """Return a prompt as the length of its common prefix with `previous` and the ids that follow."""
    reuse = common_prefix(prompt, previous)
    return {"reuse": reuse, "new": prompt[reuse:].tolist()}


def _ids(values: Any) -> np.ndarray:
    ids = np.asarray(values, np.int32)
    if ids.ndim != 1 or ids.tolist() != values:
        raise ValueError(f"{values!r:.80} is not a list of ids")
    return ids


def _undelta(record: Mapping[str, Any], previous: np.ndarray) -> np.ndarray:
    if not 0 <= record["reuse"] <= len(previous):
        raise ValueError(f"a prompt reuses {record['reuse']} of {len(previous)} ids")
    return np.concatenate([previous[: record["reuse"]], _ids(record["new"])])


def _floats(values: Any) -> np.ndarray:
    return np.asarray([float(x) for x in values], np.float32)


def _pack(values: np.ndarray | None) -> Any:
    """Return the values of a step's tokens as one number or as base64, which 10,000 values take 0.1 ms to read from."""
    if values is None:
        return None
    if values.dtype == np.float32 and len(values) and values.tobytes() == values[:1].tobytes() * len(values):
        return float(values[0])
    little = values.astype(values.dtype.newbyteorder("<"))
    return {values.dtype.name: base64.b64encode(little.tobytes()).decode()}


def _unpack(stored: Any, count: int) -> np.ndarray | None:
    """Invert `_pack`; also read a list of numbers."""
    if stored is None:
        return None
    if isinstance(stored, list):
        return _floats(stored)
    if isinstance(stored, int | float):
        return np.full(count, stored, np.float32)
    ((name, text),) = stored.items()
    if name not in ("float16", "float32"):
        raise ValueError(f"values of type {name!r:.80}")
    dtype = np.dtype(name)
    return np.frombuffer(base64.b64decode(text, validate=True), dtype.newbyteorder("<")).astype(dtype)


def to_json(trajectory: Trajectory) -> dict[str, Any]:
    """Return a trajectory as JSON; each prompt is stored against the previous prompt + response."""
    steps = []
    previous = np.zeros(0, np.int32)
    for step in trajectory.steps:
        record = {f.name: getattr(step, f.name) for f in dataclasses.fields(Step)}
        record["prompt_ids"] = _delta(step.prompt_ids, previous)
        record["response_ids"] = step.response_ids.tolist()
        record["logprobs"] = step.logprobs.tolist()
        record["account"] = {name: term._asdict() for name, term in step.account.items()}
        record |= {name: _pack(record[name]) for name in PACKED}
        steps.append(record)
        previous = np.concatenate([step.prompt_ids, step.response_ids])
    out = {f.name: getattr(trajectory, f.name) for f in dataclasses.fields(Trajectory)}
    out["steps"] = steps
    if trajectory.final_prompt_ids is not None:
        out["final_prompt_ids"] = _delta(trajectory.final_prompt_ids, previous)
    return out


def from_json(record: Mapping[str, Any]) -> Trajectory:
    """Invert `to_json`. Raises one of `CORRUPT` on a record of another shape."""
    steps: list[Step] = []
    previous = np.zeros(0, np.int32)
    for fields in record["steps"]:
        fields = dict(fields)
        fields["prompt_ids"] = _undelta(fields["prompt_ids"], previous)
        fields["response_ids"] = _ids(fields["response_ids"])
        fields["logprobs"] = _floats(fields["logprobs"])
        fields["account"] = {name: Term(**term) for name, term in fields.get("account", {}).items()}
        fields |= {name: _unpack(fields.get(name), len(fields["response_ids"])) for name in PACKED}
        fields["version_changes"] = tuple((int(at), int(v)) for at, v in fields.get("version_changes", ()))
        steps.append(Step(**fields))
        previous = np.concatenate([steps[-1].prompt_ids, steps[-1].response_ids])
    out = dict(record)
    out["steps"] = tuple(steps)
    out["outcome"] = Outcome(out["outcome"])
    if out.get("final_prompt_ids") is not None:
        out["final_prompt_ids"] = _undelta(out["final_prompt_ids"], previous)
    return Trajectory(**out)


def write_jsonl(path: str | os.PathLike[str], trajectories: Iterable[Trajectory]) -> None:
    """Write one gzipped JSONL file, which appears whole; equal content gives equal bytes (mtime 0).

    Numbers that are not finite are written as `NaN` and `Infinity`, so that a spoilt trajectory can be inspected.
    """
    with (
        files.atomic_write(path, "wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0, compresslevel=5) as out,
    ):
        for trajectory in trajectories:
            # Plain ASCII, since text of tools may hold lone surrogates, which UTF-8 has no bytes for.
            out.write(json.dumps(to_json(trajectory)).encode() + b"\n")


def read_jsonl(path: str | os.PathLike[str], wanted: Callable[[str], bool] | None = None) -> Iterator[Trajectory]:
    """Read the trajectories of a file that `write_jsonl` wrote, one at a time.

    Args:
      path: of the file.
      wanted: tells by its uid whether to read a trajectory; lines of others are not parsed. None for all.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a line is not a trajectory; the message names file and line.
    """

    def parse(line: bytes) -> Trajectory | None:
        return from_json(json.loads(line)) if wanted is None or wanted(_uid(line)) else None

    return (trajectory for trajectory in _read_lines(path, parse) if trajectory is not None)


def read_uids(path: str | os.PathLike[str]) -> Iterator[str]:
    """Read the uid of each trajectory of a file without parsing its steps; raises as `read_jsonl` does."""
    return _read_lines(path, _uid)


def read_rewards(path: str | os.PathLike[str]) -> Iterator[tuple[str, float | None]]:
    """Read uid and total reward of each trajectory of a file without making arrays; raises as `read_jsonl` does.

    The reward is None where the outcome has none, or that of a step is missing.
    """
    return _read_lines(path, _reward)


def _uid(line: bytes) -> str:
    """Return the uid, which `write_jsonl` writes first, of a line."""
    match = _UID.match(line)
    return json.loads(match[1]) if match else json.loads(line)["uid"]


def _reward(line: bytes) -> tuple[str, float | None]:
    record = json.loads(line)
    rewards = [step["reward"] for step in record["steps"]]
    counts = POLICIES[Outcome(record["outcome"])].reward
    if counts == "zero":
        return record["uid"], 0.0
    return record["uid"], None if counts == "none" or None in rewards else float(sum(rewards))


def _read_lines(path: str | os.PathLike[str], parse: Callable[[bytes], T]) -> Iterator[T]:
    """Parse a gzipped JSONL file line by line; raises as `read_jsonl` does."""
    with files.open_bytes(path) as raw, gzip.GzipFile(fileobj=raw) as lines:
        for number in itertools.count(1):
            try:
                line = lines.readline()
                if not line:
                    return
                parsed = parse(line)
            except CORRUPT as error:
                raise ValueError(
                    f"{os.fspath(path)}, line {number}: not a trajectory ({type(error).__name__}: {error}); "
                    "delete or repair the file"
                ) from error
            yield parsed
