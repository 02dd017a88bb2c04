"""Checkpoints: the learner's state and a JSON record of the run's progress, written by Orbax.

Each checkpoint also holds `inventory.json`, the names, sizes and checksums of its files, so that damage is found before
anything is restored. TensorStore has no checksums of the arrays as Orbax lays them out. A checkpoint on a disk gets its
name when it is complete, so that a kill leaves no half-written one. In a bucket, where a folder cannot be renamed, it
has its name from the start and counts once `commit_success.txt` exists.
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
import pydantic
from absl import logging
from pydantic.dataclasses import dataclass

from agentr1_jax import files
from agentr1_jax.errors import DISK_FULL, UserError
from agentr1_jax.runtime import processes
from agentr1_jax.validation import STRICT, Count

INVENTORY = "inventory.json"
COMMITTED = "commit_success.txt"
"""File that Orbax writes last into a checkpoint in a bucket."""
_INVENTORIES = pydantic.TypeAdapter(dict[str, tuple[int, str | None]] | dict[str, int])
"""Name -> size and CRC-32C; name -> size in those of version 0.2.0."""


@dataclass(frozen=True, config=STRICT)
class CheckpointConfig:
    """When checkpoints are written: section `checkpoint` of a config.

    Attributes:
      every: RL batches between checkpoints; 100 times as many updates in pretraining and warm start.
      keep: number of newest checkpoints that are not removed.
    """

    every: Count = 10
    keep: Count = 2


class Checkpoints:
    """Checkpoints of one run folder, in its folder `name`; all processes call every method."""

    def __init__(self, run_dir: str | os.PathLike[str], keep: int, name: str = "checkpoints") -> None:
        self._folder = files.absolute_path(os.path.join(run_dir, name))
        self._saving = -1
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            create=True,
            cleanup_tmp_directories=True,  # Half-written checkpoints of killed runs.
            async_options=ocp.AsyncOptions(
                timeout_secs=3600,  # Process 0 reads the files of all processes on a disk, while the others wait.
                post_finalization_callback=self._write_inventory,
            ),
        )
        self._manager = ocp.CheckpointManager(self._folder, options=options)

    def restore(self, like: Any) -> tuple[Any, dict[str, Any]] | None:
        """Read the newest intact checkpoint, (state, record); None if there is none.

        Newer checkpoints that are damaged are reported by a warning and moved to another folder.

        Args:
          like: state whose structure, shapes and shardings the result gets; its leaves are arrays or shape structs.

        Raises:
          UserError: no checkpoint is intact, or the newest intact one does not hold such a state.
        """
        self._manager.wait_until_finished()
        first = processes.process_index() == 0
        # The first exchange between CPU processes fails where one is late by 30 s, and process 0 reads all files now.
        processes.barrier()
        step, damaged = processes.all_gather_json(find_newest_intact(self._folder) if first else None)[0]
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
        except Exception as error:  # Orbax and TensorStore raise many types, bare `Exception` among them.
            sentence = str(error).partition(". ")[0].partition("\n")[0] or type(error).__name__
            raise UserError(
                f"{os.path.join(self._folder, str(step))}: cannot be read ({sentence}); if another "
                "version of the code wrote it, go on with that one; else remove it to go on from the one before"
            ) from error
        return restored.state, restored.record

    def save(self, step: int, state: Any, record: dict[str, Any]) -> None:
        """Write a checkpoint in the background, unless it exists; the state may be donated once this returns.

        Args:
          step: number of the checkpoint, not less than all earlier ones.
          state: state of the learner.
          record: progress of the run, as plain JSON.

        Raises:
          UserError: the disk was too full for this checkpoint, or for the last one.
        """
        if step in self._manager.all_steps():
            return
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(record))
        with _room_on_disk(self._folder):
            self._manager.wait_until_finished()
            self._saving = step
            self._manager.save(step, args=args)

    def numbers(self) -> list[int]:
        """Return the numbers of the checkpoints, the one that is being written included."""
        return list(self._manager.all_steps())

    def close(self) -> None:
        """Wait until the checkpoint in progress is written."""
        with _room_on_disk(self._folder):
            self._manager.wait_until_finished()
        self._manager.close()

    def _write_inventory(self) -> None:
        """List the files; Orbax calls this in its thread once all are written, before the checkpoint gets its name.

        On a disk their checksums are of what can be read there: mostly from memory, where the host still has them.
        """
        if processes.process_index() == 0:
            name = str(self._saving)
            if not files.is_remote(self._folder):
                (name,) = (each for each in files.list_names(self._folder) if each.startswith(f"{name}."))
            checkpoint = os.path.join(self._folder, name)
            sizes = _sizes(checkpoint)
            sums = files.file_checksums(checkpoint, sizes)
            with files.atomic_write(os.path.join(checkpoint, INVENTORY)) as out:
                json.dump({name: (size, sums[name]) for name, size in sizes.items()}, out, indent=1, sort_keys=True)


def sharded_shapes(shapes: Any, shardings: Any) -> Any:
    """Return shape structs with these shardings, to restore into."""
    return jax.tree.map(lambda s, h: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=h), shapes, shardings)


def find_newest_intact(folder: str) -> tuple[int | None, list[int]]:
    """Find the newest intact checkpoint in a folder. One without an inventory counts as intact.

    Returns:
      its number, None if there is no checkpoint; and the numbers of newer ones, which are damaged.

    Raises:
      UserError: all checkpoints are damaged.
    """
    damaged: list[int] = []
    for step in _numbers(folder):
        fault = _fault(os.path.join(folder, str(step)))
        if fault is None:
            return step, damaged
        damaged.append(step)
        logging.warning("checkpoint %d of %s is damaged: %s", step, folder, fault)
    if damaged:
        raise UserError(f"{folder}: all checkpoints are damaged ({damaged}); restore one, or remove them all")
    return None, []


def find_all_intact(folder: str) -> Iterator[int]:
    """Yield the numbers of the intact checkpoints in a folder, the newest first; each is read when it is asked for."""
    return (step for step in _numbers(folder) if _fault(os.path.join(folder, str(step))) is None)


def _numbers(folder: str) -> list[int]:
    """Return the numbers of the complete checkpoints in a folder, the newest first."""
    steps = sorted((int(name) for name in files.list_names(folder) if name.isdecimal()), reverse=True)
    if files.is_remote(folder):
        steps = [step for step in steps if files.exists(os.path.join(folder, str(step), COMMITTED))]
    return steps


def _sizes(checkpoint: str) -> dict[str, int]:
    """Return the sizes of the files of all items; files beside the items belong to Orbax, which writes them later."""
    return {name: size for name, size in files.file_sizes(checkpoint).items() if os.path.dirname(name)}


def _fault(checkpoint: str) -> str | None:
    """Return what is wrong with the files of a checkpoint, or None."""
    path = os.path.join(checkpoint, INVENTORY)
    if not files.exists(path):
        return None
    try:
        inventory = _INVENTORIES.validate_json(files.read_bytes(path), strict=True)
    except ValueError:
        return f"{INVENTORY} cannot be read"
    entries = {name: (entry, None) if isinstance(entry, int) else entry for name, entry in inventory.items()}
    found = _sizes(checkpoint)
    for name, (size, _) in entries.items():
        if found.get(name) != size:
            return f"{name} is missing" if name not in found else f"{name} has {found[name]} bytes of {size}"
    sums = {name: checksum for name, (_, checksum) in entries.items() if checksum}
    if not sums:
        logging.info("%s has no checksums: of its files the sizes alone are compared", checkpoint)
    try:
        found_sums = files.file_checksums(checkpoint, sums)
    except OSError as error:
        return f"a file cannot be read ({error})"
    for name, checksum in sums.items():
        if found_sums[name] not in (checksum, None):
            return f"{name} has other bytes than were written"
    return None


def _move_away(folder: str, step: int) -> None:
    """Move a damaged checkpoint to a folder beside the others, so that it can be examined."""
    place = next(p for i in itertools.count() if not files.exists(p := f"{folder}.damaged/{step}.{i}"))
    files.move_folder(os.path.join(folder, str(step)), place)
    logging.warning("it is kept as %s; the run goes on from the one before", place)


@contextlib.contextmanager
def _room_on_disk(folder: str) -> Iterator[None]:
    """Turn errors about a full disk into a UserError; Orbax and TensorStore have no type for them."""
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
            "space, or lower checkpoint.keep; the same command goes on from there"
        ) from error
