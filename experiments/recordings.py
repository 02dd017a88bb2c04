"""The trajectory files of a run's folder: how they are named, written by each process, and found again.

    trajectories/NAME.jsonl.gz       of a run of one process
    trajectories/NAME.pN.jsonl.gz    of process N of several

NAME is `rl_000012` for the RL batch of update 12, else an evaluation's name or `demonstrations`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from agentr1_jax import files
from agentr1_jax.errors import UserError
from agentr1_jax.runtime import processes
from agentr1_jax.trajectory import Trajectory
from agentr1_jax.trajectory_io import read_jsonl, write_jsonl

_FILE = re.compile(r"(?P<name>[^.]+)(\.p\d+)?\.jsonl\.gz")
_BATCH = re.compile(r"rl_(\d+)")


def batch_name(update: int) -> str:
    """The name of the RL batch of an update, counted from 0."""
    return f"rl_{update:06d}"


def write(run_dir: str, name: str, trajectories: Sequence[Trajectory]) -> None:
    """Writes this process's trajectories of one name; the first removes what another number of processes wrote."""
    own, count = processes.process_index(), processes.process_count()
    written = [f"{name}.p{process}.jsonl.gz" for process in range(count)] if count > 1 else [f"{name}.jsonl.gz"]
    write_jsonl(os.path.join(_folder(run_dir), written[own]), trajectories)
    if own == 0:
        for old in paths_by_name(run_dir).get(name, ()):
            if os.path.basename(old) not in written:
                files.remove(old)


def paths_by_name(run_dir: str) -> dict[str, list[str]]:
    """The files of each name, in the order of names and of processes; nothing where nothing was recorded."""
    found = dict[str, list[str]]()
    for file in files.names(_folder(run_dir)):
        if match := _FILE.fullmatch(file):
            found.setdefault(match["name"], []).append(os.path.join(_folder(run_dir), file))
    return dict(sorted(found.items()))


def batches(run_dir: str) -> dict[int, list[str]]:
    """The files of each recorded RL batch, by its update.

    Raises:
      UserError: there is none.
    """
    named = paths_by_name(run_dir).items()
    found = {int(match[1]): paths for name, paths in named if (match := _BATCH.fullmatch(name))}
    if not found:
        raise UserError(f"{run_dir}: has recorded no RL batch yet (trajectories/rl_*.jsonl.gz)")
    return found


def read(paths: Sequence[str]) -> list[Trajectory]:
    """All trajectories of some files.

    Raises:
      UserError: a file cannot be read; it is named, with its line.
    """
    try:
        return [trajectory for path in paths for trajectory in read_jsonl(path)]
    except ValueError as error:
        raise UserError(str(error)) from error


def chosen(run_dir: str, most: int) -> list[Trajectory]:
    """Up to so many per file: of all but the RL batches, and of the first, middle and last of those."""
    named = paths_by_name(run_dir)
    rl = [name for name in named if _BATCH.fullmatch(name)]
    shown = {*rl[:1], *rl[len(rl) // 2 :][:1], *rl[-1:]}
    names = [name for name in named if name in shown or name not in rl]
    return [trajectory for name in names for path in named[name] for trajectory in read([path])[:most]]


def _folder(run_dir: str) -> str:
    return os.path.join(run_dir, "trajectories")
