"""What a run writes as it goes: metrics, checkpoints with pending rollouts; and whether it was asked to stop."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from agentr1_jax.learner.update import LearnerState
from agentr1_jax.runtime.checkpoint import Checkpoints
from agentr1_jax.runtime.compile_cache import CompileCounter
from agentr1_jax.runtime.metrics import MetricsWriter
from agentr1_jax.runtime.processes import StopRequest
from agentr1_jax.runtime.run_folder import RunFolder
from agentr1_jax.train.progress import Progress
from agentr1_jax.trajectory import Trajectory


class Stopped(Exception):
    """The run was asked to stop; its state is saved."""


@dataclasses.dataclass(frozen=True)
class RunLogger:
    """Writers and watchers of a run.

    Attributes:
      folder: run folder.
      metrics: writer of metrics.jsonl.
      checkpoints: of the learner's state.
      stop: whether somebody asked the run to stop.
      compiles: counts compiled programs.
      started: `time.perf_counter()` at the start, less the time spent by earlier starts.
    """

    folder: RunFolder
    metrics: MetricsWriter
    checkpoints: Checkpoints
    stop: StopRequest
    compiles: CompileCounter
    started: float

    @property
    def seconds(self) -> float:
        """Time spent so far, over all starts."""
        return time.perf_counter() - self.started

    def log(self, progress: Progress, metrics: Mapping[str, Any], phase: str = "") -> None:
        """Write one record of metrics."""
        self.metrics.write({"phase": phase or progress.phase, "update": progress.update, **metrics})

    def save(self, state: LearnerState, progress: Progress, pending: Sequence[Trajectory] = ()) -> None:
        """Write a checkpoint from which the run goes on as if nothing had happened.

        Args:
          state: of the learner.
          progress: of the run.
          pending: this process's trajectories that are sampled and not trained yet.
        """
        record = progress.replace(metrics_index=self.metrics.next_index, seconds=self.seconds)
        self.metrics.sync()
        self.folder.write_pending(progress.checkpoint, pending)
        self.checkpoints.save(progress.checkpoint, state, dataclasses.asdict(record))
        self.folder.remove_pending_except([progress.checkpoint, *self.checkpoints.numbers()])

    def count_recompiles(self, before: int) -> int:
        """Return the number of programs compiled since a count; warns if there are any, for there should be none."""
        recompiles = self.compiles.count - before
        if recompiles:
            logging.warning("%d programs were compiled after warm-up", recompiles)
        return recompiles
