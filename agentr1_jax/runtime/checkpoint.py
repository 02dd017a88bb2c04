"""Checkpoints: the learner's state and a JSON record of where the run stands, by Orbax."""

from __future__ import annotations

import os
from typing import Any

import jax
import orbax.checkpoint as ocp


class Checkpoints:
    """The checkpoints of one run folder; all processes call every method.

    Args:
      run_dir: the run's folder.
      keep: newest checkpoints kept.
      name: of their folder in the run's.
    """

    def __init__(self, run_dir: str | os.PathLike[str], keep: int, name: str = "checkpoints") -> None:
        folder = os.path.abspath(os.path.join(run_dir, name))
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        self._manager = ocp.CheckpointManager(folder, options=options)

    def restore(self, like: Any) -> tuple[Any, dict[str, Any]] | None:
        """The newest (state, record), laid out like the arrays or shape structs of `like`; None if there is none."""
        step = self._manager.latest_step()
        if step is None:
            return None
        args = ocp.args.Composite(state=ocp.args.StandardRestore(like), record=ocp.args.JsonRestore())
        restored = self._manager.restore(step, args=args)
        return restored.state, restored.record

    def save(self, step: int, state: Any, record: dict[str, Any]) -> None:
        """Saves in the background; `step` must grow. The state may be donated once this returns."""
        if step in self._manager.all_steps():
            return
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(record))
        self._manager.save(step, args=args)

    def close(self) -> None:
        """Waits for what is being written."""
        self._manager.wait_until_finished()
        self._manager.close()


def abstract(shapes: Any, shardings: Any) -> Any:
    """Shape structs with shardings, to restore into."""
    return jax.tree.map(lambda s, h: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=h), shapes, shardings)
