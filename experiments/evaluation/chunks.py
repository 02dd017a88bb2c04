"""The folder of an evaluation: its request, and its chunks of questions, a file of trajectories each.

A chunk whose file exists is done. It depends on the policy, the rows and their seeds alone, so that an interrupted
evaluation goes on with the missing chunks. Memory holds one chunk at a time.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentr1_jax import files
from agentr1_jax.agents.session import Identity
from agentr1_jax.envs.base import Row
from agentr1_jax.errors import UserError
from agentr1_jax.runtime import config as configs
from agentr1_jax.runtime.seeds import seed_of
from agentr1_jax.trajectory import Trajectory
from agentr1_jax.trajectory_io import read_jsonl

FACTS = ("id", "kind", "hops", "question", "answers", "gold_ids")
"""Fields of its row that a trajectory keeps, also where it failed before its agent recorded them."""

SECTIONS = ("seed", "task", "tools", "tokenizer", "policy", "agent", "budget", "context")
"""Sections of a config that an evaluation depends on."""

GROWING = ("policies", "sources", "splits")
"""Parts of a request to which modes or splits may be added."""


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Consecutive rows of a split, answered in one mode.

    Attributes:
      mode: way of answering.
      split: split of the task.
      rows: indices of the rows.
      path: file of the trajectories.
    """

    mode: str
    split: str
    rows: range
    path: str

    @property
    def is_complete(self) -> bool:
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
    merged = {**request, **{key: dict(sorted({**stored.get(key, {}), **request[key]}.items())) for key in GROWING}}
    write_json(path, merged)
    return merged


def _check_same(out: str, stored: Mapping[str, Any], request: Mapping[str, Any]) -> None:
    missing = "(no such key)"
    differing = [
        f"  {key}: {stored.get(key, missing)!r} there, {request.get(key, missing)!r} here"
        for key in sorted(stored.keys() | request.keys())
        if stored.get(key, missing) != request.get(key, missing)
        and not key.startswith("sources.")
        and (key in stored.keys() & request.keys() or not key.startswith(tuple(f"{part}." for part in GROWING)))
    ]
    if differing:
        listed = "\n".join(differing)
        raise UserError(f"{out} holds another evaluation:\n{listed}\nchoose another --out")


def write_json(path: str, value: Any) -> None:
    """Write indented JSON, renamed into place."""
    with files.atomic_write(path) as out:
        json.dump(value, out, indent=2, allow_nan=False)
        out.write("\n")


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
