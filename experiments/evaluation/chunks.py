"""Chunks of questions of an evaluation: each is a file of trajectories, and a chunk with a file is done.

A chunk depends on nothing but the policy, the rows and their seeds, so that an interrupted evaluation goes on with the
missing chunks. Memory holds one chunk at a time.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from agentr1_jax import files
from agentr1_jax.agents.base import Agent
from agentr1_jax.agents.session import Identity
from agentr1_jax.envs.base import Row, Task
from agentr1_jax.errors import UserError
from agentr1_jax.policy.decoder import Params
from agentr1_jax.rollout.config import AttemptLimits, SamplingConfig
from agentr1_jax.rollout.engine import Engine
from agentr1_jax.rollout.runner import TaskGroup, run_groups
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime.processes import StopRequest
from agentr1_jax.runtime.seeds import seed_of
from agentr1_jax.trajectory import Trajectory
from agentr1_jax.trajectory_io import read_jsonl

FACTS = ("id", "kind", "hops", "question", "answers", "gold_ids")
"""Fields of its row that a trajectory keeps, also where it failed before its agent recorded them."""

SECTIONS = ("seed", "task", "tools", "tokenizer", "policy", "agent", "budget", "context")
"""Sections of a config that an evaluation depends on."""

ADDED = ("policies", "sources", "splits")
"""Parts of a request that grow where modes or splits are added."""


class Stopped(Exception):
    """The evaluation was asked to stop; complete chunks stay."""


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Consecutive rows of a split, answered in one mode; `path` is the file of their trajectories."""

    mode: str
    split: str
    rows: range
    path: str

    @property
    def done(self) -> bool:
        """True if its file exists; the file is renamed into place."""
        return files.exists(self.path)


def chunks_of(out: str, mode: str, counts: Mapping[str, int], size: int) -> list[Chunk]:
    """Return the chunks of a mode: `size` rows each, of `counts[split]` rows of each split."""
    return [
        Chunk(mode, split, range(first, min(first + size, count)), _path(out, mode, split, first // size))
        for split, count in counts.items()
        for first in range(0, count, size)
    ]


def _path(out: str, mode: str, split: str, number: int) -> str:
    return os.path.join(out, "trajectories", mode, split.replace("/", "-"), f"{number:05d}.jsonl.gz")


def claim(out: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Claim a folder for this evaluation, or check that it is already claimed for it.

    Modes and splits may be added to it: the parts `policies` and `splits` of a request are compared where both sides
    name them, and `sources` never, since folders may be moved.

    Args:
      out: the folder.
      request: nested plain JSON.

    Returns:
      the request with all modes and splits that were added before.

    Raises:
      UserError: it holds another evaluation (what differs is listed), or something else.
    """
    path = os.path.join(out, "request.json")
    stored: dict[str, Any] = {}
    if files.exists(path):
        try:
            stored = json.loads(files.read_bytes(path))
            _check_same(out, dict(configs.flatten(stored)), dict(configs.flatten(request)))
        except (ValueError, AttributeError) as error:
            raise UserError(f"{path}: not what an evaluation writes ({error}); choose another --out") from error
    elif files.list_names(out):
        raise UserError(f"{out}: not empty, and no evaluation (it has no request.json); choose another --out")
    joined = {**request, **{key: dict(sorted({**stored.get(key, {}), **request[key]}.items())) for key in ADDED}}
    write_json(path, joined)
    return joined


def _check_same(out: str, stored: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    missing = "(no such key)"
    differing = [
        f"  {key}: {stored.get(key, missing)!r} there, {given.get(key, missing)!r} here"
        for key in sorted(stored.keys() | given.keys())
        if stored.get(key, missing) != given.get(key, missing)
        and not key.startswith("sources.")
        and (key in stored.keys() & given.keys() or not key.startswith(tuple(f"{part}." for part in ADDED)))
    ]
    if differing:
        listed = "\n".join(differing)
        raise UserError(f"{out} holds another evaluation:\n{listed}\nchoose another --out")


def write_json(path: str, value: Any) -> None:
    """Write indented JSON, renamed into place."""
    with files.atomic_write(path) as out:
        json.dump(value, out, indent=2, allow_nan=False)
        out.write("\n")


def roll_out(
    chunk: Chunk,
    engine: Engine,
    params: Params,
    agent: Agent,
    task: Task,
    *,
    samples: int,
    sampling: SamplingConfig,
    limits: AttemptLimits,
    seed: int,
    stop: StopRequest,
    advance: Callable[[], None],
) -> list[Trajectory]:
    """Roll out a chunk; return its trajectories in order of row and sample, with the facts of their row in `info`.

    Calls `advance` with every question that is answered.

    Raises:
      Stopped: on request, between two questions.
    """
    rows = {index: task.row(chunk.split, index) for index in chunk.rows}
    groups = [TaskGroup(row, identities(chunk, index, task.name, seed, samples)) for index, row in rows.items()]
    out: list[Trajectory] = []
    running = run_groups(engine, params, agent, groups, sampling=sampling, policy_version=0, limits=limits)
    try:
        for group in running:
            if stop.requested:
                raise Stopped
            out += [with_facts(t, chunk, rows[t.group], task.name) for t in group]
            advance()
    finally:
        running.close()  # type: ignore[attr-defined]  # It is a generator: what it left running ends here.
    return sorted(out, key=lambda t: (t.group, t.sample))


def identities(chunk: Chunk, index: int, task: str, seed: int, samples: int) -> list[Identity]:
    """Return names and seeds of the samples of a row; a row has the same seeds in every mode."""
    return [
        Identity(
            uid=f"eval_{chunk.mode}/{chunk.split}/{index:06d}/{sample}",
            group=index,
            sample=sample,
            task=task,
            seed=seed_of(seed, f"evaluate/{chunk.split}", index, sample),
        )
        for sample in range(samples)
    ]


def with_facts(trajectory: Trajectory, chunk: Chunk, row: Row, task: str) -> Trajectory:
    """Return the trajectory with what figures need of its row: mode, split, data set (else the task) and `FACTS`."""
    facts = {key: row[key] for key in FACTS if key in row}
    place = {"mode": chunk.mode, "split": chunk.split, "dataset": row.get("dataset", task)}
    return dataclasses.replace(trajectory, row={**trajectory.row, **facts, **place})


def read_chunks(chunks: Sequence[Chunk]) -> Iterator[Trajectory]:
    """Yield the trajectories of finished chunks. Raise UserError where a file is damaged."""
    for chunk in chunks:
        try:
            yield from read_jsonl(chunk.path)
        except ValueError as error:
            raise UserError(f"{error}, and start again") from error
