"""Checkpoints: the learner's state and a JSON record of where the run stands, by Orbax.

Beside what Orbax writes, each checkpoint holds `inventory.json`: its files and their sizes, by which damage is found
before anything is read. A checkpoint gets its name when it is whole, so that a kill leaves nothing half-written; in a
bucket, where a folder cannot be renamed, it has its name from the start, and counts when it holds `commit_success.txt`.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging

from agentr1_jax import files
from agentr1_jax.errors import DISK_FULL, UserError
from agentr1_jax.runtime import processes

INVENTORY = "inventory.json"
COMMITTED = "commit_success.txt"
"""What Orbax writes last into a checkpoint in a bucket."""


class Checkpoints:
    """The checkpoints of one run folder; all processes call every method.

    Args:
      run_dir: the run's folder.
      keep: newest checkpoints kept.
      name: of their folder in the run's.
    """

    def __init__(self, run_dir: str | os.PathLike[str], keep: int, name: str = "checkpoints") -> None:
        self._folder = files.absolute(os.path.join(run_dir, name))
        self._saving = -1
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            create=True,
            cleanup_tmp_directories=True,  # What a run that was killed was writing.
            async_options=ocp.AsyncOptions(post_finalization_callback=self._finished),
        )
        self._manager = ocp.CheckpointManager(self._folder, options=options)

    def restore(self, like: Any) -> tuple[Any, dict[str, Any]] | None:
        """The newest intact (state, record), laid out like the arrays or shape structs of `like`.

        None if there is no checkpoint. Newer ones that are damaged are said aloud, and moved out of the way of those to
        come.

        Raises:
          UserError: none of the checkpoints is intact, or the newest does not hold such a state.
        """
        self._manager.wait_until_finished()
        first = processes.process_index() == 0
        step, damaged = processes.all_gather_json(newest_intact(self._folder) if first else None)[0]
        if step is None:
            return None
        if first:
            for number in damaged:
                _move_away(self._folder, number)
        processes.barrier()
        self._manager.reload()
        args = ocp.args.Composite(state=ocp.args.StandardRestore(like), record=ocp.args.JsonRestore())
        try:
            restored = self._manager.restore(step, args=args)
        except Exception as error:  # Orbax and TensorStore raise whatever they like, bare `Exception` included.
            raise UserError(
                f"{os.path.join(self._folder, str(step))}: cannot be read ({_first_sentence(error)}); if another "
                "version of the code wrote it, go on with that one; else remove it to go on from the one before"
            ) from error
        return restored.state, restored.record

    def save(self, step: int, state: Any, record: dict[str, Any]) -> None:
        """Saves in the background; `step` must grow. The state may be donated once this returns.

        Raises:
          UserError: this checkpoint, or the last one, found no room on the disk.
        """
        if step in self._manager.all_steps():
            return
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(record))
        with _room_on_disk(self._folder):
            self._manager.wait_until_finished()
            self._saving = step
            self._manager.save(step, args=args)

    def numbers(self) -> list[int]:
        """Those that there are, and the one that is being written."""
        return list(self._manager.all_steps())

    def close(self) -> None:
        """Waits for what is being written."""
        with _room_on_disk(self._folder):
            self._manager.wait_until_finished()
        self._manager.close()

    def _finished(self) -> None:
        """Called by Orbax, in its thread, when all files are written and before the checkpoint gets its name."""
        if processes.process_index() == 0:
            name = str(self._saving)
            if not files.is_remote(self._folder):
                (name,) = (each for each in files.names(self._folder) if each.startswith(f"{name}."))
            write_inventory(os.path.join(self._folder, name))


def abstract(shapes: Any, shardings: Any) -> Any:
    """Shape structs with shardings, to restore into."""
    return jax.tree.map(lambda s, h: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=h), shapes, shardings)


def newest_intact(folder: str) -> tuple[int | None, list[int]]:
    """The number of the newest intact checkpoint, None if there is no checkpoint; and those of newer, damaged ones.

    One without an inventory, which an earlier version wrote, counts as intact.

    Raises:
      UserError: all are damaged.
    """
    steps = sorted((int(name) for name in files.names(folder) if name.isdecimal()), reverse=True)
    if files.is_remote(folder):
        steps = [step for step in steps if files.exists(os.path.join(folder, str(step), COMMITTED))]
    damaged: list[int] = []
    for step in steps:
        fault = _fault(os.path.join(folder, str(step)))
        if fault is None:
            return step, damaged
        damaged.append(step)
        logging.warning("checkpoint %d of %s is damaged: %s", step, folder, fault)
    if damaged:
        raise UserError(f"{folder}: all checkpoints are damaged ({damaged}); restore one, or remove them all")
    return None, []


def write_inventory(checkpoint: str) -> None:
    """Lists a checkpoint's files with their sizes in bytes, in its `inventory.json`."""
    with files.published(os.path.join(checkpoint, INVENTORY)) as out:
        json.dump(_sizes(checkpoint), out, indent=1, sort_keys=True)


def _sizes(checkpoint: str) -> dict[str, int]:
    """Sizes of the files of the items; what lies beside them is Orbax's own, and is written later."""
    return {name: size for name, size in files.sizes(checkpoint).items() if os.path.dirname(name)}


def _fault(checkpoint: str) -> str | None:
    """What is wrong with the files of a checkpoint, or None."""
    path = os.path.join(checkpoint, INVENTORY)
    if not files.exists(path):
        return None
    try:
        expected = dict(json.loads(files.read_bytes(path)))
    except (ValueError, TypeError) as error:
        return f"{INVENTORY} cannot be read ({error})"
    found = _sizes(checkpoint)
    for name, size in expected.items():
        if found.get(name) != size:
            return f"{name} is missing" if name not in found else f"{name} has {found[name]} bytes of {size}"
    return None


def _move_away(folder: str, step: int) -> None:
    """Keeps a damaged checkpoint beside the others' folder, for whoever wants to look at it."""
    place = next(p for i in itertools.count() if not files.exists(p := f"{folder}.damaged/{step}.{i}"))
    files.move_folder(os.path.join(folder, str(step)), place)
    logging.warning("it is kept as %s; the run goes on from the one before", place)


@contextlib.contextmanager
def _room_on_disk(folder: str) -> Iterator[None]:
    """Tells a full disk from other errors of Orbax and TensorStore, which have no type for it."""
    try:
        yield
    except Exception as error:
        chain: list[BaseException] = [error]
        while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
            chain.append(cause)
        if not any(getattr(e, "errno", None) in DISK_FULL or os.strerror(errno.ENOSPC) in str(e) for e in chain):
            raise
        raise UserError(
            f"{folder}: the disk is full, and the checkpoint under way is lost; the last one is intact. Free some "
            "space, or lower checkpoints_kept; the same command goes on from there"
        ) from error


def _first_sentence(error: Exception) -> str:
    return str(error).partition(". ")[0].partition("\n")[0] or type(error).__name__
