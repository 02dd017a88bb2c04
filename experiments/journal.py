"""What a run writes down as it goes: where it stands, its checkpoints, what it adds up for the summary."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import logging

from agentr1_jax.errors import UserError
from agentr1_jax.learner.update import LearnerState
from agentr1_jax.runtime.checkpoint import Checkpoints
from agentr1_jax.runtime.compile_cache import CompileCounter
from agentr1_jax.runtime.metrics import MetricsWriter
from agentr1_jax.runtime.processes import StopRequest
from agentr1_jax.runtime.run_folder import RunFolder
from agentr1_jax.trajectory import Trajectory

FORMAT = 2
"""Of the checkpoints; grows where an earlier version could not go on with them."""


@dataclasses.dataclass
class Position:
    """Where a run stands; stored with every checkpoint.

    Attributes:
      phase: `pretraining`, `warm_start`, `rl` or `done`: the phase that is under way or comes next.
      update: updates (batches) of that phase which are done.
      visits: running index of the next group of task rows.
      evaluated: updates of RL after which the last evaluation on the way was made; those after this checkpoint are
        made again by who goes on from it.
      first_checkpoint: number of the checkpoint at update 0 of that phase.
      metrics_index: index of the next record of metrics.jsonl.
      kl_coef: present coefficient of an adaptive KL; None for the config's.
      returns: moments of the step returns of all RL batches so far.
      seconds: time spent so far, set-up included.
      warm_start_seconds: of which until the end of the warm start.
      results: figures for the summary.
      totals: tokens and seconds for rates.
      format: of this record and of what the checkpoint holds beside it.
    """

    phase: str = "pretraining"
    update: int = 0
    visits: int = 0
    evaluated: int = 0
    first_checkpoint: int = 0
    metrics_index: int = 0
    kl_coef: float | None = None
    returns: Sequence[float] = ()
    seconds: float = 0.0
    warm_start_seconds: float = 0.0
    results: dict[str, Any] = dataclasses.field(default_factory=dict)
    totals: dict[str, float] = dataclasses.field(default_factory=dict)
    format: int = FORMAT

    @classmethod
    def of(cls, record: Mapping[str, Any], where: str) -> Position:
        """What a checkpoint's record says. Raises UserError if a newer version wrote it in the folder `where`."""
        if record.get("format", 1) > FORMAT:
            raise UserError(
                f"{where}: its checkpoints have format {record['format']}, this version knows {FORMAT}; go on with the "
                "newer version, or choose another --config.run_dir"
            )
        if record.get("format", 1) < 2:  # They were saved after the evaluation.
            record = {**record, "evaluated": record["update"], "format": FORMAT}
        return cls(**record)

    def enter(self, phase: str) -> None:
        """Moves to the start of the next phase."""
        self.first_checkpoint += self.update + 1
        self.phase, self.update = phase, 0


@dataclasses.dataclass(frozen=True)
class Journal:
    """The writers and watchers of a run.

    Attributes:
      position: where it stands.
      metrics: the writer of metrics.jsonl.
      checkpoints: of its state.
      folder: run folder, which keeps pending rollouts beside the checkpoints.
      stop: whether somebody asked it to stop.
      compiles: counts compiled programs.
      started: `time.perf_counter()` at its start; earlier by the time of earlier starts where it was resumed.
    """

    position: Position
    metrics: MetricsWriter
    checkpoints: Checkpoints
    folder: RunFolder
    stop: StopRequest
    compiles: CompileCounter
    started: float

    @property
    def seconds(self) -> float:
        """Time spent so far, over all starts."""
        return time.perf_counter() - self.started

    def save(self, state: LearnerState, unused: Sequence[Trajectory] = ()) -> None:
        """Writes a checkpoint from which the run goes on as if nothing had happened.

        Args:
          state: of the learner.
          unused: trajectories of this process that are sampled and not trained yet.
        """
        position = self.position
        position.metrics_index = self.metrics.next_index
        position.seconds = self.seconds
        number = position.first_checkpoint + position.update
        self.metrics.sync()
        self.folder.write_pending(number, unused)
        self.checkpoints.save(number, state, dataclasses.asdict(position))
        self.folder.remove_pending_except([number, *self.checkpoints.numbers()])

    def save_if_due(
        self,
        state: LearnerState,
        every: int,
        *,
        before: Callable[[], None] = lambda: None,
        unused: Callable[[], Sequence[Trajectory]] = lambda: (),
    ) -> None:
        """Saves after `every` updates, and where the run is to stop; calls `before` first. Raises Stopped then."""
        stop = self.stop.requested_anywhere()
        if stop or self.position.update % every == 0:
            before()
            self.save(state, unused())
        if stop:
            raise Stopped


class Stopped(Exception):
    """Somebody asked the run to stop; its state is saved."""


def count_recompiles(position: Position, count: int) -> None:
    """Adds programs compiled after warm-up; there should be none."""
    position.totals["recompiles"] = position.totals.get("recompiles", 0) + count
    if count:
        logging.warning("%d programs were compiled after warm-up", count)


def add_totals(position: Position, record: dict[str, float]) -> None:
    """Keeps sums over RL batches, for the rates of the summary."""
    for key in ("time/decode_tokens", "time/rollout", "time/learner_tokens", "time/learn"):
        position.totals[key] = position.totals.get(key, 0.0) + record.get(key, 0.0)
